"""What a collective of the outer group costs by itself: thread CPU time of calling and waiting,
less the same call on the bare inner group, on a fake inner group whose works cost next to nothing.

Two ways in: from Python, as the functions of torch.distributed call it; and through C++ with the
result taken from the future, as DDP's reducer does. Two ways to end: at once, and on another
thread, whose CPU time is counted too. The calls of both sides alternate in batches; a kind's figure
is the median over batches.

gloo's point-to-point works have no future, and the fake's have none either. A broadcast is measured
on a rank that receives.

    python benchmarks/bench_collective.py [--batches 60]
"""

from __future__ import annotations

import argparse
import datetime
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, Work

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.figures import save, table

from everstep.worker.communicators import Answer, Communicators
from everstep.worker.groups import OuterGroup

BAR_US = 20.0
SIZE = 4
_CALLS = 50
_FROM_CPP = (  # what torch's C++ hands on to a group in Python and has a future
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "allgather",
    "reduce_scatter",
    "alltoall_base",
    "barrier",
)


class Ender:
    """Ends works: at once on the caller's thread, or on one of its own."""

    def __init__(self, *, threaded: bool) -> None:
        self.cpu_ns = 0
        self._works: queue.SimpleQueue[FakeWork | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="ender") if threaded else None
        if self._thread is not None:
            self._thread.start()

    def _serve(self) -> None:
        while (work := self._works.get()) is not None:
            if isinstance(work, FakeWork):
                work.end()
            else:
                self.cpu_ns = time.thread_time_ns()
                work.set()

    def end(self, work: FakeWork) -> None:
        """End `work`."""
        if self._thread is None:
            work.end()
        else:
            self._works.put(work)

    def read_cpu_ns(self) -> int:
        """CPU time of the own thread so far, all works done; 0 without one. Blocks."""
        if self._thread is not None:
            read = threading.Event()
            self._works.put(read)
            assert read.wait(60)
        return self.cpu_ns

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._works.put(None)
            self._thread.join(60)


class FakeWork(Work):
    """An inner Work. As with gloo, its future is there from the beginning."""

    def __init__(self, outputs: Any, *, has_future: bool) -> None:
        super().__init__()
        self._outputs = outputs
        self._has_future = has_future
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def end(self) -> None:
        self._future.set_result(self._outputs)

    def wait(self, timeout: Any = None) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        if not self._has_future:
            return super().get_future()  # raises, in C++ as gloo's do
        return self._future

    def _source_rank(self) -> int:
        return 0


class FakeInner(dist.ProcessGroup):
    """The bare side: a process group in Python all of whose collectives are one function."""

    patience = datetime.timedelta(seconds=60)

    def __init__(self, ender: Ender) -> None:
        super().__init__(0, SIZE)  # type: ignore[call-arg]
        self._ender = ender

    def _launch(self, outputs: Any, *_: Any) -> Work:
        work = FakeWork(outputs, has_future=True)
        self._ender.end(work)
        return work

    def _launch_point_to_point(self, outputs: Any, *_: Any) -> Work:
        work = FakeWork(outputs, has_future=False)
        self._ender.end(work)
        return work

    def operation(self, name: str) -> Callable[..., Any]:
        """As an inner group has it."""
        launch: Callable[..., Any] = getattr(self, name)
        return launch

    def abort(self) -> None:
        """Nothing to wake."""

    def retire(self) -> None:
        """Nothing to leave."""

    def silent(self) -> bool:
        """Nothing can arrive."""
        return True

    def asleep(self, seconds: float) -> bool:
        """It has no threads."""
        return True

    def destroy(self) -> None:
        """Nothing to drop."""


