"""Whatever is lost or spoiled in two tiers: a load gives the newest step of which each part is good
somewhere, as it was saved; never another, and never nothing while there is one."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.checkpoints import KEY, DictStore, Draft, Made, draft, rows

from everstep.errors import StateLost
from everstep.tiers import names
from everstep.tiers.find import Tier
from everstep.tiers.load import Opened, load
from everstep.tiers.series import Series

STEPS = (1, 2, 3)
TIERS = ("memory", "durable")
RANKS = 2
OTHER = {"memory": "", "durable": "f" * 16}
_made = {
    step: draft(
        step,
        {"w": Made(shape=(200,), data=bytes([step]) * 800, boxes=rows((200,), RANKS))},
        world=RANKS,
        signed=True,
    )
    for step in STEPS
}


class Kept(NamedTuple):
    """What has become of a step in a tier. `apart`: it is of an attempt of its own."""

    record: str
    parts: tuple[str, ...]
    apart: bool


kept = st.builds(
    Kept,
    record=st.sampled_from(["good", "good", "lost", "spoiled", "another's"]),
    parts=st.tuples(
        *[st.sampled_from(["good", "good", "lost", "spoiled", "short", "no manifest"])] * RANKS
    ),
    apart=st.booleans(),
)
worlds = st.tuples(*[st.tuples(*[kept] * len(STEPS))] * len(TIERS))
World = tuple[tuple[Kept, ...], ...]


def lay(tier: str, world: tuple[Kept, ...]) -> DictStore:
    store = DictStore(tier)
    for step, fate in zip(STEPS, world, strict=True):
        put = _made[step].put(store, KEY, attempt=OTHER[tier] if fate.apart else "")
        commit = names.commit_key("run", step)
        if fate.record == "lost":
            del store.objects[commit]
        elif fate.record == "spoiled":
            store.flip(commit, len(store.objects[commit]) // 2)
        elif fate.record == "another's":
            _made[step].put(store, bytes(32), attempt=put.checkpoint.attempt)
        for rank, part in enumerate(fate.parts):
            spoil(store, put, rank, part)
    return store


def spoil(store: DictStore, put: Draft, rank: int, part: str) -> None:
    key = put.attempt.part(rank, "safetensors")
    if part == "lost":
        del store.objects[key]
    elif part == "spoiled":
        store.flip(key, len(store.objects[key]) - 1)
    elif part == "short":
        store.objects[key] = store.objects[key][:-1]
    elif part == "no manifest":
        del store.objects[put.attempt.part(rank, "json")]


def expected(world: World) -> int | None:
    """The step that must be loaded."""
    for at in reversed(range(len(STEPS))):
        fates = [tier[at] for tier in world]
        # An attempt is known when some tier's record of it is good.
        attempts = [
            OTHER[tier] if fate.apart else "" for tier, fate in zip(TIERS, fates, strict=True)
        ]
        known = {
            attempt for attempt, fate in zip(attempts, fates, strict=True) if fate.record == "good"
        }
        usable = [fate for attempt, fate in zip(attempts, fates, strict=True) if attempt in known]
        found = [{fate.parts[rank] for fate in usable} for rank in range(RANKS)]
        # A manifest and the bytes need not come from one place.
        if all(some & {"good", "no manifest"} and some & {"good", "spoiled"} for some in found):
            return STEPS[at]
    return None


def everything(opened: Opened) -> list[bytes]:
    return [opened.read(part.rank, 0, part.nbytes) for part in opened.checkpoint.parts]


@given(world=worlds)
def test_the_newest_step_that_is_good_in_the_union_is_loaded(world: World) -> None:
    stores = [lay(tier, fates) for tier, fates in zip(TIERS, world, strict=True)]
    tiers = [
        Tier(name=tier, series=Series(store, "run", key=KEY, require_signature=True))
        for tier, store in zip(TIERS, stores, strict=True)
    ]
    wanted = expected(world)
    try:
        data, receipt = load(tiers, everything)
    except StateLost:
        assert wanted is None
        return
    assert receipt.step == wanted
    assert data == [raw for _, raw in _made[receipt.step].parts]
    assert receipt.nbytes == sum(map(len, data))
    assert receipt.behind == receipt.newest - receipt.step
