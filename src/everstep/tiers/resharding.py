"""Loading through torch.distributed.checkpoint: each rank reads the bytes that it needs.

Theory of operation. DCP asks for boxes of pieces: what a piece that some rank saved, and a piece
that this rank holds, have in common. A box whose rows lie one behind the other in the part is one
range of bytes; another one is read from its first byte to its last, or, where large gaps lie
between, run by run. A range that is just as the destination has it goes right into it; others go
through memory of our own, a bounded part of all at a time.

Which checkpoint is loaded, one rank decides: each finds the newest by itself, the coordinator's
word goes out with the plans, and who has found another one (a save has just been committed) plans
anew. `newest.py` does that first, and takes an older step when a part proves lost to any rank.

Values come back as data. The default planner would unpickle what it is handed, so they are put
into the state here; a planner that wants to see them gets them as it expects.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from everstep.errors import PeerError
from everstep.snapshot import BLOCK_BYTES
from everstep.tiers import boxes, tensors, values
from everstep.tiers.catalog import Checkpoint, Piece, check_piece
from everstep.tiers.find import Told
from everstep.tiers.load import Opened, Wanted, open_newest, open_told
from everstep.tiers.receipt import Receipt
from everstep.tiers.settings import TierSettings
from everstep.tiers.stack import Stack
from everstep.tiers.steps import step_of
from everstep.tiers.store import Refused

_BATCH_BYTES = 256 << 20
"""Memory of our own that is in use at a time, unless one range is larger."""


def runs(
    shape: Sequence[int],
    place: Sequence[int],
    size: Sequence[int],
    item_bytes: int,
    *,
    far: int = BLOCK_BYTES,
) -> tuple[list[tuple[int, int]], bool]:
    """Where the box of `size` at `place` lies in a tensor of `shape`: first byte and length of each
    run; and whether they are dense: the box and nothing else. Otherwise it is one run, from the
    first byte of the box to its last. Runs are apart where `far` bytes or more lie between. Nothing
    is empty. Pure."""
    stride = boxes.strides(shape, item_bytes)
    whole = len(shape)  # dimensions from here on are taken whole
    while whole and size[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)  # a run covers one index of each dimension before this one
    length = math.prod(size[outer:]) * item_bytes
    first = sum(at * step for at, step in zip(place, stride, strict=True))
    count = math.prod(size[:outer])
    if count == 1:
        return [(first, length)], True
    gap = stride[outer - 1] - length
    if gap >= far:
        return [(start, length) for start in _starts(first, size[:outer], stride)], True
    last = first + sum((n - 1) * step for n, step in zip(size[:outer], stride[:outer], strict=True))
    return [(first, last + length - first)], False


def _starts(first: int, counts: Sequence[int], stride: Sequence[int]) -> Iterator[int]:
    if not counts:
        yield first
        return
    for index in range(counts[0]):
        yield from _starts(first + index * stride[0], counts[1:], stride[1:])


class TieredReader(StorageReader):
    """Loads through DCP from the tiers of `settings`: the newest whole checkpoint, or that of
    `step`, or of `checkpoint_id`. `told`: what one rank has decided for all (`find.decide`).

    `receipt` says afterwards where it came from."""

    def __init__(
        self, settings: TierSettings, *, step: int | None = None, told: Told | None = None
    ) -> None:
        super().__init__()
        self.settings = settings
        self._step, self._told = step, told
        self._stack = Stack(settings)
        self._opened: Opened | None = None
        self._pieces: dict[str, dict[tuple[int, ...], Piece]] = {}
        self.receipt: Receipt | None = None

    # ------------------------------------------------------------ for DCP

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """A load begins."""
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def read_metadata(self, *args: Any, **ignored: Any) -> Metadata:
        """What the checkpoint holds, as DCP has it. Blocks on the tiers. Raises StateLost."""
        if self._told is not None:
            return self._open(open_told(self._stack.tiers(), self._told, deadline_s=self._deadline))
        return self._open(
            open_newest(self._stack.tiers(), step=self._step, deadline_s=self._deadline)
        )

    def look(self) -> Checkpoint:
        """The record of the checkpoint that is loaded. As `read_metadata`."""
        self.read_metadata()
        return self._open_now.checkpoint

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **ignored: Any
    ) -> None:
        """Nothing is to be done."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with the checkpoint that it is for."""
        plan.storage_data = self._open_now.told
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """All plans are for the coordinator's checkpoint."""
        return [LoadPlan(p.items, self._open_now.told, p.planner_data) for p in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan says. Blocks until it is done. Raises PartLost, PeerError."""
        plan = self._follow(plan, planner)
        try:
            self._read(plan, planner)
            self.receipt = self._open_now.receipt
        finally:
            self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        """Never chosen by its name."""
        return False

    def close(self) -> None:
        """Let go of everything; after a load there is nothing left."""
        if self._opened is not None:
            self._opened.close()
        self._opened = None
        self._stack.close()

    # ------------------------------------------------------------ which checkpoint

    @property
    def _deadline(self) -> float:
        return self.settings.deadline_s

    @property
    def _open_now(self) -> Opened:
        assert self._opened is not None, "DCP reads the metadata first"
        return self._opened

    def _open(self, opened: Opened) -> Metadata:
        if self._opened is not None:
            self._opened.close()
        self._opened = opened
        checkpoint = opened.checkpoint
        self._pieces = {
            key: {piece.place: piece for piece in whole.pieces}
            for key, whole in checkpoint.tensors.items()
        }
        return metadata_of(checkpoint)

    def _follow(self, plan: LoadPlan, planner: LoadPlanner) -> LoadPlan:
        """The plan for the coordinator's checkpoint, where it is another than was found here."""
        told = plan.storage_data
        if told == self._open_now.told:
            return plan
        if not isinstance(told, Told) or not isinstance(planner, DefaultLoadPlanner):
            raise PeerError(
                f"this rank found step {self._open_now.told.step} and the coordinator another "
                "checkpoint, which was just saved; load again, or name the step"
            )
        opened = open_told(self._stack.tiers(), told, deadline_s=self._deadline)
        planner.metadata = self._open(opened)
        return planner.finish_plan(planner.create_local_plan())

    # ------------------------------------------------------------ bytes

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        items = [
            item
            for item in plan.items
            if item.type != LoadItemType.BYTE_IO and item.lengths.numel()
        ]
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                key = item.storage_index.fqn
                _give(planner, item, values.decode(self._value(key), tensors.word))
        spans: dict[int, dict[str, tuple[int, Any]]] = {
            self._piece(item).rank: {} for item in items
        }
        for rank, where in spans.items():
            for tensor, start, _ in self._open_now.layout(rank).spans():
                where[tensor.name] = start, tensor
        batch, taken = _Batch(self._open_now), 0
        for item in sorted(items, key=lambda item: self._order(item, spans)):
            piece = self._piece(item)
            start, tensor = spans[piece.rank].get(piece.name, (0, None))
            key = item.storage_index.fqn
            whole = self._open_now.checkpoint.tensors[key]
            check_piece(key, whole, piece, tensor)
            dtype = tensors.dtype_named(whole.dtype)
            if dtype.itemsize != tensor.item_bytes:
                raise Refused(
                    f"{key!r}: rank {piece.rank}'s part has {tensor.item_bytes} bytes for each "
                    f"element of {dtype}, which has {dtype.itemsize}"
                )
            taken += batch.add(item, piece, start, dtype, planner)
            if taken >= _BATCH_BYTES:
                batch.read()
                taken = 0
        batch.read()

    def _order(self, item: ReadItem, spans: dict[int, dict[str, tuple[int, Any]]]) -> Any:
        """Neighbours in a part are read together: they share blocks."""
        piece = self._piece(item)
        return piece.rank, spans[piece.rank].get(piece.name, (0, None))[0]

    def _piece(self, item: ReadItem) -> Piece:
        index = item.storage_index
        place = tuple(index.offset or ())
        try:
            return self._pieces[index.fqn][place]
        except KeyError:
            raise Refused(f"no piece of {index.fqn!r} begins at {place}") from None

    def _value(self, key: str) -> bytes:
        return self._open_now.checkpoint.values[key]


class _Batch:
    """Ranges that are read together, and what is done with them afterwards."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._wanted: list[Wanted] = []
        self._then: list[Callable[[], None]] = []

    def add(
        self, item: ReadItem, piece: Piece, start: int, dtype: torch.dtype, planner: LoadPlanner
    ) -> int:
        """Add what an item needs. Returns the bytes of our own memory that it takes."""
        target = planner.resolve_tensor(item).detach()
        ranges, dense = runs(piece.shape, item.storage_offsets, item.lengths, dtype.itemsize)
        length = sum(each for _, each in ranges)
        area = tensors.direct(target, dtype) if dense else None
        taken = 0
        if area is None:
            room = bytearray(length)
            area, taken = memoryview(room), length
            self._then.append(lambda: _put(target, room, dtype, piece.shape, item.lengths, dense))
        at = 0
        for first, each in ranges:
            self._wanted.append(Wanted(piece.rank, start + first, area[at : at + each]))
            at += each
        self._then.append(lambda: planner.commit_tensor(item, target))
        return taken

    def read(self) -> None:
        """Read all of it, and put it where it belongs."""
        self._opened.read_many(self._wanted)
        for step in self._then:
            step()
        self._wanted, self._then = [], []


def _put(
    target: torch.Tensor,
    room: bytearray,
    dtype: torch.dtype,
    shape: Sequence[int],
    size: Sequence[int],
    dense: bool,
) -> None:
    """Copy a box from what was read of its piece into `target`."""
    flat = tensors.over(room).view(dtype)
    if dense:
        tensors.put(target, flat.view(tuple(size)))
        return
    strides = boxes.strides(shape)
    tensors.put(target, flat.as_strided(tuple(size), strides))


def _give(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """A value, into the state that is loaded."""
    own = type(planner).load_bytes is not DefaultLoadPlanner.load_bytes
    if not isinstance(planner, DefaultLoadPlanner) or own:
        data = io.BytesIO()  # such a planner unpickles: what was made here, of plain data
        torch.save(value, data)
        data.seek(0)
        planner.load_bytes(item, data)
    elif planner.flatten_state_dict:
        key = item.dest_index.fqn
        set_element(planner.original_state_dict, planner.mappings[key], value)
    else:
        planner.state_dict[item.dest_index.fqn] = value


def metadata_of(checkpoint: Checkpoint) -> Metadata:
    """What DCP wants to know of a checkpoint."""
    found: dict[str, Any] = {key: BytesStorageMetadata() for key in checkpoint.values}
    for key, whole in checkpoint.tensors.items():
        found[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=tensors.dtype_named(whole.dtype)),
            size=torch.Size(whole.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(p.place), sizes=torch.Size(p.shape))
                for p in whole.pieces
            ],
        )
    paths = {key: checkpoint.paths.get(key, (key,)) for key in found}
    return Metadata(state_dict_metadata=found, planner_data=paths)
