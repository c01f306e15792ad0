"""Steps that are not like each other; each kind was found by an attack on an earlier design.

`everstep run moods.py CASE`: what a replacement learns from one rehearsed step is not all there is.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep

case = sys.argv[1]
torch.set_num_threads(1)
run = everstep.init()
torch.manual_seed(5)


class Net(nn.Module):
    """Statistics that are each rank's own, and dropout."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 3)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if case == "sometimes" and run.committed % 3 == 0:
            self.seen.lerp_(x.detach().mean(0), 0.1)
        out: torch.Tensor = self.last(self.drop(torch.tanh(self.first(x + self.seen))))
        return out


net = Net()
model = DistributedDataParallel(net, broadcast_buffers=False, bucket_cap_mb=0.0005)
optimizer: torch.optim.Optimizer = torch.optim.SGD(
    net.first.parameters() if case in ("in-turn", "joins") else model.parameters(),
    lr=0.1,
    momentum=0.9 if case == "damped" else 0.0,
    fused=case == "scaler",
)
second = torch.optim.Adam(net.last.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=case == "scaler")
things: dict[str, Any] = {"scaler": scaler} if case == "scaler" else {}
if case in ("in-turn", "joins"):
    things["second"] = second
other = DistributedDataParallel(nn.Linear(8, 3))
if case == "rare":
    things |= {"other": other, "third": torch.optim.SGD(other.parameters(), lr=0.1)}
run.data(lambda step, rank, world: torch.randn(6, 8) + rank)
run.protect(model=model, optimizer=optimizer, **things)


@run.step
def train_step(x: Any) -> Any:
    if case == "checks":
        steps: list[Any] = [None] * run.world_size
        dist.all_gather_object(steps, run.committed)
        assert steps == [run.committed] * run.world_size, f"ranks are at different steps: {steps}"
    if case == "mode" and run.committed == 3:
        net.drop.eval()
    if case == "carried" and run.committed < 5:
        model.zero_grad()
    if case == "made":
        x.mul_(0.5)
    if case == "teacher":
        net.eval()  # and back, if nothing is raised between
        with torch.no_grad():
            x = x + model(x).mean()
        net.train()
    if case == "damped" and run.committed == 4:
        for entry in optimizer.state.values():
            entry["momentum_buffer"].mul_(0.5)
    loss = model(x).square().mean()
    if case == "rare" and run.committed % 5 == 0:
        loss = loss + other(x).square().mean()
    scaler.scale(loss).backward()
    if case in ("in-turn", "joins"):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.state["norm"] = float(norm)  # known only now: the job has a fence
    scaler.step(optimizer)
    scaler.update()
    if (case == "in-turn" and run.committed % 2) or (case == "joins" and run.committed >= 5):
        second.step()
    if case != "carried":
        model.zero_grad()
    return loss.detach()


for x in run.batches(until=10):
    train_step(x * 2 if case == "made" else x)
