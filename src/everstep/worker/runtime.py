"""What one worker process is made of: the parts, wired once, and the few values they share.

Does not decide anything: run.py speaks with the script, transaction.py with a step, recovery.py
with the agent."""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from everstep.core.words import name_break
from everstep.data.loader import Batch, BatchSource
from everstep.types import Cause, CauseKind
from everstep.wire import messages
from everstep.worker import devices, rng
from everstep.worker.communicators import Communicators
from everstep.worker.control import Control, Stopped
from everstep.worker.copies import Copies
from everstep.worker.faults import Faults
from everstep.worker.groups import OuterGroup, register
from everstep.worker.inner import Exchange, GlooInner, Inner
from everstep.worker.place import Place, kept_before_steps
from everstep.worker.progress import Phase, Progress
from everstep.worker.stacks import show_compiling, show_stacks
from everstep.worker.state import State
from everstep.worker.streams import Device
from everstep.worker.tape import Tape
from everstep.worker.wrappers import Wrappers

_KEPT_TIMEOUT_S = 600.0  # the agent waits much shorter for a node that it can't reach


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
        self.communicators.progress = self.progress
        self.communicators.tape = Tape(
            spec.rank, spec.tape, self.control.send, self.note, playing=spec.joiner
        )
        self.progress.regroup(spec.generation)
        show_stacks(spec.stacks_path, self.progress)
        show_compiling(self.progress)
        if spec.joiner:  # it was born into a stop
            self.control.stopped = self.communicators.stopped = spec.generation
        register(self.communicators)
        self.device: Device | None = None  # the CPU; found when the script calls init()
        self.wrappers = Wrappers()
        self.copies = Copies(self.control, spec)
        self.faults = Faults(
            spec.faults, self.control, lambda: 0 if self.joining else self.committed
        )
        self.once = dict(spec.once)
        self.state: State | None = None
        self.source: BatchSource | None = None
        self.rng_key = b""
        self.joining = spec.joiner
        self.committed = 0
        self.base = 0  # the step at which this job's ranks began: of a checkpoint, or none
        self.drawn: Drawn | None = None
        self.closed = False
        self.place = Place()
        if spec.joiner:
            self.place.kept = kept_before_steps(spec.once)
        self.carry = False  # the script's own random streams are kept
        self.values: dict[str, Any] = {}
        self.log: dict[int, dict[str, float]] = {}

    @property
    def warm_passes(self) -> int:
        """How many passes of the step function stand for the steps before a checkpoint."""
        return min(self.wrappers.due_passes(), self.base)

    def pass_of(self, step: int) -> int:
        """The how-manieth pass of the step function `step` is, in the lives of these ranks."""
        return step - self.base + self.warm_passes

    @property
    def world(self) -> OuterGroup:
        """The group of all ranks; the first that c10d made."""
        return self.communicators.groups[0]

    def _make_inner(self, group: OuterGroup, generation: int) -> Inner:
        spec = self.spec
        # Where the script makes a group its ranks come when they come; in a recovery all wait.
        made = generation == spec.generation
        timeout_s = spec.meet_timeout_s if made else spec.build_timeout_s

        def exchange_as(name: str) -> Exchange:
            return lambda payload: self.control.exchange(
                generation, name, group.rank(), group.size(), payload, timeout_s
            )

        def begun(inner: Inner) -> None:
            self.communicators.being_built(generation, inner)

        def gloo(on_address: Callable[[Inner], None]) -> GlooInner:
            return GlooInner(
                group.rank(),
                group.size(),
                exchange_as(group.name),
                host=spec.host,
                build_timeout_s=spec.build_timeout_s,
                collective_timeout_s=spec.collective_timeout_s,
                on_address=on_address,
            )

        if self.device is None:
            return gloo(begun)
        return devices.build(
            self.device,
            gloo,
            exchange_as(f"{group.name}/nccl"),
            rank=group.rank(),
            size=group.size(),
            name=group.name,
            generation=generation,
            build_timeout_s=spec.build_timeout_s,
            collective_timeout_s=spec.collective_timeout_s,
            on_begin=begun,
            on_error=lambda error: self.communicators.fail(generation, error),
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
            where=self.progress.words(),
        )
        self.control.send(
            messages.Fault(generation=generation, step=self.committed + 1, cause=cause)
        )

    def draw(self, step: int) -> Batch:
        """A fresh batch of `step`, the same each time: the generators are seeded for it first.
        Streams that are carried go on after it as if nothing had been drawn."""
        assert self.source is not None
        streams = self.streams()
        rng.seed_all(self.rng_key, step, "data")
        batch = self.source.at(step)
        self.restore_streams(streams)
        return batch

    def seed(self, moment: str, step: int | None = None) -> None:
        """Seed all generators for `moment` of `step` (of the last committed, if none is given),
        unless the script's own streams are carried."""
        if not self.carry:
            rng.seed_all(self.rng_key, self.committed if step is None else step, moment)

    def streams(self) -> bytes | None:
        """The states of all generators, where they are carried."""
        return rng.states() if self.carry else None

    def restore_streams(self, streams: bytes | None) -> None:
        """Put back what `streams` returned."""
        if streams is not None:
            rng.restore(streams)

    def hand_over(self, step: int, payload: bytes, section: str = "") -> None:
        """Send a capsule. On several nodes, wait until it is with another one, or the
        generation has been stopped: what is only on this node can be lost with it."""
        several = self.spec.local_world_size < self.spec.world_size
        turn = self.control.next_turn() if several else 0
        self.control.send(
            messages.Capsule(
                step=step,
                payload=payload,
                section=section,
                turn=turn,
                since=self.copies.oldest - 1,  # whose successor begins in the step before
            )
        )
        if several:
            generation = self.communicators.generation
            with suppress(Stopped):
                self.control.answer(messages.Kept, turn, _KEPT_TIMEOUT_S, generation)

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
        cause = exception_cause(error, self.progress.words())
        self.control.send(
            messages.Fault(generation=self.communicators.generation, step=step, cause=cause)
        )


def exception_cause(error: BaseException, where: str = "") -> Cause:
    """An exception as a cause: its type with the first line of its message (what follows may be
    advice, or a note), the traceback, and a signature by type and message. `where`: where the rank
    stood."""
    kind = type(error)
    plain = kind.__module__ in ("builtins", "__main__")
    name = kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return Cause(
        kind=CauseKind.EXCEPTION,
        text=f"{name}: {first}" if first else name,
        detail="".join(traceback.format_exception(error)),
        signature=f"{type(error).__qualname__}: {error}",
        exit_code=1,
        at_s=time.monotonic(),
        where=where,
    )
