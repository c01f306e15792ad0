"""What a person sees of a run: prefixed lines, incidents in words, a live line on terminals
only."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest

from everstep.observe.console import WIPE, ConsoleView
from everstep.observe.narrate import Narrator
from everstep.settings import RunSettings


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


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
        "stopping, a warm process takes its place",
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
        "rank 2: ValueError: boom in step 5; stopping, the step is done again",
        "step 5 done again after 0.10 s - retry, state from the ranks' own memory, 1 step lost",
    ]


def test_before_the_first_commit_all_start_again() -> None:
    [line] = tell(opened(1.0, cause(text="rank 1 exited with code 3 in step 1"), step=1))
    assert line.endswith("; nothing is committed yet, all ranks start again")


def test_a_rank_is_not_taken_for_another_that_begins_alike() -> None:
    [line] = tell(opened(1.0, cause(text="rank 12 hung up on its peer"), rank=1, step=5))
    assert line.startswith("rank 1: rank 12 hung up on its peer in step 5;")


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


def test_the_death_behind_a_broken_collective_is_told_as_the_failure() -> None:
    fault = "kill:rank=1,step=5"
    echo = cause("peer", "a collective failed: Connection reset by peer. Check the logs. GLHF!")
    death = opened(10.1, cause(fault=fault)) | {"event": "incident_cause"}
    fired = {"event": "fault_fired", "t": 10.05, "text": fault, "fired_t": 9.9}
    assert tell(step(9.0, 4), opened(10.0, echo, rank=2), fired, death, closed(10.3)) == [
        "rank 2 lost touch with a peer in step 5; stopping",
        "rank 1 was killed by SIGKILL in step 5 (backward); a warm process takes its place",
        "step 5 done again after 0.40 s - respawn, state from peers, 0 steps lost "
        "(rank 1 takes step 4 from ranks 0, 2, 3)",
    ]


def test_further_failures_and_notes() -> None:
    further = opened(10.1, cause(text="rank 3 exited with code 1"), rank=3) | {
        "event": "incident_cause"
    }
    note = {"event": "note", "t": 1.0, "key": "k", "text": "zygote restarted", "rank": None}
    assert tell(further, note, note | {"rank": 2}) == [
        "meanwhile rank 3 exited with code 1 in step 5",
        "note: zygote restarted",
        "note (rank 2): zygote restarted",
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
    view, _, stderr = view_on(Terminal())
    view.record({"t": 0.0, "event": "journal"})
    view.record({"t": 1.0, "event": "setup_done"})
    for number in range(1, 7):
        view.record(step(1.0 + number / 2, number))
    last = stderr.getvalue().rpartition(WIPE)[2]
    assert last == "everstep: step 6 | 2.0 steps/s | goodput 75.0 % | 0 incidents"
    view.record(opened(4.0, cause(), step=7))
    view.record(closed(6.0, step=7))
    view.record(step(8.0, 7))
    last = stderr.getvalue().rpartition(WIPE)[2]
    assert last == "everstep: step 7 | goodput 62.5 % | 1 incident"


def test_the_live_line_is_wiped_before_anything_is_printed_and_at_the_end() -> None:
    view, _, stderr = view_on(Terminal(), color="never")
    view.record(step(1.0, 1))
    drawn = stderr.getvalue()
    assert drawn.startswith(WIPE + "everstep: step 1")
    view.output(0, 1, "stderr", "hello")
    assert stderr.getvalue() == drawn + WIPE + "[rank0] hello\n" + drawn
    view.close()
    assert stderr.getvalue() == drawn + WIPE + "[rank0] hello\n" + drawn + WIPE
    view.output(0, 1, "stderr", "last")
    assert stderr.getvalue().endswith(WIPE + "[rank0] last\n")


def test_the_live_line_is_not_drawn_for_every_step() -> None:
    view, _, stderr = view_on(Terminal())
    for number in range(1, 101):
        view.record(step(1.0 + number / 1000, number))
    assert stderr.getvalue().count("everstep: step") == 1


def test_the_live_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    view, _, stderr = view_on(Terminal())
    view.record(step(1.0, 123456))
    assert len(stderr.getvalue().removeprefix(WIPE)) < 20


def test_quiet_shows_incidents_only() -> None:
    view, stdout, stderr = view_on(Terminal(), quiet=True, color="never")
    view.output(0, 1, "stdout", "hello")
    view.record(step(1.0, 1))
    view.record(opened(2.0, cause()))
    assert stdout.getvalue() == ""
    assert stderr.getvalue().startswith("everstep: rank 1 was killed")


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
