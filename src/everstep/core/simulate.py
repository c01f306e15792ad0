"""Whole jobs in virtual time: the coordinator against workers that fail at every moment there is.

Theory of operation. A schedule, drawn from a seed, fixes the job and its faults. Everything that
happens is an event in one heap, ordered by virtual time; every message takes a random time, first
in first out on each channel, as on a socket. After every event the coordinator's invariants are
checked (in a large world: once in as many events as there are ranks, so that checking costs no more
than running), and with them what only an onlooker can see (`simchecks`): one incarnation of a rank
acts in one generation, generations rise, a committed step or section stays and is done once, and
the state at each position is the same on whoever holds it, whenever it was made. The same seed
gives the same run.

In a job of one node what a worker has said outlives it, so its capsule is safe once it is sent.
Between nodes that is not so: there a worker waits until its capsule is acknowledged.

What it doesn't know: real processes, sockets and time.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.coordinator import Coordinator
from everstep.core.ladder import Policy
from everstep.core.simchecks import check_end, check_record
from everstep.core.simfaults import SimFaults
from everstep.core.simnodes import SimNodes
from everstep.core.simschedule import Schedule, draw_schedule
from everstep.core.simscript import Capsule, Capsules, Scripts
from everstep.core.simworker import SimWorker
from everstep.core.simworld import SimWorld
from everstep.types import Cause, CauseKind, Decision, Plan

__all__ = ["InvariantError", "Outcome", "Schedule", "Simulation", "draw_schedule", "simulate"]

_MAX_EVENTS_A_RANK = 10_000
_LATE = 50  # usual delays
_LOOKED_THROUGH = 16  # ranks up to which all the coordinator's state is checked after every event


class InvariantError(AssertionError):
    """The simulation saw what must never be; the message has the seed and the moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a simulated job ended. `records`: its journal, stamped with virtual seconds. `fired`:
    faults that found somebody to hit. `events`: how many happened; `messages`: how many of them the
    coordinator was told. `resumed`: processes whose script took up what an earlier one had left.
    `undone`: half-done steps that were undone. `ahead`: ranks that began again since the others
    could not follow them. `lost`: messages. `met`: which events the
    coordinator met, by its phase and the sender's status. `hits`: which faults hit whom, by the
    same phase."""

    end: do.End
    records: list[dict[str, Any]]
    fired: int
    events: int
    messages: int
    generation: int
    resumed: int
    undone: int
    ahead: int
    lost: int
    met: Counter[tuple[str, str, str]]
    hits: Counter[tuple[str, str, str]]


def simulate(schedule: Schedule, policy: Policy | None = None) -> Outcome:
    """Run a job to its end and return how it ended. `policy`: unlimited budgets by default.

    Raises InvariantError when an invariant does not hold or when nothing more can happen.
    """
    return Simulation(schedule, policy or Policy(unlimited=True)).run()


class Simulation:
    """One run of a schedule. The workers' view of the world outside, too."""

    def __init__(self, schedule: Schedule, policy: Policy) -> None:
        self.schedule = schedule
        self.policy = policy
        self.random = random.Random(schedule.seed ^ 0x5EED)
        self.now_s = 0.0
        self.workers: dict[int, SimWorker] = {}
        self.records: list[dict[str, Any]] = []
        self.scripts = Scripts(schedule, self.check)
        self.faults = SimFaults(self)
        self.nodes = SimNodes(self)
        self.resumed = self.undone = self._ahead = 0
        self.newest_step = self.open_incident = 0  # by the journal
        self.replaces = False  # likewise: a node with ranks was lost since the last incident
        self.awaited_s: float | None = None  # likewise: since when a node is awaited
        self._coordinator = Coordinator(schedule.world_size, policy, self.nodes.layout)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._worlds: dict[int, SimWorld] = {}
        self._actors: dict[tuple[int, int], int] = {}
        self._capsules = Capsules()
        self._events = self._messages = 0
        self._unchecked = 0
        self._newest_stop = self._newest_regroup = self._newest_start = -1
        self._end: do.End | None = None
        self._met: Counter[tuple[str, str, str]] = Counter()

    @property
    def phase(self) -> str:
        """What the job as a whole is doing."""
        return self._coordinator.phase.value

    # ------------------------------------------------------------------ the run

    def run(self) -> Outcome:
        """Run to the end of the job."""
        self._tell(ev.JobStarted())
        self.nodes.start()
        while self._end is None:
            self._events += 1
            most = _MAX_EVENTS_A_RANK * self.schedule.world_size
            self.check(self._events < most, "the job does not end")
            self._next()
            if self._end is None:
                self.faults.next()
        check_end(self, self._end)
        return Outcome(
            end=self._end,
            records=self.records,
            fired=self.faults.fired,
            events=self._events,
            messages=self._messages,
            generation=self._coordinator.generation,
            resumed=self.resumed,
            undone=self.undone,
            ahead=self._ahead,
            lost=self.faults.lost,
            met=self._met,
            hits=self.faults.hits,
        )

    def _next(self) -> None:
        """The earliest thing that happens next: an event of the heap, or a deadline."""
        deadline_s = self._coordinator.next_deadline_s
        if self._heap and (deadline_s is None or self._heap[0][0] <= deadline_s):
            self.now_s, _, act = heapq.heappop(self._heap)
            act()
        elif not self._heap and (silent := self._silent(deadline_s)) is not None:
            self._tell(silent)
        elif deadline_s is not None:
            self.now_s = max(self.now_s, deadline_s)
            self._tell(ev.Tick())
            after_s = self._coordinator.next_deadline_s
            self.check(after_s is None or after_s > self.now_s, "a deadline passes for ever")
        elif not self.faults.end_one():
            raise self.error("nothing can happen any more, and nothing is awaited")

    def _silent(self, deadline_s: float | None) -> ev.Silent | None:
        """What the agents notice when nothing moves, if they are faster than the deadline."""
        fast = deadline_s is None or self.random.random() < 0.5
        return self.faults.silent() if fast else None

    def check(self, holds: bool, text: str) -> None:
        """Raise InvariantError unless `holds`."""
        if not holds:
            raise self.error(text)

    def error(self, text: str) -> InvariantError:
        """What to raise for what must never be."""
        where = f"seed {self.schedule.seed}, event {self._events}, {self.now_s:.4f} s"
        return InvariantError(f"{where}: {text}")

    # ------------------------------------------------------------------ time and messages

    def delay_s(self) -> float:
        """A random delay: mostly short, sometimes long."""
        return self.schedule.slow_s * self.random.random() ** 4

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do `act` in `delay_s`."""
        self._at(self.now_s + delay_s, act)

    def _at(self, moment_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (moment_s, next(self._order), act))

    def _send_up(self, worker: SimWorker, act: Callable[[], None]) -> None:
        """Carry what a worker says, behind all that it has said before. What is said on a node that
        can't be reached comes late, if it comes."""
        late = 1 if worker.in_reach else _LATE
        worker.said_s = max(self.now_s + late * self.delay_s(), worker.said_s)
        home = worker.home
        self._at(worker.said_s, act if home is None else lambda: act() if home.heard else None)

    def deliver(self, worker: SimWorker, event: ev.WorkerEvent) -> None:
        """A worker speaks to the coordinator. What it has said outlives it."""

        def arrive() -> None:
            self._tell(event)

        if self.faults.passes(worker, True, arrive):
            self._send_up(worker, arrive)

    def keep_capsule(self, worker: SimWorker, capsule: Capsule) -> None:
        """A worker gives its capsule away. Nothing is kept of a node that is lost."""

        def keep() -> None:
            if self.nodes.usable(worker):
                self._capsules.keep(worker.rank, capsule)

        self._send_up(worker, keep)

    def when_kept(self, worker: SimWorker, then: Callable[[], None]) -> None:
        """`then` when what a worker has given away can't be lost with it: at once, or, between
        nodes, when that is acknowledged."""
        if worker.home is None:
            then()
            return
        heard = worker.expect(then)

        def acknowledge() -> None:
            if worker.in_reach and self.nodes.usable(worker):
                heard()

        self._send_up(worker, acknowledge)

    def peers_notice(self, worker: SimWorker) -> None:
        """A worker's peers have lost touch with it, and notice or don't."""
        for other in self.workers.values():
            if other.alive and other.generation == worker.generation and other is not worker:
                other.on_peer_died()

    def buried(self, worker: SimWorker, by_us: bool) -> None:
        """A worker has died: its peers notice or don't, and the coordinator hears of it after all
        that it had said."""
        if self.nodes.usable(worker):  # else they have left it behind
            self.peers_notice(worker)
        cause = Cause(kind=CauseKind.SIGNAL, text=f"{worker} was killed", signature="9", signal=9)
        rank, incarnation = worker.identity
        died = ev.Died(rank=rank, incarnation=incarnation, cause=cause, before_kill=not by_us)
        self._send_up(worker, lambda: self._tell(died))
        if self.random.random() < 0.3:  # a late notice, when the rank may have been given away
            self.after(10 * self.delay_s(), lambda: self._tell(died))

    # ------------------------------------------------------------------ between workers

    def world(self, worker: SimWorker) -> SimWorld:
        """The world in which `worker` acts; among its rank's tenures it must be the only one."""
        key = (worker.rank, worker.generation)
        actor = self._actors.setdefault(key, worker.incarnation)
        self.check(actor == worker.incarnation, f"{worker} and incarnation {actor} both act")
        world = self._worlds.get(worker.generation)
        if world is None:
            world = self._worlds[worker.generation] = SimWorld(self)
        return world

    # ------------------------------------------------------------------ the coordinator

    def notify(self, event: ev.Event) -> None:
        """Tell the coordinator what happened to a node."""
        self._tell(event)

    def _tell(self, event: ev.Event) -> None:
        if self._end is not None:
            return
        self._messages += 1
        self._met[self.phase, type(event).__name__, self._coordinator.status_of(event)] += 1
        actions = self._coordinator.handle(event, self.now_s)
        self._unchecked += 1
        world_size = self.schedule.world_size
        if self._unchecked >= (1 if world_size <= _LOOKED_THROUGH else world_size):
            self._unchecked = 0
            self._coordinator.validate()
        for action in actions:
            self.check(self._end is None, f"{action} after the end")
            self._carry_out(action)
        if self.schedule.nnodes and self._unchecked == 0 and self._end is None:
            self._check_held()

    def _check_held(self) -> None:
        """Nobody on a node that is lost may be taken to be alive."""
        for rank, incarnation in self._coordinator.held_by():
            worker = self._found(rank, incarnation)
            self.check(self.nodes.usable(worker), f"{worker} is gone with its node")

    def _carry_out(self, action: do.Action) -> None:
        match action:
            case do.Record(record=record):
                line = {"t": self.now_s, "event": record.event, **record.fields}
                check_record(self, line)
                self.records.append(line)
            case do.Spawn():
                self._spawn(action)
            case do.Kill(rank=rank, incarnation=incarnation):
                worker = self._found(rank, incarnation)
                worker.dying = True
                self._ahead += "not every shard can reach" in action.why
                self.after(self.delay_s(), lambda: self._kill(worker))
            case do.Dismiss():
                self.nodes.dismissed(action)
            case do.SendStop(generation=generation, to=to):
                self.check(generation > self._newest_stop, f"stop of {generation} twice")
                self._newest_stop = generation
                for each in to:
                    self._post(each, lambda worker: worker.on_stop(generation))
            case do.SendRegroup(generation=generation, plan=plan, to=to):
                self.check(generation > self._newest_regroup, "generations must rise")
                self.check(len(to) == self.schedule.world_size, "a regroup without some ranks")
                behind = f"all have seen {self.scripts.least}, and go on from {plan.position}"
                self.check(plan.position >= self.scripts.least, behind)
                self._newest_regroup = generation
                for each in to:
                    self._post_regroup(each, generation, plan)
            case do.SendGo(to=to):
                for each in to:
                    self._post(each, lambda worker: worker.on_go(), awaited=False)
            case do.SendPosition(rank=rank, incarnation=incarnation):
                self._post((rank, incarnation), lambda worker: worker.on_position())
            case do.SendClosed(to=to):
                for each in to:
                    self._post(each, lambda worker: worker.on_closed(), awaited=False)
            case do.Inspect():
                self.after(self.delay_s(), self._answer_inspection)
            case do.End():
                self._end = action

    def _kill(self, worker: SimWorker) -> None:
        if worker.alive and worker.in_reach and not worker.stuck:
            worker.die(by_us=True)

    def _answer_inspection(self) -> None:
        self._tell(ev.Inspected(evidence=self.faults.evidence()))

    def _spawn(self, order: do.Spawn) -> None:
        rank, before = order.rank, self.workers.get(order.rank)
        gone = before is None or not before.alive or not self.nodes.usable(before)
        self.check(gone, f"rank {rank} is held twice")
        self.check(order.incarnation == (before.incarnation if before else 0) + 1, "reused")
        if not order.joiner and order.generation > self._newest_start:
            self._newest_start = order.generation
            self.scripts.start_again()
        home = self.nodes.spawned(order)
        worker = self.workers[rank] = SimWorker(self, order, home)
        if home is not None:
            home.workers.append(worker)
        worker.alive = worker.in_reach  # else the order does not arrive any more
        self.after(order.delay_s, worker.born)

    def _post_regroup(self, to: tuple[int, int], generation: int, plan: Plan) -> None:
        rank, _ = to
        fetches = plan.ranks[rank].decision is Decision.FETCH
        capsule = self._capsules.newest(rank, plan.position) if fetches else None
        self._post(to, lambda worker: worker.on_regroup(generation, plan, capsule))

    def _found(self, rank: int, incarnation: int) -> SimWorker:
        worker = self.workers[rank]
        self.check(worker.incarnation == incarnation, f"rank {rank}.{incarnation} is not there")
        return worker

    def _post(
        self, to: tuple[int, int], act: Callable[[SimWorker], None], *, awaited: bool = True
    ) -> None:
        """Send to a worker. `awaited`: the coordinator waits for its answer with a deadline, so it
        may hang here."""
        worker = self._found(*to)

        def arrive() -> None:
            if worker.alive and worker.in_reach and not worker.deaf(awaited):
                act(worker)

        if self.faults.passes(worker, False, arrive):
            worker.heard_s = max(self.now_s + self.delay_s(), worker.heard_s)
            self._at(worker.heard_s, arrive)
