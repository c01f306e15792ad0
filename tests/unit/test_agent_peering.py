"""A node's dealings with others: what it offers is offered until it is answered, and what it takes
is taken once."""

from __future__ import annotations

from typing import Any, cast

import pytest

from everstep.agent.neighbours import Neighbours
from everstep.agent.peering import Home, Peering
from everstep.wire import messages as m
from everstep.wire import nodes, peers
from everstep.wire.bulk import Offer
from everstep.wire.bulk_door import TICKET_BYTES
from everstep.wire.peers import FromPeer, ToPeer

HOME, KEEPER, OTHER = 1, 2, 3
OFFER = Offer(host="h", port=1, ticket=bytes(TICKET_BYTES))


def take(step: int, keep: tuple[int, ...] = (), source: int = HOME, rank: int = 0) -> nodes.Take:
    return nodes.Take(
        rank=rank,
        incarnation=1,
        generation=4,
        step=step,
        keep=keep,
        manifest=b"m",
        offer=OFFER,
        source=source,
    )


def offered(step: int, to: int = KEEPER, **more: Any) -> nodes.Offered:
    return nodes.Offered(to=to, take=take(step, **more))


def secured(step: int) -> nodes.Secured:
    return nodes.Secured(rank=0, incarnation=1, generation=4, step=step)


def declined(step: int) -> peers.Declined:
    return peers.Declined(rank=0, incarnation=1, generation=4, step=step, text="full")


def took(step: int) -> nodes.Took:
    return nodes.Took(rank=0, incarnation=1, generation=4, step=step)


