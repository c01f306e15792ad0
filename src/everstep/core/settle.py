"""The transitions that need more than one rank: each is taken when all it waits for is there.

Theory of operation. `settle` looks at the whole state after every event and takes every transition
that has become possible, in the order of the phases. So no transition depends on which of several
messages came last, and a transition that opens the next is followed at once.

What it doesn't know: which event has just been taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.core import actions as do
from everstep.core.agreement import disagreement
from everstep.core.handover import await_node, fill_slots, settle_gathering
from everstep.core.job import COPY, Job, Phase
from everstep.core.ladder import Incident, is_of_script
from everstep.core.membership import Status
from everstep.core.regain import awaits_copy, judge_found, nobody_came
from everstep.core.reload import fall
from everstep.core.restore import Lost, choose, name_position, plan
from everstep.core.resume import settle_reconvening
from everstep.core.severed import sever
from everstep.core.words import name_ranks, verb
from everstep.types import Cause, CauseKind, Plan, Position

_KEPT_BY = (
    "One more replica of every shard, copies in memory (--copies sync) or a durable checkpoint "
    "would have kept it."
)
_KEPT_BY_MORE = "One more replica of every shard or a durable checkpoint would have kept it."
_ALONE = "With one rank there is no second copy: use --nproc-per-node 2 or more."


def settle(job: Job) -> None:
    """Take every transition that has become possible; what follows from it goes to `job.out`."""
    if job.phase is Phase.RECONVENING:
        settle_reconvening(job)
    if job.found:
        judge_found(job)
    if job.phase is Phase.GATHERING:
        settle_gathering(job)
    if job.phase is Phase.SETTING_UP:
        _settle_setup(job)
    if job.phase is Phase.STOPPING:
        _settle_stop(job)
    if job.phase is Phase.REGROUPING:
        _settle_regroup(job)
    if job.phase in (Phase.RUNNING, Phase.STOPPING, Phase.REGROUPING):
        _settle_steps(job)
        _refuse_unequal_loops(job)
    if job.phase is Phase.RUNNING:
        _settle_end(job)


# ---------------------------------------------------------------------- set-up


def _settle_setup(job: Job) -> None:
    _spawn_vacant(job, joining=False)
    await_node(job)
    if job.phase is Phase.ENDED:
        return
    if job.incident is not None and not job.stop_seen and job.membership.complete():
        _see_stopped(job, job.incident)
        job.out.planned(job.incident, job.generation)
    if job.membership.all_finished:
        _say_bye(job)  # a script that never called protect, on any rank
    elif job.membership.all_are(Status.PROTECTED):
        differs = disagreement(job.protected)
        if differs is not None:
            job.end(2, differs)
            return
        if job.incident is not None:
            _see_ready(job, job.incident)
        job.out.record("setup_done")
        _run(job)
        job.assign_peers()
        job.out.put(job.go(_everybody(job)))
    elif job.membership.any_finished:
        _refuse_unprotected(job)


def _everybody(job: Job) -> tuple[tuple[int, int], ...]:
    return tuple(member.identity for member in job.membership.members())


def _refuse_unprotected(job: Job) -> None:
    """End at once when some ranks wait for others that can no longer come."""
    members = list(job.membership.members())
    waiting = [m.rank for m in members if m.status is Status.PROTECTED]
    gone = [m.rank for m in members if m.finished and m.status is not Status.PROTECTED]
    if waiting and gone:
        text = (
            f"{verb(gone, 'has', 'have')} ended without calling protect, for which "
            f"{verb(waiting, 'waits', 'wait')}; call it once on every rank, before its first step"
        )
        job.end(2, text, None, gone[0])


def _spawn_vacant(job: Job, *, joining: bool) -> None:
    """Give every rank that nobody holds to a new process, if a node holds its slot."""
    fill_slots(job)
    for rank in job.membership.vacant():
        node = job.nodes.holder(rank)
        if node is None:
            continue
        delay_s = job.backoff.delay_s(rank, job.now_s)
        deadline_s = job.now_s + delay_s + job.policy.join_timeout_s if joining else None
        member = job.membership.spawn(rank, joining=joining, deadline_s=deadline_s)
        job.out.spawn(member, node.number, job.generation, delay_s)


# ---------------------------------------------------------------------- stop and regroup


def _settle_stop(job: Job) -> None:
    table = job.membership
    if not table.any_survivor and not job.copies.by_shard(job.shards, lost=True):
        _fall_back(job, "no process that held it is left", range(job.world_size))
        return
    _spawn_vacant(job, joining=True)
    if not table.survivors_parked:
        return
    if not job.stop_seen and job.incident is not None:
        _see_stopped(job, job.incident)
    job.settle_copies()
    if job.reclaims.ranks:
        job.reclaims.ask(job.nodes, job.out)
        if job.reclaims.waits(job.nodes):
            return
    # What a rank that is dead by now had committed, its script has seen done: who can make that
    # goes on to it.
    decided_from = table.held_version, job.copies.version, job.commits.newest
    if job.chosen_from != decided_from:
        job.chosen_from = decided_from
        copied = job.copies.by_shard(job.shards)
        job.chosen = choose(table.held, job.first_of, job.commits.newest, copied, job.base)
    if job.chosen is None:
        if not awaits_copy(job):
            _lose(job)
        return
    job.copy_deadline_s = None
    if job.chosen[0] <= job.base:
        _fall_back(job, "no living rank holds a committed step", range(job.world_size))
    elif sever(job):
        if job.phase is Phase.STOPPING:
            _settle_stop(job)  # without the nodes that were given up
    else:
        _replace_ahead(job, job.chosen)
        _place_joiners(job, job.chosen[0])
        await_node(job)
        if table.all_are(Status.PARKED) and not job.reach.waits:
            _regroup(job)


def _plan(job: Job) -> Plan | Lost:
    """The plan for what the survivors hold; all of them stand still."""
    # A joiner holds what its script made, whatever it says: only survivors have state.
    held = {member.rank: member.holding for member in job.membership.survivors()}
    holdings = [held.get(rank) or job.nothing(rank) for rank in range(job.world_size)]
    return plan(holdings, job.commits.newest, job.copies.by_shard(job.shards))


def _lose(job: Job) -> None:
    """There is no position at which a living copy of every shard is left."""
    outcome = _plan(job)
    assert isinstance(outcome, Lost), outcome
    gone = set(outcome.shards)
    held_by = [rank for rank, said in job.protected.items() if said.shard in gone]
    _fall_back(job, outcome.reason + nobody_came(job), held_by)


def _fall_back(job: Job, reason: str, held_by: Iterable[int]) -> None:
    """No living copy is left. What only some ranks had committed is made again from where all
    began; after that all go to the newest checkpoint. A step that all had committed is else lost,
    and no fresh start may hide it. `held_by`: the ranks that had what is missing."""
    assert job.incident is not None
    if job.recorded <= job.base:
        job.start_again(f"{reason}, and no step was committed by all ranks")
        _settle_setup(job)
        return
    if fall(job, reason):
        _settle_setup(job)
        return
    lost = f"the state of step {job.commits.newest[0]} is lost: {reason}"
    failed, holders = job.incident.failed, set(held_by)
    no_copy = [cause.text for cause in failed.values() if cause.signature == COPY]
    if no_copy:
        lost += f". {no_copy[0]}"
    of_script = [rank for rank in failed if rank in holders and is_of_script(failed[rank])]
    if of_script:
        first = of_script[0]
        job.end_incident(f"{lost}. {_ended_by(of_script, failed)}", show=(first, failed[first]))
    else:
        job.end_incident(f"{lost}. {_kept_by(job)}")


def _kept_by(job: Job) -> str:
    """What would have kept the state."""
    if job.world_size == 1:
        return _ALONE
    return _KEPT_BY_MORE if job.policy.copies else _KEPT_BY


def _ended_by(ranks: list[int], failed: Mapping[int, Cause]) -> str:
    """That the script itself ended these ranks, so that no replica would have helped."""
    raised = [rank for rank in ranks if failed[rank].kind is CauseKind.EXCEPTION]
    exited = [rank for rank in ranks if rank not in raised]
    said = [f"raised on {name_ranks(raised)}"] if raised else []
    said += [f"exited on {name_ranks(exited)}"] if exited else []
    return (
        f"The script {' and '.join(said)}, where the step could not be done again: after an update "
        "or outside the step function. A replica runs the same lines; correct the error"
    )


def _replace_ahead(job: Job, chosen: Position) -> None:
    """Replace the survivors that stand after the position from which all go on: a script that has
    been given a result can't be led back behind it."""
    if max((holding.position for holding in job.membership.held), default=chosen) <= chosen:
        return
    for member in job.membership.survivors():
        if member.holding is not None and member.holding.position > chosen:
            job.doom(
                member,
                f"it stands at {name_position(member.holding.position)}, which not every shard can "
                f"reach any more; its rank starts again and takes {name_position(chosen)}",
            )


