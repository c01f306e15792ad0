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

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep import snapshot
from everstep.tiers import catalog, committing, names, plan, signing
from everstep.tiers.catalog import Checkpoint, Origin, PartManifest, Whole
from everstep.tiers.committing import SaveFailed, Taken
from everstep.tiers.names import Attempt
from everstep.tiers.reading import REQUEST_DEADLINE_S, Reader, attempt_of
from everstep.tiers.store import Exists, Missing, Refused, StoreError
from everstep.tiers.waiting import Deadline

__all__ = ["Committed", "Failed", "Pruned", "Reader", "SaveFailed", "Series", "Taken"]

PRUNE_DEADLINE_S = 600.0
_LAST_WORDS_S = 30.0  # to say why, once the deadline for all else is over


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The step exists. `attempt`: whose parts it is made of; another than was asked for, where the
    same content was saved before."""

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


class Series(Reader):
    """As `Reader`, to write to as well."""

    def begin(self, step: int) -> Attempt:
        """A new attempt to save `step`, for one rank to make and to tell the others. Asks nobody.
        Raises ValueError."""
        return names.new_attempt(self.name, step)

    def put_part(
        self,
        attempt: Attempt,
        rank: int,
        area: memoryview,
        manifest: snapshot.Manifest,
        *,
        block_sha256: Sequence[str] | None = None,
        deadline_s: float,
        stop: threading.Event | None = None,
    ) -> None:
        """Put rank's part (`area`: the snapshot that `manifest` describes, unchanged until this
        returns) and its manifest. `block_sha256`: `signing.block_sha256` of the area, where it is
        known already; it is made here if there is a key. Raises StoreError, Stopped, and ValueError
        for a manifest that is not of this part."""
        deadline = self.deadline(deadline_s, stop)
        about = manifest.about
        if (about.rank, about.step, manifest.nbytes) != (rank, attempt.step, area.nbytes):
            raise ValueError(
                f"the manifest of rank {about.rank} at step {about.step}, {manifest.nbytes} bytes, "
                f"is not of rank {rank} at step {attempt.step}, {area.nbytes} bytes"
            )
        self.store.put(
            attempt.part(rank, "safetensors"), [area], deadline_s=deadline.left(), stop=stop
        )
        if block_sha256 is None:
            signed = self.key is not None
            block_sha256 = signing.block_sha256(area, manifest.block_bytes) if signed else ()
        text = catalog.encode_part(
            PartManifest(snapshot=manifest, block_sha256=tuple(block_sha256))
        )
        deadline.check()
        committing.put_once(self, attempt.part(rank, "json"), text, deadline)

    def fail(
        self,
        attempt: Attempt,
        rank: int,
        why: str,
        *,
        first: int | None = None,
        deadline_s: float,
    ) -> None:
        """Say that rank can't do its part of the save, and why; what it said first stays. `first`:
        whose failure it was, when not its own. Raises StoreError when even that fails."""
        reason = committing.encode_failure(why, rank if first is None else first)
        key = attempt.part(rank, "failed")
        try:
            self.store.put(key, [memoryview(reason)], absent=True, deadline_s=deadline_s)
        except Exists:
            pass  # the first cause is what counts

    def commit(
        self,
        attempt: Attempt,
        *,
        world: int,
        tensors: Mapping[str, Whole],
        values: Mapping[str, bytes],
        paths: Mapping[str, tuple[str | int, ...]] | None = None,
        origin: Origin,
        rank: int = 0,
        deadline_s: float,
        stop: threading.Event | None = None,
    ) -> Checkpoint:
        """Wait for the parts of ranks 0 to `world - 1`, and make the checkpoint exist. One that is
        there already is returned if it has the same content, or is of the same run (`origin.run_id`
        is the same and not empty), which has then done the step again. `rank`: the committer's own,
        under which it says so when it fails. Raises SaveFailed with the first cause, Taken,
        Refused, Stopped, StoreError."""
        deadline = self.deadline(deadline_s, stop)
        try:
            gathered = committing.gather(self, attempt, world, deadline)
            checkpoint = Checkpoint(
                series=self.name,
                step=attempt.step,
                attempt=attempt.name,
                parts=tuple(each.part for each in gathered),
                tensors=dict(tensors),
                values=dict(values),
                paths=dict(paths or {}),
                origin=origin,
            )
            catalog.check(checkpoint)
            catalog.check_pieces(checkpoint, [each.tensors for each in gathered])
            return committing.make_exist(
                self,
                checkpoint,
                [each.digest for each in gathered],
                key=self.key,
                rank=rank,
                deadline=deadline,
            )
        except StoreError as error:
            first = error.rank if isinstance(error, SaveFailed) else None
            try:
                self.fail(attempt, rank, str(error), first=first, deadline_s=_LAST_WORDS_S)
            except StoreError:
                pass  # the others learn it by their deadline; here the first cause is raised
            raise

    def outcome(
        self,
        attempt: Attempt,
        *,
        committer: int = 0,
        deadline_s: float,
        stop: threading.Event | None = None,
    ) -> Committed | Failed:
        """Wait until it is known how the attempt ended. A deadline that is over is a failure, whose
        first cause is looked for once more; it is waited a little longer than that, for a committer
        who has the same deadline and says at its end why he gave up. Raises Stopped, and StoreError
        when the store does not answer."""
        deadline = self.deadline(deadline_s + min(deadline_s, _LAST_WORDS_S), stop)
        while True:
            owner = self.owner(attempt.step, deadline)
            if owner == attempt:
                return Committed(attempt=attempt)
            # Of a step that was there before, the committer says whether it is the same.
            if (
                owner is not None
                and self.size(attempt.part(committer, "same"), deadline) is not None
            ):
                return Committed(attempt=owner)
            failure = committing.first_cause(self, attempt, committer, deadline)
            if failure is not None:
                return Failed(attempt=attempt, why=failure.why, rank=failure.rank)
            if not deadline.pause():
                return self._without_word(attempt, committer, deadline.seconds)

    def _without_word(self, attempt: Attempt, committer: int, deadline_s: float) -> Failed:
        """What there is to say when the deadline is over."""
        deadline = self.deadline(_LAST_WORDS_S)
        entries = list(self.store.list(attempt.prefix, deadline_s=deadline.left()))
        failure = committing.any_cause(self, attempt, entries, deadline)
        if failure is not None:
            return Failed(attempt=attempt, why=failure.why, rank=failure.rank)
        return Failed(
            attempt=attempt,
            why=f"within {deadline_s:g} s rank {committer}, which commits step {attempt.step}, did "
            "not say how its save ended: it may be gone",
        )

    def set_aside(self, checkpoint: Checkpoint, *, deadline_s: float = REQUEST_DEADLINE_S) -> None:
        """Make a checkpoint whose parts are corrupt exist no more, so that its step can be saved
        again (a step is saved once). Its commit is kept under another name (`names.Attempt.aside`)
        until its parts are pruned. For one rank to call, before anything is saved."""
        deadline = self.deadline(deadline_s)
        attempt = attempt_of(checkpoint)
        if self.owner(attempt.step, deadline) != attempt:
            return  # it was set aside already, or another is there by now
        key = names.commit_key(self.name, attempt.step)
        envelope = self.fetch(key, signing.MAX_ENVELOPE_BYTES, deadline)
        committing.put_once(self, attempt.aside, envelope, deadline)
        self.store.delete(key, deadline_s=deadline.left())

    def prune(
        self,
        *,
        keep: int,
        older_than_s: float,
        now: float,
        saved: int | None = None,
        deadline_s: float = PRUNE_DEADLINE_S,
        stop: threading.Event | None = None,
    ) -> Pruned:
        """Remove all but the `keep` newest whole checkpoints (0: none is removed), and leftovers:
        attempts that never became one and have not changed for `older_than_s`, or are of a step
        older than all that is kept. The newest whole one stays whatever is asked. `now`: seconds
        since 1970. `saved`: the step that a training has just saved: it stays, and what is newer,
        since a training that went back saves smaller ones. Raises Stopped, StoreError; what was to
        go and is still there goes the next time."""
        deadline = self.deadline(deadline_s, stop)
        found = plan.sort(self.name, self.store.list(f"{self.name}/", deadline_s=deadline.left()))
        oldest = self._oldest_kept(found, keep, deadline)
        if oldest is not None and saved is not None:
            oldest = min(oldest, saved)
        drop = [step for step in sorted(found.commits) if oldest is not None and step < oldest]
        for step in drop:  # from here on it does not exist; its parts are leftovers like others
            self._delete(found.commits[step].key, deadline)
        nbytes = 0
        gone = []
        for attempt in plan.leftovers(found, oldest_kept=oldest, before_s=now - older_than_s):
            if self._is_owned(attempt, deadline):
                continue
            for entry in found.attempts.pop(attempt):
                self._delete(entry.key, deadline)
                nbytes += entry.nbytes
            gone.append(attempt)
        for attempt in found.aside.keys() - found.attempts.keys():
            self._delete(attempt.aside, deadline)
        deadline.check()
        self.store.sweep(older_than_s=older_than_s, deadline_s=deadline.left())
        leftovers = tuple(attempt for attempt in gone if attempt.step not in drop)
        return Pruned(steps=tuple(drop), leftovers=leftovers, nbytes=nbytes)

    def _oldest_kept(self, found: plan.Found, keep: int, deadline: Deadline) -> int | None:
        """The step of the `keep`-th newest whole checkpoint; None when there are not so many, and
        no checkpoint may go."""
        whole = 0
        for step in sorted(found.commits, reverse=True) if keep > 0 else ():
            deadline.check()
            try:
                checkpoint = self.read(step, deadline_s=deadline.left())
            except (Missing, Refused):
                continue
            if not self.missing(checkpoint, deadline_s=deadline.left()):
                whole += 1
                if whole == keep:
                    return step
        return None

    def _is_owned(self, attempt: Attempt, deadline: Deadline) -> bool:
        """Whether an attempt is, or may be, the checkpoint of its step: a listing can be behind."""
        try:
            return self.owner(attempt.step, deadline) == attempt
        except Refused:
            return True  # what is there can't be read: somebody should look at it first

    def _delete(self, key: str, deadline: Deadline) -> None:
        deadline.check()
        self.store.delete(key, deadline_s=deadline.left())
