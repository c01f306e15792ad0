"""A step either commits or leaves no trace.

Theory of operation: an attempt runs the script's function with the generators seeded for the step.
Its communicators may be poisoned at any moment; then it runs on, on zeros, to the *gate*, which
stands before every optimizer update and at the function's end (gate.py).

An exception before the gate leaves the state whole; one after it leaves it *torn*, to be fetched
from a peer. A failed attempt puts back what it touched (entry.py), recovers (recovery.py), and is
done again with a fresh batch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from everstep.data.loader import Batch
from everstep.errors import StateLost, UserError
from everstep.types import Decision
from everstep.wire import messages
from everstep.worker import codec
from everstep.worker.attempt import Attempt, Unwind
from everstep.worker.batch import Made, exchange
from everstep.worker.between import Between
from everstep.worker.capsule import Contents
from everstep.worker.communicators import Answer
from everstep.worker.entry import Entry, GradientPolicy, Undo
from everstep.worker.fence import Fence
from everstep.worker.forecast import Forecast, pattern_of
from everstep.worker.gate import Gate
from everstep.worker.progress import Phase
from everstep.worker.record import record_of, samples_of
from everstep.worker.recovery import Outcome, Recovery
from everstep.worker.runtime import Worker
from everstep.worker.state import State, local
from everstep.worker.tape import LAST_STEP

_MAX_REHEARSALS = 6
_LEARNING_STEPS = 2


class Step:
    """The callable that `run.step` makes of a function. One a worker; main thread only."""

    def __init__(
        self,
        worker: Worker,
        function: Callable[..., Any],
        recovery: Recovery,
        between: Between,
        *,
        undo: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._worker = worker
        self._recovery = recovery
        self._forecast = Forecast(worker, function)
        self._gradients = GradientPolicy()
        self._between = between
        self._buffers_until = _LEARNING_STEPS  # up to which step buffers are looked at closely
        self._fence = Fence(worker, late=undo)
        self._gate = Gate(worker, self._fence, self._forecast, recovery, between, self._put_back)
        self._used = 0  # DDP modules, by a predecessor
        self.began = False
        self.left_open = False  # the function was left by what ends the process

    @property
    def under_way(self) -> bool:
        """Whether the function is running."""
        return self._gate.attempt is not None

    @property
    def _state(self) -> State:
        state = self._worker.state
        if state is None:
            raise UserError("call run.protect(model=..., optimizer=...) before the first step")
        return state

    # ------------------------------------------------------------ the call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        worker = self._worker
        if self._gate.attempt is not None or worker.place.inside:
            where = f"the section {worker.place.inside}" if worker.place.inside else "a step"
            raise UserError(f"a step function was called inside {where}; call it once, in the loop")
        if worker.drawn is None or self._state is None:
            raise UserError(
                "a step function takes one batch of run.batches(...) a call, and only there can a "
                "step be done again: call it once for each batch, inside `for batch in "
                "run.batches(until=...)`"
            )
        drawn, worker.drawn = worker.drawn, None
        if any(isinstance(value, Iterator) for value in [*args, *kwargs.values()]):
            raise UserError(
                "a step function was given an iterator: a second attempt could not read it again"
            )
        if worker.joining:
            return self._join(args, kwargs)
        passes = 0 if self.began else worker.warm_passes
        if not self.began:
            worker.communicators.on_outside = self._warn_of_collective
        self.began = True
        worker.place.check_all_called(drawn.step)
        self._between.at_begin(self._state, drawn.step)
        batch = drawn.batch
        made = Made((args, kwargs), batch.value)
        for number in range(1, passes + 1):
            self._warm_up(drawn.step, number, args, kwargs)
            fresh = worker.draw(drawn.step)
            args, kwargs = exchange((args, kwargs), batch.value, fresh.value)
            batch = fresh
        while True:
            result, outcome = self._try(drawn.step, args, kwargs, batch)
            if outcome is None:
                if drawn.step - worker.base <= _LEARNING_STEPS:
                    made.refuse_changed(drawn.step)
                return result
            if outcome.step == drawn.step:
                return self._resume(outcome)
            assert outcome.step == drawn.step - 1, "ranks are never more than one step apart"
            made.refuse_changed(drawn.step)
            fresh = worker.draw(drawn.step)
            args, kwargs = exchange((args, kwargs), batch.value, fresh.value)
            batch = fresh

    def _try(self, step: int, args: Any, kwargs: Any, batch: Batch) -> tuple[Any, Outcome | None]:
        """One attempt: (result, None) if it committed, (None, outcome) if it has to be done again
        or was overtaken."""
        worker = self._worker
        if worker.communicators.poisoned:  # the stop came between the steps
            return None, self.recover_between()
        samples = samples_of(batch) if worker.spec.record else None
        attempt = self._begin(step)
        error: BaseException | None = None
        result = None
        try:
            self._gate.agree(attempt)
            result = self._function(*args, **kwargs)
            if not attempt.sealed:
                attempt.result = (result,)
                self._gate.meet(attempt, last=True)
            worker.faults.fire("commit")
        except Unwind:
            attempt.unwound = True
        except UserError:
            if self._clean():
                self.left_open = True
                raise  # misuse of everstep: doing it again would not help
            attempt.unwound = True
        except Exception as failure:
            error = failure
        except BaseException:
            self.left_open = True
            raise
        finally:
            self._gate.leave(attempt)
            self._end()
        # Only in the first step an update that needs peers is made before the fence: without them
        # it is no update.
        spoiled = attempt.needs_peers and worker.communicators.touched
        undone = spoiled or (attempt.undo is not None and not self._clean())
        if error is None and attempt.passed and not (undone or attempt.unwound):
            return self._finish(attempt, result, samples)
        return None, self._failed(attempt, error, args, kwargs)

    def _clean(self) -> bool:
        return not self._worker.communicators.poisoned

    def _begin(self, step: int, warming: int = 0) -> Attempt:
        """`warming`: it is no attempt, but the how-manieth pass before the first."""
        worker = self._worker
        communicators = worker.communicators
        entry = Entry(
            self._state,
            copy_gradients=self._gradients.copies,
            learn_buffers=step - worker.base <= self._buffers_until,
        )
        self._between.at_attempt(self._state)
        attempt = Attempt(step, entry, rehearsal=warming > 0, base=worker.base)
        self._gate.attempt = attempt
        attempt.log = {step: dict(scalars) for step, scalars in worker.log.items()}
        attempt.values = codec.copy(worker.values)
        attempt.streams = worker.streams()
        worker.place.new_attempt()
        attempt.fence = self._fence.kind
        if worker.copies.on:
            attempt.fence = "late"  # from the first step on: all know it, and none need agree
        communicators.trace.clear()
        if communicators.tape is not None:
            communicators.tape.begin(warming or worker.pass_of(step))
        communicators.touched = communicators.replaying = communicators.cut_off = False
        communicators.answer = Answer.ZEROS
        communicators.before_launch = self._gate.before_collective
        communicators.unwind = Unwind
        communicators.bound = self._forecast.bound()
        worker.faults.step = 0 if warming else step
        worker.phase(Phase.STEP, step)
        worker.seed("step", step)
        return attempt

    def _warm_up(self, step: int, number: int, args: Any, kwargs: Any) -> None:
        """A whole pass that leaves no trace, on all ranks that have begun at a checkpoint: DDP lays
        out its buckets anew after the first passes of a process, and the layout decides the bits of
        the sums. A failure in it starts all ranks again."""
        worker = self._worker
        attempt = self._begin(step, number)
        attempt.undo = Undo(self._state)
        error: Exception | None = None
        result = None
        try:
            result = self._function(*args, **kwargs)
            worker.communicators.drain()
        except Unwind:
            pass
        except Exception as failure:
            error = failure
        finally:
            self._end()
        if error is None and self._clean():
            self._take_in(attempt, result)
            self._put_back(attempt)
            return
        if error is not None and self._clean():
            worker.report_exception(error, step)
            worker.communicators.hold(error)
        self._recovery.run(torn=True)
        raise AssertionError("nothing is committed, so all ranks start again")

    def _end(self) -> None:
        self._gate.attempt = None
        self._worker.faults.step = 0
        self._worker.communicators.before_launch = None
        self._worker.communicators.bound = 0
        self._worker.communicators.cut_off = False
        self._worker.communicators.answer = Answer.RAISE

    def _warn_of_collective(self, operation: str) -> None:
        self._worker.communicators.on_outside = None
        self._worker.note(
            "collective-outside",
            f"a collective ({operation}) was called outside of the step function; it works, but if "
            "a rank fails there or after it, the run can't go on. Move it into the step function, "
            "before the update, or into a section (@run.section)",
        )

    # ------------------------------------------------------------ commit

    def _finish(self, attempt: Attempt, result: Any, samples: Any) -> tuple[Any, Outcome | None]:
        worker = self._worker
        if worker.communicators.touched:
            worker.note(
                "lost-after-update",
                f"a collective after the update of step {attempt.step} lost a peer; its result is "
                f"NaN on rank {worker.spec.rank}, since the dead rank's part of it can't be had "
                "again. Do it before the update",
            )
        self._learn(attempt)
        self._forecast.settle(attempt, result)
        self._fence.kind = attempt.fence
        log, worker.log = worker.log, {}
        record = record_of(result, samples, log, worker.values) if worker.spec.record else None
        self._commit(attempt.step, log, record)
        if not self._recovery.advanced():
            # Stopped again while serving after an advance: this rank holds the step and keeps it.
            outcome = self._recovery.run(torn=False)
            assert outcome.step == attempt.step, "a rank never goes back below what it committed"
        return result, None

    def _commit(self, step: int, log: dict[int, dict[str, float]], record: bytes | None) -> None:
        worker = self._worker
        worker.communicators.complete = True
        worker.committed = step
        worker.place.next_step()
        self._between.at_commit(self._state, step)
        worker.phase(Phase.BETWEEN)
        if worker.pass_of(step) >= LAST_STEP:
            worker.communicators.tape = None
        commit = messages.Commit(
            generation=worker.communicators.generation,
            step=step,
            t=time.monotonic(),
            log=log,
            record=record,
        )
        worker.control.send(commit)
        worker.seed("after")

    def _learn(self, attempt: Attempt) -> None:
        """What this step shows of those to come."""
        self._gate.learn(attempt)
        self._worker.wrappers.passed()
        self._gradients.learn(attempt.entry)
        self._recovery.gradients = self._gradients.copies
        if attempt.entry.learn_buffers() or attempt.number <= _LEARNING_STEPS:
            self._buffers_until = max(self._buffers_until, attempt.number + _LEARNING_STEPS)
        if attempt.number <= 1:  # the first step, or a rehearsal
            self._worker.wrappers.find_fsdp()

    # ------------------------------------------------------------ failure

    def _failed(
        self, attempt: Attempt, error: BaseException | None, args: Any, kwargs: Any
    ) -> Outcome:
        """Report what is this rank's own fault, recover, and say where that led."""
        worker = self._worker
        if attempt.outcome is not None:
            return self._recovered_in_gate(attempt.outcome)
        if error is not None and not worker.communicators.poisoned:
            worker.report_exception(error, attempt.step)
            worker.communicators.hold(error)
        if attempt.number == 1:
            return self._recovery.run(torn=True, settle=lambda: self._relearn(args, kwargs))
        torn = attempt.torn or (attempt.passed and attempt.undo is None) or attempt.entry.lost()
        return self._recovery.run(torn=torn, settle=lambda: self._put_back(attempt))

    def _relearn(self, args: Any, kwargs: Any) -> None:
        """The first step failed here. Either it failed everywhere, then all ranks start again; or a
        peer has committed it, then this rank takes its state like a joiner, and like one it has to
        see a whole step first: bucket layouts, and what the function returns."""
        self._worker.wrappers.reset(passes=self._worker.warm_passes)
        self._rehearse(args, kwargs)

    def _recovered_in_gate(self, outcome: Outcome) -> Outcome:
        if not self._worker.communicators.poisoned:
            return outcome
        later = self._recovery.run(torn=False)  # stopped again while the function unwound
        return later if later.decision is Decision.FETCH else outcome

    def _put_back(self, attempt: Attempt) -> None:
        """Leave no trace of a failed attempt. Raises CopyError where its updates can't be undone,
        and all else is put back."""
        worker = self._worker
        try:
            if attempt.undo is not None:
                attempt.undo.put_back()
        finally:
            attempt.entry.put_back()
            worker.log = attempt.log
            worker.values.clear()
            worker.values.update(codec.copy(attempt.values))
            worker.restore_streams(attempt.streams)

    def check_mean(self) -> None:
        """A mean over ranks is asked for. Raises UserError where it can't be exact."""
        self._gate.check_mean()

    def recover_between(self) -> Outcome:
        """The stop came while no step was under way."""
        return self._recovery.run(torn=False)

    # ------------------------------------------------------------ coming back, joining

    def _resume(self, outcome: Outcome) -> Any:
        """The step is committed, by peers: return from it what this rank would have returned."""
        worker = self._worker
        capsule = outcome.capsule
        result = self._forecast.result_of(capsule, outcome.step)
        log: dict[int, dict[str, float]] = {}
        first = worker.base + 1
        if capsule is not None and (capsule.step <= outcome.step or outcome.step > first):
            self._fence.kind = capsule.fence or self._fence.kind
        if capsule is not None and capsule.step == outcome.step:
            worker.wrappers.check_laid_out(capsule.used)
            self._take(capsule)
            log = capsule.log
        elif worker.joining:
            raise StateLost(
                f"what belongs to rank {worker.spec.rank} alone (its streams, local objects, ...) "
                f"after step {outcome.step} is lost: it was kept on its own node, on one other and "
                "by the coordinator, and these were lost together. A durable checkpoint would have "
                "kept it"
            )
        worker.log = {}
        record = None
        if worker.spec.record:
            samples = samples_of(worker.draw(outcome.step))
            record = record_of(result, samples, log, worker.values)
        self._commit(outcome.step, log, record)
        worker.place.sections, worker.place.kept = outcome.sections, outcome.kept
        return result

    def enter_after(self, step: int, capsule: bytes | None, kept: dict[str, bytes]) -> None:
        """In a replacement: the script runs on from the commit of `step`. `capsule`, `kept`: what
        its predecessor kept then, and in the sections after it."""
        self._worker.committed = step
        if step > self._worker.base:
            self._worker.place.next_step()
            self._worker.place.kept = kept
        if capsule is not None:
            contents = msgspec.msgpack.decode(capsule, type=Contents)
            self._forecast.pattern = contents.pattern
            self._gate.expect(contents.updates)
            self._used = contents.used
            self._take(contents)

    def _take(self, capsule: Contents) -> None:
        """What the rank had of its own after the capsule's step."""
        buffers, state = dict(self._state.buffers()), self._state
        if capsule.step > self._worker.base + 1:  # in the first it is not known which change
            known = {*state.changing, *capsule.buffers}
            state.changing = tuple(name for name in buffers if name in known)
        with torch.no_grad():
            for name, data in capsule.buffers.items():
                if name in state.changing:
                    local(buffers[name]).copy_(codec.decode(data))
        self._worker.values.clear()
        self._worker.values.update(codec.decode(capsule.state))
        self._state.own.load(capsule.local)
        self._worker.restore_streams(capsule.streams)

    def _join(self, args: Any, kwargs: Any) -> Any:
        passes = self._rehearse(args, kwargs)
        self._worker.communicators.tape = None  # it has told all there is
        outcome = self._recovery.run(torn=True, passes=passes)
        self._worker.wrappers.check_laid_out(self._used)
        self._worker.joining = False
        self.began = True
        self._worker.communicators.replaying = True
        return self._resume(outcome)

    def _rehearse(self, args: Any, kwargs: Any) -> int:
        """Run the step with no peers until its collectives are those of its peers' steps, or no new
        one appears, so that lazy state is in place. What it computes is thrown away: the state
        comes from peers afterwards."""
        before: list[tuple[str, int]] | None = None
        wanted = self._forecast.pattern
        most = self._worker.wrappers.most_rehearsals(
            self._worker.pass_of(self._worker.committed + 1)
        )
        passes = 0
        while passes < (most or _MAX_REHEARSALS):
            passes += 1
            if self._worker.communicators.tape is not None:
                self._worker.communicators.tape.rehearse(passes)
            if not self._rehearse_once(args, kwargs):
                if self._worker.communicators.tape is None:
                    break
                # What was told in another step may be what it stumbled over.
                self._worker.communicators.tape = None
                continue
            trace = list(self._worker.communicators.trace)
            if trace == before or (passes > 1 and pattern_of(trace) == wanted):
                break
            before = trace
        self._worker.log = {}
        return passes

    def _rehearse_once(self, args: Any, kwargs: Any) -> bool:
        worker = self._worker
        entry = Entry(self._state, copy_gradients=True, learn_buffers=True)
        attempt = self._gate.attempt = Attempt(0, entry, rehearsal=True)
        worker.communicators.trace.clear()
        worker.communicators.answer = Answer.ZEROS
        worker.communicators.before_launch = self._gate.before_collective
        try:
            result = self._function(*args, **kwargs)
        except Exception as error:  # it ran on made-up data: never the script's fault
            worker.note(
                "rehearsal", f"a rehearsal of the step raised {type(error).__name__}: {error}"
            )
            return False
        finally:
            self._end()
        self._take_in(attempt, result)
        return True

    def _take_in(self, attempt: Attempt, result: Any) -> None:
        """What a rehearsal shows of the steps to come."""
        if not attempt.updates:
            attempt.entry.at_gate()
        self._learn(attempt)
        self._forecast.learn(attempt, result)
