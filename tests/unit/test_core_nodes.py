"""The coordinator and its nodes, event by event: gathering, loss, takeover, waiting."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core_driver import Driver, broken, killed

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.coordinator import Coordinator
from everstep.core.goodput import fold
from everstep.core.ladder import Policy
from everstep.core.nodes import Layout
from everstep.core.words import NODE_LEFT
from everstep.types import Cause, CauseKind, Holding, Rung

CLOSED = Cause(kind=CauseKind.NODE, text="its connection was closed")


class OnNodes(Driver):
    """`nnodes` nodes of two ranks each. Node n is on host "h<n>", if nothing else is said."""

    def __init__(self, nnodes: int = 2, spares: int = 0, shards: int = 1, **policy: Any) -> None:
        layout = Layout(nproc_per_node=2, nnodes=nnodes, spares=spares)
        super().__init__(layout.world_size, layout, **policy)
        self.layout, self.shards = layout, shards
        self.node_of: dict[int, int] = {}
        self.answers = True  # nodes tell at once what they keep of the ranks of lost ones

    def tell(self, event: ev.Event) -> list[do.Action]:
        super().tell(event)
        actions = self.last
        for asked in self.got(do.Reclaim) if self.answers else ():
            for node in asked.nodes:
                actions += super().tell(ev.Reclaimed(node=node, turn=asked.turn))
        self.last = actions
        self.node_of |= {spawn.rank: spawn.node for spawn in self.got(do.Spawn)}
        return self.last

    def node_joins(self, node: int, host: str = "", domain: str = "", ranks: int = 2) -> None:
        self.tell(ev.NodeJoined(node=node, host=host or f"h{node}", domain=domain, ranks=ranks))

    def lose(self, node: int, cause: Cause = CLOSED) -> list[do.Action]:
        return self.tell(ev.NodeLost(node=node, cause=cause))

    def gather(self, *domains: str) -> OnNodes:
        """All nodes and spares join; `domains` are those of the first."""
        self.tell(ev.JobStarted())
        for node in range(self.layout.nnodes + self.layout.spares):
            self.node_joins(node, domain=domains[node] if node < len(domains) else "")
        return self

    def protect(self, rank: int, manifest: str = "m", **digests: str) -> list[do.Action]:
        shard = f"s{rank % self.shards}" if self.shards > 1 else "all"
        digests = digests or {"w": "ab" * 8}
        return self.tell(
            ev.Protected(**self.who(rank), shard=shard, manifest=manifest, digests=digests)
        )

    def at(self, step: int = 4, *domains: str) -> OnNodes:
        """All have gathered and committed `step`."""
        self.gather(*domains)
        self.set_up()
        self.run_to(step)
        return self

    def parks(self, *ranks: int, step: int = 4) -> None:
        for rank in ranks:
            shard = f"s{rank % self.shards}" if self.shards > 1 else "all"
            self.park(rank, step, shard=shard)

    def recover(self, *joiners: int, step: int = 4) -> None:
        """The others have parked; `joiners` come, and all regroup and make the next step."""
        for rank in joiners:
            self.join(rank)
        self.regroup()
        self.run_to(step + 1, first=step + 1)


# -------------------------------------------------------------------- gathering


def test_ranks_are_spawned_when_all_nodes_are_there_in_any_order() -> None:
    d = OnNodes(nnodes=2)
    d.node_joins(3)  # even before the job has started
    d.tell(ev.JobStarted())
    assert d.coordinator.phase == "gathering"
    d.node_joins(1)
    assert [(s.rank, s.node, s.joiner) for s in d.got(do.Spawn)] == [
        (0, 1, False),
        (1, 1, False),
        (2, 3, False),
        (3, 3, False),
    ]
    assert d.journal("gathered") == [{"nodes": [1, 3], "spares": 0}]
    assert [line["node"] for line in d.journal("spawned")] == [1, 1, 3, 3]
    d.set_up()
    assert d.events()[-1] == "setup_done"


def test_a_layout_must_have_the_jobs_ranks() -> None:
    with pytest.raises(ValueError, match="has 4 ranks, not 3"):
        Coordinator(3, Policy(), Layout(nproc_per_node=2, nnodes=2))
    with pytest.raises(ValueError, match="a job needs nodes with ranks"):
        Layout(nproc_per_node=0, nnodes=2)


def test_nodes_that_do_not_come_end_the_job_and_those_that_came_are_named() -> None:
    d = OnNodes(nnodes=3, join_nodes_timeout_s=60.0)
    d.tell(ev.JobStarted())
    d.node_joins(0, "alpha")
    d.node_joins(1, "beta")
    assert d.coordinator.next_deadline_s == 160.0
    d.wait(59.0)
    assert not d.got(do.End)
    d.wait(1.0)
    assert d.ended.exit_code == 1
    assert d.ended.text.startswith(
        "1 of 3 nodes has not joined within 60 s; node 0 (host alpha), node 1 (host beta) came. "
    )


def test_a_node_that_is_lost_while_they_gather_is_missing_again() -> None:
    d = OnNodes(nnodes=2)
    d.tell(ev.JobStarted())
    d.node_joins(0)
    d.lose(0)
    assert d.one(do.Dismiss).node == 0
    d.node_joins(1)
    assert not d.got(do.Spawn)
    d.node_joins(2)
    assert {spawn.node for spawn in d.got(do.Spawn)} == {1, 2}
    assert not d.journal("incident_opened")


def test_more_nodes_than_asked_for_are_spares_also_late_ones() -> None:
    d = OnNodes(nnodes=2).at()
    d.node_joins(2)
    d.node_joins(3)
    assert not d.got(do.Spawn)
    d.lose(0)
    assert {spawn.node for spawn in d.got(do.Spawn)} == {2}


def test_a_node_that_can_run_too_few_workers_is_sent_away() -> None:
    d = OnNodes(nnodes=2)
    d.tell(ev.JobStarted())
    d.node_joins(0, ranks=1)
    assert d.one(do.Dismiss) == do.Dismiss(
        node=0, why="it can run 1 worker, and a node of this job has 2"
    )
    d.node_joins(1)
    assert not d.got(do.Spawn)


def test_a_node_is_taken_in_once_and_its_number_is_not_used_again() -> None:
    d = OnNodes(nnodes=2).at()
    d.node_joins(1)
    assert d.last == []
    d.node_joins(2)
    d.lose(2)
    d.node_joins(2)
    assert d.one(do.Dismiss).node == 2
    d.lose(1)
    assert not d.got(do.Spawn)


# -------------------------------------------------------------------- a loss, and the takeover


def test_a_spare_takes_all_ranks_of_a_lost_node() -> None:
    d = OnNodes(nnodes=2, spares=1).at()
    d.lose(1)
    assert d.one(do.SendStop).to == ((0, 1), (1, 1))
    assert [(s.rank, s.incarnation, s.node, s.joiner) for s in d.got(do.Spawn)] == [
        (2, 2, 2, True),
        (3, 2, 2, True),
    ]
    assert d.one(do.Dismiss) == do.Dismiss(node=1, why="its connection was closed")
    (opened,) = d.journal("incident_opened")
    assert (opened["rank"], opened["step"], opened["cause"]["kind"]) == (2, 5, "node")
    text = "node 1 (host h1) was lost, and ranks 2, 3 with it: its connection was closed"
    assert opened["cause"]["text"] == text
    assert d.journal("node_lost") == [
        {"node": 1, "host": "h1", "slot": 1, "ranks": [2, 3], "text": text}
    ]
    d.parks(0, 1)
    d.recover(2, 3)
    (closed,) = d.journal("incident_closed")
    assert (closed["rung"], closed["state_from"], closed["steps_lost"]) == ("replace", "peer", 0)
    assert closed["reason"] == (
        "node 2 (host h2) takes the place of node 1 (host h1); "
        "ranks 2, 3 take step 4 from ranks 0, 1"
    )
    assert d.journal("node_replaced")[0]["lost"] == 1
    assert not d.journal("incident_cause")


def test_the_ledger_counts_the_rung_and_the_time_until_it_was_noticed() -> None:
    d = OnNodes(nnodes=2, spares=1).at()
    d.now_s = 107.0
    d.lose(1, Cause(kind=CauseKind.NODE, text="no answer for 2 s", at_s=105.0))
    d.parks(0, 1)
    d.recover(2, 3)
    lines = [action.record for action in d.got(do.Record, everything=True)]
    times = {"incident_opened": 107.0, "incident_closed": 109.0, "job_started": 100.0}
    stamped = [{"t": 100.0, "event": "job_started", "world_size": 4}]
    for line in lines:
        t = max(float(stamped[-1]["t"]), times.get(line.event, 0.0))  # type: ignore[arg-type]
        stamped.append({"t": t, "event": line.event, **line.fields})
    ledger = fold(stamped)
    assert ledger.by_rung() == {Rung.REPLACE: 1}
    assert ledger.incidents[0].total_s == 4.0
    assert ledger.incidents[0].stages["detect"] == 2.0  # type: ignore[index]


def test_the_dead_nodes_words_change_nothing() -> None:
    d = OnNodes(nnodes=2, spares=1).at()
    d.lose(1)
    for late in (
        ev.Died(rank=2, incarnation=1, cause=killed()),
        ev.Committed(rank=3, incarnation=1, generation=0, step=5, at_s=0.0),
        ev.Parked(rank=2, incarnation=1, generation=0, holding=Holding(committed=9)),
        ev.NodeLost(node=1, cause=CLOSED),
        ev.NodeLost(node=77, cause=CLOSED),
    ):
        assert d.tell(late) == [], late
    assert d.incarnations == [1, 1, 2, 2]


def test_a_broken_collective_is_the_echo_of_the_node_that_is_lost() -> None:
    d = OnNodes(nnodes=2, spares=1).at()
    d.fault(0, 5, broken())
    d.lose(1)
    assert d.journal("incident_cause")[0]["cause"]["kind"] == "node"
    assert not d.got(do.SendStop)
    d.parks(0, 1)
    d.recover(2, 3)
    assert d.journal("incident_closed")[0]["rung"] == "replace"


def test_several_nodes_at_once() -> None:
    d = OnNodes(nnodes=3, spares=2).at()
    d.lose(2)
    d.lose(0)
    d.parks(2, 3)
    d.recover(0, 1, 4, 5)
    assert d.node_of == {0: 4, 1: 4, 2: 1, 3: 1, 4: 3, 5: 3}
    (closed,) = d.journal("incident_closed")
    assert closed["reason"].startswith(
        "node 3 (host h3) takes the place of node 2 (host h2); node 4 (host h4) takes the place of "
        "node 0 (host h0); ranks 0, 1, 4, 5 take step 4 from ranks 2, 3"
    )


def test_a_spare_that_is_lost_in_the_takeover_is_followed_by_the_next() -> None:
    d = OnNodes(nnodes=2, spares=2).at()
    d.lose(1)
    d.start(2)
    d.lose(2)
    assert [(s.rank, s.incarnation, s.node) for s in d.got(do.Spawn)] == [(2, 3, 3), (3, 3, 3)]
    assert d.journal("incident_cause")[0]["cause"]["kind"] == "node"
    d.parks(0, 1)
    d.recover(2, 3)
    assert len(d.journal("incident_opened")) == 1
    assert "node 3 (host h3) takes the place of node 2" in d.journal("incident_closed")[0]["reason"]


def test_losses_in_a_row_are_failed_attempts_not_one_for_each_rank() -> None:
    d = OnNodes(nnodes=2, spares=4, max_failures_without_progress=3).at()
    for node in (1, 2, 3):
        d.lose(node)
        assert not d.got(do.End)
    d.lose(4)
    assert "4 attempts in a row failed" in d.ended.text


def test_another_node_begins_at_once_however_often_the_rank_has_failed() -> None:
    d = OnNodes(nnodes=2, spares=2).at()
    d.lose(1)
    d.lose(2)
    assert {spawn.delay_s for spawn in d.got(do.Spawn)} == {0.0}


def test_a_node_lost_while_a_new_generation_regroups() -> None:
    d = OnNodes(nnodes=2, spares=2).at()
    d.lose(1)
    d.parks(0, 1)
    d.join(2)
    d.join(3)
    assert d.coordinator.phase == "regrouping"
    d.lose(2)
    assert d.one(do.SendStop).to == ((0, 1), (1, 1))
    d.parks(0, 1)
    d.recover(2, 3)
    assert d.journal("incident_closed")[0]["rung"] == "replace"


def test_a_death_on_a_living_node_stays_there() -> None:
    d = OnNodes(nnodes=2, spares=1).at()
    d.die(3)
    assert [(s.rank, s.node) for s in d.got(do.Spawn)] == [(3, 1)]
    d.parks(0, 1, 2)
    d.recover(3)
    assert d.journal("incident_closed")[0]["rung"] == "respawn"


def test_a_spare_that_holds_nothing_is_no_incident() -> None:
    d = OnNodes(nnodes=2, spares=1).at()
    d.lose(2)
    assert [type(action) for action in d.last] == [do.Record, do.Dismiss]
    assert d.journal("node_lost")[0]["ranks"] == []
    assert d.journal("node_lost")[0]["text"] == (
        "node 2 (host h2) was lost: its connection was closed"
    )
    assert d.coordinator.phase == "running"


def test_a_lost_node_before_the_first_commit_starts_all_again() -> None:
    d = OnNodes(nnodes=2, spares=1).gather()
    d.set_up()
    d.lose(1)
    assert {kill.rank for kill in d.got(do.Kill)} == {0, 1}
    assert [(s.rank, s.node, s.joiner) for s in d.got(do.Spawn)] == [(2, 2, False), (3, 2, False)]
    for rank in (0, 1):
        d.die(rank)
    d.set_up()
    d.run_to(1)
    (closed,) = d.journal("incident_closed")
    assert (closed["rung"], closed["state_from"]) == ("replace", "script")
    assert "ranks 2, 3 failed before any step was committed" in closed["reason"]


def test_a_node_lost_with_processes_that_were_to_die_anyway_starts_nothing_again() -> None:
    d = OnNodes(nnodes=2, spares=1).gather()
    d.set_up()
    d.die(0)
    generation = d.generation
    d.lose(1)  # whose ranks are being killed
    assert d.generation == generation
    d.die(1)
    d.set_up()
    d.run_to(1)
    assert d.journal("incident_closed")[0]["rung"] == "replace"


def test_the_node_with_the_last_copy_of_a_shard_ends_the_job() -> None:
    d = OnNodes(nnodes=2, spares=1, shards=4).at()
    d.lose(1)
    d.parks(0, 1)
    assert d.ended.exit_code == 1
    assert "was held only by processes that are gone" in d.ended.text
    assert "First cause, rank 2 in step 5: node 1 (host h1) was lost" in d.ended.text


def test_one_node_that_is_lost_takes_the_job_with_it() -> None:
    d = Driver(2).running(4)
    d.tell(ev.NodeLost(node=0, cause=CLOSED))
    assert "the state of step 4 is lost: no process that held it is left" in d.ended.text


# -------------------------------------------------------------------- which spare


def test_a_failure_domain_without_a_replica_is_preferred() -> None:
    d = OnNodes(nnodes=2, spares=2).at(4, "r0", "r1", "r0", "r2")
    d.lose(1)
    assert {spawn.node for spawn in d.got(do.Spawn)} == {3}


def test_a_spare_in_a_replicas_domain_is_better_than_none_and_that_is_said() -> None:
    d = OnNodes(nnodes=2, spares=1).at(4, "r0", "r1", "r0")
    d.lose(1)
    assert {spawn.node for spawn in d.got(do.Spawn)} == {2}
    assert d.journal("node_replaced")[0]["reason"] == (
        "node 2 (host h2) takes the place of node 1 (host h1) (no other is there, though failure "
        "domain r0 holds replicas of its state)"
    )


def test_only_replicas_of_the_lost_ranks_count() -> None:
    """Slots 0 and 1 hold shards 0 to 3, and so do slots 2 and 3."""
    d = OnNodes(nnodes=4, spares=2, shards=4).at(4, "r0", "r1", "r2", "r3", "r2", "r1")
    d.lose(0)
    assert {spawn.node for spawn in d.got(do.Spawn)} == {5}


def test_a_host_that_loses_its_nodes_is_set_aside() -> None:
    d = OnNodes(nnodes=2, spares=0, max_node_failures=2).at()
    for node in (2, 3):
        d.node_joins(node, "bad")
        d.lose(node)
    (aside,) = d.journal("node_set_aside")
    assert (aside["host"], aside["losses"]) == ("bad", 2)
    d.node_joins(4, "bad")
    d.node_joins(5, "good")
    d.lose(1)
    assert {spawn.node for spawn in d.got(do.Spawn)} == {5}
    d.lose(5)
    assert {spawn.node for spawn in d.got(do.Spawn)} == {4}  # nothing else is there
    assert "though its host is set aside" in d.journal("node_replaced")[-1]["reason"]


def test_that_a_node_left_on_purpose_is_nothing_against_its_host() -> None:
    d = OnNodes(nnodes=2, max_node_failures=1).at()
    d.node_joins(2, "rotated")
    d.lose(2, Cause(kind=CauseKind.NODE, text="asked to end", signature=NODE_LEFT))
    d.node_joins(3, "rotated")
    d.node_joins(4, "other")
    d.lose(1)
    assert {spawn.node for spawn in d.got(do.Spawn)} == {3}  # the first that came
    assert [aside["host"] for aside in d.journal("node_set_aside")] == ["h1"]


def test_a_host_is_set_aside_for_the_window_only() -> None:
    d = OnNodes(nnodes=2, max_node_failures=1, incident_window_s=600.0).at()
    d.node_joins(2, "bad")
    d.lose(2)
    d.now_s += 601
    d.node_joins(3, "bad")
    d.node_joins(4, "good")
    d.lose(1)
    assert {spawn.node for spawn in d.got(do.Spawn)} == {3}


# -------------------------------------------------------------------- no spare


def test_without_a_spare_the_ranks_stay_parked_until_a_node_comes() -> None:
    d = OnNodes(nnodes=2, spare_wait_s=300.0).at()
    d.lose(1)
    assert not d.got(do.Spawn)
    assert not d.journal("node_awaited")
    d.parks(0, 1)
    assert d.journal("node_awaited") == [{"incident": 1, "ranks": [2, 3], "wait_s": 300.0}]
    assert d.coordinator.next_deadline_s == d.now_s + 300.0
    d.wait(299.0)
    d.node_joins(2)
    assert [(s.rank, s.node) for s in d.got(do.Spawn)] == [(2, 2), (3, 2)]
    d.recover(2, 3)
    assert d.journal("incident_closed")[0]["rung"] == "replace"
    assert d.coordinator.next_deadline_s is None


def test_when_no_node_comes_the_job_ends_and_says_what_would_have_helped() -> None:
    d = OnNodes(nnodes=2, spare_wait_s=300.0).at()
    d.lose(1)
    d.parks(0, 1)
    d.wait(300.0)
    assert d.ended.exit_code == 1
    assert d.ended.text == (
        "no spare node is left for ranks 2, 3, and none has come within 300 s (--spare-wait). With "
        "--spares 1 one would have taken over at once; the state of step 4, which the other ranks "
        "still hold, ends with the job; a durable checkpoint would have kept it. First cause, rank "
        "2 in step 5: node 1 (host h1) was lost, and ranks 2, 3 with it: its connection was closed"
    )


def test_a_job_that_does_not_wait_ends_when_its_survivors_stand_still() -> None:
    d = OnNodes(nnodes=2, spares=1, spare_wait_s=0.0).at()
    d.lose(2)
    d.lose(1)
    d.park(0, 4)
    assert not d.got(do.End)
    d.park(1, 4)
    assert "and none is waited for (--spare-wait). With --spares 2 one" in d.ended.text
    assert not d.journal("node_awaited")


def test_of_two_lost_nodes_the_second_is_waited_for_as_long_as_the_first() -> None:
    d = OnNodes(nnodes=3, spare_wait_s=100.0).at()
    d.lose(1)
    d.lose(2)
    d.parks(0, 1)
    d.wait(50.0)
    d.node_joins(3)
    assert {spawn.rank for spawn in d.got(do.Spawn)} == {2, 3}
    d.wait(50.0)
    assert "no spare node is left for ranks 4, 5" in d.ended.text


def test_set_up_has_its_time_from_when_its_nodes_are_there() -> None:
    d = OnNodes(nnodes=2, setup_timeout_s=100.0, spare_wait_s=500.0).gather()
    d.set_up()
    d.lose(1)
    for rank in (0, 1):
        d.die(rank)
        d.start(rank)
        d.protect(rank)
    d.wait(400.0)
    assert not d.got(do.End)
    d.node_joins(2)
    assert d.coordinator.next_deadline_s == d.now_s + 100.0
    d.set_up()
    assert d.events()[-1] == "setup_done"


def test_set_up_that_waits_in_vain_ends_too() -> None:
    d = OnNodes(nnodes=2, spare_wait_s=500.0).gather()
    d.set_up()
    d.lose(1)
    d.die(0)
    d.die(1)
    d.wait(500.0)
    assert "taken over at once; nothing is committed yet" in d.ended.text


# -------------------------------------------------------------------- a process that can't be ended


def late_reaping(spares: int) -> OnNodes:
    d = OnNodes(nnodes=2, spares=spares, join_timeout_s=20.0, reap_timeout_s=5.0).at()
    d.die(3)
    d.parks(0, 1, 2)
    d.wait(20.0)
    assert d.one(do.Kill).rank == 3
    d.wait(5.0)
    return d


def test_a_process_that_cannot_be_ended_costs_its_node_if_there_is_a_spare() -> None:
    d = late_reaping(spares=1)
    assert d.one(do.Dismiss).node == 1
    assert [(s.rank, s.node) for s in d.got(do.Spawn)] == [(2, 2), (3, 2)]
    assert "could not be ended within 5 s" in d.journal("node_lost")[0]["text"]
    d.recover(2, 3)
    assert d.journal("incident_closed")[0]["rung"] == "replace"


def test_without_a_spare_a_process_that_cannot_be_ended_ends_the_job() -> None:
    d = late_reaping(spares=0)
    assert "could not be ended within 5 s of SIGKILL" in d.ended.text
    assert "on host h1" in d.ended.text


def test_several_that_cannot_be_ended_on_one_node_cost_it_once() -> None:
    d = OnNodes(nnodes=2, spares=2, park_timeout_s=20.0, reap_timeout_s=5.0).at()
    d.die(0)
    d.park(1, 4)
    d.wait(20.0)
    assert {kill.rank for kill in d.got(do.Kill)} == {2, 3}
    d.wait(5.0)
    assert [dismiss.node for dismiss in d.got(do.Dismiss)] == [1]
    assert [(s.rank, s.node) for s in d.got(do.Spawn)] == [(2, 2), (3, 2)]
