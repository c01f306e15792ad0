"""The inner group on CUDA devices: nccl beside gloo, each for the tensors of its own device.

Theory of operation. nccl differs from gloo in what matters here:

- A call returns when its kernel is on a stream. Errors come later, are kept by the communicator,
  and leave the kernel running: it ends when it is done or when its own communicator is aborted.
  So the end of a collective is an event on a stream (streams.py), and an error is looked for.
- `abort` may block for as long as the driver likes, and one communicator's abort may have to wait
  for the kernels of another: so each runs on a thread of its own, with the rank's device set, all
  at once, and nobody waits for it but `quiesce`, through `silent`.
- torch's watchdog ends the process when a collective fails, and its monitor when the watchdog
  stalls. Both are told not to, by environment variables, before the first group is made.
- A call with `asyncOp` false returns no Work. It would be invisible here, so it is always true.
- A communicator that is captured into a graph can't be replaced in it: refused.

The communicator is connected when it is built, not at its first use, so that a dead peer is met on
the builder's thread; it is non-blocking, so that its building can be aborted too.

What this was checked with: docs/design/accelerators.md.

Does not know: steps, poison, who decides."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from everstep.errors import TransientError, UserError
from everstep.worker.communicators import tensors_of
from everstep.worker.inner import Exchange, GlooInner, Inner
from everstep.worker.streams import Device, Lapse, StreamWork

_CONNECT_POLL_S = 0.002
_RETIRE_POLL_S = 0.05
_VARIABLES = {
    # What torch's nccl group does about an error: nothing, since everstep does it. With any other
    # value it aborts by itself, before the generation is marked as unclean, or ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # 1 lets its monitor end the process when an abort keeps its watchdog waiting.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # 1 asks the store of the default group every second; ours answers once in its life.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # How long its watchdog sleeps, four times over, after an error: it can't be joined meanwhile.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # 1 would make wait() stop the host and take the watchdog away, and errors with it.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # These two write to the store while training, and the first turns the error handling on again.
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}


def prepare(environment: MutableMapping[str, str]) -> list[str]:
    """Set what nccl groups of this process read when they are made. Returns the names of variables
    that the user had set otherwise. Raises UserError for a debug level that can't be served."""
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        raise UserError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch end the process when a collective on a "
            "GPU fails, before everstep can recover; set it to INFO, or unset it"
        )
    changed = [n for n, value in _VARIABLES.items() if environment.get(n, value) != value]
    environment.update(_VARIABLES)
    return changed


class NcclGroup(Protocol):
    """What is used of torch's ProcessGroupNCCL, besides its collectives."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Begin to connect to the other members."""
        ...

    def _is_initialized(self) -> bool:
        """Whether all are connected."""
        ...

    def abort(self) -> None:
        """End the kernels. Blocks until they have ended."""
        ...

    def get_error(self) -> Any:
        """An ErrorType, as torch's watchdog has found it last."""
        ...


MakeGroup = Callable[[Store, int, int, str, float], NcclGroup]


def make_group(store: Store, rank: int, size: int, name: str, timeout_s: float) -> NcclGroup:
    """torch's own group, not yet connected."""
    nccl: Any = c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = datetime.timedelta(seconds=timeout_s)
    options.group_name = name
    options.config.blocking = 0
    made: NcclGroup = nccl(store, rank, size, options)
    return made


