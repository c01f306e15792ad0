"""The same run without protection: for plain `python`, torchrun, and `EVERSTEP=off`.

Same methods, same batches, same keyed random streams, same numbering of steps; a failure ends the
process as it would without everstep."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from everstep.data.loader import BatchSource, make_source
from everstep.errors import UserError
from everstep.worker import rng

T = TypeVar("T")
_run: PlainRun | None = None


class PlainRun:
    """A run that nothing protects. See everstep.worker.run.Run for the methods."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device("cpu")
        self.committed = 0
        self.protected = False
        self.state: dict[str, Any] = {}
        self._source: BatchSource | None = None
        self._key = b""
        if not dist.is_initialized():
            if "RANK" in os.environ:
                dist.init_process_group("gloo")
            else:
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

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

    def step(self, function: Callable[..., T]) -> Callable[..., T]:
        def unprotected(*args: Any, **kwargs: Any) -> T:
            step = self.committed + 1
            rng.seed_all(self._key, step, "step")
            result = function(*args, **kwargs)
            self.committed = step
            rng.seed_all(self._key, step, "after")
            return result

        return unprotected

    def batches(self, *, until: int) -> Iterator[Any]:
        if self._source is None:
            raise UserError(
                "run.batches needs to know where batches come from; call run.data(...) first"
            )
        while self.committed < until:
            step = self.committed + 1
            rng.seed_all(self._key, step, "data")
            yield self._source.at(step).value
            if self.committed < step:
                raise UserError(f"the batch of step {step} was given to no step function")

    def once(self, function: Callable[[], T]) -> T:
        return function()

    def log(self, **scalars: float) -> None:
        return None


def plain_run() -> PlainRun:
    """The unprotected run of this process; says once, on rank 0, that it is one, if
    everstep's launcher has not."""
    global _run
    if _run is None:
        _run = PlainRun()
        # `EVERSTEP=off everstep run` has said so itself.
        told = os.environ.get("EVERSTEP") == "off" and "EVERSTEP_RUN_ID" in os.environ
        if _run.rank == 0 and not told:
            print("everstep: not under `everstep run`: this run is not protected", file=sys.stderr)
    return _run
