"""What is in tiers: which checkpoints, what each is made of, and whether every byte is right.

Theory of operation. `survey` goes by records and listings: which checkpoint is in which tier, whose
parts are missing or of a wrong length, which attempts never became a checkpoint. `verify` reads a
checkpoint from one tier, and from there alone, to the last byte: record, signature, each part's
manifest, header and blocks; in memory, the copy of each host. It stops at nothing and returns all
that it found.

It does not know who asks, and changes nothing.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from everstep import snapshot
from everstep.tiers import catalog, plan
from everstep.tiers.catalog import Checkpoint, Part, PartManifest
from everstep.tiers.load import Copies
from everstep.tiers.names import Attempt
from everstep.tiers.places import LIST_S, Place, Places
from everstep.tiers.reading import Reader, attempt_of
from everstep.tiers.signing import Standing
from everstep.tiers.store import Missing, Refused, Store, StoreError

_NAMED = 8  # findings of one part, one by one
_DEADLINE_S = 120.0


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in one tier. `problem`: why it can't be loaded from there alone; empty when
    nothing is seen without reading it."""

    tier: str
    where: str
    signature: Standing | None
    problem: str = ""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint. `nbytes`: of its parts; `kept`: in which tiers, the nearest first. Counts are
    None where no tier's record can be read."""

    series: str
    step: int
    nbytes: int | None = None
    ranks: int | None = None
    tensors: int | None = None
    run_id: str = ""
    commit: str = ""
    written_s: float = 0.0
    kept: tuple[Kept, ...]


