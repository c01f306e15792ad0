"""The coordinator's side of agents elsewhere: their registration, and each as a node of the fleet.

Theory of operation: an agent that connects says who it is and is checked: versions that differ, a
name that another living agent has, a script of other contents are refused, with the reason at both
ends. One that is accepted gets the next number, imports what the script imports, and is a node of
the job when it says so. The end of its connection is the loss of the node; a node that the core
dismisses is hung up on. Numbers are never used again: an agent that comes back is a new node, and
what was sent to or by the old one reaches nobody. Only while this coordinator takes over a job that
runs, an agent that reports its part under an earlier one is adopted with it, and keeps its number.
One that reports its part under a coordinator that is none before this one, nor this, belongs to a
job of which nothing is known here: it is let be. After the job's end, one that comes back is told.

It does not decide which node runs what (core). Loop thread only; nothing blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence

from everstep.agent import clocks
from everstep.agent.desk import Desk
from everstep.agent.fleet import Fleet, LeaveError
from everstep.agent.parts import Parts
from everstep.agent.preflight import Plan, Preflight, Station
from everstep.agent.remote_node import RemoteNode, tell_owner
from everstep.core.words import NODE_LEFT, name_signal
from everstep.errors import TransientError, UserError
from everstep.types import TERM_STRIDE, Cause, CauseKind, Record
from everstep.wire import nodes
from everstep.wire.clients import AgentNow, FromClient
from everstep.wire.network import Hub, Limits
from everstep.wire.secret import Secret

_Process = tuple[str, int]  # boot_id of its host, and pid
_STRAY_S = 1.0  # before it is hung up on


class CutOffError(LeaveError, TransientError):
    """No node is heard any more, all at once. They go on, and know more than their coordinator."""


class RunGoesOnError(LeaveError, UserError):
    """Agents have a part in a run that this coordinator does not know, and may not begin again."""


class Registry:
    """Listens for agents, and makes nodes of them for the fleet.

    `settings`, `versions`, `script_digest`: of the job, which all must share. `must_start`: an
    agent that fails before it has joined ends the job, since all others would, too. `term`: which
    of the job's coordinators this is. `preflight`: None: nodes are admitted untried. Implements
    `preflight.Gatekeeper`.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        host: str,
        ports: Sequence[int],
        secret: Secret,
        lease_s: float,
        settings: nodes.NodeSettings,
        versions: Mapping[str, str],
        script_digest: str,
        nproc_per_node: int,
        must_start: bool,
        term: int = 0,
        preflight: Plan | None = None,
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._versions = versions
        self._script_digest = script_digest
        self._nproc_per_node = nproc_per_node
        self._must_start = must_start
        self._nodes: dict[int, RemoteNode] = {}  # by peer
        self._parts = Parts()
        self._leaving: dict[int, RemoteNode] = {}  # those that end by themselves, by peer
        self._displaced: set[int] = set()  # peers that have yet to end their workers
        self._welcomed: dict[int, _Process] = {}  # by number, all that ever were
        self._strays: set[_Process] = set()  # that were spoken of
        self._untold: dict[int, nodes.Report] = {}  # of those that wait to be admitted, by number
        self._timers: dict[int, asyncio.TimerHandle] = {}  # until strays are hung up on, by peer
        self.told: set[int] = set()
        """Numbers of those that have ended, and know that the job has."""
        self._came: set[int] = set()  # numbers of those that have reported their part
        self._some_came = asyncio.Event()
        self._term = term
        self._lease_s = lease_s
        self._preflight = Preflight(
            self,
            preflight or Plan(needed=0, ports="", within_s=0.0),
            begun=term > 0,
            call_later=asyncio.get_running_loop().call_later,
        )
        self._next_number = term * TERM_STRIDE
        self._hub: Hub[nodes.FromNode | FromClient] = Hub(
            host=host,
            ports=ports,
            secret=secret,
            receives=nodes.FromNode | FromClient,
            on_joined=lambda *_: None,  # it has to say who it is
            on_message=self._take,
            on_lost=self._lost,
            on_refused=self._stranger,
            on_cut_off=self._cut_off,
            limits=Limits(lease_s=lease_s),
        )
        self.port = self._hub.port
        self._desk = Desk(
            fleet,
            self._hub,
            self._agents,
            run_id=settings.run_id,
            script=settings.script,
            term=term,
        )

    def close(self) -> None:
        """Hang up on all, and listen no longer."""
        for timer in self._timers.values():
            timer.cancel()
        self._preflight.close()
        self._desk.close()
        self._hub.close()

    # ------------------------------------------------------------ registration

    def _take(self, peer: int, message: nodes.FromNode | FromClient) -> None:
        node = self._nodes.get(peer)
        if isinstance(message, FromClient):
            self._desk.take(peer, message)
        elif isinstance(message, nodes.Keeps | nodes.Unwritten):
            self._parts.take(peer, message)
        elif isinstance(message, nodes.Register):
            self._register(peer, self._parts.register(peer, message, time.monotonic()))
        elif peer in self._leaving:
            if isinstance(message, nodes.Output | nodes.Note):
                tell_owner(self._leaving[peer].berth, message)
        elif peer in self._displaced:
            pass  # how its workers end concerns nobody
        elif node is None:
            self._drop(peer, "it has not registered")
        elif isinstance(message, nodes.Joined):
            self._join(peer, node, message)
        elif isinstance(message, nodes.Probed) and message.turn == 0:
            self._preflight.probed(node.number, message)
        elif isinstance(message, nodes.Failed):
            self._failed(peer, node, message)
        elif isinstance(message, nodes.Leaving):
            self._leave(peer, node, message)
        elif isinstance(message, nodes.Gone):
            node.gone.set()
            self.told.add(node.number)
        elif isinstance(message, nodes.Reclaimed):
            tell_owner(node.berth, self._parts.reclaimed(peer, message))
        else:
            tell_owner(node.berth, message)

    def _register(self, peer: int, who: nodes.Register) -> None:
        self._displaced.discard(peer)
        twin = next((n for n in self._nodes.items() if n[1].who.name == who.name), None)
        if twin is not None and _process(twin[1].who) == _process(who):
            self._hub.drop(twin[0], "its agent has come again")
            self._lost(twin[0], "its agent has come again by another connection")
            twin = None
        report = who.report
        if report is not None and (why := self._why_stray(who, report)):
            self._let_be(peer, who, why, ours=report.run_id == self._settings.run_id)
        elif report is not None and self._fleet.ended.done():
            self._end(peer, who, report)
        elif why := self._objection(peer, who, None if twin is None else twin[1]):
            self._refuse(peer, who, why)
        elif report is None:
            number, self._next_number = self._next_number, self._next_number + 1
            self._admit(peer, who, number)
        elif self._is_adoptable(report):
            self._adopt(peer, who, report)
        else:
            self._displace(peer, who, report)

    def _is_adoptable(self, report: nodes.Report) -> bool:
        """Whether an agent of an earlier coordinator's keeps its part: while such are waited for,
        and a spare also later."""
        spare = report.slot < 0 and report.term < self._term
        return (self._fleet.reconvenes or spare) and report.node not in self._welcomed

    def _why_stray(self, who: nodes.Register, report: nodes.Report) -> str:
        """Why what an agent reports is no part of the job that is coordinated here; "" if it may
        be."""
        if report.run_id != self._settings.run_id:
            return f"it has a part in the run {report.run_id}"
        ours = self._welcomed.get(report.node) == _process(who)
        if report.term > self._term or (report.term == self._term and not ours):
            return (
                f"it has a part in this run under a coordinator of term {report.term}, and nothing "
                f"is known of that one here, where the term is {self._term}"
            )
        return ""

    def _let_be(self, peer: int, who: nodes.Register, why: str, *, ours: bool) -> None:
        """Its workers go on, and another coordinator may come for them. If it is `ours`, of the
        same run, and nothing has begun here, nothing does."""
        if _process(who) not in self._strays:
            self._strays.add(_process(who))
            text = f"agent {who.name} on host {who.host} is let be: {why}"
            self._note(f"stray-{who.name}-{who.pid}", text)
        if ours and not (self._fleet.ended.done() or self._fleet.inhabited):
            self._fleet.failed(
                RunGoesOnError(
                    f"a job goes on, of which nothing is known here: agent {who.name} on host "
                    f"{who.host}: {why}. Start its coordinator with its own --run-id and --log-dir;"
                    " if its directory is lost, start it here again, until its term is high enough "
                    "for what the agents tell"
                )
            )
        # It comes again at once, and must not come all the time.
        loop = asyncio.get_running_loop()
        why = f"this is not its coordinator: {why}"
        self._timers[peer] = loop.call_later(_STRAY_S, self._drop, peer, why)

    def _end(self, peer: int, who: nodes.Register, report: nodes.Report) -> None:
        """The job is over, and it was not there to hear of that."""
        node = self._node(peer, who, report.node)
        terminate, wait_s = self._fleet.manner
        node.finish(terminate=terminate, wait_s=wait_s)
        self._has_come(report.node)

    def _adopt(self, peer: int, who: nodes.Register, report: nodes.Report) -> None:
        """It goes on with its part. One that has no slot may have been held by the preflight."""
        node = self._admit(peer, who, report.node)
        node.joined = True
        self._has_come(report.node)
        self._untold[report.node] = report
        if report.slot >= 0:
            self.admit(report.node)
            self._preflight.known(_station(node))
        else:
            self._preflight.joined(_station(node))

    def _has_come(self, number: int) -> None:
        self._came.add(number)
        self._some_came.set()

    async def all_came(self, numbers: Collection[int]) -> None:
        """Wait until the nodes of these numbers have come back."""
        while not self._came.issuperset(numbers):
            self._some_came.clear()
            await self._some_came.wait()

    def _displace(self, peer: int, who: nodes.Register, report: nodes.Report) -> None:
        """Its part in the job is over; it registers anew."""
        if report.term == self._term:
            why = "its connection was lost, and with it its place"
        else:
            why = f"the coordinator of term {self._term} has not waited for it"
        fields = {"node": report.node, "name": who.name, "host": who.host, "text": why}
        self._fleet.record(Record(event="node_displaced", fields=fields))
        self._displaced.add(peer)
        self._hub.send(peer, nodes.Displaced(why=why, term=self._term))

    def _node(self, peer: int, who: nodes.Register, number: int) -> RemoteNode:
        node = RemoteNode(
            number,
            who,
            self._fleet.berth(number),
            lambda message: self._hub.send(peer, message),
            lambda reason: self._dismiss(peer, reason),
            lambda: self._fleet.exit_code,
        )
        self._nodes[peer] = node
        self._welcomed[number] = _process(who)
        self._fleet.add(number, node)
        return node

    def _admit(self, peer: int, who: nodes.Register, number: int) -> RemoteNode:
        node = self._node(peer, who, number)
        fields = {
            "node": number,
            "name": who.name,
            "host": who.host,
            "address": who.address,
            "domain": who.domain,
            "pid": who.pid,
        }
        self._fleet.record(Record(event="node_registered", fields=fields))
        self._hub.send(
            peer,
            nodes.Welcome(
                node=number,
                term=self._term,
                adopted=who.report is not None,
                settings=self._settings,
                clock_s=time.monotonic(),
                boot_id=clocks.boot_id(),
            ),
        )
        return node

    def _objection(self, peer: int, who: nodes.Register, twin: RemoteNode | None) -> str:
        """Why an agent can't take part; "" if it can."""
        if peer in self._nodes:
            return "it registers twice on one connection"
        if self._desk.knows(peer):
            return "it has asked as a client; an agent has a connection of its own"
        if self._fleet.ended.done():
            return "the job is over"
        if twin is not None:
            return (
                f"node {twin.number} on host {twin.who.host} (process {twin.who.pid}) has that "
                "name already; start the agent once, or give it another --name"
            )
        for what, wanted in self._versions.items():
            found = who.versions.get(what, "")
            if found != wanted:
                return (
                    f"it has {what} {found or '(none)'}, and the job has {wanted}; install the "
                    "same version on all hosts, since another may compute other bits"
                )
        return ""

    def _join(self, peer: int, node: RemoteNode, joined: nodes.Joined) -> None:
        if joined.script_digest != self._script_digest:
            script = self._settings.script.target
            why = (
                f"its {script} has other contents than the coordinator's; copy one version to all "
                "hosts"
            )
            self._refuse(peer, node.who, why)
            self._lost(peer, why)
        elif not node.joined:
            node.joined, node.listens, node.found = True, joined.listens, joined.found
            self._preflight.joined(_station(node))

    # ------------------------------------------------------------ the preflight's word

    def probe(self, number: int, order: nodes.Probe) -> None:
        """Have a node try whether it reaches others."""
        self._hub.send(self._peer_of(number), order)

    def admit(self, number: int) -> None:
        """It takes part in the job."""
        node = self._nodes[self._peer_of(number)]
        who, report = node.who, self._untold.pop(number, None)
        if report is not None and self._fleet.reconvenes:
            self._fleet.back(who.host, who.domain, report)
        else:
            self._fleet.joined(number, who.host, who.domain, self._nproc_per_node, node.found)

    def refuse(self, number: int, why: str) -> None:
        """It can't take part."""
        peer = self._peer_of(number)
        self._refuse(peer, self._nodes[peer].who, why)
        self._lost(peer, why)

    def refuse_job(self, why: str) -> None:
        """The job can't begin on these nodes."""
        self._fleet.failed(UserError(why))

    def _peer_of(self, number: int) -> int:
        return next(peer for peer, node in self._nodes.items() if node.number == number)

    # ------------------------------------------------------------ refusals

    def _refuse(self, peer: int, who: nodes.Register, why: str) -> None:
        text = f"agent {who.name} on host {who.host} is refused: {why}"
        self._note(f"refused-{who.name}", text)
        text = f"refused by the coordinator: {why}"
        self._hub.send(peer, nodes.Refuse(text=text, term=self._term))
        self._drop(peer, why)

    def _drop(self, peer: int, why: str) -> None:
        """Hang up, and forget what came before a registration. Nothing, if it has gone."""
        self._forget(peer)
        self._hub.drop(peer, why)

    def _forget(self, peer: int) -> None:
        self._parts.lost(peer)
        self._displaced.discard(peer)
        self._desk.lost(peer)
        timer = self._timers.pop(peer, None)
        if timer is not None:
            timer.cancel()

    # ------------------------------------------------------------ ends

    def _failed(self, peer: int, node: RemoteNode, failed: nodes.Failed) -> None:
        text = f"its agent failed: {failed.text}"
        if self._must_start and not node.joined:
            error = UserError(failed.text)
            error.exit_code = failed.exit_code
            self._fleet.failed(error)
        self._hub.drop(peer, text)
        self._lost(peer, text)

    def _leave(self, peer: int, node: RemoteNode, leaving: nodes.Leaving) -> None:
        """Its node is lost, and that it still ends its workers concerns nobody: its place is free
        at once."""
        why = f"its agent was asked to end by {name_signal(leaving.signal)}"
        self._lost(peer, why, signature=NODE_LEFT)
        self._leaving[peer] = node

    def _cut_off(self) -> None:
        if not self._fleet.ended.done():
            self._fleet.failed(
                CutOffError(
                    f"nothing was heard of any node for {self._lease_s:g} s, so this host may be "
                    "the one that is cut off; the coordinator begins anew, and waits for the nodes"
                )
            )

    def _lost(self, peer: int, why: str, *, signature: str = "node lost") -> None:
        self._forget(peer)
        self._leaving.pop(peer, None)
        node = self._nodes.pop(peer, None)
        if node is None:
            return
        node.gone.set()
        self._untold.pop(node.number, None)
        self._preflight.lost(node.number)
        if not self._fleet.ended.done():
            cause = Cause(kind=CauseKind.NODE, text=why, signature=signature)
            self._fleet.lost(node.number, cause)

    def _dismiss(self, peer: int, why: str) -> None:
        node = self._nodes.pop(peer, None)
        if node is not None:
            node.gone.set()
            self._untold.pop(node.number, None)
            self._preflight.lost(node.number)
        self._drop(peer, why)

    def _agents(self) -> tuple[AgentNow, ...]:
        return tuple(
            AgentNow(
                node=node.number,
                name=node.who.name,
                host=node.who.host,
                address=node.who.address,
                pid=node.who.pid,
                joined=node.joined,
            )
            for node in self._nodes.values()
        )

    def _stranger(self, address: str, why: str) -> None:
        self._note(f"stranger-{address}", f"a connection from {address} was refused: {why}")

    def _note(self, key: str, text: str) -> None:
        fields = {"key": key, "text": text, "rank": None}
        self._fleet.record(Record(event="note", fields=fields))


def _process(who: nodes.Register) -> _Process:
    return who.boot_id, who.pid


def _station(node: RemoteNode) -> Station:
    return Station(
        number=node.number, host=node.who.host, address=node.who.address, listens=node.listens
    )
