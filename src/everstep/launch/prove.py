"""The proof: a run with faults ends with the same bits as the run in which nothing failed.

The script runs clean twice and with the faults once, each as a job of its own with its own journal.
The first two show that the script is equal to itself, without which no comparison means anything;
the third is held against the first. All three get the same PYTHONHASHSEED, or a script that walks
over a set would differ from itself. Equal means: for every rank and step what the step returned and
which samples it consumed, and at the end the digest of parameters, optimizer state and buffers.
Beyond that every fault must have fired and been survived.

Comparing is in `evidence.py`. This module runs the jobs, judges, and writes the verdict; it does
not know how a fault is injected or survived, and believes the journal of the run about it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from everstep.chaos import NO_FAILURE, OF_NODES, SILENT, where
from everstep.core.goodput import Ledger, fold
from everstep.errors import UserError
from everstep.launch import evidence, preflight
from everstep.launch.evidence import Evidence, EvidenceError
from everstep.observe.journal import read_journal
from everstep.observe.narrate import (
    Narrator,
    cause_in_words,
    counted,
    failure_of,
    size_in_words,
)
from everstep.observe.pace import Pace
from everstep.observe.report import show_incidents, stopped_by
from everstep.observe.screen import Screen
from everstep.settings import RUN_ID, RunSettings
from everstep.types import Stage
from everstep.wire.messages import ChaosSpec

if TYPE_CHECKING:
    from everstep.launch.job import JobResult
    from everstep.observe.view import View

    RunJob = Callable[[RunSettings, View], JobResult]

RUNS = ("clean-1", "clean-2", "faulted")
_STAGES_TOLD = (Stage.DETECT, Stage.STOP, Stage.START, Stage.REGROUP, Stage.STATE, Stage.FIRST_STEP)
_FAULTS_TOLD = 8
_PROGRESS_EVERY_S = 5.0
_DRAW_EVERY_S = 0.1
_HASH_SEED = "PYTHONHASHSEED"
_PAGE = "docs/howto/prove-a-script.md"
_AFTER_COMMIT = ("between", "section")  # places at which the fault's own step is committed
_LIVES = (*NO_FAILURE, *SILENT, *OF_NODES, "raise")  # kinds that do not end the rank's process
_SILENT = (
    "train_step returned nothing and logged nothing, so only the samples of each step and the "
    "state at the end were compared; return the loss, and every step is"
)


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
    it is no proof, in words, the first one first; none when it is one. `hint`: what would make the
    proof say more. `faults`: those to be injected, random ones as they were drawn."""

    equal: bool
    steps: int
    ranks: int
    clean_wall_s: float
    faulted_wall_s: float
    incidents: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]
    hint: str = ""
    faults: tuple[str, ...] = ()

    @property
    def proved(self) -> bool:
        """Equal, and every fault was injected and survived."""
        return self.equal and not self.problems

    def to_json(self) -> dict[str, Any]:
        """The verdict as `--json` writes it."""
        names = ("equal", "steps", "ranks", "clean_wall_s", "faulted_wall_s")
        lists = {"faults": list(self.faults), "incidents": list(self.incidents)}
        return {name: getattr(self, name) for name in names} | lists


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
    code: 0 only for a proof, 128 plus the signal when a person stopped it. Raises UserError before
    anything starts. Blocks for the three runs; main thread."""
    jobs = _plan(settings, faults)
    for job in jobs:
        preflight.check(job)
    _check_json_path(json_path)
    for fault in faults:
        _refuse_hopeless(fault, settings)
    run_job = run_job or _backend()
    screen = Screen(out, settings.color)
    size = size_in_words(settings)
    screen.say(f"everstep prove: {settings.script.target} on {size}, {len(jobs)} runs", "bold")
    outcomes: list[Outcome] = []
    with _one_hash_seed():
        for number, (job, what) in enumerate(zip(jobs, _titles(faults), strict=True), start=1):
            screen.say(f"[{number}/{len(jobs)}] {what}")
            outcomes.append(_run(job, run_job, screen, live=not settings.quiet))
            verdict = judge(outcomes, faults, settings.world_size)
            if verdict.problems:
                break  # the runs that are left could not make it a proof
    if json_path is not None:
        json_path.write_text(json.dumps(verdict.to_json(), indent=2) + "\n", encoding="utf-8")
    _close(verdict, outcomes, faults, json_path, screen)
    if stopped_by(outcomes[-1].ledger) is not None:
        return outcomes[-1].exit_code
    return 0 if verdict.proved else 1


def judge(outcomes: Sequence[Outcome], faults: Sequence[ChaosSpec], ranks: int) -> Verdict:
    """The verdict over the runs made so far, in the order of `RUNS`: a proof after the last, before
    it only whether there still can be one. Reads their files."""
    problems: list[str] = []
    equal = False
    last = outcomes[-1]
    evidences: list[Evidence] = []
    if last.exit_code == 0 and len(outcomes) < len(RUNS):
        problems += unclean(RUNS[len(outcomes) - 1], last.ledger)
    if last.exit_code != 0:
        run, by = f"the {RUNS[len(outcomes) - 1]} run", stopped_by(last.ledger)
        failed = f"{run} failed with exit code {last.exit_code}: {last.text}"
        problems.append(failed if by is None else f"{run} was stopped by {by}")
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
                f"the script differs from itself between two clean runs. First difference: {own}. "
                f"What it may come from is in {_PAGE}"
            )
    if len(evidences) == len(RUNS):
        found = evidence.first_difference(evidences[0], evidences[2])
        equal = found is None
        if found is not None:
            problems.append(
                f"the faulted run differs from the clean one. First difference: {found}. "
                f"What it may come from is in {_PAGE}"
            )
    faulted = outcomes[2] if len(outcomes) == len(RUNS) else None
    if faulted is not None:
        problems += unfired(faulted.records, faults, faulted.ledger.steps)
        problems += unsurvived(faulted.ledger)
    walls = [outcome.ledger.wall_s for outcome in outcomes[:2]]
    return Verdict(
        equal=equal,
        steps=evidences[0].steps if evidences else outcomes[0].ledger.steps,
        ranks=ranks,
        clean_wall_s=sum(walls) / len(walls),
        faulted_wall_s=faulted.ledger.wall_s if faulted is not None else 0.0,
        incidents=incidents_told(faulted.ledger) if faulted is not None else (),
        problems=tuple(problems),
        hint=_SILENT if len(evidences) > 1 and evidences[0].silent else "",
        faults=tuple(fault.text for fault in faults),
    )


def unfired(
    records: Sequence[Mapping[str, Any]], faults: Sequence[ChaosSpec], steps: int
) -> list[str]:
    """Sentences for the faults that the journal does not show to have fired: one for each, and one
    for all that are for steps after the last, `steps`."""
    fired = {record["index"] for record in records if record.get("event") == "fault_fired"}
    left = [fault for fault in faults if fault.index not in fired]
    late = [fault for fault in left if fault.step > steps]
    sentences = [
        f"the fault {fault.text} was never injected: rank {fault.rank} did not come to "
        f"{where(fault)}"
        for fault in left
        if fault not in late
    ]
    if late:
        verb = "was" if len(late) == 1 else "were"
        sentences.append(
            f"{counted(len(late), 'fault')} {verb} never injected, since the run has only "
            f"{counted(steps, 'step')}: {_some(late)}"
        )
    return sentences


def unclean(run: str, ledger: Ledger) -> list[str]:
    """A sentence, if a clean run had incidents: it would be compared with what has been repaired
    itself."""
    if not ledger.incidents:
        return []
    first = ledger.incidents[0]
    return [
        f"the {run} run had {counted(len(ledger.incidents), 'incident')}, and none on purpose, so "
        "there is nothing to compare with; the first: "
        f"{failure_of(first.rank, first.step, first.cause)}"
    ]


def unsurvived(ledger: Ledger) -> list[str]:
    """A sentence for each incident that was not closed by a committed step."""
    return [
        f"the incident on rank {incident.rank} in step {incident.step} was not survived: "
        f"{cause_in_words(incident.cause)}"
        for incident in ledger.incidents
        if not incident.closed
    ]


def incidents_told(ledger: Ledger) -> tuple[dict[str, Any], ...]:
    """The incidents as `--json` lists them; times in milliseconds."""
    told = []
    for incident in ledger.incidents:
        names = ("fault", "rung", "state_from", "reason", "step", "steps_lost")
        entry = {name: getattr(incident, name) for name in names}
        entry["faults"] = list(incident.faults)
        for stage in _STAGES_TOLD:
            entry[f"{stage}_ms"] = round(1000 * incident.stages.get(stage, 0.0), 3)
        entry["total_ms"] = round(1000 * incident.total_s, 3)
        told.append(entry)
    return tuple(told)


class ProofView:
    """What a run shows while it is part of a proof: that it goes on, and its incidents. The
    workers' output is only in the logs. `live`: with a live line, where there can be one."""

    def __init__(self, screen: Screen, *, live: bool = True) -> None:
        self._screen = screen
        self._live = live and screen.interactive
        self._every_s = _DRAW_EVERY_S if self._live else _PROGRESS_EVERY_S
        self._narrator = Narrator()
        self._pace = Pace()
        self._said_at_s: float | None = None

    def record(self, record: dict[str, Any]) -> None:
        """Say an incident at once, and where the run stands from time to time."""
        lines = self._narrator.tell(record)
        self._pace.see(record)
        now_s = float(record.get("t", 0.0))
        if self._said_at_s is None:
            self._said_at_s = now_s
        for line in lines:
            self._said_at_s = now_s
            self._screen.say(f"      {line}", "yellow")
        if record.get("event") == "step" and now_s - self._said_at_s >= self._every_s:
            self._said_at_s = now_s
            step = f"at step {self._narrator.step}"
            if self._live:
                self._screen.live("      " + " | ".join([step, *self._pace.rate()]))
            else:
                self._screen.say(f"      {step}")

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """Nothing is shown; the logs have it."""


