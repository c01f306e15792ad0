"""A run's directory: its journal and the files beside it.

`journal.jsonl`; `metrics.jsonl`, one line for each commit that logged scalars;
`logs/rank<R>.<incarnation>.log`; and, when the run is recorded for `everstep prove`, `trace.jsonl`,
one line for each commit of a rank, and `digests.json`, rank to the digests of its final state. A
step that a rank did twice has two lines in the trace, in the order they came.

A coordinator that takes a job over goes on with the files of the one before it. What that one has
written down may be told again, as it was: a line of metrics or trace that is there already, among
the newest ones, is not written twice. Digests are kept line by line as they come
(`digests.jsonl`), and become `digests.json` at the close.

It does not know what is in the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from everstep.errors import UserError
from everstep.observe.journal import JournalWriter, LineFile

# What is told again is of the newest few steps: more lines than that of one step need not be known.
_TAIL_BYTES = 16 << 20


class RunDirectory:
    """The open files of one run. Made by whoever coordinates the job; one thread.

    `path` must not exist; with `resume` it may, and what is there is gone on with. `recorded`: keep
    trace and digests. `guard`: called before each write, raises if this process may not write any
    more. Raises UserError if the directory cannot be made or written to, JournalError for a journal
    that can't be gone on with.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        recorded: bool,
        resume: bool = False,
        guard: Callable[[], None] | None = None,
    ) -> None:
        self.path = path
        self.logs = path / "logs"
        make_run_directory(path, resume=resume)
        self._recorded = recorded
        self._digests: dict[str, Any] = {}
        self.journal = JournalWriter(
            path / "journal.jsonl", run_id=run_id, wall_time=time.time(), resume=resume, guard=guard
        )
        self._metrics = _Lines(path / "metrics.jsonl", resume, guard)
        if recorded:
            self._trace = _Lines(path / "trace.jsonl", resume, guard)
            self._digest_lines = LineFile(path / "digests.jsonl", resume=resume, guard=guard)
            self._digests = _read_digests(path) if resume else {}

    def log(self, rank: int, incarnation: int) -> Path:
        """Where an incarnation's output is kept."""
        return self.logs / f"rank{rank}.{incarnation}.log"

    def stacks(self, rank: int, incarnation: int) -> Path:
        """Where an incarnation shows its stacks when it is asked to; absolute, for a worker may
        change its directory."""
        return (self.logs / f"rank{rank}.{incarnation}.stacks").absolute()

    def metrics(self, rank: int, step: int, log: Mapping[str, float]) -> None:
        """Append the scalars that `rank` logged in a committed step."""
        self._metrics.write({**log, "step": step, "rank": rank})

    def trace(self, rank: int, step: int, record: bytes) -> None:
        """Append what a committed step returned and consumed (MessagePack), if that is recorded."""
        if self._recorded:
            plain = msgspec.msgpack.decode(record)
            self._trace.write({"rank": rank, "step": step, "record": plain})

    def digests(self, rank: int, digests: Mapping[str, str]) -> None:
        """Keep the digests of a rank's final state, if that is recorded."""
        if self._recorded:
            self._digests[str(rank)] = digests
            self._digest_lines.write({"rank": rank, "digests": digests})

    def close(self) -> None:
        """Write the digests and close everything. Blocks for the disk."""
        if self._recorded:
            by_rank = dict(sorted(self._digests.items(), key=lambda item: int(item[0])))
            whole = self.path / "digests.json.part"
            whole.write_bytes(msgspec.json.encode(by_rank) + b"\n")
            whole.rename(self.path / "digests.json")
            self._digest_lines.path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Close everything as it is: another coordinator goes on with it. Blocks for the disk."""
        if self._recorded:
            self._trace.close()
            self._digest_lines.close()
        self._metrics.close()
        self.journal.close()


class _Lines:
    """A file of JSON lines, that does not write again what an earlier process has written last."""

    def __init__(self, path: Path, resume: bool, guard: Callable[[], None] | None) -> None:
        self._file = LineFile(path, resume=resume, guard=guard)
        self._there = frozenset(_newest_lines(path)) if resume else frozenset()

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line, if it is not there. Raises OSError on a full disk."""
        encoded = msgspec.json.encode(line)
        if encoded not in self._there:
            self._file.write_encoded(encoded)

    def close(self) -> None:
        """Flush to the disk and close. May be called twice."""
        self._file.close()


def make_run_directory(path: Path, *, resume: bool = False) -> None:
    """Make a run's directory and that of its logs. `resume`: they may be there.

    Raises UserError if they cannot be made."""
    try:
        (path / "logs").mkdir(parents=True, exist_ok=resume)
    except OSError as error:
        raise UserError(
            f"{path}: the run cannot have its directory ({error.strerror}); choose another "
            "--run-id or --log-dir"
        ) from error


def _newest_lines(path: Path) -> list[bytes]:
    """The whole lines in the last part of a file. Blocks for the disk."""
    with path.open("rb") as file:
        begin = max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES)
        file.seek(begin)
        lines = file.read().split(b"\n")
    return lines[1:] if begin else lines


def _read_digests(path: Path) -> dict[str, Any]:
    """Those of a run's directory, whether they were written at a close or not."""
    whole = path / "digests.json"
    found: dict[str, Any] = msgspec.json.decode(whole.read_bytes()) if whole.exists() else {}
    for line in (path / "digests.jsonl").read_bytes().splitlines():
        row = msgspec.json.decode(line)
        found[str(row["rank"])] = row["digests"]
    return found
