"""A training with work between its steps: evaluation, saves, early stopping.

`everstep run sections.py CASE FOLDER [KIND:RANK:STEP:PLACE ...]`: CASE is a list of ways to write
it, joined by "-", all of which must be exact. A fault fires once, at a place of this script that
everstep has no name for."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.worker import process

case = set(sys.argv[1].split("-"))
folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
torch.set_num_threads(1)
run = everstep.init(rng="carry" if "carry" in case else "keyed")
torch.manual_seed(3 + run.rank)
random.seed(3 + run.rank)


class Seen:
    """How many numbers this rank has seen, and their sum: no other rank knows."""

    count, total = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.total = state["count"], state["total"]


def come_by(place: str) -> None:
    """A fault is due here, or is not."""
    for number, text in enumerate(sys.argv[3:]):
        kind, rank, step, at = text.split(":")
        due = (int(rank), int(step), at) == (run.rank, run.committed, place)
        marker = folder / f"fired-{number}"
        if due and not marker.exists():
            marker.touch()
            if kind == "raise":
                raise RuntimeError(f"a fault of the script, {text}")
            os.kill(os.getpid(), signal.SIGKILL)


net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
seen = Seen()
run.data(lambda step, rank, world: (torch.randn(8, 6), torch.randn(8, 1)))
run.protect(model=model, optimizer=optimizer, scheduler=scheduler, local={"seen": seen})


def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (model(x) - y).square().mean()
    return found


@run.step
def train_step(batch: Any) -> Any:
    x, y = batch
    seen.count += x.numel()
    seen.total += float(x.sum())
    loss = loss_of(x, y)
    mean = run.mean(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    own = loss.detach()
    return own, mean


@run.section
def evaluate() -> float:
    """The mean loss over held-out numbers, of which each rank has its own."""
    assert model.training, "the mode is as it was before the attempt"
    model.eval()
    come_by("begin")
    with torch.no_grad():
        total = torch.zeros(2, dtype=torch.float64)
        for _ in range(3):
            total += torch.tensor([loss_of(torch.randn(8, 6), torch.randn(8, 1)).item(), 1.0])
        work = dist.all_reduce(total, async_op=True)
        come_by("middle")
        assert work is not None
        work.wait()
    model.train()  # type: ignore[no-untyped-call]
    value = float(total[0] / total[1])
    run.state["evaluations"] = run.state.get("evaluations", 0) + 1
    run.state["best"] = min(run.state.get("best", 1e9), value)
    seen.count += 1
    run.log(heldout=value)
    come_by("end")
    return value


@run.section
def spread() -> tuple[float, torch.Tensor]:
    """How far the ranks' sums are apart, by object and by tensor."""
    gathered: list[Any] = [None] * run.world_size
    dist.all_gather_object(gathered, seen.state_dict())
    mean = run.mean(torch.tensor([seen.total, float(seen.count)]))
    run.once(lambda: (folder / f"once-{run.rank}-{run.committed}").write_text("x"))
    return max(each["total"] for each in gathered), mean


@run.section(ranks=[0])
def note(value: float) -> int:
    """Kept once for each call, though it may be written again."""
    path = folder / f"note-{run.committed}"
    path.write_text(repr((value, random.random())))
    come_by("note")
    run.state["notes"] = run.state.get("notes", 0) + 1
    return run.state["notes"]  # type: ignore[no-any-return]


def tell(attempt: int, what: str) -> None:
    """Write to a diary that all ranks share."""
    with open(folder / "diary", "a") as file:
        file.write(f"{attempt} {run.committed} {run.rank} {what}\n")


def generation() -> int:
    """What tells one attempt from the next, on all ranks alike."""
    worker: Any = process._worker
    number: int = worker.communicators.generation
    return number


def wait_for_fault(place: str) -> None:
    """Return when a peer has met its fault at `place` of this step, if it is to meet one."""
    for number, text in enumerate(sys.argv[3:]):
        _, rank, step, at = text.split(":")
        if (int(step), at) == (run.committed, place) and int(rank) != run.rank:
            deadline = time.monotonic() + 30
            while not (folder / f"fired-{number}").exists() and time.monotonic() < deadline:
                time.sleep(0.001)


@run.section
def save() -> str:
    """All ranks save their part; a checkpoint is there when its last line is."""
    attempt = generation()
    tell(attempt, "begins")
    part = folder / f"part-{run.committed}-{run.rank}"
    scratch = part.with_suffix(".tmp")
    with open(scratch, "wb") as file:
        wait_for_fault("written")
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    tell(attempt, "ends")
    come_by("written")
    scratch.replace(part)
    come_by("renamed")
    dist.barrier()
    return part.name


@run.section
def save_distributed() -> None:
    """By torch.distributed.checkpoint, with its own collectives."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path = folder / f"dcp-{run.committed}"
    save_state(state, storage_writer=FileSystemWriter(path, overwrite=True))
    come_by("saved")


@run.section(undo=True)
def borrow() -> float:
    """Other weights for a moment."""
    kept = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.5)
        come_by("borrowed")
        model.eval()
        value = run.mean(loss_of(torch.ones(2, 6), torch.ones(2, 1)))
        model.train()  # type: ignore[no-untyped-call]
        for p, old in zip(net.parameters(), kept, strict=True):
            p.copy_(old)
    return float(value)


@run.section(undo=True)
def jolt() -> None:
    """Changes what is protected, for good."""
    dist.barrier()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.9)
    for group in optimizer.param_groups:
        group["lr"] *= 0.7


def body(step: int) -> bool:
    """What follows a step. Returns whether to leave the loop."""
    come_by("body")
    scheduler.step()
    if "every" in case and step % 2 == 0:
        run.state["last"] = evaluate()
    if "two" in case:
        run.state["spread"] = spread()
        if step % 3 == 0:
            run.state["last"] = evaluate()
    if "note" in case and step % 2 == 0:
        note(run.state.get("last", 0.0))
    if "save" in case and step % 2 == 0:
        run.state["file"] = save()
    if "dcp" in case and step % 3 == 0:
        save_distributed()
    if "borrow" in case and step % 2 == 0:
        run.state["borrowed"] = borrow()
    if "jolt" in case and step % 2 == 0:
        jolt()
    come_by("late")
    if "stop" in case and evaluate() > run.state["best"] + 1e-9:
        run.state["worse"] = run.state.get("worse", 0) + 1
        return bool(run.state["worse"] == 4)
    return False


if "before" in case:
    run.state["first"] = evaluate()
    note(run.state["first"])
for batch in run.batches(until=9):
    if "top" in case:
        run.state["top"] = spread()[0] + evaluate()
    loss, mean = train_step(batch)
    run.state["sum"] = run.state.get("sum", 0.0) + float(loss) + float(mean)
    run.log(sum=run.state["sum"], draw=random.random(), more=float(torch.rand(())))
    if body(run.committed):
        break
if "after" in case:
    run.log(final=evaluate(), extra=spread()[0])
    note(0.5)
print(f"rank {run.rank}: {run.committed} {dict(run.state)} {seen.state_dict()}")
