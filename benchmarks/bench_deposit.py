"""How long the ranks of a node wait until their capsules are safe: with a guardian, beside a round
through the coordinator.

Eight ranks hand over a capsule each, at once, and wait for the last acknowledgement. *Guardian*: as
agents do it (agent/keeping.py over agent/neighbours.py), the other agent in a process of its own.
*Coordinator*: the same capsules to a process that keeps them likewise (keepsakes.py) and answers
each over the same kind of connection. That process serves all nodes of a job, a guardian one or
two: so the second way is also measured with the capsules of more nodes in front of it, all sent at
once by this process. Ways are taken in changing order; a ratio is the median of the ratios within
rounds.

Counted and not timed: the messages of a step (tests/unit/test_agent_keeping.py counts them too).

    python benchmarks/bench_deposit.py [ROUNDS]
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.figures import median_interval, save, table

from everstep.agent.keeping import Keeping
from everstep.agent.neighbours import Events, Neighbours
from everstep.keepsakes import Keepsakes
from everstep.wire import nodes
from everstep.wire.messages import Capsule, Kept
from everstep.wire.network import Hub, Limits, Link
from everstep.wire.peers import Deposit, Deposited, Withdrawn
from everstep.wire.secret import Secret, make_secret

HOST: Final = "127.0.0.1"
RANKS: Final = 8
CAPSULE_BYTES: Final = 4096
NODES: Final = (1, 8, 64)
HOME, GUARDIAN = 0, 1
LIMITS: Final = Limits(lease_s=60.0)  # the machine may be far busier than a job's host
DEADLINE_S: Final = 60.0
END: Final = "end"
fork = multiprocessing.get_context("fork")


class Side:
    """An agent's connections to its peers, and what it keeps."""

    def __init__(self, node: int, secret: Secret, on_kept: Callable[[int, int, int], None]) -> None:
        self.joined = asyncio.Event()
        self.neighbours = Neighbours(
            host=HOST,
            ports=range(1),
            secret=secret,
            limits=LIMITS,
            events=Events(
                on_joined=self._on_joined,
                on_lost=lambda node, why: sys.exit(f"lost {node}: {why}"),
                on_unreached=lambda node, why: sys.exit(f"can't reach {node}: {why}"),
                on_asked=self._asked,
                on_answered=self._answered,
                on_refused=lambda *_: None,
            ),
        )
        self.neighbours.begin(node)
        self.keeping = Keeping(self.neighbours, on_kept)

    def meet(self, node: int, port: int) -> None:
        order = nodes.Peers(addresses={node: (HOST, port)}, guardian=node)
        self.neighbours.peers(order)
        self.keeping.peers(order)

    def _on_joined(self, node: int) -> None:
        self.keeping.joined(node)
        self.joined.set()

    def _asked(self, node: int, message: object) -> None:
        assert isinstance(message, Deposit | Withdrawn)
        self.keeping.asked(node, message)

    def _answered(self, node: int, message: object) -> None:
        assert isinstance(message, Deposited)
        self.keeping.answered(node, message)


# ---------------------------------------------------------------------- the others' processes


