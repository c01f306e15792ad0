"""Standing still and coming back: park, regroup, fetch or serve, receipt.

Theory of operation: once a generation is stopped, the worker waits until its aborted collectives
can write nowhere, puts its state in order, and reports what it holds (`Park`). The coordinator
answers with a new generation and a plan (`Regroup`): communicators are rebuilt, state travels, the
receipt is checked. A stop at any moment of this begins it again. The plan's step is reached when
`run` returns.

Does not know: the step function, why the stop came.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable

import msgspec

from everstep.errors import UserError
from everstep.types import Decision, Holding, RankPlan
from everstep.wire import messages
from everstep.worker import transfer
from everstep.worker.capsule import Contents
from everstep.worker.control import Stopped
from everstep.worker.copies import CopyError
from everstep.worker.progress import Phase
from everstep.worker.runtime import Worker
from everstep.worker.shards import WHOLE
from everstep.worker.state import Steering

# How long a parked worker waits for the coordinator. The coordinator has tighter deadlines of its
# own and the end of its process is noticed at once; this one only makes sure that no wait is
# without end.
PATIENCE_S = 86_400.0
_NOT_UNDONE = "an update could not be undone from its copy, so the state is taken from elsewhere"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Where a recovery led. `step`: committed steps now; `sections`: done after it. `capsule`: this
    rank's own of that step, for FETCH; `kept`: and what it has kept of the sections."""

    decision: Decision
    step: int
    capsule: Contents | None
    sections: int = 0
    kept: dict[str, bytes] = {}


