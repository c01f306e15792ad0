"""Real gloo, real processes: collectives against plain gloo, and stops while a peer never enters.

The processes are those of benchmarks/grouplab.py, the operations those of benchmarks/bench_stop.py.
Nothing is timed: a main thread that a stop does not free stands still until the laboratory's
deadline of 30 s, and the test fails.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.bench_stop import SIZE, _operations
from benchmarks.grouplab import Lab, Member
from torch._C._distributed_c10d import (
    AllgatherOptions,
    FileStore,
    PrefixStore,
    ProcessGroupGloo,
)

from everstep.worker.communicators import Answer

END = 1_000_000  # a stop that says: no more rounds
NAMES = list(_operations(0))


def _quietly(role: Callable[[Member], None]) -> Callable[[Member], None]:
    def run(me: Member) -> None:
        warnings.simplefilter("ignore")  # torch's own: old names of collectives
        role(me)

    return run


def _until_hung_up(me: Member) -> None:
    """Wait for the hub's last stop: a member that leaves early is a peer that died."""
    me.control.wait_stop(END, 60)


# ---------------------------------------------------------------- live, against plain gloo


def _results(group: Any, rank: int) -> dict[str, list[torch.Tensor]]:
    """What every collective gives, through the methods that c10d calls."""

    def own(width: int = 4) -> torch.Tensor:
        return torch.arange(float(width)) * (rank + 1) + rank

    def empty(width: int = 4) -> torch.Tensor:
        return torch.full((width,), -7.0)

    def row() -> list[torch.Tensor]:
        return [empty() for _ in range(SIZE)]

    found: dict[str, list[torch.Tensor]] = {}
    for operation in ("SUM", "MAX", "MIN", "PRODUCT", "AVG"):
        options, tensor = dist.AllreduceOptions(), own()
        options.reduceOp = getattr(dist.ReduceOp, operation)
        group.allreduce([tensor], options).wait()
        found[f"allreduce {operation}"] = [tensor]
    for elements in (0, 1, 1 << 18):
        tensor = own(elements)
        group.allreduce([tensor], dist.AllreduceOptions()).wait()
        found[f"allreduce {elements}"] = [tensor]
    sparse = torch.eye(3)[rank].to_sparse()
    group.allreduce([sparse], dist.AllreduceOptions()).wait()
    found["allreduce sparse"] = [sparse.to_dense()]
    pair = [own(), own(2)]
    group.allreduce_coalesced(pair, dist.AllreduceCoalescedOptions()).wait()
    found["allreduce_coalesced"] = pair
    for root in range(SIZE):
        broadcast, tensor = dist.BroadcastOptions(), own()
        broadcast.rootRank, broadcast.rootTensor = root, 0
        group.broadcast([tensor], broadcast).wait()
        found[f"broadcast {root}"] = [tensor]
        reduce, tensor = dist.ReduceOptions(), own()
        reduce.rootRank = root
        group.reduce([tensor], reduce).wait()
        found[f"reduce {root}"] = [tensor] if rank == root else []
        gather, outputs = dist.GatherOptions(), [row()] if rank == root else []
        gather.rootRank = root
        group.gather(outputs, [own()], gather).wait()
        found[f"gather {root}"] = [tensor for part in outputs for tensor in part]
        scatter, tensor = dist.ScatterOptions(), empty()
        scatter.rootRank = root
        inputs = [[own() * index for index in range(SIZE)]] if rank == root else []
        group.scatter([tensor], inputs, scatter).wait()
        found[f"scatter {root}"] = [tensor]
    outputs = [row()]
    group.allgather(outputs, [own()], AllgatherOptions()).wait()
    found["allgather"] = outputs[0]
    tensor = empty(4 * SIZE)
    group._allgather_base(tensor, own(), AllgatherOptions()).wait()
    found["all_gather_single"] = [tensor]
    tensor = empty()
    group.reduce_scatter(
        [tensor], [[own() * index for index in range(SIZE)]], dist.ReduceScatterOptions()
    ).wait()
    found["reduce_scatter"] = [tensor]
    tensor = empty()
    group._reduce_scatter_base(tensor, own(4 * SIZE), dist.ReduceScatterOptions()).wait()
    found["reduce_scatter_single"] = [tensor]
    tensor = empty(SIZE)
    group.alltoall_base(tensor, own(SIZE), [], [], dist.AllToAllOptions()).wait()
    found["all_to_all_single"] = [tensor]
    tensor = empty(SIZE * (rank + 1))
    group.alltoall_base(tensor, own(6), [rank + 1] * SIZE, [1, 2, 3], dist.AllToAllOptions()).wait()
    found["all_to_all_single with splits"] = [tensor]
    group.barrier(dist.BarrierOptions()).wait()
    received = [empty(), empty()]
    works = [
        group.send([own()], (rank + 1) % SIZE, 3),
        group.recv([received[0]], (rank - 1) % SIZE, 3),
    ]
    for work in works:
        work.wait()
    found["send and recv"] = received[:1]
    send = group.send([own()], (rank + 1) % SIZE, 4)
    anybody = group.recv_anysource([received[1]], 4)
    anybody.wait()
    send.wait()
    found["recv from anybody"] = [received[1], torch.tensor(anybody._source_rank())]
    return found