class Torn(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that is no checkpoint: under way, or left behind. `changed_s`: the last change, in
    seconds since 1970 by the store's clock; `failed`: a rank has said that it failed."""

    tier: str
    where: str
    series: str
    step: int
    attempt: str
    objects: int
    nbytes: int
    changed_s: float
    failed: bool


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong with a checkpoint in a tier. `rank`: of the part; None for all of
    it."""

    kind: Literal["missing", "corrupt", "unreachable"]
    where: str
    rank: int | None = None
    why: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` has found. `nbytes`: read and checked; whole when there is no finding."""

    tier: str
    where: str
    series: str
    step: int
    signature: Standing | None
    nbytes: int
    seconds: float
    findings: tuple[Finding, ...]


def survey(places: Places) -> tuple[list[Listed], list[Torn]]:
    """All checkpoints of the places, the newest of each series last, and the attempts that are
    none. Blocks on the stores. Raises StoreError."""
    listed, torn = [], []
    for series in places.all_series():
        kept: dict[int, list[tuple[Kept, Checkpoint | None]]] = {}
        for place in places.places:
            reader = places.reader(place, series)
            entries = place.store.list(f"{series}/", deadline_s=LIST_S)
            found = plan.sort(series, entries)
            owners = set()
            for step in found.commits:
                one, checkpoint = _kept(place, reader, step)
                kept.setdefault(step, []).append((one, checkpoint))
                owner = attempt_of(checkpoint) if checkpoint else _owner(reader, step)
                owners.add(owner)
            torn += [
                _torn(place, attempt, found)
                for attempt in sorted(found.attempts)
                if attempt not in owners
            ]
        listed += [_listed(series, step, kept[step]) for step in sorted(kept)]
    return listed, torn


def verify(place: Place, reader: Reader, step: int) -> Verdict:
    """Read all of a checkpoint from one tier. Blocks on the store. Raises nothing of the store's:
    it is in the findings."""
    began = time.monotonic()
    where = place.store.where
    try:
        checkpoint, standing = reader.examine(step, deadline_s=_DEADLINE_S)
    except StoreError as error:
        findings = [Finding(kind=_kind(error), where=where, why=str(error))]
        standing, nbytes = None, 0
    else:
        check = _Check(place, reader, checkpoint, signed=standing == "valid")
        lanes = place.source(reader).lanes
        with ThreadPoolExecutor(lanes, "everstep-verify") as pool:
            list(pool.map(check.part, checkpoint.parts))
        check.pieces()
        findings, nbytes = check.findings, check.nbytes
    return Verdict(
        tier=place.tier,
        where=where,
        series=reader.name,
        step=step,
        signature=standing,
        nbytes=nbytes,
        seconds=time.monotonic() - began,
        findings=tuple(sorted(findings, key=lambda one: (one.rank is not None, one.rank or 0))),
    )


class _Check:
    """One checkpoint in one tier, part by part. `part` may be called on several threads."""

    def __init__(
        self, place: Place, reader: Reader, checkpoint: Checkpoint, *, signed: bool
    ) -> None:
        self._place, self._reader = place, reader
        self._checkpoint, self._signed = checkpoint, signed
        self._manifests: dict[int, PartManifest] = {}
        self.findings: list[Finding] = []
        self.nbytes = 0

    def part(self, part: Part) -> None:
        """Check rank's part: its manifest, and every copy of its bytes."""
        rank, store = part.rank, self._place.store
        try:
            manifest = self._reader.part_manifest(self._checkpoint, rank, deadline_s=_DEADLINE_S)
            self._manifests[rank] = manifest
            key = attempt_of(self._checkpoint).part(rank, "safetensors")
            copies = [store]
            if isinstance(store, Copies):
                copies = list(store.copies(key, deadline_s=_DEADLINE_S)) or [store]
        except StoreError as error:
            self._find(rank, store, error)
            return
        for copy in copies:
            try:
                self._copy(copy, key, part, manifest)
            except StoreError as error:
                self._find(rank, copy, error)

    def _copy(self, store: Store, key: str, part: Part, manifest: PartManifest) -> None:
        nbytes = store.size(key, deadline_s=_DEADLINE_S)
        if nbytes != part.nbytes:
            raise Refused(f"{key} has {nbytes} bytes, and should have {part.nbytes}")
        layout = snapshot.check(manifest.snapshot)
        size = manifest.snapshot.block_bytes
        room = memoryview(bytearray(min(size, nbytes)))
        wrong = 0
        for index, (start, end) in enumerate(snapshot.block_spans(nbytes, size)):
            block = room[: end - start]
            store.get_into(key, block, start=start, deadline_s=_DEADLINE_S)
            self.nbytes += block.nbytes
            try:
                catalog.check_block(manifest, index, block, signed=self._signed)
            except Refused as error:
                wrong += 1
                if wrong <= _NAMED:
                    whose = snapshot.touched(layout, start, end)
                    self._find(part.rank, store, Refused(f"{error}; of {whose}"))
        if wrong > _NAMED:
            self._find(part.rank, store, Refused(f"{key}: {wrong - _NAMED} more blocks are wrong"))
        header = store.get(key, end=len(layout.header), deadline_s=_DEADLINE_S)
        if not wrong and header != layout.header:
            raise Refused(f"{key}: the file's header is not the one that its manifest describes")

    def pieces(self) -> None:
        """Check the record's pieces against the parts whose manifests were read."""
        tensors = {
            rank: {tensor.name: tensor for tensor in manifest.snapshot.tensors}
            for rank, manifest in self._manifests.items()
        }
        wrong: dict[int, int] = {}
        for name, whole in self._checkpoint.tensors.items():
            for piece in whole.pieces:
                if piece.rank not in tensors or wrong.get(piece.rank, 0) == _NAMED:
                    continue
                try:
                    found = tensors[piece.rank].get(piece.name)
                    catalog.check_piece(name, whole, piece, found)
                except Refused as error:
                    wrong[piece.rank] = wrong.get(piece.rank, 0) + 1
                    self._find(piece.rank, self._place.store, error)

    def _find(self, rank: int, store: Store, error: StoreError) -> None:
        finding = Finding(kind=_kind(error), where=store.where, rank=rank, why=str(error))
        self.findings.append(finding)


def _kind(error: StoreError) -> Literal["missing", "corrupt", "unreachable"]:
    if isinstance(error, Missing):
        return "missing"
    return "corrupt" if isinstance(error, Refused) else "unreachable"


def _kept(place: Place, reader: Reader, step: int) -> tuple[Kept, Checkpoint | None]:
    where = place.store.where
    try:
        checkpoint, standing = reader.examine(step)
        missing = reader.missing(checkpoint)
    except (Missing, Refused) as error:
        return Kept(tier=place.tier, where=where, signature=None, problem=str(error)), None
    problem = "; ".join(f"rank {rank}'s part: {why}" for rank, why in list(missing.items())[:4])
    if len(missing) > 4:
        problem += f"; and {len(missing) - 4} more"
    return Kept(tier=place.tier, where=where, signature=standing, problem=problem), checkpoint


def _owner(reader: Reader, step: int) -> Attempt | None:
    """Whose parts a commit is made of that can't be believed."""
    try:
        return reader.owner(step, reader.deadline(_DEADLINE_S))
    except StoreError:
        return None


def _listed(series: str, step: int, kept: list[tuple[Kept, Checkpoint | None]]) -> Listed:
    tiers = tuple(one for one, _ in kept)
    checkpoint = next((checkpoint for _, checkpoint in kept if checkpoint is not None), None)
    if checkpoint is None:
        return Listed(series=series, step=step, kept=tiers)
    return Listed(
        series=series,
        step=step,
        nbytes=sum(part.nbytes for part in checkpoint.parts),
        ranks=len(checkpoint.parts),
        tensors=len(checkpoint.tensors),
        run_id=checkpoint.origin.run_id,
        commit=checkpoint.origin.commit,
        written_s=checkpoint.origin.written_s,
        kept=tiers,
    )


def _torn(place: Place, attempt: Attempt, found: plan.Found) -> Torn:
    entries = found.attempts[attempt]
    return Torn(
        tier=place.tier,
        where=place.store.where,
        series=attempt.series,
        step=attempt.step,
        attempt=attempt.name,
        objects=len(entries),
        nbytes=sum(entry.nbytes for entry in entries),
        changed_s=max(entry.changed_s for entry in entries),
        failed=any(entry.key.endswith(".failed") for entry in entries),
    )
