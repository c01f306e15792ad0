"""The proof's judgement, on runs made by hand: no processes."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit import journals

from everstep import chaos
from everstep.errors import UserError
from everstep.launch.prove import prove
from everstep.settings import RunSettings
from everstep.wire.messages import ScriptSpec

FAULTS = chaos.parse_all([journals.FAULT], 4)


@dataclass
class Run:
    """What a fake job leaves behind."""

    records: list[journals.Record]
    trace: list[dict[str, Any]]
    digests: dict[str, dict[str, str]]
    exit_code: int = 0
    text: str = ""


def clean_run() -> Run:
    trace = [
        {
            "rank": rank,
            "step": step,
            "record": {"value": f"{step}.{rank}", "samples": [step * 4 + rank]},
        }
        for step in range(1, 9)
        for rank in range(4)
    ]
    return Run(journals.clean(), trace, {str(rank): {"model.w": "ab"} for rank in range(4)})


def faulted_run() -> Run:
    run = clean_run()
    run.records = journals.killed_and_recovered()
    return run


@dataclass
class Proof:
    """A proof over fake jobs, and what came of it."""

    folder: Path
    runs: list[Run]
    started: list[RunSettings] = field(default_factory=list)
    out: io.StringIO = field(default_factory=io.StringIO)

    def run_job(self, settings: RunSettings, view: Any) -> Any:
        run = self.runs[len(self.started)]
        self.started.append(settings)
        run_dir = Path(settings.log_dir) / settings.run_id
        run_dir.mkdir(parents=True)
        journals.write(run_dir / "journal.jsonl", run.records)
        (run_dir / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run.trace))
        (run_dir / "digests.json").write_text(json.dumps(run.digests))
        for record in run.records:
            view.record(record)
        view.output(0, 1, "stdout", "never shown")
        return SimpleNamespace(
            exit_code=run.exit_code,
            run_dir=run_dir,
            journal=run_dir / "journal.jsonl",
            text=run.text,
        )

    def prove(self, *faults: str, **more: Any) -> int:
        script = self.folder / "train.py"
        script.write_text("")
        settings = RunSettings(
            script=ScriptSpec(target=str(script), module=False, args=()),
            run_id="p",
            log_dir=str(self.folder / "runs"),
            chaos=chaos.parse_all(["abort:rank=0,step=1"], 4),
            **{"nproc_per_node": 4} | more,
        )
        nproc = settings.nproc_per_node if settings.on_nodes else None
        parsed = chaos.parse_all(faults, settings.world_size, nproc) if faults else FAULTS
        return prove(settings, parsed, self.json_path, self.out, self.run_job)

    @property
    def json_path(self) -> Path:
        return self.folder / "verdict.json"

    @property
    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.json_path.read_text())
        return found

    @property
    def said(self) -> str:
        return self.out.getvalue()


@pytest.fixture
def proof(tmp_path: Path) -> Proof:
    return Proof(tmp_path, [clean_run(), clean_run(), faulted_run()])


def test_a_proof(proof: Proof) -> None:
    assert proof.prove() == 0
    assert proof.verdict == {
        "equal": True,
        "steps": 8,
        "ranks": 4,
        "clean_wall_s": pytest.approx(4.9, abs=0.2),
        "faulted_wall_s": pytest.approx(5.1, abs=0.2),
        "faults": [journals.FAULT],
        "incidents": [
            {
                "fault": journals.FAULT,
                "faults": [journals.FAULT],
                "rung": "respawn",
                "state_from": "peer",
                "reason": "rank 1 takes step 4 from ranks 0, 2, 3",
                "step": 5,
                "steps_lost": 0,
                "detect_ms": pytest.approx(5, abs=0.01),
                "stop_ms": pytest.approx(10, abs=0.01),
                "start_ms": pytest.approx(20, abs=0.01),
                "regroup_ms": pytest.approx(30, abs=0.01),
                "state_ms": pytest.approx(40, abs=0.01),
                "first_step_ms": pytest.approx(50, abs=0.01),
                "total_ms": pytest.approx(155, abs=0.01),
            }
        ],
    }
    assert "PROVED EQUAL: 8 steps on 4 ranks" in proof.said
    assert "rank 1 was killed by SIGKILL in step 5 (backward)" in proof.said
    assert f"next: everstep report {proof.folder}/runs/p-faulted" in proof.said
    assert "never shown" not in proof.said


def test_the_three_runs_are_two_clean_and_one_with_the_faults(proof: Proof) -> None:
    proof.prove()
    assert [job.run_id for job in proof.started] == ["p-clean-1", "p-clean-2", "p-faulted"]
    assert [job.chaos for job in proof.started] == [(), (), FAULTS]
    assert all(job.record and job.lift_budgets and job.own_series for job in proof.started)


def other_loss(run: Run) -> None:
    run.trace[17]["record"]["value"] = "other"


def other_digest(run: Run) -> None:
    run.digests["2"]["model.w"] = "ac"


def twice_and_not_alike(run: Run) -> None:
    run.trace.append(run.trace[17] | {"record": {"value": "other", "samples": []}})


def no_trace(run: Run) -> None:
    run.trace.clear()


def never_fired(run: Run) -> None:
    run.records = journals.clean()


def never_closed(run: Run) -> None:
    run.records = [one for one in run.records if one["event"] != "incident_closed"]


def repaired(run: Run) -> None:
    run.records = journals.killed_and_recovered()


def failed(run: Run) -> None:
    run.exit_code, run.text = 137, "rank 1 can not be replaced"
    run.records = [*run.records[:-1], *journals.end(5.2, 137, run.text, journals.cause())]


@pytest.mark.parametrize(
    ("at", "harm", "equal", "says"),
    [
        (
            1,
            other_loss,
            False,
            "from itself between two clean runs. First difference: rank 1, in step 5: value",
        ),
        (
            1,
            other_digest,
            False,
            "differs from itself between two clean runs. First difference: rank 2, at the end",
        ),
        (
            2,
            other_loss,
            False,
            "run differs from the clean one. First difference: rank 1, in step 5: value",
        ),
        (
            2,
            other_digest,
            False,
            "First difference: rank 2, at the end: model.w differs: ab against ac",
        ),
        (2, twice_and_not_alike, False, "recorded twice by one run"),
        (2, no_trace, False, "no step was recorded"),
        (0, no_trace, False, "no step was recorded"),
        (2, never_fired, True, "was never injected: rank 1 did not come to backward of step 5"),
        (
            2,
            never_closed,
            True,
            "on rank 1 in step 5 was not survived: rank 1 was killed by SIGKILL",
        ),
        (
            0,
            repaired,
            False,
            "clean-1 run had 1 incident, and none on purpose, so there is nothing",
        ),
        (1, repaired, False, "; the first: rank 1 was killed by SIGKILL in step 5 (backward)"),
        (0, other_loss, False, "What it may come from is in docs/howto/prove-a-script.md"),
        (2, other_loss, False, "What it may come from is in docs/howto/prove-a-script.md"),
        (2, failed, False, "the faulted run failed with exit code 137: rank 1 can not be replaced"),
        (0, failed, False, "the clean-1 run failed with exit code 137: rank 1 can not be replaced"),
        (1, failed, False, "the clean-2 run failed with exit code 137: rank 1 can not be replaced"),
    ],
)
def test_what_is_no_proof(
    at: int, harm: Callable[[Run], None], equal: bool, says: str, proof: Proof
) -> None:
    harm(proof.runs[at])
    assert proof.prove() == 1
    assert proof.verdict["equal"] is equal
    assert "NOT PROVED:" in proof.said
    assert says in proof.said
    assert "PROVED EQUAL" not in proof.said


@pytest.mark.parametrize(
    ("at", "harm"),
    [
        (0, failed),
        (0, repaired),
        (0, no_trace),
        (1, failed),
        (1, repaired),
        (1, other_loss),
        (1, other_digest),
    ],
)
def test_no_run_is_made_that_can_not_help(
    at: int, harm: Callable[[Run], None], proof: Proof
) -> None:
    harm(proof.runs[at])
    assert proof.prove() == 1
    assert len(proof.started) == at + 1
    assert proof.verdict["incidents"] == []


def test_progress_is_said_every_few_seconds(proof: Proof) -> None:
    long = [*journals.begin(), *journals.steps(1, 8, 1.0, step_s=2.0), *journals.end(18.0)]
    proof.runs[0].records = long
    proof.prove()
    assert [line.strip() for line in proof.said.splitlines() if line.startswith("      at step")][
        :2
    ] == ["at step 2", "at step 5"]


def test_on_a_terminal_progress_is_a_live_line(
    proof: Proof, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    proof.out = Terminal()
    assert proof.prove() == 0
    assert "step 8 | 2.0 steps/s" in proof.said
    assert "\n      at step" not in proof.said
    assert "never shown" not in proof.said


@pytest.mark.parametrize(
    ("given", "seen"), [(None, "0"), ("", "0"), ("random", "0"), ("7", "7"), ("0", "0")]
)
def test_all_runs_hash_alike(
    given: str | None, seen: str, proof: Proof, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    run_job, seeds = proof.run_job, []

    def watched(settings: RunSettings, view: Any) -> Any:
        seeds.append(os.environ.get("PYTHONHASHSEED"))
        return run_job(settings, view)

    monkeypatch.setattr(proof, "run_job", watched)
    assert proof.prove() == 0
    assert seeds == [seen] * 3
    assert os.environ.get("PYTHONHASHSEED") == given


def test_the_environment_is_put_back_after_an_error(
    proof: Proof, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    proof.runs.clear()  # there is no run to make
    with pytest.raises(IndexError):
        proof.prove()
    assert "PYTHONHASHSEED" not in os.environ


def test_a_proof_that_a_person_stops_ends_with_the_signal_s_code(proof: Proof) -> None:
    run = proof.runs[0]
    run.exit_code, run.text = 130, "the job was asked to end by SIGINT"
    run.records = [*run.records[:-1], *journals.end(5.2, 130, run.text)]
    assert proof.prove() == 130
    assert "the clean-1 run was stopped by SIGINT" in proof.said
    assert "failed" not in proof.said


@pytest.mark.parametrize("silent", [True, False])
def test_a_script_that_records_nothing_gets_a_hint(silent: bool, proof: Proof) -> None:
    if silent:
        for run in proof.runs:
            for line in run.trace:
                line["record"]["value"] = []
    assert proof.prove() == 0
    assert ("train_step returned nothing and logged nothing" in proof.said) is silent
    assert ("every returned value" in proof.said) is not silent


ONE = {"nproc_per_node": 1}
ONE_NODE = {"nproc_per_node": 2, "local_nodes": 1, "spares": 1}


@pytest.mark.parametrize(
    ("fault", "settings", "why"),
    [
        ("kill:rank=0,step=2", ONE, "no rank is left that holds the state.*--copies sync"),
        ("exit0:rank=0,step=1,at=between", ONE, "no rank is left"),
        ("segv:rank=0,step=9,at=fetch", ONE, "no rank is left"),
        ("stop:rank=0,step=1", ONE, "nobody waits for the only rank"),
        ("hang:rank=0,step=5", ONE | {"copies": "sync"}, "nobody waits for the only rank"),
        ("node:index=0,step=5", ONE_NODE, "no node is left"),
    ],
)
def test_a_fault_that_nobody_can_survive_is_refused_at_once(
    fault: str, settings: dict[str, Any], why: str, proof: Proof
) -> None:
    with pytest.raises(UserError, match=why):
        proof.prove(fault, **settings)
    assert proof.started == []


@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        ("kill:rank=0,step=2", {"nproc_per_node": 2}),
        ("kill:rank=0,step=2", ONE | {"copies": "sync"}),
        ("kill:rank=0,step=1", ONE),
        ("kill:rank=0,at=setup", ONE),
        ("raise:rank=0,step=5", ONE),
        ("slow=3:rank=0,step=5", ONE),
        ("stop:rank=0,step=5", {"nproc_per_node": 2}),
        ("node:index=0,step=5", ONE_NODE | {"local_nodes": 2}),
    ],
)
def test_a_fault_that_can_be_survived_is_tried(
    fault: str, settings: dict[str, Any], proof: Proof
) -> None:
    proof.prove(fault, **settings)
    assert len(proof.started) == 3


def test_faults_of_steps_that_the_run_has_not_are_told_together(proof: Proof) -> None:
    never_fired(proof.runs[2])
    faults = [f"raise:rank=1,step={step}" for step in (5, *range(10, 30))]
    assert proof.prove(*faults) == 1
    told = [line for line in proof.said.splitlines() if "never injected" in line]
    assert told[0].startswith("  - the fault raise:rank=1,step=5 was never injected: rank 1 did")
    assert told[1].startswith("  - 20 faults were never injected, since the run has only 8 steps: ")
    assert told[1].endswith("step=17 and 12 more")
    assert len(told) == 2
