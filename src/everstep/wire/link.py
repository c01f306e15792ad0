"""One connection to a hub, the coordinator's or another agent's, made again when lost.

Theory of operation. A link tries until the other side comes: the name is resolved anew for each
attempt, its addresses are tried one after the other, and the pauses grow, with jitter, so that a
thousand agents do not come back in one moment. Each connection is a new DEALER with a new random
identity, closed at the first sign of its end; ZeroMQ's own reconnect is put off for an hour, since
it would go on with messages lost and tell nobody. (Were it turned off, ZeroMQ would throw away what
had arrived and was not read yet.)

`Hello` is sent once in a connection and answered by `Welcome`, with the lease and the sizes that
hold; then the link is joined. Everything sent after a loss is refused until the next join: what is
to be said again is the caller's to know.

It does not know what the messages mean. It can't tell a coordinator with another secret from
something else that closes connections. Loop thread only, but for names, which the loop's executor
resolves. Callbacks may call any method; an exception from one goes to the loop's handler.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import msgspec
import zmq

from everstep.errors import TransientError
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
from everstep.wire.plumbing import BATCH, Monitor, Watched, address_text, curve_pair, endpoint_of
from everstep.wire.secret import Secret

T = TypeVar("T")
Find = Callable[[], Awaitable[tuple[str, int]]]
"""Says where the coordinator is now; raises TransientError when nobody knows. Any other exception
ends the link, and goes to the loop's handler."""
_FIRST_RETRY_S: Final = 0.05
_NEVER_MS: Final = 3_600_000
_ENDINGS: Final = {
    zmq.EVENT_CLOSED: "nobody listens there, or the way is closed",
    zmq.EVENT_CONNECT_RETRIED: "nobody listens there, or the way is closed",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refuses this job's secret",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it is not {whom} with this job's secret",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it closed in the handshake: is its secret the same, and "
    "is it {whom}?",
    zmq.EVENT_DISCONNECTED: "the connection to {whom} closed",
}


