"""For tests of the network: what both sides were told, a proxy between them, and somebody who knows
the secret and does not keep to the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, ParamSpec

import msgspec
import zmq

from everstep.wire.frames import Control, Hello, encode_control
from everstep.wire.link import Find
from everstep.wire.network import Hub, Limits, Link
from everstep.wire.plumbing import curve_pair
from everstep.wire.secret import Secret, make_secret

P = ParamSpec("P")
LOCAL = "127.0.0.1"
ANY_PORT = range(1)
PATIENCE_S = 20
SECRET = make_secret()


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int
    text: str = ""


class Blob(msgspec.Struct, frozen=True, tag=True):
    data: bytes


Message = Ping | Blob


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class News:
    """Wakes those who wait for a condition whenever something was told."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        self._event.set()

    async def until(self, ready: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not ready():
                self._event.clear()
                await self._event.wait()


class HubCase:
    """A hub and what it told."""

    def __init__(
        self,
        news: News,
        *,
        host: str = LOCAL,
        ports: range = ANY_PORT,
        secret: Secret = SECRET,
        limits: Limits | None = None,
        may_be_cut_off: bool = False,
    ) -> None:
        self.news = news
        self.cut_off = 0
        self.joined: list[int] = []
        self.addresses: list[str] = []
        self.got: list[tuple[int, Message]] = []
        self.lost: list[tuple[int, str]] = []
        self.refused: list[tuple[str, str]] = []
        self.hub: Hub[Message] = Hub(
            host=host,
            ports=ports,
            secret=secret,
            receives=Message,
            on_joined=self._on_joined,
            on_message=self._on_message,
            on_lost=self._on_lost,
            on_refused=self._on_refused,
            on_cut_off=self._on_cut_off if may_be_cut_off else None,
            limits=limits,
        )

    def _on_joined(self, peer: int, address: str) -> None:
        self.joined.append(peer)
        self.addresses.append(address)
        self.news.tell()

    def _on_message(self, peer: int, message: Message) -> None:
        assert peer in self.joined
        assert peer not in [number for number, _ in self.lost]
        self.got.append((peer, message))
        self.news.tell()

    def _on_lost(self, peer: int, why: str) -> None:
        assert peer not in [number for number, _ in self.lost]
        self.lost.append((peer, why))
        self.news.tell()

    def _on_cut_off(self) -> None:
        self.cut_off += 1
        self.news.tell()

    def _on_refused(self, address: str, why: str) -> None:
        self.refused.append((address, why))
        self.news.tell()


class LinkCase:
    """A link and what it told, as one list of events."""

    def __init__(
        self,
        news: News,
        port: int,
        *,
        host: str = LOCAL,
        secret: Secret = SECRET,
        limits: Limits | None = None,
        find: Find | None = None,
    ) -> None:
        self.news = news
        self.events: list[str] = []
        self.got: list[Message] = []
        self.lost: list[str] = []
        self.waiting: list[str] = []
        self.reads = 0
        self.link: Link[Message] = Link(
            host=host,
            port=port,
            secret=secret,
            receives=Message,
            on_joined=self._on_joined,
            on_message=self._on_message,
            on_lost=self._on_lost,
            on_waiting=self._on_waiting,
            on_read=self._on_read,
            limits=limits,
            find=find,
        )

    def _on_read(self) -> None:
        self.reads += 1
        self.news.tell()

    def _on_joined(self) -> None:
        self.events.append("joined")
        self.news.tell()

    def _on_message(self, message: Message) -> None:
        self.events.append("message")
        self.got.append(message)
        self.news.tell()

    def _on_lost(self, why: str) -> None:
        self.events.append("lost")
        self.lost.append(why)
        self.news.tell()

    def _on_waiting(self, why: str) -> None:
        self.waiting.append(why)
        self.news.tell()


@contextlib.asynccontextmanager
async def linked(limits: Limits | None = None) -> AsyncIterator[tuple[News, HubCase, LinkCase]]:
    """A hub and a link that has joined it as peer 0."""
    news = News()
    hub = HubCase(news, limits=limits)
    link = LinkCase(news, hub.hub.port, limits=limits)
    try:
        await news.until(lambda: link.events == ["joined"])
        yield news, hub, link
    finally:
        link.link.close()
        hub.hub.close()


class Rogue:
    """Has a ZeroMQ socket of its own. By default it knows the secret."""

    def __init__(
        self,
        port: int,
        *,
        identity: bytes = b"",
        server_key: bytes | None = None,
        keys: tuple[bytes, bytes] | None = None,
        curve: bool = True,
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sock = self.context.socket(zmq.DEALER)
        if curve:
            public, private = keys or curve_pair(SECRET.agent_private_key())
            self.sock.setsockopt(
                zmq.CURVE_SERVERKEY,
                server_key or curve_pair(SECRET.coordinator_private_key())[0],
            )
            self.sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self.sock.setsockopt(zmq.CURVE_SECRETKEY, private)
        if identity:
            self.sock.setsockopt(zmq.ROUTING_ID, identity)
        self.sock.setsockopt(zmq.RECONNECT_IVL, -1)
        self.sock.setsockopt(zmq.LINGER, 0)
        self.sock.connect(f"tcp://{LOCAL}:{port}")

    def say(self, *parts: bytes | Control) -> None:
        frames = [part if isinstance(part, bytes) else encode_control(part) for part in parts]
        self.sock.send_multipart(frames)

    def hello(self) -> None:
        self.say(Hello(1))

    def __enter__(self) -> Rogue:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.context.destroy(linger=0)


class Proxy:
    """TCP from a port of its own to `port`, recorded; can hold bytes back, change them, and cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self.port = 0
        self.flip_next = False
        """Change a bit of what comes next."""
        self.to_hub: list[bytes] = []
        """What each connection has sent to the target."""
        self.from_hub: list[bytes] = []

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._connected, LOCAL, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(w.wait_closed() for w in self._writers), return_exceptions=True)

    def hold(self) -> None:
        """Take bytes and pass none on."""
        self._passing.clear()

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(LOCAL, self._target)
        except OSError:
            writer.transport.abort()
            self._writers.append(writer)
            return
        self._writers += [writer, there_writer]
        number = len(self.to_hub)
        self.to_hub.append(b"")
        self.from_hub.append(b"")
        for source, sink, record in (
            (reader, there_writer, self.to_hub),
            (there_reader, writer, self.from_hub),
        ):
            task = asyncio.create_task(self._pass_on(source, sink, record, number))
            self._tasks.add(task)

    async def _pass_on(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        record: list[bytes],
        number: int,
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                record[number] += data
                if self.flip_next:
                    self.flip_next = False
                    data = data[:-1] + bytes([data[-1] ^ 1])
                await self._passing.wait()
                sink.write(data)
                await sink.drain()
        sink.close()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server((LOCAL, 0)) as sock:
        return int(sock.getsockname()[1])
