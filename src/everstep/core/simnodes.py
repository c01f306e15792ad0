"""The nodes of a simulated job: they join, fall, are cut off, lose the coordinator, and come back.

Theory of operation. A node that fell takes its processes with it. One that is cut off lives on with
them, hears nothing, and may or may not be heard until the coordinator is told that it is lost, and
afterwards; of both, what was on its way at that moment arrives, or all of it is gone. One that is
unlinked has only lost the coordinator. When a coordinator begins anew, each node that lives turns
to it some time, early, late or too late, and reports, unless it has no part any more; then it ends
its processes and comes as another node. So it does when a coordinator tells it.

Everything that is said between a coordinator and a node goes by a connection (`SimLink`), of which
there is one at a time, and which ends with either side. What an agent has its guardian keep goes
straight to that node (`core.simkeeping`).

The onlooker knows what each coordinator has been told (`core.simterms.Seat`). Each slot is held by
a node that it may use, and each of those holds at most one.

What it doesn't know: why a spare was chosen.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.nodes import Layout
from everstep.core.simagents import Identity, SimAgent
from everstep.core.simkeeping import SimKeeping, SimLink, SimNode
from everstep.core.simscript import Capsules
from everstep.core.simterms import Seat
from everstep.types import Cause, CauseKind

if TYPE_CHECKING:
    from everstep.core.simulate import Simulation
    from everstep.core.simworker import SimWorker

_AGES = 1000  # of usual delays, after which a slow node comes back
_LATE = 50
_CLOSED = 0.4  # how often a try meets a pair that is closed


class SimNodes:
    """The nodes of one schedule; none where the schedule has none."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._all: dict[int, SimNode] = {}
        self.keeping = SimKeeping(sim, self._all)
        self._ways = random.Random(sim.schedule.seed)  # of its own: a try changes nothing else

    @property
    def layout(self) -> Layout | None:
        """The job's, if it is to gather nodes."""
        schedule = self._sim.schedule
        if not schedule.nnodes:
            return None
        return Layout(
            nproc_per_node=schedule.node_size, nnodes=schedule.nnodes, spares=schedule.spares
        )

    # ------------------------------------------------------------------ what nodes do

    def start(self) -> None:
        """All agents are started, and come in any order."""
        for _ in range(self._sim.schedule.nnodes + self._sim.schedule.spares):
            self._come(self._sim.schedule.node_size)

    def _come(self, ranks: int, host: str = "") -> None:
        number, schedule = len(self._all), self._sim.schedule
        host = host or f"h{number % schedule.hosts}"
        agent = SimAgent(self._park)
        domain = f"d{int(host[1:]) // 2}"
        node = SimNode(number=number, host=host, domain=domain, ranks=ranks, agent=agent)
        self._all[number] = node
        self._sim.after(self._sim.delay_s(), lambda: self._connect(node, self._seat))

    def _park(self, identity: Identity, generation: int) -> None:
        worker = self._sim.tenures[identity]

        def stand_still() -> None:
            if worker.alive and not worker.hung:
                worker.on_stop(generation)

        self._sim.after(self._sim.delay_s() / 10, stand_still)

    def _connect(self, node: SimNode, seat: Seat) -> None:
        """An agent turns to a coordinator and says who it is, and all that it knows."""
        followed = -1 if node.link is None else node.link.seat.term
        if not node.lives or not seat.alive or seat.term <= followed:
            return
        if node.link is not None:
            self._hang_up(node, node.link)
        link = node.link = SimLink(seat)
        if not node.up:
            node.up, node.mute = True, False
            self.keeping.again(node)
        report = node.agent.report(node.number, node.host, node.domain)
        kept, sim = node.agent.kept.copy(), self._sim
        node.heard_s = max(node.heard_s, sim.now_s + sim.delay_s())
        for worker in node.workers:
            worker.said_s = node.heard_s  # what was said before goes by the old connection
        sim.at(node.heard_s, lambda: self._arrives(node, link, report, kept))

    def _arrives(self, node: SimNode, link: SimLink, report: ev.NodeBack, kept: Capsules) -> None:
        seat, sim = link.seat, self._sim
        if not link.open or not seat.alive or not node.up or not node.lives:
            return
        term, known = node.agent.term, node.number in seat.joined
        if term >= 0 and (term == seat.term or not seat.core.reconvenes or known):
            self._displace(node)
            return
        node.heard_s = max(node.heard_s, sim.now_s + sim.delay_s())
        sim.at(node.heard_s, lambda: self._welcome(node, link))
        if node.agent.term < 0:
            self._register(node, seat)
            if sim.random.random() < 0.1:
                again = partial(self._register, node, seat)
                sim.after(20 * sim.delay_s(), again)  # it comes twice
            return
        seat.joined.add(node.number)
        for rank in kept.ranks():
            seat.capsules.merge(kept, rank)
        sim.handle(seat, report)
        self._note_claim(node, seat, report)

    def _register(self, node: SimNode, seat: Seat) -> None:
        if node.up and node.link is not None and node.link.seat is seat:
            if node.ranks >= self._sim.schedule.node_size:
                seat.joined.add(node.number)
            joined = ev.NodeJoined(
                node=node.number, host=node.host, domain=node.domain, ranks=node.ranks
            )
            self._sim.handle(seat, joined)

    def _note_claim(self, node: SimNode, seat: Seat, report: ev.NodeBack) -> None:
        if report.slot is not None and node.number not in seat.gone:
            seat.holder[report.slot], seat.slot[node.number] = node.number, report.slot
            held = set(seat.core.held_by())
            for worker in node.workers:
                if worker.identity in held:
                    self._sim.workers[worker.rank] = worker

    def _welcome(self, node: SimNode, link: SimLink) -> None:
        if link.open and node.link is link and node.lives:
            node.agent.absent, node.agent.term = False, link.seat.term

    def _displace(self, node: SimNode) -> None:
        """It has no part any more: it ends its processes, and comes as another node."""
        node.retired = True
        if node.link is not None:
            node.link.open = False
        for worker in node.workers:
            if worker.alive and not worker.stuck:
                worker.die(by_us=True)
        self._come(self._sim.schedule.node_size, node.host)

    # ------------------------------------------------------------------ what befalls them

    def befall(self, kind: str) -> str:
        """A fault of nodes hits one that it can hit. Returns whom: "holder", "joiner" or "spare";
        "" for nobody."""
        draw = self._sim.random
        if kind == "late":
            few = draw.random() < 0.1 and self._sim.schedule.node_size > 1
            self._come(self._sim.schedule.node_size - few)
            return "spare"
        gone = self._seat.gone
        up = [n for n in self._all.values() if n.up and n.lives and n.number not in gone]
        pool = [node for node in up if (self._is_spare(node) == (kind == "spare"))]
        joining = [node for node in pool if any(w.alive and w.joiner for w in node.workers)]
        if joining and draw.random() < 0.5:
            pool = joining
        if not pool:
            return ""
        node = draw.choice(pool)
        who = "spare" if self._is_spare(node) else "joiner" if node in joining else "holder"
        if kind == "unlink":
            return who if self._unlink(node) else ""
        self.fell(node, cut=kind == "cut")
        return who

    def fell(self, node: SimNode, *, cut: bool = False) -> None:
        """A node is gone, or is `cut` off; some time later that is noticed."""
        node.up, node.mute = False, self._sim.random.random() < 0.5
        node.fallen = not cut
        for worker in list(node.workers):
            if worker.alive and cut:
                self._sim.peers_notice(worker)
            elif worker.alive:
                worker.die()
        text = "its agent does not answer" if cut else "its agent's connection was closed"
        self._end_link(node, text)

    def _unlink(self, node: SimNode) -> bool:
        """It loses the coordinator, and nobody else."""
        if node.link is None or not node.link.open:
            return False
        node.link.open = False
        self._end_link(node, "its lease ran out")
        return True

    def _hang_up(self, node: SimNode, link: SimLink) -> None:
        """It turns to another coordinator."""
        if link.open and link.seat.alive:
            self._end_link(node, "its agent has hung up")
        link.open = False
        node.agent.lose_touch()

    def _end_link(self, node: SimNode, text: str) -> None:
        """Both sides notice that they have lost each other, if they live."""
        link = node.link
        if link is None:
            return
        cause = Cause(kind=CauseKind.NODE, text=text)
        lost = ev.NodeLost(node=node.number, cause=cause)

        def notice() -> None:
            if link.seat.alive:
                link.seat.gone.add(node.number)
                self._sim.handle(link.seat, lost)

        def agent_notices() -> None:
            if node.link is link and node.lives:
                node.agent.lose_touch()

        self._sim.after(3 * self._sim.delay_s(), notice)
        self._sim.after(3 * self._sim.delay_s(), agent_notices)
        if self._sim.random.random() < 0.2:
            self._sim.after(30 * self._sim.delay_s(), notice)  # it is told twice

    # ------------------------------------------------------------------ coordinators come and go

    def coordinator_died(self, seat: Seat) -> None:
        """Of what it had sent all still arrives at a node, or nothing does. Then that notices."""
        for node in self._all.values():
            link = node.link
            if link is None or link.seat is not seat or not link.open:
                continue
            last_s = self._sim.now_s
            if self._sim.random.random() < 0.5:
                link.open = False
            else:
                last_s = max([node.heard_s, last_s, *(w.heard_s for w in node.workers)])
            self._sim.at(last_s + self._sim.delay_s(), partial(self._orphaned, node, link))

    def _orphaned(self, node: SimNode, link: SimLink) -> None:
        link.open = False
        if node.link is link and node.lives:
            node.agent.lose_touch()

    def coordinator_began(self, seat: Seat) -> None:
        """Every node that lives turns to it some time; one that is cut off may never."""
        draw, sim = self._sim.random, self._sim
        for node in self._all.values():
            if not node.lives or (not node.up and draw.random() < 0.5):
                continue
            when_s = draw.choice((5, 5, 5, 5, _LATE)) * sim.delay_s()
            if draw.random() < sim.schedule.tardy:
                when_s += sim.policy.rejoin_timeout_s
            last = node.link if node.link is not None and node.link.open else None
            sim.after(when_s, partial(self._turn, node, seat, last))

    def _turn(self, node: SimNode, seat: Seat, last: SimLink | None) -> None:
        """It has learned of a new coordinator; it hears out what the one that died had sent."""
        if last is not None and last.open and not last.seat.alive and seat.alive:
            turn = partial(self._turn, node, seat, last)
            self._sim.after(self._sim.delay_s() + 1e-6, turn)
            return
        self._connect(node, seat)

    # ------------------------------------------------------------------ what a coordinator does

    def spawned(self, seat: Seat, order: do.Spawn) -> SimNode | None:
        """A worker is to run on a node; None where there are none."""
        if not self._sim.schedule.nnodes:
            return None
        number, slot = order.node, order.rank // self._sim.schedule.node_size
        usable = number in seat.usable
        self._sim.check(usable, f"rank {order.rank} is spawned on node {number}, which is lost")
        before = seat.holder.get(slot, number)
        moved = before == number or before in seat.gone
        self._sim.check(moved, f"slot {slot} is held by node {before}, and now by {number}")
        seat.holder[slot] = number
        held = seat.slot.setdefault(number, slot)
        self._sim.check(held == slot, f"node {number} holds the slots {held} and {slot}")
        return self._all[number]

    def launched(self, seat: Seat, node: SimNode, worker: SimWorker, order: do.Spawn) -> None:
        """The order reaches the node, if it does."""
        link = node.link
        worker.alive = False  # until the order arrives
        if link is None or link.seat is not seat or not link.open or not node.up:
            return
        known, slot = seat.capsules.part(order.rank), order.rank // self._sim.schedule.node_size

        def arrive() -> None:
            if link.open and node.up and node.lives:
                worker.alive = True
                node.agent.launched(order, slot, known)
                self._sim.after(order.delay_s, worker.born)

        worker.heard_s = max(self._sim.now_s + self._sim.delay_s(), node.heard_s)
        self._sim.at(worker.heard_s, arrive)

    def probe(self, seat: Seat, order: do.Probe) -> None:
        """Nodes try whether they reach others. Now and then two don't."""
        closed: tuple[int, ...] = ()
        if order.pairs and self._ways.random() < _CLOSED:
            closed = self._ways.choice(order.pairs)
        for number in sorted({asker for asker, _ in order.pairs}):
            seat.spend()
            node = self._all[number]
            if node.link is not None and node.link.seat is seat:
                targets = closed[1:] if number in closed[:1] else ()
                tell = partial(self._tell_reach, node, node.link, order.turn, targets)
                self._sim.after(self._sim.delay_s(), tell)

    def _tell_reach(self, node: SimNode, link: SimLink, turn: int, closed: tuple[int, ...]) -> None:
        if not link.open or not node.up or not node.lives:
            return
        sim = self._sim
        found = dict.fromkeys(closed, "no connection (timed out)")
        answer = ev.Probed(node=node.number, turn=turn, closed=found)

        def arrive() -> None:
            if link.open and link.seat.alive and node.heard:
                sim.handle(link.seat, answer)

        sim.after(sim.delay_s(), arrive)

    def dismissed(self, seat: Seat, order: do.Dismiss) -> None:
        """A node hears that it has no part in the job: soon, if it can be reached. One that can't
        be may come back, perhaps long afterwards."""
        node, sim = self._all[order.node], self._sim
        seat.gone.add(node.number)
        link = node.link
        if link is not None and link.seat is seat and link.open and node.up:
            sim.after(10 * sim.delay_s(), lambda: self._displace(node) if node.lives else None)
            return
        if node.retired or sim.random.random() >= sim.schedule.returns:
            return

        def return_() -> None:
            if node.fallen and not node.retired:
                node.retired = True
                self._come(sim.schedule.node_size, node.host)
            elif node.lives and node.link is link and link is not None and link.seat is seat:
                if seat.alive:
                    self._displace(node)  # it turns to the same coordinator again
            elif node.lives:
                self._connect(node, self._seat)

        late = sim.random.random() < 0.5
        sim.after((_AGES if late else 10) * sim.delay_s(), return_)

    # ------------------------------------------------------------------ what the onlooker knows

    @property
    def _seat(self) -> Seat:
        return self._sim.terms.seat

    def usable(self, worker: SimWorker) -> bool:
        """Whether the newest coordinator may take `worker` to be alive, as far as its node is
        concerned."""
        return worker.home is None or worker.home.number in self._seat.usable

    def left_behind(self, worker: SimWorker) -> bool:
        """Whether the others have gone on without the node of `worker`."""
        return worker.home is not None and worker.home.number in self._seat.gone

    def _is_spare(self, node: SimNode) -> bool:
        return node.number not in self._seat.slot

    @property
    def usable_nodes(self) -> set[int]:
        """The nodes that the newest coordinator may use."""
        return self._seat.usable

    @property
    def spares(self) -> set[int]:
        """Those of them that hold no slot."""
        return self._seat.usable - self._seat.slot.keys()
