"""The planner against a planner that tries everything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.core.restore import Lost, choose, plan
from everstep.types import Decision, Holding, Plan, Position

holding = st.builds(
    Holding,
    committed=st.integers(0, 4),
    torn=st.booleans(),
    can_advance=st.booleans(),
    shard=st.sampled_from(["a", "b", "c"]),
    sections=st.sampled_from([0, 0, 0, 1]),
    in_section=st.booleans(),
)
worlds = st.lists(holding, min_size=1, max_size=7)
Copied = dict[str, set[int]]
copies = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sets(st.integers(1, 5), max_size=2))


PLACES = [(step, sections) for step in range(6) for sections in range(3)]


def whole_at(world: list[Holding], place: Position, advance: bool) -> dict[str, list[int]]:
    """By shard, the ranks that stand at `place`, or that can come there when `advance`."""
    found: dict[str, list[int]] = {h.shard: [] for h in world}
    for rank, held in enumerate(world):
        there = (held.committed, held.sections)
        if advance and held.in_section:
            there = (held.committed, held.sections + 1)
        elif advance:
            there = (held.committed + 1, 0)
        if there == place and not world[rank].torn and (world[rank].can_advance or not advance):
            found[world[rank].shard].append(rank)
    return found


def copied_of(world: list[Holding], copied: Copied) -> Copied:
    """Copies are of shards that the job has."""
    return {shard: copied[shard] for shard in copied if shard in {h.shard for h in world}}


def committed_by(world: list[Holding], seen: Position, kept: Copied) -> set[Position]:
    """Where ranks stand, and the steps before the newest of these that were copied."""
    stand = {(h.committed, h.sections) for h in world} | {seen}
    copied = {(step, 0) for steps in kept.values() for step in steps}
    return stand | {place for place in copied if place < max(stand)}


def naive_place(
    world: list[Holding], seen: Position = (0, 0), copied: Copied | None = None
) -> Position | None:
    """The newest place for which every shard has a holder, can be made or was copied, tried one by
    one; (0, 0) is where the script begins."""
    kept = copied or {}
    committed = committed_by(world, seen, kept)
    if max(committed)[0] == 0:
        return 0, 0
    best = None
    for place in PLACES:
        have, make = whole_at(world, place, False), whole_at(world, place, True)
        reached = (have[s] or make[s] or place[0] in kept.get(s, ()) for s in have)
        if place in committed and all(reached):
            best = place if place[0] > 0 else (0, 0)
    return best


@given(worlds, st.sampled_from(PLACES), copies)
@settings(max_examples=600)
def test_the_place_is_that_of_the_naive_planner(
    world: list[Holding], seen: Position, copied: Copied
) -> None:
    kept = copied_of(world, copied)
    for before, known in (((0, 0), {}), (seen, {}), ((0, 0), kept), (seen, kept)):
        outcome = plan(world, before, known)
        expected = naive_place(world, before, known)
        assert choose(world, {h.shard for h in world}, before, known) == expected
        if expected is None:
            assert isinstance(outcome, Lost)
        else:
            assert isinstance(outcome, Plan)
            assert outcome.position == expected


@given(worlds, st.sampled_from(PLACES), copies)
def test_ranks_that_hold_nothing_may_be_left_out(
    world: list[Holding], seen: Position, copied: Copied
) -> None:
    shards, kept = {h.shard for h in world}, copied_of(world, copied)
    gone = [Holding(committed=0, torn=True, shard=shard) for shard in shards]
    for known in ({}, kept):
        assert choose(world, shards, seen, known) == choose([*world, *gone], shards, seen, known)


@given(worlds, st.sampled_from(PLACES), copies)
def test_copies_lead_to_no_older_place(
    world: list[Holding], seen: Position, copied: Copied
) -> None:
    shards, kept = {h.shard for h in world}, copied_of(world, copied)
    without, found = choose(world, shards, seen), choose(world, shards, seen, kept)
    assert without is None or (found is not None and found >= without)


@given(worlds, st.integers(1, 8), copies)
@settings(max_examples=600)
def test_every_rank_can_do_its_part(world: list[Holding], most: int, copied: Copied) -> None:
    kept = copied_of(world, copied)
    outcome = plan(world, copied=kept, most_sources=most)
    if isinstance(outcome, Lost):
        return
    assert len(outcome.ranks) == len(world)
    assert outcome.reason
    if outcome.step == 0:
        assert all(part.decision is Decision.KEEP for part in outcome.ranks)
        return
    have, make = whole_at(world, outcome.position, False), whole_at(world, outcome.position, True)
    for rank, part in enumerate(outcome.ranks):
        shard = world[rank].shard
        if rank in have[shard]:
            assert part.decision is Decision.KEEP
        elif rank in make[shard]:
            assert part.decision is Decision.ADVANCE
        else:
            assert part.decision is Decision.FETCH
            holders = have[shard] or make[shard]
            assert set(part.sources) <= set(holders)
            assert len(part.sources) == len(set(part.sources)) == min(most, len(holders))
            assert part.copy == (not holders), "peers first: their state is there already"
            assert holders or outcome.step in kept[shard]
        assert (part.sources != () or part.copy) == (part.decision is Decision.FETCH)
        assert part.decision is not Decision.FETCH or not part.sinks
        for source in part.sources:
            assert rank in outcome.ranks[source].sinks
        for sink in part.sinks:
            assert rank in outcome.ranks[sink].sources


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 8))
def test_sources_share_the_work(holders: int, joiners: int, most: int) -> None:
    """Where not all are asked, none is asked much more often than another."""
    whole, nothing = Holding(committed=3), Holding(committed=0, torn=True)
    outcome = plan([whole] * holders + [nothing] * joiners, most_sources=most)
    assert isinstance(outcome, Plan)
    asked = [len(part.sinks) for part in outcome.ranks[:holders]]
    assert sum(asked) == joiners * min(most, holders)
    assert max(asked) <= joiners * min(most, holders) / holders + min(most, joiners)


@given(worlds, copies)
def test_what_is_lost_is_lost(world: list[Holding], copied: Copied) -> None:
    kept = copied_of(world, copied)
    outcome = plan(world, copied=kept)
    if isinstance(outcome, Plan):
        return
    assert outcome.shards
    assert set(outcome.shards) <= {h.shard for h in world}
    for shard in outcome.shards:
        assert repr(shard) in outcome.reason
    reached: dict[str, set[Position]] = {h.shard: set() for h in world}
    for place in committed_by(world, (0, 0), kept):
        for ready in (False, True):
            for shard, ranks in whole_at(world, place, ready).items():
                there = ranks or place[0] in kept.get(shard, ())
                reached[shard] |= {place} if there else set()
    gone = {shard for shard, places in reached.items() if not places}
    apart = [
        {shard for shard, places in reached.items() if place not in places}
        for place in set().union(*reached.values())
    ]
    assert set(outcome.shards) in ([gone] if gone else apart)


@given(worlds, st.randoms(use_true_random=False), copies)
def test_the_order_of_the_ranks_does_not_matter(
    world: list[Holding], order: object, copied: Copied
) -> None:
    shuffled, kept = list(world), copied_of(world, copied)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = plan(world, copied=kept), plan(shuffled, copied=kept)
    assert type(one) is type(other)
    if isinstance(one, Plan) and isinstance(other, Plan):
        assert one.position == other.position
