"""The c10d backend `everstep`: an outer process group around a swappable inner one.

DDP, DeviceMesh and functional collectives hold the outer group; it never changes. A collective does
one of three things: *live*, it is launched on the inner group and returns a guard; *poisoned*, it
completes at once with outputs that are filled (zeros inside a step, NaN after the update, an
exception outside); *solo*, it answers as if every peer held what this rank holds.

Each collective is one row of `_OPERATIONS`: where its outputs are among its arguments, and how it
answers solo. A failed or poisoned broadcast inside a step leaves the tensor as it was, and one
outside a small tensor: it holds valid data before the call (bucket indices, configuration, DDP's
constant buffers), code that reads it would crash on zeros, and nobody would put a constant back.
After the update its floats are lost like those of any other."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceOp, Work

from everstep.errors import PeerError, UserError
from everstep.worker.communicators import Answer, Communicators, tensors_of, without_frames

BACKEND = "everstep"
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

    def stage(self, arrived: Callable[[], None]) -> None:
        """The inner operation writes to a buffer of its own, so nobody need wait for it after a
        stop; `arrived` copies from there when it has ended in time."""
        self._arrived = arrived
        self.detached = True

    def follow(self, inner: Any, patience: datetime.timedelta) -> None:
        """Be opened when the inner Work `inner` ends; `patience`: for one that must be waited for."""
        self._inner = inner
        self._patience = patience
        self._communicators.launched(self)
        try:
            future = inner.get_future()
        except RuntimeError:  # point-to-point works of gloo have none
            threading.Thread(target=self._await_inner, name="everstep-p2p", daemon=True).start()
        else:
            future.add_done_callback(self._inner_done)

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
        elif (
            self._arrived is not None
        ):  # only with the token in hand: after a stop nobody may write any more
            self._arrived()
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
            self._gate.acquire()
            self._gate.release()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until the collective has ended or was stopped. Raises PeerError outside of a step
        if it was."""
        if not self._released:
            seconds = timeout.total_seconds() if timeout else 0.0
            if not self._gate.acquire(timeout=seconds if 0 < seconds < _FOREVER_S else -1):
                raise RuntimeError(f"{self.operation} did not end within {seconds:g} s")
            self._gate.release()
        if self._poisoned and self._answer is Answer.RAISE:
            raise PeerError(_broken(self.operation))
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            self._future = torch.futures.Future()
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
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

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


def _fill(outputs: Any, answer: Answer) -> None:
    for tensor in tensors_of(outputs):
        with torch.no_grad():
            raw = tensor.detach()
            if raw.layout is torch.sparse_coo:
                raw = raw._values()  # fill_ knows no sparse tensors
            raw.fill_(float("nan") if answer is Answer.NANS and _is_inexact(raw) else 0)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _keeps(tensor: torch.Tensor, answer: Answer) -> bool:
    """Whether a broadcast that lost its peers leaves `tensor` as it was."""
    if answer is Answer.RAISE:
        return tensor.numel() * tensor.element_size() <= _KEPT_BROADCAST_BYTES
    return answer is Answer.ZEROS or not _is_inexact(tensor)


# ---------------------------------------------------------------- solo answers


def _solo_reduce(group: OuterGroup, tensors: Any, opts: Any) -> None:
    """As if all peers held the same: a sum is `size` times, a product a power, everything else
    stays."""
    operation = getattr(opts, "reduceOp", None)
    kind = ReduceOp.SUM if operation is None else operation
    for tensor in tensors_of(tensors):
        if kind == ReduceOp.SUM:
            tensor.detach().mul_(group.size())
        elif kind == ReduceOp.PRODUCT:
            tensor.detach().pow_(group.size())
        elif kind == ReduceOp.BXOR and group.size() % 2 == 0:
            tensor.detach().zero_()


def _solo_gather(group: OuterGroup, outputs: Any, inputs: Any) -> None:
    for row, own in zip(outputs, inputs, strict=False):
        for tensor in row:
            tensor.detach().copy_(own)


def _solo_gather_single(group: OuterGroup, output: Any, own: Any) -> None:
    if output.numel():
        output.detach().view(group.size(), -1).copy_(
            own.detach().reshape(1, -1).expand(group.size(), -1)
        )


