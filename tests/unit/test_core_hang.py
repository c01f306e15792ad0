"""Who is the culprit of a hang: by hand, and against a model that runs programs until they hang."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from everstep.core.hang import Entered, Evidence, Kind, Stance, _ahead, _behind, judge

WORLD = 1
PAIR = 2


def show(rank: int, count: int = 0, kind: str = "allreduce", **more: Any) -> Evidence:
    """A rank that has entered `count` collectives of the world, and is overdue."""
    elements = more.pop("elements", 8)
    groups = {WORLD: Entered(count=count, kind=kind, elements=elements, name="world")}
    groups |= more.pop("groups", {})
    known: dict[str, Any] = {
        "stance": Stance.WORKING,
        "where": "in step 5",
        "step": 5,
        "silent_s": 61.0,
        "overdue": True,
    }
    return Evidence(rank=rank, incarnation=1, groups=groups, **(known | more))


def blame(*evidence: Evidence) -> tuple[Kind, dict[int, str]]:
    verdict = judge(evidence)
    assert verdict is not None
    return verdict.kind, dict(verdict.culprits)


def test_the_rank_that_never_entered_is_named() -> None:
    kind, culprits = blame(show(0, 12), show(1, 11), show(2, 12), show(3, 12))
    assert kind is Kind.ABSENT
    assert culprits == {
        1: "rank 1 hangs in step 5: it has not moved for 61.0 s, and ranks 0, 2, 3 wait for it in "
        "allreduce #12 of the world"
    }


def test_a_stopped_process_needs_no_counts() -> None:
    kind, culprits = blame(show(0, 12), show(1, 12, overdue=False, stopped=True), show(2, 13))
    assert kind is Kind.STOPPED
    assert list(culprits) == [1]
    assert "stopped by a signal" in culprits[1]
    assert "rank 2 waits for it in allreduce #13 of the world" in culprits[1]


def test_a_job_that_is_suspended_as_a_whole_has_no_culprit() -> None:
    assert judge([show(rank, 12, stopped=True) for rank in range(3)]) is None


def test_ranks_that_are_slow_together_have_no_culprit() -> None:
    """All compute; none waits, or who waits has come a moment ago."""
    assert judge([show(rank, 12) for rank in range(3)]) is None
    assert judge([show(0, 13, overdue=False), show(1, 12), show(2, 12)]) is None


def test_a_rank_that_may_take_its_time_is_no_culprit() -> None:
    """It saves, within its own deadline, while the others wait for it."""
    assert judge([show(0, 13), show(1, 12, overdue=False), show(2, 13)]) is None


def test_a_wait_that_goes_over_other_ranks_is_followed() -> None:
    """Rank 0 waits for 1 in the world, and 1 for 2 in a group of the two."""
    pair = {PAIR: Entered(count=3, kind="allgather", name="dp")}
    behind = {PAIR: Entered(count=2, kind="allgather", name="dp")}
    kind, culprits = blame(show(0, 12), show(1, 11, groups=pair), show(2, 11, groups=behind))
    assert (kind, list(culprits)) == (Kind.ABSENT, [2])


def test_a_rank_that_waits_for_a_message_is_not_blamed() -> None:
    """Messages have no common count; who waits says so."""
    waits: dict[str, Any] = {"stance": Stance.WAITING}
    kind, culprits = blame(show(0, 4), show(1, 4, **waits), show(2, 4, **waits))
    assert (kind, list(culprits)) == (Kind.ABSENT, [0])
    assert culprits[0].endswith("and ranks 1, 2 wait for it")


def test_who_may_wait_in_a_collective_that_all_have_entered_is_not_accused() -> None:
    """Two stages of two replicas. The all-reduce of ranks 2 and 3 stalls with both in it, in DDP's
    C++, which doesn't show that it waits; ranks 0 and 1 wait for a message from them."""
    first = {PAIR: Entered(count=3, name="stage 0")}
    second = {PAIR + 1: Entered(count=3, name="stage 1")}
    waits: dict[str, Any] = {"groups": first, "stance": Stance.WAITING, "inside": True}
    for count in (12, 13):  # of the world: the first stage may also have come to the fence
        ranks = [show(rank, count, **waits) for rank in (0, 1)]
        ranks += [show(rank, 12, groups=second, inside=True) for rank in (2, 3)]
        assert judge(ranks) is None


