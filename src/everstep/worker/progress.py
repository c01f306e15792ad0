"""Where a worker stands, shown in shared memory.

A file of 4096 bytes in the shared-memory directory, made and removed by the agent, mapped by the
worker. It is a row of 64-bit integers: the step under way, the phase, the generation, whether the
main thread waits, whether a collective that was entered has not ended, and when the rank last
moved; then a table with one row for each communicator: who it is, how many collectives of it this
rank has entered in this generation, and the kind and size of the newest. From the counts of all
ranks it can be told which rank never entered the collective that the others wait in. A store costs
a fraction of a microsecond, makes no system call, and outlives the process. Each cell is read
whole; cells may be one store apart.

The table has room for `ROWS` communicators at a time; what does not fit is counted as `UNLISTED`,
and a hang in it has no culprit by its counts.

It does not know what the figures mean for a decision: see core/hang.py.
"""

from __future__ import annotations

import enum
import hashlib
import mmap
import os
import sys
import time
from collections.abc import Sequence, Sized
from pathlib import Path

SIZE_BYTES = 4096
MAGIC = 0x5045_5453_5245_5645  # "EVERSTEP" as bytes, little-endian


class Cell(enum.IntEnum):
    """Index of each figure in the row."""

    STEP = 0
    PHASE = 1
    INSIDE = 2  # 1: a collective or message that was entered has not ended
    CHANGED_NS = 3
    GENERATION = 4
    WAITING = 5  # 1: the main thread waits for a collective; 0: it does not
    STACKS = 6  # 1: the process answers the signal that asks for its stacks
    DEBUGGED = 7  # 1: a debugger or profiler in this process looks at every call
    MAGIC = 8
    UNLISTED = 9  # communicators that found no room in the table
    PASSED = 10  # UPDATE or SECTION, if what was begun with the newest `step` has come to it


