"""What a killed rank costs: everstep beside torchrun with DCP, NVRx and torchft, in one run.

The same model, the same batches and the same fault (SIGKILL of one rank of four in mid-backward),
each contestant in the best configuration known to us; docs/reference/peers.md says which. Each is
run once clean and `--runs` times with the fault, one after the other in turn, so that what else the
machine does meets all alike. Medians; all values are in the JSON. Takes about seven minutes on two
quiet cores, and two more the first time, for the peers' environments.

    make bench-peers            (everything, with the page and its picture written anew)
    python benchmarks/peers/bench.py [--runs 3] [--only everstep ...] [--publish]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.figures import ROOT, save
from benchmarks.peers import fold, jobs, picture
from benchmarks.peers.environments import Unavailable
from benchmarks.peers.workload import FAULT_RANK, FAULT_STEP, RANKS

_PAGE = ROOT / "docs" / "reference" / "peers.md"
_PICTURE = _PAGE.with_suffix(".svg")
_BEGIN, _END = "<!-- figures: make bench-peers -->\n", "<!-- end of figures -->"
_FAILED = ROOT / "build" / "peers" / "failed"
_QUIET = 0.5  # a load below which nothing else can be said to run
_HEADINGS = (
    "",
    "first step",
    "full strength, caught up",
    "steps lost",
    "steps with fewer ranks",
    "equal",
    "clean step",
)


@dataclass(slots=True)
class Score:
    """What is known of one contestant: its clean run, its recoveries, and what went wrong."""

    contestant: jobs.Contestant
    versions: dict[str, str] = field(default_factory=dict)
    clean: list[dict[str, Any]] = field(default_factory=list)
    recoveries: list[fold.Recovery] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def values(self, figure: str) -> list[float]:
        """A figure of all recoveries; empty when one lacks it: the rest would flatter."""
        found = [getattr(recovery, figure) for recovery in self.recoveries]
        return [] if None in found else found

    @property
    def equal(self) -> bool | None:
        """Whether every run ended with the clean one's bits; None when there is no run."""
        return not any(self.differences) if self.differences else None

    def figures(self) -> dict[str, Any]:
        """All of it, for JSON. Seconds."""
        names = ("first_step_s", "full_strength_s", "steps_lost", "short_steps")
        return {
            "title": self.contestant.title,
            "versions": self.versions,
            "medians": {name: _median(self.values(name)) for name in names},
            "equal": self.equal,
            "clean_step_s": fold.step_s(self.clean) if self.clean else None,
            "recoveries": [asdict(recovery) for recovery in self.recoveries],
            "differences": self.differences,
            "failures": self.failures,
        }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


# ---------------------------------------------------------------- measuring


def measure(scores: Sequence[Score], runs: int, place: Path) -> None:
    """All runs, in turn. Blocks for a minute and a half, and for about two for each of `runs`."""
    for score in scores:
        try:
            environment = score.contestant.environment()
        except Unavailable as error:
            score.failures.append(f"not installed: {error}")
            continue
        score.versions = environment.versions(score.contestant.packages)
        if (events := _run(score, place, "clean")) is not None:
            score.clean = events
    for number in range(1, runs + 1):
        for score in scores:
            if not score.clean or (events := _run(score, place, f"run{number}")) is None:
                continue
            try:
                score.recoveries.append(fold.recovery(events, RANKS))
            except fold.NotMeasured as error:
                score.failures.append(f"run{number}: {error}")
                continue
            score.differences.append(fold.difference(score.clean, events))


def _run(score: Score, place: Path, name: str) -> list[dict[str, Any]] | None:
    """The events of one run, or nothing and a failure noted, with its files kept."""
    directory = place / score.contestant.key / name
    begin = time.monotonic()
    try:
        return jobs.run(score.contestant, directory, fault=name != "clean")
    except jobs.Failed as error:
        kept = _FAILED / f"{score.contestant.key}-{name}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(directory, kept, ignore=shutil.ignore_patterns("checkpoints"))
        score.failures.append(f"{name}: {error}; its output is in {kept.relative_to(ROOT)}")
        return None
    finally:
        print(f"{score.contestant.title}, {name}: {time.monotonic() - begin:.0f} s", flush=True)
        shutil.rmtree(directory, ignore_errors=True)


# ---------------------------------------------------------------- telling


def cells(score: Score) -> list[str]:
    """A contestant's row of the table, under `_HEADINGS`."""

    def seconds(values: Sequence[float]) -> str:
        if not values:
            return "-"
        spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
        return f"{statistics.median(values):.1f} s{spread}"

    def count(values: Sequence[float]) -> str:
        low, high = (min(values), max(values)) if values else (None, None)
        return "-" if low is None else f"{low}" if low == high else f"{low} to {high}"

    equal = {None: "-", True: "yes", False: "no"}[score.equal]
    step = f"{fold.step_s(score.clean):.2f} s" if score.clean else "-"
    return [
        score.contestant.title,
        seconds(score.values("first_step_s")),
        seconds(score.values("full_strength_s")),
        count(score.values("steps_lost")),
        count(score.values("short_steps")),
        equal,
        step,
    ]


