"""The summary: folded from a journal, on failure the first cause first."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit import journals

from everstep.core.goodput import fold
from everstep.errors import UserError
from everstep.observe import report


def reported(folder: Path, records: list[journals.Record]) -> list[str]:
    journals.write(folder / "journal.jsonl", records)
    return report.report_run(folder)


def test_a_run_in_which_nothing_failed(tmp_path: Path) -> None:
    lines = reported(tmp_path, journals.clean())
    assert lines[0] == "everstep run one: finished"
    assert lines[1].startswith("  steps      8 committed on 4 ranks in ")
    assert lines[2] == "  incidents  none"
    assert lines[3].startswith("  goodput    ")
    assert f"  journal    {tmp_path}/journal.jsonl" in lines
    assert f"  logs       {tmp_path}/logs" in lines
    assert lines[-1] == f"  next       everstep report {tmp_path} says this again"


def test_a_kill_that_was_survived(tmp_path: Path) -> None:
    lines = reported(tmp_path, journals.killed_and_recovered())
    assert "  incidents  1 (1 respawn), 0 steps lost; state from peers" in lines
    head, row = lines[6:8]
    columns = "step rank cause rung state from detect stop start regroup state first_step total"
    assert " ".join(head.split()) == columns
    assert " ".join(row.split()) == f"5 1 {journals.FAULT} respawn peer 5 10 20 30 40 50 155"


def test_a_failure_shows_its_first_cause_with_the_traceback_first(tmp_path: Path) -> None:
    traceback = 'Traceback (most recent call last):\n  File "train.py", line 7\nValueError: boom'
    cause = journals.cause(
        kind="exception", text="rank 1: ValueError: boom in step 5", detail=traceback, signal=None
    )
    text = "the same error came twice on rank 1 in step 5; correct the script"
    records = [
        *journals.begin(),
        *journals.steps(1, 4, 1.0),
        journals.opened(3.2, **cause),
        *journals.end(3.5, exit_code=1, text=text, cause=cause),
    ]
    lines = reported(tmp_path, records)
    assert lines[:6] == [
        "everstep: the first cause: rank 1: ValueError: boom in step 5",
        "    Traceback (most recent call last):",
        '      File "train.py", line 7',
        "    ValueError: boom",
        f"everstep: {text}",
        "",
    ]
    assert "everstep run one: failed (exit code 1)" in lines
    assert "  incidents  1 (1 stop), 0 steps lost" in lines
    assert "correct the cause" in lines[-1]


def test_a_refusal_has_a_text_and_no_cause(tmp_path: Path) -> None:
    lines = reported(
        tmp_path, [*journals.begin(), *journals.end(1.5, exit_code=2, text="protect it once")]
    )
    assert lines[0] == "everstep: protect it once"


@pytest.mark.parametrize("cut", range(1, len(journals.killed_and_recovered())))
def test_a_journal_cut_at_any_record_can_be_reported(cut: int, tmp_path: Path) -> None:
    lines = reported(tmp_path, journals.killed_and_recovered()[:cut])
    assert "its journal has no end" in lines[0]
    assert "tail -f" in lines[-1]


def test_without_a_journal_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such journal"):
        report.report_run(tmp_path)


def test_tables_align_numbers_to_the_right() -> None:
    assert report.table(("name", "ms"), [("a", "5"), ("long one", "155")]) == [
        "name       ms",
        "a           5",
        "long one  155",
    ]


def test_no_incidents_is_said() -> None:
    assert report.incident_table(fold(journals.clean())) == ["no incidents"]
