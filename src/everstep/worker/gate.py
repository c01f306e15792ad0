"""The gate: no update passes it on garbage.

Theory of operation: it stands before every optimizer update (a global pre-hook) and at the end of
the step function. It waits for all collectives that were launched, and lets the update pass only if
none of this attempt's was poisoned; else the function is left. Before the last update, or at the
end, stands the fence that the job has agreed on (fence.py). It is entered when the capsule is with
the agent (forecast.py). Updates that come before the fence are undone from a copy.

A rank whose fence fails with all its own collectives whole waits here for the decision: it makes
the step by itself if any peer has, or leaves the function.

On a device the update need not wait for the host where the optimizer can leave it out by itself
(foundinf.py): it is launched at once, and all of this is decided behind it, before the script's
next line. So the device has work meanwhile, and nothing is ever made of an update that was not.

Does not know: what is done before and after an attempt (transaction.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from everstep.errors import UserError
from everstep.types import Decision
from everstep.worker.attempt import Attempt, Unwind
from everstep.worker.between import Between
from everstep.worker.communicators import Answer
from everstep.worker.entry import Undo
from everstep.worker.fence import FENCES, Fence
from everstep.worker.forecast import Forecast
from everstep.worker.foundinf import DeviceGate, Passage
from everstep.worker.progress import Phase
from everstep.worker.recovery import Recovery
from everstep.worker.runtime import Worker
from everstep.worker.state import State


class Gate:
    """The gate of one worker's steps. `put_back` leaves no trace of an attempt. Main thread, but
    for `before_collective`, which may come from the thread of a backward pass."""

    def __init__(
        self,
        worker: Worker,
        fence: Fence,
        forecast: Forecast,
        recovery: Recovery,
        between: Between,
        put_back: Callable[[Attempt], None],
    ) -> None:
        self._worker, self._fence, self._forecast = worker, fence, forecast
        self._recovery, self._between, self._put_back = recovery, between, put_back
        self._updates = 1  # in a step, as learned
        self._expected = 1  # the same, as a predecessor has learned
        self._tail = False  # whether collectives follow the last update, as learned
        self._devices: DeviceGate | None = None
        self.attempt: Attempt | None = None
        """The attempt, or rehearsal, that is under way."""
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)

    @property
    def _state(self) -> State:
        state = self._worker.state
        assert state is not None, "an attempt begins with protected state"
        return state

    def learn(self, attempt: Attempt) -> None:
        """What a whole attempt, or a rehearsal, shows of those to come."""
        self._tail = len(self._worker.communicators.trace) > attempt.collectives
        if attempt.number <= 1:  # the first step, or a rehearsal
            self._updates = max(self._expected, attempt.updates)
        elif attempt.updates > self._updates:
            self._updates = attempt.updates
            self._worker.note(
                "more-updates",
                f"step {attempt.step} made {attempt.updates} updates, more than the steps before; "
                "from now on a copy of the state is taken in each step, so that they can be undone",
            )
        self._forecast.updates = self._updates

    def expect(self, updates: int) -> None:
        """A predecessor of this rank has seen a step make so many."""
        self._expected = max(self._expected, updates)
        self._updates = max(self._updates, updates)

    def before_collective(self, index: int) -> None:
        """The `index`-th collective of the step is about to be launched."""
        if self.attempt is not None:
            self._forecast.before_collective(self.attempt, index)

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        attempt = self.attempt
        if attempt is None:
            return
        if attempt.inside is not None:  # an update inside an update: a part of it
            return
        self._check_update(optimizer)
        attempt.inside, attempt.updating = len(self._worker.communicators.trace), optimizer
        attempt.updates += 1
        if any(callable(value) for value in [*args[1:], *kwargs.values()]):
            attempt.calls_back = True
            self._want_late(attempt)
        if attempt.rehearsal:
            self._forecast.at_gate(attempt)
            attempt.entry.at_gate()
            attempt.collectives = len(self._worker.communicators.trace)
            attempt.withhold(optimizer)
            return
        last = attempt.updates >= self._updates and attempt.fence != "late"
        if not last and attempt.undo is None and attempt.number > 1:
            kept = self._worker.copies.undo(self._state, attempt.step - 1)
            attempt.undo = kept or Undo(self._state)
        self.meet(attempt, last=last, optimizer=optimizer)
        self._worker.phase(Phase.UPDATE)
        self._worker.faults.fire("optimizer")

    def _check_update(self, optimizer: Any) -> None:
        if all(optimizer is not known for known in self._state.optimizers.values()):
            raise UserError(
                f"a {type(optimizer).__name__} that is not protected updates in the step: its "
                "state would be lost with a rank; name it in run.protect(...)"
            )

    def _after_update(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        attempt = self.attempt
        if attempt is None or attempt.inside is None or optimizer is not attempt.updating:
            return
        communicates = len(self._worker.communicators.trace) > attempt.inside
        attempt.inside = None
        attempt.give_back()
        if attempt.passage is not None:
            self._confirm(attempt, attempt.passage)
        if communicates:
            self._want_late(attempt)
        if attempt.passed:
            self._worker.phase(Phase.STEP)

    def _want_late(self, attempt: Attempt) -> None:
        """The update communicates or runs the model. Raises UserError where it is too late."""
        self._fence.want("late")
        attempt.needs_peers = True
        if attempt.fence is not None and attempt.fence != "late":
            raise UserError(
                f"the update of step {attempt.step} communicates, or runs the model, and those of "
                "the first step did not, so it could not be undone; use @run.step(undo=True)"
            )

    def meet(self, attempt: Attempt, *, last: bool, optimizer: Any = None) -> None:
        """Let the update pass if all collectives of this attempt ended; else leave the function.
        `optimizer`: whose update it is; None at the end of the function."""
        worker = self._worker
        communicators = worker.communicators
        by_device = last and self._can_leave_to_device(attempt, optimizer)
        if not by_device:
            communicators.drain()
        worker.phase(Phase.FENCE)
        broken = communicators.touched
        if not attempt.passed:
            attempt.torn |= self._between.changed_since_commit(self._state, attempt.step)
        if not broken and last:
            self._check_met(attempt)
            self._forecast.at_gate(attempt)
        worker.faults.fire("fence")
        if by_device:
            if not broken and not attempt.torn and not communicators.poisoned:
                fence = attempt.fence == "device"
                attempt.passage = self._device_gate().open(optimizer, fence=fence)
                return
            communicators.drain()
            broken = communicators.touched
        all_met = True
        if last and not broken and attempt.fence in FENCES:
            all_met = self._enter(attempt)
        failed = communicators.poisoned or not all_met
        if broken or (failed and not (last and self._may_advance(attempt))):
            raise Unwind
        if failed:
            self._await_decision(attempt, can_advance=True)
        self._seal(attempt, last=last)

    def _await_decision(self, attempt: Attempt, *, can_advance: bool) -> None:
        """The fence has failed, or the rank was stopped behind its last collective. Return if the
        rank is to make the step by itself; else leave the function."""
        communicators = self._worker.communicators
        # Nothing undoes the update that was made before this one, by a gate that took it for the
        # last; so this one is made as well, and all that came so far do likewise.
        gone_too_far = attempt.passed and attempt.undo is None
        if not gone_too_far:
            outcome = self._recovery.run(
                torn=attempt.torn,
                can_advance=can_advance and not attempt.torn,
                settle=lambda: self._put_back(attempt),
            )
            if outcome.decision is not Decision.ADVANCE:
                attempt.outcome = outcome
                raise Unwind
        communicators.cut_off = True  # peers have made the step: nobody meets this rank in it

    def _seal(self, attempt: Attempt, *, last: bool) -> None:
        communicators = self._worker.communicators
        attempt.passed, attempt.sealed = True, last
        attempt.entry.at_gate()
        attempt.collectives = len(communicators.trace)
        communicators.touched = False
        if last and attempt.fence != "none":
            attempt.undo = None  # all ranks make the step: nothing of it is undone any more
        communicators.answer = Answer.NANS if attempt.undo is None else Answer.ZEROS

    # ------------------------------------------------------------ where there is a device

    def _device_gate(self) -> DeviceGate:
        worker = self._worker
        assert worker.device is not None
        if self._devices is None:
            self._devices = DeviceGate(
                worker.device,
                worker.communicators,
                self._fence.launch,
                world_size=worker.spec.world_size,
            )
        return self._devices

    def _enter(self, attempt: Attempt) -> bool:
        """The fence. False: some rank did not come there whole, and the stop is on its way."""
        if self._worker.copies.on and not self._keep_copy(attempt):
            return False
        if attempt.fence != "device":
            copies = self._worker.copies
            least = self._fence.enter(*copies.says(attempt.step))
            if not self._worker.communicators.poisoned:
                copies.agree(attempt.step, least)
            return True
        verdict = self._device_gate().ask()
        return verdict.confirm(self._worker.spec.quiesce_timeout_s)

    def _keep_copy(self, attempt: Attempt) -> bool:
        """What the step has made is copied before anybody can commit it. False: stopped."""
        worker = self._worker
        worker.phase(Phase.COPY)
        made = worker.copies.keep(
            self._state,
            attempt.step,
            worker.communicators.generation,
            gradients=self._recovery.gradients,
        )
        worker.phase(Phase.FENCE)
        return made

    def _can_leave_to_device(self, attempt: Attempt, optimizer: Any) -> bool:
        return (
            self._worker.device is not None
            and optimizer is not None
            and attempt.updates == 1
            and attempt.fence in ("none", "device")
            and not self._worker.communicators.touched
            and self._device_gate().takes(optimizer)
        )

    def _confirm(self, attempt: Attempt, passage: Passage) -> None:
        """The update is launched: wait until it is known whether the device lets it through. One
        that it left out is made now if peers have made theirs; else leave the function."""
        attempt.passage = None
        if not passage.confirm(self._worker.spec.quiesce_timeout_s):
            can_advance = passage.came_whole and self._may_advance(attempt)
            self._await_decision(attempt, can_advance=can_advance)
            attempt.inside, attempt.updating = len(self._worker.communicators.trace), None
            passage.redo()  # by `inside`, its hooks are none of ours
            attempt.inside = None
        self._seal(attempt, last=True)

    def leave(self, attempt: Attempt) -> None:
        """The function has been left. An update that was being launched then, for the device to
        decide on, may have been made in part."""
        if attempt.passage is not None:
            attempt.passage.updated()
            attempt.torn = True

    def _check_met(self, attempt: Attempt) -> None:
        """Raise UserError for a step in which the ranks do not meet."""
        met = bool(self._worker.communicators.trace)
        if not met and not attempt.calls_back and self._worker.spec.world_size > 1:
            raise UserError(
                f"step {attempt.step} made no collective, so ranks could drift apart and could not "
                "be brought back together; wrap the model (DDP, FSDP2), leave `no_sync` for the "
                "last micro-batch of a step, or call run.mean in it"
            )

    def _may_advance(self, attempt: Attempt) -> bool:
        """Whether this rank could make the step by itself. Behind a fence all can; without one it
        depends on nothing collective following the update."""
        if attempt.number <= 1:
            return False
        if attempt.fence != "none":
            return True
        return attempt.updates > 0 and attempt.undo is None and not self._tail

    def agree(self, attempt: Attempt) -> None:
        """In the job's second step all ranks agree on the fence."""
        if attempt.fence is not None or attempt.number == 1:
            return
        if self._forecast.wants_fence or self._worker.carry:
            self._fence.want("early")
        attempt.fence = self._fence.agree()
        if attempt.fence is None:
            raise Unwind
        self._forecast.capture(attempt)  # a successor of this rank must know what was agreed

    def check_mean(self) -> None:
        """A mean over ranks is asked for. Raises UserError after the update, unless that can still
        be undone."""
        attempt = self.attempt
        second = attempt is not None and attempt.number > 1
        if attempt is not None and attempt.sealed and second and attempt.fence != "late":
            raise UserError(
                f"run.mean was called after the update of step {attempt.step}, where a rank that "
                "dies takes its part along; call it before the update, or use "
                "@run.step(undo=True)"
            )
