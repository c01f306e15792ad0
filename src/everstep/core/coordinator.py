"""The coordinator: what happened goes in, what to do comes out.

Theory of operation. Taking an event only changes what is known (`core.job`): the table of members,
who has committed what, the open incident. Then `settle` takes every transition that has become
possible. Every message is judged first by its incarnation (is this still the rank's process, and
have we not killed it?) and, where it depends on the world, by its generation; what is stale changes
nothing. Every wait has a deadline, so that a lost message or a stuck worker ends in a kill, a stop
or the job's end, each with its reason.

What it doesn't know: clocks, sockets and processes (the shell's), and how long a rank may be silent
(the agent's; `core.silence` says what is done about it). What is done about nodes is in
`core.handover`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from signal import SIGKILL

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.agreement import joiner_disagreement, shared
from everstep.core.handover import end_late_gathering, give_up, on_joined, on_lost
from everstep.core.job import COPY, Job, Phase
from everstep.core.ladder import Policy, is_echo
from everstep.core.membership import Member, Status
from everstep.core.nodes import Layout
from everstep.core.overview import Overview, overview
from everstep.core.reconvene import begin, on_back, on_first, on_said
from everstep.core.reload import on_loaded, on_saved, refuse_fresh
from everstep.core.settle import settle
from everstep.core.severed import look_at_time, on_probed, on_regroup_failed
from everstep.core.silence import on_inspected, on_silent
from everstep.core.trust import TWICE, dissent
from everstep.core.words import name_ranks, verb
from everstep.types import Cause, CauseKind, Decision, Plan


class Coordinator:
    """Decides for one job of `world_size` ranks under `policy`. Pure; one thread feeds it.

    `layout`: the job begins by gathering its nodes. None: it has one node, number 0, which is there
    from the start. Raises ValueError for a layout of another number of ranks."""

    def __init__(self, world_size: int, policy: Policy, layout: Layout | None = None) -> None:
        self._job = Job(world_size, policy, layout)

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
        deadlines = (
            job.deadline_s,
            job.node_deadline_s,
            job.copy_deadline_s,
            job.membership.next_deadline_s,
            job.reach.next_deadline_s,
        )
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def reconvenes(self) -> bool:
        """It has taken over a job that runs, and waits for the nodes that it had."""
        return self._job.phase is Phase.RECONVENING

    def copies_of(self, rank: int, step: int) -> Collection[int]:
        """The nodes that have a copy of `rank` at `step`."""
        return self._job.copies.nodes(rank, step)

    def overview(self, now_s: float) -> Overview:
        """What the job is doing, for people. O(ranks)."""
        return overview(self._job, now_s)

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

    def status_of(self, event: ev.Event) -> str:
        """What the process that speaks in `event` is doing, as far as is known; "stale" when it no
        longer holds its rank. For tests and simulation."""
        if not isinstance(event, ev.WorkerEvent):
            return ""
        member = self._job.membership.current(event.rank, event.incarnation)
        return "stale" if member is None else member.status.value

    def held_by(self) -> list[tuple[int, int]]:
        """Who is taken to be alive: (rank, incarnation). For tests and simulation: O(ranks)."""
        return [member.identity for member in self._job.membership.members()]

    def validate(self) -> None:
        """Assert what must hold between any two events. For tests and simulation: O(ranks)."""
        self._job.validate()

    # ------------------------------------------------------------------ events

    def _take(self, event: ev.Event) -> None:
        job = self._job
        match event:
            case ev.JobStarted() if job.phase is Phase.NEW:
                self._begin()
            case ev.Resumed() if job.phase is Phase.NEW and job.gathers:
                begin(job, event)
            case ev.NodeBack():
                on_back(job, event)
            case ev.NodeJoined():
                on_joined(job, event)
            case ev.NodeLost():
                on_lost(job, event)
            case ev.Reclaimed(node=node, turn=turn):
                job.reclaims.answered(node, turn)
            case ev.Probed():
                on_probed(job, event)
            case ev.Tick():
                self._look_at_deadlines()
            case ev.CopySpoiled(rank=rank, step=step, node=node):
                job.copies.spoiled(rank, step, node)
            case ev.Silent():
                on_silent(job, event)
            case ev.Inspected():
                on_inspected(job, event)
            case ev.StopAsked():
                self._on_stop_asked(event)
            case ev.WorkerEvent():
                member = job.membership.current(event.rank, event.incarnation)
                if member is None:
                    return
                if job.phase is Phase.RECONVENING:
                    on_said(job, event)
                elif isinstance(event, ev.Died):
                    self._on_died(member, event)
                elif not member.doomed:
                    self._on_said(member, event)

    def _on_stop_asked(self, asked: ev.StopAsked) -> None:
        """End the job. While nodes are still to come back they could not be told, and would go on:
        then it ends when they are there, or when it is asked again."""
        job = self._job
        rejoined = job.rejoined
        if rejoined is not None and not rejoined.stop_asked:
            rejoined.stop_asked = asked
            on_first(job)
        else:
            job.end(128 + asked.signal, asked.text)

    def _begin(self) -> None:
        job = self._job
        if job.gathers:
            job.phase, limit_s = Phase.GATHERING, job.policy.join_nodes_timeout_s
        else:
            job.phase, limit_s = Phase.SETTING_UP, job.policy.setup_timeout_s
        job.deadline_s = job.now_s + limit_s

    def _on_said(self, member: Member, event: ev.WorkerEvent) -> None:
        """What a worker said that depends on its tenure only; the rest depends on the world."""
        job = self._job
        match event:
            case ev.Started(pid=pid) if member.status is Status.STARTING:
                job.membership.proceed(member, Status.SETTING_UP)
                rank, incarnation = member.identity
                job.out.record("started", rank=rank, incarnation=incarnation, pid=pid)
            case ev.Protected() if member.status in (Status.STARTING, Status.SETTING_UP):
                self._on_protected(member, event)
            case ev.Waiting() if member.joining and member.status is Status.PROTECTED:
                job.membership.move(member, Status.WAITING)  # it waits for us, not we for it
            case ev.Copied(generation=generation, step=step, node=node, stamp=stamp):
                here = generation == job.generation or step in job.copies.needed
                if here and job.nodes.get(node) is not None:
                    job.copies.kept(member.rank, step, node, stamp)
                    job.settle_copies()
            case ev.CopyWaived(generation=generation, step=step):
                if generation == job.generation:
                    job.copies.waive(member.rank, step)
            case ev.Finished():
                job.membership.finish(member)
            case ev.Saved():
                on_saved(job, event)
            case ev.Refused(text=text, exit_code=exit_code):
                job.end(exit_code, text, None, member.rank)
            case (
                ev.Committed(generation=generation)
                | ev.Faulted(generation=generation)
                | ev.Parked(generation=generation)
                | ev.Regrouped(generation=generation)
                | ev.Restored(generation=generation)
                | ev.Loaded(generation=generation)
                | ev.Closing(generation=generation)
            ):
                found = generation == job.found_in and isinstance(event, ev.Committed | ev.Faulted)
                if generation == job.generation or found:
                    self._on_said_here(member, event)

    def _on_said_here(self, member: Member, event: ev.WorkerEvent) -> None:
        """What a worker said in the current generation."""
        job = self._job
        match event:
            case ev.Loaded():
                on_loaded(job, member, event)
            case ev.Committed(step=step) if job.must_begin and step > 0:
                refuse_fresh(job)
            case ev.Committed(step=step, sections=sections):
                job.commits.made(member.rank, (step, sections))
            case ev.Faulted():
                self._on_faulted(member, event)
            case ev.Parked() if job.phase is Phase.STOPPING and member.holding is None:
                self._on_parked(member, event)
            case ev.Parked() if job.phase is Phase.RUNNING:
                self._on_stopped_by_agent(member, event)
            case ev.Regrouped() if job.phase is Phase.REGROUPING:
                job.regrouped.add(member.rank)
            case ev.Restored() if job.plan is not None and member.rank not in job.answered:
                self._on_restored(member, event, job.plan)
            case ev.Closing(step=step) if job.phase is not Phase.STOPPING:
                # One that is stopped asks again after the regroup.
                again = member.left_at == step
                job.commits.made(member.rank, (step, 0))  # its own word may have been lost
                job.membership.leave(member, step)
                if job.closed and not again:
                    job.out.put(do.SendClosed(to=(member.identity,)))

    def _on_protected(self, member: Member, event: ev.Protected) -> None:
        job = self._job
        job.membership.proceed(member, Status.PROTECTED)
        if not member.joining:
            job.protected[member.rank] = shared(event, job.first_of)
            return
        differs = joiner_disagreement(event, job.protected)
        if differs is not None:
            job.end_incident(differs, exit_code=2)
        else:
            job.out.put(job.go((member.identity,)))

    def _on_faulted(self, member: Member, event: ev.Faulted) -> None:
        job = self._job
        if (event.generation, event.cause) in member.faulted:
            return  # it has come twice
        member.faulted.add((event.generation, event.cause))
        stopping = job.phase is Phase.STOPPING and not member.joining
        if stopping and event.cause.kind is CauseKind.PEER:
            return  # its group was aborted by the stop, or broke by what led to it
        regroups = job.phase is Phase.REGROUPING
        job.fail(member, event.step, event.cause)
        if regroups and event.cause.kind is CauseKind.PEER and event.cause.fault is None:
            on_regroup_failed(job, [member.rank])
        hopeless = member.joining or event.cause.kind is CauseKind.WORKER
        if hopeless and not member.doomed and job.phase is not Phase.ENDED:
            job.doom(member, f"it cannot go on: {event.cause.text}")

    def _on_parked(self, member: Member, event: ev.Parked) -> None:
        holding = event.holding
        if member.distrusted:
            holding = replace(holding, torn=True)
        elif member.survivor and not holding.torn:
            self._job.commits.made(member.rank, holding.position)  # its own word may have been lost
        self._job.membership.park(member, holding)
        passes = event.rehearsed_passes
        self._job.out.parked(member, holding, self._job.generation, passes)

    def _on_stopped_by_agent(self, member: Member, event: ev.Parked) -> None:
        """Its agent stopped it for want of a coordinator, after it had reported it as running."""
        text = f"rank {member.rank} was stopped while no coordinator was there"
        cause = Cause(kind=CauseKind.COORDINATOR, text=text)
        self._job.fail(member, self._job.step_of(member), cause)
        if self._job.phase is Phase.STOPPING and not member.doomed:
            self._on_parked(member, event)  # it won't park again in this generation

    def _on_restored(self, member: Member, event: ev.Restored, plan: Plan) -> None:
        """It may come after another failure has stopped the generation, and counts even then."""
        job = self._job
        job.answered.add(member.rank)
        part = plan.ranks[member.rank]
        fetched = part.decision is Decision.FETCH
        if fetched and event.ok:
            member.distrusted, member.dissents = False, 0
        if fetched:
            job.out.receipt(event, plan.step)
        if not event.ok:
            self._on_mismatch(member, event, plan)
            return
        job.commits.made(member.rank, plan.position)
        job.restored[member.rank] = event.nbytes
        if fetched and job.incident is not None:
            job.incident.fetched = True

    def _on_mismatch(self, member: Member, event: ev.Restored, plan: Plan) -> None:
        job, part = self._job, plan.ranks[member.rank]
        sources = "its copy in memory" if part.copy else name_ranks(part.sources)
        member.distrusted = True
        text = (
            f"rank {member.rank}'s receipt of step {plan.step}, taken from {sources}, does not "
            f"hold: {event.text}"
        )
        dissenting = dissent(event.held)
        if not dissenting and len(set(event.held.values())) > 1:
            self._suspect(event.held)
        aside = self._set_aside(dissenting)
        if aside:
            who = verb(aside, "is", "are")
            text += f". It is the second time, so {who} set aside, to fetch it from the rest"
        # A second time at this step ends the job, unless something has been done about it.
        signature = f"{name_ranks(aside)} set aside" if aside else COPY if part.copy else ""
        cause = Cause(kind=CauseKind.RECEIPT, text=text, signature=signature)
        job.fail(member, plan.step + 1, cause)

    def _suspect(self, ranks: Iterable[int]) -> None:
        """One of `ranks` holds what it should not, and nobody knows which: who dissents from a
        majority after this has done so for the second time."""
        for rank in ranks:
            member = self._job.membership.holder(rank)
            if member is not None and member.survivor:
                member.dissents = max(member.dissents, TWICE - 1)

    def _set_aside(self, ranks: Iterable[int]) -> list[int]:
        """Note that `ranks` dissent. Returns those of which that is the second time: what they hold
        counts as torn from now on, until they have fetched."""
        aside = []
        for rank in ranks:
            member = self._job.membership.holder(rank)
            if member is None or not member.survivor or member.distrusted:
                continue
            member.dissents += 1
            if member.dissents >= TWICE:
                member.distrusted = True
                if member.holding is not None:  # the receipt came late: it has parked already
                    self._job.membership.park(member, replace(member.holding, torn=True))
                aside.append(rank)
        return aside

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
        look_at_time(job)
        if job.deadline_s is not None and job.deadline_s <= job.now_s:
            if job.phase is Phase.GATHERING:
                end_late_gathering(job)
            elif job.phase is Phase.SETTING_UP:
                self._end_late_setup()
            elif job.phase is Phase.REGROUPING:
                self._fail_late_regroup()
        for member in job.membership.late(job.now_s):
            here = job.membership.current(*member.identity) is member  # its node may be given up
            if here and job.phase is not Phase.ENDED:
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
        on_regroup_failed(job, [member.rank for member in late])

    def _on_late(self, member: Member) -> None:
        job = self._job
        rank, incarnation = member.identity
        if member.doomed:
            text = (
                f"rank {rank}'s process (incarnation {incarnation}) could not be ended within "
                f"{job.policy.reap_timeout_s:g} s of SIGKILL; look for an uninterruptible wait "
                f"(a device, a network file system) on {self._host_of(rank)}"
            )
            if not give_up(job, member, text):
                job.end_incident(text)
            return
        if member.joining:
            limit_s, what = job.policy.join_timeout_s, "replacement was not ready within"
        else:
            limit_s, what = job.policy.park_timeout_s, "worker has not parked within"
        text = f"rank {rank}'s {what} {limit_s:g} s of the stop, at step {job.step_of(member)}"
        # A rehearsal that does not end is the step that hangs: twice the same is in the script.
        hangs = member.status is Status.REHEARSING
        kind, signature = (CauseKind.HANG, "absent") if hangs else (CauseKind.TIMEOUT, "")
        job.doom(member, text, Cause(kind=kind, text=text, signature=signature))

    def _host_of(self, rank: int) -> str:
        node = self._job.nodes.holder(rank)
        return f"host {node.host}" if node is not None and node.host else "this host"


def _is_our_kill(event: ev.Died) -> bool:
    """Whether a process that we killed died of it, and not of what made us kill it: ours is
    SIGKILL, on a process that still ran, and no fault on purpose that had just fired there."""
    return event.cause.signal == SIGKILL and event.cause.fault is None and not event.before_kill
