"""The sample order for arbitrary sizes, seeds and places."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.data.order import MAX_SIZE, Order, permute

keys = st.one_of(st.integers(), st.binary(max_size=40))
small_sizes = st.integers(min_value=1, max_value=2000)


@settings(deadline=None)
@given(size=small_sizes, key=keys)
def test_permute_is_a_bijection(size: int, key: int | bytes) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


@settings(deadline=None)
@given(size=small_sizes, seed=keys, epoch=st.integers(min_value=0, max_value=10**9))
def test_an_epoch_has_every_sample_once(size: int, seed: int | bytes, epoch: int) -> None:
    assert sorted(Order(size, seed).samples(epoch * size, size)) == list(range(size))


@settings(deadline=None)
@given(size=st.integers(min_value=1, max_value=MAX_SIZE), key=keys, data=st.data())
def test_permute_stays_in_range_and_keeps_places_apart(
    size: int, key: int | bytes, data: st.DataObject
) -> None:
    indexes = data.draw(st.sets(st.integers(min_value=0, max_value=size - 1), max_size=50))
    found = [permute(index, size, key) for index in indexes]
    assert all(0 <= sample < size for sample in found)
    assert len(set(found)) == len(indexes)


@settings(deadline=None)
@given(
    size=st.integers(min_value=1, max_value=50),
    seed=keys,
    start=st.integers(min_value=0, max_value=10**15),
    count=st.integers(min_value=0, max_value=200),
)
def test_samples_are_the_single_places_in_a_row(
    size: int, seed: int | bytes, start: int, count: int
) -> None:
    together = Order(size, seed).samples(start, count)
    # Backwards, each from an object of its own: nothing that was asked before may matter.
    apart = [Order(size, seed).sample(start + place) for place in reversed(range(count))]
    assert together == apart[::-1]


@settings(deadline=None)
@given(
    size=st.integers(min_value=100, max_value=2000),
    seeds=st.lists(st.integers(), min_size=2, max_size=2, unique=True),
)
def test_seeds_and_epochs_give_different_orders(size: int, seeds: list[int]) -> None:
    one, other = (Order(size, seed) for seed in seeds)
    assert one.samples(0, size) != other.samples(0, size)
    assert one.samples(0, size) != one.samples(size, size)


def _chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


# Bounds: chi-square of df degrees has mean df and deviation sqrt(2 df); six deviations, fixed keys.


@pytest.mark.parametrize("size", [2, 3, 5, 10, 16, 17])
def test_every_place_is_equally_likely_for_every_sample(size: int) -> None:
    epochs = 4000
    order = Order(size, 1)
    places = [[0] * size for _ in range(size)]
    for epoch in range(epochs):
        for place, sample in enumerate(order.samples(epoch * size, size)):
            places[place][sample] += 1
    degrees = size - 1
    for counts in places:
        assert _chi_square(counts) < degrees + 6 * (2 * degrees) ** 0.5


@pytest.mark.parametrize(("size", "permutations"), [(2, 2), (3, 6), (4, 24)])
def test_every_permutation_of_a_few_is_equally_likely(size: int, permutations: int) -> None:
    seen = Counter(tuple(permute(index, size, key) for index in range(size)) for key in range(6000))
    assert len(seen) == permutations
    degrees = permutations - 1
    assert _chi_square(list(seen.values())) < degrees + 6 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("size", [3, 8, 9, 16, 25])
def test_odd_and_even_permutations_are_equally_likely(size: int) -> None:
    odd = 0
    for seed in range(1000):
        samples = Order(size, seed).samples(0, size)
        odd += sum(one > other for one, other in combinations(samples, 2)) % 2
    assert 400 < odd < 600  # binomial: mean 500, deviation 16


def test_neighbours_do_not_stay_neighbours() -> None:
    # The distance of two samples that follow each other, in 50 classes, over one epoch.
    size = 50_000
    samples = Order(size, 9).samples(0, size)
    classes = [0] * 50
    for one, other in pairwise(samples):
        classes[(other - one) % size * 50 // size] += 1
    assert _chi_square(classes) < 49 + 6 * 98**0.5
