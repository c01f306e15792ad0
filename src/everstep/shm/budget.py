"""How much memory copies may take on this host, and a refusal with the numbers before it is taken.

Theory of operation. What lies in /dev/shm is memory. Three things bound it: the free space of the
tmpfs, the memory limits of the control groups that this process is in (each one up to the root;
what the kernel could take back from files counts as free), and the memory that the host has. The
smallest, less a reserve for everything else that a job needs, is the budget. It is asked for early:
then a refusal costs nothing, and in the middle of a run it would cost the run.

What it doesn't know: what others will take later.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.errors import UserError

RESERVE = 0.1
"""The part of what is free that is left alone: the job's own processes grow while it runs."""

_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number near the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One thing that bounds the copies. `free`: bytes that it still gives. `what`: for a person.
    `remedy`: how it is raised. `limit`: all that a control group gives."""

    free: int
    what: str
    remedy: str
    limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What copies may take here. `limit_bytes`: all together. `bounds`: what that follows from, the
    narrowest first."""

    limit_bytes: int
    bounds: tuple[Bound, ...] = ()

    def plus(self, nbytes: int) -> Budget:
        """This budget, for one who already has `nbytes` there."""
        return replace(self, limit_bytes=self.limit_bytes + nbytes)

    def check(self, taken: int, more: int, what: str) -> None:
        """Raises UserError with the numbers when `more` bytes, beside `taken`, are over the
        budget."""
        if taken + more <= self.limit_bytes:
            return
        text = (
            f"{what} needs {size(more)}, and the copies here already take {size(taken)} of the "
            f"{size(self.limit_bytes)} that they may"
        )
        if self.bounds:
            text += f" ({'; '.join(bound.what for bound in self.bounds)})"
            text += f"; {self.bounds[0].remedy}"
        raise UserError(f"{text}; or keep fewer copies, or spread the state over more nodes")


def measure(
    shm_dir: Path,
    *,
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
) -> Budget:
    """What copies in `shm_dir` may take now, beside what lies there. Reads a dozen small files.
    Raises OSError when `shm_dir` is not there."""
    space = os.statvfs(shm_dir)
    bounds = [
        Bound(
            free=space.f_bavail * space.f_frsize,
            what=f"{shm_dir} has {size(space.f_bavail * space.f_frsize)} free",
            remedy=f"give it more (`mount -o remount,size=... {shm_dir}`; `--shm-size` in docker)",
        ),
        *_of_host(proc),
        *_of_groups(proc, cgroups),
    ]
    bounds.sort(key=lambda bound: bound.free)
    limit = int(bounds[0].free * (1 - RESERVE))
    return Budget(limit_bytes=max(limit, 0), bounds=tuple(bounds))


def memory_bytes(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The memory that this process's host has, or the narrowest of its control groups allows."""
    totals = [
        int(line.split()[1]) << 10
        for line in _text(proc / "meminfo").splitlines()
        if line.startswith("MemTotal:")
    ]
    return min([*totals, *(bound.limit for bound in _of_groups(proc, cgroups))], default=0)


def size(nbytes: int) -> str:
    """Bytes for a person: "1.5 GiB"."""
    value = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.1f} {unit}" if unit != "bytes" else f"{nbytes} bytes"
        value /= 1024
    return f"{value:.1f} TiB"


def _of_host(proc: Path) -> list[Bound]:
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
            return [
                Bound(
                    free=free,
                    what=f"the host has {size(free)} of memory available",
                    remedy="end what else runs on the host",
                )
            ]
    return []


def _of_groups(proc: Path, cgroups: Path) -> list[Bound]:
    """The memory limits of all control groups this process is in, of version 1 and 2."""
    bounds = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files = (cgroups, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = (
                cgroups / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        root, limit_name, usage_name, reclaimable = files
        group = Path(path.lstrip("/"))
        for place in (group, *group.parents):
            limit = _number(root / place / limit_name)
            usage = _number(root / place / usage_name)
            if limit is None or usage is None or limit >= _UNLIMITED:
                continue
            used = max(usage - _stat(root / place / "memory.stat", reclaimable), 0)
            bounds.append(
                Bound(
                    free=max(limit - used, 0),
                    limit=limit,
                    what=f"the control group /{place} uses {size(used)} of {size(limit)}".replace(
                        "/.", "/"
                    ),
                    remedy="raise its memory limit (`--memory` in docker, the pod's limit, "
                    "`--mem` in Slurm)",
                )
            )
    return bounds


def _text(path: Path) -> str:
    """A file of the kernel's; empty where this kernel or container has none."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _stat(path: Path, key: str) -> int:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return 0
