"""Hub and link on real sockets: joining, order, every way in which a connection ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest
from tests.unit.netcases import (
    LOCAL,
    PATIENCE_S,
    SECRET,
    Blob,
    HubCase,
    LinkCase,
    News,
    Ping,
    Proxy,
    Rogue,
    free_port,
    linked,
    on_a_loop,
)

from everstep.errors import TransientError, UserError
from everstep.wire.channel import ChannelError
from everstep.wire.frames import Beat, Hello, Welcome, encode_data
from everstep.wire.network import Limits

SMALL = Limits(max_message_bytes=16 << 10, backlog_bytes=64 << 10)
HASTY = Limits(lease_s=0.3, connect_s=1)


@pytest.mark.parametrize(
    ("bound", "host"),
    [(LOCAL, LOCAL), ("::1", "::1"), ("*", LOCAL), ("*", "::1"), (LOCAL, "localhost")],
)
@on_a_loop
async def test_messages_go_both_ways_in_order(bound: str, host: str) -> None:
    news = News()
    hub = HubCase(news, host=bound)
    link = LinkCase(news, hub.hub.port, host=host)
    await news.until(lambda: link.events and hub.joined)
    for number in range(1000):
        assert link.link.send(Ping(number))
        assert hub.hub.send(0, Ping(-number))
    assert link.link.send(Blob(os.urandom(1 << 20)))
    await news.until(lambda: len(hub.got) == 1001 and len(link.got) == 1000)
    assert hub.got[:-1] == [(0, Ping(number)) for number in range(1000)]
    assert link.got == [Ping(-number) for number in range(1000)]
    assert hub.addresses[0].startswith("[::1]:" if host == "::1" else "127.0.0.1:")
    assert hub.lost == []
    assert hub.refused == []
    link.link.close()
    hub.hub.close()


@on_a_loop
async def test_a_link_waits_for_its_hub_and_says_why() -> None:
    news = News()
    port = free_port()
    link = LinkCase(news, port)
    await news.until(lambda: link.waiting)
    assert f"{LOCAL}:{port}: nobody listens there" in link.waiting[0]
    assert not link.link.send(Ping(1))
    hub = HubCase(news, ports=range(port, port + 1))
    await news.until(lambda: link.events)
    assert link.events == ["joined"]
    assert len(link.waiting) == 1
    link.link.close()
    hub.hub.close()


@on_a_loop
async def test_a_name_is_resolved_anew_at_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    news = News()
    hub = HubCase(news)
    resolver = asyncio.get_running_loop().getaddrinfo
    asked: list[str] = []

    async def late(host: str, port: int, **options: Any) -> Any:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return await resolver(LOCAL, port, **options)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", late)
    link = LinkCase(news, hub.hub.port, host="coordinator.example")
    await news.until(lambda: link.events)
    assert asked == ["coordinator.example"] * 3
    assert link.waiting == [
        f"no connection to the coordinator at coordinator.example:{hub.hub.port}: its name does "
        "not resolve: Name or service not known"
    ]
    link.link.close()
    hub.hub.close()


@on_a_loop
async def test_a_hub_that_comes_back_is_a_new_connection() -> None:
    async with linked() as (news, first, link):
        port = first.hub.port
        first.hub.send(0, Ping(7))
        first.hub.close("it moves")
        await news.until(lambda: link.lost)
        assert link.events == ["joined", "message", "lost"]
        assert link.lost == ["the coordinator ended the connection: it moves"]
        assert not link.link.send(Ping(1))
        second = HubCase(news, ports=range(port, port + 1))
        await news.until(lambda: link.events[-1] == "joined")
        assert link.link.send(Ping(2))
        await news.until(lambda: second.got)
        assert second.got == [(0, Ping(2))]
        second.hub.close()


@on_a_loop
async def test_a_link_that_leaves_comes_again_by_another_connection() -> None:
    async with linked() as (news, hub, link):
        link.link.send(Ping(1))
        link.link.leave("an older one")
        await news.until(lambda: hub.lost and link.events[-1] == "joined" and len(hub.joined) == 2)
        assert hub.got == [(0, Ping(1))]
        assert hub.lost[0][1].endswith(": it left: an older one")
        assert link.lost == ["an older one"]
        assert link.events == ["joined", "lost", "joined"]


@on_a_loop
async def test_a_link_asks_where_the_hub_is_before_each_attempt() -> None:
    news = News()
    first, second = HubCase(news), HubCase(news)
    places: list[tuple[str, int] | None] = [None, (LOCAL, first.hub.port), (LOCAL, second.hub.port)]

    async def find() -> tuple[str, int]:
        place = places.pop(0)
        if place is None:
            raise TransientError("nobody has the lease")
        return place

    link = LinkCase(news, 1, host="no-such-host.invalid", find=find)
    try:
        await news.until(lambda: first.joined)
        assert link.waiting == ["nobody has the lease"]
        first.hub.close()
        await news.until(lambda: second.joined)
        assert not places
    finally:
        link.link.close()
        second.hub.close()


@on_a_loop
async def test_a_link_that_may_not_ask_ends_and_the_loop_is_told() -> None:
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failed.set_result(context["exception"])
    )

    async def find() -> tuple[str, int]:
        raise UserError("permission denied")

    link = LinkCase(News(), 1, find=find)
    error = await asyncio.wait_for(failed, PATIENCE_S)
    assert isinstance(error, UserError)
    assert not link.waiting
    link.link.close()


@on_a_loop
async def test_a_link_that_ends_says_goodbye() -> None:
    async with linked() as (news, hub, link):
        link.link.send(Ping(1))
        link.link.close("done")
        await news.until(lambda: hub.lost)
        assert hub.got == [(0, Ping(1))]
        assert hub.lost[0][1].endswith(": it left: done")
        assert not hub.hub.send(0, Ping(1))
        link.link.close()


@on_a_loop
async def test_a_cut_is_a_loss_for_both_and_the_next_connection_another_peer() -> None:
    news = News()
    hub = HubCase(news)
    async with Proxy(hub.hub.port) as proxy:
        link = LinkCase(news, proxy.port)
        for number in range(5):
            await news.until(lambda: link.events.count("joined") == number + 1)  # noqa: B023
            assert link.link.send(Ping(number))
            await news.until(lambda: len(hub.got) == number + 1)  # noqa: B023
            proxy.cut()
            await news.until(lambda: len(hub.lost) == len(link.lost) == number + 1)  # noqa: B023
        link.link.close()
    assert hub.got == [(number, Ping(number)) for number in range(5)]
    assert [peer for peer, _ in hub.lost] == [0, 1, 2, 3, 4]
    assert all(why.endswith("its connection closed") for _, why in hub.lost)
    assert link.events == ["joined", "lost"] * 5
    hub.hub.close()


@on_a_loop
async def test_silence_is_a_loss_for_both_when_the_lease_runs_out() -> None:
    news = News()
    hub = HubCase(news, limits=HASTY)
    async with Proxy(hub.hub.port) as proxy:
        link = LinkCase(news, proxy.port, limits=HASTY)
        await news.until(lambda: link.events)
        proxy.hold()
        await news.until(lambda: hub.lost and link.lost)
        assert "nothing was heard of it for 0.3 s" in hub.lost[0][1]
        assert link.lost == ["nothing was heard of the coordinator for 0.3 s"]
        link.link.close()
    hub.hub.close()


@on_a_loop
async def test_a_hub_that_hears_nobody_any_more_takes_itself_for_cut_off() -> None:
    news = News()
    hub = HubCase(news, limits=HASTY, may_be_cut_off=True)
    with Rogue(hub.hub.port) as one, Rogue(hub.hub.port) as other:
        one.hello()
        other.hello()
        await news.until(lambda: len(hub.joined) == 2)
        await news.until(lambda: hub.cut_off)
        assert hub.lost == []
    hub.hub.close()


@on_a_loop
async def test_a_hub_that_stood_still_knows_it_before_it_loses_who_hung_up() -> None:
    news = News()
    hub = HubCase(news, limits=HASTY, may_be_cut_off=True)
    with Rogue(hub.hub.port) as one:
        one.hello()
        await news.until(lambda: hub.joined)
    time.sleep(2 * HASTY.lease_s)  # the loop stands still, as in a process that was stopped
    await news.until(lambda: hub.cut_off or hub.lost)
    assert hub.cut_off
    hub.hub.close()


@on_a_loop
async def test_a_hub_that_hears_somebody_is_not_cut_off() -> None:
    news = News()
    hub = HubCase(news, limits=HASTY, may_be_cut_off=True)
    link = LinkCase(news, hub.hub.port, limits=HASTY)
    await news.until(lambda: hub.joined)
    with Rogue(hub.hub.port) as silent:
        silent.hello()
        await news.until(lambda: hub.lost)
        assert "nothing was heard of it for 0.3 s" in hub.lost[0][1]
        assert (link.lost, hub.cut_off) == ([], 0)
    link.link.close()
    hub.hub.close()


@on_a_loop
async def test_the_hubs_lease_holds_for_both() -> None:
    news = News()
    hub = HubCase(news, limits=HASTY)
    async with Proxy(hub.hub.port) as proxy:
        link = LinkCase(news, proxy.port, limits=Limits(lease_s=3000))
        await news.until(lambda: link.events)
        proxy.hold()
        await news.until(lambda: link.lost)
        assert link.lost == ["nothing was heard of the coordinator for 0.3 s"]
        link.link.close()
    hub.hub.close()


@on_a_loop
async def test_idle_connections_outlive_many_leases() -> None:
    async with linked(HASTY) as (_, hub, link), asyncio.timeout(20):
        loop = asyncio.get_running_loop()
        idle = loop.create_future()
        loop.call_later(4 * HASTY.lease_s, idle.set_result, None)
        await idle
        assert hub.lost == []
        assert link.lost == []


@on_a_loop
async def test_a_peer_that_was_not_listened_to_is_not_blamed() -> None:
    """The hub's process stands still for longer than a lease, and its peers do not."""
    news = News()
    hub = HubCase(news, limits=HASTY)
    with Rogue(hub.hub.port) as peer:
        peer.hello()
        await news.until(lambda: hub.joined)
        loop = asyncio.get_running_loop()
        real = loop.time
        loop.time = lambda: real() + 100  # type: ignore[method-assign]
        peer.say(encode_data(Ping(1), 100))
        await news.until(lambda: hub.got)
        assert hub.lost == []
        loop.time = real  # type: ignore[method-assign]
    hub.hub.close()


