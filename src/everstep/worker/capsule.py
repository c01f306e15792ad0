"""What belongs to one rank alone after a step, and how it is known before the step is over.

A replacement must return from the last committed step what its predecessor would have returned,
with the buffers it would have had. So this *capsule* must be with the agent before any peer can
commit the step, that is before this rank's last contribution to it; but the function has not
returned by then. Theory of operation: when a step function returns, it is looked up which of its
local variables the returned leaves came from; from then on their values are read from the running
frame just before the last collective of the step, and compared with what is really returned. If
they ever differ, or nothing fits, the capsule is not known in time, and the job's fence is set
early instead.

Does not know: when to capture (transaction.py), where the capsule goes.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, NamedTuple

import msgspec
import torch

from everstep.errors import UserError
from everstep.worker import codec

MAX_RESULT_BYTES = 1 << 20
_CANDIDATE_ELEMENTS = 4096


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """A capsule's payload. `step`: after which it holds. `result`: codec bytes of what the step
    returned; None while unknown. `candidates`: local variables by name, while it is not known which
    of them is returned. `buffers`: rank-local buffers by name. `state`: `run.state`. `log`: what
    was logged since the last commit. `fence`: the fence that the job has agreed on, if it has.
    `local`: objects of the rank alone, by name. `streams`: the states of the generators, where they
    are carried. `pattern`: that of the collectives of the step before. `updates`: the most that
    a step has made. `used`: how many DistributedDataParallel modules have made a pass."""

    step: int
    result: bytes | None
    candidates: dict[str, bytes]
    buffers: dict[str, bytes]
    state: bytes
    log: dict[int, dict[str, float]]
    fence: str | None
    local: dict[str, bytes] = {}
    streams: bytes | None = None
    pattern: str = ""
    updates: int = 1
    used: int = 0


def flatten(value: Any) -> list[Any]:
    """The leaves of nested lists, tuples and dicts; a subclass of them (a named tuple, a shape) is
    a leaf itself."""
    if type(value) in (list, tuple):
        return [leaf for item in value for leaf in flatten(item)]
    if type(value) is dict:
        return [leaf for item in value.values() for leaf in flatten(item)]
    return [value]


def _rebuild(shape: Any, leaves: list[Any]) -> Any:
    """`shape` with its leaves taken from `leaves`, in order."""
    if type(shape) in (list, tuple):
        return type(shape)(_rebuild(item, leaves) for item in shape)
    if type(shape) is dict:
        return {key: _rebuild(item, leaves) for key, item in shape.items()}
    return leaves.pop(0)


def _same(leaf: Any, local: Any) -> bool:
    """Whether a returned leaf came from a local variable."""
    if leaf is local:
        return True
    if isinstance(leaf, torch.Tensor):
        return (
            isinstance(local, torch.Tensor)
            and not _is_spread(leaf)
            and not _is_spread(local)
            and leaf.layout is torch.strided
            and local.layout is torch.strided
            and leaf.data_ptr() == local.data_ptr()
            and leaf.shape == local.shape
            and leaf.stride() == local.stride()
            and leaf.dtype == local.dtype
            and leaf.is_conj() == local.is_conj()
            and leaf.is_neg() == local.is_neg()
        )
    if isinstance(local, torch.Tensor):
        return (
            isinstance(leaf, (bool, int, float))
            and _is_number(local)
            and _equal(local.item(), leaf)
        )
    return isinstance(leaf, (bool, int, float, str)) and _equal(leaf, local)


def _agree(one: Any, other: Any) -> bool:
    """Whether two variables hold the same; decoded candidates share no memory any more."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and not _same(one, other):
        return codec.encode(one, "a result") == codec.encode(other, "a result")
    return _same(one, other)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not _is_spread(value)
        and value.layout is torch.strided
        and value.numel() == 1
    )


def _is_spread(tensor: torch.Tensor) -> bool:
    """A DTensor: it has no bytes of its own, and reading its value may be a collective."""
    return hasattr(tensor, "to_local")


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b or (a != a and b != b))  # nan is nan


