"""What `everstep prove` compares of a step, as plain data. Exact: floats by their bits."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import xxhash

from everstep.data.loader import Batch
from everstep.errors import UserError
from everstep.worker import codec
from everstep.worker.state import digest_of


def samples_of(batch: Batch) -> Any:
    """The sample numbers of a batch, or its digest where they are not known. To be asked before the
    step may change it."""
    if batch.samples is not None:
        return list(batch.samples)
    return _digest(batch.value)


def _digest(value: Any) -> str:
    """Of plain data exactly; of an object, what its attributes are."""
    try:
        return xxhash.xxh3_128_hexdigest(codec.encode(value, "the batch"))
    except UserError:
        if not hasattr(value, "__dict__"):
            raise
        parts = [(name, _digest(part)) for name, part in vars(value).items()]
        return xxhash.xxh3_128_hexdigest(repr(parts).encode())


def record_of(
    result: Any, samples: Any, log: dict[int, dict[str, float]], state: dict[str, Any]
) -> bytes:
    """MessagePack of the returned leaves; where the step returned nothing, of what was logged; of
    `run.state`, and of what `samples_of` said of the batch."""
    value = _describe(result)
    if result is None:
        value = [
            [step, name, float(scalar).hex()]
            for step, scalars in sorted(log.items())
            for name, scalar in sorted(scalars.items())
        ]
    kept = xxhash.xxh3_128_hexdigest(codec.encode(state, "run.state")) if state else ""
    return msgspec.msgpack.encode({"value": value, "samples": samples, "state": kept})


def _describe(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [[str(key), *_describe(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_describe(item) for item in value]
    return [_describe_leaf(value)]


def _describe_leaf(leaf: Any) -> list[Any]:
    if isinstance(leaf, torch.Tensor):
        if leaf.numel() == 1 and leaf.is_floating_point():
            return [str(leaf.dtype), float(leaf).hex()]
        return [str(leaf.dtype), list(leaf.shape), digest_of([leaf])]
    return [type(leaf).__name__, leaf.hex() if isinstance(leaf, float) else repr(leaf)]
