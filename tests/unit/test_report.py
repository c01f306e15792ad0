"""The summary: folded from a journal, on failure the first cause first."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from tests.unit import journals

from everstep.errors import UserError
from everstep.observe import report
from everstep.observe.screen import Screen


def reported(folder: Path, records: list[journals.Record]) -> list[str]:
    journals.write(folder / "journal.jsonl", records)
    return shown(folder, io.StringIO())


def shown(folder: Path, stream: io.StringIO) -> list[str]:
    report.report_run(folder, Screen(stream, "never"))
    return stream.getvalue().splitlines()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
    assert all(line.isascii() and line == line.rstrip() for line in lines)
    columns = "step rank cause rung state from detect stop start regroup state first step total"
    assert " ".join(head.split()) == columns
    assert " ".join(row.split()) == f"5 1 {journals.FAULT} respawn peer 5 10 20 30 40 50 155"


def test_it_says_where_a_run_began(tmp_path: Path) -> None:
    loaded = {
        "t": 0.5,
        "event": "checkpoint_loaded",
        "rank": 0,
        "generation": 0,
        "step": 40,
        "newest": 42,
        "tier": "memory",
        "parts": [],
        "seconds": 0.1,
        "text": "a part is spoiled",
    }
    lines = reported(tmp_path, [*journals.begin(), loaded, *journals.steps(41, 44, 1.0)])
    assert lines[1].startswith("  steps      4 committed on 4 ranks")
    where = "after step 40, with its checkpoint from memory, 2 steps behind the newest seen"
    assert lines[2] == f"  began      {where} (passed over: a part is spoiled)"


def test_a_failure_shows_its_first_cause_with_the_traceback_first(tmp_path: Path) -> None:
    traceback = 'Traceback (most recent call last):\n  File "train.py", line 7\nValueError: boom'
    cause = journals.cause(kind="exception", text="ValueError: boom", detail=traceback, signal=None)
    text = "the same error came twice on rank 1 in step 5; correct the script"
    records = [
        *journals.begin(),
        *journals.steps(1, 4, 1.0),
        journals.opened(3.2, **cause),
        *journals.end(3.5, exit_code=1, text=text, cause=cause),
    ]
    lines = reported(tmp_path, records)
    assert lines[:6] == [
        "everstep: the first cause: rank 1 in step 5: ValueError: boom",
        "    Traceback (most recent call last):",
        '      File "train.py", line 7',
        "    ValueError: boom",
        f"everstep: {text}",
        "",
    ]
    assert "everstep run one: failed (exit code 1)" in lines
    assert "  incidents  1 (1 stop), 4 committed steps gone with the job" in lines
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
        report.report_run(tmp_path, Screen(io.StringIO()))


def test_numbers_are_set_to_the_right(tmp_path: Path) -> None:
    head, row = reported(tmp_path, journals.killed_and_recovered())[6:8]
    for name, number in [("rank", "1"), ("stop", "10"), ("total", "155")]:
        end = head.index(name) + len(name)
        assert row[:end].endswith(f" {number}"), (head, row)
    assert row.index("kill") == head.index("cause")


@pytest.mark.parametrize(("width", "tables"), [(80, 2), (130, 1)])
def test_a_narrow_terminal_has_the_times_apart(
    width: int, tables: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    journals.write(tmp_path / "journal.jsonl", journals.killed_and_recovered())
    lines = [line for line in shown(tmp_path, Terminal()) if not line.startswith("  logs")]
    heads = [line.split() for line in lines if line.split()[:2] == ["step", "rank"]]
    assert len(heads) == tables
    assert {"cause", "detect", "first", "total"} <= {name for head in heads for name in head}
    assert any(journals.FAULT in line for line in lines)
    assert all(len(line) <= width for line in lines if str(tmp_path) not in line)


WAITED = "and ranks 0, 2, 3 wait for it in allreduce #12 of the world"
HANGS = f"rank 1 hangs in step 5: it has not moved for 60.2 s, {WAITED}"


@pytest.mark.parametrize(
    ("kind", "text", "shown", "full"),
    [
        (
            "signal",
            "rank 1 was killed by SIGKILL in step 5 (fence)",
            "killed by SIGKILL (fence)",
            "",
        ),
        (
            "exit",
            "rank 1 exited with code 3 in step 52 (fence)",
            "exited with code 3 in step 52 (fence)",
            "",
        ),
        ("hang", HANGS, "hangs: it has not moved for 60.2 s...", HANGS),
        (
            "exception",
            f"ValueError: rank 1 in step 5 {'x' * 80}",
            f"ValueError: rank 1 in step 5 {'x' * 21}...",
            f"rank 1 in step 5: ValueError: rank 1 in step 5 {'x' * 80}",
        ),
    ],
)
def test_a_long_cause_is_cut_in_its_column_and_told_below(
    kind: str, text: str, shown: str, full: str, tmp_path: Path
) -> None:
    records = [
        *journals.begin(),
        *journals.steps(1, 4, 1.0),
        journals.opened(3.2, kind=kind, text=text, signal=None),
        *journals.recovery(3.2),
        *journals.end(5.0),
    ]
    lines = reported(tmp_path, records)
    assert any(f"  {shown}  " in line for line in lines), lines
    assert (f"  {full}" in lines) is bool(full)


def test_a_cause_is_no_markup(tmp_path: Path) -> None:
    records = [
        *journals.begin(),
        *journals.steps(1, 4, 1.0),
        journals.opened(3.2, kind="exception", text="KeyError: '[red]x[/red]'", signal=None),
        *journals.recovery(3.2, rung="retry", state_from="process"),
        *journals.end(5.0),
    ]
    lines = reported(tmp_path, records)
    assert any("KeyError: '[red]x[/red]'  retry  process" in line for line in lines)


def test_where_the_state_came_from_reads_as_a_sentence(tmp_path: Path) -> None:
    records = [
        *journals.killed_and_recovered()[:-1],
        journals.opened(5.3, incident=2, rank=2, step=9, kind="exception", text="ValueError: x"),
        *journals.recovery(5.3, incident=2, rung="retry", state_from="process", step=9),
        *journals.end(6.0),
    ]
    lines = reported(tmp_path, records)
    said = "2 (1 respawn, 1 retry), 0 steps lost; state from peers and the ranks' own memory"
    assert f"  incidents  {said}" in lines


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "rank 2 failed in step 5 with the same error twice: ValueError: boom",
            "everstep: rank 2 failed in step 5 with the same error twice",
        ),
        (
            "4 attempts in a row failed. First cause, rank 2 in step 5: ValueError: boom",
            "everstep: 4 attempts in a row failed",
        ),
        ("it is over", "everstep: it is over"),
        ("rank 2 said ValueError: boom", "everstep: rank 2 said ValueError: boom"),
        ("ValueError: boom", ""),
    ],
)
def test_a_cause_is_said_once(text: str, said: str, tmp_path: Path) -> None:
    cause = journals.cause(kind="exception", text="ValueError: boom", signal=None)
    records = [
        *journals.begin(),
        *journals.steps(1, 4, 1.0),
        journals.opened(3.2, rank=2, **cause),
        *journals.end(3.5, exit_code=1, text=text, cause=cause),
    ]
    first, second = reported(tmp_path, records)[:2]
    assert first == "everstep: the first cause: rank 2 in step 5: ValueError: boom"
    assert second == said


def test_before_the_first_commit_nothing_is_gone(tmp_path: Path) -> None:
    opened = journals.opened(1.5, step=1)
    ended = journals.end(2.0, exit_code=137, cause=journals.cause())
    lines = reported(tmp_path, [*journals.begin(), opened, *ended])
    assert "  incidents  1 (1 stop), 0 steps lost" in lines


@pytest.mark.parametrize(
    ("code", "name"),
    [(130, "SIGINT"), (143, "SIGTERM"), (129, "SIGHUP"), (130, "`everstep stop`")],
)
def test_a_run_that_a_person_stopped_has_not_failed(code: int, name: str, tmp_path: Path) -> None:
    text = f"the job was asked to end by {name}"
    lines = reported(tmp_path, [*journals.begin(), *journals.end(2.0, exit_code=code, text=text)])
    assert lines[0] == f"everstep run one: stopped by {name}"
    assert lines[-1] == f"  next       everstep report {tmp_path} says this again"
    assert not any("failed" in line or "correct" in line for line in lines)


def test_a_worker_that_was_killed_is_no_stop(tmp_path: Path) -> None:
    ended = journals.end(2.0, exit_code=137, cause=journals.cause())
    assert "everstep run one: failed (exit code 137)" in reported(
        tmp_path, [*journals.begin(), *ended]
    )


def test_faults_that_never_fired_are_named(tmp_path: Path) -> None:
    never = "raise:rank=0,step=90"
    records = journals.killed_and_recovered()
    records[1]["chaos"] = [journals.FAULT, never, journals.FAULT]
    lines = reported(tmp_path, records)
    assert f"  faults     never fired: {never}; {journals.FAULT}" in lines
    (tmp_path / "journal.jsonl").unlink()
    assert not any("never fired" in line for line in reported(tmp_path, records[:-1]))
    records[1]["chaos"] = [journals.FAULT]
    (tmp_path / "journal.jsonl").unlink()
    assert not any("never fired" in line for line in reported(tmp_path, records))


def test_a_traceback_is_shown_without_the_frames_that_lead_to_the_script(tmp_path: Path) -> None:
    worker = Path(report.__file__).parents[1] / "worker" / "process.py"
    detail = [
        "Traceback (most recent call last):",
        f'  File "{worker}", line 59, in _guarded',
        "    _run_script(worker.spec.script)",
        '  File "<frozen runpy>", line 291, in run_path',
        '  File "train.py", line 7, in <module>',
        "    main()",
        "ValueError: boom",
    ]
    cause = journals.cause(kind="exception", text="ValueError: boom", detail="\n".join(detail))
    ended = journals.end(2.0, exit_code=1, text="ValueError: boom", cause=cause)
    lines = reported(tmp_path, [*journals.begin(), *ended])
    assert lines[1:5] == [f"    {detail[index]}" for index in (0, 4, 5, 6)]
