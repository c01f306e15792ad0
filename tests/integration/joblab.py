"""Runs a script under the real agent, in this process, and keeps all that it said."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.launch.local import run_job
from everstep.settings import RunSettings, faults_of
from everstep.wire.messages import ScriptSpec

SCRIPTS = Path(__file__).parents[1] / "scripts"
TINY = SCRIPTS / "tiny.py"


@dataclass
class Result:
    """What a job left behind."""

    exit_code: int
    text: str
    records: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    trace: dict[tuple[int, int], Any] = field(default_factory=dict)
    metrics: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    repeated: list[tuple[int, int]] = field(default_factory=list)
    digests: dict[str, Any] = field(default_factory=dict)

    def of(self, event: str) -> list[dict[str, Any]]:
        """The records of one event."""
        return [record for record in self.records if record["event"] == event]

    @property
    def closed(self) -> list[dict[str, Any]]:
        """The incidents that were survived."""
        return self.of("incident_closed")

    def fired(self) -> Counter[str]:
        """How often each fault on purpose fired."""
        return Counter(record["text"] for record in self.of("fault_fired"))


class _Keeper:
    def __init__(self, on_record: Callable[[dict[str, Any]], None]) -> None:
        self.records: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self._on_record = on_record

    def record(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self._on_record(record)

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        self.lines.append(f"{rank}.{incarnation}: {line}")


def run_script(
    folder: Path,
    *args: str,
    faults: tuple[str, ...] = (),
    script: Path = TINY,
    nproc: int = 4,
    on_record: Callable[[dict[str, Any]], None] = lambda _: None,
    **settings: Any,
) -> Result:
    """Run `script` to its end and read what it wrote in `folder`, which is made if it is not there.
    Blocks."""
    folder.mkdir(exist_ok=True)
    run_id = f"t{os.getpid()}-{len(list(folder.iterdir()))}"
    options: dict[str, Any] = {"lift_budgets": True, "record": True, **settings}
    keeper = _Keeper(on_record)
    job = RunSettings(
        script=ScriptSpec(target=str(script), module=False, args=args),
        nproc_per_node=nproc,
        run_id=run_id,
        log_dir=str(folder),
        **options,
    )
    outcome = run_job(dataclasses.replace(job, chaos=faults_of(job, faults)), keeper)
    result = Result(outcome.exit_code, outcome.text, keeper.records, keeper.lines)
    _read_trace(outcome.run_dir / "trace.jsonl", result)
    _read_metrics(outcome.run_dir / "metrics.jsonl", result)
    digests = outcome.run_dir / "digests.json"
    if digests.exists():
        result.digests = json.loads(digests.read_text())
    return result


def _read_trace(path: Path, result: Result) -> None:
    for row in _rows(path):
        key = row["rank"], row["step"]
        known = result.trace.setdefault(key, row["record"])
        assert known == row["record"], f"rank {key[0]} recorded two versions of step {key[1]}"


def _read_metrics(path: Path, result: Result) -> None:
    for row in _rows(path):
        key = row.pop("rank"), row.pop("step")
        if key in result.metrics:
            result.repeated.append(key)
        result.metrics.setdefault(key, {}).update(row)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_same_run(clean: Result, faulted: Result) -> None:
    """The faulted run is the clean one: values, samples, logged scalars and the final state."""
    assert clean.exit_code == 0, clean.text
    assert faulted.exit_code == 0, faulted.text + "\n".join(faulted.lines[-30:])
    for key, record in clean.trace.items():
        assert faulted.trace.get(key) == record, f"rank {key[0]}, step {key[1]}"
    assert clean.trace.keys() == faulted.trace.keys()
    assert clean.digests == faulted.digests
    assert clean.metrics == faulted.metrics
    assert len(clean.of("incident_opened")) == 0


def _story(result: Result) -> str:
    """What happened, a line each: for a message that is read on another machine."""
    told = ("fault_fired", "incident_opened", "incident_closed", "exited", "note", "ended")
    rows = [record for record in result.records if record["event"] in told]
    return "\n".join(str(row)[:300] for row in rows) + "\n" + "\n".join(result.lines[-20:])


def assert_survived(result: Result, *faults: str) -> None:
    """Every fault fired once, every incident was closed, and no step was lost."""
    assert result.fired() == Counter(faults), _story(result)
    assert len(result.closed) == len(result.of("incident_opened")) > 0
    assert [record["steps_lost"] for record in result.closed] == [0] * len(result.closed)
