"""Frequent asynchronous checkpoints with torch's distributed checkpoint (DCP), for contestants that
go back to one.

Rank 0 holds the whole state (DDP), so it alone writes, without collectives: that was as fast here
as all ranks writing a part each, and a save under way survives the death of a peer. The directory
is in memory (tmpfs), which is faster than any disk, and safe enough against the death of a process.
DCP writes `.metadata` last and renames it into place: a directory that has it is complete.

Does not know what calls it, nor anything of a failure."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from typing import Any

import torch
from benchmarks.peers.workload import DIRECTORY
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

EVERY_STEPS = 2
"""A checkpoint after so many steps. One takes about the time of a step in the background, so more
often would make training wait."""

_PLACE = DIRECTORY / "checkpoints"
_KEPT = 2
_PLAIN_COPY = StagingOptions(  # what else it can do needs CUDA
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)


class Checkpoints:
    """Checkpoints of one model and optimizer. For rank 0, but for `load`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._stager = DefaultStager(_PLAIN_COPY)
        self._pending: Future[Any] | None = None

    def save(self, step: int) -> None:
        """Begin to save the state after `step`, where it is time. Blocks for a copy in memory, and
        for the save before it, if that is not done."""
        if step % EVERY_STEPS:
            return
        self.finish()
        saving = async_save(
            self._state(),
            checkpoint_id=_PLACE / str(step),
            no_dist=True,
            async_stager=self._stager,
        )
        assert isinstance(saving, Future)
        self._pending = saving
        for old in _complete()[:-_KEPT]:
            shutil.rmtree(_PLACE / str(old))

    def finish(self) -> None:
        """Wait for the save under way."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def load(self, step: int) -> None:
        """Take the state after `step` into the model and the optimizer. On all ranks."""
        state = self._state()
        load(state, checkpoint_id=_PLACE / str(step), no_dist=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def latest() -> int:
    """The step of the newest complete checkpoint, 0 without one."""
    return max(_complete(), default=0)


def _complete() -> list[int]:
    return sorted(int(path.parent.name) for path in _PLACE.glob("*/.metadata"))
