"""What copies in memory cost a step: the example's model under FSDP2, sharded over all ranks,
against plain FSDP2 over gloo, with copies off, sync and async, each rank on a node of its own.

Each job steps in interleaved pairs of blocks (steppairs.py); the ways take turns, in rounds, so
that what else the machine does falls on all alike. The figure is the median of the pairwise ratios
on rank 0 with its bootstrap 95 % confidence interval, and the median of the milliseconds that a
step takes longer than the plain one beside it, against what a bare copy of the same bytes into
mapped shared memory takes in the same minute.

    python benchmarks/bench_copies.py [--pairs 20] [--rounds 3]
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.bench_step import RANKS, run_case
from benchmarks.figures import median_interval, save, table

WAYS = ("off", "sync", "async")
BLOCK = 5
"""Steps of each kind in a pair: what is on its way beside a step falls on steps of its own kind."""
_COPIES = 20  # of which the median counts


def bare_copy_ms(nbytes: int) -> float:
    """A copy of `nbytes` into shared memory that is mapped and has been written to before."""
    source = os.urandom(nbytes)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        with mmap.mmap(file.fileno(), nbytes) as area:
            took = []
            for _ in range(_COPIES):
                begun = time.perf_counter()
                area[:] = source
                took.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(took[1:])


def run(way: str, pairs: int) -> list[dict[str, Any]]:
    """One job; what each rank measured."""
    layout = ["--local-nodes", str(RANKS), "--nproc-per-node", "1", "--copies", way]
    return run_case(pairs, BLOCK, "fsdp", layout=layout, metered=0)


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of copies in a step.")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    longer: dict[str, list[float]] = {way: [] for way in WAYS}
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    bare: list[float] = []
    nbytes, loads = 0, []
    for _ in range(args.rounds):
        for way in WAYS:
            ranks = run(way, args.pairs)
            seconds = ranks[0]["seconds"]
            taken = list(zip(seconds["everstep"], seconds["plain"], strict=True))
            ratios[way] += [own / plain for own, plain in taken]
            longer[way] += [1e3 * (own - plain) / BLOCK for own, plain in taken]
            nbytes = ranks[0]["state_bytes"]
            loads.append(os.getloadavg()[0])
        bare.append(bare_copy_ms(nbytes))
    results: dict[str, Any] = {"shard_bytes": nbytes, "bare_copy_ms": statistics.median(bare)}
    results["load"] = statistics.median(loads)
    for way in WAYS:
        low, high = median_interval(ratios[way])
        results[way] = {
            "pairs": len(ratios[way]),
            "ratio": statistics.median(ratios[way]),
            "ratio_low": low,
            "ratio_high": high,
            "longer_ms": statistics.median(longer[way]),
        }
    rows = [
        [
            way,
            f"{results[way]['ratio']:.3f}",
            f"{results[way]['ratio_low']:.3f} to {results[way]['ratio_high']:.3f}",
            f"{results[way]['longer_ms']:.1f}",
        ]
        for way in WAYS
    ]
    print(table(["copies", "ratio to plain FSDP2", "95 %", "ms longer"], rows))
    print(
        f"a bare copy of the {nbytes} bytes of a shard: {results['bare_copy_ms']:.2f} ms; load "
        f"{results['load']:.1f}; written to {save('copies', results)}"
    )


if __name__ == "__main__":
    main()