class Link(Generic[T]):
    """Connects to a coordinator at `host` (a name or a numeric address) and `port`, and again after
    each loss, until it is closed. `receives`: the union of message types that may arrive.

    Callbacks: `on_joined()`; then `on_message(message)` for each message, in the order sent; then
    `on_lost(why)` once, and `on_joined()` again when the next connection stands. `on_waiting(why)`
    tells why no connection comes about, when the reason changes. `on_read()`: more of what was sent
    is known to be received; `unread_bytes` has fallen. `find`: asked before each attempt for the
    host and port to try, where they may change. `whom`: who is there, in messages.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        secret: Secret,
        receives: Any,
        on_joined: Callable[[], None],
        on_message: Callable[[T], None],
        on_lost: Callable[[str], None],
        on_waiting: Callable[[str], None],
        on_read: Callable[[], None] = lambda: None,
        limits: Limits | None = None,
        find: Find | None = None,
        whom: str = "the coordinator",
    ) -> None:
        self.whom = whom
        self.limits = limits or Limits()
        self.loop = asyncio.get_running_loop()
        self.receives = receives
        self.on_joined = on_joined
        self.on_message = on_message
        self.on_read = on_read
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.keys = curve_pair(secret.agent_private_key())
        self.coordinators_key = curve_pair(secret.coordinator_private_key())[0]
        self._host = host
        self._port = port
        self._find = find
        self._on_lost = on_lost
        self._on_waiting = on_waiting
        self._closed = False
        self._connection: _Connection[T] | None = None
        self._task = self.loop.create_task(self._stay_connected())
        self._task.add_done_callback(self._on_over)

    def send(self, message: msgspec.Struct) -> bool:
        """Queue a message; never blocks. False: there is no connection, as `on_lost` has told or is
        about to; or its backlog is full, and it is lost by that.

        Raises ChannelError when the message exceeds the cap.
        """
        if self._connection is None:
            return False
        return self._connection.send(message)

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of the newest attempt."""
        return self._host, self._port

    @property
    def unread_bytes(self) -> int:
        """Bytes that were sent and are not known to be received; 0 without a connection."""
        return 0 if self._connection is None else self._connection.unread_bytes

    def leave(self, why: str) -> None:
        """End this connection, and try for another one. Nothing without one."""
        if self._connection is not None:
            self._connection.leave(why)

    def close(self, why: str = "the agent has ended", linger_s: float = 0.2) -> None:
        """Say goodbye and stop for good; nothing is told after. Blocks until what is queued is
        sent, at most `linger_s`. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._connection is not None:
            self._connection.close(why, linger_s)
            self._connection = None
        self._task.cancel()
        self.context.term()

    def _on_over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.result()  # goes to the loop's handler

    async def _stay_connected(self) -> None:
        waiting_for = ""
        pause_s = _FIRST_RETRY_S
        while True:
            try:
                connection = await self._connect()
            except TransientError as error:
                if str(error) != waiting_for:
                    waiting_for = str(error)
                    self._tell(self._on_waiting, waiting_for)
            else:
                why = await connection.ended
                self._connection = None
                connection.close()
                self._tell(self._on_lost, why)
                waiting_for, pause_s = "", _FIRST_RETRY_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(2 * pause_s, self.limits.max_retry_s)

    def _tell(self, callback: Callable[..., None], *words: str) -> None:
        """Call back outside this task, which an exception would end; nothing after `close`."""
        if not self._closed:
            self.loop.call_soon(self._call, callback, *words)

    def _call(self, callback: Callable[..., None], *words: str) -> None:
        if not self._closed:
            callback(*words)

    async def _connect(self) -> _Connection[T]:
        """One attempt. Raises TransientError, which says why there is no connection."""
        if self._find is not None:
            self._host, self._port = await self._find()
        why = "it has no address"
        for address in await self._addresses():
            connection = _Connection(self, address)
            self._connection = connection
            try:
                async with asyncio.timeout(self.limits.connect_s):
                    await connection.settled.wait()
            except TimeoutError:
                why = f"no answer within {self.limits.connect_s:g} s"
            except BaseException:
                connection.close()
                raise
            if connection.joined:
                return connection
            if connection.ended.done():
                why = connection.ended.result()
            self._connection = None
            connection.close()
        raise self._no_connection(why)

    async def _addresses(self) -> list[str]:
        """The numeric addresses of the host's name, each once."""
        try:
            found = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
        except socket.gaierror:
            try:
                async with asyncio.timeout(self.limits.connect_s):
                    found = await self.loop.getaddrinfo(
                        self._host, self._port, type=socket.SOCK_STREAM
                    )
            except TimeoutError:
                why = f"its name was not resolved in {self.limits.connect_s:g} s"
                raise self._no_connection(why) from None
            except OSError as error:
                why = f"its name does not resolve: {error.strerror}"
                raise self._no_connection(why) from error
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def _no_connection(self, why: str) -> TransientError:
        return TransientError(
            f"no connection to {self.whom} at {address_text(self._host, self._port)}: {why}"
        )


