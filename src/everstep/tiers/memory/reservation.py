"""Shared memory that a desk has given a rank to write an object into.

The memory is the desk's file, mapped here; the connection over which it came holds it, so that the
desk knows when nobody uses it any more, however that came about. It does not know what is written.
"""

from __future__ import annotations

import mmap
import os

from everstep.tiers.memory.wire import Wire
from everstep.tiers.store import StoreError

_FAULT_BYTES = 4 << 20  # a call holds the interpreter
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class Reservation:
    """Shared memory for an object: `area` may be written until it is put (`MemoryStore.put` of just
    this view publishes it without a copy), and read until `close`."""

    def __init__(self, wire: Wire, fd: int, nbytes: int) -> None:
        self._wire: Wire | None = wire
        self.nbytes = nbytes
        self.published = False
        try:
            self._map = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self.area = memoryview(self._map)
        """Its bytes."""

    def fault_in(self) -> None:
        """Have all pages mapped, so that writing them is a bare copy."""
        for start in range(0, self.nbytes, _FAULT_BYTES):
            length = min(_FAULT_BYTES, self.nbytes - start)
            try:
                self._map.madvise(_POPULATE_WRITE, start, length)
            except OSError:
                return  # an older kernel: the pages come as they are written

    def is_of(self, piece: memoryview) -> bool:
        """Whether this is all of the area."""
        return piece.obj is self._map and piece.nbytes == self.nbytes

    @property
    def held(self) -> bool:
        """Whether it has not been given back."""
        return self._wire is not None

    @property
    def wire(self) -> Wire:
        """The connection that holds it."""
        if self._wire is None:
            raise StoreError("this area has been given back")
        return self._wire

    def close(self) -> None:
        """Give it back, or let the object be. May be called twice. Raises
        BufferError while there are views of parts of `area`."""
        if self._wire is not None:
            self.area.release()
            self._map.close()
            wire, self._wire = self._wire, None
            wire.close()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
