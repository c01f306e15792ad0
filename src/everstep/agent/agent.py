"""The agent: a node of a job as a process of its own.

Theory of operation: it connects to the coordinator, registers, and from then on runs workers as it
is told; what they say and print, and how they end, goes back over the connection. When that ends
the agent is *absent*: either the coordinator is gone, and then the workers' steps go on, or it has
given the node up, and then they can't, since no step ends without all peers. So the workers are let
be, until one of them fails, dies or falls silent: then all are told to stop, and stand still with
their state. To the next coordinator that it reaches the agent reports all of this. One that takes
over the job adopts it; one that has gone on without it displaces it: the workers are killed at
once, and the agent registers anew, as another node, which begins as a spare. So nothing is ever
merged of an agent that was away and a job that went on. A tenure that the coordinator finishes is
the agent's end, and so is a signal, and an absence that lasts too long.

Times in what goes to the coordinator are moved to its clock (clocks.py).

It does not decide anything. Paths in what it is told are not used: its logs and its files in shared
memory lie where its own settings say.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep.agent import clocks, identity
from everstep.agent.leftovers import sweep
from everstep.agent.memoir import Memoirs
from everstep.agent.node import Ground, Node, failures_go_to, new_mark
from everstep.agent.shipping import Dock
from everstep.core.hang import Evidence
from everstep.errors import EverstepError, TransientError, UserError
from everstep.types import Cause
from everstep.wire import nodes
from everstep.wire.messages import Fault, FromWorker, Stop, ToWorker
from everstep.wire.network import Link
from everstep.wire.secret import Secret

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A quarter of the backlog at which a connection is given up.
_MOST_UNREAD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Where an agent finds its coordinator (host and port) and keeps its files. `name`, `host`,
    `domain`: as it registers. `interface`: whose address its workers listen at; "": that which
    leads to the coordinator. `join_timeout_s`: how long it looks
    for a coordinator at first. `coordinator_timeout_s`: how long it goes on without one. `grace_s`:
    between SIGTERM and SIGKILL of its workers when it is asked to end."""

    coordinator: tuple[str, int]
    name: str
    host: str
    domain: str
    interface: str
    log_dir: Path
    shm_dir: Path
    join_timeout_s: float
    coordinator_timeout_s: float
    grace_s: float


def run_agent(settings: AgentSettings, secret: Secret, environ: Mapping[str, str]) -> int:
    """Be a node until the job is over. Returns the exit code. Main thread; blocks; afterwards no
    process of the node is left. `environ`: what workers inherit.

    Raises UserError when it is refused, or for what must be changed here; EverstepError when there
    is no coordinator.
    """
    return asyncio.run(_Agent(settings, secret, environ).run())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """How a tenure ends. `terminate`, `wait_s`: as Node.close has them. `exit_code`: of the agent;
    None: it registers anew. `error`: it is raised."""

    terminate: bool = False
    wait_s: float = 0.0
    exit_code: int | None = None
    error: BaseException | None = None


