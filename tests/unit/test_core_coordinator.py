"""The coordinator, event by event: set-up, failures, stop, regroup."""

from __future__ import annotations

import pytest
from tests.unit.core_driver import Driver, broken, early, killed, raised

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.types import Cause, CauseKind, Decision, Holding

# -------------------------------------------------------------------- set-up


def test_all_ranks_are_spawned_and_let_go_when_replicas_agree() -> None:
    driver = Driver(3)
    driver.tell(ev.JobStarted())
    spawns = driver.got(do.Spawn)
    assert [(s.rank, s.incarnation, s.generation, s.joiner) for s in spawns] == [
        (rank, 1, 0, False) for rank in range(3)
    ]
    for rank in range(3):
        driver.start(rank)
    for rank in range(2):
        driver.protect(rank)
        assert not driver.got(do.SendGo)
    driver.protect(2)
    assert driver.one(do.SendGo).to == ((0, 1), (1, 1), (2, 1))
    assert driver.events()[-1] == "setup_done"


def test_a_replica_that_differs_ends_the_job_and_is_named() -> None:
    driver = Driver(4)
    driver.tell(ev.JobStarted())
    for rank in range(4):
        driver.start(rank)
    for rank in (0, 2, 3):
        driver.protect(rank, **{"model.fc.weight": "ab12" * 4})
    driver.protect(1, **{"model.fc.weight": "cd34" * 4})
    assert driver.ended.exit_code == 2
    assert driver.ended.text.startswith(
        "parameter model.fc.weight differs: ranks 0, 2, 3 hold ab12ab12, rank 1 holds cd34cd34."
    )
    assert driver.coordinator.next_deadline_s is None


def test_set_up_that_lasts_too_long_names_the_ranks_that_are_late() -> None:
    driver = Driver(3, setup_timeout_s=50.0)
    driver.tell(ev.JobStarted())
    driver.start(1)
    driver.protect(1)
    assert driver.coordinator.next_deadline_s == 150.0
    driver.wait(49.0)
    assert not driver.got(do.End)
    driver.wait(1.0)
    assert driver.ended.exit_code == 1
    assert driver.ended.text.startswith("ranks 0, 2 have not called protect within 50 s")


def test_a_rank_that_ends_without_protect_is_not_waited_for() -> None:
    driver = Driver(2)
    driver.tell(ev.JobStarted())
    driver.start(0)
    driver.protect(0)
    driver.start(1)
    driver.finish(1)
    assert driver.ended.exit_code == 2
    assert "rank 1 has ended without calling protect" in driver.ended.text


def test_a_script_that_never_protects_may_end() -> None:
    driver = Driver(2)
    driver.tell(ev.JobStarted())
    for rank in (0, 1):
        driver.start(rank)
        driver.finish(rank)
    assert driver.one(do.SendBye).to == ((0, 1), (1, 1))
    assert driver.ended.exit_code == 0


def test_refused_input_ends_the_job_with_its_text() -> None:
    driver = Driver(2)
    driver.tell(ev.JobStarted())
    driver.start(0)
    driver.tell(ev.Refused(**driver.who(0), text="protect needs an optimizer"))
    assert (driver.ended.exit_code, driver.ended.text) == (2, "protect needs an optimizer")


def test_before_the_first_commit_all_start_again_from_the_script() -> None:
    driver = Driver(3)
    driver.set_up()
    driver.die(1)
    assert {kill.rank for kill in driver.got(do.Kill)} == {0, 2}
    assert [(s.rank, s.incarnation, s.generation, s.joiner) for s in driver.got(do.Spawn)] == [
        (1, 2, 1, False)
    ]
    for rank in (0, 2):
        driver.die(rank)  # killed by us: no causes of their own
        assert driver.one(do.Spawn).joiner is False
    assert len(driver.journal("incident_opened")) == 1
    assert not driver.journal("incident_cause")
    driver.set_up()
    assert driver.one(do.SendGo).to == ((0, 2), (1, 2), (2, 2))
    driver.run_to(1)
    (closed,) = driver.journal("incident_closed")
    assert (closed["rung"], closed["state_from"], closed["step"]) == ("respawn", "script", 1)
    assert closed["reason"] == (
        "rank 1 failed before any step was committed; ranks 0-2 start again from the script"
    )


