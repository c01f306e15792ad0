"""What a simulated agent knows of its workers, keeps for them, and does without a coordinator.

Theory of operation. The agent sees all that is said to and by its workers, and keeps of it what a
coordinator that begins anew must know. What belongs to one rank alone it has its *guardian* keep
too; a capsule is safe when that has answered. When its connection ends the agent lets its workers
go on. It has them stand still when something happens that a coordinator would answer with a stop.
What it keeps for another node is given up in the second world that begins without that node.

What it doesn't know: connections and time (`core.simnodes`), and its peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from everstep.core import events as ev
from everstep.core.actions import Spawn
from everstep.core.simscript import Capsules
from everstep.types import Plan, Position

_MOST_MISSED = 2
Identity = tuple[int, int]


@dataclass(slots=True, kw_only=True)
class Life:
    """One worker, as its agent knows it. `planned`: where the regroup leads that it was told."""

    generation: int
    joining: bool
    settled: bool = False
    stopped: int = -1
    position: Position = (0, 0)
    planned: Position = (0, 0)
    left_at: int | None = None
    finished: bool = False
    closed: bool = False
    bye: bool = False

    def stop(self, generation: int) -> None:
        """It was told to stop, or has failed."""
        self.stopped = max(self.stopped, generation)
        self.settled = self.settled and generation < self.generation

    def go(self) -> None:
        """It was told to go."""
        self.settled = self.settled or not self.joining

    def regroup(self, generation: int, plan: Plan) -> None:
        """It was told to regroup."""
        self.generation, self.joining, self.settled = generation, False, False
        self.planned = plan.position
        self.left_at = self.left_at if self.closed else None

    def close(self) -> None:
        """It was told that the closing fence is open."""
        self.closed = True

    def dismiss(self) -> None:
        """It was told that it may exit."""
        self.bye = True

    def said(self, event: ev.WorkerEvent) -> None:
        """It has said something."""
        match event:
            case ev.Committed(step=step, sections=sections):
                self.position = step, sections
            case ev.Parked(generation=generation, holding=holding):
                self.stop(generation)
                if not holding.torn and not self.joining:
                    self.position = max(self.position, holding.position)
            case ev.Faulted(generation=generation):
                self.stop(generation)
            case ev.Restored(generation=generation, ok=True):
                self.settled = generation == self.generation > self.stopped
                self.position = self.planned
            case ev.Closing(step=step):
                self.position, self.left_at = max(self.position, (step, 0)), step
            case ev.Finished():
                self.finished = True


class SimAgent:
    """The agent of one node. `park`: makes a worker stand still."""

    def __init__(self, park: Callable[[Identity, int], None]) -> None:
        self._park = park
        self.term = -1  # of the newest coordinator that has taken it in
        self.absent = True  # it has none
        self.lives: dict[Identity, Life] = {}
        self.kept = Capsules()
        self.protected: dict[int, ev.Protected] = {}
        self.peers: tuple[int, ...] = ()
        self.guardian: int | None = None
        self._slot: int | None = None
        self._ranks: set[int] = set()
        self._ended: dict[int, ev.Died] = {}
        self._wards: dict[int, int] = {}  # by rank, the node where it is
        self._missed: Counter[int] = Counter()  # worlds that have begun without a ward's node

    # ------------------------------------------------------------------ what happens

    def launched(self, order: Spawn, slot: int, known: Capsules) -> None:
        """A worker is to be forked. `known`: what the coordinator keeps of all ranks."""
        rank = order.rank
        self._slot = slot
        self._ranks.add(rank)
        self._wards.pop(rank, None)
        self._ended.pop(rank, None)
        self.kept.merge(known, rank)
        life = Life(generation=order.generation, joining=order.joiner)
        self.lives[rank, order.incarnation] = life

    def hears(self, event: ev.WorkerEvent) -> None:
        """A worker says something, or dies."""
        identity = event.rank, event.incarnation
        life = self.lives.get(identity)
        if isinstance(event, ev.Died):
            if life is not None and not life.bye:
                del self.lives[identity]
            self._ended[event.rank] = event
        elif life is not None:
            life.said(event)
            if isinstance(event, ev.Protected):
                self.protected[event.rank] = event
        if self.absent and isinstance(event, ev.Died | ev.Faulted):
            self._park_all()

    def told_peers(self, guardian: int | None, peers: tuple[int, ...]) -> None:
        """A world begins: which nodes there are, and who is the guardian."""
        self.guardian, self.peers = guardian, peers
        for rank, node in list(self._wards.items()):
            self._missed[rank] = 0 if node in peers else self._missed[rank] + 1
            if self._missed[rank] >= _MOST_MISSED:
                del self._wards[rank]
                self.kept.forget(rank)
                self.protected.pop(rank, None)

    def deposit(self, rank: int, node: int, kept: Capsules, said: ev.Protected | None) -> None:
        """Keep what `node` has of `rank`."""
        self._wards[rank] = node
        self._missed[rank] = 0
        self.kept.merge(kept, rank)
        if said is not None:
            self.protected[rank] = said

    @property
    def own(self) -> set[int]:
        """The ranks that have had a worker here."""
        return self._ranks

    # ------------------------------------------------------------------ without a coordinator

    def lose_touch(self) -> None:
        """The connection has ended."""
        if not self.absent:
            self.absent = True
            held = {rank for rank, _ in self.lives}
            if held != self._ranks or not all(life.settled for life in self.lives.values()):
                self._park_all()

    def _park_all(self) -> None:
        for identity, life in self.lives.items():
            if life.settled and not life.finished:
                life.stop(life.generation)
                self._park(identity, life.generation)

    def report(self, node: int, host: str, domain: str) -> ev.NodeBack:
        """All that it knows."""
        members = tuple(
            ev.MemberBack(
                rank=rank,
                incarnation=incarnation,
                generation=life.generation,
                joining=life.joining,
                settled=life.settled,
                position=life.position,
                left_at=life.left_at,
                finished=life.finished,
                closed=life.closed,
                bye=life.bye,
            )
            for (rank, incarnation), life in sorted(self.lives.items())
        )
        return ev.NodeBack(
            node=node,
            host=host,
            domain=domain,
            slot=self._slot,
            members=members,
            ended=tuple(self._ended.values()),
            protected=tuple(self.protected.values()),
            peers=self.peers,
        )
