"""What a silent worker can still tell: its Python stacks, and that it compiles.

Theory of operation: a handler of faulthandler's is registered for one real-time signal, with a file
that is opened beforehand. It runs in the signal itself, so it needs neither the interpreter's lock
nor memory, and shows where an endless loop or a wait in native code stands. Until it is registered
the agent must not send the signal, whose default is to end the process; so the worker says in
shared memory when it is. A stopped process answers only once it is continued.

torch's compiler says when it begins and ends: such a time is a phase of its own, since it may be a
hundred times a step's.

It does not know who asks, nor why.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
from typing import Any

from everstep.worker.progress import Phase, Progress

SIGNAL = signal.SIGRTMIN + 11
"""The signal that asks for the stacks. A real-time one, which scripts and libraries leave alone;
glibc takes the first two for itself, and debuggers and runtimes the ones after."""


def show_stacks(path: str, progress: Progress) -> None:
    """From now on write all threads' stacks to the end of the file `path` when `SIGNAL` comes. Main
    thread. With an empty `path` nothing is registered."""
    if not path:
        return
    # Never closed: the handler writes to it until the process ends.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    progress.answers()


def show_compiling(progress: Progress) -> None:
    """Show the phase COMPILE while torch compiles. Nothing, where this torch can't say it."""
    try:
        handler: Any = importlib.import_module("torch._dynamo.callback").callback_handler
    except (ImportError, AttributeError):
        return
    interrupted: list[int] = []

    def begins(_: Any) -> None:
        interrupted.append(progress.phase)
        progress.phase = Phase.COMPILE

    def ends(_: Any) -> None:
        before = interrupted.pop() if interrupted else Phase.STEP
        if progress.phase == Phase.COMPILE:
            progress.phase = before

    handler.register_start_callback(begins)
    handler.register_end_callback(ends)