class _Agent:
    def __init__(self, settings: AgentSettings, secret: Secret, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._secret = secret
        self._environ = environ
        self._parent = os.getppid()
        self._joined = asyncio.Event()
        self._newest_term = 0
        self._why_not = ""
        self._leaving: int | None = None
        self._tenure: _Tenure | None = None
        self._failure: BaseException | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        failures_go_to(self._failed)
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._leave, number)
        sweep(self._settings.shm_dir)
        self._link: Link[nodes.ToNode] = Link(
            host=self._settings.coordinator[0],
            port=self._settings.coordinator[1],
            secret=self._secret,
            receives=nodes.ToNode,
            on_joined=self._found,
            on_message=self._take,
            on_lost=self._lost,
            on_waiting=self._waiting,
        )
        try:
            while True:
                if self._leaving is None:  # else it was asked while its tenure ended by itself
                    await self._until_joined()
                if self._leaving is not None:
                    return 128 + self._leaving
                key = self._secret.bulk_key()
                self._tenure = _Tenure(self._settings, self._environ, self._link, key)
                ending = await self._tenure.run()
                self._tenure = None
                if ending.error is not None:
                    raise ending.error
                if ending.exit_code is not None:
                    return ending.exit_code
        finally:
            self._link.close()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def _until_joined(self) -> None:
        limit_s = self._settings.join_timeout_s
        try:
            await asyncio.wait_for(self._joined.wait(), limit_s)
        except TimeoutError:
            raise TransientError(
                f"{self._why_not or 'no coordinator answered'}; it was tried for {limit_s:g} s. Is "
                "the job still there?"
            ) from None
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------ what comes in

    def _found(self) -> None:
        self._joined.set()
        if self._tenure is not None:
            self._tenure.found()

    def _take(self, message: nodes.ToNode) -> None:
        if isinstance(message, nodes.Welcome):
            if message.term < self._newest_term:
                newest = self._newest_term
                self._link.leave(f"term {message.term} has ended: that of {newest} has begun")
                return
            self._newest_term = message.term
        if self._tenure is not None:
            self._tenure.take(message)

    def _lost(self, why: str) -> None:
        self._joined.clear()
        if self._tenure is not None:
            self._tenure.lost(why)

    def _waiting(self, why: str) -> None:
        self._why_not = why

    def _leave(self, number: int) -> None:
        """A signal asks for the end; the second, or that of a launcher that is dead, at once."""
        orphan = os.getppid() != self._parent
        wait_s = 0.0 if orphan else self._settings.grace_s
        if self._tenure is None:
            self._joined.set()
        elif self._leaving is not None or orphan:
            self._tenure.hurry()
        else:
            self._tenure.leave_word(number, wait_s)
        self._leaving = number
        if self._tenure is not None:
            self._tenure.end(_Ending(terminate=True, wait_s=wait_s, exit_code=128 + number))

    def _failed(self, error: BaseException) -> None:
        if self._tenure is not None:
            self._tenure.failed(error)
        else:
            self._failure = error
            self._joined.set()


