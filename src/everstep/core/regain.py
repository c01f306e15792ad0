"""Copies that a node finds when it joins: an agent of the job has died and left them on its host.

Theory of operation. A node that is lost takes its copies with it, as far as is known; but shared
memory outlives processes, and an agent that is started again on the host finds it. What it has
found counts again where the ranks are about to go on from copies, and if the table knows it
(`CopyTable.regain`). In the middle of a regroup, and while nodes come back to another coordinator,
it is not known yet whether they are, and the judgement waits.

Where no living copy of some shard is left, and a lost node had one, the ranks stay parked until a
node comes with it, as long as they would for a spare. A replacement starts meanwhile, where there
is a node for it.

What it doesn't know: how copies are found, and what is in them. A copy that turns out not to be
what was written is no copy any more, like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.core import actions as do
from everstep.core.job import Job, Phase
from everstep.core.restore import choose, lacking
from everstep.core.words import name_ranks
from everstep.types import HeldCopy


def judge_found(job: Job) -> None:
    """Say which of the copies that nodes have found when they joined are of use."""
    if job.phase in (Phase.RECONVENING, Phase.REGROUPING):
        return
    for number, found in job.found.items():
        node = job.nodes.get(number)
        if node is None:
            continue
        wanted = job.phase is Phase.STOPPING
        taken = job.copies.regain(number, node.host, found) if wanted else ()
        job.out.record(
            "copies_found",
            node=number,
            host=node.host,
            taken=[[copy.rank, copy.step] for copy in taken],
            refused=[[copy.rank, copy.step] for copy in found if copy not in taken],
            text=f"{node} has found in its memory {_in_words(found, taken)}",
        )
        job.out.put(do.JudgeCopies(node=number, keep=taken))
    job.found.clear()


def awaits_copy(job: Job) -> bool:
    """No position can be reached by all shards: whether it is waited for a node that comes back
    with a copy."""
    ranks, hosts = _awaited(job)
    wait_s = job.policy.spare_wait_s
    if not ranks or wait_s <= 0:
        return False
    assert job.incident is not None
    if job.copy_deadline_s is None:
        job.copy_deadline_s = job.now_s + wait_s
        job.out.copy_awaited(job.incident, ranks, hosts, wait_s)
    return job.now_s < job.copy_deadline_s


def nobody_came(job: Job) -> str:
    """What was waited for in vain, or would have been, as the end of a sentence; "" for nothing."""
    ranks, hosts = _awaited(job)
    if not ranks:
        return ""
    wait_s = job.policy.spare_wait_s
    waited = f"within {wait_s:g} s" if wait_s > 0 else "and none is waited for"
    return (
        f"; no node has come back with the copies of {name_ranks(ranks)} that were in the memory "
        f"of {' and '.join(hosts)}, {waited} (--spare-wait)"
    )


def _awaited(job: Job) -> tuple[list[int], list[str]]:
    """The ranks of whose state a copy would have to come back, so that all can go on, and the hosts
    where such copies lay. Empty, if that would not suffice. O(ranks)."""
    held, newest = job.membership.held, job.commits.newest
    if job.recorded <= job.base:
        return [], []  # it is made again from where all began
    position = choose(held, job.first_of, newest, job.copies.by_shard(job.shards, lost=True))
    if position is None:
        return [], []
    missing = lacking(held, job.first_of, position, job.copies.by_shard(job.shards))
    lost = {
        rank: job.copies.lost_on(rank, position[0])
        for rank, shard in job.shards.items()
        if shard in missing
    }
    hosts = {host for found in lost.values() for host in found}
    return [rank for rank, found in sorted(lost.items()) if found], sorted(hosts)


def _in_words(found: Sequence[HeldCopy], taken: Sequence[HeldCopy]) -> str:
    """Copies, and what becomes of them."""
    refused = [copy for copy in found if copy not in taken]
    said = []
    if taken:
        said.append(f"{_named(taken)}, which count again")
    if refused:
        said.append(f"{_named(refused)}, which are not known here, or of no use now")
    return "; and ".join(said)


def _named(copies: Sequence[HeldCopy]) -> str:
    ranks = name_ranks(sorted({copy.rank for copy in copies}))
    steps = ", ".join(str(step) for step in sorted({copy.step for copy in copies}))
    return f"copies of {ranks} at step {steps}"
