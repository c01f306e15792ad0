"""The proof: a run with faults ends with the same bits as the run in which nothing failed.

The script runs clean twice and with the faults once, each as a job of its own with its own journal.
The first two show that the script is equal to itself, without which no comparison means anything;
the third is held against the first. Equal means: for every rank and step what the step returned and
which samples it consumed, and at the end the digest of parameters, optimizer state and buffers.
Beyond that every fault must have fired and been survived.

Comparing is in `evidence.py`. This module runs the jobs, judges, and writes the verdict; it does
not know how a fault is injected or survived, and believes the journal of the run about it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from everstep.core.goodput import Ledger, fold
from everstep.errors import UserError
from everstep.launch import evidence, preflight
from everstep.launch.evidence import Evidence, EvidenceError
from everstep.observe.journal import read_journal
from everstep.observe.narrate import Narrator, counted
from everstep.observe.report import incident_table
from everstep.settings import RUN_ID, RunSettings
from everstep.types import Stage
from everstep.wire.messages import ChaosSpec

if TYPE_CHECKING:
    from everstep.launch.local import JobResult
    from everstep.observe.view import View

    RunJob = Callable[[RunSettings, View], JobResult]

RUNS = ("clean-1", "clean-2", "faulted")
_STAGES_TOLD = (Stage.DETECT, Stage.STOP, Stage.START, Stage.REGROUP, Stage.STATE, Stage.FIRST_STEP)
_PROGRESS_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One of the three runs, after it. `records`: its whole journal."""

    exit_code: int
    text: str
    run_dir: Path
    ledger: Ledger
    records: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the proof says. `equal`: the faulted run's records are the clean run's. `problems`: why
    it is no proof, in words, the first one first; none when it is one."""

    equal: bool
    steps: int
    ranks: int
    clean_wall_s: float
    faulted_wall_s: float
    incidents: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]

    @property
    def proved(self) -> bool:
        """Equal, and every fault was injected and survived."""
        return self.equal and not self.problems

    def to_json(self) -> dict[str, Any]:
        """The verdict as `--json` writes it."""
        names = ("equal", "steps", "ranks", "clean_wall_s", "faulted_wall_s")
        return {name: getattr(self, name) for name in names} | {"incidents": list(self.incidents)}


def prove(
    settings: RunSettings,
    faults: Sequence[ChaosSpec],
    json_path: Path | None,
    out: TextIO,
    run_job: RunJob | None = None,
) -> int:
    """Run the script three times and say on `out` whether recovery left no trace.

    `settings`: of the script's run; its run id names the three. `json_path`: where the verdict is
    written too. `run_job`: the backend, `launch.local.run_job` when not given. Returns the exit
    code: 0 only for a proof. Raises UserError before anything starts. Blocks for the three runs;
    main thread."""
    jobs = _plan(settings, faults)
    for job in jobs:
        preflight.check(job)
    _check_json_path(json_path)
    run_job = run_job or _backend()
    say = functools.partial(print, file=out, flush=True)
    ranks = counted(settings.nproc_per_node, "rank")
    say(f"everstep prove: {settings.script.target} on {ranks}, {len(jobs)} runs")
    outcomes: list[Outcome] = []
    for number, (job, what) in enumerate(zip(jobs, _titles(faults), strict=True), start=1):
        say(f"[{number}/{len(jobs)}] {what}")
        outcomes.append(_run(job, run_job, say))
        verdict = judge(outcomes, faults, settings.nproc_per_node)
        if verdict.problems:
            break  # the runs that are left could not make it a proof
    if json_path is not None:
        json_path.write_text(json.dumps(verdict.to_json(), indent=2) + "\n", encoding="utf-8")
    for line in _closing_words(verdict, outcomes, faults, json_path):
        say(line)
    return 0 if verdict.proved else 1


def judge(outcomes: Sequence[Outcome], faults: Sequence[ChaosSpec], ranks: int) -> Verdict:
    """The verdict over the runs made so far, in the order of `RUNS`: a proof after the last, before
    it only whether there still can be one. Reads their files."""
    problems: list[str] = []
    equal = False
    last = outcomes[-1]
    evidences: list[Evidence] = []
    if last.exit_code != 0:
        problems.append(
            f"the {RUNS[len(outcomes) - 1]} run failed with exit code {last.exit_code}: {last.text}"
        )
    try:
        evidences = [
            evidence.read(outcome.run_dir) for outcome in outcomes if outcome.exit_code == 0
        ]
    except EvidenceError as error:
        problems.append(str(error))
    if len(evidences) >= 2:
        own = evidence.first_difference(evidences[0], evidences[1])
        if own is not None:
            problems.append(
                f"the script differs from itself between two clean runs. First difference: {own}"
            )
    if len(evidences) == len(RUNS):
        found = evidence.first_difference(evidences[0], evidences[2])
        equal = found is None
        if found is not None:
            problems.append(
                f"the faulted run differs from the clean one. First difference: {found}"
            )
    faulted = outcomes[2] if len(outcomes) == len(RUNS) else None
    if faulted is not None:
        problems += unfired(faulted.records, faults) + unsurvived(faulted.ledger)
    walls = [outcome.ledger.wall_s for outcome in outcomes[:2]]
    return Verdict(
        equal=equal,
        steps=evidences[0].steps if evidences else outcomes[0].ledger.steps,
        ranks=ranks,
        clean_wall_s=sum(walls) / len(walls),
        faulted_wall_s=faulted.ledger.wall_s if faulted is not None else 0.0,
        incidents=incidents_told(faulted.ledger) if faulted is not None else (),
        problems=tuple(problems),
    )


def unfired(records: Sequence[Mapping[str, Any]], faults: Sequence[ChaosSpec]) -> list[str]:
    """A sentence for each fault that the journal does not show to have fired."""
    fired = {record["index"] for record in records if record.get("event") == "fault_fired"}
    return [
        f"the fault {fault.text} was never injected: rank {fault.rank} did not come to "
        f"{fault.at} of step {fault.step}"
        for fault in faults
        if fault.index not in fired
    ]


def unsurvived(ledger: Ledger) -> list[str]:
    """A sentence for each incident that was not closed by a committed step."""
    return [
        f"the incident on rank {incident.rank} in step {incident.step} was not survived: "
        f"{incident.cause.text}"
        for incident in ledger.incidents
        if not incident.closed
    ]


def incidents_told(ledger: Ledger) -> tuple[dict[str, Any], ...]:
    """The incidents as `--json` lists them; times in milliseconds."""
    told = []
    for incident in ledger.incidents:
        names = ("fault", "rung", "state_from", "reason", "step", "steps_lost")
        entry = {name: getattr(incident, name) for name in names}
        for stage in _STAGES_TOLD:
            entry[f"{stage}_ms"] = round(1000 * incident.stages.get(stage, 0.0), 3)
        entry["total_ms"] = round(1000 * incident.total_s, 3)
        told.append(entry)
    return tuple(told)


class ProofView:
    """What a run shows while it is part of a proof: that it goes on, and its incidents. The
    workers' output is only in the logs."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._narrator = Narrator()
        self._said_at_s: float | None = None

    def record(self, record: dict[str, Any]) -> None:
        """Say an incident at once, and where the run stands every few seconds."""
        lines = self._narrator.tell(record)
        now_s = float(record.get("t", 0.0))
        if self._said_at_s is None:
            self._said_at_s = now_s
        if (
            not lines
            and record.get("event") == "step"
            and now_s - self._said_at_s >= _PROGRESS_EVERY_S
        ):
            lines = [f"step {self._narrator.step}"]
        for line in lines:
            self._said_at_s = now_s
            self._say(f"      {line}")

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """Nothing is shown; the logs have it."""


