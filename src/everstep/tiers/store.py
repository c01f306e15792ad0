"""What every backend of a tier is: objects by key, whole or not at all.

Theory of operation. A store has four properties, and the rest of this package rests on them alone:

- an object is seen whole or not at all, whoever dies while it is put;
- an object never changes: a key is written to once, and what is under it stays until it is deleted;
- of several who `put` with `absent`, exactly one succeeds;
- what `put` has returned from is as durable as the store promises, and `list` shows it.

Everything else (what a checkpoint is, which is the newest, what may go) is made of these in
`series.py`, the same for a directory, an object store and the memory of the cluster. One suite of
tests holds every backend to them (tests/unit/test_store_conformance.py).

A store tries again by itself what may succeed when tried again (a throttle, a reset), with jitter,
until `deadline_s` is over; what it raises is final. All calls block, and may be made on any thread.

It does not know what the bytes are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from everstep.errors import EverstepError

MAX_KEY_CHARS = 512


class StoreError(EverstepError):
    """A store that did not do what it was asked for; the message names store, key and cause."""


class Missing(StoreError):
    """There is no object of that key."""


class Exists(StoreError):
    """There is an object of that key already, which was not to be replaced."""


class Full(StoreError):
    """No room is left; the message has the numbers."""


class Denied(StoreError):
    """The store refuses who asks."""


class Stopped(StoreError):
    """Whoever asked for it has said stop."""


class Refused(StoreError):
    """What a store holds is not what it says it is, or can't be believed; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An object that is there. `changed_s`: when it was put, in seconds since 1970 by the store's
    own clock: for age, never for order."""

    key: str
    nbytes: int
    changed_s: float


@runtime_checkable
class Store(Protocol):
    """Objects by key under one root. A key is a relative path of plain names: letters, digits,
    dots, underscores and hyphens, parted by slashes (`names.check_key`); every method refuses
    others with ValueError before anything is touched. No key is a folder of another."""

    @property
    def where(self) -> str:
        """The root, for a person: `s3://bucket/prefix`. Without credentials."""
        ...

    def put(
        self,
        key: str,
        pieces: Sequence[memoryview],
        *,
        absent: bool = False,
        deadline_s: float,
        stop: threading.Event | None = None,
    ) -> None:
        """Write an object that is the bytes of `pieces`, one after the other, which must not change
        meanwhile. With `absent`, raises Exists if there is one; without, the key must be one that
        nobody else writes to. Gives up soon when `stop` is set. Raises Full, Denied, Stopped,
        StoreError."""
        ...

    def get(self, key: str, *, start: int = 0, end: int | None = None, deadline_s: float) -> bytes:
        """The bytes of an object from `start` to before `end`. Raises Missing, Denied, StoreError;
        also when it is shorter than `end`."""
        ...

    def get_into(self, key: str, area: memoryview, *, start: int = 0, deadline_s: float) -> None:
        """Fill `area` with the object's bytes from `start` on. Raises as `get`."""
        ...

    def size(self, key: str, *, deadline_s: float) -> int:
        """An object's bytes. Raises Missing, Denied, StoreError."""
        ...

    def list(self, prefix: str, *, deadline_s: float) -> Iterator[Entry]:
        """All objects whose keys begin with `prefix` (empty, or ending in a slash), in order of
        their keys."""
        ...

    def delete(self, key: str, *, deadline_s: float) -> None:
        """Remove an object. One that is not there is no error."""
        ...

    def sweep(self, *, older_than_s: float, deadline_s: float) -> int:
        """Remove what puts that never ended have left and nobody sees (temporary files), when it
        has not changed for `older_than_s`. Returns how many; 0 where there is no such thing."""
        ...

    def close(self) -> None:
        """Let go of connections, files and threads. May be called twice."""
        ...
