"""How soon the main thread is free after a stop, whatever collective it waits in.

Three ranks; rank 2 never enters, so ranks 0 and 1 wait inside gloo. The hub stops the generation;
each rank reports the time from the stop's sending to the return of its collective. Then the groups
are rebuilt and it begins again.

    python benchmarks/bench_stop.py [ROUNDS]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.grouplab import Lab, Member
from torch._C._distributed_c10d import ProcessGroupGloo  # noqa: F401  (imported before the forks)

from everstep.worker.communicators import Answer

SIZE = 3


def _operations(rank: int) -> dict[str, Any]:
    small, large = torch.ones(8), torch.ones(1 << 20)
    peer = 1 - rank
    return {
        "allreduce small": lambda: dist.all_reduce(small),
        "allreduce 4 MB": lambda: dist.all_reduce(large),
        "broadcast": lambda: dist.broadcast(small, src=2),
        "allgather": lambda: dist.all_gather([torch.empty(8) for _ in range(SIZE)], small),
        "allgather single": lambda: dist.all_gather_into_tensor(torch.empty(8 * SIZE), small),
        "reduce scatter": lambda: dist.reduce_scatter_tensor(torch.empty(8), torch.ones(8 * SIZE)),
        "all to all": lambda: dist.all_to_all_single(torch.empty(6), torch.ones(6)),
        "barrier": dist.barrier,
        "async allreduce": lambda: dist.all_reduce(large, async_op=True).wait(),
        "future": lambda: dist.all_reduce(large, async_op=True).get_future().wait(),
        "recv": lambda: dist.recv(small, src=2),
        "recv any source": lambda: dist.recv(small),
        "send": lambda: [dist.send(large, dst=peer) for _ in range(8)],
    }


def member(me: Member, rounds: int) -> None:
    me.join()
    if me.rank == 2:
        for generation in range(rounds * len(_operations(0))):
            me.recover(generation)
            me.say("ready")
        me.say("done")
        me.control.take(int, 60)  # waits until the hub hangs up
        return
    generation = 0
    for _ in range(rounds):
        for name, run in _operations(me.rank).items():
            me.communicators.answer = Answer.ZEROS
            me.say("entering", name)
            run()
            freed = time.monotonic()
            me.say("freed", f"{name}\t{freed}")
            begun = time.monotonic()
            me.recover(generation)
            me.say("recovered", f"{name}\t{time.monotonic() - begun}")
            generation += 1
            me.say("ready")
    me.say("done")
    me.control.take(int, 60)


def measure(rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    freed_s: dict[str, list[float]] = defaultdict(list)
    recover_s: list[float] = []
    with Lab(SIZE, lambda me: member(me, rounds)) as lab:
        sent = [0.0, 0.0]
        ready, entering, generation, done = 0, 0, 0, 0
        for rank, key, text in lab.notes():
            if key == "entering":
                entering += 1
                if entering == 2:
                    entering = 0
                    time.sleep(0.02)  # let both block inside gloo: the very thing that is measured
                    at = lab.stop(generation)
                    sent = [at, at]
                    generation += 1
            elif key == "freed":
                name, when = text.split("\t")
                freed_s[name].append(float(when) - sent[rank])
            elif key == "recovered":
                recover_s.append(float(text.split("\t")[1]))
            elif key == "fault":
                print("fault", rank, text)
            elif key == "left":
                raise SystemExit(f"rank {rank} left")
            done += key == "done"
            ready += key == "ready"
            if done == SIZE:
                break
    return freed_s, recover_s


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    freed_s, recover_s = measure(rounds)
    rows = {}
    for name, values in freed_s.items():
        ordered = sorted(values)
        rows[name] = {
            "median_ms": 1e3 * statistics.median(ordered),
            "p95_ms": 1e3 * ordered[int(0.95 * (len(ordered) - 1))],
            "max_ms": 1e3 * ordered[-1],
            "count": len(ordered),
        }
        print(f"{name:18s}", " ".join(f"{k}={v:.2f}" for k, v in rows[name].items()))
    every = sorted(v for values in freed_s.values() for v in values)
    print(
        f"all: median {1e3 * statistics.median(every):.2f} ms, "
        f"p95 {1e3 * every[int(0.95 * len(every))]:.2f} ms, n={len(every)}"
    )
    print(
        f"quiesce and rebuild: median {1e3 * statistics.median(recover_s):.1f} ms, "
        f"max {1e3 * max(recover_s):.1f} ms"
    )
    Path("benchmarks/results").mkdir(exist_ok=True)
    Path("benchmarks/results/stop.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
