"""The same run without protection: for plain `python`, torchrun, and `EVERSTEP=off`.

Same methods, same batches, same keyed random streams, same numbering of steps; a failure ends the
process as it would without everstep."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from everstep.data.loader import BatchSource, make_source
from everstep.errors import UserError
from everstep.worker import devices, rng
from everstep.worker.mean import mean_over_ranks
from everstep.worker.place import Place

T = TypeVar("T")
_run: PlainRun | None = None


class PlainRun:
    """A run that nothing protects. See everstep.worker.run.Run for the methods."""

    def __init__(self, *, carry: bool = False) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = devices.unprotected(self.local_rank)
        self.committed = 0
        self.protected = False
        self.state: dict[str, Any] = {}
        self._source: BatchSource | None = None
        self._key = b""
        self._carry = carry
        self._place = Place()
        if not dist.is_initialized():
            if "RANK" in os.environ:
                on_cpu = self.device == devices.CPU
                dist.init_process_group("gloo" if on_cpu else "cpu:gloo,cuda:nccl")
            else:
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            if self.device == devices.CPU:
                # gloo's threads that still run at the interpreter's end may abort it.
                atexit.register(_leave_groups)

    def data(
        self, source: Any, *, batch_size: int | None = None, seed: int = 0, collate: Any = None
    ) -> BatchSource:
        self._source = make_source(
            source,
            batch_size=batch_size,
            seed=seed,
            rank=self.rank,
            world_size=self.world_size,
            collate=collate,
        )
        return self._source

    def protect(self, **_things: Any) -> None:
        self._key = rng.make_key()

    def checkpoint(self, destination: str = "", **_settings: Any) -> None:
        if self.rank == 0:
            print(
                f"everstep: this run is not protected, and keeps no checkpoints in "
                f"{destination or 'memory'}: use everstep.tiers.TieredWriter with dcp.save",
                file=sys.stderr,
            )

    def step(self, function: Any = None, *, undo: bool = False) -> Any:
        if function is None:
            return functools.partial(self.step, undo=undo)

        @functools.wraps(function)
        def unprotected(*args: Any, **kwargs: Any) -> Any:
            self._seed(self.committed + 1, "step")
            result = function(*args, **kwargs)
            self.committed += 1
            self._place.next_step()
            self._seed(self.committed, "after")
            return result

        return unprotected

    def section(
        self, function: Any = None, *, ranks: Sequence[int] | None = None, undo: bool = False
    ) -> Any:
        if function is None:
            return functools.partial(self.section, ranks=ranks, undo=undo)

        @functools.wraps(function)
        def unprotected(*args: Any, **kwargs: Any) -> Any:
            if ranks is not None and self.rank not in ranks:
                return None
            place = self._place.name() if ranks is None else self._place.name_alone()
            self._place.called += ranks is None
            self._seed(self.committed, place)
            result = function(*args, **kwargs)
            self._seed(self.committed, f"after {place}")
            return result

        return unprotected

    def mean(self, value: Any, group: Any = None) -> Any:
        return mean_over_ranks(value, group)

    def _seed(self, step: int, moment: str) -> None:
        if not self._carry:
            rng.seed_all(self._key, step, moment)

    def _draw(self, step: int) -> Any:
        streams = rng.states() if self._carry else None
        rng.seed_all(self._key, step, "data")
        value = self._source.at(step).value  # type: ignore[union-attr]  # batches() has looked
        if streams is not None:
            rng.restore(streams)
        return value

    def batches(self, *, until: int) -> Iterator[Any]:
        if self._source is None:
            raise UserError(
                "run.batches needs to know where batches come from; call run.data(...) first"
            )
        while self.committed < until:
            step = self.committed + 1
            self._place.draw()
            yield self._draw(step)
            if self.committed < step:
                raise UserError(f"the batch of step {step} was given to no step function")

    def once(self, function: Callable[[], T]) -> T:
        return function()

    def log(self, **scalars: float) -> None:
        return None


def _leave_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def plain_run(streams: str = rng.KEYED) -> PlainRun:
    """The unprotected run of this process; says once, on rank 0, that it is one, if
    everstep's launcher has not. `streams`: how random streams are kept, at the first call."""
    global _run
    if _run is None:
        _run = PlainRun(carry=rng.carries(streams))
        # `EVERSTEP=off everstep run` has said so itself.
        told = os.environ.get("EVERSTEP") == "off" and "EVERSTEP_RUN_ID" in os.environ
        if _run.rank == 0 and not told:
            print("everstep: not under `everstep run`: this run is not protected", file=sys.stderr)
    return _run
