"""What a job is doing now, as values that can be sent and shown.

Theory of operation: a picture of `core.job.Job`, taken between two events. It shares nothing with
the job, so it stays as it was while the job goes on. It costs O(ranks + nodes) and is made only
when somebody asks. Pure.

What it doesn't know: how fast the job goes and what it has printed (`agent.desk`), and nodes that
have registered and can't fork yet: the core has not heard of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.core.job import Job, Phase
from everstep.core.words import name_ranks
from everstep.types import Cause

VACANT = "vacant"
AWAITING = "waiting for a node"
"""What a job does whose ranks stand still until a node takes an empty slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNow:
    """A node that is there. `slot`: its place in the job; None for a spare. `aside`: its host has
    lost too many nodes, so that others are taken first."""

    node: int
    host: str
    domain: str
    slot: int | None
    aside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMissing:
    """A place in the job that no node holds. `lost`: who had it, in words; "" if nobody had."""

    slot: int
    ranks: str
    lost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNow:
    """A rank. `incarnation`: of its process, 0 while it is `VACANT`; `state`: what that does, in
    the words of core.member.Status. `node`: where its slot is; None where nobody holds that.
    `step`, `sections`: what it has committed."""

    rank: int
    incarnation: int
    state: str
    node: int | None
    step: int
    sections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentNow:
    """The open incident: its number, and the failure that is shown."""

    incident: int
    rank: int
    step: int
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A job. `phase`: in the words of core.job.Phase, or `AWAITING`. `step`: every rank has
    committed it. `nodes`: those that are there, by number. `wait_s`: seconds for which a node is
    still waited for; None where none is."""

    phase: str
    generation: int
    step: int
    world_size: int
    nodes: tuple[NodeNow, ...]
    missing: tuple[SlotMissing, ...]
    wait_s: float | None
    ranks: tuple[RankNow, ...]
    incident: IncidentNow | None


def overview(job: Job, now_s: float) -> Overview:
    """What `job` is doing. `now_s`: seconds on the clock of its events."""
    waits = job.node_deadline_s is not None or job.copy_deadline_s is not None
    return Overview(
        phase=AWAITING if waits else job.phase.value,
        generation=job.generation,
        step=job.commits.least[0],
        world_size=job.world_size,
        nodes=_nodes(job, now_s),
        missing=_missing(job),
        wait_s=_wait_s(job, now_s),
        ranks=tuple(_rank(job, rank) for rank in range(job.world_size)),
        incident=_incident(job),
    )


def _nodes(job: Job, now_s: float) -> tuple[NodeNow, ...]:
    return tuple(
        NodeNow(
            node=node.number,
            host=node.host,
            domain=node.domain,
            slot=node.slot,
            aside=job.nodes.offenders.aside(node.host, now_s),
        )
        for node in job.nodes.living
    )


def _missing(job: Job) -> tuple[SlotMissing, ...]:
    found = []
    for slot in job.nodes.empty():
        last = job.nodes.last_holder(slot)
        ranks = name_ranks(job.nodes.layout.ranks_of(slot))
        found.append(SlotMissing(slot=slot, ranks=ranks, lost="" if last is None else str(last)))
    return tuple(found)


def _wait_s(job: Job, now_s: float) -> float | None:
    gathers = job.phase in (Phase.GATHERING, Phase.RECONVENING)
    deadline_s = job.deadline_s if gathers else (job.copy_deadline_s or job.node_deadline_s)
    return None if deadline_s is None else max(0.0, deadline_s - now_s)


def _rank(job: Job, rank: int) -> RankNow:
    member, node = job.membership.holder(rank), job.nodes.holder(rank)
    step, sections = job.commits.position(rank)
    return RankNow(
        rank=rank,
        incarnation=0 if member is None else member.incarnation,
        state=VACANT if member is None else member.status.value,
        node=None if node is None else node.number,
        step=step,
        sections=sections,
    )


def _incident(job: Job) -> IncidentNow | None:
    incident = job.incident
    if incident is None:
        return None
    return IncidentNow(
        incident=incident.number, rank=incident.rank, step=incident.step, cause=incident.cause
    )
