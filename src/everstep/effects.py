"""What the coordinator's shell needs of others: a core that decides, a timer, and somebody who does
what is decided."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from everstep.core import actions, events
from everstep.core.overview import Overview
from everstep.keepsakes import Heritage
from everstep.types import Record
from everstep.wire import nodes
from everstep.wire.messages import ChaosSpec, ToWorker

Member = tuple[int, int]  # rank and incarnation


class Core(Protocol):
    """What the shell needs of core.coordinator.Coordinator."""

    @property
    def next_deadline_s(self) -> float | None:
        """When to send Tick, on the monotonic clock; None: never."""
        ...

    @property
    def reconvenes(self) -> bool:
        """It has taken over a job that runs, and waits for its nodes."""
        ...

    def copies_of(self, rank: int, step: int) -> Collection[int]:
        """The nodes that have a copy of `rank` at `step`."""
        ...

    def handle(self, event: events.Event, now_s: float) -> list[actions.Action]:
        """Decide."""
        ...

    def overview(self, now_s: float) -> Overview:
        """What the job is doing, for people."""
        ...


class Timer(Protocol):
    """What asyncio's TimerHandle is."""

    def cancel(self) -> None:
        """Do not call."""
        ...


class Effects(Protocol):
    """What the agent does for the coordinator. No call blocks, and none calls back into the shell
    before it returns."""

    def record(self, record: Record, *, shown: bool = True) -> None:
        """Append to the journal, and show it to the person who watches unless `shown` is False."""
        ...

    def spawn(self, order: actions.Spawn, heritage: Heritage) -> None:
        """Fork a worker. Its messages and its death come back by `message` and `died`."""
        ...

    def kill(self, rank: int, incarnation: int, why: str) -> None:
        """SIGKILL a worker's whole session. Nothing, if it is dead."""
        ...

    def dismiss(self, node: int, why: str) -> None:
        """End all workers of a node that has no part in the job any more, if it can be reached."""
        ...

    def cut(self, rank: int, incarnation: int, fault: ChaosSpec) -> None:
        """Have a fault on purpose happen to the node where the worker is. A loss comes back by
        `node_lost`."""
        ...

    def fall(self) -> None:
        """A fault on purpose: end this process, as by SIGKILL."""
        ...

    def inspect(self) -> None:
        """Have all workers show their stacks; what is found comes back by `inspected`, soon."""
        ...

    def send(self, rank: int, incarnation: int, message: ToWorker) -> None:
        """Send a message. Nothing, if the worker is dead."""
        ...

    def send_all(self, members: Iterable[Member], message: ToWorker) -> None:
        """Send a message to several workers."""
        ...

    def peers(self, guardians: Mapping[int, int | None]) -> None:
        """Tell the nodes that hold slots which these are, and of each its guardian."""
        ...

    def probe(self, order: actions.Probe) -> Collection[int]:
        """Have nodes try whether they reach each other. Returns those that can try: their answers
        come back by `probed`, or the node is lost."""
        ...

    def reclaim(self, order: actions.Reclaim) -> None:
        """Ask nodes what they keep of ranks. Each answer comes back by `reclaimed`, or the node is
        lost."""
        ...

    def keepers(self, generation: int, keepers: Mapping[int, int], steps: tuple[int, ...]) -> None:
        """Tell all nodes which of them keeps the copies of which rank, and that copies of other
        steps than `steps` are of no use any more."""
        ...

    def copy_order(self, node: int, order: nodes.CopyOrder) -> bool:
        """Tell a node something about copies. False if it is not there."""
        ...

    def metrics(self, rank: int, step: int, log: Mapping[str, float]) -> None:
        """Keep the scalars a rank logged in a step that is committed."""
        ...

    def trace(self, rank: int, step: int, record: bytes) -> None:
        """Keep what a committed step returned and consumed, as MessagePack."""
        ...

    def digests(self, rank: int, digests: Mapping[str, str]) -> None:
        """Keep the digests of a rank's final state."""
        ...

    def end(self, end: actions.End) -> None:
        """The job is over."""
        ...
