"""What the benchmarks share: medians, their uncertainty, tables, and where results are kept.

Does not know what is measured."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
EXAMPLE = ROOT / "examples" / "gpt.py"


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median_interval(
    values: Sequence[float], *, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """The bootstrap 95 % confidence interval of the median, the same for the same values."""
    draw = random.Random(seed)
    medians = [statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples)]
    return quantile(medians, 0.025), quantile(medians, 0.975)


def save(name: str, figures: dict[str, Any]) -> Path:
    """Write `figures` to benchmarks/results/NAME.json, with what they were measured on."""
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine, **figures}, indent=1) + "\n", encoding="utf-8")
    return path


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows under headings: the first column to the left, numbers to the right."""
    cells = [
        [
            cell if isinstance(cell, str) else f"{cell:.3g}" if cell < 10 else f"{cell:.1f}"
            for cell in row
        ]
        for row in rows
    ]
    widths = [max(len(row[i]) for row in [list(headings), *cells]) for i in range(len(headings))]
    lines = []
    for row in [list(headings), *cells]:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)


def everstep_run(arguments: Sequence[str], limit_s: float) -> None:
    """`everstep run` with these arguments, from this checkout, within `limit_s` seconds. Blocks.
    Raises CalledProcessError when it fails, after all it said."""
    command = [sys.executable, "-m", "everstep.cli", "run", *arguments]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in paths if path))
    done = subprocess.run(
        command, env=environ, cwd=ROOT, timeout=limit_s, capture_output=True, text=True
    )
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        done.check_returncode()
