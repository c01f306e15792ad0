"""Values of checkpoints: what goes in comes out, and what is no value is refused."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import UserError
from everstep.tiers import tensors, values
from everstep.tiers.store import Refused

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float8_e4m3fn, torch.device("cuda:1"), torch.strided, torch.Size([3])])
    | st.sampled_from(
        [np.float32(0.1), np.int8(-3), np.bool_(True), np.complex64(1j), np.uint64(7)]
    )
)
keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.dictionaries(st.text(), st.integers()).map(Counter)
        | st.sets(keys)
        | st.frozensets(keys)
    )


def alike(one: Any, other: Any) -> bool:
    """Equal in value and type, all the way down; NaN is NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            alike(a, b) for a, b in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, complex):
        return alike(one.real, other.real) and alike(one.imag, other.imag)
    return bool(one == other)


@given(st.recursive(scalars, containers, max_leaves=20))
def test_a_value_comes_back_equal_in_value_and_type(value: Any) -> None:
    assert alike(values.decode(values.encode(value, "key"), tensors.word), value)


@given(st.lists(st.integers() | st.text(), unique=True))
def test_equal_sets_have_equal_bytes(members: list[Any]) -> None:
    backwards = members[::-1]
    assert values.encode(set(members), "key") == values.encode(set(backwards), "key")


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    try:
        values.decode(data, tensors.word)
    except Refused:
        pass


trees = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(
            st.sampled_from(["list", "set", "dict", "int", "complex", "torch", "numpy", "eval"]),
            inner,
            inner,
        ).map(list)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(trees)
def test_any_tree_is_a_value_or_refused(tree: Any) -> None:
    try:
        values.decode(msgspec.msgpack.encode(tree), tensors.word)
    except Refused:
        pass


class Odd(int):
    """A number that is more than a number."""


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "key is a builtins.object"),
        ({"a": [1, lambda: None]}, "key['a'][1] is a builtins.function"),
        (Odd(1), "key is a "),
        ([torch.ones(1)], "key[0] is a torch.Tensor"),
        (np.ones(3), "key is a numpy.ndarray"),
        (np.array(3), "key is a numpy.ndarray"),
        (np.datetime64("2026-01-01"), "key is a numpy.datetime64"),
        ("\udc80", "key holds text that is no Unicode"),
    ],
    ids=["object", "function", "odd", "tensor", "array", "array of one", "time", "text"],
)
def test_what_is_no_data_is_named(value: Any, where: str) -> None:
    with pytest.raises(UserError) as raised:
        values.encode(value, "key")
    assert str(raised.value).startswith(where)


def test_depth_and_size_are_capped() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(UserError, match="nested deeper"):
        values.encode(deep, "key")
    with pytest.raises(UserError, match="make a tensor of it"):
        values.encode(bytes(values.MAX_BYTES), "key")
    with pytest.raises(Refused, match="exceeds"):
        values.decode(bytes(values.MAX_BYTES + 1))


def test_words_stay_words_without_torch() -> None:
    data = values.encode([torch.bfloat16, torch.Size([2, 3])], "key")
    found = values.decode(data)
    assert found == [values.Named("dtype", "torch.bfloat16"), values.Named("Size", "2 3")]
