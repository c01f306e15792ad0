"""A small job in which rank 1 dies, once, when its peers are in the phase that `--phase` names, as
they have said in the FIFO that `--arrivals` names. `--then`: what happens after they are back.
`hang`: rank 2, one of them, does not move any more in that phase. `long`: rank 1's replacement is
longer in it than a step or a section may be.

Each recovery says in which phase it began and ended; so do the places of the script.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.wire import messages
from everstep.worker.control import Control
from everstep.worker.fence import Fence
from everstep.worker.progress import Phase
from everstep.worker.recovery import Recovery

AT, STEPS = 5, 6
WAIT_S = 60.0

parser = argparse.ArgumentParser()
parser.add_argument("--phase", required=True)
parser.add_argument("--arrivals", required=True)
parser.add_argument("--then", choices=["hang", "long"])
parser.add_argument("--pause", type=float, default=0.0, help="how long `long` is, s")
args = parser.parse_args()
first = os.environ["EVERSTEP_INCARNATION"] == "1"
arrivals = os.open(args.arrivals, os.O_RDWR)  # both ways, so that neither side waits to open it

_recover, _take, _enter, _meet = Recovery.run, Control.take, Fence.enter, Fence.meet
meeting: list[int] = []
worker: Any = None
came_back = False


def say(place: str) -> None:
    print(f"{place}: {Phase(worker.progress.phase).name}", flush=True)


def recover(recovery: Recovery, **options: Any) -> Any:
    global came_back
    before = Phase(worker.progress.phase).name
    outcome = _recover(recovery, **options)
    came_back = True
    say(f"back in {before}")
    return outcome


def take(control: Control, kind: Any, *rest: Any, **options: Any) -> Any:
    if kind is messages.Closed:
        come_by("closing")
    return _take(control, kind, *rest, **options)


def enter(fence: Fence, *numbers: int) -> list[int]:
    if not meeting:  # else it is a section's fence
        come_by("fence")
    return _enter(fence, *numbers)


def meet(fence: Fence, number: int) -> bool:
    meeting.append(number)
    try:
        return _meet(fence, number)
    finally:
        meeting.pop()


Recovery.run, Control.take = recover, take  # type: ignore[assignment, method-assign]
Fence.enter, Fence.meet = enter, meet  # type: ignore[assignment, method-assign]


def come_by(place: str) -> None:
    """Rank 1 dies here in its turn, and rank 2 hangs here in its."""
    if run.committed + 1 != AT and place not in ("setup", "closing"):
        return
    say(place)
    if args.phase != place:
        return
    if first and not came_back:
        if run.rank == 1:
            for _ in range(run.world_size - 1 if place != "setup" else 0):
                os.read(arrivals, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(arrivals, b".")
        if place == "between":  # where there is nothing that the stop would end
            worker.control.wait_stop(worker.communicators.generation, WAIT_S)
    elif first and run.rank == 2 and args.then == "hang":
        signal.sigtimedwait([signal.SIGUSR1], WAIT_S)
    elif not first and run.rank == 1 and args.then == "long":
        signal.sigtimedwait([signal.SIGUSR1], args.pause)


torch.set_num_threads(1)
run = everstep.init()
worker = run._worker
come_by("setup")
dist.barrier()
torch.manual_seed(7)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.data(lambda step, rank, world: torch.full((2, 4), float(step + rank)))
run.protect(model=model, optimizer=optimizer)


@run.step(undo=True)
def train_step(batch: torch.Tensor) -> torch.Tensor:
    come_by("step")
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@run.section
def evaluate() -> float:
    come_by("section")
    total = torch.ones(())
    dist.all_reduce(total)
    return float(total)


for batch in run.batches(until=STEPS):
    train_step(batch)
    if run.committed == AT - 1:
        evaluate()
        come_by("between")
    if run.committed == STEPS and run.rank == 1:
        come_by("closing")
