"""The agent's shelf: copies of ranks' states in shared memory, of its own ranks and of neighbours'.

Theory of operation. A job has one directory in /dev/shm. Each copy is a file there, made by open,
posix_fallocate and mmap (a sparse file on a full tmpfs would kill its writer with SIGBUS), and
named by node, rank and incarnation. A worker or a transfer writes the bytes; then the agent writes
the manifest beside them, under its final name by a rename. A copy is complete when its manifest is
there and not before; so a copy whose writer died is nothing, and is given away.

Who makes a copy says of which steps older ones must stay; the others give their place to it. Their
manifests go first, so that no manifest ever stands beside bytes that are being overwritten. An area
that is still read is not used again: its memory goes with the last reader, and counts until then. A
new incarnation never gets an area of an older one, which may still be written: its writer may only
have been slow.

A restarted agent takes over every copy of its job that no living agent holds (`adopt`). They lie
apart, and are no copies of anything, until the job has said which of them it knows (`release`). The
start of another job removes (`sweep`) what no living job holds; between an agent's death and its
return this may cost the copies, and never gives a wrong one.

What it doesn't know: who writes, where a copy goes next, which step is needed. One thread; the one
call that may take long, to take memory, is left to the caller (`begin`).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection
from pathlib import Path

from everstep import snapshot
from everstep.errors import UserError
from everstep.shm.budget import Budget
from everstep.shm.files import (
    PREFIX,
    Area,
    alone,
    create_locked,
    enter,
    read,
    remove,
    sweep,
    take,
)
from everstep.snapshot import Manifest, SnapshotError
from everstep.types import HeldCopy, Stamp

_AREA = re.compile(r"n(\d{1,9})-r(\d{1,9})\.(\d{1,9})-(\d{1,9})")

__all__ = ["Area", "Shelf", "create_locked", "is_left", "refusal", "sweep"]


class Shelf:
    """The copies that one agent keeps. One thread; no call waits for anybody.

    `budget`: what copies may take beside what lies in shared memory already."""

    def __init__(self, shm_dir: Path, run_id: str, node: int, budget: Budget) -> None:
        """Raises UserError when the directory can't be made."""
        self.node = node
        self.directory = shm_dir / (PREFIX + run_id)
        try:
            self._lock: int | None = enter(self.directory)
        except OSError as error:
            raise refusal(self.directory, error) from error
        self._areas: dict[int, list[Area]] = {}
        self._leaving: list[Area] = []  # given up, and still read
        self._adopted: list[Area] = []  # and not judged yet
        self._made = 0
        self._budget = budget

    # ------------------------------------------------------------ what was left here

    def adopt(self) -> tuple[HeldCopy, ...]:
        """Take over the complete copies that no living agent holds, and remove what is incomplete.
        They count when they are judged. Their bytes are as good as they were: whoever restores from
        them compares the digests."""
        for path in sorted(self.directory.iterdir()):
            match = _AREA.fullmatch(path.name)
            fd = None if match is None else take(path)
            if match is None or fd is None:
                continue
            node, rank, incarnation, count = map(int, match.groups())
            self._made = max(self._made, count)
            area = Area(
                path=path,
                node=node,
                rank=rank,
                incarnation=incarnation,
                nbytes=os.fstat(fd).st_size,
                fd=fd,
            )
            area.manifest = _manifest_of(area)
            if area.manifest is None:
                self._remove(area)
            else:
                self._adopted.append(area)
        self._budget = self._budget.plus(self.nbytes)
        return tuple(_held(area) for area in self._adopted)

    def release(self, keep: Collection[HeldCopy]) -> None:
        """What was adopted has been judged: `keep` are copies like any others, the rest goes."""
        for area in self._adopted:
            if _held(area) in keep:
                self._areas.setdefault(area.rank, []).append(area)
            else:
                self._remove(area)
        self._adopted.clear()

    # ------------------------------------------------------------ writing

    def begin(
        self, *, rank: int, incarnation: int, nbytes: int, keep: Collection[int] = ()
    ) -> Area:
        """An area of `nbytes` bytes for a new copy of `rank`, written by `incarnation` (a transfer
        writes for the incarnation that it copies). Where its `fd` is -1, memory must be taken
        before it is written: by `create_locked` on any thread, and then `furnish`.

        `keep`: the steps of which complete copies stay; those of others, and one that is under way,
        give their place. Raises UserError with the numbers where the budget is spent."""
        for area in self._of(rank):
            if area.manifest is not None and area.step not in keep:
                area.manifest_path.unlink(missing_ok=True)
                area.manifest = None
        free = [area for area in self._of(rank) if area.manifest is None]
        reusable = [area for area in free if self._fits(area, incarnation, nbytes)]
        for area in [area for area in free if area not in reusable[:1]]:
            self._discard(area)
        area = reusable[0] if reusable else self._plan(rank, incarnation, nbytes)
        area.under_way = True
        return area

    def furnish(self, area: Area, fd: int) -> bool:
        """The memory of `area` is taken, at `fd`. False if the area was given up meanwhile; then
        nothing is left of it."""
        area.fd = fd
        if not area.gone:
            return True
        area.path.unlink(missing_ok=True)
        area.give_up()
        return False

    def commit(self, area: Area, manifest: Manifest) -> None:
        """The copy in `area` is whole: write its manifest. From here on it is there for everybody,
        and outlives its writer and this process.

        Raises SnapshotError when `manifest` does not describe the area, and ValueError for an area
        that is not being written. The digests are not looked at: the writer has just made them, or
        the transfer has compared them."""
        if not area.under_way or area not in self._of(area.rank):
            raise ValueError(f"{area.path} is not being written")
        if manifest.about.rank != area.rank:
            raise SnapshotError(
                f"the manifest of rank {manifest.about.rank} came for the copy of rank {area.rank}"
            )
        with area.bytes() as view:
            snapshot.check_header(view, snapshot.check(manifest))
            if area.users > 1:
                raise ValueError(f"{area.path} is still in its writer's hands")
        draft = area.manifest_path.with_suffix(".draft")
        draft.write_bytes(snapshot.encode(manifest))
        draft.rename(area.manifest_path)
        area.manifest, area.under_way = manifest, False

    def abandon(self, area: Area) -> None:
        """The writer of `area` is gone, or was told to stop. Its memory is given back once nobody
        has it mapped. An area that is complete or already given up stays as it is."""
        if area.under_way and area in self._of(area.rank):
            self._discard(area)

    def retain(self, steps: Collection[int]) -> None:
        """Give up all complete copies of other steps than `steps`: nobody will go back to them."""
        for area in [area for areas in self._areas.values() for area in areas]:
            if area.manifest is not None and area.step not in steps:
                self._discard(area)

    def drop(self, rank: int, step: int | None = None) -> None:
        """Give up the copies of `rank`, or only that of `step`. The memory of those that are in use
        goes with their last user."""
        for area in list(self._of(rank)):
            if step is None or (area.manifest is not None and area.step == step):
                self._discard(area)

    # ------------------------------------------------------------ reading

    def complete(self, rank: int) -> list[Area]:
        """The complete copies of `rank`, the newest first."""
        whole = [area for area in self._of(rank) if area.manifest is not None]
        return sorted(whole, key=lambda area: (-area.step, -area.incarnation))

    def newest(self, rank: int) -> Area | None:
        """The newest complete copy of `rank`."""
        return next(iter(self.complete(rank)), None)

    def held(self) -> tuple[HeldCopy, ...]:
        """The complete copies, by rank and step."""
        return tuple(_held(a) for r in sorted(self._areas) for a in reversed(self.complete(r)))

    @property
    def nbytes(self) -> int:
        """What all areas take."""
        self._leaving = [area for area in self._leaving if area.fd >= 0]
        return sum(area.nbytes for area in [*self._all(), *self._leaving])

    # ------------------------------------------------------------ its end

    def close(self, *, keep: bool = False) -> None:
        """Let go of everything. With `keep` the copies stay for an agent that comes back; else they
        are removed, and the directory with the last agent of the job. May be called twice."""
        if self._lock is None:
            return
        for area in self._all():
            if not keep:
                area.manifest_path.unlink(missing_ok=True)
                area.path.unlink(missing_ok=True)
            area.give_up()
        self._areas.clear()
        self._adopted.clear()
        lock, self._lock = self._lock, None
        try:
            if not keep and alone(lock):
                remove(self.directory)
        finally:
            os.close(lock)

    # ------------------------------------------------------------ inside

    def _of(self, rank: int) -> list[Area]:
        return self._areas.get(rank, [])

    def _all(self) -> list[Area]:
        return [*(area for areas in self._areas.values() for area in areas), *self._adopted]

    def _fits(self, area: Area, incarnation: int, nbytes: int) -> bool:
        ours = area.node == self.node and area.incarnation == incarnation
        return ours and area.fd >= 0 and area.nbytes == nbytes and not area.users

    def _plan(self, rank: int, incarnation: int, nbytes: int) -> Area:
        self._budget.check(self.nbytes, nbytes, f"a copy of rank {rank} on node {self.node}")
        self._made += 1
        path = self.directory / f"n{self.node}-r{rank}.{incarnation}-{self._made}"
        area = Area(
            path=path, node=self.node, rank=rank, incarnation=incarnation, nbytes=nbytes, fd=-1
        )
        self._areas.setdefault(rank, []).append(area)
        return area

    def _discard(self, area: Area) -> None:
        self._areas[area.rank].remove(area)
        if not self._areas[area.rank]:
            del self._areas[area.rank]
        self._remove(area)

    def _remove(self, area: Area) -> None:
        """Away with it, manifest first."""
        area.under_way = False
        area.manifest_path.unlink(missing_ok=True)
        area.path.unlink(missing_ok=True)
        area.give_up()
        if area.fd >= 0:
            self._leaving.append(area)


