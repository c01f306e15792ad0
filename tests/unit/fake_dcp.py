"""torch's distributed checkpoint with all ranks in one process, one after the other.

The calls are those of `dcp.save` and `dcp.load`, in their order; what travels by collectives is
handed over. Meshes know their rank without a process group, so DTensors can be of any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from everstep.tiers.dcp import TieredWriter
from everstep.tiers.resharding import TieredReader
from everstep.tiers.saver import Saver
from everstep.tiers.settings import TierSettings
from everstep.tiers.stack import Stack


class Writer(TieredWriter):
    """The writer of one of several ranks in this process, with a saver of its own."""

    def __init__(self, settings: TierSettings, stack: Stack | None = None, **more: Any) -> None:
        super().__init__(settings, **more)
        self.own = Saver(stack or Stack(settings, {}))

    @property
    def saver(self) -> Saver:
        return self.own


def mesh_of(rank: int, shape: Sequence[int]) -> DeviceMesh:
    """A mesh of that shape, as `rank` sees it."""
    ranks = torch.arange(torch.Size(shape).numel()).view(tuple(shape))
    names = tuple(f"dim{i}" for i in range(len(shape)))
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def shard_of(
    whole: torch.Tensor, rank: int, shape: Sequence[int], placements: Sequence[Placement]
) -> DTensor:
    """Rank's part of `whole` on a mesh of that shape."""
    mesh = mesh_of(rank, shape)
    size, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    local = whole
    for dim, (start, length) in enumerate(zip(offset, size, strict=True)):
        local = local.narrow(dim, min(start, local.shape[dim]), length)
    return DTensor.from_local(
        local.clone(),
        mesh,
        list(placements),
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def save(
    states: Sequence[dict[str, Any]],
    writers: Sequence[TieredWriter],
    step: int,
    planners: Sequence[SavePlanner] | None = None,
) -> None:
    """`dcp.save` of all ranks. What a rank raises ends it, as there."""
    planners = planners or [DefaultSavePlanner() for _ in states]
    plans = []
    for rank, (state, writer, planner) in enumerate(zip(states, writers, planners, strict=True)):
        writer.reset(step)
        planner.set_up_planner(state, None, rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results, error = [], None
    for plan, writer, planner in zip(plans, writers, planners, strict=True):
        try:
            results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
        except Exception as raised:  # noqa: BLE001 - raised when all ranks had their turn
            error = error or raised
    if error is not None:
        raise error
    writers[0].finish(metadata, results)


def load(
    states: Sequence[dict[str, Any]],
    settings: TierSettings,
    planners: Sequence[LoadPlanner] | None = None,
    **which: Any,
) -> list[TieredReader]:
    """`dcp.load` of all ranks, into their states."""
    planners = planners or [DefaultLoadPlanner() for _ in states]
    readers = [TieredReader(settings, **which) for _ in states]
    try:
        plans = []
        for rank, (state, reader, planner) in enumerate(
            zip(states, readers, planners, strict=True)
        ):
            metadata = reader.read_metadata()
            planner.set_up_planner(state, metadata, rank == 0)
            reader.set_up_storage_reader(metadata, rank == 0)
            plans.append(reader.prepare_local_plan(planner.create_local_plan()))
        plans = readers[0].prepare_global_plan(planners[0].create_global_plan(plans))
        for plan, reader, planner in zip(plans, readers, planners, strict=True):
            reader.read_data(planner.finish_plan(plan), planner)
    finally:
        for reader in readers:
            reader.close()
    return readers
