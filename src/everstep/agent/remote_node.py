"""A node elsewhere, as the coordinator has it: orders go over a connection to its agent, and what
that tells goes to the node's owner.

It does not know how the connection came about, nor what follows its end: remote.py. Loop thread
only; nothing blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from everstep.agent.berth import Berth, Kept
from everstep.agent.ending import END_TIMEOUT_S
from everstep.types import HeldCopy
from everstep.wire import nodes
from everstep.wire.messages import ChaosSpec, ToWorker, WorkerSpec


class RemoteNode:
    """A node at the other end of a connection. Implements `fleet.NodeHandle`.

    `who`: what it registered as. `exit_code()`: of the job, once it is over. `joined`: it can fork.
    `listens`: how others can try whether they reach it; None where they can't. `found`: the copies
    that were left in its host's memory.
    `gone`: set when it has ended all its workers, or nothing more can be heard of it.
    """

    def __init__(
        self,
        number: int,
        who: nodes.Register,
        berth: Berth,
        send: Callable[[nodes.ToNode], object],
        hang_up: Callable[[str], None],
        exit_code: Callable[[], int],
    ) -> None:
        self.number = number
        self.who = msgspec.structs.replace(who, report=None)  # which may be large
        self.berth = berth
        self.joined = False
        self.listens: nodes.Listens | None = None if who.report is None else who.report.listens
        self.found: tuple[HeldCopy, ...] = ()
        self.gone = asyncio.Event()
        self._send = send
        self._hang_up = hang_up
        self._exit_code = exit_code

    @property
    def peer_address(self) -> tuple[str, int]:
        """Where its agent listens for others."""
        return self.who.address, self.who.peer_port

    def launch(
        self,
        spec: WorkerSpec,
        variables: Mapping[str, str],
        delay_s: float,
        kept: Kept = (),
    ) -> None:
        """Fork a worker."""
        self._send(nodes.Launch(spec=spec, environment=dict(variables), delay_s=delay_s, kept=kept))

    def peers(self, order: nodes.Peers) -> None:
        """Which other nodes there are."""
        self._send(order)

    def probe(self, order: nodes.Probe) -> None:
        """Try whether it reaches others."""
        self._send(order)

    def reclaim(self, order: nodes.Reclaim) -> None:
        """Tell what you keep of ranks."""
        self._send(order)

    def kill(self, rank: int, incarnation: int, why: str) -> None:
        """SIGKILL a worker's whole session."""
        self._send(nodes.Kill(rank=rank, incarnation=incarnation, why=why))

    def send(self, rank: int, incarnation: int, message: ToWorker) -> None:
        """Send a message to a worker."""
        self._send(nodes.Tell(to=((rank, incarnation),), message=message))

    def send_all(self, members: Sequence[tuple[int, int]], message: ToWorker) -> None:
        """Send a message to several workers."""
        self._send(nodes.Tell(to=tuple(members), message=message))

    def look(self) -> None:
        """Say what all workers show."""
        self._send(nodes.Look())

    def inspect(self) -> None:
        """Have all workers show their stacks."""
        self._send(nodes.Inspect())

    def copy_order(self, order: nodes.CopyOrder) -> None:
        """The coordinator's word about copies."""
        self._send(order)

    def written(self, step: int) -> None:
        """What was said up to the commits of `step` is written down."""
        self._send(nodes.Written(step=step))

    def dismiss(self, why: str) -> None:
        """End the connection: the agent comes again, is displaced, and kills all its workers."""
        self._hang_up(why)

    def cut(self, fault: ChaosSpec) -> None:
        """Have a fault on purpose happen to the node."""
        self._send(nodes.Cut(fault=fault))

    def hurry(self) -> None:
        """A `close` that waits for workers waits no longer."""
        self._send(nodes.Finish(terminate=False, wait_s=0.0, exit_code=self._exit_code()))

    def finish(self, *, terminate: bool, wait_s: float) -> None:
        """Have the agent end all workers and itself."""
        code = self._exit_code()
        self._send(nodes.Finish(terminate=terminate, wait_s=wait_s, exit_code=code))

    async def close(self, *, terminate: bool, wait_s: float) -> None:
        """Have the agent end all workers and itself, and wait until it has, or is lost."""
        self.finish(terminate=terminate, wait_s=wait_s)
        try:
            await asyncio.wait_for(self.gone.wait(), wait_s + 3 * END_TIMEOUT_S)
        except TimeoutError:
            self._hang_up("it has not ended its workers in time")


def tell_owner(berth: Berth, message: nodes.FromNode) -> None:
    """Hand the owner what its node tells."""
    match message:
        case nodes.Said(rank=rank, incarnation=incarnation, message=said):
            berth.said(rank, incarnation, said)
        case nodes.Died(rank=rank, incarnation=incarnation, cause=cause):
            berth.died(rank, incarnation, cause, before_kill=message.before_kill)
        case nodes.Output(rank=rank, incarnation=incarnation, stream=stream, line=line):
            berth.output(rank, incarnation, stream, line)
        case nodes.Silent(evidence=evidence):
            berth.silent(evidence)
        case nodes.Looked(evidence=evidence):
            berth.looked(evidence)
        case nodes.Shown():
            berth.shown(message)
        case nodes.Note(key=key, text=text):
            berth.note(key, text)
        case nodes.Probed():
            berth.probed(message)
        case nodes.Reclaimed():
            berth.reclaimed(message)
        case _ if isinstance(message, nodes.CopyNews):
            berth.copy_news(message)