def _solo_reduce_scatter(group: OuterGroup, outputs: Any, inputs: Any, opts: Any) -> None:
    for output, row in zip(outputs, inputs, strict=True):
        output.detach().copy_(row[group.rank()])
    _solo_reduce(group, outputs, opts)


def _solo_reduce_scatter_single(group: OuterGroup, output: Any, own: Any, opts: Any) -> None:
    if output.numel():
        output.detach().view(-1).copy_(own.detach().reshape(group.size(), -1)[group.rank()])
    _solo_reduce(group, output, opts)


def _solo_scatter(group: OuterGroup, outputs: Any, inputs: Any) -> None:
    if inputs and inputs[0]:
        for output, row in zip(outputs, inputs, strict=True):
            output.detach().copy_(row[group.rank()])
    else:
        _fill(outputs, Answer.ZEROS)


def _solo_all_to_all(group: OuterGroup, outputs: Any, inputs: Any) -> None:
    for output, own in zip(outputs, inputs, strict=True):
        piece = own.detach().reshape(-1)[: output.numel()]
        output.detach().zero_()
        output.detach().view(-1)[: piece.numel()].copy_(piece)


# ---------------------------------------------------------------- the outer group


class OuterGroup(dist.ProcessGroup):
    """What the script's wrappers hold. Made by c10d through the backend's creator; registered with
    `communicators`, which sets `inner`. Collectives may be called on any thread, as with any
    process group."""

    def __init__(
        self, communicators: Communicators, rank: int, size: int, name: str, ranks: tuple[int, ...]
    ) -> None:
        super().__init__(rank, size)
        self.inner: Any = None
        self.ranks = ranks
        self._communicators = communicators
        self._rank, self._size, self.name_ = rank, size, name
        self._other = (
            rank + 1
        ) % size  # whom a receive from anybody names when it was poisoned: never itself
        communicators.add(self)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The group's name, the same on all its members."""
        return self.name_

    def _run(
        self,
        operation: str,
        outputs: Any,
        arguments: tuple[Any, ...],
        solo: Callable[[], None],
        arrived: Callable[[], None] | None = None,
    ) -> Work:
        communicators = self._communicators
        first = outputs
        while isinstance(first, (list, tuple)) and first:
            first = first[0]
        communicators.note(operation, first.numel() if isinstance(first, torch.Tensor) else 0)
        if communicators.solo:
            solo()
            return Done(outputs, self._other)
        keep = operation == "broadcast"
        generation = communicators.generation
        inner = self.inner
        if communicators.poisoned or inner is None:
            return self._poisoned(operation, outputs, keep)
        fill = self._filler(outputs, keep)
        guard = Guard(communicators, generation, outputs, fill, operation)
        try:
            work = inner.operation(operation)(*arguments)
        except RuntimeError as error:
            if not communicators.poisoned and not _lost_peer(operation, error):
                raise  # a wrong argument: the script's
            communicators.fail(generation, without_frames(error))
            return self._poisoned(operation, outputs, keep)
        if arrived is not None:
            guard.source = self._other
            guard.stage(arrived)
        guard.follow(work, inner.patience)
        return guard

    def _poisoned(self, operation: str, outputs: Any, keep: bool) -> Work:
        answer = self._communicators.answer
        if answer is Answer.RAISE:
            raise PeerError(_broken(operation))
        self._communicators.touched = True
        _fill([t for t in tensors_of(outputs) if not (keep and _keeps(t, answer))], answer)
        return Done(outputs, self._other)

    def _filler(self, outputs: Any, keep: bool) -> Callable[[], None]:
        answer = self._communicators.answer
        if not keep:
            return lambda: _fill(outputs, answer)
        saved = [(t, t.detach().clone()) for t in outputs if _keeps(t, answer)]
        lost = [t for t in outputs if not _keeps(t, answer)]

        def fill() -> None:
            _fill(lost, answer)
            for tensor, copy in saved:
                tensor.detach().copy_(copy)

        return fill

    # -- identity

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self.name_

    def setGroupName(self, name: str) -> None:
        self.name_ = name

    @property
    def group_name(self) -> str:
        return self.name_

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def getRank(self) -> int:
        return self._rank

    def abort(self) -> None:
        self._communicators.forget(self)

    def shutdown(self) -> None:
        self._communicators.forget(self)

    # -- collectives

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        return self._run(
            "allreduce", tensors, (tensors, opts), lambda: _solo_reduce(self, tensors, opts)
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._run(
            "allreduce_coalesced",
            tensors,
            (tensors, opts),
            lambda: _solo_reduce(self, tensors, opts),
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        opts = opts or dist.BroadcastOptions()
        return self._run("broadcast", tensors, (tensors, opts), lambda: None)

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        opts = opts or dist.ReduceOptions()
        return self._run(
            "reduce", tensors, (tensors, opts), lambda: _solo_reduce(self, tensors, opts)
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()
        return self._run(
            "allgather",
            outputs,
            (outputs, inputs, opts),
            lambda: _solo_gather(self, outputs, inputs),
        )

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()

        def solo() -> None:
            for row in outputs:
                _solo_gather(self, [[tensor] for tensor in row], inputs)

        return self._run("allgather_coalesced", outputs, (outputs, inputs, opts), solo)

    def all_gather_single(self, output: Any, own: Any, opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()
        return self._run(
            "_allgather_base",
            [output],
            (output, own, opts),
            lambda: _solo_gather_single(self, output, own),
        )

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """What functional collectives and DTensor call. gloo's Python side has none, so it is one
        by one."""
        return Several(
            [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)],
            outputs,
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        return self._run(
            "reduce_scatter",
            outputs,
            (outputs, inputs, opts),
            lambda: _solo_reduce_scatter(self, outputs, inputs, opts),
        )

    def reduce_scatter_single(self, output: Any, own: Any, opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        return self._run(
            "_reduce_scatter_base",
            [output],
            (output, own, opts),
            lambda: _solo_reduce_scatter_single(self, output, own, opts),
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return Several(
            [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)],
            outputs,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or dist.GatherOptions()
        return self._run(
            "gather", outputs, (outputs, inputs, opts), lambda: _solo_gather(self, outputs, inputs)
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or dist.ScatterOptions()
        return self._run(
            "scatter",
            outputs,
            (outputs, inputs, opts),
            lambda: _solo_scatter(self, outputs, inputs),
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or dist.AllToAllOptions()
        return self._run(
            "alltoall",
            outputs,
            (outputs, inputs, opts),
            lambda: _solo_all_to_all(self, outputs, inputs),
        )

    def all_to_all_single(
        self, output: Any, own: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work:
        opts = opts or dist.AllToAllOptions()
        return self._run(
            "alltoall_base",
            [output],
            (output, own, output_splits, input_splits, opts),
            lambda: _solo_all_to_all(self, [output], [own]),
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or dist.BarrierOptions()
        return self._run("barrier", [], (opts,), lambda: None)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        return self._run("send", [], (tensors, dst, tag), lambda: None)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        return self._run("recv", tensors, (tensors, src, tag), lambda: _fill(tensors, Answer.ZEROS))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """gloo can't be woken from it by any means but its time-out, so it receives into a buffer
        of its own."""
        staged = [torch.empty_like(tensor) for tensor in tensors]

        def arrived() -> None:
            for tensor, data in zip(tensors, staged, strict=True):
                tensor.detach().copy_(data)

        return self._run(
            "recv_anysource", tensors, (staged, tag), lambda: _fill(tensors, Answer.ZEROS), arrived
        )


def _broken(operation: str) -> str:
    return (
        f"a collective ({operation}) outside of a step lost a peer and cannot be done again; move it into the step "
        "function"
    )


def _lost_peer(operation: str, error: RuntimeError) -> bool:
    """Whether a launch failed because of a peer: only gloo's point-to-point calls notice that at
    the launch; what other collectives raise there is about their arguments."""
    return operation in ("send", "recv", "recv_anysource") and "gloo/transport" in str(error)


def register(communicators: Communicators) -> None:
    """Register the backend with c10d. Once a process; raises UserError if another `everstep`
    backend is there."""
    if BACKEND.upper() in dist.Backend._plugins:
        raise UserError(
            "a c10d backend named 'everstep' is registered already; call everstep.init() once"
        )

    def create(options: Any, _backend_options: Any) -> OuterGroup:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return OuterGroup(
            communicators, options.group_rank, options.group_size, options.group_id, ranks
        )

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
