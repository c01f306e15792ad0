"""The desk of a host's memory tier: it lives in the host's agent, keeps what the host's ranks put,
has copies kept by other hosts and keeps theirs, and finds what others have.

Theory of operation. A rank's object is written into shared memory by the rank itself (`door.py`
gives it the memory); the desk makes it an object (`vault.py`), has it copied (`copying.py`) and
finds what is asked for (`finding.py`). What another desk asks is answered from what is here. When a
commit comes, from a rank or another host, what that makes outdated goes (`keeping.py`).

It takes no memory before the first who comes. It does not know what the bytes are. Loop thread
only; what may take long is done on threads that yield to the training.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack
from functools import partial

from everstep import snapshot
from everstep.errors import EverstepError
from everstep.tiers import names
from everstep.tiers.memory import keeping, ownership, talk, vault
from everstep.tiers.memory.circle import Circle, DeskSettings
from everstep.tiers.memory.copying import Copying
from everstep.tiers.memory.finding import Finding, Question, own_names
from everstep.tiers.memory.plane import Threads
from everstep.tiers.memory.talk import INLINE_BYTES, Keep
from everstep.tiers.memory.vault import Area, Held, Vault
from everstep.tiers.store import Exists, StoreError

_BEAT_S = 60.0


class Desk:
    """`open` first, `close` last. `circle`: the other hosts; `finding`: of objects, once it is
    open."""

    finding: Finding

    def __init__(self, settings: DeskSettings) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._threads = Threads()
        self.circle = Circle(settings, self._threads, self.answer)
        self._vault: Vault | None = None
        self._copying: Copying | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._closed = False

    # ------------------------------------------------------------ its life

    async def open(self) -> None:
        """Take what an earlier desk of this name has left, and clear what others have. May be
        called again. Raises UserError, and StoreError after the end."""
        if self._closed:
            raise StoreError("this agent has ended")
        if self._vault is not None:
            return
        settings = self._settings
        self._vault = Vault(settings.directory, share=settings.share)
        self._copying = Copying(self._vault, self.circle, self._threads, settings.say)
        self.finding = Finding(self._vault, self.circle, self._own)
        self._keep_alive()
        clear = partial(
            ownership.sweep, settings.shm_dir, own=settings.directory, now_s=time.time()
        )
        for name in await self._threads.run(clear):
            settings.say(f"{name} had no owner for an hour: it was removed")

    @property
    def vault(self) -> Vault:
        """Its objects."""
        if self._vault is None:
            raise StoreError("this agent keeps no checkpoints yet, or has ended")
        return self._vault

    async def close(self, *, keep: bool) -> None:
        """End all of it. `keep`: what is complete stays for a desk of the same name. May be called
        twice."""
        if self._closed:
            return
        self._closed = True
        if self._beat is not None:
            self._beat.cancel()
        await self.circle.close()
        self._threads.close()
        await asyncio.sleep(0)  # what was lent comes back by the loop
        held, self._vault = self._vault, None
        if held is not None:
            held.close(keep=keep)

    def _keep_alive(self) -> None:
        self.vault.beat()
        self._beat = self._loop.call_later(_BEAT_S, self._keep_alive)

    # ------------------------------------------------------------ what ranks ask

    async def about(self, asked: talk.About) -> talk.This:
        """Who this is."""
        return talk.This(
            name=self._settings.name,
            site=await self.circle.listen() if asked.listen else self.circle.site,
            peers=tuple(self.circle.known()),
            lost=tuple(self.circle.lost()),
            taken_bytes=self.vault.taken_bytes,
            limit_bytes=self.vault.limit_bytes,
        )

    async def reserve(self, nbytes: int) -> Area:
        """An area with its memory. Raises Full."""
        area = self.vault.admit(nbytes)
        try:
            await self._threads.run(area.furnish)
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
        assert self._copying is not None
        if isinstance(what, Area):
            held, notes = await self._copying.put(key, what, None, terms)
        else:
            area = await self.reserve(len(what))
            try:
                os.pwrite(area.fd, what, 0)
                held, notes = await self._copying.put(key, area, what, terms)
            finally:
                self.vault.abandon(area)
        self._drop_outdated(key, terms.retained)
        return held, notes

    async def delete(self, asked: talk.Delete) -> None:
        """Remove an object here and on all hosts that are reached."""
        names.check_key(asked.key)
        self.vault.delete(asked.key)
        self.finding.forget(asked.key)
        await self.circle.ask_all(self.circle.others(), asked, asked.deadline_s)

    def _drop_outdated(self, key: str, retained: int) -> None:
        step = names.step_of(key)
        if step is None or not retained:
            return
        kept = [keeping.Kept(held.key, held.order) for held in self.vault.list(step[0] + "/")]
        for old in keeping.outdated(step[0], kept, retained):
            self.vault.delete(old)

    # ------------------------------------------------------------ what other hosts ask

    async def answer(self, asked: talk.FromDesk) -> talk.Answer:
        """The answer to another host, from what is here."""
        try:
            await self.open()
            match asked:
                case Keep():
                    await self._keep(asked)
                    return talk.Done()
                case talk.Names(prefix=prefix, after=after):
                    entries = own_names(self.vault, prefix, after)
                    page = tuple(entries[: talk.PAGE_ENTRIES])
                    return talk.Page(entries=page, more=len(entries) > len(page))
                case talk.Delete(key=key):
                    self.vault.delete(key)
                    return talk.Done()
                case _:
                    return await self._own(asked)
        except (EverstepError, ValueError, OSError) as error:
            return talk.failure(error)

    async def _keep(self, keep: Keep) -> None:
        """Keep a copy for another host."""
        terms = keep.terms
        names.check_key(keep.key)
        held = self.vault.find(keep.key)
        if held is not None and not terms.absent and held.nbytes == keep.nbytes:
            return
        if held is not None and terms.absent and held.token != terms.token:
            raise Exists(f"there is an object {keep.key} in memory already")
        if keep.offer is None and len(keep.data) != keep.nbytes:
            raise StoreError(f"{keep.key} came with {len(keep.data)} bytes of {keep.nbytes}")
        area = await self.reserve(keep.nbytes)
        try:
            if keep.offer is None:
                os.pwrite(area.fd, keep.data, 0)
            else:
                await self.circle.plane.fetch(
                    area, keep.offer, keep.block_bytes, keep.blocks, terms.deadline_s
                )
            held = self.vault.publish(area, keep.key, absent=terms.absent, token=terms.token)
        finally:
            self.vault.abandon(area)
        if keep.offer is not None and keep.block_bytes == snapshot.BLOCK_BYTES:
            held.digests = keep.blocks
        self._drop_outdated(keep.key, terms.retained)

    async def _own(self, asked: Question) -> talk.Answer:
        held = self.vault.get(asked.key)
        if isinstance(asked, talk.Size):
            return talk.Sized(nbytes=held.nbytes)
        vault.check_range(asked.key, held.nbytes, asked.start, asked.end)
        if isinstance(asked, talk.Lend):
            return await self._lend(held, asked)
        if asked.end - asked.start > INLINE_BYTES:
            raise StoreError(f"more than {INLINE_BYTES} bytes of {asked.key} at once")
        return talk.Data(data=self.vault.read(asked.key, asked.start, asked.end))

    async def _lend(self, held: Held, asked: talk.Lend) -> talk.Answer:
        if await self.circle.listen() is None:
            raise StoreError("without a secret nothing is lent")
        loan = ExitStack()
        fd = loan.enter_context(self.vault.using(held))
        blocks: tuple[str, ...] = ()
        try:
            if asked.digests:
                blocks = await self._digests(held, fd, asked.start, asked.end)
            offer = self.circle.plane.lend(
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

    async def _digests(self, held: Held, fd: int, start: int, end: int) -> tuple[str, ...]:
        """Of the blocks of a range, counted from its start: known ones, if they are the object's
        own blocks."""
        block = snapshot.BLOCK_BYTES
        if (
            held.digests is not None
            and not start % block
            and (end == held.nbytes or not end % block)
        ):
            return held.digests[start // block : -(-end // block)]
        return await self._threads.run(partial(vault.digest_file, fd, end, start))
