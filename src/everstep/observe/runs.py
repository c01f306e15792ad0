"""Which runs a directory holds, for a person who asks for a report without naming one.

A run is a directory with a journal in it. The list is folded from the journals like everything
else; one that can not be read is listed with the reason, so that it hides no other."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from everstep.core.goodput import fold
from everstep.observe.journal import JournalError, read_journal
from everstep.observe.narrate import counted
from everstep.observe.report import JOURNAL_FILE, ending
from everstep.observe.screen import Screen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A run in the list. `wall_time`: its start, seconds since the epoch, 0 where it is not
    known."""

    run_dir: Path
    wall_time: float
    steps: str
    ending: str


def list_runs(folder: Path, screen: Screen) -> bool:
    """List the runs in `folder`, the oldest first; False if there are none. Blocks on the disk and
    the screen."""
    entries = sorted(
        (_entry(journal) for journal in folder.glob(f"*/{JOURNAL_FILE}")),
        key=lambda entry: (entry.wall_time, entry.run_dir.name),
    )
    if not entries:
        return False
    screen.say(f"{folder} holds {counted(len(entries), 'run')}:", "bold")
    width = max(len(entry.run_dir.name) for entry in entries)
    screen.put(f"  {'started':19}  {'run':{width}}  {'steps':>8}  ended")
    for entry in entries:
        local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.wall_time))
        began = local if entry.wall_time else "-"
        row = f"{began:19}  {entry.run_dir.name:{width}}  {entry.steps:>8}  {entry.ending}"
        screen.put(f"  {row}")
    screen.put(f"next: everstep report {entries[-1].run_dir}")
    return True


def _entry(journal: Path) -> _Entry:
    try:
        records = read_journal(journal)
        ledger = fold(records)
    except (JournalError, OSError, KeyError, ValueError) as error:
        why = f"its journal can not be read: {error}"
        return _Entry(run_dir=journal.parent, wall_time=0.0, steps="-", ending=why)
    return _Entry(
        run_dir=journal.parent,
        wall_time=float(records[0].get("wall_time", 0.0)) if records else 0.0,
        steps=str(ledger.steps),
        ending=ending(ledger),
    )
