"""The mean of a small value over ranks, inside a step or a section.

One all-reduce of float64 each, where it is called. A mean that came with the step's fence would
cost nothing, but could not be exact: what a rank returns from a step must be with its agent before
it enters the fence, and should the only rank that passed a fence die, nobody has what came with it.

Does not know: where in a step it is called.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from everstep.errors import UserError

MOST_VALUES = 1024


def mean_over_ranks(value: Any, group: Any) -> Any:
    """The mean of `value` over the ranks of `group` (None: all): a float for a number, a float64
    tensor of the value's shape, on its device, for a tensor.

    Raises UserError for what is no number and no tensor of at most one dimension and 1024
    elements. Blocks in a collective."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 1 or value.numel() > MOST_VALUES or value.is_complex():
            raise UserError(
                f"run.mean takes a number or a real tensor of at most one dimension and "
                f"{MOST_VALUES} elements, not one of {value.dtype} {tuple(value.shape)}"
            )
        cells = value.detach().to(torch.float64, copy=True)
    elif isinstance(value, (bool, int, float)):
        cells = torch.tensor(float(value), dtype=torch.float64)
    else:
        raise UserError(f"run.mean takes a number or a small tensor, not a {type(value).__name__}")
    dist.all_reduce(cells, group=group)
    cells /= dist.get_world_size(group)
    return cells if isinstance(value, torch.Tensor) else cells.item()
