"""The agent's side of the files in which workers show where they stand.

Theory of operation: the agent makes each file, takes its space with `posix_fallocate` (a sparse
file on a full tmpfs would kill the worker with SIGBUS at its first store), holds a lock on it while
it lives, and removes it when the worker is reaped. A lock ends with its holder, whatever ended it;
so a file whose lock is free has no living owner, and the sweep at a start removes it. Unlike a
process id a lock is never reused and means the same in every container.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import UserError
from everstep.worker.progress import MAGIC, SIZE_BYTES, Cell, Phase

_PREFIX = "everstep-"
_CELLS = struct.Struct(f"<{SIZE_BYTES // 8}q")
_WORDS = {
    Phase.SETUP: "in its set-up",
    Phase.BETWEEN: "between steps (step {step})",
    Phase.STEP: "in step {step}",
    Phase.BACKWARD: "in step {step} (backward)",
    Phase.FENCE: "in step {step} (fence)",
    Phase.UPDATE: "in step {step} (optimizer)",
    Phase.PARKED: "parked at step {step}",
    Phase.RECOVER: "while it recovered step {step}",
    Phase.CLOSING: "after its last step",
    Phase.FINISHED: "after the end of its script",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a worker's file says. `step`: the one under way. `changed_ns`: monotonic nanoseconds, 0
    for never."""

    step: int
    phase: Phase
    collectives: int
    changed_ns: int

    def words(self) -> str:
        """Where it stood: "in step 5 (backward)"."""
        return _WORDS[self.phase].format(step=self.step)


class ProgressFile:
    """One worker's file. Made, locked and removed by the agent; the worker maps it by `path`."""

    def __init__(self, shm_dir: Path, run_id: str, rank: int, incarnation: int) -> None:
        """Raises UserError when the directory has no room or cannot be written to."""
        self.path = shm_dir / f"{_PREFIX}{run_id}-{rank}.{incarnation}"
        try:
            self._fd: int | None = _create_locked(self.path)
        except OSError as error:
            raise _refusal(shm_dir, error) from error
        try:
            os.posix_fallocate(self._fd, 0, SIZE_BYTES)
            os.pwrite(self._fd, MAGIC.to_bytes(8, "little"), 8 * Cell.MAGIC)
        except OSError as error:
            self.remove()
            raise _refusal(shm_dir, error) from error

    def read(self) -> Standing:
        """What the worker last stored; also after its death, until `remove`."""
        if self._fd is None:
            raise ValueError(f"{self.path} has been removed")
        cells = _CELLS.unpack(os.pread(self._fd, SIZE_BYTES, 0))
        try:
            phase = Phase(cells[Cell.PHASE])
        except ValueError:
            phase = (
                Phase.BETWEEN
            )  # the page is the worker's; its stray stores must not end the agent
        return Standing(
            step=cells[Cell.STEP],
            phase=phase,
            collectives=cells[Cell.COLLECTIVES],
            changed_ns=cells[Cell.CHANGED_NS],
        )

    def remove(self) -> None:
        """Unlink and unlock. May be called twice."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self.path.unlink(missing_ok=True)
            os.close(fd)


def _create_locked(path: Path) -> int:
    # Until its space is taken and its magic written, a sweep does not know the file for one of
    # ours; by then it is locked.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def sweep(shm_dir: Path) -> list[str]:
    """Remove the files of dead jobs and return their names. Files of other users and of living jobs
    stay."""
    removed = []
    for path in sorted(shm_dir.glob(_PREFIX + "*")):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # gone meanwhile, another user's, or no plain file: not ours to remove
        try:
            if not _is_progress_file(fd):
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except (BlockingIOError, PermissionError):
            continue  # its owner lives, or is another user
        finally:
            os.close(fd)
    return removed


def _is_progress_file(fd: int) -> bool:
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size != SIZE_BYTES:
        return False
    return os.pread(fd, 8, 8 * Cell.MAGIC) == MAGIC.to_bytes(8, "little")


def _refusal(shm_dir: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        space = os.statvfs(shm_dir)
        free = space.f_bavail * space.f_frsize
        return UserError(
            f"{shm_dir} has {free} bytes free, and each worker needs {SIZE_BYTES} there to show "
            f"where it stands; remove what is not needed (`ls {shm_dir}`), give it more (`mount -o "
            f"remount,size=1G {shm_dir}`; `--shm-size` in docker), or name another directory in "
            "memory with EVERSTEP_SHM_DIR"
        )
    return UserError(
        f"{shm_dir}: {error.strerror or error}; workers show where they stand in files there; make "
        "it writable, or name another directory in memory with EVERSTEP_SHM_DIR"
    )
