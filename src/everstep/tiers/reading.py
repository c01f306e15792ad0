"""Reading a series of checkpoints: what is there, checked before it is believed.

Theory of operation. A commit is taken when it is an envelope, signed as is asked for, of a manifest
that agrees with itself and names this series and this step; a part's manifest, when its SHA-256 is
in the commit. What is longer than it may be is refused by its length, before it is read.

All calls block, on the store and for as long as their deadline says, and may be made on any thread.

What it does not know: the bytes of the parts (`load.py`), and which tier this is.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from everstep.errors import UserError
from everstep.tiers import catalog, names, plan, signing
from everstep.tiers.catalog import Checkpoint, Part, PartManifest
from everstep.tiers.names import Attempt
from everstep.tiers.signing import Standing
from everstep.tiers.store import Missing, Refused, Store
from everstep.tiers.waiting import Deadline

REQUEST_DEADLINE_S = 60.0
"""For requests about a few bytes, where the caller names no deadline."""
_HEAD_BYTES = 512  # of a commit: its attempt stands in them
_ATTEMPT = re.compile(rb'"attempt":"([0-9a-f]{16})"')


class Reader:
    """The checkpoints called `name` in `store`. `key`: checks (and signs) them; None: they are not
    signed. `require_signature`: refuse those that are not signed with it. `clock`: monotonic
    seconds; `pause`: how it waits where there is no event to stop it. Raises UserError when a
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
        names.check_series(name)
        if require_signature and key is None:
            raise UserError(
                f"checkpoints of {name!r} must be signed, and there is no key to check them by: "
                "name the secret's file"
            )
        self.store = store
        self.name = name
        self.require_signature = require_signature
        self.key = key
        self._clock = clock
        self._pause = pause

    def steps(self, *, deadline_s: float = REQUEST_DEADLINE_S) -> list[int]:
        """Steps whose commit is there, in order. Whether their parts are too, `missing` says."""
        found = (
            names.step_of(entry.key)
            for entry in self.store.list(f"{self.name}/commits/", deadline_s=deadline_s)
        )
        return [commit[1] for commit in found if commit is not None]

    def read(self, step: int, *, deadline_s: float = REQUEST_DEADLINE_S) -> Checkpoint:
        """The checkpoint of `step`, checked by itself. Raises Missing, Refused, StoreError."""
        return self.examine(step, deadline_s=deadline_s)[0]

    def examine(
        self, step: int, *, deadline_s: float = REQUEST_DEADLINE_S
    ) -> tuple[Checkpoint, Standing]:
        """As `read`, and what its signature is worth. Refuses as `read` does."""
        key = names.commit_key(self.name, step)
        text = self.fetch(key, signing.MAX_ENVELOPE_BYTES, self.deadline(deadline_s))
        with self.naming(key):
            manifest, standing = signing.unseal(text, self.key)
            if self.require_signature and standing != "valid":
                raise Refused("it is not signed, and only signed checkpoints are taken")
            checkpoint = catalog.decode(manifest)
            if (checkpoint.series, checkpoint.step) != (self.name, step):
                raise Refused(
                    f"it is the manifest of step {checkpoint.step} of {checkpoint.series!r}"
                )
        return checkpoint, standing

    def part_manifest(
        self, checkpoint: Checkpoint, rank: int, *, deadline_s: float = REQUEST_DEADLINE_S
    ) -> PartManifest:
        """The manifest of rank's part: the one that the checkpoint names, by its SHA-256, and of
        its step, rank and length. Raises Missing, Refused, StoreError."""
        part = checkpoint.parts[rank]
        key = attempt_of(checkpoint).part(rank, "json")
        text = self.fetch(key, catalog.MAX_MANIFEST_BYTES, self.deadline(deadline_s))
        with self.naming(key):
            if hashlib.sha256(text).hexdigest() != part.manifest_sha256:
                raise Refused("it is not the manifest that the checkpoint was made with (SHA-256)")
            manifest = decode_part(text, checkpoint.step, rank, part.nbytes)
            if self.require_signature and not manifest.block_sha256:
                raise Refused("it has no SHA-256 of its blocks, so the signature says nothing")
        return manifest

    def missing(
        self, checkpoint: Checkpoint, *, deadline_s: float = REQUEST_DEADLINE_S
    ) -> dict[int, str]:
        """Ranks whose part is not there or is not as long as it should be, with what is wrong. No
        byte is read. A listing may lag, so what it lacks is asked for by name."""
        deadline = self.deadline(deadline_s)
        attempt = attempt_of(checkpoint)
        lengths = plan.part_lengths(self.store.list(attempt.prefix, deadline_s=deadline.left()))
        wrong = {}
        for part in checkpoint.parts:
            there = dict(lengths.get(part.rank, {}))
            for kind in {"safetensors", "json"} - there.keys():
                size = self.size(attempt.part(part.rank, kind), deadline)
                if size is not None:
                    there[kind] = size
            problem = _problem(part, there)
            if problem:
                wrong[part.rank] = problem
        return wrong

    def deadline(self, seconds: float, stop: threading.Event | None = None) -> Deadline:
        """A deadline by this series' clock."""
        return Deadline(seconds, stop=stop, clock=self._clock, pause=self._pause)

    def fetch(self, key: str, most: int, deadline: Deadline) -> bytes:
        """A whole object of at most `most` bytes. Raises Missing, Refused when it is longer,
        StoreError."""
        nbytes = self.store.size(key, deadline_s=deadline.left())
        if nbytes > most:
            raise Refused(f"{self.store.where}/{key}: {nbytes} bytes, more than the {most} allowed")
        return self.store.get(key, start=0, end=nbytes, deadline_s=deadline.left())

    def size(self, key: str, deadline: Deadline) -> int | None:
        """An object's bytes; None when it is not there."""
        try:
            return self.store.size(key, deadline_s=deadline.left())
        except Missing:
            return None

    def owner(self, step: int, deadline: Deadline) -> Attempt | None:
        """The attempt whose parts the checkpoint of `step` is made of, as its commit says in its
        first bytes, believed or not; None when there is none. Raises Refused when it does not say.
        """
        key = names.commit_key(self.name, step)
        nbytes = self.size(key, deadline)
        if nbytes is None:
            return None
        end = min(nbytes, _HEAD_BYTES)
        try:
            match = _ATTEMPT.search(self.store.get(key, end=end, deadline_s=deadline.left()))
        except Missing:
            return None
        if match is None:
            raise Refused(f"{self.store.where}/{key}: this is no commit of a checkpoint")
        return Attempt(series=self.name, step=step, name=match[1].decode())

    @contextlib.contextmanager
    def naming(self, key: str) -> Iterator[None]:
        """Refusals with the object that was refused."""
        try:
            yield
        except Refused as error:
            raise Refused(f"{self.store.where}/{key}: {error}") from error


def attempt_of(checkpoint: Checkpoint) -> Attempt:
    """The attempt whose parts it is made of."""
    return Attempt(series=checkpoint.series, step=checkpoint.step, name=checkpoint.attempt)


def decode_part(text: bytes, step: int, rank: int, nbytes: int) -> PartManifest:
    """The manifest of rank's part at `step`, of `nbytes` bytes. Raises Refused."""
    manifest = catalog.decode_part(text)
    about = manifest.snapshot.about
    if (about.step, about.rank) != (step, rank):
        raise Refused(f"it is the manifest of rank {about.rank} at step {about.step}")
    if manifest.snapshot.nbytes != nbytes:
        raise Refused(f"the part has {nbytes} bytes, its manifest {manifest.snapshot.nbytes}")
    return manifest


def _problem(part: Part, there: Mapping[str, int]) -> str:
    """What is wrong with a part, of which the objects of these kinds and lengths are there."""
    if "safetensors" not in there:
        return "it is not there"
    if there["safetensors"] != part.nbytes:
        return f"it has {there['safetensors']} bytes, and should have {part.nbytes}"
    return "" if "json" in there else "its manifest is not there"
