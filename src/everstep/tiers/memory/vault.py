"""The objects that one host keeps: files in shared memory, found again after their keeper's death.

Theory of operation. A desk has one directory, held by a lock that ends with it; an object is a file
in it, named by its key. What is being written is a file elsewhere in the directory, with all its
memory taken (a sparse file on a full tmpfs would kill its writer with SIGBUS); it becomes an object
by a rename. So an object is there whole or not at all, whoever dies; and since one thread of one
process holds the directory, whether there is one already is asked of what it knows.
The file of an object that is deleted while nobody reads it is kept for the next of its size: its
memory need not be cleared and mapped anew.

A desk that comes back with the same name adopts all objects and removes what was being written.
What becomes of a directory to which nobody comes back: `ownership.py`.

It does not know what the bytes are, nor other hosts. One thread; `Area.furnish` and `digest_file`
may take long and run on any.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from everstep import snapshot
from everstep.errors import UserError
from everstep.shm import budget
from everstep.shm.files import remove
from everstep.tiers import names
from everstep.tiers.memory.ownership import WAY, clear_way, hold
from everstep.tiers.store import Exists, Full, Missing, StoreError

_OBJECTS = "objects"
_PAGE = mmap.PAGESIZE
_CHECKED_BYTES = 1 << 20  # smaller ones need no look at the host's memory


@dataclass(slots=True, kw_only=True, eq=False)
class Area:
    """A file that is about to become an object. `fd`: readable and writable."""

    path: Path
    nbytes: int
    fd: int
    taken: bool
    open: bool = True

    def furnish(self) -> None:
        """Take its memory, if it has none yet. Blocks for clearing it. Raises Full."""
        if self.taken or not self.nbytes:
            return
        try:
            os.posix_fallocate(self.fd, 0, self.nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            free = budget.size(_free(self.path.parent))
            raise Full(
                f"{self.path.parent} has {free} free, too few for {budget.size(self.nbytes)} more"
            ) from error
        self.taken = True


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """An object. `order`: rises with each that comes. `users`: how many read it.
    `digests`: of its blocks, once they are known."""

    key: str
    path: Path
    nbytes: int
    changed_s: float
    order: int
    token: str = ""
    users: int = 0
    gone: bool = False
    digests: tuple[str, ...] | None = field(default=None, repr=False)


@contextmanager
def mapped(fd: int, nbytes: int, *, writable: bool = False) -> Iterator[memoryview]:
    """The first bytes of a file."""
    if not nbytes:
        yield memoryview(b"")
        return
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    with mmap.mmap(fd, nbytes, prot=access) as area, memoryview(area) as view:
        yield view


def digest_file(fd: int, end: int, start: int = 0) -> tuple[str, ...]:
    """Of the blocks of a range of a file, counted from its start. Blocks for reading it."""
    with mapped(fd, end) as view, view[start:end] as part:
        spans = snapshot.block_spans(part.nbytes, snapshot.BLOCK_BYTES)
        return tuple(snapshot.digest(part[first:last]) for first, last in spans)


class Vault:
    """The objects in `directory`, which is made if need be. `share`: the part of the host's memory
    (of the control group's, where that has a limit) that they may take. Raises UserError when
    another process keeps objects there, or it can't be made."""

    def __init__(self, directory: Path, *, share: float = 0.5) -> None:
        self.directory = directory
        self._share = share
        self._lock: int | None = hold(directory)
        self._objects: dict[str, Held] = {}
        self._areas: set[Area] = set()
        self._spare: list[Area] = []
        self._leaving: set[Held] = set()
        self._made = 0
        self._order = 0
        for name in (_OBJECTS, WAY):
            (directory / name).mkdir(mode=0o700, exist_ok=True)
        clear_way(directory)
        self._adopt()

    # ------------------------------------------------------------ writing

    def admit(self, nbytes: int) -> Area:
        """An area for an object of `nbytes` bytes; `furnish` it before it is written. Raises Full,
        with the numbers."""
        for area in self._spare:
            if area.nbytes == nbytes:
                self._spare.remove(area)
                self._areas.add(area)
                return area
        try:
            self._check(nbytes)
        except Full:
            if not self._spare:
                raise
            self.trim()
            self._check(nbytes)
        self._made += 1
        path = self.directory / WAY / str(self._made)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        area = Area(path=path, nbytes=nbytes, fd=fd, taken=False)
        self._areas.add(area)
        return area

    def publish(self, area: Area, key: str, *, absent: bool = False, token: str = "") -> Held:
        """Make `area` the object `key`; its descriptor is closed. Raises Exists with `absent`,
        where there is one that was not put with this token; then the area stays. Without `absent`
        one that is there is replaced."""
        names.check_key(key)
        path = self.directory / _OBJECTS / key
        before = self._objects.get(key)
        if before is not None and token and before.token == token:
            self.abandon(area)
            return before
        if before is not None and absent:
            raise Exists(f"there is an object {key} in memory already")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            area.path.replace(path)
        except OSError as error:
            raise StoreError(f"{key}: {error.strerror}: {path}") from error
        self._areas.discard(area)
        os.close(area.fd)
        area.open = False
        if before is not None:
            self._goes(before)
        return self._enter(key, path, area.nbytes, time.time(), token)

    def abandon(self, area: Area) -> None:
        """Nothing becomes of it. One that has become an object stays one."""
        if not area.open:
            return
        self._areas.discard(area)
        area.open = False
        os.close(area.fd)
        area.path.unlink(missing_ok=True)

    # ------------------------------------------------------------ reading

    def find(self, key: str) -> Held | None:
        """An object."""
        names.check_key(key)
        return self._objects.get(key)

    def get(self, key: str) -> Held:
        """An object. Raises Missing."""
        found = self.find(key)
        if found is None:
            raise Missing(f"there is no object {key} in memory here")
        return found

    def read(self, key: str, start: int, end: int) -> bytes:
        """Bytes of an object. Raises Missing, and StoreError where it is shorter."""
        found = self.get(key)
        check_range(found.key, found.nbytes, start, end)
        fd = os.open(found.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, end - start, start)
        finally:
            os.close(fd)

    @contextmanager
    def using(self, held: Held) -> Iterator[int]:
        """A descriptor of its file, whose bytes stay what they are meanwhile. Raises Missing for
        one that has been deleted."""
        if held.gone:
            raise Missing(f"the object {held.key} has been deleted")
        fd = os.open(held.path, os.O_RDONLY | os.O_CLOEXEC)
        held.users += 1
        try:
            yield fd
        finally:
            os.close(fd)
            held.users -= 1
            if not held.users:
                self._leaving.discard(held)

    def list(self, prefix: str) -> list[Held]:
        """Objects below a prefix, in order of their keys."""
        found = [held for key, held in self._objects.items() if key.startswith(prefix)]
        return sorted(found, key=lambda held: held.key)

    # ------------------------------------------------------------ room

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""
        held = self.find(key)
        if held is None:
            return
        del self._objects[key]
        if held.users or held.nbytes < _CHECKED_BYTES:
            held.path.unlink(missing_ok=True)
        else:
            self._set_aside(held)
        self._goes(held)
        with suppress(OSError):  # it has other entries
            for parent in held.path.relative_to(self.directory / _OBJECTS).parents[:-1]:
                (self.directory / _OBJECTS / parent).rmdir()

    def trim(self) -> None:
        """Give back the memory of deleted objects that was kept for new ones."""
        for area in self._spare:
            self.abandon(area)
        self._spare.clear()

    @property
    def taken_bytes(self) -> int:
        """What all takes, spare memory too."""
        areas = [area.nbytes for area in [*self._areas, *self._spare]]
        held = [held.nbytes for held in [*self._objects.values(), *self._leaving]]
        return sum(-(-nbytes // _PAGE) * _PAGE for nbytes in [*areas, *held])

    @property
    def limit_bytes(self) -> int:
        """What it may take, by its share."""
        return int(budget.memory_bytes() * self._share)

    def beat(self) -> None:
        """Show that the directory has an owner; to be called well within `ORPHAN_S`."""
        if self._lock is not None:
            os.utime(self._lock)

    def close(self, *, keep: bool) -> None:
        """Let go. `keep`: objects stay for a desk of the same name. May be called twice."""
        if self._lock is None:
            return
        for area in [*self._areas, *self._spare]:
            self.abandon(area)
        self._areas.clear()
        self._spare.clear()
        lock, self._lock = self._lock, None
        try:
            if keep and self._objects:
                os.utime(lock)
            else:
                remove(self.directory)
        finally:
            os.close(lock)

    # ------------------------------------------------------------ inside

    def _check(self, nbytes: int) -> None:
        taken, share = self.taken_bytes, self.limit_bytes
        what = f"a checkpoint's part of {budget.size(nbytes)}"
        if taken + nbytes > share:
            raise Full(
                f"{what} does not fit: checkpoints here take {budget.size(taken)} of the "
                f"{budget.size(share)} that they may ({self._share:g} of the host's memory); raise "
                "the share of memory (--memory-share), or retain fewer"
            )
        if nbytes < _CHECKED_BYTES:
            return
        try:
            budget.measure(self.directory).plus(taken).check(taken, nbytes, what)
        except UserError as error:
            raise Full(str(error)) from error

    def _enter(self, key: str, path: Path, nbytes: int, changed_s: float, token: str) -> Held:
        self._order += 1
        held = Held(
            key=key, path=path, nbytes=nbytes, changed_s=changed_s, order=self._order, token=token
        )
        self._objects[key] = held
        return held

    def _goes(self, held: Held) -> None:
        held.gone = True
        if held.users:
            self._leaving.add(held)

    def _set_aside(self, held: Held) -> None:
        """Keep a file that nobody reads for the next object of its size; those of other sizes
        make room."""
        if len(self._spare) >= 8:
            self.abandon(self._spare.pop(0))
        self._made += 1
        path = self.directory / WAY / str(self._made)
        held.path.rename(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._spare.append(Area(path=path, nbytes=held.nbytes, fd=fd, taken=True))

    def _adopt(self) -> None:
        root = self.directory / _OBJECTS
        found = []
        for folder, _, files in os.walk(root):
            for name in files:
                path = Path(folder, name)
                key = str(path.relative_to(root))
                about = path.lstat()
                if not names.is_key(key) or not stat.S_ISREG(about.st_mode):
                    path.unlink()  # nothing that a desk has put there
                    continue
                found.append((about.st_ctime, key, path, about))
        for _, key, path, about in sorted(found, key=lambda each: each[:2]):
            self._enter(key, path, about.st_size, about.st_mtime, "")


def check_range(key: str, nbytes: int, start: int, end: int) -> None:
    """Raises StoreError where an object has no such bytes."""
    if not 0 <= start <= end <= nbytes:
        raise StoreError(f"{key} has {nbytes} bytes, and bytes {start} to {end} were asked for")


def _free(directory: Path) -> int:
    return shutil.disk_usage(directory).free
