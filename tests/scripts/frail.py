"""A job whose replacements die: at the moment named, in the incarnations named."""

from __future__ import annotations

import argparse
import os
import signal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--when", choices=["import", "setup", "rehearsal", "joined", "after", "never"])
parser.add_argument("--incarnations", type=int, nargs="*", default=[2])
args = parser.parse_args()
incarnation = int(os.environ["EVERSTEP_INCARNATION"])


def die(moment: str) -> None:
    if moment == args.when and incarnation in args.incarnations:
        os.kill(os.getpid(), signal.SIGKILL)


die("import")
torch.set_num_threads(1)
run = everstep.init()
torch.manual_seed(run.rank)
die("setup")
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.data(lambda step, rank, world: torch.full((4, 8), float(step + rank)))
run.protect(model=model, optimizer=optimizer)


calls = 0


@run.step
def train_step(batch: torch.Tensor) -> torch.Tensor:
    global calls
    calls += 1
    loss: torch.Tensor = model(batch).square().mean()
    if calls == 1:  # in a joiner it is the first rehearsal
        die("rehearsal")
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


for batch in run.batches(until=10):
    value = train_step(batch)
    die("joined")
    run.log(loss=float(value))
if run.rank == 1:
    die("after")
torch.distributed.destroy_process_group()
print(f"rank {run.rank} ends")
