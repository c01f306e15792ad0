"""A job whose set-up is told things by peers: `everstep run told.py CASE FOLDER`.

Each process has a number, how often its rank was started before: what a replacement computes for
itself differs from what its predecessor told and was told."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("case")
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()
torch.set_num_threads(1)
run = everstep.init()
rank, world = run.rank, run.world_size
torch.manual_seed(5)

with open(args.folder / f"starts-{rank}", "ab") as file:
    starts = os.fstat(file.fileno()).st_size
    file.write(b".")


class Net(nn.Module):
    """Two branches, whose gradients come in another order on each rank if `mixed`."""

    table: torch.Tensor

    def __init__(self, wide: int, table: torch.Tensor | None, mixed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, wide), nn.Linear(6, 3)
        self.last = nn.Linear(wide, 3)
        self.mixed = mixed
        self.register_buffer("table", torch.zeros(1) if table is None else table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mixed and rank % 2:
            return self.second(x) + self.last(torch.relu(self.first(x)))  # type: ignore[no-any-return]
        return self.last(torch.relu(self.first(x))) + self.second(x)  # type: ignore[no-any-return]


def small_things() -> float:
    """Everything a rank is told, each by another collective, as one number."""
    config: list[Any] = [{"rate": 0.5, "name": "told"} if rank == 0 else None]
    dist.broadcast_object_list(config, src=0)
    said: list[Any] = [None] * world
    dist.all_gather_object(said, {"rank": rank, "starts": "x" * starts})
    seed = torch.tensor([0.25 + starts if rank == 0 else 0.0])
    dist.broadcast(seed, src=0)
    mine = torch.zeros(2)
    rows = [torch.tensor([r, starts + 0.125]) for r in range(world)] if rank == 1 else None
    dist.scatter(mine, rows, src=1)
    total = torch.tensor([rank + 10.0 * starts])
    work = dist.all_reduce(total, async_op=True)
    assert work is not None
    work.wait()
    total /= 2  # what was told is kept as it came, not as the script made it
    ring = torch.zeros(1, dtype=torch.int64)
    if rank % 2 == 0:
        dist.send(torch.tensor([rank + 100 * starts]), (rank + 1) % world)
        dist.recv(ring, (rank - 1) % world)
    else:
        dist.recv(ring, (rank - 1) % world)
        dist.send(torch.tensor([rank + 100 * starts]), (rank + 1) % world)
    swapped = torch.zeros(world)
    dist.all_to_all_single(swapped, torch.full((world,), rank + 7.0 * starts))
    parts = [float(seed), float(mine.sum()), float(total), float(ring), float(swapped.sum())]
    parts += [len(said[r]["starts"]) + said[r]["rank"] for r in range(world)]
    return float(config[0]["rate"]) * sum(parts)


factor, table, wide = 1.0, None, 4
if args.case in ("small", "order"):
    factor = 1.0 + small_things() / 64
elif args.case == "large":
    numbers = torch.full((300_000,), 1.0 + starts if rank == 0 else 0.0)
    dist.broadcast(numbers, src=0)
    factor = float(numbers.mean())
elif args.case == "table":  # large, and protected as a buffer
    table = torch.full((300_000,), 1.0 + starts if rank == 0 else 0.0)
    dist.broadcast(table, src=0)
elif args.case == "wide":  # large, and DDP's own
    wide = 50_000
elif args.case == "own":  # rank 0 keeps the object that it made
    config: list[Any] = [{"starts": starts} if rank == 0 else None]
    dist.broadcast_object_list(config, src=0)

net = Net(wide, table, args.case == "order")
model = DistributedDataParallel(net, bucket_cap_mb=1e-5 if args.case == "order" else 25)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch_at(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)


run.data(batch_at)
run.protect(model=model, optimizer=optimizer)


@run.step
def train_step(batch: Any) -> torch.Tensor:
    x, y = batch
    loss = factor * nn.functional.cross_entropy(model(x), y) + net.table[0]
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


for batch in run.batches(until=args.steps):
    loss = train_step(batch)
    run.log(loss=float(loss))
