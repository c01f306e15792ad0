"""Ways to write a step that a recovery could get wrong; each was found by an attack.

`everstep run kinds.py CASE`: a case that can't be protected is refused, the others must be exact.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep

case = sys.argv[1]
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 10
torch.set_num_threads(1)
run = everstep.init()
torch.manual_seed(7 + run.rank)


class Extra(nn.Linear):
    """A layer with state outside its tensors."""

    calls = 0

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class LateBuffer(nn.Module):
    """A buffer, each rank's own, that starts to change in step 5."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))  # each rank's own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if case == "late-buffer" and run.committed >= 4:
            self.total += x.mean().detach()
        return x


first: nn.Linear = Extra(6, 16) if case == "extra" else nn.Linear(6, 16)
net = nn.Sequential(first, LateBuffer(), nn.Tanh(), nn.Linear(16, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
second = torch.optim.SGD(net[3].parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
run.data(lambda step, rank, world: (torch.randn(5, 6), torch.randn(5, 1)))
things: dict[str, Any] = {"model": model, "optimizer": optimizer}
if case != "unprotected":
    things["second"] = second
if case == "scaler":
    things["scaler"] = scaler
if case == "scheduler-forgotten":
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
if case == "body-schedule":
    things["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
run.protect(**things)


def loss_of(x: torch.Tensor, y: torch.Tensor) -> Any:
    return (model(x) - y).square().mean()


@run.step
def train_step(*batch: Any) -> Any:
    x, y = batch if case == "unpacked" else batch[0]
    step = run.committed + 1
    if case == "unpacked":
        x.mul_(0.5)
    if case == "param-later" and step >= 5:
        with torch.no_grad():
            first.weight.mul_(0.99)
    if case == "frozen":
        net[3].requires_grad_(True)
    if case == "param-before":
        with torch.no_grad():
            first.weight.mul_(0.99)
    if case == "no-sync" and step % 3:
        with model.no_sync():
            loss = loss_of(x, y)
            loss.backward()
        return loss.detach()
    if case == "closure" and step > 3:
        optimizer.step(lambda: loss_of(x, y).backward())
        return None
    loss = loss_of(x, y)
    if case == "scaler":
        scaled: Any = scaler.scale(loss)
        scaled.backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()
    run.log(loss=float(loss.detach()))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if isinstance(first, Extra):
        first.calls += 1
    if case == "frozen":  # the rest alone, once more
        optimizer.zero_grad()
        net[3].requires_grad_(False)
        again: Any = (net(x) - y).square().mean()
        again.backward()
        torch.distributed.all_reduce(first.weight.grad)
        torch.distributed.all_reduce(first.bias.grad)
        second.step()
        optimizer.step()
    if case in ("second-later", "unprotected") and step >= 4:
        optimizer.zero_grad()
        loss_of(x, y).backward()
        second.step()
    optimizer.zero_grad()
    if case == "state-late":
        run.state["n"] = run.state.get("n", 0) + 1
    if case == "nothing":
        return None
    if case == "exit" and step == 4:
        sys.exit(0)
    return (
        {"loss": loss.detach(), "norm": norm} if case in ("norm", "param-later") else loss.detach()
    )


if case == "two-loops":
    for batch in run.batches(until=3):
        train_step(batch)
for batch in run.batches(until=steps):
    out = train_step(*batch) if case == "unpacked" else train_step(batch)
    if case == "body-schedule":
        things["scheduler"].step()
    run.state["seen"] = run.state.get("seen", 0) + 1
print(f"rank {run.rank}: {dict(run.state)}")
