"""What `everstep prove` compares of a step, as plain data. Exact: floats by their bits."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import xxhash

from everstep.data.loader import Batch
from everstep.worker import codec
from everstep.worker.capsule import flatten
from everstep.worker.state import digest_of


def samples_of(batch: Batch) -> Any:
    """The sample numbers of a batch, or its digest where they are not known. To be asked before the
    step may change it."""
    if batch.samples is not None:
        return list(batch.samples)
    return xxhash.xxh3_128_hexdigest(codec.encode(batch.value, "the batch"))


def record_of(result: Any, samples: Any) -> bytes:
    """MessagePack of the returned leaves and of what `samples_of` said of the batch."""
    value = [_describe(leaf) for leaf in flatten(result)]
    return msgspec.msgpack.encode({"value": value, "samples": samples})


def _describe(leaf: Any) -> list[Any]:
    if isinstance(leaf, torch.Tensor):
        if leaf.numel() == 1 and leaf.is_floating_point():
            return [str(leaf.dtype), float(leaf).hex()]
        return [str(leaf.dtype), list(leaf.shape), digest_of([leaf])]
    return [type(leaf).__name__, leaf.hex() if isinstance(leaf, float) else repr(leaf)]
