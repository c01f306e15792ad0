"""How long ranks take to learn each other's addresses: one round through the coordinator, beside
torch's TCPStore.

Every rank is a process, and so is each agent (of eight ranks), the coordinator and the TCPStore's
server. Our way is the one that jobs on nodes take: rank, its agent, an encrypted connection, the
coordinator's shell, and back. Both ways serve the same calls, those that gloo of torch 2.13 makes:
one `set`, then for each rank a `wait` and a `get`, with values of gloo's size. A third way is the
best that a caller could make of a TCPStore: one `wait` and one `multi_get` for all keys. The
TCPStore's connections stand already, as ours do.

A round lasts from its first rank's first call to its last rank's last answer. The ways are taken in
turn, in changing order; a ratio is the median of the ratios within rounds, with its 95 % interval.

What is counted and not timed: the messages and bytes for 1,000 nodes of eight ranks, from the real
shell with effects that only count.

    python benchmarks/bench_exchange.py [ROUNDS]
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import itertools
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.figures import median_interval, save, table

from everstep.agent.channel import AgentChannel
from everstep.coordinator import CoordinatorShell
from everstep.wire import messages, nodes
from everstep.wire.frames import Limits, encode_data
from everstep.wire.network import Hub, Link
from everstep.wire.secret import Secret, make_secret
from everstep.worker.control import Control
from everstep.worker.inner import Entry, ExchangeStore

HOST: Final = "127.0.0.1"
RANKS_PER_NODE: Final = 8
WORLDS: Final = (8, 32, 64)
OURS, STORE, BATCHED = "one round", "TCPStore as gloo calls it", "TCPStore in one call"
NCCL_ID_BYTES: Final = 128
DEADLINE_S: Final = 60.0
LIMITS: Final = Limits(lease_s=DEADLINE_S)  # the machine is far busier than its ranks' number says
fork = multiprocessing.get_context("fork")


def gloo_value(world: int) -> bytes:
    """What gloo sets, as long as torch 2.13 makes it for a group of `world` ranks."""
    return bytes(154 + 8 * world)


# ---------------------------------------------------------------------- the calls of a rank


def as_gloo(store: Store, rank: int, world: int) -> None:
    """Learn all addresses as gloo does."""
    store.set(f"0/{rank}", gloo_value(world))  # type: ignore[arg-type]  # bytes are taken
    for peer in range(world):
        store.wait([f"0/{peer}"])
        store.get(f"0/{peer}")


def batched(store: Store, rank: int, world: int) -> None:
    """Learn all addresses in as few calls as a TCPStore has."""
    keys = [f"0/{peer}" for peer in range(world)]
    store.set(f"0/{rank}", gloo_value(world))  # type: ignore[arg-type]
    store.wait(keys)
    store.multi_get(keys)


def take_part(
    rank: int, world: int, rounds: int, sock: socket.socket, store_port: int, shared: Shared
) -> None:
    """A rank's process."""
    control = Control(sock, lambda _: None)
    control.start()
    tcp = TCPStore(
        HOST,
        store_port,
        None,
        False,
        datetime.timedelta(seconds=DEADLINE_S),
        wait_for_workers=False,
    )

    def ours(number: int) -> Store:
        exchange = functools.partial(exchanged, control, number, rank, world)
        return ExchangeStore(HOST, 40_000 + rank, exchange)

    def theirs(number: int) -> Store:
        return PrefixStore(str(number), tcp)

    ways: tuple[tuple[Callable[[int], Store], Callable[[Store, int, int], None]], ...] = (
        (ours, as_gloo),
        (theirs, as_gloo),
        (theirs, batched),
    )
    for number in range(rounds * len(ways)):
        make, learn = ways[way_of(number, len(ways))]
        store = make(number)
        shared.meet()
        shared.begun[rank] = time.monotonic()
        learn(store, rank, world)
        shared.ended[rank] = time.monotonic()
        shared.meet()


def exchanged(
    control: Control, number: int, rank: int, world: int, payload: bytes
) -> dict[int, bytes]:
    return control.exchange(number, "world", rank, world, payload, DEADLINE_S)


def way_of(number: int, ways: int) -> int:
    """Which way the measurement `number` takes: each once a round, another first in each."""
    turn, place = divmod(number, ways)
    return (turn + place) % ways


class Shared:
    """What ranks and the one who measures have in common."""

    def __init__(self, world: int) -> None:
        self._barrier = fork.Barrier(world + 1)
        self.begun: Any = fork.Array("d", world, lock=False)
        self.ended: Any = fork.Array("d", world, lock=False)

    def meet(self) -> None:
        """Wait for all. Raises BrokenBarrierError when somebody does not come."""
        self._barrier.wait(DEADLINE_S)


# ---------------------------------------------------------------------- agents and coordinator


