"""A desk's connections to the desks of other hosts: questions and answers.

Theory of operation. Each desk listens (a hub), and makes a link to another when it first asks it
for something; what it asks goes over its own link, and the answer comes back on that connection.
A connection begins with names on both sides, since an address may be another's by now. A link that
is lost is made again for as long as the desk lives; meanwhile a question to that host fails at
once, since a save must not wait for a host that is gone. Every question ends by its answer, by the
loss of the connection, or by its deadline.

It does not know what is asked. Loop thread only; nothing blocks but `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from everstep.errors import TransientError
from everstep.tiers.memory.talk import (
    Answer,
    Answered,
    Asked,
    Failed,
    FromDesk,
    FromOther,
    Meet,
    Met,
    Site,
    ToDesk,
)
from everstep.wire.channel import ChannelError
from everstep.wire.network import Hub, Limits, Link
from everstep.wire.secret import Secret

_LIMITS = Limits(lease_s=10.0)
"""Of nothing here anybody waits on a lease but for what is asked of a host that was lost without a
word; and to give back the memory of large objects may hold a desk up for a second."""
_REACH_S = 5.0
"""Seconds in which a host that was not asked before must answer. Two lost packets' retries."""
_MOST_ASKED = 64  # questions of one caller that are being answered


@dataclass(slots=True, eq=False)
class _Way:
    """To the desk at `address`. `name`: "" until it has said who it is. `settled`: it is open, or
    known to be lost. `answers`: to questions that are on their way."""

    address: tuple[str, int]
    name: str
    link: Link[FromOther] | None = None
    open: bool = False
    lost: str = ""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    answers: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Caller:
    """Who has connected. `tasks`: that answer it."""

    name: str = ""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Peers:
    """Listens on `host`, on the first free port of `ports`. `answer(question)`: called for what
    others ask. `on_met(site)`: who has said who it is, from either side. `on_refused(address,
    why)`: of strangers. Raises UserError as Hub does."""

    def __init__(
        self,
        *,
        host: str,
        ports: Sequence[int],
        secret: Secret,
        answer: Callable[[FromDesk], Awaitable[Answer]],
        on_met: Callable[[Site], None],
        on_refused: Callable[[str, str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._secret = secret
        self._answer = answer
        self._on_met = on_met
        self._site: Site | None = None
        self._ways: dict[tuple[str, int], _Way] = {}
        self._callers: dict[int, _Caller] = {}
        self._asked = 0
        self._closed = False
        self._hub: Hub[ToDesk] = Hub(
            host=host,
            ports=ports,
            secret=secret,
            receives=ToDesk,
            on_joined=lambda peer, _: self._callers.update({peer: _Caller()}),
            on_message=self._called,
            on_lost=lambda peer, _: self._forget(peer),
            on_refused=on_refused,
            limits=_LIMITS,
        )
        self.port = self._hub.port
        """The port on which it listens."""

    def begin(self, site: Site) -> None:
        """This is who we are. Before anything else."""
        self._site = site

    def reach(self, address: tuple[str, int], name: str = "") -> None:
        """Have a link to a desk made, if there is none yet."""
        if address in self._ways:
            way = self._ways[address]
            if not name or way.name in ("", name):
                way.name = way.name or name
                return
            self._drop(way, f"{way.name} is not there any more")
        self._ways[address] = way = _Way(address, name)
        way.link = Link(
            host=address[0],
            port=address[1],
            secret=self._secret,
            receives=FromOther,
            on_joined=lambda: self._joined(way),
            on_message=lambda message: self._said(way, message),
            on_lost=lambda why: self._lost(way, why),
            on_waiting=lambda why: self._lost(way, why),
            limits=_LIMITS,
            whom="the agent",
        )

    async def meet(self, address: tuple[str, int]) -> None:
        """Have a link to a desk whose name is not known made, and wait until it has said who it is,
        or can't be reached for now."""
        self.reach(address)
        try:
            async with asyncio.timeout(_REACH_S):
                await self._ways[address].settled.wait()
        except TimeoutError:
            pass  # it is met when it comes

    def is_lost(self, address: tuple[str, int]) -> str:
        """Why a desk can't be asked now; "" where it can, or has not been tried."""
        way = self._ways.get(address)
        return "" if way is None else way.lost

    async def ask(
        self, address: tuple[str, int], name: str, what: FromDesk, deadline_s: float
    ) -> Answer:
        """Ask the desk `name`. Raises TransientError when it can't be reached, is lost, or does
        not answer in time."""
        self.reach(address, name)
        way = self._ways[address]
        try:
            if not way.open and not way.lost:
                async with asyncio.timeout(min(_REACH_S, deadline_s)):
                    await way.settled.wait()
            if not way.open or way.link is None:
                raise TransientError(f"{name} is not reached: {way.lost}")
            self._asked += 1
            number = self._asked
            future = way.answers[number] = self._loop.create_future()
            try:
                if not way.link.send(Asked(ask=number, what=what)):
                    raise TransientError(f"{name} is not reached: its connection has just ended")
                async with asyncio.timeout(deadline_s):
                    said: Answer = await future
                    return said
            finally:
                way.answers.pop(number, None)
        except TimeoutError:
            raise TransientError(f"{name} did not answer within {deadline_s:.0f} s") from None

    async def close(self) -> None:
        """End all connections and what is being answered."""
        if self._closed:
            return
        self._closed = True
        for way in list(self._ways.values()):
            self._drop(way, "this agent ends")
        tasks = [task for caller in self._callers.values() for task in caller.tasks]
        self._hub.close("the agent has ended")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ links to others

    def _joined(self, way: _Way) -> None:
        assert way.link is not None
        assert self._site is not None
        way.link.send(Meet(site=self._site, to=way.name))

    def _said(self, way: _Way, message: FromOther) -> None:
        if isinstance(message, Answered):
            future = way.answers.get(message.ask)
            if future is not None and not future.done():
                future.set_result(message.what)
            return
        way.name = message.site.name
        way.open, way.lost = True, ""
        way.settled.set()
        self._on_met(message.site)

    def _lost(self, way: _Way, why: str) -> None:
        way.open, way.lost = False, why
        way.settled.set()
        for future in way.answers.values():
            if not future.done():
                future.set_exception(TransientError(f"{way.name} was lost: {why}"))

    def _drop(self, way: _Way, why: str) -> None:
        del self._ways[way.address]
        self._lost(way, why)
        if way.link is not None:
            way.link.close(linger_s=0)

    # ------------------------------------------------------------ links of others

    def _called(self, peer: int, message: ToDesk) -> None:
        caller = self._callers[peer]
        if isinstance(message, Meet):
            self._meet(peer, caller, message)
        elif not caller.name or len(caller.tasks) >= _MOST_ASKED:
            self._hang_up(peer, "it asks before it says who it is, or too much at once")
        else:
            task = self._loop.create_task(self._reply(peer, message))
            caller.tasks.add(task)
            task.add_done_callback(caller.tasks.discard)

    def _meet(self, peer: int, caller: _Caller, message: Meet) -> None:
        assert self._site is not None
        if message.to not in ("", self._site.name):
            self._hang_up(peer, f"{message.to} is not here: this is {self._site.name}")
        elif message.site.name == self._site.name:
            self._hang_up(peer, f"it has this agent's own name, {self._site.name}: give --name")
        else:
            caller.name = message.site.name
            self._hub.send(peer, Met(site=self._site))
            self._on_met(message.site)

    async def _reply(self, peer: int, asked: Asked) -> None:
        what = await self._answer(asked.what)
        try:
            self._hub.send(peer, Answered(ask=asked.ask, what=what))
        except ChannelError as error:
            failed = Failed(kind="store", text=str(error))
            self._hub.send(peer, Answered(ask=asked.ask, what=failed))

    def _hang_up(self, peer: int, why: str) -> None:
        self._forget(peer)
        self._hub.drop(peer, why)

    def _forget(self, peer: int) -> None:
        caller = self._callers.pop(peer, None)
        if caller is not None:
            for task in caller.tasks:
                task.cancel()