CRASH = Cause(kind=CauseKind.SIGNAL, text="killed by SIGSEGV", signature="SIGSEGV", signal=11)


@pytest.mark.parametrize(
    ("cause", "before_kill"),
    [
        (CRASH, False),
        (killed(), True),
        (killed(fault="kill:rank=1,step=1"), False),
        (raised(), False),
        (early(), False),
    ],
    ids=["another signal", "dead before the kill", "on purpose", "raised", "exited"],
)
def test_a_death_behind_an_echo_is_shown_though_its_rank_was_to_be_killed(
    cause: Cause, before_kill: bool
) -> None:
    driver = Driver(3, max_failures_without_progress=1)
    driver.set_up()
    driver.fault(0, 1, broken())
    assert {kill.rank for kill in driver.got(do.Kill)} == {0, 1, 2}
    driver.die(2)  # our kill
    driver.die(1, cause, before_kill=before_kill)
    driver.die(0)  # our kill, too
    assert [line["rank"] for line in driver.journal("incident_cause")] == [1]
    assert driver.generation == 1  # it was one failed attempt
    driver.set_up()
    driver.fault(2, 1, broken())
    assert driver.ended.cause == cause
    assert driver.ended.rank == 1


def test_our_own_kills_are_no_causes_of_an_echo() -> None:
    driver = Driver(2, max_failures_without_progress=1)
    driver.set_up()
    driver.fault(0, 1, broken())
    driver.die(0)
    driver.die(1)
    driver.set_up()
    driver.fault(0, 1, broken())
    assert driver.ended.cause == broken()


def test_a_crash_behind_an_echo_that_repeats_is_the_scripts() -> None:
    driver = Driver(2)
    driver.set_up()
    for _ in range(2):
        driver.fault(0, 1, broken())
        driver.die(1, CRASH)
        if not driver.got(do.End):
            driver.die(0)
            driver.set_up()
    assert driver.ended.exit_code == 139
    assert "same error twice" in driver.ended.text


def test_one_that_crashes_before_it_is_killed_for_being_late_has_crashed() -> None:
    driver = Driver(3, park_timeout_s=30.0, join_timeout_s=1000.0).running(4)
    driver.die(1)
    driver.park(0, 4)
    driver.wait(30.0)
    assert driver.one(do.Kill).rank == 2
    driver.die(2, CRASH)
    assert driver.journal("incident_cause")[0]["cause"]["signal"] == 11


def test_a_dead_mans_commit_is_not_taken_for_the_new_worlds() -> None:
    driver = Driver(2)
    driver.set_up()
    driver.die(1)
    driver.tell(ev.Committed(rank=0, incarnation=1, generation=0, step=1, at_s=0.0))
    driver.die(0, incarnation=1)
    driver.set_up()
    assert not driver.journal("step")


def test_a_step_that_only_the_dead_had_committed_is_made_again_from_the_script() -> None:
    driver = Driver(2)
    driver.set_up()
    driver.commit(0, 1)
    driver.die(0)
    assert driver.one(do.Spawn).joiner is True
    driver.park(1, 0)
    assert {kill.rank for kill in driver.got(do.Kill)} == {0, 1}
    driver.die(0)
    driver.die(1)
    driver.set_up()
    driver.run_to(1)
    assert driver.journal("incident_closed")[0]["state_from"] == "script"


def test_a_step_that_only_one_had_committed_is_made_again_when_it_dies_while_it_serves() -> None:
    driver = Driver(2).running(0)
    driver.commit(0, 1)
    driver.die(1)
    driver.park(0, 1)
    driver.join(1)
    assert driver.one(do.SendRegroup).plan.step == 1
    driver.die(0)
    driver.park(1, 0, torn=True)
    assert driver.coordinator.phase == "setting up"
    driver.die(0)
    driver.die(1)
    driver.set_up()
    driver.run_to(1)
    assert driver.journal("incident_closed")[0]["state_from"] == "script"


