"""What a person sees of a run: prefixed lines, incidents in words, a live line on terminals
only."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit import journals

import everstep
from everstep.observe.console import ConsoleView
from everstep.observe.narrate import Narrator
from everstep.settings import RunSettings

_CODES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([^\x1b])", re.DOTALL)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of a known kind and width, whatever the tests run on."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and can tell what would stand on it."""

    def isatty(self) -> bool:
        return True

    @property
    def rows(self) -> list[str]:
        """What a person would see: the rows of the display, empty last ones left out."""
        rows, row, column = [""], 0, 0
        for code in _CODES.finditer(self.getvalue()):
            argument, command, char = code.groups()
            if char == "\n":
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            elif char == "\r":
                column = 0
            elif char is not None:
                rows[row] = rows[row][:column].ljust(column) + char + rows[row][column + 1 :]
                column += 1
            elif command == "K":
                assert argument == "2", "the whole row"
                rows[row] = ""
            elif command == "A":
                row -= int(argument)
            else:
                assert (command == "m") or argument == "?25", code.group()
        while rows and rows[-1] == "":
            del rows[-1]
        return rows


def cause(kind: str = "signal", text: str = "", **more: Any) -> dict[str, Any]:
    text = text or "rank 1 was killed by SIGKILL in step 5 (backward)"
    return {
        "kind": kind,
        "text": text,
        "detail": "",
        "signature": "",
        "at_s": None,
        "fault": None,
    } | more


def opened(
    t: float, cause: dict[str, Any], incident: int = 1, rank: int = 1, step: int = 5
) -> dict[str, Any]:
    named = {"incident": incident, "rank": rank, "incarnation": 1, "step": step, "generation": 0}
    return {"t": t, "event": "incident_opened", "cause": cause} | named


def closed(t: float, incident: int = 1, **more: Any) -> dict[str, Any]:
    how = {"rung": "respawn", "state_from": "peer", "step": 5, "steps_lost": 0}
    reason = "rank 1 takes step 4 from ranks 0, 2, 3"
    return {"t": t, "event": "incident_closed", "incident": incident, "reason": reason} | how | more


def step(t: float, number: int) -> dict[str, Any]:
    return {"t": t, "event": "step", "step": number, "generation": 0}


def tell(*records: dict[str, Any]) -> list[str]:
    narrator = Narrator()
    return [line for record in records for line in narrator.tell(record)]


def test_a_kill_and_its_recovery_in_words() -> None:
    assert tell(step(9.0, 4), opened(10.0, cause()), closed(10.314)) == [
        "rank 1 was killed by SIGKILL in step 5 (backward); "
        "stopping, a warm process is started for it",
        "step 5 done again after 0.31 s - respawn, state from peers, 0 steps lost "
        "(rank 1 takes step 4 from ranks 0, 2, 3)",
    ]


def test_a_raise_and_its_recovery_in_words() -> None:
    records = [
        step(9.0, 4),
        opened(10.0, cause("exception", "ValueError: boom"), rank=2),
        closed(10.1, rung="retry", state_from="process", reason="", steps_lost=1),
    ]
    assert tell(*records) == [
        "rank 2 in step 5: ValueError: boom; stopping, the step is done again",
        "step 5 done again after 0.10 s - retry, state from the ranks' own memory, 1 step lost",
    ]


def test_where_the_state_was_is_said_once() -> None:
    reason = "ranks 0, 1 redo step 5 from their own memory"
    assert tell(closed(1.0, rung="retry", state_from="process", reason=reason)) == [
        f"step 5 done again after 0.00 s - retry, 0 steps lost ({reason})"
    ]


