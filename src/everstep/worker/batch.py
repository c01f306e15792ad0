"""A fresh batch in the place of a used one, wherever its parts stand among a step's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from everstep.errors import UserError
from everstep.worker.state import version_of

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes)


def exchange(value: Any, old: Any, new: Any) -> Any:
    """`value` with every part that *is* `old`, or a part of `old`, replaced by its counterpart in
    `new`. Lists, tuples and dicts are looked into and made anew where something in them changed."""
    return _walk(value, {id(a): b for a, b in _pairs(old, new)})


def _pairs(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(old, _IMMUTABLE):
        return
    yield old, new
    if isinstance(old, dict) and isinstance(new, dict):
        for key, item in old.items():
            if key in new:
                yield from _pairs(item, new[key])
    elif isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        for a, b in zip(old, new, strict=False):
            yield from _pairs(a, b)
    elif hasattr(old, "__dict__") and type(old) is type(new) and not hasattr(old, "data_ptr"):
        yield from _pairs(vars(old), vars(new))


def _walk(value: Any, table: dict[int, Any]) -> Any:
    if id(value) in table:
        return table[id(value)]
    if type(value) is dict:
        return {key: _walk(item, table) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_walk(item, table) for item in value)
    return value


class Made:
    """The tensors among a step's arguments that the loop's body made: no fresh ones can be had of
    them, so the step must not write to them."""

    def __init__(self, value: Any, batch: Any) -> None:
        table = {id(part): None for part, _ in _pairs(batch, batch)}
        self._seen = [(tensor, version_of(tensor)) for tensor in _tensors(value, table)]

    def refuse_changed(self, step: int) -> None:
        """Raise UserError if the step has written to one."""
        for tensor, version in self._seen:
            if version_of(tensor) != version:
                raise UserError(
                    f"step {step} changes in place a tensor ({tensor.dtype}, "
                    f"{list(tensor.shape)}) that the loop's body made and gave to it; a second "
                    "attempt would find it changed. Make it in the step function, or change a copy"
                )


def _tensors(value: Any, known: dict[int, None]) -> Iterator[torch.Tensor]:
    if id(value) in known:
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) is dict:
        for item in value.values():
            yield from _tensors(item, known)
    elif type(value) in (list, tuple):
        for item in value:
            yield from _tensors(item, known)
