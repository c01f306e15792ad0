"""The workload under everstep. Started by jobs.py as `everstep run --nproc-per-node 4`."""

from __future__ import annotations

from benchmarks.peers.workload import STEPS, Events, batch_at, loss_of, prepare
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import everstep


def main() -> None:
    run = everstep.init()
    events = Events(f"rank{run.rank}")
    model, optimizer = prepare()
    parallel = DistributedDataParallel(model)
    data = run.data(lambda step, rank, _: batch_at(step, rank))
    run.protect(model=parallel, optimizer=optimizer, data=data)

    @run.step  # type: ignore[untyped-decorator]
    def train_step(batch: Tensor) -> Tensor:
        model.fuse.step, model.fuse.rank = run.committed + 1, run.rank
        optimizer.zero_grad()
        loss = loss_of(parallel, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    for batch in run.batches(until=STEPS):
        loss = train_step(batch)
        events.say(
            "step",
            step=run.committed,
            rank=run.rank,
            world=run.world_size,
            attempt=0,
            loss=loss.item(),
        )
    events.end(run.rank, model, optimizer)


if __name__ == "__main__":
    main()
