"""A step either commits or leaves no trace.

Theory of operation: an attempt runs the script's function with the generators seeded for the step.
Its communicators may be poisoned at any moment; then it runs on, on zeros, to the *gate*, which
stands before every optimizer update (a global pre-hook). The gate waits for all collectives that
were launched and lets the update pass only if none of this attempt's was poisoned. Where every rank
holds the whole state that is enough (fence `none`): a rank whose collectives all ended has the
gradients that everybody has, and who is behind takes the newest state from a peer. Where something
of a rank cannot be known before its last collective, an *early fence* is added: one tiny all-reduce
before the update, entered when the capsule is with the agent. Which of both is learned in the first
step and agreed in the second.

An exception before the gate leaves the state whole; one after it leaves it *torn*, to be fetched
from a peer. A failed attempt puts back what it touched (entry.py), recovers (recovery.py), and is
done again with a fresh batch."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from everstep.data.loader import Batch
from everstep.errors import UserError
from everstep.types import Decision
from everstep.wire import messages
from everstep.worker import codec, rng
from everstep.worker.capsule import Contents, ResultReader, encode_result, flatten
from everstep.worker.communicators import Answer
from everstep.worker.entry import Entry, GradientPolicy, Undo
from everstep.worker.progress import Phase
from everstep.worker.recovery import Outcome, Recovery
from everstep.worker.runtime import Worker
from everstep.worker.state import digest_of

_MAX_REHEARSALS = 6
_LEARNING_STEPS = 2
_ALL_BUFFERS_CAP_BYTES = 8 << 20


class Unwind(BaseException):
    """Leaves the script's step function from inside: its update must not happen. Never seen by the
    script, unless it catches BaseException."""


class Attempt:
    """What happened so far in one run of the function."""

    def __init__(self, step: int, entry: Entry | None, *, rehearsal: bool) -> None:
        self.step, self.entry, self.rehearsal = step, entry, rehearsal
        self.passed = False  # the gate let an update through
        self.sealed = (
            False  # it let the last one through: the capsule is out, nothing may change it
        )
        self.updates = 0
        self.undo: Undo | None = None
        self.fence: str | None = None  # as agreed in this very attempt
        self.collectives = 0  # how many came before the last gate
        self.outcome: Outcome | None = (
            None  # a recovery inside the gate that did not let the update pass
        )
        self.log: dict[int, dict[str, float]] = {}  # what was logged before the step
        self.values = b""  # run.state before the step
        self.captured: Contents | None = None  # the capsule as it was sent last
        self.captured_names: dict[str, Any] = {}  # the function's variables at that moment
        self.last_names: dict[str, Any] = {}  # the same, at the last collective before the gate
        self.gate_names: dict[str, Any] = {}


class Step:
    """The callable that `run.step` makes of a function. One a worker; main thread only."""

    def __init__(self, worker: Worker, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._worker = worker
        self._recovery = Recovery(worker)
        self._reader = ResultReader(function, worker.main_thread_id)
        self._gradients = GradientPolicy()
        self._attempt: Attempt | None = None
        self._updates = 1  # updates in a step, as learned
        # How many collectives recent steps had before their update. The capsule goes out before the
        # last one; after a regroup DDP has some more once, so the fewest count.
        self._counts: deque[int] = deque([1], maxlen=4)
        self._fence: str | None = None  # as agreed: none or early
        self._wants_fence = False
        self.began = False
        self._tail = False  # whether collectives follow the last update
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)

    # ------------------------------------------------------------ the call

    @property
    def under_way(self) -> bool:
        """Whether the function is running."""
        return self._attempt is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        worker = self._worker
        if self._attempt is not None:
            raise UserError("a step function was called inside a step; call it once, from the loop")
        if worker.state is None:
            raise UserError("call run.protect(model=..., optimizer=...) before the first step")
        if worker.drawn is None:
            raise UserError(
                "a step function takes one batch of run.batches(...) a call, and only there can a step be done again: "
                "call it once for each batch, inside `for batch in run.batches(until=...)`"
            )
        drawn, worker.drawn = worker.drawn, None
        if any(isinstance(value, Iterator) for value in [*args, *kwargs.values()]):
            raise UserError(
                "a step function was given an iterator: a second attempt could not read it again"
            )
        if worker.joining:
            return self._join(args, kwargs)
        self.began = True
        batch = drawn.batch
        while True:
            result, outcome = self._try(drawn.step, args, kwargs, batch)
            if outcome is None:
                return result
            if outcome.step == drawn.step:
                return self._resume(outcome)
            fresh = worker.draw(drawn.step)
            args = tuple(fresh.value if a is batch.value else a for a in args)
            kwargs = {k: fresh.value if a is batch.value else a for k, a in kwargs.items()}
            batch = fresh

    def _try(self, step: int, args: Any, kwargs: Any, batch: Batch) -> tuple[Any, Outcome | None]:
        """One attempt: (result, None) if it committed, (None, outcome) if it has to be done again
        or was overtaken."""
        worker = self._worker
        if worker.communicators.poisoned:  # the stop came between the steps
            return None, self.recover_between()
        samples = _samples_of(batch) if worker.spec.record else None
        attempt = self._begin(step)
        error: BaseException | None = None
        result = None
        try:
            self._agree(step)
            result = self._function(*args, **kwargs)
            if not attempt.updates:
                self._gate(attempt, last=True)
        except Unwind:
            pass
        except UserError:
            if not worker.communicators.poisoned:
                raise  # misuse of everstep: doing it again would not help
        except Exception as failure:
            error = failure
        finally:
            self._attempt = None
            worker.faults.step = 0
            worker.communicators.before_launch = None
            worker.communicators.answer = Answer.RAISE
        if error is None and attempt.passed and attempt.undo is None:
            return self._finish(attempt, result, samples)
        if error is None and attempt.passed and self._clean():
            return self._finish(attempt, result, samples)
        return None, self._failed(attempt, error, args, kwargs)

    def _begin(self, step: int) -> Attempt:
        worker = self._worker
        assert worker.state is not None
        communicators = worker.communicators
        learning = step <= _LEARNING_STEPS
        entry = Entry(worker.state, copy_gradients=self._gradients.copies, learn_buffers=learning)
        attempt = self._attempt = Attempt(step, entry, rehearsal=False)
        attempt.log = {step: dict(entry) for step, entry in worker.log.items()}
        attempt.values = codec.encode(worker.values, "run.state")
        attempt.fence = self._fence
        communicators.trace.clear()
        communicators.touched = False
        communicators.answer = Answer.ZEROS
        communicators.before_launch = self._before_collective
        worker.faults.step = step
        worker.phase(Phase.STEP, step)
        rng.seed_all(worker.rng_key, step, "step")
        return attempt

    def _clean(self) -> bool:
        return not self._worker.communicators.poisoned

    # ------------------------------------------------------------ commit

    def _finish(self, attempt: Attempt, result: Any, samples: Any) -> tuple[Any, Outcome | None]:
        worker = self._worker
        if worker.communicators.touched:
            worker.note(
                "lost-after-update",
                f"a collective after the update of step {attempt.step} lost a peer; its result is NaN on rank "
                f"{worker.spec.rank}, since the dead rank's part of it can't be had again. Do it before the update",
            )
        self._learn(attempt, result)
        self._fence = attempt.fence
        self._complete_capsule(attempt, result)
        log, worker.log = worker.log, {}
        record = _record(result, samples) if worker.spec.record else None
        self._commit(attempt.step, log, record)
        if not self._recovery.advanced():
            # Stopped again while serving after an advance: this rank holds the step, so it keeps
            # it.
            outcome = self._recovery.run(torn=False)
            assert outcome.step == attempt.step, "a rank never goes back below what it committed"
        return result, None

    def _commit(self, step: int, log: dict[int, dict[str, float]], record: bytes | None) -> None:
        worker = self._worker
        worker.committed = step
        worker.phase(Phase.BETWEEN)
        worker.control.send(
            messages.Commit(
                generation=worker.communicators.generation,
                step=step,
                t=time.monotonic(),
                log=log,
                record=record,
            )
        )
        rng.seed_all(worker.rng_key, step, "after")

    def _learn(self, attempt: Attempt, result: Any) -> None:
        worker = self._worker
        assert worker.state is not None
        self._counts.append(max(1, attempt.collectives))
        self._tail = len(worker.communicators.trace) > attempt.collectives
        if attempt.entry is not None:
            self._gradients.learn(attempt.entry)
            self._recovery.gradients = self._gradients.copies
        if attempt.step <= _LEARNING_STEPS or attempt.rehearsal:
            if attempt.entry is not None:
                worker.state.changing = attempt.entry.changed_buffers()
            self._updates = max(1, attempt.updates)
        names = attempt.gate_names or attempt.captured_names
        if names and not self._reader.failed and not self._reader.knows(names):
            self._reader.learn(result, names)
            if not self._reader.knows(attempt.last_names or names):
                self._wants_fence = True
        if self._reader.failed:
            self._result_unknown()
            return
        sent = attempt.captured.result if attempt.captured is not None else None
        if not attempt.rehearsal and sent is not None and sent != encode_result(result):
            self._reader.failed = True
            self._result_unknown()

    def _result_unknown(self) -> None:
        self._worker.note(
            "result-unknown",
            "what the step function returns can't be told before it returns; should this rank die between its last "
            "collective and its return, its replacement gets NaN for that one step. Return a local variable, as in "
            "`return loss.detach()`, of plain data up to 1 MiB",
        )

    # ------------------------------------------------------------ the gate, and what comes before
    # it

    def _before_collective(self, index: int) -> None:
        attempt = self._attempt
        if attempt is None or attempt.sealed:
            return
        if attempt.rehearsal:
            attempt.captured_names = attempt.last_names = self._reader.locals()
        elif index + 1 >= min(self._counts):
            self._capture(attempt)
            attempt.last_names = attempt.captured_names

    def _capture(self, attempt: Attempt) -> None:
        """Send the capsule of the step under way."""
        worker = self._worker
        assert worker.state is not None
        names = self._reader.locals()
        if not names and attempt.captured_names:
            names = attempt.captured_names
        attempt.captured_names = names
        learning = attempt.step == 1
        buffers = {
            name: codec.encode(buffer, name)
            for name, buffer in worker.state.buffers()
            if name in worker.state.changing
            or (learning and buffer.numel() * buffer.element_size() <= _ALL_BUFFERS_CAP_BYTES)
        }
        contents = Contents(
            step=attempt.step,
            result=self._reader.predict(names),
            candidates=self._reader.candidates(names),
            buffers=buffers,
            state=codec.encode(worker.values, "run.state"),
            log=worker.log,
            fence=attempt.fence,
        )
        attempt.captured = contents
        worker.control.send(
            messages.Capsule(step=attempt.step, payload=msgspec.msgpack.encode(contents))
        )

    def _complete_capsule(self, attempt: Attempt, result: Any) -> None:
        """Now that the step has returned: send the capsule again, if what it said of the result was
        not this."""
        encoded = encode_result(result)
        if attempt.captured is None:
            self._capture(attempt)
        assert attempt.captured is not None
        if attempt.captured.result != encoded:
            whole = msgspec.structs.replace(attempt.captured, result=encoded, candidates={})
            self._worker.control.send(
                messages.Capsule(step=attempt.step, payload=msgspec.msgpack.encode(whole))
            )

    def _before_update(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        attempt.updates += 1
        if attempt.rehearsal:
            attempt.gate_names = self._reader.locals()
            attempt.collectives = len(self._worker.communicators.trace)
            return
        last = attempt.updates >= self._updates
        if not last and attempt.undo is None and attempt.step > 1:
            assert self._worker.state is not None
            attempt.undo = Undo(self._worker.state)
        self._gate(attempt, last=last)
        self._worker.phase(Phase.UPDATE)
        self._worker.faults.fire("optimizer")

    def _after_update(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self._attempt is not None and self._attempt.passed:
            self._worker.phase(Phase.STEP)

    def _gate(self, attempt: Attempt, *, last: bool) -> None:
        """Let the update pass if all collectives of this attempt ended; else leave the function."""
        worker = self._worker
        communicators = worker.communicators
        communicators.drain()
        worker.phase(Phase.FENCE)
        broken = communicators.poisoned and communicators.touched
        if not broken and last:
            attempt.gate_names = self._reader.locals()
            if attempt.captured is None or attempt.captured.result is None:
                self._capture(attempt)
        worker.faults.fire("fence")
        if not broken and last and attempt.fence == "early":
            self._pass_fence()
        if broken or (communicators.poisoned and not (last and self._may_advance(attempt))):
            raise Unwind
        if communicators.poisoned:
            outcome = self._recovery.run(
                torn=False, can_advance=True, settle=lambda: self._put_back(attempt)
            )
            if outcome.decision is not Decision.ADVANCE:
                attempt.outcome = outcome
                raise Unwind
        attempt.passed = True
        attempt.collectives = len(communicators.trace)
        communicators.touched = False
        communicators.answer = Answer.NANS if attempt.undo is None else Answer.ZEROS
        if last:
            attempt.sealed = True
            communicators.before_launch = None

    def _may_advance(self, attempt: Attempt) -> bool:
        """Whether this rank could make the step by itself: nothing collective follows its
        update."""
        return attempt.updates > 0 and attempt.undo is None and attempt.step > 1 and not self._tail

    def _pass_fence(self) -> None:
        """One tiny all-reduce on the world: I am here, and none of my collectives was poisoned."""
        communicators = self._worker.communicators
        communicators.before_launch = None
        flag = torch.ones(1, dtype=torch.int32)
        work = self._worker.world.allreduce([flag])
        communicators.trace.pop()
        work.wait()
        communicators.before_launch = self._before_collective

    def _agree(self, step: int) -> None:
        """In the first step after the job's first: all ranks take the early fence if one wants
        it."""
        attempt = self._attempt
        if attempt is None or attempt.fence is not None or step == 1:
            return
        communicators = self._worker.communicators
        communicators.before_launch = None
        wish = torch.tensor([1 if self._wants_fence else 0], dtype=torch.int32)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._worker.world.allreduce([wish], options).wait()
        communicators.trace.clear()
        communicators.before_launch = self._before_collective
        if communicators.poisoned:
            raise Unwind
        attempt.fence = "early" if int(wish) else "none"
        self._capture(attempt)  # so that a successor of this rank knows what was agreed

    # ------------------------------------------------------------ failure

    def _failed(
        self, attempt: Attempt, error: BaseException | None, args: Any, kwargs: Any
    ) -> Outcome:
        """Report what is this rank's own fault, recover, and say where that led."""
        worker = self._worker
        communicators = worker.communicators
        if attempt.outcome is not None:  # recovered inside the gate; to be done again
            return self._recovered_in_gate(attempt.outcome)
        if error is not None and not communicators.poisoned:
            worker.report_exception(error, attempt.step)
            communicators.hold(error)
        if attempt.step == 1:
            return self._recovery.run(torn=True, settle=lambda: self._relearn(args, kwargs))
        torn = attempt.passed and attempt.undo is None
        return self._recovery.run(torn=torn, settle=lambda: self._put_back(attempt))

    def _relearn(self, args: Any, kwargs: Any) -> None:
        """The first step failed here. Either it failed everywhere, then all ranks start again; or a
        peer has committed it, then this rank takes its state like a joiner, and like one it has to
        see a whole step first: bucket layouts, and what the function returns."""
        self._worker.wrappers.reset(rebuild=False)
        self._rehearse(args, kwargs)

    def _recovered_in_gate(self, outcome: Outcome) -> Outcome:
        if not self._worker.communicators.poisoned:
            return outcome
        later = self._recovery.run(torn=False)  # stopped again while the function unwound
        return later if later.decision is Decision.FETCH else outcome

    def _put_back(self, attempt: Attempt) -> None:
        """Leave no trace of a failed attempt."""
        worker = self._worker
        if attempt.undo is not None:
            attempt.undo.put_back()
        if attempt.entry is not None:
            attempt.entry.put_back()
        worker.log = attempt.log
        worker.values.clear()
        worker.values.update(codec.decode(attempt.values))

    def recover_between(self) -> Outcome:
        """The stop came while no step was under way."""
        return self._recovery.run(torn=False)

    def _resume(self, outcome: Outcome) -> Any:
        """The step is committed, by peers: return from it what this rank would have returned."""
        worker = self._worker
        assert worker.state is not None
        capsule = outcome.capsule
        result = None
        log: dict[int, dict[str, float]] = {}
        if capsule is None:
            result = self._lost_result(outcome.step)
        else:
            buffers = dict(worker.state.buffers())
            with torch.no_grad():
                for name, data in capsule.buffers.items():
                    if name in buffers:
                        buffers[name].copy_(codec.decode(data))
            worker.values.clear()
            worker.values.update(codec.decode(capsule.state))
            encoded = capsule.result or self._reader.from_candidates(capsule.candidates)
            log = capsule.log
            self._fence = capsule.fence or self._fence
            if capsule.step != outcome.step:
                encoded, log = None, {}
            if encoded is None:
                result = self._lost_result(outcome.step)
            else:
                result = codec.decode(encoded)
        worker.log = {}
        record = None
        if worker.spec.record:
            record = _record(result, _samples_of(worker.draw(outcome.step)))
        self._commit(outcome.step, log, record)
        return result

    def _lost_result(self, step: int) -> Any:
        self._worker.note(
            f"result-lost-{self._worker.spec.rank}-{step}",
            f"what rank {self._worker.spec.rank} returned from step {step} is lost with its predecessor; the call "
            "returns NaN this once. Parameters, optimizer and data are exact",
        )
        return self._reader.placeholder()

    # ------------------------------------------------------------ joining

    def _join(self, args: Any, kwargs: Any) -> Any:
        worker = self._worker
        passes = self._rehearse(args, kwargs)
        outcome = self._recovery.run(torn=True, passes=passes)
        worker.joining = False
        return self._resume(outcome)

    def _rehearse(self, args: Any, kwargs: Any) -> int:
        """Run the step with no peers until no new collective appears, so that lazy state is in
        place. What it computes is thrown away: the state comes from peers afterwards."""
        worker = self._worker
        communicators = worker.communicators
        assert worker.state is not None
        before: list[tuple[str, int]] | None = None
        passes = 0
        while passes < _MAX_REHEARSALS:
            entry = Entry(worker.state, copy_gradients=True, learn_buffers=True)
            attempt = self._attempt = Attempt(0, entry, rehearsal=True)
            communicators.trace.clear()
            communicators.answer = Answer.ZEROS
            communicators.before_launch = self._before_collective
            passes += 1
            try:
                result = self._function(*args, **kwargs)
                attempt.passed = True
                self._learn(attempt, result)
            except Exception as error:
                worker.note(
                    "rehearsal", f"a rehearsal of the step raised {type(error).__name__}: {error}"
                )
                break
            finally:
                self._attempt = None
                communicators.answer = Answer.RAISE
                communicators.before_launch = None
            trace = list(communicators.trace)
            if trace == before:
                break
            before = trace
        worker.log = {}
        return passes


def _samples_of(batch: Batch) -> Any:
    """The sample numbers of a batch, or its digest where they are not known. Before the step may
    change it."""
    if batch.samples is not None:
        return list(batch.samples)
    return xxhash.xxh3_128_hexdigest(codec.encode(batch.value, "the batch"))


def _record(result: Any, samples: Any) -> bytes:
    """What `prove` compares of a step: the returned leaves, exactly, and what `_samples_of` said of
    its batch."""
    leaves = []
    for leaf in flatten(result):
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.is_floating_point():
            leaves.append([str(leaf.dtype), float(leaf).hex()])
        elif isinstance(leaf, torch.Tensor):
            leaves.append([str(leaf.dtype), list(leaf.shape), digest_of([leaf])])
        else:
            leaves.append(
                [type(leaf).__name__, leaf.hex() if isinstance(leaf, float) else repr(leaf)]
            )
    return msgspec.msgpack.encode({"value": leaves, "samples": samples})