def test_a_fault_on_purpose_is_called_so() -> None:
    fault = "raise:rank=2,step=9,at=forward"
    text = f"everstep.worker.faults.ChaosError: fault on purpose: {fault}"
    told = tell(step(9.0, 8), opened(10.0, cause("exception", text, fault=fault), rank=2, step=9))
    assert told == [
        f"rank 2 in step 9: fault on purpose ({fault}); stopping, the step is done again"
    ]
    [line] = tell(opened(10.0, cause("exception", "ValueError: boom", fault=fault), rank=2, step=9))
    assert "ValueError: boom" in line


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("signal", "rank 1 was killed by SIGKILL in step 5", " in step 5 (forward or backward);"),
        ("exit", "rank 1 exited with code 3 in step 5", " in step 5 (forward or backward);"),
        ("signal", "rank 1 was killed by SIGKILL in step 5 (fence)", " in step 5 (fence);"),
        ("signal", "rank 1 was killed by SIGKILL in step 5 (after an update)", " an update);"),
        ("signal", "rank 1 was killed by SIGKILL between steps 5 and 6", " steps 5 and 6; stop"),
        ("signal", "rank 1 was killed by SIGKILL in a recovery", " in a recovery of step 5; stop"),
        ("receipt", "rank 1's receipt of step 4 does not hold: no", "does not hold: no; stopping"),
        ("exception", "ValueError: odd in step 9", "rank 1 in step 5: ValueError: odd in step 9;"),
        ("worker", "it has to be replaced: why", "rank 1 in step 5: it has to be replaced: why;"),
    ],
)
def test_where_in_a_step_a_process_died(kind: str, text: str, told: str) -> None:
    [line] = tell(step(9.0, 4), opened(10.0, cause(kind, text)))
    assert told in line


AFTER_5 = "in a section after step 5"


@pytest.mark.parametrize(
    ("failed", "told", "measure"),
    [
        (
            cause(text=f"rank 1 was killed by SIGKILL {AFTER_5}", where=AFTER_5),
            f"rank 1 was killed by SIGKILL {AFTER_5}",
            "a warm process is started for it",
        ),
        (
            cause("exception", "ValueError: odd", where=AFTER_5),
            f"rank 1 {AFTER_5}: ValueError: odd",
            "the section is done again",
        ),
        (
            cause("peer", "lost touch with a peer (timed out)", where=f"{AFTER_5} (fence)"),
            f"rank 1 lost touch with a peer (timed out) {AFTER_5} (fence)",
            "the section is done again",
        ),
    ],
)
def test_a_section_is_called_one(failed: dict[str, Any], told: str, measure: str) -> None:
    records = [opened(10.0, failed, step=6), stopped(10.1), closed(10.2, step=6)]
    first, second = tell(step(9.0, 5), *records)
    assert first == f"{told}; stopping, {measure}"
    assert second.startswith("section after step 5 done again after 0.20 s - ")


def test_an_exception_that_ends_the_script_costs_the_process() -> None:
    odd = cause("exception", "ValueError: odd", where="between steps 4 and 5")
    assert tell(step(9.0, 4), opened(10.0, odd)) == [
        "rank 1 between steps 4 and 5: ValueError: odd; stopping, a warm process is started for it"
    ]


def test_where_an_exception_came_stands_before_it() -> None:
    where = "in a recovery"
    [line] = tell(step(9.0, 4), opened(10.0, cause("exception", "ValueError: odd", where=where)))
    assert line.startswith("rank 1 in a recovery of step 5: ValueError: odd; ")


@pytest.mark.parametrize(("ranks", "promised"), [(1, False), (2, True)])
def test_of_a_job_of_one_rank_no_process_is_promised(ranks: int, promised: bool) -> None:
    started = {"t": 0.0, "event": "job_started", "world_size": ranks}
    [line] = tell(started, step(9.0, 4), opened(10.0, cause()))
    assert ("; stopping, a warm process" in line) is promised
    assert line.endswith("; stopping") is not promised


def again_and_again(*failures: tuple[int, dict[str, Any]], rank: int = 1) -> list[str]:
    records = [
        opened(float(number), failed, incident=number, rank=rank, step=at)
        for number, (at, failed) in enumerate(failures, start=1)
    ]
    return [line for line in tell(step(0.5, 1), *records) if line.startswith("note")]


