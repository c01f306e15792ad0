"""Checkpoints in a store: how one comes to be, is found, read and removed.

Theory of operation. Each rank puts its part, and after it the part's manifest, or why it could not;
all under the prefix of one attempt, which nobody else has. One rank, the committer, waits until
every part's manifest is there, checks that parts and manifests belong together, and puts the
checkpoint's manifest, if none is there yet, under the key of its step. That put is the commit: from
then on the checkpoint exists, whole; before it, nothing of it is ever read. Who dies on the way
leaves an attempt behind that counts for nothing until `prune` removes it.

No rank talks to another. All learn how it ended from the store: the commit is there, or the
committer's reason, or the deadline is over. Of two committers one wins, whatever their clocks say;
a put that is too late is of another attempt, and changes nothing.

A commit whose answer was lost on the way looks like one that was lost to another; so what is there
is read back and compared, as attempts are never alike.

All calls block, on the store and for as long as their deadline says, and may be made on any thread.

What it does not know: what is in the parts, where they come from, and which tier it is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from everstep import snapshot
from everstep.tiers.catalog import Checkpoint, Origin, PartManifest, Whole
from everstep.tiers.names import Attempt
from everstep.tiers.signing import Standing
from everstep.tiers.store import Store, StoreError

REQUEST_DEADLINE_S = 60.0
"""For requests about a few bytes, where the caller names no deadline."""


class Taken(StoreError):
    """The step exists already, from another attempt. Nothing is overwritten."""


class SaveFailed(StoreError):
    """An attempt that will not become a checkpoint. `rank`: whose failure it was first; None when
    nobody has said."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The attempt has become the checkpoint of its step."""

    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """It has not. `why`: the first cause; `rank`: whose, None where nobody has said."""

    attempt: Attempt
    why: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What `prune` has removed: checkpoints by step, `leftovers` (attempts), and bytes of all."""

    steps: tuple[int, ...] = ()
    leftovers: tuple[Attempt, ...] = ()
    nbytes: int = 0


class Series:
    """The checkpoints called `name` in `store`. `key`: signs and checks them (None: they are not
    signed). `require_signature`: refuse those that are not signed with it. `clock`: monotonic
    seconds; `pause`: waits so many seconds, and may raise to stop. Raises UserError when a
    signature is required without a key, ValueError for a bad name."""

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        key: bytes | None = None,
        require_signature: bool = False,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        raise NotImplementedError

    def begin(self, step: int) -> Attempt:
        """A new attempt to save `step`, for one rank to make and to tell the others. Asks nobody.
        Raises ValueError."""
        raise NotImplementedError

    def put_part(
        self,
        attempt: Attempt,
        rank: int,
        area: memoryview,
        manifest: snapshot.Manifest,
        *,
        block_sha256: Sequence[str] | None = None,
        deadline_s: float,
    ) -> None:
        """Put rank's part (`area`: the snapshot that `manifest` describes, unchanged until this
        returns) and its manifest. `block_sha256`: `signing.block_sha256` of the area, where it is
        known already; it is made here if there is a key. Raises StoreError."""
        raise NotImplementedError

    def fail(self, attempt: Attempt, rank: int, why: str, *, deadline_s: float) -> None:
        """Say that rank can't put its part, and why. Raises StoreError when even that fails."""
        raise NotImplementedError

    def commit(
        self,
        attempt: Attempt,
        *,
        world: int,
        tensors: Mapping[str, Whole],
        values: Mapping[str, bytes],
        origin: Origin,
        rank: int = 0,
        deadline_s: float,
    ) -> Checkpoint:
        """Wait for the parts of ranks 0 to `world - 1`, and make the checkpoint exist. `rank`: the
        committer's own, under which it says so when it fails. Raises SaveFailed with the first
        cause, Taken, StoreError."""
        raise NotImplementedError

    def outcome(
        self, attempt: Attempt, *, committer: int = 0, deadline_s: float
    ) -> Committed | Failed:
        """Wait until it is known how the attempt ended; a deadline that is over is a failure, whose
        first cause is looked for once more. Raises StoreError when the store does not answer."""
        raise NotImplementedError

    def steps(self, *, deadline_s: float = REQUEST_DEADLINE_S) -> list[int]:
        """Steps whose commit is there, in order. Whether their parts are too, `missing` says."""
        raise NotImplementedError

    def read(self, step: int, *, deadline_s: float = REQUEST_DEADLINE_S) -> Checkpoint:
        """The checkpoint of `step`, checked by itself. Raises Missing, Refused, StoreError."""
        raise NotImplementedError

    def examine(
        self, step: int, *, deadline_s: float = REQUEST_DEADLINE_S
    ) -> tuple[Checkpoint, Standing]:
        """As `read`, and what its signature is worth. Refuses as `read` does."""
        raise NotImplementedError

    def part_manifest(
        self, checkpoint: Checkpoint, rank: int, *, deadline_s: float = REQUEST_DEADLINE_S
    ) -> PartManifest:
        """The manifest of rank's part: the one that the checkpoint names, by its SHA-256, and of
        its step, rank and length. Raises Missing, Refused, StoreError."""
        raise NotImplementedError

    def missing(
        self, checkpoint: Checkpoint, *, deadline_s: float = REQUEST_DEADLINE_S
    ) -> dict[int, str]:
        """Ranks whose part is not there or is not as long as it should be, with what is wrong. By
        a listing: no byte is read."""
        raise NotImplementedError

    def set_aside(
        self, checkpoint: Checkpoint, why: str, *, deadline_s: float = REQUEST_DEADLINE_S
    ) -> None:
        """Make a checkpoint that can't be loaded exist no more, so that its step can be saved again
        (a step is saved once). Its commit is kept under another name, with `why`, until its parts
        are pruned. For one rank to call, before anything is saved."""
        raise NotImplementedError

    def prune(
        self,
        *,
        keep: int,
        older_than_s: float,
        now: float,
        deadline_s: float = REQUEST_DEADLINE_S,
    ) -> Pruned:
        """Remove all but the `keep` newest whole checkpoints (0: none is removed), and leftovers:
        attempts that never became one and have not changed for `older_than_s`, or are of a step
        older than all that is kept. The newest whole one stays whatever is asked. `now`: seconds
        since 1970."""
        raise NotImplementedError
