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
Between nodes that is not so: there a worker waits until its node's guardian has its capsule. And
there the coordinator may die, or be taken for dead, and another comes (`simterms`).

What it doesn't know: real processes, sockets and time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.ladder import Policy
from everstep.core.simchecks import check_end
from everstep.core.simfaults import SimFaults
from everstep.core.simnodes import SimNodes
from everstep.core.simorders import SimOrders
from everstep.core.simschedule import Schedule, draw_schedule
from everstep.core.simscript import Capsule, Scripts
from everstep.core.simterms import GoneError, Seat, SimTerms
from everstep.core.simworker import SimWorker
from everstep.core.simworld import SimWorld
from everstep.types import Cause, CauseKind

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
    coordinator was told. `terms`: coordinators, one after the other. `resumed`: processes whose
    script took up what an earlier one had left. `undone`: half-done steps that were undone.
    `ahead`: ranks that began again since the others could not follow them. `lost`: messages. `met`:
    which events the coordinator met, by its phase and the sender's status. `hits`: which faults hit
    whom, by the same phase."""

    end: do.End
    records: list[dict[str, Any]]
    fired: int
    events: int
    messages: int
    generation: int
    terms: int
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
        self.workers: dict[int, SimWorker] = {}  # the newest of each rank
        self.tenures: dict[tuple[int, int], SimWorker] = {}  # all
        self.records: list[dict[str, Any]] = []
        self.scripts = Scripts(schedule, self.check)
        self.faults = SimFaults(self)
        self.nodes = SimNodes(self)
        self.terms = SimTerms(self)
        self._orders = SimOrders(self)
        self.resumed = self.undone = 0
        self.newest_step = self.open_incident = 0  # by the journal
        self.replaces = False  # likewise: a node with ranks was lost since the last incident
        self.awaited_s: float | None = None  # likewise: since when a node is awaited
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._worlds: dict[int, SimWorld] = {}
        self._actors: dict[tuple[int, int], int] = {}
        self._events = self._messages = 0
        self._unchecked = 0
        self._end: do.End | None = None
        self._acting: Seat = self.terms.seat
        self._met: Counter[tuple[str, str, str]] = Counter()

    @property
    def phase(self) -> str:
        """What the job as a whole is doing; "away" while there is no coordinator."""
        seat = self.terms.seat
        return seat.core.phase.value if seat.alive else "away"

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
            generation=self.terms.seat.core.generation,
            resumed=self.resumed,
            undone=self.undone,
            ahead=self._orders.ahead,
            terms=len(self.terms.seats),
            lost=self.faults.lost,
            met=self._met,
            hits=self.faults.hits,
        )

    def _next(self) -> None:
        """The earliest thing that happens next: an event of the heap, or a deadline."""
        seat = min(self.terms.acting, key=_due_s, default=None)
        deadline_s = None if seat is None else seat.due_s
        if self._heap and (deadline_s is None or self._heap[0][0] <= deadline_s):
            self.now_s, _, act = heapq.heappop(self._heap)
            act()
        elif not self._heap and (silent := self._silent(deadline_s)) is not None:
            self._tell(silent)
        elif seat is not None and deadline_s is not None:
            self.now_s = max(self.now_s, deadline_s)
            seat.wake()
            self.handle(seat, ev.Tick())
            after_s = seat.due_s
            self.check(after_s is None or after_s > self.now_s, "a deadline passes for ever")
        elif not self.faults.end_one():
            raise self.error("nothing can happen any more, and nothing is awaited")

    def _silent(self, deadline_s: float | None) -> ev.Silent | None:
        """What the agents notice when nothing moves, if they are faster than the deadline."""
        fast = deadline_s is None or self.random.random() < 0.5
        return self.faults.silent() if fast else None

    def end(self, end: do.End) -> None:
        """The job is over."""
        self._end = end

    @property
    def over(self) -> bool:
        """The job has ended."""
        return self._end is not None

    def lose_capsule(self, worker: SimWorker) -> None:
        """What belongs to a rank alone is not to be had: its node and its guardian are gone."""
        position = worker.train.position
        gone = worker.home is not None and self.nodes.keeping.is_lost(worker.rank, position)
        self.check(gone, f"{worker} has no capsule of {position}")
        text = f"what belongs to rank {worker.rank} alone went down with its node and its guardian"
        self.end(do.End(exit_code=1, text=text))

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
        self.at(self.now_s + delay_s, act)

    def at(self, moment_s: float, act: Callable[[], None]) -> None:
        """Do `act` at `moment_s`."""
        heapq.heappush(self._heap, (moment_s, next(self._order), act))

    def _send_up(self, worker: SimWorker, act: Callable[[Seat], None]) -> None:
        """Carry to its coordinator what a worker says, behind all that it has said before. What is
        said on a node that can't be reached comes late, if it comes."""
        home = worker.home
        link = None if home is None else home.link
        if home is not None and link is None:
            return
        late = 1 if worker.in_reach else _LATE
        worker.said_s = max(self.now_s + late * self.delay_s(), worker.said_s)

        def arrive() -> None:
            seat = self.terms.seat if link is None else link.seat
            if home is None or (home.heard and link is not None and link.open and seat.alive):
                act(seat)

        self.at(worker.said_s, arrive)

    def deliver(self, worker: SimWorker, event: ev.WorkerEvent) -> None:
        """A worker speaks to its agent and, through it, to the coordinator. What it has said
        outlives it."""
        if worker.home is not None and worker.home.lives:
            worker.home.agent.hears(event)

        def arrive(seat: Seat) -> None:
            self.handle(seat, event)

        if self.faults.passes(worker, True, lambda: self._tell(event)):
            self._send_up(worker, arrive)

    def keep_capsule(self, worker: SimWorker, capsule: Capsule) -> None:
        """A worker gives its capsule away. A coordinator keeps nothing of a node that is lost."""

        def keep(seat: Seat) -> None:
            if worker.home is None or worker.home.number in seat.usable:
                seat.capsules.keep(worker.rank, capsule)

        self.nodes.keeping.keep(worker, capsule)
        self._send_up(worker, keep)

    def when_kept(self, worker: SimWorker, then: Callable[[], None]) -> None:
        """`then` when what a worker has given away can't be lost with it: at once, or, between
        nodes, when its guardian has it."""
        if worker.home is None:
            then()
        else:
            self.nodes.keeping.when_kept(worker, then)

    def peers_notice(self, worker: SimWorker) -> None:
        """A worker's peers have lost touch with it, and notice or don't."""
        for other in self.workers.values():
            if other.alive and other.generation == worker.generation and other is not worker:
                other.on_peer_died()

    def buried(self, worker: SimWorker, by_us: bool) -> None:
        """A worker has died: its peers notice or don't, and the coordinator hears of it after all
        that it had said."""
        if not self.nodes.left_behind(worker):
            self.peers_notice(worker)
        cause = Cause(kind=CauseKind.SIGNAL, text=f"{worker} was killed", signature="9", signal=9)
        rank, incarnation = worker.identity
        died = ev.Died(rank=rank, incarnation=incarnation, cause=cause, before_kill=not by_us)
        if worker.home is not None and worker.home.lives:
            worker.home.agent.hears(died)
        self._send_up(worker, lambda seat: self.handle(seat, died))
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

    def _tell(self, event: ev.Event) -> None:
        """Tell the newest coordinator."""
        self._handle(self.terms.seat, event)

    def handle(self, seat: Seat, event: ev.Event) -> None:
        """Tell a coordinator."""
        if seat is self.terms.seat:
            self._tell(event)
        else:
            self._handle(seat, event)

    def _handle(self, seat: Seat, event: ev.Event) -> None:
        if self._end is not None or not seat.alive:
            return
        newest = seat is self.terms.seat
        self._messages += 1
        phase, status = seat.core.phase.value, seat.core.status_of(event)
        self._met[phase, type(event).__name__, status] += 1
        actions = seat.core.handle(event, seat.clock_s(self.now_s))
        self._unchecked += 1
        world_size = self.schedule.world_size
        if self._unchecked >= (1 if world_size <= _LOOKED_THROUGH else world_size):
            self._unchecked = 0
            seat.core.validate()
        self.terms.judge(actions)
        if not self._carried_out(seat, actions):
            return
        if self.schedule.nnodes and newest and self._unchecked == 0 and self._end is None:
            self._check_held(seat)

    def _carried_out(self, seat: Seat, actions: list[do.Action]) -> bool:
        """Carry actions out; False when the coordinator dies at that."""
        try:
            for action in actions:
                self.check(self._end is None, f"{action} after the end")
                self._acting = seat
                self._carry_out(action)
        except GoneError:
            self.terms.die(seat)
            return False
        return True

    def _carry_out(self, action: do.Action) -> None:
        self._orders.carry_out(self._acting, action)

    def _check_held(self, seat: Seat) -> None:
        """Nobody on a node that is lost may be taken to be alive."""
        for identity in seat.core.held_by():
            worker = self.tenures[identity]
            self.check(self.nodes.usable(worker), f"{worker} is gone with its node")

    def answer_inspection(self, seat: Seat) -> None:
        """All workers show where they are."""
        self.handle(seat, ev.Inspected(evidence=self.faults.evidence()))


def _due_s(seat: Seat) -> float:
    return math.inf if seat.due_s is None else seat.due_s
