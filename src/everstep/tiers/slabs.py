"""Tensors of a checkpoint as bytes in order, whatever their pieces: box by box, in bounded memory.

Theory of operation. A tensor is cut into slabs, each of which is one run of its elements in order
(the last dimension fastest), so that one slab after the other is the tensor. A slab is put together
from the pieces that it meets; each gives runs of bytes that lie together both in the piece and in
the slab. As a slab has whole rows, what it needs of a piece lies together there too, and blocks are
read once.

What a record says about a piece is compared with what its part says: it may be a stranger's.

It does not know what the elements mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everstep import snapshot
from everstep.tiers.boxes import Box, overlap, strides
from everstep.tiers.catalog import Piece, Whole, check_piece
from everstep.tiers.load import Opened, Wanted

SLAB_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A piece, and where its bytes are: from byte `start` of its part on."""

    piece: Piece
    start: int
    item_bytes: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.piece.shape) * self.item_bytes


class Reading:
    """Tensors of an opened checkpoint. For one thread."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.checkpoint = opened.checkpoint
        self._spans: dict[int, dict[str, tuple[snapshot.Tensor, int]]] = {}

    def held(self, name: str) -> list[Held]:
        """The pieces of a tensor. Raises Refused where record and parts contradict each other;
        PartLost."""
        whole = self.checkpoint.tensors[name]
        return [self._held(name, whole, piece) for piece in whole.pieces]

    def item_bytes(self, name: str) -> int:
        """Bytes of one of its elements; 0 for a tensor of no pieces, which has no elements."""
        return max((held.item_bytes for held in self.held(name)), default=0)

    def read(self, name: str, box: Box, area: memoryview) -> None:
        """Fill `area` with a box of the tensor, in order. Raises Refused, PartLost."""
        wanted: list[Wanted] = []
        for held in self.held(name):
            common = overlap(box, (held.piece.place, held.piece.shape))
            if common is not None:
                wanted += _runs(held, common, box, area)
        self.opened.read_many(wanted)

    def slabs(self, name: str, limit: int = SLAB_BYTES) -> Iterator[tuple[Box, bytearray]]:
        """The tensor's bytes, one slab after the other. Raises Refused, PartLost."""
        item = self.item_bytes(name)
        for box in slabs(self.checkpoint.tensors[name].shape, item, limit):
            area = bytearray(math.prod(box[1]) * item)
            self.read(name, box, memoryview(area))
            yield box, area

    def _held(self, name: str, whole: Whole, piece: Piece) -> Held:
        spans = self._spans.get(piece.rank)
        if spans is None:
            layout = self.opened.layout(piece.rank)
            spans = {tensor.name: (tensor, start) for tensor, start, _ in layout.spans()}
            self._spans[piece.rank] = spans
        tensor, start = spans.get(piece.name, (None, 0))
        check_piece(name, whole, piece, tensor)
        assert tensor is not None
        return Held(piece=piece, start=start, item_bytes=tensor.item_bytes)


def slabs(shape: Sequence[int], item_bytes: int, limit: int) -> Iterator[Box]:
    """Boxes of at most `limit` bytes (one element at least), each one run of the tensor's elements,
    in order. Pure."""
    if math.prod(shape) == 0:
        return
    dims = len(shape)
    along, row = dims, item_bytes  # the first dimension that is cut; bytes of one step in it
    while along and row * shape[along - 1] <= limit:
        along -= 1
        row *= shape[along]
    if along == 0:
        yield (0,) * dims, tuple(shape)
        return
    along -= 1
    many = max(1, limit // row)
    for outer in itertools.product(*(range(size) for size in shape[:along])):
        for start in range(0, shape[along], many):
            stop = min(start + many, shape[along])
            place = (*outer, start, *(0 for _ in shape[along + 1 :]))
            yield place, (*(1 for _ in outer), stop - start, *shape[along + 1 :])


def _runs(held: Held, common: Box, box: Box, area: memoryview) -> Iterator[Wanted]:
    """What of `held` goes where in `area`, which is `box`. `common`: what both have."""
    piece, item = held.piece, held.item_bytes
    place, shape = common
    # From here on the elements lie together, in the piece and in the box.
    inner = len(shape)
    while inner and piece.shape[inner - 1] == box[1][inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)
    run = math.prod(shape[outer:]) * item
    there, here = strides(piece.shape, item), strides(box[1], item)
    for index in itertools.product(*(range(size) for size in shape[:outer])):
        at = [p + i for p, i in itertools.zip_longest(place, index, fillvalue=0)]
        source = held.start + _offset(at, piece.place, there)
        target = _offset(at, box[0], here)
        yield Wanted(piece.rank, source, area[target : target + run])


def _offset(at: Sequence[int], origin: Sequence[int], apart: Sequence[int]) -> int:
    return sum((a - o) * s for a, o, s in zip(at, origin, apart, strict=True))
