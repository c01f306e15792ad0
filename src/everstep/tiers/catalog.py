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

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from everstep.snapshot import MAX_BYTES, Count, Name, Sizes

FORMAT = 1
MAX_MANIFEST_BYTES = 1 << 30
Sha256: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=10**5 - 1)]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all that is written here."""


class Part(Record):
    """What rank `rank` saved. `nbytes`: of its file; `manifest_sha256`: of its manifest's bytes."""

    rank: Rank
    nbytes: Annotated[int, Meta(ge=8, le=MAX_BYTES)]
    manifest_sha256: Sha256


class Piece(Record):
    """A box of a tensor: `shape` at `place` of the whole, in rank's part, under `name` there."""

    rank: Rank
    name: Name
    place: Sizes
    shape: Sizes


class Whole(Record):
    """A tensor of the checkpoint, put together from `pieces`, which cover it and do not overlap.
    `dtype`: as `str` of torch's has it, `torch.bfloat16`."""

    dtype: Annotated[str, Meta(min_length=1, max_length=64)]
    shape: Sizes
    pieces: tuple[Piece, ...]


class Origin(Record):
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


class Checkpoint(Record):
    """The manifest of a checkpoint. `attempt`: which attempt's parts it is made of. `values`: what
    is no tensor, by its key, as `values.py` has encoded it; keys of `values` and `tensors` are
    those of the flattened state, and no key is in both."""

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)] = FORMAT
    series: Annotated[str, Meta(max_length=64)]
    step: Count
    attempt: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    parts: tuple[Part, ...]
    tensors: dict[Name, Whole]
    values: dict[Name, bytes]
    origin: Origin = Origin()


def encode(checkpoint: Checkpoint) -> bytes:
    """As JSON."""
    return msgspec.json.encode(checkpoint)