def test_a_rank_that_fails_alike_in_three_steps_is_told_of_once() -> None:
    odd = cause("exception", "ValueError: odd", signature="ValueError: odd")
    [note] = again_and_again((3, odd), (5, odd), (5, odd), (8, odd), (9, odd))
    assert note.startswith(
        "note (rank 1): it fails alike again and again, so far in steps 3, 5, 8: ValueError: odd. "
    )


def test_what_is_not_alike_is_no_pattern() -> None:
    odd = cause("exception", "ValueError: odd", signature="ValueError: odd")
    even = cause("exception", "ValueError: even", signature="ValueError: even")
    killed = cause(signature="SIGKILL", signal=9)
    on_purpose = odd | {"fault": "raise:rank=1,step=3"}
    assert again_and_again((3, odd), (4, even), (5, odd), (6, even)) == []
    assert again_and_again((3, killed), (4, killed), (5, killed)) == []
    assert again_and_again((3, on_purpose), (4, on_purpose), (5, on_purpose)) == []


def test_before_the_first_commit_all_start_again() -> None:
    [line] = tell(opened(1.0, cause(text="rank 1 exited with code 3 in step 1"), step=1))
    assert line.endswith("; nothing is committed yet, all ranks start again")


def test_a_rank_is_not_taken_for_another_that_begins_alike() -> None:
    [line] = tell(opened(1.0, cause(text="rank 12 hung up on its peer"), rank=1, step=5))
    assert line.startswith("rank 1: rank 12 hung up on its peer;")


@pytest.mark.parametrize(
    ("more", "fired_t", "seconds"),
    [
        ({"at_s": 9.5}, None, "0.80 s"),
        ({"fault": "kill:rank=1,step=5", "at_s": None}, 9.9, "0.40 s"),
        ({"fault": "kill:rank=1,step=5", "at_s": 9.5}, 9.9, "0.40 s"),
        ({"at_s": 11.0}, None, "0.30 s"),
    ],
)
def test_an_incident_begins_when_the_fault_happened(
    more: dict[str, Any], fired_t: float | None, seconds: str
) -> None:
    fired = {"event": "fault_fired", "t": 10.0, "text": "kill:rank=1,step=5", "fired_t": fired_t}
    records = [opened(10.0, cause(**more)), closed(10.3)]
    lines = tell(*([fired] if fired_t is not None else []), *records)
    assert f"after {seconds} - " in lines[-1]


FAULT = "kill:rank=1,step=5"
ECHO = cause("peer", "lost touch with a peer (connection reset)")
LOST_TOUCH = (
    "rank 2 lost touch with a peer (connection reset) in step 5; stopping, the step is done again"
)


def stopped(t: float) -> dict[str, Any]:
    return {"t": t, "event": "stopped", "incident": 1, "generation": 0}


def further(t: float, cause: dict[str, Any], rank: int = 1) -> dict[str, Any]:
    return opened(t, cause, rank=rank) | {"event": "incident_cause"}


def test_the_death_behind_a_broken_collective_is_told_as_the_failure_and_alone() -> None:
    fired = {"event": "fault_fired", "t": 10.05, "text": FAULT, "fired_t": 9.9}
    death = further(10.1, cause(fault=FAULT))
    records = [opened(10.0, ECHO, rank=2), fired, death, stopped(10.2), closed(10.3)]
    assert tell(step(9.0, 4), *records) == [
        "rank 1 was killed by SIGKILL in step 5 (backward); "
        "stopping, a warm process is started for it",
        "step 5 done again after 0.40 s - respawn, state from peers, 0 steps lost "
        "(rank 1 takes step 4 from ranks 0, 2, 3)",
    ]


def test_a_broken_collective_that_nobody_died_of_is_told_when_all_stand_still() -> None:
    narrator = Narrator()
    assert narrator.tell(step(9.0, 4)) == narrator.tell(opened(10.0, ECHO, rank=2)) == []
    assert narrator.tell(stopped(10.1)) == [LOST_TOUCH]
    assert narrator.tell(stopped(10.2)) == []
    assert narrator.incidents == 1


