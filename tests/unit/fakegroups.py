"""A c10d world of one process for tests, over fake inner groups that are driven by hand."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from everstep.worker.communicators import Communicators
from everstep.worker.groups import BACKEND, OuterGroup, register

PATIENCE = datetime.timedelta(seconds=77)


class FakeWork:
    """An inner Work that ends when the test says so. Without a future: like gloo's sends."""

    def __init__(self, *, has_future: bool = True) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self._has_future = has_future
        self.asked = 0
        self._ended = threading.Event()
        self._error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._ended.set()
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)

    def get_future(self) -> torch.futures.Future[Any]:
        self.asked += 1
        if not self._has_future:
            raise RuntimeError("no future")
        return self.future

    def wait(self, timeout: datetime.timedelta) -> None:
        assert timeout == PATIENCE
        assert self._ended.wait(20)
        if self._error is not None:
            raise self._error

    def _source_rank(self) -> int:
        return 0


class FakeInner:
    """Counts what is done to it; each launched operation is a FakeWork in `works`."""

    patience = PATIENCE

    def __init__(self, group: OuterGroup | None = None, generation: int = 0) -> None:
        self.group, self.generation = group, generation
        self.works: list[FakeWork] = []
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.aborted = self.destroyed = 0
        self.on_launch: Callable[[], None] = lambda: None
        self.has_future = True
        self.is_silent = False
        self.is_asleep = True
        self._gone = threading.Event()

    def operation(self, name: str) -> Callable[..., FakeWork]:
        def launch(*arguments: Any) -> FakeWork:
            self.on_launch()
            self.calls.append((name, arguments))
            self.works.append(FakeWork(has_future=self.has_future))
            return self.works[-1]

        return launch

    def abort(self) -> None:
        self.aborted += 1

    def retire(self) -> None:
        self.abort()

    def silent(self) -> bool:
        return self.is_silent

    def asleep(self, seconds: float) -> bool:
        return self.is_asleep

    def destroy(self) -> None:
        self.destroyed += 1
        self._gone.set()

    def wait_gone(self) -> None:
        assert self._gone.wait(20)


class FakeWorld:
    """Communicators over fake inner groups; `made` has them in the order of their making."""

    def __init__(self, *, solo: bool = False, rank: int = 1, size: int = 3) -> None:
        self.made: list[FakeInner] = []
        self.faults: list[tuple[int, BaseException]] = []
        self.rank, self.size = rank, size
        self.communicators = Communicators(
            self.make,
            lambda generation, error: self.faults.append((generation, error)),
            generation=0,
            solo=solo,
        )

    def make(self, group: OuterGroup, generation: int) -> FakeInner:
        inner = FakeInner(group, generation)
        self.made.append(inner)
        return inner

    def group(self, name: str = "world") -> OuterGroup:
        return OuterGroup(self.communicators, self.rank, self.size, name, tuple(range(self.size)))

    def regroup(self, generation: int) -> None:
        """What a recovery does to the communicators."""
        self.communicators.quiesce(20)
        self.communicators.rebuild(generation)


@contextmanager
def in_c10d(world: FakeWorld) -> Iterator[Communicators]:
    """The world as c10d's default group."""
    backend: Any = dist.Backend
    register(world.communicators)
    try:
        dist.init_process_group(BACKEND, store=HashStore(), rank=world.rank, world_size=world.size)
        yield world.communicators
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        backend._plugins.pop(BACKEND.upper())
        backend.backend_list.remove(BACKEND)
        backend.backend_type_map.pop(BACKEND)
        backend.backend_capability.pop(BACKEND)
        delattr(backend, BACKEND.upper())
