"""How often gloo loses a send when a socket breaks: an aborted all-reduce that does not end.

Not a bar: the measurement behind docs/design/step-transaction.md, "gloo loses sends". In each round
one of four ranks shuts its connections at a random moment, while all have four all-reduces in
flight; the others shut theirs when one of their own fails. An operation that has not ended a second
later is lost.

    python benchmarks/probe_lost_sends.py [ROUNDS]
"""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.grouplab import Lab, Member

SIZE = 4


def _one_round(me: Member, generation: int, draw: random.Random) -> int:
    inner = me.communicators.groups[0].inner
    launch, options = inner.operation("allreduce"), dist.AllreduceOptions()
    launch([torch.ones(1300)], options).wait()
    broken = threading.Event()

    def ended(future: torch.futures.Future[object]) -> None:
        try:
            future.value()
        except RuntimeError:
            broken.set()

    until = time.perf_counter() + draw.random() * 0.001
    while time.perf_counter() < until:
        pass
    futures = []
    for tensor in (torch.ones(7), torch.ones(1300), torch.ones(7), torch.ones(1300)):
        futures.append(launch([tensor], options).get_future())
        futures[-1].add_done_callback(ended)
    if me.rank == generation % SIZE:
        inner.abort()
    broken.wait(1)
    inner.abort()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and not all(future.done() for future in futures):
        threading.Event().wait(0.001)
    return sum(not future.done() for future in futures)


def _member(me: Member, rounds: int) -> None:
    me.join()
    draw = random.Random(me.rank)
    for generation in range(rounds):
        me.say("round", str(_one_round(me, generation, draw)))
        me.control.wait_stop(generation, 60)
        for group in me.communicators.groups:
            inner, group.inner = group.inner, None
            me.communicators._reap(inner)
        me.communicators.rebuild(generation + 1)
    me.say("done")
    me.control.wait_stop(1_000_000, 60)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    aborted = lost = generation = done = waiting = 0
    with Lab(SIZE, lambda me: _member(me, rounds)) as lab:
        for _, key, text in lab.notes():
            if key == "round":
                aborted += 1
                lost += text != "0"
                waiting += 1
                if waiting == SIZE:
                    waiting = 0
                    lab.stop(generation)
                    generation += 1
            done += key == "done"
            if done == SIZE:
                lab.stop(1_000_000)
                break
    print(f"{lost} of {aborted} aborted groups had an operation that did not end")


if __name__ == "__main__":
    main()
