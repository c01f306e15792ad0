"""Nodes come back to a coordinator that takes over a job that runs, and tell what they know.

Theory of operation. All that matters and that an earlier coordinator knew, the agents know too, and
tell (`NodeBack`). What their workers say from then on is added to it. How the job goes on is
decided when all are there, or the wait is over (`core.resume`).

Two nodes may claim one slot: one that was lost and lives, and the one that took its place. The
processes of the later one have the higher incarnations; the other is sent away. It may come again,
as another node.

What it doesn't know: how agents are reached, and what the journal is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from signal import SIGKILL

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.agreement import shared
from everstep.core.job import Job, Phase
from everstep.core.nodes import Node
from everstep.core.rejoined import Failure, Rejoined
from everstep.core.reload import on_saved
from everstep.types import TERM_STRIDE, Cause

GONE_ON = "the job has gone on without it"
"""Why a node is sent away."""


def begin(job: Job, event: ev.Resumed) -> None:
    """Take over: wait for the nodes."""
    job.phase = Phase.RECONVENING
    job.deadline_s = job.now_s + max(job.policy.silence_timeout_s, job.policy.rejoin_timeout_s)
    job.membership.number_from(event.term * TERM_STRIDE)
    job.reach.number_from(event.term * TERM_STRIDE)
    job.budget.incidents, job.recorded = event.incidents, event.recorded
    job.ever, job.base, job.saved = event.recorded, event.base, dict(event.saved)
    job.keeps = bool(job.saved)
    for rank in range(job.world_size):
        job.commits.made(rank, (event.recorded, 0))
    if event.open_incident is not None:
        job.incident = replace(event.open_incident, failed=dict(event.open_incident.failed))
    job.rejoined = Rejoined(told=event)


# ---------------------------------------------------------------------- nodes


def on_first(job: Job) -> None:
    """A node has come: the others that live are not far."""
    assert job.deadline_s is not None
    job.deadline_s = min(job.deadline_s, job.now_s + job.policy.rejoin_timeout_s)


def on_back(job: Job, event: ev.NodeBack) -> None:
    """A node has come back: take it in, with what it knows."""
    rejoined = job.rejoined
    if job.nodes.get(event.node) is not None:
        return  # it is told twice
    if job.nodes.is_lost(event.node) or (rejoined is None and event.slot is not None):
        job.out.put(do.Dismiss(node=event.node, why=GONE_ON))
        return
    if rejoined is None:  # a spare, which was not waited for: it is warm, and has missed nothing
        spare = job.nodes.join(event.node, event.host, event.domain)
        assert spare is not None
        job.out.node_joined(spare)
        return
    on_first(job)
    node = job.nodes.join(event.node, event.host, event.domain)
    assert node is not None
    rejoined.reports[event.node] = event
    for said in event.protected:
        _learn(job, said)
    for tier, step in event.saved.items():
        job.saved[tier], job.keeps = max(step, job.saved.get(tier, 0)), True
    for copy in event.copies:
        job.copies.kept(copy.rank, copy.step, event.node, copy.stamp)
    if event.slot is not None and _wins_slot(job, rejoined, node, event):
        _take_slot(job, rejoined, node, event)


def _learn(job: Job, said: ev.Protected) -> None:
    """What a rank said in set-up; that of its first process has the digests."""
    known = job.protected.get(said.rank)
    if known is None or (said.digests and not known.digests):
        job.protected[said.rank] = shared(said, job.first_of)


def _wins_slot(job: Job, rejoined: Rejoined, node: Node, event: ev.NodeBack) -> bool:
    """Whether `node` has the slot that it claims; another that claims it is sent away."""
    layout, slot = job.nodes.layout, event.slot
    assert slot is not None
    ranks = layout.ranks_of(slot)
    if slot >= layout.nnodes or any(member.rank not in ranks for member in event.members):
        expel(job, rejoined, node, f"it held slot {slot}, which this job lays out differently")
        return False
    rival = job.nodes.holder_of(slot)
    if rival is None:
        return True
    later = _is_later(event, rejoined.reports[rival.number])
    loser, winner = (rival, node) if later else (node, rival)
    expel(job, rejoined, loser, f"{winner} has taken its place")
    return later


def _is_later(one: ev.NodeBack, other: ev.NodeBack) -> bool:
    """Whether the ranks of a slot were given to `one` after `other`. Both have had all of them, or
    the first ones."""
    mine, theirs = _incarnations(one), _incarnations(other)
    common = mine.keys() & theirs.keys()
    return any(mine[rank] > theirs[rank] for rank in common) if common else one.node > other.node


def _incarnations(event: ev.NodeBack) -> Mapping[int, int]:
    """By rank, the newest process that the node has had."""
    known = {died.rank: died.incarnation for died in event.ended}
    return known | {member.rank: member.incarnation for member in event.members}


def _take_slot(job: Job, rejoined: Rejoined, node: Node, event: ev.NodeBack) -> None:
    assert event.slot is not None
    job.nodes.give(event.slot, node)
    for known in event.members:
        job.membership.take_in(known.rank, known.incarnation, joining=known.joining)
        rejoined.members[known.rank] = known
    for died in event.ended:
        if died.rank not in rejoined.members:
            rejoined.ended[died.rank] = _failure(died)


def expel(job: Job, rejoined: Rejoined, node: Node, why: str) -> None:
    """A node has no part in the job; its processes are ended, and it may come as another."""
    _forget_members(job, rejoined, node)
    job.nodes.expel(node)
    job.copies.lose(node.number)
    job.out.put(do.Dismiss(node=node.number, why=why))


def _forget_members(job: Job, rejoined: Rejoined, node: Node) -> None:
    if node.slot is None:
        return
    for rank in job.nodes.layout.ranks_of(node.slot):
        rejoined.ended.pop(rank, None)
        member = rejoined.members.pop(rank, None)
        if member is not None:
            job.membership.died(rank, member.incarnation)


def on_holder_lost(job: Job, node: Node, cause: Cause) -> None:
    """A node that had come back is lost again."""
    rejoined = job.rejoined
    assert rejoined is not None
    assert node.slot is not None
    rejoined.lost[node.slot] = cause
    _forget_members(job, rejoined, node)
    job.nodes.lose(node, job.now_s)
    job.copies.lose(node.number, node.host)
    job.out.put(do.Dismiss(node=node.number, why=cause.text))


# ---------------------------------------------------------------------- workers


def on_said(job: Job, event: ev.WorkerEvent) -> None:
    """A worker of a node that has come back says more, or dies, before it is known how the job goes
    on."""
    rejoined = job.rejoined
    assert rejoined is not None
    known = rejoined.members[event.rank]
    match event:
        case ev.Died():
            job.membership.died(event.rank, event.incarnation)
            del rejoined.members[event.rank]
            rejoined.ended[event.rank] = _failure(event)
            return
        case ev.Refused(text=text, exit_code=exit_code):
            job.end(exit_code, text, None, event.rank)
        case ev.Copied(step=step, node=node) if job.nodes.get(node) is not None:
            job.copies.kept(event.rank, step, node, event.stamp)
        case ev.Finished():
            known = replace(known, finished=True)
        case ev.Saved():
            on_saved(job, event)
        case ev.Loaded(step=step, ok=True) if event.generation == known.generation:
            known = replace(known, base=step, position=max(known.position, (step, 0)))
        case ev.Committed(step=step, sections=sections) if event.generation == known.generation:
            known = replace(known, position=max(known.position, (step, sections)))
        case ev.Closing(step=step) if event.generation == known.generation:
            known = replace(known, left_at=step, position=max(known.position, (step, 0)))
        case ev.Restored(ok=ok) if event.generation == known.generation:
            known = replace(known, settled=ok and not known.stopped)
        case ev.Parked() if event.generation == known.generation:
            known = replace(known, settled=False, stopped=True)
        case ev.Faulted() if event.generation == known.generation:
            known = replace(known, settled=False)
            rejoined.failures.append(_failure(event))
    rejoined.members[event.rank] = known


def _failure(event: ev.Died | ev.Faulted) -> Failure:
    cause = event.cause
    ended = isinstance(event, ev.Died) and not event.before_kill
    ours = ended and cause.signal == SIGKILL and cause.fault is None
    return Failure(rank=event.rank, incarnation=event.incarnation, cause=cause, ours=ours)