def test_the_last_one_in_the_loop_is_waited_for() -> None:
    left: dict[str, Any] = {"stance": Stance.LEFT, "overdue": False}
    kind, culprits = blame(show(0, 12, **left), show(1, 12), show(2, 12, **left))
    assert (kind, list(culprits)) == (Kind.ABSENT, [1])


def test_a_rank_that_left_its_loop_alone() -> None:
    kind, culprits = blame(show(0, 12), show(1, 11, stance=Stance.LEFT, overdue=False), show(2, 12))
    assert (kind, list(culprits)) == (Kind.LEFT, [1])
    assert "left its loop after step 5" in culprits[1]
    assert "the same `until`" in culprits[1]


def test_what_ranks_do_after_their_loops_is_their_own() -> None:
    left: dict[str, Any] = {"stance": Stance.LEFT, "overdue": False}
    assert judge([show(0, 12, **left), show(1, 11, **left)]) is None


def test_collectives_of_different_kinds() -> None:
    kind, culprits = blame(show(0, 12), show(1, 12, "broadcast"), show(2, 12))
    assert (kind, list(culprits)) == (Kind.MISMATCH, [1])
    assert "entered broadcast as collective #12 of the world" in culprits[1]
    assert "ranks 0, 2 have entered allreduce" in culprits[1]


def test_collectives_of_different_sizes() -> None:
    kind, culprits = blame(show(0, 12), show(1, 12, elements=9), show(2, 12))
    assert (kind, list(culprits)) == (Kind.MISMATCH, [1])
    assert "allreduce of 9 elements" in culprits[1]
    assert "allreduce of 8 elements" in culprits[1]


def test_sizes_that_may_differ() -> None:
    ranks = [show(r, 12, "alltoall_base", elements=r, stance=Stance.WAITING) for r in range(3)]
    assert judge(ranks) is None


def test_of_two_that_differ_the_lower_rank_is_taken_to_be_right() -> None:
    kind, culprits = blame(show(0, 12, "barrier"), show(1, 12))
    assert (kind, list(culprits)) == (Kind.MISMATCH, [1])


def test_ranks_that_wait_for_each_other() -> None:
    first = {PAIR: Entered(count=3, kind="broadcast", name="dp")}
    second = {PAIR: Entered(count=4, kind="broadcast", name="dp")}
    kind, culprits = blame(show(0, 13, groups=first), show(1, 12, groups=second), show(2, 13))
    assert (kind, list(culprits)) == (Kind.DEADLOCK, [0])
    assert "ranks 0, 1 wait for each other" in culprits[0]
    assert "rank 0 has not entered broadcast #4 of group dp" in culprits[0]


def test_another_generation_is_another_world() -> None:
    old = show(1, 2, generation=3)
    assert judge([show(0, 12, generation=4), old, show(2, 12, generation=4)]) is None


def test_who_is_set_up_or_parked_is_left_to_other_deadlines() -> None:
    assert judge([show(0, 12), show(1, 3, stance=Stance.APART), show(2, 12)]) is None


# ---------------------------------------------------------------------- against a model


@dataclass
class Rank:
    """Runs its part of the program as far as it can."""

    rank: int
    stuck_at: int | None
    place: int = 0
    inside: bool = False
    counts: dict[int, int] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)


Case = tuple[int, list[tuple[int, ...]], dict[int, int], set[int], set[int]]


@st.composite
def programs(draw: st.DrawFn) -> Case:
    """(ranks, the members of each group, rank to where it loops for ever, which collectives do not
    end though all have entered, ranks that don't show that they wait), and the program is one
    collective of each group in order."""
    size = draw(st.integers(2, 6))
    members = st.lists(st.integers(0, size - 1), min_size=2, max_size=size, unique=True)
    program = draw(st.lists(members.map(lambda m: tuple(sorted(m))), min_size=1, max_size=12))
    stuck = draw(
        st.dictionaries(st.integers(0, size - 1), st.integers(0, len(program)), max_size=2)
    )
    stalled = draw(st.sets(st.integers(0, len(program) - 1), max_size=1))
    quiet = draw(st.sets(st.integers(0, size - 1)))
    return size, program, stuck, stalled, quiet


