"""The coordinator: what happened goes in, what to do comes out.

Theory of operation. Taking an event only changes what is known (`core.job`): the table of members,
who has committed what, the open incident. Then `settle` takes every transition that has become
possible. Every message is judged first by its incarnation (is this still the rank's process, and
have we not killed it?) and, where it depends on the world, by its generation; what is stale changes
nothing. Every wait has a deadline, so that a lost message or a stuck worker ends in a kill, a stop
or the job's end, each with its reason.

What it doesn't know: clocks, sockets and processes (the shell's), nodes, and why a step makes no
headway (a hang in a step shows only when a worker says that a collective timed out).
"""

from __future__ import annotations

from dataclasses import replace
from signal import SIGKILL

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.agreement import joiner_disagreement
from everstep.core.job import Job, Phase
from everstep.core.ladder import Policy, is_echo
from everstep.core.membership import Member, Status
from everstep.core.settle import settle
from everstep.core.words import name_ranks, name_signal, verb
from everstep.types import Cause, CauseKind, Decision, Plan


class Coordinator:
    """Decides for one job of `world_size` ranks under `policy`. Pure; one thread feeds it."""

    def __init__(self, world_size: int, policy: Policy) -> None:
        self._job = Job(world_size, policy)

    @property
    def phase(self) -> Phase:
        """What the job as a whole is doing."""
        return self._job.phase

    @property
    def generation(self) -> int:
        """The number of the current world."""
        return self._job.generation

    @property
    def next_deadline_s(self) -> float | None:
        """When the shell must send `Tick`, in seconds on the clock of `now_s`; None: no need."""
        job = self._job
        if job.phase is Phase.ENDED:
            return None
        deadlines = [job.deadline_s, *(m.deadline_s for m in job.membership.members())]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def handle(self, event: ev.Event, now_s: float) -> list[do.Action]:
        """Take one event and return what to do, in order. `now_s`: seconds on a monotonic clock.

        Never blocks and raises nothing on purpose. After `End` every event yields nothing.
        """
        job = self._job
        job.now_s = now_s
        if job.phase is not Phase.ENDED:
            self._take(event)
            settle(job)
        return job.out.take()

    def validate(self) -> None:
        """Assert what must hold between any two events. For tests and simulation: O(ranks)."""
        self._job.validate()

    # ------------------------------------------------------------------ events

    def _take(self, event: ev.Event) -> None:
        job = self._job
        match event:
            case ev.JobStarted() if job.phase is Phase.NEW:
                job.phase = Phase.SETTING_UP
                job.deadline_s = job.now_s + job.policy.setup_timeout_s
            case ev.Tick():
                self._look_at_deadlines()
            case ev.StopAsked(signal=number):
                job.end(128 + number, f"the job was asked to end by {name_signal(number)}")
            case ev.WorkerEvent():
                member = job.membership.current(event.rank, event.incarnation)
                if member is None:
                    return
                if isinstance(event, ev.Died):
                    self._on_died(member, event)
                elif not member.doomed:
                    self._on_said(member, event)

    def _on_said(self, member: Member, event: ev.WorkerEvent) -> None:
        """What a worker said that depends on its tenure only; the rest depends on the world."""
        job = self._job
        match event:
            case ev.Started(pid=pid) if member.status is Status.STARTING:
                member.status = Status.SETTING_UP
                rank, incarnation = member.identity
                job.out.record("started", rank=rank, incarnation=incarnation, pid=pid)
            case ev.Protected():
                self._on_protected(member, event)
            case ev.Waiting() if member.joining:
                member.status = Status.WAITING
            case ev.Finished():
                member.finished = True
            case ev.Refused(text=text, exit_code=exit_code):
                job.end(exit_code, text, None, member.rank)
            case (
                ev.Committed(generation=generation)
                | ev.Faulted(generation=generation)
                | ev.Parked(generation=generation)
                | ev.Regrouped(generation=generation)
                | ev.Restored(generation=generation)
                | ev.Closing(generation=generation)
            ):
                if generation == job.generation:
                    self._on_said_here(member, event)

    def _on_said_here(self, member: Member, event: ev.WorkerEvent) -> None:
        """What a worker said in the current generation."""
        job = self._job
        match event:
            case ev.Committed(step=step):
                job.committed[member.rank] = step
            case ev.Faulted():
                self._on_faulted(member, event)
            case ev.Parked() if job.phase is Phase.STOPPING:
                self._on_parked(member, event)
            case ev.Regrouped() if job.phase is Phase.REGROUPING:
                job.regrouped.add(member.rank)
            case ev.Restored() if job.plan is not None:
                self._on_restored(member, event, job.plan)
            case ev.Closing(step=step) if job.phase is not Phase.STOPPING:
                # One that is stopped asks again after the regroup.
                member.left_at = step
                if job.closed:
                    job.out.put(do.SendClosed(to=(member.identity,)))

    def _on_protected(self, member: Member, event: ev.Protected) -> None:
        job = self._job
        member.status = Status.PROTECTED
        if not member.joining:
            job.protected[member.rank] = event
            return
        differs = joiner_disagreement(event, job.protected)
        if differs is not None:
            job.end_incident(differs, exit_code=2)
        else:
            job.out.put(do.SendGo(to=(member.identity,)))

    def _on_faulted(self, member: Member, event: ev.Faulted) -> None:
        job = self._job
        stopping = job.phase is Phase.STOPPING and not member.joining
        if stopping and event.cause.kind is CauseKind.PEER:
            return  # its group was aborted by the stop, or broke by what led to it
        job.fail(member, event.step, event.cause)
        hopeless = member.joining or event.cause.kind is CauseKind.WORKER
        if hopeless and not member.doomed and job.phase is not Phase.ENDED:
            job.doom(member, f"it cannot go on: {event.cause.text}")

    def _on_parked(self, member: Member, event: ev.Parked) -> None:
        holding = event.holding
        if member.distrusted:
            holding = replace(holding, torn=True)
        member.status, member.holding, member.deadline_s = Status.PARKED, holding, None
        passes = event.rehearsed_passes
        self._job.out.parked(member, holding, self._job.generation, passes)

    def _on_restored(self, member: Member, event: ev.Restored, plan: Plan) -> None:
        """It may come after another failure has stopped the generation, and counts even then."""
        job = self._job
        member.distrusted = not event.ok
        part = plan.ranks[member.rank]
        fetched = part.decision is Decision.FETCH
        if fetched:
            job.out.receipt(event, plan.step)
        if not event.ok:
            text = (
                f"rank {member.rank}'s receipt of step {plan.step}, taken from "
                f"{name_ranks(part.sources)}, does not hold: {event.text}"
            )
            job.fail(member, plan.step + 1, Cause(kind=CauseKind.RECEIPT, text=text))
            return
        job.committed[member.rank] = plan.step
        job.restored[member.rank] = event.nbytes
        if fetched and job.incident is not None:
            job.incident.fetched = True

    def _on_died(self, member: Member, event: ev.Died) -> None:
        job, cause = self._job, event.cause
        step = job.step_of(member)
        job.membership.died(member.rank, member.incarnation)
        by_us = member.doomed and _is_our_kill(event)
        news = member.doom if by_us else cause
        if news is not None and (not member.doomed or member.doom is not None):
            job.fail(member, step, news)
        elif not by_us and job.incident is not None and is_echo(job.incident.cause):
            job.explain(member, step, cause)
        elif job.incident is not None and job.incident.cause.signature == cause.signature:
            # Killed for a peer's failure, it had met the same error by itself: it is in the script.
            job.repeated(member.rank, step, cause)
        if job.incident is not None:
            job.incident.respawned = True

    # ------------------------------------------------------------------ deadlines

    def _look_at_deadlines(self) -> None:
        job = self._job
        if job.deadline_s is not None and job.deadline_s <= job.now_s:
            if job.phase is Phase.SETTING_UP:
                self._end_late_setup()
            elif job.phase is Phase.REGROUPING:
                self._fail_late_regroup()
        for member in list(job.membership.members()):
            late = member.deadline_s is not None and member.deadline_s <= job.now_s
            if late and job.phase is not Phase.ENDED:
                self._on_late(member)

    def _end_late_setup(self) -> None:
        job = self._job
        late = [m.rank for m in job.membership.members() if m.status is not Status.PROTECTED]
        text = (
            f"{verb(late, 'has', 'have')} not called protect within "
            f"{job.policy.setup_timeout_s:g} s; call it once on every rank, before its first step "
            "(the setting setup_timeout_s allows a slower set-up)"
        )
        if job.incident is not None:
            job.end_incident(text)
        else:
            job.end(1, text, Cause(kind=CauseKind.TIMEOUT, text=text), late[0])

    def _fail_late_regroup(self) -> None:
        job = self._job
        late = [m for m in job.membership.members() if m.rank not in job.restored]
        text = (
            f"{verb([m.rank for m in late], 'has', 'have')} not regrouped and restored within "
            f"{job.policy.regroup_timeout_s:g} s in generation {job.generation}"
        )
        job.fail(late[0], job.step_of(late[0]), Cause(kind=CauseKind.TIMEOUT, text=text))

    def _on_late(self, member: Member) -> None:
        job = self._job
        rank, incarnation = member.identity
        if member.doomed:
            job.end_incident(
                f"rank {rank}'s process (incarnation {incarnation}) could not be ended within "
                f"{job.policy.reap_timeout_s:g} s of SIGKILL; look for an uninterruptible wait "
                "(a device, a network file system) on this host"
            )
            return
        if member.joining:
            limit_s, what = job.policy.join_timeout_s, "replacement was not ready within"
        else:
            limit_s, what = job.policy.park_timeout_s, "worker has not parked within"
        text = f"rank {rank}'s {what} {limit_s:g} s of the stop, at step {job.step_of(member)}"
        job.doom(member, text, Cause(kind=CauseKind.TIMEOUT, text=text))


def _is_our_kill(event: ev.Died) -> bool:
    """Whether a process that we killed died of it, and not of what made us kill it: ours is
    SIGKILL, on a process that still ran, and no fault on purpose that had just fired there."""
    return event.cause.signal == SIGKILL and event.cause.fault is None and not event.before_kill
