"""Who holds a directory of objects, and what becomes of those that nobody holds.

Theory of operation. A desk holds its directory by a lock, which ends with it, and touches it now
and then. A sweep, at the start of any desk, removes what was being written where nobody holds the
directory, and the directory itself once it has been without an owner for `ORPHAN_S`: long enough
for a machine's agent to be started again, by hand if need be, and soon enough that a series which
nobody goes on with does not hold a host's memory for days.

It does not know what is in a directory but that one part of it is under way.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from everstep.errors import UserError
from everstep.shm.files import remove
from everstep.wire.secret import Secret

PREFIX = "everstep-tier-"
ORPHAN_S = 3600.0
WAY = "way"
"""The part of a directory for what is being written."""
_HELD_S = 1.0  # a sweep that is just looking lets go before


def directory_of(shm_dir: Path, secret: Secret | None, name: str) -> Path:
    """Where the desk `name` keeps its objects: found again by who has the same secret."""
    tag = "local" if secret is None else secret.memory_tag()
    return shm_dir / f"{PREFIX}{tag}-{name}"


def clear_way(directory: Path) -> None:
    """Remove what was being written by a desk that is gone."""
    with suppress(FileNotFoundError):
        for path in (directory / WAY).iterdir():
            path.unlink(missing_ok=True)


def sweep(shm_dir: Path, *, own: Path, now_s: float) -> list[str]:
    """Remove what was being written by desks of this user that are gone, and the objects of those
    that have been for longer than `ORPHAN_S`; returns the names of these. `now_s`: of the wall
    clock."""
    removed = []
    for path in sorted(shm_dir.glob(PREFIX + "*")):
        if path == own:
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # gone meanwhile, another user's, or no directory: not ours to remove
        try:
            about = os.fstat(fd)
            if about.st_uid != os.geteuid() or not _is_unheld(path, fd):
                continue
            if now_s - about.st_mtime > ORPHAN_S:
                remove(path)
                removed.append(path.name)
            else:
                clear_way(path)
        except FileNotFoundError:
            pass  # another start sweeps as well
        finally:
            os.close(fd)
    return removed


def forget(directory: Path) -> None:
    """Remove what a desk has left in `directory`, if it is gone: nobody will come back for it."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if _is_unheld(directory, fd):
            remove(directory)
    finally:
        os.close(fd)


def hold(directory: Path) -> int:
    """Make the directory if need be, and hold it alone: a descriptor with its lock. Raises
    UserError when another process holds it, or it can't be made."""
    deadline_s = time.monotonic() + _HELD_S
    while True:
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            if not directory.parent.is_dir():
                raise UserError(
                    f"{directory.parent} is not there: checkpoints are kept in it; "
                    "name a directory in memory with EVERSTEP_SHM_DIR"
                ) from None
            continue  # a sweep was faster
        except OSError as error:
            raise UserError(
                f"{directory}: {error.strerror}; checkpoints are kept there; make it writable, or "
                "name another directory in memory with EVERSTEP_SHM_DIR"
            ) from error
        held = False
        try:
            about = os.fstat(fd)
            if about.st_uid != os.geteuid():
                raise UserError(f"{directory} belongs to user {about.st_uid}: it is not used")
            held = _is_unheld(directory, fd)
        finally:
            if not held:
                os.close(fd)
        if held:
            return fd
        if time.monotonic() >= deadline_s:
            raise UserError(
                f"another agent keeps checkpoints in {directory}: it has the same secret and name; "
                "end it, or give this one another --name"
            )
        time.sleep(0.01)


def _is_unheld(directory: Path, fd: int) -> bool:
    """Whether the directory that is open at `fd` had no owner, is locked now, and has its name
    still: it may have been removed in between, and another one made."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.lstat(directory))
    except (BlockingIOError, FileNotFoundError):
        return False
