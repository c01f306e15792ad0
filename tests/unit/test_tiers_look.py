"""What is in tiers, whether every byte of it is right, and what differs between two."""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from collections.abc import Callable, Sequence

import msgspec
import pytest
from tests.unit import checkpoints
from tests.unit.checkpoints import KEY, DictStore, Draft, Made, draft, tier

from everstep.errors import UserError
from everstep.tiers import catalog, places, values
from everstep.tiers.diff import Compared, compare
from everstep.tiers.load import open_newest
from everstep.tiers.look import survey, verify
from everstep.tiers.places import Address, Place, Places
from everstep.tiers.slabs import Reading
from everstep.tiers.store import Store

FLOATS = 60_000


def floats(seed: int, shape: tuple[int, ...] = (FLOATS,), world: int = 2, along: int = 0) -> Made:
    rng = random.Random(seed)
    count = 1
    for size in shape:
        count *= size
    data = struct.pack(f"<{count}f", *(rng.random() for _ in range(count)))
    return Made(shape=shape, data=data, boxes=checkpoints.rows(shape, world, along))


def saved(store: DictStore, step: int, *, signed: bool = False) -> Draft:
    made = draft(step, {"w": floats(step)}, {"n": values.encode(step, "n")}, world=2, signed=signed)
    return made.put(store, KEY if signed else None)


def around(*stores: DictStore, key: bytes | None = None, require: bool = False) -> Places:
    tiers = ["memory", "durable"] if len(stores) == 2 else ["durable"]
    return Places(
        places=tuple(Place(tier=t, store=s) for t, s in zip(tiers, stores, strict=True)),
        series=None,
        step=None,
        key=key,
        require_signature=require,
    )


def verdict(
    store: DictStore, step: int, *, key: bytes | None = None, require: bool = False
) -> list[tuple[str, int | None]]:
    here = around(store, key=key, require=require)
    found = verify(here.places[0], here.reader(here.places[0], "run"), step)
    return [(finding.kind, finding.rank) for finding in found.findings]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("/data", Address(place="/data")),
        ("s3://b/p#run", Address(place="s3://b/p", series="run")),
        ("memory#run.1/42", Address(place="memory", series="run.1", step=42)),
        ("/a#b/c#run/7", Address(place="/a#b/c", series="run", step=7)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert places.parse(text) == address


@pytest.mark.parametrize(
    "text", ["#run", "/data#", "/data#../x", "/data#run/x", "/data#run/1/2", "/d#-x"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UserError):
        places.parse(text)


def test_addresses_that_mean_different_checkpoints_are_refused() -> None:
    with pytest.raises(UserError, match="different"), places.opened(["/a#one", "/b#two"]):
        pass


def test_a_survey_sees_every_tier_and_what_is_missing() -> None:
    near, far = DictStore("near"), DictStore("far")
    saved(far, 10)
    made = saved(far, 20).put(near)
    del near.objects[made.attempt.part(1, "safetensors")]
    under_way = saved(far, 30)
    del far.objects["run/commits/0000000030.json"]
    listed, torn = survey(around(near, far))
    assert [(one.step, [kept.tier for kept in one.kept]) for one in listed] == [
        (10, ["durable"]),
        (20, ["memory", "durable"]),
    ]
    assert [bool(kept.problem) for kept in listed[1].kept] == [True, False]
    assert listed[0].nbytes == sum(part.nbytes for part in made.checkpoint.parts)
    assert [(one.step, one.attempt) for one in torn] == [(30, under_way.checkpoint.attempt)]


def test_a_record_that_cant_be_read_hides_no_other() -> None:
    far = DictStore("far")
    saved(far, 10)
    saved(far, 20)
    far.objects["run/commits/0000000020.json"] = b"{}"
    listed, _ = survey(around(far))
    assert [one.kept[0].problem == "" for one in listed] == [True, False]


@pytest.mark.parametrize("signed", [False, True])
def test_what_is_whole_is_verified_to_the_last_byte(signed: bool) -> None:
    far = DictStore("far")
    made = saved(far, 10, signed=signed)
    here = around(far, key=KEY if signed else None, require=signed)
    found = verify(here.places[0], here.reader(here.places[0], "run"), 10)
    assert found.findings == ()
    assert found.nbytes == sum(part.nbytes for part in made.checkpoint.parts)
    assert found.signature == ("valid" if signed else "absent")


def flip(store: DictStore, made: Draft) -> None:
    store.flip(made.attempt.part(1, "safetensors"), 70_000)


def flip_header(store: DictStore, made: Draft) -> None:
    store.flip(made.attempt.part(1, "safetensors"), 3)


def lose(store: DictStore, made: Draft) -> None:
    del store.objects[made.attempt.part(1, "safetensors")]


def shorten(store: DictStore, made: Draft) -> None:
    key = made.attempt.part(1, "safetensors")
    store.objects[key] = store.objects[key][:-1]


def lose_manifest(store: DictStore, made: Draft) -> None:
    del store.objects[made.attempt.part(1, "json")]


def change_manifest(store: DictStore, made: Draft) -> None:
    store.objects[made.attempt.part(1, "json")] += b" "


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (flip, "corrupt"),
        (flip_header, "corrupt"),
        (lose, "missing"),
        (shorten, "corrupt"),
        (lose_manifest, "missing"),
        (change_manifest, "corrupt"),
    ],
)
def test_what_is_wrong_with_a_part_is_found(
    spoil: Callable[[DictStore, Draft], None], kind: str
) -> None:
    far = DictStore("far")
    spoil(far, saved(far, 10))
    assert verdict(far, 10) == [(kind, 1)]


