"""A run's summary in plain text, folded from its journal.

The same words end `everstep run`, answer `everstep report`, and stand in a proof. Everything said
here is in the journal; the one thing looked for beside it is the last output of a worker, in the
logs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from everstep.core.goodput import Ledger, fold
from everstep.errors import UserError
from everstep.observe.journal import read_journal
from everstep.observe.narrate import counted, source_in_words
from everstep.types import Stage

JOURNAL_FILE = "journal.jsonl"
LOGS = "logs"
_COLUMNS = (Stage.DETECT, Stage.STOP, Stage.START, Stage.REGROUP, Stage.STATE, Stage.FIRST_STEP)


def report_run(run_dir: Path) -> list[str]:
    """The lines of the report on a run's directory. Raises UserError without a journal in it.
    Blocks on the disk."""
    journal = run_dir / JOURNAL_FILE
    if not journal.is_file():
        raise UserError(
            f"{journal}: no such journal; give the directory of a run, like everstep-runs/RUN_ID"
        )
    return summary(fold(read_journal(journal)), run_dir)


def summary(ledger: Ledger, run_dir: Path) -> list[str]:
    """How a run went: on failure the first cause, then the figures, then where to look and what to
    do next."""
    lines = _failure(ledger) if ledger.exit_code else []
    lines.append(f"everstep run {ledger.run_id}: {_ending(ledger)}")
    ranks = counted(ledger.world_size, "rank")
    lines.append(f"  steps      {ledger.steps} committed on {ranks} in {ledger.wall_s:.2f} s")
    lines.append(f"  incidents  {_incidents(ledger)}")
    lines.append(f"  goodput    {100 * ledger.goodput:.1f} %")
    if ledger.incidents:
        lines += ["", *(f"  {line}" for line in incident_table(ledger)), ""]
    lines.append(f"  journal    {run_dir / JOURNAL_FILE}")
    lines.append(f"  logs       {run_dir / LOGS}")
    lines.append(f"  next       {_next(ledger, run_dir)}")
    return lines


def incident_table(ledger: Ledger) -> list[str]:
    """A title, and a line for each incident: what, which rung, and where the time went."""
    if not ledger.incidents:
        return ["no incidents"]
    head = (
        "step",
        "rank",
        "cause",
        "rung",
        "state from",
        *(f"{stage}" for stage in _COLUMNS),
        "total",
    )
    rows = [
        (
            str(incident.step),
            str(incident.rank),
            incident.fault or incident.cause.text,
            incident.rung if incident.closed and incident.rung else "(open)",
            incident.state_from or "",
            *(f"{1000 * incident.stages.get(stage, 0.0):.0f}" for stage in _COLUMNS),
            f"{1000 * incident.total_s:.0f}",
        )
        for incident in ledger.incidents
    ]
    return ["incidents, times in ms:", *table(head, rows)]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; a column of numbers is set to the right."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    right = [all(row[column].isdigit() for row in cells[1:]) for column in range(len(head))]
    lines = []
    for row in cells:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    return lines


def _failure(ledger: Ledger) -> list[str]:
    """The first cause, with its traceback or last output, and what the coordinator says of it."""
    lines = []
    cause = ledger.cause
    if cause is not None:
        lines.append(f"everstep: the first cause: {cause.text}")
        lines += [f"    {line}" for line in cause.detail.rstrip().splitlines()]
    if ledger.text and (cause is None or ledger.text != cause.text):
        lines += [f"everstep: {line}" for line in ledger.text.splitlines()]
    return [*lines, ""]


def _ending(ledger: Ledger) -> str:
    if ledger.exit_code is None:
        return "its journal has no end; it still runs, or everstep itself was killed"
    return "finished" if ledger.exit_code == 0 else f"failed (exit code {ledger.exit_code})"


def _incidents(ledger: Ledger) -> str:
    if not ledger.incidents:
        return "none"
    by_rung = ", ".join(f"{number} {rung}" for rung, number in ledger.by_rung().items())
    closed = [incident for incident in ledger.incidents if incident.closed]
    sources = sorted({source_in_words(str(incident.state_from)) for incident in closed})
    origin = f"; state from {', '.join(sources)}" if sources else ""
    return f"{len(ledger.incidents)} ({by_rung}), {counted(ledger.steps_lost, 'step')} lost{origin}"


def _next(ledger: Ledger, run_dir: Path) -> str:
    if ledger.exit_code is None:
        return f"follow it with: tail -f {run_dir / JOURNAL_FILE}"
    if ledger.exit_code == 0:
        return f"everstep report {run_dir} says this again"
    return f"each worker's last output is in {run_dir / LOGS}; correct the cause and start again"
