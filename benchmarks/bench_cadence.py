"""What saving costs the steps, by cadence: the example on two ranks, with blocks of ten steps in
which checkpoints are saved and blocks in which none are, in turn, in one job.

The figure is the median, over pairs of neighbouring blocks on rank 0, of the ratio of their times,
with its 95 % interval; beside it the 50th and 99th percentile of a step's time of either kind, the
save included, and what a bare copy of the saved bytes takes.

    python benchmarks/bench_cadence.py [--blocks 60]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.bench_copies import bare_copy_ms
from benchmarks.figures import ROOT, everstep_run, median_interval, save, table

RANKS, BLOCK = 2, 10
WAYS: dict[str, Sequence[str]] = {
    "memory, every step": ("--memory-every", "1"),
    "memory, every 10": ("--memory-every", "10"),
    "directory, every 10": ("--durable-every", "10"),
}
_LIMIT_S = 600.0


def run(way: Sequence[str], blocks: int) -> dict[str, Any]:
    """One job; what rank 0 has measured. Raises CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--nproc-per-node", str(RANKS), "--quiet", "--log-dir", f"{folder}/runs"]
        script = [str(ROOT / "benchmarks" / "cadencesteps.py"), *way]
        script += ["--blocks", str(blocks), "--out", folder]
        everstep_run([*options, *script], _LIMIT_S)
        found: dict[str, Any] = json.loads(Path(folder, "rank0.json").read_text())
        return found


def figures_of(times: Mapping[str, list[float]]) -> dict[str, Any]:
    """Ratios of neighbouring blocks, and percentiles in milliseconds."""
    blocks = {
        kind: [sum(steps[at : at + BLOCK]) for at in range(0, len(steps) - BLOCK + 1, BLOCK)]
        for kind, steps in times.items()
    }
    ratios = [s / p for s, p in zip(blocks["saving"], blocks["plain"], strict=False)]
    low, high = median_interval(ratios)
    found: dict[str, Any] = {
        "pairs": len(ratios),
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
    }
    for kind, steps in times.items():
        cuts = statistics.quantiles(steps, n=100)
        found[f"{kind}_p50_ms"], found[f"{kind}_p99_ms"] = 1e3 * cuts[49], 1e3 * cuts[98]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of saving, by cadence.")
    parser.add_argument("--blocks", type=int, default=60)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    results: dict[str, Any] = {"load_before": load}
    nbytes = 0
    rows: list[list[Any]] = []
    for name, way in WAYS.items():
        measured = run(way, args.blocks)
        found = results[name] = figures_of(measured["times"])
        nbytes = measured["nbytes"] // RANKS  # the ranks share the saving
        rows.append(
            [
                name,
                found["ratio"],
                f"{found['ratio_low']:.3f} to {found['ratio_high']:.3f}",
                *(found[f"{kind}_{p}_ms"] for kind in ("plain", "saving") for p in ("p50", "p99")),
            ]
        )
    head = ["saved", "ratio", "95 %", "plain p50 ms", "p99", "saving p50 ms", "p99"]
    print(table(head, rows))
    copy_ms = results["bare_copy_ms"] = bare_copy_ms(nbytes)
    print(
        f"a bare copy of one rank's {nbytes} bytes takes {copy_ms:.2f} ms; load before: {load:.1f}"
    )
    print(f"written to {save('cadence', results)}")


if __name__ == "__main__":
    main()