def is_left(shm_dir: Path, run_id: str) -> bool:
    """Whether an agent of the job has a shelf on this host, or has left one. What another user has
    put there is none."""
    try:
        about = os.lstat(shm_dir / (PREFIX + run_id))
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()


def _held(area: Area) -> HeldCopy:
    """What a complete copy is known by."""
    assert area.manifest is not None
    about = area.manifest.about
    stamp = Stamp(generation=about.generation, digest=area.manifest.digest)
    return HeldCopy(rank=area.rank, step=about.step, stamp=stamp)


def _manifest_of(area: Area) -> Manifest | None:
    """The manifest beside a file that was found, if it describes it."""
    text = read(area.manifest_path, snapshot.MAX_MANIFEST_BYTES)
    if text is None:
        return None  # it was not complete when its agent died
    try:
        manifest = snapshot.decode(text)
        if manifest.about.rank != area.rank:
            return None
        if manifest.nbytes != area.nbytes:
            return None
        with area.bytes() as view:
            snapshot.check_header(view, snapshot.check(manifest))
    except SnapshotError:
        return None
    return manifest


def refusal(path: Path, error: OSError) -> UserError:
    """What to say and do where `path` could not be made."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        space = os.statvfs(path.parent)
        free = space.f_bavail * space.f_frsize
        return UserError(
            f"{path.parent} has {free} bytes free, too few for another copy; give it more (`mount "
            "-o remount,size=...`; `--shm-size` in docker), keep fewer copies, or spread the state "
            "over more nodes"
        )
    return UserError(
        f"{path}: {error.strerror or error}; copies of the ranks' states are kept there; make it "
        "writable, or name another directory in memory with EVERSTEP_SHM_DIR"
    )
