"""The hosts that a desk knows: who they are, which can be reached, and what they answer.

Theory of operation. A desk listens for others only when somebody needs it to: until then no port is
taken. It comes to know others by introduction (a rank brings their cards), by an address that it is
told, and by being asked; each has a name, and whoever comes again under it is taken for the same.
None is forgotten: one that is lost is tried again for as long as the desk lives.

It does not know what is asked and answered. Loop thread only.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.errors import TransientError, UserError
from everstep.tiers.memory import talk
from everstep.tiers.memory.ownership import directory_of
from everstep.tiers.memory.plane import Plane, Threads
from everstep.tiers.memory.talk import Site
from everstep.wire.secret import Secret

if TYPE_CHECKING:
    from everstep.tiers.memory.peers import Peers

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_AT_ONCE = 16  # hosts that are asked the same thing at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskSettings:
    """`name`: of this desk; another one on this host with the same secret needs another. `host`,
    `domain`: the machine, and what fails with it. `secret`: None: it speaks with no other host.
    `listen_host`: asked for the numeric address to listen at when it comes to that. `ports`: to
    listen on, two of them. `share`: of the host's memory. `bytes_per_s`: for copies that leave, and
    for those that come; None: no limit. `say`: what a person should know. Raises UserError for a
    name that can't be one."""

    shm_dir: Path
    name: str
    host: str
    domain: str
    secret: Secret | None = field(repr=False)
    listen_host: Callable[[], str]
    ports: Sequence[int] = (0,)
    share: float = 0.5
    bytes_per_s: float | None = None
    say: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"{self.name!r} can't name an agent that keeps checkpoints: up to 64 letters, "
                "digits, dots, underscores and hyphens; give another --name"
            )

    @property
    def directory(self) -> Path:
        """Where objects are kept: found again by who has the same secret and name."""
        return directory_of(self.shm_dir, self.secret, self.name)


class Circle:
    """`answer(question)`: for what other hosts ask."""

    def __init__(
        self,
        settings: DeskSettings,
        threads: Threads,
        answer: Callable[[talk.FromDesk], Awaitable[talk.Answer]],
    ) -> None:
        self.name = settings.name
        self.site: Site | None = None
        """Where others find this desk, once it listens."""
        self._settings = settings
        self._threads = threads
        self._answer = answer
        self._opening = asyncio.Lock()
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._sites: dict[str, Site] = {}
        self._peers: Peers | None = None
        self._plane: Plane | None = None

    async def listen(self) -> Site | None:
        """Listen for other hosts, if it does not yet: where. None without a secret. Raises
        UserError."""
        async with self._opening:
            if self.site is None and self._settings.secret is not None:
                await self._open(self._settings.secret)
            return self.site

    async def _open(self, secret: Secret) -> None:
        from everstep.tiers.memory.peers import Peers  # which brings ZeroMQ

        settings = self._settings
        host = settings.listen_host()
        peers = Peers(
            host=host,
            ports=settings.ports,
            secret=secret,
            answer=self._answer,
            on_met=self._met,
            on_refused=self._refused,
        )
        plane = Plane(
            self._threads,
            site=settings.name,
            key=secret.bulk_key(),
            bytes_per_s=settings.bytes_per_s,
        )
        try:
            await plane.open(host, settings.ports, self._refused)
        except BaseException:
            await peers.close()
            raise
        self.site = Site(
            name=settings.name,
            host=settings.host,
            domain=settings.domain or settings.host,
            address=host,
            port=peers.port,
        )
        peers.begin(self.site)
        self._peers, self._plane = peers, plane

    @property
    def plane(self) -> Plane:
        """Its bulk plane. Raises TransientError before it listens."""
        if self._plane is None:
            raise TransientError(f"{self.name} speaks with no other host")
        return self._plane

    async def close(self) -> None:
        """End all connections and transfers."""
        if self._plane is not None:
            self._plane.stop()
        if self._peers is not None:
            await self._peers.close()
        if self._plane is not None:
            self._plane.close()

    # ------------------------------------------------------------ who there is

    async def introduce(self, sites: Sequence[Site]) -> None:
        """There are these other desks."""
        if await self.listen() is not None:
            for site in sites:
                self._met(site)

    async def seek(self, addresses: Sequence[tuple[str, int]]) -> None:
        """There are other desks at `addresses`. Waits for them, for a few seconds. Raises UserError
        without a secret."""
        if not addresses:
            return
        if await self.listen() is None or self._peers is None:
            raise UserError("other hosts are spoken to with a secret only: give --secret-file")
        await asyncio.gather(*map(self._peers.meet, addresses))

    def others(self, without: Sequence[str] | dict[str, str] = ()) -> list[str]:
        """The other hosts that may be asked, but for some."""
        return [
            name for name in sorted(self._sites) if name not in without and not self._lost(name)
        ]

    def known(self) -> list[str]:
        """All other hosts, lost ones too."""
        return sorted(self._sites)

    def lost(self) -> dict[str, str]:
        """Those that can't be asked now, and why."""
        return {name: why for name in sorted(self._sites) if (why := self._lost(name))}

    def sites(self, names: Sequence[str]) -> list[Site]:
        """This one and the others of these names."""
        assert self.site is not None
        return [self.site, *(self._sites[name] for name in names)]

    def _met(self, site: Site) -> None:
        if site.name != self.name:
            self._sites[site.name] = site

    def _refused(self, address: str, why: str) -> None:
        self._settings.say(f"{address} was refused: {why}")

    def _lost(self, name: str) -> str:
        site = self._sites[name]
        return "" if self._peers is None else self._peers.is_lost((site.address, site.port))

    # ------------------------------------------------------------ what is asked

    async def ask(self, name: str, what: talk.FromDesk, deadline_s: float) -> talk.Answer:
        """Ask another host. Raises TransientError."""
        site = self._sites.get(name)
        if site is None or self._peers is None:
            raise TransientError(f"{name} is not known here")
        return await self._peers.ask((site.address, site.port), name, what, deadline_s)

    async def ask_all(
        self, whom: Sequence[str], what: talk.FromDesk, deadline_s: float
    ) -> dict[str, talk.Answer]:
        """What each says; those that can't be reached say nothing."""
        answers: dict[str, talk.Answer] = {}

        async def one(name: str) -> None:
            async with self._at_once:
                try:
                    answers[name] = await self.ask(name, what, deadline_s)
                except TransientError:
                    pass  # `lost` tells

        await asyncio.gather(*(one(name) for name in whom))
        return {name: answers[name] for name in whom if name in answers}
