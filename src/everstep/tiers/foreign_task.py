"""What is said to the process that turns torch's distributed checkpoints into ours, and back."""

from __future__ import annotations

from typing import Literal

import msgspec

from everstep.tiers.incoming import PART_BYTES


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to do. `addresses`: of our checkpoint; `folder`: of the other; `step`: to make, or to
    read, None for the newest."""

    do: Literal["import", "export"]
    addresses: tuple[str, ...]
    folder: str
    series: str
    step: int | None = None
    require_signature: bool = False
    part_bytes: int = PART_BYTES


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What was done."""

    step: int
    tensors: int
    values: int
