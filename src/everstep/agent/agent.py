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
from collections.abc import Mapping

from everstep.agent import identity
from everstep.agent.neighbours import Neighbours
from everstep.agent.node import failures_go_to
from everstep.agent.outage import Outage, devices
from everstep.agent.peering import Peering, events_for
from everstep.agent.tenure import Tenure
from everstep.agent.terms import AgentSettings, Ending
from everstep.chaos import OF_NETWORK
from everstep.core.words import name_signal
from everstep.errors import TransientError, UserError
from everstep.shm.files import forget
from everstep.tiers.memory.circle import DeskSettings
from everstep.tiers.memory.serving import desk_name, in_job
from everstep.wire import nodes
from everstep.wire.network import Link
from everstep.wire.plumbing import address_text
from everstep.wire.secret import Secret

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_agent(settings: AgentSettings, secret: Secret, environ: Mapping[str, str]) -> int:
    """Be a node until the job is over. Returns the exit code. Main thread; blocks; afterwards no
    process of the node is left. `environ`: what workers inherit.

    Raises UserError when it is refused, or for what must be changed here; EverstepError when there
    is no coordinator.
    """
    return asyncio.run(_Agent(settings, secret, environ).run())


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
        self._tenure: Tenure | None = None
        self._failure: BaseException | None = None
        self._run_id = ""  # in which its last tenure was
        self._outage: Outage | None = None
        self._outage_ends: asyncio.TimerHandle | None = None
        self._say = settings.say

    async def run(self) -> int:
        """Serve the node's ranks with memory for checkpoints, and be a node."""
        async with in_job(self._desk(), self._environ) as self._environ:
            return await self._run()

    def _desk(self) -> DeskSettings:
        settings = self._settings
        return DeskSettings(
            shm_dir=settings.shm_dir,
            name=desk_name(settings.host, settings.name),
            host=settings.host,
            domain=settings.domain,
            secret=self._secret,
            listen_host=self._address,
            ports=settings.ports,
            share=settings.memory_share,
            bytes_per_s=settings.bytes_per_s,
        )

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        failures_go_to(self._failed)
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._leave, number)
        self._link: Link[nodes.ToNode] = Link(
            host=self._settings.coordinator[0],
            port=self._settings.coordinator[1],
            secret=self._secret,
            receives=nodes.ToNode,
            on_joined=self._found,
            on_message=self._take,
            on_lost=self._lost,
            on_waiting=self._waiting,
            on_read=self._read,
            find=None if self._settings.where is None else self._find,
        )
        self._say(f"this node looks for its coordinator{self._place()}")
        neighbours: Neighbours | None = None
        try:
            while True:
                if self._leaving is None:  # else it was asked while its tenure ended by itself
                    await self._until_joined()
                if self._leaving is not None:
                    return 128 + self._leaving
                neighbours = neighbours or self._listen()
                self._tenure = Tenure(
                    self._settings, self._environ, self._link, neighbours, self._secret.bulk_key()
                )
                ending = await self._tenure.run()
                self._run_id = self._tenure.run_id
                self._tenure = None
                if ending.error is not None:
                    raise ending.error
                if ending.exit_code is not None:
                    return ending.exit_code
        finally:
            if self._outage_ends is not None:
                self._end_outage()
            if neighbours is not None:
                neighbours.close()
            self._link.close()
            if self._run_id:  # no further tenure adopts what the last one has kept for it
                forget(self._settings.shm_dir, self._run_id)
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _place(self) -> str:
        if self._settings.where is not None:
            return ", and asks the job's lease where it is"
        return f" at {address_text(*self._settings.coordinator)}"

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

    async def _find(self) -> tuple[str, int]:
        """Where the coordinator is now. Raises TransientError; a UserError, when that may not be
        asked for, ends the agent by way of `_failed`. But not one with workers, which go on: what
        is amiss may be mended in time."""
        assert self._settings.where is not None
        try:
            place = await self._settings.where()
        except UserError as error:
            if self._tenure is None or not self._tenure.absent:
                raise
            raise TransientError(str(error)) from error
        if place is None:
            raise TransientError("nobody coordinates the job now: its lease is free")
        host, port, term = place
        if term < self._newest_term:
            raise TransientError(
                f"the lease tells of the coordinator of term {term}, and term {self._newest_term} "
                "has begun"
            )
        return host, port

    def _address(self) -> str:
        """Of this host, where the others can reach it."""
        if self._settings.interface:
            return identity.address_of(self._settings.interface)
        return identity.address_towards(*self._link.place)

    def _listen(self) -> Neighbours:
        """Listen for other agents, where the coordinator can be reached from."""

        def peering() -> Peering | None:
            return None if self._tenure is None else self._tenure.peering

        def stranger(address: str, why: str) -> None:
            if self._tenure is not None:
                self._tenure.stranger(address, why)

        return Neighbours(
            host=self._address(),
            ports=self._settings.ports,
            secret=self._secret,
            events=events_for(peering, stranger),
        )

    # ------------------------------------------------------------ what comes in

    def _found(self) -> None:
        self._joined.set()
        if self._tenure is not None:
            self._tenure.found()

    def _take(self, message: nodes.ToNode) -> None:
        if isinstance(message, nodes.Welcome | nodes.Displaced | nodes.Refuse):
            if message.term < self._newest_term:
                newest = self._newest_term
                self._link.leave(f"term {message.term} has ended: that of {newest} has begun")
                return
            self._newest_term = message.term
        if isinstance(message, nodes.Welcome) and message.settings.cuts_networks:
            self._devices()  # refused before anything starts, if ever
        if isinstance(message, nodes.Cut) and message.fault.kind == OF_NETWORK:
            self._begin_outage(message.fault.lasts_s)
        elif self._tenure is not None:
            self._tenure.take(message)

    def _devices(self) -> tuple[str, ...]:
        """Those by which this host has its network. Raises UserError if it must not lose it."""
        _, coordinator = identity.way_towards(*self._link.place)
        return devices(coordinator, self._settings.interface)

    def _begin_outage(self, lasts_s: float) -> None:
        """The network is gone for so long, 0: for good. The last word counts."""
        if self._outage_ends is not None:
            self._outage_ends.cancel()
            self._outage_ends = None
        self._outage = self._outage or Outage(self._devices())
        self._say(f"fault on purpose: no network{f' for {lasts_s:g} s' if lasts_s else ''}")
        if lasts_s:
            loop = asyncio.get_running_loop()
            self._outage_ends = loop.call_later(lasts_s, self._end_outage)

    def _end_outage(self) -> None:
        assert self._outage is not None
        assert self._outage_ends is not None
        self._outage_ends.cancel()
        outage, self._outage, self._outage_ends = self._outage, None, None
        outage.end()
        self._say("fault on purpose: the network is back")

    def _lost(self, why: str) -> None:
        self._joined.clear()
        if self._tenure is not None:
            self._tenure.lost(why)

    def _waiting(self, why: str) -> None:
        self._why_not = why
        self._say(f"{why}; trying again")
        if self._tenure is not None:
            self._tenure.waiting(why)

    def _read(self) -> None:
        if self._tenure is not None:
            self._tenure.read()

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
        self._say(f"asked to end by {name_signal(number)}: this node leaves the job")
        if self._tenure is not None:
            self._tenure.end(Ending(terminate=True, wait_s=wait_s, exit_code=128 + number))

    def _failed(self, error: BaseException) -> None:
        if self._tenure is not None:
            self._tenure.failed(error)
        else:
            self._failure = error
            self._joined.set()
