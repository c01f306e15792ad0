"""How long the loss of a node costs: from the loss to the next commit by all ranks, less one clean
step.

Three nodes and a spare on this machine, one rank each, in two layouts: FSDP2 over all ranks with
`copies = sync`, and HSDP on two ranks a node. The node is lost in two ways: with all its processes
at once, so that its connection closes (`node:`), and by silence: its agent and its workers are
stopped in step 9, as a host whose network is cut. The bar is a lease and a second; one whose
connection closes is to be noticed within 100 ms. Each faulted run is compared with a clean one.

    python benchmarks/bench_nodes.py [--runs 5]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.figures import ROOT, save, table

from everstep.launch import evidence
from everstep.launch.local import run_job
from everstep.observe.journal import read_journal
from everstep.settings import RunSettings, resolve
from everstep.wire.messages import ScriptSpec

STEPS, FAULT_STEP, LOST = 16, 9, 1
SCRIPT = ROOT / "tests" / "scripts" / "layouts.py"
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"nproc_per_node": 1, "copies": "sync"},
    "hsdp": {"nproc_per_node": 2},
}
WAYS = ("closed", "silent")
_LEARNING_STEPS = 2  # slower than the others, and not what a clean step is


class Watch:
    """A view that shows nothing, and stops a node's processes when the time has come."""

    def __init__(self, way: str | None, ranks: Sequence[int]) -> None:
        self._way, self._ranks = way, ranks
        self._workers: dict[int, int] = {}
        self.lost_t: float | None = None

    def record(self, record: dict[str, Any]) -> None:
        """A record of the job's journal."""
        if record["event"] == "started":
            self._workers[record["rank"]] = record["pid"]
        elif record["event"] == "step" and record["step"] == FAULT_STEP - 1:
            if self._way == "silent":
                self._silence(record["t"])
        elif record["event"] == "fault_fired":
            self.lost_t = record["fired_t"]

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """Nothing."""

    def _silence(self, now: float) -> None:
        workers = [self._workers[rank] for rank in self._ranks]
        for pid in [_agent_of(workers[0]), *workers]:
            os.kill(pid, signal.SIGSTOP)
        self.lost_t = now


def _agent_of(worker: int) -> int:
    """The agent's process: the parent of the zygote that forked the worker."""
    return _parent(_parent(worker))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def settings_for(directory: Path, run_id: str, layout: str, way: str | None) -> RunSettings:
    """The settings of one run."""
    arguments: dict[str, Any] = {
        "script": ScriptSpec(
            target=str(SCRIPT), module=False, args=(layout, "--steps", str(STEPS))
        ),
        "local_nodes": 3,
        "spares": 1,
        "run_id": run_id,
        "log_dir": str(directory),
        "record": True,
        "quiet": True,
        "chaos": (f"node:index={LOST},step={FAULT_STEP}",) if way == "closed" else None,
        **LAYOUTS[layout],
    }
    return resolve(arguments, {})[0]


def run(directory: Path, run_id: str, layout: str, way: str | None) -> tuple[Path, dict[str, Any]]:
    """Run the script; its directory and what was measured. Raises SystemExit when it fails."""
    settings = settings_for(directory, run_id, layout, way)
    ranks = range(LOST * settings.nproc_per_node, (LOST + 1) * settings.nproc_per_node)
    watch = Watch(way, ranks)
    result = run_job(settings, watch)
    if result.exit_code != 0:
        sys.exit(f"{run_id} failed with exit code {result.exit_code}: {result.text}")
    if way is None:
        return result.run_dir, {}
    journal = list(read_journal(result.journal))
    lost_t = watch.lost_t
    assert lost_t is not None
    noticed_t = next(r["t"] for r in journal if r["event"] == "node_lost")
    commits = [record for record in journal if record["event"] == "step"]
    committed_t = next(r["t"] for r in commits if r["step"] >= FAULT_STEP and r["t"] > noticed_t)
    steps = [
        after["t"] - before["t"]
        for before, after in pairwise(commits)
        if before["step"] >= _LEARNING_STEPS
        and after["step"] == before["step"] + 1
        and not before["t"] <= lost_t <= after["t"]
    ]
    closed = [r for r in journal if r["event"] == "incident_closed"]
    return result.run_dir, {
        "noticed_ms": 1e3 * (noticed_t - lost_t),
        "cost_ms": 1e3 * (committed_t - lost_t - statistics.median(steps)),
        "lease_ms": 1e3 * settings.lease_s,
        "rungs": [record.get("rung") for record in closed],
        "steps_lost": sum(record.get("steps_lost", 0) for record in closed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a lost node.")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        path for path in (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")) if path
    )
    results: dict[str, Any] = {}
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for layout in LAYOUTS:
            clean_dir, _ = run(directory, f"{layout}-clean", layout, None)
            clean = evidence.read(clean_dir)
            for way in WAYS:
                runs = []
                for number in range(args.runs):
                    run_dir, figures = run(directory, f"{layout}-{way}-{number}", layout, way)
                    found = evidence.first_difference(clean, evidence.read(run_dir))
                    runs.append({**figures, "difference": str(found or "")})
                bar_ms = runs[0]["lease_ms"] + 1000
                cost_ms = statistics.median(figures["cost_ms"] for figures in runs)
                noticed_ms = statistics.median(figures["noticed_ms"] for figures in runs)
                equal = not any(figures["difference"] for figures in runs)
                lost = sum(figures["steps_lost"] for figures in runs)
                results[f"{layout} {way}"] = {
                    "median_ms": cost_ms,
                    "bar_ms": bar_ms,
                    "noticed_ms": noticed_ms,
                    "equal": equal,
                    "runs": runs,
                }
                rows.append([f"{layout}, {way}", noticed_ms, cost_ms, bar_ms, lost, str(equal)])
    print(table(["loss", "noticed ms", "cost ms", "bar ms", "steps lost", "equal"], rows))
    print(f"medians of {args.runs}; written to {save('nodes', results)}")
    if not all(figures["equal"] for figures in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
