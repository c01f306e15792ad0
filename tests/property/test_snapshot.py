"""The snapshot's format, against headers and manifests that lie."""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.snapshot import (
    BLOCK_BYTES,
    MAX_BYTES,
    About,
    Layout,
    Manifest,
    SnapshotError,
    Tensor,
    check,
    check_header,
    decode,
    describe,
    encode,
    verify,
    write,
)

ABOUT = About(run_id="run", rank=1, world=4, shard="all", step=7)
TYPES = {
    "torch.float32": 4,
    "torch.bfloat16": 2,
    "torch.float8_e8m0fnu": 1,
    "torch.complex128": 16,
    "torch.bool": 1,
}

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
tensors = st.lists(
    st.tuples(names, st.sampled_from(sorted(TYPES)), st.lists(st.integers(0, 5), max_size=3)),
    max_size=8,
    unique_by=lambda item: item[0],
).map(
    lambda items: [
        Tensor(name=name, dtype=dtype, item_bytes=TYPES[dtype], shape=tuple(shape))
        for name, dtype, shape in items
    ]
)


def written(parts: list[Tensor], fill: int = 1) -> tuple[bytearray, Manifest, dict[str, bytes]]:
    layout = Layout(parts)
    buffers = {
        part.name: bytes((fill + i + at) % 256 for at in range(part.nbytes))
        for i, part in enumerate(parts)
    }
    area = bytearray(layout.nbytes)
    return area, write(memoryview(area), layout, ABOUT, buffers), buffers


@given(tensors)
def test_a_snapshot_is_a_safetensors_file(parts: list[Tensor]) -> None:
    area, _, buffers = written(parts)
    found = dict(safetensors.deserialize(bytes(area)))  # type: ignore[no-untyped-call]
    assert set(found) == set(buffers)
    for name, data in buffers.items():
        assert found[name]["dtype"] == "U8"
        assert bytes(found[name]["data"]) == data


@given(tensors)
def test_what_is_written_is_read_again(parts: list[Tensor]) -> None:
    area, manifest, buffers = written(parts)
    again = decode(encode(manifest))
    assert again == manifest
    verify(again, memoryview(area))
    for tensor, start, end in Layout(again.tensors).spans():
        assert bytes(area[start:end]) == buffers[tensor.name]
        assert start % tensor.item_bytes == 0  # a map of it can be viewed as its type


@given(tensors, tensors)
def test_equal_content_has_equal_digests(one: list[Tensor], other: list[Tensor]) -> None:
    (area, first, _), (area_2, second, _) = written(one), written(other)
    assert (first.digest == second.digest) == (area == area_2)


@given(tensors, st.data())
def test_a_flipped_bit_is_found(parts: list[Tensor], data: st.DataObject) -> None:
    area, manifest, _ = written(parts)
    at = data.draw(st.integers(0, len(area) - 1))
    area[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SnapshotError, match="rank 1 at step 7 is corrupt"):
        verify(manifest, memoryview(area))


def test_a_wrong_block_names_its_tensors() -> None:
    sizes = {"a": 3 << 16, "b": 1 << 16, "c": 1 << 16}
    parts = [
        Tensor(name=name, dtype="torch.uint8", item_bytes=1, shape=(size,))
        for name, size in sizes.items()
    ]
    layout = Layout(parts)
    area = bytearray(layout.nbytes)
    manifest = describe(memoryview(area), layout, ABOUT, block_bytes=1 << 16)
    assert len(manifest.blocks) == 6
    area[-1] = 1
    with pytest.raises(SnapshotError, match=r"\(c\)"):
        verify(manifest, memoryview(area))
    area[-1], area[0] = 0, 255
    with pytest.raises(SnapshotError, match=r"\(a\)"):
        verify(manifest, memoryview(area))


@given(tensors, st.data())
@settings(max_examples=400)
def test_a_changed_header_is_never_accepted_for_another(
    parts: list[Tensor], data: st.DataObject
) -> None:
    area, manifest, _ = written(parts)
    layout = check(manifest)
    at = data.draw(st.integers(0, len(layout.header) - 1))
    area[at] = data.draw(st.integers(0, 255).filter(lambda value: value != area[at]))
    with pytest.raises(SnapshotError):
        check_header(memoryview(area), layout)


# ---------------------------------------------------------------- hostile manifests


