"""Where a save is copied to before the training goes on: areas of memory that are warm.

Theory of operation. A copy into memory that has just been mapped costs several times one into
memory that has been written to before: each page is a fault. So areas are made and touched in the
background, before they are needed, and used in turn. An area has one owner at a time, who hands it
on and releases it when nobody reads it any more.

There are at most `AREAS`: one that is on its way, one that waits or is being filled.

It does not know what is copied, nor how large that will be before the first time.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from everstep.errors import UserError
from everstep.shm import budget

AREAS = 3


class Room(Protocol):
    """Memory that is taken: `area` is writable until it is handed on."""

    @property
    def area(self) -> memoryview: ...

    def close(self) -> None:
        """Give it back. May be called twice."""
        ...


Make = Callable[[int], Room]


class Own:
    """Memory of this process alone, which ends with it; no child inherits it. Takes and touches all
    of it. Raises OSError."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_DONTFORK)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._all = memoryview(self._map)
        self.area = self._all[:nbytes]
        ctypes.memset((ctypes.c_char * nbytes).from_buffer(self._map), 0, nbytes)

    def close(self) -> None:
        """Unmap it, with the last who looks at it."""
        self.area.release()
        self._all.release()


@dataclass(slots=True, eq=False)
class Staged:
    """An area with one user or several. Any thread."""

    room: Room
    _back: Callable[[Staged], None]
    _users: int = 1
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def area(self) -> memoryview:
        """Its bytes."""
        return self.room.area

    def share(self) -> Staged:
        """The same, for one user more."""
        with self._lock:
            if not self._users:
                raise ValueError("a staged area was given back before it was shared")
            self._users += 1
        return self

    def release(self) -> None:
        """One user less; the last one gives it back."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._back(self)


class Staging:
    """Areas of one kind. `make`: takes one. `again`: whether an area may be filled again when it
    was given back; else it is closed, and another one made. `limit`: most bytes of all; None: as
    `make` allows. Any thread."""

    def __init__(self, make: Make, *, again: bool, limit: int | None = None) -> None:
        self._make, self._again, self._limit = make, again, limit
        self._lock = threading.Lock()
        self._spare: list[Room] = []
        self._out = self._taken = 0  # areas in use; bytes of all areas
        self._closed = False

    def take(self, nbytes: int) -> Staged:
        """An area of `nbytes`: a warm one if there is, else made now. Raises UserError for more
        than the memory that saves may take, OSError, and what `make` raises."""
        with self._lock:
            room = next((each for each in self._spare if each.area.nbytes == nbytes), None)
            stale = [] if room is not None else self._spare  # the state has changed its size
            self._spare = [each for each in self._spare if each is not room and each not in stale]
            self._out += 1
        for each in stale:
            self._close(each)
        try:
            return Staged(self._take(nbytes) if room is None else room, self._give_back)
        except BaseException:
            with self._lock:
                self._out -= 1
            raise

    def warm(self, nbytes: int) -> None:
        """Have an area of `nbytes` ready for the next save, if there is room for one more. Blocks
        for the making of it: call it in the background. Raises as `take`."""
        with self._lock:
            ready = any(each.area.nbytes == nbytes for each in self._spare)
            full = self._out + len(self._spare) >= AREAS or not self._fits(nbytes)
            if ready or full or self._closed:
                return
        room = self._take(nbytes)
        with self._lock:
            keep = not self._closed
            if keep:
                self._spare.append(room)
        if not keep:
            self._close(room)

    def close(self) -> None:
        """Give up the spare areas; those in use go when they are released."""
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, []
        for room in spare:
            self._close(room)

    def _fits(self, nbytes: int) -> bool:
        return self._limit is None or self._taken + nbytes <= self._limit

    def _take(self, nbytes: int) -> Room:
        with self._lock:
            if not self._fits(nbytes):
                raise UserError(
                    f"a save of {budget.size(nbytes)}, beside {budget.size(self._taken)} that are "
                    f"on their way, is more than the {budget.size(self._limit or 0)} of memory "
                    "that this rank may take; raise memory_share, or spread the state over more "
                    "hosts"
                )
            self._taken += nbytes
        try:
            return self._make(nbytes)
        except BaseException:
            with self._lock:
                self._taken -= nbytes
            raise

    def _close(self, room: Room) -> None:
        nbytes = room.area.nbytes
        room.close()
        with self._lock:
            self._taken -= nbytes

    def _give_back(self, staged: Staged) -> None:
        with self._lock:
            self._out -= 1
            keep = self._again and not self._closed
            if keep:
                self._spare.append(staged.room)
        if not keep:
            self._close(staged.room)
