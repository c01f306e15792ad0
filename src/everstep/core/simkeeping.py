"""What simulated nodes keep for one another, and what a coordinator is told of it.

Theory of operation. A node's guardian is told with each world that begins. What its agent keeps of
a rank goes there behind all that went before, and is *safe* when it has arrived; what could not
arrive goes there again when both can be reached. A coordinator that asks for what is kept of a rank
has it before it hears the answer.

The onlooker knows here on which nodes each capsule is safe: it may only be missed when all of them
are gone.

What it doesn't know: how nodes come and go (`core.simnodes`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.simagents import SimAgent
from everstep.core.simscript import Capsule
from everstep.core.simterms import Seat
from everstep.types import Position

if TYPE_CHECKING:
    from everstep.core.simulate import Simulation
    from everstep.core.simworker import SimWorker


@dataclass(eq=False, slots=True)
class SimLink:
    """A connection of a node with a coordinator."""

    seat: Seat
    open: bool = True


@dataclass(eq=False, slots=True, kw_only=True)
class SimNode:
    """One agent and its workers. `up`: it can be reached. `mute`: now that it can't be, nothing
    that it says arrives. `fallen`: it is no more; `retired`: its agent is another node now. `link`:
    its newest connection. `heard_s`: when the newest of what concerns the node arrives there;
    `kept_s`: likewise at its guardian, of what it deposits; `unkept`: of which ranks that went
    astray, and who waits for it."""

    number: int
    host: str
    domain: str
    ranks: int
    agent: SimAgent
    up: bool = True
    mute: bool = False
    fallen: bool = False
    retired: bool = False
    link: SimLink | None = None
    heard_s: float = 0.0
    kept_s: float = 0.0
    unkept: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    workers: list[SimWorker] = field(default_factory=list)

    @property
    def heard(self) -> bool:
        """Whether what its workers say arrives."""
        return self.up or not self.mute

    @property
    def lives(self) -> bool:
        """Its agent is still this node."""
        return not self.fallen and not self.retired


class SimKeeping:
    """What all nodes of one schedule keep."""

    def __init__(self, sim: Simulation, nodes: dict[int, SimNode]) -> None:
        self._sim = sim
        self._all = nodes
        self._safe_on: dict[tuple[int, Position], set[SimNode]] = {}  # of capsules

    # ------------------------------------------------------------------ between nodes

    def keep(self, worker: SimWorker, capsule: Capsule) -> None:
        """A worker's own agent keeps its capsule."""
        if worker.home is not None:
            worker.home.agent.kept.keep(worker.rank, capsule)

    def when_kept(self, worker: SimWorker, then: Callable[[], None]) -> None:
        """`then` when the guardian has what was kept."""
        node = worker.home
        assert node is not None
        if node.agent.guardian is None:
            then()
        else:
            self.deposit(node, worker.rank, worker.expect(then))

    def deposit(self, node: SimNode, rank: int, then: Callable[[], None]) -> None:
        guardian = self._guardian(node)
        kept, said = node.agent.kept.part(rank), node.agent.protected.get(rank)
        if guardian is None:
            return

        def arrive() -> None:
            if node.up and node.lives and guardian.up and guardian.lives:
                guardian.agent.deposit(rank, node.number, kept, said)
                for position in kept.positions(rank):
                    self._safe_on.setdefault((rank, position), set()).update((node, guardian))
                then()
            else:
                node.unkept.append((rank, then))

        node.kept_s = max(self._sim.now_s + self._sim.delay_s(), node.kept_s)
        self._sim.at(node.kept_s, arrive)

    def again(self, node: SimNode) -> None:
        """It can be reached again; what could not be kept is deposited once more."""
        for other in self._all.values():
            if node in (other, self._guardian(other)):
                unkept, other.unkept = other.unkept, []
                for rank, then in unkept:
                    self.deposit(other, rank, then)

    def _guardian(self, node: SimNode) -> SimNode | None:
        return self._all.get(-1 if node.agent.guardian is None else node.agent.guardian)

    # ------------------------------------------------------------------ what a coordinator does

    def tell_peers(self, seat: Seat, order: do.SendPeers) -> None:
        """Nodes hear that a world begins, before anything else of it."""
        peers = tuple(sorted(order.guardians))
        for number, guardian in order.guardians.items():
            seat.spend()
            node = self._all[number]
            link = node.link
            if link is None or link.seat is not seat or not link.open:
                continue
            heard_s = max((worker.heard_s for worker in node.workers), default=0.0)
            usual_s = self._sim.now_s + self._sim.delay_s()
            node.heard_s = max(usual_s, heard_s, node.heard_s)
            self._sim.at(node.heard_s, partial(self._hear_peers, node, link, guardian, peers))

    def _hear_peers(
        self, node: SimNode, link: SimLink, guardian: int | None, peers: tuple[int, ...]
    ) -> None:
        if not link.open or not node.up or not node.lives:
            return
        changed = guardian != node.agent.guardian
        node.agent.told_peers(guardian, peers)
        if changed:
            for rank in sorted(node.agent.own):
                self.deposit(node, rank, lambda: None)

    def reclaim(self, seat: Seat, order: do.Reclaim) -> None:
        """Nodes are asked what they keep, and answer behind all that their workers have said."""
        for number in order.nodes:
            seat.spend()
            node = self._all[number]
            if node.link is not None and node.link.seat is seat:
                sim = self._sim
                sim.after(sim.delay_s(), partial(self._tell_kept, node, node.link, order))

    def _tell_kept(self, node: SimNode, link: SimLink, order: do.Reclaim) -> None:
        if not link.open or not node.up or not node.lives:
            return
        parts = {rank: node.agent.kept.part(rank) for rank in order.ranks}
        answer, sim = ev.Reclaimed(node=node.number, turn=order.turn), self._sim

        def arrive() -> None:
            if link.open and link.seat.alive and node.heard:
                for rank, part in parts.items():
                    link.seat.capsules.merge(part, rank)
                sim.handle(link.seat, answer)

        sim.after(sim.delay_s(), arrive)

    # ------------------------------------------------------------------ what the onlooker knows

    @property
    def _seat(self) -> Seat:
        return self._sim.terms.seat

    def knows(self, rank: int) -> bool:
        """Whether a node that the newest coordinator may use knows what `rank` said in set-up."""
        return any(rank in self._all[n].agent.protected for n in self._seat.usable)

    def is_lost(self, rank: int, position: Position) -> bool:
        """Whether what belongs to `rank` alone at `position` was safe, and all that had it are
        gone."""
        holders = self._safe_on.get((rank, position), ())
        gone = [not n.lives or not n.up or n.number in self._seat.gone for n in holders]
        return bool(gone) and all(gone)
