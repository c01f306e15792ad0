"""How a job is found by a coordinator that has taken it over, and how it goes on.

Theory of operation. Steps have gone on meanwhile where nothing was wrong. So when every slot is
held by a node that has come back, or the wait is over, the job is found in one of these states,
which are looked for in this order:

- A script was told that it may exit: the job is over.
- Nothing is recorded, and no node has come that held a slot: nodes are gathered.
- Every rank has a process, all of them in one world and in their loops: the job runs. Nobody is
  told anything but what may have been missed.
- Something is wrong: somebody is dead, a node is not there, some stand still, some were in set-up
  or in a recovery. That is an incident like any other, the one that the journal leaves open or a
  new one, and is answered like any other: by a stop and a recovery, or, while nothing is committed,
  by starting again. Its world has a number of this coordinator's, so those that have been stopped
  before stop once more. Processes that had not joined yet are replaced: what they were told is not
  known.

A node that was lost and lives may come where the one that took its place does not. The others tell:
who is not among the peers of those that are in the newest world has been left behind by it.

What it doesn't know: what a recovery is made of (`core.settle`'s).
"""

from __future__ import annotations

from dataclasses import replace

from everstep.core import actions as do
from everstep.core.job import Job, Phase
from everstep.core.ladder import is_echo
from everstep.core.member import Member
from everstep.core.nodes import Node
from everstep.core.reconvene import GONE_ON, expel
from everstep.core.rejoined import Failure, Rejoined
from everstep.core.words import name_ranks, verb
from everstep.types import WHOLE, Cause, CauseKind


def settle_reconvening(job: Job) -> None:
    """Go on, when all slots are held by nodes that have come back, or the wait is over."""
    rejoined = job.rejoined
    assert rejoined is not None
    assert job.deadline_s is not None
    late = job.deadline_s <= job.now_s
    if job.nodes.any_empty and not late:
        return
    _expel_left_behind(job, rejoined)
    if job.nodes.any_empty and not late:
        return  # those that took their places may still come
    if any(member.bye for member in rejoined.members.values()):
        _say_bye_again(job, rejoined)
    elif rejoined.stop_asked:
        _record(job, rejoined, "the nodes are there, and the job was asked to end")
        job.end(128 + rejoined.stop_asked.signal, rejoined.stop_asked.text)
    elif rejoined.told.recorded == 0 and not _had_slots(job, rejoined):
        _gather(job, rejoined)
    elif _is_undisturbed(job, rejoined):
        _go_on(job, rejoined)
    else:
        _recover(job, rejoined)
    job.rejoined = None


def _expel_left_behind(job: Job, rejoined: Rejoined) -> None:
    """Send nodes away that a newer world than theirs doesn't count among its own."""
    newest = rejoined.newest
    peers: set[int] = set()
    for report in rejoined.reports.values():
        if any(not each.joining and each.generation == newest for each in report.members):
            peers.update(report.peers)
    if not peers:
        return
    for slot in range(job.nodes.layout.nnodes):
        node = job.nodes.holder_of(slot)
        if node is None or node.number in peers:
            continue
        found = (rejoined.members.get(rank) for rank in job.nodes.layout.ranks_of(slot))
        if any(each and not each.joining and each.generation < newest for each in found):
            expel(job, rejoined, node, GONE_ON)


def _had_slots(job: Job, rejoined: Rejoined) -> bool:
    """Whether a node has come back that held a slot."""
    holds = any(job.nodes.holder_of(slot) for slot in range(job.nodes.layout.nnodes))
    return holds or bool(rejoined.lost)


def _is_undisturbed(job: Job, rejoined: Rejoined) -> bool:
    """Every rank has a process, all are in one world, and in their loops or after them."""
    members = rejoined.members.values()
    return (
        len(members) == job.world_size
        and not rejoined.failures
        and all(member.settled and not member.joining for member in members)
        and len({member.generation for member in members}) == 1
    )


def _gather(job: Job, rejoined: Rejoined) -> None:
    _record(job, rejoined, "nothing had begun, nodes are gathered")
    job.membership.found_in(rejoined.newest)
    job.membership.advance()
    job.phase = Phase.GATHERING
    job.deadline_s = job.now_s + job.policy.join_nodes_timeout_s
    if job.incident is not None:
        job.incident.start_again("no node that had a part in the job has come back")


def _say_bye_again(job: Job, rejoined: Rejoined) -> None:
    _record(job, rejoined, "all scripts have ended")
    if job.incident is not None:
        job.close_incident()
    to = tuple(member.identity for member in job.membership.members())
    job.out.put(do.SendBye(to=to))
    job.end(0, "")


