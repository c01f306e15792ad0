"""Trains in one world after the other, each from the checkpoint of the one before:
`elastic.py FOLDER WORLD...`, sharded by FSDP2, and in a grid (replicas x shards x tensor parallel).

Each world is made of forks of this process. What a world ended with is written down whole, and the
next one must find it, bit for bit."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from everstep.tiers import TieredWriter, TierSettings, load_newest
from everstep.tiers.find import NoneThere

folder = Path(sys.argv[1])
worlds = [int(text) for text in sys.argv[2:]]
GRIDS = {8: (2, 2, 2), 4: (2, 1, 2), 3: (1, 3, 1), 2: (1, 1, 2), 1: (1, 1, 1)}


class Net(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 7)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


def build(layout: str, world: int) -> Any:
    torch.manual_seed(1)
    net = Net()
    if layout == "fsdp":
        return fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    mesh = init_device_mesh("cpu", GRIDS[world], mesh_dim_names=("replicate", "shard", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(net, mesh["tensor"], plan)
    return fully_shard(net, mesh=mesh["replicate", "shard"])


def whole(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if hasattr(tree, "full_tensor"):
        return tree.full_tensor().clone()
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def train_all(rank: int, world: int, turn: int) -> None:
    store = FileStore(str(folder / f"meet-{turn}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for layout in ("fsdp", "grid"):
        train(layout, rank, world, turn)
    dist.barrier()
    dist.destroy_process_group()


def train(layout: str, rank: int, world: int, turn: int) -> None:
    settings = TierSettings(series=layout, destination=str(folder / "tier"), durable_every=1)
    model = build(layout, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    writer = TieredWriter(settings)

    def state() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "turn": turn}

    try:
        target = state() | {"turn": 0}
        receipt = load_newest(target, settings)
    except NoneThere:
        assert turn == 1
    else:
        assert (receipt.step, target["turn"]) == (turn - 1, turn - 1)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=target["model"],
            optim_state_dict=target["optimizer"],
        )
        found = whole({key: value for key, value in state().items() if key != "turn"})
        assert same(found, torch.load(folder / f"{layout}-{turn - 1}", weights_only=True))
    torch.manual_seed(turn)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    dcp_save(state(), storage_writer=writer, checkpoint_id=str(turn))
    ended = whole({key: value for key, value in state().items() if key != "turn"})
    if rank == 0:
        torch.save(ended, folder / f"{layout}-{turn}")
    writer.close()


def in_children(count: int, work: Callable[[int], None]) -> None:
    """Run `work(rank)` in so many forks; SystemExit if one fails."""
    pids = []
    for rank in range(count):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                work(rank)
                code = 0
            except BaseException:  # noqa: BLE001 - a fork must not come to its parent's end
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    if failed:
        sys.exit(f"{len(failed)} of {count} ranks failed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for turn, world in enumerate(worlds, 1):
        in_children(world, lambda rank: train_all(rank, world, turn))  # noqa: B023 - called at once
    print(f"{len(worlds)} worlds, each from the one before")
