"""What the coordinator does about ranks that are silent.

Theory of operation: the agent says who has been silent for too long, with what all ranks show. If
there is a culprit in it (`core.hang`) all workers are made to show their stacks, and what comes
back is judged again: a rank that has moved meanwhile is no culprit. Only then the culprits are
killed, and their ranks respawned; a deadlock, which is nobody's alone, is begun again by all. A
rank that was told to stop and stands still on its way to the boundary is killed alike, and so is
one that is stopped by a signal, whatever it is about.

Nobody is killed if of some shard no rank that could give its state would be left: that is said,
once, and left to a person. And nobody is for having left its loop: the script did that, and would
do it again.

What it doesn't know: deadlines in seconds (the agent's), and the stacks' meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.hang import Evidence, Kind, Verdict, judge
from everstep.core.job import Job, Phase
from everstep.core.membership import Member, Status
from everstep.core.words import name_ranks
from everstep.types import Cause, CauseKind

_INSPECTION_S = 5.0  # within which an answer has come; and from one that found nobody to the next


def on_silent(job: Job, event: ev.Silent) -> None:
    """Somebody is silent: have a closer look if there is a culprit."""
    if job.now_s < job.inspect_again_s:
        return
    verdict = _find(job, event.evidence)
    if verdict is not None and _key(job, verdict) not in job.spared:
        job.inspect_again_s = job.now_s + _INSPECTION_S
        job.out.put(do.Inspect())


def on_inspected(job: Job, event: ev.Inspected) -> None:
    """Do something about the culprits, if they still are."""
    verdict = _find(job, event.evidence)
    job.inspect_again_s = job.now_s + (_INSPECTION_S if verdict is None else 0.0)
    if verdict is None:
        return
    shown = {each.rank: each for each in event.evidence}
    only = _only_holders(job, verdict)
    if only:
        _spare(job, verdict, only, event)
        return
    if verdict.kind is Kind.LEFT:
        rank, text = next(iter(verdict.culprits.items()))
        _record(job, verdict, event)
        job.end(2, text, None, rank)
        return
    for rank, text in verdict.culprits.items():
        member = job.membership.current(rank, shown[rank].incarnation)
        if member is None or member.doomed or job.phase is Phase.ENDED:
            continue
        cause = _cause(verdict.kind, text, shown[rank], event.stacks)
        job.fail(member, job.step_of(member), cause)
    _record(job, verdict, event)
    if verdict.kind is Kind.DEADLOCK:
        return
    for rank, text in verdict.culprits.items():
        member = job.membership.current(rank, shown[rank].incarnation)
        if member is not None and not member.doomed and job.phase is not Phase.ENDED:
            job.doom(member, text)


def _find(job: Job, evidence: Sequence[Evidence]) -> Verdict | None:
    """Whom to blame now; None for nobody."""
    if job.phase in (Phase.NEW, Phase.RECONVENING, Phase.ENDED):
        return None
    known = {each.rank: each for each in evidence if _holds(job, each)}
    verdict = judge(list(known.values()))
    if verdict is not None and verdict.kind is not Kind.STOPPED and job.phase is not Phase.RUNNING:
        verdict = None  # counts mean something only while all are in one world
    if verdict is None and job.phase is Phase.STOPPING:
        verdict = _stragglers(job, known)
    return verdict


def _holds(job: Job, each: Evidence) -> bool:
    member = job.membership.current(each.rank, each.incarnation)
    return member is not None and not member.doomed


def _stragglers(job: Job, known: Mapping[int, Evidence]) -> Verdict | None:
    """Those that were told to stop and don't move: nothing makes them wait any more."""
    culprits = {}
    for rank, each in known.items():
        member = job.membership.holder(rank)
        if each.overdue and member is not None and member.status is Status.STOPPING:
            culprits[rank] = (
                f"rank {rank} hangs {each.where}: it was told to stop, and has not moved for "
                f"{each.silent_s:.1f} s"
            )
    return Verdict(kind=Kind.ABSENT, culprits=culprits) if culprits else None


def _only_holders(job: Job, verdict: Verdict) -> list[int]:
    """Those of stopped culprits whose part of the state nobody else could give if all were killed:
    they may be continued. Before the first commit there is no state."""
    if verdict.kind is not Kind.STOPPED or job.recorded <= job.base:
        return []
    left = {
        job.protected[member.rank].shard
        for member in job.membership.survivors()
        if member.rank not in verdict.culprits and _may_give(member)
    }
    return [
        rank
        for rank in verdict.culprits
        if (member := job.membership.holder(rank)) is not None
        and member.survivor
        and job.protected[rank].shard not in left
        and not job.copies.steps(rank)
    ]


def _may_give(member: Member) -> bool:
    """Whether it has the state of its shard, as far as is known."""
    return member.holding is None or not member.holding.torn


def _spare(job: Job, verdict: Verdict, only: list[int], event: ev.Inspected) -> None:
    """Say why nothing is done about the culprits."""
    key = _key(job, verdict)
    if key in job.spared:
        return
    job.spared.add(key)
    halted = verdict.kind is Kind.STOPPED
    remedy = "continue it with `kill -CONT`" if halted else "end the job, if it does not go on"
    where = f"; where all ranks stood is in {event.file}" if event.file else ""
    job.out.record(
        "note",
        key=key,
        rank=None,
        text=f"{'; '.join(verdict.culprits.values())}. Nothing is done about it, since nobody else "
        f"holds the state of {name_ranks(only)}, and it would be lost: {remedy}{where}",
    )


def _key(job: Job, verdict: Verdict) -> str:
    """Names these processes in this hang."""
    holders = (job.membership.holder(rank) for rank in verdict.culprits)
    named = (f"{member.rank}.{member.incarnation}" for member in holders if member is not None)
    return f"only-copy-{verdict.kind.value}-{','.join(named)}"


def _cause(kind: Kind, text: str, shown: Evidence, stacks: Sequence[str]) -> Cause:
    return Cause(
        kind=CauseKind.HANG,
        text=text,
        detail="\n".join(stacks),
        signature=kind.value,
        at_s=shown.since_s,
        fault=shown.fault,
    )


def _record(job: Job, verdict: Verdict, event: ev.Inspected) -> None:
    job.out.record(
        "hang",
        incident=None if job.incident is None else job.incident.number,
        kind=verdict.kind.value,
        ranks=sorted(verdict.culprits),
        stacks=list(event.stacks),
        file=event.file,
    )