class _Tenure:
    """One part in the job, from `Register` to the last worker's burial. Implements
    `node.Owner`."""

    def __init__(
        self,
        settings: AgentSettings,
        environ: Mapping[str, str],
        link: Link[nodes.ToNode],
        bulk_key: bytes,
    ) -> None:
        self._settings = settings
        self._bulk_key = bulk_key
        self._environ = environ
        self._link = link
        self._node: Node | None = None
        self._number = -1
        self._term = 0
        self._script_digest: str | None = None  # None until the node is open
        self._memoirs = Memoirs()
        self._absence: asyncio.TimerHandle | None = None  # its end, while it lasts
        self._opening: asyncio.Task[None] | None = None
        self._asked_s = 0.0
        self._offset_s = 0.0
        self._unsent_lines = 0
        self._ending: asyncio.Future[_Ending] = asyncio.get_running_loop().create_future()

    async def run(self) -> _Ending:
        """Register, and stay until the tenure has ended and nothing of it is left."""
        settings = self._settings
        address = (
            identity.address_of(settings.interface)
            if settings.interface
            else identity.address_towards(*settings.coordinator)
        )
        self._address = address
        self._register()
        ending = await self._ending
        self._end_absence()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._node is not None:
            await self._node.close(terminate=ending.terminate, wait_s=ending.wait_s)
        self._send(nodes.Gone())
        return ending

    def _register(self) -> None:
        settings = self._settings
        self._asked_s = time.monotonic()
        self._send(
            nodes.Register(
                name=settings.name,
                host=settings.host,
                address=self._address,
                domain=settings.domain,
                pid=os.getpid(),
                boot_id=clocks.boot_id(),
                versions=identity.versions(),
                report=self._report(),
            )
        )

    def _report(self) -> nodes.Report | None:
        """What a coordinator that begins anew must know; None while there is nothing."""
        if self._script_digest is None:
            return None
        return self._memoirs.report(term=self._term, node=self._number, kept={}, copies=())

    def end(self, ending: _Ending) -> None:
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
        if self._script_digest is None:  # it has no part yet
            self._leave(f"its agent has lost the coordinator: {why}")
        elif self._absence is None and not self._ending.done():
            limit_s = self._settings.coordinator_timeout_s
            loop = asyncio.get_running_loop()
            self._absence = loop.call_later(limit_s, self._give_up, why)
            if self._memoirs.disturbed:
                self._park()

    def found(self) -> None:
        """There is a coordinator again, or another one."""
        if self._absence is not None and not self._ending.done():
            self._register()

    def _give_up(self, why: str) -> None:
        limit_s = self._settings.coordinator_timeout_s
        self.failed(
            TransientError(
                f"the coordinator was lost ({why}), and none came within {limit_s:g} s (the "
                "setting coordinator_timeout_s); the workers of this node were ended"
            )
        )

    def _leave(self, why: str) -> None:
        """Kill all workers, and register anew."""
        if self._node is not None:
            self._node.dismiss(why)
        self.hurry()
        self.end(_Ending())

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
                self._leave(f"the job has gone on without this node: {why}")
            case nodes.Refuse(text=text):
                self.end(_Ending(error=UserError(text)))
            case nodes.Written(step=step):
                self._memoirs.written(step)
            case nodes.Tell(rank=rank, incarnation=incarnation, message=told):
                if not self._ending.done():
                    self._tell(rank, incarnation, told)
            case nodes.Finish(terminate=terminate, wait_s=wait_s, exit_code=exit_code):
                if wait_s == 0:
                    self.hurry()
                self.end(_Ending(terminate=terminate, wait_s=wait_s, exit_code=exit_code))
            case _:
                if isinstance(message, nodes.Launch):
                    self._memoirs.launched(message.spec)
                if self._node is not None and not self._ending.done():
                    _obey(self._node, message)

    def _welcomed(self, welcome: nodes.Welcome) -> None:
        if self._ending.done() or welcome.adopted != (self._script_digest is not None):
            return
        self._offset_s = 0.0
        if welcome.boot_id != clocks.boot_id():
            self._offset_s = clocks.offset(self._asked_s, time.monotonic(), welcome.clock_s)
        self._term = welcome.term
        if welcome.adopted:
            self._end_absence()
            return
        self._number = welcome.node
        settings = welcome.settings
        logs = self._settings.log_dir / settings.run_id / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        ground = Ground(
            environ=self._environ,
            shm_dir=self._settings.shm_dir,
            shm_name=f"{settings.run_id}-n{welcome.node}",
            logs=logs,
            zygote_log=logs / f"zygote-n{welcome.node}.log",
            host=self._address,
            mark=new_mark(),
            number=welcome.node,
            dock=Dock(
                host=self._address, ports=(0,), key=self._bulk_key, on_refused=self._stranger
            ),
        )
        self._node = Node(settings, ground, self)
        self._opening = asyncio.get_running_loop().create_task(self._open(self._node, settings))

    async def _open(self, node: Node, settings: nodes.NodeSettings) -> None:
        try:
            digest = identity.script_digest(settings.script)
            await node.open()
        except Exception as error:  # noqa: BLE001 - told to the coordinator, and raised by the agent
            self.failed(error)
            return
        self._script_digest = digest
        self._send(nodes.Joined(script_digest=digest))

    # ------------------------------------------------------------ Owner, for the node

    def said(self, rank: int, incarnation: int, message: FromWorker) -> None:
        """A worker said something."""
        self._memoirs.said(rank, incarnation, message)
        if isinstance(message, Fault):
            self._disturbed()
        moved = clocks.message(message, self._offset_s) if self._offset_s else message
        self._send(nodes.Said(rank=rank, incarnation=incarnation, message=moved))

    def died(self, rank: int, incarnation: int, cause: Cause, *, before_kill: bool) -> None:
        """A worker is gone."""
        died = nodes.Died(
            rank=rank,
            incarnation=incarnation,
            cause=clocks.cause(cause, self._offset_s),
            before_kill=before_kill,
        )
        self._memoirs.died(died)
        self._disturbed()
        self._send(died)

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """A line that a worker printed. Lines are let go when the coordinator lags behind, and that
        is said once it has caught up: they are in the log, and it must not be lost for them."""
        if self._link.unread_bytes > _MOST_UNREAD_BYTES:
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
        self._send(news)

    def note(self, key: str, text: str) -> None:
        """Something a person should know."""
        self._send(nodes.Note(key=key, text=text))

    def failed(self, error: BaseException) -> None:
        """The node can not go on."""
        exit_code = error.exit_code if isinstance(error, EverstepError) else 1
        words = str(error) if isinstance(error, EverstepError) else repr(error)
        self._send(nodes.Failed(text=words, exit_code=exit_code))
        self.end(_Ending(error=error))

    def _stranger(self, address: str, why: str) -> None:
        self.note(f"stranger-{address}", f"a connection from {address} was refused: {why}")

    def _send(self, message: nodes.FromNode) -> None:
        # Without a connection nobody is there to be told; its end ends the tenure.
        self._link.send(message)


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
        case nodes.Cut(whole=whole):
            node.cut(whole=whole)
        case _ if isinstance(message, nodes.CopyOrder):
            node.copy_order(message)