@on_a_loop
async def test_a_peer_that_reads_nothing_is_lost_when_its_backlog_is_full() -> None:
    news = News()
    hub = HubCase(news, limits=SMALL)
    other = LinkCase(news, hub.hub.port)
    await news.until(lambda: hub.joined)
    with Rogue(hub.hub.port) as peer:
        peer.hello()
        await news.until(lambda: len(hub.joined) == 2)
        taken = 0
        while hub.hub.send(1, Blob(b"x" * 4000)):
            taken += 1
        assert 14 <= taken <= 16
        await news.until(lambda: hub.lost)
        assert hub.lost[0][0] == 1
        assert "bytes unread" in hub.lost[0][1]
        assert hub.hub.send(0, Ping(3))
        await news.until(lambda: other.got)
    other.link.close()
    hub.hub.close()


@on_a_loop
async def test_a_hub_that_does_not_listen_is_lost_when_the_backlog_is_full() -> None:
    async with linked(SMALL) as (news, _, link):
        while link.link.send(Blob(b"x" * 4000)):
            pass
        await news.until(lambda: link.lost)
        assert "bytes unread" in link.lost[0]


@on_a_loop
async def test_who_reads_may_get_many_times_the_backlog() -> None:
    async with linked(SMALL) as (news, hub, link):
        total = 200
        for number in range(total):
            assert hub.hub.send(0, Blob(b"x" * 4000))
            assert link.link.send(Blob(b"x" * 4000))
            await news.until(lambda: min(len(hub.got), len(link.got)) >= number - 5)  # noqa: B023
        await news.until(lambda: len(hub.got) == len(link.got) == total)


