"""What is no tensor, as data: to bytes and back, exactly, and never as code.

Theory of operation. A value is a tree of MessagePack. None, bool, int, float, str and bytes stand
for themselves; all else is an array of a tag and what it is made of. So what comes back is equal in
value and in type, and a tag that is not known is refused: nothing is looked up by a name from the
bytes but in the tables here. torch's own words (a dtype, a device, a size) are kept by their names;
`decode` hands them to whoever knows torch.

It does not know torch, nor where a value is kept.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from everstep.errors import UserError
from everstep.tiers.store import Refused

MAX_BYTES = 16 << 20
"""Of one encoded value. More than that is a tensor's affair."""
_MAX_DEPTH = 100

_PLAIN = (type(None), bool, float, str, bytes)
_SEQUENCES: dict[str, type[Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_MAPPINGS: dict[str, type[Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_TAGS = {kind: tag for tag, kind in (_SEQUENCES | _MAPPINGS).items()}
_TORCH = {"dtype", "device", "layout", "memory_format"}
_NUMPY = re.compile(r"[<>|=]?[biufc]\d{1,2}")


class Named(NamedTuple):
    """A word of torch's: `kind` is `dtype`, `device`, `layout`, `memory_format` or `Size`; `text`
    is what `str` makes of it, a size's numbers with blanks between."""

    kind: str
    text: str


def encode(value: Any, key: str) -> bytes:
    """The bytes of `value`. Raises UserError, which names `key` and the place in it, for what is no
    plain data, and for more than `MAX_BYTES`."""
    try:
        data = msgspec.msgpack.encode(_pack(value, key, 0))
    except UnicodeEncodeError as error:
        raise UserError(f"{key} holds text that is no Unicode: {error}; encode it") from None
    if len(data) > MAX_BYTES:
        raise UserError(
            f"{key} takes {len(data)} bytes, and a value that is no tensor may take {MAX_BYTES}; "
            "make a tensor of it"
        )
    return data


def decode(data: bytes, named: Callable[[Named], Any] | None = None) -> Any:
    """The value in `data`. `named` makes torch's words; without it they stay `Named`. Raises
    Refused for bytes that `encode` does not write."""
    if len(data) > MAX_BYTES:
        raise Refused(f"a value of {len(data)} bytes exceeds {MAX_BYTES}")
    try:
        return _unpack(msgspec.msgpack.decode(data), named or _itself)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise Refused(f"this is no value of a checkpoint: {error}") from error


def _itself(word: Named) -> Any:
    return word


def _pack(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth > _MAX_DEPTH:
        raise UserError(f"{where} is nested deeper than {_MAX_DEPTH}; flatten it")
    if kind is int:
        return value if -(2**63) <= value < 2**64 else ["int", hex(value)]
    if kind is complex:
        return ["complex", value.real, value.imag]
    tag = _TAGS.get(kind)
    if tag in _MAPPINGS:
        return [
            tag,
            *(
                [_pack(key, where, depth + 1), _pack(item, f"{where}[{key!r}]", depth + 1)]
                for key, item in value.items()
            ),
        ]
    if tag is not None:
        packed = [_pack(item, f"{where}[{at}]", depth + 1) for at, item in enumerate(value)]
        if tag in ("set", "frozenset"):  # equal sets, equal bytes
            packed.sort(key=msgspec.msgpack.encode)
        return [tag, *packed]
    if kind.__module__ == "torch" and kind.__name__ in _TORCH:
        return ["torch", kind.__name__, str(value)]
    if kind.__module__ == "torch" and kind.__name__ == "Size":
        return ["torch", "Size", " ".join(map(str, value))]
    packed_scalar = _pack_numpy(value)
    if packed_scalar is not None:
        return packed_scalar
    raise UserError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint can't hold as "
        "data: it holds tensors, and None, bool, int, float, complex, str, bytes, list, tuple, "
        "set, dict, torch's dtypes, devices and sizes, and NumPy's numbers; convert it, or leave "
        "it out"
    )


def _pack_numpy(value: Any) -> list[Any] | None:
    """A NumPy scalar; None for anything else."""
    dtype = getattr(value, "dtype", None)
    if getattr(value, "shape", None) != () or not type(value).__module__.startswith("numpy"):
        return None
    text = getattr(dtype, "str", "")
    if hasattr(value, "__array_interface__") and _NUMPY.fullmatch(text) and _is_scalar(value):
        return ["numpy", text, value.tobytes()]
    return None


def _is_scalar(value: Any) -> bool:
    return type(value).__name__ != "ndarray"


def _unpack(tree: Any, named: Callable[[Named], Any]) -> Any:
    if not isinstance(tree, list):
        if isinstance(tree, dict):
            raise ValueError("a map has no tag")  # noqa: TRY004 - of the data, not of an argument
        return tree
    tag, *rest = tree or [None]
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_unpack(item, named) for item in rest)
    if tag in _MAPPINGS:
        mapping = _MAPPINGS[tag]()
        for key, item in rest:
            mapping[_unpack(key, named)] = _unpack(item, named)
        return mapping
    match tree:
        case ["int", str() as text]:
            return int(text, 16)
        case ["complex", float() as real, float() as imaginary]:
            return complex(real, imaginary)
        case ["torch", str() as kind, str() as text] if kind in _TORCH or kind == "Size":
            return named(Named(kind, text))
        case ["numpy", str() as text, bytes() as raw] if _NUMPY.fullmatch(text):
            return _unpack_numpy(text, raw)
    raise ValueError(f"unknown tag {str(tag)[:40]!r}")


def _unpack_numpy(text: str, raw: bytes) -> Any:
    """The scalar; as Python's number where there is no NumPy."""
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        raise ValueError("it holds a number of NumPy's, and there is no NumPy here") from None
    array = numpy.frombuffer(raw, dtype=text)
    if array.shape != (1,):
        raise ValueError("a number of NumPy's has another size than its type")
    return array[0]
