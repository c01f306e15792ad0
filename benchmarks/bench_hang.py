"""How soon a stopped rank is noticed, and what showing one's progress costs.

One job of the example; every few steps one rank gets a SIGSTOP from outside, by its process id.
Noticed is when the incident is opened (the stacks of the others have been taken by then); back is
the first step that all ranks commit after it. The cost of the progress hook, which every collective
pays, is CPU time of the calling thread, less that of an empty call.

    python benchmarks/bench_hang.py [STOPS]
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.figures import EXAMPLE, save, table

from everstep.agent.progress import ProgressFile
from everstep.launch.local import run_job
from everstep.settings import RunSettings
from everstep.wire.messages import ScriptSpec
from everstep.worker.progress import Progress

RANKS = 3
EVERY = 5  # steps from one stop to the next
CALLS = 50_000
ROUNDS = 15


class Stopper:
    """A view that stops a rank every few steps."""

    def __init__(self, stops: int) -> None:
        self.stops = stops
        self.pids: dict[int, int] = {}
        self.sent_s: list[float] = []
        self.noticed_s: list[float] = []
        self.back_s: list[float] = []

    def record(self, record: dict[str, Any]) -> None:
        match record["event"]:
            case "started":
                self.pids[record["rank"]] = record["pid"]
            case "step" if record["step"] % EVERY == 0 and len(self.sent_s) < self.stops:
                victim = 1 + len(self.sent_s) % (RANKS - 1)
                self.sent_s.append(time.monotonic())
                os.kill(self.pids[victim], signal.SIGSTOP)
            case "incident_opened":
                self.noticed_s.append(record["t"] - self.sent_s[-1])
            case "incident_closed":
                self.back_s.append(record["t"] - self.sent_s[-1])

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        del rank, incarnation, stream, line


def stop_ranks(stops: int) -> Stopper:
    view = Stopper(stops)
    with tempfile.TemporaryDirectory() as folder:
        steps = str(EVERY * (stops + 1))
        settings = RunSettings(
            script=ScriptSpec(target=str(EXAMPLE), module=False, args=("--steps", steps)),
            nproc_per_node=RANKS,
            run_id=f"bench-hang-{os.getpid()}",
            log_dir=folder,
            lift_budgets=True,
        )
        result = run_job(settings, view)
    if result.exit_code or len(view.back_s) != stops:
        raise SystemExit(f"{len(view.back_s)} of {stops} stops were recovered from: {result.text}")
    return view


def cost_ns(call: Callable[[], object]) -> float:
    """The median over rounds, in nanoseconds of this thread's CPU time."""
    rounds = []
    for _ in range(ROUNDS):
        begin = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        rounds.append((time.thread_time_ns() - begin) / CALLS)
    return statistics.median(rounds)


def hook_costs() -> dict[str, float]:
    file = ProgressFile(Path("/dev/shm"), f"bench-hang-{os.getpid()}", 0, 1)
    progress = Progress(file.path)
    row = progress.join("world", range(RANKS))
    empty = cost_ns(lambda: None)
    costs = {
        "a collective entered": cost_ns(lambda: progress.entered(row, "allreduce", 1000)) - empty,
        "it is inside, and no more": cost_ns(lambda: (progress.inside((row,)), progress.inside(())))
        - empty,
        "a wait begun": cost_ns(lambda: progress.waits(True)) - empty,
        "the agent's glance at one rank": cost_ns(file.glance) - empty,
    }
    progress.close()
    file.remove()
    return costs


def main() -> None:
    stops = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    costs = hook_costs()
    print(table(["hook", "ns"], list(costs.items())))
    view = stop_ranks(stops)
    rows = [
        [name, statistics.median(values), min(values), max(values)]
        for name, values in (("noticed", view.noticed_s), ("next step", view.back_s))
    ]
    print(table(["after SIGSTOP, s", "median", "least", "most"], rows))
    figures = {"hook_ns": costs, "noticed_s": view.noticed_s, "back_s": view.back_s}
    print(f"written to {save('hang', figures)}")


if __name__ == "__main__":
    main()
