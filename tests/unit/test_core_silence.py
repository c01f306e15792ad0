"""What the coordinator does about silent ranks, and what the budgets of causes allow."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core_driver import Driver, early, killed, raised

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.hang import Entered, Evidence, Stance
from everstep.core.ladder import Backoff, Budget, Policy
from everstep.types import Cause, CauseKind


def shows(driver: Driver, rank: int, count: int, **more: Any) -> Evidence:
    known: dict[str, Any] = {
        "stance": Stance.WORKING,
        "where": "in step 5",
        "step": 5,
        "silent_s": 61.0,
        "since_s": driver.now_s - 61.0,
        "overdue": True,
        "groups": {7: Entered(count=count, kind="allreduce", name="world")},
    }
    return Evidence(rank=rank, **({"incarnation": driver.incarnations[rank]} | known | more))


def absent(driver: Driver, rank: int = 1, **more: Any) -> tuple[Evidence, ...]:
    """All but `rank` wait for it."""
    return tuple(
        shows(driver, r, 12 - (r == rank), **(more if r == rank else {})) for r in driver.ranks
    )


def inspect(driver: Driver, evidence: tuple[Evidence, ...]) -> list[do.Action]:
    """Silence, the inspection that is asked for, and its answer."""
    driver.tell(ev.Silent(evidence=evidence))
    assert driver.one(do.Inspect)
    return driver.tell(
        ev.Inspected(evidence=evidence, stacks=("rank 1: in f at a.py:3",), file="hang-1.txt")
    )


def test_the_culprit_is_killed_and_its_rank_respawned() -> None:
    driver = Driver().running()
    inspect(driver, absent(driver))
    assert [kill.rank for kill in driver.got(do.Kill)] == [1]
    assert driver.one(do.SendStop)
    (opened,) = driver.journal("incident_opened")
    assert opened["cause"]["kind"] == "hang"
    assert "rank 1 hangs in step 5" in opened["cause"]["text"]
    assert "ranks 0, 2, 3 wait for it in allreduce #12" in opened["cause"]["text"]
    assert opened["cause"]["detail"] == "rank 1: in f at a.py:3"
    assert opened["cause"]["at_s"] == driver.now_s - 61.0
    (hang,) = driver.journal("hang")
    assert hang == {
        "incident": 1,
        "kind": "absent",
        "ranks": [1],
        "stacks": ["rank 1: in f at a.py:3"],
        "file": "hang-1.txt",
    }
    driver.die(1)
    assert [spawn.rank for spawn in driver.got(do.Spawn)] == [1]
    assert len(driver.journal("incident_opened")) == 1
    assert driver.journal("incident_cause") == []


def test_a_silence_without_a_culprit_is_not_looked_into() -> None:
    driver = Driver().running()
    slow = tuple(shows(driver, rank, 12) for rank in driver.ranks)
    assert driver.tell(ev.Silent(evidence=slow)) == []


def test_one_inspection_at_a_time_but_one_that_is_lost_is_asked_for_again() -> None:
    driver = Driver().running()
    driver.tell(ev.Silent(evidence=absent(driver)))
    assert driver.got(do.Inspect)
    assert driver.tell(ev.Silent(evidence=absent(driver))) == []
    driver.now_s += 6
    driver.tell(ev.Silent(evidence=absent(driver)))
    assert driver.got(do.Inspect)


def test_a_rank_that_has_moved_meanwhile_is_no_culprit() -> None:
    driver = Driver().running()
    driver.tell(ev.Silent(evidence=absent(driver)))
    moved = absent(driver, overdue=False)
    assert driver.tell(ev.Inspected(evidence=moved)) == []
    assert driver.coordinator.phase == "running"


def test_an_inspection_that_found_nobody_is_not_made_again_at_once() -> None:
    driver = Driver().running()
    driver.tell(ev.Silent(evidence=absent(driver)))
    driver.now_s += 1
    driver.tell(ev.Inspected(evidence=absent(driver, overdue=False)))
    asked = []
    for _ in range(24):  # six seconds of looks
        driver.now_s += 0.25
        asked.append(bool(driver.tell(ev.Silent(evidence=absent(driver)))))
    assert (asked.index(True), sum(asked)) == (19, 1)


def test_evidence_of_a_process_that_is_gone_changes_nothing() -> None:
    driver = Driver().running()
    stale = absent(driver, incarnation=99)
    assert driver.tell(ev.Silent(evidence=stale)) == []


def test_the_only_holder_of_the_state_is_not_killed() -> None:
    driver = Driver(1).running()
    alone = (shows(driver, 0, 3, stopped=True),)
    assert driver.tell(ev.Silent(evidence=alone)) == []


class Sharded(Driver):
    """Ranks with shards of their own, but for 0 and 1, which are replicas."""

    def protect(self, rank: int, manifest: str = "m", **digests: str) -> list[do.Action]:
        shard = f"part {max(rank, 1)}"
        said = ev.Protected(**self.who(rank), shard=shard, manifest=manifest, digests=digests)
        return self.tell(said)


def test_the_only_holder_of_a_shard_is_spared_and_that_is_said_once() -> None:
    driver = Sharded().running()
    evidence = absent(driver, 2, stopped=True, overdue=False)
    inspect(driver, evidence)
    assert driver.got(do.Kill) == []
    assert driver.got(do.SendStop) == []
    (note,) = driver.journal("note")
    assert note["text"].startswith("rank 2 has been stopped by a signal (SIGSTOP or the like)")
    assert "nobody else holds the state of rank 2" in note["text"]
    assert note["text"].endswith("with `kill -CONT`; where all ranks stood is in hang-1.txt")
    assert driver.journal("hang") == driver.journal("incident_opened") == []
    driver.now_s += 600
    assert driver.tell(ev.Silent(evidence=evidence)) == []
    # The answer to one that was under way.
    assert driver.tell(ev.Inspected(evidence=evidence)) == []


def test_a_replica_of_a_shard_is_killed() -> None:
    driver = Sharded().running()
    inspect(driver, absent(driver, 0, stopped=True))
    assert [kill.rank for kill in driver.got(do.Kill)] == [0]


def test_all_replicas_of_a_shard_are_spared_together() -> None:
    driver = Sharded().running()
    inspect(driver, tuple(shows(driver, r, 12, stopped=r < 2) for r in driver.ranks))
    assert driver.got(do.Kill) == []
    (note,) = driver.journal("note")
    assert "nobody else holds the state of ranks 0, 1" in note["text"]


def test_a_replica_whose_copy_is_torn_is_no_copy() -> None:
    driver = Sharded().running()
    driver.die(3)
    driver.park(0, 4, torn=True)
    stopped = tuple(shows(driver, r, 12, stopped=r == 1) for r in driver.ranks if r != 3)
    inspect(driver, stopped)
    assert driver.got(do.Kill) == []
    assert "nobody else holds the state of rank 1" in driver.journal("note")[0]["text"]


def test_before_the_first_commit_there_is_no_state_to_spare() -> None:
    driver = Sharded()
    driver.set_up()
    inspect(driver, absent(driver, 2, stopped=True))
    assert 2 in [kill.rank for kill in driver.got(do.Kill)]


def test_a_fault_on_purpose_is_named() -> None:
    driver = Driver().running()
    inspect(driver, absent(driver, fault="stop:rank=1,step=5", stopped=True))
    (opened,) = driver.journal("incident_opened")
    assert opened["cause"]["fault"] == "stop:rank=1,step=5"
    driver.die(1, killed("stop:rank=1,step=5"))
    assert driver.journal("incident_cause") == []


def test_the_same_hang_twice_is_in_the_script() -> None:
    driver = Driver().running()
    recover(driver, absent(driver))
    inspect(driver, absent(driver))
    assert driver.ended.exit_code == 1
    assert "failed in step 5 with the same error twice: rank 1 hangs" in driver.ended.text


def test_a_stop_from_outside_may_come_twice() -> None:
    driver = Driver().running()
    for _ in range(2):
        recover(driver, absent(driver, stopped=True))
    assert driver.got(do.End, everything=True) == []


def recover(driver: Driver, evidence: tuple[Evidence, ...]) -> None:
    """The culprit is replaced, and all stand before step 5 again."""
    inspect(driver, evidence)
    driver.die(1)
    for rank in (0, 2, 3):
        driver.park(rank, 4)
    driver.join(1)
    driver.regroup()
    assert driver.coordinator.phase == "running"


def test_a_rehearsal_that_hangs_like_the_step_ends_the_job() -> None:
    driver = Driver(join_timeout_s=50.0).running()
    inspect(driver, absent(driver))
    driver.die(1)
    for rank in (0, 2, 3):
        driver.park(rank, 4)
    driver.start(1)
    driver.protect(1)
    driver.tell(ev.Waiting(**driver.who(1)))
    driver.wait(51.0)
    driver.die(1)
    assert "with the same error twice" in driver.ended.text


def test_a_loop_that_is_left_alone_ends_the_job() -> None:
    driver = Driver().running()
    driver.close(1, 4)
    evidence = absent(driver, stance=Stance.LEFT, overdue=False)
    inspect(driver, evidence)
    assert driver.ended.exit_code == 2
    assert driver.ended.text.startswith("rank 1 has left its loop after step 5")
    assert driver.journal("hang")[0]["kind"] == "left"


def test_ranks_that_wait_for_each_other_begin_again() -> None:
    """Nobody is killed; the second time it is in the script."""
    driver = Driver(2).running()

    def ring() -> tuple[Evidence, ...]:
        return tuple(
            shows(
                driver,
                rank,
                0,
                groups={
                    7: Entered(count=12 + rank, kind="allreduce", name="a"),
                    8: Entered(count=13 - rank, kind="allreduce", name="b"),
                },
            )
            for rank in driver.ranks
        )

    inspect(driver, ring())
    assert driver.got(do.Kill) == []
    assert driver.one(do.SendStop)
    for rank in driver.ranks:
        driver.park(rank, 4)
    driver.regroup()
    inspect(driver, ring())
    assert "ranks 0, 1 wait for each other" in driver.ended.text


def test_a_survivor_that_does_not_unwind_is_killed() -> None:
    driver = Driver().running()
    driver.die(0)
    for rank in (1, 2):
        driver.park(rank, 4)
    evidence = (*(shows(driver, r, 12, stance=Stance.APART, overdue=False) for r in (1, 2)),)
    inspect(driver, (*evidence, shows(driver, 3, 12)))
    assert [kill.rank for kill in driver.got(do.Kill)] == [3]
    (cause,) = driver.journal("incident_cause")
    assert "rank 3 hangs in step 5: it was told to stop" in cause["cause"]["text"]
    assert cause["cause"]["kind"] == "hang"


def test_counts_mean_nothing_while_a_generation_ends() -> None:
    driver = Driver().running()
    driver.die(0)
    driver.park(1, 4)
    evidence = (shows(driver, 1, 11, stance=Stance.APART), shows(driver, 2, 12, overdue=False))
    assert driver.tell(ev.Silent(evidence=evidence)) == []


@pytest.mark.parametrize("moment", ["setting up", "stopping", "regrouping"])
def test_a_stopped_process_is_replaced_whatever_it_is_about(moment: str) -> None:
    driver = Driver()
    if moment == "setting up":
        driver.tell(ev.JobStarted())
    else:
        driver.running().die(0)
        driver.park(2, 4)
        driver.park(3, 4)
        if moment == "regrouping":
            driver.park(1, 4)
            driver.join(0)
    assert driver.coordinator.phase == moment
    apart = {"stance": Stance.APART, "overdue": False}
    inspect(
        driver,
        tuple(shows(driver, r, 0, stopped=r == 1, **apart) for r in driver.ranks if r),
    )
    assert 1 in [kill.rank for kill in driver.got(do.Kill)]


def test_a_late_process_that_cannot_be_reaped_is_a_bounded_wait() -> None:
    driver = Driver(reap_timeout_s=30.0).running()
    inspect(driver, absent(driver))
    driver.wait(31.0)
    assert "could not be ended within 30 s of SIGKILL" in driver.ended.text


# ---------------------------------------------------------------------- budgets


def test_incidents_of_one_kind_within_the_window() -> None:
    budget = Budget(Policy(max_per_cause=2, incident_window_s=100.0))
    for now_s in (0.0, 50.0, 101.0):  # the first has left the window when the third comes
        budget.caused(early(), now_s)
        assert budget.exceeded() is None
    budget.caused(raised(), 102.0)
    assert budget.exceeded() is None
    budget.caused(early(), 103.0)
    said = budget.exceeded()
    assert said is not None
    assert said.startswith("more than 2 incidents of the kind early_exit within 100 s")


def test_echoes_and_faults_on_purpose_are_not_counted() -> None:
    budget = Budget(Policy(max_per_cause=0))
    budget.caused(killed("kill:rank=1,step=2"), 1.0)
    budget.caused(Cause(kind=CauseKind.PEER, text="lost touch"), 2.0)
    assert budget.exceeded() is None


def test_a_spent_budget_ends_the_job_with_the_first_cause() -> None:
    driver = Driver(max_per_cause=0).running()
    driver.die(1)
    assert driver.ended.exit_code == 137
    assert "more than 0 incidents of the kind signal" in driver.ended.text
    assert "First cause, rank 1 in step 5" in driver.ended.text


def test_a_rank_that_fails_quickly_waits_longer_each_time() -> None:
    backoff = Backoff(Policy(backoff_s=0.5, max_backoff_s=3.0, quick_failure_s=60.0))
    waits = []
    for number in range(6):
        backoff.failed(1, 10.0 * number)
        waits.append(backoff.delay_s(1, 10.0 * number))
    assert waits == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.delay_s(0, 50.0) == 0.0
    backoff.failed(1, 200.0)  # it had lived for long
    assert backoff.delay_s(1, 200.0) == 0.0


def test_where_budgets_are_lifted_nobody_waits() -> None:
    backoff = Backoff(Policy(unlimited=True))
    for _ in range(9):
        backoff.failed(1, 1.0)
    assert backoff.delay_s(1, 1.0) == 0.0


def test_the_wait_is_in_the_order_and_in_the_joiners_deadline() -> None:
    driver = Driver(join_timeout_s=10.0, backoff_s=4.0).running()
    driver.die(1)
    assert driver.one(do.Spawn).delay_s == 0.0
    driver.die(1)
    assert driver.one(do.Spawn).delay_s == 4.0
    for rank in (0, 2, 3):
        driver.park(rank, 4)
    driver.wait(13.0)
    assert driver.got(do.Kill) == []
    driver.wait(2.0)
    assert [kill.rank for kill in driver.got(do.Kill)] == [1]
