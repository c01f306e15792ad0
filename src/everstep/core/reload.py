"""All ranks begin at a checkpoint: at the start of a job, and when its state is lost for good.

Theory of operation. A script that keeps checkpoints takes the newest whole one before its first
step, on all ranks alike, and each rank says so (`Loaded`). From then on that step is the job's
*base*: what the script's own set-up is to a job without checkpoints. Nothing behind it can be gone
back to, and while no step after it is committed, a failure starts all ranks again.

Which checkpoints of the job exist is told too (`Saved`). When no living copy of some shard is left,
all processes are killed and their ranks start again, as before the first commit; which checkpoint
they take is found out by them (the newest may turn out to be spoiled, or one may exist of which
nobody could tell any more). A job that has once recorded a step never begins without
one: a fresh start would hide the loss.

What it doesn't know: where checkpoints lie, and what is in them.
"""

from __future__ import annotations

from everstep.core import events as ev
from everstep.core.commits import Commits
from everstep.core.job import Job, Phase, newest
from everstep.core.membership import Member
from everstep.types import Cause, CauseKind, StateFrom


def on_saved(job: Job, event: ev.Saved) -> None:
    """A checkpoint has come to be."""
    job.keeps = True
    if event.step > job.saved.get(event.tier, 0):
        job.saved[event.tier] = event.step
        job.out.record("checkpoint_saved", step=event.step, tier=event.tier.value)


def on_loaded(job: Job, member: Member, event: ev.Loaded) -> None:
    """A rank has taken its part of a checkpoint, or has found that there is none (step 0), or that
    none can be had."""
    if job.phase is not Phase.RUNNING:
        return
    job.keeps = True
    if not event.ok:
        _end(job, member, event.text)
    elif event.step > 0:
        job.out.loaded(event)
        if not job.begun:
            _begin_at(job, event)
        job.restored[member.rank] = sum(nbytes for *_, nbytes in event.parts)
        if job.incident is not None and len(job.restored) == job.world_size:
            known = {"incident": job.incident.number, "generation": job.generation}
            job.out.record("restored", **known, nbytes=sum(job.restored.values()))
    elif job.ever > 0:
        _end(job, member, f"no checkpoint is left: {event.text}")


def refuse_fresh(job: Job) -> None:
    """A rank has committed, and none has begun at a checkpoint, though there were steps before."""
    job.end_incident(
        f"the job had made step {job.ever}, and its ranks have begun anew without a checkpoint; "
        "call run.checkpoint(...) each time the script runs, after run.protect"
    )


def fall(job: Job, reason: str) -> bool:
    """The state is lost for `reason`: start all ranks again from the newest checkpoint, also where
    none is known yet. False when the script keeps none."""
    incident = job.incident
    assert incident is not None
    if not job.keeps:
        return False
    step, tier = newest(job.saved or {StateFrom.DURABLE: 0})
    incident.steps_lost += max(0, job.recorded - step)
    incident.reload(step, tier)
    job.start_again(f"the state of step {job.commits.newest[0]} is lost: {reason}")
    return True


def _begin_at(job: Job, event: ev.Loaded) -> None:
    """The first rank of this start has told where all stand."""
    step, tier = event.step, event.tier
    job.begun, job.must_begin, job.restored = True, False, {}
    job.base = job.recorded = step
    job.ever = max(job.ever, step)
    job.commits, job.resumed_at = Commits(job.world_size, (step, 0)), (step, 0)
    # Newer ones that were not taken can't be.
    job.saved = {where: kept for where, kept in job.saved.items() if kept <= step} | {tier: step}
    if job.incident is not None:
        job.incident.reloaded(step, tier, event.text)


def _end(job: Job, member: Member, text: str) -> None:
    said = f"rank {member.rank} could not begin at a checkpoint: {text}"
    if job.incident is not None:
        job.end_incident(f"{job.incident.decision}; {said}", exit_code=1)
    else:
        job.end(1, said, Cause(kind=CauseKind.EXCEPTION, text=text), member.rank)
