"""The preflight: who tries whom, who is admitted, and what is said of a closed pair."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.preflight import MOST, Plan, Preflight, Station, first_pairs, late_pairs
from everstep.wire import nodes
from everstep.wire.bulk import Offer

WITHIN_S = 5.0


def station(number: int, address: str = "", network: str = "") -> Station:
    address = address or f"10.0.0.{number}"
    listens = nodes.Listens(
        door=Offer(host=address, port=29401, ticket=bytes(16)),
        network=network or f"network{number}",
        any_port=41234,
        any_ports=(32768, 60999),
    )
    return Station(number=number, host=f"h{number}", address=address, listens=listens)


def closed(node: int, *, chosen: bool = False) -> nodes.Closed:
    port = 41234 if chosen else 29401
    return nodes.Closed(
        node=node, host=f"10.0.0.{node}", port=port, chosen=chosen, why="no connection (timed out)"
    )


class Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Gate:
    """A gatekeeper on paper, and the preflight that it serves."""

    def __init__(
        self, needed: int = 3, within_s: float = WITHIN_S, *, begun: bool = False, ports: str = ""
    ) -> None:
        self.asked: dict[int, set[int]] = {}
        self.admitted: list[int] = []
        self.refused: dict[int, str] = {}
        self.job_refused: list[str] = []
        self.timer: Timer | None = None
        self.preflight = Preflight(
            self,
            Plan(needed=needed, ports=ports, within_s=within_s),
            begun=begun,
            call_later=self._call_later,
        )

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        assert delay_s > WITHIN_S or not self.asked  # a round, or the wait before the first
        self.timer = Timer(call)
        return self.timer

    def join(self, *numbers: int) -> None:
        for number in numbers:
            self.preflight.joined(station(number))

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self.preflight.probed(number, nodes.Probed(closed=()))

    def run_out(self) -> None:
        assert self.timer is not None
        assert self.timer.call is not None
        self.timer.call()

    def probe(self, number: int, order: nodes.Probe) -> None:
        self.asked[number] = set(order.targets)

    def admit(self, number: int) -> None:
        self.admitted.append(number)

    def refuse(self, number: int, why: str) -> None:
        self.refused[number] = why

    def refuse_job(self, why: str) -> None:
        self.job_refused.append(why)


def test_the_last_node_is_held_until_all_reach_one_another() -> None:
    gate = Gate()
    gate.join(0, 1)
    assert (gate.admitted, gate.asked) == ([0, 1], {})
    gate.join(2)
    assert gate.admitted == [0, 1]
    assert gate.asked == {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}
    gate.answer(0, 1)
    assert gate.admitted == [0, 1]
    gate.answer(2)
    assert gate.admitted == [0, 1, 2]
    assert gate.timer is not None
    assert gate.timer.call is None


def test_a_closed_pair_refuses_the_job_with_both_names_and_the_port() -> None:
    gate = Gate(ports="29400-29499")
    gate.join(0, 1, 2)
    gate.answer(0, 2)
    gate.preflight.probed(1, nodes.Probed(closed=(closed(2),)))
    assert gate.job_refused == [
        "node 1 (host h1, 10.0.0.1) can't reach node 2 (host h2) at 10.0.0.2:29401: no connection "
        "(timed out); open the port range 29400-29499 between them, or use --interface"
    ]
    gate.join(3)  # nothing is said any more
    gate.answer(0)
    assert (gate.admitted, len(gate.job_refused)) == ([0, 1], 1)


def test_a_port_that_the_system_chooses_is_told_as_one() -> None:
    gate = Gate(needed=2, ports="29400-29499")
    gate.join(0, 1)
    gate.answer(0)
    gate.preflight.probed(1, nodes.Probed(closed=(closed(0, chosen=True),)))
    (why,) = gate.job_refused
    assert "10.0.0.0:41234" in why
    assert "open 32768-60999 (net.ipv4.ip_local_port_range of host h0)" in why


def test_a_pair_that_is_wholly_closed_is_told_once_and_many_are_counted() -> None:
    gate = Gate(needed=4)
    gate.join(0, 1, 2, 3)
    for number in range(4):
        others = [n for n in range(4) if n != number]
        both = tuple(closed(n, chosen=chosen) for n in others for chosen in (False, True))
        gate.preflight.probed(number, nodes.Probed(closed=both))
    (why,) = gate.job_refused
    assert why.count("can't reach") == 4
    assert why.endswith("and 8 more pairs are closed")


def test_who_does_not_answer_is_named() -> None:
    gate = Gate()
    gate.join(0, 1, 2)
    gate.answer(0, 2)
    gate.run_out()
    (why,) = gate.job_refused
    assert why.startswith("node 1 (host h1, 10.0.0.1) has not said within 7 s")


def test_a_node_that_is_lost_meanwhile_is_not_waited_for() -> None:
    gate = Gate()
    gate.join(0, 1, 2)
    gate.preflight.probed(0, nodes.Probed(closed=(closed(1),)))
    gate.preflight.lost(1)
    gate.answer(2)
    assert (gate.admitted, gate.job_refused) == ([0, 1, 2], [])
    gate.asked.clear()
    gate.join(3)  # there are three again: all try, as before
    assert gate.asked == {0: {2, 3}, 2: {0, 3}, 3: {0, 2}}


def test_the_held_node_may_be_the_one_that_is_lost() -> None:
    gate = Gate(needed=2)
    gate.join(0, 1)
    gate.preflight.lost(1)
    gate.answer(0)
    assert gate.admitted == [0]
    gate.join(2)
    gate.answer(0, 2)
    assert gate.admitted == [0, 2]


def test_who_comes_later_tries_and_is_refused_alone() -> None:
    gate = Gate(needed=2)
    gate.join(0, 1)
    gate.answer(0, 1)
    gate.asked.clear()
    gate.join(2)
    assert gate.asked == {0: {2}, 1: {2}, 2: {0, 1}}
    gate.join(3)  # while the round goes on: in the next
    gate.preflight.probed(1, nodes.Probed(closed=(closed(2),)))
    gate.asked.clear()
    gate.answer(0, 2)
    assert "node 1 (host h1, 10.0.0.1) can't reach node 2 (host h2)" in gate.refused[2]
    assert gate.asked == {0: {3}, 1: {3}, 3: {0, 1}}
    gate.answer(0, 1, 3)
    assert (gate.admitted, gate.job_refused) == ([0, 1, 3], [])


def test_a_coordinator_that_takes_over_tries_only_who_is_new_to_it() -> None:
    gate = Gate(needed=3, begun=True)
    for number in range(3):
        gate.preflight.known(station(number))
    assert (gate.admitted, gate.asked) == ([], {})
    gate.join(7)
    assert (gate.admitted, gate.asked) == ([], {7: {0, 1, 2}, 0: {7}, 1: {7}, 2: {7}})
    gate.answer(0, 1, 2)
    gate.preflight.probed(7, nodes.Probed(closed=(closed(1),)))
    assert gate.admitted == []
    assert "node 7 (host h7, 10.0.0.7) can't reach node 1" in gate.refused[7]


def test_one_without_a_slot_that_comes_back_first_waits_for_those_that_it_is_to_try() -> None:
    gate = Gate(needed=3, begun=True)
    gate.join(7)
    for number in range(2):
        gate.preflight.known(station(number))
    assert (gate.admitted, gate.asked) == ([], {})
    timer = gate.timer
    gate.preflight.known(station(2))
    assert gate.asked[7] == {0, 1, 2}
    assert timer is not None
    assert timer.call is None
    gate.answer(0, 1, 2, 7)
    assert gate.admitted == [7]


def test_nodes_that_come_back_to_a_job_that_had_not_begun_wait_for_each_other_a_moment() -> None:
    gate = Gate(needed=4, begun=True)
    gate.join(7, 8)
    assert gate.admitted == []
    gate.run_out()
    assert gate.admitted == [7, 8]
    gate.join(9)
    assert gate.asked == {9: {7, 8}, 7: {9}, 8: {9}}
    gate.answer(7, 8, 9)
    assert gate.admitted == [7, 8, 9]


def test_nodes_of_one_host_and_nodes_that_can_not_say_how_are_not_tried() -> None:
    gate = Gate(needed=3)
    for number in range(2):
        gate.preflight.joined(station(number, "127.0.0.1", "here"))
    gate.preflight.joined(Station(number=2, host="h", address="127.0.0.1", listens=None))
    assert (gate.admitted, gate.asked) == ([0, 1, 2], {})


def test_it_can_be_left_out() -> None:
    gate = Gate(needed=2, within_s=0.0)
    gate.join(0, 1, 2)
    assert (gate.admitted, gate.asked) == ([0, 1, 2], {})


@pytest.mark.parametrize("address", ["127.0.1.1", "::1"])
def test_a_loopback_address_among_several_hosts_is_refused_before_anything_is_tried(
    address: str,
) -> None:
    gate = Gate(needed=2)
    gate.join(0)
    gate.preflight.joined(station(1, address))
    (why,) = gate.job_refused
    assert why.startswith(f"node 1 (host h1, {address}) listens at an address that only its own")
    assert gate.asked == {}
    late = Gate(needed=1)
    late.join(0)
    late.preflight.joined(station(1, address))
    assert list(late.refused) == [1]
    assert late.job_refused == []


@given(st.integers(1, 600), st.randoms(use_true_random=False))
def test_whatever_keeps_some_from_the_rest_is_met(count: int, random: object) -> None:
    numbers = list(range(0, 3 * count, 3))
    pairs = first_pairs(numbers)
    by_asker: dict[int, int] = {}
    for asker, target in pairs:
        assert asker != target
        by_asker[asker] = by_asker.get(asker, 0) + 1
    assert all(tries <= MOST for tries in by_asker.values())
    if count <= MOST + 1:
        assert len(pairs) == count * (count - 1)
    some = {number for number in numbers if random.random() < 0.5}  # type: ignore[attr-defined]
    if some and len(some) < count:
        assert any(a in some and b not in some for a, b in pairs)
        assert any(a not in some and b in some for a, b in pairs)


@given(st.integers(0, 2000))
def test_a_late_one_tries_a_few_of_all_in_both_directions(count: int) -> None:
    pairs = late_pairs(-1, range(count))
    assert {(b, a) for a, b in pairs} == pairs
    assert len(pairs) == 2 * min(MOST, count)
    if count >= 2 * MOST:
        assert max(b for a, b in pairs if a == -1) >= count // 2
