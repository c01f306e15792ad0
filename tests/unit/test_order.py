"""The sample order: golden vectors (a change of any of them makes old runs irreproducible), and its
edges."""

from __future__ import annotations

import pytest

from everstep.data.order import MAX_SIZE, Order, permute

BIG = 2**33 + 7

PERMUTATIONS: list[tuple[int, int | bytes, list[int]]] = [
    (1, 0, [0]),
    (2, 0, [0, 1]),
    (2, 2, [1, 0]),
    (3, 0, [2, 0, 1]),
    (10, 0, [6, 8, 1, 3, 4, 7, 5, 2, 0, 9]),
    (10, b"key", [7, 2, 4, 1, 3, 8, 5, 9, 6, 0]),
]


@pytest.mark.parametrize(("size", "key", "golden"), PERMUTATIONS)
def test_permute_golden_whole(size: int, key: int | bytes, golden: list[int]) -> None:
    assert [permute(index, size, key) for index in range(size)] == golden


PLACES: list[tuple[int, int, list[int], list[int]]] = [
    (1000, 42, [0, 1, 2, 3, 4, 5, 6, 7], [927, 630, 253, 739, 214, 216, 989, 40]),
    (1000, 42, [500, 999], [268, 65]),
    (BIG, -7, [0, 1, 2, 2**32], [2812291765, 81663294, 430366898, 6501914146]),
    (BIG, -7, [2**33, BIG - 1], [6938478977, 7969512914]),
    (MAX_SIZE, 2**100, [0, 1], [6387934360558646726, 431855892315855348]),
    (MAX_SIZE, 2**100, [2**62, MAX_SIZE - 1], [3238329813895392567, 3127539816450033461]),
]


@pytest.mark.parametrize(("size", "key", "indexes", "golden"), PLACES)
def test_permute_golden_places(size: int, key: int, indexes: list[int], golden: list[int]) -> None:
    assert [permute(index, size, key) for index in indexes] == golden


ORDERS: list[tuple[int, int | bytes, int, list[int]]] = [
    # size, seed, first position, samples from there on; all but the last cross an epoch's end
    (1, 5, 0, [0, 0, 0]),
    (2, 5, 0, [1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1]),
    (3, 5, 0, [2, 1, 0, 1, 0, 2, 2, 1, 0, 2, 0, 1]),
    (10, 5, 6, [8, 0, 9, 2, 4, 1, 9, 2, 7, 5, 8, 6]),
    (1000, 5, 996, [562, 347, 81, 503, 164, 357, 934, 340, 560, 347, 165, 591]),
    (1000, b"x", 996, [630, 648, 55, 10, 151, 287, 246, 976, 281, 696, 259, 30]),
    (BIG, 5, BIG - 3, [3009406314, 589864758, 1920154771, 7790596486, 2692237338, 2325254600]),
    (BIG, 5, 2**40, [2396036734]),
]


@pytest.mark.parametrize(("size", "seed", "start", "golden"), ORDERS)
def test_order_golden(size: int, seed: int | bytes, start: int, golden: list[int]) -> None:
    assert Order(size, seed).samples(start, len(golden)) == golden


def test_order_is_the_permutation_of_each_epoch_by_a_key_of_its_own() -> None:
    order = Order(1000, 1)
    epochs = [tuple(order.samples(epoch * 1000, 1000)) for epoch in range(5)]
    assert all(sorted(epoch) == list(range(1000)) for epoch in epochs)
    assert len(set(epochs)) == 5


def test_seeds_differ_and_text_of_a_number_is_not_the_number() -> None:
    seeds: list[int | bytes] = [0, 1, -1, 2**64, 2**64 + 1, b"", b"0", b"1", b"int:0"]
    assert len({tuple(Order(1000, seed).samples(0, 50)) for seed in seeds}) == len(seeds)
    assert len({permute(0, MAX_SIZE, seed) for seed in seeds}) == len(seeds)


def test_going_back_to_an_older_epoch_gives_the_same_samples() -> None:
    order = Order(7, 3)
    first = order.samples(0, 7)
    order.sample(10**12)
    assert order.samples(0, 7) == first


def test_neighbouring_seeds_and_epochs_agree_no_more_than_by_chance() -> None:
    # Two random permutations agree in one place on average (Poisson); the bound holds for 20 of it.
    orders = [Order(2000, seed) for seed in range(5)]
    lists = [order.samples(epoch * 2000, 2000) for order in orders for epoch in range(3)]
    for place, one in enumerate(lists):
        for other in lists[:place]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 20


@pytest.mark.parametrize(("index", "size"), [(0, 0), (0, -1), (-1, 5), (5, 5), (0, MAX_SIZE + 1)])
def test_permute_refuses_what_is_out_of_range(index: int, size: int) -> None:
    with pytest.raises(ValueError, match="it must be"):
        permute(index, size, 0)


@pytest.mark.parametrize("size", [0, -3, MAX_SIZE + 1])
def test_order_refuses_sizes_out_of_range(size: int) -> None:
    with pytest.raises(ValueError, match=f"size is {size}"):
        Order(size, 0)


def test_order_refuses_negative_positions() -> None:
    order = Order(10, 0)
    assert order.samples(3, 0) == []
    with pytest.raises(ValueError, match="start is -1"):
        order.sample(-1)
    with pytest.raises(ValueError, match="count is -2"):
        order.samples(0, -2)
