"""The bulk plane against a bare loop: the same bytes, sink, digest and link, in the same run.

A sender in a process of its own gives 1 GiB from shared memory over loopback; this process receives
it into shared memory and digests it. The bare loop is what one would write without the plane: one
connection, `sendall` from the map, `recv_into` a block, XXH3 over it; and the same with two. What
the plane adds is the challenge, tickets, requests, and the bookkeeping by which a cut is resumed.
All ways are taken in turn, in each round; rates are medians over rounds, and a ratio is the median
of the ratios within rounds. CPU is of both processes.

    python benchmarks/bench_bulk.py [ROUNDS [MIB]]
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import xxhash
from benchmarks.figures import median_interval, save, table

from everstep.snapshot import BLOCK_BYTES, block_spans, digest
from everstep.wire.bulk import Caller, Listener, Offer, Sink, Source, fetch

KEY = b"a key that only this bench knows"
HOST = "127.0.0.1"
STREAMS = (1, 2, 4)
BARE = {count: f"bare loop x{count}" for count in (1, 2)}
DEADLINE_S = 120.0


@contextmanager
def area(name: str, nbytes: int) -> Iterator[memoryview]:
    """Shared memory, all of it taken."""
    path = Path(f"/dev/shm/everstep-bench-bulk-{os.getpid()}-{name}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        path.unlink()
        os.posix_fallocate(fd, 0, nbytes)
        with mmap.mmap(fd, nbytes) as mapped, memoryview(mapped) as view:
            yield view
    finally:
        os.close(fd)


def serve(view: memoryview, pipe: Connection) -> None:
    """The sender's process: does what it is told, one order at a time, until told to end."""
    listener = Listener(host=HOST, ports=[0], key=KEY, on_refused=lambda *_: None)
    bare = socket.create_server((HOST, 0))
    pipe.send((listener.port, bare.getsockname()[1]))
    while order := pipe.recv():
        before_s = cpu_s()
        match order:
            case ("lend",):
                lend(listener, view, pipe)
            case ("bare", int(connections)):
                give_bare(bare, view, connections)
        pipe.send(cpu_s() - before_s)
    bare.close()
    listener.close()


def lend(listener: Listener, view: memoryview, pipe: Connection) -> None:
    ended = threading.Event()
    source = Source(view)
    pipe.send(listener.lend(source, node=1, lifetime_s=DEADLINE_S, on_end=lambda _: ended.set()))
    ended.wait(DEADLINE_S)


def give_bare(listener: socket.socket, view: memoryview, connections: int) -> None:
    def give(sock: socket.socket, start: int, end: int) -> None:
        with sock, view[start:end] as part:
            sock.sendall(part)

    threads = []
    for start, end in shares(view.nbytes, connections):
        sock, _ = listener.accept()
        threads.append(threading.Thread(target=give, args=(sock, start, end)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def shares(nbytes: int, count: int) -> list[tuple[int, int]]:
    """The range cut into `count` parts, at the bounds of blocks."""
    cuts = [nbytes * i // count // BLOCK_BYTES * BLOCK_BYTES for i in range(count)] + [nbytes]
    return [(cuts[i], cuts[i + 1]) for i in range(count)]


def take_bare(port: int, view: memoryview, digests: list[str], connections: int) -> None:
    def take(sock: socket.socket, start: int, end: int) -> None:
        with sock:
            for first in range(start, end, BLOCK_BYTES):
                last = min(first + BLOCK_BYTES, end)
                with view[first:last] as part:
                    sock.recv_into(part, part.nbytes, socket.MSG_WAITALL)
                    if xxhash.xxh3_128_hexdigest(part) != digests[first // BLOCK_BYTES]:
                        raise SystemExit(f"the bare loop got wrong bytes at {first}")

    threads = []
    for start, end in shares(view.nbytes, connections):
        sock = socket.create_connection((HOST, port))
        threads.append(threading.Thread(target=take, args=(sock, start, end)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(rounds: int, nbytes: int) -> dict[str, list[tuple[float, float]]]:
    """For each way, in each round: GiB/s, and seconds of CPU for a GiB."""
    with area("from", nbytes) as here, area("to", nbytes) as there:
        for start, end in block_spans(nbytes, BLOCK_BYTES):
            here[start:end] = os.urandom(end - start)
            there[start:end] = bytes(end - start)
        digests = [digest(here[start:end]) for start, end in block_spans(nbytes, BLOCK_BYTES)]
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        sender = multiprocessing.get_context("fork").Process(target=serve, args=(here, theirs))
        sender.start()
        port, bare_port = ours.recv()

        def plane(streams: int) -> None:
            ours.send(("lend",))
            offer = Offer(host=HOST, port=port, ticket=ours.recv())
            sink = Sink(there, BLOCK_BYTES, digests)
            fetch(sink, [offer], Caller(key=KEY, node=1), deadline_s=DEADLINE_S, streams=streams)

        def bare(connections: int) -> None:
            ours.send(("bare", connections))
            take_bare(bare_port, there, digests, connections)

        ways: dict[str, Callable[[], None]] = {
            name: partial(bare, count) for count, name in BARE.items()
        }
        ways |= {f"plane x{streams}": partial(plane, streams) for streams in STREAMS}
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(rounds + 1):
            for way, go in list(ways.items())[:: 1 if turn % 2 else -1]:
                begin_s, begin_cpu_s = time.perf_counter(), cpu_s()
                go()
                took_s = time.perf_counter() - begin_s
                used_s = cpu_s() - begin_cpu_s + ours.recv()
                gib = nbytes / (1 << 30)
                if turn:  # the first is a warm-up
                    found[way].append((gib / took_s, used_s / gib))
        ours.send(None)
        sender.join()
    return found


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    nbytes = (int(sys.argv[2]) if len(sys.argv) > 2 else 1024) << 20
    found = measure(rounds, nbytes)
    figures = {}
    for way, values in found.items():
        rates = [rate for rate, _ in values]
        figures[way] = {
            "gib_per_s": statistics.median(rates),
            "cpu_s_per_gib": statistics.median(used for _, used in values),
        }
        for count, name in BARE.items():
            ratios = [rate / base for rate, (base, _) in zip(rates, found[name], strict=True)]
            low, high = median_interval(ratios)
            figures[way] |= {
                f"to_bare_x{count}": statistics.median(ratios),
                f"to_bare_x{count}_low": low,
                f"to_bare_x{count}_high": high,
            }
    print(
        table(
            ["way", "GiB/s", "CPU s/GiB", "to bare x1", "from", "to", "to bare x2", "from", "to"],
            [[way, *(value for value in row.values())] for way, row in figures.items()],
        )
    )
    print(f"written to {save('bulk', {'nbytes': nbytes, 'rounds': rounds, 'ways': figures})}")


if __name__ == "__main__":
    main()
