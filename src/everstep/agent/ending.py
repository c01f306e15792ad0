"""Ending processes for certain: killed, reaped and seen to be gone, or an error that says which are
not.

Every wait looks again each millisecond and has a deadline: what must be waited for here (processes
that are neither children nor known beforehand) has no descriptor to wait on.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterable

from everstep.agent import processes
from everstep.errors import EverstepError

END_TIMEOUT_S = 10.0
_POLL_S = 0.001


async def end_session(session: int) -> None:
    """Kill and reap every process of a session. Raises EverstepError if one is left after
    `END_TIMEOUT_S`."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while left := processes.kill_session(session):
        for process in left:
            processes.reap(process.pid)
        await _pause(deadline, (process.pid for process in left))


async def end_marked(mark: str) -> None:
    """Kill and reap every process that was started with `mark` in its environment, wherever it has
    gone.

    Raises EverstepError if one is left after `END_TIMEOUT_S`.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    left = set(processes.marked(mark))
    while left:
        for pid in left:
            processes.send_signal(pid, signal.SIGKILL)
            processes.reap(pid)
        await _pause(deadline, left)
        # A zombie has no environment any more; it is known by its number until somebody has reaped
        # it.
        left = {pid for pid in left if processes.is_there(pid)} | set(processes.marked(mark))


async def exit_status(pid: int) -> int | None:
    """The status, as from `os.waitpid`, of a process whose parent is dead, so that it is a child of
    ours.

    Kills its session first. None if somebody else has reaped it. Raises EverstepError after
    `END_TIMEOUT_S`.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    processes.kill_session(pid)
    while processes.is_there(pid):
        status = processes.reap(pid)
        if status is not None:
            return status
        await _pause(deadline, (pid,))
    return None


async def _pause(deadline: float, left: Iterable[int]) -> None:
    if time.monotonic() > deadline:
        raise EverstepError(
            f"processes {sorted(left)} do not end on SIGKILL; they hang in the kernel (a dead file "
            "system, a device); free them before the job is started again"
        )
    await asyncio.sleep(_POLL_S)