# -------------------------------------------------------------------- respawn and retry


def test_a_death_stops_the_others_and_spawns_a_joiner_at_once() -> None:
    driver = Driver(4).running(4)
    driver.die(1)
    assert [type(action) for action in driver.last] == [
        do.Record,  # incident_opened
        do.SendStop,
        do.Record,  # spawned
        do.Spawn,
    ]
    assert driver.one(do.SendStop).to == ((0, 1), (2, 1), (3, 1))
    spawn = driver.one(do.Spawn)
    assert (spawn.rank, spawn.incarnation, spawn.generation, spawn.joiner) == (1, 2, 0, True)


def test_respawn_from_the_death_to_the_first_commit() -> None:
    driver = Driver(4).running(4)
    driver.die(1)
    driver.start(1)
    driver.protect(1)
    assert driver.one(do.SendGo).to == ((1, 2),)
    driver.tell(ev.Waiting(**driver.who(1)))
    assert not driver.got(do.SendPosition)
    for rank in (0, 2, 3):
        driver.park(rank, 4)
    position = driver.one(do.SendPosition)
    assert (position.rank, position.incarnation, position.step) == (1, 2, 4)
    driver.park(1, 4, torn=False)  # whatever a joiner says, it has no state
    regroup = driver.one(do.SendRegroup)
    assert regroup.generation == 1
    assert regroup.to == ((0, 1), (1, 2), (2, 1), (3, 1))
    assert regroup.plan.ranks[1].decision is Decision.FETCH
    assert regroup.plan.ranks[1].sources == (0, 2, 3)
    driver.regroup()
    assert not driver.journal("incident_closed")
    driver.run_to(5, first=5)
    (closed,) = driver.journal("incident_closed")
    assert closed == {
        "incident": 1,
        "rung": "respawn",
        "state_from": "peer",
        "reason": "rank 1 takes step 4 from ranks 0, 2, 3",
        "step": 5,
        "steps_lost": 0,
    }
    assert driver.events()[-13:-6] == [
        "started",
        "parked",
        "parked",
        "parked",
        "stopped",
        "parked",
        "ready",
    ]
    assert driver.events()[-6:-4] == ["planned", "regrouped"]
    assert driver.events()[-4:] == ["receipt", "restored", "step", "incident_closed"]
    assert driver.journal("restored") == [{"incident": 1, "generation": 1, "nbytes": 40}]


def test_an_exception_is_retried_in_place() -> None:
    driver = Driver(3).running(4)
    driver.fault(2, 5, raised())
    assert driver.one(do.SendStop).to == ((0, 1), (1, 1), (2, 1))
    assert not driver.got(do.Spawn)
    for rank in range(3):
        driver.park(rank, 4)
    assert {part.decision for part in driver.one(do.SendRegroup).plan.ranks} == {Decision.KEEP}
    driver.regroup()
    driver.run_to(5, first=5)
    (closed,) = driver.journal("incident_closed")
    assert (closed["rung"], closed["state_from"]) == ("retry", "process")
    assert closed["reason"] == "ranks 0-2 redo step 5 from their own memory"


def test_a_rank_that_is_behind_takes_the_step_that_a_peer_has_committed() -> None:
    driver = Driver(3).running(4)
    driver.commit(0, 5)
    driver.fault(2, 5, broken())
    driver.park(0, 5)
    driver.park(1, 4, can_advance=True)
    driver.park(2, 4)
    plan = driver.one(do.SendRegroup).plan
    assert plan.step == 5
    assert [part.decision for part in plan.ranks] == [
        Decision.KEEP,
        Decision.ADVANCE,
        Decision.FETCH,
    ]
    driver.commit(1, 5)  # its replay
    driver.regroup()
    assert [line["step"] for line in driver.journal("step")] == [1, 2, 3, 4, 5]
    assert not driver.journal("incident_closed")
    driver.run_to(6, first=6)
    assert driver.journal("incident_closed")[0]["steps_lost"] == 0


