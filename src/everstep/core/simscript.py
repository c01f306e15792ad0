"""What the script of a simulated rank does and sees: results, state of its own, capsules.

Theory of operation. The model's state after step k is a number that only the updates of steps 1 to
k, in their order, make; an update comes in two halves, so that a step can be cut in its middle.
Beside it each rank has what no peer holds: what its steps and sections returned, and a number of
its own that each of them changes (`run.state`). Both travel in a capsule, which the worker gives to
its agent before its last contribution; the agent keeps the newest four of each rank. `Scripts`
watches what each rank's script is given: the results of all positions, in order and once each,
where a replacement begins with the step that its peers stand at.

What it doesn't know: time, messages, and who is alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from everstep.core.commits import Commits
from everstep.core.simschedule import Schedule
from everstep.types import Position

_MODULUS = (1 << 61) - 1
_KEPT = 4
Result = tuple[int, int, int]


def first_half(state: int, step: int) -> int:
    """The first half of the update of `step`; what it gives is the state of no step."""
    return (state * 6364136223846793005 + step) % _MODULUS


def second_half(half: int, step: int) -> int:
    """The second half; no other order of halves gives the same state."""
    return (half * 3935559000370003845 + 7 * step + 1) % _MODULUS


@cache
def state_after(step: int) -> int:
    """What every rank must hold after `step` committed steps."""
    return 1 if step == 0 else second_half(first_half(state_after(step - 1), step), step)


def own_forward(rank: int, own: int, position: Position) -> int:
    """What the step or section that leads to `position` makes of a rank's own state."""
    step, sections = position
    return (own * 2862933555777941757 + 31 * step + 1009 * sections + rank) % _MODULUS


def result_of(rank: int, position: Position) -> Result:
    """What the step or section that leads to `position` returns on `rank`."""
    return rank, position[0] * position[0], position[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capsule:
    """What belongs to one rank alone at `position`. `results`: of the last step, and of the
    sections after it."""

    position: Position
    results: tuple[Result, ...]
    own: int


class Capsules:
    """A store, as the coordinator's shell and the agents keep it."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[Position, Capsule]] = {}

    def keep(self, rank: int, capsule: Capsule) -> None:
        """Take a capsule; newer ones are of a future that the rank has left."""
        kept = {**self._kept.get(rank, {}), capsule.position: capsule}
        usable = sorted(position for position in kept if position <= capsule.position)[-_KEPT:]
        self._kept[rank] = {position: kept[position] for position in usable}

    def merge(self, other: Capsules, rank: int) -> None:
        """Take what another store has of `rank`."""
        if rank in other._kept:
            self._kept[rank] = {**self._kept.get(rank, {}), **other._kept[rank]}

    def copy(self) -> Capsules:
        """Another store with the same."""
        again = Capsules()
        again._kept = {rank: dict(kept) for rank, kept in self._kept.items()}
        return again

    def part(self, rank: int) -> Capsules:
        """Another store with what this one has of `rank`."""
        part = Capsules()
        part.merge(self, rank)
        return part

    def positions(self, rank: int) -> list[Position]:
        """Of which positions there is something of `rank`."""
        return sorted(self._kept.get(rank, ()))

    def forget(self, rank: int) -> None:
        """Keep nothing of `rank`."""
        self._kept.pop(rank, None)

    def ranks(self) -> list[int]:
        """Of which ranks there is something."""
        return sorted(self._kept)

    def newest(self, rank: int, position: Position) -> Capsule | None:
        """The newest that is not newer than `position`."""
        kept = self._kept.get(rank, {})
        return kept[max(usable)] if (usable := [p for p in kept if p <= position]) else None


class Scripts:
    """What each rank's script has been given, over all processes that held the rank. `check`: told
    whether what must hold does, and what it is."""

    def __init__(self, schedule: Schedule, check: Callable[[bool, str], None]) -> None:
        self._schedule = schedule
        self._check = check
        self._seen = Commits(schedule.world_size)
        self._begun = -1
        self._here: dict[tuple[int, int], Position] = {}  # by incarnation
        self._own: dict[tuple[int, Position], int] = {}

    @property
    def least(self) -> Position:
        """What every rank's script has been given the result of; nobody may be set back behind
        it."""
        return self._seen.least

    def begin(self, generation: int) -> None:
        """All scripts have begun from their first line, in this world."""
        if generation > self._begun:
            self._begun = generation
            self._seen = Commits(self._schedule.world_size)

    def sees(self, rank: int, incarnation: int, position: Position, result: Result) -> None:
        """The call of the step or section that leads to `position` returns `result`."""
        before = self._here.get((rank, incarnation))
        if before is None and position > (0, 0):
            self._begins(rank, incarnation, position)
        elif before is not None:
            follows = position == self._schedule.after(before)
            self._check(follows, f"rank {rank}.{incarnation} sees {position} after {before}")
        right = result == result_of(rank, position)
        self._check(right, f"rank {rank}.{incarnation} sees {result} of {position}")
        self._here[rank, incarnation] = position
        self._seen.made(rank, position)

    def _begins(self, rank: int, incarnation: int, position: Position) -> None:
        seen = self._seen.position(rank)
        follows = self._schedule.after(seen)
        who = f"the script of rank {rank}.{incarnation}"
        early = position <= seen or position == follows
        self._check(early, f"{who} begins at {position}, and {follows} is still to be seen")
        late = position[0] >= self.least[0]
        self._check(late, f"{who} begins at {position}, and all have {self.least}")

    def last(self, rank: int, incarnation: int) -> Position | None:
        """The newest position of which the script of this process has the result."""
        return self._here.get((rank, incarnation))

    def own_after(self, rank: int, position: Position) -> int:
        """What `rank` must hold of its own at `position`."""
        known = self._own.get((rank, position))
        if known is None:
            here, known = (0, 0), rank
            while here != position:
                following = self._schedule.after(here)
                assert following is not None, (position, self._schedule)
                here, known = following, own_forward(rank, known, following)
            self._own[rank, position] = known
        return known
