"""What a checkpoint is, as data: its manifest, and what each rank's part holds.

Theory of operation. A checkpoint is the parts of all ranks and one manifest. A part is a snapshot
(`everstep.snapshot`: a safetensors file and its own manifest with digests of its blocks). The
checkpoint's manifest says which parts, each with a SHA-256 of the part's manifest; where each piece
of each tensor lies; the values that are no tensors, as data; and where it all came from. So whoever
trusts the manifest (it is signed, `signing.py`) can trust every byte below it as far as the digests
go, and nothing in it is a path, a pickle or code.

Everything here is capped and checked as it is decoded: a manifest from a bucket is a stranger's
text until then.

It does not know where a checkpoint is kept, nor torch: dtypes are names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from everstep import snapshot
from everstep.snapshot import MAX_BYTES, Count, Name, Sizes
from everstep.tiers import boxes
from everstep.tiers.store import Refused

FORMAT = 1
MAX_MANIFEST_BYTES = 1 << 30
"""Of a checkpoint's manifest and of a part's: above it nothing is read into memory."""
Sha256: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=10**5 - 1)]


_SPARE_ELEMENTS = 1000  # of a list, that have no key: empty dictionaries

_Kind = TypeVar("_Kind", bound="Record")


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all that is written here."""


class PartManifest(Record, kw_only=True):
    """What is put beside a rank's part. `block_sha256`: of each block of the snapshot, where the
    checkpoint is signed: XXH3 tells a flipped bit, SHA-256 also a forger. Else empty."""

    snapshot: snapshot.Manifest
    block_sha256: tuple[Sha256, ...] = ()


class Part(Record, kw_only=True):
    """What rank `rank` saved. `nbytes`: of its file; `manifest_sha256`: of its manifest's bytes."""

    rank: Rank
    nbytes: Annotated[int, Meta(ge=8, le=MAX_BYTES)]
    manifest_sha256: Sha256


class Piece(Record, kw_only=True):
    """A box of a tensor: `shape` at `place` of the whole, in rank's part, under `name` there."""

    rank: Rank
    name: Name
    place: Sizes
    shape: Sizes


class Whole(Record, kw_only=True):
    """A tensor of the checkpoint, put together from `pieces`, which cover it and do not overlap.
    `dtype`: as `str` of torch's has it, `torch.bfloat16`."""

    dtype: Annotated[str, Meta(min_length=1, max_length=64)]
    shape: Sizes
    pieces: tuple[Piece, ...]


class Origin(Record, kw_only=True):
    """Where a checkpoint comes from. Empty where it is not known. `mesh`: names and sizes of the
    dimensions; `packages`: versions by name; `config`: what the script gave, as data; `parent`: the
    checkpoint that its training began from, as `series/step`."""

    run_id: str = ""
    commit: str = ""
    world: Annotated[int, Meta(ge=1, le=1 << 24)] = 1
    mesh: dict[str, int] = {}
    packages: dict[str, str] = {}
    config: dict[str, Any] = {}
    parent: str = ""
    written_s: float = 0.0
    """Wall time, seconds since 1970. For a person."""


class Checkpoint(Record, kw_only=True):
    """The manifest of a checkpoint. `attempt`: which attempt's parts it is made of. `values`: what
    is no tensor, by its key, as `values.py` has encoded it; keys of `values` and `tensors` are
    those of the flattened state, and no key is in both. `paths`: where a key stands in the nested
    state, for those to whom the key does not say it."""

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)] = FORMAT
    series: Annotated[str, Meta(max_length=64)]
    step: Count
    attempt: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    parts: tuple[Part, ...]
    tensors: dict[Name, Whole]
    values: dict[Name, bytes]
    paths: dict[Name, Annotated[tuple[str | Count, ...], Meta(max_length=100)]] = {}
    origin: Origin = Origin()


def encode(checkpoint: Checkpoint) -> bytes:
    """As JSON. Raises Refused when it is longer than `decode` would read."""
    return _capped(msgspec.json.encode(checkpoint))


def decode(text: bytes | memoryview) -> Checkpoint:
    """The checkpoint whose manifest is `text`, checked by itself. Raises Refused."""
    checkpoint = _decode(text, Checkpoint)
    check(checkpoint)
    return checkpoint


def encode_part(manifest: PartManifest) -> bytes:
    """As JSON. Raises Refused when it is longer than `decode_part` would read."""
    return _capped(msgspec.json.encode(manifest))


