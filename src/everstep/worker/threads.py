"""Whether native threads of this process are running, read from the kernel.

A library's thread can't be asked; but one that sleeps, and has not been switched to in between two
looks, has touched no memory in that time.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

_TASKS = Path("/proc/self/task")


def _switches(name: str) -> dict[str, str] | None:
    """Thread id to its context-switch counts, for all threads called `name`; None if one runs."""
    found: dict[str, str] = {}
    for task in os.listdir(_TASKS):
        try:
            status = (_TASKS / task / "status").read_text()
        except OSError:  # it has ended
            continue
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if fields.get("Name") != name:
            continue
        if not fields.get("State", "").startswith("S"):
            return None
        found[task] = f"{fields['voluntary_ctxt_switches']} {fields['nonvoluntary_ctxt_switches']}"
    return found


def asleep(name: str, seconds: float) -> bool:
    """Whether all threads called `name` sleep, and none of them ran for `seconds`. Blocks so long;
    any thread."""
    before = _switches(name)
    if before is None:
        return False
    threading.Event().wait(seconds)
    return _switches(name) == before
