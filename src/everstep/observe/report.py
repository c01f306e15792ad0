"""A run's summary, folded from its journal.

The same words end `everstep run`, answer `everstep report`, and stand in a proof. Everything said
here is in the journal; the one thing looked for beside it is the last output of a worker, in the
logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from everstep.core.goodput import IncidentEntry, Ledger, fold
from everstep.core.words import STOP_COMMAND, name_signal
from everstep.errors import UserError
from everstep.observe.journal import read_journal
from everstep.observe.narrate import (
    beginning,
    cause_in_words,
    counted,
    failure_of,
    source_in_words,
)
from everstep.observe.screen import Screen
from everstep.observe.tracebacks import cleaned
from everstep.types import Cause, CauseKind, Stage

JOURNAL_FILE = "journal.jsonl"
LOGS = "logs"
_STAGES = (Stage.DETECT, Stage.STOP, Stage.START, Stage.REGROUP, Stage.STATE, Stage.FIRST_STEP)
_INDENT = (0, 0, 0, 2)
_BRIEF = 50  # characters of a cause: beside all other columns they fit a terminal of 140
_CLAUSE = re.compile(r", (?:and|where) ")
_ALREADY_SAID = re.compile(r"(?:\. First cause, rank \d+ in step \d+)?:\s*$")


def report_run(run: Path, screen: Screen) -> None:
    """Report on a run. `run`: its directory, or its journal.

    Raises UserError without a journal there. Blocks on the disk and the screen."""
    journal = run if run.is_file() else run / JOURNAL_FILE
    if not journal.is_file():
        raise UserError(
            f"{journal}: no such journal; give the directory of a run, like everstep-runs/RUN_ID"
        )
    summarize(read_journal(journal), journal, screen)


def summarize(records: Sequence[Mapping[str, Any]], journal: Path, screen: Screen) -> None:
    """Say how a run went: on failure the first cause, then the figures, then where to look and what
    to do next. `records`: those of `journal`."""
    ledger, run_dir = fold(records), journal.parent
    if ledger.exit_code and stopped_by(ledger) is None:
        _show_failure(ledger, screen)
    screen.say(f"everstep run {ledger.run_id}: {ending(ledger)}", "bold")
    ranks = counted(ledger.world_size, "rank")
    began = _began(records)
    made = ledger.steps - (began["step"] if began else 0)
    screen.say(f"  steps      {made} committed on {ranks} in {ledger.wall_s:.2f} s")
    if began:
        screen.say(f"  began      {beginning(began)}")
    screen.say(f"  incidents  {_incidents(ledger)}")
    pool = _pool(records)
    if pool:
        screen.say(f"  nodes      {pool}")
    never = unfired(records)
    if never and ledger.exit_code is not None:
        screen.say(f"  faults     never fired: {'; '.join(never)}")
    screen.say(f"  goodput    {100 * ledger.goodput:.1f} %")
    if ledger.incidents:
        show_incidents(ledger, screen)
    screen.put(f"  journal    {journal}")
    screen.put(f"  logs       {run_dir / LOGS}")
    screen.put(f"  next       {_next(ledger, run_dir)}")


def show_incidents(ledger: Ledger, screen: Screen) -> None:
    """A table with a line for each incident: what, which rung, and where the time went; empty lines
    around it. On a narrow terminal the times are a table of their own. Causes that are too long for
    their column are told in full below."""
    screen.put("")
    screen.say("  incidents, times in ms:")
    parts = [[*_WHERE, *_WHAT, *_TIMES]]
    if not screen.fits(_table(ledger, parts[0], screen.terminal)):
        parts = [[*_WHERE, *_WHAT, _TIMES[-1]], [*_WHERE, *_TIMES]]
    for columns in parts:
        screen.draw(_table(ledger, columns, screen.terminal))
        screen.put("")
    cut = [one for one in ledger.incidents if _brief(_told(one)) != _told(one)]
    for incident in cut:
        screen.say(f"  {failure_of(incident.rank, incident.step, incident.cause)}")
    if cut:
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


def _told(incident: IncidentEntry) -> str:
    """The fault on purpose, or the cause, less rank and step, which have columns of their own."""
    if incident.fault:
        return incident.fault
    text = cause_in_words(incident.cause)
    if incident.cause.kind is CauseKind.EXCEPTION:  # the script's own words
        return text
    text = re.sub(rf" in step {incident.step}\b", "", text)
    return text.removeprefix(f"rank {incident.rank} ").removeprefix("was ")


def _brief(text: str) -> str:
    """What fits the column: the first clause, or its beginning."""
    if len(text) <= _BRIEF:
        return text
    clause = _CLAUSE.split(text, maxsplit=1)[0]
    return (clause if len(clause) <= _BRIEF else clause[:_BRIEF].rstrip()) + "..."


def _time(stage: Stage) -> _Column:
    def cell(incident: IncidentEntry) -> str:
        return f"{1000 * incident.stages.get(stage, 0.0):.0f}"

    return _Column(stage.replace("_", " "), cell, number=True)


_WHERE = (
    _Column("step", lambda incident: str(incident.step), number=True),
    _Column("rank", lambda incident: str(incident.rank), number=True),
)
_WHAT = (
    _Column("cause", lambda incident: _brief(_told(incident))),
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
        for line in cleaned(cause.detail.rstrip().splitlines()):
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


def ending(ledger: Ledger) -> str:
    """How the run ended, in a few words."""
    if ledger.exit_code is None:
        return "its journal has no end; it still runs, or everstep itself was killed"
    by = stopped_by(ledger)
    if by is not None:
        return f"stopped by {by}"
    return "finished" if ledger.exit_code == 0 else f"failed (exit code {ledger.exit_code})"


def stopped_by(ledger: Ledger) -> str | None:
    """By what a person ended the job: a signal's name, or a command; None for any other end. A job
    that a signal to a worker has ended has a cause."""
    if ledger.cause is not None or ledger.exit_code is None or ledger.exit_code <= 128:
        return None
    if STOP_COMMAND in ledger.text:
        return STOP_COMMAND
    return name_signal(ledger.exit_code - 128)


def unfired(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The faults on purpose that were asked for and that the journal does not show to have
    fired."""
    fired = {record["index"] for record in records if record.get("event") == "fault_fired"}
    asked = (record.get("chaos", ()) for record in records if record.get("event") == "job_started")
    return [text for index, text in enumerate(next(asked, ())) if index not in fired]


