"""The journal: the append-only record of a run, one JSON object a line.

Theory of operation: each record is one `write` on a descriptor opened with O_APPEND, ending in its
newline. The kernel has the whole line or, if the process is killed in the call or the machine dies,
a part of it; so a kill at any byte loses at most the last line, and a reader drops a line without a
newline. Who goes on with a journal that another process began cuts such a part off first. The first
line names the format and its version. `fsync` only at the close: the journal explains a run, it
does not restore one, and a step must not wait for a disk.

Every line has `t`, seconds on the host's monotonic clock, and `event`. A coordinator that goes on
with the journal on another host, or after a boot, has another clock: it says so, and a reader moves
what follows by what the two wall clocks tell, never back behind what was read. Beyond that this
module does not know the events.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from everstep.errors import EverstepError

_BLOCK_BYTES = 64 << 10
FORMAT = "everstep-journal"
VERSION = 1


class JournalError(EverstepError):
    """The file is not a journal that this version can read."""


class LineFile:
    """A file of JSON lines, appended to one whole line at a time.

    `path` must not exist; with `resume` it may, and a last line without its end is cut off.
    `guard`: called before each write, raises if this process may not write any more. Writes block
    for the page cache only. Not thread-safe.
    """

    def __init__(
        self, path: Path, *, resume: bool = False, guard: Callable[[], None] | None = None
    ) -> None:
        exclusive = 0 if resume else os.O_EXCL
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | exclusive
        self._fd: int | None = os.open(path, flags, 0o644)
        self._guard = guard
        self.path = path
        if resume:
            _cut_torn_line(self._fd)

    def write(self, line: Mapping[str, Any]) -> bytes:
        """Append one line and return it. Raises OSError when the kernel does not take it (a full
        disk)."""
        encoded = msgspec.json.encode(line)
        self.write_encoded(encoded)
        return encoded

    def write_encoded(self, encoded: bytes) -> None:
        """Append a line that is JSON already. Raises OSError likewise."""
        if self._fd is None:
            raise ValueError(f"{self.path} is closed")
        if self._guard is not None:
            self._guard()
        left = memoryview(encoded + b"\n")
        while left:
            left = left[os.write(self._fd, left) :]

    def close(self) -> None:
        """Flush to the disk and close. May be called twice. Blocks for the disk."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


class JournalWriter:
    """Writes one run's journal, and stamps each record with the time.

    `path` must not exist yet; with `resume` it may, and is gone on with. `wall_time`: seconds since
    the epoch at the start, for people; all other times are monotonic. `clock`: seconds on the
    monotonic clock. `guard`: as LineFile has it. Not thread-safe. Raises JournalError for a file
    that can't be gone on with.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        wall_time: float,
        clock: Callable[[], float] = time.monotonic,
        resume: bool = False,
        guard: Callable[[], None] | None = None,
    ) -> None:
        self._file = LineFile(path, resume=resume, guard=guard)
        self._clock = clock
        self.path = path
        try:
            there = next(records_of(path), None) if resume else None
        except JournalError:
            self.close()
            raise
        header = {"format": FORMAT, "version": VERSION, "run_id": run_id, "wall_time": wall_time}
        self.header = there or self.write("journal", header)

    def write(self, event: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Append a record and return it as a reader will see it. Raises OSError on a full disk."""
        line = {"t": self._clock(), "event": event, **fields}
        return msgspec.json.decode(self._file.write(line), type=dict[str, Any])

    def close(self) -> None:
        """Flush to the disk and close. May be called twice."""
        self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole records of a journal, the header first; a cut last line is dropped. An empty file
    has none.

    Raises JournalError for a file that is no journal, is of another version, or is damaged before
    its last line; OSError if it cannot be read.
    """
    return list(records_of(path))


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """The records as `read_journal` has them, one after another. Raises as it does. Blocks for the
    disk."""
    clock = _Clock()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.MsgspecError as error:
                raise JournalError(
                    f"{path}, line {number}: not a JSON object ({error}); only the last line of a "
                    "journal can be cut, so the file was changed by something else; take it from a "
                    "backup or remove that line"
                ) from error
            if number == 1:
                _check_header(path, record)
            yield clock.moved(record)


class _Clock:
    """Moves the times of later coordinators to the first one's clock."""

    def __init__(self) -> None:
        self._header: Mapping[str, Any] = {}
        self._boot_id: str | None = None
        self._offset_s = 0.0
        self._last_s = float("-inf")

    def moved(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record, with its times on the first clock."""
        self._header = self._header or record
        if record.get("event") == "coordinator_started":
            self._look(record)
        if self._offset_s:
            _move(record, self._offset_s)
        self._last_s = float(record.get("t", self._last_s))
        return record

    def _look(self, started: Mapping[str, Any]) -> None:
        before, self._boot_id = self._boot_id, started.get("boot_id")
        if before in (None, self._boot_id):
            return
        began = self._header
        since_s = float(started["wall_time"]) - float(began["wall_time"])
        self._offset_s = max(float(began["t"]) + since_s, self._last_s) - float(started["t"])


def _move(record: dict[str, Any], offset_s: float) -> None:
    for name in ("t", "fired_t", "at_s"):
        if record.get(name) is not None:
            record[name] += offset_s
    cause = record.get("cause")
    if isinstance(cause, dict) and cause.get("at_s") is not None:
        cause["at_s"] += offset_s


def _cut_torn_line(fd: int) -> None:
    """Cut off what stands behind the last newline. Blocks for the disk."""
    end = os.fstat(fd).st_size
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        newline = os.pread(fd, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    os.ftruncate(fd, end)


def _check_header(path: Path, header: Mapping[str, Any]) -> None:
    if header.get("format") != FORMAT:
        raise JournalError(
            f"{path}: the first line does not name the format {FORMAT!r}; this is not a journal"
        )
    if header.get("version") != VERSION:
        raise JournalError(
            f"{path}: journal version {header.get('version')!r}; this everstep reads version "
            f"{VERSION}; use the everstep that wrote it"
        )
