"""The journal: the append-only record of a run, one JSON object a line.

Theory of operation: each record is one `write` on a descriptor opened with O_APPEND, ending in its
newline. The kernel has the whole line or, if the process is killed in the call or the machine dies,
a part of it; so a kill at any byte loses at most the last line, and a reader drops a line without a
newline. The first line names the format and its version. `fsync` only at the close: the journal
explains a run, it does not restore one, and a step must not wait for a disk.

Every line has `t`, seconds on the host's monotonic clock, and `event`. This module does not know
the events.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from everstep.errors import EverstepError

FORMAT = "everstep-journal"
VERSION = 1


class JournalError(EverstepError):
    """The file is not a journal that this version can read."""


class LineFile:
    """A file of JSON lines, appended to one whole line at a time.

    `path` must not exist. Writes block for the page cache only. Not thread-safe.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd: int | None = os.open(path, flags, 0o644)
        self.path = path

    def write(self, line: Mapping[str, Any]) -> bytes:
        """Append one line and return it. Raises OSError when the kernel does not take it (a full
        disk)."""
        if self._fd is None:
            raise ValueError(f"{self.path} is closed")
        encoded = msgspec.json.encode(line)
        left = memoryview(encoded + b"\n")
        while left:
            left = left[os.write(self._fd, left) :]
        return encoded

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

    `path` must not exist yet. `wall_time`: seconds since the epoch at the start, for people; all
    other times are monotonic. `clock`: seconds on the monotonic clock. Not thread-safe.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        wall_time: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = LineFile(path)
        self._clock = clock
        self.path = path
        header = {"format": FORMAT, "version": VERSION, "run_id": run_id, "wall_time": wall_time}
        self.header = self.write("journal", header)

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
    *whole, _cut = path.read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(whole, start=1):
        try:
            records.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.MsgspecError as error:
            raise JournalError(
                f"{path}, line {number}: not a JSON object ({error}); only the last line of a "
                "journal can be cut, so the file was changed by something else; take it from a "
                "backup or remove that line"
            ) from error
    if records:
        _check_header(path, records[0])
    return records


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
