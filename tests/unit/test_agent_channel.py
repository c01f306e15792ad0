"""The agent's end of a control channel, on real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from everstep.agent import channel as module
from everstep.agent.channel import AgentChannel
from everstep.wire.channel import BlockingChannel, encode
from everstep.wire.messages import Address, Bye, FromWorker, Stop, ToWorker, Wait


class Case:
    """A channel, and the socket at its other end."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        ours, self.peer = socket.socketpair()
        self.peer.settimeout(10)
        self.got: list[FromWorker] = []
        self.errors: list[str] = []
        self.channel: AgentChannel[FromWorker] = AgentChannel(
            self.loop, ours, FromWorker, self.got.append, self.errors.append
        )

    def turn_until(self, ready: Callable[[], bool]) -> None:
        """Let the loop run until `ready`; fails after 10 s."""

        async def wait() -> None:
            async with asyncio.timeout(10):
                while not ready():
                    await asyncio.sleep(0)

        self.loop.run_until_complete(wait())

    def close(self) -> None:
        self.channel.close()
        self.peer.close()
        self.loop.close()


@pytest.fixture
def case() -> Iterator[Case]:
    case = Case()
    yield case
    case.close()


def address(nbytes: int) -> Address:
    return Address(generation=0, group="g", rank=0, size=1, payload=b"x" * nbytes)


def test_messages_arrive_in_order(case: Case) -> None:
    case.peer.sendall(encode(Wait()) + encode(address(3)) + encode(Wait())[:3])
    case.turn_until(lambda: len(case.got) == 2)
    assert case.got == [Wait(), address(3)]
    case.peer.sendall(encode(Wait())[3:])
    case.turn_until(lambda: len(case.got) == 3)


def test_what_a_dead_peer_wrote_is_drained_but_for_a_torn_frame(case: Case) -> None:
    frames = [encode(address(100_000)) for _ in range(3)]
    case.peer.setblocking(False)
    whole = b"".join(frames)
    sent = 0
    while sent < len(whole) - 10:
        try:
            sent += case.peer.send(whole[sent : len(whole) - 10])
        except BlockingIOError:
            case.turn_until(lambda: len(case.got) > 0)
    case.peer.close()
    case.channel.drain()
    assert case.got == [address(100_000)] * 2
    assert case.errors == []
    case.channel.drain()


def test_a_drain_does_not_wait_for_whoever_holds_the_other_end(case: Case) -> None:
    case.peer.sendall(encode(Wait()))
    case.channel.drain()
    assert case.got == [Wait()]


def test_sending_never_blocks_and_all_arrives_in_order(case: Case) -> None:
    reader: BlockingChannel[ToWorker] = BlockingChannel(case.peer, ToWorker)
    count = 20_000
    for generation in range(count):
        case.channel.send(Stop(generation=generation))
    case.channel.send(Bye())
    case.peer.settimeout(0)
    got: list[ToWorker] = []

    def all_is_there() -> bool:
        try:
            message = reader.receive()
        except BlockingIOError:
            return False
        assert message is not None
        got.append(message)
        return isinstance(message, Bye)

    case.turn_until(all_is_there)
    assert got == [*(Stop(generation=g) for g in range(count)), Bye()]


def test_a_peer_that_reads_nothing_is_given_up(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BACKLOG_BYTES", 1 << 20)
    for _ in range(40):
        case.channel.send(address(100_000))
    assert len(case.errors) == 1
    assert "unread" in case.errors[0]


def test_a_peer_that_is_gone_is_no_error(case: Case) -> None:
    case.peer.close()
    ours, theirs = os.pipe()
    os.close(ours)
    case.channel.send(Stop(generation=1), [theirs])
    case.channel.send(Stop(generation=2))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(theirs)
    case.turn_until(lambda: True)
    assert (case.got, case.errors) == ([], [])


@pytest.mark.parametrize("junk", [encode(Bye()), b"\xff\xff\xff\xff", b"\1\0\0\0\xc1"])
def test_what_is_no_message_is_told_once_and_the_rest_unread(case: Case, junk: bytes) -> None:
    case.peer.sendall(junk + encode(Wait()))
    case.turn_until(lambda: bool(case.errors))
    case.peer.sendall(encode(Wait()))
    case.channel.drain()
    assert len(case.errors) == 1
    assert case.got == []


def test_descriptors_travel_and_are_closed_here(case: Case) -> None:
    reading, writing = os.pipe()
    case.channel.send(Stop(generation=1), [writing])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writing)
    data, fds, _, _ = socket.recv_fds(case.peer, 100, 4, socket.MSG_CMSG_CLOEXEC)
    assert data == encode(Stop(generation=1))
    (theirs,) = fds
    os.write(theirs, b"through")
    assert os.read(reading, 10) == b"through"
    os.close(theirs)
    os.close(reading)


def test_closing_closes_descriptors_that_were_not_sent(case: Case) -> None:
    reading, writing = os.pipe()
    while case.channel._backlog_bytes == 0:
        case.channel.send(address(100_000))
    case.channel.send(Stop(generation=1), [writing])
    case.channel.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writing)
    os.close(reading)