@contextmanager
def _one_hash_seed() -> Iterator[None]:
    """While it is entered, this process's environment has a PYTHONHASHSEED for the jobs to take:
    the user's, else 0. A job that finds none draws one of its own."""
    given = os.environ.get(_HASH_SEED)
    if given is None or not given.isdecimal():  # unset, empty, or "random"
        os.environ[_HASH_SEED] = "0"
    try:
        yield
    finally:
        if given is None:
            del os.environ[_HASH_SEED]
        else:
            os.environ[_HASH_SEED] = given


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
    base = dataclasses.replace(
        settings, record=True, lift_budgets=True, own_series=True, quiet=True, chaos=()
    )
    jobs = [dataclasses.replace(base, run_id=f"{settings.run_id}-{suffix}") for suffix in RUNS]
    jobs[2] = dataclasses.replace(jobs[2], chaos=tuple(faults))
    return tuple(jobs)


def _titles(faults: Sequence[ChaosSpec]) -> tuple[str, ...]:
    return (
        "a clean run",
        "a clean run again, to see that the script is equal to itself",
        f"a run with {counted(len(faults), 'fault')}: {_some(faults)}",
    )


def _some(faults: Sequence[ChaosSpec]) -> str:
    """Their texts; of many the first, and how many more there are."""
    texts = ", ".join(fault.text for fault in faults[:_FAULTS_TOLD])
    more = len(faults) - _FAULTS_TOLD
    return f"{texts} and {more} more" if more > 0 else texts


