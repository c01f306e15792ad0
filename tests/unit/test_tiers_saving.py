"""What a save is made of: bytes of tensors, warm memory, one order for all ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from everstep.errors import UserError
from everstep.tiers import policy, tensors
from everstep.tiers.policy import Failure, Standing, Wish
from everstep.tiers.settings import TierSettings
from everstep.tiers.staging import AREAS, Own, Staging

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_goes_into_memory_and_out_of_it(dtype: torch.dtype) -> None:
    if str(dtype).startswith("torch.q"):
        pytest.skip("quantized tensors are refused: they are more than their bytes")
    words = torch.randint(0, 256, (4, 8 * dtype.itemsize), dtype=torch.uint8)
    source = words.view(dtype)[1:, ::2]  # in no order
    area = bytearray(source.numel() * dtype.itemsize)
    tensors.fill(memoryview(area), source)
    want = words.view(4, 8, -1)[1:, ::2].flatten()
    assert area == bytes(want.tolist())
    target = torch.zeros(4, 8 * dtype.itemsize, dtype=torch.uint8).view(dtype)[1:, ::2]
    tensors.put(target, tensors.over(area).view(dtype).view(3, 4))
    again = bytearray(len(area))
    tensors.fill(memoryview(again), target)
    assert again == area


def test_bytes_in_order_are_read_into_directly() -> None:
    tensor = torch.zeros(2, 3)
    area = tensors.direct(tensor[1], torch.float32)
    assert area is not None
    area[:] = b"\x01" * 12
    assert tensor.view(torch.uint8)[1].tolist() == [1] * 12
    assert not tensor[0].any()
    assert tensors.direct(tensor.t(), torch.float32) is None
    assert tensors.direct(tensor, torch.float16) is None


# ------------------------------------------------------------ staging


def test_memory_is_used_again() -> None:
    staging = Staging(Own, again=True)
    first = staging.take(5000)
    room = first.room
    first.area[:] = b"x" * 5000
    first.release()
    second = staging.take(5000)
    assert second.room is room
    second.release()
    other = staging.take(6000)  # the state has grown
    other.release()
    assert staging.take(6000).room is other.room
    staging.close()


def test_memory_goes_with_its_last_user() -> None:
    made: list[Own] = []

    def make(nbytes: int) -> Own:
        made.append(Own(nbytes))
        return made[-1]

    staging = Staging(make, again=False)
    staged = staging.take(100)
    staged.share()
    staged.release()
    assert staged.area.nbytes == 100
    staged.release()
    with pytest.raises(ValueError, match="released"):
        bytes(made[0].area)
    with pytest.raises(ValueError, match="before it was shared"):
        staged.share()


def test_memory_is_warmed_up_to_a_bound_and_no_further() -> None:
    made: list[int] = []

    def make(nbytes: int) -> Own:
        made.append(nbytes)
        return Own(nbytes)

    staging = Staging(make, again=True, limit=250)
    staging.warm(100)
    staging.warm(100)
    assert made == [100]
    held = [staging.take(100)]
    assert made == [100]
    staging.warm(100)
    held.append(staging.take(100))
    staging.warm(100)  # over the limit, and nobody waits for it
    assert made == [100, 100]
    with pytest.raises(UserError, match="beside 200 bytes that are on their way, is more than"):
        staging.take(100)
    for each in held:
        each.release()
    staging.close()
    free = Staging(make, again=True)
    many = [free.take(1) for _ in range(AREAS)]
    made.clear()
    free.warm(1)
    assert made == []
    for each in many:
        each.release()
    free.close()


def test_what_cannot_be_had_is_not_counted() -> None:
    def refuse(nbytes: int) -> Own:
        raise OSError("no memory")

    staging = Staging(refuse, again=True, limit=10)
    for _ in range(5):
        with pytest.raises(OSError, match="no memory"):
            staging.take(10)


# ------------------------------------------------------------ one order for all


def settings(**more: Any) -> TierSettings:
    usual = TierSettings(series="a", destination="/d", durable_every=4, memory_every=2)
    return replace(usual, **more)


def wishes(*standing: dict[str, Standing], known: Sequence[Failure] = ()) -> list[Wish]:
    return [
        Wish(rank=rank, step=8, standing=each, known=tuple(known) if rank == 1 else ())
        for rank, each in enumerate(standing)
    ]


def test_cadences_say_where_a_step_goes() -> None:
    assert policy.due(settings(), 3) == ()
    assert policy.due(settings(), 2) == ("memory",)
    assert policy.due(settings(), 4) == ("memory", "durable")
    assert policy.due(settings(durable_every=0), 4) == ("memory",)
    assert policy.wanted(settings(), 3) == ("memory", "durable")
    assert policy.wanted(settings(), 2) == ("memory",)
    assert policy.wanted(settings(), 2, everywhere=True) == ("memory", "durable")
    assert policy.wanted(settings(memory_every=0, durable_every=0), 2) == ("durable",)


def test_newest_displaces_what_waits_in_that_tier_only() -> None:
    busy = {"durable": Standing(under_way="a", waiting=("b",)), "memory": Standing(put=("a", "b"))}
    late = {"durable": Standing(under_way="b", put=("a",)), "memory": Standing(put=("a", "b"))}
    order = policy.decide(wishes(busy, late), settings(), "c")
    assert order.tiers == ("memory", "durable")
    assert order.displaced == (("durable", "b"),)
    assert (order.lost, order.wait, order.skipped) == ((), (), ())


def test_skip_leaves_a_busy_tier_out_and_wait_waits_for_it() -> None:
    busy = {"durable": Standing(under_way="a"), "memory": Standing(put=("a",))}
    free = {"durable": Standing(put=("a",)), "memory": Standing(put=("a",))}
    order = policy.decide(wishes(free, busy), settings(on_busy="skip"), "c")
    assert (order.tiers, order.skipped) == (("memory",), ("durable",))
    order = policy.decide(wishes(free, busy), settings(on_busy="wait"), "c")
    assert (order.tiers, order.wait) == (("memory", "durable"), ("durable",))


def test_an_attempt_that_a_rank_knows_nothing_of_is_lost_and_not_busy() -> None:
    busy = {"durable": Standing(under_way="a"), "memory": Standing()}
    order = policy.decide(wishes(busy, {}), settings(on_busy="skip"), "c")
    assert order.lost == (("durable", "a"),)
    assert order.tiers == ("memory", "durable")


def test_a_failure_is_told_once_to_all_and_not_if_all_have_seen_it() -> None:
    failure = Failure(step=4, tier="durable", attempt="a", rank=2, why="full")
    vague = Failure(step=4, tier="durable", attempt="a", rank=-1, why="time")
    order = policy.decide(wishes({}, {}, known=[vague, failure]), settings(), "c")
    assert order.failures == (failure,)
    order = policy.decide(wishes({}, {}, known=[failure]), settings(), "c", raised=["a"])
    assert order.failures == ()
    assert order.raised == ("a",)


def test_cards_are_told_when_a_rank_lacks_some() -> None:
    one, two = (Wish(rank=r, step=1, standing={}, card=f"host{r}") for r in range(2))
    cards = policy.decide([one, two], settings(), "c").cards
    assert cards == ("host0", "host1")
    met = policy.digest(cards)
    knowing = [Wish(rank=r, step=1, standing={}, card=f"host{r}", met=met) for r in range(2)]
    assert policy.decide(knowing, settings(), "c").cards == ()
    assert policy.decide([knowing[0], two], settings(), "c").cards == cards


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"series": "a/b"}, "'a/b' can't name a series"),
        ({"series": "../up"}, "can't name a series"),
        ({"memory_every": 0, "durable_every": 0, "destination": ""}, "no place to go"),
        ({"destination": ""}, "durable_every=4 has no destination"),
        ({"on_busy": "later"}, "on_busy='later' is none of newest, wait, skip"),
        ({"on_save_error": "hide"}, "is none of raise, warn"),
        ({"copies": 0}, "copies=0 is less than 1"),
        ({"memory_every": -1}, "memory_every=-1 is less than 0"),
        ({"deadline_s": float("nan")}, "deadline_s=nan is less than"),
        ({"memory_share": 1.5}, "memory_share=1.5 is no part"),
        ({"upload_bandwidth": "fast"}, "'fast' is no rate"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused_in_words(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        settings(**wrong)
