"""Each rank puts what it has into the memory of its node, with a copy on another, and reads what
all have put. A node may be lost in between."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import everstep
from everstep.tiers.memory.client import connect

NBYTES = 2 << 20
torch.set_num_threads(1)
run = everstep.init()
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = run.data(lambda step, rank, world: torch.full((2,), float(step)))
run.protect(model=model, optimizer=optimizer, data=data)


@run.step
def train_step(batch: torch.Tensor) -> None:
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@run.section
def put() -> None:
    """All get to know one another, and put."""
    store = connect(copies=2)
    cards = [""] * run.world_size
    dist.all_gather_object(cards, store.card())
    store.introduce(cards)
    mine = bytes([run.rank]) * NBYTES
    store.put(f"run/{run.rank}", [memoryview(mine)], deadline_s=30)
    print("notes", store.notes(), flush=True)
    store.close()


@run.section
def get() -> None:
    store = connect(copies=2)
    cards = [""] * run.world_size
    dist.all_gather_object(cards, store.card())
    store.introduce(cards)
    for rank in range(run.world_size):
        assert store.get(f"run/{rank}", deadline_s=30) == bytes([rank]) * NBYTES
    print("all are there", flush=True)
    store.close()


for batch in run.batches(until=4):
    train_step(batch)
    if run.committed == 1:
        put()
    if run.committed == 3:
        get()
sys.exit(0)
