"""What the simulated workers of one generation share: collectives, and the way of state from rank
to rank.

Theory of operation. A collective completes when every rank has contributed; each then hears of it
after a random time of its own. A source offers its state until all its sinks have taken it; a sink
takes it when all its sources offer. Whoever is stopped in between hears of nothing (`expect`). Who
waits for a rank is known by that rank, so an offer costs as much as it has takers.

What it doesn't know: deaths. A rank that died before it contributed is missed for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.core.simulate import Simulation
    from everstep.core.simworker import SimWorker


class _Awaited:
    """Things done once by ranks, and who waits for several of them."""

    def __init__(self) -> None:
        self._done: set[int] = set()
        self._waiting: dict[int, list[tuple[set[int], Callable[[], None]]]] = {}

    def await_all(self, ranks: Sequence[int], then: Callable[[], None]) -> None:
        """Call `then` when all `ranks` are done."""
        missing = {rank for rank in ranks if rank not in self._done}
        if not missing:
            then()
        for rank in missing:
            self._waiting.setdefault(rank, []).append((missing, then))

    def done(self, rank: int) -> None:
        """`rank` is done."""
        self._done.add(rank)
        for missing, then in self._waiting.pop(rank, ()):
            missing.discard(rank)
            if not missing:
                then()


class SimWorld:
    """One generation's shared part of the simulation."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        # By collective: how each rank that has contributed hears of the completion.
        self._gathered: dict[Hashable, dict[SimWorker, Callable[[], None]]] = {}
        self._states: dict[int, int] = {}  # what is offered, by rank
        self._offers = _Awaited()
        self._taken = _Awaited()

    def gather(self, worker: SimWorker, collective: Hashable, done: Callable[[], None]) -> None:
        """Contribute; when all ranks have, each hears of it after a while (`done`)."""
        gathered = self._gathered.setdefault(collective, {})
        gathered[worker] = worker.expect(done)
        if len(gathered) == self._sim.schedule.world_size:
            del self._gathered[collective]
            for heard in gathered.values():
                heard()

    def serve(self, worker: SimWorker, sinks: Sequence[int], done: Callable[[], None]) -> None:
        """Offer the state to `sinks`; `done` when all have taken it."""
        self._states[worker.rank] = worker.train.state
        self._taken.await_all(sinks, worker.expect(done))
        self._offers.done(worker.rank)

    def fetch(self, worker: SimWorker, sources: Sequence[int], done: Callable[[int], None]) -> None:
        """Take the state from all `sources`, when they offer it (`done(state)`)."""
        self._sim.check(bool(sources), f"{worker} has nobody to fetch from")

        def take() -> None:
            self._taken.done(worker.rank)
            done(self._states[sources[0]])

        def offered() -> None:
            states = {self._states[source] for source in sources}
            self._sim.check(len(states) == 1, f"{worker}'s sources differ")
            heard()

        heard = worker.expect(take)
        self._offers.await_all(sources, offered)
