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
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from everstep.errors import StateLost
from everstep.snapshot import Count, SnapshotError
from everstep.tiers.catalog import Checkpoint, Origin, Part, PartManifest, Sha256
from everstep.tiers.names import Attempt, part_of
from everstep.tiers.receipt import Receipt, Refusal
from everstep.tiers.signing import Standing
from everstep.tiers.store import Missing, Refused, Store, StoreError
from everstep.tiers.suspects import Suspects, named

DAMAGED = (Missing, Refused, SnapshotError)
"""Errors that say that something is gone or wrong, and not only out of reach."""
_STANDINGS: tuple[Standing, ...] = ("valid", "unchecked", "absent")


class Readable(Protocol):
    """The reading half of `series.Series`."""

    @property
    def store(self) -> Store: ...

    @property
    def name(self) -> str: ...

    def steps(self, *, deadline_s: float) -> list[int]:
        """Steps that have a record. Raises StoreError."""
        ...

    def examine(self, step: int, *, deadline_s: float) -> tuple[Checkpoint, Standing]:
        """A step's record, and what its signature is worth. Raises StoreError."""
        ...

    def part_manifest(
        self, checkpoint: Checkpoint, rank: int, *, deadline_s: float
    ) -> PartManifest:
        """What a part holds, checked against the record. Raises StoreError."""
        ...


