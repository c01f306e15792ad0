"""Who is told what about copies, and where a copy is looked for."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from everstep.agent.ferry import Ferry
from everstep.wire import nodes

WHO = {"rank": 1, "incarnation": 2, "generation": 7, "step": 5}
TOOK = nodes.Took(**WHO, stamp=None)
UNTAKEN = nodes.Untaken(**WHO, source=0, text="no room")
SEEK = nodes.Seek(**WHO, spoiled=False)
MISSING = nodes.Missing(rank=1, generation=7, step=5)


def lend(to: int) -> nodes.Lend:
    return nodes.Lend(**WHO, to=to)


class World:
    """Three nodes, 0 to 2, rank 1 on node 0. It is harbour and harbourmaster."""

    def __init__(self, *holders: int) -> None:
        self.holders = set(holders)
        self.living = {0, 1, 2}
        self.orders: list[tuple[int, nodes.CopyOrder]] = []
        self.heard: list[object] = []
        self.notes: list[str] = []
        self.ferry = Ferry(self, self, lambda: self.living)

    def copy_order(self, node: int, order: nodes.CopyOrder) -> bool:
        if node in self.living:
            self.orders.append((node, order))
        return node in self.living

    def home_of(self, rank: int, incarnation: int) -> int | None:
        return 0 if (rank, incarnation) == (1, 2) else None

    def note(self, key: str, text: str) -> None:
        self.notes.append(text)

    def copied(self, news: nodes.Took, node: int) -> None:
        self.heard.append((news, node))

    def copy_waived(self, news: nodes.Untaken) -> None:
        self.heard.append(news)

    def copy_spoiled(self, rank: int, step: int, node: int) -> None:
        self.heard.append((rank, step, node))
        self.holders.discard(node)

    def copies_of(self, rank: int, step: int) -> Collection[int]:
        return sorted(self.holders)


def test_where_a_copy_is_goes_to_the_core_and_to_nobody_else() -> None:
    world = World()
    world.ferry.take(2, TOOK)
    world.ferry.take(0, TOOK)  # the rank's own
    assert world.heard == [(TOOK, 2), (TOOK, 0)]
    assert world.orders == []


def test_a_keeper_without_room_is_not_waited_for_and_said_once() -> None:
    world = World()
    for _ in range(2):
        world.ferry.take(2, UNTAKEN)
    assert world.orders == []
    assert world.heard == [UNTAKEN] * 2
    (note,) = world.notes
    assert "node 2 can't keep the copy of rank 1 at step 5" in note
    assert "no room" in note


def test_a_copy_is_lent_by_one_after_the_other_until_nobody_is_left() -> None:
    world = World(0, 1, 2)
    world.ferry.take(0, SEEK)
    assert world.orders.pop() == (1, lend(0))
    world.ferry.take(1, nodes.Lack(**WHO, to=0))
    assert world.orders.pop() == (2, lend(0))
    assert world.heard == [(1, 5, 1)]
    world.ferry.take(0, nodes.Untaken(**WHO, source=2, text="corrupt"))
    assert world.orders.pop() == (0, MISSING)
    assert world.heard == [(1, 5, 1), (1, 5, 2)]
    assert world.orders == []
    assert world.notes == []


def test_who_lent_what_was_no_better_is_not_asked_again() -> None:
    world = World(0, 1, 2)
    spoiled = nodes.Seek(**WHO, spoiled=True)
    world.ferry.take(0, spoiled)
    assert world.heard == [(1, 5, 0)]
    assert world.orders.pop() == (1, lend(0))
    world.ferry.take(0, spoiled)
    assert world.orders.pop() == (2, lend(0))
    world.ferry.take(0, spoiled)
    assert world.orders.pop() == (0, MISSING)


@pytest.mark.parametrize("way", ["another process", "a new generation"])
def test_a_new_search_begins_with_all(way: str) -> None:
    world = World(1)
    world.ferry.take(0, SEEK)
    if way == "a new generation":
        world.ferry.keepers(8, {1: 2}, (4, 5))
        keepers = nodes.Keepers(generation=8, keepers={1: 2}, steps=(4, 5))
        told = [each for each in world.orders if each[1] == keepers]
        assert told == [(node, keepers) for node in (0, 1, 2)]
        again = SEEK
    else:
        again = nodes.Seek(**{**WHO, "incarnation": 3}, spoiled=False)
    world.orders.clear()
    world.ferry.take(0, again)
    ((node, order),) = world.orders
    assert node == 1
    assert isinstance(order, nodes.Lend)


def test_a_holder_that_is_gone_is_passed_over() -> None:
    world = World(1, 2)
    world.living.discard(1)
    world.ferry.take(0, SEEK)
    assert world.orders == [(2, lend(0))]
