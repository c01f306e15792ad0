"""Loads from the memory tier: 1 GiB with digests checked, into warm memory.

Two agents, processes of their own, stand for two hosts; an object lies with one of them, and this
process reads it as a rank of either. *own*: from its own host's memory, against a memory copy of
the same bytes (`memcpy`), and against the least that copies and checks (`copy and check`: a block
at a time, with its digest). *peer*: from the other host over loopback, against a bare loop of one
connection and of two with the same digests (bench_bulk.py). Each in one call, and as load.py asks:
in requests of 16 MiB, by two threads. All ways are taken in turn, in each
round; rates are medians over rounds, and a ratio is the median of the ratios within rounds.

    python benchmarks/bench_loads.py [ROUNDS [MIB]]
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.bench_bulk import area, serve, take_bare
from benchmarks.figures import median_interval, save, table

from everstep.snapshot import BLOCK_BYTES, block_spans, digest
from everstep.tiers.memory.client import MemoryStore, connect
from everstep.tiers.memory.ownership import directory_of
from everstep.wire.secret import Secret, make_secret

DEADLINE_S = 120.0
KEY = "bench/object"
AGENT = (sys.executable, "-m", "everstep.cli", "agent", "--interface", "lo")
REQUEST_BYTES = 16 << 20  # as load.py asks, by two threads


@contextmanager
def agent(name: str, secret: Secret, shm_dir: Path) -> Iterator[MemoryStore]:
    """An agent, and a rank of its host."""
    process = subprocess.Popen(
        [*AGENT, "--name", name, "--host", name],
        env=os.environ | {"EVERSTEP_SECRET": secret.reveal(), "EVERSTEP_SHM_DIR": str(shm_dir)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "may keep" in line:
                break
        store = connect(str(directory_of(shm_dir, secret, name) / "socket"), copies=1)
        yield store
        store.close()
    finally:
        process.terminate()
        process.communicate(timeout=60)


def measure(rounds: int, nbytes: int) -> dict[str, list[float]]:
    """For each way, GiB/s in each round."""
    secret = make_secret()
    with ExitStack() as stack, ThreadPoolExecutor(2) as lanes:
        here = stack.enter_context(area("from", nbytes))
        there = stack.enter_context(area("to", nbytes))
        for start, end in block_spans(nbytes, BLOCK_BYTES):
            here[start:end] = os.urandom(end - start)
            there[start:end] = bytes(end - start)
        blocks = [digest(here[start:end]) for start, end in block_spans(nbytes, BLOCK_BYTES)]
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        sender = multiprocessing.get_context("fork").Process(target=serve, args=(here, theirs))
        sender.start()
        _, bare_port = ours.recv()
        shm_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        own = stack.enter_context(agent("a", secret, shm_dir))
        peer = stack.enter_context(agent("b", secret, shm_dir))
        cards = [own.card(), peer.card()]
        for store in (own, peer):
            store.introduce(cards)
        own.put(KEY, [here], deadline_s=DEADLINE_S)

        def get(store: MemoryStore, start: int, end: int) -> None:
            with there[start:end] as part:
                store.get_checked(
                    KEY,
                    part,
                    start=start,
                    block_bytes=BLOCK_BYTES,
                    digests=blocks[start // BLOCK_BYTES : -(-end // BLOCK_BYTES)],
                    deadline_s=DEADLINE_S,
                )

        def load(store: MemoryStore, request_bytes: int) -> None:
            spans = list(block_spans(nbytes, request_bytes))
            for future in [lanes.submit(get, store, start, end) for start, end in spans]:
                future.result()

        def copy() -> None:
            there[:] = here

        def copy_and_check() -> None:
            for number, (start, end) in enumerate(block_spans(nbytes, BLOCK_BYTES)):
                there[start:end] = here[start:end]
                assert digest(there[start:end]) == blocks[number]

        def bare(connections: int) -> None:
            ours.send(("bare", connections))
            take_bare(bare_port, there, blocks, connections)
            ours.recv()

        ways: dict[str, Callable[[], None]] = {
            "memcpy": copy,
            "copy and check": copy_and_check,
            "own": lambda: load(own, nbytes),
            "own, requests": lambda: load(own, REQUEST_BYTES),
            "bare loop x1": lambda: bare(1),
            "bare loop x2": lambda: bare(2),
            "peer": lambda: load(peer, nbytes),
            "peer, requests": lambda: load(peer, REQUEST_BYTES),
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds + 1):
            for way, go in list(ways.items())[:: 1 if turn % 2 else -1]:
                begin_s = time.perf_counter()
                go()
                if turn:  # the first is a warm-up
                    found[way].append(nbytes / (1 << 30) / (time.perf_counter() - begin_s))
        ours.send(None)
        sender.join()
    return found


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    nbytes = (int(sys.argv[2]) if len(sys.argv) > 2 else 1024) << 20
    found = measure(rounds, nbytes)
    figures: dict[str, dict[str, float]] = {}
    rows = []
    against = {
        "copy and check": ["memcpy"],
        "own": ["memcpy"],
        "own, requests": ["memcpy"],
        "peer": ["bare loop x1", "bare loop x2"],
        "peer, requests": ["bare loop x1", "bare loop x2"],
    }
    for way, rates in found.items():
        figures[way] = {"gib_per_s": statistics.median(rates)}
        row: list[object] = [way, statistics.median(rates)]
        for base in against.get(way, []):
            ratios = [rate / other for rate, other in zip(rates, found[base], strict=True)]
            low, high = median_interval(ratios)
            figures[way] |= {
                f"to_{base}": statistics.median(ratios),
                f"to_{base}_low": low,
                f"to_{base}_high": high,
            }
            row += [f"to {base}", statistics.median(ratios), low, high]
        rows.append([*row, *[""] * (10 - len(row))])
    heads = ["way", "GiB/s", "", "ratio", "from", "to", "", "ratio", "from", "to"]
    print(table(heads, rows))
    print(f"written to {save('loads', {'nbytes': nbytes, 'rounds': rounds, 'ways': figures})}")


if __name__ == "__main__":
    main()