def test_a_death_that_is_known_late_is_told_after_its_echo() -> None:
    records = [opened(10.0, ECHO, rank=2), stopped(10.1), further(10.2, cause())]
    assert tell(step(9.0, 4), *records) == [
        LOST_TOUCH,
        "rank 1 was killed by SIGKILL in step 5 (backward); a warm process is started for it",
    ]


def test_of_two_deaths_behind_a_broken_collective_one_is_the_failure() -> None:
    second = further(10.2, cause(text="rank 3 was killed by SIGKILL in step 5 (fence)"), rank=3)
    told = tell(step(9.0, 4), opened(10.0, ECHO, rank=2), further(10.1, cause()), second)
    assert [line.split(" was ")[0] for line in told] == ["rank 1", "meanwhile rank 3"]


@pytest.mark.parametrize(
    "last",
    [
        {"t": 10.1, "event": "job_ended", "exit_code": 1, "text": "spent", "cause": None},
        further(10.1, cause("timeout", "rank 3's worker has not parked"), rank=3),
        closed(10.1),
    ],
)
def test_what_is_held_back_is_told_in_the_end(last: dict[str, Any]) -> None:
    assert tell(step(9.0, 4), opened(10.0, ECHO, rank=2), last)[0] == LOST_TOUCH


def test_where_the_stacks_of_a_hang_are() -> None:
    record = {"t": 9.0, "event": "hang", "incident": 1, "kind": "absent", "ranks": [1]}
    record |= {"stacks": ["rank 1: in f at a.py:3"], "file": "runs/x/hang-1.txt"}
    assert Narrator().tell(record) == ["where all ranks stood is in runs/x/hang-1.txt"]


def test_further_failures_and_notes() -> None:
    third = further(10.1, cause(text="rank 3 exited with code 1"), rank=3)
    note = {"event": "note", "t": 1.0, "key": "k", "text": "zygote restarted", "rank": None}
    assert tell(third, note, note | {"rank": 2}) == [
        "meanwhile rank 3 exited with code 1",
        "note: zygote restarted",
        "note (rank 2): zygote restarted",
    ]


UNCAUGHT = [
    "Traceback (most recent call last):",
    f'  File "{Path(everstep.__file__).parent}/worker/process.py", line 59, in _guarded',
    "    _run_script(worker.spec.script)",
    '  File "<frozen runpy>", line 291, in run_path',
    '  File "train.py", line 7, in <module>',
    "    main()",
    "ValueError: boom",
]


def view_on(stderr: io.StringIO, **settings: Any) -> tuple[ConsoleView, io.StringIO, io.StringIO]:
    stdout = io.StringIO()
    return ConsoleView(RunSettings(**settings), stdout, stderr), stdout, stderr


def test_lines_carry_rank_and_incarnation_and_keep_their_stream() -> None:
    view, stdout, stderr = view_on(io.StringIO())
    view.output(1, 1, "stdout", "loss 3.2")
    view.output(1, 2, "stdout", "loss 3.1\n")
    view.output(0, 1, "stderr", "careful")
    assert stdout.getvalue() == "[rank1] loss 3.2\n[rank1.2] loss 3.1\n"
    assert stderr.getvalue() == "[rank0] careful\n"


def test_without_a_terminal_there_is_no_live_line_and_no_color() -> None:
    view, stdout, stderr = view_on(io.StringIO())
    for record in (step(1.0, 1), step(2.0, 2), opened(2.5, cause()), closed(2.8)):
        view.record(record)
    view.close()
    assert "\x1b" not in stderr.getvalue()
    assert [line.partition(":")[0] for line in stderr.getvalue().splitlines()] == [
        "everstep",
        "everstep",
    ]
    assert stdout.getvalue() == ""


