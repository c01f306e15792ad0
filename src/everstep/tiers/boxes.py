"""Boxes of a tensor, and whether they make up the whole of it. Pure.

Theory of operation. A box is `(place, shape)`: where it begins, and its size, in each dimension.
Boxes that lie inside, are disjoint, and have together as many elements as the whole, cover it. That
they are disjoint is found by a sweep along the dimension with the most different places: a box is
compared only with those that reach to where it begins.

It does not know what is in the boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from everstep.tiers.store import Refused

Box = tuple[tuple[int, ...], tuple[int, ...]]


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor have in common; None for nothing."""
    place = tuple(map(max, one[0], other[0]))
    ends = [
        min(a + m, b + n) for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True)
    ]
    shape = tuple(end - start for start, end in zip(place, ends, strict=True))
    return (place, shape) if all(size > 0 for size in shape) else None


def strides(shape: Sequence[int], item_bytes: int = 1) -> list[int]:
    """How far apart neighbours are in each dimension of a contiguous tensor of `shape`: in bytes,
    or in elements where nothing is said of their size."""
    return [math.prod(shape[dim + 1 :]) * item_bytes for dim in range(len(shape))]


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raises Refused, with `name`, unless `boxes` lie in a tensor of `shape`, are disjoint, and
    cover it. Empty boxes are allowed and cover nothing."""
    for place, size in boxes:
        if not len(place) == len(size) == len(shape):
            raise Refused(f"{name!r}: a piece of shape {size} at {place} is in no {tuple(shape)}")
        if any(at + n > limit for at, n, limit in zip(place, size, shape, strict=True)):
            raise Refused(f"{name!r}: a piece of shape {size} at {place} reaches out of {shape}")
    full = [box for box in boxes if math.prod(box[1])]
    held = sum(math.prod(size) for _, size in full)
    if held != math.prod(shape):
        raise Refused(f"{name!r}: its pieces have {held} elements, its shape {math.prod(shape)}")
    clash = _clash(full)
    if clash is not None:
        raise Refused(f"{name!r}: its pieces at {clash[0][0]} and {clash[1][0]} overlap")


def _clash(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that overlap, if there are such."""
    if len(boxes) < 2:
        return None
    if not boxes[0][0]:
        return boxes[0], boxes[1]  # a tensor without dimensions has one element
    along = max(range(len(boxes[0][0])), key=lambda dim: len({place[dim] for place, _ in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][along]):
        start = box[0][along]
        active = [other for other in active if other[0][along] + other[1][along] > start]
        for other in active:
            if overlap(box, other) is not None:
                return other, box
        active.append(box)
    return None
