"""The script that bench_cadence.py runs: the example's training with checkpoints, which are saved
in every second block of steps and left out in the others.

Writes the time of each step, the save before it included, and the bytes of the state to
DIRECTORY/rankN.json.

    everstep run --nproc-per-node 2 benchmarks/cadencesteps.py --memory-every 1 --out DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import everstep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.steppairs import Training, load_example

_WARM_UP = 2  # blocks
_BLOCK = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-every", type=int, default=0)
    parser.add_argument("--durable-every", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = everstep.init()
    example = load_example()
    torch.manual_seed(run.rank)
    gpt = example.GPT(width=160, layers=3, heads=4, context=64, dropout=0.1)
    training = Training(gpt, None, "adamw")
    data = run.data(example.TextDataset(64, limit_bytes=2_000_000), batch_size=2, seed=0)
    things: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
    run.protect(**things, scheduler=training.scheduler, data=data)
    run.checkpoint(
        str(args.out / "durable") if args.durable_every else "",
        memory_every=args.memory_every,
        durable_every=args.durable_every,
    )
    saves: Any = run._saves
    between = saves.between

    def sometimes(*, last: bool = False) -> None:
        """Save in odd blocks only. The save of step s stands before step s + 1."""
        block = (run.committed - 1) // _BLOCK
        if last or block < _WARM_UP or block % 2:
            between(last=last)

    saves.between = sometimes
    train_step = run.step(training.step)
    times: dict[str, list[float]] = {"saving": [], "plain": []}
    until = (_WARM_UP + args.blocks) * _BLOCK
    begun = time.perf_counter()
    for batch in run.batches(until=until):
        # What came before this step in the loop is the save of the step before.
        kind = "saving" if ((run.committed - 1) // _BLOCK) % 2 else "plain"
        train_step(batch)
        ended = time.perf_counter()
        if run.committed > _WARM_UP * _BLOCK + 1:
            times[kind].append(ended - begun)
        begun = ended
    nbytes = 3 * sum(parameter.nbytes for parameter in gpt.parameters())  # and both moments
    found = {"times": times, "nbytes": nbytes}
    (args.out / f"rank{run.rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
