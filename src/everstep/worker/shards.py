"""Which part of the state this rank holds, and so which ranks are its replicas.

Theory of operation. Two ranks are replicas if every protected tensor is the same piece on both.
For each parameter that is worked out from what the wrappers say, never from its values: a DTensor's
mesh and placements give the piece of the global tensor that is stored here, and the ranks over
which it is spread; a DistributedDataParallel gives the ranks that hold the same; anything else is
taken to be alike on the whole world. All pieces together make the *shard key*: ranks with equal
keys are replicas. What no wrapper says (stages of a pipeline, experts by hand) the script says, by
`protect(..., replicas=...)`. Keys are checked against the values' digests when set-up ends, and
again after the first step (transaction.py): a wrong key is refused, never trained on.

Does not know: who is alive, what travels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

from everstep.core.words import name_ranks
from everstep.errors import UserError
from everstep.worker.checks import is_zero_optimizer

WHOLE = "all"
"""The key where every rank holds the whole state."""


def shard_key(
    modules: dict[str, torch.nn.Module],
    optimizers: dict[str, torch.optim.Optimizer],
    replicas: Any,
    *,
    rank: int,
    world_size: int,
) -> str:
    """The key of what this rank holds: words for people, then a digest.

    `replicas`: what the script says of it, or None: a process group, a one-dimensional DeviceMesh,
    or global ranks, of those that hold the same as this rank. Raises UserError if this rank is not
    among them."""
    world = tuple(range(world_size))
    said = said_ranks(replicas, rank)
    pieces: list[tuple[Any, ...]] = [] if said is None else [("replicas", said)]
    places: dict[str, int] = {}
    for prefix, module in modules.items():
        by_wrapper = _ranks_by_wrapper(module)
        for name, parameter in module.named_parameters():
            ranks, piece = _piece(parameter, world, places)
            ranks = said or by_wrapper.get(id(parameter), ranks)
            if piece or ranks != world:
                pieces.append((f"{prefix}/{name}", ranks, piece))
    for name, optimizer in optimizers.items():
        if is_zero_optimizer(optimizer):
            places[f"part of {name}"] = optimizer.rank  # type: ignore[attr-defined]
            pieces.append((name, "zero", optimizer.rank))  # type: ignore[attr-defined]
    if not pieces:
        return WHOLE
    words = [f"{name} {place}" for name, place in places.items()]
    if said is not None or not places:
        words.append(f"of {name_ranks(said or pieces[0][1])}")
    digest = xxhash.xxh3_64_hexdigest(repr(pieces).encode())[:8]
    return f"{', '.join(words)} ({digest})"


def said_ranks(replicas: Any, rank: int) -> tuple[int, ...] | None:
    """The ranks of `protect(replicas=...)`; None where it says nothing. Raises UserError."""
    if replicas is None:
        return None
    ranks = _ranks_of(replicas)
    if rank not in ranks:
        raise UserError(
            f"protect(replicas=...): rank {rank} is not among the ranks {list(ranks)} that are "
            "said to hold the same as it; pass the group that this rank is in"
        )
    return ranks


def _ranks_of(replicas: Any) -> tuple[int, ...]:
    if isinstance(replicas, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(replicas))
    mesh = getattr(replicas, "mesh", None)
    if isinstance(mesh, torch.Tensor):
        return tuple(int(rank) for rank in mesh.flatten())
    try:
        return tuple(sorted(int(rank) for rank in replicas))
    except TypeError:
        raise UserError(
            "protect(replicas=...) takes a process group, a DeviceMesh or a list of global ranks, "
            f"not a {type(replicas).__name__}"
        ) from None


def _ranks_by_wrapper(module: torch.nn.Module) -> dict[int, tuple[int, ...]]:
    """For parameters below a DistributedDataParallel: the ranks of its group, by identity."""
    found: dict[int, tuple[int, ...]] = {}
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            ranks = tuple(dist.get_process_group_ranks(part.process_group))
            for parameter in part.module.parameters():
                found.setdefault(id(parameter), ranks)
    return found


def _piece(
    tensor: Any, everybody: tuple[int, ...], places: dict[str, int]
) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Over which ranks a tensor is spread, and which piece of it is here; () for all of it. Where
    the rank stands on the mesh dimensions that cut it goes to `places`."""
    if not hasattr(tensor, "placements"):
        return everybody, ()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    ranks = tuple(sorted(int(rank) for rank in mesh.mesh.flatten()))
    if all(placement.is_replicate() for placement in placements):
        return ranks, ()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if 0 in shape and 0 not in tensor.shape:
        return ranks, ("none",)  # more ranks than rows: those without are alike
    coordinate = mesh.get_coordinate() or []
    names = mesh.mesh_dim_names or tuple(f"mesh dimension {d}" for d in range(mesh.ndim))
    for name, place, placement in zip(names, coordinate, placements, strict=False):
        if not placement.is_replicate():
            places[name] = place
    return ranks, (tuple(shape), tuple(offset))
