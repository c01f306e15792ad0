"""The bulk plane's listener: who may come in, with what ticket, and how many at a time.

Theory of operation. One thread accepts and looks after expired tickets; each connection has a
thread of its own, which ends with it. Until it has shown that it has the key a connection is a
stranger's: strangers get a few seconds and a few places, and when these are taken the longest
waiting one is put out, so a crowd of them can't keep the job's own nodes away, who need
milliseconds. Transfers that are under way never notice.

A ticket ends when its transfer has, when it expires, or when it is withdrawn; `on_end` is called
once, when no connection uses its memory any more.

What it doesn't know: why a ticket was made.
"""

from __future__ import annotations

import collections
import errno
import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everstep.errors import EverstepError
from everstep.wire.bulk_door import (
    KEY_BYTES,
    TICKET_BYTES,
    Claim,
    Cut,
    Use,
    Verdict,
    admit,
    words,
)
from everstep.wire.bulk_stream import Source, prepare, send_all
from everstep.wire.bulk_throttle import UNLIMITED, Throttle
from everstep.wire.frames import Sparingly
from everstep.wire.ports import listen

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FULL_PAUSE_S = 0.1
_BACKLOG = 128
_REMEMBERED = 4096  # tickets that are over, so that a late one is told why


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long and how many. `handshake_s`: seconds a connection has to show that it has the key;
    a healthy one needs two round trips. `stall_s`: seconds in which nothing moves, after which a
    connection is given up; above what a retransmission on a lossy network takes. `strangers`:
    connections that have not shown it yet; `connections`: those that have, which are threads;
    `streams`: connections with one ticket; `refusals_per_minute`: who is not let in is told one by
    one, and the others are counted."""

    handshake_s: float = 5.0
    stall_s: float = 15.0
    strangers: int = 32
    connections: int = 128
    streams: int = 16
    refusals_per_minute: int = 20


@dataclass(slots=True, eq=False)
class _Ticket:
    """A ticket that was made here. `holder`: of the transfer that it is tied to."""

    source: Source
    node: int
    expires_s: float
    on_end: Callable[[bool], None]
    holder: bytes | None = None
    done: bool = False
    sockets: set[socket.socket] = field(default_factory=set)


class Listener:
    """Listens on the first free one of `ports` (0: any) at `host`.

    `key`: the job's, at least 32 bytes. `on_refused(address, why)` is called for everybody who is
    not let in, at most `limits.refusals_per_minute`, on a thread of the listener. `throttle` is for
    what goes out and comes in through here. `greeting`: with it, anybody who has the key may see
    whether this listener can be reached (`Use.GREET`), and does nothing else. Any thread. Raises
    UserError when no port is free or `host` is not an address of this host."""

    def __init__(
        self,
        *,
        host: str,
        ports: Sequence[int],
        key: bytes,
        on_refused: Callable[[str, str], None],
        throttle: Throttle = UNLIMITED,
        limits: Limits = Limits(),
    ) -> None:
        if len(key) < KEY_BYTES:
            raise ValueError(f"the key has {len(key)} bytes; at least {KEY_BYTES}")
        self.host = host
        self._key = key
        self.greeting = secrets.token_bytes(TICKET_BYTES)
        self._on_refused = on_refused
        self._sparingly = Sparingly(limits.refusals_per_minute)
        self._throttle = throttle
        self._limits = limits
        self._lock = threading.Lock()
        self._tickets: dict[bytes, _Ticket] = {}
        self._over: collections.OrderedDict[bytes, tuple[Verdict, bytes | None]] = (
            collections.OrderedDict()
        )
        self._strangers: dict[socket.socket, str] = {}  # in the order in which they came
        self._admitted = 0
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()
        self._socket = listen(host, ports, _BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._acceptor = threading.Thread(target=self._accept, name="everstep-bulk-listener")
        self._acceptor.start()

    # ------------------------------------------------------------ tickets

    def lend(
        self,
        source: Source,
        *,
        node: int,
        lifetime_s: float,
        on_end: Callable[[bool], None],
    ) -> bytes:
        """A ticket with which `node` may read `source` once, within `lifetime_s`. `on_end(done)` is
        called when the memory is free again, on a thread of the listener."""
        return self._make(_Ticket(source, node, _after(lifetime_s), on_end))

    def withdraw(self, ticket: bytes) -> None:
        """End a ticket now, with all its connections. One that is over stays so."""
        with self._lock:
            found = self._tickets.get(ticket)
        if found is not None:
            self._retire(ticket, found, Verdict.EXPIRED)

    def close(self) -> None:
        """End everything and wait for all threads. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake()
        self._acceptor.join()
        with self._lock:
            tickets = list(self._tickets.items())
            strangers = list(self._strangers)
        for sock in strangers:
            _shut(sock)
        for name, ticket in tickets:
            self._retire(name, ticket, Verdict.EXPIRED)
        while True:
            with self._lock:
                thread = next(iter(self._threads), None)
            if thread is None:
                break
            thread.join()  # its sockets are shut: it ends now
        for sock in (self._socket, self._wake_in, self._wake_out):
            sock.close()

    def _make(self, ticket: _Ticket) -> bytes:
        if self._closing.is_set():
            raise ValueError("the listener is closed")
        name = secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            self._tickets[name] = ticket
        self._wake()
        return name

    def _retire(self, name: bytes, ticket: _Ticket, why: Verdict) -> None:
        """Take the ticket back. Its connections are shut, unless it is done: then they end by
        themselves."""
        with self._lock:
            if self._tickets.pop(name, None) is None:
                return
            self._over[name] = why, ticket.holder
            while len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)
            if why is not Verdict.USED:
                for sock in ticket.sockets:
                    _shut(sock)
            unused = not ticket.sockets
        if unused:
            ticket.on_end(ticket.done)

    # ------------------------------------------------------------ connections

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wake_out, selectors.EVENT_READ)
            while not self._closing.is_set():
                ready = {key.fileobj for key, _ in selector.select(self._expire())}
                if self._wake_out in ready:
                    self._wake_out.recv(4096)
                if self._socket in ready:
                    self._let_in()

    def _let_in(self) -> None:
        try:
            sock, address = self._socket.accept()
        except BlockingIOError:
            return  # it has gone again
        except OSError as error:
            if error.errno not in _FULL:
                return  # it was broken before it was accepted
            self._refuse("(all)", f"no connection can be accepted: {error.strerror}")
            self._closing.wait(_FULL_PAUSE_S)  # it stays in the queue, and select would not wait
            return
        peer = address_text(*address[:2])
        thread = threading.Thread(
            target=self._connection, args=(sock, peer), name="everstep-bulk-connection"
        )
        put_out = None
        with self._lock:
            if len(self._strangers) >= self._limits.strangers:
                put_out = next(iter(self._strangers))
                put_out_peer = self._strangers.pop(put_out)
                _shut(put_out)
            self._strangers[sock] = peer
            self._threads.add(thread)
        if put_out is not None:
            self._refuse(put_out_peer, "it was put out to make room for others")
        try:
            thread.start()
        except RuntimeError as error:  # as many threads as the system allows
            with self._lock:
                self._strangers.pop(sock, None)
                self._threads.discard(thread)
            sock.close()
            self._refuse(peer, f"it can't be served: {error}")

    def _refuse(self, peer: str, why: str) -> None:
        with self._lock:
            held_back = self._sparingly.admit(time.monotonic())
        if held_back is not None:
            more = f" ({held_back} more were refused and not told)" if held_back else ""
            self._on_refused(peer, f"{why}{more}")

    def _expire(self) -> float | None:
        """End what has expired, and say in how many seconds the next will; None for never."""
        now = time.monotonic()
        with self._lock:
            tickets = list(self._tickets.items())
        for name, ticket in tickets:
            if ticket.expires_s <= now:
                self._retire(name, ticket, Verdict.EXPIRED)
        left = [ticket.expires_s - now for _, ticket in tickets if ticket.expires_s > now]
        return min(left, default=None)

    def _connection(self, sock: socket.socket, peer: str) -> None:
        try:
            with sock:
                self._talk(sock, peer)
        finally:
            with self._lock:
                self._strangers.pop(sock, None)
                self._threads.discard(threading.current_thread())

    def _talk(self, sock: socket.socket, peer: str) -> None:
        ticket: _Ticket | None = None

        def judge(claim: Claim) -> tuple[Verdict, int]:
            nonlocal ticket
            verdict, ticket = self._judge(claim, sock)
            return verdict, ticket.source.nbytes if ticket is not None else 0

        try:
            claim, verdict = admit(sock, self._key, _after(self._limits.handshake_s), judge)
            if ticket is None:
                if verdict not in (Verdict.DONE, Verdict.WELCOME):
                    self._refuse(peer, f"node {claim.node} was refused: {words(verdict)}")
                return
            self._transfer(sock, ticket)
            ticket.done = True
            self._retire(claim.ticket, ticket, Verdict.USED)
        except Cut as error:
            if self._is_stranger(sock):
                self._refuse(peer, f"it did not show that it has the job's secret: {error}")
        except EverstepError as error:
            self._refuse(peer, str(error))
        finally:
            if ticket is not None:
                self._leave(sock, ticket)

    def _is_stranger(self, sock: socket.socket) -> bool:
        """Whether it is one still, and has not been put out already, and named."""
        with self._lock:
            return sock in self._strangers and not self._closing.is_set()

    def _judge(self, claim: Claim, sock: socket.socket) -> tuple[Verdict, _Ticket | None]:
        """What to say to one who has the key; with the ticket if it is welcome, and counted in."""
        with self._lock:
            self._strangers.pop(sock, None)
            if claim.use == Use.GREET:
                known = hmac.compare_digest(claim.ticket, self.greeting)
                return Verdict.WELCOME if known else Verdict.UNKNOWN, None
            ticket = self._tickets.get(claim.ticket)
            if ticket is None:
                return self._too_late(claim), None
            verdict = Verdict.WELCOME
            if ticket.expires_s <= time.monotonic():
                verdict = Verdict.EXPIRED
            elif claim.use != Use.READ:
                verdict = Verdict.WRONG_USE
            elif ticket.node != claim.node:
                verdict = Verdict.WRONG_NODE
            elif ticket.holder not in (None, claim.holder):
                verdict = Verdict.USED
            elif (
                len(ticket.sockets) >= self._limits.streams
                or self._admitted >= self._limits.connections
            ):
                verdict = Verdict.BUSY
            if verdict is not Verdict.WELCOME:
                return verdict, None
            ticket.holder = claim.holder
            ticket.sockets.add(sock)
            self._admitted += 1
            return verdict, ticket

    def _too_late(self, claim: Claim) -> Verdict:
        """What to say to one whose ticket is not there: a stream that comes late to its own
        transfer does nothing wrong."""
        why, holder = self._over.get(claim.ticket, (Verdict.UNKNOWN, None))
        return Verdict.DONE if why is Verdict.USED and holder == claim.holder else why

    def _transfer(self, sock: socket.socket, ticket: _Ticket) -> None:
        """Send what is asked for until all has been. Raises Cut and Stranger."""
        prepare(sock, self._limits.stall_s)
        send_all(sock, ticket.source, self._throttle, ticket.expires_s, self._closing)

    def _leave(self, sock: socket.socket, ticket: _Ticket) -> None:
        with self._lock:
            ticket.sockets.discard(sock)
            self._admitted -= 1
            last = not ticket.sockets and ticket not in self._tickets.values()
        if last:
            ticket.on_end(ticket.done)

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"w")
        except BlockingIOError:
            pass  # it has been woken often enough


def address_text(host: str, port: int) -> str:
    """An address for a person: "[::1]:29400"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _after(seconds: float) -> float:
    return time.monotonic() + seconds


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is closed or was never connected: nobody waits in it
