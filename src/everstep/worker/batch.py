"""A fresh batch in the place of a used one, wherever its parts stand among a step's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
