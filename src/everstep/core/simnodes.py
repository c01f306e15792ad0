"""The nodes of a simulated job: they join, fall, are cut off, and come back under a new number.

Theory of operation. A node that fell takes its processes with it; one that is cut off lives on with
them, hears nothing, and may or may not be heard until the coordinator is told that it is lost, and
afterwards. Of both, what was on its way at that moment arrives, or all of it is gone. A node that
the coordinator dismisses ends its processes when it hears of it, and may come back.

The onlooker knows here which nodes the coordinator may use: those of which it has been told that
they joined, and not that they are lost. Each slot is held by one of them, and each of them holds at
most one.

What it doesn't know: why a spare was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.nodes import Layout
from everstep.types import Cause, CauseKind

if TYPE_CHECKING:
    from everstep.core.simulate import Simulation
    from everstep.core.simworker import SimWorker

_AGES = 1000  # of usual delays, after which a slow node comes back


@dataclass(eq=False, slots=True, kw_only=True)
class SimNode:
    """One agent and its workers. `up`: it can be reached. `mute`: now that it can't be, nothing
    that it says arrives."""

    number: int
    host: str
    domain: str
    up: bool = True
    mute: bool = False
    workers: list[SimWorker] = field(default_factory=list)

    @property
    def heard(self) -> bool:
        """Whether what its workers say arrives."""
        return self.up or not self.mute


class SimNodes:
    """The nodes of one schedule; none where the schedule has none."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._all: dict[int, SimNode] = {}
        self._joined: set[int] = set()  # as the coordinator has been told
        self._gone: set[int] = set()  # likewise, or dismissed by it
        self._holder: dict[int, int] = {}  # slot to node, by the spawns
        self._slot: dict[int, int] = {}  # and back

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
        node = SimNode(number=number, host=host, domain=f"d{int(host[1:]) // 2}")
        self._all[number] = node

        def register() -> None:
            if node.up:
                if ranks >= schedule.node_size:
                    self._joined.add(number)
                self._sim.notify(
                    ev.NodeJoined(node=number, host=host, domain=node.domain, ranks=ranks)
                )

        self._sim.after(self._sim.delay_s(), register)
        if self._sim.random.random() < 0.1:
            self._sim.after(20 * self._sim.delay_s(), register)  # it comes twice

    def befall(self, kind: str) -> str:
        """A fault of nodes hits one that it can hit. Returns whom: "holder", "joiner" or "spare";
        "" for nobody."""
        draw = self._sim.random
        if kind == "late":
            few = draw.random() < 0.1 and self._sim.schedule.node_size > 1
            self._come(self._sim.schedule.node_size - few)
            return "spare"
        up = [node for node in self._all.values() if node.up and node.number not in self._gone]
        pool = [node for node in up if (self._is_spare(node) == (kind == "spare"))]
        joining = [node for node in pool if any(w.alive and w.joiner for w in node.workers)]
        if joining and draw.random() < 0.5:
            pool = joining
        if not pool:
            return ""
        node = draw.choice(pool)
        who = "spare" if self._is_spare(node) else "joiner" if node in joining else "holder"
        self.fell(node, cut=kind == "cut")
        return who

    def fell(self, node: SimNode, *, cut: bool = False) -> None:
        """A node is gone, or is `cut` off; some time later that is noticed."""
        node.up, node.mute = False, self._sim.random.random() < 0.5
        for worker in list(node.workers):
            if worker.alive and cut:
                self._sim.peers_notice(worker)
            elif worker.alive:
                worker.die()
        text = "its agent does not answer" if cut else "its agent's connection was closed"
        lost = ev.NodeLost(node=node.number, cause=Cause(kind=CauseKind.NODE, text=text))

        def notice() -> None:
            self._gone.add(node.number)
            self._sim.notify(lost)

        self._sim.after(3 * self._sim.delay_s(), notice)
        if self._sim.random.random() < 0.2:
            self._sim.after(30 * self._sim.delay_s(), notice)  # it is told twice

    # ------------------------------------------------------------------ what the coordinator does

    def spawned(self, order: do.Spawn) -> SimNode | None:
        """A worker is to run on a node; None where there are none."""
        if not self._sim.schedule.nnodes:
            return None
        number, slot = order.node, order.rank // self._sim.schedule.node_size
        usable = number in self._joined and number not in self._gone
        self._sim.check(usable, f"rank {order.rank} is spawned on node {number}, which is lost")
        before = self._holder.get(slot, number)
        moved = before == number or before in self._gone
        self._sim.check(moved, f"slot {slot} is held by node {before}, and now by {number}")
        self._holder[slot] = number
        held = self._slot.setdefault(number, slot)
        self._sim.check(held == slot, f"node {number} holds the slots {held} and {slot}")
        return self._all[number]

    def dismissed(self, order: do.Dismiss) -> None:
        """A node hears some time, perhaps long afterwards, that it has no part in the job."""
        node, draw = self._all[order.node], self._sim.random
        self._gone.add(node.number)

        def hear() -> None:
            for worker in node.workers:
                if worker.alive and not worker.stuck:
                    worker.die(by_us=True)
            if draw.random() < self._sim.schedule.returns:
                self._come(self._sim.schedule.node_size, node.host)

        late = draw.random() < 0.5
        self._sim.after((_AGES if late else 10) * self._sim.delay_s(), hear)

    # ------------------------------------------------------------------ what the onlooker knows

    def usable(self, worker: SimWorker) -> bool:
        """Whether `worker` may be taken to be alive, as far as its node is concerned."""
        return worker.home is None or worker.home.number not in self._gone

    def _is_spare(self, node: SimNode) -> bool:
        return node.number not in self._slot

    @property
    def usable_nodes(self) -> set[int]:
        """The nodes that the coordinator may use."""
        return self._joined - self._gone

    @property
    def spares(self) -> set[int]:
        """Those of them that hold no slot."""
        return self.usable_nodes - self._slot.keys()
