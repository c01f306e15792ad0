"""Whole jobs under seeded schedules of delays and faults. A failure names its seed:
`python -m tests.simulation.soak --seed N` runs it again, event for event."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.simulation.coverage import Coverage

from everstep.core import settle, simscript
from everstep.core.goodput import fold
from everstep.core.ladder import Policy
from everstep.core.membership import Member, Membership
from everstep.core.restore import Lost, choose, plan
from everstep.core.simschedule import FAULTS, Fence, Schedule, draw_schedule
from everstep.core.simscript import Capsule, first_half, result_of
from everstep.core.simstep import SimTrainer
from everstep.core.simulate import InvariantError, Outcome, Simulation, simulate
from everstep.core.simworker import SimWorker
from everstep.types import Holding, Plan, Position, Rung

BATCHES, BATCH = 20, 100  # 2,000 schedules, in pieces that run side by side


def sums(outcome: Outcome) -> None:
    """The ledger of any simulated journal sums to its wall time, whole or cut."""
    ledger = fold(outcome.records)
    wall_s = outcome.records[-1]["t"] - outcome.records[0]["t"]
    assert ledger.wall_s == pytest.approx(wall_s)
    for entry in ledger.incidents:
        assert entry.total_s == sum(entry.stages.values())
        assert min(entry.stages.values()) >= 0
    assert ledger.incident_s == pytest.approx(sum(e.total_s for e in ledger.incidents))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_schedule_ends_right(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        outcome = simulate(draw_schedule(seed))  # raises where an invariant does not hold
        sums(outcome)


# ---------------------------------------------------------------------- what the schedules meet


@cache
def coverage() -> Coverage:
    found = Coverage()
    for seed in range(1200):
        found.add(simulate(draw_schedule(seed)))
    return found


@pytest.mark.slow
def test_the_schedules_reach_what_they_are_for() -> None:
    """A simulation that never recovers proves nothing: count what the first 1,200 have met."""
    found = coverage()
    print(found.table())
    rungs = ["retry process", "retry peer", "respawn peer", "respawn script"]
    causes = ["signal", "exception", "peer", "receipt", "timeout", "worker", "hang"]
    met_in_steps = ["advance", "section", "torn", "resumed", "undone", "receipt"]
    wanted = [*rungs, *causes, "incident_cause", "lost", *met_in_steps]
    missing = [what for what in wanted if found.met[what] < 3]
    assert not missing, found.met
    assert found.met["ended well"] > 1000


@pytest.mark.parametrize("phase", ["running", "stopping", "regrouping"])
def test_every_fault_comes_in_every_phase(phase: str) -> None:
    """So a second one at any moment of a recovery is among them."""
    by_kind = Counter[str]()
    for (kind, when, _), count in coverage().hits.items():
        by_kind[kind] += count if when == phase else 0
    assert all(by_kind[kind] >= 1 for kind in FAULTS), by_kind


@pytest.mark.parametrize("kind", FAULTS)
def test_joiners_are_hit_too(kind: str) -> None:
    assert coverage().hits[kind, "stopping", "joiner"] >= 2


def test_every_event_comes_in_every_phase_where_it_may() -> None:
    """Also late, twice, and from those that no longer count."""
    found = Counter[tuple[str, str]]()
    for (phase, event, status), count in coverage().events.items():
        found[event, phase] += count
        found[event, status] += count
    late = ["Committed", "Faulted", "Regrouped", "Restored", "Closing", "Finished", "Died"]
    wanted = [(event, "stopping") for event in [*late, "Parked", "Waiting", "Silent", "Inspected"]]
    wanted += [(event, "regrouping") for event in late]
    wanted += [("Died", "setting up"), ("Died", "running"), ("Tick", "regrouping")]
    wanted += [(event, "stale") for event in ("Died", "Committed")]
    wanted += [(event, "doomed") for event in ("Died", "Committed", "Parked", "Protected")]
    missing = [each for each in wanted if found[each] < 2]
    assert not missing, found


# ---------------------------------------------------------------------- moments, one by one


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(draw_schedule(7)) == simulate(draw_schedule(7))


def test_budgets_end_a_storm() -> None:
    storm = Schedule(seed=2, world_size=3, steps=400, faults=((150, "kill"),) * 200)
    policy = Policy(max_incidents=10, max_failures_without_progress=100, max_per_cause=100)
    outcome = simulate(storm, policy)
    assert outcome.end.exit_code == 137
    assert fold(outcome.records).by_rung()[Rung.RESPAWN] >= 8


LAYOUTS: list[tuple[str, Schedule]] = [
    ("ddp", Schedule(seed=3, world_size=3, steps=3)),
    ("two updates", Schedule(seed=3, world_size=3, steps=3, updates=2, undoes=True)),
    ("late", Schedule(seed=3, world_size=3, steps=3, updates=2, fence="late")),
    ("hsdp", Schedule(seed=3, world_size=4, steps=3, shards=2, fence="early")),
    ("sections", Schedule(seed=3, world_size=3, steps=2, sections=(0, 2, 1))),
    ("fenced sections", Schedule(seed=3, world_size=3, steps=2, fence="early", sections=(1, 1, 2))),
]


@pytest.mark.parametrize("schedule", [s for _, s in LAYOUTS], ids=[name for name, _ in LAYOUTS])
@pytest.mark.parametrize("kind", ["kill", "lose", "twice"])
def test_a_fault_at_every_boundary_of_a_run(kind: str, schedule: Schedule) -> None:
    """A death at every one, a lost or doubled message at every third."""
    for after in range(0, simulate(schedule).events, 1 if kind == "kill" else 3):
        outcome = simulate(replace(schedule, faults=((after, kind),)))
        assert outcome.end.exit_code == 0
        sums(outcome)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_second_fault_at_every_boundary_of_a_recovery(kind: str) -> None:
    base = Schedule(seed=4, world_size=4, steps=4, sections=(0, 0, 1))
    for after in range(80):
        outcome = simulate(replace(base, faults=((60, "kill"), (after, kind))))
        assert outcome.end.exit_code == 0
        sums(outcome)


# ---------------------------------------------------------------------- shards


@pytest.mark.parametrize("fence", ["early", "late"])
def test_a_death_without_a_replica_ends_the_job_and_names_the_shard(fence: Fence) -> None:
    full = Schedule(seed=6, world_size=3, steps=4, shards=3, fence=fence)
    ends = Counter[int]()
    for after in range(20, simulate(full).events, 3):
        outcome = simulate(replace(full, faults=((after, "kill"),)))
        ends[outcome.end.exit_code] += 1
        if outcome.end.exit_code == 0:
            continue  # before the first step, or after the last, nothing was to lose
        text = outcome.end.text
        rank = outcome.end.rank
        assert f"shard 's{rank}' was held only by processes that are gone (rank {rank})" in text
        assert "One more replica of every shard" in text
    assert ends[137] > 5


def test_a_failure_without_a_death_keeps_every_shard() -> None:
    full = Schedule(seed=6, world_size=3, steps=4, shards=3, fence="late", updates=2)
    for kind in ("raise", "peer"):
        for after in range(20, 150, 3):
            outcome = simulate(replace(full, faults=((after, kind),)))
            assert outcome.end.exit_code == 0, outcome.end.text


def test_one_replica_of_each_shard_is_enough() -> None:
    """Of two replicas a whole one may go; the other serves."""
    hybrid = Schedule(seed=8, world_size=6, steps=4, shards=3, fence="early", node_size=3)
    for after in range(30, 200, 7):
        outcome = simulate(replace(hybrid, faults=((after, "node"),)))
        assert outcome.end.exit_code == 0, outcome.end.text


def test_a_rank_whose_step_no_shard_can_reach_any_more_begins_again() -> None:
    """It has seen a result that is not to be had again: its script can't be led back."""
    outcomes = raises_in_updates()
    assert all(outcome.end.exit_code in (0, 1) for outcome in outcomes)
    assert [outcome.end.exit_code for outcome in outcomes if outcome.ahead].count(0) >= 1


