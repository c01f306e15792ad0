"""What the committer does: wait for all parts, check that they belong together, make it exist.

Theory of operation. See `series.py`. The committer reads each part's manifest as soon as it is
there, while it waits for the others, so that at the end little is left to do. Why an attempt failed
is an object too (`Failure`), and the first one that is found ends the waiting: nobody sits out a
deadline for a cause that is known.

It does not know what a tier is, nor what comes after the commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from everstep import snapshot
from everstep.tiers import catalog, names, plan, signing
from everstep.tiers.catalog import Checkpoint, Part, Rank
from everstep.tiers.names import Attempt
from everstep.tiers.reading import Reader, attempt_of, decode_part
from everstep.tiers.store import Entry, Exists, Missing, Refused, StoreError
from everstep.tiers.waiting import Deadline

MAX_WHY_CHARS = 2048
_MAX_FAILURE_BYTES = 16 << 10
_READ_BACK_S = 10.0  # to learn whether a commit whose answer was lost has come to be


class Taken(StoreError):
    """The step exists already, with other content. Nothing is overwritten."""


class SaveFailed(StoreError):
    """An attempt that will not become a checkpoint. `rank`: whose failure it was first; None when
    nobody has said."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class Failure(catalog.Record, frozen=True, kw_only=True):
    """Why an attempt failed, as it is put. `rank`: whose failure it was first."""

    rank: Rank | None
    why: Annotated[str, Meta(max_length=MAX_WHY_CHARS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What the committer keeps of a part's manifest."""

    part: Part
    tensors: Mapping[str, snapshot.Tensor]
    digest: str


def encode_failure(why: str, rank: int | None) -> bytes:
    """As it is put."""
    return msgspec.json.encode(Failure(rank=rank, why=_plain(why)[:MAX_WHY_CHARS]))


def first_cause(series: Reader, attempt: Attempt, rank: int, deadline: Deadline) -> Failure | None:
    """What rank has said about the attempt's failure; None when it has not."""
    try:
        text = series.fetch(attempt.part(rank, "failed"), _MAX_FAILURE_BYTES, deadline)
    except Missing:
        return None
    except Refused as error:
        return Failure(rank=rank, why=_plain(str(error)))
    try:
        failure = msgspec.json.decode(text, type=Failure)
    except (msgspec.MsgspecError, RecursionError):
        return Failure(rank=rank, why="it failed, and why can't be read")
    return Failure(rank=failure.rank, why=_plain(failure.why))


def any_cause(
    series: Reader, attempt: Attempt, entries: Collection[Entry], deadline: Deadline
) -> Failure | None:
    """The first cause among an attempt's objects, if there is one."""
    said = [entry for entry in entries if entry.key.endswith(".failed")]
    for entry in sorted(said, key=lambda entry: entry.changed_s):
        part = names.part_of(entry.key)
        failure = first_cause(series, attempt, part[1], deadline) if part else None
        if failure is not None:
            return failure
    return None


def gather(series: Reader, attempt: Attempt, world: int, deadline: Deadline) -> list[Gathered]:
    """Wait for the parts of all ranks. Raises SaveFailed with the first cause, Refused for a part
    that does not belong here, Stopped, StoreError."""
    gathered: dict[int, Gathered] = {}
    while True:
        entries = list(series.store.list(attempt.prefix, deadline_s=deadline.left()))
        failure = any_cause(series, attempt, entries, deadline)
        if failure is not None:
            raise SaveFailed(
                f"{_who(failure.rank)} could not save its part of step {attempt.step}: "
                f"{failure.why}",
                failure.rank,
            )
        lengths = plan.part_lengths(entries)
        for rank in range(world):
            there = lengths.get(rank, {})
            if rank not in gathered and {"safetensors", "json"} <= there.keys():
                gathered[rank] = _gather_one(series, attempt, rank, there, deadline)
        if len(gathered) == world:
            return [gathered[rank] for rank in range(world)]
        if not deadline.pause():
            late = [rank for rank in range(world) if rank not in gathered]
            raise SaveFailed(
                f"nothing was heard of {_ranks(late)} within {deadline.seconds:g} s of saving step "
                f"{attempt.step}, neither a part nor why there is none",
                late[0],
            )


def make_exist(
    series: Reader,
    checkpoint: Checkpoint,
    digests: Sequence[str],
    *,
    key: bytes | None,
    rank: int,
    deadline: Deadline,
) -> Checkpoint:
    """Put the commit, or find that the same checkpoint is there already. `digests`: of the parts.
    Raises Taken, StoreError."""
    envelope = signing.seal(catalog.encode(checkpoint), key)
    deadline.check()
    key_of_step = names.commit_key(series.name, checkpoint.step)
    try:
        # A server that ignores conditions would overwrite: so it is looked at first, too.
        if series.size(key_of_step, deadline) is not None:
            raise Exists(f"{series.store.where}/{key_of_step}: it is there already")
        put_once(series, key_of_step, envelope, deadline)
    except Exists as error:
        existing, why = _same(series, checkpoint, digests, deadline)
        if existing is None:
            raise Taken(
                f"step {checkpoint.step} of {series.name!r} in {series.store.where} was saved "
                f"before ({why}), and nothing is overwritten; a training that goes another way "
                "needs another name for its checkpoints"
            ) from error
        put_once(series, attempt_of(checkpoint).part(rank, "same"), b"{}", deadline)
        return existing
    return checkpoint


def put_once(series: Reader, key: str, data: bytes, deadline: Deadline) -> None:
    """Put an object that nobody else would put with the same bytes. A request whose answer was lost
    may have done its work, and a second try then finds it done: so what is there is compared.
    Raises Exists, StoreError."""
    try:
        series.store.put(key, [memoryview(data)], absent=True, deadline_s=deadline.left())
    except StoreError:
        if not _holds(series, key, data):
            raise


def _holds(series: Reader, key: str, data: bytes) -> bool:
    deadline = series.deadline(_READ_BACK_S)
    try:
        return series.size(key, deadline) == len(data) and data == series.store.get(
            key, deadline_s=deadline.left()
        )
    except StoreError:
        return False  # what went wrong first is what is told


def _gather_one(
    series: Reader, attempt: Attempt, rank: int, there: Mapping[str, int], deadline: Deadline
) -> Gathered:
    key = attempt.part(rank, "json")
    text = series.fetch(key, catalog.MAX_MANIFEST_BYTES, deadline)
    with series.naming(key):
        manifest = decode_part(text, attempt.step, rank, there["safetensors"])
    return Gathered(
        part=Part(
            rank=rank,
            nbytes=manifest.snapshot.nbytes,
            manifest_sha256=hashlib.sha256(text).hexdigest(),
        ),
        tensors={tensor.name: tensor for tensor in manifest.snapshot.tensors},
        digest=manifest.snapshot.digest,
    )


def _same(
    series: Reader, checkpoint: Checkpoint, digests: Sequence[str], deadline: Deadline
) -> tuple[Checkpoint | None, str]:
    """The checkpoint that is there, if it is as good: of the same run, which has done the step
    again, or with the same content. Else what is wrong with it."""
    try:
        existing = series.read(checkpoint.step, deadline_s=deadline.left())
        missing = series.missing(existing, deadline_s=deadline.left())
        if missing:
            rank, why = min(missing.items())
            return None, f"and is not whole: rank {rank}'s part: {why}"
        if checkpoint.origin.run_id and existing.origin.run_id == checkpoint.origin.run_id:
            return existing, ""
        ours = (checkpoint.tensors, checkpoint.values, len(digests))
        if (existing.tensors, existing.values, len(existing.parts)) != ours:
            return None, "with other content"
        for part, digest in zip(existing.parts, digests, strict=True):
            manifest = series.part_manifest(existing, part.rank, deadline_s=deadline.left())
            if manifest.snapshot.digest != digest:
                return None, f"with other bytes in rank {part.rank}'s part"
    except (Missing, Refused) as error:
        return None, f"and can't be read: {error}"
    return existing, ""


def _plain(text: str) -> str:
    """Text from a stranger, without what would move a terminal's cursor."""
    return "".join(char if char.isprintable() else " " for char in text)


def _who(rank: int | None) -> str:
    return "a rank" if rank is None else f"rank {rank}"


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 5} more" if len(ranks) > 5 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:5]))}{more}"