def test_every_wrong_block_is_named_with_its_tensors() -> None:
    far = DictStore("far")
    made = saved(far, 10)
    for at in (10_000, 70_000):
        far.flip(made.attempt.part(0, "safetensors"), at)
    here = around(far)
    found = verify(here.places[0], here.reader(here.places[0], "run"), 10)
    assert [finding.why.endswith("; of w") for finding in found.findings] == [True, True]


def test_signatures_are_checked() -> None:
    far = DictStore("far")
    saved(far, 10, signed=True)
    assert verdict(far, 10, key=bytes(32)) == [("corrupt", None)]
    saved(far, 20)
    assert verdict(far, 20, key=KEY, require=True) == [("corrupt", None)]
    assert verdict(far, 20, key=KEY) == []


def test_bytes_that_pass_xxh3_but_were_not_signed_are_found() -> None:
    far = DictStore("far")
    made = saved(far, 10, signed=True)
    manifest, data = made.parts[0]
    wrong = msgspec.structs.replace(manifest, block_sha256=("0" * 64,) * len(manifest.block_sha256))
    made.parts[0] = (wrong, data)
    digest = hashlib.sha256(catalog.encode_part(wrong)).hexdigest()
    parts = (
        msgspec.structs.replace(made.checkpoint.parts[0], manifest_sha256=digest),
        made.checkpoint.parts[1],
    )
    made.checkpoint = msgspec.structs.replace(made.checkpoint, parts=parts)
    made.put(far, KEY)
    assert {kind for kind, _ in verdict(far, 10, key=KEY)} == {"corrupt"}


def test_every_copy_of_a_tier_is_verified() -> None:
    class Copied(DictStore):
        def copies(self, key: str, *, deadline_s: float) -> Sequence[Store]:
            return [self, other]

    near, other = Copied("near"), DictStore("neighbour")
    made = saved(near, 10).put(other)
    other.flip(made.attempt.part(0, "safetensors"), 9)
    here = around(near)
    found = verify(here.places[0], here.reader(here.places[0], "run"), 10)
    assert [(finding.where, finding.rank) for finding in found.findings] == [("neighbour", 0)]


def compared(one: Draft, other: Draft) -> Compared:
    with contextlib.ExitStack() as stack:
        readings = []
        for made in (one, other):
            store = DictStore()
            made.put(store)
            readings.append(Reading(stack.enter_context(open_newest([tier(store)]))))
        return compare(*readings)


def test_checkpoints_that_are_equal_are_not_read() -> None:
    made = draft(1, {"w": floats(1)}, world=2)
    again = draft(2, {"w": floats(1)}, world=2)
    found = compared(made, again)
    assert (found.differences, found.unread, found.nbytes) == ((), 1, 0)


def test_checkpoints_that_are_cut_differently_are_compared_by_their_bytes() -> None:
    shape = (200, 300)
    made = draft(1, {"w": floats(1, shape)}, world=2)
    again = draft(1, {"w": floats(1, shape, world=3, along=1)}, world=3)
    found = compared(made, again)
    assert (found.differences, found.unread, found.nbytes) == ((), 0, 240_000)


def test_what_differs_is_said_with_numbers() -> None:
    one, two = floats(1, (4, 5)), floats(1, (4, 5), world=1)
    changed = bytearray(two.data)
    [old] = struct.unpack("<f", changed[52:56])
    changed[52:56] = struct.pack("<f", old + 0.5)
    made = draft(
        1,
        {"w": one, "gone": floats(2, (3,)), "b": floats(3, (3,))},
        {"n": values.encode(1, "n"), "x": values.encode(2, "x")},
        world=2,
    )
    again = draft(
        1,
        {
            "w": Made(shape=(4, 5), data=bytes(changed)),
            "b": floats(3, (1, 3), world=1),
            "x": floats(4, (2,), world=1),
        },
        {"n": values.encode(2, "n"), "new": values.encode(1, "new")},
    )
    found = compared(made, again)
    assert [(one.key, one.kind) for one in found.differences] == [
        ("b", "shape"),
        ("gone", "only in the first"),
        ("n", "value"),
        ("new", "only in the second"),
        ("w", "tensor"),
        ("x", "type"),
    ]
    [tensor] = [one for one in found.differences if one.key == "w"]
    assert (tensor.elements, tensor.of) == (1, 20)
    assert tensor.most == pytest.approx(0.5, abs=1e-6)
    assert "at [2, 3]" in tensor.what
    assert [one.what for one in found.differences if one.kind == "value"] == ["1, then 2"]


@pytest.mark.parametrize(
    ("dtype", "item", "one", "other", "most"),
    [
        ("torch.bfloat16", 2, b"\x80\x3f", b"\x00\x40", 1.0),
        ("torch.float16", 2, b"\x00\x3c", b"\x00\x40", 1.0),
        ("torch.int8", 1, b"\xff", b"\x01", 2.0),
        ("torch.bool", 1, b"\x00", b"\x01", None),
        ("torch.float32", 4, struct.pack("<f", float("nan")), bytes(4), None),
        ("torch.complex128", 16, bytes(16), bytes(15) + b"\x01", None),
    ],
)
def test_elements_of_every_type_are_compared(
    dtype: str, item: int, one: bytes, other: bytes, most: float | None
) -> None:
    made, again = (
        draft(1, {"w": Made(shape=(), data=data, dtype=dtype, item_bytes=item)})
        for data in (one, other)
    )
    [found] = compared(made, again).differences
    assert (found.elements, found.of, found.most) == (1, 1, most)
