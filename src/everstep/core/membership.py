"""Who holds each rank: the one table of incarnations, their statuses, and the number of the current
world.

Theory of operation. A rank is held by at most one process at a time. Each tenure has an incarnation
number that rises with every spawn of the rank and is never used again, so a late notice about an
earlier process finds nobody (`current` answers None) and changes nothing. All that is known of a
tenure lives in its `Member`, so nothing of a dead process can leak into the next one. The
generation is the number of the current world and only rises.

What it doesn't know: what a status means for the job, and when a process must be spawned, stopped
or killed; that is the coordinator's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from everstep.types import Cause, Holding


class Status(enum.StrEnum):
    """What a process that holds a rank is doing, as far as it has said."""

    STARTING = "starting"  # spawned, has not spoken
    SETTING_UP = "setting up"  # it runs; `protect` is still to come
    PROTECTED = "protected"  # it called `protect`
    RUNNING = "running"  # in the loop, or after it
    WAITING = "waiting"  # a joiner that is set up and needs its peers' position
    REHEARSING = "rehearsing"  # a joiner that knows its position
    STOPPING = "stopping"  # told to stop, has not parked
    PARKED = "parked"  # stands still; its holding is known
    REGROUPING = "regrouping"  # told to regroup, has not done its part of the plan
    DOOMED = "doomed"  # we killed it; its death has not been seen


@dataclass(slots=True, kw_only=True)
class Member:
    """One tenure of a rank.

    `joining`: it was spawned to join and has not yet been told to regroup; it holds no state.
    `left_at`: the step after which it left its loop; it waits (or has waited) for the others.
    `finished`: its script ended with code 0. `holding`: what it holds, while parked. `position`:
    the step a joiner was told. `distrusted`: its last receipt did not match, so what it holds
    counts as torn. `deadline_s`: by when it must do what its status waits for. `doom`: the cause
    that its death stands for when we killed it for being late; None when its death is no news.
    """

    rank: int
    incarnation: int
    joining: bool
    status: Status = Status.STARTING
    left_at: int | None = None
    finished: bool = False
    holding: Holding | None = None
    position: int | None = None
    distrusted: bool = False
    deadline_s: float | None = None
    doom: Cause | None = None

    @property
    def identity(self) -> tuple[int, int]:
        """(rank, incarnation), as actions name it."""
        return self.rank, self.incarnation

    @property
    def closing(self) -> bool:
        """It has left its loop."""
        return self.left_at is not None

    @property
    def doomed(self) -> bool:
        """We killed it and wait for its death; nothing else it says counts."""
        return self.status is Status.DOOMED

    @property
    def survivor(self) -> bool:
        """It lives and was part of the world that stopped."""
        return not self.joining and not self.doomed


class Membership:
    """The table of members, one row a rank. Not thread-safe; pure state."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"a job needs at least one rank, not {world_size}")
        self.world_size = world_size
        self._generation = 0
        self._members: list[Member | None] = [None] * world_size
        self._last_incarnation = [0] * world_size

    @property
    def generation(self) -> int:
        """The number of the current world; 0 is the first."""
        return self._generation

    def advance(self) -> int:
        """Begin the next generation and return its number."""
        self._generation += 1
        return self._generation

    def spawn(self, rank: int, *, joining: bool) -> Member:
        """Give `rank` to a new process and return its row.

        Raises ValueError when the rank's earlier process has not been reaped.
        """
        holder = self._members[rank]
        if holder is not None:
            raise ValueError(
                f"rank {rank} is still held by incarnation {holder.incarnation} ({holder.status}); "
                "reap it before the rank is given away"
            )
        self._last_incarnation[rank] += 1
        member = Member(rank=rank, incarnation=self._last_incarnation[rank], joining=joining)
        self._members[rank] = member
        return member

    def died(self, rank: int, incarnation: int) -> Member | None:
        """Take the rank from the process, which has been reaped. Returns its row, or None when the
        notice is stale."""
        member = self.current(rank, incarnation)
        if member is not None:
            self._members[rank] = None
        return member

    def current(self, rank: int, incarnation: int) -> Member | None:
        """The row of this very tenure, or None when the rank is held by another process or by
        none."""
        member = self.holder(rank)
        return member if member is not None and member.incarnation == incarnation else None

    def holder(self, rank: int) -> Member | None:
        """The row of whoever holds `rank`; None when nobody does, or when there is no such rank."""
        return self._members[rank] if 0 <= rank < self.world_size else None

    def members(self) -> Iterator[Member]:
        """All rows, by rank; ranks that nobody holds are left out."""
        return (member for member in self._members if member is not None)

    def survivors(self) -> list[Member]:
        """The living members of the world that stopped, by rank."""
        return [member for member in self.members() if member.survivor]

    def complete(self) -> bool:
        """Every rank is held by a process that is not doomed."""
        return all(member is not None and not member.doomed for member in self._members)

    def all_are(self, status: Status) -> bool:
        """Every rank is held by a process with `status`."""
        return all(member is not None and member.status is status for member in self._members)

    def validate(self) -> None:
        """Assert what must always hold of the table."""
        for rank, member in enumerate(self._members):
            if member is None:
                continue
            assert member.rank == rank
            assert member.incarnation == self._last_incarnation[rank]
            assert (member.holding is not None) == (member.status is Status.PARKED), member
            assert member.doom is None or member.doomed, member
