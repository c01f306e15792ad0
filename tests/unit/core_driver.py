"""Drives a coordinator by hand: says what workers say, and finds what was asked for."""

from __future__ import annotations

from typing import Any, TypeVar

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.coordinator import Coordinator
from everstep.core.ladder import Policy
from everstep.core.nodes import Layout
from everstep.types import Cause, CauseKind, Holding

A = TypeVar("A", bound=do.Action)


def killed(fault: str | None = None) -> Cause:
    return Cause(kind=CauseKind.SIGNAL, text="killed by SIGKILL", signal=9, fault=fault)


def raised(text: str = "ValueError: no", fault: str | None = None) -> Cause:
    return Cause(
        kind=CauseKind.EXCEPTION,
        text=text,
        detail=f"Traceback: {text}",
        signature=text,
        exit_code=1,
        fault=fault,
    )


def broken() -> Cause:
    return Cause(kind=CauseKind.PEER, text="connection reset by peer")


def early() -> Cause:
    return Cause(kind=CauseKind.EARLY_EXIT, text="exited with 0 before the end", exit_code=0)


class Driver:
    """A job of `world_size` ranks. `incarnations[r]` is who holds rank r, as the actions told."""

    def __init__(self, world_size: int = 4, layout: Layout | None = None, **policy: Any) -> None:
        self.world_size = world_size
        self.ranks = range(world_size)
        self.coordinator = Coordinator(world_size, Policy(**policy), layout)
        self.now_s = 100.0
        self.incarnations = [0] * world_size
        self.last: list[do.Action] = []
        self.all: list[do.Action] = []

    # ---------------------------------------------------------------- saying

    def tell(self, event: ev.Event) -> list[do.Action]:
        self.last = self.coordinator.handle(event, self.now_s)
        self.coordinator.validate()
        self.all += self.last
        for spawn in self.got(do.Spawn):
            self.incarnations[spawn.rank] = spawn.incarnation
        return self.last

    def wait(self, seconds: float) -> list[do.Action]:
        self.now_s += seconds
        return self.tell(ev.Tick())

    def who(self, rank: int, incarnation: int | None = None) -> dict[str, Any]:
        return {"rank": rank, "incarnation": incarnation or self.incarnations[rank]}

    @property
    def generation(self) -> int:
        return self.coordinator.generation

    def here(self, rank: int) -> dict[str, Any]:
        return self.who(rank) | {"generation": self.generation}

    def start(self, rank: int) -> None:
        self.tell(ev.Started(**self.who(rank), pid=1000 + rank))

    def protect(self, rank: int, manifest: str = "m", **digests: str) -> list[do.Action]:
        digests = digests or {"w": "ab" * 8}
        return self.tell(
            ev.Protected(**self.who(rank), shard="all", manifest=manifest, digests=digests)
        )

    def commit(self, rank: int, step: int) -> list[do.Action]:
        return self.tell(ev.Committed(**self.here(rank), step=step, at_s=self.now_s))

    def die(
        self,
        rank: int,
        cause: Cause | None = None,
        incarnation: int | None = None,
        before_kill: bool = False,
    ) -> None:
        who = self.who(rank, incarnation)
        self.tell(ev.Died(**who, cause=cause or killed(), before_kill=before_kill))

    def fault(self, rank: int, step: int, cause: Cause) -> None:
        self.tell(ev.Faulted(**self.here(rank), step=step, cause=cause))

    def park(self, rank: int, committed: int, **more: Any) -> list[do.Action]:
        holding = Holding(committed=committed, **more)
        return self.tell(ev.Parked(**self.here(rank), holding=holding))

    def close(self, rank: int, step: int) -> list[do.Action]:
        return self.tell(ev.Closing(**self.here(rank), step=step))

    def finish(self, rank: int) -> list[do.Action]:
        return self.tell(ev.Finished(**self.who(rank)))

    # ---------------------------------------------------------------- whole passages

    def set_up(self) -> None:
        if self.coordinator.phase == "new":
            self.tell(ev.JobStarted())
        for rank in self.ranks:
            self.start(rank)
        for rank in self.ranks:
            self.protect(rank)

    def run_to(self, step: int, first: int = 1) -> None:
        for number in range(first, step + 1):
            for rank in self.ranks:
                self.commit(rank, number)

    def running(self, step: int = 4) -> Driver:
        """All ranks have committed `step`."""
        self.set_up()
        self.run_to(step)
        return self

    def join(self, rank: int) -> None:
        """A joiner goes through its set-up and rehearsal, as far as it is let."""
        self.start(rank)
        self.protect(rank)
        self.tell(ev.Waiting(**self.who(rank)))
        if any(position.rank == rank for position in self.got(do.SendPosition)):
            self.park(rank, 0, torn=True)

    def restored(self, rank: int, ok: bool = True, text: str = "", **more: Any) -> None:
        here = self.here(rank)
        self.tell(ev.Restored(**here, ok=ok, text=text, nbytes=10, **more))

    def regroup(self) -> None:
        for rank in self.ranks:
            self.tell(ev.Regrouped(**self.here(rank)))
        for rank in self.ranks:
            self.restored(rank)

    # ---------------------------------------------------------------- finding

    def got(self, kind: type[A], everything: bool = False) -> list[A]:
        actions = self.all if everything else self.last
        return [action for action in actions if isinstance(action, kind)]

    def one(self, kind: type[A]) -> A:
        (action,) = self.got(kind)
        return action

    def journal(self, event: str) -> list[dict[str, Any]]:
        records = [action.record for action in self.got(do.Record, everything=True)]
        return [record.fields for record in records if record.event == event]

    def events(self) -> list[str]:
        return [action.record.event for action in self.got(do.Record, everything=True)]

    @property
    def ended(self) -> do.End:
        (end,) = self.got(do.End, everything=True)
        return end
