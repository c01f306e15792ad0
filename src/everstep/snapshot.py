"""The one format of a copy: a safetensors file, and a manifest that says what it is a copy of.

Theory of operation. A snapshot is the bytes of one rank's tensors at one step, laid out as a
safetensors file: in shared memory, on the wire and on disk the same, so that an upload is a byte
copy and a load is a map. safetensors has no word for some of torch's types, so every tensor stands
there as bytes (U8), and the manifest has its type. Tensors lie in order of their elements' size,
the largest first: then each is aligned to its elements with no hole between them, as safetensors
asks.

The manifest is JSON: whose copy it is, what tensors are in it, what part of the whole each is, and
one digest for each block of `BLOCK_BYTES` of the file, header included. Blocks, not tensors, carry
the digests, because they are what is moved: a transfer that is cut keeps the blocks that have
arrived, and nothing is digested twice.

Nothing here believes what it reads. A manifest is accepted if its tensors fill the file exactly,
one after the other; a file's header, if it is, byte for byte, the one that the accepted tensors
make. So a header that names a tensor twice, overlaps, or reaches outside has no way to be accepted.
Counts and lengths are capped before memory is taken for them.

What it doesn't know: torch (agents read this), where a snapshot is kept, and whether it is the
newest.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
import xxhash
from msgspec import Meta

from everstep.errors import EverstepError

FORMAT = 1
BLOCK_BYTES = 4 << 20
"""What one digest covers, and what a transfer asks for at a time: large enough that a request costs
nothing, small enough that a cut loses little and a digest finds its bytes in the cache."""

MAX_HEADER_BYTES = 100_000_000
"""safetensors' own cap."""
MAX_MANIFEST_BYTES = 256 << 20
MAX_TENSORS = 1 << 20
MAX_BYTES = 1 << 46
"""Of one snapshot: 64 TiB, above any host's memory, and far below where sums overflow."""

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64  # of the first tensor in the file: a cache line, and the widest vector load
_DIGEST = r"^[0-9a-f]{32}\Z"

Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
Sizes: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=64)]
Digest: TypeAlias = Annotated[str, Meta(pattern=_DIGEST)]


class SnapshotError(EverstepError):
    """Bytes that are no snapshot, or not the one that their manifest describes."""


