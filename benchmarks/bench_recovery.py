"""How long a failure costs: from the fault to the next commit by all ranks, less one clean step.

The example on four ranks, once clean and five times with each fault: a kill in mid-backward, and an
exception in mid-forward. All is read from the journals: the fault's moment, the commits, the stages
of the incident; the clean step is the median of the same run's. Every faulted run is compared with
the clean one, as `everstep prove` does, so that no fast but wrong recovery counts.

    python benchmarks/bench_recovery.py [--runs 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.figures import EXAMPLE, ROOT, save, table

from everstep.core.goodput import fold
from everstep.launch import evidence
from everstep.launch.local import run_job
from everstep.observe.journal import read_journal
from everstep.settings import RunSettings, resolve
from everstep.types import Stage
from everstep.wire.messages import ScriptSpec

RANKS = 4
FAULTS = {  # and the bar, in seconds
    "kill:rank=1,step=5,at=backward": 0.5,
    "raise:rank=2,step=5,at=forward": 0.15,
}
_STAGES = (Stage.DETECT, Stage.STOP, Stage.START, Stage.REGROUP, Stage.STATE, Stage.FIRST_STEP)
_LEARNING_STEPS = 2  # slower than the others, and not what a clean step is


class Silent:
    """A view that shows nothing."""

    def record(self, record: dict[str, Any]) -> None:
        """Nothing."""

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One faulted run: seconds from the fault to the commit (`to_commit_s`), the median clean step,
    the stages, and whether the run's records equal the clean run's."""

    to_commit_s: float
    clean_step_s: float
    stages_s: Mapping[str, float]
    difference: str

    @property
    def cost_s(self) -> float:
        """What the failure cost: without the step that had to be made anyway."""
        return self.to_commit_s - self.clean_step_s


def settings_for(directory: Path, run_id: str, fault: str | None) -> RunSettings:
    """The settings of one run."""
    script = ScriptSpec(target=str(EXAMPLE), module=False, args=())
    arguments: dict[str, Any] = {
        "script": script,
        "nproc_per_node": RANKS,
        "run_id": run_id,
        "log_dir": str(directory),
        "record": True,
        "lift_budgets": True,
        "quiet": True,
        "chaos": (fault,) if fault is not None else None,
    }
    return resolve(arguments, {})[0]


def run(directory: Path, run_id: str, fault: str | None) -> tuple[Path, list[dict[str, Any]]]:
    """Run the example; its directory and its journal. Raises SystemExit when it fails."""
    result = run_job(settings_for(directory, run_id, fault), Silent())
    if result.exit_code != 0:
        sys.exit(f"{run_id} failed with exit code {result.exit_code}: {result.text}")
    return result.run_dir, list(read_journal(result.journal))


def measure(journal: Sequence[Mapping[str, Any]], difference: str) -> Recovery:
    """The one recovery in a journal. Raises StopIteration when no fault fired or none was
    survived."""
    fired = next(record for record in journal if record["event"] == "fault_fired")
    commits = [record for record in journal if record["event"] == "step"]
    committed_t = next(r["t"] for r in commits if r["step"] >= fired["step"])
    clean = [
        after["t"] - before["t"]
        for before, after in pairwise(commits)
        if before["step"] >= _LEARNING_STEPS
        and after["step"] == before["step"] + 1
        and not before["t"] <= fired["fired_t"] <= after["t"]
    ]
    (incident,) = fold(journal).incidents
    return Recovery(
        to_commit_s=committed_t - fired["fired_t"],
        clean_step_s=statistics.median(clean),
        stages_s={str(stage): incident.stages.get(stage, 0.0) for stage in _STAGES},
        difference=difference,
    )


def figures_of(recoveries: Sequence[Recovery], bar_s: float) -> dict[str, Any]:
    """All values and the medians, in milliseconds."""
    cost_s = statistics.median(r.cost_s for r in recoveries)
    return {
        "median_ms": 1e3 * cost_s,
        "bar_ms": 1e3 * bar_s,
        "bar_met": cost_s <= bar_s,
        "equal": not any(r.difference for r in recoveries),
        "values_ms": [1e3 * r.cost_s for r in recoveries],
        "clean_step_ms": [1e3 * r.clean_step_s for r in recoveries],
        "stages_ms": [{s: 1e3 * v for s, v in r.stages_s.items()} for r in recoveries],
    }


def show(fault: str, figures: Mapping[str, Any]) -> None:
    """The fault's figures in words and a table."""
    verdict = "met" if figures["bar_met"] else "MISSED"
    print(
        f"{fault}: median {figures['median_ms']:.0f} ms; bar {figures['bar_ms']:.0f} ms, {verdict}"
    )
    names = [str(stage) for stage in _STAGES]
    rows: list[list[Any]] = [
        [f"{number}", cost, step, *(stages[name] for name in names)]
        for number, (cost, step, stages) in enumerate(
            zip(figures["values_ms"], figures["clean_step_ms"], figures["stages_ms"], strict=True),
            start=1,
        )
    ]
    medians = [statistics.median(row[i] for row in rows) for i in range(1, len(names) + 3)]
    print(table(["run", "cost ms", "clean step", *names], [*rows, ["median", *medians]]))
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a failure.")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        path for path in (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")) if path
    )
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        clean_dir, _ = run(directory, "clean", None)
        clean = evidence.read(clean_dir)
        for index, (fault, bar_s) in enumerate(FAULTS.items()):
            recoveries = []
            for number in range(args.runs):
                run_dir, journal = run(directory, f"fault-{index}-{number}", fault)
                found = evidence.first_difference(clean, evidence.read(run_dir))
                recoveries.append(measure(journal, str(found or "")))
                if found is not None:
                    print(f"{fault}, run {number + 1} differs from the clean run: {found}")
            results[fault] = figures_of(recoveries, bar_s)
            show(fault, results[fault])
    print(f"written to {save('recovery', results)}")
    if not all(figures["equal"] for figures in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
