"""Checkpoints made by hand, for tests that read them: a store that is a dict, and what lies in it.

Nothing here asks `series.py`, so that what is read is made by another hand, and can be made wrong.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from everstep import snapshot
from everstep.tiers import catalog, names, signing
from everstep.tiers.catalog import Checkpoint, Origin, Part, PartManifest, Piece, Whole
from everstep.tiers.find import Tier
from everstep.tiers.signing import Standing
from everstep.tiers.store import Entry, Exists, Missing, Refused, StoreError

KEY = bytes(range(32))
_attempts = itertools.count(1)


class DictStore:
    """Objects in a dict. `fail`: keys whose end is one of these raise StoreError. `asked`: what was
    read."""

    def __init__(self, where: str = "dict") -> None:
        self.where = where
        self.objects: dict[str, bytes] = {}
        self.fail: list[str] = []
        self.hidden: list[str] = []
        self.asked: list[tuple[str, int, int]] = []

    def put(
        self,
        key: str,
        pieces: Sequence[memoryview],
        *,
        absent: bool = False,
        deadline_s: float,
        stop: threading.Event | None = None,
    ) -> None:
        names.check_key(key)
        if absent and key in self.objects:
            raise Exists(f"{key} is there")
        self.objects[key] = b"".join(pieces)

    def _get(self, key: str) -> bytes:
        names.check_key(key)
        if any(key.endswith(end) for end in self.fail):
            raise StoreError(f"{self.where}: {key}: out of order")
        if key not in self.objects:
            raise Missing(f"{self.where} has no {key}")
        return self.objects[key]

    def get(self, key: str, *, start: int = 0, end: int | None = None, deadline_s: float) -> bytes:
        data = self._get(key)
        end = len(data) if end is None else end
        if not 0 <= start <= end <= len(data):
            raise StoreError(f"{self.where}: {key} is shorter than {end}")
        self.asked.append((key, start, end))
        return data[start:end]

    def get_into(self, key: str, area: memoryview, *, start: int = 0, deadline_s: float) -> None:
        area[:] = self.get(key, start=start, end=start + area.nbytes, deadline_s=deadline_s)

    def size(self, key: str, *, deadline_s: float) -> int:
        return len(self._get(key))

    def list(self, prefix: str, *, deadline_s: float) -> Iterator[Entry]:
        names.check_prefix(prefix)
        if "list" in self.fail:
            raise StoreError(f"{self.where}: can't be listed")
        for key in sorted(self.objects):
            if key.startswith(prefix) and key not in self.hidden:
                yield Entry(key=key, nbytes=len(self.objects[key]), changed_s=0.0)

    def delete(self, key: str, *, deadline_s: float) -> None:
        names.check_key(key)
        self.objects.pop(key, None)

    def sweep(self, *, older_than_s: float, deadline_s: float) -> int:
        return 0

    def close(self) -> None:
        pass

    def flip(self, key: str, at: int) -> None:
        """Turn one bit of an object."""
        data = bytearray(self.objects[key])
        data[at] ^= 1
        self.objects[key] = bytes(data)


class Shelf:
    """The reading half of a series, naive."""

    def __init__(self, store: DictStore, name: str = "run", key: bytes | None = None) -> None:
        self.store, self.name, self.key = store, name, key

    def steps(self, *, deadline_s: float) -> list[int]:
        found = self.store.list(f"{self.name}/commits/", deadline_s=deadline_s)
        return [step[1] for step in (names.step_of(entry.key) for entry in found) if step]

    def examine(self, step: int, *, deadline_s: float) -> tuple[Checkpoint, Standing]:
        raw = self.store.get(names.commit_key(self.name, step), deadline_s=deadline_s)
        text, standing = signing.unseal(raw, self.key)
        return catalog.decode(text), standing

    def part_manifest(
        self, checkpoint: Checkpoint, rank: int, *, deadline_s: float
    ) -> PartManifest:
        attempt = names.Attempt(
            series=checkpoint.series, step=checkpoint.step, name=checkpoint.attempt
        )
        raw = self.store.get(attempt.part(rank, "json"), deadline_s=deadline_s)
        if hashlib.sha256(raw).hexdigest() != checkpoint.parts[rank].manifest_sha256:
            raise Refused(f"the manifest of rank {rank} is not the one that was committed")
        return catalog.decode_part(raw)


@dataclass(frozen=True)
class Made:
    """A tensor for `save`: its whole bytes, and how it is cut: a rank and a box for each piece."""

    shape: tuple[int, ...]
    data: bytes
    boxes: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]] = ()
    dtype: str = "torch.float32"
    item_bytes: int = 4


def rows(shape: tuple[int, ...], world: int, along: int = 0) -> list[Any]:
    """A tensor cut evenly, as far as it goes, over `world` ranks along a dimension."""
    size = -(-shape[along] // world)
    boxes = []
    for rank in range(world):
        start = min(rank * size, shape[along])
        stop = min(start + size, shape[along])
        place = tuple(start if dim == along else 0 for dim in range(len(shape)))
        extent = tuple(stop - start if dim == along else whole for dim, whole in enumerate(shape))
        boxes.append((rank, place, extent))
    return boxes


def cut(made: Made, place: Sequence[int], shape: Sequence[int]) -> bytes:
    """The bytes of a box, row by row."""
    if not shape:
        return made.data
    strides = [math.prod(made.shape[dim + 1 :]) for dim in range(len(made.shape))]
    out = bytearray()
    for index in itertools.product(*(range(n) for n in shape[:-1])):
        at = sum((i + p) * s for i, p, s in zip((*index, 0), place, strides, strict=True))
        out += made.data[at * made.item_bytes : (at + shape[-1]) * made.item_bytes]
    return bytes(out)


@dataclass
class Draft:
    """A checkpoint before it is put: what a test may spoil."""

    checkpoint: Checkpoint
    parts: list[tuple[PartManifest, bytes]] = field(default_factory=list)

    @property
    def attempt(self) -> names.Attempt:
        at = self.checkpoint
        return names.Attempt(series=at.series, step=at.step, name=at.attempt)

    def put(self, store: DictStore, key: bytes | None = None, attempt: str = "") -> Draft:
        """Put it all, the parts first. `attempt`: under another name."""
        if attempt:
            checkpoint = msgspec.structs.replace(self.checkpoint, attempt=attempt)
            return replace(self, checkpoint=checkpoint).put(store, key)
        for rank, (manifest, data) in enumerate(self.parts):
            text = catalog.encode_part(manifest)
            store.objects[self.attempt.part(rank, "safetensors")] = data
            store.objects[self.attempt.part(rank, "json")] = text
        sealed = signing.seal(msgspec.json.encode(self.checkpoint), key)
        store.objects[names.commit_key(self.checkpoint.series, self.checkpoint.step)] = sealed
        return self


def draft(
    step: int,
    tensors: Mapping[str, Made],
    values: Mapping[str, bytes] | None = None,
    *,
    series: str = "run",
    world: int = 1,
    block_bytes: int = 1 << 16,
    signed: bool = False,
    origin: Origin | None = None,
) -> Draft:
    """A checkpoint of `world` ranks."""
    held: list[list[snapshot.Tensor]] = [[] for _ in range(world)]
    buffers: list[dict[str, bytes]] = [{} for _ in range(world)]
    wholes = {}
    for name, made in tensors.items():
        boxes = made.boxes or [(0, (0,) * len(made.shape), made.shape)]
        for rank, place, shape in boxes:
            held[rank].append(
                snapshot.Tensor(
                    name=name,
                    dtype=made.dtype,
                    item_bytes=made.item_bytes,
                    shape=shape,
                    global_shape=made.shape,
                    place=place,
                )
            )
            buffers[rank][name] = cut(made, place, shape)
        pieces = tuple(Piece(rank=r, name=name, place=p, shape=s) for r, p, s in boxes)
        wholes[name] = Whole(dtype=made.dtype, shape=made.shape, pieces=pieces)
    parts = []
    for rank in range(world):
        layout = snapshot.Layout(held[rank])
        area = memoryview(bytearray(layout.nbytes))
        about = snapshot.About(run_id="r", rank=rank, world=world, shard=f"rank {rank}", step=step)
        snapshot.write(area, layout, about, buffers[rank])
        manifest = snapshot.describe(area, layout, about, block_bytes=block_bytes)
        sha = signing.block_sha256(area, block_bytes) if signed else ()
        parts.append((PartManifest(snapshot=manifest, block_sha256=sha), bytes(area)))
    checkpoint = Checkpoint(
        series=series,
        step=step,
        attempt=f"{next(_attempts):016x}",
        parts=tuple(
            Part(
                rank=rank,
                nbytes=len(data),
                manifest_sha256=hashlib.sha256(catalog.encode_part(manifest)).hexdigest(),
            )
            for rank, (manifest, data) in enumerate(parts)
        ),
        tensors=wholes,
        values=dict(values or {}),
        origin=origin or Origin(),
    )
    return Draft(checkpoint, parts)


def tier(store: DictStore, name: str = "durable", **options: Any) -> Tier:
    """A tier over such a store."""
    key = options.pop("key", None)
    return Tier(name=name, series=Shelf(store, key=key), **options)