def _place_joiners(job: Job, step: int) -> None:
    """Tell the joiners where their peers stand; replace those that rehearsed another step."""
    if job.told_step not in (None, step):
        for member in job.membership.members():
            if member.joining and not member.doomed and member.position not in (None, step):
                told = f"it rehearsed after step {member.position}"
                job.doom(member, f"{told}, and its peers go on from step {step}")
    job.told_step = step
    deadline_s = job.now_s + job.policy.join_timeout_s
    for member in job.membership.waiting():
        job.membership.move(member, Status.REHEARSING, deadline_s=deadline_s)
        member.position = step
        rank, incarnation = member.identity
        job.out.put(do.SendPosition(rank=rank, incarnation=incarnation, step=step))


def _regroup(job: Job) -> None:
    """Every rank has a parked process: begin the next generation, by the plan."""
    incident, chosen = job.incident, _plan(job)
    assert incident is not None
    assert isinstance(chosen, Plan), chosen
    assert chosen.position == job.chosen, (chosen.position, job.chosen)
    _see_ready(job, incident)
    incident.steps_lost += max(0, job.commits.least[0] - chosen.step)
    incident.follow(chosen, job.commits.newest)
    job.membership.advance()
    job.out.planned(incident, job.generation)
    job.phase, job.plan = Phase.REGROUPING, chosen
    job.deadline_s = job.now_s + job.policy.regroup_timeout_s
    job.regrouped, job.answered, job.restored = set(), set(), {}
    job.regroup_seen = False
    job.chosen = job.chosen_from = job.told_step = job.found_in = None
    job.reclaims.clear()
    job.reach.clear()
    job.commits.cut(chosen.position)
    job.copies.regroup(chosen.step)
    job.resumed_at = chosen.position
    job.membership.admit(closed=job.closed)
    job.assign_peers()
    job.out.put(
        do.SendRegroup(
            generation=job.generation, plan=chosen, to=_everybody(job), copies=job.copies.needed
        )
    )


