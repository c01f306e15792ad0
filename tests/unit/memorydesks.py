"""Hosts of the memory tier in this process: each a desk on an event loop of one thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from everstep.tiers.memory.circle import DeskSettings
from everstep.tiers.memory.client import MemoryStore, connect
from everstep.tiers.memory.desk import Desk
from everstep.tiers.memory.door import Door
from everstep.tiers.memory.talk import Terms
from everstep.tiers.memory.vault import Area
from everstep.wire.secret import Secret

SECRET = Secret("a secret of forty-two different characters", "the test")
T = TypeVar("T")


class Hosts:
    """Hosts on one loop. `close` ends all that is left."""

    def __init__(self, shm_dir: Path, *, secret: Secret | None = SECRET, share: float = 0.5):
        self.shm_dir = shm_dir
        self.secret = secret
        self.share = share
        self.said: list[str] = []
        self.desks: dict[str, Desk] = {}
        self._doors: dict[str, Door] = {}
        self._stores: list[MemoryStore] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-desks")
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=60)

    def start(self, name: str, domain: str = "") -> None:
        """A host's desk."""

        async def begin() -> None:
            settings = DeskSettings(
                shm_dir=self.shm_dir,
                name=name,
                host=name,
                domain=domain or name,
                secret=self.secret,
                listen_host=lambda: "127.0.0.1",
                share=self.share,
                say=self.said.append,
            )
            desk = Desk(settings)
            await desk.open()
            self.desks[name] = desk
            self._doors[name] = Door(desk, self.socket(name), desk.open)

        self.run(begin())

    def socket(self, name: str) -> str:
        """Where a host's ranks come."""
        return str(self.desks[name].vault.directory / "socket")

    def stop(self, name: str, *, keep: bool = False) -> None:
        """End a desk."""

        async def end() -> None:
            await self._doors.pop(name).close()
            await self.desks.pop(name).close(keep=keep)

        self.run(end())

    def store(self, name: str, **options: Any) -> MemoryStore:
        """A rank's store on a host."""
        store = connect(self.socket(name), **{"patience_s": 0.3} | options)
        self._stores.append(store)
        return store

    def acquaint(self, stores: Sequence[MemoryStore]) -> None:
        """Tell all of all."""
        cards = [store.card() for store in stores]
        for store in stores:
            store.introduce(cards)

    def forget_own(self, name: str) -> None:
        """Have a host lose each object as soon as it has put it: only others have it."""
        desk = self.desks[name]
        put = desk.put

        async def put_and_lose(key: str, what: bytes | Area, terms: Terms) -> Any:
            held, notes = await put(key, what, terms)
            desk.vault.delete(key)
            return held, notes

        desk.put = put_and_lose  # type: ignore[method-assign]

    def close(self) -> None:
        """End all of it."""
        for store in self._stores:
            store.close()
        for name in list(self.desks):
            self.stop(name)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