def _go_on(job: Job, rejoined: Rejoined) -> None:
    """Nobody is disturbed."""
    _take_stands(job, rejoined)
    _record(job, rejoined, "all ranks have gone on without it", undisturbed=True)
    missing = _know_shards(job)
    if missing:
        job.end(1, missing)
        return
    job.phase, job.deadline_s = Phase.RUNNING, None
    job.resumed_at = job.commits.least
    if job.incident is not None and not job.incident.decision:
        job.incident.decision = "nobody had been stopped when the coordinator came back"
    untold = _untold(job, rejoined)
    if untold:
        job.out.put(do.SendClosed(to=tuple(member.identity for member in untold)))


def _untold(job: Job, rejoined: Rejoined) -> list[Member]:
    """Those that wait for the closing fence, and have not been told that it is open."""
    members = job.membership.members() if job.closed else ()
    return [m for m in members if m.closing and not rejoined.members[m.rank].closed]


def _take_stands(job: Job, rejoined: Rejoined) -> None:
    """Where each rank stands, as the agents have told it."""
    job.membership.found_in(rejoined.newest)
    job.found_in = rejoined.newest
    job.closed = any(known.closed for known in rejoined.members.values())
    job.base = max((known.base for known in rejoined.members.values()), default=0) or job.base
    job.begun = job.base > 0
    if job.recorded < job.base:  # the last coordinator did not write down where all began
        job.recorded, job.ever = job.base, max(job.ever, job.base)
        for rank in range(job.world_size):
            job.commits.made(rank, (job.base, 0))
    for rank, known in rejoined.members.items():
        job.commits.made(rank, known.position)
        member = job.membership.current(rank, known.incarnation)
        assert member is not None
        if known.left_at is not None:
            job.membership.leave(member, known.left_at)
        if known.finished:
            job.membership.finish(member)


def _know_shards(job: Job) -> str:
    """Find out which part of the state each rank holds. Returns "", or why it is not known."""
    unknown = [rank for rank in range(job.world_size) if rank not in job.protected]
    known = next(iter(job.protected.values()), None)
    if not unknown:
        return ""
    if known is not None and known.shard == WHOLE:
        for rank in unknown:
            job.protected[rank] = replace(known, rank=rank, incarnation=0)
        return ""
    return (
        f"it is not known which part of the state {verb(unknown, 'holds', 'hold')}: the nodes that "
        "knew are gone, or have not come back to the coordinator within "
        f"{job.policy.rejoin_timeout_s:g} s (the setting rejoin_timeout_s). A node and its "
        "guardian know it: while there is no coordinator, one of the two may be lost"
    )


# ---------------------------------------------------------------------- a recovery


def _recover(job: Job, rejoined: Rejoined) -> None:
    """Something is wrong: stop those that live, and go on like after any failure."""
    _take_stands(job, rejoined)
    for rank in range(job.world_size):
        if rank not in rejoined.members:  # it was in the last step that anybody has committed
            job.commits.made(rank, (max(0, job.commits.newest[0] - 1), 0))
    job.write_steps()  # before the incident: they were made before it
    losses = [_take_loss(job, rejoined, slot) for slot in job.nodes.empty()]
    away = _away(rejoined)
    _record(job, rejoined, "; ".join([*(loss.text for _, loss in losses), away.text]))
    lost = _tell_losses(job, rejoined, losses)
    missing = _know_shards(job) if job.commits.newest[0] > job.base else ""
    if missing and (job.protected or rejoined.members):
        _end_ignorant(job, missing, away)
        return
    for member in _untold(job, rejoined):
        job.membership.leave(member, None)  # it asks again after the regroup
    job.membership.advance()
    _tell_failures(job, rejoined, lost, away)
    if job.phase is Phase.ENDED:
        return
    assert job.incident is not None
    job.incident.replaced |= bool(losses)
    job.incident.respawned |= bool(rejoined.ended)
    if job.phase is Phase.STOPPING:
        _replace_beginners(job, rejoined)


def _replace_beginners(job: Job, rejoined: Rejoined) -> None:
    """Those that have not come into the world yet where the others stand: they were to join it, or
    set up another one."""
    assert job.incident is not None
    for rank, known in rejoined.members.items():
        member = job.membership.holder(rank)
        behind = not known.settled and known.position[0] <= job.base
        if member is not None and not member.doomed and (known.joining or behind):
            job.doom(member, "the coordinator for which it set itself up is gone")
            job.incident.respawned = True