class _Connection(Generic[T]):
    """One attempt, and what may become of it. `joined`: the hub's `Welcome` has come. `ended` is
    set by the end, with its reason, after all that had arrived was told. `settled` by the first of
    them."""

    def __init__(self, link: Link[T], address: str) -> None:
        self.joined = False
        self.settled = asyncio.Event()
        self.ended: asyncio.Future[str] = link.loop.create_future()
        self._link = link
        self._loop = link.loop
        self._limits = link.limits
        self._ending = ""
        self._closed = False
        self._ticks = 0
        self._agree(link.limits.lease_s, link.limits.max_message_bytes, link.limits.backlog_bytes)
        dealer = link.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, b"E" + secrets.token_bytes(15))
        dealer.setsockopt(zmq.CURVE_SERVERKEY, link.coordinators_key)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, link.keys[0])
        dealer.setsockopt(zmq.CURVE_SECRETKEY, link.keys[1])
        dealer.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        dealer.setsockopt(zmq.HANDSHAKE_IVL, int(link.limits.connect_s * 1000))
        dealer.setsockopt(zmq.MAXMSGSIZE, link.limits.max_message_bytes + 4096)
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, 0)  # the ledger bounds what is sent
        self._monitor = Monitor(self._loop, link.context, dealer, self._connection_events)
        dealer.connect(endpoint_of(address, link._port))
        self._dealer = Watched(self._loop, dealer, self._read)
        self._put(encode_control(Hello(PROTOCOL)))

    def _agree(self, lease_s: float, max_message_bytes: int, backlog_bytes: int) -> None:
        """Take the bounds under which the connection stands."""
        self._lease_s = lease_s
        self._tick_s = lease_s / TICKS_PER_LEASE
        self._max_message_bytes = max_message_bytes
        self._decoder: FrameDecoder[T] = FrameDecoder(self._link.receives, max_message_bytes)
        self._clock = LeaseClock(self._loop.time(), 2 * self._tick_s)
        self._ledger = Ledger(backlog_bytes, self._clock.look(self._loop.time()))

    @property
    def unread_bytes(self) -> int:
        return self._ledger.unread_bytes

    def send(self, message: msgspec.Struct) -> bool:
        if not self.joined or self.ended.done():
            return False
        frame = encode_data(message, self._max_message_bytes)
        if not self._ledger.take(frame):
            self._end(f"{self._link.whom} has left {self._ledger.unread_bytes} bytes unread")
            return False
        self._put(frame)
        return True

    def leave(self, why: str) -> None:
        """Say goodbye; the end is told as any other is."""
        if not self.ended.done():
            self._put(encode_control(Bye(why)))
            self._end(why)

    def close(self, why: str = "", linger_s: float = 0) -> None:
        """Close the sockets; with `why`, say goodbye first. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if why and not self.ended.done():
            self._put(encode_control(Bye(why)))
        if self.joined:
            self._timer.cancel()
        self._monitor.close()
        self._dealer.close(linger_s)

    def _put(self, frame: bytes) -> None:
        self._dealer.sock.send(frame, zmq.NOBLOCK)
        self._dealer.look()

    def _end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)
            self.settled.set()

    def _read(self) -> bool:
        dealer = self._dealer.sock
        for _ in range(BATCH):
            if self.ended.done() or self._closed:
                return False
            try:
                frame = dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                if self._ending:
                    self._end(self._ending)
                return False
            if dealer.getsockopt(zmq.RCVMORE):
                self._end(f"{self._link.whom} sent a message in several parts")
                return False
            self._take(frame)
        return True

    def _take(self, frame: bytes) -> None:
        self._ledger.heard_s = self._clock.look(self._loop.time())
        try:
            tell = self._obey(decode_control(frame)) if is_control(frame) else self._data(frame)
        except ChannelError as error:
            why = f"{self._link.whom} broke the protocol: {error}"
            self._put(encode_control(Bye(why)))
            self._end(why)
            return
        if tell is not None:  # a ChannelError of its own is none of the other side's
            tell()

    def _data(self, frame: bytes) -> Callable[[], None]:
        """Returns whom to tell of it."""
        message = self._decoder.data(frame)
        if self._ledger.receive(frame):
            self._put(encode_control(self._ledger.beat()))
        return lambda: self._link.on_message(message)

    def _obey(self, control: Control) -> Callable[[], None] | None:
        """Returns whom to tell of it, if anybody."""
        if isinstance(control, Beat) and self.joined:
            self._ledger.acknowledge(control)
            return self._link.on_read
        if isinstance(control, Bye):
            self._end(f"{self._link.whom} ended the connection: {control.why}")
        elif isinstance(control, Welcome) and not self.joined:
            self._agree(control.lease_s, control.max_message_bytes, control.backlog_bytes)
            self._timer = self._loop.call_later(self._tick_s, self._tick)
            self.joined = True
            self.settled.set()
            return self._link.on_joined
        else:
            raise ChannelError(f"{type(control).__name__} at the wrong time")
        return None

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        silent_s = self._clock.look(self._loop.time()) - self._ledger.heard_s
        self._ticks += 1
        if silent_s > self._lease_s:
            self._end(f"nothing was heard of {self._link.whom} for {self._lease_s:g} s")
        elif self._ticks % TICKS_PER_BEAT == 0:
            self._put(encode_control(self._ledger.beat()))

    def _connection_events(self, events: list[tuple[int, int]]) -> None:
        for event, _ in events:
            if event in _ENDINGS:
                why = _ENDINGS[zmq.Event(event)].format(whom=self._link.whom)
                self._ending = self._ending or why
        if self._ending:
            # What arrived before it is read first; `_read` tells the end.
            self._loop.call_soon(self._read_to_its_end)

    def _read_to_its_end(self) -> None:
        if not self._closed and self._read():
            self._dealer.look()