def _incidents(ledger: Ledger) -> str:
    if not ledger.incidents:
        return "none"
    by_rung = ", ".join(f"{number} {rung}" for rung, number in ledger.by_rung().items())
    closed = [incident for incident in ledger.incidents if incident.closed]
    sources = sorted({source_in_words(str(one.state_from)) for one in closed}, key=len)
    origin = f"; state from {_listed(sources)}" if sources else ""
    return f"{len(ledger.incidents)} ({by_rung}), {_lost(ledger)}{origin}"


def _began(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The record of the checkpoint at which the job began; None where it began at its script."""
    for record in records:
        if record.get("event") == "checkpoint_loaded":
            return record
        if record.get("event") == "step":
            return None
    return None


def _pool(records: Sequence[Mapping[str, Any]]) -> str:
    """What became of the job's nodes; "" where it had none of its own."""
    gathered = [record for record in records if record.get("event") == "gathered"]
    if not gathered:
        return ""
    joined = sum(record.get("event") == "node_joined" for record in records)
    lost = [record for record in records if record.get("event") == "node_lost"]
    replaced = [record for record in records if record.get("event") == "node_replaced"]
    parts = [f"{len(gathered[0]['nodes'])} needed, {joined} joined, {len(lost)} lost"]
    parts += [f"node {one['lost']} replaced by node {one['node']}" for one in replaced]
    return "; ".join(parts)


def _lost(ledger: Ledger) -> str:
    """What became of committed steps. After an incident that nobody survived the state is gone with
    the processes, and the steps with it."""
    if ledger.exit_code and ledger.steps and not ledger.incidents[-1].closed:
        gone = f"{counted(ledger.steps - ledger.kept, 'committed step')} gone with the job"
        return f"{gone}, a checkpoint of step {ledger.kept} is left" if ledger.kept else gone
    return f"{counted(ledger.steps_lost, 'step')} lost"


def _listed(words: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _next(ledger: Ledger, run_dir: Path) -> str:
    if ledger.exit_code is None:
        return f"follow it with: tail -f {run_dir / JOURNAL_FILE}"
    if ledger.exit_code == 0 or stopped_by(ledger) is not None:
        return f"everstep report {run_dir} says this again"
    return f"each worker's last output is in {run_dir / LOGS}; correct the cause and start again"