@on_a_loop
async def test_a_message_above_the_cap_is_its_senders_error() -> None:
    async with linked(SMALL) as (news, hub, link):
        with pytest.raises(ChannelError, match="a Blob of"):
            link.link.send(Blob(b"x" * (17 << 10)))
        with pytest.raises(ChannelError, match="a Blob of"):
            hub.hub.send(0, Blob(b"x" * (17 << 10)))
        assert link.link.send(Ping(1))
        await news.until(lambda: hub.got)


@on_a_loop
async def test_who_is_dropped_hears_why_and_comes_as_another() -> None:
    async with linked() as (news, hub, link):
        for number in range(100):
            link.link.send(Ping(number))
        hub.hub.drop(0, "two nodes of this name")
        hub.hub.drop(0, "twice is once")
        await news.until(lambda: link.events == ["joined", "lost", "joined"])
        assert link.lost == ["the coordinator ended the connection: two nodes of this name"]
        assert hub.joined == [0, 1]
        assert hub.got == []
        assert hub.lost == []
        assert link.link.send(Ping(5))
        await news.until(lambda: hub.got)
        assert hub.got == [(1, Ping(5))]


def _break_protocol(peer: Rogue, how: str) -> None:
    match how:
        case "no message":
            peer.say(b"\x01\xc1\xff")
        case "a message of another kind":
            peer.say(b"\x01" + msgspec.msgpack.encode({"type": "Stranger", "number": 1}))
        case "text that is none":
            peer.say(b"\x01\x83\xa4type\xa4Ping\xa6number\x01\xa4text\xa2\xff\xfe")
        case "nested without end":
            peer.say(b"\x01" + b"\x91" * 5000)
        case "an unknown frame":
            peer.say(b"\x07abc")
        case "an empty frame":
            peer.say(b"")
        case "parts":
            peer.say(encode_data(Ping(1), 100), b"more")
        case "above the cap":
            peer.say(b"\x01" + b"x" * (17 << 10))
        case "far above the cap":
            peer.say(b"\x01" + b"x" * (1 << 20))
        case "a receipt for nothing":
            peer.say(Beat(1 << 60))
        case "a second hello":
            peer.hello()
        case "a welcome":
            peer.say(Welcome(1, 1, 1))
        case "an endless control frame":
            peer.say(b"\x00" + b"\x91" * 5000)


