"""The coordinators of a simulated job, one after the other.

Theory of operation. A coordinator dies between two of the things that one `handle` asks for, so
that of a message to many only some are sent. What was sent may still arrive, or nothing of it does.
Some time later the next one begins, with what the journal tells, a higher term, and a clock of its
own. Or it begins while the last one lives, which was only taken for dead: that one goes on with the
agents that have not turned to the new one yet, until it finds that it may not write any more.

The onlooker knows here what each coordinator has been told of nodes: which have joined, and which
are gone. Nobody is disturbed where nothing was wrong, and nobody is told anything by a return that
disturbs nobody.

What it doesn't know: how agents live without a coordinator (`core.simagents`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from everstep.core import actions as do
from everstep.core.coordinator import Coordinator
from everstep.core.job import Phase
from everstep.core.past import recall
from everstep.core.simscript import Capsules
from everstep.types import TERM_STRIDE

if TYPE_CHECKING:
    from everstep.core.simulate import Simulation

_QUIET = (do.Record, do.SendClosed, do.SendBye, do.End)


class GoneError(Exception):
    """The coordinator that acts dies at this very moment."""


@dataclass(eq=False, slots=True, kw_only=True)
class Seat:
    """One coordinator. `ahead_s`: its clock, against the onlooker's. `deposed`: another one has
    begun. `breath`: how much more it does before it dies, if it is to. `joined`, `gone`: nodes, as
    it has been told. `holder`, `slot`: slot to node, and back."""

    term: int
    core: Coordinator
    ahead_s: float = 0.0
    alive: bool = True
    deposed: bool = False
    breath: int | None = None
    newest_stop: int = -1
    capsules: Capsules = field(default_factory=Capsules)
    joined: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    holder: dict[int, int] = field(default_factory=dict)
    slot: dict[int, int] = field(default_factory=dict)
    _now_s: float = 0.0

    def clock_s(self, now_s: float) -> float:
        """What its clock shows."""
        self._now_s = max(self._now_s, now_s + self.ahead_s)
        return self._now_s

    def wake(self) -> None:
        """Its clock shows its deadline, or more."""
        due_s = self.core.next_deadline_s
        self._now_s = self._now_s if due_s is None else max(self._now_s, due_s)

    @property
    def due_s(self) -> float | None:
        """Its deadline, on the onlooker's clock."""
        due_s = self.core.next_deadline_s if self.alive else None
        return None if due_s is None else due_s - self.ahead_s

    def spend(self) -> None:
        """It does one more thing. Raises GoneError when that is one too many."""
        if self.breath is not None:
            self.breath -= 1
            if self.breath < 0:
                raise GoneError

    @property
    def usable(self) -> set[int]:
        """The nodes that it may use."""
        return self.joined - self.gone


class SimTerms:
    """All coordinators of one job. `seat`: the newest."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.seats = [self._new(0)]
        self._calm_with: int | None = None  # faults, when all was well at the death

    @property
    def seat(self) -> Seat:
        """The newest, alive or not."""
        return self.seats[-1]

    @property
    def acting(self) -> Iterable[Seat]:
        """Those that live."""
        return (seat for seat in self.seats if seat.alive)

    def _new(self, term: int) -> Seat:
        schedule = self._sim.schedule
        core = Coordinator(schedule.world_size, self._sim.policy, self._sim.nodes.layout)
        ahead_s = 0.0 if term == 0 else self._sim.random.randrange(-1000, 1000) * 64.0
        return Seat(term=term, core=core, ahead_s=ahead_s)

    # ------------------------------------------------------------------ faults

    def befall(self, kind: str) -> bool:
        """A fault of coordinators hits the newest one. Whether it did."""
        seat, draw = self.seat, self._sim.random
        if not seat.alive or seat.breath is not None:
            return False
        if kind == "depose":
            self._note_calm()
            seat.deposed = True
            self._begin_next()
        elif draw.random() < 0.5:
            seat.breath = draw.randrange(3 + 2 * self._sim.schedule.world_size)
        else:
            self.die(seat)
        return True

    def die(self, seat: Seat) -> None:
        """A coordinator is gone; if it is the newest, another comes some time."""
        newest = seat is self.seat
        if newest:
            self._note_calm()
        seat.alive = False
        self._sim.nodes.coordinator_died(seat)
        if newest:
            usual = self._sim.random.choice((1, 5, 100))
            self._sim.after(usual * self._sim.delay_s(), self._begin_next)

    def _begin_next(self) -> None:
        sim = self._sim
        seat = self._new(len(self.seats))
        self.seats.append(seat)
        sim.handle(seat, recall(sim.records).resumed(seat.term))
        sim.nodes.coordinator_began(seat)

    # ------------------------------------------------------------------ what must hold

    def _note_calm(self) -> None:
        self._calm_with = self._sim.faults.fired if self._all_well() else None

    def _all_well(self) -> bool:
        workers = self._sim.workers.values()
        size = self._sim.schedule.world_size
        worlds = {worker.generation for worker in workers}
        return len(workers) == size and len(worlds) == 1 and all(w.well for w in workers)

    def judge(self, actions: list[do.Action]) -> None:
        """A return disturbs nobody where nothing was wrong, and where it says so."""
        for action in actions:
            if isinstance(action, do.Record) and action.record.event == "coordinator_resumed":
                self._judge_return(action.record.fields, actions)

    def _judge_return(self, line: dict[str, Any], actions: list[do.Action]) -> None:
        sim, undisturbed = self._sim, line["undisturbed"]
        well = self._calm_with == sim.faults.fired and self._all_well() and not line["missing"]
        sim.check(undisturbed or not well, f"nothing was wrong, and ranks are disturbed: {line}")
        quiet = all(isinstance(action, _QUIET) for action in actions)
        sim.check(quiet or not undisturbed, f"ranks are disturbed by {actions}")

    def check_number(self, seat: Seat, number: int) -> None:
        """What a coordinator numbers anew lies in its own range."""
        own = number // TERM_STRIDE == seat.term
        self._sim.check(own, f"the coordinator of term {seat.term} gives the number {number}")

    @property
    def reconvening(self) -> bool:
        """There is no coordinator, or none that knows yet how the job is found."""
        return not self.seat.alive or self.seat.core.phase is Phase.RECONVENING
