"""What one worker process is made of: the parts, wired once, and the few values they share.

Does not decide anything: run.py speaks with the script, transaction.py with a step, recovery.py
with the agent."""

from __future__ import annotations

import socket
import threading
import time
import traceback
from typing import Any

from everstep.core.words import name_break
from everstep.data.loader import Batch, BatchSource
from everstep.types import Cause, CauseKind
from everstep.wire import messages
from everstep.worker import rng
from everstep.worker.communicators import Communicators
from everstep.worker.control import Control, Stopped
from everstep.worker.faults import Faults
from everstep.worker.groups import OuterGroup, register
from everstep.worker.inner import GlooInner
from everstep.worker.progress import Phase, Progress
from everstep.worker.state import State
from everstep.worker.wrappers import Wrappers

HOST = "127.0.0.1"


class Drawn:
    """The batch that `run.batches` handed out for `step`, until a step function takes it."""

    def __init__(self, step: int, batch: Batch) -> None:
        self.step, self.batch = step, batch


class Worker:
    """The parts of a worker. Made on the main thread right after the fork."""

    def __init__(self, spec: messages.WorkerSpec, sock: socket.socket) -> None:
        self.spec = spec
        self.main_thread_id = threading.get_ident()
        self.progress = Progress(spec.progress_path)
        self.control = Control(sock, self._on_stop)
        self.communicators = Communicators(
            self._make_inner, self._on_fault, generation=spec.generation, solo=spec.joiner
        )
        if spec.joiner:  # it was born into a stop
            self.control.stopped = self.communicators.stopped = spec.generation
        register(self.communicators)
        self.wrappers = Wrappers()
        self.faults = Faults(spec.faults, self.control)
        self.once = dict(spec.once)
        self.state: State | None = None
        self.source: BatchSource | None = None
        self.rng_key = b""
        self.joining = spec.joiner
        self.committed = 0
        self.drawn: Drawn | None = None
        self.closed = False
        self.values: dict[str, Any] = {}
        self.log: dict[int, dict[str, float]] = {}

    @property
    def world(self) -> OuterGroup:
        """The group of all ranks; the first that c10d made."""
        return self.communicators.groups[0]

    def _make_inner(self, group: OuterGroup, generation: int) -> GlooInner:
        def exchange(payload: bytes) -> dict[int, bytes]:
            return self.control.exchange(
                generation,
                group.name,
                group.rank(),
                group.size(),
                payload,
                self.spec.build_timeout_s,
            )

        return GlooInner(
            group.rank(),
            group.size(),
            exchange,
            host=HOST,
            build_timeout_s=self.spec.build_timeout_s,
            collective_timeout_s=self.spec.collective_timeout_s,
            on_address=lambda inner: self.communicators.being_built(generation, inner),
        )

    def _on_stop(self, generation: int) -> None:
        self.communicators.stop(generation)

    def _on_fault(self, generation: int, error: BaseException) -> None:
        if isinstance(error, Stopped):
            return
        cause = Cause(
            kind=CauseKind.PEER,
            text=name_break(str(error)),
            detail=str(error),
            signature="collective",
            at_s=None,
        )
        self.control.send(
            messages.Fault(generation=generation, step=self.committed + 1, cause=cause)
        )

    def draw(self, step: int) -> Batch:
        """A fresh batch of `step`, the same each time: the generators are seeded for it first."""
        assert self.source is not None
        rng.seed_all(self.rng_key, step, "data")
        return self.source.at(step)

    def note(self, key: str, text: str) -> None:
        """Something a person should know, shown once."""
        self.control.send(messages.Note(key=key, text=text))

    def phase(self, phase: Phase, step: int | None = None) -> None:
        """Show where this worker stands."""
        if step is not None:
            self.progress.step = step
        self.progress.phase = phase

    def report_exception(self, error: BaseException, step: int) -> None:
        """Tell the agent that the script's step raised here while the process lives."""
        cause = exception_cause(error)
        self.control.send(
            messages.Fault(generation=self.communicators.generation, step=step, cause=cause)
        )


def exception_cause(error: BaseException) -> Cause:
    """An exception as a cause: one line, the traceback, and a signature by type and message."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return Cause(
        kind=CauseKind.EXCEPTION,
        text=text.splitlines()[-1] if text else type(error).__name__,
        detail="".join(traceback.format_exception(error)),
        signature=f"{type(error).__qualname__}: {error}",
        exit_code=1,
        at_s=time.monotonic(),
    )
