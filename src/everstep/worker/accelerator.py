"""The device that a worker trains on, and what everstep asks of it.

Theory of operation: kernels and copies are put on the calling thread's stream and run later; the
host learns that they have run from events. All that everstep itself puts on a stream goes through
`launch`, and all waiting through events, so that a fake device can hold work back for as long as a
test likes. A thread has a current device of its own (the first one of the machine, until it says
otherwise), so each thread of everstep's calls `enter` first: else it would make a context on a
device that is another rank's.

Does not know: communicators, poison, optimizers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

from everstep.errors import UserError


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the stream has come there. Does not block."""
        ...


class Lane(Protocol):
    """A stream of everstep's own, on which nothing runs: it only waits."""

    def behind(self, line_up: Callable[[], None]) -> Event:
        """The point behind all that `line_up` makes this stream wait for."""
        ...


class Accelerator(Protocol):
    """One device. Any thread, once it has called `enter`."""

    device: torch.device

    def enter(self) -> None:
        """Make this the calling thread's device."""
        ...

    def capturing(self) -> bool:
        """Whether the calling thread's stream is being captured into a graph."""
        ...

    def launch(self, kernels: Callable[[], object]) -> None:
        """Put what `kernels` launches on the calling thread's stream. Does not wait for it."""
        ...

    def here(self) -> Event:
        """The point that the calling thread's stream has been filled to."""
        ...

    def lane(self) -> Lane:
        """A new lane."""
        ...

    def host_cell(self, value: int) -> torch.Tensor:
        """One int32 in host memory that copies on a stream read and write when they run, not when
        they are launched."""
        ...

    def settle(self) -> None:
        """At a regroup: wait until all that was launched has run, so that other threads may read
        and write the state, and drop captured graphs. Main thread, when nothing hangs any more."""
        ...


class _CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def behind(self, line_up: Callable[[], None]) -> Event:
        with torch.cuda.stream(self._stream):
            line_up()
            return _recorded()


class Cuda:
    """A CUDA device."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    def enter(self) -> None:
        torch.cuda.set_device(self.device)

    def capturing(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    def launch(self, kernels: Callable[[], object]) -> None:
        kernels()

    def here(self) -> Event:
        return _recorded()

    def lane(self) -> Lane:
        return _CudaLane(self.device)

    def host_cell(self, value: int) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.int32, pin_memory=True)

    def settle(self) -> None:
        """Graphs of compiled code are captured anew at their next call. Those that a script
        captured itself hold no collective: that is refused when it is launched (nccl.py)."""
        torch.cuda.synchronize(self.device)
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is not None:
            trees.reset_cudagraph_trees()


def _recorded() -> Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def choose(wanted: str, *, devices: int, local_rank: int, local_size: int) -> int | None:
    """Which of this machine's `devices` CUDA devices the rank trains on; None for the CPU. All
    ranks of a machine choose alike. `wanted`: the setting, `auto`, `cpu` or `cuda`.

    nccl takes one rank on a device, no more, so with fewer devices than ranks `auto` is the CPU.
    Raises UserError where `cuda` was asked for and can't be had."""
    if wanted == "cpu" or (wanted == "auto" and devices < local_size):
        return None
    if devices < local_size:
        raise UserError(
            f"device = cuda: {local_size} ranks on this machine, and torch sees {devices} CUDA "
            "devices; nccl needs one for each rank. Start fewer workers, or set device = cpu"
        )
    return local_rank
