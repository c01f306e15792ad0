"""Agents and their peers on real sockets: who may speak, in which order, and what is told of
losses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from tests.unit.netcases import (
    ANY_PORT,
    LOCAL,
    SECRET,
    News,
    Proxy,
    Rogue,
    free_port,
    on_a_loop,
)

from everstep.agent.keeping import Keeping
from everstep.agent.neighbours import Events, Neighbours
from everstep.errors import UserError
from everstep.wire.frames import encode_data
from everstep.wire.messages import Capsule
from everstep.wire.network import Limits
from everstep.wire.nodes import Peers
from everstep.wire.peers import Deposit, Deposited, FromPeer, Greeted, Greeting, ToPeer
from everstep.wire.secret import Secret, make_secret

T = TypeVar("T")
HASTY = Limits(lease_s=1, connect_s=1, max_retry_s=0.05)


def deposit(number: int, nbytes: int = 1) -> Deposit:
    capsule = Capsule(step=number, payload=b"x" * nbytes)
    return Deposit(number=number, rank=0, incarnation=1, message=capsule)


class Agent:
    """One side, and what it was told."""

    def __init__(
        self,
        news: News,
        node: int | None = None,
        *,
        host: str = LOCAL,
        ports: range = ANY_PORT,
        secret: Secret = SECRET,
        limits: Limits | None = None,
    ) -> None:
        self.news = news
        self.host = host
        self.told: list[tuple[str, int]] = []  # "joined" and "lost", in order
        self.lost: list[str] = []
        self.unreached: list[tuple[int, str]] = []
        self.asked: list[tuple[int, ToPeer]] = []
        self.answered: list[tuple[int, FromPeer]] = []
        self.refused: list[tuple[str, str]] = []
        self.on_joined: Callable[[int], None] = lambda _: None
        self.on_lost: Callable[[int], None] = lambda _: None
        self.on_asked: Callable[[int, Any], None] = lambda *_: None
        self.on_answered: Callable[[int, Any], None] = lambda *_: None
        self.side = Neighbours(
            host=host,
            ports=ports,
            secret=secret,
            limits=limits,
            events=Events(
                on_joined=self._on_joined,
                on_lost=self._on_lost,
                on_unreached=lambda node, why: self._note(self.unreached, (node, why)),
                on_asked=self._on_asked,
                on_answered=self._on_answered,
                on_refused=lambda address, why: self._note(self.refused, (address, why)),
            ),
        )
        if node is not None:
            self.side.begin(node)

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.side.port

    def _note(self, where: list[T], what: T) -> None:
        where.append(what)
        self.news.tell()

    def _on_joined(self, node: int) -> None:
        self._note(self.told, ("joined", node))
        self.on_joined(node)

    def _on_lost(self, node: int, why: str) -> None:
        self.lost.append(why)
        self._note(self.told, ("lost", node))
        self.on_lost(node)

    def _on_asked(self, node: int, message: ToPeer) -> None:
        self._note(self.asked, (node, message))
        self.on_asked(node, message)

    def _on_answered(self, node: int, message: FromPeer) -> None:
        self._note(self.answered, (node, message))
        self.on_answered(node, message)


@contextlib.contextmanager
def closing(*agents: Agent) -> Iterator[None]:
    try:
        yield
    finally:
        for agent in agents:
            agent.side.close()


def introduce(agent: Agent, guardian: int, **addresses: tuple[str, int]) -> None:
    """`addresses`: of n1, n2 and so on."""
    known = {int(name[1:]): address for name, address in addresses.items()}
    agent.side.peers(Peers(addresses=known, guardian=guardian))


@pytest.mark.parametrize("host", [LOCAL, "::1"])
@on_a_loop
async def test_what_is_asked_and_answered_arrives_in_order(host: str) -> None:
    news = News()
    one, two = Agent(news, 1, host=host), Agent(news, 2, host=host)
    with closing(one, two):
        introduce(one, guardian=2, n1=one.address, n2=two.address)
        assert not one.side.ask(2, deposit(0))  # there is no link yet
        await news.until(lambda: one.told)
        for number in range(500):
            assert one.side.ask(2, deposit(number))
        await news.until(lambda: len(two.asked) == 500)
        assert two.asked == [(1, deposit(number)) for number in range(500)]
        for number in range(500):
            assert two.side.answer(1, Deposited(number=number))
        await news.until(lambda: len(one.answered) == 500)
        assert one.answered == [(2, Deposited(number=number)) for number in range(500)]
        assert one.told == [("joined", 2)]
        assert two.told == []  # it has asked nobody


@on_a_loop
async def test_two_that_need_each_other_have_a_connection_each() -> None:
    news = News()
    one, two = Agent(news, 1), Agent(news, 2)
    with closing(one, two):
        introduce(one, 2, n2=two.address)
        introduce(two, 1, n1=one.address)
        await news.until(lambda: one.told and two.told)
        assert one.side.ask(2, deposit(1))
        assert two.side.ask(1, deposit(2))
        assert one.side.answer(2, Deposited(number=2))
        await news.until(lambda: one.asked and two.asked and two.answered)
        assert (one.asked, two.asked) == ([(2, deposit(2))], [(1, deposit(1))])
        assert two.answered == [(1, Deposited(number=2))]


@on_a_loop
async def test_nobody_can_be_asked_or_answered_who_is_not_known() -> None:
    news = News()
    one = Agent(news, 1)
    with closing(one):
        introduce(one, -1, n1=one.address)
        assert not one.side.ask(2, deposit(1))
        assert not one.side.ask(1, deposit(1))
        assert not one.side.answer(2, Deposited(number=1))
        assert one.side.unread_bytes(2) == 0


@on_a_loop
async def test_a_link_is_made_when_it_is_needed_and_who_is_not_reached_is_told_once() -> None:
    news = News()
    one = Agent(news, 1, limits=HASTY)
    port = free_port()
    with closing(one):
        introduce(one, -1, n2=(LOCAL, port))
        assert not one.side.ask(2, deposit(1))
        await news.until(lambda: one.unreached)
        assert not one.side.ask(2, deposit(1))
        two = Agent(news, 2, ports=range(port, port + 1), limits=HASTY)
        with closing(two):
            await news.until(lambda: one.told)
            assert one.side.ask(2, deposit(1))
            await news.until(lambda: two.asked)
        assert len(one.unreached) == 1
        node, why = one.unreached[0]
        assert node == 2
        assert why.startswith(f"no connection to node 2 at {LOCAL}:{port}: nobody listens there")


@on_a_loop
async def test_a_cut_is_told_and_the_link_comes_back() -> None:
    news = News()
    one, two = Agent(news, 1), Agent(news, 2)
    with closing(one, two):
        async with Proxy(two.side.port) as proxy:
            introduce(one, 2, n2=(LOCAL, proxy.port))
            for number in range(3):
                await news.until(lambda: len(one.told) == 2 * number + 1)  # noqa: B023
                assert one.side.ask(2, deposit(number))
                await news.until(lambda: len(two.asked) == number + 1)  # noqa: B023
                assert two.side.answer(1, Deposited(number=number))
                await news.until(lambda: len(one.answered) == number + 1)  # noqa: B023
                proxy.cut()
            await news.until(lambda: len(one.told) == 7)
            assert one.told == [("joined", 2), ("lost", 2)] * 3 + [("joined", 2)]
        assert set(one.lost) == {"the connection to node 2 closed"}
        assert two.asked == [(1, deposit(number)) for number in range(3)]


@on_a_loop
async def test_silence_is_a_loss_to_who_asks() -> None:
    news = News()
    one, two = Agent(news, 1, limits=HASTY), Agent(news, 2, limits=HASTY)
    with closing(one, two):
        async with Proxy(two.side.port) as proxy:
            introduce(one, 2, n2=(LOCAL, proxy.port))
            await news.until(lambda: one.told)
            proxy.hold()
            await news.until(lambda: one.unreached)
        assert one.told == [("joined", 2), ("lost", 2)]
        assert one.lost == ["nothing was heard of node 2 for 1 s"]
        assert [node for node, _ in one.unreached] == [2]


@on_a_loop
async def test_an_address_may_have_become_another_nodes() -> None:
    news = News()
    one, three, idle = Agent(news, 1, limits=HASTY), Agent(news, 3), Agent(news)
    with closing(one, three, idle):
        introduce(one, 2, n2=three.address, n4=idle.address)
        assert not one.side.ask(4, deposit(1))
        await news.until(lambda: len(one.unreached) == 2)
        assert one.told == []
        assert dict(one.unreached) == {
            2: "node 2 ended the connection: node 2 is not here: this is node 3",
            4: "node 4 ended the connection: node 4 is not here: this is no node yet",
        }
        idle.side.begin(4)
        await news.until(lambda: one.told)
        assert one.told == [("joined", 4)]
        assert one.side.ask(4, deposit(1))
        await news.until(lambda: idle.asked)


@on_a_loop
async def test_who_has_left_the_job_is_hung_up_on_and_not_listened_to_again() -> None:
    news = News()
    one, two = Agent(news, 1, limits=HASTY), Agent(news, 2, limits=HASTY)
    with closing(one, two):
        introduce(one, 2, n2=two.address)
        introduce(two, 1, n1=one.address)
        await news.until(lambda: one.told and two.told)
        introduce(two, -1, n3=(LOCAL, free_port()))
        assert two.told == [("joined", 1), ("lost", 1)]
        assert two.lost == ["it has no part in the job any more"]
        await news.until(lambda: one.unreached)
        assert one.told == [("joined", 2), ("lost", 2)]
        assert "it has no part in the job any more" in one.lost[0]
        assert "node 1 has no part in the job any more" in one.unreached[0][1]
        introduce(two, -1, n1=one.address)  # it was a mistake
        await news.until(lambda: len(one.told) == 3)


@on_a_loop
async def test_a_node_may_greet_before_its_own_generation_is_told_here() -> None:
    news = News()
    one, two = Agent(news, 1), Agent(news, 2)
    with closing(one, two):
        introduce(one, 2, n2=two.address)
        await news.until(lambda: one.told)
        assert one.side.ask(2, deposit(1))
        await news.until(lambda: two.asked)
        assert two.side.answer(1, Deposited(number=1))
        introduce(two, -1, n1=one.address)
        await news.until(lambda: one.answered)
        assert one.told == [("joined", 2)]


@on_a_loop
async def test_a_node_that_comes_again_takes_its_own_connections_place() -> None:
    news = News()
    old, new, two = Agent(news, 1), Agent(news, 1), Agent(news, 2)
    with closing(old, new, two):
        introduce(old, 2, n2=two.address)
        await news.until(lambda: old.told)
        introduce(new, 2, n2=two.address)
        await news.until(lambda: new.told and len(old.told) == 2)
        assert "it has come again by another connection" in old.lost[0]


@on_a_loop
async def test_another_number_is_another_node() -> None:
    news = News()
    one, two = Agent(news, 1), Agent(news, 2)
    with closing(one, two):
        introduce(one, 2, n2=two.address)
        introduce(two, 1, n1=one.address)
        await news.until(lambda: one.told and two.told)
        port = one.side.port
        one.side.begin(7)
        assert not one.side.ask(2, deposit(1))
        assert not one.side.answer(2, Deposited(number=1))
        await news.until(lambda: len(two.told) == 2)
        introduce(two, 7, n7=(LOCAL, port))
        await news.until(lambda: len(two.told) == 3)
        assert two.told[-1] == ("joined", 7)
        assert one.told == [("joined", 2)]


@on_a_loop
async def test_a_node_that_moves_is_dialled_where_it_is() -> None:
    news = News()
    one, two, moved = Agent(news, 1), Agent(news, 2), Agent(news, 2)
    with closing(one, two, moved):
        introduce(one, 2, n2=two.address)
        await news.until(lambda: one.told)
        introduce(one, 2, n2=moved.address)
        await news.until(lambda: len(one.told) == 3)
        assert one.told == [("joined", 2), ("lost", 2), ("joined", 2)]
        assert one.side.ask(2, deposit(1))
        await news.until(lambda: moved.asked)
        assert two.asked == []


@on_a_loop
async def test_what_is_not_received_is_counted() -> None:
    news = News()
    one, two = Agent(news, 1), Agent(news, 2)
    with closing(one, two):
        introduce(one, 2, n2=two.address)
        await news.until(lambda: one.told)
        assert one.side.ask(2, deposit(1, 1 << 20))
        assert one.side.unread_bytes(2) > 1 << 20
        await news.until(lambda: two.asked)


@on_a_loop
async def test_every_capsule_becomes_safe_over_a_connection_that_is_cut_again_and_again() -> None:
    """With what agents do on both sides (agent/keeping.py)."""
    news = News()
    one, two = Agent(news, 1), Agent(news, 2)
    safe: list[int] = []

    def on_kept(rank: int, incarnation: int, turn: int) -> None:
        safe.append(turn)
        news.tell()

    home, guardian = Keeping(one.side, on_kept), Keeping(two.side, lambda *_: None)
    one.on_joined, one.on_lost, one.on_answered = home.joined, home.lost, home.answered
    two.on_asked = guardian.asked
    with closing(one, two):
        async with Proxy(two.side.port) as proxy:
            order = Peers(addresses={2: (LOCAL, proxy.port)}, guardian=2)
            one.side.peers(order)
            home.peers(order)
            for turn in range(1, 41):
                capsule = Capsule(step=turn, payload=b"x" * 1000, turn=turn)
                home.said(0, 1, capsule)
                if turn % 4 == 0:
                    proxy.cut()  # with the capsule under way, or its answer
                await news.until(lambda: turn in safe)  # noqa: B023
            assert safe == list(range(1, 41))
            assert guardian.report() == home.report()
            assert one.told.count(("lost", 2)) == 10


class TestStrangers:
    @on_a_loop
    async def test_who_does_not_know_the_secret_is_refused_and_told(self) -> None:
        news = News()
        two = Agent(news, 2)
        stranger = Agent(news, 1, secret=make_secret(), limits=HASTY)
        with closing(two, stranger):
            introduce(stranger, 2, n2=two.address)
            await news.until(lambda: two.refused and stranger.unreached)
            assert two.refused[0][0].startswith(LOCAL)
            assert stranger.told == []

    @on_a_loop
    async def test_who_sends_garbage_is_refused_and_the_others_go_on(self) -> None:
        news = News()
        one, two = Agent(news, 1), Agent(news, 2)
        with closing(one, two):
            introduce(one, 2, n2=two.address)
            await news.until(lambda: one.told)
            with socket.create_connection(two.address) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 9)
                await news.until(lambda: two.refused)
            assert one.side.ask(2, deposit(1))
            await news.until(lambda: two.asked)
            assert one.told == [("joined", 2)]

    @pytest.mark.parametrize(
        "frames",
        [
            [deposit(1)],
            [Greeting(node=9, to=2), Greeting(node=9, to=2)],
            [Greeting(node=9, to=2), Greeted()],
        ],
        ids=["no greeting", "two greetings", "an answer"],
    )
    @on_a_loop
    async def test_who_knows_it_and_does_not_keep_to_the_protocol_is_hung_up_on(
        self, frames: list[ToPeer | FromPeer]
    ) -> None:
        news = News()
        two = Agent(news, 2)
        with closing(two), Rogue(two.side.port) as rogue:
            rogue.hello()
            for frame in frames:
                rogue.say(encode_data(frame, 1 << 20))
            one = Agent(news, 1)
            with closing(one):
                introduce(one, 2, n2=two.address)
                await news.until(lambda: one.told)
                assert one.side.ask(2, deposit(5))
                await news.until(lambda: two.asked)
            assert two.asked == [(1, deposit(5))]


@on_a_loop
async def test_a_range_without_a_free_port_is_refused() -> None:
    news = News()
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is not free"):
            Agent(news, 1, ports=range(port, port + 1))
