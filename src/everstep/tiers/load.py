"""Reading a checkpoint: byte ranges of its parts, each block checked, from the nearest good copy.

Theory of operation. What is asked for is cut at the blocks that digests cover. Blocks that lie
whole in one destination are read right into it and digested there; one that is wanted in part is
read once into memory of our own, checked, and copied from; it stays, up to a cap, for the next
range beside it. Where a tier is far, requests are large and several go at a time.

A block whose digest is wrong, or that can't be had, refuses its source for that part: the next
copy, then the next tier is asked. When none is left, the part is lost (`PartLost`), and the caller
falls to an older step, on all ranks alike.

It does not know what the bytes mean: the manifest of a part has names, types and places.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec

from everstep import snapshot
from everstep.errors import EverstepError, StateLost
from everstep.tiers import find
from everstep.tiers.blockcache import BlockCache
from everstep.tiers.catalog import Checkpoint, PartManifest, check_block
from everstep.tiers.find import Found, Source, Tier, Told
from everstep.tiers.receipt import PartSource, Receipt, Refusal
from everstep.tiers.store import Store, StoreError
from everstep.tiers.suspects import Suspects

Item = TypeVar("Item")
Result = TypeVar("Result")
CACHE_BYTES = 64 << 20


class PartLost(StateLost):
    """No good copy of a part is left; the message says what each had. `step`, `rank`: of the part.
    `damaged`: every copy is gone or wrong; else one may be had later. Can be pickled, as torch
    sends what ranks raise to one of them."""

    def __init__(self, step: int, rank: int, why: str, damaged: bool) -> None:
        super().__init__(step, rank, why, damaged)
        self.step, self.rank, self.why, self.damaged = step, rank, why, damaged

    def __str__(self) -> str:
        return self.why


class Wanted(NamedTuple):
    """Bytes `start` to `start + area.nbytes` of rank's part, to be put into `area`, which is
    writable, contiguous and of bytes (`cast("B")`)."""

    rank: int
    start: int
    area: memoryview


@runtime_checkable
class Copies(Protocol):
    """A store that keeps several copies of an object, and can be asked for each."""

    def copies(self, key: str, *, deadline_s: float) -> Sequence[Store]:
        """The store as seen from each copy of the object, the nearest first."""
        ...


@runtime_checkable
class Checked(Protocol):
    """A store that digests what it reads, on the way."""

    def get_checked(
        self,
        key: str,
        area: memoryview,
        *,
        start: int,
        block_bytes: int,
        digests: Sequence[str],
        deadline_s: float,
    ) -> None:
        """As `get_into`; `digests`: XXH3 of each block, the first of which begins at `start`.
        Raises SnapshotError when they stay wrong."""
        ...


class _Job(NamedTuple):
    """Blocks of rank's part from `first` on. They are read into `area`, which they fill; or there
    is none, and from the one block `cuts` are copied: where in the block, and into what."""

    rank: int
    first: int
    area: memoryview | None
    cuts: list[tuple[int, memoryview]]


class Opened:
    """A checkpoint that is being read. Any thread, several at a time. Close it when done.

    `checkpoint`: its record. `told`: for other ranks, that `follow` it."""

    def __init__(
        self, found: Found, *, deadline_s: float = 60.0, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.checkpoint: Checkpoint = found.checkpoint
        self.told: Told = found.told
        self._sources = {rank: list(sources) for rank, sources in found.sources.items()}
        self._refused = list(found.refused)
        self._signed = found.standing == "valid"
        self._deadline_s = deadline_s
        self._cache = BlockCache(cache_bytes)
        self._manifests: dict[int, PartManifest] = {}
        self._layouts: dict[int, snapshot.Layout] = {}
        self._taken: dict[tuple[int, str, str], int] = {}
        self._seconds = 0.0
        self._lock = threading.RLock()
        lanes = max((s.tier.lanes for some in self._sources.values() for s in some), default=1)
        self._pool = ThreadPoolExecutor(lanes, "everstep-load") if lanes > 1 else None

    def manifest(self, rank: int) -> snapshot.Manifest:
        """What rank's part holds. Blocks on the store at the first call. Raises PartLost, and
        StateLost for a rank that has no part."""
        return self._manifest(rank).snapshot

    def layout(self, rank: int) -> snapshot.Layout:
        """Where each tensor lies in rank's part; `spans()` has the bytes. As `manifest`."""
        manifest = self.manifest(rank)
        with self._lock:
            if rank not in self._layouts:
                self._layouts[rank] = snapshot.check(manifest)
            return self._layouts[rank]

    def read(self, rank: int, start: int, end: int) -> bytes:
        """Checked bytes of a part. Raises as `read_into`."""
        self._check_range(rank, start, end)
        area = bytearray(end - start)
        self.read_into(rank, start, memoryview(area))
        return bytes(area)

    def read_into(self, rank: int, start: int, area: memoryview) -> None:
        """Fill `area` with checked bytes of a part, from `start` on. Raises PartLost; `area` may
        hold anything then. Raises ValueError for a range that reaches out of the part."""
        self.read_many([Wanted(rank, start, area)])

    def read_many(self, wanted: Iterable[Wanted]) -> None:
        """Fill many areas; each block is asked for once, whoever wants a piece of it. This is how
        a resharding rank reads only its bytes. Raises as `read_into`."""
        began, asked = time.monotonic(), list(wanted)
        try:
            self._each_of(self._manifest, list(dict.fromkeys(one.rank for one in asked)))
            self._each_of(self._do, self._jobs(asked))
        finally:
            with self._lock:
                self._seconds += time.monotonic() - began

    @property
    def receipt(self) -> Receipt:
        """What was read until now."""
        with self._lock:
            return Receipt(
                series=self.told.series,
                step=self.told.step,
                newest=self.told.newest,
                parts=tuple(
                    PartSource(rank=rank, tier=tier, where=where, nbytes=nbytes)
                    for (rank, tier, where), nbytes in sorted(self._taken.items())
                ),
                seconds=self._seconds,
                refused=tuple(self._refused),
            )

    def close(self) -> None:
        """Let go of cached blocks and threads; the stores are the caller's."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._cache.clear()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _each_of(self, do: Callable[[Item], object], items: Sequence[Item]) -> None:
        """Do it for each, several at a time where the tiers are far."""
        if self._pool is None or len(items) < 2:
            for item in items:
                do(item)
            return
        futures = [self._pool.submit(do, item) for item in items]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # nobody writes into an area after this

    def _jobs(self, wanted: Iterable[Wanted]) -> list[_Job]:
        """What is to be read for it, no block twice for two who want pieces of it."""
        whole: list[_Job] = []
        parts: dict[tuple[int, int], _Job] = {}
        for rank, start, area in wanted:
            manifest, end = self.manifest(rank), start + area.nbytes
            size = manifest.block_bytes
            self._check_range(rank, start, end)
            at = start
            while at < end:
                block = at // size
                full = block * size == at
                last = manifest.nbytes // size + 1 if end == manifest.nbytes else end // size
                if full and last > block:
                    # As many as one request takes, each of them whole in the area.
                    last = min(last, block + max(1, self._request_bytes(rank) // size))
                    stop = min(last * size, end)
                    whole.append(_Job(rank, block, area[at - start : stop - start], []))
                else:
                    stop = min((block + 1) * size, end)
                    job = parts.setdefault((rank, block), _Job(rank, block, None, []))
                    job.cuts.append((at - block * size, area[at - start : stop - start]))
                at = stop
        return whole + list(parts.values())

    def _check_range(self, rank: int, start: int, end: int) -> None:
        nbytes = self.manifest(rank).nbytes
        if not 0 <= start <= end <= nbytes:
            raise ValueError(
                f"bytes {start} to {end} reach out of rank {rank}'s part, which has {nbytes}"
            )

    def _do(self, job: _Job) -> None:
        if job.area is not None:
            self._fetch(job.rank, job.first, job.area)
            return
        block = self._cache.get((job.rank, job.first))
        if block is None:
            manifest = self.manifest(job.rank)
            size = manifest.block_bytes
            nbytes = min(size, manifest.nbytes - job.first * size)
            block = memoryview(bytearray(nbytes))
            self._fetch(job.rank, job.first, block)
            self._cache.put((job.rank, job.first), block)
        for start, area in job.cuts:
            area[:] = block[start : start + area.nbytes]

    def _fetch(self, rank: int, first: int, area: memoryview) -> None:
        """Fill `area` with whole blocks, from block `first` on, that are right."""
        for source in self._each(rank):
            try:
                self._take(source, rank, first, area)
            except (StoreError, snapshot.SnapshotError) as error:
                self._refuse(rank, source, error)
                continue
            with self._lock:
                given = (rank, source.tier.name, source.store.where)
                self._taken[given] = self._taken.get(given, 0) + area.nbytes
            return
        raise self._lost(rank)

    def _take(self, source: Source, rank: int, first: int, area: memoryview) -> None:
        """Fill `area` from `source` and check it. Raises StoreError, SnapshotError."""
        manifest = self._manifest(rank)
        size, blocks = manifest.snapshot.block_bytes, manifest.snapshot.blocks
        key, start = source.attempt.part(rank, "safetensors"), first * size
        checked = isinstance(source.store, Checked)
        if isinstance(source.store, Checked):
            source.store.get_checked(
                key,
                area,
                start=start,
                block_bytes=size,
                digests=blocks[first : first + -(-area.nbytes // size)],
                deadline_s=self._deadline_s,
            )
        else:
            source.store.get_into(key, area, start=start, deadline_s=self._deadline_s)
        if self._signed or not checked:
            for index, at in enumerate(range(0, area.nbytes, size), first):
                check_block(manifest, index, area[at : at + size], signed=self._signed)

    def _each(self, rank: int) -> Iterator[Source]:
        """The sources of rank's part that were not refused, by and by."""
        while True:
            with self._lock:
                source = next(iter(self._sources.get(rank, [])), None)
            if source is None:
                return
            yield source

    def _refuse(self, rank: int, source: Source, error: EverstepError) -> None:
        """Take no more of that part from there; where that was one of several copies that the
        store keeps, from the others."""
        with self._lock:
            sources = self._sources[rank]
            if source not in sources:
                return  # another thread saw it first
            self._note(rank, source, error)
            at = sources.index(source)
            sources[at : at + 1] = self._copies(rank, source)

    def _copies(self, rank: int, source: Source) -> list[Source]:
        if source.single or not isinstance(source.store, Copies):
            return []
        key = source.attempt.part(rank, "safetensors")
        try:
            stores = source.store.copies(key, deadline_s=self._deadline_s)
        except StoreError:
            return []  # it was refused already, and has no more to give
        return [replace(source, store=store, single=True) for store in stores]

    def _request_bytes(self, rank: int) -> int:
        sources = self._sources.get(rank)
        return sources[0].tier.request_bytes if sources else 0

    def _manifest(self, rank: int) -> PartManifest:
        with self._lock:
            if rank not in self._sources:
                raise StateLost(
                    f"the checkpoint of step {self.told.step} has no part of rank {rank}; it has "
                    f"{len(self._sources)}"
                )
            known = self._manifests.get(rank)
        if known is None:
            known = self._read_manifest(rank)
            with self._lock:
                self._manifests[rank] = known
        return known

    def _read_manifest(self, rank: int) -> PartManifest:
        """The part's manifest, from any source: by its SHA-256 it is as good for the others."""
        for source in list(self._sources[rank]):
            told = msgspec.structs.replace(self.checkpoint, attempt=source.attempt.name)
            try:
                return source.tier.series.part_manifest(told, rank, deadline_s=self._deadline_s)
            except StoreError as error:
                self._note(rank, source, error, "its manifest: ")
        raise self._lost(rank)

    def _note(self, rank: int, source: Source, error: EverstepError, what: str = "") -> None:
        refusal = Refusal(
            tier=source.tier.name,
            where=source.store.where,
            step=self.told.step,
            rank=rank,
            why=f"{what}{error}",
            damaged=isinstance(error, find.DAMAGED),
        )
        with self._lock:
            self._refused.append(refusal)

    def _lost(self, rank: int) -> PartLost:
        refused = [one for one in self.receipt.refused if one.rank in (rank, None)]
        said = "; ".join(map(str, refused)) or "no tier has it here"
        return PartLost(
            self.told.step,
            rank,
            f"no good copy of rank {rank}'s part of step {self.told.step} is left: {said}",
            bool(refused) and all(one.damaged for one in refused),
        )