def test_the_live_line_shows_step_rate_goodput_and_incidents() -> None:
    terminal = Terminal()
    view, _, _ = view_on(terminal)
    view.record({"t": 0.0, "event": "journal"})
    assert terminal.rows == []
    view.record({"t": 0.0, "event": "job_started", "world_size": 4})
    assert terminal.rows == ["everstep: setting up 4 ranks"]
    view.record({"t": 1.0, "event": "setup_done"})
    for number in range(1, 7):
        view.record(step(1.0 + number / 2, number))
    assert terminal.rows == ["everstep: step 6 | 2.0 steps/s | goodput 75.0 % | 0 incidents"]
    view.record(opened(4.0, cause(), step=7))
    assert terminal.rows[-1] == "everstep: step 6 | recovering | goodput 75.0 % | 1 incident"
    view.record(closed(6.0, step=7))
    view.record(step(8.0, 7))
    assert terminal.rows[-1] == "everstep: step 7 | goodput 62.5 % | 1 incident"
    view.close()
    assert [row.split(" ")[1] for row in terminal.rows] == ["rank", "step"]


def test_nothing_runs_into_the_live_line() -> None:
    terminal = Terminal()
    view = ConsoleView(RunSettings(color="never"), terminal, terminal)
    view.record(step(1.0, 1))
    view.output(0, 1, "stderr", "hello")
    assert terminal.rows == ["[rank0] hello", "everstep: step 1 | 0 incidents"]
    view.output(1, 1, "stdout", "[bold]no markup[/] :smile: 12")
    view.record(opened(2.0, cause()))
    assert terminal.rows[1:3] == [
        "[rank1] [bold]no markup[/] :smile: 12",
        "everstep: rank 1 was killed by SIGKILL in step 5 (backward); "
        "stopping, a warm process is started for it",
    ]
    assert terminal.rows[-1].startswith("everstep: step 1 | recovering")
    view.close()
    before = terminal.rows
    assert not before[-1].startswith("everstep: step 1 |")
    view.output(0, 1, "stderr", "last")
    assert terminal.rows == [*before, "[rank0] last"]


@pytest.mark.parametrize(
    "line",
    [
        "\x1b[2A\x1b[2Kup",
        "\x1b[31mup\x1b[0m",
        "\x1b]0;up\x1b\\up",
        "down\rup",
        "up\x1b[",
        "u\x08\x07p",
    ],
)
def test_a_worker_moves_no_cursor_but_its_own(line: str) -> None:
    terminal = Terminal()
    view = ConsoleView(RunSettings(), terminal, terminal)
    view.output(0, 1, "stdout", "above")
    view.record(step(1.0, 1))
    view.output(0, 1, "stdout", line)
    above, shown, live = terminal.rows
    assert above == "[rank0] above"
    assert shown.removeprefix("[rank0] ").startswith("up")
    assert live.startswith("everstep: step 1")


def test_a_worker_s_colors_are_kept_where_there_is_color() -> None:
    for color, kept in [("auto", True), ("never", False)]:
        terminal = Terminal()
        view = ConsoleView(RunSettings(color=color), terminal, terminal)
        view.output(0, 1, "stdout", "\x1b[31mred\x1b[0m")
        assert ("\x1b[31mred" in terminal.getvalue()) is kept


def test_what_is_no_terminal_gets_a_worker_s_line_as_it_came() -> None:
    view, stdout, _ = view_on(Terminal())
    view.output(0, 1, "stdout", "\x1b[31m" + "x" * 500)
    assert stdout.getvalue() == "[rank0] \x1b[31m" + "x" * 500 + "\n"


def test_the_live_line_is_not_drawn_for_every_step() -> None:
    view, _, stderr = view_on(Terminal())
    for number in range(1, 101):
        view.record(step(1.0 + number / 1000, number))
    assert stderr.getvalue().count("everstep: step") == 1