FIRST_ROW = 16
ROW_CELLS = 8
ROWS = (SIZE_BYTES // 8 - FIRST_ROW) // ROW_CELLS
NAME_BYTES = 8 * (ROW_CELLS - 3)


class Column(enum.IntEnum):
    """Offset of each figure in a communicator's row; its name fills the rest."""

    IDENTITY = 0  # a digest of name and ranks; 0: the row is free
    COUNT = 1
    NEWEST = 2  # kind, and the number of elements above it
    NAME = 3


KINDS = (
    "collective",  # one that is not known here
    "send",
    "recv",
    "recv_anysource",
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "reduce_scatter",
    "_reduce_scatter_base",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "barrier",
)
KIND_BITS = 8
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_LAST_MESSAGE = _CODES["recv_anysource"]  # between two ranks; the others of the group skip it


class Phase(enum.IntEnum):
    """What a worker is doing. STEP: in the step function, and nothing narrower is known. COMPILE
    and SECTION may take long without a hang, and so may COPY, which waits for another node's
    memory."""

    SETUP = 0
    BETWEEN = 1
    STEP = 2
    FENCE = 3
    UPDATE = 4
    PARKED = 5
    RECOVER = 6
    CLOSING = 7
    FINISHED = 8
    COMPILE = 9
    SECTION = 10
    COPY = 11


_PLACES = {
    Phase.SETUP: "in its set-up",
    Phase.RECOVER: "in a recovery",
    Phase.CLOSING: "after its last step",
    Phase.FINISHED: "after the end of its script",
}
_PARTS = {
    Phase.FENCE: " (fence)",
    Phase.UPDATE: " (optimizer)",
    Phase.COMPILE: " (compilation)",
    Phase.COPY: " (copy to memory)",
}


def place_in_words(phase: Phase, step: int, passed: int = 0) -> str:
    """Where a worker stands, for a sentence: "in step 5 (optimizer)", "in a section after step 5".
    `step` and `passed` as its file has them; a process that has begun no step shows 0."""
    if phase in _PLACES:
        return _PLACES[phase]
    if phase is Phase.PARKED:
        return f"while parked at step {step}" if step else "while parked"
    if phase is Phase.BETWEEN:
        return f"between steps {step} and {step + 1}" if step else "between steps"
    part = _PARTS.get(phase, "")
    if Phase.SECTION in (phase, passed):
        return f"in a section {f'after step {step}' if step else 'before step 1'}{part}"
    if phase is Phase.STEP and passed == Phase.UPDATE:
        part = " (after an update)"
    return f"in step {step}{part}"


class Progress:
    """The worker's hand on its file. Any thread may store; the last store wins.

    `path`: the file that the agent made. Raises OSError if it is not there or is too short.
    """

    __slots__ = ("_cells", "_map")

    def __init__(self, path: str | Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # A map beyond the end of the file would kill with SIGBUS at the first store.
            if os.fstat(fd).st_size < SIZE_BYTES:
                raise OSError(f"{path} is shorter than {SIZE_BYTES} bytes: not a progress file")
            self._map = mmap.mmap(fd, SIZE_BYTES)
        finally:
            os.close(fd)
        self._cells = memoryview(self._map).cast("q")

    @property
    def step(self) -> int:
        """The step under way; 1 is the first, 0 is none."""
        return self._cells[Cell.STEP]

    @step.setter
    def step(self, value: int) -> None:
        self._cells[Cell.PASSED] = 0
        self._cells[7] = sys.gettrace() is not None or sys.getprofile() is not None
        self._store(0, value)

    @property
    def phase(self) -> int:
        """A value of `Phase`."""
        return self._cells[Cell.PHASE]

    @phase.setter
    def phase(self, value: int) -> None:
        if value in (Phase.UPDATE, Phase.SECTION):
            self._cells[Cell.PASSED] = value
        self._store(1, value)

    def words(self) -> str:
        """Where this worker stands, for a sentence."""
        return place_in_words(Phase(self.phase), self.step, self._cells[Cell.PASSED])

    def _store(self, cell: int, value: int) -> None:
        self._cells[cell] = value
        self._cells[3] = time.monotonic_ns()

    # ------------------------------------------------------------ communicators

    def join(self, name: str, ranks: Sequence[int]) -> int:
        """Give the communicator `name` of the global `ranks` a row. Returns where it is; 0 when
        there is no room, which is counted."""
        cells = self._cells
        for row in range(FIRST_ROW, FIRST_ROW + ROWS * ROW_CELLS, ROW_CELLS):
            if cells[row] == 0:
                cells[row + Column.COUNT] = cells[row + Column.NEWEST] = 0
                written = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
                start = 8 * (row + Column.NAME)
                self._map[start : start + NAME_BYTES] = written
                self._store(row, _identity(name, ranks))
                return row
        self._store(Cell.UNLISTED, cells[Cell.UNLISTED] + 1)
        return 0

    def leave(self, row: int) -> None:
        """The communicator at `row` was destroyed."""
        if row:
            self._store(row, 0)
        else:
            self._store(Cell.UNLISTED, self._cells[Cell.UNLISTED] - 1)

    def regroup(self, generation: int) -> None:
        """The communicators are those of `generation`, in which nothing has been entered yet."""
        cells = self._cells
        for row in range(FIRST_ROW, FIRST_ROW + ROWS * ROW_CELLS, ROW_CELLS):
            cells[row + Column.COUNT] = cells[row + Column.NEWEST] = 0
        self._store(Cell.GENERATION, generation)

    def entered(self, row: int, operation: str, elements: int) -> None:
        """A collective of the communicator at `row` is about to be launched. On the hot path of
        every collective, so cells stand as plain numbers here."""
        cells = self._cells
        kind = _CODES.get(operation, 0)
        if row and not 0 < kind <= _LAST_MESSAGE:
            cells[row + 1] += 1
            cells[row + 2] = elements << KIND_BITS | kind
        cells[3] = time.monotonic_ns()

    def inside(self, running: Sized) -> None:
        """What has been entered and has not ended has changed to `running`. That something ends is
        no move of this rank. Any thread: who stores last has looked after its store."""
        cells = self._cells
        while cells[2] != bool(running):
            cells[2] = bool(running)

    def waits(self, waiting: bool) -> None:
        """The main thread begins, or ends, to wait for a collective."""
        self._cells[5] = waiting
        self._cells[3] = time.monotonic_ns()

    def answers(self) -> None:
        """From now on this process shows its stacks when the signal asks for them."""
        self._cells[Cell.STACKS] = 1

    def close(self) -> None:
        """Unmap. The figures stay in the file; storing afterwards raises ValueError."""
        self._cells.release()
        self._map.close()


def _identity(name: str, ranks: Sequence[int]) -> int:
    """By its name and its ranks."""
    text = f"{name}:{','.join(map(str, ranks))}".encode()
    found = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    return found or 1
