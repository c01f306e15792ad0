"""What befalls a simulated job: the faults of its schedule, each put where its moment finds it.

Theory of operation. The next fault comes so many events after the one before it, so that any
boundary between two events is a place for it. It hits a random living worker, in a recovery often a
joiner. A fault that has to do with a message (`lose`, `twice`) waits on its worker for the next one
that may carry it: capsules are written to the worker's own agent and are never lost, and nothing is
lost or stands still in a set-up of all ranks, since the coordinator can't tell that from a slow
script and ends the job in the end.

Who stands still is found by the agents' look at progress: when nothing moves any more, they say so
to the coordinator. Where it can do nothing (all stand still, or a message is lost that no deadline
waits for), whoever runs the job kills one. What befalls a node is done by `core.simnodes`.

What it doesn't know: what comes of it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from everstep.core import events as ev
from everstep.core.hang import Evidence, Stance
from everstep.core.simschedule import COORDINATOR_FAULTS, NODE_FAULTS
from everstep.core.simworker import ACTING, Place, SimWorker
from everstep.types import CauseKind

if TYPE_CHECKING:
    from everstep.core.simulate import Simulation

_LATE = 10  # how many usual delays a message that comes twice may come late


class SimFaults:
    """The faults of one schedule. `hits`: how often each kind hit, with the job's phase and the
    worker's place."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._left = list(reversed(sim.schedule.faults))
        self._after = self._left[-1][0] if self._left else -1
        self._bad_receipts = 0
        self._perturbed: dict[SimWorker, str] = {}  # by the fault that waits for its next message
        self.corrupted: Counter[int] = Counter()  # fetches, by rank
        self._said: set[tuple[int, int]] = set()  # that they stand still
        self.lost = 0
        self.fired = 0
        self.hits: Counter[tuple[str, str, str]] = Counter()

    # ------------------------------------------------------------------ faults of processes

    def next(self) -> None:
        """An event has passed; the next fault may be due."""
        if not self._left:
            return
        if self._after > 0:
            self._after -= 1
            return
        _, kind = self._left.pop()
        self._after = self._left[-1][0] if self._left else -1
        draw = self._sim.random
        if kind in COORDINATOR_FAULTS:
            phase = self._sim.phase
            if self._sim.terms.befall(kind):
                self.fired += 1
                self.hits[kind, phase, ""] += 1
            return
        if kind in NODE_FAULTS and kind != "stuck":
            phase = self._sim.phase  # before it
            if who := self._sim.nodes.befall(kind):
                self.fired += 1
                self.hits[kind, phase, who] += 1
            return
        living = self._living()
        joiners = [worker for worker in living if worker.joiner]
        pool = joiners if joiners and draw.random() < 0.4 else living
        if pool:
            self._hit(kind, draw.choice(pool), draw)

    def _living(self) -> list[SimWorker]:
        """The newest process of each rank, if it lives and can be reached."""
        return [w for w in self._sim.workers.values() if w.alive and w.in_reach]

    def _hit(self, kind: str, worker: SimWorker, draw: random.Random) -> None:
        setting_up = worker.place is Place.SET_UP
        if kind in ("hang", "stall", "lose", "stuck") and setting_up and not worker.joiner:
            return
        self.fired += 1
        who = "joiner" if worker.joiner else worker.place.value
        self.hits[kind, self._sim.phase, who] += 1
        signature = f"fault {self.fired}"
        match kind:
            case "kill":
                worker.die()
            case "node":
                self._fell_node(worker)
            case "raise" if setting_up:
                worker.die()
            case "raise":
                worker.fail(CauseKind.EXCEPTION, signature)
            case "peer":
                worker.fail(CauseKind.PEER, signature)
            case "replace":
                worker.fail(CauseKind.WORKER, signature)
            case "receipt":
                self._bad_receipts += 1
            case "hang":
                worker.will_hang = True
            case "stall":
                worker.hung = True
            case "stuck":
                worker.hung = worker.stuck = True
            case "lose" | "twice":
                self._perturbed[worker] = kind
            case _:
                raise ValueError(f"there is no fault {kind!r}")

    def _fell_node(self, worker: SimWorker) -> None:
        size = self._sim.schedule.node_size
        first = worker.rank - worker.rank % size
        for rank in range(first, first + size):
            peer = self._sim.workers.get(rank)
            if peer is not None and peer.alive:
                peer.die()

    def take_bad_receipt(self, rank: int) -> bool:
        """Whether the fetch of `rank` that has just ended was corrupted; each fault corrupts
        one."""
        if self._bad_receipts == 0:
            return False
        self._bad_receipts -= 1
        self.corrupted[rank] += 1
        return True

    # ------------------------------------------------------------------ faults of messages

    def passes(self, worker: SimWorker, up: bool, again: Callable[[], None]) -> bool:
        """Whether a message on a worker's channel arrives. `up`: the worker speaks. `again`:
        delivers it once more, for one that comes twice."""
        kind = self._perturbed.get(worker)
        if kind is None or (kind == "twice" and not up):
            return True
        del self._perturbed[worker]
        if kind == "twice":
            self._sim.after(_LATE * self._sim.delay_s(), again)
            return True
        self.lost += 1
        worker.silent = True
        return False

    # ------------------------------------------------------------------ who stands still

    def silent(self) -> ev.Silent | None:
        """What the agents say when nothing moves: that somebody stands still, if somebody does of
        whom they have not said so yet."""
        stalled = {worker.identity for worker in self._living() if worker.stalled}
        if stalled <= self._said:
            return None
        self._said |= stalled
        return ev.Silent(evidence=self.evidence())

    def evidence(self) -> tuple[Evidence, ...]:
        """What each living rank shows of itself."""
        return tuple(
            Evidence(
                rank=worker.rank,
                incarnation=worker.incarnation,
                stance=Stance.WORKING if worker.place in ACTING else Stance.APART,
                where=f"in {worker.place}",
                step=worker.train.position[0],
                generation=worker.generation,
                stopped=worker.hung,
            )
            for worker in self._living()
        )

    def end_one(self) -> bool:
        """Nothing will move by itself any more: whoever runs the job kills one that stands still,
        or whose message was lost. False when all look well."""
        for worker in self._living():
            if worker.silent or worker.hung:
                if worker.stuck and worker.home is not None:
                    self._sim.nodes.fell(worker.home)  # nothing less helps
                else:
                    worker.die()
                return True
        return False
