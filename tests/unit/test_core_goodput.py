"""The ledger's fold: stages, parts of the wall time, journals that are cut."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.core.goodput import Ledger, fold
from everstep.types import CauseKind, Rung, Stage, StateFrom

R = dict[str, Any]


def line(t: float, event: str, **fields: Any) -> R:
    return {"t": t, "event": event, **fields}


def cause(kind: str = "signal", fault: str | None = None, at_s: float | None = None) -> R:
    return {
        "kind": kind,
        "text": f"a {kind}",
        "detail": "",
        "signature": "",
        "exit_code": None,
        "signal": 9 if kind == "signal" else None,
        "at_s": at_s,
        "fault": fault,
    }


def plan(t: float, event: str, **fields: Any) -> R:
    known = {"incident": 1, "rung": "respawn", "state_from": "peer", "reason": "because"}
    return line(t, event, **known, **fields)


HEAD = [
    line(0.0, "journal", format="everstep-journal", version=1, run_id="r1", wall_time=1.0),
    line(1.0, "job_started", world_size=4, script="s.py", args=[]),
    line(4.0, "setup_done"),
    line(6.0, "step", step=1, generation=0),
    line(8.0, "step", step=2, generation=0),
]
FIRED = line(9.01, "fault_fired", index=0, text="kill:rank=1,step=3", rank=1, step=3, fired_t=9.0)
OPENED = line(
    9.5,
    "incident_opened",
    incident=1,
    rank=1,
    incarnation=1,
    step=3,
    cause=cause(fault="kill:rank=1,step=3"),
    generation=0,
)
RECOVERY = [
    line(10.0, "stopped", incident=1, generation=0),
    line(11.0, "ready", incident=1, generation=0),
    plan(11.0, "planned", generation=1, step=2),
    line(13.0, "regrouped", incident=1, generation=1),
    line(13.5, "restored", incident=1, generation=1, nbytes=100),
    line(16.0, "step", step=3, generation=1),
    plan(16.0, "incident_closed", step=3, steps_lost=0),
]
TAIL = [
    line(18.0, "step", step=4, generation=1),
    line(18.5, "closed", step=4),
    line(20.0, "job_ended", exit_code=0, text="", cause=None),
]
WHOLE = [*HEAD, FIRED, OPENED, *RECOVERY, *TAIL]


def test_what_is_written_after_the_end_costs_nothing() -> None:
    late = line(90.0, "nodes_told", nodes=[0])
    assert fold([*WHOLE, late]) == fold(WHOLE)


def sums(ledger: Ledger) -> None:
    parts = (ledger.setup_s, ledger.step_s, ledger.discarded_s, ledger.incident_s, ledger.rest_s)
    assert ledger.wall_s == sum(parts)
    assert all(part >= 0 for part in parts)
    for entry in ledger.incidents:
        assert entry.total_s == sum(entry.stages.values())
        assert all(width >= 0 for width in entry.stages.values())
        assert set(entry.stages) == set(Stage)


def test_a_whole_run() -> None:
    ledger = fold(WHOLE)
    sums(ledger)
    assert (ledger.run_id, ledger.world_size, ledger.steps) == ("r1", 4, 4)
    assert (ledger.exit_code, ledger.text, ledger.cause) == (0, "", None)
    assert ledger.wall_s == 20.0
    assert ledger.setup_s == 4.0
    assert ledger.step_s == 4.0 + 2.0
    assert ledger.discarded_s == 1.0
    assert ledger.incident_s == 7.0
    assert ledger.rest_s == 2.0
    assert ledger.goodput == 0.3
    assert ledger.by_rung() == {Rung.RESPAWN: 1}
    assert ledger.faults_fired == ("kill:rank=1,step=3",)


def test_stages_are_contiguous_from_the_fault_to_the_commit() -> None:
    (entry,) = fold(WHOLE).incidents
    assert entry.stages == {
        Stage.DETECT: 0.5,
        Stage.STOP: 0.5,
        Stage.START: 1.0,
        Stage.REGROUP: 2.0,
        Stage.STATE: 0.5,
        Stage.DATA: 0.0,
        Stage.FIRST_STEP: 2.5,
        Stage.LOST_STEPS: 0.0,
    }
    assert entry.total_s == 7.0
    assert (entry.rung, entry.state_from, entry.reason) == (
        Rung.RESPAWN,
        StateFrom.PEER,
        "because",
    )
    assert (entry.fault, entry.rank, entry.step, entry.closed) == (
        "kill:rank=1,step=3",
        1,
        3,
        True,
    )


@pytest.mark.parametrize("length", range(len(WHOLE) + 1))
def test_a_journal_cut_at_any_record(length: int) -> None:
    cut = WHOLE[:length]
    ledger = fold(cut)
    sums(ledger)
    assert ledger.wall_s == pytest.approx(cut[-1]["t"] - cut[0]["t"] if cut else 0.0)
    assert ledger.exit_code is (0 if length == len(WHOLE) else None)
    if ledger.incidents:
        assert ledger.incidents[0].closed == (length > WHOLE.index(RECOVERY[-1]))


def test_an_open_incident_gives_its_time_to_the_stage_under_way() -> None:
    cut = [*HEAD, FIRED, OPENED, *RECOVERY[:2], line(12.0, "note", key="k", text="", rank=0)]
    (entry,) = fold(cut).incidents
    assert entry.stages[Stage.REGROUP] == 1.0
    assert entry.total_s == 3.0
    assert fold(cut).by_rung() == {Rung.STOP: 1}
    assert (entry.rung, entry.state_from, entry.reason) == (None, None, "")


def test_a_failure_in_the_recovery_makes_the_last_boundaries_count() -> None:
    again = [
        line(14.0, "incident_cause", incident=1, rank=2, incarnation=1, step=3, cause=cause()),
        line(15.0, "stopped", incident=1, generation=1),
        line(17.0, "ready", incident=1, generation=1),
    ]
    (entry,) = fold([*HEAD, FIRED, OPENED, *RECOVERY[:5], *again]).incidents
    assert entry.stages[Stage.STOP] == 5.5
    assert entry.stages[Stage.START] == 2.0
    assert entry.stages[Stage.REGROUP] == 0.0
    assert entry.total_s == 8.0


def test_a_cut_in_a_second_attempt_counts_for_the_stage_of_that_attempt() -> None:
    again = [line(15.0, "stopped", incident=1, generation=1), line(16.0, "note", key="k")]
    (entry,) = fold([*HEAD, FIRED, OPENED, *RECOVERY[:5], *again]).incidents
    assert entry.stages[Stage.STOP] == 5.5
    assert entry.stages[Stage.START] == 1.0


def test_boundaries_out_of_order_are_moved_up() -> None:
    late = [line(12.0, "stopped", incident=1), line(11.0, "ready", incident=1), *RECOVERY[2:]]
    (entry,) = fold([*HEAD, FIRED, OPENED, *late]).incidents
    assert entry.stages[Stage.STOP] == 2.5
    assert entry.stages[Stage.START] == 0.0
    assert entry.total_s == 7.0


def test_a_missing_boundary_has_no_width() -> None:
    from_script = [
        record for record in RECOVERY if record["event"] not in ("regrouped", "restored")
    ]
    (entry,) = fold([*HEAD, FIRED, OPENED, *from_script]).incidents
    assert entry.stages[Stage.REGROUP] == entry.stages[Stage.STATE] == 0.0
    assert entry.stages[Stage.FIRST_STEP] == 5.0


def test_the_cause_that_is_no_echo_is_shown_with_its_fault() -> None:
    echo = OPENED | {"rank": 0, "cause": cause("peer")}
    death = line(9.6, "incident_cause", incident=1, rank=1, incarnation=1, step=2)
    death["cause"] = cause(fault="kill:rank=1,step=3")
    (entry,) = fold([*HEAD, FIRED, echo, death, *RECOVERY]).incidents
    assert (entry.cause.kind, entry.rank, entry.step) == (CauseKind.SIGNAL, 1, 2)
    assert entry.fault == "kill:rank=1,step=3"
    assert entry.stages[Stage.DETECT] == 0.5
    assert entry.faults == ("kill:rank=1,step=3",)


def test_the_moment_of_a_fault_that_is_not_known_is_that_of_its_notice() -> None:
    opened = OPENED | {"cause": cause()}
    (entry,) = fold([*HEAD, opened, *RECOVERY]).incidents
    assert (entry.stages[Stage.DETECT], entry.fault) == (0.0, None)
    known = OPENED | {"cause": cause(at_s=9.25)}
    assert fold([*HEAD, known, *RECOVERY]).incidents[0].stages[Stage.DETECT] == 0.25
    from_the_future = OPENED | {"cause": cause(at_s=99.0)}
    assert fold([*HEAD, from_the_future, *RECOVERY]).incidents[0].stages[Stage.DETECT] == 0.0


def test_of_two_equal_faults_the_later_one_counts() -> None:
    earlier = FIRED | {"t": 5.0, "fired_t": 5.0}
    (entry,) = fold([*HEAD[:3], earlier, *HEAD[3:], FIRED, OPENED, *RECOVERY]).incidents
    assert entry.stages[Stage.DETECT] == 0.5


def test_an_attempt_that_others_completed_is_not_discarded() -> None:
    completed = [line(13.5, "step", step=3, generation=1)]
    floor = plan(11.0, "planned", generation=1, step=3)
    records = [*HEAD, FIRED, OPENED, *RECOVERY[:2], floor, *RECOVERY[3:5], *completed]
    records += [line(16.0, "step", step=4, generation=1), RECOVERY[-1], *TAIL[1:]]
    ledger = fold(records)
    sums(ledger)
    assert (ledger.step_s, ledger.discarded_s) == (5.0, 0.0)


def test_lost_steps_last_until_the_job_is_back_where_it_was() -> None:
    lost = [
        *RECOVERY[:2],
        plan(11.0, "planned", generation=1, step=0),
        *RECOVERY[3:5],
        line(15.0, "step", step=1, generation=1),
        plan(15.0, "incident_closed", step=3, steps_lost=2),
        line(17.0, "step", step=2, generation=1),
        line(19.0, "step", step=3, generation=1),
        line(20.0, "job_ended", exit_code=0, text="", cause=None),
    ]
    ledger = fold([*HEAD, FIRED, OPENED, *lost])
    sums(ledger)
    (entry,) = ledger.incidents
    assert entry.stages[Stage.LOST_STEPS] == 2.0
    assert entry.total_s == ledger.incident_s == 8.0
    assert (ledger.step_s, ledger.steps_lost, ledger.steps) == (6.0, 2, 3)


def test_a_start_again_before_the_first_commit_is_incident_time() -> None:
    records = [
        *HEAD[:2],
        OPENED | {"t": 2.0, "step": 1, "cause": cause()},
        line(2.5, "stopped", incident=1, generation=1),
        plan(2.5, "planned", generation=1, step=0),
        line(4.0, "ready", incident=1, generation=1),
        line(4.0, "setup_done"),
        line(5.0, "step", step=1, generation=1),
        plan(5.0, "incident_closed", step=1, steps_lost=0),
        line(7.0, "step", step=2, generation=1),
    ]
    ledger = fold(records)
    sums(ledger)
    assert (ledger.setup_s, ledger.incident_s, ledger.step_s) == (2.0, 3.0, 2.0)
    assert ledger.wall_s == 7.0


def test_an_incident_that_follows_another_at_once() -> None:
    second = OPENED | {"t": 16.0, "incident": 2, "step": 4, "cause": cause()}
    follow = [
        line(17.0, "stopped", incident=2),
        line(18.0, "step", step=4, generation=2),
        plan(18.0, "incident_closed", step=4, steps_lost=0) | {"incident": 2},
    ]
    ledger = fold([*HEAD, FIRED, OPENED, *RECOVERY, second, *follow, *TAIL[1:]])
    sums(ledger)
    assert [entry.total_s for entry in ledger.incidents] == [7.0, 2.0]
    assert (ledger.incident_s, ledger.step_s, ledger.discarded_s) == (9.0, 4.0, 1.0)


def test_the_end_of_a_failed_run_is_told() -> None:
    end = line(12.0, "job_ended", exit_code=137, text="the state is lost", cause=cause())
    ledger = fold([*HEAD, OPENED, end])
    assert (ledger.exit_code, ledger.text) == (137, "the state is lost")
    assert ledger.cause is not None
    assert ledger.cause.kind is CauseKind.SIGNAL


def test_records_of_later_versions_are_passed_over() -> None:
    assert fold([*WHOLE[:5], line(8.5, "news", what=1), *WHOLE[5:]]) == fold(WHOLE)


def test_an_incident_goes_on_under_the_next_coordinator() -> None:
    """What was done before it came counts for the stages that it did again."""
    before = [OPENED, line(9.75, "stopped", incident=1, generation=0)]
    resumed = line(9.8, "coordinator_resumed", term=1, generation=0, undisturbed=False, text="")
    ledger = fold([*HEAD, FIRED, *before, resumed, *RECOVERY, *TAIL])
    sums(ledger)
    (entry,) = ledger.incidents
    assert (entry.total_s, entry.closed) == (7.0, True)
    assert entry.stages[Stage.STOP] == 0.5
    assert ledger.wall_s == 20.0
