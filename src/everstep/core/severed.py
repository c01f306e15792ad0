"""What the coordinator does about nodes that don't reach each other, while it hears all of them.

Theory of operation. A cable or a rule of a firewall may part two nodes of a job that runs. Nobody
is dead then, and every regroup fails as the one before. So when one has failed, and nobody is known
to be the cause, the nodes that hold slots try each other; the ranks, which have parked meanwhile,
wait some seconds for their word. Where a pair is closed, the fewest nodes are given up after which
none is (`core.reach`), as any lost node is, if there are spares for all of them and no state goes
with them: the position from which the ranks go on stays the same. Where all is open nothing is
done about it, and the ranks regroup. Nor is anything done where a cause has shown itself meanwhile:
a death, a lost node, a process that hangs.

Else the ranks stay parked, for as long as they would wait for a node, and the nodes try again every
few seconds: a spare may come, and the way between the nodes may open.

What it doesn't know: how one tries, and that a spare reaches those whose place it does not take;
if it doesn't, the next regroup will show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

from everstep.core import events as ev
from everstep.core.handover import lose
from everstep.core.job import Job, Phase
from everstep.core.reach import Pair, fewest
from everstep.core.restore import choose
from everstep.types import Cause, CauseKind

_AGAIN_S: Final = 3.0
_TOLD: Final = 4  # closed pairs that a text names


def on_regroup_failed(job: Job, ranks: Iterable[int]) -> None:
    """A regroup has failed, and nobody is known to be the cause: have the nodes try each other.
    `ranks`: who has complained, or has not come."""
    reach = job.reach
    if job.nodes.layout.nnodes < 2 or job.phase is not Phase.STOPPING or reach.waits:
        return
    holders = (job.nodes.holder(rank) for rank in ranks)
    reach.complained = frozenset(node.number for node in holders if node is not None)
    _ask(job)


def on_probed(job: Job, event: ev.Probed) -> None:
    """A node has tried others."""
    job.reach.answered(event.node, event.turn, event.closed)


def look_at_time(job: Job) -> None:
    """Wait for no more answers, or have the nodes try again, if it is time."""
    due_s = job.reach.next_deadline_s
    if due_s is None or due_s > job.now_s:
        return
    if job.reach.again_s is not None:
        _ask(job)
    else:
        job.reach.late()


def _ask(job: Job) -> None:
    holders = (job.nodes.holder_of(slot) for slot in range(job.nodes.layout.nnodes))
    numbers = sorted(node.number for node in holders if node is not None)
    job.out.put(job.reach.ask(numbers, job.now_s))


def sever(job: Job) -> bool:
    """All survivors stand still, and it is known from where they go on: if the nodes have tried
    each other, do what is to be done. Returns whether nodes have been given up, or the job has
    ended."""
    reach = job.reach
    if not reach.over:
        return False
    closed = reach.closed()
    if not closed:
        reach.clear()
        return False
    lost = fewest(closed, len(job.nodes.spares), partial(_can_do_without, job), _whole(job))
    if not lost:
        return _wait(job, closed)
    reach.clear()
    for number in sorted(lost):
        node = job.nodes.get(number)
        if node is not None and job.phase is Phase.STOPPING:
            own = {pair: how for pair, how in closed.items() if number in pair}
            lose(job, node, Cause(kind=CauseKind.NODE, text=_in_words(job, own)))
    return True


def _whole(job: Job) -> Counter[int]:
    """How many ranks with a whole state each node has. O(ranks)."""
    found = Counter[int]()
    for member in job.membership.survivors():
        node = job.nodes.holder(member.rank)
        if node is not None and member.holding is not None and not member.holding.torn:
            found[node.number] += 1
    return found


def _can_do_without(job: Job, lost: frozenset[int]) -> bool:
    """Whether the ranks can go on from the same position without these nodes. O(ranks)."""
    held = {
        member.holding
        for member in job.membership.survivors()
        if member.holding is not None
        and (node := job.nodes.holder(member.rank)) is not None
        and node.number not in lost
    }
    copied = job.copies.by_shard(job.shards, without=lost)
    return choose(held, job.first_of, job.commits.newest, copied) == job.chosen


def _wait(job: Job, closed: Mapping[Pair, str]) -> bool:
    """Nobody can be given up. Returns whether the job has ended."""
    reach, incident, wait_s = job.reach, job.incident, job.policy.spare_wait_s
    assert incident is not None
    text = _in_words(job, closed)
    if reach.patient_until_s is None:
        reach.patient_until_s = job.now_s + wait_s
        ranks = sorted(rank for pair in closed for number in pair for rank in _ranks(job, number))
        member = job.membership.holder(ranks[0])
        assert member is not None
        job.explain(member, job.step_of(member), Cause(kind=CauseKind.NODE, text=text))
        if wait_s > 0:
            job.out.node_awaited(incident, ranks, wait_s)
    if reach.patient_until_s > job.now_s:
        reach.over, reach.again_s = False, min(job.now_s + _AGAIN_S, reach.patient_until_s)
        return False
    waited = f"within {wait_s:g} s" if wait_s > 0 else "and nothing is waited for"
    job.end_incident(
        f"{text}. No spare node could take the place of one of them, {waited} (--spare-wait), and "
        "the way between them has not opened; open it, or have a spare node (--spares) that "
        "reaches all others"
    )
    return True


def _ranks(job: Job, number: int) -> Iterable[int]:
    node = job.nodes.get(number)
    return () if node is None or node.slot is None else job.nodes.layout.ranks_of(node.slot)


def _in_words(job: Job, closed: Mapping[Pair, str]) -> str:
    told = [
        f"{job.nodes.get(one)} and {job.nodes.get(other)} do not reach each other ({how})"
        for (one, other), how in list(closed.items())[:_TOLD]
    ]
    more = len(closed) - _TOLD
    return "; ".join(told) + (f"; nor do {more} more pairs" if more > 0 else "")