def run(
    size: int, program: list[tuple[int, ...]], stuck: dict[int, int], stalled: set[int]
) -> list[Rank]:
    """Run every rank until nobody can go on: a collective ends when all members have entered, if
    it is none of `stalled`."""
    ranks = [Rank(rank, stuck.get(rank)) for rank in range(size)]
    entered: list[set[int]] = [set() for _ in program]
    moved = True
    while moved:
        moved = False
        for each in ranks:
            while each.place < len(program) and each.place != each.stuck_at:
                group = program[each.place]
                if each.rank in group and each.rank not in entered[each.place]:
                    entered[each.place].add(each.rank)
                    identity = hash(group)
                    each.counts[identity] = each.counts.get(identity, 0) + 1
                    moved = True
                stalls = each.place in stalled
                each.inside = each.rank in group and (stalls or entered[each.place] != set(group))
                if each.inside:
                    break
                each.place += 1
                moved = True
    return ranks


def evidence_of(
    ranks: list[Rank], program: list[tuple[int, ...]], quiet: set[int]
) -> list[Evidence]:
    """What the ranks show; every member of a group has a row for it, at 0 if need be."""
    groups = {hash(group): group for group in program}
    shown = []
    for each in ranks:
        done = each.place == len(program) and each.stuck_at is None
        rows = {
            identity: Entered(count=each.counts.get(identity, 0), kind="allreduce", name="g")
            for identity, group in groups.items()
            if each.rank in group
        }
        waits = Stance.WAITING if each.inside and each.rank not in quiet else Stance.WORKING
        stance = Stance.LEFT if done else waits
        shown.append(
            Evidence(
                rank=each.rank,
                incarnation=1,
                stance=stance,
                where="in step 5",
                overdue=not done,
                silent_s=9.0,
                inside=each.inside,
                groups=rows,
            )
        )
    return shown


@given(programs())
def test_the_culprits_are_those_that_loop(case: Case) -> None:
    """Nobody else is ever named, and somebody is whenever anybody waits; where a collective stalls,
    they may wait for that."""
    size, program, stuck, stalled, quiet = case
    ranks = run(size, program, stuck, stalled)
    evidence = evidence_of(ranks, program, quiet)
    loops = {r.rank for r in ranks if r.stuck_at is not None and r.place == r.stuck_at}
    verdict = judge(evidence)
    if verdict is not None:
        assert verdict.kind is Kind.ABSENT
        assert set(verdict.culprits) <= loops
    waits = any(each.rank not in loops for each in ranks)
    stalls = any(each.inside and each.place in stalled for each in ranks)
    assert verdict is None or (loops and waits)
    assert verdict is not None or stalls or not (loops and waits)


counts = st.lists(
    st.dictionaries(st.integers(1, 4), st.integers(0, 3), max_size=4), min_size=1, max_size=7
)


@given(counts)
def test_who_is_behind_and_ahead(case: list[dict[int, int]]) -> None:
    """Against a look at every pair."""
    evidence = [
        Evidence(
            rank=rank,
            incarnation=1,
            stance=Stance.WORKING,
            where="",
            groups={group: Entered(count=count) for group, count in groups.items()},
        )
        for rank, groups in enumerate(case)
    ]
    pairs = {
        (a, b, group)
        for a, of_a in enumerate(case)
        for b, of_b in enumerate(case)
        for group in of_a.keys() & of_b.keys()
        if of_a[group] > of_b[group]
    }
    assert _ahead(evidence) == {a for a, _, _ in pairs}
    behind = _behind(evidence)
    assert behind.keys() == {b for _, b, _ in pairs}
    for rank, (_, count) in behind.items():
        most = max(
            len({a for a, b, g in pairs if b == rank and g == group}) for _, _, group in pairs
        )
        assert any(
            case[rank].get(group) == count
            and len({a for a, b, g in pairs if b == rank and g == group}) == most
            for group in case[rank]
        )


@given(st.permutations(range(5)), st.integers(0, 4))
def test_the_order_of_the_evidence_does_not_matter(order: list[int], looping: int) -> None:
    evidence = [show(rank, 12 - (rank == looping)) for rank in range(5)]
    assert judge([evidence[i] for i in order]) == judge(evidence)