def open_newest(
    tiers: Sequence[Tier],
    *,
    step: int | None = None,
    without: Collection[int] = (),
    suspects: Suspects | None = None,
    deadline_s: float = 60.0,
) -> Opened:
    """Open the newest whole checkpoint of `tiers` (nearest first), as `find.decide` does."""
    found = find.decide(tiers, step=step, without=without, suspects=suspects, deadline_s=deadline_s)
    return Opened(found, deadline_s=deadline_s)


def open_told(tiers: Sequence[Tier], told: Told, *, deadline_s: float = 60.0) -> Opened:
    """Open what another rank has decided for (`find.follow`)."""
    return Opened(find.follow(tiers, told, deadline_s=deadline_s), deadline_s=deadline_s)


def load(
    tiers: Sequence[Tier],
    use: Callable[[Opened], Result],
    *,
    step: int | None = None,
    deadline_s: float = 60.0,
) -> tuple[Result, Receipt]:
    """For a process that loads alone: `use` the newest whole checkpoint; when a part of it proves
    lost, the next older one, unless `step` was asked for. `use` may be called several times."""
    skipped: set[int] = set()
    refused: list[Refusal] = []
    while True:
        try:
            opened = open_newest(tiers, step=step, without=skipped, deadline_s=deadline_s)
        except StateLost as error:
            if not refused:
                raise
            raise StateLost("; ".join([str(error), *map(str, refused)])) from error
        with opened:
            try:
                result = use(opened)
            except PartLost:
                if step is not None:
                    raise
                skipped.add(opened.told.step)
                refused += opened.receipt.refused
                continue
            receipt = opened.receipt
            return result, msgspec.structs.replace(receipt, refused=(*refused, *receipt.refused))
