"""Whole jobs in virtual time: the coordinator against workers that fail at every moment there is.

Theory of operation. A schedule, drawn from a seed, fixes the job and its faults. Everything that
happens is an event in one heap, ordered by virtual time; every message takes a random time, first
in first out on each channel, as on a socket. Faults are placed by counting events, so any boundary
between two of them is a place to die, also in the middle of a recovery. After every event the
coordinator's invariants are checked, and with them what only an onlooker can see: one incarnation
of a rank acts in one generation, generations rise, a committed step stays, and the state after
step k is the same on whoever holds it, whenever it was made; and each rank's script is given the
result of every step once, whoever runs it. The same seed gives the same run.

What it doesn't know: real processes, sockets, time, and more than one fault at one instant.
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
from everstep.core.simscript import Capsule, Capsules, Scripts, own_after, state_after
from everstep.core.simworker import Place, SimWorker
from everstep.core.simworld import SimWorld
from everstep.types import Cause, CauseKind, Decision, Plan

_MAX_EVENTS = 50_000
_FAULTS = ("kill", "kill", "kill", "raise", "peer", "hang", "receipt", "replace")


class InvariantError(AssertionError):
    """The simulation saw what must never be; the message has the seed and the moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A job and its faults. `shards`: parts of the state, dealt to the ranks in turn. `fenced`: a
    step ends in a fence. `updates`: of a step, 1 or 2; with 2 a rank may keep a copy to undo the
    first with (`undoes`). `faults`: how many events after the one before it each fault comes, and
    which it is. `slow_s`: the longest delay."""

    seed: int
    world_size: int
    steps: int
    shards: int = 1
    fenced: bool = False
    updates: int = 1
    undoes: bool = False
    faults: tuple[tuple[int, str], ...] = ()
    slow_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a simulated job ended. `records`: its journal, stamped with virtual seconds. `fired`:
    faults that found somebody to hit. `events`: how many events it took. `resumed`: calls of a step
    that returned what a capsule held. `undone`: half-done steps that were undone."""

    end: do.End
    records: list[dict[str, Any]]
    fired: int
    events: int
    generation: int
    resumed: int
    undone: int


def draw_schedule(seed: int) -> Schedule:
    """A schedule with everything drawn from `seed`: small jobs, up to five faults, half of them
    close behind the one before."""
    draw = random.Random(seed)
    world_size = draw.choice((1, 2, 2, 3, 3, 4, 5))
    fenced = draw.random() < 0.5
    gaps = [draw.randrange(40 * world_size)]
    gaps += [draw.randrange(draw.choice((12, 150))) for _ in range(4)]
    faults = tuple((gap, draw.choice(_FAULTS)) for gap in gaps[: draw.randrange(6)])
    steps = draw.randrange(1, 6)
    shards = draw.choice((1, 1, 2)) if fenced and world_size > 2 else 1
    return Schedule(
        seed=seed,
        world_size=world_size,
        steps=steps,
        shards=shards,
        fenced=fenced,
        faults=faults,
        slow_s=draw.choice((0.01, 0.1, 1.0)),
        # Shards that end a step at different updates would have no common step: not supported.
        updates=draw.choice((1, 1, 2)) if shards == 1 else 1,
        undoes=draw.random() < 0.5,
    )


def simulate(schedule: Schedule, policy: Policy | None = None) -> Outcome:
    """Run a job to its end and return how it ended. `policy`: unlimited budgets by default.

    Raises InvariantError when an invariant does not hold or when nothing more can happen.
    """
    return Simulation(schedule, policy or Policy(unlimited=True)).run()


