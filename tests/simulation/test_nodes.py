"""Whole jobs on several nodes, which fall, are cut off and come back, under seeded schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from tests.simulation.coverage import Coverage

from everstep.core import coordinator, handover, settle
from everstep.core.goodput import fold
from everstep.core.job import Job
from everstep.core.nodes import Nodes
from everstep.core.simschedule import NODE_FAULTS, Fence, Schedule, draw_schedule
from everstep.core.simulate import InvariantError, Simulation, simulate
from everstep.core.simworker import SimWorker
from everstep.types import Cause

SCHEDULES = 500  # all on nodes, of about 1,250 that are drawn


@cache
def on_nodes() -> tuple[Schedule, ...]:
    """Drawn schedules of jobs with nodes."""
    drawn = (draw_schedule(seed) for seed in range(3 * SCHEDULES))
    return tuple(schedule for schedule in drawn if schedule.nnodes)[:SCHEDULES]


@cache
def coverage() -> Coverage:
    found = Coverage()
    for schedule in on_nodes():
        found.add(simulate(schedule))
    return found


@pytest.mark.slow
def test_the_schedules_reach_what_they_are_for() -> None:
    found = coverage()
    print(found.table())
    wanted = ["replace peer", "replace script", "respawn peer", "node", "node_awaited"]
    wanted += ["node_set_aside", "node_replaced", "lost", "resumed"]
    assert not [what for what in wanted if found.met[what] < 5], found.met
    assert found.met["replace peer"] > 30
    assert found.met["ended well"] > 300


def test_nodes_fail_in_every_phase_and_in_the_takeover() -> None:
    hits = coverage().hits
    by_phase = Counter[tuple[str, str]]()
    for (kind, phase, _), count in hits.items():
        by_phase[kind, phase] += count
    phases = ["setting up", "running", "stopping", "regrouping"]
    wanted = [("fell", p) for p in phases] + [("cut", p) for p in phases]
    wanted += [("spare", p) for p in ["gathering", *phases[:3]]]
    wanted += [("late", p) for p in phases[:2]] + [("stuck", p) for p in phases[1:3]]
    wanted += [("unlink", p) for p in phases]
    assert {kind for kind, _ in wanted} == set(NODE_FAULTS)
    assert not [each for each in wanted if by_phase[each] < 1], by_phase
    assert hits["fell", "stopping", "joiner"] >= 3
    assert hits["cut", "stopping", "joiner"] >= 2


def test_every_event_of_nodes_comes_in_every_phase() -> None:
    found = Counter[tuple[str, str]]()
    for (phase, event, status), count in coverage().events.items():
        found[event, phase] += count
        found[event, status] += count
    phases = ["gathering", "setting up", "running", "stopping", "regrouping"]
    wanted = [(event, p) for event in ("NodeJoined", "NodeLost") for p in phases]
    wanted += [(event, "stale") for event in ("Died", "Committed", "Faulted")]
    assert not [each for each in wanted if found[each] < 1], found


# ---------------------------------------------------------------------- moments, one by one


PAIR = Schedule(seed=3, world_size=4, steps=3, node_size=2, nnodes=2, spares=1, hosts=3)
LAYOUTS: list[tuple[str, Schedule]] = [
    ("ddp", PAIR),
    ("sections", replace(PAIR, steps=2, sections=(0, 1, 2))),
    ("hsdp", replace(PAIR, world_size=6, nnodes=3, shards=2, fence="early", hosts=4)),
    ("late fence", replace(PAIR, updates=2, fence="late")),
]


@pytest.mark.parametrize("schedule", [s for _, s in LAYOUTS], ids=[name for name, _ in LAYOUTS])
@pytest.mark.parametrize("kind", ["fell", "cut"])
def test_a_node_lost_at_every_boundary_of_a_run(kind: str, schedule: Schedule) -> None:
    for after in range(0, simulate(schedule).events, 4):
        outcome = simulate(replace(schedule, faults=((after, kind),)))
        assert outcome.end.exit_code == 0, (after, outcome.end.text)
        fold(outcome.records)


@pytest.mark.parametrize("kind", ["fell", "cut", "kill", "spare", "late", "stuck"])
def test_a_second_fault_at_every_boundary_of_a_takeover(kind: str) -> None:
    """Of three nodes two may go, also the one that takes over."""
    base = Schedule(
        seed=4, world_size=6, steps=4, node_size=2, nnodes=3, spares=2, hosts=5, sections=(0, 0, 1)
    )
    for after in range(0, 120, 4):
        outcome = simulate(replace(base, faults=((100, "fell"), (after, kind))))
        assert outcome.end.exit_code == 0, (after, outcome.end.text)


def test_without_a_spare_a_node_that_comes_back_takes_its_slot() -> None:
    base = replace(PAIR, spares=0, returns=1.0, slow_s=0.01)
    waited = 0
    for after in range(20, simulate(base).events, 5):
        outcome = simulate(replace(base, faults=((after, "fell"),)))
        assert outcome.end.exit_code == 0, outcome.end.text
        waited += any(line["event"] == "node_awaited" for line in outcome.records)
    assert waited > 5


def test_without_a_spare_and_with_nobody_who_comes_back_the_job_ends_for_that() -> None:
    base = replace(PAIR, spares=0)
    ends = Counter[str]()
    for after in range(20, simulate(base).events, 5):
        outcome = simulate(replace(base, faults=((after, "fell"),)))
        ends[outcome.end.text[:24]] += 1
    assert ends["no spare node is left fo"] > 10, ends
    assert set(ends) <= {"no spare node is left fo", ""}, ends


@pytest.mark.parametrize("fence", ["early", "late"])
def test_full_shards_end_with_their_node(fence: Fence) -> None:
    full = replace(PAIR, shards=4, fence=fence)
    ends = Counter[int]()
    for after in range(40, simulate(full).events, 5):
        outcome = simulate(replace(full, faults=((after, "fell"),)))
        ends[outcome.end.exit_code] += 1
        if outcome.end.exit_code:
            assert "is lost" in outcome.end.text
    assert ends[1] > 5


# ---------------------------------------------------------------------- errors that must be found


def simulate_all() -> None:
    for schedule in on_nodes():
        simulate(schedule)


def test_a_slot_that_is_kept_by_the_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nodes, "lose", lambda *_: 1)
    with pytest.raises(InvariantError, match=r"is spawned on node \d, which is lost"):
        simulate_all()


def test_ranks_of_a_lost_node_that_are_awaited_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_the_first(job: Job, ranks: range, cause: Cause) -> None:
        first = job.membership.holder(ranks[0])
        assert first is not None
        job.membership.died(*first.identity)
        job.fail(first, job.step_of(first), cause)

    monkeypatch.setattr(handover, "_fail_all", only_the_first)
    with pytest.raises(AssertionError):
        simulate_all()


def test_a_spare_that_is_not_taken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "fill_slots", lambda _: None)
    with pytest.raises(AssertionError, match="a slot is empty, and a spare is there"):
        simulate_all()


def test_a_job_that_does_not_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_in(job: Job) -> None:
        if job.nodes.any_empty:
            job.end_incident("no spare node is left for it")

    monkeypatch.setattr(settle, "await_node", give_in)
    with pytest.raises(InvariantError, match="no node was waited for"):
        simulate_all()


def test_a_node_that_is_not_given_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "give_up", lambda *_: False)
    with pytest.raises(InvariantError, match="its node could have been given up"):
        simulate_all()


def test_a_capsule_that_is_not_acknowledged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes down with the node, and the peers have made the step."""

    def at_once(_sim: Simulation, _worker: SimWorker, then: Callable[[], None]) -> None:
        then()

    monkeypatch.setattr(Simulation, "when_kept", at_once)
    with pytest.raises(InvariantError, match="has no capsule of"):
        lose_nodes_in_fences()


def lose_nodes_in_fences() -> None:
    for seed in range(40):
        for after in range(60, 160, 5):
            simulate(replace(PAIR, seed=seed, fence="early", faults=((after, "fell"),)))
