"""The ledger: every figure that everstep prints about a run, folded from its journal.

Theory of operation. `fold` walks the records once and cuts the wall time, from the first record to
the last, into parts that do not overlap and leave nothing out, so that they sum to it:

  setup_s      until set-up is done for the first time
  step_s       from one commit by all ranks (or the end of set-up, or of an incident) to the next
  discarded_s  from the last commit by all to a fault: the attempt that was thrown away
  incident_s   from a fault to the first step that all ranks commit after it, or, where steps were
               lost, to the step at which the job is back where it was
  rest_s       after the last commit: the closing fence, the rest of the script, the exit

Goodput is step_s / wall_s. The step that ends an incident counts as its cost, not as step time:
the measure errs against us by at most one step an incident.

An incident's own stages lie between moments that the journal has: fault, noticed, all survivors
parked, all ranks ready, communicators up, state restored, first commit. Each boundary is moved up
to the one before it if it lies earlier, and a missing one has no width, so the stages are never
negative and sum to the incident. The fault's moment is that of the injected fault that caused it,
else what the cause says, else the moment of notice.

A journal may end at any record: what is open then ends with the last record.

What it doesn't know: how the journal is stored, and clocks of other hosts (one journal, one clock,
also where coordinators of several hosts have written it: whoever reads it has seen to that).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.core.ladder import is_echo
from everstep.types import Cause, CauseKind, Rung, Stage, StateFrom

_BOUNDARIES = {  # the record that ends a stage
    Stage.DETECT: "incident_opened",
    Stage.STOP: "stopped",
    Stage.START: "ready",
    Stage.REGROUP: "regrouped",
    Stage.STATE: "restored",
    Stage.FIRST_STEP: "incident_closed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentEntry:
    """One incident. `cause` is the one to show, of `rank`; `fault`: the injected fault that caused
    it, else the first that fell into it, and `faults` all those. `step`: the one that was under
    way. `rung`, `state_from`, `reason`: None and "" until it is planned. `closed`: a step was
    committed by all ranks after it. `stages` are seconds and sum to `total_s`."""

    incident: int
    rank: int
    step: int
    cause: Cause
    fault: str | None
    faults: tuple[str, ...]
    rung: Rung | None
    state_from: StateFrom | None
    reason: str
    steps_lost: int
    closed: bool
    began_s: float
    stages: Mapping[Stage, float]

    @property
    def total_s(self) -> float:
        """Seconds from the fault to the end of the incident: the sum of its stages."""
        return sum(self.stages.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """A run in figures; see the module's text for the parts of the wall time, in seconds.

    `steps`: the newest step that all ranks have committed; `kept`: the newest of which there is a
    checkpoint, 0 without one. `exit_code`, `cause`, `text`: of the
    end; None, None and "" for a run that has not ended. `faults_fired`: in their order.
    """

    run_id: str
    world_size: int
    steps: int
    kept: int
    setup_s: float
    step_s: float
    discarded_s: float
    incident_s: float
    rest_s: float
    incidents: tuple[IncidentEntry, ...]
    faults_fired: tuple[str, ...]
    exit_code: int | None
    cause: Cause | None
    text: str

    @property
    def wall_s(self) -> float:
        """Seconds from the first record to the last: the sum of the parts."""
        return self.setup_s + self.step_s + self.discarded_s + self.incident_s + self.rest_s

    @property
    def goodput(self) -> float:
        """The share of the wall time in which steps were made that count, 0 to 1."""
        return self.step_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def steps_lost(self) -> int:
        """Steps that were committed by all ranks and had to be done again."""
        return sum(entry.steps_lost for entry in self.incidents)

    def by_rung(self) -> dict[Rung, int]:
        """How many incidents ended on each rung; those that never got to one count as `stop`."""
        counts: dict[Rung, int] = {}
        for entry in self.incidents:
            rung = entry.rung if entry.rung is not None and entry.closed else Rung.STOP
            counts[rung] = counts.get(rung, 0) + 1
        return counts


def _until_the_end(records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Those up to the job's end: what is written later costs it nothing."""
    for record in records:
        yield record
        if record.get("event") == "job_ended":
            return


