"""Prints, as JSON, the shard keys of all ranks of a world of eight for several models. Each rank is
a process of its own, forked from one that has only imported: DTensor's caches outlive a group."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.worker.shards import shard_key

WORLD = 8
fork = multiprocessing.get_context("fork")
Case = Callable[[], tuple[Any, Any]]


def mesh(*shape: int, names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def three_dimensions() -> tuple[Any, Any]:
    whole = mesh(2, 2, 2, names=("replicate", "shard", "tp"))
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(distribute_tensor(model.weight, whole["tp"], [Shard(0)]))
    model.bias = nn.Parameter(distribute_tensor(model.bias, whole["tp"], [Replicate()]))
    return fully_shard(model, mesh=whole["replicate", "shard"]), None


def ddp_over_pairs() -> tuple[Any, Any]:
    pairs = mesh(4, 2, names=("stage", "dp"))["dp"]
    return DistributedDataParallel(nn.Linear(4, 4), process_group=pairs.get_group()), None


CASES: dict[str, Case] = {
    "plain": lambda: (nn.Linear(4, 4), None),
    "ddp": lambda: (DistributedDataParallel(nn.Linear(4, 4)), None),
    "full": lambda: (fully_shard(nn.Linear(8, 8), mesh=mesh(8, names=("shard",))), None),
    "uneven": lambda: (fully_shard(nn.Linear(8, 5), mesh=mesh(8, names=("shard",))), None),
    "replicated": lambda: (
        fully_shard(nn.Linear(8, 8), mesh=mesh(2, 4, names=("replicate", "shard"))),
        None,
    ),
    "three": three_dimensions,
    "pairs": ddp_over_pairs,
    "said-mesh": lambda: (nn.Linear(4, 4), mesh(2, 4, names=("dp", "ep"))["dp"]),
    "said-group": lambda: (nn.Linear(4, 4), mesh(4, 2, names=("a", "b"))["b"].get_group()),
}


def keys_of(rank: int) -> dict[str, str]:
    found = {}
    for name, case in CASES.items():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        model, said = case()
        found[name] = shard_key({"m": model}, {}, said, rank=rank, world_size=WORLD)
        dist.destroy_process_group()
    return found


def main() -> None:
    by_rank = []
    for rank in range(WORLD):
        here, there = fork.Pipe(duplex=False)
        child = fork.Process(target=lambda: there.send(keys_of(rank)))  # noqa: B023
        child.start()
        there.close()
        by_rank.append(here.recv())
        child.join()
    print(json.dumps({name: [keys[name] for keys in by_rank] for name in CASES}))


if __name__ == "__main__":
    main()