def _refuse_hopeless(fault: ChaosSpec, settings: RunSettings) -> None:
    """Raise UserError for a fault after which nobody can be left who holds the state. Before the
    first commit there is none to hold."""
    committed = fault.step > 1 or fault.at in _AFTER_COMMIT
    if fault.kind == "node" and settings.slots == 1 and committed:
        raise UserError(
            f"the fault {fault.text!r} is refused: no node is left that holds the state, since the "
            "job has only one; give it two or more (--local-nodes 2)"
        )
    if settings.world_size > 1:
        return
    if fault.kind in SILENT:
        raise UserError(
            f"the fault {fault.text!r} is refused: nobody waits for the only rank, so nobody would "
            "notice; give the job two ranks or more (--nproc-per-node 2)"
        )
    if fault.kind not in _LIVES and committed and settings.copies == "off":
        raise UserError(
            f"the fault {fault.text!r} is refused: no rank is left that holds the state; give the "
            "job two ranks or more (--nproc-per-node 2), or have the state copied in each step "
            "(--copies sync)"
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


def _run(job: RunSettings, run_job: RunJob, screen: Screen, *, live: bool) -> Outcome:
    try:
        result = run_job(job, ProofView(screen, live=live))
    finally:
        screen.end_live()
    records = read_journal(result.journal)
    ledger = fold(records)
    if result.exit_code == 0:
        screen.say(f"      {counted(ledger.steps, 'step')} in {ledger.wall_s:.2f} s")
    return Outcome(
        exit_code=result.exit_code,
        text=result.text,
        run_dir=result.run_dir,
        ledger=ledger,
        records=records,
    )


def _close(
    verdict: Verdict,
    outcomes: Sequence[Outcome],
    faults: Sequence[ChaosSpec],
    json_path: Path | None,
    screen: Screen,
) -> None:
    """Show the table of incidents, the verdict, where everything lies, and what to do next."""
    if len(outcomes) == len(RUNS) and outcomes[2].ledger.incidents:
        show_incidents(outcomes[2].ledger, screen)
    else:
        screen.put("")
    if verdict.proved:
        screen.say(
            f"PROVED EQUAL: {counted(verdict.steps, 'step')} on {counted(verdict.ranks, 'rank')}; "
            f"{'' if verdict.hint else 'every returned value, '}"
            "every sample and the state at the end are bit for bit those of the clean run; "
            f"{counted(len(faults), 'fault')} injected and survived.",
            "bold green",
        )
    else:
        screen.say("NOT PROVED:", "bold red")
        for problem in verdict.problems:
            screen.say(f"  - {problem}", "red")
    if verdict.hint:
        screen.say(f"hint: {verdict.hint}", "yellow")
    screen.put("")
    screen.say("journals and logs:")
    for outcome in outcomes:
        screen.put(f"  {outcome.run_dir}")
    if json_path is not None:
        screen.put(f"verdict: {json_path}")
    screen.put(f"next: everstep report {outcomes[-1].run_dir}")
