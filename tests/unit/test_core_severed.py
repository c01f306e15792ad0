"""Nodes that don't reach each other, event by event."""

from __future__ import annotations

import pytest
from tests.unit.core_driver import broken, killed
from tests.unit.test_core_nodes import OnNodes

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.types import Cause, CauseKind

HOW = "10.0.0.2 -> 10.0.0.3:29403: no connection (timed out)"
PAIR = f"node 1 (host h1) and node 2 (host h2) do not reach each other ({HOW})"


class Severed(OnNodes):
    """Three nodes of two ranks, and spares."""

    def __init__(self, spares: int = 1, shards: int = 1, **policy: object) -> None:
        super().__init__(nnodes=3, spares=spares, shards=shards, **policy)
        self.at(4)

    def regroup_fails(self) -> do.Probe:
        """A collective breaks, and the ranks come together in vain."""
        if self.coordinator.phase == "running":
            self.fault(0, 5, broken())
            assert not self.got(do.Probe)
            self.parks(*self.ranks)
        assert self.coordinator.phase == "regrouping"
        self.fault(2, 5, broken())
        return self.one(do.Probe)

    def answer_closed_then_wait(self) -> None:
        """Nodes 1 and 2 do not reach each other, and there is nobody else."""
        probe = self.regroup_fails()
        self.parks(*self.ranks)
        self.answer(probe, by2={1: HOW})
        assert self.journal("node_awaited")

    def answer(self, probe: do.Probe, **closed: dict[int, str]) -> None:
        for node in sorted({asker for asker, _ in probe.pairs}):
            found = closed.get(f"by{node}", {})
            self.tell(ev.Probed(node=node, turn=probe.turn, closed=found))


def test_one_of_a_closed_pair_is_replaced_and_the_pair_is_named() -> None:
    d = Severed()
    probe = d.regroup_fails()
    assert set(probe.pairs) == {(a, b) for a in range(3) for b in range(3) if a != b}
    d.parks(*d.ranks)
    assert d.coordinator.phase == "stopping"
    d.answer(probe, by1={2: HOW})
    assert d.one(do.Dismiss).node == 2
    assert [(spawn.rank, spawn.node) for spawn in d.got(do.Spawn)] == [(4, 3), (5, 3)]
    for rank in (4, 5):
        d.start(rank)
        d.protect(rank)
        d.tell(ev.Waiting(**d.who(rank)))
    d.tell(ev.Reclaimed(node=0, turn=d.got(do.Reclaim, everything=True)[-1].turn))
    d.tell(ev.Reclaimed(node=1, turn=d.got(do.Reclaim, everything=True)[-1].turn))
    d.tell(ev.Reclaimed(node=3, turn=d.got(do.Reclaim, everything=True)[-1].turn))
    for rank in (4, 5):
        d.park(rank, 0, torn=True)
    d.regroup()
    d.run_to(5, first=5)
    (closed,) = d.journal("incident_closed")
    assert (closed["rung"], closed["steps_lost"]) == ("replace", 0)
    cause = d.journal("incident_cause")[-1]["cause"]
    assert cause["kind"] == CauseKind.NODE
    assert cause["text"] == f"node 2 (host h2) was lost, and ranks 4, 5 with it: {PAIR}"


def test_where_all_is_open_the_ranks_regroup() -> None:
    d = Severed()
    probe = d.regroup_fails()
    d.parks(*d.ranks)
    generation = d.generation
    d.answer(probe)
    assert d.coordinator.phase == "regrouping"
    assert d.generation == generation + 1
    assert not d.journal("node_lost")


def test_a_regroup_that_is_late_is_looked_into_as_well() -> None:
    d = Severed(regroup_timeout_s=60.0)
    d.fault(0, 5, broken())
    d.parks(*d.ranks)
    d.wait(60.0)
    assert d.got(do.Probe)


def test_one_who_does_not_answer_is_neither_waited_for_long_nor_accused() -> None:
    d = Severed()
    probe = d.regroup_fails()
    d.parks(*d.ranks)
    d.tell(ev.Probed(node=0, turn=probe.turn, closed={2: HOW}))
    d.tell(ev.Probed(node=1, turn=probe.turn, closed={2: HOW}))
    assert d.coordinator.phase == "stopping"
    d.wait(probe.within_s + 2.0)
    assert d.coordinator.phase == "regrouping"
    assert not d.journal("node_lost")


def test_a_loss_or_a_death_explains_the_failure_and_nothing_is_waited_for() -> None:
    d = Severed()
    probe = d.regroup_fails()
    d.parks(*d.ranks)
    d.tell(ev.Probed(node=0, turn=probe.turn, closed={1: HOW}))
    d.lose(2)
    assert [record["node"] for record in d.journal("node_lost")] == [2]
    assert not d.coordinator.next_deadline_s or d.coordinator.next_deadline_s > d.now_s + 60
    d.tell(ev.Probed(node=1, turn=probe.turn, closed={0: HOW}))
    assert len(d.journal("node_lost")) == 1

    d = Severed()
    probe = d.regroup_fails()
    d.parks(*d.ranks[1:])
    d.die(0, killed())
    d.answer(probe, by1={2: HOW})
    d.join(0)
    assert d.coordinator.phase == "regrouping"
    assert not d.journal("node_lost")


