"""The desk of a host's memory tier: keeps its ranks' objects, has copies kept by others, and finds
what others have.

Theory of operation. It lives in the host's agent. A rank's object is written into shared memory by
the rank itself; the desk makes it an object, then has it copied to so many other hosts as are asked
for, in other failure domains where there are any (`core/placement.py`, over the hosts that can be
reached now). A host that is lost stops no save: another one keeps the copy, or there is one fewer,
which is said once. Commits and failures go to all hosts: they are small, each host can tell from
them what it need not keep any more, and a rank that waits for one asks its own host only.

Where an object must be the first of its key, one host decides: the first, in an order that all
hosts make alike from the key, that can be reached. It has the object before anybody else; so who
asks later is told that there is one. Hosts that don't see each other may both decide: then there
are two, each whole, and `series.py` reads the one that it finds first.

What is read is the own host's, if it has it, else another's: small things by the control plane,
others over the bulk plane, straight into the memory of who asks.

It listens for other hosts only when somebody needs it to. It does not know what the bytes are. Loop
thread only; what may take long is done on threads that yield to the training.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from everstep import snapshot
from everstep.errors import EverstepError, TransientError, UserError
from everstep.tiers import names
from everstep.tiers.memory import keeping, talk, vault
from everstep.tiers.memory.peers import Peers
from everstep.tiers.memory.plane import Plane, Threads, node_of
from everstep.tiers.memory.talk import INLINE_BYTES, Failed, Keep, Site
from everstep.tiers.memory.vault import Area, Held, Vault, mapped
from everstep.tiers.store import Exists, Missing, StoreError
from everstep.wire.secret import Secret

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BEAT_S = 60.0
_AT_ONCE = 16  # hosts to which one object goes at the same time
_MOST_HINTS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskSettings:
    """`name`: of this desk; another one on this host with the same secret needs another. `host`,
    `domain`: the machine, and what fails with it. `secret`: None: it speaks with no other host.
    `listen_host`: asked for the numeric address to listen at when it comes to that. `ports`: to
    listen on, two of them. `share`: of the host's memory. `bytes_per_s`: for copies that leave, and
    for those that come; None: no limit. `say`: what a person should know."""

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

    @property
    def directory(self) -> Path:
        """Where objects are kept: found again by who has the same secret and name."""
        tag = "local" if self.secret is None else self.secret.memory_tag()
        return self.shm_dir / f"{vault.PREFIX}{tag}-{self.name}"


class Desk:
    """`open` first, `close` last. Raises UserError for a name that can't be one."""

    def __init__(self, settings: DeskSettings) -> None:
        if not _NAME.fullmatch(settings.name):
            raise UserError(
                f"{settings.name!r} can't name an agent that keeps checkpoints: up to 64 letters, "
                "digits, dots, underscores and hyphens; give another --name"
            )
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self.threads = Threads()
        self._network = asyncio.Lock()
        self._peers: Peers | None = None
        self._plane: Plane | None = None
        self._site: Site | None = None
        self._sites: dict[str, Site] = {}
        self._hints: dict[str, tuple[str, ...]] = {}
        self._said: set[str] = set()
        self._beat: asyncio.TimerHandle | None = None
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._vault: Vault | None = None

    # ------------------------------------------------------------ its life

    async def open(self) -> None:
        """Take what an earlier desk of this name has left, and clear what others have. May be
        called again. Raises UserError."""
        if self._vault is None:
            settings = self._settings
            self._vault = Vault(settings.directory, share=settings.share)
            self._keep_alive()
            clear = partial(
                vault.sweep, settings.shm_dir, own=settings.directory, now_s=time.time()
            )
            for name in await self.threads.run(clear):
                settings.say(f"{name} had no owner for an hour: it was removed")

    @property
    def vault(self) -> Vault:
        """Its objects."""
        if self._vault is None:
            raise StoreError("this agent keeps no checkpoints yet, or has ended")
        return self._vault

    async def listen(self) -> Site | None:
        """Listen for other hosts, if it does not yet: where. None without a secret. Raises
        UserError."""
        settings = self._settings
        async with self._network:
            if self._site is not None or settings.secret is None:
                return self._site
            host = settings.listen_host()
            peers = Peers(
                host=host,
                ports=settings.ports,
                secret=settings.secret,
                answer=self.answer,
                on_met=self._met,
                on_refused=self._refused,
            )
            plane = Plane(
                self.threads,
                site=settings.name,
                key=settings.secret.bulk_key(),
                bytes_per_s=settings.bytes_per_s,
            )
            try:
                await plane.open(host, settings.ports, self._refused)
            except BaseException:
                await peers.close()
                raise
            self._site = Site(
                name=settings.name,
                host=settings.host,
                domain=settings.domain or settings.host,
                address=host,
                port=peers.port,
            )
            peers.begin(self._site)
            self._peers, self._plane = peers, plane
            return self._site

    async def close(self, *, keep: bool) -> None:
        """End all of it. `keep`: what is complete stays for a desk of the same name."""
        if self._beat is not None:
            self._beat.cancel()
        if self._plane is not None:
            self._plane.stop()
        if self._peers is not None:
            await self._peers.close()
        if self._plane is not None:
            self._plane.close()
        self.threads.close()
        await asyncio.sleep(0)  # what was lent comes back by the loop
        held, self._vault = self._vault, None
        if held is not None:
            held.close(keep=keep)

    def _keep_alive(self) -> None:
        self.vault.beat()
        self._beat = self._loop.call_later(_BEAT_S, self._keep_alive)

    # ------------------------------------------------------------ who there is

    async def introduce(self, sites: Sequence[Site]) -> None:
        """There are these other desks."""
        if await self.listen() is None:
            return
        for site in sites:
            if site.name != self._settings.name:
                self._met(site)

    async def seek(self, address: tuple[str, int]) -> None:
        """There is another desk at `address`. Raises UserError without a secret."""
        if await self.listen() is None or self._peers is None:
            raise UserError("other hosts are spoken to with a secret only: give --secret-file")
        self._peers.reach(address)

    async def about(self) -> talk.This:
        """Who this is."""
        site = await self.listen()
        others = sorted(self._sites)
        return talk.This(
            name=self._settings.name,
            site=site,
            peers=tuple(others),
            lost=tuple(name for name in others if self._lost(name)),
            taken_bytes=self.vault.taken_bytes,
            limit_bytes=self.vault.limit_bytes,
        )

    def _met(self, site: Site) -> None:
        self._sites[site.name] = site

    def _refused(self, address: str, why: str) -> None:
        self._settings.say(f"{address} was refused: {why}")

    def _lost(self, name: str) -> str:
        site = self._sites[name]
        return "" if self._peers is None else self._peers.is_lost((site.address, site.port))

    def _others(self) -> list[str]:
        """The other hosts that may be asked."""
        return [name for name in sorted(self._sites) if not self._lost(name)]

    async def _ask(self, name: str, what: talk.FromDesk, deadline_s: float) -> talk.Answer:
        """Ask another host. Raises TransientError."""
        site = self._sites.get(name)
        if site is None or self._peers is None:
            raise TransientError(f"{name} is not known here")
        return await self._peers.ask((site.address, site.port), name, what, deadline_s)

    async def _ask_all(
        self, whom: Sequence[str], what: talk.FromDesk, deadline_s: float
    ) -> dict[str, talk.Answer]:
        """What each says; those that can't be reached say nothing."""

        async def one(name: str) -> talk.Answer | None:
            async with self._at_once:
                try:
                    return await self._ask(name, what, deadline_s)
                except TransientError:
                    return None

        answers = await asyncio.gather(*(one(name) for name in whom))
        return {name: a for name, a in zip(whom, answers, strict=True) if a is not None}

    # ------------------------------------------------------------ putting

    async def reserve(self, nbytes: int) -> Area:
        """An area with its memory. Raises Full."""
        area = self.vault.admit(nbytes)
        try:
            await self.threads.run(area.furnish)
        except BaseException:
            self.vault.abandon(area)
            raise
        return area

    async def put(
        self, key: str, what: bytes | Area, terms: talk.Terms
    ) -> tuple[Held, tuple[str, ...]]:
        """Make `what` an object, and have it copied. Returns what a person should know. Raises
        Exists, Full, StoreError; then an area stays the caller's."""
        names.check_key(key)
        end_s = self._loop.time() + terms.deadline_s
        shared = keeping.is_shared(key)
        blocks: tuple[str, ...] = ()
        far = bool(self._sites) and (terms.copies > 1 or shared or terms.absent)
        if far and isinstance(what, Area):
            blocks = await self.threads.run(partial(_digests, what))
        having: set[str] = set()
        if terms.absent:
            decided = await self._decide(key, what, blocks, terms, end_s)
            having |= {decided} if decided else set()
        if isinstance(what, Area):
            held = self.vault.publish(what, key, absent=terms.absent, token=terms.token)
            held.digests = blocks or None
        else:
            held = self.vault.write(key, what, absent=terms.absent, token=terms.token)
        content = what if isinstance(what, bytes) else held
        self._drop_outdated(key, terms.retained)
        if shared:
            await self._copy_to_all(content, held, having, terms, end_s)
            return held, ()
        return held, await self._copy(content, held, having, terms, end_s)

    async def _decide(
        self,
        key: str,
        what: bytes | Area,
        blocks: tuple[str, ...],
        terms: talk.Terms,
        end_s: float,
    ) -> str:
        """Have the host decide whose turn it is; "" where that is this one. Raises Exists."""
        held = self.vault.find(key)
        if held is not None and held.token != terms.token:
            raise Exists(f"there is an object {key} in memory already")
        for name in keeping.deciders(key, [self._settings.name, *self._others()]):
            if name == self._settings.name:
                return ""
            try:
                answer = await self._hand(name, key, what, blocks, terms, end_s)
            except TransientError:
                continue
            if isinstance(answer, talk.Done):
                return name
            if isinstance(answer, Failed) and answer.kind == "exists":
                raise Exists(answer.text)
        return ""

    async def _copy(
        self,
        content: bytes | Held,
        held: Held,
        having: set[str],
        terms: talk.Terms,
        end_s: float,
    ) -> tuple[str, ...]:
        """To as many hosts as are wanted, and others in place of those that fail."""
        tried: dict[str, str] = {}
        wanted = terms.copies - 1
        while len(having) < wanted:
            targets = [name for name in self._keepers(terms.copies, tried) if name not in having][
                : wanted - len(having)
            ]
            if not targets:
                break
            told = await asyncio.gather(
                *(self._try(name, content, held, terms, end_s) for name in targets)
            )
            for name, why in zip(targets, told, strict=True):
                if why:
                    tried[name] = why
                else:
                    having.add(name)
        return self._missing(wanted - len(having), terms.copies, tried)

    async def _copy_to_all(
        self,
        content: bytes | Held,
        held: Held,
        having: set[str],
        terms: talk.Terms,
        end_s: float,
    ) -> None:
        async def one(name: str) -> None:
            async with self._at_once:
                await self._try(name, content, held, terms, end_s)

        await asyncio.gather(*(one(name) for name in self._others() if name not in having))

    async def _try(
        self, name: str, content: bytes | Held, held: Held, terms: talk.Terms, end_s: float
    ) -> str:
        """Have a host keep a copy. Returns why it does not."""
        try:
            answer = await self._hand(name, held.key, content, held.digests or (), terms, end_s)
        except TransientError as error:
            return str(error)
        return answer.text if isinstance(answer, Failed) and answer.kind != "exists" else ""

    async def _hand(
        self,
        name: str,
        key: str,
        content: bytes | Area | Held,
        blocks: tuple[str, ...],
        terms: talk.Terms,
        end_s: float,
    ) -> talk.Answer:
        left_s = end_s - self._loop.time()
        if left_s <= 0:
            raise TransientError(f"the time for copies of {key} is over")
        terms = talk.Terms(
            absent=terms.absent, token=terms.token, retained=terms.retained, deadline_s=left_s
        )
        if isinstance(content, bytes):
            keep = Keep(key=key, nbytes=len(content), data=content, terms=terms)
            return await self._ask(name, keep, left_s)
        assert self._plane is not None
        loan = ExitStack()
        fd = (
            content.fd
            if isinstance(content, Area)
            else loan.enter_context(self.vault.using(content))
        )
        if isinstance(content, Held) and content.digests is None:
            content.digests = blocks = await self.threads.run(
                partial(_digests_at, fd, content.nbytes)
            )
        offer = self._plane.lend(loan, fd, 0, content.nbytes, node=node_of(name), lifetime_s=left_s)
        keep = Keep(
            key=key,
            nbytes=content.nbytes,
            offer=offer,
            block_bytes=snapshot.BLOCK_BYTES,
            blocks=blocks,
            terms=terms,
        )
        try:
            return await self._ask(name, keep, left_s)
        finally:
            self._plane.withdraw(offer)

    def _keepers(self, copies: int, without: dict[str, str]) -> list[str]:
        """Other hosts, those first that should have a copy of what is here."""
        if self._site is None:
            return []
        there = [name for name in self._others() if name not in without]
        sites = sorted([self._site, *(self._sites[name] for name in there)], key=lambda s: s.name)
        slots = keeping.placed(sites, copies).holders(sites.index(self._site))
        return [sites[slot].name for slot in slots[1:]]

    def _missing(self, missing: int, copies: int, tried: dict[str, str]) -> tuple[str, ...]:
        """What to say of copies that there are not; once, until there are all again."""
        if missing <= 0:
            self._said.clear()
            return ()
        lost = {name: why for name in sorted(self._sites) if (why := self._lost(name))} | tried
        why = "; ".join(f"{name}: {why}" for name, why in lost.items())
        if not self._sites:
            why = (
                "no other host is known"
                if self._settings.secret
                else ("without a secret this agent speaks with no other host")
            )
        said = f"{copies - missing} of {copies}, {sorted(lost)}"
        if said in self._said:
            return ()
        self._said.add(said)
        text = f"of {copies} copies of each part {copies - missing} are kept: {why}"[:4000]
        self._settings.say(text)
        return (text,)

    def _drop_outdated(self, key: str, retained: int) -> None:
        step = names.step_of(key)
        if step is None or not retained:
            return
        kept = [keeping.Kept(held.key, held.order) for held in self.vault.list(step[0] + "/")]
        for old in keeping.outdated(step[0], kept, retained):
            self.vault.delete(old)

    # ------------------------------------------------------------ finding

    async def get(self, asked: talk.Get | talk.Lend | talk.Size) -> talk.Answer:
        """For a rank, what this host or another has. Raises Missing, StoreError."""
        names.check_key(asked.key)
        name = self._settings.name
        beside: tuple[str, ...] = ()
        if isinstance(asked, talk.Lend):
            beside = asked.beside
            asked = msgspec.structs.replace(asked, node=node_of(name))
        here = asked.at in ("", name) and name not in beside
        if here and self.vault.find(asked.key) is not None:
            return self._with_key(await self._own(asked))
        failed: dict[str, str] = {}
        for holder in await self._holders(asked):
            if holder in (*beside, name):
                continue
            try:
                answer = await self._ask(holder, asked, asked.deadline_s)
            except TransientError as error:
                failed[holder] = str(error)
                continue
            if not isinstance(answer, Failed):
                return self._with_key(answer)
            failed[holder] = answer.text
        lost = {each: why for each in sorted(self._sites) if (why := self._lost(each))}
        told = "; ".join(f"{each}: {why}" for each, why in (lost | failed).items())
        raise Missing(f"no host that was reached has {asked.key}" + (f" ({told})" if told else ""))

    def _with_key(self, answer: talk.Answer) -> talk.Answer:
        if isinstance(answer, talk.Lent) and self._plane is not None:
            return msgspec.structs.replace(answer, key=self._plane.key)
        return answer

    async def holders(self, key: str, deadline_s: float) -> list[str]:
        """The hosts that have an object, this one first."""
        names.check_key(key)
        own = [self._settings.name] if self.vault.find(key) is not None else []
        answers = await self._ask_all(
            self._others(), talk.Size(key=key, deadline_s=deadline_s), deadline_s
        )
        return own + [name for name, said in answers.items() if isinstance(said, talk.Sized)]

    async def _holders(self, asked: talk.Get | talk.Lend | talk.Size) -> list[str]:
        if asked.at:
            return [asked.at]
        hinted = self._hints.pop(asked.key, ())
        there = [name for name in hinted if name in self._sites and not self._lost(name)]
        if not there:
            there = await self.holders(asked.key, asked.deadline_s)
        if there:
            self._hints[asked.key] = tuple(there)
        return there

    async def names(self, asked: talk.Names) -> list[talk.Listed]:
        """All objects below a prefix, of this host (or another, `at`) and all that are reached."""
        found: dict[str, talk.Listed] = {}
        own = self._settings.name
        if asked.at in ("", own):
            found = {each.key: each for each in self._own_names(asked.prefix, "")}
        others = self._others() if not asked.at else [asked.at] if asked.at != own else []
        hints: dict[str, list[str]] = {}
        for name, entries in zip(
            others,
            await asyncio.gather(*(self._names_at(name, asked) for name in others)),
            strict=True,
        ):
            for entry in entries:
                if entry.key not in found or entry.key in hints:
                    hints.setdefault(entry.key, []).append(name)
                found.setdefault(entry.key, entry)
        if len(self._hints) + len(hints) > _MOST_HINTS:
            self._hints.clear()
        self._hints.update({key: tuple(where) for key, where in hints.items()})
        return [found[key] for key in sorted(found)]

    async def _names_at(self, name: str, asked: talk.Names) -> list[talk.Listed]:
        found: list[talk.Listed] = []
        while True:
            after = found[-1].key if found else ""
            question = talk.Names(
                prefix=asked.prefix, after=after, at=name, deadline_s=asked.deadline_s
            )
            try:
                page = await self._ask(name, question, asked.deadline_s)
            except TransientError:
                return found
            if not isinstance(page, talk.Page):
                return found
            found += page.entries
            if not page.more or not page.entries:
                return found

    async def delete(self, asked: talk.Delete) -> None:
        """Remove an object here and on all hosts that are reached."""
        names.check_key(asked.key)
        self.vault.delete(asked.key)
        self._hints.pop(asked.key, None)
        await self._ask_all(self._others(), asked, asked.deadline_s)

    # ------------------------------------------------------------ what other hosts ask

    async def answer(self, asked: talk.FromDesk) -> talk.Answer:
        """The answer to another host, from what is here."""
        try:
            match asked:
                case Keep():
                    await self._take(asked)
                    return talk.Done()
                case talk.Names(prefix=prefix, after=after):
                    entries = self._own_names(prefix, after)
                    page = tuple(entries[: talk.PAGE_ENTRIES])
                    return talk.Page(entries=page, more=len(entries) > len(page))
                case talk.Delete(key=key):
                    self.vault.delete(key)
                    return talk.Done()
                case _:
                    return await self._own(asked)
        except (EverstepError, ValueError, OSError) as error:
            return talk.failure(error)

    async def _take(self, keep: Keep) -> None:
        """Keep a copy for another host."""
        terms = keep.terms
        held = self.vault.find(keep.key)
        if held is not None and not terms.absent and held.nbytes == keep.nbytes:
            return
        if held is not None and terms.absent and held.token != terms.token:
            raise Exists(f"there is an object {keep.key} in memory already")
        if keep.offer is None:
            if len(keep.data) != keep.nbytes:
                raise StoreError(f"{keep.key} came with {len(keep.data)} bytes of {keep.nbytes}")
            self.vault.write(keep.key, keep.data, absent=terms.absent, token=terms.token)
        else:
            assert self._plane is not None
            area = await self.reserve(keep.nbytes)
            try:
                await self._plane.fetch(
                    area, keep.offer, keep.block_bytes, keep.blocks, terms.deadline_s
                )
                held = self.vault.publish(area, keep.key, absent=terms.absent, token=terms.token)
            finally:
                self.vault.abandon(area)
            if keep.block_bytes == snapshot.BLOCK_BYTES:
                held.digests = keep.blocks
        self._drop_outdated(keep.key, terms.retained)

    async def _own(self, asked: talk.Get | talk.Lend | talk.Size) -> talk.Answer:
        held = self.vault.get(asked.key)
        if isinstance(asked, talk.Size):
            return talk.Sized(nbytes=held.nbytes)
        vault.check_range(asked.key, held.nbytes, asked.start, asked.end)
        if isinstance(asked, talk.Get):
            if asked.end - asked.start > INLINE_BYTES:
                raise StoreError(f"more than {INLINE_BYTES} bytes of {asked.key} at once")
            return talk.Data(data=self.vault.read(asked.key, asked.start, asked.end))
        return await self._lend(held, asked)

    async def _lend(self, held: Held, asked: talk.Lend) -> talk.Answer:
        if await self.listen() is None or self._plane is None:
            raise StoreError("without a secret nothing is lent")
        loan = ExitStack()
        fd = loan.enter_context(self.vault.using(held))
        blocks: tuple[str, ...] = ()
        try:
            if asked.digests:
                blocks = await self.threads.run(partial(_digests_at, fd, asked.end, asked.start))
            offer = self._plane.lend(
                loan, fd, asked.start, asked.end, node=asked.node, lifetime_s=asked.deadline_s
            )
        except BaseException:
            loan.close()
            raise
        return talk.Lent(
            site=self._settings.name,
            node=asked.node,
            offer=offer,
            block_bytes=snapshot.BLOCK_BYTES,
            blocks=blocks,
        )

    def _own_names(self, prefix: str, after: str) -> list[talk.Listed]:
        return [
            talk.Listed(held.key, held.nbytes, held.changed_s)
            for held in self.vault.list(prefix)
            if held.key > after
        ]


def _digests(area: Area) -> tuple[str, ...]:
    return _digests_at(area.fd, area.nbytes)


def _digests_at(fd: int, end: int, start: int = 0) -> tuple[str, ...]:
    """Of the blocks of a range of a file. Blocks for reading it."""
    with mapped(fd, end) as view, view[start:end] as part:
        return vault.digests_of(part)
