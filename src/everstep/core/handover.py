"""What the coordinator does about nodes: it gathers them at the start, gives the slot of a lost one
to a spare, and waits for one when there is none.

Theory of operation. A lost node is one failure with one cause, however many ranks it held. All of
them are vacant at once, since nothing that the node's processes may still say counts. What follows
is what follows on any death: the survivors stop and park, and each vacant rank is spawned as soon
as its slot is held again, on the spare that took it. A rank that dies on a node that lives stays
there. So a spare that is lost in the takeover, and several nodes that go at once, are nothing
special: a slot is empty again, and the next spare takes it.

Without a spare the ranks stay parked and wait for a node to join: from when it is known that the
survivors hold the state, since a job whose last copy went with the node has nothing to wait for.

A node with a process that can't be ended is given up like a lost one if a spare can take its place.

What it doesn't know: how a loss is noticed, and whether the node's processes still run. They can do
no harm: the new generation doesn't know them, and `Dismiss` ends them when the agent is reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.job import Job, Phase, newest
from everstep.core.membership import Member
from everstep.core.nodes import Node, name_nodes
from everstep.core.reconvene import on_first, on_holder_lost
from everstep.core.words import NODE_LEFT, name_ranks
from everstep.types import Cause, CauseKind


def on_joined(job: Job, event: ev.NodeJoined) -> None:
    """An agent has registered: take it in as a spare. Whether it is needed, `fill_slots` says."""
    needed = job.nodes.layout.nproc_per_node
    if job.nodes.is_lost(event.node):
        _dismiss(job, event.node, "it was given up, and its number is never used again")
    elif event.ranks < needed:
        workers = f"{event.ranks} worker{'' if event.ranks == 1 else 's'}"
        _dismiss(job, event.node, f"it can run {workers}, and a node of this job has {needed}")
    elif (node := job.nodes.join(event.node, event.host, event.domain)) is not None:
        job.out.node_joined(node)
        if event.found:
            job.found[event.node] = event.found
        if job.phase is Phase.RECONVENING:
            on_first(job)


def on_lost(job: Job, event: ev.NodeLost) -> None:
    """A node is gone. A loss that is told twice is one."""
    node = job.nodes.get(event.node)
    if node is not None and node.slot is not None and job.phase is Phase.RECONVENING:
        on_holder_lost(job, node, event.cause)
    elif node is not None:
        lose(job, node, event.cause)


def give_up(job: Job, member: Member, why: str) -> bool:
    """Take the node of `member` for lost, if a spare can take its place. Returns whether it can."""
    node = job.nodes.holder(member.rank)
    if node is None or not job.nodes.spares:
        return False
    lose(job, node, Cause(kind=CauseKind.NODE, text=why))
    return True


def lose(job: Job, node: Node, cause: Cause) -> None:
    """`node` is gone, or is given up, with all its ranks."""
    ranks = () if node.slot is None else job.nodes.layout.ranks_of(node.slot)
    held = f", and {name_ranks(ranks)} with it" if ranks else ""
    left = cause.signature == NODE_LEFT
    text = f"{node} {'left' if left else 'was lost'}{held}: {cause.text}"
    if left:  # that is nothing against its host, and it takes its copies along
        losses = 0
        job.nodes.expel(node)
        job.copies.lose(node.number)
    else:
        losses = job.nodes.lose(node, job.now_s)
        job.copies.lose(node.number, node.host)
    job.reach.lost(node.number)
    job.out.node_lost(node, ranks, text)
    if losses == job.policy.max_node_failures:
        said = f"host {node.host} has lost {losses} nodes within {job.policy.incident_window_s:g} s"
        job.out.node_set_aside(node.host, losses, f"{said}: others are taken before its own")
    _dismiss(job, node.number, cause.text)
    if ranks:
        _fail_all(job, ranks, replace(cause, kind=CauseKind.NODE, text=text))


def _fail_all(job: Job, ranks: Sequence[int], cause: Cause) -> None:
    """All `ranks` fail by one cause, and have no process any more."""
    job.reclaims.lost(ranks)
    found = [member for rank in ranks if (member := job.membership.holder(rank)) is not None]
    counted = [member for member in found if not member.doomed]
    first = (counted or found)[0]
    step = job.step_of(first)
    for member in found:
        job.membership.died(member.rank, member.incarnation)
    if counted:
        job.fail(first, step, cause, [rank for rank in ranks if rank != first.rank])
    else:
        job.explain(first, step, cause)  # they were all to be killed: nothing new has stopped
    if job.incident is not None:
        job.incident.replaced = True


def _dismiss(job: Job, number: int, why: str) -> None:
    job.out.put(do.Dismiss(node=number, why=why))


# ---------------------------------------------------------------------- the start


def settle_gathering(job: Job) -> None:
    """Begin when there are as many nodes as the job needs; those that are left over are spares."""
    nodes = job.nodes
    if len(nodes.spares) < nodes.layout.nnodes:
        return
    holders = nodes.preferred((), job.now_s)[: nodes.layout.nnodes]
    for slot, node in enumerate(holders):
        nodes.give(slot, node)
    job.out.gathered(holders, spares=len(nodes.spares))
    job.phase = Phase.SETTING_UP
    job.deadline_s = job.now_s + job.policy.setup_timeout_s


def end_late_gathering(job: Job) -> None:
    """Not enough nodes have come in time."""
    nodes, needed = job.nodes, job.nodes.layout.nnodes
    missing = needed - len(nodes.living)
    text = (
        f"{missing} of {needed} nodes {'has' if missing == 1 else 'have'} not joined within "
        f"{job.policy.join_nodes_timeout_s:g} s; {name_nodes(nodes.living)} came. Look on the "
        "missing hosts whether the agent runs and reaches the coordinator (the setting "
        "join_nodes_timeout_s allows a later start)"
    )
    job.end(1, text, Cause(kind=CauseKind.TIMEOUT, text=text))


# ---------------------------------------------------------------------- empty slots


def fill_slots(job: Job) -> None:
    """Give empty slots to spares, as far as there are any."""
    nodes, incident = job.nodes, job.incident
    if not nodes.any_empty or not nodes.spares:
        return
    assert incident is not None
    for slot in nodes.empty():
        avoid = _domains_of_replicas(job, slot)
        spares, lost = nodes.preferred(avoid, job.now_s), nodes.last_holder(slot)
        if not spares:
            return
        assert lost is not None
        node = spares[0]
        aside = nodes.offenders.aside(node.host, job.now_s)
        nodes.give(slot, node)
        incident.takeovers[slot] = _takeover(node, lost, node.domain in avoid, aside)
        job.out.node_replaced(incident, slot, lost, node)
    if job.node_deadline_s is not None and job.phase is Phase.SETTING_UP:
        job.deadline_s = job.now_s + job.policy.setup_timeout_s
    job.node_deadline_s = None


def _takeover(node: Node, lost: Node, shared: bool, aside: bool) -> str:
    """Who takes over from whom, and what speaks against it."""
    but = []
    if shared:
        but.append(f"failure domain {node.domain} holds replicas of its state")
    if aside:
        but.append("its host is set aside")
    better = f" (no other is there, though {' and '.join(but)})" if but else ""
    return f"{node} takes the place of {lost}{better}"


def _domains_of_replicas(job: Job, slot: int) -> set[str]:
    """The failure domains of the nodes that hold replicas of what the ranks of `slot` hold. None is
    known in set-up. O(ranks)."""
    ranks = job.nodes.layout.ranks_of(slot)
    shards = {job.protected[rank].shard for rank in ranks if rank in job.protected}
    peers = (rank for rank, said in job.protected.items() if said.shard in shards)
    holders = (job.nodes.holder(rank) for rank in peers if rank not in ranks)
    return {node.domain for node in holders if node is not None}


def await_node(job: Job) -> None:
    """Wait for a node to join, if a slot is empty; end the job when none has come in time."""
    incident = job.incident
    if not job.nodes.any_empty:
        return
    assert incident is not None
    ranks = [rank for slot in job.nodes.empty() for rank in job.nodes.layout.ranks_of(slot)]
    if job.node_deadline_s is None:
        job.node_deadline_s = job.now_s + job.policy.spare_wait_s
        if job.policy.spare_wait_s > 0:
            job.out.node_awaited(incident, ranks, job.policy.spare_wait_s)
    if job.phase is Phase.SETTING_UP:
        job.deadline_s = None  # set-up has time from when its ranks are there
    if job.node_deadline_s <= job.now_s:
        job.end_incident(_nobody_came(job, ranks))


def _nobody_came(job: Job, ranks: Sequence[int]) -> str:
    wait_s, missing = job.policy.spare_wait_s, len(job.nodes.empty())
    waited = f"and none has come within {wait_s:g} s" if wait_s > 0 else "and none is waited for"
    spares = job.nodes.layout.spares + missing
    step = job.commits.newest[0]
    kept = f"a checkpoint of step {newest(job.saved)[0]} is left" if job.saved else ""
    lost = (
        f"the state of step {step}, which the other ranks still hold, ends with the job; "
        f"{kept or 'a durable checkpoint would have kept it'}"
        if step > 0
        else "nothing is committed yet"
    )
    return (
        f"no spare node is left for {name_ranks(ranks)}, {waited} (--spare-wait). "
        f"With --spares {spares} one would have taken over at once; {lost}"
    )
