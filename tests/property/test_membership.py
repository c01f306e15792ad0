"""The table of members against a list of everything that ever happened, and its tallies against
a look at every row."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from everstep.core.membership import Member, Membership, Status
from everstep.types import Holding

WORLD = 3
ranks = st.integers(0, WORLD - 1)
statuses = st.sampled_from([s for s in Status if s not in (Status.DOOMED, Status.PARKED)])
deadlines = st.none() | st.integers(0, 3)
holdings = st.builds(Holding, committed=st.integers(0, 1), torn=st.booleans())


class AgainstHistory(RuleBasedStateMachine):
    """The model keeps only the history: ("spawn" | "death" | "doom", rank, incarnation)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Membership(WORLD)
        self.history: list[tuple[str, int, int]] = []
        self.generations = [0]

    def spawned(self, rank: int) -> list[int]:
        return [i for what, r, i in self.history if what == "spawn" and r == rank]

    def holder(self, rank: int) -> int | None:
        spawned = self.spawned(rank)
        gone = bool(spawned) and ("death", rank, spawned[-1]) in self.history
        return spawned[-1] if spawned and not gone else None

    @rule(rank=ranks, joining=st.booleans())
    def spawn(self, rank: int, joining: bool) -> None:
        if self.holder(rank) is not None:
            with pytest.raises(ValueError, match=f"rank {rank} is still held by incarnation"):
                self.table.spawn(rank, joining=joining)
            return
        member = self.table.spawn(rank, joining=joining)
        assert member.incarnation not in self.spawned(rank)
        assert member.incarnation > max(self.spawned(rank), default=0)
        fresh = Member(rank=rank, incarnation=member.incarnation, _joining=joining)
        assert member == fresh
        self.history.append(("spawn", rank, member.incarnation))

    @rule(rank=st.integers(-1, WORLD), incarnation=st.integers(0, 6))
    def death_notice(self, rank: int, incarnation: int) -> None:
        right = 0 <= rank < WORLD and self.holder(rank) == incarnation
        before = [m.identity for m in self.table.members()]
        gone = self.table.died(rank, incarnation)
        if right:
            assert gone is not None
            assert gone.identity == (rank, incarnation)
            self.history.append(("death", rank, incarnation))
        else:
            assert gone is None
            assert [m.identity for m in self.table.members()] == before

    @rule(rank=ranks)
    def doom(self, rank: int) -> None:
        member = self.table.holder(rank)
        if member is not None:
            self.table.move(member, Status.DOOMED)
            self.history.append(("doom", rank, member.incarnation))

    def living(self, rank: int) -> Member | None:
        member = self.table.holder(rank)
        return None if member is None or member.doomed else member

    @rule(rank=ranks, status=statuses, deadline_s=deadlines)
    def move(self, rank: int, status: Status, deadline_s: float | None) -> None:
        if member := self.living(rank):
            self.table.move(member, status, deadline_s=deadline_s)
            assert (member.status, member.deadline_s) == (status, deadline_s)

    @rule(rank=ranks, status=statuses)
    def proceed(self, rank: int, status: Status) -> None:
        if member := self.living(rank):
            before_s = member.deadline_s
            self.table.proceed(member, status)
            assert (member.status, member.deadline_s) == (status, before_s)

    @rule(rank=ranks, holding=holdings)
    def park(self, rank: int, holding: Holding) -> None:
        if member := self.living(rank):
            self.table.park(member, holding)
            assert (member.holding, member.deadline_s) == (holding, None)

    @rule(rank=ranks, step=st.none() | st.integers(0, 2))
    def leave(self, rank: int, step: int | None) -> None:
        if member := self.living(rank):
            self.table.leave(member, step)

    @rule(rank=ranks)
    def finish(self, rank: int) -> None:
        if member := self.living(rank):
            self.table.finish(member)

    @rule(closed=st.booleans())
    def admit(self, closed: bool) -> None:
        if self.table.all_are(Status.PARKED):
            self.table.admit(closed=closed)
            assert self.table.all_are(Status.REGROUPING)
            assert len(self.table.survivors()) == WORLD

    @rule(now_s=st.integers(0, 4))
    def time_passes(self, now_s: int) -> None:
        due = [m for m in self.table.members() if m.deadline_s is not None]
        late = [m.identity for m in due if m.deadline_s is not None and m.deadline_s <= now_s]
        assert [m.identity for m in self.table.late(now_s)] == late
        assert self.table.late(now_s) == []

    @rule()
    def advance(self) -> None:
        self.generations.append(self.table.advance())

    @invariant()
    def agrees(self) -> None:
        self.table.validate()
        held = [(r, i) for r in range(WORLD) if (i := self.holder(r)) is not None]
        assert [member.identity for member in self.table.members()] == held
        doomed = [pair for pair in held if ("doom", *pair) in self.history]
        assert self.table.complete() == (len(held) == WORLD and not doomed)
        survivors = [member.identity for member in self.table.survivors()]
        assert set(survivors) <= set(held) - set(doomed)
        assert all(not m.joining for m in self.table.survivors())
        everybody = list(self.table.members())
        parked = [m.holding for m in self.table.survivors() if m.holding is not None]
        assert self.table.any_survivor == bool(survivors)
        assert self.table.survivors_parked == (len(parked) == len(survivors))
        assert set(self.table.held) == set(parked)
        assert set(self.table.left_at) == {m.left_at for m in everybody} - {None}
        assert self.table.any_finished == any(m.finished for m in everybody)
        assert self.table.all_finished == (sum(m.finished for m in everybody) == WORLD)
        ended = [m for m in everybody if m.finished or m.closing]
        assert self.table.all_ended == (len(ended) == WORLD)
        assert self.table.vacant() == [r for r in range(WORLD) if self.holder(r) is None]
        waiting = [m for m in everybody if m.status is Status.WAITING]
        assert self.table.waiting() == waiting
        for status in Status:
            assert self.table.number(status) == sum(m.status is status for m in everybody)
        assert self.generations == sorted(set(self.generations))
        assert self.table.generation == self.generations[-1]
        for rank in range(WORLD):
            for incarnation in range(8):
                found = self.table.current(rank, incarnation)
                assert (found is not None) == ((rank, incarnation) in held)


AgainstHistory.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestAgainstHistory = AgainstHistory.TestCase


def test_a_job_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        Membership(0)