for _name in (  # not written as methods: their signatures would have to be torch's
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather"),
    *("allgather_coalesced", "_allgather_base", "all_gather_single", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_single", "gather", "scatter", "alltoall"),
    *("alltoall_base", "all_to_all_single", "barrier"),
):
    setattr(FakeInner, _name, FakeInner._launch)
for _name in ("send", "recv", "recv_anysource"):
    setattr(FakeInner, _name, FakeInner._launch_point_to_point)


def calls() -> dict[str, tuple[Any, ...]]:
    """The arguments of each kind, small tensors."""
    small, wide = torch.ones(8), torch.ones(8 * SIZE)
    received = dist.BroadcastOptions()
    received.rootRank = 1

    def rows() -> list[list[torch.Tensor]]:
        return [[torch.ones(8) for _ in range(SIZE)]]

    return {
        "allreduce": ([small], dist.AllreduceOptions()),
        "allreduce_coalesced": ([small, wide], dist.AllreduceCoalescedOptions()),
        "broadcast": ([small], received),
        "reduce": ([small], dist.ReduceOptions()),
        "allgather": (rows(), [small], AllgatherOptions()),
        "allgather_coalesced": (rows(), [small], AllgatherOptions()),
        "_allgather_base": (wide, small, AllgatherOptions()),
        "reduce_scatter": ([small], rows(), dist.ReduceScatterOptions()),
        "_reduce_scatter_base": (small, wide, dist.ReduceScatterOptions()),
        "gather": (rows(), [small], dist.GatherOptions()),
        "scatter": ([small], rows(), dist.ScatterOptions()),
        "alltoall": (rows()[0], rows()[0], dist.AllToAllOptions()),
        "alltoall_base": (wide, wide, [], [], dist.AllToAllOptions()),
        "barrier": (dist.BarrierOptions(),),
        "send": ([small], 1, 0),
        "recv": ([small], 1, 0),
        "recv_anysource": ([small], 0),
    }


def by_python(group: dist.ProcessGroup, name: str) -> Callable[..., None]:
    """Call the override and wait on its work."""
    method: Callable[..., Any] = getattr(group, name)

    def call(*arguments: Any) -> None:
        method(*arguments).wait()

    return call


def by_cpp(group: dist.ProcessGroup, name: str) -> Callable[..., None]:
    """Call the C++ virtual function and wait on the C++ future, as the reducer does."""
    method: Callable[..., Any] = getattr(dist.ProcessGroup, name)
    get_future: Callable[..., Any] = Work.get_future

    def call(*arguments: Any) -> None:
        get_future(method(group, *arguments)).wait()

    return call


class Bench:
    """Outer group and bare fake over one way of ending."""

    def __init__(self, *, threaded: bool, batches: int) -> None:
        self.ender = Ender(threaded=threaded)
        self.batches = batches
        self.communicators = Communicators(
            lambda _group, _generation: FakeInner(self.ender),
            lambda _generation, error: print("a collective failed:", error, file=sys.stderr),
            generation=0,
            solo=False,
        )
        self.outer = OuterGroup(self.communicators, 0, SIZE, "world", tuple(range(SIZE)))
        self.bare = FakeInner(self.ender)
        self.communicators.answer = Answer.ZEROS  # as inside a step
        self.communicators.before_launch = lambda _index: None

    def own_us(self, way: Callable[..., Callable[..., None]], name: str) -> float:
        """Median CPU microseconds that the outer group adds to a call of `name`."""
        arguments = calls()[name]
        sides = (way(self.outer, name), way(self.bare, name))
        differences = []
        for number in range(self.batches + 5):
            costs = [0.0, 0.0]
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                costs[side] = self._batch_ns(sides[side], arguments) / 1e3 / _CALLS
            self.communicators.trace.clear()
            differences.append(costs[0] - costs[1])
        return statistics.median(differences[5:])

    def _batch_ns(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> int:
        before_ns = self.ender.read_cpu_ns()
        begin_ns = time.thread_time_ns()
        for _ in range(_CALLS):
            call(*arguments)
        own_ns = time.thread_time_ns() - begin_ns
        return own_ns + self.ender.read_cpu_ns() - before_ns


def main() -> None:
    parser = argparse.ArgumentParser(description="The own cost of a collective.")
    parser.add_argument("--batches", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    ways: dict[str, tuple[bool, Callable[..., Callable[..., None]]]] = {
        "python": (False, by_python),
        "c++": (False, by_cpp),
        "python, other thread": (True, by_python),
        "c++, other thread": (True, by_cpp),
    }
    for title, (threaded, way) in ways.items():
        bench = Bench(threaded=threaded, batches=args.batches)
        try:
            for name in calls():
                if way is by_cpp and name not in _FROM_CPP:
                    continue
                results.setdefault(name, {})[title] = bench.own_us(way, name)
        finally:
            bench.ender.close()
    rows = [[name, *(row.get(title, "-") for title in ways)] for name, row in results.items()]
    print("own CPU time of a collective, microseconds:")
    print(table(["collective", *ways], rows))
    worst = max((cost, name, way) for name, row in results.items() for way, cost in row.items())
    over = sorted(name for name, row in results.items() if max(row.values()) > BAR_US)
    print(f"\nworst: {worst[1]} ({worst[2]}) {worst[0]:.1f} us; bar {BAR_US:g} us", end="")
    print(f"; over it: {', '.join(over)}" if over else "; all within it")
    figures = {"bar_us": BAR_US, "bar_met": not over, "own_us": results}
    print(f"written to {save('collective', figures)}")


if __name__ == "__main__":
    main()
