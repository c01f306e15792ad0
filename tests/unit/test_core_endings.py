"""The coordinator, event by event: closing, deadlines, budgets and every way a job ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.core_driver import Driver, broken, early, killed, raised

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.words import STOP_COMMAND
from everstep.types import Cause, CauseKind

# -------------------------------------------------------------------- closing


def close_all(driver: Driver, step: int) -> None:
    for rank in driver.ranks:
        driver.close(rank, step)


def test_the_closing_fence_opens_when_all_have_left() -> None:
    driver = Driver(2).running(3)
    driver.close(0, 3)
    assert not driver.got(do.SendClosed)
    driver.close(1, 3)
    assert driver.one(do.SendClosed).to == ((0, 1), (1, 1))
    assert driver.journal("closed") == [{"step": 3}]
    driver.finish(0)
    assert not driver.got(do.End)
    driver.finish(1)
    assert [type(action) for action in driver.last] == [do.SendBye, do.Record, do.End]
    assert driver.ended == do.End(exit_code=0)
    assert driver.journal("job_ended") == [{"exit_code": 0, "text": "", "cause": None}]


def test_nothing_follows_the_end() -> None:
    driver = Driver(1).running(1)
    driver.finish(0)
    driver.die(0, early())
    assert driver.last == []
    assert driver.wait(1e6) == []


def test_a_death_in_the_closing_fence_is_survived() -> None:
    driver = Driver(3).running(3)
    driver.close(0, 3)
    driver.close(2, 3)
    driver.die(1)
    driver.park(0, 3)
    driver.park(2, 3)
    driver.join(1)
    driver.regroup()
    driver.close(1, 3)
    assert not driver.journal("closed")  # the others must say it again
    driver.close(0, 3)
    driver.close(2, 3)
    assert driver.journal("incident_closed")[0]["step"] == 4
    assert driver.events()[-2:] == ["incident_closed", "closed"]
    assert len(driver.one(do.SendClosed).to) == 3


def test_a_death_after_the_closing_fence_is_survived() -> None:
    driver = Driver(2).running(3)
    close_all(driver, 3)
    driver.finish(0)
    driver.die(1)
    driver.park(0, 3)
    driver.join(1)
    driver.regroup()
    assert not driver.journal("incident_closed")
    driver.close(1, 3)
    assert driver.one(do.SendClosed).to == ((1, 2),)
    assert len(driver.journal("incident_closed")) == 1
    assert len(driver.journal("closed")) == 1
    driver.finish(1)
    assert driver.ended.exit_code == 0


def test_those_that_have_passed_the_closing_fence_need_not_pass_it_again() -> None:
    driver = Driver(2).running(3)
    close_all(driver, 3)
    driver.die(1)
    driver.park(0, 3)
    driver.join(1)
    driver.regroup()
    driver.close(1, 3)
    assert len(driver.journal("incident_closed")) == 1


def test_a_script_without_a_loop_has_no_closing_fence() -> None:
    driver = Driver(2).running(3)
    driver.finish(0)
    driver.finish(1)
    assert driver.ended.exit_code == 0
    assert not driver.journal("closed")


def test_a_loop_without_steps_is_closed_again_after_a_start_again() -> None:
    driver = Driver(2)
    driver.set_up()
    close_all(driver, 0)
    driver.die(1)
    driver.die(0)
    driver.set_up()
    close_all(driver, 0)
    assert driver.one(do.SendClosed).to == ((0, 2), (1, 2))
    assert len(driver.journal("incident_closed")) == 1


def test_one_that_closes_while_it_is_stopped_asks_again() -> None:
    driver = Driver(2).running(3)
    close_all(driver, 3)
    driver.die(1)
    driver.park(0, 3)
    driver.join(1)
    driver.fault(0, 4, broken())
    assert driver.close(1, 3) == []
    driver.park(0, 3)
    driver.park(1, 3)
    driver.regroup()
    driver.close(1, 3)
    assert driver.one(do.SendClosed).to == ((1, 2),)


@pytest.mark.parametrize("first", [0, 1])
def test_loops_that_end_at_different_steps_end_the_job(first: int) -> None:
    driver = Driver(3).running(3)
    if first == 0:
        driver.close(0, 3)
        driver.close(2, 3)
        assert not driver.got(do.End)
        driver.commit(1, 4)
    else:
        driver.commit(1, 4)
        driver.close(1, 4)
        assert not driver.got(do.End)
        driver.close(0, 3)
    assert driver.ended.exit_code == 2
    early = "ranks 0, 2" if first == 0 else "rank 0"
    assert driver.ended.text.startswith(
        f"the ranks left their loops at different steps: {early} after step 3, but rank 1 has "
        "made step 4. "
    )


def test_a_loop_that_is_left_before_the_commit_of_a_peer_is_heard_is_no_difference() -> None:
    driver = Driver(2).running(2)
    driver.commit(0, 3)
    driver.close(0, 3)
    driver.commit(1, 3)
    driver.close(1, 3)
    assert len(driver.one(do.SendClosed).to) == 2


def test_a_second_loop_after_the_closing_fence_may_go_further() -> None:
    driver = Driver(2).running(3)
    close_all(driver, 3)
    driver.run_to(5, first=4)
    for rank in driver.ranks:
        driver.finish(rank)
    assert driver.ended.exit_code == 0


def test_an_exit_before_the_end_is_a_failure_even_with_code_0() -> None:
    driver = Driver(2).running(3)
    driver.die(0, early())
    assert driver.journal("incident_opened")[0]["cause"]["kind"] == "early_exit"
    assert driver.one(do.Spawn).joiner is True


def test_a_death_after_finish_is_a_failure_until_all_have_finished() -> None:
    driver = Driver(2).running(3)
    close_all(driver, 3)
    driver.finish(1)
    driver.die(1, early())
    assert driver.one(do.Spawn).rank == 1
    driver.finish(0)
    assert not driver.got(do.End)


# -------------------------------------------------------------------- deadlines


def test_a_survivor_that_does_not_park_is_killed_and_replaced() -> None:
    driver = Driver(3, park_timeout_s=30.0, join_timeout_s=1000.0).running(4)
    driver.die(1)
    driver.park(0, 4)
    assert driver.coordinator.next_deadline_s == 130.0
    driver.wait(30.0)
    kill = driver.one(do.Kill)
    assert (kill.rank, kill.incarnation) == (2, 1)
    assert kill.why == "rank 2's worker has not parked within 30 s of the stop, at step 5"
    assert driver.journal("stopped")  # it is not waited for any longer
    driver.die(2)
    assert driver.journal("incident_cause")[0]["cause"]["kind"] == "timeout"
    driver.join(1)
    driver.join(2)
    assert driver.one(do.SendRegroup).plan.ranks[2].sources == (0,)


def test_a_joiner_that_is_late_is_replaced() -> None:
    driver = Driver(2, join_timeout_s=20.0).running(4)
    driver.die(1)
    driver.park(0, 4)
    driver.start(1)
    driver.wait(20.0)
    assert (driver.one(do.Kill).rank, driver.one(do.Kill).incarnation) == (1, 2)
    driver.die(1)
    assert driver.one(do.Spawn).incarnation == 3


def test_a_regroup_that_hangs_is_stopped_and_names_who_is_late() -> None:
    driver = Driver(3, regroup_timeout_s=10.0).running(4)
    driver.fault(0, 5, broken())
    for rank in driver.ranks:
        driver.park(rank, 4)
    driver.tell(ev.Regrouped(**driver.here(0)))
    driver.restored(0)
    driver.wait(10.0)
    assert driver.one(do.SendStop).generation == 1
    text = driver.journal("incident_cause")[0]["cause"]["text"]
    assert text == "ranks 1, 2 have not regrouped and restored within 10 s in generation 1"


def test_a_process_that_cannot_be_killed_ends_the_job() -> None:
    driver = Driver(2, join_timeout_s=20.0, reap_timeout_s=5.0).running(4)
    driver.die(1)
    driver.park(0, 4)
    driver.wait(20.0)
    driver.wait(5.0)
    assert driver.ended.exit_code == 137
    assert "rank 1's process (incarnation 2) could not be ended within 5 s" in driver.ended.text


def test_nothing_is_awaited_while_steps_are_made() -> None:
    assert Driver(2).running(3).coordinator.next_deadline_s is None


# -------------------------------------------------------------------- repeats and budgets


def recover(driver: Driver, committed: int, died: int | None = None) -> None:
    for rank in driver.ranks:
        if rank != died:
            driver.park(rank, committed)
    if died is not None:
        driver.join(died)
    driver.regroup()


def test_the_same_error_on_the_same_rank_and_step_ends_with_its_traceback() -> None:
    driver = Driver(2).running(4)
    driver.fault(1, 5, raised())
    recover(driver, 4)
    driver.fault(1, 5, raised())
    assert driver.ended.exit_code == 1
    assert driver.ended.cause == raised()
    assert driver.ended.rank == 1
    assert driver.ended.text == (
        "rank 1 failed in step 5 with the same error twice: ValueError: no"
    )


@pytest.mark.parametrize(
    ("first", "second", "step", "rank"),
    [
        (raised("a"), raised("b"), 5, 1),
        (raised("a"), raised("a"), 6, 1),
        (raised("a"), raised("a"), 5, 0),
        (raised("a", fault="raise:rank=1,step=5"), raised("a"), 5, 1),
        (killed(), killed(), 5, 1),
    ],
    ids=["another error", "another step", "another rank", "on purpose", "killed"],
)
def test_what_is_no_repeat(first: Cause, second: Cause, step: int, rank: int) -> None:
    driver = Driver(2).running(4)
    driver.fault(1, 5, first)
    recover(driver, 4)
    driver.fault(rank, step, second)
    assert not driver.got(do.End)


def test_a_crash_that_repeats_is_the_scripts() -> None:
    crash = Cause(kind=CauseKind.SIGNAL, text="killed by SIGSEGV", signal=11)
    driver = Driver(2).running(4)
    driver.die(1, crash)
    recover(driver, 4, died=1)
    driver.die(1, crash)
    assert driver.ended.exit_code == 139


def test_an_error_of_all_ranks_ends_the_job_at_the_second_time_whoever_is_first() -> None:
    driver = Driver(3).running(4)
    driver.fault(0, 5, raised())
    driver.fault(1, 5, raised())
    driver.fault(2, 5, raised())
    recover(driver, 4)
    driver.fault(2, 5, raised())
    assert driver.ended.cause == raised()


def test_an_error_of_all_ranks_in_set_up_ends_the_job_at_the_second_time() -> None:
    driver = Driver(2)
    driver.tell(ev.JobStarted())
    driver.die(0, raised())
    driver.die(1, raised())  # while it was being killed
    driver.die(1, raised())
    assert driver.ended.exit_code == 1
    assert "same error twice" in driver.ended.text


def test_max_incidents_is_torchruns_max_restarts() -> None:
    driver = Driver(2, max_incidents=1).running(4)
    driver.die(1)
    recover(driver, 4, died=1)
    driver.run_to(5, first=5)
    assert not driver.got(do.End, everything=True)
    driver.fault(0, 6, raised())
    assert driver.ended.exit_code == 1
    assert driver.ended.cause == raised()
    assert "the job has had 2 incidents, and 1 are allowed" in driver.ended.text


def test_attempts_without_progress_are_bounded_and_the_first_cause_is_shown() -> None:
    driver = Driver(2, max_failures_without_progress=2).running(4)
    for attempt in range(2):
        driver.die(1, replace(killed(), text=f"death {attempt}"))
        recover(driver, 4, died=1)
    assert not driver.got(do.End, everything=True)
    driver.die(1)
    assert "3 attempts in a row failed" in driver.ended.text
    assert driver.ended.text.endswith("First cause, rank 1 in step 5: death 0")
    assert driver.ended.cause is not None
    assert driver.ended.cause.text == "death 0"


def test_progress_gives_the_budget_back() -> None:
    driver = Driver(2, max_failures_without_progress=1).running(4)
    for step in range(5, 9):
        driver.die(1)
        recover(driver, step - 1, died=1)
        driver.run_to(step, first=step)
    assert not driver.got(do.End, everything=True)


def test_progress_gives_the_budget_of_joiners_back() -> None:
    driver = Driver(2, max_failures_without_progress=2).running(4)
    for step in range(5, 9):
        driver.die(1)
        driver.die(1)
        recover(driver, step - 1, died=1)
        driver.run_to(step, first=step)
    assert not driver.got(do.End, everything=True)
    for _ in range(2):
        driver.die(1)
    assert not driver.got(do.End, everything=True)
    driver.die(1)
    assert driver.ended.exit_code == 137


def test_many_ranks_that_die_together_are_one_failed_attempt() -> None:
    driver = Driver(8, max_failures_without_progress=1).running(4)
    for rank in range(1, 8):
        driver.die(rank)
    assert not driver.got(do.End, everything=True)
    driver.die(3)
    assert driver.ended.exit_code == 137


def test_prove_lifts_the_budgets() -> None:
    driver = Driver(2, unlimited=True, max_incidents=0, max_failures_without_progress=0)
    driver.running(4)
    for _ in range(5):
        driver.die(1)
        recover(driver, 4, died=1)
    assert not driver.got(do.End, everything=True)


@pytest.mark.parametrize(
    "cause",
    [raised(), early(), Cause(kind=CauseKind.EXIT, text="exited with code 3", exit_code=3)],
    ids=lambda cause: str(cause.kind),
)
def test_the_repeat_rule_holds_without_budgets(cause: Cause) -> None:
    driver = Driver(2, unlimited=True).running(4)
    driver.die(1, cause)
    recover(driver, 4, died=1)
    assert not driver.got(do.End, everything=True)
    driver.die(1, cause)
    assert driver.ended.cause == cause
    assert "same error twice" in driver.ended.text


def replace_me() -> Cause:
    return Cause(kind=CauseKind.WORKER, text="a group could not be dropped")


@pytest.mark.parametrize("kind", [CauseKind.PEER, CauseKind.WORKER])
def test_what_fails_twenty_times_in_a_row_ends_the_job_without_budgets(kind: CauseKind) -> None:
    driver = Driver(2, unlimited=True).running(4)
    for attempt in range(20):
        assert not driver.got(do.End, everything=True), attempt
        if kind is CauseKind.PEER:
            driver.fault(1, 5, broken())
            died = None
        else:
            driver.fault(1, 5, replace_me())
            driver.die(1)
            died = 1
        if attempt < 19:
            recover(driver, 4, died=died)
    assert driver.ended.exit_code == 1
    assert driver.ended.text.startswith("20 attempts in a row failed with no step committed")


def test_a_joiner_that_never_gets_there_ends_the_job_without_budgets() -> None:
    driver = Driver(2, unlimited=True).running(4)
    driver.die(1)
    driver.park(0, 4)
    for _ in range(18):
        driver.die(1)
    assert not driver.got(do.End, everything=True)
    driver.die(1)
    assert "20 attempts in a row" in driver.ended.text


def test_progress_and_faults_on_purpose_break_the_row() -> None:
    driver = Driver(2, unlimited=True).running(4)
    for step in range(5, 8):
        for attempt in range(19):
            driver.fault(1, step, broken())
            recover(driver, step - 1)
            assert not driver.got(do.End, everything=True), (step, attempt)
        if step == 5:
            driver.die(1, killed(fault="kill:rank=1,step=5"))
            recover(driver, step - 1, died=1)
        driver.run_to(step, first=step)


# -------------------------------------------------------------------- other ends


def test_lost_state_ends_the_job_and_says_what_would_have_kept_it() -> None:
    driver = Driver(2).running(4)
    first = replace(killed(), text="the first")
    driver.die(0, first)
    driver.die(1)
    assert driver.ended.exit_code == 137
    assert driver.ended.cause == first
    assert driver.ended.text == (
        "the state of step 4 is lost: no process that held it is left. One more replica of every "
        "shard, copies in memory (--copies sync) or a durable checkpoint would have kept it. First "
        "cause, rank 0 in step 5: the first"
    )


def test_no_replica_is_promised_against_an_error_of_the_script() -> None:
    driver = Driver(3).running(4)
    driver.die(2)
    driver.die(1, raised("in evaluation"))
    driver.die(0, raised("too"))
    assert driver.ended.exit_code == 1
    assert (driver.ended.rank, driver.ended.cause) == (1, raised("in evaluation"))
    assert driver.ended.text == (
        "the state of step 4 is lost: no process that held it is left. The script raised on ranks "
        "0, 1, where the step could not be done again: after an update or outside the step "
        "function. A replica runs the same lines; correct the error. First cause, rank 1 in step "
        "5: in evaluation"
    )


def test_a_script_that_exits_on_all_ranks_is_named_too() -> None:
    driver = Driver(2).running(4)
    driver.die(0, early())
    driver.die(1, raised())
    assert "The script raised on rank 1 and exited on rank 0" in driver.ended.text
    assert driver.ended.cause == early()


def test_a_script_that_raises_after_its_update_on_all_ranks_is_named() -> None:
    driver = Driver(2).running(4)
    driver.fault(1, 5, raised())
    driver.fault(0, 5, raised())
    driver.park(0, 4, torn=True)
    driver.park(1, 4, torn=True)
    assert "is torn on ranks 0, 1" in driver.ended.text
    assert "The script raised on ranks 0, 1" in driver.ended.text
    assert (driver.ended.rank, driver.ended.cause) == (1, raised())


def test_an_error_of_an_attempt_that_is_over_is_not_what_lost_the_state() -> None:
    driver = Driver(2).running(4)
    driver.fault(1, 5, raised())
    recover(driver, 4)
    driver.die(0)
    driver.die(1)
    assert "One more replica" in driver.ended.text


def test_an_error_on_purpose_is_not_the_scripts() -> None:
    driver = Driver(2).running(4)
    driver.die(0, raised(fault="raise:rank=0,step=5"))
    driver.die(1)
    assert "One more replica" in driver.ended.text


def test_one_rank_is_told_to_become_two() -> None:
    driver = Driver(1).running(4)
    driver.die(0)
    assert driver.ended.text.startswith(
        "the state of step 4 is lost: no process that held it is left. With one rank there is no "
        "second copy: use --nproc-per-node 2 or more. First cause, rank 0 in step 5"
    )


def test_torn_state_is_lost_state() -> None:
    driver = Driver(2).running(4)
    driver.die(0)
    driver.park(1, 4, torn=True)
    assert driver.ended.exit_code == 137
    assert "shard 'all' is torn on rank 1, and nobody else holds it" in driver.ended.text


@pytest.mark.parametrize(("by", "said"), [("", "SIGTERM"), (STOP_COMMAND, "`everstep stop`")])
def test_a_person_may_end_the_job(by: str, said: str) -> None:
    driver = Driver(2).running(4)
    driver.tell(ev.StopAsked(signal=15, by=by))
    assert driver.ended.exit_code == 143
    assert driver.ended.text == f"the job was asked to end by {said}"


def test_the_end_is_in_the_journal_with_its_cause() -> None:
    driver = Driver(1).running(4)
    driver.die(0)
    (ended,) = driver.journal("job_ended")
    assert ended["exit_code"] == 137
    assert ended["cause"]["kind"] == "signal"
    assert type(ended["cause"]["kind"]) is str