def manifest_of(**changes: Any) -> bytes:
    area, manifest, _ = written(
        [
            Tensor(name="a", dtype="torch.float32", item_bytes=4, shape=(2, 2)),
            Tensor(name="b", dtype="torch.bool", item_bytes=1, shape=(3,)),
        ]
    )
    del area
    tree = json.loads(encode(manifest))
    for path, value in changes.items():
        *way, last = path.split("__")
        place = tree
        for key in way:
            place = place[int(key)] if isinstance(place, list) else place[key]
        if value is None:
            del place[last]
        elif isinstance(place, list):
            place[int(last)] = value
        else:
            place[last] = value
    return json.dumps(tree).encode()


def test_the_manifest_of_these_tests_is_right() -> None:
    assert decode(manifest_of()).about == ABOUT


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"format": "1"},
        {"more": 1},
        {"about": None},
        {"about__rank": -1},
        {"about__rank": 4},
        {"about__step": 1 << 70},
        {"about__world": 0},
        {"about__run_id": "x" * 65},
        {"tensors__0__name": ""},
        {"tensors__0__name": "b"},
        {"tensors__0__name": "__metadata__"},
        {"tensors__0__name": "n" * 1025},
        {"tensors__0__item_bytes": 0},
        {"tensors__0__item_bytes": 1},
        {"tensors__0__shape": [2, -2]},
        {"tensors__0__shape": [MAX_BYTES, MAX_BYTES]},
        {"tensors__0__shape": [MAX_BYTES + 1]},
        {"tensors__0__shape": [1] * 65},
        {"tensors__0__shape": [2]},
        {"tensors__0__global_shape": [4, 4]},
        {"tensors__0__global_shape": [4, 4], "tensors__0__place": [3, 0]},
        {"tensors__0__global_shape": [4], "tensors__0__place": [0]},
        {"tensors__0__place": [0, 0]},
        {"nbytes": 0},
        {"nbytes": 1 << 60},
        {"block_bytes": 1},
        {"block_bytes": 1 << 40},
        {"blocks": []},
        {"blocks": ["0" * 32] * 2},
        {"blocks__0": "0" * 31},
        {"blocks__0": "G" * 32},
        {"blocks__0": "0" * 32 + "\n"},
    ],
)
def test_a_manifest_that_lies_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SnapshotError):
        decode(manifest_of(**changes))


def test_a_part_of_a_tensor_says_where_it_lies() -> None:
    text = manifest_of(tensors__0__global_shape=[4, 2], tensors__0__place=[2, 0])
    assert decode(text).tensors[0].place == (2, 0)


def test_tensors_out_of_order_are_refused() -> None:
    parts = json.loads(manifest_of())["tensors"]
    with pytest.raises(SnapshotError, match="order"):
        decode(manifest_of(tensors=parts[::-1]))


@given(st.binary(max_size=200))
def test_any_text_is_refused(text: bytes) -> None:
    with pytest.raises(SnapshotError):
        decode(text)


def test_deep_text_is_refused() -> None:
    with pytest.raises(SnapshotError):
        decode(b'{"about":' * 200_000)


# ---------------------------------------------------------------- writers' mistakes


def test_a_buffer_of_another_size_is_refused() -> None:
    part = Tensor(name="a", dtype="torch.int32", item_bytes=4, shape=(2,))
    layout = Layout([part])
    area = memoryview(bytearray(layout.nbytes))
    with pytest.raises(SnapshotError, match="has 4 bytes, its place 8"):
        write(area, layout, ABOUT, {"a": bytes(4)})
    with pytest.raises(SnapshotError, match="has no buffer"):
        write(area, layout, ABOUT, {})
    with pytest.raises(SnapshotError, match="the area has"):
        write(area[:-1], layout, ABOUT, {"a": bytes(8)})


def test_two_tensors_of_one_name_are_refused() -> None:
    part = Tensor(name="a", dtype="torch.int32", item_bytes=4, shape=(2,))
    with pytest.raises(SnapshotError, match="two tensors"):
        Layout([part, part])


def test_blocks_cover_the_file() -> None:
    part = Tensor(name="a", dtype="torch.uint8", item_bytes=1, shape=(2 * BLOCK_BYTES,))
    _, manifest, _ = written([part])
    assert len(manifest.blocks) == 3
