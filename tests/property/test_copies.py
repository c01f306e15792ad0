"""The table of copies under any order of steps, stops, losses and returns: whatever it counts is of
the steps that were gone on from, and lies where it says."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from everstep.core.copies import CopyTable
from everstep.types import HeldCopy, Stamp

RANKS = range(3)


class Copies(RuleBasedStateMachine):
    """Three slots in a ring, each with a rank; slot s is kept by the next. A node's memory is never
    emptied by itself here, so it has all that was ever made there. `made_in`: by step that counts,
    in which generation it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.table = CopyTable()
        self.generation = 0
        self.step = 0
        self.made_in: dict[int, int] = {}
        self.memory: dict[int, set[HeldCopy]] = {node: set() for node in RANKS}  # by living node
        self.left: list[set[HeldCopy]] = []  # the memories of lost ones
        self.slots: list[int | None] = list(RANKS)
        self.next_node = len(RANKS)
        self.running = True
        self.assign()

    def assign(self) -> None:
        nodes = [node for node in self.slots if node is not None]
        assert len(nodes) == len(RANKS)
        keepers = {rank: nodes[(rank + 1) % len(RANKS)] for rank in RANKS}
        self.keepers, self.homes = keepers, dict(enumerate(nodes))
        self.table.assign(frozenset(RANKS), keepers, self.homes)

    @property
    def whole(self) -> bool:
        return None not in self.slots

    @precondition(lambda self: self.running)
    @rule(told=st.lists(st.booleans(), min_size=6, max_size=6), commits=st.booleans())
    def make_a_step(self, told: list[bool], commits: bool) -> None:
        """It commits if all copies are where they belong, unless something stops it."""
        stamp = Stamp(generation=self.generation, digest=f"step {self.step + 1}")
        for rank in RANKS:
            for number, node in enumerate((self.homes[rank], self.keepers[rank])):
                if commits or told[2 * rank + number]:
                    copy = HeldCopy(rank=rank, step=self.step + 1, stamp=stamp)
                    self.memory[node].add(copy)
                    self.table.kept(rank, copy.step, node, stamp)
        self.running = commits
        if commits:
            self.step += 1
            self.made_in[self.step] = self.generation
            self.table.settle(self.step)

    @precondition(lambda self: any(node is not None for node in self.slots))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([s for s, n in enumerate(self.slots) if n is not None]))
        node = self.slots[slot]
        assert node is not None
        self.slots[slot], self.running = None, False
        self.left.append(self.memory.pop(node))
        self.table.lose(node, f"h{len(self.left) % 2}")

    @precondition(lambda self: not self.whole)
    @rule(data=st.data())
    def come(self, data: st.DataObject) -> None:
        """A node comes, perhaps where another was lost, at any time; it finds what was left."""
        found = data.draw(st.sampled_from([set[HeldCopy](), *self.left]))
        node, self.next_node = self.next_node, self.next_node + 1
        self.slots[self.slots.index(None)] = node
        ordered = sorted(found, key=lambda copy: (copy.rank, copy.step, copy.stamp.generation))
        self.memory[node] = set(
            self.table.regain(node, data.draw(st.sampled_from(["h0", "h1"])), ordered)
        )

    @precondition(lambda self: self.whole and self.step > 0)
    @rule(back=st.integers(0, 2))
    def regroup(self, back: int) -> None:
        self.step = max(1, self.step - back)
        self.generation += 1
        self.made_in = {step: made for step, made in self.made_in.items() if step <= self.step}
        self.running = True
        self.table.regroup(self.step)
        self.assign()

    @invariant()
    def what_counts_is_there_and_was_not_done_again(self) -> None:
        for rank in RANKS:
            for step in self.table.steps(rank):
                expected = self.made_in.get(step, self.generation)  # or is under way
                for node in self.table.nodes(rank, step):
                    stamp = Stamp(generation=expected, digest=f"step {step}")
                    assert HeldCopy(rank=rank, step=step, stamp=stamp) in self.memory[node]

    @invariant()
    def what_is_hoped_for_was_there(self) -> None:
        hoped = self.table.by_shard({rank: str(rank) for rank in RANKS}, lost=True)
        for shard, steps in hoped.items():
            for step in steps - set(self.table.steps(int(shard))):
                stamp = Stamp(
                    generation=self.made_in.get(step, self.generation), digest=f"step {step}"
                )
                copy = HeldCopy(rank=int(shard), step=step, stamp=stamp)
                assert any(copy in memory for memory in self.left)


TestCopies = Copies.TestCase
TestCopies.settings = settings(max_examples=100, stateful_step_count=40)
