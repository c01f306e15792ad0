"""A run's summary, folded from its journal.

The same words end `everstep run`, answer `everstep report`, and stand in a proof. Everything said
here is in the journal; the one thing looked for beside it is the last output of a worker, in the
logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from everstep.core.goodput import IncidentEntry, Ledger, fold
from everstep.errors import UserError
from everstep.observe.journal import read_journal
from everstep.observe.narrate import cause_in_words, counted, failure_of, source_in_words
from everstep.observe.screen import Screen
from everstep.types import Cause, Stage

JOURNAL_FILE = "journal.jsonl"
LOGS = "logs"
_STAGES = (Stage.DETECT, Stage.STOP, Stage.START, Stage.REGROUP, Stage.STATE, Stage.FIRST_STEP)
_INDENT = (0, 0, 0, 2)
_ALREADY_SAID = re.compile(r"(?:\. First cause, rank \d+ in step \d+)?:\s*$")


def report_run(run_dir: Path, screen: Screen) -> None:
    """Report on a run's directory. Raises UserError without a journal in it. Blocks on the disk and
    the screen."""
    journal = run_dir / JOURNAL_FILE
    if not journal.is_file():
        raise UserError(
            f"{journal}: no such journal; give the directory of a run, like everstep-runs/RUN_ID"
        )
    summarize(fold(read_journal(journal)), run_dir, screen)


def summarize(ledger: Ledger, run_dir: Path, screen: Screen) -> None:
    """Say how a run went: on failure the first cause, then the figures, then where to look and what
    to do next."""
    if ledger.exit_code:
        _show_failure(ledger, screen)
    screen.say(f"everstep run {ledger.run_id}: {_ending(ledger)}", "bold")
    ranks = counted(ledger.world_size, "rank")
    screen.say(f"  steps      {ledger.steps} committed on {ranks} in {ledger.wall_s:.2f} s")
    screen.say(f"  incidents  {_incidents(ledger)}")
    screen.say(f"  goodput    {100 * ledger.goodput:.1f} %")
    if ledger.incidents:
        show_incidents(ledger, screen)
    screen.put(f"  journal    {run_dir / JOURNAL_FILE}")
    screen.put(f"  logs       {run_dir / LOGS}")
    screen.put(f"  next       {_next(ledger, run_dir)}")


def show_incidents(ledger: Ledger, screen: Screen) -> None:
    """A table with a line for each incident: what, which rung, and where the time went; empty lines
    around it. On a narrow terminal the times are a table of their own."""
    screen.put("")
    screen.say("  incidents, times in ms:")
    parts = [[*_WHERE, *_WHAT, *_TIMES]]
    if not screen.fits(_table(ledger, parts[0], screen.terminal)):
        parts = [[*_WHERE, *_WHAT, _TIMES[-1]], [*_WHERE, *_TIMES]]
    for columns in parts:
        screen.draw(_table(ledger, columns, screen.terminal))
        screen.put("")


def _table(ledger: Ledger, columns: Sequence[_Column], terminal: bool) -> RenderableType:
    """Ruled on a terminal, plain columns elsewhere."""
    table = Table(
        box=SIMPLE_HEAD if terminal else None,
        padding=(0, 1 if terminal else 2, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )
    for column in columns:
        table.add_column(
            column.name,
            justify="right" if column.number else "left",
            no_wrap=column.number,
            overflow="fold",
        )
    for incident in ledger.incidents:
        table.add_row(*(Text(column.cell(incident)) for column in columns))
    return Padding(table, _INDENT, expand=False)


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the incidents' table."""

    name: str
    cell: Callable[[IncidentEntry], str]
    number: bool = False


def _time(stage: Stage) -> _Column:
    def cell(incident: IncidentEntry) -> str:
        return f"{1000 * incident.stages.get(stage, 0.0):.0f}"

    return _Column(stage.replace("_", " "), cell, number=True)


_WHERE = (
    _Column("step", lambda incident: str(incident.step), number=True),
    _Column("rank", lambda incident: str(incident.rank), number=True),
)
_WHAT = (
    _Column("cause", lambda incident: incident.fault or cause_in_words(incident.cause)),
    _Column("rung", lambda incident: (incident.closed and incident.rung) or "(open)"),
    _Column("state from", lambda incident: incident.state_from or ""),
)
_TIMES = (
    *(_time(stage) for stage in _STAGES),
    _Column("total", lambda incident: f"{1000 * incident.total_s:.0f}", number=True),
)


def _show_failure(ledger: Ledger, screen: Screen) -> None:
    """The first cause, with its traceback or last output, and what the coordinator says of it."""
    cause = ledger.cause
    if cause is not None:
        screen.say(f"everstep: the first cause: {_first_cause(ledger, cause)}", "bold red")
        for line in cause.detail.rstrip().splitlines():
            screen.put(f"    {line}")
    said = _conclusion(ledger.text, cause)
    for line in said.splitlines():
        screen.say(f"everstep: {line}", "red")
    screen.put("")


def _first_cause(ledger: Ledger, cause: Cause) -> str:
    """The cause that ended a job, with rank and step if an incident has them."""
    for incident in reversed(ledger.incidents):
        if (incident.cause.kind, incident.cause.text) == (cause.kind, cause.text):
            return failure_of(incident.rank, incident.step, cause)
    return cause_in_words(cause)


def _conclusion(text: str, cause: Cause | None) -> str:
    """What the coordinator says of the end, less the cause, which stands above it."""
    if cause is None or not text.endswith(cause.text):
        return text
    said, found = _ALREADY_SAID.subn("", text.removesuffix(cause.text))
    return said if found or not said else text


def _ending(ledger: Ledger) -> str:
    if ledger.exit_code is None:
        return "its journal has no end; it still runs, or everstep itself was killed"
    return "finished" if ledger.exit_code == 0 else f"failed (exit code {ledger.exit_code})"


def _incidents(ledger: Ledger) -> str:
    if not ledger.incidents:
        return "none"
    by_rung = ", ".join(f"{number} {rung}" for rung, number in ledger.by_rung().items())
    closed = [incident for incident in ledger.incidents if incident.closed]
    sources = sorted({source_in_words(str(one.state_from)) for one in closed}, key=len)
    origin = f"; state from {_listed(sources)}" if sources else ""
    return f"{len(ledger.incidents)} ({by_rung}), {counted(ledger.steps_lost, 'step')} lost{origin}"


def _listed(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _next(ledger: Ledger, run_dir: Path) -> str:
    if ledger.exit_code is None:
        return f"follow it with: tail -f {run_dir / JOURNAL_FILE}"
    if ledger.exit_code == 0:
        return f"everstep report {run_dir} says this again"
    return f"each worker's last output is in {run_dir / LOGS}; correct the cause and start again"
