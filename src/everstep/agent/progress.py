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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from everstep.core.hang import Entered
from everstep.errors import UserError
from everstep.worker.progress import (
    FIRST_ROW,
    KIND_BITS,
    KINDS,
    MAGIC,
    NAME_BYTES,
    ROW_CELLS,
    ROWS,
    SIZE_BYTES,
    Cell,
    Column,
    Phase,
    place_in_words,
)

_PREFIX = "everstep-"
_CELLS = struct.Struct(f"<{SIZE_BYTES // 8}q")
_HEAD = struct.Struct(f"<{FIRST_ROW}q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a worker's file says. `step`: the one under way. `passed`: UPDATE or SECTION, if it has
    come to that since `step` was set. `changed_ns`: when it last moved,
    monotonic nanoseconds, 0 for never. `waiting`: its main thread waits for a collective.
    `inside`: a collective or message that it has entered has not ended. `answers`: it shows its
    stacks on a signal. `debugged`: a debugger or profiler is in it. `unlisted`: communicators that
    its table has no room for. `groups`: identity of each communicator to what was entered of it;
    empty after `glance`."""

    step: int
    phase: Phase
    changed_ns: int
    generation: int = 0
    waiting: bool = False
    inside: bool = False
    answers: bool = False
    debugged: bool = False
    unlisted: int = 0
    passed: int = 0
    groups: Mapping[int, Entered] = field(default_factory=dict)

    def words(self) -> str:
        """Where it stood: "in step 5 (optimizer)"."""
        return place_in_words(self.phase, self.step, self.passed)


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
        page = self._page(SIZE_BYTES)
        return _standing(_CELLS.unpack(page), _groups(page))

    def glance(self) -> Standing:
        """As `read`, without the communicators: a few microseconds, to be done often."""
        return _standing(_HEAD.unpack(self._page(_HEAD.size)), {})

    def _page(self, size: int) -> bytes:
        if self._fd is None:
            raise ValueError(f"{self.path} has been removed")
        return os.pread(self._fd, size, 0)

    def remove(self) -> None:
        """Unlink and unlock. May be called twice."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self.path.unlink(missing_ok=True)
            os.close(fd)


def _standing(cells: tuple[int, ...], groups: Mapping[int, Entered]) -> Standing:
    """The figures as values. The page is the worker's; its stray stores must not end the agent."""
    phase = cells[Cell.PHASE]
    return Standing(
        step=cells[Cell.STEP],
        phase=Phase(phase) if phase in Phase._value2member_map_ else Phase.BETWEEN,
        changed_ns=cells[Cell.CHANGED_NS],
        generation=cells[Cell.GENERATION],
        waiting=bool(cells[Cell.WAITING]),
        inside=bool(cells[Cell.INSIDE]),
        answers=bool(cells[Cell.STACKS]),
        debugged=bool(cells[Cell.DEBUGGED]),
        unlisted=cells[Cell.UNLISTED],
        passed=cells[Cell.PASSED],
        groups=groups,
    )


def _kind(code: int) -> str:
    return KINDS[code] if 0 <= code < len(KINDS) else KINDS[0]


def _groups(page: bytes) -> dict[int, Entered]:
    cells = _CELLS.unpack(page)
    found = {}
    for row in range(FIRST_ROW, FIRST_ROW + ROWS * ROW_CELLS, ROW_CELLS):
        identity, count, newest = cells[row : row + Column.NAME]
        if identity:
            start = 8 * (row + Column.NAME)
            name = page[start : start + NAME_BYTES].rstrip(b"\0").decode(errors="replace")
            found[identity] = Entered(
                count=count,
                kind=_kind(newest & (1 << KIND_BITS) - 1),
                elements=newest >> KIND_BITS,
                name=name,
            )
    return found


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
