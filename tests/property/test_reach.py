"""Who tries whom, and whom it costs the least to give up."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.reach import MOST, Pair, Reach, fewest, pairs_to_try

NODES = 7
pairs_of_nodes = st.sampled_from(list(combinations(range(NODES), 2)))


def covers(closed: set[Pair], nodes: frozenset[int]) -> bool:
    return all(not nodes.isdisjoint(pair) for pair in closed)


@given(st.sets(pairs_of_nodes), st.integers(0, NODES), st.sets(st.integers(0, NODES - 1)))
def test_the_fewest_are_given_up_and_of_those_that_may(
    closed: set[Pair], most: int, kept: set[int]
) -> None:
    """Compared with a look at all sets. `kept`: of these, one has to stay."""

    def may_go(nodes: frozenset[int]) -> bool:
        return not kept or not kept <= nodes

    found = fewest(closed, most, may_go)
    sets = (
        frozenset(nodes)
        for size in range(1, most + 1)
        for nodes in combinations(range(NODES), size)
        if covers(closed, frozenset(nodes)) and may_go(frozenset(nodes))
    )
    naive = next(sets, frozenset()) if closed else frozenset()
    assert len(found) == len(naive)
    assert not found or (covers(closed, found) and may_go(found))


@given(st.sets(pairs_of_nodes, min_size=1))
def test_of_several_sets_the_one_with_most_closed_pairs_goes(closed: set[Pair]) -> None:
    found = fewest(closed, NODES, lambda _: True)

    def pairs(nodes: frozenset[int]) -> int:
        return sum(node in pair for pair in closed for node in nodes)

    for nodes in map(frozenset, combinations(range(NODES), len(found))):
        if covers(closed, nodes):
            assert pairs(nodes) <= pairs(found)


@given(st.permutations([0, 1, 2, 3, 4]))
def test_of_equals_the_one_that_is_worth_less_goes(worths: list[int]) -> None:
    worth = dict(enumerate(worths))
    closed = {(0, 1), (2, 3)}
    least = frozenset(min(pair, key=worths.__getitem__) for pair in closed)
    assert fewest(closed, NODES, lambda _: True, worth) == least


def test_a_rack_that_is_cut_off_goes_as_a_whole() -> None:
    """Too many for a search: those with most closed pairs."""
    rack = frozenset(range(12))
    closed = {(one, other) for one in rack for other in range(12, 60)}
    assert fewest(closed, 12, lambda _: True) == rack
    assert fewest(closed, 11, lambda _: True) == frozenset()
    assert fewest(closed, 12, lambda nodes: 3 not in nodes) == frozenset()


@given(st.lists(st.integers(0, 999), min_size=2, max_size=MOST + 1, unique=True))
def test_few_nodes_all_try_all(nodes: list[int]) -> None:
    wanted = {(one, other) for one in nodes for other in nodes if one != other}
    assert pairs_to_try(sorted(nodes), [], 1) == wanted


@given(st.integers(MOST + 2, 120), st.sets(st.integers(0, 119), max_size=12), st.integers(1, 9))
def test_many_nodes_try_a_bounded_number_and_others_each_time(
    count: int, complained: set[int], turn: int
) -> None:
    nodes = range(count)
    pairs = pairs_to_try(nodes, complained, turn)
    assert all(one != other for one, other in pairs)
    some = sorted(complained & set(nodes))[:8]
    for node in nodes:
        tried = {other for one, other in pairs if one == node}
        assert tried >= {
            (node + 1 + step % (count - 1)) % count
            for step in range((turn - 1) * MOST, turn * MOST)
        }
        assert len(tried) <= (2 * MOST + 8 if node in some else MOST + len(some))
    turns = (count - 1 + MOST - 1) // MOST
    seen = set().union(*(pairs_to_try(nodes, [], each) for each in range(1, turns + 1)))
    assert len(seen) == count * (count - 1)


@given(
    st.dictionaries(
        st.integers(0, 4), st.dictionaries(st.integers(0, 4), st.just("shut"), max_size=3)
    )
)
def test_a_pair_is_closed_by_the_word_of_one_where_both_have_answered(
    said: dict[int, dict[int, str]],
) -> None:
    reach = Reach()
    probe = reach.ask(range(5), now_s=10.0)
    for node, closed in said.items():
        others = {other: how for other, how in closed.items() if other != node}
        reach.answered(node, probe.turn, others)
    assert reach.over == (len(said) == 5)
    reach.late()
    assert reach.over
    assert set(reach.closed()) == {
        (min(one, other), max(one, other))
        for one, closed in said.items()
        for other in closed
        if other in said and other != one
    }
