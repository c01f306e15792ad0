"""What differs between two checkpoints, however each is sharded.

Theory of operation. Tensors are compared by name: type and shape first. Where both lie in the same
place of parts that have the same digests there, they are equal and nothing is read. All others are
read, slab by slab, from both, and compared as bytes; so a NaN equals itself, and 0.0 is not -0.0.
Of what differs, elements are counted, and for real numbers the largest difference is said.

Values that are no tensors are compared as data; what the two trainings ran on (`origin`) is not
compared.

It does not know what either was saved by.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from everstep.tiers import values
from everstep.tiers.catalog import Whole
from everstep.tiers.slabs import SLAB_BYTES, Held, Reading
from everstep.tiers.store import Refused

_SHOWN = 80  # characters of a value
_FLOATS = {"torch.float16": "e", "torch.float32": "f", "torch.float64": "d"}


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A key in which they differ. `what`: for a person. `elements`: that differ, of `of`; `most`:
    the largest difference of two real numbers, None for other types, and where one is a NaN."""

    key: str
    kind: Literal["only in the first", "only in the second", "type", "shape", "tensor", "value"]
    what: str
    elements: int | None = None
    of: int | None = None
    most: float | None = None


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """How two checkpoints compare. `unread`: tensors that are equal by their digests; `nbytes`:
    read from each."""

    tensors: int
    values: int
    unread: int
    nbytes: int
    differences: tuple[Difference, ...]


def compare(one: Reading, other: Reading) -> Compared:
    """Compare two opened checkpoints. Blocks for reading what the digests leave open. Raises
    PartLost, Refused."""
    differences = [*_keys(one, other)]
    unread = nbytes = 0
    tensors, others = one.checkpoint.tensors, other.checkpoint.tensors
    both = [name for name in tensors if name in others]
    for name in both:
        problem = _shape(name, tensors[name], others[name])
        if problem is not None:
            differences.append(problem)
        elif _same_digests(one, one.held(name), other, other.held(name)):
            unread += 1
        else:
            nbytes += math.prod(tensors[name].shape) * one.item_bytes(name)
            found = _tensor(name, tensors[name], one, other)
            differences += [found] if found else []
    kept, more = one.checkpoint.values, other.checkpoint.values
    differences += [
        Difference(key=key, kind="value", what=f"{_shown(kept[key])}, then {_shown(more[key])}")
        for key in kept
        if key in more and kept[key] != more[key]
    ]
    return Compared(
        tensors=len(both),
        values=len(kept.keys() & more.keys()),
        unread=unread,
        nbytes=nbytes,
        differences=tuple(sorted(differences, key=lambda found: found.key)),
    )


def _keys(one: Reading, other: Reading) -> Iterator[Difference]:
    """Keys that only one of them has, or that are a tensor in one and a value in the other."""
    here = one.checkpoint.tensors.keys() | one.checkpoint.values.keys()
    there = other.checkpoint.tensors.keys() | other.checkpoint.values.keys()
    for key in here - there:
        yield Difference(key=key, kind="only in the first", what="the second does not have it")
    for key in there - here:
        yield Difference(key=key, kind="only in the second", what="the first does not have it")
    for key in here & there:
        if (key in one.checkpoint.tensors) != (key in other.checkpoint.tensors):
            yield Difference(key=key, kind="type", what="a tensor in one of them, else a value")


def _shape(name: str, one: Whole, other: Whole) -> Difference | None:
    if one.dtype != other.dtype:
        return Difference(key=name, kind="type", what=f"{one.dtype}, then {other.dtype}")
    if one.shape != other.shape:
        return Difference(
            key=name, kind="shape", what=f"{list(one.shape)}, then {list(other.shape)}"
        )
    return None


def _same_digests(one: Reading, pieces: list[Held], other: Reading, others: list[Held]) -> bool:
    """Whether the pieces are cut and placed alike, and all blocks that they touch are equal."""
    if len(pieces) != len(others):
        return False
    for mine, its in zip(pieces, others, strict=True):
        box, same = (mine.piece.place, mine.piece.shape), (its.piece.place, its.piece.shape)
        if box != same or (mine.start, mine.item_bytes) != (its.start, its.item_bytes):
            return False
        left = one.opened.manifest(mine.piece.rank)
        right = other.opened.manifest(its.piece.rank)
        if left.block_bytes != right.block_bytes:
            return False
        first = mine.start // left.block_bytes
        last = -(-(mine.start + mine.nbytes) // left.block_bytes)
        if left.blocks[first:last] != right.blocks[first:last]:
            return False
    return True


def _tensor(name: str, whole: Whole, one: Reading, other: Reading) -> Difference | None:
    """Compare the elements. The numbers of what differs are looked at one by one."""
    item = one.item_bytes(name)
    if item != other.item_bytes(name):
        return Difference(key=name, kind="type", what="elements of another size")
    number = _number(whole.dtype)
    count, most, first = 0, 0.0, ""
    for (box, left), (_, right) in zip(
        one.slabs(name, SLAB_BYTES), other.slabs(name, SLAB_BYTES), strict=True
    ):
        if left == right:
            continue
        for at in _different(left, right, item):
            if not count:
                first = _index(box, at)
            count += 1
            if number is not None:
                span = slice(at * item, (at + 1) * item)
                apart = abs(number(bytes(left[span])) - number(bytes(right[span])))
                most = max(most, apart, key=_nan_last)
    if not count:
        return None
    of = math.prod(whole.shape)
    known = number is not None and math.isfinite(most)
    said = f", by {most:.3g} at most" if known else ""
    return Difference(
        key=name,
        kind="tensor",
        what=f"{count} of {of} elements differ{said}, the first at {first}",
        elements=count,
        of=of,
        most=most if known else None,
    )


def _different(left: bytearray, right: bytearray, item: int) -> Iterator[int]:
    """Which elements differ."""
    step = 1 << 14
    for start in range(0, len(left), step * item):
        stop = start + step * item
        one, other = left[start:stop], right[start:stop]
        if one != other:
            for at in range(0, len(one), item):
                if one[at : at + item] != other[at : at + item]:
                    yield (start + at) // item


def _index(box: tuple[tuple[int, ...], tuple[int, ...]], at: int) -> str:
    """The place in the tensor of element `at` of a box, as a person writes it."""
    place = []
    for start, size in zip(reversed(box[0]), reversed(box[1]), strict=True):
        place.append(start + at % size)
        at //= size
    return f"[{', '.join(map(str, reversed(place)))}]"


def _number(dtype: str) -> Callable[[bytes], float] | None:
    """What makes a number of an element's bytes; None for types that are no real numbers here."""
    if dtype == "torch.bfloat16":
        return lambda raw: float(struct.unpack("<f", b"\0\0" + raw)[0])
    code = _FLOATS.get(dtype)
    if code is not None:
        return lambda raw: float(struct.unpack(f"<{code}", raw)[0])
    if dtype.startswith(("torch.int", "torch.uint")):
        signed = dtype.startswith("torch.int")
        return lambda raw: float(int.from_bytes(raw, "little", signed=signed))
    return None


def _shown(raw: bytes) -> str:
    try:
        text = repr(values.decode(raw))
    except Refused as error:
        return str(error)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _nan_last(number: float) -> float:
    return math.inf if math.isnan(number) else number
