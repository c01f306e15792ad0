"""The step in a name."""

from __future__ import annotations

import os
import re

from everstep.errors import UserError

_STEP = re.compile(r"(\d{1,10})/?\Z")


def step_of(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """The step that DCP's `checkpoint_id` names: a number, or what ends with one ("step-100").
    Raises UserError."""
    match = _STEP.search(str(checkpoint_id))
    if match is None:
        raise UserError(
            f"checkpoint_id={checkpoint_id!r} names no step; give the step's number, or a name "
            "that ends with it"
        )
    return int(match[1])
