"""Files and locks of the shelf of copies: how they are made, held, found again and removed.

Theory of operation. A job has one directory, a copy one file in it. Who lives is told by locks,
which end with their holder and are never reused: an agent holds its files alone, and its job's
directory together with the job's other agents. A file gets its name when it is locked and has its
memory; a directory is renamed before it is emptied. So nobody ever sees a half-made thing, and
nobody has to wait for one that is being removed.

What it doesn't know: which copies are needed (`shelf`).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from everstep.snapshot import Manifest

PREFIX = "everstep-copies-"
_MANIFEST = ".json"
_TRIES = 1000  # to enter a directory that a sweep takes away; one is enough but for a race


@dataclass(slots=True, kw_only=True, eq=False)
class Area:
    """A file in shared memory that holds a copy, or is about to. `node`: whose agent made it;
    `incarnation`: whose writer it was made for. `manifest` is None until the copy is complete.
    `fd`: -1 as long as no memory is taken for it. `users`: how many have its bytes in hand; `gone`:
    it has been given up, and its memory goes with the last of them."""

    path: Path
    node: int
    rank: int
    incarnation: int
    nbytes: int
    fd: int
    manifest: Manifest | None = None
    under_way: bool = False
    users: int = 0
    gone: bool = False
    _map: mmap.mmap | None = field(default=None, repr=False)

    @property
    def step(self) -> int:
        """The step whose state it holds. Complete copies only."""
        if self.manifest is None:
            raise ValueError(f"{self.path} holds no complete copy")
        return self.manifest.about.step

    @property
    def manifest_path(self) -> Path:
        """Where its manifest is when it is complete."""
        return self.path.with_name(self.path.name + _MANIFEST)

    @contextmanager
    def bytes(self) -> Iterator[memoryview]:
        """Its bytes, writable while it is being written, which are not used for another copy before
        the context ends. Nothing may keep a view of them for longer."""
        if self.gone:
            raise ValueError(f"{self.path} has been given up")
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.nbytes)
        self.users += 1
        try:
            with memoryview(self._map) as view:
                if self.manifest is None:
                    yield view
                else:
                    with view.toreadonly() as readable:
                        yield readable
        finally:
            self.users -= 1
            self._let_go()

    def give_up(self) -> None:
        """Unmap and unlock, at once or with the last user."""
        self.gone = True
        self._let_go()

    def _let_go(self) -> None:
        if not self.gone or self.users:
            return
        if self._map is not None:
            self._map.close()
            self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def sweep(shm_dir: Path, run_id: str = "") -> list[str]:
    """Remove the copies of jobs of which no agent lives on this host, and return their directories'
    names. Those of other users, of living jobs, and of the run `run_id` stay."""
    found = sorted(path for path in shm_dir.glob(PREFIX + "*") if path.name != PREFIX + run_id)
    return [path.name for path in found if _remove_unheld(path)]


def forget(shm_dir: Path, run_id: str) -> None:
    """Remove the copies of one job, if none of its agents lives on this host."""
    _remove_unheld(shm_dir / (PREFIX + run_id))


def _remove_unheld(path: Path) -> bool:
    """Remove a job's directory that nobody holds. Returns whether it is removed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # gone meanwhile, another user's, or no directory: not ours to remove
    try:
        about = os.fstat(fd)
        ours = about.st_uid == os.geteuid() and alone(fd) and _is_still(path, about)
        if ours:
            remove(path)
        return ours
    finally:
        os.close(fd)


def _is_still(path: Path, about: os.stat_result) -> bool:
    """Whether what was opened and locked has its name still: it may have been removed in between,
    and an agent have made another one."""
    try:
        return os.path.samestat(about, os.lstat(path))
    except FileNotFoundError:
        return False


def enter(directory: Path) -> int:
    """Make the job's directory if need be, and hold it: a descriptor with a shared lock. Tries
    again when a sweep takes the directory away between the two."""
    for _ in range(_TRIES):
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        entered = False
        try:
            about = os.fstat(fd)
            if about.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user")
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            entered = _is_still(directory, about)
        except BlockingIOError:
            pass
        finally:
            if not entered:
                os.close(fd)
        if entered:
            return fd
        os.sched_yield()  # a sweep is about to rename it, or just has
    raise OSError(errno.EAGAIN, "another start of everstep removes it again and again")


def remove(directory: Path) -> None:
    """Remove a job's directory that nobody else holds. It is renamed first, so that an agent that
    comes just now makes a new one and need not wait."""
    away = directory.with_name(f"{PREFIX}~{secrets.token_hex(8)}")
    directory.rename(away)
    shutil.rmtree(away)


def create_locked(path: Path, nbytes: int) -> int:
    """A new file with all its memory taken. It gets its name when it is locked: nobody ever sees it
    without an owner, and one that was not finished leaves nothing."""
    fd = os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, nbytes)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # a folder given, Python calls linkat, which follows what /proc shows
            os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=folder, follow_symlinks=True)
        finally:
            os.close(folder)
    except BaseException:
        os.close(fd)
        raise
    return fd


def alone(fd: int) -> bool:
    """Whether nobody else holds the job's directory."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def take(path: Path) -> int | None:
    """A descriptor with the lock on a file that no living agent holds, or None."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None  # its agent has removed it meanwhile, or it is no plain file, nor of ours
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        about = os.fstat(fd)
        if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def read(path: Path, most_bytes: int) -> bytes | None:
    """What is in a plain file that is no longer than `most_bytes`; None for anything else. Does not
    block."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size > most_bytes:
            return None
        return file.read()
