"""Copies on their way between agents: lent here, fetched there.

Theory of operation: who has a complete copy lends it, which makes an offer: an address and a
ticket for one node. The offer travels by the control plane; the other agent fetches the bytes
straight into an area of its own shelf, on a thread, block by block with its digest (wire/bulk.py).
The area in which a copy is lent can't be used for another one until the loan has ended.

Does not know: which copy should go where. Loop thread only; nothing blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from everstep.agent.shelf import Area
from everstep.errors import EverstepError
from everstep.snapshot import Manifest
from everstep.wire.bulk import STREAMS, Caller, Listener, Offer, Sink, Source, fetch

_LIFETIME_S = 600.0  # of a ticket; a stop makes it useless long before
_LARGE_BYTES = 64 << 20  # below it a second connection costs more than it brings
_FETCHES = 4  # at once; each has streams of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Dock:
    """Where a node's bulk plane listens: the first free one of `ports` (0: any) at `host`. `key`:
    the job's. `on_refused(address, why)`: for who is not let in; called on the loop."""

    host: str
    ports: Iterable[int]
    key: bytes = field(repr=False)
    on_refused: Callable[[str, str], None]


class Shipping:
    """The bulk plane of node `node`. It listens from the first loan on."""

    def __init__(self, dock: Dock, node: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._dock = dock
        self._caller = Caller(key=dock.key, node=node)
        self._listener: Listener | None = None
        self._threads = ThreadPoolExecutor(_FETCHES, thread_name_prefix="everstep-fetch")
        self._sinks: set[Sink] = set()

    def lend(self, area: Area, node: int) -> Offer:
        """Let `node` read the complete copy in `area`, once."""
        if self._listener is None:
            self._listener = Listener(
                host=self._dock.host,
                ports=self._dock.ports,
                key=self._dock.key,
                on_refused=self._refused,
            )
        loan = ExitStack()
        view = loan.enter_context(area.bytes())

        def ended(_: bool) -> None:
            self._loop.call_soon_threadsafe(loan.close)

        ticket = self._listener.lend(Source(view), node=node, lifetime_s=_LIFETIME_S, on_end=ended)
        return Offer(host=self._listener.host, port=self._listener.port, ticket=ticket)

    def withdraw(self, offer: Offer) -> None:
        """End the loan that `offer` is of, with the transfer, if there is one. The area is free
        soon, not at once. One that is over stays so."""
        if self._listener is not None:
            self._listener.withdraw(offer.ticket)

    async def fetch(self, area: Area, manifest: Manifest, offer: Offer) -> None:
        """Fill `area` with what is offered. Raises EverstepError where that can't be had."""
        with area.bytes() as view:
            sink = Sink(view, manifest.block_bytes, manifest.blocks)
            self._sinks.add(sink)
            try:
                streams = STREAMS if manifest.nbytes >= _LARGE_BYTES else 1
                transfer = partial(
                    fetch,
                    sink,
                    [offer],
                    self._caller,
                    deadline_s=_LIFETIME_S,
                    streams=streams,
                )
                await self._loop.run_in_executor(self._threads, transfer)
            finally:
                self._sinks.discard(sink)

    def close(self) -> None:
        """End all transfers. Blocks until their threads have ended, which is soon."""
        for sink in list(self._sinks):
            sink.fail(EverstepError("the node ends"))
        self._threads.shutdown(wait=True)
        if self._listener is not None:
            self._listener.close()

    def _refused(self, address: str, why: str) -> None:
        self._loop.call_soon_threadsafe(self._dock.on_refused, address, why)
