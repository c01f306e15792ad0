"""Jobs that begin at a checkpoint, and those that go back to one when their state is lost."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core_driver import Driver, raised
from tests.unit.test_core_nodes import OnNodes
from tests.unit.test_core_resume import Resuming

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.past import recall
from everstep.types import StateFrom


class Sharded(Driver):
    """Two ranks, each with a shard of its own, of which no copies are made."""

    def __init__(self, **policy: Any) -> None:
        super().__init__(2, **policy)

    def protect(self, rank: int, manifest: str = "m", **digests: str) -> list[do.Action]:
        who, digests = self.who(rank), digests or {"w": "ab" * 8}
        return self.tell(ev.Protected(**who, shard=f"s{rank}", manifest=manifest, digests=digests))

    def loaded(self, rank: int, step: int, **more: Any) -> None:
        self.tell(ev.Loaded(**self.here(rank), step=step, **more))

    def saved(self, step: int, tier: StateFrom = StateFrom.DURABLE) -> None:
        self.tell(ev.Saved(**self.who(0), step=step, tier=tier))

    def begin(self, step: int, **more: Any) -> None:
        """All set themselves up and take the checkpoint of `step`."""
        self.set_up()
        for rank in self.ranks:
            self.loaded(rank, step, **more)

    def reap(self) -> None:
        """Those that were just told to be killed are dead."""
        for kill in self.got(do.Kill):
            self.die(kill.rank, incarnation=kill.incarnation)

    def all_die(self) -> None:
        for rank in self.ranks:
            self.die(rank)
        self.reap()

    @property
    def closed(self) -> dict[str, Any]:
        (closed,) = self.journal("incident_closed")
        return closed

    def steps(self) -> list[int]:
        return [record["step"] for record in self.journal("step")]


# -------------------------------------------------------------------- the beginning


def test_a_job_goes_on_with_the_step_after_its_checkpoint() -> None:
    d = Sharded()
    d.begin(40, tier=StateFrom.MEMORY, newest=41, parts=((0, "memory", "/dev/shm", 8),), seconds=1)
    d.run_to(42, first=41)
    assert d.steps() == [41, 42]
    first, second = d.journal("checkpoint_loaded")
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first | {"rank": 1} == second
    assert (first["step"], first["newest"], first["tier"]) == (40, 41, "memory")
    assert first["parts"] == [[0, "memory", "/dev/shm", 8]]


def test_where_no_checkpoint_is_the_script_begins() -> None:
    d = Sharded()
    d.begin(0)
    d.run_to(2)
    assert d.steps() == [1, 2]
    assert not d.journal("checkpoint_loaded")


def test_before_a_step_after_the_checkpoint_a_failure_starts_all_again() -> None:
    d = Sharded()
    d.begin(40)
    d.die(1)
    assert {kill.rank for kill in d.got(do.Kill)} == {0}
    d.reap()
    (planned,) = d.journal("planned")
    assert (planned["rung"], planned["step"]) == ("durable", 40)
    d.begin(40)
    d.run_to(41, first=41)
    assert d.steps() == [41]
    assert (d.closed["rung"], d.closed["state_from"], d.closed["steps_lost"]) == (
        "durable",
        "durable",
        0,
    )
    assert "ranks 0, 1 start again from a checkpoint" in d.closed["reason"]


def test_a_failure_between_two_words_of_the_load_starts_all_again() -> None:
    d = Sharded()
    d.set_up()
    d.loaded(0, 40)
    d.die(1)
    d.reap()
    d.begin(40)
    d.run_to(41, first=41)
    assert d.steps() == [41]


def test_a_step_that_only_some_have_made_is_made_again_from_the_checkpoint() -> None:
    d = Sharded()
    d.begin(40)
    d.commit(0, 41)
    d.die(0)
    d.park(1, 40, torn=True, shard="s1")
    d.reap()
    d.begin(40)
    d.run_to(41, first=41)
    assert d.closed["steps_lost"] == 0


@pytest.mark.parametrize("known", [False, True])
def test_a_job_ends_when_checkpoints_are_there_and_none_can_be_had(known: bool) -> None:
    d = Sharded()
    if known:
        d.begin(40)
        d.all_die()
    d.set_up()
    d.loaded(1, 0, ok=False, text="each has a part that is spoiled")
    assert d.ended.exit_code == (1 if not known else d.ended.exit_code) != 0
    assert "each has a part that is spoiled" in d.ended.text
    assert ("First cause" in d.ended.text) == known


# -------------------------------------------------------------------- the rung


def test_a_state_that_is_lost_is_taken_from_the_newest_checkpoint() -> None:
    d = Sharded()
    d.running(7)
    d.saved(3)
    d.saved(6)
    d.die(1)
    d.park(0, 7, shard="s0")
    d.reap()
    assert [spawn.joiner for spawn in d.got(do.Spawn, everything=True)][-2:] == [False, False]
    d.begin(6)
    d.run_to(8, first=7)
    assert d.steps() == [1, 2, 3, 4, 5, 6, 7, 7, 8]
    closed = d.closed
    assert (closed["rung"], closed["state_from"], closed["steps_lost"]) == ("durable", "durable", 1)
    assert "the state of step 7 is lost" in closed["reason"]
    assert "the checkpoint of step 6 from the durable tier" in closed["reason"]
    assert [record["step"] for record in d.journal("checkpoint_saved")] == [3, 6]


def test_when_all_die_together_nobody_parks_first() -> None:
    d = Sharded()
    d.running(7)
    d.saved(6, StateFrom.MEMORY)
    d.all_die()
    (planned,) = d.journal("planned")
    assert (planned["rung"], planned["state_from"], planned["step"]) == ("memory", "memory", 6)
    d.begin(6, tier=StateFrom.MEMORY)
    d.run_to(8, first=7)
    assert (d.closed["rung"], d.closed["state_from"]) == ("memory", "memory")


def test_an_older_checkpoint_costs_more_steps_and_it_is_said_why() -> None:
    d = Sharded()
    d.running(9)
    d.saved(8, StateFrom.MEMORY)
    d.saved(4)
    d.all_die()
    d.begin(4, newest=8, text="step 8, memory: a part is spoiled")
    d.run_to(5, first=5)
    assert (d.closed["rung"], d.closed["steps_lost"]) == ("durable", 5)
    assert "passed over: step 8, memory: a part is spoiled" in d.closed["reason"]
    d.all_die()
    assert d.journal("planned")[-1]["step"] == 4, "that of step 8 is known to be none"


def test_a_checkpoint_of_which_nobody_could_tell_costs_less() -> None:
    d = Sharded()
    d.running(9)
    d.saved(4)
    d.all_die()
    d.begin(9)
    d.run_to(10, first=10)
    assert d.closed["steps_lost"] == 0


def test_without_a_checkpoint_the_state_stays_lost() -> None:
    d = Sharded()
    d.running(7)
    d.die(1)
    d.park(0, 7, shard="s0")
    assert "state of step 7 is lost" in d.ended.text


def test_where_checkpoints_are_kept_and_none_is_known_one_is_looked_for() -> None:
    d = Sharded()
    d.begin(0)
    d.run_to(7)
    d.all_die()
    assert d.journal("planned")[-1]["step"] == 0
    d.set_up()
    d.loaded(1, 0, text="durable (/d) has none")
    assert "the state of step 7 is lost" in d.ended.text
    assert "no checkpoint is left: durable (/d) has none" in d.ended.text


def test_a_fresh_start_never_hides_a_loss() -> None:
    d = Sharded()
    d.running(7)
    d.saved(6)
    d.all_die()
    d.set_up()
    d.loaded(0, 0, text="durable (/d) has none")
    assert "no checkpoint is left: durable (/d) has none" in d.ended.text


def test_a_script_that_takes_no_checkpoint_does_not_begin_again() -> None:
    d = Sharded()
    d.running(7)
    d.saved(6)
    d.all_die()
    d.set_up()
    d.commit(0, 1)
    assert "call run.checkpoint(...) each time the script runs" in d.ended.text


def test_the_state_is_lost_twice_in_one_incident() -> None:
    """Once more before a step is made: nothing more is lost by that."""
    d = Sharded()
    d.running(7)
    d.saved(6)
    d.all_die()
    d.begin(6)
    d.all_die()
    d.begin(6)
    d.run_to(8, first=7)
    assert d.closed["steps_lost"] == 1


def test_budgets_hold() -> None:
    d = Sharded(max_failures_without_progress=2)
    d.running(7)
    d.saved(6)
    for _ in range(3):
        d.all_die()
        if d.got(do.End, everything=True):
            break
        d.begin(6)
    assert "attempts in a row failed" in d.ended.text


def test_the_same_error_twice_at_one_step_ends_the_job() -> None:
    d = Sharded()
    d.running(7)
    d.saved(6)
    for _ in range(2):
        d.fault(1, 8, raised("a bug of the script"))
        d.park(1, 7, torn=True, shard="s1")
        if d.got(do.End, everything=True):
            break
        d.park(0, 7, shard="s0")
        d.reap()
        d.begin(6)
        d.run_to(7, first=7)
    assert "with the same error twice" in d.ended.text


def test_a_replacement_joins_peers_that_began_at_a_checkpoint() -> None:
    d = Driver(2)
    d.set_up()
    for rank in d.ranks:
        d.tell(ev.Loaded(**d.here(rank), step=40))
    d.run_to(42, first=41)
    d.die(1)
    d.park(0, 42)
    d.join(1)
    d.regroup()
    d.run_to(43, first=43)
    (closed,) = d.journal("incident_closed")
    assert (closed["rung"], closed["state_from"], closed["steps_lost"]) == ("respawn", "peer", 0)


def test_all_nodes_are_lost_and_others_come() -> None:
    d = OnNodes(2, spares=0, spare_wait_s=60.0)
    d.at(4)
    d.tell(ev.Saved(**d.who(0), step=3, tier=StateFrom.DURABLE))
    d.lose(0)
    d.lose(1)
    d.node_joins(2)
    d.node_joins(3)
    d.set_up()
    for rank in d.ranks:
        d.tell(ev.Loaded(**d.here(rank), step=3))
    d.run_to(5, first=4)
    (closed,) = d.journal("incident_closed")
    assert (closed["rung"], closed["steps_lost"]) == ("durable", 1)
    assert "takes the place" in closed["reason"]


def test_a_job_that_waits_for_a_node_in_vain_says_what_is_left() -> None:
    d = OnNodes(2, spares=0, spare_wait_s=60.0)
    d.at(4)
    d.tell(ev.Saved(**d.who(0), step=3, tier=StateFrom.DURABLE))
    d.lose(1)
    d.parks(0, 1)
    d.wait(61.0)
    assert "ends with the job; a checkpoint of step 3 is left" in d.ended.text


# -------------------------------------------------------------------- another coordinator


def test_the_journal_tells_another_coordinator_what_it_must_know() -> None:
    d = Sharded()
    d.running(9)
    d.saved(8, StateFrom.MEMORY)
    d.saved(4)
    d.all_die()
    d.begin(4, text="spoiled")
    d.run_to(5, first=5)
    records = [
        {"event": action.record.event, **action.record.fields}
        for action in d.got(do.Record, everything=True)
    ]
    past = recall(records)
    assert (past.base, past.recorded, past.saved) == (4, 5, {StateFrom.DURABLE: 4})
    closing = max(n for n, record in enumerate(records) if record["event"] == "incident_closed")
    incident = recall(records[:closing]).open_incident
    assert incident is not None
    assert (incident.rung, incident.steps_lost) == ("durable", 5)


@pytest.mark.parametrize("written", [True, False])
def test_another_coordinator_knows_at_which_checkpoint_all_began(written: bool) -> None:
    d = Resuming()
    d.resume(recorded=40, base=40) if written else d.resume(recorded=0)
    for node in range(2):
        ranks = d.layout.ranks_of(node)
        d.back(node, members=tuple(d.member(rank, position=(40, 0), base=40) for rank in ranks))
    assert d.resumed["undisturbed"]
    assert not d.journal("step")
    d.die(1)
    assert {kill.rank for kill in d.got(do.Kill)} == {0, 2, 3}, "they have made no step yet"
    d.commit(0, 41)
    assert not d.journal("step")


def test_what_is_told_of_checkpoints_while_no_coordinator_is_there_is_known_to_the_next() -> None:
    d = Resuming(shards=2, nnodes=2)
    d.resume(saved={StateFrom.DURABLE: 4})
    d.back(0, saved={StateFrom.DURABLE: 6})
    d.back(1)
    for rank in d.ranks:
        d.die(rank)
    assert d.journal("planned") == []
    for kill in d.got(do.Kill):
        d.die(kill.rank, incarnation=kill.incarnation)
    (planned,) = d.journal("planned")
    assert (planned["rung"], planned["step"]) == ("durable", 6)


def test_a_restore_is_over_when_all_have_loaded() -> None:
    d = Sharded()
    d.running(7)
    d.saved(6)
    d.all_die()
    d.set_up()
    d.loaded(0, 6, parts=((0, "durable", "/d", 5), (1, "durable", "/d", 3)))
    assert not d.journal("restored")
    d.loaded(1, 6, parts=((1, "durable", "/d", 4),))
    assert d.journal("restored") == [{"incident": 1, "generation": 1, "nbytes": 12}]