class _Source(NamedTuple):
    """Where a returned leaf comes from: one of the local variables `names`, as its Python number if
    `as_number`. Which of them is not known while they have held equal values (two counters at
    zero). Empty: the leaf is None."""

    names: tuple[str, ...]
    as_number: bool

    def value(self, variables: dict[str, Any]) -> Any:
        """The leaf. Raises LookupError while it can't be told."""
        if not self.names:
            return None
        values = [variables[name] for name in self.names]
        if self.as_number:
            values = [value.item() if _is_number(value) else value for value in values]
        if any(not _agree(values[0], value) for value in values[1:]):
            raise LookupError(f"the result is one of {self.names}, which differ")
        return values[0]


class ResultReader:
    """Reads from the running frame of `function`, on thread `thread_id`, what it is going to
    return."""

    def __init__(self, function: Callable[..., Any], thread_id: int) -> None:
        self._code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
        self._thread_id = thread_id
        self._sources: list[_Source] | None = None
        self._lost: list[Any] = []
        self._skeleton: Any = None
        self.failed = self._code is None

    def locals(self) -> dict[str, Any]:
        """The function's local variables now; empty if it is not running."""
        frame: FrameType | None = sys._current_frames().get(self._thread_id)
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        return dict(frame.f_locals) if frame is not None else {}

    def knows(self, names: dict[str, Any]) -> bool:
        """Whether the coming result can be told from the local variables `names`."""
        return self._leaves(names) is not None

    def _leaves(self, names: dict[str, Any]) -> list[Any] | None:
        if self.failed or self._sources is None:
            return None
        try:
            return [source.value(names) for source in self._sources]
        except LookupError:
            return None

    def predict(self, names: dict[str, Any]) -> bytes | None:
        """Codec bytes of the coming result; None while it cannot be told."""
        leaves = self._leaves(names)
        return None if leaves is None else encode_result(_rebuild(self._skeleton, leaves))

    def from_candidates(self, candidates: dict[str, bytes]) -> bytes | None:
        """The result told from a predecessor's `candidates`, by what this process has learned."""
        return self.predict({name: codec.decode(data) for name, data in candidates.items()})

    def candidates(self, names: dict[str, Any]) -> dict[str, bytes]:
        """Every small local variable that might be returned; used until the first return has been
        seen."""
        if self._sources is not None or self.failed:
            return {}
        found = {}
        for name, value in names.items():
            small = isinstance(value, torch.Tensor) and value.numel() <= _CANDIDATE_ELEMENTS
            if small or isinstance(value, (bool, int, float, str)):
                with suppress(
                    UserError
                ):  # a sparse tensor, a number of an enumeration: no candidate
                    found[name] = codec.encode(value, name)
        return found

    def placeholder(self) -> Any:
        """What stands for a result that is lost: NaN where numbers were, so that nobody takes it
        for a value."""
        if self._skeleton is None and not self._lost:  # no return was ever seen
            return None
        return _rebuild(self._skeleton, list(self._lost))

    def learn(self, result: Any, names: dict[str, Any]) -> None:
        """The function returned `result`; just before, its local variables were `names`."""
        sources: list[_Source] = []
        leaves = flatten(result)
        skeleton = _rebuild(result, [None] * len(leaves))
        narrowed = (
            self._sources if self._sources is not None and self._skeleton == skeleton else None
        )
        self._skeleton, self._lost = skeleton, [_lost(leaf) for leaf in leaves]
        self.failed = encode_result(result) is None
        for index, leaf in enumerate(leaves):
            known = narrowed[index].names if narrowed else None
            fitting = tuple(
                name
                for name, local in names.items()
                if (not known or name in known) and _same(leaf, local)
            )
            if not fitting and leaf is not None:
                self.failed = True
            number = leaf is not None and not isinstance(leaf, torch.Tensor)
            sources.append(_Source(fitting if leaf is not None else (), number))
        if not self.failed:
            self._sources = sources


def _lost(leaf: Any) -> Any:
    """NaN in the form of `leaf`; what cannot be NaN becomes None, or zeros."""
    if isinstance(leaf, torch.Tensor):
        able = leaf.is_floating_point() or leaf.is_complex()
        return torch.full(leaf.shape, float("nan") if able else 0, dtype=leaf.dtype)
    return float("nan") if isinstance(leaf, float) else None


def encode_result(result: Any) -> bytes | None:
    """Codec bytes of a step's result; None if it is no plain data or larger than 1 MiB."""
    try:
        data = codec.encode(result, "what the step returned")
    except UserError:
        return None
    return data if len(data) <= MAX_RESULT_BYTES else None
