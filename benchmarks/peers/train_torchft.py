"""The workload under torchft, one process for each replica group.

Started by jobs.py, each group under a torchrun of its own that starts it again. A failed step is
given up and done again by the groups that are left; a group that comes back heals from a peer.

With PEERS_SPARE=1 there is one group more than take part (FIXED_WITH_SPARES): it makes every step
with the others, adds zeros, and takes part as soon as another is missing. A batch belongs to a rank
among those that take part, so the quorum is asked for before the step, not beside it."""

from __future__ import annotations

import datetime
import os
from typing import Any

from benchmarks.peers.workload import RANKS, STEPS, Events, batch_at, loss_of, prepare
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode

_GROUP = int(os.environ["REPLICA_GROUP_ID"])
_SPARE = os.environ.get("PEERS_SPARE") == "1"


def main() -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    events = Events(f"group{_GROUP}.{attempt}")
    model, inner = prepare()

    def state() -> dict[str, Any]:
        return {"model": parallel.state_dict(), "optimizer": optimizer.state_dict()}

    def load(given: dict[str, Any]) -> None:
        parallel.load_state_dict(given["model"])
        optimizer.load_state_dict(given["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=2)),
        min_replica_size=RANKS if _SPARE else 1,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if _SPARE else WorldSizeMode.DYNAMIC,
        use_async_quorum=not _SPARE,
        replica_id=f"group_{_GROUP}",
        timeout=datetime.timedelta(seconds=30),
        init_sync=False,
        load_state_dict=load,
        state_dict=state,
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < STEPS:
        before = manager.current_step()
        optimizer.zero_grad()  # asks for the quorum
        rank = manager.participating_rank() if _SPARE else _GROUP
        step = before + 1
        model.fuse.step, model.fuse.rank = step, _GROUP
        loss = loss_of(parallel, batch_at(step, rank or 0))
        loss.backward()
        world_size = manager.num_participants()
        optimizer.step()
        if manager.current_step() > before:
            step = manager.current_step()
            events.say("step", step=step, rank=rank, world=world_size, attempt=0, loss=loss.item())
        else:
            events.say("discarded", step=step, rank=rank)
    events.end(_GROUP, model, inner)
    manager.shutdown(wait=False)
    os._exit(0)  # its threads don't end by themselves


if __name__ == "__main__":
    main()
