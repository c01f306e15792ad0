"""The c10d backend `everstep`: an outer process group around a swappable inner one.

Theory of operation: DDP, DeviceMesh and functional collectives hold the outer group; it never
changes. A collective does one of three things: *live*, it is launched on the inner group and
returns a guard (guard.py); *poisoned*, it completes at once with outputs that are filled (zeros
inside a step, NaN after the update, an exception outside); *solo*, it answers as if every peer held
what this rank holds (solo.py). Each collective is one method, which hands to `_run` where its
outputs are among its arguments and how it answers solo.

Does not know: what an inner group is made of, when to poison or to regroup (communicators.py)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, Work
from torch.distributed import distributed_c10d

from everstep.errors import PeerError, UserError
from everstep.worker import solo
from everstep.worker.communicators import Answer, Communicators, tensors_of, without_frames
from everstep.worker.guard import MESSAGES, Done, Filler, Guard, Several, broken, fill, keeps
from everstep.worker.streams import StreamGuard, StreamWork

BACKEND = "everstep"


class OuterGroup(dist.ProcessGroup):
    """What the script's wrappers hold. Made by c10d through the backend's creator; registered with
    `communicators`, which sets `inner`. Collectives may be called on any thread, as with any
    process group.

    The ignores: pybind gives c10d's methods several overloads and names of their own; what is here
    takes the one form that c10d calls, lists of tensors and options."""

    def __init__(
        self, communicators: Communicators, rank: int, size: int, name: str, ranks: tuple[int, ...]
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # in no stub: for Python groups
        self.inner: Any = None
        self.ranks = ranks
        self.row = 0  # in the progress file
        self.abandoned = False  # some of its ranks have destroyed it
        self._communicators = communicators
        self._rank, self._size = rank, size
        self._c10d_name = name
        self._name = communicators.name_for(ranks)
        # Whom a receive from anybody names when it was poisoned: never itself.
        self._other = (rank + 1) % size
        communicators.add(self)

    @property
    def name(self) -> str:  # type: ignore[override]
        """By which its members find each other: their ranks, and how many groups of just these
        came before. c10d's own name won't do: two groups that do not meet may share one, and a
        split's is counted anew on each rank."""
        return self._name

    def _run(
        self,
        operation: str,
        outputs: Any,
        arguments: tuple[Any, ...],
        alone: Callable[[], None],
        arrived: Callable[[], None] | None = None,
    ) -> Work:
        communicators = self._communicators
        first = outputs
        while isinstance(first, (list, tuple)) and first:
            first = first[0]
        elements = first.numel() if isinstance(first, torch.Tensor) else 0
        communicators.note(operation, elements)
        if communicators.progress is not None:
            left = communicators.poisoned or communicators.cut_off or communicators.solo
            row = 0 if left else self.row  # peers do not enter it
            communicators.progress.entered(row, operation, elements)
        tape = communicators.tape
        keep = operation == "broadcast"
        root = keep and arguments[1].rootRank == self._rank
        if communicators.solo:
            told = None
            if tape is not None:
                told = tape.play(self._name, operation, outputs, is_root=root)
            if told is None:
                alone()
            return Done(outputs, self._other if told is None else told.source)
        if communicators.answer is Answer.RAISE:
            communicators.outside(operation)
        generation = communicators.generation
        inner = self.inner
        if self.abandoned and not communicators.poisoned:
            raise UserError(
                f"{operation} on a process group (of ranks {list(self.ranks)}) that other ranks "
                "have destroyed, or that a replacement has not made; make groups before "
                "run.protect, and destroy them on all ranks or on none"
            )
        if communicators.poisoned or communicators.cut_off or inner is None:
            return self._poisoned(operation, outputs, keep)
        place = None if tape is None else tape.place(self._name, operation, outputs)
        filling = Filler(outputs, communicators.answer, keep=keep, root=root)
        try:
            work = inner.operation(operation)(*arguments)
        except RuntimeError as error:
            if not communicators.poisoned and not _lost_peer(operation, error):
                raise  # a wrong argument: the script's
            communicators.fail(generation, without_frames(error))
            return self._poisoned(operation, outputs, keep)
        kind = StreamGuard if isinstance(work, StreamWork) else Guard
        guard = kind(communicators, generation, outputs, filling, operation)
        guard.told = place
        if arrived is not None:
            guard.source = self._other
            guard.stage(arrived)
        guard.follow(work, inner.patience)
        return guard

    def _poisoned(self, operation: str, outputs: Any, keep: bool) -> Work:
        answer = self._communicators.answer
        if answer is Answer.RAISE:
            raise PeerError(broken(operation))
        self._communicators.touched = True
        fill([t for t in tensors_of(outputs) if not (keep and keeps(t, answer))], answer)
        return Done(outputs, self._other)

    # -- identity

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._c10d_name

    @property
    def _device_types(self) -> list[torch.device]:
        """What state-dict utilities and checkpoints ask for."""
        return [torch.device("cpu")]

    def setGroupName(self, name: str) -> None:
        self._c10d_name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._c10d_name

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

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        return self._run(
            "allreduce", tensors, (tensors, opts), lambda: solo.reduce(tensors, opts, self._size)
        )

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._run(
            "allreduce_coalesced",
            tensors,
            (tensors, opts),
            lambda: solo.reduce(tensors, opts, self._size),
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        opts = opts or dist.BroadcastOptions()
        return self._run("broadcast", tensors, (tensors, opts), lambda: None)

    def reduce(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        opts = opts or dist.ReduceOptions()
        return self._run(
            "reduce", tensors, (tensors, opts), lambda: solo.reduce(tensors, opts, self._size)
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()
        return self._run(
            "allgather",
            outputs,
            (outputs, inputs, opts),
            lambda: solo.gather(outputs, inputs),
        )

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()
        return self._run(
            "allgather_coalesced",
            outputs,
            (outputs, inputs, opts),
            lambda: solo.gather_coalesced(outputs, inputs),
        )

    def all_gather_single(self, output: Any, own: Any, opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()
        return self._run(
            "_allgather_base",
            [output],
            (output, own, opts),
            lambda: solo.gather_single(output, own, self._size),
        )

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """What functional collectives and DTensor call. gloo's Python side has none, so it is one
        by one."""
        return Several(
            [self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)],
            outputs,
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:  # type: ignore[override]
        opts = opts or dist.ReduceScatterOptions()
        return self._run(
            "reduce_scatter",
            outputs,
            (outputs, inputs, opts),
            lambda: solo.reduce_scatter(outputs, inputs, opts, self._size, self._rank),
        )

    def reduce_scatter_single(self, output: Any, own: Any, opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        return self._run(
            "_reduce_scatter_base",
            [output],
            (output, own, opts),
            lambda: solo.reduce_scatter_single(output, own, opts, self._size, self._rank),
        )

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return Several(
            [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)],
            outputs,
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:  # type: ignore[override]
        opts = opts or dist.GatherOptions()
        return self._run(
            "gather", outputs, (outputs, inputs, opts), lambda: solo.gather(outputs, inputs)
        )

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:  # type: ignore[override]
        opts = opts or dist.ScatterOptions()
        return self._run(
            "scatter",
            outputs,
            (outputs, inputs, opts),
            lambda: solo.scatter(outputs, inputs, self._rank),
        )

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        opts = opts or dist.AllToAllOptions()
        return self._run(
            "alltoall",
            outputs,
            (outputs, inputs, opts),
            lambda: solo.all_to_all(outputs, inputs),
        )

    def all_to_all_single(
        self, output: Any, own: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work:
        opts = opts or dist.AllToAllOptions()
        return self._run(
            "alltoall_base",
            [output],
            (output, own, output_splits, input_splits, opts),
            lambda: solo.all_to_all([output], [own]),
        )

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or dist.BarrierOptions()
        return self._run("barrier", [], (opts,), lambda: None)

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        return self._run("send", [], (tensors, dst, tag), lambda: None)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        return self._run("recv", tensors, (tensors, src, tag), lambda: fill(tensors, Answer.ZEROS))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """gloo can't be woken from it by any means but its time-out, so it receives into a buffer
        of its own."""
        staged = [torch.empty_like(tensor) for tensor in tensors]

        def arrived() -> None:
            for tensor, data in zip(tensors, staged, strict=True):
                tensor.detach().copy_(data)

        return self._run(
            "recv_anysource", tensors, (staged, tag), lambda: fill(tensors, Answer.ZEROS), arrived
        )


def _lost_peer(operation: str, error: RuntimeError) -> bool:
    """Whether a launch failed because of a peer: only gloo's point-to-point calls notice that at
    the launch; what other collectives raise there is about their arguments."""
    return operation in MESSAGES and "gloo/transport" in str(error)


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

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    dist.split_group = distributed_c10d.split_group = split_group


_split_elsewhere = distributed_c10d.split_group


def split_group(
    parent_pg: dist.ProcessGroup | None = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    """What stands for torch.distributed.split_group, which asks for an accelerator that c10d is
    bound to before it asks the backend. Each part becomes a group as `new_group` makes it; other
    parts are not waited for.

    `split_ranks`: of each part, ranks in `parent_pg` (None: the world). Returns None on a rank that
    is in no part. Raises UserError where the parts make no sense. Blocks; all ranks of the parent
    call it."""
    parent = parent_pg or dist.group.WORLD
    if not isinstance(parent, OuterGroup):
        return _split_elsewhere(parent_pg, split_ranks, timeout, pg_options, group_desc, backend)
    parts = split_ranks or []
    named = sorted(rank for part in parts for rank in part)
    if not parts or not all(parts) or not set(named) <= set(range(parent.size())):
        raise UserError(
            f"split_group got split_ranks={split_ranks}; it takes lists, none of them empty, of "
            f"ranks from 0 to {parent.size() - 1}, which count within the group that is split"
        )
    if len(named) != len(set(named)):
        raise UserError(f"split_group got split_ranks={split_ranks}, which name a rank twice")
    if backend not in (None, BACKEND):
        raise UserError(
            f"split_group was asked for backend {backend!r}, and groups of everstep have one for "
            "all devices; leave the argument out"
        )
    own = next((part for part in parts if parent.rank() in part), None)
    if own is None:
        return None
    ranks = [parent.ranks[rank] for rank in own]
    options: dict[str, Any] = {"timeout": timeout, "group_desc": group_desc}
    group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, **options)
    return group
