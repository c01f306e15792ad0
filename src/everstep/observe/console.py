"""The terminal's view of a run: the workers' lines, each incident as it happens, a live line, a
summary.

The script's lines go where the script sent them, standard output or standard error, with the rank
before them. Everstep's own go to standard error, so that what the script prints can be piped on
alone. Where standard error is a terminal, a live line stands at its bottom; if standard output is
the same terminal, its lines take the same way, so that they do not run into the live line.

The view counts what the live line shows and keeps no record. The summary is folded from the
journal.

A traceback with which the script ends is shown once, not by every rank and attempt; see
`tracebacks.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, TextIO

from everstep.observe.narrate import Narrator, counted, size_in_words
from everstep.observe.pace import Pace
from everstep.observe.report import report_run
from everstep.observe.screen import Screen, same_terminal
from everstep.observe.tracebacks import Folder
from everstep.settings import RunSettings
from everstep.wire.clients import OWN, Line

_DRAW_EVERY_S = 0.1


class ConsoleView:
    """Shows one job on a terminal or in a log. For one thread; writes block as the streams do.

    `stdout`, `stderr`: the streams to write to, the process's own when not given.
    """

    def __init__(
        self, settings: RunSettings, stdout: TextIO | None = None, stderr: TextIO | None = None
    ) -> None:
        out, err = stdout or sys.stdout, stderr or sys.stderr
        self._quiet = settings.quiet
        self._run = (
            f"run {settings.run_id} on {size_in_words(settings)}, "
            f"kept in {Path(settings.log_dir) / settings.run_id}"
        )
        self._folder = Folder()
        self._screen = Screen(err, settings.color)
        shared = same_terminal(out, err)
        self._script_out = self._screen if shared else Screen(out, settings.color)
        self._narrator = Narrator()
        self._pace = Pace()
        self._doing = ""
        self._drawn_at_s = float("-inf")
        self._closed = False

    def record(self, record: dict[str, Any]) -> None:
        """Show what a journal record means, if it means anything to a person."""
        lines = self._narrator.tell(record)
        self._pace.see(record)
        event, now_s = record.get("event"), float(record.get("t", 0.0))
        if event == "journal" and not self._screen.interactive:
            self._screen.say(f"everstep: {self._run}")
        if event == "job_started":
            self._doing = f"setting up {counted(int(record['world_size']), 'rank')}"
        due = event == "step" and now_s - self._drawn_at_s >= _DRAW_EVERY_S
        if lines or due or event in ("job_started", "incident_opened"):
            self._drawn_at_s = now_s
            self._draw(now=not lines)
        for line in lines:
            self._screen.say(f"everstep: {line}", "yellow")

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """Show one line of a worker. `stream`: `stdout` or `stderr`."""
        if self._quiet:
            return
        line = line.rstrip()
        if stream == "stdout":
            self._script_out.relay(_prefix(rank, incarnation), line)
            return
        for shown in self._folder.take(rank, incarnation, line):
            self._screen.relay(_prefix(rank, incarnation), shown)

    def close(self) -> None:
        """Take the live line away. The view can still summarize."""
        self._closed = True
        for rank, incarnation, lines in self._folder.rest():
            for line in lines:
                self._screen.relay(_prefix(rank, incarnation), line)
        self._screen.end_live()

    def summarize(self, run_dir: Path) -> None:
        """Say how the run went, from its journal: on failure the first cause first. Reads the
        journal."""
        self._screen.end_live()
        report_run(run_dir, self._screen)

    def _draw(self, *, now: bool) -> None:
        step = self._narrator.step
        if self._quiet or self._closed or not (step or self._doing):
            return
        parts = [f"step {step}"] if step else [self._doing]
        if self._pace.recovering:
            parts.append("recovering")
        if step:
            parts += [*self._pace.rate(), *self._pace.goodput()]
        if step or self._narrator.incidents:
            parts.append(counted(self._narrator.incidents, "incident"))
        if self._narrator.spares is not None:
            parts.append(counted(self._narrator.spares, "spare"))
        self._screen.live("everstep: " + " | ".join(parts), now=now)


class LinePrinter:
    """Prints lines of a job that runs elsewhere, as `ConsoleView` does. Implements
    `launch.client.Printer`. Writes block as the streams do."""

    def __init__(self, color: str) -> None:
        self._out, self._err = Screen(sys.stdout, color), Screen(sys.stderr, color)

    def line(self, line: Line) -> None:
        """Show a line."""
        if line.rank == OWN:
            self._err.say(f"everstep: {line.text}", "yellow")
        else:
            screen = self._out if line.stream == "stdout" else self._err
            screen.relay(_prefix(line.rank, line.incarnation), line.text.rstrip())

    def missed(self, rank: int, count: int) -> None:
        """Say that lines of a rank were left out."""
        whose, where = f"rank {rank}'s", "its log"
        if rank == OWN:
            whose, where = "everstep's own", "the journal"
        left_out = f"{counted(count, 'line')} of {whose} came faster than they were read"
        self._err.say(f"everstep: {left_out}, and are left out here; see {where}", "yellow")


def _prefix(rank: int, incarnation: int) -> str:
    again = f".{incarnation}" if incarnation > 1 else ""
    return f"[rank{rank}{again}] "