class Routes:
    """The shell's effects: answers go to the agent of the rank's node."""

    def __init__(self) -> None:
        self.peers: dict[int, int] = {}  # by rank
        self.hub: Hub[nodes.FromNode] | None = None

    def send_all(self, members: Iterable[tuple[int, int]], message: messages.ToWorker) -> None:
        assert self.hub is not None
        by_peer: dict[int, list[tuple[int, int]]] = {}
        for member in members:
            by_peer.setdefault(self.peers[member[0]], []).append(member)
        for peer, there in by_peer.items():
            self.hub.send(peer, nodes.Tell(to=tuple(there), message=message))

    def took(self, shell: CoordinatorShell, peer: int, message: nodes.FromNode) -> None:
        if isinstance(message, nodes.Said):
            self.peers[message.rank] = peer
            shell.message(message.rank, message.incarnation, message.message)


def coordinate(secret: Secret, pipe: Connection) -> None:
    """The coordinator's process: tells its port, and ends when told to."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        routes, over = Routes(), asyncio.Event()
        shell = bare_shell(routes, loop.call_at)
        routes.hub = Hub(
            host=HOST,
            ports=range(1),
            secret=secret,
            receives=nodes.FromNode,
            on_joined=lambda *_: None,
            on_message=functools.partial(routes.took, shell),
            on_lost=lambda *_: None,
            on_refused=lambda *_: None,
            limits=LIMITS,
        )
        loop.add_reader(pipe.fileno(), over.set)
        pipe.send(routes.hub.port)
        await over.wait()
        routes.hub.close()

    asyncio.run(serve())


def bare_shell(effects: Any, call_at: Any) -> CoordinatorShell:
    """The real shell; what it does for exchanges needs no core, and of effects only `send`."""
    core: Any = None
    return CoordinatorShell(core, effects, (), call_at)


def be_agent(
    secret: Secret, port: int, socks: Mapping[int, socket.socket], pipe: Connection
) -> None:
    """An agent's process: says when it is connected, and ends when told to."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        channels: dict[int, AgentChannel[messages.FromWorker]] = {}

        def from_worker(rank: int, message: messages.FromWorker) -> None:
            link.send(nodes.Said(rank=rank, incarnation=0, message=message))

        def from_coordinator(message: nodes.ToNode) -> None:
            if isinstance(message, nodes.Tell):
                for rank, _ in message.to:
                    channels[rank].send(message.message)

        def joined() -> None:
            for rank, sock in socks.items():
                channels[rank] = AgentChannel(
                    loop,
                    sock,
                    messages.FromWorker,
                    functools.partial(from_worker, rank),
                    lambda _: over.set(),
                )
            pipe.send("joined")

        link: Link[nodes.ToNode] = Link(
            host=HOST,
            port=port,
            secret=secret,
            receives=nodes.ToNode,
            on_joined=joined,
            on_message=from_coordinator,
            on_lost=lambda _: over.set(),
            on_waiting=lambda _: None,
            limits=LIMITS,
        )
        loop.add_reader(pipe.fileno(), over.set)
        await over.wait()
        link.close()

    asyncio.run(serve())