class IdStore(Store):
    """A store that is one all-gather of nccl's id: each member sends what it has set as soon as it
    has set something or wants something. Blocks in the exchange; raises what the exchange raises.
    """

    def __init__(self, exchange: Exchange, *, gives: bool) -> None:
        """`gives`: this member sets an id, so it must not send before it has."""
        super().__init__()
        self._exchange = exchange
        self._gives = gives
        self._lock = threading.Lock()
        self._own: dict[str, bytes] = {}
        self._keys: dict[str, bytes] | None = None
        self.error: Exception | None = None

    def set(self, key: str, value: bytes | str) -> None:
        self._own[key] = value.encode() if isinstance(value, str) else bytes(value)
        if self._gives:
            self._all()

    def get(self, key: str) -> bytes:
        keys = self._all()
        if key not in keys:
            raise KeyError(f"no member of the group has set {key!r}")
        return keys[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether the keys are there. Does not exchange: torch's threads ask, too."""
        known = self._own | (self._keys or {})
        return all(key in known for key in keys)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """The exchange has its own deadline."""

    def has_extended_api(self) -> bool:
        return True

    def _all(self) -> dict[str, bytes]:
        with self._lock:
            if self._keys is None:
                try:
                    answers = self._exchange(msgspec.msgpack.encode(self._own))
                except Exception as error:
                    self.error = error  # c10d wraps what a Python store raises
                    raise
                self._keys = {
                    key: value
                    for answer in answers.values()
                    for key, value in msgspec.msgpack.decode(answer, type=dict[str, bytes]).items()
                }
            return self._keys


class NcclInner:
    """A ProcessGroupNCCL of one generation. The constructor blocks until all members are connected
    (bounded by `build_timeout_s`); call it on a builder thread. `on_begin` is called as soon as it
    can be aborted, `on_error` when nccl reports an error, once, on the watch's thread."""

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Exchange,
        *,
        name: str,
        generation: int,
        device: Device,
        build_timeout_s: float,
        collective_timeout_s: float,
        on_begin: Callable[[NcclInner], None] = lambda _: None,
        on_error: Callable[[Exception], None] = lambda _: None,
        make: MakeGroup = make_group,
    ) -> None:
        self._accelerator, self._watch = device.accelerator, device.watch
        self._accelerator.enter()
        self.patience = datetime.timedelta(seconds=collective_timeout_s)
        self._name, self._on_error = name, on_error
        self._clean = device.clean(generation)
        self._lane = self._accelerator.lane()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._silent = threading.Event()
        self._told = False
        self._running = 0
        self._idle = threading.Condition(self._lock)
        store = IdStore(exchange, gives=rank == 0)
        try:
            self.group = make(store, rank, size, name, collective_timeout_s)
            on_begin(self)
            self.group.eager_connect_single_device(self._accelerator.device)
            self._connected(build_timeout_s)
        except Exception as error:
            self.abort()
            if store.error is not None:
                raise store.error from error
            raise

    def _connected(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.group._is_initialized():
            if self._stopped.wait(_CONNECT_POLL_S):
                raise TransientError(f"nccl group {self._name} was stopped while it was built")
            if time.monotonic() >= deadline:
                raise TransientError(
                    f"nccl group {self._name} was not connected within {timeout_s:g} s; a member "
                    "died meanwhile, or the devices can't reach each other (see NCCL_DEBUG=INFO)"
                )

    def operation(self, name: str) -> Callable[..., StreamWork]:
        call: Callable[..., Any] = getattr(self.group, name)

        def launch(*arguments: Any) -> StreamWork:
            if self._accelerator.capturing():
                raise UserError(
                    f"a collective ({name}) is being captured into a CUDA graph; a graph keeps "
                    "the communicator it was captured with, and a recovery replaces that. Leave "
                    "collectives out of graphs (torch.compile: not mode='reduce-overhead')"
                )
            _be_asynchronous(arguments)
            try:
                work = call(*arguments)
            except dist.DistBackendError as error:  # the communicator is broken: no error of args
                lost = StreamWork(self._accelerator, self._clean, None, ())
                lost.end(error)
                return lost
            return self._follow(work, arguments)

        return launch

    def _follow(self, work: Any, arguments: tuple[Any, ...]) -> StreamWork:
        held = StreamWork(self._accelerator, self._clean, work, arguments)
        event = self._lane.behind(work.synchronize)

        def ended(error: BaseException | None) -> None:
            held.end(error or self._lapse())
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

        with self._idle:
            self._running += 1
        self._watch.add(self, event, ended)
        return held

    def _lapse(self) -> Lapse | None:
        """What a kernel that has just ended has ended by: an abort if there was one, for that is
        called before it takes effect. One that was done just before it counts as aborted."""
        return Lapse(f"nccl group {self._name} was aborted") if self._stopped.is_set() else None

    def probe(self) -> None:
        """See Source. A kernel whose communicator has failed runs on until it is aborted."""
        group = self.__dict__.get("group")  # the reaper may just have taken it
        if group is None or self._told or self._stopped.is_set():
            return
        error = group.get_error()
        if error != c10d.ErrorType.SUCCESS:
            self._told = True
            self._on_error(RuntimeError(_words(error, self._name)))

    def abort(self) -> None:
        """Begin to end the kernels; returns at once. The generation is marked as unclean before."""
        self._clean.spoil()
        self._end()

    def _end(self) -> None:
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
        threading.Thread(target=self._abort, name="everstep-nccl-abort", daemon=True).start()

    def retire(self) -> None:
        """What it still does is waited for by `destroy`."""

    def _abort(self) -> None:
        self._accelerator.enter()
        group = self.__dict__.get("group")  # none where it could not be made
        if group is not None:
            group.abort()
        self._silent.set()

    def silent(self) -> bool:
        return self._silent.is_set()

    def asleep(self, seconds: float) -> bool:
        """Nothing of it runs on the host's threads, so this is `silent`."""
        return self.silent()

    def destroy(self) -> None:
        """Drop the group, once. Blocks until its kernels have ended, by themselves unless the
        generation is stopped, and then torch's watchdog."""
        self._accelerator.enter()
        with self._idle:
            while self._running and self._clean.whole:
                self._idle.wait(_RETIRE_POLL_S)
        self._end()
        self._silent.wait()
        self.__dict__.pop("group", None)


class DeviceInner:
    """Both inner groups of one generation: tensors on the CPU go by gloo, others by nccl. A barrier
    has no tensors, so it is gloo's, and stops the host as it should."""

    def __init__(
        self,
        make_cpu: Callable[[Callable[[Inner], None]], GlooInner],
        make_device: Callable[[Callable[[Inner], None]], NcclInner],
        on_begin: Callable[[DeviceInner], None],
    ) -> None:
        self._parts: list[Inner] = []
        self._aborted = False
        self._lock = threading.Lock()

        def begun(part: Inner) -> None:
            with self._lock:
                self._parts.append(part)
                aborted, first = self._aborted, len(self._parts) == 1
            if aborted:
                raise TransientError("the group was stopped while it was built")
            if first:
                on_begin(self)

        try:
            self.cpu = make_cpu(begun)
            self.device = make_device(begun)
        except Exception:
            self.abort()
            raise
        self.patience = self.cpu.patience

    @property
    def group(self) -> Any:
        """gloo's: state travels between ranks through the host's memory."""
        return self.cpu.group

    def operation(self, name: str) -> Callable[..., Any]:
        def launch(*arguments: Any) -> Any:
            on_cpu = all(tensor.is_cpu for tensor in _tensors(arguments))
            return (self.cpu if on_cpu else self.device).operation(name)(*arguments)

        return launch

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            parts = list(self._parts)
        for part in reversed(parts):  # nccl first: what it marks as unclean must not pass gloo
            part.abort()

    def retire(self) -> None:
        for part in self._parts:
            part.retire()

    def silent(self) -> bool:
        return all(part.silent() for part in self._parts)

    def asleep(self, seconds: float) -> bool:
        return all(part.asleep(seconds) for part in self._parts)

    def destroy(self) -> None:
        for part in reversed(self._parts):
            part.destroy()


def _tensors(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    found = (item for argument in arguments for item in tensors_of(argument))
    return [item for item in found if isinstance(item, torch.Tensor)]


def _be_asynchronous(arguments: tuple[Any, ...]) -> None:
    options = arguments[-1]
    if hasattr(options, "asyncOp"):
        options.asyncOp = True


def _words(error: Any, name: str) -> str:
    if error == c10d.ErrorType.TIMEOUT:
        return f"a collective of nccl group {name} timed out"
    return f"nccl group {name} lost a peer: connection closed ({error.name})"
