"""What a simulated worker does in its loop: steps and sections, their fences, and what is left when
one is cut.

Theory of operation. An *attempt* leads from one position of the script to the next. A step has a
collective before each of its updates; a section has one. Nobody commits a step before every rank of
the generation has contributed to its last collective, and each hears of its completion at its own
moment, so a death in between leaves some committed and others not. The fence is such a collective:
early before the last update, late at the step's end, at a section's end always. Who stands in it
has all that the attempt needs, and can advance; without a fence, only who has heard of the last
reduction can. The capsule goes out before the last contribution. A stop that finds a step half done
leaves the state torn, unless the rank has a copy to undo it with. What the attempt did to the
rank's own state is put back when it parks, or, for one that might advance, when it is told not to.

What it doesn't know: messages, joining, and how a worker is stopped (`SimWorker`'s).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.core.simscript import (
    Capsule,
    Result,
    first_half,
    own_forward,
    result_of,
    second_half,
    state_after,
)
from everstep.types import Holding, Position

if TYPE_CHECKING:
    from everstep.core.simworker import SimWorker

GARBAGE = -1


class SimTrainer:
    """The training state of one process, and the attempt that is under way."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self._sim = worker.sim
        self._schedule = worker.sim.schedule
        self.position: Position = (0, 0)
        self.target: Position | None = None  # where the attempt leads
        self.state, self.torn = state_after(0), False
        self.own = worker.rank  # what no peer holds
        self.ready: Position | None = None  # where it could come with what it has reduced
        self.updating = False
        self._own_before = self.own
        self._results: tuple[Result, ...] = ()  # since the last step
        self._undo: int | None = None  # a copy of the state, as it was at the attempt's entry
        self._half = self._made = self._cut = False  # a part of the updates is done, or all are

    @property
    def holding(self) -> Holding:
        """What it truly holds."""
        spoilt = self._half or self._made or self._cut
        torn = self.torn or (spoilt and self._undo is None)
        step, sections = self.position
        return Holding(
            committed=step,
            sections=sections,
            torn=torn,
            can_advance=self.ready is not None and not torn and not self._cut,
            in_section=self.target is not None and self.target[1] > 0,
            shard=self._worker.shard,
        )

    # ------------------------------------------------------------------ attempts

    def begin(self) -> bool:
        """Begin what comes next in the script; False when that is the end of the loop."""
        self.target = self._schedule.after(self.position)
        self._own_before, self._undo, self.ready = self.own, None, None
        self.updating = self._half = self._made = self._cut = False
        if self.target is None:
            return False
        target = self.target
        self._worker.later(lambda: self._contribute(target, 1))
        return True

    def _contribute(self, target: Position, part: int) -> None:
        """Take part in the collective before update `part` of the step, or in the section's."""
        if part == 1:
            self.own = own_forward(self._worker.rank, self.own, target)
        last = part == self._schedule.updates

        def gather() -> None:
            self._worker.gather((target, part), lambda: self._reduced(target, part))

        if last and target[1] == 0 and self._schedule.fence == "none":
            self._send_capsule(target)
            self._sim.when_kept(self._worker, gather)
        else:
            gather()

    def _reduced(self, target: Position, part: int) -> None:
        """Every rank has contributed, and this one has heard of it."""
        last = part == self._schedule.updates
        if target[1] > 0 or (last and self._schedule.fence == "early"):
            self._enter_fence(target)
            return
        self.updating = True
        if part == 1 and self._schedule.copies:
            self._undo = self.state
        if last and self._schedule.fence == "none":
            self.ready = target if part == 1 else None
            self._worker.later(self._commit)
        else:
            self._worker.later(lambda: self._update(target, part))

    def _update(self, target: Position, part: int) -> None:
        self._update_part()
        if self._made:
            self._enter_fence(target)
        else:
            self._worker.later(lambda: self._contribute(target, part + 1))

    def _update_part(self) -> None:
        """The update that is under way, where it does not commit the step."""
        assert self.target is not None
        step, self.updating = self.target[0], False
        if self._half or self._schedule.updates == 1:
            half = self.state if self._half else first_half(self.state, step)
            self.state, self._half, self._made = second_half(half, step), False, True
        else:
            self.state, self._half = first_half(self.state, step), True

    def _enter_fence(self, target: Position) -> None:
        def gather() -> None:
            self.ready = target
            self._worker.gather((target, "fence"), lambda: self._passed(target))

        self._send_capsule(target)
        self._sim.when_kept(self._worker, gather)

    def _passed(self, target: Position) -> None:
        self.updating = target[1] == 0 and self._schedule.fence == "early"
        self._worker.later(self._commit)

    def _commit(self) -> None:
        self.commit()
        self._worker.go_on()

    def commit(self) -> None:
        """Bring the attempt to its end; the script is given its result."""
        assert self.target is not None
        target = self.target
        follows = self._schedule.after(self.position) == target and not self.torn and not self._cut
        self._sim.check(follows, f"{self._worker} goes from {self.position} to {target}")
        if target[1] == 0 and not self._made:
            half = self.state if self._half else first_half(self.state, target[0])
            self.state = second_half(half, target[0])
        self._results = self._results_at(target)
        self.position, self._own_before, self._undo, self.ready = target, self.own, None, None
        self.updating = self._half = self._made = False
        self.target = self._schedule.after(target)
        self.check_whole()
        self._sim.scripts.sees(*self._worker.identity, target, self._results[-1])
        self._worker.say_committed()

    def _results_at(self, target: Position) -> tuple[Result, ...]:
        result = result_of(self._worker.rank, target)
        return (result,) if target[1] == 0 else (*self._results, result)

    def _send_capsule(self, target: Position) -> None:
        capsule = Capsule(position=target, results=self._results_at(target), own=self.own)
        self._sim.keep_capsule(self._worker, capsule)

    # ------------------------------------------------------------------ what ends an attempt

    def tear(self) -> None:
        """The update that is under way stops in its middle."""
        if self.updating:
            self._cut, self.updating = True, False

    def cut_update(self) -> None:
        """The stop finds an update under way: it ends, is cut, or had not begun."""
        if not self.updating:
            return
        assert self.target is not None
        chance = self._sim.random.random()
        commits = self._half or self._schedule.updates == 1
        if chance < 0.5 and commits and self._schedule.fence != "late":
            self.commit()
        elif chance < 0.5:
            self._update_part()
        elif chance < 0.6:
            self._cut = True
        self.updating = False

    def put_back(self) -> None:
        """Leave no trace of an attempt; without a copy to go back to, a half-done update stays."""
        self.own, self.ready, self.updating = self._own_before, None, False
        spoilt = self._half or self._made or self._cut
        if self._undo is not None:
            self._sim.undone += spoilt
            self.state = self._undo
        elif spoilt:
            self.state, self.torn = GARBAGE, True
        self._undo, self._half, self._made, self._cut = None, False, False, False

    # ------------------------------------------------------------------ state from peers

    def take(self, state: int, position: Position) -> None:
        """Take the state that peers hold at `position`."""
        self.state, self.torn, self.position = state, False, position

    def resume(self, capsule: Capsule | None) -> bool:
        """Calls that lead to this position return by what an earlier process, or attempt, left.
        False when they have returned already."""
        rank, incarnation = self._worker.identity
        last = self._sim.scripts.last(rank, incarnation)
        if last == self.position:
            return False
        if capsule is None or capsule.position != self.position:
            self._sim.lose_capsule(self._worker)
            return False
        self._sim.resumed += 1
        self.own = self._own_before = capsule.own
        self._results = capsule.results
        step, _ = self.position
        for sections, result in enumerate(capsule.results):
            if last is None or (step, sections) > last:
                self._sim.scripts.sees(rank, incarnation, (step, sections), result)
        return True

    def check_whole(self) -> None:
        """What it holds must be what a run without a fault holds here."""
        step, rank = self.position[0], self._worker.rank
        whole = self.state == state_after(step)
        self._sim.check(whole, f"{self._worker} holds another state at {self.position}")
        own = self.own == self._sim.scripts.own_after(rank, self.position)
        self._sim.check(own, f"{self._worker} lost its own at {self.position}")