class Simulation:
    """One run of a schedule. The workers' view of the world outside, too."""

    def __init__(self, schedule: Schedule, policy: Policy) -> None:
        self.schedule = schedule
        self.random = random.Random(schedule.seed ^ 0x5EED)
        self.now_s = 0.0
        self._policy = policy
        self._coordinator = Coordinator(schedule.world_size, policy)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._channel_s: dict[tuple[SimWorker, bool], float] = {}
        self._workers: dict[int, SimWorker] = {}
        self._worlds: dict[int, SimWorld] = {}
        self._actors: dict[tuple[int, int], int] = {}
        self._records: list[dict[str, Any]] = []
        self._faults = list(schedule.faults)
        self._capsules = Capsules()
        self._scripts = Scripts(self.check)
        self._bad_receipts = 0
        self._corrupted: Counter[int] = Counter()  # by rank
        self._fired = self.resumed = self.undone = 0
        self._events = 0
        self._newest_stop = self._newest_regroup = -1
        self._end: do.End | None = None

    # ------------------------------------------------------------------ the run

    def run(self) -> Outcome:
        """Run to the end of the job."""
        self._tell(ev.JobStarted())
        while self._end is None:
            self._events += 1
            self.check(self._events < _MAX_EVENTS, "the job does not end")
            self._next()
            self._inject()
        self._check_end(self._end)
        return Outcome(
            end=self._end,
            records=self._records,
            fired=self._fired,
            events=self._events,
            generation=self._coordinator.generation,
            resumed=self.resumed,
            undone=self.undone,
        )

    def _next(self) -> None:
        """The earliest thing that happens next: an event of the heap, or a deadline."""
        deadline_s = self._coordinator.next_deadline_s
        if self._heap and (deadline_s is None or self._heap[0][0] <= deadline_s):
            self.now_s, _, act = heapq.heappop(self._heap)
            act()
        else:
            if deadline_s is None:
                raise self.error("nothing can happen any more, and nothing is awaited")
            self.now_s = max(self.now_s, deadline_s)
            self._tell(ev.Tick())
            after_s = self._coordinator.next_deadline_s
            self.check(after_s is None or after_s > self.now_s, "a deadline passes for ever")

    def check(self, holds: bool, text: str) -> None:
        """Raise InvariantError unless `holds`."""
        if not holds:
            raise self.error(text)

    def error(self, text: str) -> InvariantError:
        """What to raise for what must never be."""
        return InvariantError(self._where(text))

    def _where(self, text: str) -> str:
        return f"seed {self.schedule.seed}, event {self._events}, {self.now_s:.4f} s: {text}"

    # ------------------------------------------------------------------ time and messages

    def delay_s(self) -> float:
        """A random delay: mostly short, sometimes long."""
        return self.schedule.slow_s * self.random.random() ** 4

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do `act` in `delay_s`."""
        self._at(self.now_s + delay_s, act)

    def _at(self, moment_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (moment_s, next(self._order), act))

    def _send(self, worker: SimWorker, up: bool, act: Callable[[], None]) -> None:
        """Carry a message on one direction of a worker's channel, behind all earlier ones."""
        key = (worker, up)
        arrives_s = max(self.now_s + self.delay_s(), self._channel_s.get(key, 0.0))
        self._channel_s[key] = arrives_s
        self._at(arrives_s, act)

    def deliver(self, worker: SimWorker, event: ev.WorkerEvent) -> None:
        """A worker speaks to the coordinator. What it has said outlives it."""
        self._send(worker, True, lambda: self._tell(event))

    def keep_capsule(self, worker: SimWorker, capsule: Capsule) -> None:
        """A worker gives its capsule to the agent."""
        self._send(worker, True, lambda: self._capsules.keep(worker.rank, capsule))

    def buried(self, worker: SimWorker, by_us: bool) -> None:
        """A worker has died: its peers notice or don't, and the coordinator hears of it after all
        that it had said."""
        for other in self._workers.values():
            if other.alive and other.generation == worker.generation:
                other.on_peer_died()
        cause = Cause(kind=CauseKind.SIGNAL, text=f"{worker} was killed", signature="9", signal=9)
        died = ev.Died(
            rank=worker.rank, incarnation=worker.incarnation, cause=cause, before_kill=not by_us
        )
        self.deliver(worker, died)
        if self.random.random() < 0.3:  # a late notice, when the rank may have been given away
            self.after(10 * self.delay_s(), lambda: self.deliver(worker, died))

    # ------------------------------------------------------------------ between workers

    def world(self, worker: SimWorker) -> SimWorld:
        """The world in which `worker` acts; among its rank's tenures it must be the only one."""
        key = (worker.rank, worker.generation)
        actor = self._actors.setdefault(key, worker.incarnation)
        self.check(actor == worker.incarnation, f"{worker} and incarnation {actor} both act")
        return self._worlds.setdefault(worker.generation, SimWorld(self))

    # ------------------------------------------------------------------ scripts

    def sees(self, worker: SimWorker, step: int, result: tuple[int, int]) -> None:
        """The script of `worker` is given the result of `step`."""
        done = [record["step"] for record in self._records if record["event"] == "step"]
        at_least = done[-1] if done else 0
        self._scripts.sees(worker.rank, worker.incarnation, step, result, at_least=at_least)

    def last_seen(self, worker: SimWorker) -> int | None:
        """The newest step of which the script of `worker` has the result."""
        return self._scripts.last(worker.rank, worker.incarnation)

    # ------------------------------------------------------------------ the coordinator

    def _tell(self, event: ev.Event) -> None:
        if self._end is not None:
            return
        actions = self._coordinator.handle(event, self.now_s)
        self._coordinator.validate()
        for action in actions:
            self.check(self._end is None, f"{action} after the end")
            self._carry_out(action)

    def _carry_out(self, action: do.Action) -> None:
        match action:
            case do.Record(record=record):
                line = {"t": self.now_s, "event": record.event, **record.fields}
                self._records.append(line)
                self._check_record(line)
            case do.Spawn(rank=rank, incarnation=incarnation):
                before = self._workers.get(rank)
                self.check(before is None or not before.alive, f"rank {rank} is held twice")
                self.check(incarnation == (before.incarnation if before else 0) + 1, "reused")
                worker = SimWorker(self, rank, incarnation, action.generation, action.joiner)
                self._workers[rank] = worker
                worker.born()
            case do.Kill(rank=rank, incarnation=incarnation):
                worker = self._found(rank, incarnation)
                worker.dying = True
                self.after(self.delay_s(), lambda: worker.die(by_us=True) if worker.alive else None)
            case do.SendStop(generation=generation, to=to):
                self.check(generation > self._newest_stop, f"stop of {generation} twice")
                self._newest_stop = generation
                for each in to:
                    self._post(each, lambda worker: worker.on_stop(generation))
            case do.SendRegroup(generation=generation, plan=plan, to=to):
                self.check(generation > self._newest_regroup, "generations must rise")
                self.check(len(to) == self.schedule.world_size, "a regroup without some ranks")
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
            case do.End():
                self._end = action

    def _post_regroup(self, to: tuple[int, int], generation: int, plan: Plan) -> None:
        rank, _ = to
        fetches = plan.ranks[rank].decision is Decision.FETCH
        capsule = self._capsules.newest(rank, plan.step) if fetches else None
        self._post(to, lambda worker: worker.on_regroup(generation, plan, capsule))

    def _found(self, rank: int, incarnation: int) -> SimWorker:
        worker = self._workers[rank]
        self.check(worker.incarnation == incarnation, f"rank {rank}.{incarnation} is not there")
        return worker

    def _post(
        self, to: tuple[int, int], act: Callable[[SimWorker], None], *, awaited: bool = True
    ) -> None:
        """Send to a worker. `awaited`: the coordinator waits for its answer with a deadline, so it
        may hang here."""
        worker = self._found(*to)

        def arrive() -> None:
            if worker.alive and not worker.deaf(awaited):
                act(worker)

        self._send(worker, False, arrive)

    # ------------------------------------------------------------------ faults

    def take_bad_receipt(self, rank: int) -> bool:
        """Whether the fetch of `rank` that has just ended was corrupted; each fault corrupts
        one."""
        if self._bad_receipts == 0:
            return False
        self._bad_receipts -= 1
        self._corrupted[rank] += 1
        return True

    def _inject(self) -> None:
        if not self._faults or self._end is not None:
            return
        after, kind = self._faults[0]
        if after > 0:
            self._faults[0] = (after - 1, kind)
            return
        del self._faults[0]
        living = [worker for worker in self._workers.values() if worker.alive]
        joiners = [worker for worker in living if worker.joiner]
        pool = joiners if joiners and self.random.random() < 0.4 else living
        if not pool:
            return
        worker = self.random.choice(pool)
        self._fired += 1
        signature = f"fault {self._fired}"
        if kind == "kill" or (kind == "raise" and worker.place is Place.SET_UP):
            worker.die()
        elif kind == "raise":
            worker.fail(CauseKind.EXCEPTION, signature)
        elif kind == "peer":
            worker.fail(CauseKind.PEER, signature)
        elif kind == "replace":
            worker.fail(CauseKind.WORKER, signature)
        elif kind == "receipt":
            self._bad_receipts += 1
        elif worker.joiner or worker.place is not Place.SET_UP:
            worker.will_hang = True

    # ------------------------------------------------------------------ what must hold

    def _check_record(self, line: dict[str, Any]) -> None:
        if line["event"] == "step":
            later = [r for r in self._records[:-1] if r["event"] == "step"]
            follows = line["step"] == (later[-1]["step"] if later else 0) + 1
            self.check(follows, f"step {line['step']} is out of order, lost or done twice")
        if line["event"] == "incident_closed":
            self.check(line["steps_lost"] == 0, "a committed step was lost")

    def _check_end(self, end: do.End) -> None:
        opened = [r["incident"] for r in self._records if r["event"] == "incident_opened"]
        closed = [r["incident"] for r in self._records if r["event"] == "incident_closed"]
        if end.exit_code != 0:
            self.check(end.cause is not None, "no first cause")
            self.check(opened[:-1] == closed, "an earlier incident was left open")
            if "allowed" in end.text and not self._policy.unlimited:
                return
            if "the copies differ" in end.text:
                twice = end.rank is not None and self._corrupted[end.rank] >= 2
                self.check(twice, f"rank {end.rank} had no two bad receipts: {end.text}")
                return
            self.check("lost" in end.text, f"the job ended with: {end.text}")
            self.check(not self._recoverable(), f"the state was there: {end.text}")
            self.check(any(r["event"] == "step" for r in self._records), "nothing was to lose")
            return
        self.check(opened == closed, f"incidents {opened} opened, {closed} closed")
        self.check(len(self._workers) == self.schedule.world_size, "a rank was never there")
        for worker in self._workers.values():
            right = worker.state == state_after(self.schedule.steps)
            self.check(right, f"{worker} ends with a wrong state")
            own = worker.own == own_after(worker.rank, self.schedule.steps)
            self.check(own, f"{worker} ends with a wrong state of its own")
            self.check(self.last_seen(worker) == self.schedule.steps, f"{worker} missed a result")
            self.check(worker.place is Place.FINISHED, f"{worker} has not ended")

    def _recoverable(self) -> bool:
        """Whether the living hold a whole state of one step, seen by an onlooker who knows all."""
        holders = [w for w in self._workers.values() if w.alive and not w.dying and w.has_state]
        shards = {f"s{rank % self.schedule.shards}" for rank in range(self.schedule.world_size)}
        held = [worker.holding for worker in holders]
        for step in {holding.committed for holding in held}:
            there = {
                holding.shard
                for holding in held
                if not holding.torn
                and (
                    holding.committed == step
                    or (holding.can_advance and holding.committed == step - 1)
                )
            }
            if there == shards:
                return True
        return False