def decode_part(text: bytes | memoryview) -> PartManifest:
    """A part's manifest, checked by itself. Raises Refused."""
    manifest = _decode(text, PartManifest)
    try:
        snapshot.check(manifest.snapshot)
    except snapshot.SnapshotError as error:
        raise Refused(f"a part's manifest contradicts itself: {error}") from error
    if manifest.block_sha256 and len(manifest.block_sha256) != len(manifest.snapshot.blocks):
        raise Refused(
            f"a part's manifest has {len(manifest.block_sha256)} SHA-256 digests for "
            f"{len(manifest.snapshot.blocks)} blocks"
        )
    return manifest


def check_block(manifest: PartManifest, index: int, data: memoryview, *, signed: bool) -> None:
    """Raises Refused unless `data` is the `index`-th block of the part. `signed`: by SHA-256 too,
    which must then be there. Blocks for a digest of it."""
    about = manifest.snapshot.about
    start = index * manifest.snapshot.block_bytes
    where = f"rank {about.rank}'s part of step {about.step}, bytes {start} to {start + len(data)}"
    if snapshot.digest(data) != manifest.snapshot.blocks[index]:
        raise Refused(f"{where}: the bytes are not those that were saved (XXH3)")
    if not signed:
        return
    if not manifest.block_sha256:
        raise Refused(f"{where}: nothing but XXH3 speaks for them, which anybody can forge")
    if hashlib.sha256(data).hexdigest() != manifest.block_sha256[index]:
        raise Refused(f"{where}: the bytes are not those that were signed (SHA-256)")


def check(checkpoint: Checkpoint) -> None:
    """Raises Refused unless the parts are of ranks 0 to n-1 in order, the pieces of each tensor
    are in them and make the whole of it without overlap, no key is both tensor and value, and no
    path leads far behind the end of a list."""
    ranks = len(checkpoint.parts)
    if [part.rank for part in checkpoint.parts] != list(range(ranks)):
        raise Refused(
            f"the parts of step {checkpoint.step} are not those of ranks 0 to {ranks - 1}"
        )
    both = checkpoint.tensors.keys() & checkpoint.values.keys()
    if both:
        raise Refused(f"{min(both)!r} is a tensor and a value in step {checkpoint.step}")
    for name, whole in checkpoint.tensors.items():
        for piece in whole.pieces:
            if piece.rank >= ranks:
                raise Refused(f"{name!r} has a piece on rank {piece.rank}, of {ranks} ranks")
        boxes.check_cover(name, whole.shape, [(p.place, p.shape) for p in whole.pieces])
    _check_paths(checkpoint)


def _check_paths(checkpoint: Checkpoint) -> None:
    """A list is made as long as the largest index says. It is as long as it has elements with
    keys, and a few without."""
    indices: dict[tuple[str | int, ...], set[int]] = {}
    for path in checkpoint.paths.values():
        for depth, step in enumerate(path):
            if isinstance(step, int):
                indices.setdefault(path[:depth], set()).add(step)
    for path, found in indices.items():
        if max(found) > 2 * len(found) + _SPARE_ELEMENTS:
            raise Refused(
                f"a path in step {checkpoint.step} leads to element {max(found)} of a "
                f"list with {len(found)} keys, at {path[:8]}"
            )


def check_pieces(checkpoint: Checkpoint, parts: Sequence[Mapping[str, snapshot.Tensor]]) -> None:
    """Raises Refused unless every piece is a tensor of its part. `parts`: the tensors of each
    rank's part by name."""
    for name, whole in checkpoint.tensors.items():
        for piece in whole.pieces:
            check_piece(name, whole, piece, parts[piece.rank].get(piece.name))


def check_piece(name: str, whole: Whole, piece: Piece, tensor: snapshot.Tensor | None) -> None:
    """Raises Refused unless `tensor`, of the part that has it, is this piece of `whole`."""
    if tensor is None:
        raise Refused(f"{name!r}: rank {piece.rank}'s part has no tensor {piece.name!r}")
    if (tensor.shape, tensor.dtype) != (piece.shape, whole.dtype):
        raise Refused(
            f"{name!r}: a piece of {whole.dtype} {piece.shape} is {tensor.dtype} {tensor.shape} in "
            f"rank {piece.rank}'s part"
        )


def _capped(text: bytes) -> bytes:
    if len(text) > MAX_MANIFEST_BYTES:
        raise Refused(f"a manifest of {len(text)} bytes exceeds {MAX_MANIFEST_BYTES}")
    return text


def _decode(text: bytes | memoryview, kind: type[_Kind]) -> _Kind:
    if len(text) > MAX_MANIFEST_BYTES:
        raise Refused(f"a manifest of {len(text)} bytes exceeds {MAX_MANIFEST_BYTES}")
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Refused(f"this is no manifest: {error}") from error