def test_a_step_that_all_had_committed_and_that_is_gone_counts_as_lost() -> None:
    driver = Driver(2).running(6)
    driver.fault(0, 7, broken())
    driver.park(0, 5)
    driver.park(1, 5)
    assert driver.one(do.SendRegroup).plan.step == 5
    driver.fault(1, 6, broken())
    assert driver.journal("incident_cause")[0]["step"] == 6
    driver.park(0, 5)
    driver.park(1, 5)
    driver.regroup()
    driver.run_to(6, first=6)
    assert driver.journal("incident_closed")[0]["steps_lost"] == 1
    assert [line["step"] for line in driver.journal("step")][-2:] == [6, 6]


def test_state_that_a_peer_gave_in_an_earlier_attempt_still_came_from_a_peer() -> None:
    driver = Driver(2).running(4)
    driver.die(1)
    driver.park(0, 4)
    driver.join(1)
    driver.regroup()
    driver.fault(0, 5, broken())
    driver.park(0, 4)
    driver.park(1, 4)
    driver.regroup()
    driver.run_to(5, first=5)
    (closed,) = driver.journal("incident_closed")
    assert (closed["rung"], closed["state_from"]) == ("respawn", "peer")
    assert closed["reason"] == "ranks 0, 1 redo step 5 from their own memory"


def test_stale_words_change_nothing() -> None:
    driver = Driver(2).running(4)
    driver.die(1)
    for stale in (
        ev.Died(rank=1, incarnation=1, cause=killed()),
        ev.Committed(rank=1, incarnation=1, generation=0, step=9, at_s=0.0),
        ev.Parked(rank=1, incarnation=1, generation=0, holding=Holding(committed=9)),
        ev.Finished(rank=1, incarnation=1),
        ev.Faulted(rank=0, incarnation=1, generation=-1, step=5, cause=raised()),
        ev.Regrouped(rank=0, incarnation=1, generation=0),
        ev.Restored(rank=0, incarnation=1, generation=0, ok=True),
        ev.Started(rank=7, incarnation=1, pid=1),
        ev.Started(rank=0, incarnation=1, pid=1),
    ):
        assert driver.tell(stale) == [], stale
    assert driver.incarnations == [1, 2]


def test_a_broken_collective_is_an_echo_of_the_death_that_follows() -> None:
    driver = Driver(3).running(4)
    driver.fault(0, 5, broken())
    driver.die(1)
    driver.park(0, 4, torn=True)
    driver.park(2, 4, torn=True)
    assert driver.ended.cause == killed()
    assert driver.ended.rank == 1
    assert driver.ended.exit_code == 137


def test_the_cause_behind_an_echo_is_shown_with_its_own_step() -> None:
    """Rank 0 was a step further when it lost touch with rank 1."""
    driver = Driver(3).running(4)
    for rank in (0, 2):
        driver.commit(rank, 5)
    driver.fault(0, 6, broken())
    driver.die(1)
    driver.park(0, 5, torn=True)
    driver.park(2, 5, torn=True)
    assert "First cause, rank 1 in step 5: killed by SIGKILL" in driver.ended.text


def test_echoes_of_the_stop_are_no_causes() -> None:
    driver = Driver(3).running(4)
    driver.die(1)
    driver.fault(0, 5, broken())
    assert driver.last == []
    driver.fault(2, 5, raised())
    assert [line["rank"] for line in driver.journal("incident_cause")] == [2]
    assert not driver.got(do.SendStop)


# -------------------------------------------------------------------- failures in a recovery


def test_a_survivor_that_dies_in_the_stop_is_replaced_in_the_same_generation() -> None:
    driver = Driver(3).running(4)
    driver.die(1)
    driver.park(0, 4)
    driver.die(2)
    assert not driver.got(do.SendStop)
    assert driver.one(do.Spawn).generation == 0
    driver.join(1)
    driver.join(2)
    assert driver.one(do.SendRegroup).plan.ranks[1].sources == (0,)
    assert [line["incident"] for line in driver.journal("incident_opened")] == [1]