def fold(records: Iterable[Mapping[str, Any]]) -> Ledger:
    """Fold a journal's records, in their order, into the ledger.

    Records that it does not know are passed over. Pure; raises KeyError or ValueError on a known
    record without its fields.
    """
    journal = list(_until_the_end(record for record in records if "t" in record))
    drafts = _incidents(journal)
    entries = tuple(_entry(draft, journal) for draft in drafts)
    parts = _parts(journal, entries, [draft.last_step_inside for draft in drafts])
    known: dict[str, Any] = {"run_id": "", "world_size": 0, "exit_code": None, "text": ""}
    cause: Cause | None = None
    steps, kept, fired = 0, 0, []
    for record in journal:
        match record["event"]:
            case "journal" | "job_started" | "job_ended" as event:
                known |= {key: record[key] for key in known if key in record}
                if event == "job_ended" and record.get("cause") is not None:
                    cause = read_cause(record["cause"])
            case "step":
                steps = max(steps, record["step"])
            case "checkpoint_loaded":
                kept = record["step"]
                steps = max(steps, kept)
            case "checkpoint_saved":
                kept = max(kept, record["step"])
            case "fault_fired":
                fired.append(record["text"])
    return Ledger(
        **known,
        steps=steps,
        kept=kept,
        setup_s=parts["setup_s"],
        step_s=parts["step_s"],
        discarded_s=parts["discarded_s"],
        incident_s=parts["incident_s"],
        rest_s=parts["rest_s"],
        incidents=entries,
        faults_fired=tuple(fired),
        cause=cause,
    )


def read_cause(fields: Mapping[str, Any]) -> Cause:
    """A cause as the journal has it, as a value again."""
    return Cause(**{**fields, "kind": CauseKind(fields["kind"])})


# ---------------------------------------------------------------------- incidents


@dataclass(slots=True, kw_only=True)
class _Draft:
    """An incident while its records are gathered. `marks`: stage to the moment that ends it.
    `floor`: the step that all went on from. `last_step_inside`: that step became complete only in
    the incident, with the work of before the fault."""

    opened: Mapping[str, Any]
    cause: Cause
    rank: int
    step: int
    floor: int = 0
    last_step_inside: bool = False
    faults: list[str] = field(default_factory=list)
    marks: dict[Stage, float] = field(default_factory=dict)
    planned: Mapping[str, Any] = field(default_factory=dict)
    closed: bool = False
    until_s: float = 0.0
    caught_up_s: float | None = None


def _incidents(journal: Sequence[Mapping[str, Any]]) -> list[_Draft]:
    """Gather what belongs to each incident. Only one is open at a time."""
    drafts: list[_Draft] = []
    steps = 0
    for record in journal:
        event = record["event"]
        if event == "incident_opened":
            cause, rank, step = read_cause(record["cause"]), record["rank"], record["step"]
            drafts.append(_Draft(opened=record, cause=cause, rank=rank, step=step))
        if not drafts:
            steps = max(steps, record["step"]) if event == "step" else steps
            continue
        draft = drafts[-1]
        if event == "step":
            draft.last_step_inside |= not draft.closed and record["step"] <= draft.floor
            behind = draft.closed and draft.planned.get("steps_lost", 0) > 0
            if behind and draft.caught_up_s is None and record["step"] >= steps:
                draft.caught_up_s = record["t"]
            steps = max(steps, record["step"])
        elif event in ("incident_opened", "incident_cause"):
            _take_cause(draft, record)
        elif not draft.closed and record.get("incident") == draft.opened["incident"]:
            _take_mark(draft, record)
        if not draft.closed:
            draft.until_s = record["t"]
    return drafts


def _take_cause(draft: _Draft, record: Mapping[str, Any]) -> None:
    cause = read_cause(record["cause"])
    if cause.fault is not None and cause.fault not in draft.faults:
        draft.faults.append(cause.fault)
    if is_echo(draft.cause) and not is_echo(cause):
        draft.cause, draft.rank, draft.step = cause, record["rank"], record["step"]
    if record["event"] == "incident_opened":
        draft.marks[Stage.DETECT] = record["t"]


def _take_mark(draft: _Draft, record: Mapping[str, Any]) -> None:
    event = record["event"]
    for stage, ends in _BOUNDARIES.items():
        if ends == event:
            # A failure in a recovery brings earlier stages back; what they end counts anew.
            order = list(Stage).index(stage)
            draft.marks = {s: t for s, t in draft.marks.items() if list(Stage).index(s) < order}
            draft.marks[stage] = record["t"]
    if event == "planned":
        draft.floor = record["step"]
    if event in ("planned", "incident_closed"):
        draft.planned = record
    if event == "incident_closed":
        draft.closed, draft.until_s = True, record["t"]


