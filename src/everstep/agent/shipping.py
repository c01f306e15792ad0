"""Copies on their way between agents: lent here, fetched there.

Theory of operation: who has a complete copy lends it, which makes an offer: an address and a
ticket for one node. The offer travels by the control plane; the other agent fetches the bytes
straight into an area of its own shelf, on a thread, block by block with its digest (wire/bulk.py).
The area in which a copy is lent can't be used for another one until the loan has ended. Networks
carry as much in one direction as in the other at the same time, so each has a throttle of its own.

Does not know: which copy should go where. Loop thread only; nothing blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from everstep.agent.shelf import Area
from everstep.errors import EverstepError
from everstep.snapshot import Manifest
from everstep.wire.bulk import (
    STREAMS,
    Caller,
    Limits,
    Listener,
    Offer,
    Sink,
    Source,
    Throttle,
    fetch,
)

_LARGE_BYTES = 64 << 20  # below it a second connection costs more than it brings
_FETCHES = 4  # at once; each has streams of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Dock:
    """Where a node's bulk plane listens: the first free one of `ports` (0: any) at `host`. `key`:
    the job's. `on_refused(address, why)`: for who is not let in; called on the loop. `bytes_per_s`:
    most that goes out, and most that comes in; None: no limit. `transfer_timeout_s`,
    `transfer_stall_s`: as the settings of these names."""

    host: str
    ports: Sequence[int]
    key: bytes = field(repr=False)
    on_refused: Callable[[str, str], None]
    bytes_per_s: float | None = None
    transfer_timeout_s: float = 600.0
    transfer_stall_s: float = 15.0


class Shipping:
    """The bulk plane of node `node`. It listens from the start, so that others can try whether they
    reach it: `door` is what they need for that. `caller`: as which it connects to others. Raises
    UserError when it can't listen."""

    def __init__(self, dock: Dock, node: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._dock = dock
        limits = Limits(stall_s=dock.transfer_stall_s)
        self._listener = Listener(
            host=dock.host,
            ports=dock.ports,
            key=dock.key,
            on_refused=self._refused,
            throttle=Throttle(dock.bytes_per_s),
            limits=limits,
        )
        self.caller = Caller(key=dock.key, node=node, limits=limits)
        self._incoming = Throttle(dock.bytes_per_s)
        self._threads = ThreadPoolExecutor(_FETCHES, thread_name_prefix="everstep-fetch")
        self._sinks: dict[Area, Sink] = {}
        self.door = self._offer(self._listener.greeting)

    def lend(self, area: Area, node: int) -> Offer:
        """Let `node` read the complete copy in `area`, once."""
        loan = ExitStack()
        view = loan.enter_context(area.bytes())

        def ended(_: bool) -> None:
            self._loop.call_soon_threadsafe(loan.close)

        lifetime_s = self._dock.transfer_timeout_s
        ticket = self._listener.lend(Source(view), node=node, lifetime_s=lifetime_s, on_end=ended)
        return self._offer(ticket)

    def withdraw(self, offer: Offer) -> None:
        """End the loan that `offer` is of, with the transfer, if there is one. The area is free
        soon, not at once. One that is over stays so."""
        self._listener.withdraw(offer.ticket)

    async def fetch(self, area: Area, manifest: Manifest, offer: Offer) -> None:
        """Fill `area` with what is offered. Raises EverstepError where that can't be had."""
        with area.bytes() as view:
            sink = Sink(view, manifest.block_bytes, manifest.blocks)
            self._sinks[area] = sink
            try:
                streams = STREAMS if manifest.nbytes >= _LARGE_BYTES else 1
                transfer = partial(
                    fetch,
                    sink,
                    [offer],
                    self.caller,
                    deadline_s=self._dock.transfer_timeout_s,
                    streams=streams,
                    throttle=self._incoming,
                )
                await self._loop.run_in_executor(self._threads, transfer)
            finally:
                del self._sinks[area]

    def end(self, area: Area, why: str) -> None:
        """End the transfer into `area`, if there is one: its `fetch` raises `why`, soon."""
        sink = self._sinks.get(area)
        if sink is not None:
            sink.fail(EverstepError(why))

    def close(self) -> None:
        """End all transfers. Blocks until their threads have ended, which is soon."""
        for area in list(self._sinks):
            self.end(area, "the node ends")
        self._threads.shutdown(wait=True)
        self._listener.close()

    def _offer(self, ticket: bytes) -> Offer:
        return Offer(host=self._listener.host, port=self._listener.port, ticket=ticket)

    def _refused(self, address: str, why: str) -> None:
        self._loop.call_soon_threadsafe(self._dock.on_refused, address, why)