def test_a_loss_does_not_end_the_wait_for_a_pair_that_is_known_to_be_closed() -> None:
    d = Severed(spares=0)
    d.answer_closed_then_wait()
    d.lose(0)
    d.node_joins(8)
    d.wait(3.0)
    d.answer(d.one(do.Probe), by2={1: HOW})
    assert d.coordinator.phase == "stopping"
    assert [record["node"] for record in d.journal("node_lost")] == [0]


def test_answers_of_an_earlier_turn_and_of_strangers_say_nothing() -> None:
    d = Severed()
    first = d.regroup_fails()
    d.parks(*d.ranks)
    d.answer(first)
    second = d.regroup_fails()
    assert second.turn > first.turn
    d.parks(*d.ranks)
    d.answer(first, by1={2: HOW}, by2={1: HOW})
    d.tell(ev.Probed(node=3, turn=second.turn, closed={0: HOW}))
    assert d.coordinator.phase == "stopping"
    d.answer(second)
    assert d.coordinator.phase == "regrouping"


def test_a_failure_with_a_death_in_it_is_no_question_of_who_reaches_whom() -> None:
    d = Severed()
    d.fault(0, 5, broken())
    d.parks(*d.ranks)
    d.die(2, killed())
    assert not d.got(do.Probe, everything=True)


def test_without_a_spare_the_ranks_wait_until_the_way_opens() -> None:
    d = Severed(spares=0, spare_wait_s=300.0)
    probe = d.regroup_fails()
    d.parks(*d.ranks)
    d.answer(probe, by2={1: HOW})
    assert d.journal("incident_cause")[-1]["cause"]["text"] == PAIR
    assert d.journal("node_awaited")[-1]["ranks"] == [2, 3, 4, 5]
    for _ in range(20):
        d.wait(3.0)
        d.answer(d.one(do.Probe), by2={1: HOW})
    assert len(d.journal("incident_cause")) == 2
    assert d.coordinator.phase == "stopping"
    d.wait(3.0)
    d.answer(d.one(do.Probe))
    assert d.coordinator.phase == "regrouping"
    d.regroup()
    d.run_to(5, first=5)
    assert d.journal("incident_closed")[0]["rung"] == "retry"
    assert not d.journal("node_lost")


def test_a_spare_that_comes_takes_the_place_of_one() -> None:
    d = Severed(spares=0, spare_wait_s=300.0)
    probe = d.regroup_fails()
    d.parks(*d.ranks)
    d.answer(probe, by2={1: HOW})
    d.node_joins(7)
    d.wait(3.0)
    d.answer(d.one(do.Probe), by2={1: HOW})
    assert [record["node"] for record in d.journal("node_lost")] == [2]
    assert d.journal("node_replaced")[0]["node"] == 7


@pytest.mark.parametrize("wait_s", [0.0, 10.0])
def test_the_wait_ends_with_the_pair_s_name(wait_s: float) -> None:
    d = Severed(spares=0, spare_wait_s=wait_s)
    probe = d.regroup_fails()
    d.parks(*d.ranks)
    d.answer(probe, by1={2: HOW}, by2={1: HOW})
    end_s = d.now_s + 2 * wait_s
    while d.coordinator.phase != "ended":
        assert d.now_s <= end_s
        d.wait(1.0)
        for again in d.got(do.Probe):
            d.answer(again, by1={2: HOW})
    assert d.ended.text.startswith(PAIR)
    assert "--spare-wait" in d.ended.text
    assert d.ended.cause is not None
    assert d.ended.cause.text == PAIR


def test_who_holds_no_state_yet_goes_first() -> None:
    """A replacement that has not fetched is worth less than who it was to fetch from."""
    d = Severed(spares=2)
    d.lose(0)
    d.parks(2, 3, 4, 5)
    for rank in (0, 1):
        d.join(rank)
    d.fault(2, 5, broken())
    probe = d.one(do.Probe)
    for rank in d.ranks:
        d.park(rank, 4 if rank > 1 else 0, torn=rank < 2)
    d.answer(probe, by1={3: HOW})
    assert [record["node"] for record in d.journal("node_lost")] == [0, 3]


def test_a_hang_that_is_found_meanwhile_explains_the_failure() -> None:
    d = Severed()
    probe = d.regroup_fails()
    d.parks(*d.ranks)
    d.fault(0, 5, Cause(kind=CauseKind.WORKER, text="it can't go on"))
    d.answer(probe, by1={2: HOW})
    assert not d.journal("node_lost")


def test_who_alone_holds_a_shard_stays() -> None:
    """Node 1 holds what nobody else has, and node 2 goes; with both alone, neither does."""
    d = OnNodes(nnodes=3, spares=1)
    d.gather()
    for rank in d.ranks:
        d.start(rank)
    shard_of = {0: "a", 1: "a", 2: "a", 3: "a", 4: "b", 5: "b"}  # node 2 alone has b
    for rank in d.ranks:
        d.tell(ev.Protected(**d.who(rank), shard=shard_of[rank], manifest="m", digests={"w": "1"}))
    d.run_to(4)
    d.fault(0, 5, broken())
    for rank in d.ranks:
        d.park(rank, 4, shard=shard_of[rank])
    d.fault(0, 5, broken())
    probe = d.one(do.Probe)
    for rank in d.ranks:
        d.park(rank, 4, shard=shard_of[rank])
    for node in range(3):
        closed = {1: HOW} if node == 2 else {}
        d.tell(ev.Probed(node=node, turn=probe.turn, closed=closed))
    assert [record["node"] for record in d.journal("node_lost")] == [1]
