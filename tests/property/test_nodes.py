"""The table of nodes against a list of everything that ever happened."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from everstep.core.ladder import Policy
from everstep.core.nodes import Layout, Nodes

SLOTS, RANKS = 3, 2
WINDOW_S, MOST = 10.0, 2
numbers = st.integers(0, 9)
hosts = st.sampled_from(["a", "b", "c"])
domains = st.sampled_from(["", "r1", "r2"])


class AgainstHistory(RuleBasedStateMachine):
    """The model keeps each node's host and domain, who is lost, which slot was given to whom, and
    when a host lost a node."""

    def __init__(self) -> None:
        super().__init__()
        policy = Policy(max_node_failures=MOST, incident_window_s=WINDOW_S)
        self.table = Nodes(Layout(nproc_per_node=RANKS, nnodes=SLOTS), policy)
        self.came: dict[int, tuple[str, str]] = {}
        self.lost: list[tuple[int, str, float]] = []
        self.given: list[tuple[int, int]] = []
        self.now_s = 0.0

    # ---------------------------------------------------------------- the model

    def living(self) -> set[int]:
        return self.came.keys() - {number for number, _, _ in self.lost}

    def holders(self) -> dict[int, int]:
        newest = dict(self.given)
        return {slot: number for slot, number in newest.items() if number in self.living()}

    def spares(self) -> set[int]:
        return self.living() - set(self.holders().values())

    def aside(self, host: str) -> bool:
        recent = [t for _, h, t in self.lost if h == host and t > self.now_s - WINDOW_S]
        return len(recent) >= MOST

    # ---------------------------------------------------------------- what happens

    @rule(number=numbers, host=hosts, domain=domains)
    def joins(self, number: int, host: str, domain: str) -> None:
        node = self.table.join(number, host, domain)
        assert (node is None) == (number in self.came)
        if node is not None:
            assert (node.domain, node.slot) == (domain or host, None)
            self.came[number] = host, domain or host

    @rule(number=numbers)
    def is_lost(self, number: int) -> None:
        node = self.table.get(number)
        assert (node is not None) == (number in self.living())
        if node is not None:
            host, _ = self.came[number]
            losses = self.table.lose(node, self.now_s)
            self.lost.append((number, host, self.now_s))
            recent = [t for _, h, t in self.lost if h == host and t > self.now_s - WINDOW_S]
            assert losses == len(recent)
        assert self.table.is_lost(number) == (number in {n for n, _, _ in self.lost})

    @rule(avoid=st.sets(st.sampled_from(["a", "b", "c", "r1", "r2"])))
    def a_slot_is_given_to_the_preferred(self, avoid: set[str]) -> None:
        ordered = self.table.preferred(avoid, self.now_s)
        assert {node.number for node in ordered} == self.spares()
        costs = [(self.aside(n.host), n.domain in avoid, n.number) for n in ordered]
        assert costs == sorted(costs)
        for slot in self.table.empty()[:1]:
            for node in ordered[:1]:
                self.table.give(slot, node)
                self.given.append((slot, node.number))

    @rule(slot=st.integers(0, SLOTS - 1), number=numbers)
    def what_is_held_is_not_given_away(self, slot: int, number: int) -> None:
        node = self.table.get(number)
        if node is not None and (slot in self.holders() or number not in self.spares()):
            with pytest.raises(ValueError, match="can't be given"):
                self.table.give(slot, node)

    @rule(seconds=st.integers(1, 6))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @invariant()
    def agrees(self) -> None:
        self.table.validate()
        holders = self.holders()
        assert [node.number for node in self.table.living] == sorted(self.living())
        assert {node.number for node in self.table.spares} == self.spares()
        assert self.table.empty() == [slot for slot in range(SLOTS) if slot not in holders]
        assert self.table.any_empty == (len(holders) < SLOTS)
        for rank in range(SLOTS * RANKS):
            node = self.table.holder(rank)
            assert (node and node.number) == holders.get(rank // RANKS)
        newest = dict(self.given)
        for slot in self.table.empty():
            last = self.table.last_holder(slot)
            assert (last and last.number) == newest.get(slot)
        for host in ("a", "b", "c"):
            assert self.table.offenders.aside(host, self.now_s) == self.aside(host)


AgainstHistory.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestAgainstHistory = AgainstHistory.TestCase
