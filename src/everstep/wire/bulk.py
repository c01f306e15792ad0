"""The bulk plane: snapshots from the memory of one agent into that of another, over plain TCP.

Theory of operation. Each agent listens on one port of the job's range. Who has a snapshot to give
makes a ticket (`Listener.lend`); the ticket and the snapshot's manifest travel to the other agent
by the control plane, which is encrypted; that agent connects (`fetch`) with several streams, each
on its own thread. Threads, because a stream is a system call that fills a block and a digest over
it, and both let go of the interpreter: one event loop ran at the speed of one core. Each connection
opens with a keyed challenge (`bulk_door`), then blocks flow (`bulk_stream`).

A ticket is for one transfer: one node, one snapshot, until it expires. The first who shows it ties
it to a random number of his own, by which his further streams, and those that come again after a
cut, are known; it is spent when all has arrived.

What it doesn't know: what the bytes mean, whether a copy is needed, and who should have it.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from everstep.errors import EverstepError, TransientError
from everstep.wire.bulk_door import (
    KEY_BYTES,
    TICKET_BYTES,
    Cut,
    Done,
    Refused,
    Stranger,
    Use,
    enter,
)
from everstep.wire.bulk_listener import Limits, Listener, address_text
from everstep.wire.bulk_stream import Corrupt, Sink, Source, prepare, receive_all
from everstep.wire.bulk_throttle import UNLIMITED, Throttle

__all__ = [
    "Caller",
    "Corrupt",
    "Cut",
    "Limits",
    "Listener",
    "Offer",
    "Refused",
    "Sink",
    "Source",
    "Stranger",
    "Throttle",
    "Transferred",
    "fetch",
    "greet",
]

STREAMS = 2
"""Connections to each source. On two cores a second one pays, by the digest that it takes while the
first one receives; a third does not."""
FRUITLESS = 5
"""Connections in a row that brought nothing, after which a stream gives its source up."""
_FIRST_PAUSE_S = 0.05  # doubled with each of them


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A ticket, and where to show it. Goes over the control plane only: who reads it may use it."""

    host: str
    port: int
    ticket: bytes

    def __post_init__(self) -> None:
        if len(self.ticket) != TICKET_BYTES:
            raise ValueError(f"a ticket of {len(self.ticket)} bytes; it has {TICKET_BYTES}")

    def __repr__(self) -> str:
        return f"Offer({address_text(self.host, self.port)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who connects. `key`: the job's, at least 32 bytes; `node`: the own number."""

    key: bytes = field(repr=False)
    node: int
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if len(self.key) < KEY_BYTES:
            raise ValueError(f"the key has {len(self.key)} bytes; at least {KEY_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """What a transfer took. `cuts`: connections that were lost on the way and replaced."""

    nbytes: int
    seconds: float
    cuts: int


def fetch(
    sink: Sink,
    offers: Sequence[Offer],
    caller: Caller,
    *,
    deadline_s: float,
    streams: int = STREAMS,
    throttle: Throttle = UNLIMITED,
) -> Transferred:
    """Fill `sink` from all that offer the same snapshot: each stream takes the next block that is
    missing, so the faster source gives more, and one that fails costs nothing but time.

    `deadline_s`: seconds it may take; `streams`: to each source. Blocks until all has arrived, or
    `Sink.fail` was called; any thread. Raises Corrupt when a block stays wrong, Refused or Stranger
    when a source does not take the ticket or lacks the key, TransientError when time or sources
    have run out. What has arrived stays in the sink: call again with other offers."""
    before = sink.arrived_bytes

    def work(sock: socket.socket, peer: str) -> None:
        receive_all(sock, sink, throttle, crew.deadline_s, peer)

    crew = _Crew(
        caller,
        deadline_s,
        sink.over,
        work=work,
        progress=lambda: sink.arrived_bytes,
    )
    crew.run([offer for offer in offers for _ in range(streams)])
    if sink.failure is None and sink.left:
        crew.explain()
    sink.check()
    return crew.result(sink.arrived_bytes - before)


def greet(offer: Offer, caller: Caller, *, deadline_s: float) -> None:
    """See whether the listener that `offer` is of, with its greeting, can be reached. Nothing is
    moved.

    `deadline_s`: seconds it may take. Blocks; any thread. Raises Refused when another listener of
    the job answers there, Stranger when it is none, Cut when nobody answers in time."""
    end_s = time.monotonic() + deadline_s
    sock = _dial(offer, end_s)
    with sock:
        enter(
            sock,
            caller.key,
            end_s,
            ticket=offer.ticket,
            holder=secrets.token_bytes(TICKET_BYTES),
            node=caller.node,
            use=Use.GREET,
        )


class _Crew:
    """The streams of one transfer, each on a thread. `over`: set when no stream need connect again;
    `work`: what is done with a connection; `progress`: a number that rises while bytes arrive."""

    def __init__(
        self,
        caller: Caller,
        deadline_s: float,
        over: threading.Event,
        *,
        work: Callable[[socket.socket, str], None],
        progress: Callable[[], int],
    ) -> None:
        self.deadline_s = time.monotonic() + deadline_s
        self._caller = caller
        self._over = over
        self._work = work
        self._progress = progress
        self._began_s = time.monotonic()
        self._holder = secrets.token_bytes(TICKET_BYTES)
        self._lock = threading.Lock()
        self._cuts = 0
        self._errors: list[EverstepError] = []

    def run(self, offers: Sequence[Offer]) -> None:
        """A stream to each of `offers`; wait for the end of the last. Each ends by its deadlines,
        of the socket's calls and of the whole."""
        if not offers:
            raise ValueError("a transfer needs an offer and a stream")
        if len(offers) == 1:
            try:
                self._stream(offers[0])
            except EverstepError as error:
                self._errors.append(error)
            return
        with ThreadPoolExecutor(len(offers), thread_name_prefix="everstep-bulk-stream") as pool:
            futures = [pool.submit(self._stream, offer) for offer in offers]
        for future in futures:
            try:
                future.result()
            except EverstepError as error:
                self._errors.append(error)

    def explain(self) -> None:
        """Raise the first error of a stream, if there was one: why not all has arrived."""
        if self._errors:
            raise self._errors[0]

    def result(self, nbytes: int) -> Transferred:
        """What it took until now."""
        return Transferred(nbytes=nbytes, seconds=time.monotonic() - self._began_s, cuts=self._cuts)

    def _stream(self, offer: Offer) -> None:
        """Connect and work, again after each cut, until it is over. A source that moves nothing
        several times is given up. Raises Refused, Stranger, and TransientError."""
        peer = address_text(offer.host, offer.port)
        fruitless = 0
        while not self._over.is_set():
            before = self._progress()
            try:
                with self._connect(offer) as sock:
                    self._work(sock, peer)
                    return
            except Done:  # by the other streams; or the last word of a connection was lost
                return
            except (Refused, Stranger) as error:
                raise type(error)(f"{peer} was asked for a transfer: {error}") from error
            except Cut as error:
                fruitless = fruitless + 1 if self._progress() == before else 0
                with self._lock:
                    self._cuts += 1
                left_s = self.deadline_s - time.monotonic()
                if fruitless >= FRUITLESS or left_s <= 0:
                    raise TransientError(
                        f"the transfer with {peer} was given up: {error}"
                    ) from error
                self._over.wait(min(_FIRST_PAUSE_S * 2**fruitless, left_s))

    def _connect(self, offer: Offer) -> socket.socket:
        limits = self._caller.limits
        deadline_s = min(self.deadline_s, time.monotonic() + limits.handshake_s)
        sock = _dial(offer, deadline_s)
        try:
            enter(
                sock,
                self._caller.key,
                deadline_s,
                ticket=offer.ticket,
                holder=self._holder,
                node=self._caller.node,
                use=Use.READ,
            )
            prepare(sock, limits.stall_s)
        except BaseException:
            sock.close()
            raise
        return sock


def _dial(offer: Offer, deadline_s: float) -> socket.socket:
    """A connection to who made `offer`; `deadline_s` on the monotonic clock. Raises Cut."""
    try:
        return socket.create_connection(
            (offer.host, offer.port), max(deadline_s - time.monotonic(), 0.001)
        )
    except OSError as error:
        raise Cut(f"no connection ({error.strerror or error})") from error