class Tensor(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One tensor of a rank, or this rank's part of one.

    `dtype` as `str` of torch's has it; `item_bytes`: the size of an element. `shape`: of what is
    held here. `global_shape`: of the whole tensor, where this is a part of it; `place`: where in
    the whole the part begins. Both are empty for a whole tensor."""

    name: Name
    dtype: Annotated[str, Meta(min_length=1, max_length=64)]
    item_bytes: Annotated[int, Meta(ge=1, le=64)]
    shape: Sizes
    global_shape: Sizes = ()
    place: Sizes = ()

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.item_bytes


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose state a snapshot is, and when: after `sections` sections after step `step`, made in
    `generation`. `shard`: the key that replicas of the same part of the state have alike."""

    run_id: Annotated[str, Meta(min_length=1, max_length=64)]
    rank: Count
    world: Annotated[int, Meta(ge=1, le=1 << 24)]
    shard: Name
    step: Count
    sections: Count = 0
    generation: Count = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All about one snapshot. `tensors`: in the order of their bytes. `nbytes`: of the file.
    `blocks`: XXH3 (128 bits, hexadecimal) of each `block_bytes` of the file, the last one shorter.
    """

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)] = FORMAT
    about: About
    tensors: Annotated[tuple[Tensor, ...], Meta(max_length=MAX_TENSORS)]
    nbytes: Annotated[int, Meta(ge=_LENGTH.size, le=MAX_BYTES)]
    block_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 30)] = BLOCK_BYTES
    blocks: tuple[Digest, ...]

    @property
    def digest(self) -> str:
        """One digest over all bytes of the snapshot: equal for replicas that are equal."""
        return xxhash.xxh3_128_hexdigest("".join(self.blocks).encode())


class _Span(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor in safetensors' header; offsets count from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Layout:
    """Where each tensor of a snapshot lies. Made before its memory is taken.

    `tensors`: in the order of their bytes in the file. `header`: the file's first bytes. `nbytes`:
    of the whole file. Raises SnapshotError for two tensors of one name, a part that does not fit
    into its whole, and what exceeds the caps of this module."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) > MAX_TENSORS:
            raise SnapshotError(f"a snapshot of {len(tensors)} tensors exceeds {MAX_TENSORS}")
        self.tensors = tuple(sorted(tensors, key=lambda tensor: -tensor.item_bytes))
        spans: dict[str, _Span] = {}
        end = 0
        for tensor in self.tensors:
            _check_tensor(tensor)
            if tensor.name in spans:
                raise SnapshotError(f"two tensors of a snapshot are named {tensor.name!r}")
            start, end = end, end + tensor.nbytes
            if end > MAX_BYTES:
                raise SnapshotError(f"a snapshot with {tensor.name!r} exceeds {MAX_BYTES} bytes")
            spans[tensor.name] = _Span(
                dtype="U8", shape=(tensor.nbytes,), data_offsets=(start, end)
            )
        self.header = _header(spans)
        self.nbytes = len(self.header) + end
        if self.nbytes > MAX_BYTES:
            raise SnapshotError(f"a snapshot of {self.nbytes} bytes exceeds {MAX_BYTES}")

    def spans(self) -> Iterator[tuple[Tensor, int, int]]:
        """Each tensor with the first byte of it in the file and the one behind its last."""
        end = len(self.header)
        for tensor in self.tensors:
            start, end = end, end + tensor.nbytes
            yield tensor, start, end


def write(area: memoryview, layout: Layout, about: About, buffers: Mapping[str, Any]) -> Manifest:
    """Copy the header and every tensor into `area`, and return the manifest.

    `area`: writable, of exactly `layout.nbytes` bytes. `buffers`: by tensor's name, anything with
    the buffer protocol, contiguous, of that tensor's size. Blocks for a memory copy and a digest of
    all of it. Any thread; the manifest must be kept only after this has returned. Raises
    SnapshotError for a buffer that is missing or of another size."""
    if area.nbytes != layout.nbytes:
        raise SnapshotError(f"the area has {area.nbytes} bytes, the snapshot {layout.nbytes}")
    area[: len(layout.header)] = layout.header
    for tensor, start, end in layout.spans():
        if tensor.name not in buffers:
            raise SnapshotError(f"{tensor.name!r} of the layout has no buffer")
        with memoryview(buffers[tensor.name]) as source:
            if source.nbytes != end - start:
                raise SnapshotError(
                    f"{tensor.name!r} has {source.nbytes} bytes, its place {end - start}"
                )
            if end > start:
                with source.cast("B") as raw:
                    area[start:end] = raw
    return describe(area, layout, about)


def describe(
    area: memoryview, layout: Layout, about: About, *, block_bytes: int = BLOCK_BYTES
) -> Manifest:
    """The manifest of a snapshot whose bytes lie in `area`: what `write` does last, for those who
    have copied the tensors there themselves. Blocks for a digest of all."""
    return Manifest(
        about=about,
        tensors=layout.tensors,
        nbytes=layout.nbytes,
        block_bytes=block_bytes,
        blocks=tuple(
            digest(area[start:end]) for start, end in block_spans(layout.nbytes, block_bytes)
        ),
    )


def digest(data: memoryview) -> str:
    """XXH3 with 128 bits of `data`, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def block_spans(nbytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """The blocks of `nbytes` bytes: start and end of each."""
    for start in range(0, nbytes, block_bytes):
        yield start, min(start + block_bytes, nbytes)


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON. Raises SnapshotError when it is longer than `decode` would read."""
    text = msgspec.json.encode(manifest)
    if len(text) > MAX_MANIFEST_BYTES:
        raise SnapshotError(f"a manifest of {len(text)} bytes exceeds {MAX_MANIFEST_BYTES}")
    return text


def decode(text: bytes | memoryview) -> Manifest:
    """The manifest in `text`, checked by itself: its tensors fill its file, and it has a digest for
    each block. Raises SnapshotError for anything else."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise SnapshotError(f"a manifest of {len(text)} bytes exceeds {MAX_MANIFEST_BYTES}")
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SnapshotError(f"this is no manifest of a snapshot: {error}") from error
    check(manifest)
    return manifest


@functools.lru_cache(maxsize=64)
def layout_of(tensors: tuple[Tensor, ...]) -> Layout:
    """The layout of `tensors`, kept: copies of one rank are of the same tensors at each step."""
    return Layout(tensors)


def check(manifest: Manifest) -> Layout:
    """The layout that `manifest` describes. Raises SnapshotError when its tensors do not fill its
    file exactly, are not in order, or its digests are not as many as its blocks."""
    layout = layout_of(manifest.tensors)
    if layout.tensors != manifest.tensors:
        raise SnapshotError("the tensors of a manifest are not in the order of their bytes")
    if layout.nbytes != manifest.nbytes:
        raise SnapshotError(
            f"a manifest gives its file {manifest.nbytes} bytes, its tensors make {layout.nbytes}"
        )
    blocks = -(-manifest.nbytes // manifest.block_bytes)
    if len(manifest.blocks) != blocks:
        raise SnapshotError(f"a manifest has {len(manifest.blocks)} digests for {blocks} blocks")
    if manifest.about.rank >= manifest.about.world:
        raise SnapshotError(
            f"a manifest is of rank {manifest.about.rank} in a world of {manifest.about.world}"
        )
    return layout


def check_header(area: memoryview, layout: Layout) -> None:
    """Raises SnapshotError unless `area` begins with the header of `layout` and is as long."""
    if area.nbytes != layout.nbytes:
        raise SnapshotError(f"the file has {area.nbytes} bytes, its manifest {layout.nbytes}")
    if area[: len(layout.header)] != layout.header:
        raise SnapshotError("the file's header is not the one that its manifest describes")


def verify(manifest: Manifest, area: memoryview) -> None:
    """Raises SnapshotError unless `area` holds what `manifest` describes, to the last bit; the
    message names the tensors that the first wrong block touches. Blocks for a digest of all."""
    layout = check(manifest)
    if area.nbytes != layout.nbytes:
        raise SnapshotError(f"the file has {area.nbytes} bytes, its manifest {layout.nbytes}")
    spans = block_spans(manifest.nbytes, manifest.block_bytes)
    for (start, end), expected in zip(spans, manifest.blocks, strict=True):
        if digest(area[start:end]) != expected:
            about = manifest.about
            raise SnapshotError(
                f"the copy of rank {about.rank} at step {about.step} is corrupt in bytes {start} "
                f"to {end} ({touched(layout, start, end)}); take another copy of it"
            )
    check_header(area, layout)


def _header(spans: Mapping[str, _Span]) -> bytes:
    """Length and JSON, padded with blanks so that the first tensor is aligned."""
    text = msgspec.json.encode(spans)
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise SnapshotError(f"a header of {len(text)} bytes exceeds {MAX_HEADER_BYTES}")
    return _LENGTH.pack(len(text)) + text


def _check_tensor(tensor: Tensor) -> None:
    if tensor.name == "__metadata__":
        raise SnapshotError("no tensor can be named '__metadata__': safetensors keeps that name")
    whole, place, part = tensor.global_shape, tensor.place, tensor.shape
    if not whole and not place:
        return
    if not len(whole) == len(place) == len(part):
        raise SnapshotError(
            f"{tensor.name!r}: a part of shape {part} at {place} is in no tensor of shape {whole}"
        )
    if any(at + size > limit for at, size, limit in zip(place, part, whole, strict=True)):
        raise SnapshotError(
            f"{tensor.name!r}: a part of shape {part} at {place} reaches outside of {whole}"
        )


def touched(layout: Layout, start: int, end: int) -> str:
    """The tensors that share bytes with `start` to `end`, for a sentence."""
    names = [tensor.name for tensor, first, last in layout.spans() if first < end and last > start]
    if not names:
        return "its header"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
