"""The codec keeps plain data exactly, refuses the rest by name, and its digest is one of values."""

from __future__ import annotations

import enum
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import UserError
from everstep.worker import codec

KEYS = st.one_of(
    st.integers(), st.text(max_size=4), st.booleans(), st.none(), st.binary(max_size=4)
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**80), max_value=2**80),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.binary(max_size=8),
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.sets(KEYS, max_size=4),
    ),
    max_leaves=20,
)


def _typed(value: Any) -> Any:
    """A value with its types spelled out, since 1 == True == 1.0."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_typed(item) for item in value]
    if isinstance(value, set):
        return "set", sorted(repr(_typed(item)) for item in value)
    if isinstance(value, dict):
        return type(value).__name__, [(_typed(k), _typed(v)) for k, v in value.items()]
    return type(value).__name__, repr(value)


@settings(deadline=None)
@given(PLAIN)
def test_plain_data_comes_back_with_its_types_and_order(value: Any) -> None:
    assert _typed(codec.decode(codec.encode(value, "v"))) == _typed(value)


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0x8000000000000000, 0x0000000000000001])
def test_floats_keep_every_bit(bits: int) -> None:
    value = struct.unpack("<d", struct.pack("<Q", bits))[0]
    back = codec.decode(codec.encode(value, "v"))
    assert struct.pack("<d", back) == struct.pack("<d", value)


def test_integers_have_no_limit() -> None:
    huge = -(10**6000)  # more digits than int() reads
    assert codec.decode(codec.encode([huge, 2**64, -(2**63)], "v")) == [huge, 2**64, -(2**63)]


def test_counter_stays_a_counter() -> None:
    back = codec.decode(codec.encode(Counter("abca"), "v"))
    assert type(back) is Counter
    assert back == Counter("abca")


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (3, 5)], ids=str)
def test_tensors_keep_dtype_shape_and_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    raw = torch.arange(count * dtype.itemsize, dtype=torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    value = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    back = codec.decode(codec.encode({"t": value}, "v"))["t"]
    assert (back.dtype, back.shape) == (dtype, value.shape)
    assert torch.equal(codec.tensor_bytes(back), codec.tensor_bytes(value))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[1],
        lambda t: t.flip(0),
        lambda t: t.unsqueeze(0).expand(4, *t.shape),
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
        lambda t: t.clone().requires_grad_(),
        lambda t: torch.nn.Parameter(t),
    ],
)
def test_views_are_kept_by_value(view: Any) -> None:
    value = view(torch.arange(12.0).reshape(3, 4))
    assert torch.equal(codec.decode(codec.encode(value, "v")), value)


def test_a_decoded_tensor_can_be_written_and_shares_nothing() -> None:
    data = codec.encode(torch.zeros(4), "v")
    one, other = codec.decode(data), codec.decode(data)
    one += 1
    assert other.tolist() == [0.0] * 4


class Color(enum.IntEnum):
    RED = 1


class Words(enum.StrEnum):
    A = "a"


Point = namedtuple("Point", "x y")


def _cycle() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


@pytest.mark.parametrize(
    "unfit",
    [
        object(), Color.RED, Words.A, Point(1, 2), defaultdict(int), frozenset({1}), 1j,
        bytearray(b"x"), range(3),
        torch.nn.Linear(1, 1), torch.float32, torch.Size([1]), print, "\udc80", _cycle(),
        torch.eye(2).to_sparse(), torch.empty(2, device="meta"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_no_plain_data_is_refused_by_name(unfit: Any) -> None:
    with pytest.raises(UserError, match=r"^the state of x\["):
        codec.encode([unfit], "the state of x['a']")


def test_numpy_scalars_become_python_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    values = [
        numpy.float64(0.1),
        numpy.float32(0.5),
        numpy.int8(-3),
        numpy.bool_(True),
        numpy.str_("s"),
    ]
    back = codec.decode(codec.encode([*values, numpy.array(2)], "v"))
    assert _typed(back) == _typed([0.1, 0.5, -3, True, "s", 2])


@pytest.mark.parametrize("kind", ["longdouble", "complex64", "datetime64"])
def test_numpy_scalars_without_a_python_number_are_refused(kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    value = numpy.datetime64("2020-01-01") if kind == "datetime64" else getattr(numpy, kind)(1)
    with pytest.raises(UserError, match="does not keep"):
        codec.encode(value, "v")


@given(st.lists(st.integers(), max_size=12, unique=True), st.randoms(use_true_random=False))
def test_equal_values_have_equal_digests(keys: list[int], shuffle: Any) -> None:
    grown = set(range(-500, 500)) | set(keys)  # a set's order depends on how large it once was
    grown -= grown - set(keys)
    other = list(keys)
    shuffle.shuffle(other)
    one = {"s": set(keys), "d": {key: [key] for key in keys}}
    two = {"d": {key: [key] for key in other}, "s": grown}
    assert codec.digest(codec.encode(one, "v")) == codec.digest(codec.encode(two, "v"))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ([1, 2], [2, 1]),
        ([1], (1,)),
        (1, 1.0),
        (1, True),
        ({}, OrderedDict()),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ("1", b"1"),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (0.0, -0.0),
    ],
    ids=repr,
)
def test_different_values_have_different_digests(one: Any, two: Any) -> None:
    assert codec.digest(codec.encode(one, "v")) != codec.digest(codec.encode(two, "v"))


def test_an_unknown_tag_or_dtype_is_refused() -> None:
    with pytest.raises(UserError, match="unknown tag"):
        codec.decode(msgspec.msgpack.encode(["object", "os.system"]))
    with pytest.raises(UserError, match="unknown dtype"):
        codec.decode(msgspec.msgpack.encode(["tensor", "torch.nn", [1], b"1"]))


def test_bytes_that_are_missing_are_never_uninitialised_memory() -> None:
    assert (
        codec.decode(msgspec.msgpack.encode(["tensor", "torch.int64", [64], b""])).tolist()
        == [0] * 64
    )


def test_buffers_of_tensors() -> None:
    raw = torch.arange(5, dtype=torch.uint8)
    assert bytes(codec.buffer_of(raw)) == bytes(range(5))
    assert bytes(codec.buffer_of(raw[5:])) == b""
    assert codec.tensor_bytes(torch.tensor(1.0)).shape == (4,)
    assert codec.tensor_bytes(torch.empty(0, 3)).shape == (0,)