@pytest.mark.parametrize(
    "how",
    [
        "no message",
        "a message of another kind",
        "text that is none",
        "nested without end",
        "an unknown frame",
        "an empty frame",
        "parts",
        "above the cap",
        "far above the cap",
        "a receipt for nothing",
        "a second hello",
        "a welcome",
        "an endless control frame",
    ],
)
@on_a_loop
async def test_who_breaks_the_protocol_is_lost_alone(how: str) -> None:
    async with linked(SMALL) as (news, hub, link):
        with Rogue(hub.hub.port) as peer:
            peer.hello()
            await news.until(lambda: len(hub.joined) == 2)
            peer.say(encode_data(Ping(1), 100))
            _break_protocol(peer, how)
            await news.until(lambda: hub.lost)
            assert hub.got == [(1, Ping(1))]
            [(number, why)] = hub.lost
            assert number == 1
            assert why.startswith("127.0.0.1:")
            assert link.link.send(Ping(2))
            await news.until(lambda: len(hub.got) == 2)
            assert hub.lost == [(number, why)]
            assert link.lost == []


@on_a_loop
async def test_who_has_the_secret_and_does_not_say_hello_is_refused() -> None:
    async with linked() as (news, hub, _):
        with Rogue(hub.hub.port) as peer:
            peer.say(encode_data(Ping(1), 100))
            await news.until(lambda: hub.refused)
            assert hub.refused[0][0].startswith("127.0.0.1:")
            assert hub.got == []
            assert hub.joined == [0]


@on_a_loop
async def test_another_protocol_is_told_what_to_do() -> None:
    async with linked() as (news, hub, _):
        with Rogue(hub.hub.port) as peer:
            peer.say(Hello(99))
            await news.until(lambda: hub.refused)
            assert "it speaks protocol 99, this is 1" in hub.refused[0][1]
            assert hub.joined == [0]