def serve_store(pipe: Connection) -> None:
    """The process of the TCPStore's server: tells its port, and ends when told to."""
    store = TCPStore(HOST, 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


class Helpers:
    """Processes that serve until they are told to end."""

    def __init__(self) -> None:
        self._running: list[tuple[Any, Connection]] = []

    def start(self, serve: Callable[[Connection], None]) -> Connection:
        ours, theirs = fork.Pipe()
        process = fork.Process(target=serve, args=(theirs,))
        process.start()
        theirs.close()
        self._running.append((process, ours))
        return ours

    def end(self) -> None:
        for process, pipe in reversed(self._running):
            pipe.send("end")
            process.join(DEADLINE_S)
            pipe.close()


def received(pipe: Connection) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise SystemExit(f"a helper has said nothing for {DEADLINE_S:g} s")
    return pipe.recv()


def measure(world: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by way."""
    secret, shared, helpers = make_secret(), Shared(world), Helpers()
    store_port = received(helpers.start(serve_store))
    port = received(helpers.start(functools.partial(coordinate, secret)))
    pairs = [socket.socketpair() for _ in range(world)]
    ranks = []
    for rank, (_, theirs) in enumerate(pairs):
        arguments = (rank, world, rounds, theirs, store_port, shared)
        ranks.append(fork.Process(target=take_part, args=arguments))
        ranks[-1].start()
    for first in range(0, world, RANKS_PER_NODE):
        mine = {rank: pairs[rank][0] for rank in range(first, first + RANKS_PER_NODE)}
        serve = functools.partial(be_agent, secret, port, mine)
        received(helpers.start(serve))
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
    ways = (OURS, STORE, BATCHED)
    taken_s: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds * len(ways)):
        shared.meet()
        shared.meet()
        taken_s[ways[way_of(number, len(ways))]].append(max(shared.ended) - min(shared.begun))
    for process in ranks:
        process.join(DEADLINE_S)
    helpers.end()
    return taken_s


# ---------------------------------------------------------------------- counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What passes the coordinator for one group: messages and bytes that come in and go out."""

    messages_in: int
    bytes_in: int
    messages_out: int
    bytes_out: int


class Counter:
    """Effects of the shell that only count. All answers are one message but for the ranks in front,
    so one is encoded."""

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0

    def send_all(self, members: Iterable[tuple[int, int]], message: messages.ToWorker) -> None:
        answer_bytes = len(msgspec.msgpack.encode(message))
        bye = messages.Bye()
        for _, there in itertools.groupby(members, lambda member: member[0] // RANKS_PER_NODE):
            self.messages += 1
            self.bytes += size_of(nodes.Tell(to=tuple(there), message=bye)) + answer_bytes
            self.bytes -= len(msgspec.msgpack.encode(bye))


def size_of(message: msgspec.Struct) -> int:
    return len(encode_data(message, sys.maxsize))


def count(world: int, payload: Callable[[int], bytes]) -> Counts:
    """Run the addresses of one group of `world` ranks through the real shell. `payload(rank)`: what
    the rank puts."""
    counter = Counter()
    shell = bare_shell(counter, lambda *_: None)
    bytes_in = 0
    for rank in range(world):
        address = messages.Address(
            generation=0, group="world", rank=rank, size=world, payload=payload(rank)
        )
        bytes_in += size_of(nodes.Said(rank=rank, incarnation=rank, message=address))
        shell.message(rank, rank, address)
    return Counts(
        messages_in=world,
        bytes_in=bytes_in,
        messages_out=counter.messages,
        bytes_out=counter.bytes,
    )


def gloo_payload(world: int, rank: int) -> bytes:
    """A rank's entry for a group of gloo's."""
    keys = {f"0/{rank}": gloo_value(world)}
    return msgspec.msgpack.encode(Entry(host="10.0.0.1", port=40_000, keys=keys))


def nccl_payload(rank: int) -> bytes:
    """A rank's entry for a group of nccl's: only one has something to say."""
    return msgspec.msgpack.encode({"0": bytes(NCCL_ID_BYTES)} if rank == 0 else {})


def largest_gloo_world(limits: Limits | None = None) -> int:
    """The most ranks of which a gloo group's addresses fit into one message."""
    cap = (limits or Limits()).max_message_bytes
    fits, too_many = 1, 1 << 16
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if middle * (len(gloo_payload(middle, middle)) + 6) < cap:
            fits = middle
        else:
            too_many = middle
    return fits


def store_calls(world: int) -> int:
    """Requests to a TCPStore that gloo makes for one group."""
    return world * (1 + 2 * world)


def counted_rows(nodes_count: int) -> list[list[Any]]:
    world = nodes_count * RANKS_PER_NODE
    rows: list[list[Any]] = []
    for name, payload in (
        ("gloo, 2048 ranks", functools.partial(gloo_payload, 2048)),
        (f"nccl, {world} ranks", nccl_payload),
    ):
        size = 2048 if name.startswith("gloo") else world
        counts = count(size, payload)
        rows.append(
            [
                name,
                float(counts.messages_in + counts.messages_out),
                counts.bytes_in / 2**20,
                counts.bytes_out / 2**20,
                float(store_calls(size)) if name.startswith("gloo") else float(size + 1),
            ]
        )
    return rows


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    figures: dict[str, Any] = {"rounds": rounds, "timed": {}}
    rows = []
    for world in WORLDS:
        taken_s = measure(world, rounds)
        row: list[Any] = [f"{world} ranks"]
        entry: dict[str, Any] = {}
        for way, values in taken_s.items():
            entry[way] = {"median_ms": 1e3 * statistics.median(values)}
            row.append(1e3 * statistics.median(values))
        for way in (STORE, BATCHED):
            ratios = [ours / other for ours, other in zip(taken_s[OURS], taken_s[way], strict=True)]
            low, high = median_interval(ratios)
            entry[way] |= {"ours_to_it": statistics.median(ratios), "interval": [low, high]}
            row.append(f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]")
        figures["timed"][world] = entry
        rows.append(row)
    headings = ["addresses, ms", OURS, STORE, BATCHED, "ours / as gloo", "ours / one call"]
    print(table(headings, rows))
    counted = counted_rows(1000)
    print(
        table(["coordinator, one group", "messages", "MiB in", "MiB out", "store's calls"], counted)
    )
    figures["counted"] = {row[0]: row[1:] for row in counted}
    figures["largest_gloo_world"] = largest_gloo_world()
    print(f"a gloo group's addresses fit into one message up to {largest_gloo_world()} ranks")
    print(f"written to {save('exchange', figures)}")


if __name__ == "__main__":
    main()
