"""The bytes of objects, from desk to desk and from a desk to another host's ranks.

Theory of operation. Who has an object lends a range of it, which makes an offer: an address and a
ticket for one node. Copies come to a desk by a thread that fetches into an area of its own; ranks
fetch for themselves. All threads here run with a lower priority than the process, so that they
yield to a training that wants the same cores; a thread that another one starts has its priority.
Networks carry as much in one direction as in the other, so each has a throttle of its own.

It does not know which object should go where. Loop thread only; nothing blocks.
"""

from __future__ import annotations

import asyncio
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from everstep.errors import EverstepError
from everstep.tiers.memory.vault import Area, mapped
from everstep.wire.bulk import STREAMS, Caller, Listener, Offer, Sink, Source, Throttle, fetch

LARGE_BYTES = 64 << 20
"""Below it a second connection costs more than it brings."""
_THREADS = 4
_NICENESS = 10
T = TypeVar("T")


def node_of(site: str) -> int:
    """The number by which tickets know a host."""
    return zlib.crc32(site.encode())


def _yield_to_others() -> None:
    """Have this thread, and those that it starts, wait for who wants the same core."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class Threads:
    """Threads that yield to others."""

    def __init__(self, count: int = _THREADS) -> None:
        self._pool = ThreadPoolExecutor(
            count, thread_name_prefix="everstep-tier", initializer=_yield_to_others
        )

    async def run(self, work: Callable[[], T]) -> T:
        """Do something that blocks. When the caller is cancelled, it is still waited for: what it
        writes to is the caller's."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    def close(self) -> None:
        """Wait for all of them."""
        self._pool.shutdown(wait=True)


class Plane:
    """The bulk plane of the desk `site`, whose `key` is derived from the secret. `bytes_per_s`:
    most that goes out, and most that comes in; None: no limit. `open` it first."""

    def __init__(self, threads: Threads, *, site: str, key: bytes, bytes_per_s: float | None):
        self.key = key
        self._loop = asyncio.get_running_loop()
        self._threads = threads
        self._site = site
        self._rate = bytes_per_s
        self._incoming = Throttle(bytes_per_s)
        self._caller = Caller(key=key, node=node_of(site))
        self._sinks: set[Sink] = set()
        self._listener: Listener | None = None
        self._closed = False

    async def open(
        self, host: str, ports: Sequence[int], on_refused: Callable[[str, str], None]
    ) -> None:
        """Listen. Raises UserError when no port is free."""

        def refused(address: str, why: str) -> None:
            self._loop.call_soon_threadsafe(on_refused, address, why)

        make = partial(
            Listener,
            host=host,
            ports=ports,
            key=self.key,
            on_refused=refused,
            throttle=Throttle(self._rate),
        )
        self._listener = await self._threads.run(make)

    @property
    def port(self) -> int:
        """On which it listens."""
        assert self._listener is not None
        return self._listener.port

    def lend(
        self, held: ExitStack, fd: int, start: int, end: int, *, node: int, lifetime_s: float
    ) -> Offer:
        """Let `node` read bytes `start` to `end` of the file once. `held` is closed, on the loop,
        when nobody does any more."""
        assert self._listener is not None
        view = held.enter_context(mapped(fd, end))

        def ended(_: bool) -> None:
            self._loop.call_soon_threadsafe(self._free, held)

        part = held.enter_context(view[start:end])
        ticket = self._listener.lend(Source(part), node=node, lifetime_s=lifetime_s, on_end=ended)
        return Offer(host=self._listener.host, port=self._listener.port, ticket=ticket)

    def withdraw(self, offer: Offer) -> None:
        """End the loan that `offer` is of. One that is over stays so."""
        if self._listener is not None:
            self._listener.withdraw(offer.ticket)

    async def fetch(
        self, area: Area, offer: Offer, block_bytes: int, blocks: Sequence[str], deadline_s: float
    ) -> None:
        """Fill `area` with what is offered. Raises EverstepError where that can't be had."""
        with mapped(area.fd, area.nbytes, writable=True) as view:
            sink = Sink(view, block_bytes, blocks)
            self._sinks.add(sink)
            if self._closed:
                sink.fail(EverstepError("the agent ends"))
            work = partial(
                fetch,
                sink,
                [offer],
                self._caller,
                deadline_s=deadline_s,
                streams=STREAMS if area.nbytes >= LARGE_BYTES else 1,
                throttle=self._incoming,
            )
            try:
                await self._threads.run(work)
            finally:
                self._sinks.discard(sink)

    def stop(self) -> None:
        """End all transfers that come in; what waits for them is told soon."""
        self._closed = True
        for sink in self._sinks:
            sink.fail(EverstepError("the agent ends"))

    def close(self) -> None:
        """Listen no longer. Blocks until its threads have ended, which is soon."""
        self.stop()
        if self._listener is not None:
            self._listener.close()

    def _free(self, held: ExitStack) -> None:
        held.close()
