"""A checkpoint made of tensors that come from elsewhere, part by part, in bounded memory.

Theory of operation. Tensors are put together to parts of at most some size, a larger one alone; one
part at a time is laid out in a file without a name, mapped, filled by whoever has the bytes, and
put. Then the checkpoint is committed as any other, by one who saves all ranks' parts.

It does not know where the bytes come from.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from everstep import snapshot
from everstep.errors import UserError
from everstep.tiers.catalog import Checkpoint, Origin, Piece, Whole
from everstep.tiers.series import Series

PART_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A tensor. `fill`: writes its bytes, elements in order, into what it is given, which is as
    long as they are."""

    key: str
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    fill: Callable[[memoryview], object]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.item_bytes


def bring_in(
    series: Series,
    step: int,
    tensors: Sequence[Incoming],
    values: Mapping[str, bytes],
    *,
    paths: Mapping[str, tuple[str | int, ...]] | None = None,
    origin: Origin,
    part_bytes: int = PART_BYTES,
    deadline_s: float = 3600.0,
) -> Checkpoint:
    """Make a checkpoint of `tensors`, in that order. Needs room for one part where temporary files
    are. `deadline_s`: for each part. Raises StoreError, UserError for what is no checkpoint, and
    what `fill` raises."""
    if step in series.steps():
        raise UserError(
            f"step {step} of {series.name} is at {series.store.where} already, and nothing is "
            "overwritten: choose another step or series"
        )
    attempt = series.begin(step)
    groups = list(_groups(tensors, part_bytes))
    wholes = {}
    for rank, group in enumerate(groups):
        try:
            layout = snapshot.Layout([_tensor(one) for one in group])
        except snapshot.SnapshotError as error:
            raise UserError(f"this can't be a checkpoint: {error}") from error
        about = snapshot.About(
            run_id="import", rank=rank, world=len(groups), shard=f"rank {rank}", step=step
        )
        with _room(layout.nbytes) as area:
            _fill(area, layout, group)
            manifest = snapshot.describe(area, layout, about)
            series.put_part(attempt, rank, area, manifest, deadline_s=deadline_s)
        for one in group:
            piece = Piece(rank=rank, name=one.key, place=(0,) * len(one.shape), shape=one.shape)
            wholes[one.key] = Whole(dtype=one.dtype, shape=one.shape, pieces=(piece,))
    return series.commit(
        attempt,
        world=len(groups),
        tensors=wholes,
        values=values,
        paths=paths,
        origin=msgspec.structs.replace(origin, world=len(groups)),
        deadline_s=deadline_s,
    )


def _groups(tensors: Sequence[Incoming], part_bytes: int) -> Iterator[list[Incoming]]:
    """The tensors of each part; at least one part."""
    group: list[Incoming] = []
    held = 0
    for tensor in tensors:
        if group and held + tensor.nbytes > part_bytes:
            yield group
            group, held = [], 0
        group.append(tensor)
        held += tensor.nbytes
    yield group


def _tensor(one: Incoming) -> snapshot.Tensor:
    return snapshot.Tensor(
        name=one.key, dtype=one.dtype, item_bytes=one.item_bytes, shape=one.shape
    )


def _fill(area: memoryview, layout: snapshot.Layout, group: Sequence[Incoming]) -> None:
    area[: len(layout.header)] = layout.header
    by_key = {one.key: one for one in group}
    for tensor, start, end in layout.spans():
        with area[start:end] as room:
            by_key[tensor.name].fill(room)


@contextlib.contextmanager
def _room(nbytes: int) -> Iterator[memoryview]:
    """Memory that is a file's, so that it need not stay in memory."""
    with tempfile.TemporaryFile() as file:
        file.truncate(nbytes)
        with mmap.mmap(file.fileno(), nbytes) as mapped, memoryview(mapped) as area:
            yield area


def under(prefix: str, tensors: Sequence[Incoming]) -> list[Incoming]:
    """The same tensors with keys that begin with `prefix`."""
    return [replace(one, key=prefix + one.key) for one in tensors]
