"""How an object comes to be on several hosts.

Theory of operation. Its own host has it first, then as many others as copies are wanted, in other
failure domains where there are any (`core/placement.py`, over the hosts that can be reached now).
A host that fails is replaced by another one; when there is none there are fewer copies, which is
said once, until there are all again. A save waits for no host that is lost.

Commits and failures go to all hosts: they are small, each host can tell from a commit what it need
not keep any more, and what all wait for is near all.

Where an object must be the first of its key, one host decides: the first, in an order that all
hosts make alike from the key, that can be reached. It has the object before anybody else; so who
asks later is told that there is one, by it or by any other that has it. Hosts that don't see each
other may both decide: then there are two, each whole, and a reader finds its own host's first.

It does not know what the bytes are. Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import msgspec

from everstep import snapshot
from everstep.errors import TransientError
from everstep.tiers.memory import keeping, talk, vault
from everstep.tiers.memory.circle import Circle
from everstep.tiers.memory.plane import Threads, node_of
from everstep.tiers.memory.talk import Failed, Keep, Terms
from everstep.tiers.memory.vault import Area, Held, Vault
from everstep.tiers.store import Exists, Missing

_AT_ONCE = 16


@dataclass(slots=True, eq=False, kw_only=True)
class Copied:
    """What is put: `data` where it is small. `fd`, `blocks`: of its file, where it is not, with the
    digests of its blocks. `end_s`: on the loop's clock."""

    key: str
    nbytes: int
    terms: Terms
    end_s: float
    data: bytes | None = None
    fd: int = -1
    held: Held | None = None
    blocks: tuple[str, ...] = ()


class Copying:
    """Has objects kept by other hosts. `say`: what a person should know."""

    def __init__(
        self, vault: Vault, circle: Circle, threads: Threads, say: Callable[[str], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._vault = vault
        self._circle = circle
        self._threads = threads
        self._say = say
        self._said: set[str] = set()
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    async def put(
        self, key: str, area: Area, data: bytes | None, terms: Terms
    ) -> tuple[Held, tuple[str, ...]]:
        """Make `area` (whose bytes are `data`, where it is small) the object `key`, here and on
        other hosts. Returns what a person should know. Raises Exists, StoreError; then the area
        stays the caller's."""
        what = Copied(
            key=key,
            nbytes=area.nbytes,
            terms=terms,
            end_s=self._loop.time() + terms.deadline_s,
            data=data,
            fd=area.fd,
        )
        shared = keeping.is_shared(key)
        if data is None and self._circle.known() and (terms.copies > 1 or shared or terms.absent):
            what.blocks = await self._threads.run(partial(vault.digest_file, area.fd, area.nbytes))
        decided = await self._decide(what) if terms.absent else ""
        held = self._vault.publish(area, key, absent=terms.absent, token=terms.token)
        held.digests = what.blocks or None
        what.held = held
        having = {decided} if decided else set()
        if shared:
            await self._copy_to_all(what, having)
            return held, ()
        return held, await self._copy(what, having)

    async def _decide(self, what: Copied) -> str:
        """Have the host decide whose turn it is; "" where that is this one. Raises Exists."""
        held = self._vault.find(what.key)
        if held is not None and held.token != what.terms.token:
            raise Exists(f"there is an object {what.key} in memory already")
        own, others = self._circle.name, self._circle.others()
        left_s = what.end_s - self._loop.time()
        asked = talk.Size(key=what.key, deadline_s=left_s)
        for name, answer in (await self._circle.ask_all(others, asked, left_s)).items():
            if held is None and isinstance(answer, talk.Sized):
                raise Exists(f"there is an object {what.key} in the memory of {name} already")
        for name in keeping.deciders(what.key, [own, *others]):
            if name == own:
                break
            try:
                answer = await self._hand(name, what)
            except TransientError:
                continue
            if isinstance(answer, talk.Done):
                return name
            if isinstance(answer, Failed) and answer.kind == "exists":
                raise Exists(answer.text)
        return ""

    async def _copy(self, what: Copied, having: set[str]) -> tuple[str, ...]:
        """To as many hosts as are wanted, and others in place of those that fail."""
        tried: dict[str, str] = {}
        wanted = what.terms.copies - 1
        while len(having) < wanted:
            keepers = self._keepers(what.terms.copies, tried)
            targets = [name for name in keepers if name not in having][: wanted - len(having)]
            if not targets:
                break
            told = await asyncio.gather(*(self._try(name, what) for name in targets))
            for name, why in zip(targets, told, strict=True):
                if why:
                    tried[name] = why
                else:
                    having.add(name)
        return self._missing(wanted - len(having), what.terms.copies, tried)

    async def _copy_to_all(self, what: Copied, having: set[str]) -> None:
        async def one(name: str) -> None:
            async with self._at_once:
                await self._try(name, what)

        await asyncio.gather(*(one(name) for name in self._circle.others() if name not in having))

    async def _try(self, name: str, what: Copied) -> str:
        """Have a host keep a copy. Returns why it does not."""
        try:
            answer = await self._hand(name, what)
        except TransientError as error:
            return str(error)
        except Missing:
            return ""  # it has been deleted meanwhile
        return answer.text if isinstance(answer, Failed) and answer.kind != "exists" else ""

    async def _hand(self, name: str, what: Copied) -> talk.Answer:
        """Give a host a copy. Raises TransientError."""
        left_s = what.end_s - self._loop.time()
        if left_s <= 0:
            raise TransientError(f"the time for copies of {what.key} is over")
        terms = msgspec.structs.replace(what.terms, copies=1, deadline_s=left_s)
        keep = Keep(key=what.key, nbytes=what.nbytes, terms=terms)
        if what.data is not None:
            keep = msgspec.structs.replace(keep, data=what.data)
            return await self._circle.ask(name, keep, left_s)
        plane = self._circle.plane
        loan = ExitStack()
        fd = what.fd if what.held is None else loan.enter_context(self._vault.using(what.held))
        offer = plane.lend(loan, fd, 0, what.nbytes, node=node_of(name), lifetime_s=left_s)
        keep = msgspec.structs.replace(
            keep, offer=offer, block_bytes=snapshot.BLOCK_BYTES, blocks=what.blocks
        )
        try:
            return await self._circle.ask(name, keep, left_s)
        finally:
            plane.withdraw(offer)

    def _keepers(self, copies: int, without: dict[str, str]) -> list[str]:
        """Other hosts, those first that should have a copy of what is here."""
        if self._circle.site is None:
            return []
        sites = self._circle.sites(self._circle.others(without))
        sites.sort(key=lambda site: site.name)
        slots = keeping.placed(sites, copies).holders(sites.index(self._circle.site))
        return [sites[slot].name for slot in slots[1:]]

    def _missing(self, missing: int, copies: int, tried: dict[str, str]) -> tuple[str, ...]:
        """What to say of copies that there are not; once, until there are all again."""
        if missing <= 0:
            self._said.clear()
            return ()
        failed = self._circle.lost() | tried
        said = f"{missing} of {copies}, {sorted(failed)}"
        if said in self._said:
            return ()
        self._said.add(said)
        why = "; ".join(f"{name}: {why}" for name, why in failed.items())
        if not failed:
            count = 1 + len(self._circle.known())
            why = f"this agent knows of {count} host{'s' if count > 1 else ''}"
            if self._circle.site is None:
                why += ", and has no secret to speak with others, or was told of none"
        text = f"of {copies} copies of each part {copies - missing} are kept: {why}"[:4000]
        self._say(text)
        return (text,)
