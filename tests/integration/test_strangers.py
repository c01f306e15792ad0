"""Who does not have the job's secret can't join, read, stop or disturb it, and is named.

In each test a hub and a link exchange messages before, while and after the stranger does what he
can."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import pytest
import zmq
from tests.unit.netcases import (
    LOCAL,
    SECRET,
    HubCase,
    LinkCase,
    News,
    Ping,
    Proxy,
    Rogue,
    on_a_loop,
)

from everstep.wire.frames import Hello, Limits, encode_control
from everstep.wire.plumbing import UNKNOWN, curve_pair
from everstep.wire.secret import make_secret

pytestmark = pytest.mark.slow

HASTY = Limits(connect_s=0.5, refusals_per_minute=1000)


class Job:
    """A hub, a link that has joined, and messages between them."""

    def __init__(self, limits: Limits) -> None:
        self.news = News()
        self.hub = HubCase(self.news, limits=limits)
        self.link = LinkCase(self.news, self.hub.hub.port, limits=limits)
        self.port = self.hub.hub.port
        self._said = 0

    async def speaks(self) -> None:
        """Have ten messages go each way, and see that nothing else was told."""
        for _ in range(10):
            self._said += 1
            assert self.hub.hub.send(0, Ping(self._said))
            assert self.link.link.send(Ping(self._said))
        await self.news.until(
            lambda: len(self.hub.got) == self._said and len(self.link.got) == self._said
        )
        assert self.hub.got == [(0, Ping(number + 1)) for number in range(self._said)]
        assert self.hub.joined == [0]
        assert self.hub.lost == []
        assert self.link.lost == []

    async def refuses(self, count: int = 1) -> list[tuple[str, str]]:
        """The refusals, once there are `count`. The job speaks meanwhile."""
        await self.speaks()
        await self.news.until(lambda: len(self.hub.refused) >= count)
        await self.speaks()
        return self.hub.refused


@contextlib.asynccontextmanager
async def job(limits: Limits = HASTY) -> AsyncIterator[Job]:
    case = Job(limits)
    try:
        await case.news.until(lambda: case.link.events and case.hub.joined)
        await case.speaks()
        yield case
    finally:
        case.link.link.close()
        case.hub.hub.close()


@on_a_loop
async def test_without_a_key() -> None:
    async with job() as case:
        with Rogue(case.port, curve=False) as stranger:
            stranger.hello()
            [(address, why)] = await case.refuses()
            assert address.startswith(f"{LOCAL}:")
            assert "handshake" in why


@on_a_loop
async def test_with_another_secret() -> None:
    async with job() as case:
        other = LinkCase(case.news, case.port, secret=make_secret())
        refused = await case.refuses()
        assert refused[0][0].startswith(f"{LOCAL}:")
        assert "secret" in refused[0][1]
        await case.news.until(lambda: other.waiting)
        assert "is its secret the same" in other.waiting[0]
        assert other.events == []
        other.link.close()


@on_a_loop
async def test_with_the_coordinators_public_key_and_a_key_of_its_own() -> None:
    async with job() as case:
        with Rogue(case.port, keys=zmq.curve_keypair()) as stranger:
            stranger.hello()
            refused = await case.refuses()
            assert refused == [(LOCAL, "its key is not this job's")]


@on_a_loop
async def test_as_the_coordinator_of_another_secret() -> None:
    """A link tells nothing to a hub that does not have the secret."""
    async with job() as case:
        other = HubCase(case.news, secret=make_secret(), limits=HASTY)
        link = LinkCase(case.news, other.hub.port)
        await case.news.until(lambda: link.waiting and other.refused)
        assert link.events == []
        assert other.joined == []
        link.link.close()
        other.hub.close()


@on_a_loop
async def test_with_the_plain_mechanism() -> None:
    async with job() as case:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.PLAIN_USERNAME, b"root")
        sock.setsockopt(zmq.PLAIN_PASSWORD, b"root")
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(f"tcp://{LOCAL}:{case.port}")
        sock.send(b"let me in")
        try:
            refused = await case.refuses()
            assert "handshake" in refused[0][1]
        finally:
            context.destroy(linger=0)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48)
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: everstep\r\n\r\n" * 4,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "zeros": bytes(200),
    "noise": b"\x17" + os.urandom(1 << 16),
    "half a greeting": GREETING[:20],
    "a greeting and noise": GREETING + os.urandom(4096),
    "a greeting and an endless command": GREETING + b"\x06" + b"\x7f" * 8 + bytes(1 << 16),
    "a greeting and a frame in clear": GREETING + b"\x00\x10" + encode_control(Hello(1)) + bytes(9),
    "a hello of zeros": GREETING + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
}


@pytest.mark.parametrize("kind", GARBAGE)
@on_a_loop
async def test_with_garbage(kind: str) -> None:
    async with job() as case:
        with socket.create_connection((LOCAL, case.port)) as stranger:
            here = "{}:{}".format(*stranger.getsockname())
            with contextlib.suppress(ConnectionError):
                stranger.sendall(GARBAGE[kind])
            [(address, _)] = await case.refuses()
            assert address in (here, UNKNOWN)


@on_a_loop
async def test_with_silence() -> None:
    async with job() as case:
        with socket.create_connection((LOCAL, case.port)) as stranger:
            here = "{}:{}".format(*stranger.getsockname())
            [(address, why)] = await case.refuses()
            assert address == here
            assert why == "it broke off the handshake, or began none"


@on_a_loop
async def test_with_a_recorded_session() -> None:
    """Neither the hub nor a link takes the recorded bytes of its peer; nothing in them is text."""
    async with job() as case:
        async with Proxy(case.port) as proxy:
            victim = LinkCase(case.news, proxy.port)
            await case.news.until(lambda: victim.events)
            for number in range(20):
                victim.link.send(Ping(number, "attack at dawn"))
            await case.news.until(lambda: len(case.hub.got) == 10 + 20)
            victim.link.close()
            await case.news.until(lambda: case.hub.lost)
        [said], [answered] = proxy.to_hub, proxy.from_hub
        assert b"dawn" not in said + answered
        assert SECRET.reveal().encode() not in said + answered
        told, joined = len(case.hub.got), len(case.hub.joined)

        for cuts in (len(said), 4096, 64, 1):
            before = len(case.hub.refused)
            _, writer = await asyncio.open_connection(LOCAL, case.port)
            with contextlib.suppress(ConnectionError):
                for start in range(0, len(said), cuts):
                    writer.write(said[start : start + cuts])
                    await writer.drain()
            await case.news.until(lambda: len(case.hub.refused) > before)  # noqa: B023
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert len(case.hub.got) == told
        assert len(case.hub.joined) == joined

        async def replay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answered)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
                await reader.read()
            writer.close()

        async with await asyncio.start_server(replay, LOCAL, 0) as server:
            deceived = LinkCase(case.news, server.sockets[0].getsockname()[1], limits=HASTY)
            await case.news.until(lambda: deceived.waiting)
            assert deceived.events == []
            assert deceived.got == []
            deceived.link.close()
        assert case.link.lost == []


@on_a_loop
async def test_by_changing_bytes_on_the_way() -> None:
    """A bit that is flipped in a session ends it; no changed message is ever told."""
    async with job() as case:
        async with Proxy(case.port) as proxy:
            victim: LinkCase = LinkCase(case.news, proxy.port)
            await case.news.until(lambda: victim.events)
            proxy.flip_next = True
            victim.link.send(Ping(1, "x" * 100))
            await case.news.until(lambda: case.hub.lost and victim.lost)
            victim.link.close()
        assert [peer for peer, _ in case.hub.got if peer == 1] == []
        assert case.link.lost == []


@on_a_loop
async def test_many_at_once() -> None:
    """A scan does not fill the journal, and its connections do not stay."""
    limits = Limits(connect_s=0.5, refusals_per_minute=5)
    async with job(limits) as case:
        strangers = [socket.create_connection((LOCAL, case.port)) for _ in range(100)]
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(GARBAGE["http"])
        refused = await case.refuses(5)
        loop = asyncio.get_running_loop()
        for stranger in strangers:
            stranger.setblocking(False)
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionError):
                    while await loop.sock_recv(stranger, 4096):
                        pass
            stranger.close()
        await case.speaks()
        assert len(refused) == 5


@on_a_loop
async def test_a_secret_is_in_no_text_that_people_see() -> None:
    async with job() as case:
        other = make_secret()
        link = LinkCase(case.news, case.port, secret=other).link
        refused = await case.refuses()
        private = curve_pair(other.agent_private_key())[1].decode()
        text = f"{refused} {case.hub.hub!r} {link!r} {vars(case.hub.hub)} {other!r}"
        assert other.reveal() not in text
        assert SECRET.reveal() not in text
        assert private not in text
        link.close()
