"""Signatures of checkpoints: the envelope that a commit is, and the key.

Theory of operation. What is put under a commit's key is an envelope: the checkpoint's manifest, as
the very bytes that were signed, and an HMAC-SHA256 of them. The key is made of the job's secret for
this purpose alone (`Secret.checkpoint_key`). The manifest names its series and step, so that one
can't stand for another; it has the SHA-256 of each part's manifest, and that, where there is a key,
the SHA-256 of each block. So who can write to the store, but has no key, can remove and withhold
checkpoints, but can change none unseen.

It does not know when a signature is asked for (`series.py`), nor where the secret comes from.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from everstep.snapshot import block_spans
from everstep.tiers.catalog import MAX_MANIFEST_BYTES, Record
from everstep.tiers.store import Refused

Standing: TypeAlias = Literal["valid", "unchecked", "absent"]
"""Of a signature: `valid`: made with our key; `unchecked`: there is one, and no key to check it by;
`absent`: there is none. One that is wrong has no standing: it is refused."""

_PURPOSE = b"everstep checkpoint 1\x00"
_HEADROOM = 4096  # of the envelope around a manifest


class Envelope(Record, frozen=True, kw_only=True):
    """What lies under a commit's key. `signature`: empty where there was no key."""

    signature: Annotated[str, Meta(pattern=r"^(?:[0-9a-f]{64})?\Z")]
    manifest: msgspec.Raw


MAX_ENVELOPE_BYTES = MAX_MANIFEST_BYTES + _HEADROOM


def seal(manifest: bytes, key: bytes | None) -> bytes:
    """The envelope of `manifest` (JSON), signed if there is a key."""
    signature = _sign(manifest, key) if key is not None else ""
    return msgspec.json.encode(Envelope(signature=signature, manifest=msgspec.Raw(manifest)))


def unseal(envelope: bytes, key: bytes | None) -> tuple[bytes, Standing]:
    """The manifest in an envelope, and what its signature is worth. Raises Refused for what is no
    envelope, and for a signature that was not made with `key`."""
    if len(envelope) > MAX_ENVELOPE_BYTES:
        raise Refused(f"a commit of {len(envelope)} bytes exceeds {MAX_ENVELOPE_BYTES}")
    try:
        opened = msgspec.json.decode(envelope, type=Envelope)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Refused(f"this is no commit of a checkpoint: {error}") from error
    manifest = bytes(opened.manifest)
    if not opened.signature:
        return manifest, "absent"
    if key is None:
        return manifest, "unchecked"
    if not hmac.compare_digest(opened.signature, _sign(manifest, key)):
        raise Refused("its signature was made with another key, or it was changed afterwards")
    return manifest, "valid"


def block_sha256(area: memoryview, block_bytes: int) -> tuple[str, ...]:
    """SHA-256 of each block of `area`. Blocks for a digest of all; lets go of the interpreter."""
    return tuple(
        hashlib.sha256(area[start:end]).hexdigest()
        for start, end in block_spans(area.nbytes, block_bytes)
    )


def _sign(manifest: bytes, key: bytes) -> str:
    return hmac.digest(key, _PURPOSE + manifest, "sha256").hex()
