"""A job that believes it trains on devices: each is the CPU, whose work is done when it is
launched, and an abort marks the generation as nccl's group does. So its fused updates go by the
device's gate, under real faults.

`--deny STEP`: rank 2's device is told in that step that somebody did not come, though all did, as
when a stop aborts the fence on one rank after others have passed it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.worker import devices, foundinf, streams
from everstep.worker.inner import GlooInner

parser = argparse.ArgumentParser()
parser.add_argument("case", choices=["ddp", "hsdp", "zeroed", "scaler", "average"])
parser.add_argument("--deny", type=int, default=0)
args = parser.parse_args()


class Come:
    """An event of a device that is never behind."""

    def query(self) -> bool:
        return True


class Prompt:
    """A device on which all has run when its launch returns."""

    device = torch.device("cpu")

    def enter(self) -> None:
        pass

    def launch(self, kernels: Callable[[], object]) -> None:
        kernels()

    def here(self) -> Come:
        return Come()

    def host_cell(self, value: int) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.int32)

    def settle(self) -> None:
        pass


class Marked:
    """gloo, with the mark that nccl's group makes before it is aborted."""

    def __init__(self, inner: GlooInner, clean: streams.Clean) -> None:
        self._inner, self._clean = inner, clean

    def abort(self) -> None:
        self._clean.spoil()
        self._inner.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def build(device: streams.Device, gloo: Any, _exchange: Any, **options: Any) -> Any:
    clean, begin = device.clean(options["generation"]), options["on_begin"]
    return Marked(gloo(lambda inner: begin(Marked(inner, clean))), clean)


devices.find = lambda *_: streams.Device(Prompt())  # type: ignore[arg-type]
devices.build = build  # type: ignore[assignment]
torch.set_num_threads(1)
run = everstep.init()
opened: list[foundinf.Passage] = []
made_after_all: list[int] = []
_open, _redo = foundinf.DeviceGate.open, foundinf.Passage.redo
_read, _sum = streams.Clean.read, foundinf.DeviceGate._sum
denied = False


def deny(cell: torch.Tensor) -> torch.Tensor:
    global denied
    if run.rank == 2 and run.committed + 1 == args.deny and not denied:
        denied = True
        cell.zero_()
    return cell


def counted(gate: foundinf.DeviceGate, optimizer: Any, *, fence: bool) -> foundinf.Passage:
    opened.append(_open(gate, optimizer, fence=fence))
    return opened[-1]


def redone(passage: foundinf.Passage) -> None:
    made_after_all.append(run.committed + 1)
    _redo(passage)


foundinf.DeviceGate.open = counted  # type: ignore[assignment, method-assign]
foundinf.Passage.redo = redone  # type: ignore[assignment, method-assign]
if args.case == "hsdp":
    foundinf.DeviceGate._sum = lambda gate, own: deny(_sum(gate, own))  # type: ignore
else:
    streams.Clean.read = lambda clean: deny(_read(clean))  # type: ignore

torch.manual_seed(0)
first = nn.Linear(8, 16)
net = nn.Sequential(first, nn.Dropout(0.3), nn.Linear(16, 1))
model: Any
if args.case == "hsdp":
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(net, mesh=mesh)
else:
    model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=args.case == "scaler")
average = nn.Linear(8, 16)
protected = {"average": average} if args.case == "average" else {}
run.data(lambda step, rank, _world: torch.full((4, 8), float(step + rank)))
run.protect(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, **protected)


@run.step
def train_step(batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    if protected:
        with torch.no_grad():
            average.weight.lerp_(first.weight, 0.5)
    optimizer.zero_grad(set_to_none=args.case != "zeroed")
    return loss.detach()


for batch in run.batches(until=10):
    run.log(loss=float(train_step(batch)))
print(f"opened={len(opened)} redone={made_after_all}")
