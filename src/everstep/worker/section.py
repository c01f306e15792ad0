"""Collective work between the steps: it commits on all ranks, or is done again, like a step.

Theory of operation: a section is a function (an evaluation, a save) that ends with a fence on the
world. Before the fence its result, and what else it made of the rank's own (`Done`), goes to the
agent. So if any rank has passed the fence, every rank has entered it, and each either holds its
result or has it kept: a rank whose fence broke commits by itself when the planner says so, and a
replacement's calls return what was kept. If nobody has passed, all put back what the attempt
touched and do it again. The position of a rank is (steps committed, sections done after the last of
them); place.py counts it.

A section changes no protected state, or says `undo=True`: then a copy is taken first. That is
looked for by digest in a section's first calls, later by the tensors' versions.

A section of some ranks only (`ranks=`) has no fence, no collective and no place in the position:
what it returned is kept, and a replacement that comes by finds it, or does it.

Does not know: steps, how the planner decides.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from everstep.errors import UserError
from everstep.types import Decision
from everstep.wire import messages
from everstep.worker import codec
from everstep.worker.attempt import Unwind
from everstep.worker.between import Between, digests
from everstep.worker.communicators import Answer
from everstep.worker.entry import Entry, Undo
from everstep.worker.fence import Fence
from everstep.worker.kept import Before, done_of, keep, return_kept
from everstep.worker.progress import Phase
from everstep.worker.recovery import Recovery
from everstep.worker.runtime import Worker
from everstep.worker.state import State, digest_of

_LOOKED_AT = 2  # calls of a section before which and after which the state is digested
_BOUND_SLACK = 64


class _Attempt:
    """What a section found when it began."""

    def __init__(self, worker: Worker, state: State, *, gradients: bool, undo: bool) -> None:
        self.entry = Entry(state, copy_gradients=gradients)
        self.undo = Undo(state) if undo else None
        self.before = Before(state, leaves=undo)
        self.versions = state.updates_seen()
        self.digests: dict[str, str] | None = None
        self.modes = [(m, m.training) for root in state.modules.values() for m in root.modules()]
        self.values = codec.copy(worker.values)
        self.log = {step: dict(scalars) for step, scalars in worker.log.items()}
        self.streams = worker.streams()


class Sections:
    """All sections of one worker. Main thread."""

    def __init__(
        self,
        worker: Worker,
        recovery: Recovery,
        between: Between,
        in_step: Callable[[], bool],
    ) -> None:
        self.worker, self.recovery, self.between = worker, recovery, between
        self.in_step = in_step
        self.fence = Fence(worker, late=False)
        self.left_open = False
        """A section was left by what ends the process."""

    def make(
        self, function: Callable[..., Any], *, ranks: Any, undo: bool
    ) -> Section | SectionOfSome:
        """The callable that `run.section` makes of `function`."""
        if ranks is None:
            return Section(self, function, undo=undo)
        if undo:
            raise UserError(
                "run.section(ranks=..., undo=True): a section of some ranks changes no protected "
                "state, so there is nothing to undo; leave one of the two out"
            )
        world = self.worker.spec.world_size
        ranks = tuple(ranks)
        if not ranks or any(not isinstance(r, int) or not 0 <= r < world for r in ranks):
            raise UserError(
                f"run.section(ranks={list(ranks)}): name at least one rank, of 0 to {world - 1}"
            )
        return SectionOfSome(self, function, ranks)

    def check_call(self, name: str, args: Sequence[Any]) -> State:
        """A section is called. Returns the state; raises UserError where it may not be."""
        if self.in_step():
            raise UserError(
                f"the section {name} was called inside a step; call it between the steps"
            )
        if self.worker.place.inside:
            raise UserError(
                f"the section {name} was called inside the section {self.worker.place.inside}; "
                "call one after the other"
            )
        if self.worker.state is None:
            raise UserError(
                f"the section {name} was called before run.protect(...), so it could not be done "
                "again; call it after"
            )
        if any(isinstance(value, Iterator) for value in args):
            raise UserError(
                f"the section {name} was given an iterator: a second attempt could not read it "
                "again; make a list of it"
            )
        return self.worker.state


class SectionOfSome:
    """A section that only some ranks do, each for itself."""

    def __init__(
        self, sections: Sections, function: Callable[..., Any], ranks: tuple[int, ...]
    ) -> None:
        functools.update_wrapper(self, function)
        self._sections, self._function, self._ranks = sections, function, ranks
        self._name = _name_of(function)
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sections, worker = self._sections, self._sections.worker
        state = sections.check_call(self._name, [*args, *kwargs.values()])
        if worker.spec.rank not in self._ranks:
            return None
        place = worker.place.name_alone()
        if worker.joining or place in worker.place.kept:
            return return_kept(worker, place, self._name)
        self._calls += 1
        sections.between.at_section(state, worker.committed + 1)
        before = Before(state, leaves=False)
        looked_at = digests(state) if self._calls <= _LOOKED_AT else None
        result = self._run(place, args, kwargs)
        if looked_at is not None:
            _refuse_changed(self._name, looked_at, state, "")
        sections.between.after_section(state)
        worker.faults.fire("section")
        keep(worker, place, done_of(worker, self._name, result, before))
        worker.phase(Phase.BETWEEN)
        worker.seed(f"after {place}")
        return result

    def _run(self, place: str, args: Any, kwargs: Any) -> Any:
        """Run the function. What it raises is the script's, as between the steps."""
        worker = self._sections.worker
        worker.place.inside = self._name
        worker.place.new_attempt()
        worker.phase(Phase.SECTION, worker.committed)
        worker.seed(place)
        worker.communicators.before_launch = self._refuse_collective
        try:
            return self._function(*args, **kwargs)
        finally:
            worker.communicators.before_launch = None
            worker.place.inside = ""

    def _refuse_collective(self, _index: int) -> None:
        raise UserError(
            f"the section {self._name} called a collective, and only ranks {list(self._ranks)} "
            "are in it; write @run.section without ranks= for work that ranks do together"
        )


