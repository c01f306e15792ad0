"""Between a fleet and one of its nodes: what the fleet asks of the node, and what the node has for
its owner.

A node is a `Node` in this process, or a connection to one elsewhere (remote_node.py). It does not
know how either does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from everstep.core.hang import Evidence
from everstep.types import Cause
from everstep.wire import nodes
from everstep.wire.messages import ChaosSpec, FromWorker, Keepsake, ToWorker, WorkerSpec
from everstep.wire.nodes import Shown

if TYPE_CHECKING:
    from everstep.agent.fleet import Fleet

Member = tuple[int, int]  # rank and incarnation
Kept = tuple[tuple[int, Keepsake], ...]


class NodeHandle(Protocol):
    """What a fleet needs of a node; `agent.node.Node` says what each call does. No call but `close`
    blocks or waits."""

    def launch(
        self,
        spec: WorkerSpec,
        variables: Mapping[str, str],
        delay_s: float,
        kept: Kept = (),
    ) -> None:
        """Fork a worker. `kept`: as nodes.Launch has it."""
        ...

    def kill(self, rank: int, incarnation: int, why: str) -> None:
        """SIGKILL a worker's whole session."""
        ...

    def send(self, rank: int, incarnation: int, message: ToWorker) -> None:
        """Send a message to a worker."""
        ...

    def send_all(self, members: Sequence[Member], message: ToWorker) -> None:
        """Send a message to several workers."""
        ...

    def look(self) -> None:
        """Say what all workers show."""
        ...

    def inspect(self) -> None:
        """Have all workers show their stacks."""
        ...

    @property
    def peer_address(self) -> tuple[str, int]:
        """Where it listens for other nodes."""
        ...

    def peers(self, order: nodes.Peers) -> None:
        """Which other nodes there are."""
        ...

    @property
    def listens(self) -> nodes.Listens | None:
        """How others can try whether they reach it; None where they can't."""
        ...

    def probe(self, order: nodes.Probe) -> None:
        """Try whether it reaches others."""
        ...

    def reclaim(self, order: nodes.Reclaim) -> None:
        """Tell what you keep of ranks."""
        ...

    def copy_order(self, order: nodes.CopyOrder) -> None:
        """The coordinator's word about copies."""
        ...

    def written(self, step: int) -> None:
        """What was said up to the commits of `step` is written down."""
        ...

    def dismiss(self, why: str) -> None:
        """The job goes on without this node: kill all its workers."""
        ...

    def cut(self, fault: ChaosSpec) -> None:
        """Have a fault on purpose happen to the node."""
        ...

    def hurry(self) -> None:
        """A `close` that waits for workers waits no longer."""
        ...

    async def close(self, *, terminate: bool, wait_s: float) -> None:
        """End all workers, and the node's part in the job."""
        ...


class Berth:
    """One node's owner: it passes on what the node tells, with the node's number."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self._fleet = fleet
        self._number = number

    def said(self, rank: int, incarnation: int, message: FromWorker) -> None:
        """A worker said something."""
        self._fleet._said(rank, incarnation, message)

    def died(self, rank: int, incarnation: int, cause: Cause, *, before_kill: bool) -> None:
        """A worker is gone."""
        self._fleet._died(rank, incarnation, cause, before_kill)

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """A line that a worker printed."""
        self._fleet._view.output(rank, incarnation, stream, line)

    def silent(self, evidence: tuple[Evidence, ...]) -> None:
        """Some worker has been silent for longer than it may."""
        self._fleet._silent(self._number, evidence)

    def looked(self, evidence: tuple[Evidence, ...]) -> None:
        """What all workers show."""
        self._fleet._lookout.looked(self._number, evidence)

    def shown(self, shown: Shown) -> None:
        """The stacks of all workers."""
        self._fleet._lookout.shown(self._number, shown)

    def probed(self, answer: nodes.Probed) -> None:
        """Which others it can't reach."""
        self._fleet._probed(self._number, answer)

    def reclaimed(self, answer: nodes.Reclaimed) -> None:
        """What it keeps of ranks."""
        self._fleet._shell.reclaimed(self._number, answer)

    def copy_news(self, news: nodes.CopyNews) -> None:
        """Something about copies."""
        self._fleet._ferry.take(self._number, news)

    def note(self, key: str, text: str) -> None:
        """Something a person should know."""
        self._fleet.note(key, text)

    def failed(self, error: BaseException) -> None:
        """The node can not go on."""
        self._fleet.failed(error)
