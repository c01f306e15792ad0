"""Whole jobs whose coordinator dies, or is taken for dead, and comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from tests.simulation.coverage import Coverage

from everstep.core import events as ev
from everstep.core import resume, simterms
from everstep.core.goodput import fold
from everstep.core.job import Job
from everstep.core.membership import Membership
from everstep.core.reclaim import Reclaims
from everstep.core.rejoined import Rejoined
from everstep.core.simagents import SimAgent
from everstep.core.simkeeping import SimKeeping, SimNode
from everstep.core.simschedule import COORDINATOR_FAULTS, Fence, Schedule, draw_schedule
from everstep.core.simulate import InvariantError, Outcome, simulate

SCHEDULES = 300  # all with a fault of a coordinator, of about 1,400 that are drawn


@cache
def with_coordinators() -> tuple[Schedule, ...]:
    """Drawn schedules of jobs whose coordinator may die."""
    drawn = (draw_schedule(seed) for seed in range(5 * SCHEDULES))
    hit = [s for s in drawn if any(kind in COORDINATOR_FAULTS for _, kind in s.faults)]
    return tuple(hit)[:SCHEDULES]


@cache
def outcomes() -> tuple[Outcome, ...]:
    return tuple(simulate(schedule) for schedule in with_coordinators())


@cache
def coverage() -> Coverage:
    found = Coverage()
    for outcome in outcomes():
        found.add(outcome)
    return found


def returns(outcome: Outcome) -> list[bool]:
    """For each coordinator that has found out how the job is: whether nobody was disturbed."""
    lines = outcome.records
    return [line["undisturbed"] for line in lines if line["event"] == "coordinator_resumed"]


@pytest.mark.slow
def test_the_schedules_reach_what_they_are_for() -> None:
    found, back = coverage(), Counter[bool]()
    for outcome in outcomes():
        back.update(returns(outcome))
    print(found.table(), back)
    assert min(back[True], back[False]) > 40, back
    assert sum(outcome.terms > 2 for outcome in outcomes()) > 20, "twice in one run"
    assert found.met["coordinator"] > 15, "incidents for which only its absence is to blame"
    assert found.met["ended well"] > SCHEDULES * 2 / 3
    assert found.met["replace peer"] > 5


def test_coordinators_die_and_are_deposed_in_every_phase() -> None:
    by_phase = Counter[tuple[str, str]]()
    for (kind, phase, _), count in coverage().hits.items():
        by_phase[kind, phase] += count
    phases = ["gathering", "setting up", "running", "stopping", "regrouping", "reconvening"]
    wanted = [("crash", phase) for phase in phases] + [("depose", phase) for phase in phases]
    assert not [each for each in wanted if by_phase[each] < 1], by_phase


def test_what_happens_while_there_is_none() -> None:
    away = Counter[str]()
    for (kind, phase, _), count in coverage().hits.items():
        away[kind] += count if phase in ("away", "reconvening") else 0
    assert not [kind for kind in ("kill", "fell", "cut", "raise") if away[kind] < 1], away


def test_every_journal_sums_to_its_wall_time() -> None:
    for outcome in outcomes():
        ledger = fold(outcome.records)
        wall_s = outcome.records[-1]["t"] - outcome.records[0]["t"] if outcome.records else 0.0
        assert ledger.wall_s == pytest.approx(wall_s)
        assert ledger.incident_s == pytest.approx(sum(e.total_s for e in ledger.incidents))


# ---------------------------------------------------------------------- moments, one by one


PAIR = Schedule(seed=3, world_size=4, steps=3, node_size=2, nnodes=2, spares=1, hosts=3)
LAYOUTS: list[tuple[str, Schedule]] = [
    ("ddp", PAIR),
    ("sections", replace(PAIR, steps=2, sections=(0, 1, 2))),
    ("full", replace(PAIR, shards=4, fence="early")),
    ("hsdp", replace(PAIR, world_size=6, nnodes=3, shards=2, fence="late", hosts=4)),
]


@pytest.mark.parametrize("schedule", [s for _, s in LAYOUTS], ids=[name for name, _ in LAYOUTS])
@pytest.mark.parametrize("kind", COORDINATOR_FAULTS)
def test_a_coordinator_lost_at_every_boundary_of_a_run(kind: str, schedule: Schedule) -> None:
    """With nothing else wrong the job always comes to its end, also with full shards."""
    for after in range(0, simulate(schedule).events, 3):
        outcome = simulate(replace(schedule, faults=((after, kind),)))
        assert outcome.end.exit_code == 0, (after, outcome.end.text)


@pytest.mark.parametrize("kind", ["fell", "kill", "crash", "depose", "unlink"])
def test_a_coordinator_lost_at_every_boundary_of_a_recovery(kind: str) -> None:
    base = replace(PAIR, seed=4, steps=4, spares=2, hosts=4, sections=(0, 0, 1))
    for after in range(0, 120, 4):
        outcome = simulate(replace(base, faults=((100, kind), (after, "crash"))))
        good = outcome.end.exit_code == 0 or "its node and its guardian" in outcome.end.text
        assert good, (after, outcome.end.text)


def test_one_that_dies_again_and_again_costs_nothing_but_time() -> None:
    base = replace(PAIR, steps=5, spares=0, shards=4, fence="late", slow_s=0.01)
    terms = Counter[int]()
    for after in range(0, 100, 7):
        outcome = simulate(replace(base, faults=((after, "crash"), *[(20, "crash")] * 8)))
        assert outcome.end.exit_code == 0, (after, outcome.end.text)
        terms[outcome.terms] += 1
    assert max(terms) > 4, terms


def test_steps_go_on_while_there_is_none() -> None:
    """Full shards, so that any disturbance would be seen: nobody is replaced, no step is undone."""
    base = replace(PAIR, steps=6, spares=0, shards=4, fence="early", slow_s=0.01)
    undisturbed = 0
    for seed in range(40):
        outcome = simulate(replace(base, seed=seed, faults=((80, "crash"),)))
        undisturbed += returns(outcome) == [True]
        assert outcome.end.exit_code == 0
    assert undisturbed > 25


# ---------------------------------------------------------------------- errors that must be found


def simulate_all() -> None:
    for schedule in with_coordinators():
        simulate(schedule)


def test_numbers_that_are_given_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "number_from", lambda *_: None)
    with pytest.raises(InvariantError, match=r"gives the number|reused|rank .* both act"):
        simulate_all()


def test_a_return_that_disturbs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_is_undisturbed", lambda *_: False)
    with pytest.raises(InvariantError, match="nothing was wrong, and ranks are disturbed"):
        simulate_all()


def test_a_failure_that_is_overlooked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have a process; that some of them stand still is not looked at."""

    def all_there(job: Job, rejoined: Rejoined) -> bool:
        return len(rejoined.members) == job.world_size

    monkeypatch.setattr(resume, "_is_undisturbed", all_there)
    with pytest.raises((InvariantError, AssertionError)):
        simulate_all()


