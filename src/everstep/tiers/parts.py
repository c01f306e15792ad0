"""What of DCP's plans lies where: in a rank's part, and in the checkpoint's manifest.

It does not know when a save is made, nor what the ranks agree on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from everstep import snapshot
from everstep.errors import UserError
from everstep.tiers import catalog, tensors, values
from everstep.tiers.lanes import Contents
from everstep.tiers.origin import origin

MAX_KEY_CHARS = 1024


def lay_out(
    items: Sequence[WriteItem], planner: SavePlanner, rank: int
) -> tuple[list[WriteResult], snapshot.Layout, dict[str, torch.Tensor]]:
    """What of a plan is written where: the results for the coordinator, the part's layout, and its
    tensors by name. Tensors that are the same memory are written once."""
    results: list[WriteResult] = []
    sources: dict[str, torch.Tensor] = {}
    described: list[snapshot.Tensor] = []
    written: dict[Any, str] = {}
    for item in items:
        index = item.index
        if item.type == WriteItemType.BYTE_IO:
            data = values.encode(_object(planner, index), index.fqn)
            results.append(WriteResult(index=index, size_in_bytes=len(data), storage_data=data))
            continue
        source = tensors.plain(planner.resolve_data(item), index.fqn)  # type: ignore[arg-type]
        chunk, place = _chunk(item, source), (rank, "")
        if source.numel():
            same = (
                source.data_ptr(),
                source.dtype,
                source.shape,
                source.stride(),
                source.is_conj(),
            )
            name = written.setdefault(
                (*same, source.is_neg(), source.device), _name(index, sources)
            )
            place = rank, name
            if name not in sources:
                sources[name] = source
                described.append(
                    snapshot.Tensor(
                        name=name,
                        dtype=str(source.dtype),
                        item_bytes=source.element_size(),
                        shape=tuple(source.shape),
                        global_shape=tuple(item.tensor_data.size),  # type: ignore[union-attr]
                        place=tuple(chunk.offsets),
                    )
                )
        results.append(WriteResult(index=index, size_in_bytes=source.nbytes, storage_data=place))
    return results, snapshot.layout_of(tuple(described)), sources


def _chunk(item: WriteItem, source: torch.Tensor) -> Any:
    """Where in the whole an item lies. Raises UserError where its plan and its tensor differ."""
    planned = item.tensor_data
    assert planned is not None
    said = tuple(planned.chunk.sizes), planned.properties.dtype
    if said != (tuple(source.shape), source.dtype):
        raise UserError(
            f"{item.index.fqn}: its plan says {said[0]} of {said[1]}, and the tensor is "
            f"{tuple(source.shape)} of {source.dtype}; a planner that converts must say so in both"
        )
    return planned.chunk


def _name(index: MetadataIndex, taken: Mapping[str, Any]) -> str:
    """What a piece is called in its part: as its tensor, with its place where a rank has more of
    one."""
    if index.fqn not in taken and index.fqn != "__metadata__":
        return index.fqn
    return f"{len(taken)}:{index.fqn}"[:MAX_KEY_CHARS]


def _object(planner: SavePlanner, index: MetadataIndex) -> Any:
    """A value as the state has it. Raises UserError for a planner that can only pickle it."""
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise UserError(
            f"{type(planner).__qualname__} hands out {index.fqn!r} as a pickle, and no "
            "checkpoint holds one; derive it from DefaultSavePlanner"
        )
    return lookup(index)


def contents_of(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]], about: Mapping[str, Any]
) -> Contents:
    """What the committer needs, of DCP's metadata and of what all ranks have written."""
    pieces: dict[str, list[catalog.Piece]] = {}
    found: dict[str, bytes] = {}
    for result in (each for some in results for each in some):
        fqn, data = result.index.fqn, result.storage_data
        if isinstance(data, bytes):
            found[fqn] = data
            continue
        rank, name = data
        whole = metadata.state_dict_metadata[fqn]
        assert isinstance(whole, TensorStorageMetadata)
        chunk = _chunk_at(whole, result.index)
        if name:
            pieces.setdefault(fqn, []).append(
                catalog.Piece(
                    rank=rank, name=name, place=tuple(chunk.offsets), shape=tuple(chunk.sizes)
                )
            )
    wholes = {
        fqn: catalog.Whole(
            dtype=str(whole.properties.dtype),
            shape=tuple(whole.size),
            pieces=tuple(sorted(pieces.get(fqn, ()), key=lambda piece: piece.place)),
        )
        for fqn, whole in metadata.state_dict_metadata.items()
        if not isinstance(whole, BytesStorageMetadata)
    }
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return Contents(
        world=len(results),
        tensors=wholes,
        values=found,
        paths={fqn: tuple(path) for fqn, path in paths.items() if tuple(path) != (fqn,)},
        origin=lambda: origin(world=len(results), **about),
    )


def _chunk_at(whole: TensorStorageMetadata, index: MetadataIndex) -> Any:
    """The chunk that an item wrote."""
    if index.index is not None and index.index < len(whole.chunks):
        return whole.chunks[index.index]
    offset = tuple(index.offset or (0,) * len(whole.size))
    return next(chunk for chunk in whole.chunks if tuple(chunk.offsets) == offset)
