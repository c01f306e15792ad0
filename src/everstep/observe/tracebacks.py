"""Tracebacks as the script's author should see them: without the frames that lead to the script.

Theory of operation: a frame is a line `  File "...", line N` and the lines after it that are not
the next one; it is left out when its file is everstep's or runpy's. A traceback of which nothing
would be left (an error in everstep itself) stays as it is. The journal and the logs keep all of it.

When the script raises out of its main module, the worker prints the traceback, and each rank and
each attempt prints it again. `Folder` holds such a traceback back until it is complete and gives it
out once; later, one line stands for it. What the script prints of exceptions that it caught itself
begins with a frame of its own and is not touched, nor is an exception group, which has frames of
another form.

It does not know why an exception was raised, nor that two texts mean one error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import everstep

_HEAD = "Traceback (most recent call last):"
_BETWEEN = (  # what Python prints between the tracebacks of one chain
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FRAME = re.compile(r'\s+File "([^"]+)", line \d+')
_PACKAGE = f"{Path(everstep.__file__).parent}/"
_INSTALLED = "site-packages/everstep/"
_MOST_LINES = 2000  # of a traceback that never ends; it is shown as it came


def cleaned(lines: Sequence[str]) -> list[str]:
    """`lines`, a text with any number of tracebacks in it, without frames of everstep and runpy."""
    shown: list[str] = []
    part: list[str] = []
    for line in lines:
        if line == _HEAD:
            shown += _clean_one(part)
            part = []
        part.append(line)
    return shown + _clean_one(part)


class Folder:
    """Takes the lines that workers print to standard error. Not thread-safe."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], list[str]] = {}
        self._seen: set[str] = set()
        self._hushed: set[tuple[int, int]] = set()

    def take(self, rank: int, incarnation: int, line: str) -> list[str]:
        """The lines to show for this one: none while a traceback is held back, all of it when it is
        complete."""
        who = rank, incarnation
        held = self._held.get(who)
        if held is None:
            if line == _HEAD:
                self._held[who] = [line]
                return []
            if who in self._hushed and line in ("", *_BETWEEN):
                return []  # it stood between two that were shown before
            self._hushed.discard(who)
            return [line]
        held.append(line)
        ends_script, complete = _is_led_by_us(held), not line.startswith(" ")
        if ends_script and not complete and len(held) < _MOST_LINES:
            return []
        del self._held[who]
        return self._once(who, held) if ends_script and complete else held

    def rest(self) -> list[tuple[int, int, list[str]]]:
        """What is held back still, by rank and incarnation: its end did not come."""
        held, self._held = self._held, {}
        return [(*who, lines) for who, lines in held.items()]

    def _once(self, who: tuple[int, int], held: list[str]) -> list[str]:
        text = "\n".join(held)
        if text not in self._seen:
            self._seen.add(text)
            return cleaned(held)
        self._hushed.add(who)
        return [f"{held[-1]} (its traceback is above)"]


def _is_led_by_us(traceback: Sequence[str]) -> bool:
    """Its first frame is everstep's: the script has ended with it. Else the script printed it."""
    frame = _FRAME.match(traceback[1])
    return frame is not None and _is_ours(frame[1])


def _clean_one(lines: Sequence[str]) -> list[str]:
    shown: list[str] = []
    ours = frames = False
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            ours = _is_ours(frame[1])
            frames |= not ours
        elif not line.startswith(" "):
            ours = False
        if not ours:
            shown.append(line)
    return shown if frames else list(lines)


def _is_ours(file: str) -> bool:
    if file.startswith(_PACKAGE) or _INSTALLED in file:
        return True
    return file == "<frozen runpy>" or file.endswith("/runpy.py")
