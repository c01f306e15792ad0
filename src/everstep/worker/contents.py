"""What a checkpoint of a run holds: the protected state, under the names that torch gives it.

Theory of operation. A module's tensors stand under its name as its `state_dict` has them, an
optimizer's under its own as `torch.distributed.checkpoint.state_dict` has them: by the parameter's
name, not by its number. So `dcp.load` into a model and an optimizer without everstep finds what it
looks for, at any world size. What makes the run go on exactly where it was stands beside them,
under `everstep`: what steers the updates, and what belongs to each rank alone.

Reading makes nothing: the state is taken as it is, without a copy.

It does not know when a checkpoint is made (`saves.py`), nor how it is put back (`restoring.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from everstep.worker import codec
from everstep.worker.kept import own_buffers
from everstep.worker.runtime import Worker
from everstep.worker.state import State

OWN = "everstep"
GRADIENTS = "everstep.grads"
_DDP = "module."


class RankOnly(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs to one rank. `values`: codec bytes of `run.state`; `local`: of the objects of
    `protect(local=...)`; `streams`: the generators' states where they are carried; `buffers`: codec
    bytes of those that no replica holds alike; `log`: what was logged since the last commit."""

    rng_key: bytes
    values: bytes
    local: dict[str, bytes]
    streams: bytes | None
    buffers: dict[str, bytes]
    log: dict[int, dict[str, float]] = {}


def pack(worker: Worker, *, gradients: bool) -> dict[str, Any]:
    """What is given to `dcp.save`: nested dicts of the tensors themselves, and plain data.
    `gradients`: the script carries them from step to step."""
    state = worker.state
    assert state is not None
    packed: dict[str, Any] = {}
    for path, tensor in _tensors(state, gradients=gradients):
        _put(packed, path, tensor)
    names = _names(state)
    for name, optimizer in state.optimizers.items():
        _put(
            packed,
            (_top(state, name), "param_groups"),
            [
                {k: v for k, v in group.items() if k != "params"}
                | {"params": [names.get(id(p), "") for p in group["params"]]}
                for group in optimizer.param_groups
            ],
        )
    packed[OWN] = {
        "world": worker.spec.world_size,
        "step": worker.committed,
        "leaves": state.leaves().values,
        "modes": state.modes(),
        "carried": worker.carry,
        "position": _position(worker),
        "far": [
            ".".join(path)
            for path, _, tensor, parameter in _optimized(state)
            if tensor.device != parameter.device
        ],
        "rank": {str(worker.spec.rank): msgspec.msgpack.encode(_rank_only(worker, state))},
    }
    return packed


def tensor_keys(state: State, *, gradients: bool = False) -> dict[str, str]:
    """Names of a checkpoint's tensors, as DCP flattens them, with those that `State.replicas` gives
    them. A tensor of several names has one there."""
    found = {}
    known = {id(tensor): name for name, tensor in [*state.parameters(), *state.buffers()]}
    for path, tensor in _module_tensors(state):
        found[".".join(path)] = known[id(tensor)]
    for path, name, _, _ in _optimized(state):
        found[".".join(path)] = name
    if gradients:
        for path, tensor in _gradients(state):
            found[".".join(path)] = f"{known[id(tensor)]}#grad"
    return found


def module_tops(state: State) -> set[str]:
    """The names under which modules stand in a checkpoint, as this rank has them."""
    return {path[0] for path, _ in _module_tensors(state)}


def optimizer_places(state: State) -> Iterator[tuple[str, torch.Tensor, tuple[str, ...]]]:
    """Of each parameter that an optimizer updates: its place in the state's names, itself, and
    under what a checkpoint may have the optimizer's tensors of it."""
    names = _names(state)
    for place, parameter in state.optimized():
        name = place.partition("/")[0]
        tops = dict.fromkeys((name, _top(state, name)))
        yield place, parameter, tuple(f"{top}.state.{names[id(parameter)]}" for top in tops)


def gradient_places(state: State) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Of each parameter: its name in the state, itself, and where a checkpoint has its gradient."""
    for name, parameter in state.parameters():
        prefix, _, rest = name.partition("/")
        path = GRADIENTS, _top(state, prefix, parameter), _plain(rest)
        yield name, parameter, ".".join(path)


def rank_only(data: bytes) -> RankOnly:
    """A rank's own, from a checkpoint. Raises msgspec.ValidationError for other bytes."""
    return msgspec.msgpack.decode(data, type=RankOnly)


def _position(worker: Worker) -> int | None:
    """Samples that all ranks together have taken, where the source counts them."""
    count = getattr(worker.source, "position", None)
    return count(worker.committed) if count is not None else None


def _rank_only(worker: Worker, state: State) -> RankOnly:
    return RankOnly(
        rng_key=worker.rng_key,
        values=codec.encode(worker.values, "run.state"),
        local=state.own.values(),
        streams=worker.streams(),
        buffers={name: codec.encode(buffer, name) for name, buffer in own_buffers(state)},
        log=worker.log,
    )


def _tensors(state: State, *, gradients: bool) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    yield from _module_tensors(state)
    for path, _, tensor, _ in _optimized(state):
        yield path, tensor
    if gradients:
        for path, parameter in _gradients(state):
            assert parameter.grad is not None
            yield path, parameter.grad


def _module_tensors(state: State) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """All parameters and buffers, under all their names."""
    stored = dict(state.parameters())
    first = {id(tensor): name for name, tensor in stored.items()}
    for prefix, module in state.modules.items():
        for name, tensor in module.named_parameters(remove_duplicate=False):
            # FSDP2 puts other tensors there while they are gathered: these have one name.
            known = first.get(id(tensor), f"{prefix}/{name}")
            if known in stored:
                yield (_top(state, prefix, stored[known]), _plain(name)), stored[known]
        for name, buffer in module.named_buffers(remove_duplicate=False):
            yield (_top(state, prefix, buffer), _plain(name)), buffer


def _optimized(
    state: State,
) -> Iterator[tuple[tuple[str, ...], str, torch.Tensor, torch.Tensor]]:
    """Path, name in the state, tensor and parameter of each tensor in the optimizers' state."""
    names = _names(state)
    for name, tensor, parameter in state.optimizer_tensors():
        prefix, _, rest = name.partition("/")
        key = rest.rpartition("/")[2]
        path = _top(state, prefix, tensor), "state", names[id(parameter)], key
        yield path, name, tensor, parameter


def _gradients(state: State) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    for name, parameter in state.parameters():
        if parameter.grad is not None:
            prefix, _, rest = name.partition("/")
            yield (GRADIENTS, _top(state, prefix, parameter), _plain(rest)), parameter


def _names(state: State) -> dict[int, str]:
    """What parameters are called in optimizers' states: as in their module; with the module's name
    before it where there are several."""
    several = len(state.modules) > 1
    found = {}
    for name, parameter in state.parameters():
        prefix, _, rest = name.partition("/")
        found[id(parameter)] = f"{prefix}.{_plain(rest)}" if several else _plain(rest)
    return found


def _plain(name: str) -> str:
    """A tensor's name as it is without the wrapper."""
    return name.removeprefix(_DDP)


def _top(state: State, name: str, tensor: torch.Tensor | None = None) -> str:
    """A protected thing's name in the checkpoint. Where the script says who holds the same, others
    hold something else under the same name; but for a DTensor, which knows of the others."""
    if state.said is None or hasattr(tensor, "device_mesh"):
        return name
    return f"{name}@{'-'.join(map(str, state.said))}"


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
