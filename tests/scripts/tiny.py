"""A small job for the integration tests: every kind of state, steps of a few milliseconds.

Dropout draws from per-rank streams, BatchNorm has buffers that belong to one rank, the schedule
warms up, `run.state` steers, `run.log` logs. Options turn parts on."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--batchnorm", action="store_true")
parser.add_argument("--zero-first", action="store_true", help="zero_grad at the start of the step")
parser.add_argument(
    "--accumulate", type=int, default=1, help="update every N steps; gradients are carried"
)
parser.add_argument("--updates", type=int, default=1, help="optimizer updates a step")
parser.add_argument("--find-unused", action="store_true")
parser.add_argument("--ema", action="store_true", help="average the weights after the update")
parser.add_argument("--body-scheduler", action="store_true", help="step the schedule in the body")
parser.add_argument("--tail", action="store_true", help="an all-reduce after the update")
parser.add_argument("--item", action="store_true", help="return a number, not a tensor")
parser.add_argument("--opaque", action="store_true", help="return what no local variable holds")
parser.add_argument("--resources", action="store_true", help="log descriptors, threads and memory")
parser.add_argument("--linger", type=float, default=0.0, help="wait before the last step, s")
parser.add_argument("--fail-at", type=int, default=0, help="rank 1 raises in this step, always")
parser.add_argument("--sgd", action="store_true")
parser.add_argument("--function-data", action="store_true")
parser.add_argument("--checkpoint", help="a directory for checkpoints, every second step")
args = parser.parse_args()

torch.set_num_threads(1)
run = everstep.init()
torch.manual_seed(100 + run.rank)
random.seed(run.rank)


class Numbers:
    """A map-style dataset of 97 samples."""

    def __len__(self) -> int:
        return 97

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(12, generator=generator), index % 5


def batch_at(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 12), torch.arange(
        6
    ) % 5  # from the keyed stream: the same on a second attempt


norm = nn.BatchNorm1d(24) if args.batchnorm else nn.LayerNorm(24)
net = nn.Sequential(
    nn.Linear(12, 24),
    norm,
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(24, 24),
    nn.ReLU(),
    nn.Linear(24, 5),
)
model = DistributedDataParallel(net, find_unused_parameters=args.find_unused)
optimizer: torch.optim.Optimizer
if args.sgd:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
data = run.data(batch_at) if args.function_data else run.data(Numbers(), batch_size=6, seed=3)
things: dict[str, Any] = {
    "model": model,
    "optimizer": optimizer,
    "scheduler": scheduler,
    "data": data,
}
if args.ema:
    things["ema"] = torch.optim.swa_utils.AveragedModel(net, use_buffers=True)
run.protect(**things)
if args.checkpoint:
    run.checkpoint(args.checkpoint, durable_every=2, durable_retained=0, on_busy="wait")
started = run.once(lambda: random.random())


@run.step
def train_step(batch):  # type: ignore[no-untyped-def]
    inputs, labels = batch
    if args.zero_first:
        optimizer.zero_grad()
    inputs.add_(0.5)  # in place: a second attempt must get a fresh batch
    loss = nn.functional.cross_entropy(model(inputs), labels)
    if args.fail_at and run.rank == 1 and run.committed + 1 == args.fail_at:
        raise ValueError("a bug of the script")
    loss.backward()  # type: ignore[no-untyped-call]
    update = (run.committed + 1) % args.accumulate == 0
    if update:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for _ in range(args.updates - 1):
            optimizer.zero_grad()
            inputs2 = torch.randn(6, 12)
            nn.functional.cross_entropy(model(inputs2), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if not args.body_scheduler:
            scheduler.step()
        if args.ema:
            things["ema"].update_parameters(net)
        if not args.zero_first:
            optimizer.zero_grad()
    if args.tail:
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return total
    if args.item:
        return loss.item()
    if args.opaque:
        return {"twice": loss.detach() * 2}
    return loss.detach()


def resources() -> dict[str, float]:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    }


for batch in run.batches(until=args.steps):
    if args.linger and run.committed == args.steps - 1:
        time.sleep(args.linger)
    loss = train_step(batch)
    if args.body_scheduler:
        scheduler.step()
    run.state["sum"] = run.state.get("sum", 0.0) + (
        float(loss["twice"]) if args.opaque else float(loss)
    )
    run.log(sum=run.state["sum"], draw=random.random(), once=started)
    if args.resources:
        run.log(**resources())
print(f"rank {run.rank} done, {run.committed} steps", file=sys.stderr)
