"""The stacks that silent workers show: asked for, read, and told in few lines.

Theory of operation: each worker has a file to which faulthandler appends the stacks of all its
threads when a signal comes (worker/stacks.py). All are asked at once, and waited for together, a
second at the most; a process that is stopped by a signal, or stuck in the kernel, does not answer.
Of each answer the main thread counts, and of that the innermost line of the script and what it has
called; ranks that stand alike are named together.

It does not know which rank is to blame.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.core.words import name_ranks

_ANSWER_TIMEOUT_S = 1.0
_POLL_S = 0.02
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_CURRENT = "Current thread"
_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", f"{_PACKAGE}/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} at {Path(self.file).name}:{self.line}"


class StackFile:
    """The file in which one worker shows its stacks. Removed when it has none to keep."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken = 0
        """How many bytes `take` has returned so far."""

    def size(self) -> int:
        """Bytes in the file; 0 while there is none."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def take(self) -> str:
        """What was written since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.taken)
                data = file.read()
        except FileNotFoundError:
            return ""
        self.taken += len(data)
        return data.decode(errors="replace")

    def remove(self) -> None:
        """Remove the file: what it had is told elsewhere. May be called twice."""
        self.path.unlink(missing_ok=True)


async def collect(asked: Mapping[int, StackFile]) -> dict[int, str]:
    """What each rank answers, once it has been asked; "" from one that does not in time.

    An answer is whole when its file has stopped growing.
    """
    deadline = time.monotonic() + _ANSWER_TIMEOUT_S
    sizes: dict[int, int] = {}
    while asked and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
        before, sizes = sizes, {rank: file.size() for rank, file in asked.items()}
        if all(
            size > asked[rank].taken and size == before.get(rank) for rank, size in sizes.items()
        ):
            break
    return {rank: file.take() for rank, file in asked.items()}


def main_stack(text: str) -> tuple[Frame, ...]:
    """The stack of the thread that took the signal, which is the main thread; innermost first. The
    newest, if `text` has several; empty if it has none."""
    frames: list[Frame] = []
    current = False
    for line in text.splitlines():
        match = _FRAME.match(line)
        if match is None:
            if line.startswith(_CURRENT):
                current, frames = True, []
            elif line.strip():
                current = False
        elif current:
            file, number, function = match.group("file", "line", "function")
            frames.append(Frame(file=file, line=int(number), function=function))
    return tuple(frames)


def in_words(stack: tuple[Frame, ...]) -> str:
    """Where a stack stands: the innermost line of the script, what it has called, and where that
    has come to."""
    of_script = next((frame for frame in stack if not _is_library(frame)), None)
    if of_script is None:
        return f"in {stack[0]}"
    if of_script is stack[0]:
        return f"in {of_script}"
    called = stack[stack.index(of_script) - 1]
    words = f"in {of_script}, which called {called.function}"
    return words if called is stack[0] else f"{words}, now in {stack[0]}"


def _is_library(frame: Frame) -> bool:
    return any(part in frame.file for part in _LIBRARIES)


def group(answers: Mapping[int, str], silent: Mapping[int, str]) -> tuple[str, ...]:
    """One line for each different stack: "ranks 0, 2, 3: in train_step at train.py:41, which called
    backward, now in ...". `silent`: rank to why it did not answer."""
    ranks_at: dict[str, list[int]] = {}
    for rank, text in sorted(answers.items()):
        stack = main_stack(text)
        words = in_words(stack) if stack else "did not answer in time: it is stuck in the kernel"
        ranks_at.setdefault(words, []).append(rank)
    for rank, why in sorted(silent.items()):
        ranks_at.setdefault(why, []).append(rank)
    ordered = sorted(ranks_at.items(), key=lambda item: min(item[1]))
    return tuple(f"{name_ranks(ranks)}: {words}" for words, ranks in ordered)


def written(answers: Mapping[int, str], lines: Iterable[str]) -> str:
    """All that is known, for a file: the lines, then each rank's whole answer."""
    parts = [*lines, ""]
    for rank, text in sorted(answers.items()):
        parts += [f"==== rank {rank}", text.rstrip(), ""]
    return "\n".join(parts)