async def _until_told(pipe: Connection) -> None:
    """Answer each question with the CPU time used so far, in seconds, until told to end."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def read() -> None:
        if pipe.recv() == END:
            loop.remove_reader(pipe.fileno())
            ended.set()
        else:
            used = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send(used.ru_utime + used.ru_stime)

    loop.add_reader(pipe.fileno(), read)
    await ended.wait()


def guard(secret: Secret, pipe: Connection) -> None:
    """Be the guardian."""

    async def run() -> None:
        side = Side(GUARDIAN, secret, lambda *_: None)
        pipe.send(side.neighbours.port)
        await _until_told(pipe)
        side.neighbours.close()

    asyncio.run(run())


def coordinate(secret: Secret, pipe: Connection) -> None:
    """Be what of the coordinator has to do with capsules."""

    async def run() -> None:
        kept = Keepsakes()

        def said(peer: int, message: nodes.Said) -> None:
            rank, incarnation, capsule = message.rank, message.incarnation, message.message
            assert isinstance(capsule, Capsule)
            kept.take(rank, incarnation, capsule)
            answer = Kept(turn=capsule.turn)
            hub.send(peer, nodes.Tell(to=((rank, incarnation),), message=answer))

        hub: Hub[nodes.Said] = Hub(
            host=HOST,
            ports=range(1),
            secret=secret,
            receives=nodes.Said,
            on_joined=lambda *_: None,
            on_message=said,
            on_lost=lambda *_: None,
            on_refused=lambda *_: None,
            limits=LIMITS,
        )
        pipe.send(hub.port)
        await _until_told(pipe)
        hub.close()

    asyncio.run(run())


class Other:
    """One of these processes."""

    def __init__(self, target: Callable[[Secret, Connection], None], secret: Secret) -> None:
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=target, args=(secret, theirs), daemon=True)
        self._process.start()
        self.port = int(self._pipe.recv())

    def cpu_s(self) -> float:
        self._pipe.send("cpu")
        return float(self._pipe.recv())

    def end(self) -> None:
        self._pipe.send(END)
        self._process.join(DEADLINE_S)


# ---------------------------------------------------------------------- the rounds


class Bench:
    """This process: the ranks' agent, of one node or of many."""

    def __init__(self, secret: Secret, coordinator: Other) -> None:
        self._waits = 0
        self._done = asyncio.Event()
        self._turn = 0
        self._step = 0
        self.linked = asyncio.Event()
        self.side = Side(HOME, secret, lambda *_: self._safe())
        self.link: Link[nodes.Tell] = Link(
            host=HOST,
            port=coordinator.port,
            secret=secret,
            receives=nodes.Tell,
            on_joined=self.linked.set,
            on_message=lambda _: self._safe(),
            on_lost=lambda why: sys.exit(why),
            on_waiting=lambda why: sys.exit(why),
            limits=LIMITS,
        )

    def _safe(self) -> None:
        self._waits -= 1
        if self._waits == 0:
            self._done.set()

    async def step(self, hand_over: Callable[[int, Capsule], None], ranks: int) -> float:
        """Seconds from the first capsule handed over to the last that is safe."""
        self._step += 1
        self._waits = ranks
        self._done.clear()
        began_s = time.perf_counter()
        for rank in range(ranks):
            self._turn += 1
            hand_over(rank, Capsule(step=self._step, payload=bytes(CAPSULE_BYTES), turn=self._turn))
        await asyncio.wait_for(self._done.wait(), DEADLINE_S)
        return time.perf_counter() - began_s

    def to_guardian(self, rank: int, capsule: Capsule) -> None:
        self.side.keeping.said(rank, 1, capsule)

    def to_coordinator(self, rank: int, capsule: Capsule) -> None:
        self.link.send(nodes.Said(rank=rank, incarnation=1, message=capsule))


async def measure(rounds: int, secret: Secret, guardian: Other, coordinator: Other) -> None:
    """Take the rounds, print a table, and save."""
    bench = Bench(secret, coordinator)
    bench.side.meet(GUARDIAN, guardian.port)
    await asyncio.wait_for(bench.side.joined.wait(), DEADLINE_S)
    await asyncio.wait_for(bench.linked.wait(), DEADLINE_S)
    seconds: dict[str, list[float]] = {}
    cpu_us = {}
    order = random.Random(0)
    ways = [("guardian", 1)] + [("coordinator", count) for count in NODES]
    for _ in range(rounds):
        order.shuffle(ways)
        for way, count in ways:
            hand_over = bench.to_guardian if way == "guardian" else bench.to_coordinator
            name = f"{way}, {count} node{'s' * (count > 1)}"
            took_s = await bench.step(hand_over, count * RANKS)
            seconds.setdefault(name, []).append(took_s)
    for other, name, hand_over in (
        (guardian, "guardian", bench.to_guardian),
        (coordinator, "coordinator", bench.to_coordinator),
    ):
        before_s = other.cpu_s()
        for _ in range(rounds):
            await bench.step(hand_over, RANKS)
        cpu_us[name] = (other.cpu_s() - before_s) / (rounds * RANKS) * 1e6
    bench.side.neighbours.close()
    bench.link.close()
    report(seconds, cpu_us)


def report(seconds: dict[str, list[float]], cpu_us: dict[str, float]) -> None:
    """Print, and save."""
    base = seconds["guardian, 1 node"]
    rows, figures = [], {}
    for name, values in sorted(seconds.items(), key=lambda item: statistics.median(item[1])):
        ratios = [value / of for value, of in zip(values, base, strict=True)]
        low, high = median_interval(ratios)
        median_ms, ratio = statistics.median(values) * 1e3, statistics.median(ratios)
        rows.append((name, f"{median_ms:.2f}", f"{ratio:.2f} ({low:.2f} to {high:.2f})"))
        figures[name] = {"ms": median_ms, "to_guardian": ratio, "low": low, "high": high}
    print(table(("capsules of", "ms until all are safe", "to the guardian (95 %)"), rows))
    for name, used_us in cpu_us.items():
        print(f"CPU of the {name} for a capsule: {used_us:.0f} us")
    load = os.getloadavg()[0]
    print(f"load {load:.1f}")
    save("deposit", {"ways": figures, "cpu_us": cpu_us, "load": load, "rounds": len(base)})


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    secret = make_secret()
    guardian, coordinator = Other(guard, secret), Other(coordinate, secret)
    try:
        asyncio.run(measure(rounds, secret, guardian, coordinator))
    finally:
        guardian.end()
        coordinator.end()


if __name__ == "__main__":
    main()