class Recovery:
    """Recovers one worker, on its main thread. `gradients`: whether gradients are part of the
    state."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._owed: messages.Regroup | None = None
        self.gradients = False

    def run(
        self,
        *,
        torn: bool,
        can_advance: bool = False,
        in_section: bool = False,
        settle: Callable[[], None] | None = None,
        passes: int = 0,
    ) -> Outcome:
        """Park and come back. `settle` puts the state in order, once aborted collectives have
        ended; for a rank that can advance, whose gradients are still needed, only when it is told
        not to. `in_section`: the attempt was a section. Blocks."""
        phase = self._worker.progress.phase
        try:
            return self._run(torn, can_advance, in_section, settle or _nothing, passes)
        finally:
            self._worker.phase(Phase(phase))

    def _run(
        self,
        torn: bool,
        can_advance: bool,
        in_section: bool,
        settle: Callable[[], None],
        passes: int,
    ) -> Outcome:
        worker = self._worker
        self._owed = None  # of an earlier generation: never to be obeyed
        while True:
            generation = worker.control.wait_stop(worker.communicators.generation, PATIENCE_S)
            worker.phase(Phase.PARKED)
            worker.communicators.quiesce(worker.spec.quiesce_timeout_s)
            if not can_advance:
                torn |= not self._settle(settle)
                settle = _nothing
            self._park(generation, torn, can_advance, in_section, passes)
            worker.faults.fire("recovery", worker.committed + worker.joining + 1)
            try:
                regroup = worker.control.take(
                    messages.Regroup,
                    PATIENCE_S,
                    generation=generation + 1,
                    match=functools.partial(_is_newer, generation),
                )
                worker.phase(Phase.RECOVER)
                worker.copies.resume(regroup.copies)
                worker.communicators.rebuild(regroup.generation, regroup.groups)
                worker.faults.fire("rebuild", regroup.step + 1)
                worker.control.send(messages.Built(generation=regroup.generation))
            except Stopped:
                continue
            except Exception as error:  # the group could not be built: a peer died meanwhile
                worker.communicators.fail_build(error)
                continue
            if can_advance and regroup.plan.decision is not Decision.ADVANCE:
                torn |= not self._settle(settle)
                settle, can_advance = _nothing, False
                if torn and regroup.plan.decision is Decision.KEEP:  # it can't keep what it has not
                    worker.communicators.fail(regroup.generation, CopyError(_NOT_UNDONE))
                    continue
            if regroup.plan.decision is Decision.ADVANCE:
                self._owed = regroup
            elif not self._exchange(regroup):
                torn = torn or regroup.plan.decision is Decision.FETCH
                continue
            return self._outcome(regroup)

    def _park(
        self, generation: int, torn: bool, can_advance: bool, in_section: bool, passes: int
    ) -> None:
        worker = self._worker
        holding = Holding(
            committed=worker.committed,
            torn=torn,
            can_advance=can_advance,
            sections=worker.place.sections,
            in_section=in_section,
            shard=worker.state.shard if worker.state is not None else WHOLE,
        )
        worker.control.send(
            messages.Park(
                generation=generation,
                holding=holding,
                rehearsed_passes=passes,
                groups=worker.communicators.held(),
            )
        )

    def _settle(self, settle: Callable[[], None]) -> bool:
        """Put the state in order. False if it is torn now: what undoes the updates is not there."""
        communicators, whole = self._worker.communicators, True
        was_solo, communicators.solo = communicators.solo, True  # a wrapper's reset answers itself
        try:
            try:
                settle()
            except CopyError as error:
                self._worker.note("not-undone", f"{_NOT_UNDONE}: {error}")
                whole = False
            self._worker.wrappers.reset(passes=self._worker.pass_of(self._worker.committed))
        finally:
            communicators.solo = was_solo
        if self._worker.device is not None:
            self._worker.device.accelerator.settle()
        return whole

    def _outcome(self, regroup: messages.Regroup) -> Outcome:
        capsule = None
        if regroup.plan.decision is Decision.FETCH and regroup.capsule is not None:
            capsule = msgspec.msgpack.decode(regroup.capsule, type=Contents)
        return Outcome(
            decision=regroup.plan.decision,
            step=regroup.step,
            capsule=capsule,
            sections=regroup.sections,
            kept=regroup.kept,
        )

    def advanced(self) -> bool:
        """After an advancing rank has committed: do its part of the plan. False if it was stopped
        meanwhile."""
        regroup, self._owed = self._owed, None
        if regroup is None:
            return True
        if self._worker.communicators.poisoned:
            return False
        assert regroup.generation == self._worker.communicators.generation
        self._settle(_nothing)
        return self._exchange(regroup)

    def _exchange(self, regroup: messages.Regroup) -> bool:
        """Serve, fetch, report. False when it did not come to its end; a stop has come or will."""
        own = self._own_steering(regroup)
        job = _Exchange(self._worker, regroup, self.gradients)
        job.start()
        job.join()
        if isinstance(job.error, UserError):
            raise job.error
        if job.error is not None and not isinstance(job.error, transfer.ReceiptError):
            self._worker.communicators.fail(regroup.generation, job.error)
            return False
        if job.error is None and regroup.plan.decision is Decision.FETCH:
            self._worker.committed = regroup.step
            self._worker.place.sections = regroup.sections
            if own is not None and self._worker.state is not None:
                self._worker.state.load_steering(own)
        self._worker.control.send(
            messages.Receipt(
                generation=regroup.generation,
                ok=job.error is None,
                text=str(job.error or ""),
                t=time.monotonic(),
                nbytes=job.nbytes,
                sources=regroup.plan.sources,
                digest=job.digest,
                held=job.error.held if isinstance(job.error, transfer.ReceiptError) else {},
            )
        )
        return job.error is None

    def _own_steering(self, regroup: messages.Regroup) -> Steering | None:
        """What this rank's script has made of param_groups and schedulers since the commit that it
        is about to fetch: peers give them as they were at that commit, and its loop's body, which
        may have stepped a scheduler, does not run again. None for one that goes on elsewhere."""
        worker = self._worker
        here = regroup.step, regroup.sections
        if (
            regroup.plan.decision is not Decision.FETCH
            or worker.state is None
            or worker.joining
            or here != (worker.committed, worker.place.sections)
        ):
            return None
        return worker.state.steering()


def _is_newer(generation: int, regroup: messages.Regroup) -> bool:
    return regroup.generation > generation


def _nothing() -> None:
    return None


class _Exchange(threading.Thread):
    """One rank's part of a plan. Ends by itself, or when the stop shuts the sockets it waits on."""

    def __init__(self, worker: Worker, regroup: messages.Regroup, gradients: bool) -> None:
        super().__init__(name="everstep-exchange", daemon=True)
        self._worker, self._regroup, self._gradients = worker, regroup, gradients
        self.digest, self.nbytes = "", 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._run(self._regroup.plan)
        except Exception as error:
            self.error = error

    def _run(self, plan: RankPlan) -> None:
        worker = self._worker
        assert worker.state is not None
        inner = worker.world.inner
        if worker.device is not None:
            worker.device.accelerator.enter()
        if plan.sinks:
            worker.faults.fire("serve", self._regroup.step + 1)
            self.digest = transfer.serve(
                inner.group, worker.state, plan.sinks, gradients=self._gradients
            )
        if plan.decision is Decision.FETCH:
            worker.faults.fire("fetch", self._regroup.step + 1)
            if plan.copy:
                self.digest, self.nbytes = transfer.recall(
                    worker.copies, worker.state, self._regroup.step, self._regroup.generation
                )
            else:
                self.digest, self.nbytes = transfer.fetch(inner.group, worker.state, plan.sources)
