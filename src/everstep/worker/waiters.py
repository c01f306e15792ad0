"""Threads that wait for works which can't say when they end: gloo's point-to-point ones.

Making a thread costs several times what the waiting costs, so an idle one is used again; it leaves
when nothing came for a second.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_IDLE_S = 1.0
Job = Callable[[], None]


class Waiters:
    """Runs each job on a thread of its own. `run` may be called on any thread and does not
    block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Job]] = []

    def run(self, job: Job) -> None:
        """Run `job`, which must not raise."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            name = "everstep-waiter"
            threading.Thread(target=self._serve, args=(inbox,), name=name, daemon=True).start()
        inbox.put(job)

    def _serve(self, inbox: queue.SimpleQueue[Job]) -> None:
        while True:
            try:
                job = inbox.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                continue  # taken at this very moment: its job is on the way
            job()
            del job  # it holds a guard, and that the script's tensors
            with self._lock:
                self._idle.append(inbox)


waiters = Waiters()
"""Of this process."""
