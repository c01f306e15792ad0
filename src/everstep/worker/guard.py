"""What a collective returns, and what its outputs become when it has lost its peers.

Theory of operation: a `Guard` stands between the script and the inner group's Work. It is opened
once, by the inner operation's end or by the stop, whichever comes first: whoever pops the token
decides what the outputs hold, and the other changes nothing. The main thread waits on the guard
alone, never inside gloo. `Done` is a collective that was over when it was called (solo, poisoned);
`Several` are collectives that are waited for as one.

Filling: the outputs of a poisoned collective are zeros, or NaN after the update. A failed or
poisoned broadcast inside a step leaves the tensor as it was, and one outside a small tensor: it
holds valid data before the call (bucket indices, configuration, DDP's constant buffers), code that
reads it would crash on zeros, and nobody would put a constant back. After the update its floats are
lost like those of any other.

Does not know: which collectives there are, how they answer solo, when to poison."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work

from everstep.errors import PeerError
from everstep.worker.communicators import Answer, Communicators, tensors_of, without_frames
from everstep.worker.waiters import waiters

if TYPE_CHECKING:
    from everstep.worker.tape import Place

MESSAGES = frozenset({"send", "recv", "recv_anysource"})
"""Operations between two ranks."""
_without_future = set(MESSAGES)
"""Operations whose works in gloo have no future; others are learned. An exception from C++ that
says so costs as much as all the rest of a collective."""
_KEPT_BROADCAST_BYTES = 64 << 10
_FOREVER_S = threading.TIMEOUT_MAX


class Guard(Work):
    """The Work that a collective returns: opened by the inner operation's end or by the stop."""

    def __init__(
        self,
        communicators: Communicators,
        generation: int,
        outputs: Any,
        fill: Callable[[], None],
        operation: str,
    ) -> None:
        super().__init__()
        self.operation = operation
        self.generation = generation
        self.detached = False
        self._communicators = communicators
        self._outputs = outputs
        self._fill = fill
        self._once = [True]
        self._settle_once = [True]
        self._released = False
        self._poisoned = False
        self._answer = communicators.answer
        self._inner: Any = None
        self._future: torch.futures.Future[Any] | None = None
        self._gate = threading.Lock()
        self._gate.acquire()
        self._arrived: Callable[[], None] | None = None
        self.source = 0
        self.told: Place | None = None
        """Where on the tape the outputs belong, while it is recorded."""

    def stage(self, arrived: Callable[[], None]) -> None:
        """The inner operation writes to a buffer of its own, so nobody need wait for it after a
        stop; `arrived` copies from there when it has ended in time."""
        self._arrived = arrived
        self.detached = True

    def follow(self, inner: Any, patience: datetime.timedelta) -> None:
        """Be opened when the inner Work `inner` ends; `patience`: for one that must be waited
        for."""
        self._inner = inner
        self._patience = patience
        self._communicators.launched(self)
        if self.operation not in _without_future:
            try:
                future = inner.get_future()
            except RuntimeError:
                _without_future.add(self.operation)
            else:
                future.add_done_callback(self._inner_done)
                return
        waiters.run(self._await_inner)

    def _inner_done(self, future: torch.futures.Future[Any]) -> None:
        error: BaseException | None = None
        try:
            future.value()
        except Exception as failure:
            error = without_frames(failure)
        self._end(error)

    def _await_inner(self) -> None:
        error: BaseException | None = None
        try:
            self._inner.wait(self._patience)
        except Exception as failure:
            error = without_frames(failure)
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if error is None and self._arrived is not None:
            self.source = self._inner._source_rank()
        self._inner = None
        self._communicators.ended(self, error)

    def release(self, *, poisoned: bool) -> None:
        """Open the guard, once; whoever comes second changes nothing. Any thread."""
        try:
            self._once.pop()
        except IndexError:
            return
        if poisoned:
            self._poisoned = True
            self._communicators.touched = True
            self._fill()
        elif self._arrived is not None:
            # Only with the token in hand: after a stop nobody may write any more.
            self._arrived()
        if self.told is not None and not poisoned:
            self.told.keep(self.source)
        self._released = True
        self._communicators.open.pop(id(self), None)
        if self._future is not None:
            self._settle()
        self._gate.release()

    def _settle(self) -> None:
        """Complete the future, once: the releaser and its maker may both come here."""
        try:
            self._settle_once.pop()
        except IndexError:
            return
        assert self._future is not None
        self._future.set_result(self._outputs)

    def await_release(self) -> None:
        """Wait until the guard is open; bounded by the inner operation's time-out or the stop."""
        if not self._released:
            self._pass_gate(-1)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until the collective has ended or was stopped. Raises PeerError outside of a step
        if it was."""
        if not self._released:
            seconds = timeout.total_seconds() if timeout else 0.0
            if not self._pass_gate(seconds if 0 < seconds < _FOREVER_S else -1):
                raise RuntimeError(f"{self.operation} did not end within {seconds:g} s")
        if self._poisoned and self._answer is Answer.RAISE:
            raise PeerError(broken(self.operation))
        return True

    def _pass_gate(self, timeout_s: float) -> bool:
        """Wait for the gate to open, and leave it open; shown in the progress file meanwhile."""
        progress = self._communicators.progress
        if progress is not None:
            progress.waits(True)
        opened = self._gate.acquire(timeout=timeout_s)
        if progress is not None:
            progress.waits(False)
        if opened:
            self._gate.release()
        return opened

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._future = open_future(self._outputs)
            if self._released:
                self._settle()
        return self._future

    def is_completed(self) -> bool:
        return self._released

    def is_success(self) -> bool:
        return self._released and not self._poisoned

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        return self.source


class Done(Work):
    """A collective that is over: solo or poisoned."""

    def __init__(self, outputs: Any, source: int) -> None:
        super().__init__()
        self._outputs = outputs
        self._source = source

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return future_of(self._outputs)

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self._outputs

    def synchronize(self) -> None:
        return None

    def _source_rank(self) -> int:
        return self._source


class Several(Work):
    """Collectives that are waited for as one."""

    def __init__(self, works: list[Work], outputs: Any) -> None:
        super().__init__()
        self._works = works
        self._outputs = outputs

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(lambda _: self._outputs)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()


def broken(operation: str) -> str:
    """The words of the PeerError for collective `operation`, which lost a peer outside of a
    step."""
    return (
        f"a collective ({operation}) outside of a step lost a peer and cannot be done again; "
        "move it into the step function, or into a section (@run.section)"
    )


def fill(outputs: Any, answer: Answer) -> None:
    """Overwrite all tensors in `outputs`: with NaN where `answer` says so and the dtype has one,
    else with zeros. Any thread."""
    for tensor in tensors_of(outputs):
        with torch.no_grad():
            raw = tensor.detach()
            if raw.layout is torch.sparse_coo:
                raw = raw._values()  # fill_ knows no sparse tensors
            raw.fill_(float("nan") if answer is Answer.NANS and _is_inexact(raw) else 0)


class Filler:
    """What overwrites `outputs` if the collective that is about to be launched is poisoned. With
    `keep` (a broadcast) it copies the tensors to be kept now, and puts them back then; on the
    `root`, whose tensors are only read, they stay as they are without."""

    def __init__(self, outputs: Any, answer: Answer, *, keep: bool, root: bool = False) -> None:
        self._answer = answer
        self._lost = outputs
        self.saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors that are put back, each with its copy."""
        if keep:
            kept = [t for t in outputs if keeps(t, answer)]
            if kept:  # else all are lost
                self._lost = [t for t in outputs if not keeps(t, answer)]
            if not root:
                self.saved = [(t, t.detach().clone()) for t in kept]

    @property
    def lost(self) -> list[torch.Tensor]:
        """Tensors that are filled."""
        return list(tensors_of(self._lost))

    def value_for(self, tensor: torch.Tensor) -> float:
        """What a tensor is filled with."""
        return float("nan") if self._answer is Answer.NANS and _is_inexact(tensor) else 0.0

    def __call__(self) -> None:
        fill(self._lost, self._answer)
        for tensor, copy in self.saved:
            tensor.detach().copy_(copy)


def future_of(outputs: Any) -> torch.futures.Future[Any]:
    """A future that `outputs` have been set in: streams of the devices they lie on can wait for
    it."""
    future = open_future(outputs)
    future.set_result(outputs)
    return future


def open_future(outputs: Any) -> torch.futures.Future[Any]:
    """A future that will hold `outputs`; torch wants to know their devices beforehand."""
    devices = {t.device for t in tensors_of(outputs) if not t.is_cpu}
    return torch.futures.Future(devices=list(devices)) if devices else torch.futures.Future()


def keeps(tensor: torch.Tensor, answer: Answer) -> bool:
    """Whether a broadcast that lost its peers leaves `tensor` as it was."""
    if answer is Answer.RAISE:
        return tensor.numel() * tensor.element_size() <= _KEPT_BROADCAST_BYTES
    return answer is Answer.ZEROS or not _is_inexact(tensor)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
