"""Loads: the newest whole checkpoint of all tiers, part by part from the nearest good copy."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence

import msgspec
import pytest
from tests.unit import checkpoints
from tests.unit.checkpoints import KEY, DictStore, Made, draft, tier

from everstep.errors import StateLost
from everstep.tiers import find
from everstep.tiers.find import NoneThere, Tier, Told
from everstep.tiers.load import Opened, PartLost, Wanted, load, open_newest, open_told
from everstep.tiers.series import Series
from everstep.tiers.store import Store
from everstep.tiers.suspects import Suspects

FLOATS = 100_000


def weights(seed: int = 0) -> Made:
    """Two ranks hold half of it each; some blocks of 64 KiB."""
    shape = (FLOATS,)
    data = random.Random(seed).randbytes(4 * FLOATS)
    return Made(shape=shape, data=data, boxes=checkpoints.rows(shape, 2))


def saved(store: DictStore, step: int, *, signed: bool = False) -> checkpoints.Draft:
    made = draft(step, {"w": weights(step)}, world=2, signed=signed)
    return made.put(store, KEY if signed else None)


def everything(opened: Opened) -> list[bytes]:
    return [opened.read(part.rank, 0, part.nbytes) for part in opened.checkpoint.parts]


def held(made: checkpoints.Draft) -> list[bytes]:
    return [data for _, data in made.parts]


def part_key(made: checkpoints.Draft, rank: int, what: str = "safetensors") -> str:
    return made.attempt.part(rank, what)


def test_the_newest_whole_one_is_taken_and_read_from_the_nearest_tier() -> None:
    near, far = DictStore("near"), DictStore("far")
    saved(near, 10), saved(far, 10)
    newest = saved(far, 20)
    newest.put(near, attempt="f" * 16)
    with open_newest([tier(near, "memory"), tier(far)]) as opened:
        assert everything(opened) == held(newest)
        receipt = opened.receipt
    assert (receipt.step, receipt.behind, receipt.tier, receipt.refused) == (20, 0, "memory", ())
    assert receipt.nbytes == sum(map(len, held(newest)))
    assert not [key for key, _, _ in far.asked if key.endswith("safetensors")]


def test_parts_come_from_the_union_of_tiers_whatever_their_attempts() -> None:
    near, far = DictStore("near"), DictStore("far")
    made = saved(far, 20)
    made.put(near, attempt="f" * 16)
    lost = made.attempt.part(0, "safetensors").replace(made.attempt.name, "f" * 16)
    del near.objects[lost]
    del far.objects[part_key(made, 1)]
    with open_newest([tier(near, "memory"), tier(far)]) as opened:
        assert everything(opened) == held(made)
        assert [(part.rank, part.tier) for part in opened.receipt.parts] == [
            (0, "durable"),
            (1, "memory"),
        ]


def test_parts_are_taken_from_a_tier_that_has_no_record_of_them() -> None:
    near, far = DictStore("near"), DictStore("far")
    made = saved(far, 20).put(near)
    del near.objects["run/commits/0000000020.json"]
    with open_newest([tier(near, "memory"), tier(far)]) as opened:
        assert everything(opened) == held(made)
        assert opened.receipt.tier == "memory"


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_flipped_bit_falls_to_another_tier(lanes: int) -> None:
    near, far = DictStore("near"), DictStore("far")
    made = saved(near, 20).put(far)
    near.flip(part_key(made, 1), 150_000)
    with open_newest([tier(near, "memory", lanes=lanes), tier(far)]) as opened:
        assert everything(opened) == held(made)
        [refusal] = opened.receipt.refused
    assert (refusal.rank, refusal.where) == (1, "near")
    assert "XXH3" in refusal.why


def test_a_flipped_bit_falls_to_another_copy_of_the_same_tier() -> None:
    class Copied(DictStore):
        def copies(self, key: str, *, deadline_s: float) -> Sequence[Store]:
            return [self, other]

    near, other = Copied("near"), DictStore("neighbour")
    made = saved(near, 20).put(other)
    near.flip(part_key(made, 0), 3)
    with open_newest([tier(near, "memory")]) as opened:
        assert everything(opened) == held(made)
        assert {part.where for part in opened.receipt.parts} == {"near", "neighbour"}


def test_what_a_store_has_digested_is_not_digested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    class Digesting(DictStore):
        def get_checked(
            self,
            key: str,
            area: memoryview,
            *,
            start: int,
            block_bytes: int,
            digests: Sequence[str],
            deadline_s: float,
        ) -> None:
            checked.append((start, area.nbytes, block_bytes, len(digests)))
            self.get_into(key, area, start=start, deadline_s=deadline_s)

    near = Digesting("near")
    made = saved(near, 20)
    monkeypatch.setattr("everstep.tiers.load.check_block", None)
    with open_newest([tier(near)]) as opened:
        assert opened.read(0, 70_000, 70_010) == held(made)[0][70_000:70_010]
    assert checked == [(1 << 16, 1 << 16, 1 << 16, 1)]


def test_a_part_without_a_good_copy_falls_to_an_older_step() -> None:
    far = DictStore("far")
    old, new = saved(far, 10), saved(far, 20)
    far.flip(part_key(new, 0), 100_000)
    result, receipt = load([tier(far)], everything)
    assert result == held(old)
    assert (receipt.step, receipt.behind, len(receipt.refused)) == (10, 10, 1)
    with pytest.raises(PartLost, match=r"rank 0's part of step 20.*XXH3"):
        load([tier(far)], everything, step=20)


def test_what_was_passed_over_as_damaged_can_be_set_aside_and_saved_again() -> None:
    far = DictStore("far")
    saved(far, 10)
    wrong, short = saved(far, 20), saved(far, 30)
    far.flip(part_key(wrong, 0), 100_000)
    del far.objects[part_key(short, 1)]
    tiers = [Tier.durable(Series(far, "run"))]
    _, receipt = load(tiers, everything)
    lost = find.damaged(receipt)
    assert sorted(lost) == [20, 30]
    assert find.set_aside(tiers, lost) == []
    assert tiers[0].series.steps(deadline_s=1) == [10]
    assert find.set_aside(tiers, lost) == []


def test_what_is_only_out_of_reach_is_not_damaged() -> None:
    far = DictStore("far")
    saved(far, 10)
    new = saved(far, 20)
    far.fail = [part_key(new, 0)]
    _, receipt = load([tier(far)], everything)
    assert (receipt.step, find.damaged(receipt)) == (10, {})


def test_a_lost_part_is_told_to_other_processes() -> None:
    lost = PartLost(3, 1, "why", True)
    again = pickle.loads(pickle.dumps(lost))  # noqa: S301 - as torch does within a job
    assert (str(again), again.step, again.rank, again.damaged) == ("why", 3, 1, True)


@pytest.mark.parametrize("what", ["safetensors", "json"])
def test_a_missing_piece_of_a_part_falls_to_an_older_step(what: str) -> None:
    far = DictStore("far")
    old, new = saved(far, 10), saved(far, 20)
    del far.objects[part_key(new, 1, what)]
    result, receipt = load([tier(far)], everything)
    assert (result, receipt.step, receipt.behind) == (held(old), 10, 10)
    assert any(refusal.step == 20 for refusal in receipt.refused)


def test_when_nothing_good_is_left_all_reasons_are_said() -> None:
    far = DictStore("far")
    one, two = saved(far, 10), saved(far, 20)
    far.flip(part_key(one, 0), 9)
    far.objects[part_key(two, 1)] += b"more"
    with pytest.raises(StateLost, match=r"bytes, the record says(.|\n)*XXH3"):
        load([tier(far)], everything)


def test_none_there_is_said_only_when_every_tier_answers() -> None:
    near, far = DictStore("near"), DictStore("far")
    with pytest.raises(NoneThere):
        open_newest([tier(near, "memory"), tier(far)])
    far.fail = ["list"]
    with pytest.raises(StateLost, match="can't be listed") as raised:
        open_newest([tier(near, "memory"), tier(far)])
    assert not isinstance(raised.value, NoneThere)


def test_a_tier_that_does_not_answer_is_left_out_and_named() -> None:
    near, far = DictStore("near"), DictStore("far")
    made = saved(far, 10)
    near.fail = ["list"]
    with open_newest([tier(near, "memory"), tier(far)]) as opened:
        assert everything(opened) == held(made)
        assert [str(one) for one in opened.receipt.refused] == [
            "memory (near): near: can't be listed"
        ]


def test_a_listing_that_lags_hides_no_part() -> None:
    far = DictStore("far")
    made = saved(far, 10)
    far.hidden = [part_key(made, 1)]
    with open_newest([tier(far)]) as opened:
        assert everything(opened) == held(made)


def test_the_others_follow_the_one_who_decides() -> None:
    near, far = DictStore("near"), DictStore("far")
    made = saved(far, 10)
    told = find.decide([tier(far)]).told
    saved(near, 20)
    text = msgspec.json.encode(told)
    with open_told(
        [tier(near, "memory"), tier(far)], msgspec.json.decode(text, type=Told)
    ) as opened:
        assert everything(opened) == held(made)
    with pytest.raises(StateLost, match="not to be seen from here"):
        open_told([tier(near, "memory")], told)


def test_two_checkpoints_of_one_step_are_told_apart() -> None:
    near, far = DictStore("near"), DictStore("far")
    draft(10, {"w": weights(1)}, world=2).put(near)
    made = draft(10, {"w": weights(2)}, world=2).put(far)
    told = find.decide([tier(far)]).told
    with open_told([tier(near, "memory"), tier(far)], told) as opened:
        assert everything(opened) == held(made)
        assert opened.receipt.tier == "durable"


def test_a_range_reads_its_blocks_once() -> None:
    far = DictStore("far")
    made = saved(far, 10)
    data = held(made)[0]
    areas = [bytearray(10), bytearray(20), bytearray(1 << 17), bytearray(3)]
    starts = [65_000, 65_100, (1 << 16) - 5, len(data) - 3]
    with open_newest([tier(far)]) as opened:
        far.asked.clear()
        opened.read_many(
            Wanted(0, start, memoryview(area)) for start, area in zip(starts, areas, strict=True)
        )
        for start, area in zip(starts, areas, strict=True):
            assert area == data[start : start + len(area)]
        blocks = [start >> 16 for key, start, _ in far.asked if key.endswith("safetensors")]
        assert sorted(blocks) == [0, 1, 2, 3]
        far.asked.clear()
        opened.read(0, 65_000, 65_010)
        assert far.asked == []


def test_a_far_tier_is_asked_for_large_pieces() -> None:
    far = DictStore("far")
    made = saved(far, 10)
    with open_newest([tier(far, request_bytes=1 << 17, lanes=3)]) as opened:
        far.asked.clear()
        assert everything(opened) == held(made)
    spans = [end - start for key, start, end in far.asked if key.endswith("safetensors")]
    assert max(spans) == 1 << 17


@pytest.mark.parametrize("span", [(-1, 5), (0, 10**9)])
def test_a_range_outside_of_a_part_is_an_error(span: tuple[int, int]) -> None:
    far = DictStore("far")
    saved(far, 10)
    with open_newest([tier(far)]) as opened, pytest.raises(ValueError, match="reach out"):
        opened.read(0, *span)


def test_the_cache_of_blocks_is_capped() -> None:
    far = DictStore("far")
    saved(far, 10)
    with Opened(find.decide([tier(far)]), cache_bytes=1 << 17) as opened:
        for block in range(3):
            opened.read(0, (block << 16) + 1, (block << 16) + 2)
        far.asked.clear()
        opened.read(0, 1, 2)
        opened.read(0, (2 << 16) + 1, (2 << 16) + 2)
        assert [start for _, start, _ in far.asked] == [0]


def test_signed_blocks_are_checked_by_sha256() -> None:
    far = DictStore("far")
    made = saved(far, 10, signed=True)
    with open_newest([tier(far, key=KEY)]) as opened:
        assert everything(opened) == held(made)
    forged = saved(far, 20)
    sealed = draft(20, {"w": weights(20)}, world=2)
    sealed.checkpoint = forged.checkpoint
    sealed.put(far, KEY)  # signed, but by parts that nothing speaks for
    with pytest.raises(PartLost, match="nothing but XXH3"):
        load([tier(far, key=KEY)], everything, step=20)


def test_a_wrong_signature_refuses_the_step() -> None:
    far = DictStore("far")
    old = saved(far, 10, signed=True)
    draft(20, {"w": weights()}, world=2).put(far, bytes(32))
    result, receipt = load([tier(far, key=KEY)], everything)
    assert (result, receipt.behind) == (held(old), 10)
    assert "another key" in receipt.refused[0].why


def test_a_copy_after_which_the_training_fails_twice_is_set_aside() -> None:
    near, far = DictStore("near"), DictStore("far")
    old = saved(far, 10)
    new = saved(far, 20).put(near)
    tiers = [tier(near, "memory"), tier(far)]
    suspects, taken = Suspects(), []
    for _ in range(6):
        with open_newest(tiers, suspects=suspects) as opened:
            data, receipt = everything(opened), opened.receipt
        taken.append((receipt.step, receipt.tier, data))
        suspects = suspects.after(receipt)
        suspects = msgspec.json.decode(msgspec.json.encode(suspects), type=Suspects)
    assert taken == [
        (20, "memory", held(new)),
        (20, "memory", held(new)),
        (20, "durable", held(new)),
        (20, "durable", held(new)),
        (10, "durable", held(old)),
        (10, "durable", held(old)),
    ]
    with pytest.raises(StateLost, match="set aside"):
        open_newest(tiers, suspects=suspects)


def test_the_others_leave_out_what_was_set_aside() -> None:
    near, far = DictStore("near"), DictStore("far")
    made = saved(far, 20).put(near)
    tiers = [tier(near, "memory"), tier(far)]
    suspects = Suspects()
    for _ in range(2):
        with open_newest(tiers) as opened:
            everything(opened)
            suspects = suspects.after(opened.receipt)
    told = find.decide(tiers, suspects=suspects).told
    with open_told(tiers, told) as opened:
        assert everything(opened) == held(made)
        assert opened.receipt.tier == "durable"


def test_a_tier_is_named_by_where_it_is() -> None:
    series = checkpoints.Shelf(DictStore())
    assert (Tier.memory(series).name, Tier.memory(series).lanes) == ("memory", 2)
    assert (Tier.durable(series).name, Tier.durable(series).lanes) == ("durable", 8)
