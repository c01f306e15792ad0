"""A device and nccl groups for tests, with what matters of their semantics; driven by hand.

What is launched runs when the test calls `run`, in the order of its stream. A collective's kernel
starts when its stream comes to it and ends when the test says so, or when its group is aborted,
which leaves garbage. Errors are found by asking, and end nothing. `abort` blocks for as long as the
test likes, and must be called on a thread that has set the device. All tensors are on the CPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from tests.unit.fakegroups import FakeWorld
from torch._C._distributed_c10d import ErrorType, Store

from everstep.worker.accelerator import Event, Lane
from everstep.worker.groups import OuterGroup
from everstep.worker.nccl import NcclInner
from everstep.worker.streams import Device

WAIT_S = 20
GARBAGE = 77


class FakeEvent:
    """Comes when its stream reaches it."""

    def __init__(self) -> None:
        self.come = threading.Event()
        self.error: RuntimeError | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.come.is_set()

    def reach(self) -> bool:
        """An item of its stream."""
        self.come.set()
        return True

    def passed(self) -> bool:
        """An item of a stream that waits for it."""
        return self.come.is_set()


class Stream:
    """Items run in order; one that returns False holds up those behind it."""

    def __init__(self) -> None:
        self.items: deque[Callable[[], bool]] = deque()

    def run(self) -> bool:
        """Run what can be run; whether anything was."""
        moved = False
        while self.items and self.items[0]():
            self.items.popleft()
            moved = True
        return moved


class FakeAccelerator:
    """One device with its streams. `entered`: names of the threads that have set it."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.main = Stream()
        self.streams = [self.main]
        self.entered: set[str] = set()
        self.is_capturing = False
        self.lost: RuntimeError | None = None
        self._here = threading.local()
        self._lock = threading.RLock()

    def stream(self) -> Stream:
        """A new stream."""
        with self._lock:
            self.streams.append(Stream())
            return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Any:
        """Make `stream` the calling thread's."""
        before, self._here.stream = self.current, stream
        yield
        self._here.stream = before

    @property
    def current(self) -> Stream:
        return getattr(self._here, "stream", self.main)

    def put(self, item: Callable[[], bool]) -> None:
        with self._lock:
            self.current.items.append(item)

    def run(self) -> None:
        """Run all streams until each is empty or held up."""
        with self._lock:
            while sum(stream.run() for stream in self.streams):  # all of them, not up to the first
                pass

    def run_some(self, choose: Callable[[int], int], count: int) -> None:
        """Run the heads of `count` streams, each chosen by `choose(how many there are)`."""
        with self._lock:
            for _ in range(count):
                stream = self.streams[choose(len(self.streams))]
                if stream.items and stream.items[0]():
                    stream.items.popleft()

    # ------------------------------------------------------------ Accelerator

    def enter(self) -> None:
        self._here.entered = True
        self.entered.add(threading.current_thread().name)

    def assert_entered(self) -> None:
        """The calling thread has set the device; pytest's main thread needs not."""
        main = threading.current_thread() is threading.main_thread()
        assert main or getattr(self._here, "entered", False), threading.current_thread().name

    def capturing(self) -> bool:
        return self.is_capturing

    def launch(self, kernels: Callable[[], object]) -> None:
        self.put(lambda: (kernels(), True)[1])

    def here(self) -> FakeEvent:
        event = FakeEvent()
        event.error = self.lost
        self.put(event.reach)
        return event

    def lane(self) -> Lane:
        accelerator, stream = self, self.stream()

        class _Lane:
            def behind(self, line_up: Callable[[], None]) -> Event:
                with accelerator.on(stream):
                    line_up()
                    return accelerator.here()

        return _Lane()

    def host_cell(self, value: int) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.int32)

    def settle(self) -> None:
        self.run()