def _away(rejoined: Rejoined) -> Cause:
    """What is wrong, as far as only this coordinator's absence explains it."""
    members = rejoined.members
    dead = sorted(rejoined.ended)
    still = [rank for rank, known in members.items() if not known.settled or known.joining]
    said = [f"{verb(dead, 'is', 'are')} dead"] if dead else []
    if still:
        said.append(f"{verb(still, 'was', 'were')} stopped, in set-up or in a recovery")
    worlds = {known.generation for known in members.values() if known.settled}
    if len(worlds) > 1 and not said:
        said.append("the ranks were in different worlds")
    text = f"the coordinator was away: {', '.join(said)}" if said else "the coordinator was away"
    return Cause(kind=CauseKind.COORDINATOR, text=text)


def _take_loss(job: Job, rejoined: Rejoined, slot: int) -> tuple[Node, Cause]:
    """The node of `slot` has not come back, or is gone again: which it was, and how it was lost."""
    ranks = job.nodes.layout.ranks_of(slot)
    job.reclaims.lost(ranks)
    before, cause = rejoined.told.holders.get(slot), rejoined.lost.get(slot)
    node = job.nodes.last_holder(slot)
    if cause is None or node is None:
        number, host = (before.node, before.host) if before is not None else (-1, "")
        node = Node(number=number, host=host, domain=host, slot=slot)
        job.nodes.vacate(slot, node)
        wait_s = job.policy.rejoin_timeout_s
        cause = Cause(
            kind=CauseKind.NODE, text=f"it has not come back to the coordinator within {wait_s:g} s"
        )
    who = str(node) if node.number >= 0 else f"the node of slot {slot}"
    text = f"{who} was lost, and {name_ranks(ranks)} with it: {cause.text}"
    return node, replace(cause, kind=CauseKind.NODE, text=text)


def _tell_losses(job: Job, rejoined: Rejoined, losses: list[tuple[Node, Cause]]) -> list[Failure]:
    """Write down which nodes are lost. Returns their failures, without those that the open incident
    has already."""
    news = []
    for node, cause in losses:
        assert node.slot is not None
        before = rejoined.told.holders.get(node.slot)
        told = job.incident is not None and before is not None and before.lost
        if not told or node.slot in rejoined.lost:
            ranks = job.nodes.layout.ranks_of(node.slot)
            job.out.node_lost(node, ranks, cause.text)
            news.append(Failure(rank=ranks[0], incarnation=0, cause=cause))
    return news


def _tell_failures(job: Job, rejoined: Rejoined, lost: list[Failure], away: Cause) -> None:
    """Stop what runs, or start again, by the first cause that is known, and take note of the
    rest. An incident that is open has its causes; a death in it that we have brought about is no
    news."""
    told = {} if job.incident is None else job.incident.failed
    dead = [
        failure
        for rank, failure in sorted(rejoined.ended.items())
        if job.incident is None or (rank not in told and not failure.ours)
    ]
    news = [*dead, *lost, *rejoined.failures]
    news.sort(key=lambda failure: is_echo(failure.cause))
    if not news and job.incident is None:
        news = [Failure(rank=min(rejoined.members, default=0), incarnation=0, cause=away)]
    if not news:
        job.stop_all("the coordinator was away before any step was committed")
    for number, failure in enumerate(news):
        if job.phase is Phase.ENDED:
            return
        layout, cause = job.nodes.layout, failure.cause
        member = Member(rank=failure.rank, incarnation=failure.incarnation, _joining=False)
        step = job.step_of(member)
        if number > 0:
            job.explain(member, step, cause)
        elif cause.kind is CauseKind.NODE:
            ranks = layout.ranks_of(layout.slot_of(failure.rank))
            job.fail(member, step, cause, [rank for rank in ranks if rank != failure.rank])
        else:
            job.fail(member, step, cause)


def _end_ignorant(job: Job, text: str, away: Cause) -> None:
    if job.incident is not None:
        job.end_incident(text, exit_code=1)
    else:
        job.end(1, text, away)


def _record(job: Job, rejoined: Rejoined, what: str, *, undisturbed: bool = False) -> None:
    told = rejoined.told
    job.out.record(
        "coordinator_resumed",
        term=told.term,
        generation=rejoined.newest,
        nodes=[node.number for node in job.nodes.living],
        missing=job.nodes.empty() if _had_slots(job, rejoined) or told.recorded else [],
        undisturbed=undisturbed,
        text=f"the coordinator is back (term {told.term}): {what}",
    )