def _entry(draft: _Draft, journal: Sequence[Mapping[str, Any]]) -> IncidentEntry:
    began_s = _fault_s(draft, journal)
    stages = dict.fromkeys(Stage, 0.0)
    cursor_s = began_s
    last = max((stage for stage in draft.marks), key=list(Stage).index)
    for stage in _BOUNDARIES:
        mark_s = draft.marks.get(stage)
        if mark_s is not None and mark_s > cursor_s:
            stages[stage] = mark_s - cursor_s
            cursor_s = mark_s
    if not draft.closed and draft.until_s > cursor_s:
        # Cut short: the time belongs to the stage that was under way.
        under_way = list(_BOUNDARIES)[list(_BOUNDARIES).index(last) + 1]
        stages[under_way] += draft.until_s - cursor_s
    if draft.caught_up_s is not None and draft.caught_up_s > cursor_s:
        stages[Stage.LOST_STEPS] = draft.caught_up_s - cursor_s
    plan = draft.planned
    return IncidentEntry(
        incident=draft.opened["incident"],
        rank=draft.rank,
        step=draft.step,
        cause=draft.cause,
        fault=draft.cause.fault if draft.cause.fault is not None else _first(draft.faults),
        faults=tuple(draft.faults),
        rung=Rung(plan["rung"]) if plan else None,
        state_from=StateFrom(plan["state_from"]) if plan else None,
        reason=plan.get("reason", ""),
        steps_lost=plan.get("steps_lost", 0),
        closed=draft.closed,
        began_s=began_s,
        stages=stages,
    )


def _fault_s(draft: _Draft, journal: Sequence[Mapping[str, Any]]) -> float:
    """When the fault happened, never later than it was noticed."""
    noticed_s: float = draft.opened["t"]
    if draft.cause.fault is None:
        at_s = draft.cause.at_s
        return noticed_s if at_s is None else min(at_s, noticed_s)
    fired_s = [
        float(record["fired_t"])
        for record in journal
        if record["event"] == "fault_fired"
        and record["text"] == draft.cause.fault
        and record["rank"] == draft.rank
        and record["fired_t"] <= noticed_s
    ]
    return max(fired_s, default=noticed_s)


def _first(faults: Sequence[str]) -> str | None:
    return faults[0] if faults else None


# ---------------------------------------------------------------------- wall time


def _parts(
    journal: Sequence[Mapping[str, Any]],
    entries: Sequence[IncidentEntry],
    useful: Sequence[bool],
) -> dict[str, float]:
    """Cut the wall time at every boundary; each piece goes to the part that its end belongs to.

    `useful`: by incident, whether the attempt that the fault cut off was completed, not discarded.
    """
    parts = dict.fromkeys(("setup_s", "step_s", "discarded_s", "incident_s", "rest_s"), 0.0)
    if not journal:
        return parts
    cuts: list[tuple[float, int, str, int]] = []
    for record in journal:
        part = {"setup_done": "setup_s", "step": "step_s", "closed": "rest_s"}.get(record["event"])
        if part is not None:
            cuts.append((record["t"], 1, part, 0))
    for number, (entry, completed) in enumerate(zip(entries, useful, strict=True), start=1):
        cuts.append((entry.began_s, 0, "step_s" if completed else "discarded_s", number))
        cuts.append((entry.began_s + entry.total_s, 2, "incident_s", number))
    cuts.sort(key=lambda cut: cut[:2])
    cursor_s, end_s = float(journal[0]["t"]), float(journal[-1]["t"])
    set_up = closed = False
    inside = 0  # the incident that the cursor is in; the next one's fault ends it, too
    for moment_s, _, part, number in cuts:
        set_up, closed = set_up or part == "setup_s", closed or part == "rest_s"
        if inside and number in (0, inside) and part != "incident_s":
            continue  # steps and set-ups inside an incident are its cost
        if part == "incident_s" and number != inside:
            continue
        piece_s = max(0.0, min(moment_s, end_s) - cursor_s)
        if part == "incident_s":
            inside = 0
        elif number:
            before = "setup_s" if not set_up else "rest_s" if closed else part
            part, inside = "incident_s" if inside else before, number
        parts[part] += piece_s
        cursor_s += piece_s
    parts["rest_s" if set_up else "setup_s"] += max(0.0, end_s - cursor_s)
    return parts
