"""The coordinator's shell: around the pure core.

Theory of operation: what workers say becomes events, with the time stamped on; what the core
answers is carried out, in order, through `Effects`. One event is finished before the next begins,
whoever brings it. One timer stands for the core's next deadline. Beside the core the shell keeps
what is only carried and never decided upon: each rank's capsules of the newest four steps (with
those of the sections after them), its random key, recorded results and tape for its next
incarnation, which faults have fired, and the half-complete exchanges of addresses.

It does not know processes, sockets or files. Loop thread only; nothing blocks.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from everstep import chaos, translation
from everstep.core import actions, events
from everstep.core.agreement import groups_of_all
from everstep.core.hang import Evidence
from everstep.effects import Core, Effects, Timer
from everstep.keepsakes import Keepsakes
from everstep.types import Cause, HeldCopy, Record
from everstep.wire import messages, nodes
from everstep.wire.messages import ChaosSpec, FromWorker

_MIN_TIMER_S = 0.001  # a deadline that has passed and is not moved by a Tick must not spin the loop
Member = tuple[int, int]  # rank and incarnation


@dataclass(slots=True)
class _Exchange:
    """Entries of one group of one generation, until all are there."""

    entries: dict[int, bytes] = dataclasses.field(default_factory=dict)
    members: dict[int, Member] = dataclasses.field(default_factory=dict)


class CoordinatorShell:
    """Carries messages to the core and its decisions to the agent.

    `faults`: all of the job. `call_at(when_s, callback)` makes a timer on the clock of `clock`, in
    seconds.
    """

    def __init__(
        self,
        core: Core,
        effects: Effects,
        faults: Iterable[ChaosSpec],
        call_at: Callable[[float, Callable[[], None]], Timer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._effects = effects
        self._call_at = call_at
        self._clock = clock
        self._events: deque[events.Event] = deque()
        self._busy = False
        self._ended = False
        self._timer: Timer | None = None
        self._armed_s: float | None = None
        self._unfired = {fault.index: fault for fault in faults}
        self._fired: dict[Member, tuple[ChaosSpec, float]] = {}
        self._raised: dict[Member, Cause] = {}
        self._kept = Keepsakes()
        self._exchanges: dict[tuple[int, str], _Exchange] = {}
        self._oldest_exchanged = 0
        self._groups: dict[int, tuple[tuple[str, int], ...]] = {}
        self._note_keys: set[str] = set()
        self._notes: set[tuple[int, str, str]] = set()
        self._logged: dict[int, int] = {}

    # ------------------------------------------------------------ what comes in

    def start(self) -> None:
        """Begin: the workers are spawned."""
        self._feed(events.JobStarted())

    def resume(self, resumed: events.Resumed, fired: Collection[int] = ()) -> None:
        """Take over a job that runs. `fired`: the faults on purpose that are known to have."""
        for index in fired:
            self._unfired.pop(index, None)
        self._feed(resumed)

    @property
    def reconvenes(self) -> bool:
        """The job that was taken over waits for its nodes."""
        return self._core.reconvenes

    def stop_asked(self, signal: int, by: str = "") -> None:
        """A person or the system wants the job to end. `by`: as events.StopAsked has it."""
        self._feed(events.StopAsked(signal=signal, by=by))

    def died(self, rank: int, incarnation: int, cause: Cause, *, before_kill: bool = False) -> None:
        """A worker is gone, its session killed and reaped, and all it had written has been given to
        `message`. `before_kill`: it is known to have ended before `Effects.kill` could reach it."""
        member = (rank, incarnation)
        cause = translation.final_cause(
            cause, self._raised.pop(member, None), self._fired.pop(member, None)
        )
        died = events.Died(rank=rank, incarnation=incarnation, cause=cause, before_kill=before_kill)
        self._feed(died)

    def node_joined(
        self,
        node: int,
        host: str,
        domain: str,
        ranks: int,
        found: tuple[HeldCopy, ...] = (),
    ) -> None:
        """An agent is ready to fork workers, at most `ranks` of them. `found`: the copies that were
        left in its host's memory."""
        self._feed(events.NodeJoined(node=node, host=host, domain=domain, ranks=ranks, found=found))

    def node_back(self, host: str, domain: str, report: nodes.Report) -> None:
        """An agent of an earlier coordinator has come back with all that it knows."""
        protected = []
        for rank, kept in report.kept.items():
            for incarnation, message in kept:
                self._remember(rank, incarnation, message)
                if isinstance(message, messages.Protect):
                    protected.append(translation.protected(rank, incarnation, message))
        # Before anything is decided: it may be said to be written, and forgotten there.
        for said in report.unwritten:
            self._rewrite((said.rank, said.incarnation), said.message)
        self._feed(translation.node_back(host, domain, report, protected))

    def probed(self, node: int, turn: int, closed: dict[int, str]) -> None:
        """A node has tried whether it reaches others. `closed`: as events.Probed has it."""
        self._feed(events.Probed(node=node, turn=turn, closed=closed))

    def reclaimed(self, node: int, answer: nodes.Reclaimed) -> None:
        """A node tells what it keeps of ranks whose node is gone."""
        for rank, kept in answer.kept.items():
            for incarnation, message in kept:
                self._remember(rank, incarnation, message)
        self._feed(events.Reclaimed(node=node, turn=answer.turn))

    def node_lost(self, node: int, cause: Cause, members: Iterable[Member]) -> None:
        """An agent can't be reached any more, and so can't `members`, its workers."""
        fired = None
        for member in members:
            self._raised.pop(member, None)
            fired = self._fired.pop(member, None) or fired
        self._feed(events.NodeLost(node=node, cause=translation.final_cause(cause, None, fired)))

    def copied(self, news: nodes.Took, node: int) -> None:
        """A copy of a rank's state is complete on `node`."""
        about = {"rank": news.rank, "incarnation": news.incarnation, "step": news.step}
        where = {"generation": news.generation, "node": node}
        self._feed(events.Copied(**about, **where, stamp=news.stamp))

    def copy_waived(self, news: nodes.Untaken) -> None:
        """The keeper of a rank can't have its copy."""
        about = {"rank": news.rank, "incarnation": news.incarnation, "step": news.step}
        self._feed(events.CopyWaived(**about, generation=news.generation))

    def copy_spoiled(self, rank: int, step: int, node: int) -> None:
        """The copy of `rank` at `step` on `node` is not there, or not what was written."""
        self._feed(events.CopySpoiled(rank=rank, step=step, node=node))

    def copies_of(self, rank: int, step: int) -> Collection[int]:
        """The nodes that have a copy of `rank` at `step`."""
        return self._core.copies_of(rank, step)

    def silent(self, evidence: tuple[Evidence, ...]) -> None:
        """Some worker has been silent for longer than it may; `evidence` is of all that live."""
        self._feed(events.Silent(evidence=self._with_faults(evidence)))

    def inspected(self, found: events.Inspected) -> None:
        """All workers have shown what they can."""
        self._feed(dataclasses.replace(found, evidence=self._with_faults(found.evidence)))

    def message(self, rank: int, incarnation: int, message: FromWorker) -> None:
        """A worker said something."""
        if self._ended:
            return
        member = (rank, incarnation)
        match message:
            case messages.Capsule():
                self._kept.take(rank, incarnation, message)
            case messages.Address():
                self._exchange(member, message)
            case messages.Fired():
                self._note_fired(member, message)
            case messages.Park():
                self._groups[rank] = message.groups
                self._feed(self._event(member, message))
            case messages.Once() | messages.Tape():
                self._kept.take(rank, incarnation, message)
            case messages.Raised():
                self._raised[member] = message.cause
            case messages.Note():
                self._note(rank, message)
            case _:
                self._keep(member, message)
                self._feed(self._event(member, message))

    def stop(self) -> None:
        """No timer fires any more, and nothing more is heeded. May be called twice."""
        self._ended = True
        self._arm(None)

    # ------------------------------------------------------------ what an earlier one was told

    def _remember(self, rank: int, incarnation: int, message: FromWorker) -> None:
        """Keep what an agent has kept."""
        match message:
            case messages.Protect() | messages.Once() | messages.Tape() | messages.Capsule():
                self._kept.take(rank, incarnation, message)
            case _:
                raise TypeError(f"{type(message).__name__} is nothing that is kept of a rank")

    def _rewrite(self, member: Member, message: FromWorker) -> None:
        """Write down what may have been lost with an earlier coordinator."""
        match message:
            case messages.Fired():
                self._note_fired(member, message)
            case messages.Note():
                self._note(member[0], message)
            case _:
                self._keep(member, message)

    # ------------------------------------------------------------ what the core does not see

    def _exchange(self, member: Member, address: messages.Address) -> None:
        if address.generation < self._oldest_exchanged:
            return
        key = (address.generation, address.group)
        exchange = self._exchanges.setdefault(key, _Exchange())
        exchange.entries[address.rank] = address.payload
        exchange.members[address.rank] = member
        if len(exchange.entries) < address.size:
            return
        del self._exchanges[key]
        answer = messages.Addresses(
            generation=address.generation, group=address.group, entries=exchange.entries
        )
        self._effects.send_all(exchange.members.values(), answer)

    def _with_faults(self, evidence: Iterable[Evidence]) -> tuple[Evidence, ...]:
        """With the fault on purpose that had fired on each rank, and when."""
        told = []
        for each in evidence:
            fired = self._fired.get((each.rank, each.incarnation))
            if fired is not None:
                fault, at_s = fired
                each = dataclasses.replace(each, fault=fault.text, since_s=at_s)
            told.append(each)
        return tuple(told)

    def _forget_exchanges(self, below_generation: int) -> None:
        self._oldest_exchanged = max(self._oldest_exchanged, below_generation)
        for key in [key for key in self._exchanges if key[0] < self._oldest_exchanged]:
            del self._exchanges[key]

    def _note_fired(self, member: Member, fired: messages.Fired) -> None:
        fault = self._unfired.pop(fired.index, None)
        if fault is None:
            return
        if fault.kind not in chaos.NO_FAILURE:
            self._fired[member] = (fault, fired.t)
        fields = {
            "index": fault.index,
            "text": fault.text,
            "rank": fault.rank,
            "step": fault.step,
            "fired_t": fired.t,
        }
        self._effects.record(Record(event="fault_fired", fields=fields))
        if fault.kind in chaos.OF_NODES:
            self._effects.cut(*member, fault)
        elif fault.kind == chaos.OF_COORDINATOR:
            self._effects.fall()

    def _note(self, rank: int, note: messages.Note) -> None:
        if (rank, note.key, note.text) in self._notes:
            return  # a rank may say the same in every step
        self._notes.add((rank, note.key, note.text))
        shown = note.key not in self._note_keys
        self._note_keys.add(note.key)
        fields = {"key": note.key, "text": note.text, "rank": rank}
        self._effects.record(Record(event="note", fields=fields), shown=shown)

    # ------------------------------------------------------------ what becomes an event

    def _keep(self, member: Member, message: FromWorker) -> None:
        """What a message carries beside its event."""
        rank, incarnation = member
        match message:
            case messages.Protect():
                self._kept.take(rank, incarnation, message)
            case messages.Commit():
                if message.step > self._logged.get(rank, 0):  # else a successor says it again
                    self._logged[rank] = message.step
                    self._log(rank, message.log)
                if message.record is not None:
                    self._effects.trace(rank, message.step, message.record)
                fired = self._fired.get(member)
                if fired is not None and self._is_past(*fired, message.step):
                    del self._fired[member]
            case messages.Close():
                self._log(rank, message.log)
            case messages.Finish():
                self._effects.digests(rank, message.digests)

    def _is_past(self, fault: ChaosSpec, fired_s: float, committed: int) -> bool:
        """Whether a fault did no harm that shows, so that a later failure is another's."""
        if fault.kind == chaos.OF_NETWORK:  # the rank commits until the network is gone
            back_s = fired_s + fault.lasts_s if fault.lasts_s else math.inf
            return self._clock() > back_s
        return committed > fault.step

    def _event(self, member: Member, message: FromWorker) -> events.Event:
        rank, incarnation = member
        match message:
            case messages.Fault(generation=generation, step=step):
                cause = translation.final_cause(message.cause, None, self._fired.pop(member, None))
                return events.Faulted(
                    rank=rank,
                    incarnation=incarnation,
                    generation=generation,
                    step=step,
                    cause=cause,
                )
            case _:
                return translation.plain_event(rank, incarnation, message)

    # ------------------------------------------------------------ the core's decisions

    def _feed(self, event: events.Event) -> None:
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events and not self._ended:
                for action in self._core.handle(self._events.popleft(), self._clock()):
                    self._carry_out(action)
            self._arm(None if self._ended else self._core.next_deadline_s)
        finally:
            self._busy = False

    def _carry_out(self, action: actions.Action) -> None:
        match action:
            case actions.Record():
                self._effects.record(action.record)
            case actions.Spawn():
                if not action.joiner:
                    self._forget_exchanges(action.generation)
                    self._kept.begin_tape(action.rank, action.incarnation)
                faults = (f for f in self._unfired.values() if f.rank == action.rank)
                self._effects.spawn(action, self._kept.heritage(action.rank, faults))
            case actions.Kill():
                self._effects.kill(action.rank, action.incarnation, action.why)
            case actions.Dismiss():
                self._effects.dismiss(action.node, action.why)
            case actions.Inspect():
                self._effects.inspect()
            case actions.SendStop(generation=generation):
                self._forget_exchanges(generation + 1)
                self._effects.send_all(action.to, messages.Stop(generation=generation))
            case actions.SendPosition(step=step):
                capsule, kept = self._kept.after(action.rank, step - 1)
                position = messages.Position(step=step, capsule=capsule, kept=kept)
                self._effects.send(action.rank, action.incarnation, position)
            case actions.SendRegroup():
                self._send_regroup(action)
            case actions.SendPeers(guardians=guardians):
                self._effects.peers(guardians)
            case actions.Probe(turn=turn, pairs=pairs):
                idle = {asker for asker, _ in pairs} - set(self._effects.probe(action))
                self._events.extend(
                    events.Probed(node=node, turn=turn, closed={}) for node in sorted(idle)
                )
            case actions.Reclaim():
                self._effects.reclaim(action)
            case actions.SendKeepers(generation=generation, keepers=keepers, steps=steps):
                self._effects.keepers(generation, keepers, steps)
            case actions.DropCopies(generation=generation, rank=rank, node=node):
                self._effects.copy_order(node, nodes.Drop(rank=rank, generation=generation))
            case actions.JudgeCopies(node=node, keep=keep):
                self._effects.copy_order(node, nodes.Judged(keep=keep))
            case actions.SendGo(copied=copied, copy_every=every):
                for rank, incarnation in action.to:
                    go = messages.Go(copies=bool(copied), copy=rank in copied, copy_every=every)
                    self._effects.send(rank, incarnation, go)
            case actions.SendClosed():
                self._effects.send_all(action.to, messages.Closed())
            case actions.SendBye():
                self._effects.send_all(action.to, messages.Bye())
            case actions.End():
                self.stop()
                self._effects.end(action)
            case _:
                raise TypeError(
                    f"the core asked for {type(action).__name__}, which the shell cannot do"
                )

    def _send_regroup(self, action: actions.SendRegroup) -> None:
        self._forget_exchanges(action.generation)
        groups = groups_of_all(self._groups)
        for rank, incarnation in action.to:
            capsule, kept = self._kept.for_plan(rank, action.plan)
            message = messages.Regroup(
                generation=action.generation,
                step=action.plan.step,
                plan=action.plan.ranks[rank],
                capsule=capsule,
                groups=groups,
                sections=action.plan.sections,
                kept=kept,
                copies=action.copies,
            )
            self._effects.send(rank, incarnation, message)

    def _log(self, rank: int, log: Mapping[int, Mapping[str, float]]) -> None:
        for step, scalars in log.items():
            self._effects.metrics(rank, step, scalars)

    # ------------------------------------------------------------ time

    def _arm(self, deadline_s: float | None) -> None:
        if deadline_s == self._armed_s and (deadline_s is None or self._timer is not None):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed_s = deadline_s
        if deadline_s is not None:
            self._timer = self._call_at(max(deadline_s, self._clock() + _MIN_TIMER_S), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._feed(events.Tick())
