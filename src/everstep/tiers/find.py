"""What exists, over all tiers: the newest checkpoint that is whole in their union.

Theory of operation. A tier is a series in a store. Each says which steps it has a record of; the
newest step is taken whose every part lies, with the size that its record names, in some tier. The
same checkpoint in two tiers is one if its *content* is: parts, tensors and values, by SHA-256 over
the record without its attempt and origin. Then any of its attempts, in any tier, is a source for
any of its parts. So a checkpoint whose record is in one tier and whose parts lie in two is whole.

One rank decides (`decide`) and tells the others (`Told`, plain data, how is the caller's affair);
they `follow` it, looking only for what they were told. So ranks that see tiers differently (a
listing that lags, another host's memory) never load two steps.

A listing may lag behind what was put: a part that is not in it is asked for by name before it
counts as missing.

It does not read parts (`load.py`), so it does not know of bytes that are wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from everstep import snapshot
from everstep.snapshot import Count
from everstep.tiers.catalog import Checkpoint, Sha256
from everstep.tiers.names import Attempt
from everstep.tiers.receipt import Refusal
from everstep.tiers.store import Store

MAX_TOLD_BYTES = 1 << 20


class Readable(Protocol):
    """The reading half of `series.Series`."""

    @property
    def store(self) -> Store: ...

    @property
    def name(self) -> str: ...

    def steps(self) -> list[int]:
        """Steps that have a record. Raises StoreError."""
        ...

    def read(self, step: int) -> Checkpoint:
        """A step's record, its signature checked. Raises StoreError, SnapshotError."""
        ...

    def part_manifest(self, checkpoint: Checkpoint, rank: int) -> snapshot.Manifest:
        """What a part holds, checked against the record. Raises StoreError, SnapshotError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place where copies may be. `name`: `memory` or `durable`. `request_bytes`: what one request
    asks for at most, and `lanes`: requests at a time; one block and one for what is memory here."""

    name: str
    series: Readable
    request_bytes: int = snapshot.BLOCK_BYTES
    lanes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A copy of a part: in `store`, under the keys of `attempt`."""

    tier: Tier
    store: Store
    attempt: Attempt


class Told(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the deciding rank tells the others. `newest`: the newest step that any tier says it
    has. `content`: of the checkpoint."""

    series: Annotated[str, Meta(max_length=64)]
    step: Count
    newest: Count
    content: Sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint, and where its parts are, the nearest first. `refused`: what was seen and not
    taken on the way."""

    checkpoint: Checkpoint
    told: Told
    sources: dict[int, list[Source]]
    refused: list[Refusal] = field(default_factory=list)


def content(checkpoint: Checkpoint) -> str:
    """SHA-256 of what a checkpoint holds, wherever it lies and whoever saved it. Pure."""
    bare = msgspec.structs.replace(checkpoint, attempt="0" * 16, origin=type(checkpoint.origin)())
    return hashlib.sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()


def decide(
    tiers: Sequence[Tier],
    *,
    step: int | None = None,
    without: Collection[int] = (),
    deadline_s: float = 60.0,
) -> Found:
    """The newest step that is whole in the union of `tiers` (nearest first), or `step` alone.
    `without`: steps that are not to be taken. Blocks on the stores, `deadline_s` for each request.
    Raises StateLost, with all that was refused, when there is none."""
    raise NotImplementedError


def follow(tiers: Sequence[Tier], told: Told, *, deadline_s: float = 60.0) -> Found:
    """The checkpoint that another rank has decided for. Raises StateLost when no tier has it here;
    parts that are not to be seen here are left out of `sources`."""
    raise NotImplementedError
