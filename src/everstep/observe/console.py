"""The terminal's view of a run: the workers' lines, each incident as it happens, a live line, a
summary.

The script's lines go where the script sent them, standard output or standard error, with the rank
before them. Everstep's own go to standard error, so that what the script prints can be piped on
alone. Where standard error is a terminal, a live line stands at its bottom: it is wiped before
anything is printed and drawn again behind it, so it needs no thread and no timer.

The view counts what the live line shows and keeps no record. The summary is folded from the
journal."""

from __future__ import annotations

import os
import shutil
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from everstep.observe.narrate import Narrator, counted
from everstep.observe.report import report_run
from everstep.settings import RunSettings

WIPE = "\r\x1b[2K"
_YELLOW, _PLAIN = "\x1b[33m", "\x1b[0m"
_RATE_OVER_STEPS = 32
_DRAW_EVERY_S = 0.1


class ConsoleView:
    """Shows one job on a terminal or in a log. For one thread; writes block as the streams do.

    `stdout`, `stderr`: the streams to write to, the process's own when not given.
    """

    def __init__(
        self, settings: RunSettings, stdout: TextIO | None = None, stderr: TextIO | None = None
    ) -> None:
        self._settings = settings
        self._streams = {"stdout": stdout or sys.stdout, "stderr": stderr or sys.stderr}
        terminal = self._streams["stderr"].isatty()
        self._live = terminal and not settings.quiet
        self._color = settings.color == "always" or (settings.color == "auto" and terminal)
        self._narrator = Narrator()
        self._pace = _Pace()
        self._drawn = False
        self._drawn_at_s = float("-inf")

    def record(self, record: dict[str, Any]) -> None:
        """Show what a journal record means, if it means anything to a person."""
        lines = self._narrator.tell(record)
        self._pace.see(record)
        for line in lines:
            self._say(line)
        now_s = float(record.get("t", 0.0))
        if lines or (record.get("event") == "step" and now_s - self._drawn_at_s >= _DRAW_EVERY_S):
            self._drawn_at_s = now_s
            self._draw()

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """Show one line of a worker. `stream`: `stdout` or `stderr`."""
        if self._settings.quiet:
            return
        again = f".{incarnation}" if incarnation > 1 else ""
        self._write(
            "stdout" if stream == "stdout" else "stderr", f"[rank{rank}{again}] {line.rstrip()}"
        )
        self._draw()

    def close(self) -> None:
        """Take the live line away. The view can still summarize."""
        self._wipe()
        self._live = False

    def summarize(self, run_dir: Path) -> None:
        """Say how the run went, from its journal: on failure the first cause first. Reads the
        journal."""
        for line in report_run(run_dir):
            self._write("stderr", line)

    def _say(self, line: str) -> None:
        text = f"everstep: {line}"
        self._write("stderr", f"{_YELLOW}{text}{_PLAIN}" if self._color else text)

    def _write(self, name: str, line: str) -> None:
        self._wipe()
        self._put(name, line + "\n")

    def _draw(self) -> None:
        if not self._live or self._narrator.step == 0:
            return
        parts = [
            f"step {self._narrator.step}",
            *self._pace.words(),
            counted(self._narrator.incidents, "incident"),
        ]
        width = shutil.get_terminal_size().columns - 1
        self._put("stderr", WIPE + ("everstep: " + " | ".join(parts))[:width])
        self._drawn = True

    def _wipe(self) -> None:
        if self._drawn:
            self._put("stderr", WIPE)
            self._drawn = False

    def _put(self, name: str, text: str) -> None:
        """Write and flush; a stream whose reader has gone is given up, for the run matters more
        than its display."""
        stream = self._streams[name]
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            _silence(stream)
            self._live = self._live and name != "stderr"


class _Pace:
    """Rate of steps, and goodput so far as the ledger defines it: from commit to commit, incidents
    left out."""

    def __init__(self) -> None:
        self._step_at_s: deque[float] = deque(maxlen=_RATE_OVER_STEPS)
        self._first_s: float | None = None
        self._last_s = 0.0
        self._good_s = 0.0
        self._good_from_s: float | None = None
        self._open: set[int] = set()

    def see(self, record: Mapping[str, Any]) -> None:
        now_s = float(record.get("t", self._last_s))
        self._first_s = now_s if self._first_s is None else self._first_s
        self._last_s = now_s
        match record.get("event"):
            case "step" if not self._open:
                self._step_at_s.append(now_s)
                self._good_s += now_s - (now_s if self._good_from_s is None else self._good_from_s)
                self._good_from_s = now_s
            case "setup_done" if not self._open:
                self._good_from_s = now_s
            case "incident_opened":
                self._open.add(record["incident"])
                self._step_at_s.clear()
            case "incident_closed":
                self._open.discard(record["incident"])
                self._good_from_s = now_s

    def words(self) -> list[str]:
        """`12.3 steps/s` and `goodput 98.1 %`, where they are known."""
        words = []
        if len(self._step_at_s) > 1 and self._step_at_s[-1] > self._step_at_s[0]:
            rate = (len(self._step_at_s) - 1) / (self._step_at_s[-1] - self._step_at_s[0])
            words.append(f"{rate:.1f} steps/s")
        if self._first_s is not None and self._last_s > self._first_s:
            words.append(f"goodput {100 * self._good_s / (self._last_s - self._first_s):.1f} %")
        return words


def _silence(broken: TextIO) -> None:
    """Point a stream whose reader has gone to /dev/null; the interpreter flushes it once more at
    its exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, broken.fileno())
    finally:
        os.close(nowhere)