class Fabric:
    """What connects the ranks of one communicator: their kernels of one call sum what they have,
    once all have come."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: dict[int, dict[int, torch.Tensor]] = {}

    def come(self, call: int, rank: int, tensor: torch.Tensor) -> None:
        """The kernel of `rank` has started."""
        self._given.setdefault(call, {}).setdefault(rank, tensor.clone())

    def whole(self, call: int) -> bool:
        """Whether all have come."""
        return len(self._given[call]) == self.size

    def total(self, call: int) -> torch.Tensor:
        """The sum of those that have."""
        return torch.stack(list(self._given[call].values())).sum(0)


class FakeNcclWork:
    """What a call returns: a kernel on the group's stream. `compute` is set by `finish`."""

    def __init__(self, group: FakeNcclGroup, outputs: list[torch.Tensor]) -> None:
        accelerator = group.accelerator
        self.group, self.outputs = group, outputs
        self.started = False
        self.call = len(group.works)
        self.compute: Callable[[], object] | None = None
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.future.set_result(outputs)  # as nccl's: done at once, for a stream to wait for
        self._end = FakeEvent()
        before = accelerator.here()
        with accelerator.on(group.stream):
            accelerator.put(before.passed)
            accelerator.put(self._kernel)
            accelerator.put(self._end.reach)

    def _kernel(self) -> bool:
        self.started = True
        fabric, killed = self.group.fabric, self.group.killed.is_set()
        if fabric is not None:
            fabric.come(self.call, self.group.rank, self.outputs[0])
        if self.compute is not None:
            self.compute()
        elif fabric is not None:
            if not killed and not fabric.whole(self.call):
                return False
            self.outputs[0].copy_(fabric.total(self.call))
        elif killed:
            for tensor in self.outputs:
                tensor.detach().fill_(GARBAGE)
        else:
            return False
        return True

    def finish(self, compute: Callable[[], object] = lambda: None) -> None:
        """Let the kernel end, once its stream comes to it."""
        self.compute = compute

    def synchronize(self) -> None:
        self.group.accelerator.put(self._end.passed)

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future

    def wait(self, *_: Any) -> bool:
        raise AssertionError("nccl's own wait() aborts the communicator where it finds an error")

    exception = is_success = is_completed = wait


class FakeNcclGroup:
    """A communicator. `letting_abort` gates `abort`, `connected` the building."""

    def __init__(self, accelerator: FakeAccelerator, rank: int, size: int, name: str) -> None:
        accelerator.assert_entered()
        self.accelerator, self.rank, self.size, self.name = accelerator, rank, size, name
        self.stream = accelerator.stream()
        self.works: list[FakeNcclWork] = []
        self.error = ErrorType.SUCCESS
        self.raises: Exception | None = None
        self.connected = threading.Event()
        self.connected.set()
        self.letting_abort = threading.Event()
        self.letting_abort.set()
        self.killed = threading.Event()
        self.aborts: list[str] = []
        self.on_abort: Callable[[], object] = lambda: None
        self.fabric: Fabric | None = None
        self.runs_on = True
        """After an abort the streams run on by themselves."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == self.accelerator.device
        self.accelerator.assert_entered()

    def _is_initialized(self) -> bool:
        return self.connected.is_set()

    def get_error(self) -> Any:
        return self.error

    def abort(self) -> None:
        self.accelerator.assert_entered()
        self.aborts.append(threading.current_thread().name)
        self.on_abort()
        assert self.letting_abort.wait(WAIT_S)
        self.killed.set()
        if self.runs_on:
            self.accelerator.run()

    def _launch(self, outputs: list[torch.Tensor], options: Any) -> FakeNcclWork:
        assert options is None or options.asyncOp, "it would return no Work"
        if self.raises is not None:
            raise self.raises
        self.works.append(FakeNcclWork(self, outputs))
        return self.works[-1]

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> FakeNcclWork:
        return self._launch(tensors, options)

    broadcast = allreduce

    def _allgather_base(self, output: Any, own: Any, options: Any) -> FakeNcclWork:
        return self._launch([output], options)

    def alltoall_base(
        self, output: Any, own: Any, out_splits: Any, in_splits: Any, options: Any
    ) -> FakeNcclWork:
        return self._launch([output], options)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> FakeNcclWork:
        return self._launch(tensors, None)


class NcclWorld(FakeWorld):
    """Communicators over NcclInners on one fake device; `nccl` has torch's groups in their
    order of making."""

    def __init__(self, *, rank: int = 1, size: int = 3) -> None:
        self.accelerator = FakeAccelerator()
        self.device = Device(self.accelerator)
        self.nccl: list[FakeNcclGroup] = []
        self.prepare: Callable[[FakeNcclGroup], None] = lambda _: None
        super().__init__(rank=rank, size=size)
        self.communicators._make_inner = self.make_nccl

    def make_nccl(self, group: OuterGroup, generation: int) -> NcclInner:
        """What the communicators call, on a builder thread."""

        def make(store: Store, rank: int, size: int, name: str, timeout_s: float) -> FakeNcclGroup:
            assert timeout_s == 77
            made = FakeNcclGroup(self.accelerator, rank, size, name)
            if rank == 0:
                store.set("0", "id")
            else:
                assert bytes(store.get("0")) == b"id"
            self.nccl.append(made)
            self.prepare(made)
            return made

        return NcclInner(
            self.rank,
            self.size,
            lambda own: {0: msgspec.msgpack.encode({"0": b"id"}), self.rank: own},
            name=group.name,
            generation=generation,
            device=self.device,
            build_timeout_s=WAIT_S,
            collective_timeout_s=77,
            on_begin=lambda inner: self.communicators.being_built(generation, inner),
            on_error=lambda error: self.communicators.fail(generation, error),
            make=make,
        )

    def work(self, index: int = -1, group: int = 0) -> FakeNcclWork:
        """The inner Work of one of the calls made so far."""
        return self.nccl[group].works[index]