class Section:
    """A section that all ranks do."""

    def __init__(self, sections: Sections, function: Callable[..., Any], *, undo: bool) -> None:
        functools.update_wrapper(self, function)
        self._sections, self._function = sections, function
        self._worker = sections.worker
        self._name = _name_of(function)
        self._number = int(digest_of([], self._name.encode())[:12], 16)
        self._undo = self._asked = undo
        self._calls = 0  # that committed
        self._usual = 1  # collectives, as learned
        self._tape: Any = None  # put aside meanwhile: a replacement skips what was done here

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        worker, place = self._worker, self._worker.place
        state = self._sections.check_call(self._name, [*args, *kwargs.values()])
        while True:
            if worker.joining or place.called < place.sections:
                name = place.name()
                place.called += 1
                return return_kept(worker, name, self._name)
            if worker.communicators.poisoned:  # the stop came between
                self._sections.recovery.run(torn=False)
                continue
            self._sections.between.at_section(state, worker.committed + 1)
            found = self._try(state, args, kwargs)
            if found is not None:
                return found[0]

    # ------------------------------------------------------------ one attempt

    def _try(self, state: State, args: Any, kwargs: Any) -> tuple[Any] | None:
        """What it returned, if it committed; None if it has to be done again, or was overtaken."""
        sections, communicators = self._sections, self._worker.communicators
        attempt = self._begin(state)
        error: BaseException | None = None
        result, entered = None, False
        try:
            result = self._function(*args, **kwargs)
            communicators.drain()
            if not communicators.touched:
                self._look(attempt, state)
                usual = len(communicators.trace)
                self._keep(attempt, state, result)
                self._worker.faults.fire("section")
                entered = True
                self._meet()
                self._usual = max(self._usual, usual)
        except Unwind:
            pass
        except UserError:
            if not communicators.poisoned:
                sections.left_open = True
                raise
        except Exception as failure:
            error = failure
        except BaseException:
            sections.left_open = True
            raise
        finally:
            self._end()
        if error is None and entered and not communicators.poisoned:
            self._commit(state)
            return (result,)
        if self._recover(attempt, state, error, entered=entered and error is None):
            self._commit(state)
            self._serve()
            return (result,)
        return None

    def _begin(self, state: State) -> _Attempt:
        worker, communicators = self._worker, self._worker.communicators
        if self._asked and worker.copies.on:
            raise UserError(
                f"the section {self._name} changes protected state, of which the copies in memory "
                "(--copies) would know nothing; do it in the step function, after the update"
            )
        attempt = _Attempt(
            worker, state, gradients=self._sections.recovery.gradients, undo=self._undo
        )
        if self._calls < _LOOKED_AT and not self._undo:
            attempt.digests = digests(state)
        communicators.trace.clear()
        communicators.touched = communicators.replaying = communicators.cut_off = False
        communicators.answer = Answer.ZEROS
        communicators.unwind = Unwind
        communicators.bound = 2 * self._usual + _BOUND_SLACK
        self._tape, communicators.tape = communicators.tape, None
        worker.place.inside = self._name
        worker.place.new_attempt()
        worker.phase(Phase.SECTION, worker.committed)
        worker.seed(worker.place.name())
        return attempt

    def _end(self) -> None:
        communicators = self._worker.communicators
        communicators.tape = self._tape
        communicators.bound = 0
        communicators.answer = Answer.RAISE
        self._worker.place.inside = ""

    def _look(self, attempt: _Attempt, state: State) -> None:
        """The function has returned: whether it changed what it may not change. Raises UserError
        for what it left changed, in its first calls."""
        if attempt.digests is not None:
            _refuse_changed(self._name, attempt.digests, state, ", or say run.section(undo=True)")
        if not self._undo and state.updates_seen() != attempt.versions:
            self._undo = True
            self._worker.note(
                f"changed-in-section-{self._name}",
                f"the section {self._name} writes to protected parameters; should a rank fail in "
                "it, they can't be put back. From its next call on a copy is taken first; say "
                "run.section(undo=True) to have one from the first call on",
            )

    def _keep(self, attempt: _Attempt, state: State, result: Any) -> None:
        """Give what is to be kept to the agent: nobody commits the section before it is there."""
        worker = self._worker
        done = done_of(worker, self._name, result, attempt.before)
        keep(worker, worker.place.name(), done)

    def _meet(self) -> None:
        self._worker.phase(Phase.FENCE)
        alike = self._sections.fence.meet(self._number)
        if not alike and not self._worker.communicators.poisoned:
            raise UserError(
                f"rank {self._worker.spec.rank} is in the section {self._name} after step "
                f"{self._worker.committed}, and another rank is in another one; all ranks must "
                "call the same sections in the same order (what one rank does by itself: "
                "run.section(ranks=[0]))"
            )

    # ------------------------------------------------------------ commit, failure

    def _commit(self, state: State) -> None:
        worker, place = self._worker, self._worker.place
        self._calls += 1
        name = place.name()
        place.sections += 1
        place.called += 1
        self._sections.between.after_section(state)
        worker.phase(Phase.BETWEEN)
        worker.control.send(
            messages.Commit(
                generation=worker.communicators.generation,
                step=worker.committed,
                t=time.monotonic(),
                log={},
                record=None,
                sections=place.sections,
            )
        )
        worker.seed(f"after {name}")

    def _serve(self) -> None:
        """Give those that need it the state that was committed by the planner's word."""
        recovery = self._sections.recovery
        if not recovery.advanced():
            recovery.run(torn=False)  # stopped again meanwhile: this rank keeps what it has

    def _recover(
        self, attempt: _Attempt, state: State, error: BaseException | None, *, entered: bool
    ) -> bool:
        """Report what is this rank's own fault, and come back. `entered`: it stood in the fence
        with all that the section needs. Returns whether it is to commit."""
        worker = self._worker
        if error is not None and not worker.communicators.poisoned:
            worker.report_exception(error, worker.committed + 1)
            worker.communicators.hold(error)
        torn = attempt.undo is None and state.updates_seen() != attempt.versions and not entered
        outcome = self._sections.recovery.run(
            torn=torn,
            can_advance=entered,
            in_section=True,
            settle=lambda: self._put_back(attempt, state),
        )
        if outcome.decision is Decision.FETCH:
            worker.place.kept = outcome.kept
            if worker.place.called == worker.place.sections:  # state alone; what the body did stays
                attempt.entry.put_back()
        return outcome.decision is Decision.ADVANCE

    def _put_back(self, attempt: _Attempt, state: State) -> None:
        """Leave no trace of a failed attempt."""
        worker = self._worker
        if attempt.undo is not None:
            attempt.undo.put_back()
        attempt.entry.put_back()
        for module, training in attempt.modes:
            module.training = training
        worker.log = attempt.log
        worker.values.clear()
        worker.values.update(codec.copy(attempt.values))
        worker.restore_streams(attempt.streams)
        self._sections.between.after_section(state)


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _refuse_changed(name: str, before: dict[str, str], state: State, how: str) -> None:
    """Raise UserError where a section has left a protected tensor changed."""
    now = digests(state)
    changed = sorted(
        each
        for each, digest in before.items()
        if each not in state.changing and digest != now.get(each)
    )
    if changed:
        raise UserError(
            f"the section {name} changes {changed[0]}, which is protected, and so would change it "
            f"twice where it is done again. Put it back before it returns{how}"
        )
