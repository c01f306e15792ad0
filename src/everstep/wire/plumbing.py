"""ZeroMQ sockets on an asyncio loop, and what has to be asked of the descriptors below them.

Theory of operation. A ZeroMQ socket has one descriptor, which becomes readable when *something* may
have happened; using the socket in any way takes that sign away. So after each use its owner calls
`look`, and `Watched` reads until nothing is there, a batch in each turn of the loop.

A ROUTER can neither close one peer's connection nor say where a peer is. Both are asked of the
connection's descriptor, whose number ZeroMQ tells (in its monitor's events, and as SRCFD of a
message). The descriptor is ZeroMQ's: it is duplicated for the moment of the question, and before a
connection is shut the address at its other end is compared, for the number may be another's by now.

ZeroMQ's own thread accepts, and cuts a stranger before the loop has come to ask who he is. So the
listening socket is made here, with a high SO_RCVLOWAT, which the kernel gives on to accepted
connections: ZeroMQ is not woken for what arrives until `begin` lowers it. Only what had come before
the connection was accepted can still be read, and its sender be gone, too early.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from everstep.wire.ports import listen as free_port_of

BATCH: Final = 64  # messages read in one turn of the loop, so that timers keep their time
UNKNOWN: Final = "an address that was gone before it could be asked"
_BACKLOG: Final = 4096  # a job's agents may all come at once; the kernel's own cap holds below
_HELD_BACK_BYTES: Final = 1 << 16  # much more than a handshake's first frames
_MONITORED: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Watched:
    """Calls `read` on the loop whenever `sock` may have something. `read` returns whether there may
    be more, and reads at most a batch."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: zmq.Socket[bytes], read: Callable[[], bool]
    ) -> None:
        self.sock = sock
        self._loop = loop
        self._read = read
        self._fd = int(sock.getsockopt(zmq.FD))
        self._open = True
        self._scheduled = False
        loop.add_reader(self._fd, self._run)
        self.look()

    def look(self) -> None:
        """Have what is there read in the loop's next turn. To be called after each other use of the
        socket."""
        if self._open and not self._scheduled and int(self.sock.events) & zmq.POLLIN:
            self._schedule()

    def close(self, linger_s: float = 0) -> None:
        """Close the socket. ZeroMQ goes on sending what is queued for `linger_s`. May be called
        twice."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self.sock.close(linger=int(linger_s * 1000))

    def _schedule(self) -> None:
        if self._open and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        self._scheduled = False
        self._run()

    def _run(self) -> None:
        if not self._open:
            return
        more = True  # also when a callback raises: the sign on the descriptor is used up
        try:
            more = self._read()
        finally:
            if more:
                self._schedule()
            else:
                self.look()


class Monitor:
    """Tells the connections' events of one socket: `on_events` gets (event, value) for all that
    have happened, in order. The value is a descriptor's number or an error's."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        sock: zmq.Socket[bytes],
        on_events: Callable[[list[tuple[int, int]]], None],
    ) -> None:
        self._of = sock
        self._on_events = on_events
        self._open = True
        endpoint = f"inproc://everstep.monitor.{id(self):x}"
        sock.monitor(endpoint, _MONITORED)
        pair = context.socket(zmq.PAIR)
        # ZeroMQ's own thread would block on a full one.
        pair.setsockopt(zmq.RCVHWM, 0)
        pair.connect(endpoint)
        self._watched = Watched(loop, pair, self._read)

    def drain(self) -> None:
        """Tell all events that have happened so far."""
        if self._open:
            self._read()

    def close(self) -> None:
        """Stop listening. May be called twice, and before the socket is closed."""
        if self._open:
            self._open = False
            self._of.monitor(None, 0)
            self._watched.close()

    def _read(self) -> bool:
        events = []
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._watched.sock.recv_multipart(zmq.NOBLOCK))
                events.append((int(event["event"]), int(event["value"])))
        if events:
            self._on_events(events)
        return False


def curve_pair(private_key: bytes) -> tuple[bytes, bytes]:
    """(public, private) of a 32-byte private key, as ZeroMQ takes them."""
    private = z85.encode(private_key)
    return zmq.curve_public(private), private


def endpoint_of(host: str, port: int) -> str:
    """The ZeroMQ endpoint of a numeric address of either family."""
    return f"tcp://{address_text(host, port)}"


def address_text(host: str, port: int) -> str:
    """An address as people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, ports: Sequence[int]) -> socket.socket:
    """A listening socket for a ROUTER, on the first free port of `ports`. Raises UserError as
    `ports.listen` does."""
    sock = free_port_of(host, ports, _BACKLOG)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _HELD_BACK_BYTES)
    return sock


def begin(fd: int) -> str:
    """Let ZeroMQ read from a connection that `listen`'s socket has accepted. Returns the address at
    its other end, or words where it is closed."""
    sock = _borrow(fd)
    if sock is None:
        return UNKNOWN
    with sock:
        address = _remote(sock)
        if address != UNKNOWN:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return address


def shut(fd: int, address: str) -> None:
    """Close the connection `fd` if `address` is still at its other end."""
    sock = _borrow(fd)
    if sock is not None:
        with sock:
            if _remote(sock) == address != UNKNOWN:
                with contextlib.suppress(OSError):  # it closed by itself in this moment
                    sock.shutdown(socket.SHUT_RDWR)


def _borrow(fd: int) -> socket.socket | None:
    """A duplicate of ZeroMQ's descriptor; None if the number is no socket's any more."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _remote(sock: socket.socket) -> str:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return UNKNOWN
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return UNKNOWN
    return address_text(host.removeprefix("::ffff:"), port)
