"""A node's part in a job, as its agent holds it: from the registration to the last burial.

Theory of operation: what the coordinator asks for is done on the node, what the node tells goes to
the coordinator, and all that a coordinator must know which begins anew is remembered on the way
(memoir.py, peering.py). Without a coordinator the node is let be, until one of its workers can't go
on; then all are stopped. The next coordinator is told all of it, and adopts the node or has it end
its workers. Times in what goes to the coordinator are moved to its clock (clocks.py).

It does not know the connection's making, nor what follows a tenure: agent.py.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping

import msgspec

from everstep.agent import clocks, identity, open_files
from everstep.agent.leftovers import sweep
from everstep.agent.memoir import Memoirs
from everstep.agent.neighbours import Neighbours
from everstep.agent.node import Ground, Node, new_mark
from everstep.agent.outbox import Outbox
from everstep.agent.peering import Home, Peering
from everstep.agent.reach import Reach
from everstep.agent.shipping import Dock
from everstep.agent.terms import AgentSettings, Ending
from everstep.core.hang import Evidence
from everstep.core.words import name_ranks
from everstep.errors import EverstepError, TransientError, UserError
from everstep.types import Cause
from everstep.wire import nodes
from everstep.wire.messages import Fault, FromWorker, Stop, ToWorker
from everstep.wire.network import Link

# A quarter of the backlog at which a connection is given up.
_MOST_UNREAD_BYTES = 64 << 20


class Tenure:
    """One part in the job, from `Register` to the last worker's burial. Implements
    `node.Owner`."""

    def __init__(
        self,
        settings: AgentSettings,
        environ: Mapping[str, str],
        link: Link[nodes.ToNode],
        neighbours: Neighbours,
        bulk_key: bytes,
    ) -> None:
        self.peering: Peering | None = None  # from when the node has a number
        self._settings = settings
        self._neighbours = neighbours
        self._bulk_key = bulk_key
        self._environ = environ
        self._link = link
        self._node: Node | None = None
        self._reach: Reach | None = None
        self._number = -1
        self.run_id = ""  # until the coordinator has said
        self._term = 0
        self._script_digest: str | None = None  # None until the node is open
        self._memoirs = Memoirs()
        self._outbox = Outbox(link, self._put)
        self._absence: asyncio.TimerHandle | None = None  # its end, while it lasts
        self._why_not = ""  # why it lasts, as far as known
        self._opening: asyncio.Task[None] | None = None
        self._slot = -1
        self._say = settings.say
        self._asked_s = 0.0
        self._offset_s = 0.0
        self._unsent_lines = 0
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    async def run(self) -> Ending:
        """Register, and stay until the tenure has ended and nothing of it is left."""
        self._register()
        ending = await self._ending
        self._end_absence()
        if self._reach is not None:
            self._reach.close()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._node is not None:
            await self._node.close(
                terminate=ending.terminate, wait_s=ending.wait_s, keep_copies=ending.anew
            )
        self._send(nodes.Gone())
        return ending

    def _register(self) -> None:
        settings, report = self._settings, self._report()
        before: list[nodes.FromNode] = []
        if report is not None and self.peering is not None:
            before += self.peering.kept()
            before += self._memoirs.unwritten()
        register = nodes.Register(
            name=settings.name,
            host=settings.host,
            address=self._neighbours.host,
            peer_port=self._neighbours.port,
            domain=settings.domain,
            pid=os.getpid(),
            boot_id=clocks.boot_id(),
            versions=identity.versions(),
            report=report,
        )
        self._outbox.send_all([*before, register])

    def _report(self) -> nodes.Report | None:
        """What a coordinator that begins anew must know, but for what goes before it; None while
        there is nothing."""
        if self._script_digest is None or self._node is None or self.peering is None:
            return None
        return self._memoirs.report(
            term=self._term,
            node=self._number,
            peers=self.peering.listed,
            copies=self._node.copies_held(),
            listens=None if self._reach is None else self._reach.listens,
            run_id=self.run_id,
        )

    def end(self, ending: Ending) -> None:
        """The tenure is over; the first ending counts."""
        if not self._ending.done():
            self._ending.set_result(ending)

    def leave_word(self, number: int, grace_s: float) -> None:
        """Tell the coordinator that signal `number` ends this node, before its workers end: their
        deaths are no failures, and another node can take their ranks meanwhile."""
        self._send(nodes.Leaving(signal=number, grace_s=grace_s))

    def hurry(self) -> None:
        """An end that waits for workers waits no longer."""
        if self._node is not None:
            self._node.hurry()

    # ------------------------------------------------------------ without a coordinator

    def lost(self, why: str) -> None:
        """The connection has ended: the coordinator is gone, or has given this node up."""
        self._outbox.clear()
        if self._script_digest is None:  # it has no part yet
            self._leave(f"its agent has lost the coordinator: {why}")
        elif self._absence is None and not self._ending.done():
            limit_s = self._settings.coordinator_timeout_s
            loop = asyncio.get_running_loop()
            self._absence = loop.call_later(limit_s, self._give_up, why)
            self._say(
                f"the coordinator is gone ({why}); the workers go on, and it, or another, is "
                f"awaited for {limit_s:g} s"
            )
            if self._memoirs.disturbed:
                self._park()

    def found(self) -> None:
        """There is a coordinator again, or another one."""
        if self._absence is not None and not self._ending.done():
            self._register()

    @property
    def absent(self) -> bool:
        """Whether the node has a part in the job, and no coordinator."""
        return self._absence is not None

    def waiting(self, why: str) -> None:
        """There is no coordinator yet."""
        self._why_not = f": {why}"

    def read(self) -> None:
        """The coordinator has read more of what was said."""
        self._outbox.go_on()

    def _give_up(self, why: str) -> None:
        limit_s = self._settings.coordinator_timeout_s
        self.failed(
            TransientError(
                f"the coordinator was lost ({why}), and none came within {limit_s:g} s (the "
                f"setting coordinator_timeout_s){self._why_not}; the workers of this node were "
                "ended"
            )
        )

    def _leave(self, why: str) -> None:
        """Kill all workers, and register anew."""
        if self._node is not None:
            self._node.dismiss(why)
        self.hurry()
        self.end(Ending())

    def _end_absence(self) -> None:
        if self._absence is not None:
            self._absence.cancel()
            self._absence = None

    def _park(self) -> None:
        """Have all workers stand still: they can't go on, and their peers may have."""
        for (rank, incarnation), generation in self._memoirs.settled():
            self._tell(rank, incarnation, Stop(generation=generation))

    def _disturbed(self) -> None:
        """Something has happened that a coordinator would answer with a stop."""
        if self._absence is not None:
            self._park()

    def _tell(self, rank: int, incarnation: int, message: ToWorker) -> None:
        if self._node is not None:
            self._memoirs.told(rank, incarnation, message)
            self._node.send(rank, incarnation, message)

    # ------------------------------------------------------------ what the coordinator says

    def take(self, message: nodes.ToNode) -> None:
        """A message of the coordinator."""
        match message:
            case nodes.Welcome():
                self._welcomed(message)
            case nodes.Displaced(why=why):
                self._say(f"the job has gone on without this node ({why}), which joins anew")
                self._leave(f"the job has gone on without this node: {why}")
            case nodes.Refuse(text=text):
                self.end(Ending(error=UserError(text)))
            case nodes.Peers():
                if self.peering is not None:
                    self.peering.began(message)
            case nodes.Reclaim(turn=turn, ranks=ranks):
                kept = [] if self.peering is None else self.peering.kept(ranks)
                self._outbox.send_all([*kept, nodes.Reclaimed(turn=turn)])
            case nodes.Written(step=step):
                self._memoirs.written(step)
            case nodes.Probe():
                if self._reach is not None:
                    self._reach.probe(message)
            case nodes.Tell(to=to, message=told):
                for rank, incarnation in to if not self._ending.done() else ():
                    self._tell(rank, incarnation, told)
            case nodes.Finish(terminate=terminate, wait_s=wait_s, exit_code=exit_code):
                if not self._ending.done():
                    self._say(f"the job is over, with exit code {exit_code}")
                if wait_s == 0:
                    self.hurry()
                self.end(Ending(terminate=terminate, wait_s=wait_s, exit_code=exit_code))
            case _:
                if isinstance(message, nodes.Launch):
                    self._launched(message)
                if self._node is not None and not self._ending.done():
                    _obey(self._node, message)

    def _launched(self, order: nodes.Launch) -> None:
        nproc = order.spec.local_world_size
        slot = order.spec.rank // nproc
        if slot != self._slot:
            self._slot = slot
            ranks = name_ranks(range(slot * nproc, (slot + 1) * nproc))
            self._say(f"node {self._number} holds slot {slot}: {ranks}")
        self._memoirs.launched(order.spec)
        if self.peering is not None:
            self.peering.launched(order.spec, order.kept)

    def _welcomed(self, welcome: nodes.Welcome) -> None:
        if self._ending.done() or welcome.adopted != (self._script_digest is not None):
            return
        self._offset_s = 0.0
        if welcome.boot_id != clocks.boot_id():
            self._offset_s = clocks.offset(self._asked_s, time.monotonic(), welcome.clock_s)
        self._term = welcome.term
        if welcome.adopted:
            self._end_absence()
            if self._node is not None:  # who was told what it had found is gone: nobody judges it
                self._node.copy_order(nodes.Judged(keep=()))
            self._say(f"there is a coordinator again (term {welcome.term})")
            for said in self._memoirs.unanswered():
                self._send_said(said)
            return
        self._number = welcome.node
        settings = welcome.settings
        self.run_id = settings.run_id
        open_files.raise_limit(
            open_files.OF_AN_AGENT + open_files.PER_WORKER * settings.nproc_per_node
        )
        logs = self._settings.log_dir / settings.run_id / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        ground = Ground(
            environ=self._environ,
            shm_dir=self._settings.shm_dir,
            shm_name=f"{settings.run_id}-n{welcome.node}",
            logs=logs,
            zygote_log=logs / f"zygote-n{welcome.node}.log",
            host=self._neighbours.host,
            mark=new_mark(),
            number=welcome.node,
            dock=Dock(
                host=self._neighbours.host,
                ports=self._settings.ports,
                key=self._bulk_key,
                on_refused=self.stranger,
                bytes_per_s=settings.recovery_bytes_per_s,
                transfer_timeout_s=settings.transfer_timeout_s,
                transfer_stall_s=settings.transfer_stall_s,
            ),
        )
        node = self._node = Node(settings, ground, self)
        home = Home(send=self._tell, obey=node.copy_order, tell=self._send_news, note=self.note)
        self.peering = Peering(self._neighbours, welcome.node, home)
        if settings.preflight_s and node.shipping is not None:
            self._reach = Reach(node.shipping, self._send)
        self._opening = asyncio.get_running_loop().create_task(self._open(self._node, settings))

    async def _open(self, node: Node, settings: nodes.NodeSettings) -> None:
        loop = asyncio.get_running_loop()
        try:
            digest = identity.script_digest(settings.script)
            # What dead jobs left. What this one's own agents left is looked through instead.
            await loop.run_in_executor(None, sweep, self._settings.shm_dir, settings.run_id)
            found = node.adopt_copies()
            await node.open()
        except Exception as error:  # noqa: BLE001 - told to the coordinator, and raised by the agent
            self.failed(error)
            return
        self._script_digest = digest
        self._say(
            f"this is node {self._number} of run {settings.run_id}, and ready; a spare until it is "
            "given a slot"
        )
        listens = None if self._reach is None else self._reach.listens
        self._send(nodes.Joined(script_digest=digest, listens=listens, found=found))

    # ------------------------------------------------------------ Owner, for the node

    def said(self, rank: int, incarnation: int, message: FromWorker) -> None:
        """A worker said something."""
        self._memoirs.said(rank, incarnation, message)
        if self.peering is not None:
            self.peering.said(rank, incarnation, message)
        if isinstance(message, Fault):
            self._disturbed()
        self._send_said(nodes.Said(rank=rank, incarnation=incarnation, message=message))

    def _send_said(self, said: nodes.Said) -> None:
        if self._offset_s:
            moved = clocks.message(said.message, self._offset_s)
            said = nodes.Said(rank=said.rank, incarnation=said.incarnation, message=moved)
        self._send(said)

    def died(self, rank: int, incarnation: int, cause: Cause, *, before_kill: bool) -> None:
        """A worker is gone."""
        died = nodes.Died(rank=rank, incarnation=incarnation, cause=cause, before_kill=before_kill)
        self._memoirs.died(died)
        self._disturbed()
        self._send(msgspec.structs.replace(died, cause=clocks.cause(cause, self._offset_s)))

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """A line that a worker printed. Lines are let go when the coordinator lags behind, and that
        is said once it has caught up: they are in the log, and it must not be lost for them."""
        if self._link.unread_bytes > _MOST_UNREAD_BYTES or self._outbox.waits:
            self._unsent_lines += 1
            return
        if self._unsent_lines:
            text = f"{self._unsent_lines} lines of output came too fast to be shown; see the logs"
            self._unsent_lines = 0
            self.note(f"output-unsent-{time.monotonic()}", text)
        self._send(nodes.Output(rank=rank, incarnation=incarnation, stream=stream, line=line))

    def silent(self, evidence: tuple[Evidence, ...]) -> None:
        """Some worker has been silent for longer than it may."""
        self._disturbed()
        self._send(nodes.Silent(evidence=clocks.evidence(evidence, self._offset_s)))

    def looked(self, evidence: tuple[Evidence, ...]) -> None:
        """What all workers show."""
        self._send(nodes.Looked(evidence=clocks.evidence(evidence, self._offset_s)))

    def shown(self, shown: nodes.Shown) -> None:
        """The stacks of all workers."""
        evidence = clocks.evidence(shown.evidence, self._offset_s)
        self._send(msgspec.structs.replace(shown, evidence=evidence))

    def copy_news(self, news: nodes.CopyNews) -> None:
        """Something about copies."""
        if self.peering is not None:
            self.peering.copy_news(news)

    def _send_news(self, news: nodes.CopyNews) -> None:
        self._send(news)

    def note(self, key: str, text: str) -> None:
        """Something a person should know."""
        self._send(nodes.Note(key=key, text=text))

    def failed(self, error: BaseException) -> None:
        """The node can not go on."""
        exit_code = error.exit_code if isinstance(error, EverstepError) else 1
        words = str(error) if isinstance(error, EverstepError) else repr(error)
        self._send(nodes.Failed(text=words, exit_code=exit_code))
        self.end(Ending(error=error))

    def stranger(self, address: str, why: str) -> None:
        self.note(f"stranger-{address}", f"a connection from {address} was refused: {why}")

    def _send(self, message: nodes.FromNode) -> None:
        self._outbox.send(message)

    def _put(self, message: nodes.FromNode) -> None:
        if isinstance(message, nodes.Register):  # it may have waited
            self._asked_s = time.monotonic()
            message = msgspec.structs.replace(message, clock_s=self._asked_s)
        self._link.send(message)  # without a connection it is not: the next report has it


def _obey(node: Node, message: nodes.ToNode) -> None:
    """Do what the coordinator asks of a node that is there."""
    match message:
        case nodes.Launch(spec=spec, environment=environment, delay_s=delay_s):
            node.launch(spec, environment, delay_s)
        case nodes.Kill(rank=rank, incarnation=incarnation, why=why):
            node.kill(rank, incarnation, why)
        case nodes.Look():
            node.look()
        case nodes.Inspect():
            node.inspect()
        case nodes.Cut(fault=fault):
            node.cut(fault)
        case _ if isinstance(message, nodes.CopyOrder):
            node.copy_order(message)