def _backend() -> RunJob:
    from everstep.launch.local import run_job

    return run_job


def _plan(settings: RunSettings, faults: Sequence[ChaosSpec]) -> tuple[RunSettings, ...]:
    """The three jobs. Faults of the settings themselves are left out: a clean run is clean."""
    longest = f"{settings.run_id}-{max(RUNS, key=len)}"
    if RUN_ID.fullmatch(longest) is None:
        raise UserError(
            f"the run id {longest!r} of the third run is longer than 64 characters; "
            "shorten --run-id"
        )
    base = dataclasses.replace(settings, record=True, lift_budgets=True, quiet=True, chaos=())
    jobs = [dataclasses.replace(base, run_id=f"{settings.run_id}-{suffix}") for suffix in RUNS]
    jobs[2] = dataclasses.replace(jobs[2], chaos=tuple(faults))
    return tuple(jobs)


def _titles(faults: Sequence[ChaosSpec]) -> tuple[str, ...]:
    texts = ", ".join(fault.text for fault in faults)
    return (
        "a clean run",
        "a clean run again, to see that the script is equal to itself",
        f"a run with {counted(len(faults), 'fault')}: {texts}",
    )


def _check_json_path(path: Path | None) -> None:
    """Three runs are too long to find out afterwards that the verdict can't be written."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        what = (
            "is a directory"
            if path.is_dir()
            else f"can not be written: {path.parent} is not a directory"
        )
        raise UserError(f"--json {path} {what}; name a file in a directory that exists")


def _run(job: RunSettings, run_job: RunJob, say: Callable[[str], None]) -> Outcome:
    result = run_job(job, ProofView(say))
    records = read_journal(result.journal)
    ledger = fold(records)
    if result.exit_code == 0:
        say(f"      {counted(ledger.steps, 'step')} in {ledger.wall_s:.2f} s")
    return Outcome(
        exit_code=result.exit_code,
        text=result.text,
        run_dir=result.run_dir,
        ledger=ledger,
        records=records,
    )


def _closing_words(
    verdict: Verdict,
    outcomes: Sequence[Outcome],
    faults: Sequence[ChaosSpec],
    json_path: Path | None,
) -> list[str]:
    """The table of incidents, the verdict, where everything lies, and what to do next."""
    lines = [""]
    if len(outcomes) == len(RUNS):
        lines += [*incident_table(outcomes[2].ledger), ""]
    if verdict.proved:
        lines.append(
            f"PROVED EQUAL: {counted(verdict.steps, 'step')} on {counted(verdict.ranks, 'rank')}; "
            "every returned value, every sample and the state at the end are bit for bit those of "
            "the clean run; "
            f"{counted(len(faults), 'fault')} injected and survived."
        )
    else:
        lines.append("NOT PROVED:")
        lines += [f"  - {problem}" for problem in verdict.problems]
    lines += ["", "journals and logs:", *(f"  {outcome.run_dir}" for outcome in outcomes)]
    if json_path is not None:
        lines.append(f"verdict: {json_path}")
    lines.append(f"next: everstep report {outcomes[-1].run_dir}")
    return lines