def _settle_regroup(job: Job) -> None:
    assert job.incident is not None
    which = {"incident": job.incident.number, "generation": job.generation}
    if len(job.regrouped) == job.world_size and not job.regroup_seen:
        job.regroup_seen = True
        job.out.record("regrouped", **which)
    if len(job.restored) == job.world_size:
        job.out.record("restored", **which, nbytes=sum(job.restored.values()))
        _run(job)


def _run(job: Job) -> None:
    job.phase, job.deadline_s, job.plan = Phase.RUNNING, None, None
    for member in job.membership.members():
        job.membership.move(member, Status.RUNNING)


def _see_stopped(job: Job, incident: Incident) -> None:
    job.stop_seen = True
    job.out.record("stopped", incident=incident.number, generation=job.generation)


def _see_ready(job: Job, incident: Incident) -> None:
    job.out.record("ready", incident=incident.number, generation=job.generation)


# ---------------------------------------------------------------------- steps and ends


def _settle_steps(job: Job) -> None:
    """Write the steps that every rank has committed."""
    job.write_steps()


def _refuse_unequal_loops(job: Job) -> None:
    """End at once when a rank has left its loop before a step that another has made: the rest of
    the script would run on ranks that stand at different steps. Once all have left together the
    script may begin another loop."""
    left_after = job.membership.left_at
    if job.closed or not left_after:
        return
    newest = max(job.commits.newest[0], *left_after)
    if min(left_after) == newest:
        return
    left_at = {m.rank: m.left_at for m in job.membership.members() if m.left_at is not None}
    early = {rank: step for rank, step in left_at.items() if step < newest}
    left = ", ".join(
        f"{name_ranks(rank for rank in early if early[rank] == step)} after step {step}"
        for step in sorted(set(early.values()))
    )
    made = (max(job.commits[rank], left_at.get(rank, 0)) for rank in range(job.world_size))
    ahead = [rank for rank, step in enumerate(made) if step == newest]
    text = (
        f"the ranks left their loops at different steps: {left}, but {verb(ahead, 'has', 'have')} "
        f"made step {newest}. Every rank must make the same steps: give run.batches the same "
        "`until` on all, and leave the loop early on all of them or on none"
    )
    job.end(2, text, None, min(early))


def _settle_end(job: Job) -> None:
    """Close the incident, the loop and the job, each when all ranks are there."""
    left = job.membership.all_ended
    if job.incident is not None and (job.commits.least > job.resumed_at or left):
        job.close_incident()
    if left and job.membership.left_at and not job.closed:
        job.closed = True
        job.out.record("closed", step=job.commits.least[0])
        closing = (member for member in job.membership.members() if member.closing)
        job.out.put(do.SendClosed(to=tuple(member.identity for member in closing)))
    if job.membership.all_finished:
        _say_bye(job)


def _say_bye(job: Job) -> None:
    if job.incident is not None:
        job.close_incident()
    job.out.put(do.SendBye(to=_everybody(job)))
    job.end(0, "")
