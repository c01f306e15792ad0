"""Which bytes of a piece a box needs, against torch's own slicing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.tiers.resharding import _put, runs


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    place = [draw(st.integers(0, size - 1)) for size in shape]
    size = [draw(st.integers(1, n - at)) for n, at in zip(shape, place, strict=True)]
    return shape, place, size


@given(boxes(), st.sampled_from([0, 4, 40, 4 << 20]))
def test_what_is_read_is_the_box(box: tuple[list[int], list[int], list[int]], gap: int) -> None:
    """With gaps that count as large (0), not at all, and between."""
    shape, place, size = box
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    data = bytes(whole.flatten().view(torch.uint8).tolist())
    ranges, dense = runs(shape, place, size, 4, far=gap)
    assert all(
        start >= 0 and length > 0 and start + length <= len(data) for start, length in ranges
    )
    if dense:
        assert sum(length for _, length in ranges) == torch.Size(size).numel() * 4
    else:
        assert len(ranges) == 1
    room = bytearray(b"".join(data[start : start + length] for start, length in ranges))
    target = torch.zeros(size)
    _put(target, room, torch.float32, shape, size, dense)
    assert torch.equal(target, _sliced(whole, place, size))


def _sliced(whole: torch.Tensor, place: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(place, size, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def test_rows_are_one_run_and_columns_one_stretch() -> None:
    assert runs([8, 10], [2, 0], [3, 10], 4) == ([(80, 120)], True)
    assert runs([8, 10], [0, 5], [8, 5], 4) == ([(20, 300)], False)
    assert runs([], [], [], 8) == ([(0, 8)], True)
    large = 4 << 20
    assert runs([2, 2, large], [0, 1, 0], [2, 1, large], 1) == (
        [(large, large), (3 * large, large)],
        True,
    )
