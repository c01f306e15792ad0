"""What the processes of a job hold of the machine, and whether it grows with each recovery.

Theory of operation: each living worker is looked at, by /proc, whenever an incident is closed. One
that has lived through three has all that it will ever need (its caches, its arenas), so from then
on it must stay as it is. Workers are replaced often, so what leaks from a process into its
successors (through the zygote, or the agent) is looked for in the first look at each: late ones
must hold no more than early ones.

Single looks say little: a group that is being taken down has its sockets and threads for some
milliseconds more, and one of which gloo has lost a send until the collective's time-out. So the
smallest of the last looks, which reach back over that time, is compared with the largest of the
first ones: what leaks is never given back, and shows in all.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SETTLED = 3  # incidents after which a worker has what it needs
_LOOKS = 3  # that are compared, at each end, at the least
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one process holds. `shared`: files in /dev/shm that it has mapped."""

    descriptors: int
    threads: int
    shared: int
    rss_mib: float

    @classmethod
    def by(cls, pid: int) -> Held | None:
        """What process `pid` holds now; None when it has ended."""
        proc = Path(f"/proc/{pid}")
        try:
            descriptors = len(os.listdir(proc / "fd"))
            threads = len(os.listdir(proc / "task"))
            pages = int((proc / "statm").read_text().split()[1])
            mapped = (proc / "maps").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return None
        files = {line.split()[5] for line in mapped if "/dev/shm/" in line}
        if not pages:  # it has ended, and is not reaped yet
            return None
        return cls(
            descriptors=descriptors,
            threads=threads,
            shared=len(files),
            rss_mib=pages * _PAGE_BYTES / 2**20,
        )


SLACK = Held(descriptors=0, threads=0, shared=0, rss_mib=8.0)
"""How much more a process may hold at the end than at the beginning."""


class Workers:
    """Looks at all workers of a job. Give `on_record` to the job, and call it in the agent's
    process."""

    def __init__(self, *, collective_timeout_s: float) -> None:
        self._lingers_s = 2 * collective_timeout_s  # the machine may be busy
        self._pids: dict[int, str] = {}
        self._times_s: dict[str, list[float]] = {}
        self.looks: dict[str, list[Held]] = {}
        """By worker, in the order of their births."""

    def on_record(self, record: dict[str, Any]) -> None:
        """A record of the job's journal."""
        if record["event"] == "started":
            who = f"rank {record['rank']}, incarnation {record['incarnation']}"
            self._pids[record["pid"]] = who
        elif record["event"] == "incident_closed":
            for pid, who in list(self._pids.items()):
                held = Held.by(pid)
                if held is None:
                    del self._pids[pid]
                else:
                    self.looks.setdefault(who, []).append(held)
                    self._times_s.setdefault(who, []).append(time.monotonic())

    def growth(self) -> list[str]:
        """What has grown, a sentence each; empty when all is flat."""
        grown = []
        for who, looks in self.looks.items():
            times_s = self._times_s[who]
            late = sum(time_s > times_s[-1] - self._lingers_s for time_s in times_s)
            settled = looks[_SETTLED - 1 :]
            grown += [f"{who}: {text}" for text in growth(settled, SLACK, late=late)]
        first = [looks[0] for looks in self.looks.values()]
        return grown + [f"at their first incident, {text}" for text in growth(first, SLACK)]


def growth(looks: Sequence[Held], slack: Held, *, late: int = 0) -> Iterator[str]:
    """What the last of `looks` (`late` of them) have more than the first by more than `slack`, in
    words. Nothing is said of too few looks."""
    early, last = looks[:_LOOKS], looks[-max(late, _LOOKS) :]
    if len(looks) < 2 * _LOOKS:
        return
    for field in dataclasses.fields(Held):
        most = max(getattr(held, field.name) for held in early)
        least = min(getattr(held, field.name) for held in last)
        if least > most + getattr(slack, field.name):
            every = ", ".join(f"{getattr(held, field.name):.4g}" for held in looks)
            yield f"{field.name} grew from {most:.4g} to {least:.4g} ({every})"
