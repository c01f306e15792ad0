"""Where a worker stands, shown in shared memory.

A file of 4096 bytes in the shared-memory directory, made and removed by the agent, mapped by the
worker. It is a row of 64-bit integers: the step under way, the phase, the number of collectives
entered, and when any of them last changed. A store costs a fraction of a microsecond and outlives
the process, so that the agent can say in which step, and where in it, a worker was killed. Each
cell has one writer and is read whole; cells may be one store apart.

It does not know what the figures mean for a decision: nothing is decided by them.
"""

from __future__ import annotations

import enum
import mmap
import os
import time
from pathlib import Path

SIZE_BYTES = 4096
MAGIC = 0x5045_5453_5245_5645  # "EVERSTEP" as bytes, little-endian


class Cell(enum.IntEnum):
    """Index of each figure in the row."""

    STEP = 0
    PHASE = 1
    COLLECTIVES = 2
    CHANGED_NS = 3
    MAGIC = 8


class Phase(enum.IntEnum):
    """What a worker is doing. STEP: in the step function, and nothing narrower is known."""

    SETUP = 0
    BETWEEN = 1
    STEP = 2
    BACKWARD = 3
    FENCE = 4
    UPDATE = 5
    PARKED = 6
    RECOVER = 7
    CLOSING = 8
    FINISHED = 9


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
        self._store(0, value)

    @property
    def phase(self) -> int:
        """A value of `Phase`."""
        return self._cells[Cell.PHASE]

    @phase.setter
    def phase(self, value: int) -> None:
        self._store(1, value)

    @property
    def collectives(self) -> int:
        """Collectives entered since the process began."""
        return self._cells[Cell.COLLECTIVES]

    @collectives.setter
    def collectives(self, value: int) -> None:
        self._store(2, value)

    def _store(self, cell: int, value: int) -> None:
        self._cells[cell] = value
        self._cells[3] = time.monotonic_ns()

    def close(self) -> None:
        """Unmap. The figures stay in the file; storing afterwards raises ValueError."""
        self._cells.release()
        self._map.close()
