"""Tensors as bytes in order, whatever their pieces."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit import checkpoints
from tests.unit.checkpoints import DictStore, Made, draft, tier

from everstep.tiers.boxes import check_cover
from everstep.tiers.load import open_newest
from everstep.tiers.slabs import Reading, slabs
from everstep.tiers.store import Refused


def grid(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Any]:
    """Boxes of a tensor cut at these places in each dimension, one rank each."""
    boxes: list[Any] = [((), ())]
    for size, at in zip(shape, cuts, strict=True):
        edges = [0, *sorted(set(at)), size]
        spans = [(a, b - a) for a, b in itertools.pairwise(edges)]
        boxes = [((*p, a), (*s, n)) for p, s in boxes for a, n in spans]
    return [(rank, place, extent) for rank, (place, extent) in enumerate(boxes)]


@st.composite
def cut_tensors(draw: st.DrawFn) -> Made:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    cuts = [draw(st.lists(st.integers(0, size), max_size=2)) for size in shape]
    item = draw(st.sampled_from([1, 2, 4, 8, 16]))
    data = random.Random(1).randbytes(math.prod(shape) * item)
    return Made(shape=shape, data=data, boxes=grid(shape, cuts), dtype="torch.x", item_bytes=item)


@given(made=cut_tensors(), limit=st.integers(1, 300))
def test_slabs_one_after_the_other_are_the_tensor(made: Made, limit: int) -> None:
    store = DictStore()
    draft(1, {"w": made}, world=len(made.boxes)).put(store)
    with open_newest([tier(store)]) as opened:
        assert b"".join(area for _, area in Reading(opened).slabs("w", limit)) == made.data


@given(shape=st.lists(st.integers(0, 5), max_size=4), limit=st.integers(1, 200))
def test_slabs_cover_the_tensor_and_keep_to_the_limit(shape: list[int], limit: int) -> None:
    boxes = list(slabs(shape, 4, limit))
    check_cover("w", shape, boxes)
    assert all(math.prod(size) * 4 <= max(limit, 4) for _, size in boxes)


def test_any_box_can_be_read() -> None:
    shape = (6, 10)
    made = Made(
        shape=shape,
        data=random.Random(2).randbytes(240),
        boxes=checkpoints.rows(shape, 3, along=1),
    )
    store = DictStore()
    draft(1, {"w": made}, world=3).put(store)
    with open_newest([tier(store)]) as opened:
        area = bytearray(4 * 3 * 4)
        Reading(opened).read("w", ((1, 3), (4, 3)), memoryview(area))
        assert area == checkpoints.cut(made, (1, 3), (4, 3))


@pytest.mark.parametrize("change", [{"name": "v"}, {"shape": (9,)}])
def test_a_record_that_contradicts_its_parts_is_refused(change: dict[str, Any]) -> None:
    made = draft(1, {"w": Made(shape=(10,), data=bytes(40))})
    whole = made.checkpoint.tensors["w"]
    piece = msgspec.structs.replace(whole.pieces[0], **change)
    spoiled = msgspec.structs.replace(
        whole, shape=change.get("shape", whole.shape), pieces=(piece,)
    )
    made.checkpoint = msgspec.structs.replace(made.checkpoint, tensors={"w": spoiled})
    store = DictStore()
    made.put(store)
    with open_newest([tier(store)]) as opened, pytest.raises(Refused, match="rank 0's part"):
        list(Reading(opened).slabs("w"))
