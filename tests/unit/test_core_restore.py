"""The planner's words, and the cases a person would ask about."""

from __future__ import annotations

import pytest

from everstep.core.restore import Lost, plan
from everstep.core.words import name_ranks, name_signal, verb
from everstep.types import Decision, Holding, Plan


def holds(
    committed: int, *, shard: str = "all", torn: bool = False, ready: bool = False
) -> Holding:
    return Holding(committed=committed, torn=torn, can_advance=ready, shard=shard)


NOTHING = holds(0, torn=True)


def planned(*holdings: Holding) -> Plan:
    outcome = plan(holdings)
    assert isinstance(outcome, Plan)
    return outcome


def lost(*holdings: Holding) -> Lost:
    outcome = plan(holdings)
    assert isinstance(outcome, Lost)
    return outcome


def test_a_joiner_fetches_from_all_replicas() -> None:
    outcome = planned(holds(5), NOTHING, holds(5), holds(5))
    assert outcome.step == 5
    assert outcome.reason == "rank 1 takes step 5 from ranks 0, 2, 3"
    assert outcome.ranks[1].sources == (0, 2, 3)
    assert [outcome.ranks[rank].sinks for rank in (0, 2, 3)] == [(1,)] * 3


def test_a_retry_is_done_from_memory() -> None:
    assert planned(*[holds(5)] * 4).reason == "ranks 0-3 redo step 6 from their own memory"
    assert planned(holds(5)).reason == "rank 0 redoes step 6 from its own memory"


def test_who_stands_in_the_fence_rolls_forward_when_a_peer_has_committed() -> None:
    outcome = planned(holds(6), holds(5, ready=True), holds(5, ready=True), holds(5))
    assert outcome.reason == (
        "rank 3 takes step 6 from rank 0; ranks 1, 2 make step 6 from their own gradients"
    )


def test_a_torn_peer_that_has_committed_proves_that_the_step_was_passed() -> None:
    outcome = planned(holds(6, torn=True), holds(5, ready=True))
    assert outcome.step == 6
    assert outcome.ranks[0].decision is Decision.FETCH
    assert outcome.ranks[0].sources == (1,)


def test_nobody_advances_to_a_step_that_nobody_committed() -> None:
    outcome = planned(holds(5, ready=True), holds(5, ready=True))
    assert outcome.step == 5
    assert {part.decision for part in outcome.ranks} == {Decision.KEEP}


def test_the_step_is_one_that_every_shard_reaches() -> None:
    outcome = planned(
        holds(6, shard="a"), holds(5, shard="a"), holds(5, shard="b"), holds(5, shard="b")
    )
    assert outcome.step == 5
    assert outcome.ranks[0].decision is Decision.FETCH
    assert outcome.ranks[0].sources == (1,)


def test_keepers_are_asked_before_those_that_advance() -> None:
    outcome = planned(holds(6), holds(5, ready=True), NOTHING)
    assert outcome.ranks[2].sources == (0,)


def test_step_0_means_all_start_again() -> None:
    for holdings in ([holds(0)] * 2, [holds(0), NOTHING], [NOTHING] * 2):
        outcome = planned(*holdings)
        assert outcome.step == 0
        assert {part.decision for part in outcome.ranks} == {Decision.KEEP}
        assert outcome.reason == (
            "nothing is committed yet: ranks 0, 1 start again from the script"
        )


def test_what_is_lost_is_named() -> None:
    outcome = lost(holds(5, shard="a"), holds(0, shard="b", torn=True))
    assert outcome.shards == ("b",)
    assert "shard 'b' was held only by processes that are gone (rank 1)" in outcome.reason
    torn = lost(holds(5, torn=True), holds(4, torn=True))
    assert torn.shards == ("all",)
    assert "shard 'all' is torn on ranks 0, 1" in torn.reason
    apart = lost(holds(6, shard="a"), holds(6, shard="b"), holds(4, shard="c"))
    assert apart.shards == ("c",)
    assert apart.reason.startswith("no step is held by every shard: shard 'a' is at step 6")


def test_a_plan_needs_ranks() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        plan([])


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([], "no rank"),
        ([3], "rank 3"),
        ([2, 1], "ranks 1, 2"),
        ([0, 1, 2, 3], "ranks 0-3"),
        ([0, 2, 3, 5, 6, 7, 9], "ranks 0, 2, 3, 5-7, 9"),
    ],
)
def test_ranks_are_named_shortly(ranks: list[int], said: str) -> None:
    assert name_ranks(ranks) == said


def test_words() -> None:
    assert verb([1], "waits", "wait") == "rank 1 waits"
    assert verb([1, 2], "waits", "wait") == "ranks 1, 2 wait"
    assert name_signal(9) == "SIGKILL"
    assert name_signal(99) == "signal 99"
