"""Collectives that run on a device's streams: when they have ended, and what becomes of those that
were aborted.

Theory of operation. On a device `wait()` blocks a stream, not the host, and a collective fails long
after its call has returned. So a `StreamWork` has two ends: on the stream, which `wait` puts into
the script's stream; and on the host, where the `Watch`, one thread a process, sees its event and
opens the guard. If the watch itself fails, all that it awaits fails with it. A collective's kernel
ends when it is done or when its communicator is aborted. The host marks the generation as unclean
*before* it aborts anything (`Clean`), so whatever runs on a stream behind an aborted collective can
read there that it was. That is how outputs are mended:

- a collective that was poisoned when it was launched, or before its `wait`, is filled by the host's
  order, on the script's stream, behind the aborted kernel;
- one that is aborted later has been waited for by the stream, and the script's next kernels are
  queued behind it already. What the host may read from it, to take sizes and indices from (small
  tensors of whole numbers), is therefore mended by the stream itself: a masked fill stands behind
  each such collective. After the update, where a lost result must be seen to be lost, it stands
  behind all. Other numbers are garbage until the step unwinds, which no update lets out.

Nothing is ever filled from another thread: it would run on another stream, in the middle of the
script's kernels.

Does not know: nccl, when to abort."""

from __future__ import annotations

import datetime
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from everstep.worker.accelerator import Accelerator, Event
from everstep.worker.communicators import Answer, Communicators, without_frames
from everstep.worker.guard import Filler, Guard, future_of

_POLL_S = 0.001  # how late the host may learn of an end; a query costs microseconds
_PROBE_S = 0.1  # how often torch's own watchdog looks for errors of nccl
_READ_BYTES = 64 << 10  # outputs up to this size may be read for sizes and indices
Ended = Callable[[BaseException | None], None]


class Lapse(RuntimeError):
    """A collective that was aborted."""


class Clean:
    """Whether the groups of one generation are whole, as the device itself can read it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._cell = accelerator.host_cell(1)

    @property
    def whole(self) -> bool:
        """What the host knows. Any thread."""
        return bool(self._cell.item())

    def spoil(self) -> None:
        """From now on they are not. Any thread; before the first abort."""
        self._cell.fill_(0)

    def read(self) -> torch.Tensor:
        """One int32 on the device, 1 if they were whole when the calling thread's stream came
        here, else 0."""
        cell = torch.empty(1, dtype=torch.int32, device=self._accelerator.device)
        self._accelerator.launch(lambda: cell.copy_(self._cell, non_blocking=True))
        return cell


class Source(Protocol):
    """Where watched events come from. Those of one source come in their order."""

    def probe(self) -> None:
        """Look for errors; called now and then on the watch's thread while events are awaited."""
        ...


class Watch:
    """Tells the host of events on the device. Its thread begins with the first event."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._changed = threading.Condition()
        self._queues: dict[Source, deque[tuple[Event, Ended]]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._probed = time.monotonic()

    def add(self, source: Source, event: Event, ended: Ended) -> None:
        """Call `ended` on the watch's thread once the stream has come to `event`: with None, or
        with the error by which the device, or the watch, was lost."""
        with self._changed:
            self._queues.setdefault(source, deque()).append((event, ended))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="everstep-watch", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """End the thread once nothing is awaited. Blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._awaits():
            try:
                moved = self._round()
            except Exception as error:  # noqa: BLE001 - all that is awaited is told
                self._fail(error)
            else:
                if not moved:
                    with self._changed:
                        self._changed.wait(_POLL_S)

    def _fail(self, error: Exception) -> None:
        """Tell all that is awaited that it has failed with `error`, for nobody may wait for ever.
        The thread lives on, for what comes after."""
        traceback.print_exception(error)  # into the rank's log: there may be nobody to be told
        error = without_frames(error)
        with self._changed:
            queues, self._queues = self._queues, {}
        for queue in queues.values():
            while queue:
                _, ended = queue.popleft()
                try:
                    ended(error)
                except Exception as failure:  # noqa: BLE001 - the others must be told
                    traceback.print_exception(failure)
                del ended

    def _awaits(self) -> bool:
        """Wait until there is an event to look for; False once there is none and will be none."""
        with self._changed:
            while not self._queues and not self._closed:
                self._changed.wait()
            return bool(self._queues)

    def _round(self) -> bool:
        """Look once for all events; whether one had come. A method of its own, so that nothing of a
        source is held while the thread waits."""
        self._accelerator.enter()  # costs nothing where it has been done
        with self._changed:
            queues = list(self._queues.items())
        moved = [self._advance(source, queue) for source, queue in queues]
        if time.monotonic() - self._probed >= _PROBE_S:
            self._probed = time.monotonic()
            for source, _ in queues:
                source.probe()
        return any(moved)

    def _advance(self, source: Source, queue: deque[tuple[Event, Ended]]) -> bool:
        """Tell of the events of one source that have come; whether there was one."""
        moved = False
        while queue:
            event, ended = queue[0]
            error: BaseException | None = None
            try:
                if not event.query():
                    return moved
            except RuntimeError as failure:  # the device is lost: every call says so
                error = failure
            queue.popleft()
            moved = True
            ended(error)
            del event, ended  # they hold the script's tensors
        with self._changed:
            if not queue:
                self._queues.pop(source, None)
        return moved


