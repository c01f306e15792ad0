"""What the simulated workers of one generation share: collectives, and the way of state from rank
to rank.

Theory of operation. A collective completes when every rank has contributed; each then hears of it
after a random time of its own. A source offers its state until all its sinks have taken it; a sink
takes it when all its sources offer. Whoever is stopped in between hears of nothing (`expect`).

What it doesn't know: deaths. A rank that died before it contributed is missed for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.core.simulate import Simulation
    from everstep.core.simworker import SimWorker


class SimWorld:
    """One generation's shared part of the simulation."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        # By collective: those that have contributed, and how each hears of the completion.
        self._gathered: dict[tuple[str, int], dict[SimWorker, Callable[[], None]]] = {}
        self._offers: dict[int, int] = {}
        self._taken: set[int] = set()
        self._fetching: dict[int, Callable[[], None]] = {}
        self._serving: dict[int, Callable[[], None]] = {}

    def gather(
        self, worker: SimWorker, collective: tuple[str, int], done: Callable[[], None]
    ) -> None:
        """Contribute; when all ranks have, each hears of it after a while (`done`)."""
        gathered = self._gathered.setdefault(collective, {})
        gathered[worker] = worker.expect(done)
        if len(gathered) == self._sim.schedule.world_size:
            for heard in gathered.values():
                heard()

    def serve(self, worker: SimWorker, sinks: Sequence[int], done: Callable[[], None]) -> None:
        """Offer the state to `sinks`; `done` when all have taken it."""
        self._offers[worker.rank] = worker.state
        heard = worker.expect(done)

        def look() -> None:
            if self._taken.issuperset(sinks):
                self._serving.pop(worker.rank, None)
                heard()

        self._serving[worker.rank] = look
        look()
        for waiting in list(self._fetching.values()):
            waiting()

    def fetch(
        self,
        worker: SimWorker,
        sources: Sequence[int],
        step: int,
        done: Callable[[int, int], None],
    ) -> None:
        """Take the state of `step` from all `sources`, when they offer it (`done(state, step)`)."""
        self._sim.check(bool(sources), f"{worker} has nobody to fetch from")

        def take() -> None:
            self._taken.add(worker.rank)
            done(self._offers[sources[0]], step)
            for served in list(self._serving.values()):
                served()

        heard = worker.expect(take)

        def look() -> None:
            if all(source in self._offers for source in sources):
                self._fetching.pop(worker.rank, None)
                states = {self._offers[source] for source in sources}
                self._sim.check(len(states) == 1, f"{worker}'s sources differ")
                heard()

        self._fetching[worker.rank] = look
        look()
