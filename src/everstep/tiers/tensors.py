"""Tensors as bytes: into an area of memory, and out of it.

Theory of operation. Bytes are bytes: a tensor is copied as integers of its elements' size, so that
each of torch's types goes the same way, also those that torch can hardly compute with, and no bit
of a NaN is touched. What lies otherwise in memory (a transpose, a slice, a conjugate, on a device)
is laid out in order by the copy itself.

It does not know where a tensor's place in a file is, nor what a checkpoint is.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from everstep.errors import UserError
from everstep.tiers.store import Refused
from everstep.tiers.values import Named


def _names_of(kind: type[Any]) -> dict[str, Any]:
    return {str(value): value for value in vars(torch).values() if isinstance(value, kind)}


_DTYPES: dict[str, torch.dtype] = _names_of(torch.dtype)
_WORDS = {
    "dtype": _DTYPES,
    "layout": _names_of(torch.layout),
    "memory_format": _names_of(torch.memory_format),
}
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_named(name: str) -> torch.dtype:
    """The dtype whose `str` is `name`. Raises Refused where this torch has none."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise Refused(f"this torch ({torch.__version__}) has no dtype {name[:64]!r}") from None


def word(named: Named) -> Any:
    """What `values.decode` asks for: torch's dtype, device, size of that name. Raises ValueError
    for an unknown one."""
    try:
        if named.kind == "Size":
            return torch.Size(int(size) for size in named.text.split())
        if named.kind == "device":
            return torch.device(named.text)
        return _WORDS[named.kind][named.text]
    except (KeyError, RuntimeError):
        raise ValueError(f"no {named.kind} is called {named.text[:64]!r}") from None


def plain(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """The tensor without its gradient's graph, when it has bytes of its own. Raises UserError,
    which names `key`, for one that has not."""
    if hasattr(tensor, "trigger_wait"):  # what a functional collective returns
        tensor = tensor.trigger_wait()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UserError(
            f"{key} is a sparse, quantized or meta tensor, which has no bytes in order; make it a "
            "dense one"
        )
    made_of_others: bool = is_traceable_wrapper_subclass(tensor)
    if made_of_others:
        raise UserError(
            f"{key} is a {type(tensor).__qualname__}, a tensor made of others; save those that it "
            "is made of"
        )
    return tensor.detach()


def fill(area: memoryview, tensor: torch.Tensor) -> None:
    """Copy the elements of `tensor` into `area`, which is writable and as long. Blocks, also for a
    device."""
    if not area.nbytes:
        return
    tensor = tensor.resolve_conj().resolve_neg()
    in_order = tensor.device.type == "cpu" and tensor.is_contiguous()
    if in_order and torch.get_num_threads() == 1:
        # libc's copy does not read what it overwrites, which torch's does.
        room = (ctypes.c_char * area.nbytes).from_buffer(area)
        ctypes.memmove(room, tensor.data_ptr(), area.nbytes)
        return
    source = _as_ints(tensor)
    with torch.no_grad():
        over(area).view(source.dtype).view(source.shape).copy_(source)


def put(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target`, which has its shape: bit for bit where the types are one, else
    as torch converts."""
    target = target.detach()
    if target.dtype == source.dtype and not target.is_conj() and not target.is_neg():
        target, source = _as_ints(target), _as_ints(source)
    with torch.no_grad():
        target.copy_(source)


def over(area: Any) -> torch.Tensor:
    """`area`'s bytes as a tensor that shares them, and holds the area."""
    return torch.frombuffer(area, dtype=torch.uint8)


def direct(tensor: torch.Tensor, dtype: torch.dtype) -> memoryview | None:
    """The bytes of `tensor`, to be read into, if they lie in order in this process' memory and are
    of `dtype`. The caller keeps the tensor."""
    tensor = tensor.detach()
    in_order = tensor.device.type == "cpu" and tensor.is_contiguous()
    if not in_order or tensor.dtype != dtype or tensor.is_conj() or tensor.is_neg():
        return None
    room = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * room).from_address(tensor.data_ptr())).cast("B")


def _as_ints(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same elements as integers of their size; complex128 as pairs of floats."""
    size = tensor.element_size()
    return tensor.view(_INTS[size]) if size in _INTS else torch.view_as_real(tensor)