@on_a_loop
async def test_a_second_connection_of_one_identity_does_not_disturb_the_first() -> None:
    news = News()
    hub = HubCase(news)
    with Rogue(hub.hub.port, identity=b"Etwin") as first:
        first.hello()
        await news.until(lambda: hub.joined == [0])
        with Rogue(hub.hub.port, identity=b"Etwin") as second:
            second.hello()
            second.say(encode_data(Ping(666), 100))
            first.say(encode_data(Ping(1), 100))
            await news.until(lambda: hub.got)
        first.say(encode_data(Ping(2), 100))
        await news.until(lambda: len(hub.got) == 2)
        assert hub.got == [(0, Ping(1)), (0, Ping(2))]
        assert hub.lost == []
    hub.hub.close()


@on_a_loop
async def test_a_resumed_connection_would_be_refused() -> None:
    """What ZeroMQ's own reconnect would do: the same socket, the same identity, no hello."""
    news = News()
    hub = HubCase(news)
    with Rogue(hub.hub.port, identity=b"Esame") as first:
        first.hello()
        await news.until(lambda: hub.joined)
    await news.until(lambda: hub.lost)
    with Rogue(hub.hub.port, identity=b"Esame") as again:
        again.say(encode_data(Ping(1), 100))
        await news.until(lambda: hub.refused)
    assert hub.got == []
    assert hub.joined == [0]
    hub.hub.close()


@on_a_loop
async def test_what_was_written_before_the_end_is_read_before_the_loss() -> None:
    news = News()
    hub = HubCase(news)
    with Rogue(hub.hub.port) as peer:
        peer.hello()
        await news.until(lambda: hub.joined)
        for number in range(500):
            peer.say(encode_data(Ping(number), 100))
        peer.sock.close(linger=5000)
        await news.until(lambda: hub.lost)
    assert hub.got == [(0, Ping(number)) for number in range(500)]
    hub.hub.close()


@on_a_loop
async def test_what_the_hub_wrote_before_its_end_is_read_before_the_loss() -> None:
    async with linked() as (news, hub, link):
        for number in range(500):
            hub.hub.send(0, Ping(number))
        hub.hub.close(linger_s=5)
        await news.until(lambda: link.lost)
        assert link.got == [Ping(number) for number in range(500)]
        assert link.events[-1] == "lost"


