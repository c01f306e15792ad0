"""The workload under torchrun's own restart, going back to the newest DCP checkpoint.

Started by jobs.py as `torchrun --max-restarts ...`: when a process dies, torchrun ends its peers,
starts all of them again and lets them meet anew."""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist
from benchmarks.peers.checkpoints import Checkpoints, latest
from benchmarks.peers.workload import STEPS, Events, batch_at, loss_of, prepare
from torch.nn.parallel import DistributedDataParallel

_TIMEOUT = datetime.timedelta(seconds=60)


def main() -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    events = Events(f"rank{rank}.{attempt}")
    done = latest()  # nobody writes now, so all ranks see the same
    model, optimizer = prepare(values=not done)
    checkpoints = Checkpoints(model, optimizer)
    if done:
        checkpoints.load(done)
    parallel = DistributedDataParallel(model)
    for step in range(done + 1, STEPS + 1):
        model.fuse.step, model.fuse.rank = step, rank
        optimizer.zero_grad()
        loss = loss_of(parallel, batch_at(step, rank))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        events.say(
            "step", step=step, rank=rank, world=world_size, attempt=attempt, loss=loss.item()
        )
        if rank == 0:
            checkpoints.save(step)
    events.end(rank, model, optimizer)
    checkpoints.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
