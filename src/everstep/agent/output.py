"""What a worker prints: kept in a file, its last bytes in memory, and shown line by line.

Theory of operation: stdout and stderr are pipes, read on the event loop as bytes come. Bytes go to
the incarnation's log at once and unchanged; lines go to `on_line` when complete, decoded, without
the parts that a carriage return would have overwritten. The pipes are drained when the process is
dead, and not waited for: a process that left the worker's session may hold them open for ever. Loop
thread only.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from pathlib import Path

TAIL_BYTES = 64 << 10
MAX_LINE_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_DETAIL_LINES = 100
_DRAIN_READS = 32  # twice the largest pipe an unprivileged process can have


class LineSplitter:
    """Turns bytes into lines of text. A line without an end is given out at `MAX_LINE_BYTES`."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest[:MAX_LINE_BYTES])
            self._rest = self._rest[MAX_LINE_BYTES:]
        return [_shown(line) for line in lines]

    def flush(self) -> list[str]:
        """The last line, if it had no end."""
        rest, self._rest = self._rest, b""
        return [_shown(rest)] if rest else []


def _shown(line: bytes) -> str:
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace")


class Output:
    """The output of one incarnation of a rank.

    `log`: the file that keeps all of it; made here. `on_line(stream, line)` is called with "stdout"
    or "stderr".
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        log: Path,
        on_line: Callable[[str, str], None],
    ) -> None:
        self._loop = loop
        self._on_line = on_line
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._tail = bytearray()
        self._pipes: dict[int, tuple[str, LineSplitter]] = {}

    def open_pipe(self, stream: str) -> int:
        """Make a pipe for `stream` and return its writing end, which is the caller's to pass on and
        close."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        self._pipes[ours] = (stream, LineSplitter())
        self._loop.add_reader(ours, functools.partial(self._read_once, ours))
        return theirs

    def detail(self) -> str:
        """The last lines of the last 64 KiB, for the cause of a death without a traceback."""
        text = self._tail.decode(errors="replace")
        return "\n".join(text.splitlines()[-_DETAIL_LINES:])

    def drain(self) -> None:
        """Read what is in the pipes now. For a process that is dead; one that left its session may
        write for ever."""
        for fd in list(self._pipes):
            for _ in range(_DRAIN_READS):
                if not self._read_once(fd):
                    break

    def close(self) -> None:
        """Give out unfinished lines and close pipes and log. May be called twice."""
        for fd in list(self._pipes):
            self._close_pipe(fd)
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def _read_once(self, fd: int) -> bool:
        """Take one piece from a pipe. False: it is empty now, or at its end."""
        stream, splitter = self._pipes[fd]
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(fd)
            return False
        self._keep(data)
        for line in splitter.feed(data):
            self._on_line(stream, line)
        return True

    def _keep(self, data: bytes) -> None:
        self._tail += data
        del self._tail[:-TAIL_BYTES]
        left = memoryview(data)
        while left:
            left = left[os.write(self._log, left) :]

    def _close_pipe(self, fd: int) -> None:
        stream, splitter = self._pipes.pop(fd)
        self._loop.remove_reader(fd)
        os.close(fd)
        for line in splitter.flush():
            self._on_line(stream, line)