@on_a_loop
async def test_nothing_is_kept_of_connections_that_have_ended() -> None:
    news = News()
    hub = HubCase(news)
    for number in range(30):
        with Rogue(hub.hub.port) as peer, Rogue(hub.hub.port, curve=False) as stranger:
            peer.hello()
            stranger.hello()
            await news.until(lambda: len(hub.joined) == number + 1)  # noqa: B023
            if number % 3 == 0:
                hub.hub.drop(number, "enough")
            elif number % 3 == 1:
                peer.say(b"nonsense")
        await news.until(lambda: len(hub.lost) == len(hub.joined) - (len(hub.joined) + 2) // 3)
    gate = hub.hub._gate
    await news.until(lambda: len(hub.refused) == 20)
    async with asyncio.timeout(10):
        while gate.addresses or hub.hub._by_identity or hub.hub._by_fd:
            await asyncio.sleep(0)
    assert hub.hub._peers == {}
    assert hub.hub._unrouted == []
    assert not any(gate._denied.values())
    hub.hub.close()


@on_a_loop
async def test_many_links_come_and_go_at_once() -> None:
    news = News()
    hub = HubCase(news)
    links = [LinkCase(news, hub.hub.port) for _ in range(40)]
    await news.until(lambda: all(link.events for link in links))
    for number in range(40):
        for link in links:
            assert link.link.send(Ping(number))
    await news.until(lambda: len(hub.got) == 1600)
    for peer in range(40):
        assert [message for sender, message in hub.got if sender == peer] == [
            Ping(number) for number in range(40)
        ]
    for link in links[::2]:
        link.link.close()
    await news.until(lambda: len(hub.lost) == 20)
    assert [link.lost for link in links] == [[]] * 40
    for link in links[1::2]:
        link.link.close()
    hub.hub.close()


@on_a_loop
async def test_the_first_free_port_of_the_range_is_taken() -> None:
    news = News()
    base = free_port()
    with socket.create_server((LOCAL, base)):
        hub = HubCase(news, ports=range(base, base + 20))
        assert base < hub.hub.port < base + 20
        with pytest.raises(UserError, match=f"port {base} is not free"):
            HubCase(news, ports=range(base, base + 1))
        hub.hub.close()


@on_a_loop
async def test_an_address_of_another_host_is_refused_with_words() -> None:
    with pytest.raises(UserError, match="give a numeric address of this host"):
        HubCase(News(), host="192.0.2.1")


@on_a_loop
async def test_callbacks_may_close_what_called_them() -> None:
    news = News()
    hub = HubCase(news)
    link = LinkCase(news, hub.hub.port)
    link.link.on_message = lambda message: link.link.close()
    await news.until(lambda: hub.joined)
    hub.hub.send(0, Ping(1))
    hub.hub.send(0, Ping(2))
    await news.until(lambda: hub.lost)
    assert link.events == ["joined"]
    hub.hub.close()


@on_a_loop
async def test_an_exception_in_a_callback_does_not_stop_the_messages() -> None:
    news = News()
    hub = HubCase(news)
    link = LinkCase(news, hub.hub.port)
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: told.append(str(context["exception"]))
    )
    got: list[int] = []

    def fragile(message: Any) -> None:
        got.append(message.number)
        news.tell()
        raise ValueError(f"message {message.number}")

    link.link.on_message = fragile
    await news.until(lambda: hub.joined)
    for number in range(3):
        hub.hub.send(0, Ping(number))
    await news.until(lambda: len(got) == 3)
    link.link.close()
    hub.hub.close()
    assert told == ["message 0", "message 1", "message 2"]


@on_a_loop
async def test_what_is_too_large_when_the_link_joins_is_not_blamed_on_the_hub() -> None:
    news = News()
    hub = HubCase(news, limits=Limits(max_message_bytes=1000))
    link = LinkCase(news, hub.hub.port)
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: told.append(str(context["exception"]))
    )

    def say_too_much() -> None:
        link.link.send(Blob(bytes(2000)))

    link.link.on_joined = say_too_much
    await news.until(lambda: hub.joined)
    assert hub.hub.send(0, Ping(1))
    await news.until(lambda: link.got)
    assert link.lost == []
    link.link.close()
    hub.hub.close()
    assert len(told) == 1
    assert told[0].startswith("a Blob of")


@on_a_loop
async def test_who_sends_is_told_when_it_is_read() -> None:
    news = News()
    hub = HubCase(news)
    link = LinkCase(news, hub.hub.port)
    await news.until(lambda: link.events)
    link.link.send(Blob(bytes(1000)))
    assert link.link.unread_bytes > 1000
    await news.until(lambda: link.reads and not link.link.unread_bytes)
    link.link.close()
    hub.hub.close()


CHILD = """
import asyncio, sys
from everstep.wire.network import Link
from everstep.wire.secret import Secret
from tests.unit.netcases import Message, Ping

async def main():
    link = Link(
        host="127.0.0.1", port=int(sys.argv[1]), secret=Secret(sys.stdin.readline(), "stdin"),
        receives=Message, on_joined=lambda: link.send(Ping(1)), on_message=print, on_lost=print,
        on_waiting=print,
    )
    await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


@pytest.mark.slow
@on_a_loop
async def test_a_killed_process_is_noticed_by_its_connection_not_by_its_lease() -> None:
    news = News()
    hub = HubCase(news, limits=Limits(lease_s=3000))
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(hub.hub.port)], stdin=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        child.stdin.write(SECRET.reveal() + "\n")
        child.stdin.flush()
        await news.until(lambda: hub.got)
        child.send_signal(signal.SIGKILL)
        await news.until(lambda: hub.lost)
    assert hub.lost[0][1].endswith("its connection closed")
    hub.hub.close()


@pytest.mark.slow
def test_the_command_line_does_not_import_zeromq() -> None:
    code = "import sys, everstep.cli; sys.exit('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
