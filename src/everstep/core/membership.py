"""Who holds each rank: the one table of incarnations, their statuses, and the number of the current
world.

Theory of operation. A rank is held by at most one process at a time. Each tenure has an incarnation
number that rises with every spawn of the rank and is never used again, so a late notice about an
earlier process finds nobody (`current` answers None) and changes nothing. All that is known of a
tenure lives in its `Member`, so nothing of a dead process can leak into the next one. The
generation is the number of the current world and only rises. A coordinator that takes over a job
numbers both from a bound that no earlier one has reached (`number_from`).

What is asked of the whole table after every event (do all survivors stand still? who must be
spawned? what is the next deadline?) is not looked for among the rows: each change of a row keeps
tallies, and deadlines lie in a heap. So an event costs the same in a world of four and of sixteen
thousand. A row is changed by the table's methods only; its properties can't be set.

What it doesn't know: what a status means for the job, and when a process must be spawned, stopped
or killed; that is the coordinator's.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator

from everstep.core.member import Member, Status, Tallies
from everstep.types import Holding

__all__ = ["Member", "Membership", "Status"]


class Membership:
    """The table of members, one row a rank. Not thread-safe; pure state."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"a job needs at least one rank, not {world_size}")
        self.world_size = world_size
        self._generation = 0
        self._first = 0  # no new number lies below it
        self._members: list[Member | None] = [None] * world_size
        self._last_incarnation = [0] * world_size
        self._vacant = set(range(world_size))
        self._tallies = Tallies()
        self._deadlines: list[tuple[float, int, int]] = []  # a heap; the rows say which still hold

    @property
    def generation(self) -> int:
        """The number of the current world; 0 is the first."""
        return self._generation

    def advance(self) -> int:
        """Begin the next generation and return its number."""
        self._generation = max(self._generation + 1, self._first)
        return self._generation

    def number_from(self, first: int) -> None:
        """Generations and incarnations that begin from now on have at least the number `first`."""
        self._first = first

    def found_in(self, generation: int) -> None:
        """The world that there is has the number `generation`, which an earlier coordinator
        gave."""
        self._generation = generation

    # ------------------------------------------------------------------ tenures

    def spawn(self, rank: int, *, joining: bool, deadline_s: float | None = None) -> Member:
        """Give `rank` to a new process and return its row.

        Raises ValueError when the rank's earlier process has not been reaped.
        """
        holder = self._members[rank]
        if holder is not None:
            raise ValueError(
                f"rank {rank} is still held by incarnation {holder.incarnation} ({holder.status}); "
                "reap it before the rank is given away"
            )
        incarnation = max(self._last_incarnation[rank] + 1, self._first)
        member = self._give(rank, incarnation, joining)
        self._expect(member, deadline_s)
        return member

    def take_in(self, rank: int, incarnation: int, *, joining: bool) -> Member:
        """`rank` is held by a process that an earlier coordinator spawned. The rank is vacant."""
        assert self._members[rank] is None, rank
        member = self._give(rank, incarnation, joining)
        self.move(member, Status.RUNNING)
        return member

    def _give(self, rank: int, incarnation: int, joining: bool) -> Member:
        self._last_incarnation[rank] = incarnation
        member = Member(rank=rank, incarnation=incarnation, _joining=joining)
        self._members[rank] = member
        self._vacant.discard(rank)
        if not self._vacant:
            self._vacant = set()  # to look through a set that was large once is not O(1)
        self._tallies.count(member, 1)
        return member

    def died(self, rank: int, incarnation: int) -> Member | None:
        """Take the rank from the process, which has been reaped. Returns its row, or None when the
        notice is stale."""
        member = self.current(rank, incarnation)
        if member is not None:
            self._tallies.count(member, -1)
            self._members[rank] = None
            self._vacant.add(rank)
        return member

    # ------------------------------------------------------------------ what a row comes to

    def move(self, member: Member, status: Status, *, deadline_s: float | None = None) -> None:
        """`member` does something else now; it no longer stands still. `deadline_s`: by when it
        must have done it; None: the table doesn't wait for it."""
        self._tallies.count(member, -1)
        member._status, member._holding = status, None
        self._tallies.count(member, 1)
        self._expect(member, deadline_s)

    def proceed(self, member: Member, status: Status) -> None:
        """`member` has come further on its way, and the deadline is still the same."""
        self.move(member, status, deadline_s=member._deadline_s)

    def park(self, member: Member, holding: Holding) -> None:
        """`member` stands still and holds `holding`."""
        self._tallies.count(member, -1)
        member._status, member._holding, member._deadline_s = Status.PARKED, holding, None
        self._tallies.count(member, 1)

    def leave(self, member: Member, step: int | None) -> None:
        """`member` has left its loop after `step` steps; None: it is in it again."""
        self._tallies.count(member, -1)
        member._left_at = step
        self._tallies.count(member, 1)

    def finish(self, member: Member) -> None:
        """The script of `member` has ended."""
        self._tallies.count(member, -1)
        member._finished = True
        self._tallies.count(member, 1)

    def admit(self, *, closed: bool) -> None:
        """All that stand still make up a new world: they regroup. `closed`: the closing fence has
        opened; else who waits at it asks again."""
        for member in self.members():
            self._tallies.count(member, -1)
            member._status, member._holding = Status.REGROUPING, None
            member._joining = False
            member._left_at = member._left_at if closed else None
            self._tallies.count(member, 1)

    def _expect(self, member: Member, deadline_s: float | None) -> None:
        if deadline_s is not None and deadline_s != member._deadline_s:
            heapq.heappush(self._deadlines, (deadline_s, member.rank, member.incarnation))
        member._deadline_s = deadline_s

    # ------------------------------------------------------------------ rows

    def current(self, rank: int, incarnation: int) -> Member | None:
        """The row of this very tenure, or None when the rank is held by another process or by
        none."""
        member = self.holder(rank)
        return member if member is not None and member.incarnation == incarnation else None

    def holder(self, rank: int) -> Member | None:
        """The row of whoever holds `rank`; None when nobody does, or when there is no such rank."""
        return self._members[rank] if 0 <= rank < self.world_size else None

    def members(self) -> Iterator[Member]:
        """All rows, by rank; ranks that nobody holds are left out. O(ranks)."""
        return (member for member in self._members if member is not None)

    def survivors(self) -> list[Member]:
        """The living members of the world that stopped, by rank. O(ranks)."""
        return [member for member in self.members() if member.survivor]

    def vacant(self) -> list[int]:
        """The ranks that nobody holds, in order."""
        return sorted(self._vacant)

    def waiting(self) -> list[Member]:
        """The joiners that need their peers' position, by rank."""
        rows = (self._members[rank] for rank in sorted(self._tallies.waiting))
        return [member for member in rows if member is not None]

    # ------------------------------------------------------------------ the table as a whole, O(1)

    @property
    def any_survivor(self) -> bool:
        """Somebody lives who was part of the world that stopped."""
        return self._tallies.survivors > 0

    @property
    def survivors_parked(self) -> bool:
        """All survivors stand still."""
        return self._tallies.parked == self._tallies.survivors

    @property
    def held(self) -> Collection[Holding]:
        """What the parked survivors hold, each different holding once."""
        return self._tallies.held.keys()

    @property
    def held_version(self) -> int:
        """Another number whenever `held` has changed."""
        return self._tallies.held_version

    @property
    def left_at(self) -> Collection[int]:
        """The steps after which loops were left, each once."""
        return self._tallies.left_at.keys()

    @property
    def all_finished(self) -> bool:
        """Every rank is held by a process whose script has ended."""
        return self._tallies.finished == self.world_size

    @property
    def all_ended(self) -> bool:
        """Every rank is held by a process that has left its loop or whose script has ended."""
        return self._tallies.ended == self.world_size

    @property
    def any_finished(self) -> bool:
        """A script has ended."""
        return self._tallies.finished > 0

    def number(self, status: Status) -> int:
        """How many ranks are held by a process with `status`."""
        return self._tallies.by_status[status]

    def complete(self) -> bool:
        """Every rank is held by a process that is not doomed."""
        return not self._vacant and not self.number(Status.DOOMED)

    def all_are(self, status: Status) -> bool:
        """Every rank is held by a process with `status`."""
        return self.number(status) == self.world_size

    # ------------------------------------------------------------------ deadlines

    @property
    def next_deadline_s(self) -> float | None:
        """The earliest deadline of a member; None when nobody has one."""
        heap = self._deadlines
        while heap:
            deadline_s, rank, incarnation = heap[0]
            member = self.current(rank, incarnation)
            if member is not None and member._deadline_s == deadline_s:
                return deadline_s
            heapq.heappop(heap)
        return None

    def late(self, now_s: float) -> list[Member]:
        """Those whose deadline has passed, by rank. Each is named once, and is awaited no more:
        whoever asks gives it another deadline."""
        found: dict[int, Member] = {}
        while (deadline_s := self.next_deadline_s) is not None and deadline_s <= now_s:
            _, rank, incarnation = heapq.heappop(self._deadlines)
            member = self.current(rank, incarnation)
            assert member is not None
            member._deadline_s = None
            found[rank] = member
        return [found[rank] for rank in sorted(found)]

    # ------------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Assert what must always hold of the table. O(ranks)."""
        again = Tallies()
        for rank, member in enumerate(self._members):
            assert (member is None) == (rank in self._vacant), rank
            if member is None:
                continue
            again.count(member, 1)
            assert member.rank == rank
            assert member.incarnation == self._last_incarnation[rank]
            assert (member.holding is not None) == (member.status is Status.PARKED), member
            assert member.doom is None or member.doomed, member
        again.held_version = self._tallies.held_version
        for name, tally in vars(again).items():
            kept = vars(self._tallies)[name]
            assert kept == tally, f"the tally {name} is {kept}, and should be {tally}"
        deadlines = [m.deadline_s for m in self.members() if m.deadline_s is not None]
        assert self.next_deadline_s == min(deadlines, default=None)