def test_live_collectives_give_what_plain_gloo_gives(tmp_path: Path) -> None:
    def role(me: Member) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        store = PrefixStore("plain", FileStore(str(tmp_path / "store"), SIZE))
        plain = ProcessGroupGloo(store, me.rank, SIZE, options)
        me.join()
        ours, theirs = _results(dist.group.WORLD, me.rank), _results(plain, me.rank)
        bad = [
            name
            for name, tensors in theirs.items()
            if len(tensors) != len(ours[name])
            or not all(torch.equal(one, two) for one, two in zip(tensors, ours[name], strict=True))
        ]
        me.say("compared", f"{len(theirs)} {bad}")
        _until_hung_up(me)

    with Lab(SIZE, _quietly(role)) as lab:
        hub = Hub(lab)
        texts = hub.collect("compared", set(range(SIZE)))
        hub.end()
    assert hub.faults == []
    assert set(texts.values()) == {"30 []"}
    assert set(lab.codes.values()) == {0}


# ---------------------------------------------------------------- stops


def _announce_launches(me: Member) -> Callable[[int], None]:
    """Returns what begins a round: from then on, the first collective that is under way inside
    gloo, its guard registered, is told to the hub."""
    communicators = me.communicators
    launched = communicators.launched
    due: list[int] = []

    def tell(guard: Any) -> None:
        launched(guard)
        if due:
            me.say(f"launched {due.pop()}")

    communicators.launched = tell  # type: ignore[method-assign]
    return due.append


