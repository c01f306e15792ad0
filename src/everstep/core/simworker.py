"""A worker that is not there: it speaks the worker's side of the protocol in virtual time.

Theory of operation. Its model is one number, and what its script does with it stands in
`simscript`. A step has a collective before each of its updates, mostly one: nobody commits it
before every rank of the generation has contributed to the last, and each hears of its completion at
its own moment, so a death in between leaves some committed and others not. The capsule goes out
before that last contribution. With `fenced`, who has contributed stands in the fence with reduced
gradients and can advance; without, who has not heard of the completion cannot. A stop that finds a
step half done leaves the state torn, unless the rank has a copy to undo it with. What the attempt
did to the rank's own state is put back when it parks, or, for one that might advance, when it is
told not to. Whatever it does takes a random time, and the stop cancels what it was about to do
(`_epoch`).

What it doesn't know: the coordinator, which it meets through `Simulation` only.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from everstep.core import events as ev
from everstep.core.simscript import (
    Capsule,
    first_half,
    own_after,
    own_forward,
    result_of,
    second_half,
    state_after,
)
from everstep.types import Cause, CauseKind, Decision, Holding, Plan

if TYPE_CHECKING:
    from everstep.core.simulate import Simulation

_GARBAGE = -1


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
        self.own = own_after(rank, 0)  # what no peer holds
        self.updating = False
        self._own_before = self.own
        self._undo: int | None = None  # a copy of the state, in a step of more than one update
        self._half = self._cut = False  # a part of the step's updates is done
        self.bad_receipt = False
        self._told_closed = False
        self._finished = False
        self._stop: int | None = None
        self._epoch = 0
        self.shard = f"s{rank % sim.schedule.shards}"

    @property
    def holding(self) -> Holding:
        """What it truly holds."""
        torn = self.torn or ((self._half or self._cut) and self._undo is None)
        ahead = self.gradients == self.committed + 1 and not torn and not self._cut
        return Holding(committed=self.committed, torn=torn, can_advance=ahead, shard=self.shard)

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
        self._own_before, self._undo, self._half = self.own, None, False
        self._later(lambda: self._contribute(step, 1))

    def _contribute(self, step: int, part: int) -> None:
        """Take part in the collective before update `part` of the step."""
        if part == 1:
            self.own = own_forward(self.rank, self.own, step)
        last = part == self.sim.schedule.updates
        if last:
            result = result_of(self.rank, step)
            self.sim.keep_capsule(self, Capsule(step=step, result=result, own=self.own))
        if last and part == 1 and self.sim.schedule.fenced:
            self.gradients = step
        collective = (f"step, update {part}", step)
        self.sim.world(self).gather(self, collective, lambda: self._reduced(step, part))

    def _reduced(self, step: int, part: int) -> None:
        """Every rank has contributed, and this one has heard of it."""
        self.updating = True
        if part < self.sim.schedule.updates:
            self._undo = self.state if self.sim.schedule.undoes else None
            self._later(lambda: self._update_half(step, part))
        else:
            self.gradients = step if part == 1 else 0
            self._later(lambda: self._commit(step))

    def _update_half(self, step: int, part: int) -> None:
        self.state, self._half, self.updating = first_half(self.state, step), True, False
        self._later(lambda: self._contribute(step, part + 1))

    def _commit(self, step: int) -> None:
        self._update(step)
        self._begin_step()

    def _update(self, step: int) -> None:
        self.sim.check(self.committed == step - 1 and not self.torn, f"{self} updates to {step}")
        half = self.state if self._half else first_half(self.state, step)
        self.state, self.committed = second_half(half, step), step
        self.updating = self._half = False
        self._own_before, self._undo = self.own, None
        self._check_whole()
        self.sim.sees(self, step, result_of(self.rank, step))
        self._say_committed()

    def _check_whole(self) -> None:
        step = self.committed
        self.sim.check(self.state == state_after(step), f"{self} holds another state at {step}")
        self.sim.check(self.own == own_after(self.rank, step), f"{self} lost its own at {step}")

    def _put_back(self) -> None:
        """Leave no trace of an attempt; without a copy to go back to, a half-done update stays."""
        self.own, self.gradients = self._own_before, 0
        if self._undo is not None:
            self.sim.undone += self._half or self._cut
            self.state, self._half, self._cut = self._undo, False, False
        elif self._half or self._cut:
            self.state, self.torn, self._half, self._cut = _GARBAGE, True, False, False
        self._undo = None

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

    def die(self, *, by_us: bool = False) -> None:
        """SIGKILL, at this very moment. `by_us`: the coordinator's."""
        self.alive = False
        self._epoch += 1
        self.sim.buried(self, by_us)

    def fail(self, kind: CauseKind, signature: str) -> None:
        """The attempt fails and the process lives; it says so and waits for the stop."""
        if self.place not in (Place.STEP, Place.REGROUPING) or self._stop is not None:
            return
        self._epoch += 1
        if self.updating and kind is CauseKind.EXCEPTION:
            self._cut, self.updating = True, False
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
        last = self._half or self.sim.schedule.updates == 1
        if chance < 0.5 and last:
            self._update(self.committed + 1)
        elif chance < 0.6:
            self._cut, self.updating = True, False

    def _park(self, generation: int) -> None:
        self.place, self.updating = Place.PARKED, False
        self._stop = generation
        if not self.holding.can_advance:
            self._put_back()
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

    def on_regroup(self, generation: int, plan: Plan, capsule: Capsule | None) -> None:
        """Build the communicators of `generation` and follow the plan. `capsule`: this rank's own,
        for a fetch."""
        self.sim.check(self.place is Place.PARKED, f"{self} regroups though it is {self.place}")
        self.sim.check(generation > self.generation or self.joiner, f"{self} in an old world")
        self.generation, self._stop = generation, None
        self.place, self.joiner = Place.REGROUPING, False
        built = ("build", generation)
        self._later(
            lambda: self.sim.world(self).gather(self, built, lambda: self._built(plan, capsule))
        )

    def _built(self, plan: Plan, capsule: Capsule | None) -> None:
        self._say(
            ev.Regrouped(rank=self.rank, incarnation=self.incarnation, generation=self.generation)
        )
        part = plan.ranks[self.rank]
        if part.decision is not Decision.ADVANCE:
            self._put_back()
        if part.decision is Decision.FETCH:
            self.torn, self.has_state = True, True
            self.sim.world(self).fetch(
                self,
                part.sources,
                plan.step,
                lambda state, step: self._fetched(state, capsule, step),
            )
            return
        if part.decision is Decision.ADVANCE:
            self.sim.check(self.gradients == plan.step, f"{self} advances without gradients")
            self._update(plan.step)
        where = f"{self} keeps {self.committed} (torn: {self.torn}), not {plan.step}"
        self.sim.check(self.committed == plan.step and not self.torn, where)
        self.sim.world(self).serve(self, part.sinks, self._restored)

    def _fetched(self, state: int, capsule: Capsule | None, step: int) -> None:
        if self.sim.take_bad_receipt(self.rank):
            self.state, self.committed, self.bad_receipt = _GARBAGE, step, True
            self._say_restored(ok=False)
            return
        self.state, self.committed, self.torn, self.bad_receipt = state, step, False, False
        self._say_restored(ok=True)
        if self.sim.last_seen(self) != step:
            self._resume(capsule, step)
        self._check_whole()
        self._go_on()

    def _resume(self, capsule: Capsule | None, step: int) -> None:
        """The call of the plan's step returns by what an earlier process, or attempt, has left."""
        if capsule is None or capsule.step != step:
            raise self.sim.error(f"{self} has no capsule of step {step}: {capsule}")
        self.sim.resumed += 1
        self.own = self._own_before = capsule.own
        self.sim.sees(self, step, capsule.result)
        self._say_committed()

    def _restored(self) -> None:
        self._check_whole()
        self._say_restored(ok=True)
        self._go_on()

    def _go_on(self) -> None:
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
