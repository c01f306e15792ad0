"""Steps that don't wait for their copies: whatever comes late, and whichever node is lost, there is
a step of which every rank has a copy."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from everstep.worker.schedule import AREAS, Schedule, most_behind


@dataclass
class Rank:
    """One rank, alone on its node. `here`: the steps of which it has copies; `away`: of those,
    which are with its keeper, the next rank's node; `told`: which it knows to be."""

    schedule: Schedule
    here: set[int] = field(default_factory=set)
    away: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)


class Job(RuleBasedStateMachine):
    """Three ranks. A rank that is refused room, for once, makes no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.every = 1
        self.ranks: list[Rank] = []
        self.step = 0
        self.first: int | None = None  # the first step that all have copied
        self.refusing: set[int] = set()
        self.refused = False

    @precondition(lambda self: not self.ranks)
    @rule(every=st.integers(1, 3))
    def begin(self, every: int) -> None:
        self.every = every
        self.ranks = [Rank(Schedule(every)) for _ in range(3)]

    @precondition(lambda self: self.ranks)
    @rule(number=st.integers(0, 2))
    def refuse(self, number: int) -> None:
        """The rank makes no copy of the next step."""
        self.refusing, self.refused = {number}, True

    @precondition(lambda self: self.ranks)
    @rule(steps=st.integers(1, 4), prompt=st.booleans())
    def run_steps(self, steps: int, prompt: bool) -> None:
        for _ in range(steps):
            self.run_a_step(prompt)
            self.every_loss_is_survived()

    def run_a_step(self, prompt: bool) -> None:
        """`prompt`: all copies have come, and that is known."""
        for rank in self.ranks if prompt else ():
            rank.away |= rank.here
            self.tell(rank)
        waits = [rank.schedule.must_wait(self.step + 1) for rank in self.ranks]
        for rank, older in zip(self.ranks, waits, strict=True):
            if older is not None:
                assert older in rank.here
                rank.away.add(older)
                self.tell(rank)
        self.step += 1
        wanted = {rank.schedule.wants(self.step) for rank in self.ranks}
        assert len(wanted) == 1, "all know the same"
        for number, rank in enumerate(self.ranks):
            if wanted == {True} and number not in self.refusing:
                rank.here &= set(rank.schedule.steps)
                assert len(rank.here) < AREAS
                rank.away &= rank.here  # its keeper gives the same to the next copy
                rank.here.add(self.step)
                rank.schedule.made(self.step)
                if not rank.schedule.steps:
                    rank.away.add(self.step)
                    self.tell(rank)
        self.refusing = set()
        said = [rank.schedule.says(self.step) for rank in self.ranks]
        for rank in self.ranks:
            rank.schedule.agree(self.step, min(made for made, _ in said), min(s for _, s in said))
        if self.first is None and all(made for made, _ in said):
            self.first = self.step

    @precondition(lambda self: self.ranks)
    @rule(number=st.integers(0, 2), data=st.data())
    def a_copy_comes(self, number: int, data: st.DataObject) -> None:
        rank = self.ranks[number]
        if rank.here:
            rank.away.add(min(rank.here - rank.away, default=max(rank.here)))

    @precondition(lambda self: self.ranks)
    @rule(number=st.integers(0, 2))
    def it_is_told(self, number: int) -> None:
        self.tell(self.ranks[number])

    def tell(self, rank: Rank) -> None:
        for step in rank.away - rank.told:
            rank.schedule.settled(step)
        rank.told |= rank.away

    @precondition(lambda self: self.first is not None)
    @rule(lost=st.integers(0, 2))
    def lose_a_node(self, lost: int) -> None:
        """All go back; the node's ranks have their copies from the keeper."""
        left = self.left(lost)
        self.step = max(left)
        kept = tuple(sorted(left))[-2:]
        for number, rank in enumerate(self.ranks):
            rank.here &= set(kept)
            rank.away &= set(kept)
            if number == lost:
                rank.here = set(rank.away)
                rank.away = set()
            if (number + 1) % 3 == lost:  # what it kept is gone, and copied again
                rank.away = set()
            rank.told = set()
        whole = [s for s in kept if all(s in rank.here for rank in self.ranks)]
        for rank in self.ranks:
            rank.schedule.resume(tuple(whole))
            rank.away |= set(whole)  # one more loss before that is not survived
        self.first = self.step

    def left(self, lost: int) -> set[int]:
        """The steps of which there is a copy of every rank when node `lost` is gone."""
        found = [r.away if number == lost else r.here for number, r in enumerate(self.ranks)]
        return set.intersection(*found)

    @invariant()
    def every_loss_is_survived(self) -> None:
        assert len({rank.schedule.steps for rank in self.ranks}) <= 1, "all know the same"
        for lost in range(3) if self.first is not None else ():
            assert self.left(lost), (lost, self.ranks)
            assert self.refused or max(self.left(lost)) >= self.step - most_behind(self.every)


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=100, stateful_step_count=40)
