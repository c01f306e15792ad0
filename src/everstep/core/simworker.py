"""A worker that is not there: it speaks the worker's side of the protocol in virtual time.

Theory of operation. Its model is one number; `state_after(k)` is what it must be after step k, each
step mapping the one before it. A step is one collective: nobody commits it before every rank of the
generation has contributed, and each hears of its completion at its own moment, so a death in
between leaves some committed and others not. With `fenced`, who has contributed stands in the fence
with reduced gradients and can advance; without, who has not heard of the completion cannot. An
update cut by a stop may leave the state torn. Whatever it does takes a random time, and the stop
cancels what it was about to do (`_epoch`).

What it doesn't know: the coordinator, which it meets through `Simulation` only.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from everstep.core import events as ev
from everstep.types import Cause, CauseKind, Decision, Holding, Plan

if TYPE_CHECKING:
    from everstep.core.simulate import Simulation

_MODULUS = (1 << 61) - 1
_GARBAGE = -1


def step_forward(state: int, step: int) -> int:
    """The update of `step`; no other order of steps gives the same state."""
    return (state * 6364136223846793005 + step) % _MODULUS


def state_after(step: int) -> int:
    """What every rank must hold after `step` committed steps."""
    state = 1
    for k in range(1, step + 1):
        state = step_forward(state, k)
    return state


class Place(enum.StrEnum):
    """Where in its script a worker is."""

    SET_UP = "set-up"  # also a joiner's, until it has parked for the first time
    STEP = "step"
    CLOSING = "closing"  # it has left the loop and waits for the others
    TAIL = "tail"  # the script after the loop
    FINISHED = "finished"
    PARKED = "parked"
    REGROUPING = "regrouping"


class SimWorker:
    """One incarnation of a rank."""

    def __init__(
        self, sim: Simulation, rank: int, incarnation: int, generation: int, joiner: bool
    ) -> None:
        self.sim = sim
        self.rank, self.incarnation, self.joiner = rank, incarnation, joiner
        self.generation = generation
        self.alive = True
        self.dying = False  # the coordinator has asked for its death
        self.will_hang = False
        self.hung = False
        self.place = Place.SET_UP
        self.has_state = not joiner
        self.state, self.committed, self.torn = state_after(0), 0, False
        self.gradients = 0  # the step for which it has all gradients reduced, if it kept them
        self.updating = False
        self.bad_receipt = False
        self._told_closed = False
        self._finished = False
        self._stop: int | None = None
        self._epoch = 0
        self.shard = f"s{rank % sim.schedule.shards}"

    @property
    def holding(self) -> Holding:
        """What it truly holds."""
        ahead = self.gradients == self.committed + 1 and not self.torn
        return Holding(
            committed=self.committed, torn=self.torn, can_advance=ahead, shard=self.shard
        )

    # ------------------------------------------------------------------ time and speech

    def _later(self, act: Callable[[], None], *, sticky: bool = False) -> None:
        """Do `act` after a while, unless a stop comes in between (`sticky`: even then)."""
        epoch = self._epoch

        def run() -> None:
            if self.alive and not self.hung and (sticky or epoch == self._epoch):
                act()

        self.sim.after(self.sim.delay_s(), run)

    def expect(self, act: Callable[[], None]) -> Callable[[], None]:
        """What is to be called when that comes for which this worker now begins to wait: it hears
        of it after a while and does `act`, unless a stop has come before."""
        epoch = self._epoch
        return lambda: self._later(act) if epoch == self._epoch else None

    def deaf(self, awaited: bool) -> bool:
        """Whether it hangs: it was to, and now a message has come whose answer is `awaited`."""
        self.hung = self.hung or (self.will_hang and awaited)
        return self.hung

    def _say(self, event: ev.WorkerEvent) -> None:
        self.sim.deliver(self, event)

    # ------------------------------------------------------------------ set-up and joining

    def born(self) -> None:
        """Its first line runs."""
        self._later(self._start, sticky=True)

    def _start(self) -> None:
        self._say(ev.Started(rank=self.rank, incarnation=self.incarnation, pid=1))
        self._later(self._protect, sticky=True)

    def _protect(self) -> None:
        digests = {"w": "7" * 16}
        self._say(
            ev.Protected(
                rank=self.rank,
                incarnation=self.incarnation,
                shard=self.shard,
                manifest="m",
                digests=digests,
            )
        )

    def on_go(self) -> None:
        """`protect` returns."""
        if self.joiner:
            self._later(
                lambda: self._say(ev.Waiting(rank=self.rank, incarnation=self.incarnation)),
                sticky=True,
            )
        else:
            self._begin_step()

    def on_position(self) -> None:
        """A joiner knows its peers' step; it rehearses the next one and parks."""
        self.torn = True
        self._later(lambda: self._park(self.generation), sticky=True)

    # ------------------------------------------------------------------ steps

    def _begin_step(self) -> None:
        step = self.committed + 1
        if step > self.sim.schedule.steps:
            self._leave_loop()
            return
        self.place, self.updating = Place.STEP, False
        self._later(lambda: self._contribute(step))

    def _contribute(self, step: int) -> None:
        if self.sim.schedule.fenced:
            self.gradients = step
        self.sim.world(self).gather(self, ("step", step), lambda: self._reduced(step))

    def _reduced(self, step: int) -> None:
        """Every rank has contributed, and this one has heard of it."""
        self.gradients, self.updating = step, True
        self._later(lambda: self._commit(step))

    def _commit(self, step: int) -> None:
        self._update(step)
        self._begin_step()

    def _update(self, step: int) -> None:
        self.sim.check(self.committed == step - 1 and not self.torn, f"{self} updates to {step}")
        self.state, self.committed = step_forward(self.state, step), step
        self.updating = False
        self.sim.check(self.state == state_after(step), f"{self} holds another state at {step}")
        self._say_committed()

    def _say_committed(self) -> None:
        self._say(
            ev.Committed(
                rank=self.rank,
                incarnation=self.incarnation,
                generation=self.generation,
                step=self.committed,
                at_s=self.sim.now_s,
            )
        )

    # ------------------------------------------------------------------ faults

    def die(self) -> None:
        """SIGKILL, at this very moment."""
        self.alive = False
        self._epoch += 1
        self.sim.buried(self)

    def fail(self, kind: CauseKind, signature: str) -> None:
        """The attempt fails and the process lives; it says so and waits for the stop."""
        if self.place not in (Place.STEP, Place.REGROUPING) or self._stop is not None:
            return
        self._epoch += 1
        if self.updating and kind is CauseKind.EXCEPTION:
            self.torn, self.updating = True, False
        self._say(
            ev.Faulted(
                rank=self.rank,
                incarnation=self.incarnation,
                generation=self.generation,
                step=self.committed + 1,
                cause=Cause(kind=kind, text=f"{kind} on {self}", signature=signature),
            )
        )

    def on_peer_died(self) -> None:
        """A peer of this generation has died: its collectives may or may not complete here."""
        if self.place not in (Place.STEP, Place.REGROUPING) or self.updating:
            return
        chance = self.sim.random.random()
        if chance < 0.4:
            self._epoch += 1  # it hangs
        elif chance < 0.7:
            self._later(lambda: self.fail(CauseKind.PEER, "connection reset"))

    # ------------------------------------------------------------------ stop and regroup

    def on_stop(self, generation: int) -> None:
        """Abort, run to the boundary, park."""
        self._stop = generation
        if self.place is Place.TAIL:
            return  # it parks where the script ends
        self._epoch += 1
        if self.updating:
            self._cut_update()
        self._later(lambda: self._park(generation))

    def _cut_update(self) -> None:
        """The stop finds an update under way: it ends, is cut, or had not begun."""
        chance = self.sim.random.random()
        if chance < 0.5:
            self._update(self.committed + 1)
        elif chance < 0.6:
            self.torn, self.updating = True, False

    def _park(self, generation: int) -> None:
        self.place, self.updating = Place.PARKED, False
        self._stop = generation
        holding = self.holding
        if self.bad_receipt:
            # It lies, as a worker would that does not know better: the coordinator must not.
            holding = Holding(committed=holding.committed, shard=self.shard)
        self._say(
            ev.Parked(
                rank=self.rank,
                incarnation=self.incarnation,
                generation=generation,
                holding=holding,
            )
        )

    def on_regroup(self, generation: int, plan: Plan) -> None:
        """Build the communicators of `generation` and follow the plan."""
        self.sim.check(self.place is Place.PARKED, f"{self} regroups though it is {self.place}")
        self.sim.check(generation > self.generation or self.joiner, f"{self} in an old world")
        self.generation, self._stop = generation, None
        self.place, self.joiner = Place.REGROUPING, False
        built = ("build", generation)
        self._later(lambda: self.sim.world(self).gather(self, built, lambda: self._built(plan)))

    def _built(self, plan: Plan) -> None:
        self._say(
            ev.Regrouped(rank=self.rank, incarnation=self.incarnation, generation=self.generation)
        )
        part = plan.ranks[self.rank]
        if part.decision is Decision.FETCH:
            self.torn, self.has_state = True, True
            self.sim.world(self).fetch(self, part.sources, plan.step, self._fetched)
            return
        if part.decision is Decision.ADVANCE:
            self.sim.check(self.gradients == plan.step, f"{self} advances without gradients")
            self._update(plan.step)
        where = f"{self} keeps {self.committed} (torn: {self.torn}), not {plan.step}"
        self.sim.check(self.committed == plan.step and not self.torn, where)
        self.sim.world(self).serve(self, part.sinks, self._restored)

    def _fetched(self, state: int, step: int) -> None:
        if self.sim.take_bad_receipt():
            self.state, self.committed, self.bad_receipt = _GARBAGE, step, True
            self._say_restored(ok=False)
            return
        self.state, self.committed, self.torn, self.bad_receipt = state, step, False, False
        self.sim.check(state == state_after(step), f"{self} fetched another state for {step}")
        if self.sim.random.random() < 0.5:
            self._say_committed()  # its script has made the call of the plan's step again
        self._restored()

    def _restored(self) -> None:
        self._say_restored(ok=True)
        if self.committed < self.sim.schedule.steps:
            self._begin_step()
        elif not self._told_closed:
            self._leave_loop()
        else:
            self.place = Place.FINISHED if self._finished else Place.TAIL

    def _say_restored(self, *, ok: bool) -> None:
        self._say(
            ev.Restored(
                rank=self.rank,
                incarnation=self.incarnation,
                generation=self.generation,
                ok=ok,
                nbytes=8,
            )
        )

    # ------------------------------------------------------------------ the end

    def _leave_loop(self) -> None:
        self.place = Place.CLOSING
        self._say(
            ev.Closing(
                rank=self.rank,
                incarnation=self.incarnation,
                generation=self.generation,
                step=self.committed,
            )
        )

    def on_closed(self) -> None:
        """All ranks have left their loops; the script goes on."""
        self._told_closed = True
        self.sim.check(self.place is Place.CLOSING, f"{self} is told closed while {self.place}")
        self.place = Place.TAIL
        self._later(self._finish, sticky=True)

    def _finish(self) -> None:
        self._finished = True
        self.place = Place.FINISHED
        self._say(ev.Finished(rank=self.rank, incarnation=self.incarnation))
        if self._stop is not None:
            stop = self._stop
            self._later(lambda: self._park(stop))

    def __repr__(self) -> str:
        return f"rank {self.rank}.{self.incarnation} of generation {self.generation}"
