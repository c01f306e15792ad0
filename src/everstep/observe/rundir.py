"""A run's directory: its journal and the files beside it.

`journal.jsonl`; `metrics.jsonl`, one line for each commit that logged scalars;
`logs/rank<R>.<incarnation>.log`; and, when the run is recorded for `everstep prove`, `trace.jsonl`,
one line for each commit of a rank, and `digests.json`, rank to the digests of its final state. A
step that a rank did twice has two lines in the trace, in the order they came.

It does not know what is in them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from everstep.errors import UserError
from everstep.observe.journal import JournalWriter, LineFile


class RunDirectory:
    """The open files of one run. Made by the agent when the job starts; one thread.

    `path` must not exist. `recorded`: keep trace and digests. Raises UserError if it cannot be
    made.
    """

    def __init__(self, path: Path, *, run_id: str, recorded: bool) -> None:
        self.path = path
        self.logs = path / "logs"
        try:
            self.logs.mkdir(parents=True, exist_ok=False)
        except OSError as error:
            raise UserError(
                f"{path}: the run cannot have its directory ({error.strerror}); choose another "
                "--run-id or --log-dir"
            ) from error
        self.journal = JournalWriter(path / "journal.jsonl", run_id=run_id, wall_time=time.time())
        self._metrics = LineFile(path / "metrics.jsonl")
        self._trace = LineFile(path / "trace.jsonl") if recorded else None
        self._digests: dict[int, Mapping[str, str]] = {}

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
        if self._trace is not None:
            plain = msgspec.msgpack.decode(record)
            self._trace.write({"rank": rank, "step": step, "record": plain})

    def digests(self, rank: int, digests: Mapping[str, str]) -> None:
        """Keep the digests of a rank's final state; they are written at the close."""
        self._digests[rank] = digests

    def close(self) -> None:
        """Write the digests and close everything. Blocks for the disk."""
        if self._trace is not None:
            self._trace.close()
            by_rank: dict[str, Any] = {str(r): d for r, d in sorted(self._digests.items())}
            (self.path / "digests.json").write_bytes(msgspec.json.encode(by_rank) + b"\n")
        self._metrics.close()
        self.journal.close()
