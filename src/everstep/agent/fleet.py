"""All nodes of one job, as the coordinator uses them.

Theory of operation: what nodes tell goes to the coordinator's shell, and what that answers is
carried out on the node where the worker is. The fleet keeps which member is on which node, and
which nodes there are; a node is a `Node` in this process or a connection to one elsewhere, which is
all the same here. What belongs to the job and not to a node is done at once: the journal, the
metrics, the traces, the view. Whatever goes wrong here ends the job and is raised to whoever waits
for `ended`.

It does not decide about ranks or nodes (core), nor how nodes are found (launch). Loop thread only.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection, Iterable, Mapping

from everstep.agent.berth import Berth, NodeHandle
from everstep.agent.ferry import Ferry
from everstep.agent.lookout import Lookout
from everstep.agent.reach import targets, unreached
from everstep.agent.workers import Place, torchrun_environment, worker_spec
from everstep.coordinator import CoordinatorShell
from everstep.core import actions, events
from everstep.core.hang import Evidence
from everstep.core.overview import Overview
from everstep.core.words import STOP_COMMAND, name_signal
from everstep.effects import Core
from everstep.errors import EverstepError
from everstep.keepsakes import Heritage
from everstep.observe.rundir import RunDirectory
from everstep.observe.view import Both, View
from everstep.settings import RunSettings
from everstep.types import Cause, HeldCopy, Record
from everstep.wire import nodes
from everstep.wire.messages import ChaosSpec, FromWorker, ToWorker

Member = tuple[int, int]  # rank and incarnation
_WRITTEN_EVERY_S = 0.25


class LeaveError(EverstepError):
    """What ends this coordinator, and not the job, which goes on without it."""


class Fleet:
    """Implements `coordinator.Effects`. `master`: MASTER_ADDR and MASTER_PORT of the script."""

    def __init__(
        self,
        *,
        settings: RunSettings,
        core: Core,
        directory: RunDirectory,
        view: View,
        master: tuple[str, int],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[actions.End] = loop.create_future()
        self._loop = loop
        self._settings = settings
        self._core = core
        self._directory = directory
        self._view = view
        self._master = master
        self._shell = CoordinatorShell(core, self, settings.chaos, loop.call_at)
        self._lookout = Lookout(directory.path, self._shell.silent, self._shell.inspected)
        self._nodes: dict[int, NodeHandle] = {}
        self._homes: dict[Member, int] = {}
        self._ferry = Ferry(self, self._shell, lambda: list(self._nodes))
        self._told_written_s = 0.0
        self._started = False
        self._asked_by: int | None = None

    # ------------------------------------------------------------ the job's life

    def add(self, number: int, node: NodeHandle) -> None:
        """There is a node, which tells what it has to tell to `berth(number)`."""
        self._nodes[number] = node

    def berth(self, number: int) -> Berth:
        """What the node `number` has for its owner."""
        return Berth(self, number)

    def joined(
        self,
        number: int,
        host: str,
        domain: str,
        ranks: int,
        found: tuple[HeldCopy, ...] = (),
    ) -> None:
        """The node `number` can fork, up to `ranks` workers. `host`, `domain`, `found`: as
        events.NodeJoined has them."""
        self._shell.node_joined(number, host, domain, ranks, found)

    @property
    def reconvenes(self) -> bool:
        """The job was taken over, and waits for its nodes."""
        return self._shell.reconvenes

    @property
    def peopled(self) -> bool:
        """There is a node."""
        return bool(self._nodes)

    @property
    def inhabited(self) -> bool:
        """Some node has a worker."""
        return bool(self._homes)

    def back(self, host: str, domain: str, report: nodes.Report) -> None:
        """A node that had a part in the job under an earlier coordinator has come back, and has
        been `add`ed under its old number."""
        for member in report.members:
            self._homes[member.rank, member.incarnation] = report.node
        self._shell.node_back(host, domain, report)

    def lost(self, number: int, cause: Cause) -> None:
        """Nothing is heard of the node `number` any more."""
        self._shell.node_lost(number, cause, self._forget(number))

    def start(self) -> None:
        """Begin the job."""
        self._started = True
        self._shell.start()

    def resume(self, resumed: events.Resumed, fired: Collection[int] = ()) -> None:
        """Take over a job that runs. `fired`: numbers of the faults on purpose that have."""
        self._started = True
        self._shell.resume(resumed, fired)

    def over(self, end: actions.End) -> None:
        """The job has ended under an earlier coordinator; some nodes may not know."""
        number = end.exit_code - 128
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._asked_by = number
        self.end(end)

    def leave(self) -> None:
        """Do nothing more for the job, which goes on."""
        self._shell.stop()

    def stop_asked(self, number: int, by: str = "") -> None:
        """Signal `number`, or something like it (`by`, in words), asks the job to end: the first
        time in order, the second time at once."""
        if self._asked_by is not None:
            self._shell.stop_asked(number, by)
            for node in self._nodes.values():
                node.hurry()
            return
        self._asked_by = number
        if self._started:
            self._shell.stop_asked(number, by)
        else:
            text = f"asked to end by {by or name_signal(number)} before any worker was started"
            self.end(actions.End(exit_code=128 + number, text=text))

    def end_asked(self, *, now: bool) -> None:
        """A person asks from elsewhere that the job end, as by SIGINT; `now`: as by two."""
        if self._asked_by is None:
            self.stop_asked(signal.SIGINT, STOP_COMMAND)
        if now:
            self.stop_asked(signal.SIGINT, STOP_COMMAND)

    def overview(self) -> Overview:
        """What the job is doing."""
        return self._core.overview(self._loop.time())

    def also_show(self, view: View) -> None:
        """Show all that comes from now on to `view`, too."""
        self._view = Both(self._view, view)

    def failed(self, error: BaseException) -> None:
        """Something went wrong that is not a failure of the job's: `ended` raises it."""
        if not self.ended.done():
            self.ended.set_exception(error)
        else:
            self._loop.default_exception_handler(
                {"message": "everstep: a failure after the job's end", "exception": error}
            )

    async def close(self) -> None:
        """End all workers on all nodes: in their own time after a success, after SIGTERM and a
        grace if a person asked for the end, at once if a failure is the reason.

        Raises EverstepError if a process cannot be ended.
        """
        self._shell.stop()
        terminate, wait_s = self.manner
        closings = [node.close(terminate=terminate, wait_s=wait_s) for node in self._nodes.values()]
        outcomes = await asyncio.gather(*closings, return_exceptions=True)
        if self.ended.done() and not self.ended.cancelled():
            self.ended.exception()  # who waits for it has had it, unless a cancellation came first
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    @property
    def manner(self) -> tuple[bool, float]:
        """How workers are ended now: whether by SIGTERM first, and the seconds that they have."""
        terminate = self._asked_by is not None
        return terminate, self._settings.grace_s if terminate or self.exit_code == 0 else 0.0

    @property
    def exit_code(self) -> int:
        """The job's, once it is over; 1 before, and where something broke it."""
        ended = self.ended
        if not ended.done() or ended.cancelled():
            return 1
        error = ended.exception()
        if error is None:
            return ended.result().exit_code
        return error.exit_code if isinstance(error, EverstepError) else 1

    # ------------------------------------------------------------ Effects, for the coordinator

    def record(self, record: Record, *, shown: bool = True) -> None:
        """Append to the journal."""
        line = self._directory.journal.write(record.event, record.fields)
        if shown:
            self._view.record(line)
        if record.event == "step":
            self._written(record.fields["step"])

    def _written(self, step: int) -> None:
        """Tell the nodes, now and then, up to which step they need not remember what was said."""
        now_s = self._loop.time()
        if now_s - self._told_written_s >= _WRITTEN_EVERY_S:
            self._told_written_s = now_s
            for node in self._nodes.values():
                node.written(step)

    def spawn(self, order: actions.Spawn, heritage: Heritage) -> None:
        """Have the order's node fork a worker."""
        place = Place(
            rank=order.rank,
            nproc_per_node=self._settings.nproc_per_node,
            world_size=self._settings.world_size,
        )
        spec = worker_spec(self._settings, place, order, heritage)
        variables = torchrun_environment(place, *self._master)
        variables["EVERSTEP_RUN_ID"] = spec.run_id
        variables["EVERSTEP_INCARNATION"] = str(spec.incarnation)
        node = self._nodes.get(order.node)
        if node is not None:  # else it is lost, which the core is about to hear
            self._homes[order.rank, order.incarnation] = order.node
            node.launch(spec, variables, order.delay_s, heritage.kept)

    def kill(self, rank: int, incarnation: int, why: str) -> None:
        """SIGKILL a worker."""
        node = self._home(rank, incarnation)
        if node is not None:
            node.kill(rank, incarnation, why)

    def dismiss(self, node: int, why: str) -> None:
        """Have a node end its workers; one that is lost hears of it when it comes back."""
        handle = self._nodes.get(node)
        if handle is not None:
            self._forget(node)
            handle.dismiss(why)

    def cut(self, rank: int, incarnation: int, fault: ChaosSpec) -> None:
        """Have a fault on purpose happen to a worker's node."""
        node = self._home(rank, incarnation)
        if node is not None:
            node.cut(fault)

    def fall(self) -> None:
        """End this process: the job has another one for its nodes."""
        os.kill(os.getpid(), signal.SIGKILL)

    def inspect(self) -> None:
        """Have all workers show their stacks."""
        self._lookout.inspect(self._inhabited(), lambda number: self._nodes[number].inspect())

    def send(self, rank: int, incarnation: int, message: ToWorker) -> None:
        """Send a message to a worker."""
        node = self._home(rank, incarnation)
        if node is not None:
            node.send(rank, incarnation, message)

    def send_all(self, members: Iterable[Member], message: ToWorker) -> None:
        """Send a message to several workers: once to each node, for it may be large."""
        by_node: dict[int, list[Member]] = {}
        for member in members:
            if member in self._homes:
                by_node.setdefault(self._homes[member], []).append(member)
        for number, there in by_node.items():
            self._nodes[number].send_all(there, message)

    def peers(self, guardians: Mapping[int, int | None]) -> None:
        """Tell nodes of each other."""
        there = {number: self._nodes[number] for number in guardians if number in self._nodes}
        addresses = {number: node.peer_address for number, node in there.items()}
        for number, node in there.items():
            guardian = guardians[number]
            node.peers(
                nodes.Peers(addresses=addresses, guardian=-1 if guardian is None else guardian)
            )

    def probe(self, order: actions.Probe) -> set[int]:
        """Have nodes try whether they reach each other, as far as they can try. Returns which."""
        listens = {number: node.listens for number, node in self._nodes.items()}
        tries = targets(order.pairs, listens)
        for number, others in tries.items():
            self._nodes[number].probe(
                nodes.Probe(targets=others, within_s=order.within_s, turn=order.turn)
            )
        return set(tries)

    def _probed(self, number: int, answer: nodes.Probed) -> None:
        node = self._nodes.get(number)
        source = "" if node is None else node.peer_address[0]
        self._shell.probed(number, answer.turn, unreached(source, answer.closed))

    def reclaim(self, order: actions.Reclaim) -> None:
        """Ask nodes what they keep of ranks."""
        for number in order.nodes:
            if number in self._nodes:  # else it is lost, which the core is about to hear
                self._nodes[number].reclaim(nodes.Reclaim(turn=order.turn, ranks=order.ranks))

    def keepers(self, generation: int, keepers: Mapping[int, int], steps: tuple[int, ...]) -> None:
        """Tell all nodes who keeps whose copies."""
        self._ferry.keepers(generation, keepers, steps)

    def copy_order(self, node: int, order: nodes.CopyOrder) -> bool:
        """Tell a node something about copies. False if it is not there."""
        handle = self._nodes.get(node)
        if handle is not None:
            handle.copy_order(order)
        return handle is not None

    def home_of(self, rank: int, incarnation: int) -> int | None:
        """The node on which a worker is."""
        return self._homes.get((rank, incarnation))

    def metrics(self, rank: int, step: int, log: Mapping[str, float]) -> None:
        """Keep logged scalars."""
        self._directory.metrics(rank, step, log)

    def trace(self, rank: int, step: int, record: bytes) -> None:
        """Keep a step's record."""
        self._directory.trace(rank, step, record)

    def digests(self, rank: int, digests: Mapping[str, str]) -> None:
        """Keep a rank's final digests."""
        self._directory.digests(rank, digests)

    def end(self, end: actions.End) -> None:
        """The job is over."""
        if not self.ended.done():
            self.ended.set_result(end)

    def _home(self, rank: int, incarnation: int) -> NodeHandle | None:
        number = self._homes.get((rank, incarnation))
        return None if number is None else self._nodes.get(number)

    def _forget(self, number: int) -> list[Member]:
        """The node has no part in the job any more. Returns the members that it had."""
        self._nodes.pop(number, None)
        members = [member for member, home in self._homes.items() if home == number]
        for member in members:
            del self._homes[member]
        self._lookout.lost(number)
        return members

    def _inhabited(self) -> set[int]:
        return set(self._homes.values())

    # ------------------------------------------------------------ what nodes tell

    def _said(self, rank: int, incarnation: int, message: FromWorker) -> None:
        self._shell.message(rank, incarnation, message)

    def _died(self, rank: int, incarnation: int, cause: Cause, before_kill: bool) -> None:
        self._homes.pop((rank, incarnation), None)
        self._shell.died(rank, incarnation, cause, before_kill=before_kill)

    def _silent(self, number: int, evidence: tuple[Evidence, ...]) -> None:
        others = self._inhabited() - {number}
        self._lookout.silent(number, evidence, others, lambda other: self._nodes[other].look())

    def note(self, key: str, text: str) -> None:
        """Something a person should know."""
        self.record(Record(event="note", fields={"key": key, "text": text, "rank": None}))
