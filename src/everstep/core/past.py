"""What the journal tells a coordinator that takes over a job.

Theory of operation: the state of a running job comes from its agents, who know it. What they don't
know is in the journal: how far it has got itself, which incident is open, who held the slots, which
faults on purpose have fired, and how the job was begun. `recall` folds the records once. A record
that was lost at the end (its writer was killed) is one that agents tell of again, or that is
written once more.

What it doesn't know: how the journal is stored, and who lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.core.events import Holder, Resumed
from everstep.core.goodput import read_cause
from everstep.core.ladder import Incident
from everstep.types import CauseKind, StateFrom


@dataclass(slots=True, kw_only=True)
class Past:
    """`term`: of the newest coordinator, -1 if there was none. `started`, `ended`: the
    records of these words, if they are there. `recorded`: the newest step; `incidents`: how many
    were opened; `base`, `saved`, `open_incident`, `holders`: as events.Resumed has them. `loss`: a
    node with ranks was lost, and no incident has been opened since. `hosts`: by node. `here`: nodes
    that joined and were not lost, and may not know of the end. `fired`: numbers of the faults on
    purpose that have."""

    term: int = -1
    started: Mapping[str, Any] | None = None
    ended: Mapping[str, Any] | None = None
    recorded: int = 0
    base: int = 0
    saved: dict[StateFrom, int] = field(default_factory=dict)
    incidents: int = 0
    open_incident: Incident | None = None
    loss: bool = False
    hosts: dict[int, str] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)
    holders: dict[int, Holder] = field(default_factory=dict)
    fired: set[int] = field(default_factory=set)

    def resumed(self, term: int) -> Resumed:
        """The first event of the coordinator of `term`, which takes over."""
        return Resumed(
            term=term,
            recorded=self.recorded,
            base=self.base,
            saved=dict(self.saved),
            incidents=self.incidents,
            open_incident=self.open_incident,
            holders=dict(self.holders),
        )


def recall(records: Iterable[Mapping[str, Any]]) -> Past:
    """Fold a journal's records, in their order. Those that it does not know are passed over. Pure;
    raises KeyError or ValueError on a known record without its fields."""
    past = Past()
    for record in records:
        match record.get("event"):
            case "coordinator_started" | "coordinator_resumed":
                past.term = max(past.term, record["term"])
                past.loss = False
            case "job_started":
                past.started = record
            case "job_ended":
                past.ended = record
            case "step":
                past.recorded = record["step"]
            case "planned":
                _take_plan(past, record)
            case "fault_fired":
                past.fired.add(record["index"])
            case "incident_opened" | "incident_cause":
                _take_failure(past, record)
            case "incident_closed":
                past.open_incident = None
            case "spawned":
                _take_spawn(past, joiner=record["joiner"])
            case "checkpoint_saved":
                past.saved[StateFrom(record["tier"])] = record["step"]
            case "checkpoint_loaded":
                _take_load(past, record["step"], StateFrom(record["tier"]), record["text"])
            case "nodes_told":
                past.here.difference_update(record["nodes"])
            case "node_joined" | "gathered" | "node_lost" | "node_displaced" | "node_replaced":
                _take_node(past, record)
    return past


def _take_failure(past: Past, record: Mapping[str, Any]) -> None:
    cause, rank, step = read_cause(record["cause"]), record["rank"], record["step"]
    if record["event"] == "incident_opened":
        number = record["incident"]
        past.incidents = max(past.incidents, number)
        past.open_incident = Incident(number=number, rank=rank, step=step, cause=cause)
        past.open_incident.replaced, past.loss = past.loss, False
    if past.open_incident is not None:
        past.open_incident.blame(rank, step, cause)
        past.open_incident.replaced |= cause.kind is CauseKind.NODE


def _take_plan(past: Past, record: Mapping[str, Any]) -> None:
    """All may go back behind what they had committed."""
    lost = max(0, past.recorded - record["step"])
    past.recorded -= lost
    incident = past.open_incident
    if incident is not None:
        incident.floor, incident.decision = record["step"], record["reason"]
        incident.state_from = StateFrom(record["state_from"])
        incident.fetched |= incident.state_from is StateFrom.PEER
        incident.steps_lost += lost
        incident.failed.clear()


def _take_spawn(past: Past, *, joiner: bool) -> None:
    if past.open_incident is not None:
        past.open_incident.respawned = True
    if not joiner:
        past.base = 0  # all start again


def _take_load(past: Past, step: int, tier: StateFrom, refused: str) -> None:
    """A rank has begun at a checkpoint, as all do."""
    if past.base == step:
        return
    past.base = past.recorded = step
    past.saved = {where: kept for where, kept in past.saved.items() if kept <= step} | {tier: step}
    if past.open_incident is not None:
        past.open_incident.reloaded(step, tier, refused)


def _take_node(past: Past, record: Mapping[str, Any]) -> None:
    match record["event"]:
        case "node_joined":
            past.here.add(record["node"])
        case "node_lost" | "node_displaced":
            past.here.discard(record["node"])
    match record["event"]:
        case "node_joined":
            past.hosts[record["node"]] = record["host"]
        case "gathered":
            for slot, node in enumerate(record["nodes"]):
                past.holders[slot] = Holder(node=node, host=past.hosts.get(node, ""))
        case "node_lost" if record["ranks"]:
            lost = Holder(node=record["node"], host=record["host"], lost=True)
            past.holders[record["slot"]] = lost
            if past.open_incident is not None:
                past.open_incident.replaced = True
            else:
                past.loss = True
        case "node_replaced":
            past.holders[record["slot"]] = Holder(node=record["node"], host=record["host"])
