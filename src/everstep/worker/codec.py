"""Plain data with tensors in it, to bytes and back; nothing decoded here can run code.

Used for what is no big tensor: schedulers' states, results of steps, `run.state`, capsules. A value
is encoded as a tagged tree of MessagePack: containers keep their type (list, tuple, dict with any
plain key, OrderedDict, Counter, set), tensors are dtype, shape and bytes, floats are exact. Equal
values have equal digests, whatever order their keys or members came in: a restored object keeps
them in an order of its own."""

from __future__ import annotations

import ctypes
from collections import Counter, OrderedDict
from typing import Any

import msgspec
import torch
import xxhash

from everstep.errors import UserError

_SCALARS = (type(None), bool, int, float, str, bytes)
_CONTAINERS: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set}
_MAPPINGS: dict[str, type[Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_NAMES = {kind: name for name, kind in (_CONTAINERS | _MAPPINGS).items()}
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def dtype_named(name: str) -> torch.dtype:
    """The dtype whose `str` is `name`. Raises UserError for an unknown one."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise UserError(
            f"unknown dtype {name!r} in a state; do all ranks run the same torch?"
        ) from None


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as a flat uint8 tensor on its device; shares memory where it is
    contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    flat = flat.as_strided(
        flat.shape, (1,)
    )  # a single element may have any stride, and then has no bytes
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def copy(value: Any) -> Any:
    """A copy of plain data that shares nothing with it; what `encode` refuses is refused."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is dict:
        return {key: copy(item) for key, item in value.items()}
    if kind is list:
        return [copy(item) for item in value]
    if kind is tuple:
        return tuple([copy(item) for item in value])
    if kind is torch.Tensor:
        return value.detach().clone()
    return decode(encode(value, "a state"))


def buffer_of(raw: torch.Tensor) -> Any:
    """A buffer over the memory of a flat uint8 CPU tensor, without NumPy. The caller keeps `raw`
    alive."""
    return (ctypes.c_char * raw.numel()).from_address(raw.data_ptr()) if raw.numel() else b""


def _to_bytes(tensor: torch.Tensor) -> bytes:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    if plain and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
    raw = tensor_bytes(tensor.detach().to("cpu").resolve_conj().resolve_neg())
    return bytes(buffer_of(raw))


def _pack(value: Any, where: str) -> list[Any]:
    if isinstance(value, torch.Tensor):
        if hasattr(value, "trigger_wait"):  # what a functional collective returns
            value = value.trigger_wait()
        if hasattr(value, "to_local"):
            raise UserError(
                f"{where} is a DTensor, which is spread over ranks; keep its to_local() or its "
                "full_tensor()"
            )
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise UserError(
                f"{where} is a sparse, quantized or meta tensor, which everstep does not keep; "
                "make it a dense one"
            )
        return ["tensor", str(value.dtype), list(value.shape), _to_bytes(value)]
    if isinstance(value, bool) or value is None or type(value) in _SCALARS:
        if type(value) is int and not -(2**63) <= value < 2**64:
            return ["bigint", hex(value)]  # decimal has a limit of digits
        return ["value", value]
    name = _NAMES.get(type(value))
    if name in _CONTAINERS:
        packed = [_pack(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if name == "set":
            packed.sort(key=msgspec.msgpack.encode)
        return [name, packed]
    if name in _MAPPINGS:
        return [name, [[_pack(k, where), _pack(v, f"{where}[{k!r}]")] for k, v in value.items()]]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a NumPy scalar
        plain = value.item()
        if type(plain) in _SCALARS:  # an extended float gives itself
            return _pack(plain, where)
    raise UserError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which everstep does "
        "not keep: only plain data (None, bool, int, float, str, bytes, list, tuple, set, dict) "
        "and tensors; convert it"
    )


def _unpack(tree: list[Any]) -> Any:
    tag = tree[0]
    if tag == "value":
        return tree[1]
    if tag == "bigint":
        return int(tree[1], 16)
    if tag == "tensor":
        dtype, shape, raw = dtype_named(tree[1]), tree[2], tree[3]
        if not raw:
            return torch.zeros(shape, dtype=dtype)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](_unpack(item) for item in tree[1])
    if tag in _MAPPINGS:
        mapping = _MAPPINGS[tag]()
        for key, value in tree[1]:
            mapping[_unpack(key)] = _unpack(value)
        return mapping
    raise UserError(f"a state has an unknown tag {tag!r}; do all ranks run the same everstep?")


def encode(value: Any, where: str) -> bytes:
    """Bytes of plain data. `where` names the value in the UserError that unfit data raises. Tensors
    on a device are copied to the host, which waits for them."""
    try:
        return msgspec.msgpack.encode(_pack(value, where))
    except (UnicodeEncodeError, RecursionError) as error:
        raise UserError(f"{where} can't be kept: {error}; convert it to plain data") from None


def decode(data: bytes) -> Any:
    """The value of `encode`'s bytes; its tensors are on the CPU."""
    return _unpack(msgspec.msgpack.decode(data))


def digest(data: bytes) -> str:
    """xxh3-128 of `encode`'s bytes; the order of a dict's keys does not count."""
    return xxhash.xxh3_128_hexdigest(
        msgspec.msgpack.encode(_canonical(msgspec.msgpack.decode(data)))
    )


def _canonical(tree: list[Any]) -> list[Any]:
    tag = tree[0]
    if tag in _CONTAINERS:
        return [tag, [_canonical(item) for item in tree[1]]]
    if tag in _MAPPINGS:
        items = [[_canonical(key), _canonical(value)] for key, value in tree[1]]
        if tag != "ordered":
            items.sort(key=lambda item: msgspec.msgpack.encode(item[0]))
        return [tag, items]
    return tree