def test_a_death_in_the_regroup_stops_the_new_generation() -> None:
    driver = Driver(3).running(4)
    driver.die(1)
    driver.park(0, 4)
    driver.park(2, 4)
    driver.join(1)
    driver.tell(ev.Regrouped(**driver.here(0)))
    driver.die(2)
    stop = driver.one(do.SendStop)
    assert (stop.generation, stop.to) == (1, ((0, 1), (1, 2)))
    driver.tell(ev.Parked(**driver.who(0), generation=0, holding=Holding(committed=9)))
    assert driver.last == []
    driver.park(0, 4)
    driver.park(1, 0, torn=True)
    driver.join(2)
    assert driver.one(do.SendRegroup).generation == 2
    assert [line["generation"] for line in driver.journal("stopped")] == [0, 1]
    assert [line["generation"] for line in driver.journal("ready")] == [0, 1]
    assert [line["generation"] for line in driver.journal("planned")] == [1, 2]
    driver.regroup()
    driver.run_to(5, first=5)
    assert len(driver.journal("incident_closed")) == 1


def test_a_joiner_that_dies_is_replaced() -> None:
    driver = Driver(2).running(4)
    driver.die(1)
    driver.start(1)
    driver.die(1)
    spawn = driver.one(do.Spawn)
    assert (spawn.incarnation, spawn.joiner) == (3, True)


def test_a_survivor_that_dies_after_the_position_was_told_changes_the_step() -> None:
    driver = Driver(4).running(4)
    driver.commit(0, 5)
    driver.die(1)
    driver.park(0, 5)
    driver.park(2, 4)
    driver.park(3, 4)
    driver.start(1)
    driver.protect(1)
    driver.tell(ev.Waiting(**driver.who(1)))
    assert driver.one(do.SendPosition).step == 5
    driver.die(0)
    kill = driver.one(do.Kill)
    assert (kill.rank, kill.incarnation) == (1, 2)
    assert kill.why == "it rehearsed after step 5, and its peers go on from step 4"
    driver.die(1)
    assert driver.one(do.Spawn).incarnation == 3
    assert len(driver.journal("incident_cause")) == 1


def test_a_joiner_of_another_make_ends_the_job() -> None:
    driver = Driver(2).running(4)
    driver.die(1)
    driver.start(1)
    driver.protect(1, manifest="other", w="x", extra="y")
    assert driver.ended.exit_code == 2
    assert "rank 1's replacement (incarnation 2) built other state" in driver.ended.text
    assert "extra is there in addition" in driver.ended.text


def test_a_receipt_that_does_not_hold_makes_the_rank_torn() -> None:
    driver = Driver(3).running(4)
    driver.die(1)
    driver.park(0, 4)
    driver.park(2, 4)
    driver.join(1)
    driver.restored(1, ok=False, text="digest of w")
    assert driver.one(do.SendStop).generation == 1
    assert driver.journal("incident_cause")[0]["cause"]["kind"] == "receipt"
    driver.park(0, 4)
    driver.park(2, 4)
    driver.park(1, 4)  # it believes itself whole
    assert driver.one(do.SendRegroup).plan.ranks[1].sources == (0, 2)
    driver.regroup()
    driver.run_to(5, first=5)
    assert driver.journal("incident_closed")[0]["state_from"] == "peer"


def fetch_badly(driver: Driver, step: int = 4) -> None:
    """Rank 1 takes the state of `step` from ranks 0 and 2, and it is not theirs."""
    sources = driver.one(do.SendRegroup).plan.ranks[1].sources
    assert sources == (0, 2)
    driver.restored(1, ok=False, text="digest ab, not cd", sources=sources)


