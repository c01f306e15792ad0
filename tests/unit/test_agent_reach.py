"""Trying other nodes' listeners, with real sockets on loopback."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import msgspec
import pytest

from everstep.agent.reach import Reach, probe, targets, unreached
from everstep.agent.shipping import Dock, Shipping
from everstep.wire import nodes
from everstep.wire.bulk import Caller, Offer

KEY = b"the secret of the job, 32 bytes."
WITHIN_S = 10.0


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 60))

    return run


class NodeOnPaper:
    """What of a node takes part."""

    def __init__(self, number: int, host: str = "127.0.0.1") -> None:
        self.refused: list[str] = []
        self.answers: asyncio.Queue[nodes.Probed] = asyncio.Queue()
        dock = Dock(host=host, ports=[0], key=KEY, on_refused=lambda _, why: self._refuse(why))
        self.shipping = Shipping(dock, number)
        self.reach = Reach(self.shipping, self.answers.put_nowait)

    def _refuse(self, why: str) -> None:
        self.refused.append(why)

    async def tries(self, targets: dict[int, nodes.Listens]) -> tuple[nodes.Closed, ...]:
        self.reach.probe(nodes.Probe(targets=targets, within_s=WITHIN_S))
        return (await self.answers.get()).closed

    def close(self) -> None:
        self.reach.close()
        self.shipping.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_is_open_is_reached_and_nobody_is_refused(host: str) -> None:
    async def test() -> None:
        one, other = NodeOnPaper(1, host), NodeOnPaper(2, host)
        listens = other.reach.listens
        assert listens.network == one.reach.listens.network
        first, last = listens.any_ports
        assert first <= listens.any_port <= last
        for _ in range(2):
            assert await one.tries({2: listens}) == ()
        assert other.refused == []
        one.close()
        other.close()

    asyncio.run(asyncio.wait_for(test(), 60))


@on_a_loop
async def test_each_listener_that_is_closed_is_named() -> None:
    one, other = NodeOnPaper(1), NodeOnPaper(2)
    listens = other.reach.listens
    other.reach.close()
    (closed,) = await one.tries({2: listens})
    assert (closed.node, closed.port, closed.chosen) == (2, listens.any_port, True)
    assert closed.why == "no connection (Connection refused)"
    other.shipping.close()
    found = await one.tries({2: listens})
    assert [each.port for each in found] == [listens.door.port, listens.any_port]
    one.close()


@on_a_loop
async def test_a_node_that_cannot_try_says_that_it_is_its_own_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = NodeOnPaper(1), NodeOnPaper(2)

    def no_more_files(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "create_connection", no_more_files)
    found = await one.tries({2: other.reach.listens})
    monkeypatch.undo()
    assert [(each.chosen, each.own) for each in found] == [(False, True), (True, True)]
    other.reach.close()
    (closed,) = await one.tries({2: other.reach.listens})
    assert not closed.own
    one.close()
    other.close()


@on_a_loop
async def test_another_listener_at_the_same_address_is_not_taken_for_it() -> None:
    one, other = NodeOnPaper(1), NodeOnPaper(2)
    door = Offer(host="127.0.0.1", port=one.shipping.door.port, ticket=other.shipping.door.ticket)
    listens = msgspec.structs.replace(other.reach.listens, door=door)
    (closed,) = await one.tries({2: listens})
    assert closed.why == "another agent of the job answers there"
    one.close()
    other.close()


@on_a_loop
async def test_one_that_is_silent_costs_the_time_and_no_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        door = Offer(host="127.0.0.1", port=silent.getsockname()[1], ticket=bytes(16))
        listens = nodes.Listens(door=door, network="", any_port=door.port, any_ports=(1, 2))
        order = nodes.Probe(targets=dict.fromkeys(range(5), listens), within_s=0.2)
        answer = await probe(order, Caller(key=KEY, node=1))
    assert {(each.node, each.chosen) for each in answer.closed} == {(n, False) for n in range(5)}
    assert {each.why for each in answer.closed} == {"it did not answer in time"}


@on_a_loop
async def test_nothing_to_try_is_answered_and_an_end_in_the_middle_tells_nothing() -> None:
    one = NodeOnPaper(1)
    assert await one.tries({}) == ()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        door = Offer(host="127.0.0.1", port=silent.getsockname()[1], ticket=bytes(16))
        listens = nodes.Listens(door=door, network="", any_port=door.port, any_ports=(1, 2))
        one.reach.probe(nodes.Probe(targets={2: listens}, within_s=0.2))
        await asyncio.sleep(0)
        one.close()
        one.close()
    await asyncio.sleep(0)
    assert one.answers.empty()


def test_only_those_are_to_try_that_can_and_between_which_lies_a_network() -> None:
    def listens(network: str, host: str) -> nodes.Listens:
        door = Offer(host=host, port=1, ticket=bytes(16))
        return nodes.Listens(door=door, network=network, any_port=2, any_ports=(2, 3))

    a, twin, b = listens("a", "10.0.0.1"), listens("a", "10.0.0.1"), listens("b", "10.0.0.2")
    pairs = [(one, other) for one in range(5) for other in range(5) if one != other]
    assert targets(pairs, {0: a, 1: twin, 2: b, 3: None}) == {
        0: {2: b},
        1: {2: b},
        2: {0: a, 1: twin},
    }


def test_the_first_way_that_is_closed_is_told_and_nothing_of_ones_own_trouble() -> None:
    def closed(node: int, port: int, *, own: bool = False) -> nodes.Closed:
        why = "no connection (timed out)"
        return nodes.Closed(
            node=node, host=f"fd00::{node}", port=port, chosen=False, why=why, own=own
        )

    found = unreached("fd00::1", [closed(2, 7, own=True), closed(2, 8), closed(2, 9)])
    assert found == {2: "fd00::1 -> [fd00::2]:8: no connection (timed out)"}
    assert unreached("fd00::1", [closed(2, 7, own=True)]) == {}
