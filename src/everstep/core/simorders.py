"""What simulated coordinators ask for, carried out.

Theory of operation. Each action, and each message of an action, is one thing that a coordinator
does; it may die before any of them. A message to a worker on a node goes by the node's connection:
it arrives if that still stands, after what was sent to this worker before, and the agent takes note
of it. The onlooker holds the orders to what the shells rely on: numbers are given once, generations
rise, a rank is held once.

What it doesn't know: why something is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from everstep.core import actions as do
from everstep.core.simagents import Life
from everstep.core.simchecks import check_record
from everstep.core.simterms import GoneError, Seat
from everstep.core.simworker import SimWorker
from everstep.types import Decision, Plan

if TYPE_CHECKING:
    from everstep.core.simulate import Simulation

Act = Callable[[SimWorker], None]


def _nothing(_: Life) -> None:
    """The agent need not know."""


class SimOrders:
    """Carries orders out. `ahead`: processes that began again since the others could not follow
    them."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.ahead = 0
        self._newest_regroup = -1
        self._acts_in: dict[int, int] = {}  # by generation, the term of who acted last in it

    def carry_out(self, seat: Seat, action: do.Action) -> None:
        """Do one thing for a coordinator. Raises GoneError when it dies at it."""
        sim = self._sim
        if not isinstance(action, do.End | do.SendPeers | do.Reclaim | do.Probe):
            seat.spend()
        match action:
            case do.Record(record=record):
                if seat.deposed:
                    raise GoneError  # it may not write any more
                line = {"t": sim.now_s, "event": record.event, **record.fields}
                check_record(sim, line)
                sim.records.append(line)
            case do.Spawn():
                self._spawn(seat, action)
            case do.Kill(rank=rank, incarnation=incarnation):
                self.ahead += "not every shard can reach" in action.why
                self._kill(seat, self._found(rank, incarnation))
            case do.Dismiss():
                sim.nodes.dismissed(seat, action)
            case do.Reclaim():
                sim.nodes.keeping.reclaim(seat, action)
            case do.Probe():
                sim.nodes.probe(seat, action)
            case do.SendPeers():
                sim.nodes.keeping.tell_peers(seat, action)
            case do.SendStop():
                self._stop(seat, action)
            case do.SendRegroup():
                self._regroup(seat, action)
            case do.SendGo(to=to):
                self._post_all(seat, to, SimWorker.on_go, Life.go, awaited=False)
            case do.SendPosition(rank=rank, incarnation=incarnation):
                self._post(seat, (rank, incarnation), SimWorker.on_position, _nothing)
            case do.SendClosed(to=to):
                self._post_all(seat, to, SimWorker.on_closed, Life.close, awaited=False)
            case do.SendBye(to=to):
                self._post_all(seat, to, SimWorker.on_bye, Life.dismiss, awaited=False)
            case do.Inspect():
                sim.after(sim.delay_s(), lambda: sim.answer_inspection(seat))
            case do.End():
                sim.end(action)

    def _spawn(self, seat: Seat, order: do.Spawn) -> None:
        sim, rank = self._sim, order.rank
        before = sim.workers.get(rank)
        gone = before is None or not before.alive or not sim.nodes.usable(before)
        sim.check(gone, f"rank {rank} is held twice")
        sim.check((rank, order.incarnation) not in sim.tenures, "reused")
        sim.terms.check_number(seat, order.incarnation)
        self._act_in(seat, order.generation)
        home = sim.nodes.spawned(seat, order)
        worker = SimWorker(sim, order, home)
        sim.workers[rank] = sim.tenures[worker.identity] = worker
        if home is None:
            sim.after(order.delay_s, worker.born)
        else:
            home.workers.append(worker)
            sim.nodes.launched(seat, home, worker, order)

    def _kill(self, seat: Seat, worker: SimWorker) -> None:
        worker.dying = True
        link = None if worker.home is None else worker.home.link

        def strike() -> None:
            stands = link is None or (link.open and link.seat is seat)
            if worker.alive and worker.in_reach and stands and not worker.stuck:
                worker.die(by_us=True)

        self._sim.at(max(self._sim.now_s + self._sim.delay_s(), worker.heard_s), strike)

    def _stop(self, seat: Seat, action: do.SendStop) -> None:
        generation = action.generation
        self._sim.check(generation > seat.newest_stop, f"stop of {generation} twice")
        seat.newest_stop = generation
        self._act_in(seat, generation)
        for each in action.to:
            self._post(
                seat,
                each,
                lambda worker: worker.on_stop(generation),
                lambda life: life.stop(generation),
            )

    def _regroup(self, seat: Seat, action: do.SendRegroup) -> None:
        sim, generation, plan = self._sim, action.generation, action.plan
        sim.check(generation > self._newest_regroup, "generations must rise")
        sim.check(len(action.to) == sim.schedule.world_size, "a regroup without some ranks")
        behind = f"all have seen {sim.scripts.least}, and go on from {plan.position}"
        sim.check(plan.position >= sim.scripts.least, behind)
        sim.terms.check_number(seat, generation)
        self._newest_regroup = generation
        self._act_in(seat, generation)
        for each in action.to:
            self._post_regroup(seat, each, generation, plan)

    def _post_regroup(self, seat: Seat, to: tuple[int, int], generation: int, plan: Plan) -> None:
        rank, _ = to
        fetches = plan.ranks[rank].decision is Decision.FETCH
        capsule = seat.capsules.newest(rank, plan.position) if fetches else None
        self._post(
            seat,
            to,
            lambda worker: worker.on_regroup(generation, plan, capsule),
            lambda life: life.regroup(generation, plan),
        )

    def _act_in(self, seat: Seat, generation: int) -> None:
        """Nobody acts in a world in which a later coordinator has acted."""
        term = self._acts_in.setdefault(generation, seat.term)
        text = f"the coordinator of term {seat.term} acts in generation {generation} after {term}"
        self._sim.check(term <= seat.term, text)
        self._acts_in[generation] = seat.term

    # ------------------------------------------------------------------ messages

    def _found(self, rank: int, incarnation: int) -> SimWorker:
        worker = self._sim.tenures.get((rank, incarnation))
        self._sim.check(worker is not None, f"rank {rank}.{incarnation} is not there")
        assert worker is not None
        return worker

    def _post_all(
        self,
        seat: Seat,
        to: tuple[tuple[int, int], ...],
        act: Act,
        note: Callable[[Life], None],
        *,
        awaited: bool,
    ) -> None:
        for each in to:
            self._post(seat, each, act, note, awaited=awaited)

    def _post(
        self,
        seat: Seat,
        to: tuple[int, int],
        act: Act,
        note: Callable[[Life], None],
        *,
        awaited: bool = True,
    ) -> None:
        """Send to a worker; its agent takes `note`. `awaited`: the coordinator waits for its answer
        with a deadline, so it may hang here."""
        seat.spend()
        sim, worker = self._sim, self._found(*to)
        home = worker.home
        link = None if home is None else home.link
        if home is not None and (link is None or link.seat is not seat or not link.open):
            return

        def arrive() -> None:
            if not worker.alive or not worker.in_reach or (link is not None and not link.open):
                return
            if home is not None and worker.identity in home.agent.lives:
                note(home.agent.lives[worker.identity])
            if not worker.deaf(awaited):
                act(worker)

        if sim.faults.passes(worker, False, partial(arrive)):
            floor_s = 0.0 if home is None else home.heard_s
            worker.heard_s = max(sim.now_s + sim.delay_s(), worker.heard_s, floor_s)
            sim.at(worker.heard_s, arrive)
