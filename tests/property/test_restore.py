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


def naive_place(world: list[Holding], seen: Position = (0, 0)) -> Position | None:
    """The newest place for which every shard has a copy or can make one, tried one by one; (0, 0)
    is where the script begins."""
    committed = {(h.committed, h.sections) for h in world} | {seen}
    if max(committed)[0] == 0:
        return 0, 0
    best = None
    for place in PLACES:
        have, make = whole_at(world, place, False), whole_at(world, place, True)
        if place in committed and all(have[shard] or make[shard] for shard in have):
            best = place if place[0] > 0 else (0, 0)
    return best


@given(worlds, st.sampled_from(PLACES))
@settings(max_examples=600)
def test_the_place_is_that_of_the_naive_planner(world: list[Holding], seen: Position) -> None:
    for before in ((0, 0), seen):
        outcome = plan(world, before)
        expected = naive_place(world, before)
        assert choose(world, {h.shard for h in world}, before) == expected
        if expected is None:
            assert isinstance(outcome, Lost)
        else:
            assert isinstance(outcome, Plan)
            assert outcome.position == expected


@given(worlds)
def test_ranks_that_hold_nothing_may_be_left_out(world: list[Holding]) -> None:
    shards = {h.shard for h in world}
    gone = [Holding(committed=0, torn=True, shard=shard) for shard in shards]
    assert choose(world, shards) == choose([*world, *gone], shards)


@given(worlds, st.integers(1, 8))
@settings(max_examples=600)
def test_every_rank_can_do_its_part(world: list[Holding], most: int) -> None:
    outcome = plan(world, most_sources=most)
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
        assert (part.sources != ()) == (part.decision is Decision.FETCH)
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


@given(worlds)
def test_what_is_lost_is_lost(world: list[Holding]) -> None:
    outcome = plan(world)
    if isinstance(outcome, Plan):
        return
    assert outcome.shards
    assert set(outcome.shards) <= {h.shard for h in world}
    for shard in outcome.shards:
        assert repr(shard) in outcome.reason
    reached: dict[str, set[Position]] = {h.shard: set() for h in world}
    for place in {h.position for h in world}:
        for ready in (False, True):
            for shard, ranks in whole_at(world, place, ready).items():
                reached[shard] |= {place} if ranks else set()
    gone = {shard for shard, places in reached.items() if not places}
    apart = [
        {shard for shard, places in reached.items() if place not in places}
        for place in set().union(*reached.values())
    ]
    assert set(outcome.shards) in ([gone] if gone else apart)


@given(worlds, st.randoms(use_true_random=False))
def test_the_order_of_the_ranks_does_not_matter(world: list[Holding], order: object) -> None:
    shuffled = list(world)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = plan(world), plan(shuffled)
    assert type(one) is type(other)
    if isinstance(one, Plan) and isinstance(other, Plan):
        assert one.position == other.position
