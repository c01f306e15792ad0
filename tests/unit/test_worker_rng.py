"""Keyed random streams: the same for the same key, step and moment; each rank's own."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest
import torch

from everstep.worker import rng


@pytest.fixture(autouse=True)
def generators_as_they_were() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    saved = torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()
    yield
    torch.set_rng_state(saved[0])
    random.setstate(saved[1])
    if numpy is not None and saved[2] is not None:
        numpy.random.set_state(saved[2])


def _seed_script(seed: int) -> None:
    import numpy

    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def _draw() -> tuple[tuple[float, ...], ...]:
    import numpy

    return (
        tuple(torch.randn(3).tolist()),
        tuple(random.random() for _ in range(3)),
        tuple(numpy.random.rand(3).tolist()),
    )


def test_making_a_key_draws_from_no_generator() -> None:
    _seed_script(1)
    without = _draw()
    _seed_script(1)
    rng.make_key()
    assert _draw() == without


def test_every_generator_repeats_for_the_same_key_step_and_moment() -> None:
    key = rng.make_key()
    rng.seed_all(key, 7, "step")
    first = _draw()
    _draw()
    rng.seed_all(key, 7, "step")
    assert _draw() == first


@pytest.mark.parametrize(
    "other", [(8, "step"), (7, "after"), (7, "data"), (7 + 256, "step"), (2**40, "step")]
)
def test_another_step_or_moment_is_another_stream_in_every_generator(
    other: tuple[int, str],
) -> None:
    key = rng.make_key()
    rng.seed_all(key, 7, "step")
    first = _draw()
    rng.seed_all(key, *other)
    assert all(one != two for one, two in zip(first, _draw(), strict=True))


def test_ranks_seeded_alike_stay_alike_and_others_differ() -> None:
    _seed_script(3)
    one = rng.make_key()
    _seed_script(3)
    assert rng.make_key() == one
    _seed_script(4)
    other = rng.make_key()
    size = len(one) // 3
    assert all(one[i * size : (i + 1) * size] != other[i * size : (i + 1) * size] for i in range(3))


def test_a_generator_that_the_script_did_not_seed_changes_only_its_own_stream() -> None:
    _seed_script(5)
    one = rng.make_key()
    _seed_script(5)
    random.seed(99)
    other = rng.make_key()
    rng.seed_all(one, 1, "step")
    torch_one, python_one, numpy_one = _draw()
    rng.seed_all(other, 1, "step")
    torch_other, python_other, numpy_other = _draw()
    assert (torch_one, numpy_one) == (torch_other, numpy_other)
    assert python_one != python_other


def test_one_draw_more_before_protect_gives_another_key() -> None:
    _seed_script(5)
    one = rng.make_key()
    torch.randn(1)
    assert rng.make_key() != one


def test_the_generators_of_a_rank_do_not_echo_one_another() -> None:
    import numpy

    seeds: list[int] = []
    key = bytes(range(16)) * 3  # even if all three keys were the same
    rng.seed_all(key, 1, "step")
    seeds.append(torch.initial_seed())
    rng.seed_all(key, 2, "step")
    seeds.append(torch.initial_seed())
    assert len(set(seeds)) == 2
    assert numpy.random.get_state(legacy=True)[0] == "MT19937"  # type: ignore[index]


def test_without_numpy_it_works_and_never_imports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    key = rng.make_key()
    rng.seed_all(key, 1, "step")
    assert "numpy" not in sys.modules
    assert len(key) == 48
