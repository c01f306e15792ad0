"""A rank's connections to the desk of its host, and the objects that it has open for reading.

Theory of operation. A call takes a free connection or makes one. A connection on which an object
was opened holds that object, whose memory is not used again meanwhile: it is kept for further
reads until something else is done, since a load reads many ranges of few objects. An agent that has
died is looked for again for `patience_s`, with jitter: it may be on its way back. One that was not
is asked once a call from then on, until it is there: a training that saves on must not wait for it
each time. After a fork the child makes connections of its own.

It does not know what is asked. Any thread; all calls block.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from everstep.tiers.memory import talk
from everstep.tiers.memory.wire import Gone, Wire
from everstep.tiers.store import StoreError

_RANDOM = random.SystemRandom()  # the script's own stream must not move by a draw here

_KEPT_OPEN = 4
A = TypeVar("A", bound=talk.Message)
R = TypeVar("R")


class Reader:
    """An object of this host that is open for reading. `users`: who read it now."""

    def __init__(self, wire: Wire, fd: int, nbytes: int) -> None:
        self.wire, self.fd, self.nbytes = wire, fd, nbytes
        self.users = 1

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)
        self.wire.close()


class Pool:
    """Connections to the desk at `name`."""

    def __init__(self, name: str, patience_s: float) -> None:
        self.name = name
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._closed = False
        self._missed = False
        self._pid = os.getpid()
        self._free: list[Wire] = []
        self._readers: dict[str, Reader] = {}

    def close(self) -> None:
        """End them all. May be called twice."""
        with self._lock:
            self._closed = True
            self._end_all()

    # ------------------------------------------------------------ what is asked

    def ask(self, asked: talk.FromRank, answer: type[A], deadline_s: float) -> A:
        """The answer, of type `answer`. A desk that ends meanwhile is asked again when it is back.
        Raises what it says, StoreError."""
        said: A = self._retried(lambda wire: wire.ask(asked, answer, deadline_s)[0], deadline_s)
        return said

    def pages(self, asked: talk.Names, deadline_s: float) -> list[talk.Listed]:
        """All entries of a listing. Raises as `ask`."""

        def read(wire: Wire) -> list[talk.Listed]:
            page: talk.Page = wire.ask(asked, talk.Page, deadline_s)[0]
            entries = list(page.entries)
            while page.more:
                page = wire.receive(talk.Page, deadline_s)[0]
                entries += page.entries
            return entries

        return self._retried(read, deadline_s)

    def hold(self, asked: talk.FromRank, answer: Any, deadline_s: float) -> tuple[Wire, Any, int]:
        """Ask for what a connection holds: the connection, for the caller to close or `give_back`,
        the answer, and its descriptor. Raises as `ask`."""
        for last in self._tries(deadline_s):
            wire = None
            try:
                wire = self._take()
                said, fd = wire.ask(asked, answer, deadline_s)
            except Gone as error:
                if last:
                    raise StoreError(f"{self.name}: {error}") from error
            except BaseException:
                if wire is not None:
                    self.give_back(wire)
                raise
            else:
                return wire, said, fd
            if wire is not None:
                wire.close()
        raise AssertionError("the last try has ended")

    def give_back(self, wire: Wire) -> None:
        """It is free again, and holds nothing."""
        with self._lock:
            if not self._closed and wire.usable:
                self._free.append(wire)
                return
        wire.close()

    # ------------------------------------------------------------ what is open

    def open(self, key: str, deadline_s: float) -> Reader | None:
        """This host's object, for `reading`; None where it does not have it."""
        with self._lock:
            self._check()
            reader = self._readers.get(key)
            if reader is not None:
                reader.users += 1
                return reader
        asked = talk.Open(key=key)
        wire, answer, fd = self.hold(asked, talk.Opened | talk.Away, deadline_s)
        if isinstance(answer, talk.Away):
            self.give_back(wire)
            return None
        made = Reader(wire, fd, answer.nbytes)
        self._keep_open(key, made)
        return made

    @contextmanager
    def reading(self, key: str, reader: Reader) -> Iterator[None]:
        """While what `open` gave is read."""
        try:
            yield
        finally:
            with self._lock:
                reader.users -= 1
                over = not reader.users and self._readers.get(key) is not reader
            if over:
                reader.close()

    def let_go(self) -> None:
        """What was read is not read any more: its memory may be used again."""
        with self._lock:
            idle = [key for key, reader in self._readers.items() if not reader.users]
            readers = [self._readers.pop(key) for key in idle]
        for reader in readers:
            reader.close()

    def _keep_open(self, key: str, reader: Reader) -> None:
        with self._lock:
            idle = [name for name, each in self._readers.items() if not each.users]
            more = max(len(self._readers) - _KEPT_OPEN + 1, 0)
            old = [self._readers.pop(name) for name in idle[:more]]
            if not self._closed and key not in self._readers:
                self._readers[key] = reader
        for each in old:
            each.close()

    # ------------------------------------------------------------ inside

    def _retried(self, work: Callable[[Wire], R], deadline_s: float) -> R:
        for last in self._tries(deadline_s):
            try:
                wire = self._take()
                try:
                    return work(wire)
                finally:
                    self.give_back(wire)
            except Gone as error:
                if last:
                    raise StoreError(f"{self.name}: {error}") from error
        raise AssertionError("the last try has ended")

    def _tries(self, deadline_s: float) -> Iterator[bool]:
        """Each try, with pauses between them; True: the last one."""
        patience_s = 0.0 if self._missed else self._patience_s
        end_s = time.monotonic() + min(patience_s, deadline_s)
        pause_s = 0.05
        while (now_s := time.monotonic()) < end_s:
            yield False
            time.sleep(min(pause_s * _RANDOM.uniform(0.5, 1), max(end_s - now_s, 0)))
            pause_s = min(2 * pause_s, 1.0)
        self._missed = self._missed or self._patience_s <= deadline_s
        yield True

    def _take(self) -> Wire:
        with self._lock:
            self._check()
            while self._free:
                wire = self._free.pop()
                if wire.is_idle():
                    self._missed = False
                    return wire
                wire.close()
        wire = Wire(self.name)
        self._missed = False
        return wire

    def _check(self) -> None:
        """Raises StoreError when it is closed. After a fork, the parent's connections are let
        be."""
        if self._closed:
            raise StoreError(f"{self.name}: the store has been closed")
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._end_all()

    def _end_all(self) -> None:
        for wire in self._free:
            wire.close()
        for reader in self._readers.values():
            if not reader.users:
                reader.close()
        self._free, self._readers = [], {}