def test_agents_that_say_all_is_well_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They report ranks as if these were in their loops."""
    report = SimAgent.report

    def rosy(agent: SimAgent, node: int, host: str, domain: str) -> ev.NodeBack:
        told = report(agent, node, host, domain)
        return replace(told, members=tuple(replace(each, settled=True) for each in told.members))

    monkeypatch.setattr(SimAgent, "report", rosy)
    with pytest.raises((InvariantError, AssertionError)):
        simulate_all()


def test_what_a_guardian_keeps_and_nobody_asks_for_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Reclaims, "ask", lambda *_: None)
    with pytest.raises(InvariantError, match="has no capsule of"):
        lose_nodes_in_fences("early")


def test_a_capsule_that_no_guardian_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker goes on before it is kept elsewhere, and nobody keeps it."""

    def at_once(_keeping: SimKeeping, _node: SimNode, _rank: int, then: Callable[[], None]) -> None:
        then()

    monkeypatch.setattr(SimKeeping, "deposit", at_once)
    with pytest.raises(InvariantError, match="has no capsule of"):
        lose_nodes_in_fences("early")


def lose_nodes_in_fences(fence: Fence) -> None:
    for seed in range(40):
        for after in range(60, 160, 5):
            simulate(replace(PAIR, seed=seed, fence=fence, faults=((after, "fell"),)))


def test_one_that_was_left_behind_and_is_taken_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that was cut off while another took its place comes back to the next coordinator, and
    its successor does not."""
    monkeypatch.setattr(resume, "_expel_left_behind", lambda *_: None)
    with pytest.raises((InvariantError, AssertionError)):
        cut_one_off_and_lose_its_successor()


def cut_one_off_and_lose_its_successor() -> None:
    base = replace(PAIR, spares=2, steps=5, hosts=4, returns=1.0, slow_s=0.01)
    for seed in range(600):
        for after in (100, 140, 180):
            faults = ((60, "cut"), (after, "crash"), (1, "fell"))
            simulate(replace(base, seed=seed, faults=faults))


def test_a_coordinator_that_writes_after_it_is_deposed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stubborn(simterms.Seat):
        @property
        def deposed(self) -> bool:
            return False

        @deposed.setter
        def deposed(self, _: bool) -> None: ...

    monkeypatch.setattr(simterms, "Seat", Stubborn)
    with pytest.raises((InvariantError, AssertionError)):
        simulate_all()
