"""The table of members against a list of everything that ever happened."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from everstep.core.membership import Member, Membership, Status

WORLD = 3
ranks = st.integers(0, WORLD - 1)


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
        assert (member.status, member.joining) == (Status.STARTING, joining)
        fresh = Member(rank=rank, incarnation=member.incarnation, joining=joining)
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
            member.status = Status.DOOMED
            self.history.append(("doom", rank, member.incarnation))

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