def show(scores: Sequence[Score]) -> None:
    """The table, and what went wrong, on the terminal."""
    table = Table(title=f"SIGKILL of rank {FAULT_RANK} of {RANKS} in backward of step {FAULT_STEP}")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading else "left")
    for score in scores:
        table.add_row(*cells(score))
    Console(width=max(Console().width, 110)).print(table)
    for line in remarks(scores):
        print(line)


def remarks(scores: Sequence[Score]) -> list[str]:
    """A line for every failure, and for what differed."""
    lines = []
    for score in scores:
        title = score.contestant.title
        lines += [f"{title}: {failure}" for failure in score.failures]
        differing = [difference for difference in score.differences if difference]
        if differing:
            lines.append(f"{title} differs from its clean run, first in: {differing[0]}")
    return lines


def times_faster(scores: Sequence[Score]) -> float | None:
    """How many times sooner everstep is at full strength than the best of its peers."""
    medians = {s.contestant.key: _median(s.values("full_strength_s")) for s in scores}
    ours = medians.pop("everstep", None)
    peers = [value for value in medians.values() if value is not None]
    return min(peers) / ours if ours is not None and peers else None


def markdown(scores: Sequence[Score], load: float) -> str:
    """The table and its remarks for the page. `load`: what others did when it began."""
    headings = list(_HEADINGS)
    rows = [headings, ["---"] * len(headings), *(cells(score) for score in scores)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    versions: dict[str, str] = {}
    for score in scores:
        versions |= score.versions
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    runs = max(len(score.recoveries) for score in scores)
    several = f"Medians of {runs} runs each" if runs > 1 else "One run each"
    told = [
        f"{several} (in brackets the least and the most) on a machine with "
        f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} when they began. {named}."
    ]
    if (factor := times_faster(scores)) is not None:
        told.append(
            f"To full strength the quickest peer takes {factor:.1f} times as long as everstep."
        )
    return "\n".join([*lines, "", *told, *(f"- {line}" for line in remarks(scores)), ""])


def draw(scores: Sequence[Score]) -> str:
    """The picture."""

    def bar(values: Sequence[float]) -> picture.Bar | None:
        return picture.Bar(statistics.median(values), min(values), max(values)) if values else None

    rows = []
    for score in scores:
        _, _, _, lost, short, _, _ = cells(score)
        told = [f"steps lost {lost}", *([f"short {short}"] if short != "0" else [])]
        told.append("equal" if score.equal else "not equal")
        remark = ", ".join(told) if score.recoveries else "no figures"
        bars = (bar(score.values("first_step_s")), bar(score.values("full_strength_s")))
        rows.append(picture.Row(score.contestant.title, remark, bars))
    legend = ("first step", "full strength, caught up")
    return picture.draw(f"One of {RANKS} ranks is killed: seconds until ...", legend, rows)


def publish(scores: Sequence[Score], load: float) -> None:
    """Write the figures into the page, and the picture beside it."""
    text = _PAGE.read_text(encoding="utf-8")
    head, rest = text.split(_BEGIN)
    _, tail = rest.split(_END)
    _PAGE.write_text(f"{head}{_BEGIN}{markdown(scores, load)}{_END}{tail}", encoding="utf-8")
    _PICTURE.write_text(draw(scores), encoding="utf-8")
    print(f"written: {_PAGE.relative_to(ROOT)}, {_PICTURE.relative_to(ROOT)}")


def _end_orderly(signum: int, _frame: object) -> None:
    sys.exit(128 + signum)


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a failure, beside others.")
    parser.add_argument("--runs", type=int, default=3, help="runs with the fault of each")
    keys = [contestant.key for contestant in jobs.CONTESTANTS]
    parser.add_argument("--only", nargs="+", choices=keys, default=keys)
    parser.add_argument("--publish", action="store_true", help="write the page and its picture")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _end_orderly)  # so that what was started is ended
    load = os.getloadavg()[0]
    if load > _QUIET:
        print(f"the machine is busy (load {load:.1f}): these will be no figures to keep")
    scores = [Score(c) for c in jobs.CONTESTANTS if c.key in args.only]
    with tempfile.TemporaryDirectory(prefix="everstep-peers-", dir="/dev/shm") as name:
        measure(scores, args.runs, Path(name))
    show(scores)
    figures: dict[str, Any] = {score.contestant.key: score.figures() for score in scores}
    factor = times_faster(scores)
    told = {"load_before": load, "times_faster_than_the_best_peer": factor}
    path = save("peers", {**told, "contestants": figures})
    print(f"written to {path.relative_to(ROOT)}")
    if args.publish:
        publish(scores, load)
    if any(score.failures and score.contestant.key == "everstep" for score in scores):
        sys.exit(1)


if __name__ == "__main__":
    main()