class Hub:
    """Collects what members say; nothing that comes early is lost. A fault is no failure here: a
    peer that was stopped first shuts its connections, which a rank may see before its own stop."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._notes = lab.notes()
        self.faults: list[str] = []
        self._said: dict[str, dict[int, str]] = {}

    def collect(self, key: str, ranks: set[int]) -> dict[int, str]:
        while not ranks <= set(self._said.get(key, {})):
            rank, said, text = next(self._notes)
            assert said != "left", f"rank {rank} left before {key}: {self.faults}"
            if said == "fault":
                self.faults.append(text)
            self._said.setdefault(said, {})[rank] = text
        return self._said.pop(key)

    def end(self) -> None:
        """Let all members leave, and wait until they have."""
        self._lab.stop(END)
        for _ in self._notes:
            pass


def _sum(me: Member, key: str) -> None:
    """A correct all-reduce, with all ranks; told to the hub."""
    tensor = torch.full((1000,), float(me.rank + 1))
    dist.all_reduce(tensor)
    me.say(key, f"{sorted(set(tensor.tolist()))} {me.communicators.poisoned}")


def _holdings() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _settled(least: tuple[int, int]) -> tuple[int, int]:
    """Descriptors and threads, once what was given to the reapers is gone: at most `least`, or
    what is left when the patience ends."""
    for thread in threading.enumerate():
        if thread.name.startswith(("everstep-reaper", "everstep-p2p", "everstep-build")):
            thread.join(30)
    deadline, gate = time.monotonic() + 5, threading.Event()
    while (now := _holdings()) > least or now[1] > least[1]:
        if time.monotonic() > deadline:  # a thread that was joined is not gone at once
            break
        gate.wait(0.002)
    return now


def _stop_member(names: list[str]) -> Callable[[Member], None]:
    def role(me: Member) -> None:
        me.join()
        begin = _announce_launches(me)
        communicators = me.communicators
        _sum(me, "summed -1")  # or a rank might be stopped while it still joins
        gc.disable()  # nothing may need it to be found
        before = _holdings()
        for generation, name in enumerate(names):
            communicators.answer = Answer.ZEROS
            if me.rank != 2:
                begin(generation)
                _operations(me.rank)[name]()
                me.say(f"freed {generation}", f"{name} {communicators.poisoned}")
            me.recover(generation)
            _sum(me, f"summed {generation}")
            if (generation + 1) % 10 == 0:
                me.say(f"holds {generation}", f"{before} {_settled(before)}")
        _until_hung_up(me)

    return role


def _run_stops(names: list[str]) -> list[dict[int, str]]:
    """Every round: both waiting ranks are inside gloo, all are stopped, all regroup and sum.
    Returns what they hold after every tenth."""
    holdings = []
    everybody = set(range(SIZE))
    with Lab(SIZE, _quietly(_stop_member(names))) as lab:
        hub = Hub(lab)
        hub.collect("summed -1", everybody)
        for generation, name in enumerate(names):
            hub.collect(f"launched {generation}", {0, 1})
            lab.stop(generation)
            freed = hub.collect(f"freed {generation}", {0, 1})
            assert set(freed.values()) == {f"{name} True"}
            summed = hub.collect(f"summed {generation}", everybody)
            assert set(summed.values()) == {"[6.0] False"}, name
            if (generation + 1) % 10 == 0:
                holdings.append(hub.collect(f"holds {generation}", everybody))
        hub.end()
    assert set(lab.codes.values()) == {0}
    return holdings


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_frees_the_main_thread_and_the_next_generation_is_correct(name: str) -> None:
    _run_stops([name] * 2)


@pytest.mark.slow
def test_descriptors_and_threads_stay_flat_over_thirty_stops() -> None:
    steady = [name for name in NAMES if name not in ("recv any source", "send")]
    for held in _run_stops((steady * 4)[:30]):
        for rank, text in held.items():
            before, now = text[1:-1].split(") (")
            assert before == now, f"rank {rank}: descriptors and threads"


# ---------------------------------------------------------------- nothing false gets out

LEAK_ROUNDS = 20


def _summing(me: Member) -> None:
    me.join()
    draw = random.Random(me.rank)
    for generation in range(LEAK_ROUNDS):
        communicators = me.communicators
        communicators.answer = Answer.ZEROS
        tensor = torch.full((1 << 22,), float(me.rank + 1))
        dist.barrier()
        communicators.touched = False
        stopper = None
        if me.rank == 1:  # alone, at some moment of the all-reduce
            stopper = threading.Timer(draw.random() * 0.03, communicators.stop, (generation,))
            stopper.start()
        dist.all_reduce(tensor)
        communicators.drain()
        wrong = int((tensor != 6).sum())
        me.say("ended", "poisoned" if communicators.touched else f"clean, {wrong} wrong")
        if stopper is not None:
            stopper.join()
        me.recover(generation)
        me.say("ready")
    me.say("done")
    _until_hung_up(me)


@pytest.mark.slow
def test_a_stopped_rank_never_sends_what_it_was_filled_with() -> None:
    """A peer whose collective ends well has the true sum, though another rank was stopped in
    the middle of sending: the connections are shut before its tensors are filled."""
    ended: list[str] = []
    generation = done = 0
    with Lab(3, _quietly(_summing)) as lab:
        for rank, key, text in lab.notes():
            if key == "ended":
                ended.append(text)
                if rank == 1:
                    # The others go on by themselves first: whatever they get, they get from peers.
                    grace = threading.Timer(0.15, lab.stop, (generation,))
                    grace.start()
                    generation += 1
            done += key == "done"
            if key == "done" and done == 3:
                lab.stop(END)
        grace.join()
    assert len(ended) == 3 * LEAK_ROUNDS
    assert {text for text in ended if text != "poisoned"} <= {"clean, 0 wrong"}
