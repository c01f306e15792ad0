"""A copy that is not like the others: who is meant, and what becomes of the rank that holds it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core_driver import Driver

from everstep.core import actions as do
from everstep.core.trust import dissent
from everstep.types import CauseKind, Decision


@pytest.mark.parametrize(
    ("held", "who"),
    [
        ({}, ()),
        ({4: "a"}, ()),
        ({0: "a", 1: "a"}, ()),
        ({0: "a", 1: "b"}, ()),  # nobody knows who is right
        ({0: "a", 2: "b", 3: "a"}, (2,)),
        ({0: "a", 1: "a", 2: "b", 3: "b"}, ()),
        ({0: "c", 1: "a", 2: "b", 3: "a", 4: "a"}, (0, 2)),
        ({0: "a", 1: "a", 2: "b", 3: "c"}, ()),  # two of four are not more than half
    ],
)
def test_who_dissents(held: dict[int, str], who: tuple[int, ...]) -> None:
    assert dissent(held) == who


@given(st.dictionaries(st.integers(0, 20), st.sampled_from("abc"), max_size=9))
def test_those_that_remain_are_most_and_agree(held: dict[int, str]) -> None:
    out = dissent(held)
    rest = {digest for rank, digest in held.items() if rank not in out}
    if out:
        assert len(rest) == 1
        assert 2 * (len(held) - len(out)) > len(held)
    elif len(rest) > 1:
        assert 2 * max(Counter(held.values()).values()) <= len(held)


CORRUPT = {0: "ab", 2: "cd", 3: "ab"}


def stopped(world_size: int = 4) -> Driver:
    """Step 4 is committed, rank 1 has died, and its replacement has parked with the others."""
    driver = Driver(world_size, unlimited=True).running(4)
    driver.die(1)
    for rank in driver.ranks:
        if rank != 1:
            driver.park(rank, 4)
    driver.join(1)
    return driver


def mismatch(driver: Driver, rank: int = 1, held: dict[int, str] | None = None) -> None:
    sources = driver.got(do.SendRegroup, everything=True)[-1].plan.ranks[rank].sources
    held = held or {source: CORRUPT[source] for source in sources}
    driver.restored(rank, ok=False, text="they differ", sources=sources, held=held)


def all_park(driver: Driver) -> None:
    for rank in driver.ranks:
        driver.park(rank, 4)


def test_a_suspect_that_then_dissents_is_set_aside_at_once() -> None:
    """The first receipt had two sources, which differed: a third was making the step by itself."""
    driver = stopped()
    mismatch(driver, held={0: "ab", 2: "cd"})
    all_park(driver)
    mismatch(driver)
    all_park(driver)
    parts = driver.one(do.SendRegroup).plan.ranks
    assert [rank for rank, part in enumerate(parts) if part.decision is Decision.FETCH] == [1, 2]
    assert parts[1].sources == (0, 3)


def test_one_that_dissents_twice_is_set_aside_and_fetches_from_the_rest() -> None:
    driver = stopped()
    mismatch(driver)
    all_park(driver)
    assert driver.one(do.SendRegroup).plan.ranks[1].sources == (0, 2, 3)  # once may be an accident
    driver.restored(2, digest="cd")  # having served is no proof
    mismatch(driver)
    all_park(driver)
    parts = driver.one(do.SendRegroup).plan.ranks
    assert [part.decision for part in parts] == [
        *(Decision.KEEP, Decision.FETCH, Decision.FETCH, Decision.KEEP)
    ]
    assert parts[1].sources == parts[2].sources == (0, 3)
    assert "rank 2 is set aside" in str(driver.journal("incident_cause")[-1])
    for rank in driver.ranks:
        driver.restored(rank, digest="ab")
    assert not driver.got(do.End, everything=True)
    # It has fetched: what it holds counts again.
    driver.die(3)
    for rank in (0, 1, 2):
        driver.park(rank, 4)
    driver.join(3)
    assert driver.one(do.SendRegroup).plan.ranks[3].sources == (0, 1, 2)


def test_two_that_find_it_in_one_recovery_are_twice() -> None:
    driver = Driver(5, unlimited=True).running(4)
    driver.die(1)
    driver.die(4)
    for rank in (0, 2, 3):
        driver.park(rank, 4)
    driver.join(1)
    driver.join(4)
    plan = driver.one(do.SendRegroup).plan
    for rank in (1, 4):
        sources = plan.ranks[rank].sources
        driver.restored(rank, ok=False, text="they differ", sources=sources, held=CORRUPT)
    all_park(driver)
    parts = driver.one(do.SendRegroup).plan.ranks
    assert parts[1].sources == parts[2].sources == parts[4].sources == (0, 3)


def test_where_no_more_than_half_agree_the_second_time_ends_the_job() -> None:
    driver = stopped(3)
    mismatch(driver, held={0: "ab", 2: "cd"})
    all_park(driver)
    mismatch(driver, held={0: "ab", 2: "cd"})
    assert driver.ended.cause is not None
    assert driver.ended.cause.kind is CauseKind.RECEIPT
    assert "the copies differ" in driver.ended.text


def test_what_still_fails_without_the_one_set_aside_ends_the_job() -> None:
    driver = stopped()
    for _ in range(3):
        mismatch(driver)
        all_park(driver)
    assert driver.ended.exit_code == 1
