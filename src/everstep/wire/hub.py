"""The coordinator's side of the control plane: one listening socket, a connection for each agent.

Theory of operation. A ROUTER with CURVE. Who does not know the coordinator's public key fails in
the handshake; who does not have the agents' private key is refused by the gate; both keys come from
the job's secret. A recorded session replayed fails too, since each handshake makes new keys on both
sides.

A peer is one connection of one link, with a number that is never used again. It begins with `Hello`
as its first frame and ends for good when the connection closes, when it is silent for a lease, when
it leaves a full backlog unread, breaks the protocol or says `Bye`. A link makes a new socket with a
new random identity for each connection, and ROUTER refuses two of one identity at a time. Should
ZeroMQ on the other side ever connect the same socket again, its first frame here is no `Hello`, and
it is cut: so no connection is resumed with messages missing.

That a connection closed is told by the socket's monitor, by its descriptor, which the peer's first
frame has told too. What the peer wrote before is still read: when ROUTER no longer has a route to
it, everything is in the socket's queue, and the loss is told after the queue has been read.

Where all peers fall silent at once it is rather this host that is cut off: no peer is lost then,
and `on_cut_off` is told.

It does not know what the messages mean, which node a peer is, or whether a peer's host is up. Loop
thread only. Callbacks may call any method; an exception from one goes to the loop's handler.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec
import zmq

from everstep.wire.channel import ChannelError
from everstep.wire.frames import (
    PROTOCOL,
    TICKS_PER_BEAT,
    TICKS_PER_LEASE,
    Beat,
    Bye,
    Control,
    FrameDecoder,
    Hello,
    LeaseClock,
    Ledger,
    Limits,
    Welcome,
    decode_control,
    encode_control,
    encode_data,
    is_control,
)
from everstep.wire.gate import Gate
from everstep.wire.plumbing import BATCH, Watched, curve_pair, endpoint_of, listen, shut
from everstep.wire.secret import Secret

T = TypeVar("T")
_PROBE_EVERY_S: Final = 0.002
_PROBES: Final = 25
_LAST_WORDS_S: Final = 0.1  # for a Bye to get out before the connection is shut


@dataclass(slots=True, eq=False, kw_only=True)
class _Peer:
    """`live`: joined, and neither lost nor dropped. `connected`: its connection is open."""

    number: int
    identity: bytes
    fd: int
    address: str
    ledger: Ledger
    live: bool = True
    connected: bool = True


class Hub(Generic[T]):
    """Listens on `host`, on the first port of `ports` that is free; port 0 is any.

    `host` is a numeric address of either family, `*` for all of both. `receives`: the union of
    message types that peers may send.

    Callbacks: `on_joined(peer, address)` first; `on_message(peer, message)` for each message, in
    the order sent; `on_lost(peer, why)`, which names its address, once and last, unless the peer
    was dropped or the hub closed. `on_refused(address, why)` for strangers, at most
    `limits.refusals_per_minute`; of one whose garbage came with the connection, the address may be
    gone before it can be asked. `on_cut_off()`, once or more: nothing was heard of any peer for a
    lease, or this process stood still for one; without it they are lost like others.

    Raises UserError when no port of the range is free or the address is not this host's.
    """

    def __init__(
        self,
        *,
        host: str,
        ports: Sequence[int],
        secret: Secret,
        receives: Any,
        on_joined: Callable[[int, str], None],
        on_message: Callable[[int, T], None],
        on_lost: Callable[[int, str], None],
        on_refused: Callable[[str, str], None],
        on_cut_off: Callable[[], None] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._on_cut_off = on_cut_off
        self._loop = asyncio.get_running_loop()
        self._decoder: FrameDecoder[T] = FrameDecoder(receives, self._limits.max_message_bytes)
        self._on_joined = on_joined
        self._on_message = on_message
        self._on_lost = on_lost
        self._closed = False
        self._next_number = 0
        self._peers: dict[int, _Peer] = {}  # the live ones, by number
        self._by_identity: dict[bytes, _Peer] = {}
        self._by_fd: dict[int, _Peer] = {}  # the connected ones
        self._unrouted: list[_Peer] = []
        self._ticks = 0
        self._tick_s = self._limits.lease_s / TICKS_PER_LEASE
        self._ticked_s = self._loop.time()
        self._clock = LeaseClock(self._ticked_s, 2 * self._tick_s)

        listener = listen(host, ports)
        self.port: int = listener.getsockname()[1]
        """The port on which it listens."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._open(listener, secret, on_refused)
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _open(
        self, listener: socket.socket, secret: Secret, on_refused: Callable[[str, str], None]
    ) -> None:
        router = self._context.socket(zmq.ROUTER)
        public, private = curve_pair(secret.coordinator_private_key())
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_PUBLICKEY, public)
        router.setsockopt(zmq.CURVE_SECRETKEY, private)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.IPV6, 1)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDHWM, 0)  # the ledgers bound what is sent
        router.setsockopt(zmq.HANDSHAKE_IVL, int(self._limits.connect_s * 1000))
        router.setsockopt(zmq.MAXMSGSIZE, self._limits.max_message_bytes + 4096)
        self._gate = Gate(
            self._loop,
            self._context,
            router,
            public_key=curve_pair(secret.agent_private_key())[0],
            refusals_per_minute=self._limits.refusals_per_minute,
            on_closed=self._connection_closed,
            on_refused=on_refused,
        )
        self._router = Watched(self._loop, router, self._read)
        router.setsockopt(zmq.USE_FD, listener.detach())
        router.bind(endpoint_of("127.0.0.1", self.port))  # the descriptor says where

    def _close_sockets(self, linger_s: float) -> None:
        self._gate.close()
        self._router.close(linger_s)
        self._context.term()

    def send(self, peer: int, message: msgspec.Struct) -> bool:
        """Queue a message; never blocks. False: the peer is not there any more, as `on_lost` has
        told or is about to; or its backlog is full, and it is lost by that.

        Raises ChannelError when the message exceeds `limits.max_message_bytes`.
        """
        there = self._peers.get(peer)
        frame = encode_data(message, self._limits.max_message_bytes)
        if there is None:
            return False
        if not there.ledger.take(frame):
            self._lose(there, f"it has left {there.ledger.unread_bytes} bytes unread")
            return False
        return self._put(there, frame)

    def unread_bytes(self, peer: int) -> int:
        """Bytes that were sent to a peer and are not known to be received; 0 for one that is not
        there."""
        there = self._peers.get(peer)
        return 0 if there is None else there.ledger.unread_bytes

    def drop(self, peer: int, why: str) -> None:
        """End a peer's connection, telling it why. Nothing of it is told any more, neither a
        message nor its loss. Of a peer that is lost already, nothing happens."""
        there = self._peers.get(peer)
        if there is not None:
            self._hang_up(there, why)

    def close(self, why: str = "the coordinator has ended", linger_s: float = 0.2) -> None:
        """Say goodbye to all and close every socket. Blocks until what is queued is sent, at most
        `linger_s`. May be called twice."""
        if self._closed:
            return
        for peer in self._peers.values():
            self._put(peer, encode_control(Bye(why)))
        self._closed = True
        self._timer.cancel()
        self._close_sockets(linger_s)

    # ------------------------------------------------------------ frames

    def _read(self) -> bool:
        router = self._router.sock
        for _ in range(BATCH):
            try:
                identity = router.recv(zmq.NOBLOCK)
            except zmq.Again:
                for peer in self._unrouted:
                    self._lose(peer, "its connection closed")
                self._unrouted.clear()
                return False
            there = self._by_identity.get(identity)
            if there is None:
                hello = router.recv(copy=False)  # which knows its descriptor
                self._skip_parts()
                self._admit(identity, hello)
            else:
                frame = router.recv()
                if more := self._skip_parts():
                    self._lose(there, f"it sent a message in {1 + more} parts")
                else:
                    self._take(there, frame)
            if self._closed:
                return False
        return True

    def _skip_parts(self) -> int:
        """How many parts a message had beyond its first."""
        router, count = self._router.sock, 0
        while router.getsockopt(zmq.RCVMORE):
            router.recv()
            count += 1
        return count

    def _take(self, peer: _Peer, frame: bytes) -> None:
        if not peer.live:
            return
        peer.ledger.heard_s = self._clock.look(self._loop.time())
        try:
            if is_control(frame):
                self._obey(peer, decode_control(frame))
                return
            message = self._decoder.data(frame)
        except ChannelError as error:
            self._lose(peer, f"it broke the protocol: {error}")
            return
        if peer.ledger.receive(frame):
            self._put(peer, encode_control(peer.ledger.beat()))
        self._on_message(peer.number, message)

    def _obey(self, peer: _Peer, control: Control) -> None:
        if isinstance(control, Beat):
            peer.ledger.acknowledge(control)
        elif isinstance(control, Bye):
            self._lose(peer, f"it left: {control.why}")
        else:
            raise ChannelError(f"{type(control).__name__} in the middle of a connection")

    def _admit(self, identity: bytes, frame: zmq.Frame) -> None:
        """The first frame of an identity that is not known: a new peer's, or the last of one whose
        loss was told."""
        self._gate.drain()  # so that a descriptor's number means what it did to the sender
        fd = int(frame.get(zmq.SRCFD))
        address = self._gate.addresses.get(fd)
        if address is None or fd in self._by_fd:
            return
        try:
            hello = decode_control(frame.bytes)
        except ChannelError:
            hello = Bye("")
        if not isinstance(hello, Hello):
            self._gate.refuse(address, "its first frame is not the one that begins a connection")
            shut(fd, address)
            return
        heard_s = self._clock.look(self._loop.time())
        peer = _Peer(
            number=self._next_number,
            identity=identity,
            fd=fd,
            address=address,
            ledger=Ledger(self._limits.backlog_bytes, heard_s),
        )
        self._by_identity[identity] = self._by_fd[fd] = peer
        if hello.protocol != PROTOCOL:
            why = f"it speaks protocol {hello.protocol}, this is {PROTOCOL}: install one version"
            self._gate.refuse(address, why)
            self._hang_up(peer, why)
            return
        self._next_number += 1
        limits = self._limits
        welcome = Welcome(limits.lease_s, limits.max_message_bytes, limits.backlog_bytes)
        self._peers[peer.number] = peer
        self._put(peer, encode_control(welcome))
        self._on_joined(peer.number, address)

    def _put(self, peer: _Peer, frame: bytes) -> bool:
        """Hand a frame to the socket. False: there is no route to the peer any more."""
        router = self._router
        try:
            router.sock.send(peer.identity, zmq.SNDMORE | zmq.NOBLOCK)
            router.sock.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if peer not in self._unrouted:
                self._unrouted.append(peer)
                # What it wrote may still be in the queue: told when that is read.
                self._loop.call_soon(self._read_to_its_end)
            return False
        router.look()
        return True

    def _read_to_its_end(self) -> None:
        if not self._closed and self._unrouted:
            self._read()
            self._router.look()

    # ------------------------------------------------------------ ends

    def _lose(self, peer: _Peer, why: str) -> None:
        """A peer is lost: told in the loop's next turn, since a caller may be in the middle of
        sending to all."""
        if peer.live:
            self._hang_up(peer, why)
            if self._has_stood_still():
                self._loop.call_soon(self._tell_cut_off)
            self._loop.call_soon(self._tell_lost, peer.number, f"{peer.address}: {why}")

    def _tell_lost(self, number: int, why: str) -> None:
        if not self._closed:
            self._on_lost(number, why)

    def _tell_cut_off(self) -> None:
        if self._on_cut_off is not None and not self._closed:
            self._on_cut_off()

    def _hang_up(self, peer: _Peer, why: str) -> None:
        peer.live = False
        self._peers.pop(peer.number, None)
        if not peer.connected:
            self._forget(peer)
        elif self._put(peer, encode_control(Bye(why))):
            self._loop.call_later(_LAST_WORDS_S, self._cut, peer)

    def _cut(self, peer: _Peer) -> None:
        if peer.connected and not self._closed:
            shut(peer.fd, peer.address)

    def _forget(self, peer: _Peer) -> None:
        if self._by_identity.get(peer.identity) is peer:
            del self._by_identity[peer.identity]

    def _probe(self, peer: _Peer, left: int) -> None:
        """Its connection is closed: lose it when the socket knows so, at the latest after some
        tries."""
        if self._closed or not peer.live:
            return
        if left == 0:
            self._lose(peer, "its connection closed")
        elif self._put(peer, encode_control(peer.ledger.beat())):
            self._loop.call_later(_PROBE_EVERY_S, self._probe, peer, left - 1)
        else:
            self._loop.call_later(_PROBES * _PROBE_EVERY_S, self._probe, peer, 0)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        if self._peers and self._has_stood_still():
            self._tell_cut_off()
        self._ticked_s = self._loop.time()
        now_s = self._clock.look(self._ticked_s)
        self._ticks += 1
        lease_s, cut_off = self._limits.lease_s, self._looks_cut_off(now_s)
        for peer in list(self._peers.values()):
            if now_s - peer.ledger.heard_s > lease_s and not cut_off:
                self._lose(peer, f"nothing was heard of it for {lease_s:g} s")
            elif self._ticks % TICKS_PER_BEAT == 0:
                self._put(peer, encode_control(peer.ledger.beat()))

    def _has_stood_still(self) -> bool:
        """Whether this loop did not run for a lease: then it is this process that was away, and
        that peers have hung up meanwhile says nothing of them."""
        away_s = self._loop.time() - self._ticked_s
        return self._on_cut_off is not None and away_s > self._limits.lease_s

    def _looks_cut_off(self, now_s: float) -> bool:
        """Whether no peer at all was heard of late. All of them beat thrice in a lease; so when the
        lease of one runs out, half of it tells whether the others are still there."""
        if self._on_cut_off is None or not self._peers:
            return False
        silences_s = [now_s - peer.ledger.heard_s for peer in self._peers.values()]
        if min(silences_s) > self._limits.lease_s:
            self._loop.call_soon(self._tell_cut_off)
        return min(silences_s) > self._limits.lease_s / 2

    def _connection_closed(self, fd: int) -> bool:
        peer = self._by_fd.pop(fd, None)
        if peer is None:
            return False
        peer.connected = False
        if peer.live:
            self._probe(peer, _PROBES)
        else:
            self._forget(peer)
        return True