class Case:
    """A peering on paper. `done`: all that it did, in order."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        home = Home(
            send=lambda *what: self.done.append(("send", *what)),
            obey=lambda order: self.done.append(("obey", order)),
            tell=lambda news: self.done.append(("tell", news)),
            note=lambda key, text: self.done.append(("note", key, text)),
        )
        self.peering = Peering(cast(Neighbours, self), HOME, home)
        self.began()
        self.take()

    def began(self, guardian: int = KEEPER) -> None:
        where = {node: ("h", node) for node in (KEEPER, OTHER)}
        self.peering.began(nodes.Peers(addresses=where, guardian=guardian))

    def take(self) -> list[tuple[Any, ...]]:
        """What was done since the last time."""
        done, self.done = self.done, []
        return done

    # what it uses of neighbours

    def begin(self, node: int) -> None:
        self.done.append(("begin", node))

    def peers(self, order: nodes.Peers) -> None:
        self.done.append(("peers", order))

    def ask(self, node: int, message: ToPeer) -> bool:
        self.done.append(("ask", node, message))
        return True

    def answer(self, node: int, message: FromPeer) -> bool:
        self.done.append(("answer", node, message))
        return True

    def unread_bytes(self, _: int) -> int:
        return 0


@pytest.fixture
def case() -> Case:
    return Case()


class TestOffers:
    def test_an_offer_goes_to_the_keeper_and_its_answer_to_the_copies(self, case: Case) -> None:
        case.peering.copy_news(offered(5))
        assert case.take() == [("ask", KEEPER, take(5))]
        case.peering.answered(KEEPER, secured(5))
        assert case.take() == [("obey", secured(5))]

    def test_who_can_not_take_it_is_not_waited_for(self, case: Case) -> None:
        case.peering.copy_news(offered(5))
        case.peering.answered(KEEPER, declined(5))
        assert case.take()[-1] == ("obey", secured(5))

    def test_it_is_made_again_with_the_connection_until_it_is_answered(self, case: Case) -> None:
        case.peering.copy_news(offered(5))
        case.peering.copy_news(offered(6, keep=(5,)))
        case.peering.copy_news(offered(7, to=OTHER))
        case.peering.answered(KEEPER, secured(5))
        case.take()
        case.peering.lost(KEEPER)
        case.peering.joined(KEEPER)
        assert case.take() == [("ask", KEEPER, take(6, keep=(5,)))]
        case.peering.answered(KEEPER, secured(6))
        case.take()
        case.peering.joined(KEEPER)
        assert case.take() == []

    def test_one_that_is_of_no_use_any_more_is_not(self, case: Case) -> None:
        for step in range(1, 6):
            case.peering.copy_news(offered(step, keep=(step - 1,)))
        case.peering.copy_news(offered(1, rank=9))
        case.take()
        case.peering.joined(KEEPER)
        expected = [take(4, keep=(3,)), take(5, keep=(4,)), take(1, rank=9)]
        assert case.take() == [("ask", KEEPER, message) for message in expected]
        case.began()
        case.take()
        case.peering.joined(KEEPER)
        assert case.take() == []

    def test_who_can_not_be_reached_is_not_waited_for(self, case: Case) -> None:
        case.peering.copy_news(offered(5))
        case.peering.said(0, 1, m.Capsule(step=5, payload=b"", turn=3))
        case.take()
        case.peering.unreached(OTHER, "why")
        (note,) = case.take()
        assert note == ("note", f"unreached-{OTHER}", f"node {HOME} can't reach node {OTHER}: why")
        case.peering.unreached(KEEPER, "why")
        kept, note, copied = case.take()
        assert kept == ("send", 0, 1, m.Kept(turn=3))
        assert copied == ("obey", secured(5))
        assert "kept on no second node meanwhile" in note[2]
        case.peering.joined(KEEPER)
        asked = [done[2] for done in case.take()]
        assert [type(message) for message in asked] == [peers.Deposit]

    def test_nor_is_it_for_what_is_offered_later_until_it_can_be(self, case: Case) -> None:
        case.peering.unreached(KEEPER, "why")
        case.take()
        for step in (5, 6):
            case.peering.copy_news(offered(step))
            assert case.take() == [("ask", KEEPER, take(step)), ("obey", secured(step))]
        case.peering.joined(KEEPER)
        assert case.take() == []
        case.peering.copy_news(offered(7))
        assert case.take() == [("ask", KEEPER, take(7))]

    def test_nor_is_a_node_that_becomes_the_guardian_and_can_not_be(self, case: Case) -> None:
        case.peering.unreached(OTHER, "why")
        case.peering.said(0, 1, m.Capsule(step=5, payload=b"", turn=3))
        case.take()
        case.began(guardian=OTHER)
        peers_told, kept, note = case.take()
        assert peers_told[0] == "peers"
        assert kept == ("send", 0, 1, m.Kept(turn=3))
        assert "kept on no second node meanwhile" in note[2]
        case.peering.said(0, 1, m.Capsule(step=6, payload=b"", turn=4))
        assert case.take() == [("send", 0, 1, m.Kept(turn=4))]

    def test_a_copy_that_is_overtaken_is_not_waited_for(self, case: Case) -> None:
        case.peering.copy_news(offered(5))
        case.take()
        case.peering.copy_news(offered(6))
        assert case.take() == [("obey", secured(5)), ("ask", KEEPER, take(6))]


class TestTakes:
    def test_the_coordinator_hears_of_a_copy_before_the_node_it_is_from(self, case: Case) -> None:
        case.peering.asked(OTHER, take(5, source=OTHER))
        assert case.take() == [("obey", take(5, source=OTHER))]
        case.peering.copy_news(took(5))
        assert case.take() == [("tell", took(5)), ("answer", OTHER, secured(5))]

    def test_one_that_fails_is_declined(self, case: Case) -> None:
        case.peering.asked(OTHER, take(5, source=OTHER))
        untaken = nodes.Untaken(
            rank=0, incarnation=1, generation=4, step=5, source=OTHER, text="full"
        )
        case.take()
        case.peering.copy_news(untaken)
        assert case.take() == [("tell", untaken), ("answer", OTHER, declined(5))]

    def test_a_copy_that_was_made_here_is_nobody_elses(self, case: Case) -> None:
        case.peering.copy_news(took(5))
        assert case.take() == [("tell", took(5))]

    def test_what_is_offered_again_is_taken_once(self, case: Case) -> None:
        """Its ticket is good for one."""
        case.peering.asked(OTHER, take(5))
        case.peering.asked(OTHER, take(5))
        assert case.take() == [("obey", take(5))]
        case.peering.copy_news(took(5))
        case.take()
        case.peering.asked(OTHER, take(5))
        assert case.take() == [("answer", OTHER, secured(5))]
        case.began()
        case.take()
        case.peering.asked(OTHER, take(5))
        assert case.take() == [("obey", take(5))]

    def test_a_deposit_is_kept_and_told(self, case: Case) -> None:
        capsule = m.Capsule(step=1, payload=b"x")
        case.peering.asked(OTHER, peers.Deposit(number=1, rank=7, incarnation=1, message=capsule))
        assert case.take() == [("answer", OTHER, peers.Deposited(number=1))]
        keeps = nodes.Keeps(rank=7, incarnation=1, message=capsule)
        assert case.peering.kept() == case.peering.kept((7,)) == [keeps]
        assert case.peering.kept((6,)) == []