class Device:
    """What all groups on this worker's device share."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.watch = Watch(accelerator)
        self._lock = threading.Lock()
        self._clean: dict[int, Clean] = {}

    def clean(self, generation: int) -> Clean:
        """Of `generation`. Any thread."""
        with self._lock:
            if generation not in self._clean:
                self._clean = {g: clean for g, clean in self._clean.items() if g > generation}
                self._clean[generation] = Clean(self.accelerator)
            return self._clean[generation]


class StreamWork:
    """One collective on a device. `work`: what the group returned for it, None if it could not be
    launched. `arguments` are held until it has ended: the allocator may know only of one of the
    streams that use them."""

    def __init__(
        self, accelerator: Accelerator, clean: Clean, work: Any, arguments: tuple[Any, ...]
    ) -> None:
        self.accelerator, self.clean = accelerator, clean
        self._work = work
        self._arguments: tuple[Any, ...] | None = arguments
        self._lock = threading.Lock()
        self._over = False
        self._error: BaseException | None = None
        self._ended: Ended | None = None

    def line_up(self) -> None:
        """Make the calling thread's stream wait for it. Never raises, unlike the group's own wait,
        which would also abort the communicator."""
        if self._work is not None:
            self._work.synchronize()

    def future(self, outputs: Any) -> torch.futures.Future[Any]:
        """A future of `outputs` that streams can wait for."""
        if self._work is None:
            return future_of(outputs)
        future: torch.futures.Future[Any] = self._work.get_future()
        return future

    def then(self, ended: Ended) -> None:
        """Call `ended` once it is over for the host: with None, or with what it failed by."""
        with self._lock:
            if not self._over:
                self._ended = ended
                return
        ended(self._error)

    def end(self, error: BaseException | None) -> None:
        """It is over. Once."""
        with self._lock:
            self._over, self._error = True, error
            ended, self._ended, self._arguments = self._ended, None, None
        if ended is not None:
            ended(error)


class StreamGuard(Guard):
    """The Work that a collective on a device returns. Its `wait` does not stop the host inside a
    step; outside, where a failure has to be raised, it does."""

    def __init__(
        self,
        communicators: Communicators,
        generation: int,
        outputs: Any,
        fill: Filler,
        operation: str,
    ) -> None:
        super().__init__(communicators, generation, outputs, _nothing, operation)
        self._filling = fill
        self._work: Any = None

    def follow(self, inner: StreamWork, _patience: datetime.timedelta) -> None:
        self._work = inner
        self._communicators.launched(self)
        inner.then(self._end)

    def line_up(self) -> None:
        """Make the calling thread's stream wait for the collective, and nothing else."""
        self._work.line_up()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Make the calling thread's stream wait for the collective; outside of a step, with a
        `timeout`, and where its outputs go on the tape, the host as well. Raises PeerError outside
        of a step if it was stopped."""
        if self._answer is Answer.RAISE or timeout or self.told is not None:
            super().wait(timeout)
        self.line_up()
        if self._poisoned:
            self._work.accelerator.launch(self._filling)
        else:
            self._mend()
        return True

    def _mend(self) -> None:
        """Let the stream itself make good what an abort from now on leaves in the outputs."""
        every = self._answer is Answer.NANS
        filled = [t for t in self._filling.lost if every or _is_read(t)]
        put_back = [(t, copy) for t, copy in self._filling.saved if _is_read(t)]
        if not filled and not put_back:
            return
        clean = self._work.clean.read()

        def mend() -> None:
            with torch.no_grad():
                aborted = (clean == 0).reshape(())
                for tensor in filled:
                    tensor.detach().masked_fill_(aborted, self._filling.value_for(tensor))
                for tensor, copy in put_back:
                    tensor.detach().copy_(torch.where(aborted, copy, tensor))

        self._work.accelerator.launch(mend)

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = self._work.future(self._outputs)
        return future


def _is_read(tensor: torch.Tensor) -> bool:
    """Whether a script may take sizes or indices from it."""
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return whole and tensor.layout is torch.strided and tensor.nbytes <= _READ_BYTES


def _nothing() -> None:
    return None