def raises_in_updates() -> list[Outcome]:
    """Schedules in which the only rank of a shard may lose its gradients in the middle of an
    update, when a peer has made the step."""
    base = Schedule(seed=0, world_size=3, steps=3, shards=2, fence="early", updates=2)
    return [
        simulate(replace(base, seed=seed, faults=((after, "raise"),)))
        for seed in range(10)
        for after in range(60, 94, 2)
    ]


# ---------------------------------------------------------------------- errors that must be found


def simulate_many(policy: Policy | None = None) -> None:
    for seed in range(600):
        simulate(draw_schedule(seed), policy)


def believe_everybody(held: Collection[Holding]) -> list[Holding]:
    return [replace(holding, torn=False) for holding in held]


def ask_one_too_many(held: Collection[Holding]) -> list[Holding]:
    return [replace(holding, can_advance=True) for holding in held]


def take_the_oldest(held: Collection[Holding]) -> list[Holding]:
    whole = [h.committed for h in held if not h.torn and h.committed]
    oldest = min(whole, default=0)
    return [replace(h, torn=h.torn or h.committed > oldest) for h in held]


def forget_sections(held: Collection[Holding]) -> list[Holding]:
    return [replace(holding, sections=0) for holding in held]


@pytest.mark.parametrize(
    "distort", [believe_everybody, ask_one_too_many, take_the_oldest, forget_sections]
)
def test_a_wrong_planner_is_found(
    distort: Callable[[Collection[Holding]], list[Holding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong_choice(held: Collection[Holding], *more: Any) -> Position | None:
        return choose(distort(held), *more)

    def wrong_plan(holdings: Sequence[Holding], *more: Any) -> Plan | Lost:
        return plan(distort(holdings), *more)

    monkeypatch.setattr(settle, "choose", wrong_choice)
    monkeypatch.setattr(settle, "plan", wrong_plan)
    with pytest.raises(AssertionError):
        simulate_many()


def test_a_rank_that_is_led_back_behind_its_script_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settle, "_replace_ahead", lambda *_: None)
    with pytest.raises(InvariantError, match=r"and go on from|sees .* after"):
        raises_in_updates()


def test_a_capsule_that_goes_out_too_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must be with the agent before the last contribution, not after the commit."""
    commit, keep = SimTrainer.commit, Simulation.keep_capsule

    def late(train: SimTrainer) -> None:
        commit(train)
        worker, step = train._worker, train.position[0]
        results = tuple(
            result_of(worker.rank, (step, done)) for done in range(train.position[1] + 1)
        )
        keep(worker.sim, worker, Capsule(position=train.position, results=results, own=train.own))

    monkeypatch.setattr(Simulation, "keep_capsule", lambda *_: None)
    monkeypatch.setattr(SimTrainer, "commit", late)
    with pytest.raises(InvariantError, match="has no capsule of"):
        simulate_many()


def test_an_agent_that_keeps_two_capsules_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may be two steps ahead of the only one that survives."""
    monkeypatch.setattr(simscript, "_KEPT", 2)
    with pytest.raises(InvariantError, match=r"has no capsule of"):
        simulate_survivors()


def simulate_survivors() -> None:
    """One of four ranks survives, often one that is behind."""
    base = Schedule(seed=0, world_size=4, steps=5, node_size=3)
    for seed in range(30):
        for after in range(60, 150, 5):
            simulate(replace(base, seed=seed, faults=((after, "node"),)))


@pytest.mark.parametrize("what", ["own", "undo"])
def test_an_attempt_that_is_not_put_back_is_found(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back = SimTrainer.put_back

    def forget(train: SimTrainer) -> None:
        own, half = train.own, train._half
        put_back(train)
        if what == "own":
            train.own = own
        elif half and not train.torn:
            train.state = first_half(train.state, train.position[0] + 1)

    monkeypatch.setattr(SimTrainer, "put_back", forget)
    found = "lost its own" if what == "own" else "sources differ|holds another state"
    with pytest.raises(InvariantError, match=found):
        simulate_many()


def test_a_result_that_a_script_is_given_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = SimWorker.go_on

    def again(worker: SimWorker) -> None:
        position = worker.train.position
        if position > (0, 0):
            worker.sim.scripts.sees(*worker.identity, position, result_of(worker.rank, position))
        go_on(worker)

    monkeypatch.setattr(SimWorker, "go_on", again)
    with pytest.raises(InvariantError, match=r"sees (\(\d+, \d+\)) after \1"):
        simulate_many()


def test_two_bad_receipts_of_one_rank_end_the_job() -> None:
    bad = Schedule(
        seed=5, world_size=2, steps=4, faults=((40, "receipt"), (0, "receipt"), (0, "kill"))
    )
    outcome = simulate(bad)
    assert outcome.end.exit_code == 1
    assert "It is the second time at this step, so the copies differ" in outcome.end.text


def test_a_coordinator_that_obeys_the_dead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def obey(table: Membership, rank: int, incarnation: int) -> Member | None:
        return table.holder(rank)

    monkeypatch.setattr(Membership, "current", obey)
    with pytest.raises(AssertionError):
        simulate_many()


def test_a_coordinator_that_waits_without_deadlines_is_found() -> None:
    forever = Policy(unlimited=True, park_timeout_s=math.inf, join_timeout_s=math.inf)
    with pytest.raises(InvariantError, match="a deadline passes for ever"):
        simulate_many(forever)
