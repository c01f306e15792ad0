"""The tiers of one configuration, opened.

It does not know torch, nor what is saved. What is opened is opened at its first use, so that a
process that only loads from the destination needs no agent beside it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from everstep.quantities import bytes_per_s
from everstep.settings import has_secret, secret_of
from everstep.shm import budget
from everstep.tiers.find import Tier
from everstep.tiers.open import open_store
from everstep.tiers.policy import DURABLE, MEMORY
from everstep.tiers.series import Series
from everstep.tiers.settings import TierSettings
from everstep.tiers.staging import Own, Staging
from everstep.tiers.store import Store
from everstep.wire.bulk_throttle import UNLIMITED, Throttle
from everstep.wire.secret import Secret

if TYPE_CHECKING:
    from everstep.tiers.memory.client import MemoryStore

_RESERVE_S = 30.0


class Stack:
    """Stores, key and staging of `settings`. Any thread. `environ`: where the secret may be.

    Raises UserError when the secret can't be read, or a signature is required without one."""

    def __init__(self, settings: TierSettings, environ: Mapping[str, str] = os.environ) -> None:
        self.settings = settings
        self.key = _key(settings, environ)
        self._ranks_here = int(environ.get("LOCAL_WORLD_SIZE") or 1)
        self._card = ""
        self._lock = threading.Lock()
        self._stores: dict[str, Store] = {}
        self._staging: dict[str, Staging] = {}

    def names(self) -> tuple[str, ...]:
        """The tiers that there are, the nearest first."""
        near = (MEMORY,) if self.settings.memory_every else ()
        return near + ((DURABLE,) if self.settings.destination else ())

    def store(self, tier: str) -> Store:
        """A tier's store. Raises UserError, StoreError when it can't be opened."""
        with self._lock:
            if tier not in self._stores:
                self._stores[tier] = self._memory() if tier == MEMORY else self._durable()
            return self._stores[tier]

    def memory(self) -> MemoryStore:
        """The memory tier's store. Raises as `store`."""
        from everstep.tiers.memory.client import MemoryStore

        store = self.store(MEMORY)
        assert isinstance(store, MemoryStore)
        return store

    def card(self, *, anew: bool = False) -> str:
        """How this host's memory tier is reached; empty where there is none. Asks its agent at the
        first time, and `anew`: one that was started again is reached elsewhere."""
        if self.settings.memory_every and (anew or not self._card):
            self._card = self.memory().card()
        return self._card

    def series(self, tier: str) -> Series:
        """The series in a tier's store. Raises as `store`."""
        return Series(
            self.store(tier),
            self.settings.series,
            key=self.key,
            require_signature=self.settings.require_signature,
        )

    def tiers(self) -> list[Tier]:
        """All of them, to load from."""
        return [
            Tier.memory(self.series(name)) if name == MEMORY else Tier.durable(self.series(name))
            for name in self.names()
        ]

    def staging(self, tier: str) -> Staging:
        """Where a save to `tier` is copied to first."""
        with self._lock:
            if tier in self._staging:
                return self._staging[tier]
        if tier == MEMORY:
            memory = self.memory()
            made = Staging(lambda n: memory.reserve(n, deadline_s=_RESERVE_S), again=False)
        else:
            limit = int(self.settings.memory_share * budget.memory_bytes() / self._ranks_here)
            made = Staging(Own, again=True, limit=limit)
        with self._lock:
            return self._staging.setdefault(tier, made)

    def close(self) -> None:
        """Let go of all of it."""
        with self._lock:
            staging, self._staging = list(self._staging.values()), {}
            stores, self._stores = list(self._stores.values()), {}
        for each in staging:
            each.close()
        for store in stores:
            store.close()

    def _memory(self) -> Store:
        from everstep.tiers.memory.client import connect

        return connect(copies=self.settings.copies, retained=self.settings.memory_retained)

    def _durable(self) -> Store:
        rate = self.settings.upload_bandwidth
        throttle = Throttle(bytes_per_s(rate)) if rate else UNLIMITED
        return open_store(self.settings.destination, throttle=throttle)


def _key(settings: TierSettings, environ: Mapping[str, str]) -> bytes | None:
    if settings.secret_file:
        return Secret.from_file(settings.secret_file).checkpoint_key()
    return secret_of(environ).checkpoint_key() if has_secret(environ) else None
