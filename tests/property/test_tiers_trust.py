"""Whatever is changed in a store: a signed checkpoint loads as it was saved, or is refused in
words; an unsigned one is read or refused, and nothing else happens."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.unit import checkpoints
from tests.unit.checkpoints import KEY, DictStore, Made, draft

from everstep.errors import StateLost
from everstep.tiers import values
from everstep.tiers.find import Tier
from everstep.tiers.load import Opened, load
from everstep.tiers.series import Series
from everstep.tiers.slabs import Reading
from everstep.tiers.store import StoreError

DATA = bytes(range(240))
WORDS = [b"0", b"9" * 30, b"-1", b"[", b"null", b"}"]


def saved(key: bytes | None) -> DictStore:
    made = Made(shape=(6, 10), data=DATA, boxes=checkpoints.rows((6, 10), 2))
    store = DictStore()
    encoded = {"epoch": values.encode(3, "epoch")}
    draft(7, {"w": made}, encoded, world=2, signed=key is not None).put(store, key)
    return store


def everything(opened: Opened) -> tuple[dict[str, bytes], dict[str, Any]]:
    reading = Reading(opened)
    tensors = {
        name: b"".join(area for _, area in reading.slabs(name))
        for name in opened.checkpoint.tensors
    }
    return tensors, {key: values.decode(raw) for key, raw in opened.checkpoint.values.items()}


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, int, int, bytes]:
    """Which object, and bytes of it that others take the place of."""
    return (
        draw(st.integers(0, 4)),
        draw(st.integers(0, 10**6)),
        draw(st.integers(0, 40)),
        draw(
            st.binary(max_size=8) | st.sampled_from([b"0", b"9" * 30, b"-1", b"[", b"null", b"}"])
        ),
    )


def changed(store: DictStore, change: tuple[int, int, int, bytes]) -> bool:
    """Make the change; whether it is one."""
    which, at, length, new = change
    key = sorted(store.objects)[which]
    old = store.objects[key]
    at %= len(old) + 1
    store.objects[key] = old[:at] + new + old[at + length :]
    return store.objects[key] != old


@given(change=changes())
def test_a_signed_checkpoint_is_as_it_was_saved_or_refused(
    change: tuple[int, int, int, bytes],
) -> None:
    store = saved(KEY)
    changed(store, change)
    series = Series(store, "run", key=KEY, require_signature=True)
    try:
        (tensors, found), _ = load([Tier.memory(series)], everything)
    except (StoreError, StateLost):
        return
    assert (tensors, found) == ({"w": DATA}, {"epoch": 3})


@given(change=changes())
def test_an_unsigned_checkpoint_is_read_or_refused(change: tuple[int, int, int, bytes]) -> None:
    store = saved(None)
    changed(store, change)
    try:
        load([Tier.memory(Series(store, "run"))], everything)
    except (StoreError, StateLost):
        return
