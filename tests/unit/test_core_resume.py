"""A coordinator that takes over a job that runs, event by event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core_driver import broken, killed, raised
from tests.unit.test_core_nodes import CLOSED, OnNodes

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.goodput import fold
from everstep.core.ladder import Incident
from everstep.core.past import recall
from everstep.types import TERM_STRIDE, Cause, CauseKind, Holding, StateFrom

FIRST = TERM_STRIDE  # what the coordinator of term 1 numbers anew begins here
HOLDERS = {slot: ev.Holder(node=slot, host=f"h{slot}") for slot in range(2)}


class Resuming(OnNodes):
    """A coordinator of term 1 over two nodes of two ranks, which were in generation 3 when the last
    one went, and had committed step 7."""

    def __init__(self, nnodes: int = 2, spares: int = 0, shards: int = 1, **policy: Any) -> None:
        limits = {"rejoin_timeout_s": 10.0, "silence_timeout_s": 300.0} | policy
        super().__init__(nnodes, spares, shards, **limits)
        self.incarnations = [1] * self.world_size

    def resume(self, recorded: int = 7, **more: Any) -> Resuming:
        self.tell(ev.Resumed(term=1, recorded=recorded, **{"holders": HOLDERS, **more}))
        return self

    def member(self, rank: int, **more: Any) -> ev.MemberBack:
        known: dict[str, Any] = {"generation": 3, "joining": False, "settled": True}
        known |= {"position": (7, 0)} | more
        return ev.MemberBack(rank=rank, incarnation=self.incarnations[rank], **known)

    def said(self, rank: int) -> ev.Protected:
        shard = f"s{rank % self.shards}" if self.shards > 1 else "all"
        return ev.Protected(
            rank=rank, incarnation=1, shard=shard, manifest="m", digests={"w": "ab" * 8}
        )

    def back(self, node: int, slot: int | None = None, **more: Any) -> list[do.Action]:
        """Node `node` comes back with all its ranks, if nothing else is said."""
        slot = node if slot is None else slot
        ranks = self.layout.ranks_of(slot)
        known: dict[str, Any] = {
            "members": tuple(self.member(rank) for rank in ranks),
            "protected": tuple(self.said(rank) for rank in ranks),
            "peers": (0, 1),
        }
        return self.tell(
            ev.NodeBack(node=node, host=f"h{node}", domain="", slot=slot, **(known | more))
        )

    def spare_back(self, node: int) -> None:
        self.tell(ev.NodeBack(node=node, host=f"h{node}", domain="", slot=None))

    @property
    def due_s(self) -> float:
        return self.coordinator.next_deadline_s or 0.0

    @property
    def resumed(self) -> dict[str, Any]:
        (line,) = self.journal("coordinator_resumed")
        return line


# -------------------------------------------------------------------- nothing was wrong


def test_where_all_have_gone_on_nobody_is_disturbed() -> None:
    d = Resuming().resume()
    assert d.coordinator.reconvenes
    assert d.due_s == 400.0  # until somebody has come
    assert d.back(1) == []
    assert d.due_s == 110.0
    d.back(0)
    assert [type(action) for action in d.last] == [do.Record]
    assert d.resumed == {
        "term": 1,
        "generation": 3,
        "nodes": [0, 1],
        "missing": [],
        "undisturbed": True,
        "text": "the coordinator is back (term 1): all ranks have gone on without it",
    }
    assert (d.coordinator.phase, d.generation) == ("running", 3)
    assert not d.due_s
    d.run_to(8, first=8)
    assert d.journal("step") == [{"step": 8, "generation": 3}]


def test_steps_that_were_made_meanwhile_are_written_down() -> None:
    d = Resuming().resume(recorded=5)
    d.back(0)
    d.back(1, members=(d.member(2, position=(8, 0)), d.member(3)))
    assert [line["step"] for line in d.journal("step")] == [6, 7]
    d.commit(0, 8)
    d.commit(1, 8)
    d.commit(3, 8)
    assert [line["step"] for line in d.journal("step")] == [6, 7, 8]


def test_a_spare_that_comes_late_is_taken_in_as_it_is() -> None:
    d = Resuming(spares=1).resume()
    d.back(0)
    d.back(1)
    assert d.resumed["undisturbed"]
    d.spare_back(2)
    assert not [action for action in d.last if isinstance(action, do.Dismiss)]
    d.tell(ev.NodeLost(node=1, cause=CLOSED))
    for rank in (0, 1):
        d.tell(ev.Parked(**d.who(rank), generation=3, holding=Holding(committed=7)))
    assert 2 in {action.node for action in d.got(do.Spawn, everything=True)}


def test_who_held_a_slot_and_comes_late_is_sent_away() -> None:
    d = Resuming().resume()
    d.back(0)
    d.back(1)
    d.back(7, slot=1)
    assert [action.node for action in d.last if isinstance(action, do.Dismiss)] == [7]


def test_who_was_stopped_is_not_found_running_whatever_it_restores() -> None:
    d = Resuming().resume()
    stopped = d.member(1, settled=False, stopped=True)
    d.back(0, members=(d.member(0), stopped))
    d.tell(ev.Restored(**d.who(1), generation=3, ok=True))
    d.back(1)
    assert not d.resumed["undisturbed"]


def test_who_parks_after_it_was_reported_is_not_found_running() -> None:
    d = Resuming().resume()
    d.back(0)
    d.tell(ev.Parked(**d.who(1), generation=3, holding=Holding(committed=7)))
    d.back(1)
    assert not d.resumed["undisturbed"]


def test_who_parks_once_all_are_found_running_stops_them() -> None:
    d = Resuming().resume()
    d.back(0)
    d.back(1)
    assert d.resumed["undisturbed"]
    d.tell(ev.Parked(**d.who(1), generation=3, holding=Holding(committed=7)))
    (stop,) = [action for action in d.last if isinstance(action, do.SendStop)]
    assert stop.generation == 3
    for rank in (0, 2, 3):
        d.tell(ev.Parked(**d.who(rank), generation=3, holding=Holding(committed=7)))
    assert any(isinstance(action, do.SendRegroup) for action in d.last)


def test_a_stop_that_is_asked_for_waits_for_those_who_must_be_told() -> None:
    d = Resuming().resume()
    d.back(0)
    assert d.tell(ev.StopAsked(signal=2)) == []
    d.back(1)
    (end,) = [action for action in d.last if isinstance(action, do.End)]
    assert end.exit_code == 130


def test_a_second_stop_waits_for_nobody() -> None:
    d = Resuming().resume()
    d.tell(ev.StopAsked(signal=2))
    (end,) = [a for a in d.tell(ev.StopAsked(signal=2)) if isinstance(a, do.End)]
    assert end.exit_code == 130


def test_what_is_said_while_others_are_awaited_counts() -> None:
    d = Resuming().resume()
    d.back(0, members=(d.member(0), d.member(1, settled=False)))
    d.tell(ev.Committed(**d.who(0), generation=3, step=8, at_s=0.0))
    d.tell(ev.Committed(**d.who(1), generation=2, step=9, at_s=0.0))  # of a world it has left
    d.tell(ev.Restored(**d.who(1), generation=3, ok=True))
    d.tell(ev.Closing(**d.who(1), generation=3, step=8))
    d.back(1, members=(d.member(2, position=(8, 0)), d.member(3, position=(8, 0))))
    assert d.resumed["undisturbed"]
    assert [line["step"] for line in d.journal("step")] == [8]


def test_an_incident_that_was_open_is_closed_by_the_next_step() -> None:
    incident = Incident(number=4, rank=2, step=7, cause=CLOSED, replaced=True, decision="so it is")
    d = Resuming().resume(incidents=4, open_incident=incident)
    d.back(0)
    d.back(1)
    d.run_to(8, first=8)
    (closed,) = d.journal("incident_closed")
    assert (closed["incident"], closed["rung"], closed["reason"]) == (4, "replace", "so it is")
    d.die(0)
    assert d.journal("incident_opened")[0]["incident"] == 5


def test_who_was_not_told_that_the_fence_is_open_is_told() -> None:
    d = Resuming().resume()
    d.back(0, members=tuple(d.member(rank, left_at=7, closed=True) for rank in (0, 1)))
    d.back(1, members=(d.member(2, left_at=7), d.member(3, left_at=7, closed=True)))
    assert d.one(do.SendClosed).to == ((2, 1),)
    assert not d.journal("closed")  # it is in the journal
    for rank in d.ranks:
        d.finish(rank)
    assert d.ended.exit_code == 0


def test_the_fence_opens_when_all_have_left_meanwhile() -> None:
    d = Resuming().resume()
    d.back(0, members=tuple(d.member(rank, left_at=7) for rank in (0, 1)))
    d.back(1, members=tuple(d.member(rank, left_at=7) for rank in (2, 3)))
    assert len(d.one(do.SendClosed).to) == 4
    assert d.journal("closed") == [{"step": 7}]


def test_a_job_whose_scripts_may_exit_is_over() -> None:
    d = Resuming().resume()
    d.back(0, members=tuple(d.member(r, left_at=7, finished=True, closed=True) for r in (0, 1)))
    d.back(1, members=tuple(d.member(r, finished=True, bye=r == 3) for r in (2, 3)))
    assert len(d.one(do.SendBye).to) == 4
    assert d.ended.exit_code == 0


def test_a_second_time_it_is_told_nothing_happens() -> None:
    d = Resuming().resume()
    d.back(0)
    assert d.back(0) == []
    d.back(1)
    assert d.back(1) == []
    assert d.coordinator.phase == "running"


# -------------------------------------------------------------------- something was wrong


def test_a_rank_that_died_meanwhile_is_replaced() -> None:
    d = Resuming().resume()
    d.back(0)
    died = ev.Died(rank=3, incarnation=1, cause=killed())
    d.back(1, members=(d.member(2),), ended=(died,))
    assert d.one(do.SendStop) == do.SendStop(generation=FIRST, to=((0, 1), (1, 1), (2, 1)))
    spawn = d.one(do.Spawn)
    assert (spawn.rank, spawn.incarnation, spawn.generation) == (3, FIRST, FIRST)
    assert (spawn.node, spawn.joiner) == (1, True)
    (opened,) = d.journal("incident_opened")
    assert (opened["rank"], opened["incarnation"], opened["step"]) == (3, 1, 8)
    assert opened["cause"]["text"] == "killed by SIGKILL"
    assert not d.resumed["undisturbed"]
    d.parks(0, 1, 2, step=7)
    d.recover(3, step=7)
    (closed,) = d.journal("incident_closed")
    assert (closed["rung"], closed["state_from"], closed["steps_lost"]) == ("respawn", "peer", 0)
    assert d.generation == FIRST + 1


def test_what_was_done_in_the_old_world_counts_until_the_next() -> None:
    d = Resuming(shards=2).resume()
    died = ev.Died(rank=3, incarnation=1, cause=killed())
    d.back(0)
    d.back(1, members=(d.member(2),), ended=(died,))
    d.tell(ev.Committed(**d.who(2), generation=3, step=8, at_s=0.0))
    d.tell(ev.Parked(**d.who(0), generation=3, holding=d.coordinator._job.nothing(0)))
    assert d.coordinator._job.commits[2] == 8
    assert d.coordinator._job.membership.holder(0).holding is None  # type: ignore[union-attr]
    d.fault(1, 8, broken())  # of the new world
    d.tell(ev.Faulted(**d.who(1), generation=3, step=8, cause=raised()))
    assert [line["cause"]["kind"] for line in d.journal("incident_cause")] == ["exception"]


def test_a_node_that_does_not_come_is_lost_and_a_spare_takes_its_place() -> None:
    d = Resuming(spares=1).resume()
    d.back(0)
    d.spare_back(2)
    d.wait(9.0)
    assert d.coordinator.reconvenes
    d.wait(1.0)
    text = (
        "node 1 (host h1) was lost, and ranks 2, 3 with it: it has not come back to the "
        "coordinator within 10 s"
    )
    assert (d.resumed["missing"], d.resumed["nodes"]) == ([1], [0, 2])
    assert d.resumed["text"].startswith(f"the coordinator is back (term 1): {text}")
    assert d.journal("node_lost")[0]["text"] == text
    assert d.journal("incident_opened")[0]["cause"]["kind"] == "node"
    assert {(spawn.rank, spawn.node) for spawn in d.got(do.Spawn)} == {(2, 2), (3, 2)}
    d.parks(0, 1, step=7)
    d.recover(2, 3, step=7)
    (closed,) = d.journal("incident_closed")
    assert closed["reason"] == (
        "node 2 (host h2) takes the place of node 1 (host h1); "
        "ranks 2, 3 take step 7 from ranks 0, 1"
    )
    assert d.back(1) == [do.Dismiss(node=1, why="the job has gone on without it")]


def test_a_node_that_nobody_knows_is_named_by_its_slot() -> None:
    d = Resuming(spares=1).resume(holders={})
    d.back(0)
    d.spare_back(2)
    d.wait(10.0)
    assert d.journal("node_lost")[0]["text"].startswith("the node of slot 1 was lost")


def test_a_node_that_comes_and_is_lost_again() -> None:
    d = Resuming(nnodes=3, spares=1).resume()
    d.back(1)
    assert d.lose(1) == [do.Dismiss(node=1, why="its connection was closed")]
    assert d.back(1) == [do.Dismiss(node=1, why="the job has gone on without it")]
    d.back(0)
    d.back(2)
    d.spare_back(3)
    d.wait(10.0)
    (opened,) = d.journal("incident_opened")
    assert opened["cause"]["text"] == (
        "node 1 (host h1) was lost, and ranks 2, 3 with it: its connection was closed"
    )
    assert {spawn.node for spawn in d.got(do.Spawn)} == {3}


def test_ranks_that_were_stopped_stop_again_and_only_the_coordinator_is_to_blame() -> None:
    d = Resuming().resume()
    d.back(0, members=(d.member(0, settled=False), d.member(1, settled=False)))
    d.back(1)
    assert d.one(do.SendStop).generation == FIRST
    (opened,) = d.journal("incident_opened")
    assert opened["cause"]["kind"] == "coordinator"
    assert opened["cause"]["text"] == (
        "the coordinator was away: ranks 0, 1 were stopped, in set-up or in a recovery"
    )
    d.parks(0, 1, 2, 3, step=7)
    d.recover(step=7)
    assert d.journal("incident_closed")[0]["rung"] == "retry"


def test_a_failure_that_is_told_again_is_the_cause() -> None:
    d = Resuming().resume()
    d.back(0, members=(d.member(0, settled=False), d.member(1)))
    d.back(1)
    d.tell(ev.Faulted(**d.who(0), generation=3, step=8, cause=raised()))
    assert d.journal("incident_cause")[0]["cause"]["text"] == "ValueError: no"
    d.parks(0, 1, 2, 3, step=7)
    d.recover(step=7)
    assert fold(_stamped(d)).incidents[0].cause.kind is CauseKind.EXCEPTION


def test_a_failure_before_the_others_have_come() -> None:
    d = Resuming().resume()
    d.back(0)
    d.tell(ev.Faulted(**d.who(0), generation=3, step=8, cause=broken()))
    d.die(1)
    d.back(1)
    (opened,) = d.journal("incident_opened")
    assert (opened["rank"], opened["cause"]["kind"]) == (1, "signal")
    assert d.journal("incident_cause")[0]["cause"]["kind"] == "peer"
    assert d.one(do.Spawn).rank == 1


def test_in_an_open_incident_only_what_is_new_is_told() -> None:
    incident = Incident(number=4, rank=2, step=8, cause=killed(), failed={2: killed()})
    d = Resuming().resume(incidents=4, open_incident=incident)
    d.back(0, ended=(ev.Died(rank=0, incarnation=1, cause=killed()),), members=(d.member(1),))
    ended = tuple(ev.Died(rank=rank, incarnation=1, cause=raised()) for rank in (2, 3))
    d.back(1, members=(), ended=ended)
    assert not d.journal("incident_opened")
    assert [line["rank"] for line in d.journal("incident_cause")] == [3]
    assert len(d.got(do.Spawn)) == 3


def test_a_recovery_that_was_under_way_is_begun_again_and_joiners_are_replaced() -> None:
    incident = Incident(number=1, rank=3, step=8, cause=killed(), respawned=True)
    d = Resuming().resume(incidents=1, open_incident=incident)
    d.back(0, members=tuple(d.member(rank, settled=False) for rank in (0, 1)))
    d.incarnations[3] = 2
    joiner = d.member(3, joining=True, settled=False, position=(0, 0))
    d.back(1, members=(d.member(2, settled=False), joiner))
    assert not d.journal("incident_opened")
    assert d.one(do.SendStop).to == ((0, 1), (1, 1), (2, 1))
    assert (d.one(do.Kill).rank, d.one(do.Kill).incarnation) == (3, 2)
    d.die(3, incarnation=2)
    assert d.one(do.Spawn).incarnation == FIRST
    d.parks(0, 1, 2, step=7)
    d.recover(3, step=7)
    assert d.journal("incident_closed")[0]["incident"] == 1


def test_those_that_a_regroup_did_not_reach_any_more_take_part_again() -> None:
    """Nobody has committed anything in the newest world, since they were not in it."""
    d = Resuming().resume()
    d.back(0, members=tuple(d.member(r, generation=4, settled=False) for r in (0, 1)))
    d.back(1, members=tuple(d.member(r, settled=False) for r in (2, 3)))
    assert d.one(do.SendStop).to == ((0, 1), (1, 1), (2, 1), (3, 1))
    assert d.resumed["generation"] == 4


# -------------------------------------------------------------------- two claim one slot


@pytest.mark.parametrize("later_first", [True, False])
def test_of_two_that_claim_a_slot_the_one_that_took_it_over_has_it(later_first: bool) -> None:
    d = Resuming(spares=1).resume()
    d.incarnations = [1, 1, 2, 2]
    later = tuple(d.member(rank) for rank in (2, 3))
    earlier = tuple(replace(member, incarnation=1, generation=2) for member in later)
    orders = [(2, later), (1, earlier)]
    if not later_first:
        orders.reverse()
    for node, members in orders:
        d.back(node, 1, members=members)
    dismissed = do.Dismiss(node=1, why="node 2 (host h2) has taken its place")
    assert d.got(do.Dismiss, everything=True) == [dismissed]
    d.back(0)
    assert d.resumed["undisturbed"]


def test_one_that_was_replaced_is_told_by_the_others_and_its_successor_is_awaited() -> None:
    d = Resuming(spares=1).resume()
    earlier = tuple(d.member(rank, generation=2) for rank in (2, 3))
    d.back(1, members=earlier)
    assert d.back(0, peers=(0, 2)) == [do.Dismiss(node=1, why="the job has gone on without it")]
    assert d.coordinator.reconvenes
    d.incarnations = [1, 1, 2, 2]
    d.back(2, 1, peers=(0, 2))
    assert d.resumed["undisturbed"]


def test_a_node_of_another_layout_is_sent_away() -> None:
    d = Resuming().resume()
    assert d.tell(ev.NodeBack(node=7, host="x", domain="", slot=0, members=(d.member(3),))) == [
        do.Dismiss(node=7, why="it held slot 0, which this job lays out differently")
    ]
    assert d.tell(ev.NodeBack(node=8, host="x", domain="", slot=2)) == [
        do.Dismiss(node=8, why="it held slot 2, which this job lays out differently")
    ]


# -------------------------------------------------------------------- before the first step


def test_where_nothing_is_committed_all_start_again() -> None:
    d = Resuming().resume(recorded=0)
    d.back(0, members=tuple(d.member(rank, position=(0, 0)) for rank in (0, 1)))
    setting_up = tuple(d.member(r, settled=False, position=(0, 0), generation=0) for r in (2, 3))
    d.back(1, members=setting_up)
    assert {kill.rank for kill in d.got(do.Kill)} == set(d.ranks)
    for rank in d.ranks:
        d.die(rank)
        spawn = d.one(do.Spawn)
        assert not spawn.joiner
        assert spawn.incarnation == FIRST
        assert spawn.generation >= FIRST
    d.set_up()
    d.run_to(1)
    assert d.journal("incident_closed")[0]["state_from"] == "script"


def test_gathering_goes_on() -> None:
    d = Resuming(join_nodes_timeout_s=60.0).resume(recorded=0, holders={})
    d.spare_back(0)
    d.node_joins(FIRST)
    assert not d.got(do.Spawn)
    d.wait(10.0)
    assert [(s.node, s.incarnation) for s in d.got(do.Spawn)] == [
        (0, FIRST),
        (0, FIRST),
        (FIRST, FIRST),
        (FIRST, FIRST),
    ]
    assert d.journal("gathered") == [{"nodes": [0, FIRST], "spares": 0}]


def test_where_all_that_held_state_are_gone_the_job_ends() -> None:
    d = Resuming(spares=1).resume()
    d.spare_back(2)
    d.wait(10.0)
    assert "the state of step 7 is lost" in d.ended.text
    assert "node 0 (host h0) was lost, and ranks 0, 1 with it" in d.ended.text


# -------------------------------------------------------------------- which part of the state


def test_what_a_lost_nodes_ranks_held_its_guardian_knows() -> None:
    d = Resuming(nnodes=3, spares=1, shards=2).resume()
    d.back(0)
    said = tuple(d.said(rank) for rank in (2, 3, 4, 5))
    d.back(2, protected=said)
    d.spare_back(3)
    d.wait(10.0)
    assert {spawn.node for spawn in d.got(do.Spawn)} == {3}
    d.parks(0, 1, 4, 5, step=7)
    d.recover(2, 3, step=7)
    assert d.journal("incident_closed")


def test_what_nobody_knows_is_the_same_where_all_hold_the_same() -> None:
    d = Resuming(spares=1).resume()
    d.back(0)
    d.spare_back(2)
    d.wait(10.0)
    d.parks(0, 1, step=7)
    d.recover(2, 3, step=7)
    assert d.journal("incident_closed")


def test_what_nobody_knows_ends_the_job_and_is_named() -> None:
    d = Resuming(nnodes=3, shards=2).resume()
    d.back(0)
    d.back(2)
    d.wait(10.0)
    assert d.ended.exit_code == 1
    assert d.ended.text.startswith(
        "it is not known which part of the state ranks 2, 3 hold: the nodes that knew are gone"
    )


# -------------------------------------------------------------------- peers


def test_every_node_has_a_guardian_in_another_domain() -> None:
    d = OnNodes(nnodes=4, spares=1).at(4, "a", "a", "b", "b")
    (peers,) = d.got(do.SendPeers, everything=True)
    domain = {0: "a", 1: "a", 2: "b", 3: "b"}
    assert peers.guardians.keys() == domain.keys()
    assert all(domain[node] != domain[other or 0] for node, other in peers.guardians.items())
    assert len(set(peers.guardians.values())) == 4
    d.lose(1)
    d.parks(0, 1, 4, 5, 6, 7)
    for rank in (2, 3):
        d.join(rank)
    kinds = [type(action) for action in d.last]
    assert kinds.index(do.SendPeers) < kinds.index(do.SendRegroup)
    assert d.one(do.SendPeers).guardians.keys() == {0, 2, 3, 4}


def test_a_node_that_is_the_only_one_has_no_guardian() -> None:
    d = OnNodes(nnodes=1).at()
    assert d.got(do.SendPeers, everything=True) == [do.SendPeers(guardians={0: None})]


# -------------------------------------------------------------------- what the journal tells


def _stamped(d: OnNodes) -> list[dict[str, Any]]:
    lines = [action.record for action in d.got(do.Record, everything=True)]
    return [{"t": float(n), "event": each.event, **each.fields} for n, each in enumerate(lines)]


def test_the_journal_of_a_recovery_gives_the_open_incident() -> None:
    d = OnNodes(nnodes=2, spares=1).at()
    d.lose(1)
    past = recall(_stamped(d))
    resumed = past.resumed(1)
    assert (resumed.recorded, resumed.incidents) == (4, 1)
    assert resumed.holders == {
        0: ev.Holder(node=0, host="h0"),
        1: ev.Holder(node=2, host="h2"),
    }
    incident = resumed.open_incident
    assert incident is not None
    assert (incident.number, incident.rank, incident.step) == (1, 2, 5)
    assert (incident.replaced, incident.cause.kind) == (True, CauseKind.NODE)
    d.parks(0, 1)
    for rank in (2, 3):
        d.join(rank)
    incident = recall(_stamped(d)).open_incident
    assert incident is not None
    assert (incident.floor, incident.state_from) == (4, StateFrom.PEER)
    assert "takes the place of" in incident.decision
    d.regroup()
    d.run_to(5, first=5)
    past = recall(_stamped(d))
    assert (past.open_incident, past.recorded, past.incidents) == (None, 5, 1)


def test_a_slot_that_is_empty_by_the_journal_is_not_lost_again() -> None:
    d = OnNodes(nnodes=2).at()
    d.lose(1, Cause(kind=CauseKind.NODE, text="no answer for 2 s"))
    resumed = recall(_stamped(d)).resumed(1)
    assert resumed.holders[1] == ev.Holder(node=1, host="h1", lost=True)
    r = Resuming()
    r.tell(resumed)
    r.back(0)
    r.wait(10.0)
    assert not r.journal("node_lost")
    assert not r.journal("incident_cause")
    assert r.one(do.SendStop).to == ((0, 1), (1, 1))


def test_a_loss_belongs_to_the_incident_that_is_open_or_opens_with_it() -> None:
    d = OnNodes(nnodes=2, spares=2).at()
    d.die(0)
    d.lose(1)
    d.parks(1)
    for rank in (0, 2, 3):
        d.join(rank)
    d.regroup()
    d.run_to(5, first=5)
    assert d.journal("incident_closed")[0]["rung"] == "replace"
    d.die(0)
    incident = recall(_stamped(d)).open_incident
    assert incident is not None
    assert not incident.replaced


# -------------------------------------------------------------------- what guardians keep


def test_what_belongs_to_ranks_of_a_lost_node_is_asked_for_before_they_are_led_on() -> None:
    d = OnNodes(nnodes=3, spares=1).at()
    d.answers = False
    d.lose(1)
    for rank in (2, 3):
        d.join(rank)
    d.parks(0, 1, 4)
    assert not d.got(do.Reclaim)
    d.parks(5)
    asked = d.one(do.Reclaim)
    assert (asked.ranks, asked.nodes) == ((2, 3), (0, 2, 3))
    assert not d.got(do.SendPosition)
    for node in (0, 2):
        d.tell(ev.Reclaimed(node=node, turn=asked.turn))
    d.tell(ev.Reclaimed(node=3, turn=asked.turn - 1))  # of another time
    assert not d.got(do.SendPosition)
    d.tell(ev.Reclaimed(node=3, turn=asked.turn))
    assert [position.rank for position in d.got(do.SendPosition)] == [2, 3]


def test_one_that_is_lost_before_it_answers_is_not_waited_for() -> None:
    d = OnNodes(nnodes=3, spares=2).at()
    d.answers = False
    d.lose(1)
    d.parks(0, 1, 4, 5)
    first = d.one(do.Reclaim)
    d.lose(2)
    again = d.one(do.Reclaim)
    assert again.turn > first.turn
    assert (again.ranks, again.nodes) == ((2, 3, 4, 5), (0, 3, 4))


def test_nobody_is_asked_where_all_nodes_live() -> None:
    d = OnNodes(nnodes=2).at()
    d.answers = False
    d.die(0)
    d.parks(1, 2, 3)
    d.recover(0)
    assert not d.got(do.Reclaim, everything=True)