@runtime_checkable
class Abandoning(Protocol):
    """A series in which a checkpoint can be set aside."""

    def set_aside(self, checkpoint: Checkpoint, *, deadline_s: float) -> None:
        """As `Series.set_aside`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place where copies may be. `name`: `memory` or `durable`. `request_bytes`: what one request
    asks for at most; `lanes`: requests at a time."""

    name: str
    series: Readable
    request_bytes: int = 16 << 20
    lanes: int = 1

    @classmethod
    def memory(cls, series: Readable) -> Tier:
        """The memory of the hosts: a copy and its digest take a processor each."""
        return cls(name="memory", series=series, lanes=2)

    @classmethod
    def durable(cls, series: Readable) -> Tier:
        """A file system or an object store."""
        return cls(name="durable", series=series, lanes=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A copy of a part: in `store`, under the keys of `attempt`. `single`: that store shows one of
    several copies that the tier has."""

    tier: Tier
    store: Store
    attempt: Attempt
    single: bool = False


class Told(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the deciding rank tells the others. `newest`: the newest step that any tier says it
    has. `content`: of the checkpoint. `aside`: copies that nobody is to take
    (`suspects.named`)."""

    series: Annotated[str, Meta(max_length=64)]
    step: Count
    newest: Count
    content: Sha256
    aside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint, and where its parts are, the nearest first. `standing`: of the best signature
    among its records. `refused`: what was seen and not taken on the way."""

    checkpoint: Checkpoint
    told: Told
    standing: Standing
    sources: dict[int, list[Source]]
    refused: list[Refusal] = field(default_factory=list)


class _Record(NamedTuple):
    tier: Tier
    checkpoint: Checkpoint
    standing: Standing


def content(checkpoint: Checkpoint) -> str:
    """SHA-256 of what a checkpoint holds, wherever it lies and whoever saved it. Pure."""
    bare = msgspec.structs.replace(checkpoint, attempt="0" * 16, origin=Origin())
    return hashlib.sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()


class NoneThere(StateLost):
    """Every tier answered, and none has a checkpoint: a training that begins."""


def decide(
    tiers: Sequence[Tier],
    *,
    step: int | None = None,
    without: Collection[int] = (),
    suspects: Suspects | None = None,
    deadline_s: float = 60.0,
) -> Found:
    """The newest step that is whole in the union of `tiers` (nearest first), or `step` alone.
    `without`: steps that are not to be taken; `suspects`: copies that are not. Blocks on the
    stores, `deadline_s` for each request. Raises NoneThere when every tier answers that it has
    none; StateLost, with all that was refused, when those that there are can't be had."""
    refused: list[Refusal] = []
    seen: set[int] = set()
    answering: list[Tier] = []
    for tier in tiers:
        try:
            seen.update(tier.series.steps(deadline_s=deadline_s))
            answering.append(tier)
        except StoreError as error:
            refused.append(Refusal(tier=tier.name, where=tier.series.store.where, why=str(error)))
    if not seen and not refused:
        raise NoneThere(f"no checkpoint is in {_places(tiers)}")
    wanted = sorted(seen, reverse=True) if step is None else [step] if step in seen else []
    for candidate in wanted:
        if candidate in without:
            continue
        aside = suspects.aside(candidate) if suspects is not None else ()
        for same in _by_content(_records(answering, candidate, refused, deadline_s)):
            found = _locate(answering, same, max(seen), aside, deadline_s)
            lacking = [part.rank for part in found.checkpoint.parts if not found.sources[part.rank]]
            if not lacking:
                found.refused[:0] = refused
                return found
            why = f"no tier has the parts of ranks {lacking[:8]} whole"
            gone = all(refusal.damaged for refusal in found.refused)
            refused += found.refused
            refused += [_refused(tier, candidate, why, damaged=gone) for tier, _, _ in same]
    what = "checkpoint" if step is None else f"checkpoint of step {step}"
    why = "; ".join(str(refusal) for refusal in refused) or "no other is there"
    raise StateLost(f"no whole {what} is left in {_places(tiers)}: {why}")


def follow(tiers: Sequence[Tier], told: Told, *, deadline_s: float = 60.0) -> Found:
    """The checkpoint that another rank has decided for. Parts that are not to be seen here have no
    source. Raises StateLost when no tier has its record here."""
    refused: list[Refusal] = []
    for same in _by_content(_records(tiers, told.step, refused, deadline_s)):
        found = _locate(tiers, same, told.newest, told.aside, deadline_s)
        if found.told == told:
            found.refused[:0] = refused
            return found
    why = "; ".join(str(refusal) for refusal in refused) or "none has its record"
    raise StateLost(
        f"the checkpoint of step {told.step} that the first rank decided for is not to be seen "
        f"from here in {_places(tiers)}: {why}"
    )


def damaged(receipt: Receipt) -> dict[int, str]:
    """Steps newer than the one that was loaded, of which all that was seen is gone or wrong, with
    the reasons: what a training that goes on from there sets aside. Pure."""
    passed: dict[int, list[Refusal]] = {}
    for refusal in receipt.refused:
        if refusal.step is not None and refusal.step > receipt.step:
            passed.setdefault(refusal.step, []).append(refusal)
    return {
        step: "; ".join(map(str, refusals))
        for step, refusals in passed.items()
        if all(refusal.damaged for refusal in refusals)
    }


def set_aside(
    tiers: Sequence[Tier], steps: Iterable[int], *, deadline_s: float = 60.0
) -> list[str]:
    """Make these steps exist no more, in every tier, so that they can be saved again. For one rank
    of a training that goes on from an older step, before it saves. Blocks on the stores. Returns
    what could not be set aside, for a warning."""
    failed = []
    for tier, step in itertools.product(tiers, steps):
        if not isinstance(tier.series, Abandoning):
            continue
        try:
            checkpoint, _ = tier.series.examine(step, deadline_s=deadline_s)
            tier.series.set_aside(checkpoint, deadline_s=deadline_s)
        except Missing:
            continue
        except StoreError as error:
            failed.append(f"step {step} in {tier.name} could not be set aside: {error}")
    return failed


def _records(
    tiers: Sequence[Tier], step: int, refused: list[Refusal], deadline_s: float
) -> list[_Record]:
    """What each tier has as the record of `step`; why others have none is added to `refused`."""
    records = []
    for tier in tiers:
        try:
            records.append(_Record(tier, *tier.series.examine(step, deadline_s=deadline_s)))
        except Missing:
            continue
        except StoreError as error:
            damaged = isinstance(error, DAMAGED)
            refused.append(_refused(tier, step, str(error), damaged=damaged))
    return records


def _by_content(records: list[_Record]) -> list[list[_Record]]:
    """The records, those of one content together, in the order of the nearest tier of each."""
    groups: dict[str, list[_Record]] = {}
    for record in records:
        groups.setdefault(content(record.checkpoint), []).append(record)
    return list(groups.values())


def _locate(
    tiers: Sequence[Tier],
    same: list[_Record],
    newest: int,
    aside: tuple[str, ...],
    deadline_s: float,
) -> Found:
    """Where the parts of one checkpoint are. `same`: its records, which have one content."""
    checkpoint = same[0].checkpoint
    refused: list[Refusal] = []
    sources: dict[int, list[Source]] = {part.rank: [] for part in checkpoint.parts}
    attempts = list(dict.fromkeys(record.checkpoint.attempt for record in same))
    for tier in tiers:
        own = [record.checkpoint.attempt for record in same if record.tier is tier]
        for name in sorted(attempts, key=lambda attempt: attempt not in own):
            attempt = Attempt(series=checkpoint.series, step=checkpoint.step, name=name)
            source = Source(tier=tier, store=tier.series.store, attempt=attempt)
            try:
                there, lacking = _sizes(source, checkpoint.parts, name in own, deadline_s)
            except StoreError as error:
                refused.append(_refused(tier, checkpoint.step, str(error)))
                continue
            if lacking:
                refused.append(_refused(tier, checkpoint.step, lacking, damaged=True))
            for part in checkpoint.parts:
                nbytes = there.get(part.rank)
                copy = named(tier.name, source.store.where, checkpoint.step, part.rank)
                if nbytes is not None and copy in aside:
                    why = "set aside: twice the training failed after a restore from it"
                elif nbytes == part.nbytes:
                    sources[part.rank].append(source)
                    continue
                elif nbytes is not None:
                    why = f"it has {nbytes} bytes, the record says {part.nbytes}"
                else:
                    continue
                refused.append(_refused(tier, checkpoint.step, why, rank=part.rank, damaged=True))
    told = Told(
        series=checkpoint.series,
        step=checkpoint.step,
        newest=newest,
        content=content(checkpoint),
        aside=aside,
    )
    return Found(
        checkpoint=checkpoint,
        told=told,
        standing=min((record.standing for record in same), key=_STANDINGS.index),
        sources=sources,
        refused=refused,
    )


def _sizes(
    source: Source, parts: Sequence[Part], committed: bool, deadline_s: float
) -> tuple[dict[int, int], str]:
    """The bytes of each rank's part that is there. Where the attempt is `committed` in that tier,
    what the listing lacks is asked for by name; and why the first such is not there."""
    sizes, lacking = {}, ""
    for entry in source.store.list(source.attempt.prefix, deadline_s=deadline_s):
        part = part_of(entry.key)
        if part is not None and part[2] == "safetensors":
            sizes[part[1]] = entry.nbytes
    if committed:
        for rank in (part.rank for part in parts if part.rank not in sizes):
            try:
                key = source.attempt.part(rank, "safetensors")
                sizes[rank] = source.store.size(key, deadline_s=deadline_s)
            except Missing as error:
                lacking = lacking or str(error)
    return sizes, lacking


def _refused(
    tier: Tier, step: int, why: str, *, rank: int | None = None, damaged: bool = False
) -> Refusal:
    where = tier.series.store.where
    return Refusal(tier=tier.name, where=where, step=step, rank=rank, why=why, damaged=damaged)


def _places(tiers: Sequence[Tier]) -> str:
    return " or ".join(f"{tier.name} ({tier.series.store.where})" for tier in tiers)
