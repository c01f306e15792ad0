"""A small job whose ranks write down, each on its own host, what every step returned.

So it can be told afterwards who has committed what, also on a side that nobody hears any more. A
line is the step, its loss, and a number in which every bit of the weights has a part. Steps take
`--pace` seconds, and the last ones longer, until the file `--hurry` is there."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import everstep

LAST, LAST_PACE_S = 20, 3.0  # steps, which are slow: on a busy machine all takes longer
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--pace", type=float, default=0.0)
parser.add_argument("--hurry", type=Path, default=Path("/nowhere"))
parser.add_argument("--shards", type=int, default=1, help="ranks over which the model is spread")
args = parser.parse_args()

torch.set_num_threads(1)
run = everstep.init()
torch.manual_seed(5)
net: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
model: Any
if args.shards > 1:
    shape = (run.world_size // args.shards, args.shards)
    model = fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")))
else:
    model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def batch_at(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


run.protect(model=model, optimizer=optimizer, data=run.data(batch_at))


def checksum() -> int:
    """Of all bits of this rank's weights."""
    parts = (getattr(p, "to_local", lambda p=p: p)() for p in model.parameters())
    return sum(int(part.detach().view(torch.int32).sum()) for part in parts)


@run.step
def train_step(batch: Any) -> torch.Tensor:
    x, y = batch
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def keep_pace() -> None:
    early = run.committed < args.steps - LAST
    end_s = time.monotonic() + (args.pace if early else LAST_PACE_S)
    while args.pace and time.monotonic() < end_s and not args.hurry.exists():
        time.sleep(min(args.pace, 0.05))


path = Path(os.environ["WITNESS"], f"{run.rank}.{os.environ['EVERSTEP_INCARNATION']}")
with path.open("a", buffering=1) as witness:
    for batch in run.batches(until=args.steps):
        loss = float(train_step(batch))
        print(run.committed, loss.hex(), checksum(), file=witness)
        keep_pace()
