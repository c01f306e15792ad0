"""What protection costs a step: the example's model under everstep against DDP over plain gloo.

Interleaved pairs in the same four processes, the order within the pair alternating, every timed
step begun together after a barrier of the plain group. The figure is the median of the pairwise
ratios on rank 0 with its bootstrap 95 % confidence interval. Four cases: the example's optimizer
(AdamW, with a scheduler), one with little state (SGD), AdamW in blocks of ten steps a pair, where
the agent's work after a commit falls on the steps of its own kind, and FSDP2 in the place of DDP,
which has a fence (its own cost stands in the breakdown).

Then where the time goes: parts of everstep's own code, wrapped from outside, on rank 0.

    python benchmarks/bench_step.py [--pairs 1000] [--case adamw]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.figures import ROOT, everstep_run, median_interval, save, table

RANKS = 4
GOAL_RATIO = {"adamw": 1.02, "sgd": 1.02, "blocks": 1.02, "fsdp": 1.03}
CASES = {"adamw": ("adamw", 1), "sgd": ("sgd", 1), "blocks": ("adamw", 10), "fsdp": ("fsdp", 1)}
"""Name to the optimizer, and the steps of each kind in a pair."""
_LIMIT_S = 1200


def run_case(
    pairs: int,
    block: int,
    optimizer: str,
    *,
    layout: Sequence[str] = ("--nproc-per-node", str(RANKS)),
    metered: int = 200,
) -> list[dict[str, Any]]:
    """One job of pairs; what each rank measured. `layout`: options of everstep run, for RANKS
    ranks; `metered`: steps for the breakdown. Raises CalledProcessError when the job fails."""
    with tempfile.TemporaryDirectory() as directory:
        script = [str(ROOT / "benchmarks" / "steppairs.py"), "--pairs", str(pairs)]
        script += ["--block", str(block), "--optimizer", optimizer, "--out", directory]
        script += ["--metered", str(metered)]
        options = [*layout, "--quiet", "--log-dir", f"{directory}/runs"]
        everstep_run([*options, *script], _LIMIT_S)
        files = [Path(directory) / f"rank{rank}.json" for rank in range(RANKS)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def figures_of(ranks: list[dict[str, Any]], block: int, goal: float) -> dict[str, Any]:
    """The case's figures; times in milliseconds a step."""
    own, plain = ranks[0]["seconds"]["everstep"], ranks[0]["seconds"]["plain"]
    ratios = [a / b for a, b in zip(own, plain, strict=True)]
    low, high = median_interval(ratios)
    every = [
        a / b
        for rank in ranks
        for a, b in zip(rank["seconds"]["everstep"], rank["seconds"]["plain"], strict=True)
    ]

    def cpu_ms(kind: str) -> float:
        medians: list[float] = [statistics.median(rank["cpu_s"][kind]) for rank in ranks]
        return 1e3 * statistics.mean(medians) / block

    return {
        "pairs": len(ratios),
        "steps_in_a_block": block,
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "ratio_all_ranks": statistics.median(every),
        "ratio_of_medians": statistics.median(own) / statistics.median(plain),
        "everstep_ms": 1e3 * statistics.median(own) / block,
        "plain_ms": 1e3 * statistics.median(plain) / block,
        "everstep_cpu_ms": cpu_ms("everstep"),
        "plain_cpu_ms": cpu_ms("plain"),
        "agent_cpu_ms": 1e3 * ranks[0]["agent_cpu_s_per_step"],
        "equal": all(rank["equal"] for rank in ranks) if block == 1 else None,
        "goal": goal,
        "goal_met": statistics.median(ratios) <= goal,
        "parts": ranks[0]["parts"],
    }


def show(name: str, case: dict[str, Any]) -> None:
    """The case in words."""
    print(
        f"{name}: ratio {case['ratio']:.4f} "
        f"(95 % {case['ratio_low']:.4f} to {case['ratio_high']:.4f}), "
        f"{case['pairs']} pairs of {case['steps_in_a_block']}; goal {case['goal']}"
    )
    print(
        f"  a step: {case['everstep_ms']:.2f} ms against {case['plain_ms']:.2f}; CPU a rank "
        f"{case['everstep_cpu_ms']:.2f} ms against {case['plain_cpu_ms']:.2f}, and the agent's "
        f"{case['agent_cpu_ms']:.2f}; all ranks' ratio {case['ratio_all_ranks']:.4f}"
    )
    if case["equal"] is False:
        print("  the two trainings differ at the end: they did not do the same work")


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a protected step.")
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--case", choices=CASES, action="append", help="all, when not given")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name in args.case or CASES:
        optimizer, block = CASES[name]
        pairs = max(20, args.pairs // block)
        results[name] = figures_of(run_case(pairs, block, optimizer), block, GOAL_RATIO[name])
        show(name, results[name])
    for name in results:
        parts = sorted(results[name]["parts"].items(), key=lambda item: -item[1]["cpu_us"])
        rows = [[part, p["calls"], p["cpu_us"], p["wall_us"]] for part, p in parts]
        print(f"\nwhere a step's time goes, {name}, rank 0, each part without those inside it:")
        print(table(["part", "calls", "CPU us", "wall us"], rows))
    print(f"\nwritten to {save('step', results)}")
    if any(case["equal"] is False for case in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
