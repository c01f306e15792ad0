"""The planner against a planner that tries everything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.core.restore import Lost, plan
from everstep.types import Decision, Holding, Plan

holding = st.builds(
    Holding,
    committed=st.integers(0, 4),
    torn=st.booleans(),
    can_advance=st.booleans(),
    shard=st.sampled_from(["a", "b", "c"]),
)
worlds = st.lists(holding, min_size=1, max_size=7)


def whole_at(world: list[Holding], step: int, advance: bool) -> dict[str, list[int]]:
    """By shard, the ranks that have `step` whole, or that can make it when `advance`."""
    found: dict[str, list[int]] = {h.shard: [] for h in world}
    for rank in range(len(world)):
        has = world[rank].committed + (1 if advance else 0) == step
        if has and not world[rank].torn and (world[rank].can_advance or not advance):
            found[world[rank].shard].append(rank)
    return found


def naive_step(world: list[Holding]) -> int | None:
    """The newest step for which every shard has a copy or can make one, tried one by one."""
    best = None
    for step in range(8):
        seen = any(h.committed == step for h in world)
        have, make = whole_at(world, step, False), whole_at(world, step, True)
        if step == 0 and not any(h.committed for h in world):
            best = 0
        if seen and all(have[shard] or (make[shard] and step > 0) for shard in have):
            best = step
    return best


@given(worlds)
@settings(max_examples=600)
def test_the_step_is_that_of_the_naive_planner(world: list[Holding]) -> None:
    outcome = plan(world)
    expected = naive_step(world)
    if expected is None:
        assert isinstance(outcome, Lost)
    else:
        assert isinstance(outcome, Plan)
        assert outcome.step == expected


@given(worlds)
@settings(max_examples=600)
def test_every_rank_can_do_its_part(world: list[Holding]) -> None:
    outcome = plan(world)
    if isinstance(outcome, Lost):
        return
    assert len(outcome.ranks) == len(world)
    assert outcome.reason
    if outcome.step == 0:
        assert all(part.decision is Decision.KEEP for part in outcome.ranks)
        return
    have, make = whole_at(world, outcome.step, False), whole_at(world, outcome.step, True)
    for rank, part in enumerate(outcome.ranks):
        shard = world[rank].shard
        if rank in have[shard]:
            assert part.decision is Decision.KEEP
        elif rank in make[shard]:
            assert part.decision is Decision.ADVANCE
        else:
            assert part.decision is Decision.FETCH
            assert list(part.sources) == (have[shard] or make[shard])
        assert (part.sources != ()) == (part.decision is Decision.FETCH)
        assert part.decision is not Decision.FETCH or not part.sinks
        for source in part.sources:
            assert rank in outcome.ranks[source].sinks
        for sink in part.sinks:
            assert rank in outcome.ranks[sink].sources


@given(worlds)
def test_what_is_lost_is_lost(world: list[Holding]) -> None:
    outcome = plan(world)
    if isinstance(outcome, Plan):
        return
    assert outcome.shards
    assert set(outcome.shards) <= {h.shard for h in world}
    for shard in outcome.shards:
        assert repr(shard) in outcome.reason
    reached: dict[str, set[int]] = {h.shard: set() for h in world}
    for step in {h.committed for h in world}:
        for ready in (False, True):
            for shard, ranks in whole_at(world, step, ready).items():
                reached[shard] |= {step} if ranks else set()
    gone = {shard for shard, steps in reached.items() if not steps}
    apart = [
        {shard for shard, steps in reached.items() if step not in steps}
        for step in set().union(*reached.values())
    ]
    assert set(outcome.shards) in ([gone] if gone else apart)


@given(worlds, st.randoms(use_true_random=False))
def test_the_order_of_the_ranks_does_not_matter(world: list[Holding], order: object) -> None:
    shuffled = list(world)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = plan(world), plan(shuffled)
    assert type(one) is type(other)
    if isinstance(one, Plan) and isinstance(other, Plan):
        assert one.step == other.step
