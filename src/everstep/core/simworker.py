"""A worker that is not there: it speaks the worker's side of the protocol in virtual time.

Theory of operation. It sets up, or joins; makes its steps and sections (`simstep`); is stopped,
parks with what it holds, follows the plan, and leaves with all others. Whatever it does takes a
random time, and the stop cancels what it was about to do (`_epoch`). It speaks and is spoken to
through `Simulation` only, which may delay, lose or double its messages.

What it doesn't know: the coordinator, and its peers beyond what they give it in a collective or a
transfer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from everstep.core import events as ev
from everstep.core.actions import Spawn
from everstep.core.simscript import Capsule
from everstep.core.simstep import GARBAGE, SimTrainer
from everstep.types import Cause, CauseKind, Decision, Holding, Plan

if TYPE_CHECKING:
    from everstep.core.simkeeping import SimNode
    from everstep.core.simulate import Simulation

_COLLECTIVE_S = 30.0  # after which one that hangs fails
_DIGESTS = {"w": "7" * 16}


class Place(enum.StrEnum):
    """Where in its script a worker is."""

    SET_UP = "set-up"  # also a joiner's, until it has parked for the first time
    STEP = "step"
    SECTION = "section"
    CLOSING = "closing"  # it has left the loop and waits for the others
    TAIL = "tail"  # the script after the loop
    FINISHED = "finished"
    PARKED = "parked"
    REGROUPING = "regrouping"


ACTING = frozenset({Place.STEP, Place.SECTION, Place.REGROUPING})
"""Where a worker has to do with its peers."""
_AT_WORK = frozenset({Place.STEP, Place.SECTION, Place.CLOSING, Place.TAIL, Place.FINISHED})


class SimWorker:
    """One incarnation of a rank, on `home`; None where the job has one node only."""

    def __init__(self, sim: Simulation, order: Spawn, home: SimNode | None) -> None:
        self.sim, self.home = sim, home
        self.rank, self.incarnation, self.joiner = order.rank, order.incarnation, order.joiner
        self.identity = order.rank, order.incarnation
        self.generation = order.generation
        self.shard = sim.schedule.shard(order.rank)
        self.alive = True
        self.dying = False  # the coordinator has asked for its death
        self.will_hang = self.hung = False
        self.stuck = False  # nothing ends it
        self.silent = False  # a message from or to it was lost
        self.place = Place.SET_UP
        self.has_state = not order.joiner
        self.train = SimTrainer(self)
        self.bad_receipt = False
        self.heard_s = self.said_s = 0.0  # when the newest message of each direction arrives
        self._told_closed = self._finished = False
        self._failed = False  # its attempt has failed in this world
        self._stop: int | None = None
        self._epoch = 0

    # ------------------------------------------------------------------ time and speech

    def later(self, act: Callable[[], None], *, sticky: bool = False) -> None:
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
        return lambda: self.later(act) if epoch == self._epoch else None

    def gather(self, collective: Hashable, done: Callable[[], None]) -> None:
        """Take part in a collective of the whole world."""
        self.sim.world(self).gather(self, collective, done)

    @property
    def stalled(self) -> bool:
        """It lives and stands still."""
        return self.alive and self.hung

    @property
    def in_reach(self) -> bool:
        """The coordinator can act on it."""
        return self.home is None or self.home.up

    def deaf(self, awaited: bool) -> bool:
        """Whether it hangs: it was to, and now a message has come whose answer is `awaited`."""
        self.hung = self.hung or (self.will_hang and awaited)
        return self.hung

    def _say(self, event: ev.WorkerEvent) -> None:
        self.sim.deliver(self, event)

    def say_committed(self) -> None:
        """It has come to a new position."""
        step, sections = self.train.position
        self._say(
            ev.Committed(
                rank=self.rank,
                incarnation=self.incarnation,
                generation=self.generation,
                step=step,
                sections=sections,
                at_s=self.sim.now_s,
            )
        )

    # ------------------------------------------------------------------ set-up and joining

    def born(self) -> None:
        """Its first line runs."""
        self.later(self._start, sticky=True)

    def _start(self) -> None:
        self._say(ev.Started(rank=self.rank, incarnation=self.incarnation, pid=1))
        self.later(self._protect, sticky=True)

    def _protect(self) -> None:
        self._say(
            ev.Protected(
                rank=self.rank,
                incarnation=self.incarnation,
                shard=self.shard,
                manifest="m",
                digests=_DIGESTS,
            )
        )

    def on_go(self) -> None:
        """`protect` returns."""
        if self.joiner:
            self.later(self._wait, sticky=True)
        else:
            self.sim.scripts.begin(self.generation)
            self.go_on()

    def _wait(self) -> None:
        self._say(ev.Waiting(rank=self.rank, incarnation=self.incarnation))

    def on_position(self) -> None:
        """A joiner knows its peers' step; it rehearses the next one and parks."""
        self.train.torn = True
        self.later(lambda: self._park(self.generation), sticky=True)

    # ------------------------------------------------------------------ faults

    def die(self, *, by_us: bool = False) -> None:
        """SIGKILL, at this very moment. `by_us`: the coordinator's."""
        self.alive = False
        self._epoch += 1
        self.sim.buried(self, by_us)

    def fail(self, kind: CauseKind, signature: str) -> None:
        """The attempt fails and the process lives; it says so and waits for the stop."""
        if self.place not in ACTING or self._stop is not None:
            return
        self._epoch += 1
        self._failed = True
        if kind is CauseKind.EXCEPTION:
            self.train.tear()
        self._say(
            ev.Faulted(
                rank=self.rank,
                incarnation=self.incarnation,
                generation=self.generation,
                step=self.train.position[0] + 1,
                cause=Cause(kind=kind, text=f"{kind} on {self}", signature=signature),
            )
        )

    def on_peer_died(self) -> None:
        """A peer of this generation has died: its collectives may or may not complete here."""
        if self.place not in ACTING or self.train.updating:
            return
        chance = self.sim.random.random()
        if chance < 0.4:
            self._epoch += 1  # it hangs, until its collective times out
            epoch = self._epoch
            self.sim.after(_COLLECTIVE_S, lambda: self._time_out(epoch))
        elif chance < 0.7:
            self.later(lambda: self.fail(CauseKind.PEER, "connection reset"))

    def _time_out(self, epoch: int) -> None:
        if self.alive and not self.hung and epoch == self._epoch:
            self.fail(CauseKind.PEER, "timed out")

    # ------------------------------------------------------------------ stop and regroup

    def on_stop(self, generation: int) -> None:
        """Abort, run to the boundary, park."""
        self._stop = generation
        if self.place is Place.TAIL:
            return  # it parks where the script ends
        self._epoch += 1
        self.train.cut_update()
        self.later(lambda: self._park(generation))

    def _park(self, generation: int) -> None:
        self.place, self._stop = Place.PARKED, generation
        if not self.train.holding.can_advance:
            self.train.put_back()
        holding = self.train.holding
        if self.bad_receipt and not self.silent and self.sim.terms.seat.term == 0:
            # It lies, as a worker would that does not know better. The coordinator does: it was
            # told of the receipt.
            step, sections = self.train.position
            holding = Holding(committed=step, sections=sections, shard=self.shard)
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
        self.generation, self._stop, self._failed = generation, None, False
        self.place, self.joiner = Place.REGROUPING, False
        self.later(lambda: self.gather("build", lambda: self._built(plan, capsule)))

    def _built(self, plan: Plan, capsule: Capsule | None) -> None:
        self._say(
            ev.Regrouped(rank=self.rank, incarnation=self.incarnation, generation=self.generation)
        )
        part, train = plan.ranks[self.rank], self.train
        if part.decision is Decision.FETCH:
            train.put_back()
            train.torn, self.has_state = True, True
            fetched = self._fetched
            self.sim.world(self).fetch(self, part.sources, lambda s: fetched(s, plan, capsule))
            return
        if part.decision is Decision.ADVANCE:
            ready = train.ready == plan.position
            self.sim.check(ready, f"{self} advances without what {plan.position} needs")
            train.commit()
        train.put_back()
        where = f"{self} keeps {train.position} (torn: {train.torn}), not {plan.position}"
        self.sim.check(train.position == plan.position and not train.torn, where)
        self.sim.world(self).serve(self, part.sinks, self._restored)

    def _fetched(self, state: int, plan: Plan, capsule: Capsule | None) -> None:
        self.bad_receipt = self.sim.faults.take_bad_receipt(self.rank)
        if self.bad_receipt:
            self.train.take(GARBAGE, plan.position)
            self.train.torn = True
            self._say_restored(ok=False)
            return
        self.train.take(state, plan.position)
        self._say_restored(ok=True)
        if self.train.resume(capsule):
            self.say_committed()
        elif self.sim.over:
            return
        self.train.check_whole()
        self.go_on()

    def _restored(self) -> None:
        self.train.check_whole()
        self._say_restored(ok=True)
        self.go_on()

    def go_on(self) -> None:
        """The next attempt, or what comes after the loop."""
        if self.train.begin():
            assert self.train.target is not None
            self.place = Place.SECTION if self.train.target[1] > 0 else Place.STEP
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
                step=self.train.position[0],
            )
        )

    def on_closed(self) -> None:
        """All ranks have left their loops; the script goes on."""
        self._told_closed = True
        self.sim.check(self.place is Place.CLOSING, f"{self} is told closed while {self.place}")
        self.place = Place.TAIL
        self.later(self._finish, sticky=True)

    def on_bye(self) -> None:
        """It may exit, and does."""
        self.alive = False
        self._epoch += 1

    @property
    def well(self) -> bool:
        """It lives, and is in its loop or after it, undisturbed."""
        at = self.place in _AT_WORK and not self.joiner
        return self.alive and at and self._stop is None and not self._failed and not self.hung

    def _finish(self) -> None:
        self._finished = True
        self.place = Place.FINISHED
        self._say(ev.Finished(rank=self.rank, incarnation=self.incarnation))
        if self._stop is not None:
            stop = self._stop
            self.later(lambda: self._park(stop))

    def __repr__(self) -> str:
        return f"rank {self.rank}.{self.incarnation} of generation {self.generation}"
