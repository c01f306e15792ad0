"""Reading a checkpoint: byte ranges of its parts, each block checked, from the nearest good copy.

Theory of operation. What is asked for is cut at the blocks that digests cover. Blocks that lie
whole in one destination are read right into it and digested there; those that are wanted in part
are read once into memory of our own, checked, and copied from; they stay, up to a cap, for the
next range beside them. Where a tier is far, requests are large and several go at a time.

A block whose digest is wrong, or that can't be had, refuses its source for that part: the next
copy, then the next tier is asked. When none is left, the part is lost (`PartLost`), and the caller
falls to an older step, on all ranks alike.

It does not know what the bytes mean: `snapshot.Manifest` of a part has names, types and places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

from everstep import snapshot
from everstep.errors import StateLost
from everstep.tiers.catalog import Checkpoint
from everstep.tiers.find import Found, Tier, Told
from everstep.tiers.receipt import Receipt

Result = TypeVar("Result")
CACHE_BYTES = 64 << 20


class PartLost(StateLost):
    """No good copy of a part is left; the message says what each had. `step`, `rank`: of the
    part."""

    def __init__(self, step: int, rank: int, why: str) -> None:
        super().__init__(why)
        self.step, self.rank = step, rank


class Wanted(NamedTuple):
    """Bytes `start` to `start + area.nbytes` of rank's part, to be put into `area`, which is
    writable, contiguous and of bytes (`cast("B")`)."""

    rank: int
    start: int
    area: memoryview


class Opened:
    """A checkpoint that is being read. Any thread, several at a time. Close it when done.

    `checkpoint`: its record. `told`: for other ranks, that `follow` it."""

    def __init__(
        self, found: Found, *, deadline_s: float = 60.0, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.checkpoint: Checkpoint = found.checkpoint
        self.told: Told = found.told
        raise NotImplementedError

    def manifest(self, rank: int) -> snapshot.Manifest:
        """What rank's part holds. Blocks on the store at the first call. Raises PartLost, and
        StateLost for a rank that has no part."""
        raise NotImplementedError

    def layout(self, rank: int) -> snapshot.Layout:
        """Where each tensor lies in rank's part; `spans()` has the bytes. As `manifest`."""
        raise NotImplementedError

    def read(self, rank: int, start: int, end: int) -> bytes:
        """Checked bytes of a part. Raises PartLost."""
        raise NotImplementedError

    def read_into(self, rank: int, start: int, area: memoryview) -> None:
        """Fill `area` with checked bytes of a part, from `start` on. Raises PartLost; `area` may
        hold anything then."""
        raise NotImplementedError

    def read_many(self, wanted: Iterable[Wanted]) -> None:
        """Fill many areas; each block is asked for once, whoever wants a piece of it. This is how
        a resharding rank reads only its bytes. Raises PartLost."""
        raise NotImplementedError

    @property
    def receipt(self) -> Receipt:
        """What was read until now."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of cached blocks and threads; the stores are the caller's."""
        raise NotImplementedError

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_newest(
    tiers: Sequence[Tier],
    *,
    step: int | None = None,
    without: Collection[int] = (),
    deadline_s: float = 60.0,
) -> Opened:
    """Open the newest whole checkpoint of `tiers` (nearest first), as `find.decide` does."""
    raise NotImplementedError


def open_told(tiers: Sequence[Tier], told: Told, *, deadline_s: float = 60.0) -> Opened:
    """Open what another rank has decided for (`find.follow`)."""
    raise NotImplementedError


def load(
    tiers: Sequence[Tier],
    use: Callable[[Opened], Result],
    *,
    step: int | None = None,
    deadline_s: float = 60.0,
) -> tuple[Result, Receipt]:
    """For a process that loads alone: `use` the newest whole checkpoint; when a part of it proves
    lost, the next older one, unless `step` was asked for. `use` may be called several times."""
    raise NotImplementedError