def test_the_display_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    view, _, _ = view_on(terminal)
    view.record({"t": 0.5, "event": "setup_done"})
    view.record(step(1.0, 123456))
    view.record(step(2.0, 123457))
    assert len(terminal.rows) == 1
    view.record(opened(2.5, cause(), step=123458))
    assert all(len(row.rstrip()) <= 40 for row in terminal.rows)
    assert [row.split()[-1] for row in terminal.rows[:2]] == ["SIGKILL", "warm"]


def test_a_terminal_that_can_not_redraw_has_no_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    view, _, stderr = view_on(Terminal())
    view.record(step(1.0, 1))
    view.record(opened(2.0, cause()))
    view.close()
    assert "\x1b" not in stderr.getvalue()
    assert "step 1 |" not in stderr.getvalue()


def test_the_summary_takes_the_place_of_the_live_line(tmp_path: Path) -> None:
    records = journals.killed_and_recovered()
    journals.write(tmp_path / "journal.jsonl", records)
    terminal = Terminal()
    view, _, _ = view_on(terminal)
    for record in records:
        view.record(record)
    view.close()
    view.summarize(tmp_path)
    assert terminal.rows[2] == "everstep run one: finished"


def test_a_character_that_the_stream_lacks_does_not_end_the_run() -> None:
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True) as narrow:
        view = ConsoleView(RunSettings(), narrow, io.StringIO())
        view.output(0, 1, "stdout", "größer")
        assert isinstance(narrow.buffer, io.BytesIO)
        assert narrow.buffer.getvalue() == b"[rank0] gr\\xf6\\xdfer\n"


def test_quiet_shows_incidents_only() -> None:
    view, stdout, stderr = view_on(Terminal(), quiet=True, color="never")
    view.output(0, 1, "stdout", "hello")
    view.record(step(1.0, 1))
    view.record(opened(2.0, cause()))
    assert stdout.getvalue() == ""
    assert stderr.getvalue().startswith("everstep: rank 1 was killed")
    assert "step 1 |" not in stderr.getvalue()


@pytest.mark.parametrize(("color", "colored"), [("auto", True), ("always", True), ("never", False)])
def test_incidents_are_colored_on_terminals(color: str, colored: bool) -> None:
    view, _, stderr = view_on(Terminal(), color=color)
    view.record(opened(2.0, cause()))
    assert ("\x1b[33m" in stderr.getvalue()) is colored


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stdout:
        stderr = io.StringIO()
        view = ConsoleView(RunSettings(), stdout, stderr)
        view.output(0, 1, "stdout", "nobody reads this")
        view.output(0, 1, "stdout", "nor this")
        view.output(0, 1, "stderr", "but this")
    assert stderr.getvalue() == "[rank0] but this\n"


def test_without_a_live_line_the_run_is_named_at_its_start() -> None:
    header = {"t": 0.0, "event": "journal", "run_id": "one"}
    settings: dict[str, Any] = {"run_id": "one", "nproc_per_node": 2, "log_dir": "runs"}
    view, _, stderr = view_on(io.StringIO(), **settings)
    view.record(header)
    assert stderr.getvalue() == "everstep: run one on 2 ranks, kept in runs/one\n"
    view, _, stderr = view_on(Terminal(), **settings)
    view.record(header)
    assert stderr.getvalue() == ""


def test_a_traceback_that_all_ranks_end_with_is_shown_once() -> None:
    view, _, stderr = view_on(io.StringIO())
    for lines in zip(*[[(rank, line) for line in UNCAUGHT] for rank in (0, 1)], strict=True):
        for rank, line in lines:
            view.output(rank, 1, "stderr", line)
    view.output(1, 2, "stderr", UNCAUGHT[0])  # cut off
    view.close()
    assert stderr.getvalue().splitlines() == [
        "[rank0] Traceback (most recent call last):",
        '[rank0]   File "train.py", line 7, in <module>',
        "[rank0]     main()",
        "[rank0] ValueError: boom",
        "[rank1] ValueError: boom (its traceback is above)",
        "[rank1.2] Traceback (most recent call last):",
    ]
