"""What can't be protected is refused by name, before anything is lost.

Each check raises UserError, and says what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from everstep.errors import UserError


def is_zero_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's ZeroRedundancyOptimizer. By name: its module is costly to import."""
    return "ZeroRedundancyOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}


def refuse_unsupported(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Optimizers that let the ranks' weights part between averages, and those that update inside
    the backward pass."""
    if "PostLocalSGDOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}:
        raise UserError(
            f"protect({name}=...): with PostLocalSGDOptimizer the ranks hold different weights "
            "between two averages, so no rank has a copy of another's; average in each step"
        )
    if getattr(optimizer, "_overlap_with_ddp", False):
        raise UserError(
            f"protect({name}=...): a ZeroRedundancyOptimizer with overlap_with_ddp=True updates "
            "inside the backward pass, before a failure there can be seen; leave it out"
        )


def refuse_unsupported_module(name: str, module: torch.nn.Module) -> None:
    """Wrappers whose state is not known here."""
    for part in module.modules():
        if "FullyShardedDataParallel" in {kind.__name__ for kind in type(part).__mro__}:
            raise UserError(
                f"protect({name}=...): FullyShardedDataParallel (FSDP1) is not supported; use "
                "torch.distributed.fsdp.fully_shard (FSDP2), which replaces it"
            )


def refuse_stateless(name: str, thing: Any) -> NoReturn:
    """What has no state to keep: say where it belongs."""
    if isinstance(thing, (DataLoader, Dataset, Sampler, Iterator)):
        instead = (
            "the order of the data is a function of the step here: make "
            f"{name} = run.data(dataset, batch_size=...), and protect that"
        )
    elif isinstance(thing, torch.Tensor):
        instead = (
            "put it into a module, as a buffer or as an nn.Parameter with requires_grad=False, "
            "and protect that"
        )
    else:
        instead = (
            "protect takes modules, optimizers, lists of them, and objects that have both; plain "
            "values that steer the script are kept in run.state"
        )
    raise UserError(
        f"protect({name}=...): a {type(thing).__name__} has no state_dict() and "
        f"load_state_dict(); {instead}"
    )


def refuse_lost_state(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Optimizer state that is not kept by parameter and name."""
    for name, optimizer in optimizers.items():
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for key, entry in optimizer.state.items():
            if id(key) not in own:
                raise UserError(
                    f"{name} keeps state under {key!r}, which is none of its parameters, so it "
                    "would be lost with a rank; keep it in param_groups, or by parameter"
                )
            for inner in entry:
                if not isinstance(inner, str) or "/" in inner or "#" in inner:
                    raise UserError(
                        f"{name} keeps state of a parameter under {inner!r}; only names without "
                        "'/' and '#' are kept"
                    )


def refuse_forgotten_scheduler(
    optimizers: Mapping[str, torch.optim.Optimizer], objects: Mapping[str, Any]
) -> None:
    """A scheduler that drives a protected optimizer and is not protected itself."""
    driven = {id(getattr(thing, "optimizer", None)) for thing in objects.values()}
    known = any(isinstance(thing, LRScheduler) for thing in objects.values())
    for name, optimizer in optimizers.items():
        scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        if scheduled and id(optimizer) not in driven and not known:
            raise UserError(
                f"{name} has a learning-rate scheduler that is not protected: a replacement would "
                "begin its schedule anew; name it in run.protect(..., scheduler=...)"
            )


class ExtraState:
    """A module's `get_extra_state`, as an object with a state."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """The extra state, in a dictionary."""
        return {"extra": self._module.get_extra_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give it back."""
        self._module.set_extra_state(state["extra"])


def extra_states(prefix: str, module: torch.nn.Module) -> dict[str, ExtraState]:
    """The modules below `module` that have extra state, by name."""
    base = torch.nn.Module.get_extra_state
    return {
        f"{prefix}/{name}".rstrip("/"): ExtraState(part)
        for name, part in module.named_modules()
        if type(part).get_extra_state is not base
    }