@pytest.mark.parametrize("unlimited", [False, True])
def test_the_second_bad_receipt_of_a_rank_at_a_step_ends_the_job(unlimited: bool) -> None:
    driver = Driver(3, unlimited=unlimited).running(4)
    driver.die(1)
    driver.park(0, 4)
    driver.park(2, 4)
    driver.join(1)
    fetch_badly(driver)
    for rank in driver.ranks:
        driver.park(rank, 4)
    assert not driver.got(do.End, everything=True)
    fetch_badly(driver)
    assert driver.ended.exit_code == 1
    assert driver.ended.rank == 1
    assert driver.ended.cause is not None
    assert driver.ended.cause.kind is CauseKind.RECEIPT
    assert driver.ended.text.startswith(
        "rank 1's receipt of step 4, taken from ranks 0, 2, does not hold: digest ab, not cd. It "
        "is the second time at this step, so the copies differ: those ranks are no replicas"
    )


@pytest.mark.parametrize(("rank", "step"), [(0, 4), (1, 5)])
def test_another_bad_receipt_is_no_repeat(rank: int, step: int) -> None:
    driver = Driver(3, unlimited=True).running(4)
    driver.die(1)
    driver.park(0, 4)
    driver.park(2, 4)
    driver.join(1)
    fetch_badly(driver)
    for each in driver.ranks:
        driver.park(each, 4)
    driver.regroup()
    if step == 5:
        driver.run_to(5, first=5)
    driver.die(rank)
    for each in driver.ranks:
        if each != rank:
            driver.park(each, step)
    driver.join(rank)
    driver.restored(rank, ok=False, text="differs", sources=(2,))
    assert not driver.got(do.End, everything=True)


def test_each_fetch_leaves_its_receipt_in_the_journal() -> None:
    driver = Driver(3).running(4)
    driver.die(1)
    driver.park(0, 4)
    driver.park(2, 4)
    driver.join(1)
    driver.restored(0, digest="cd")  # a source has nothing to show
    driver.restored(1, ok=False, text="differs", sources=(0, 2), digest="ab", at_s=9.5)
    assert driver.journal("receipt") == [
        {
            "rank": 1,
            "generation": 1,
            "step": 4,
            "sources": [0, 2],
            "digest": "ab",
            "nbytes": 10,
            "ok": False,
            "at_s": 9.5,
        }
    ]


def test_how_often_a_joiner_rehearsed_is_in_the_journal() -> None:
    driver = Driver(2).running(4)
    driver.die(1)
    driver.park(0, 4)
    driver.start(1)
    driver.protect(1)
    driver.tell(ev.Waiting(**driver.who(1)))
    torn = Holding(committed=0, torn=True)
    driver.tell(ev.Parked(**driver.here(1), holding=torn, rehearsed_passes=2))
    assert [line["rehearsed_passes"] for line in driver.journal("parked")] == [0, 2]


def test_a_bad_receipt_counts_even_when_something_else_has_stopped_the_generation() -> None:
    driver = Driver(3).running(4)
    driver.die(1)
    driver.park(0, 4)
    driver.park(2, 4)
    driver.join(1)
    driver.fault(0, 5, broken())
    driver.restored(1, ok=False, text="digest of w")
    for rank in range(3):
        driver.park(rank, 4)
    assert driver.one(do.SendRegroup).plan.ranks[1].decision is Decision.FETCH


def test_a_worker_that_asks_to_be_replaced_is() -> None:
    driver = Driver(2).running(4)
    driver.fault(1, 5, Cause(kind=CauseKind.WORKER, text="a group could not be dropped"))
    assert driver.one(do.Kill).rank == 1
    driver.die(1)
    assert driver.one(do.Spawn).joiner is True
    driver.park(0, 4)
    driver.join(1)
    driver.regroup()
    driver.run_to(5, first=5)
    assert driver.journal("incident_closed")[0]["rung"] == "respawn"


@pytest.mark.parametrize("cause", [killed(), early(), raised()])
def test_any_way_to_die_is_a_failure(cause: Cause) -> None:
    driver = Driver(2).running(4)
    driver.die(1, cause)
    assert driver.journal("incident_opened")[0]["cause"]["kind"] == cause.kind.value
    assert driver.one(do.Spawn).joiner is True
