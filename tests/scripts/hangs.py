"""A small job in which rank 1 makes the others wait, in one of the ways that `--how` names, in step
`--at`, and in the incarnations given."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--how", required=True)
parser.add_argument("--at", type=int, default=5)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--incarnations", type=int, nargs="*", default=[1])
parser.add_argument("--pause", type=float, default=0.0, help="of every rank in every step, s")
args = parser.parse_args()

torch.set_num_threads(1)
run = everstep.init()
torch.manual_seed(7 + run.rank)


def batch_at(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8), torch.arange(4) % 3


model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = run.data(batch_at)
run.protect(model=model, optimizer=optimizer, data=data)
chosen = run.rank == 1 and int(os.environ["EVERSTEP_INCARNATION"]) in args.incarnations


def due(how: str) -> bool:
    return chosen and args.how == how and run.committed + 1 == args.at


@run.step
def train_step(batch):  # type: ignore[no-untyped-def]
    inputs, labels = batch
    if args.pause:
        time.sleep(args.pause)
    while due("loop"):
        pass
    if due("wait"):
        time.sleep(1e6)
    total = torch.ones(())
    if not due("skip"):
        dist.all_reduce(total)
    if due("other"):
        dist.all_gather([torch.zeros(3) for _ in range(run.world_size)], torch.zeros(3))
    loss = nn.functional.cross_entropy(model(inputs), labels) / total
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    while due("after"):
        pass
    return loss.detach()


for batch in run.batches(until=args.steps):
    if due("leave"):
        break
    while due("body"):
        pass
    loss = train_step(batch)
    run.log(loss=float(loss))
