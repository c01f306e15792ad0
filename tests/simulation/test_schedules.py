"""Whole jobs under seeded schedules of delays and faults. A failure names its seed:
`simulate(draw_schedule(seed))` runs it again, event for event."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from everstep.core import settle, simscript
from everstep.core.goodput import fold
from everstep.core.ladder import Policy
from everstep.core.membership import Member, Membership
from everstep.core.restore import Lost, plan
from everstep.core.simscript import Capsule, first_half, result_of
from everstep.core.simulate import (
    InvariantError,
    Outcome,
    Schedule,
    Simulation,
    draw_schedule,
    simulate,
)
from everstep.core.simworker import SimWorker
from everstep.types import Holding, Plan, Rung

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


def test_the_schedules_reach_what_they_are_for() -> None:
    """A simulation that never recovers proves nothing: count what the first 600 have met."""
    met: Counter[str] = Counter()
    for seed in range(600):
        outcome = simulate(draw_schedule(seed))
        for line in outcome.records:
            met[line["event"]] += 1
            if line["event"] == "incident_closed":
                met[f"{line['rung']} {line['state_from']}"] += 1
            if line["event"] in ("incident_opened", "incident_cause"):
                met[line["cause"]["kind"]] += 1
            if line["event"] == "planned" and "gradients" in line["reason"]:
                met["advance"] += 1
            if line["event"] == "parked" and line["torn"] and not line["joiner"]:
                met["torn"] += 1
        met["lost"] += "lost" in outcome.end.text
        met["resumed"] += outcome.resumed
        met["undone"] += outcome.undone
        met["ended well"] += outcome.end.exit_code == 0
    rungs = ["retry process", "retry peer", "respawn peer", "respawn script"]
    causes = ["signal", "exception", "peer", "receipt", "timeout", "worker"]
    met_in_steps = ["advance", "torn", "resumed", "undone", "receipt"]
    wanted = [*rungs, *causes, "incident_cause", "lost", *met_in_steps]
    missing = [what for what in wanted if met[what] < 3]
    assert not missing, met
    assert met["ended well"] > 550


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(draw_schedule(7)) == simulate(draw_schedule(7))


def test_budgets_end_a_storm() -> None:
    storm = Schedule(seed=2, world_size=3, steps=400, faults=((150, "kill"),) * 200)
    outcome = simulate(storm, Policy(max_incidents=10, max_failures_without_progress=100))
    assert outcome.end.exit_code == 137
    assert fold(outcome.records).by_rung()[Rung.RESPAWN] >= 8


@pytest.mark.parametrize("after", range(120))
@pytest.mark.parametrize("updates", [1, 2])
def test_a_death_at_every_boundary_of_a_run(after: int, updates: int) -> None:
    clean = Schedule(seed=3, world_size=3, steps=3, updates=updates, undoes=True)
    outcome = simulate(replace(clean, faults=((after, "kill"),)))
    assert outcome.end.exit_code == 0
    sums(outcome)


@pytest.mark.parametrize("after", range(60))
@pytest.mark.parametrize("kind", ["kill", "raise", "peer", "receipt", "hang"])
def test_a_second_fault_at_every_boundary_of_a_recovery(after: int, kind: str) -> None:
    twice = Schedule(seed=4, world_size=4, steps=4, faults=((50, "kill"), (after, kind)))
    outcome = simulate(twice)
    assert outcome.end.exit_code == 0
    sums(outcome)


def simulate_many(policy: Policy | None = None) -> None:
    for seed in range(400):
        simulate(draw_schedule(seed), policy)


def believe_everybody(holdings: Sequence[Holding], seen: int = 0) -> Plan | Lost:
    return plan([replace(holding, torn=False) for holding in holdings])


def ask_one_too_many(holdings: Sequence[Holding], seen: int = 0) -> Plan | Lost:
    return plan([replace(holding, can_advance=True) for holding in holdings])


def take_the_oldest(holdings: Sequence[Holding], seen: int = 0) -> Plan | Lost:
    oldest = min(holding.committed for holding in holdings if not holding.torn)
    return plan([replace(h, torn=h.torn or h.committed > oldest) for h in holdings])


@pytest.mark.parametrize("planner", [believe_everybody, ask_one_too_many, take_the_oldest])
def test_a_wrong_planner_is_found(
    planner: Callable[[Sequence[Holding]], Plan | Lost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settle, "plan", planner)
    with pytest.raises(AssertionError):
        simulate_many()


def test_a_capsule_that_goes_out_too_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must be with the agent before the last contribution, not after the commit."""
    update = SimWorker._update

    def late(worker: SimWorker, step: int) -> None:
        capsule = Capsule(step=step, result=result_of(worker.rank, step), own=worker.own)
        keep(worker.sim, worker, capsule)
        update(worker, step)

    keep = Simulation.keep_capsule
    monkeypatch.setattr(Simulation, "keep_capsule", lambda *_: None)
    monkeypatch.setattr(SimWorker, "_update", late)
    with pytest.raises(InvariantError, match="has no capsule of step"):
        simulate_many()


def test_an_agent_that_keeps_two_capsules_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may be two steps ahead of the only one that survives."""
    monkeypatch.setattr(simscript, "_KEPT", 2)
    with pytest.raises(InvariantError, match=r"has no capsule of step 3"):
        simulate(draw_schedule(1830))


@pytest.mark.parametrize("what", ["own", "undo"])
def test_an_attempt_that_is_not_put_back_is_found(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back = SimWorker._put_back

    def forget(worker: SimWorker) -> None:
        own, half = worker.own, worker._half
        put_back(worker)
        if what == "own":
            worker.own = own
        elif half and not worker.torn:
            worker.state = first_half(worker.state, worker.committed + 1)

    monkeypatch.setattr(SimWorker, "_put_back", forget)
    with pytest.raises(InvariantError, match="lost its own" if what == "own" else "sources differ"):
        simulate_many()


def test_a_step_whose_result_a_script_is_given_twice_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = SimWorker._go_on

    def again(worker: SimWorker) -> None:
        worker.sim.sees(worker, worker.committed, result_of(worker.rank, worker.committed))
        go_on(worker)

    monkeypatch.setattr(SimWorker, "_go_on", again)
    with pytest.raises(InvariantError, match=r"sees step (\d+) after step \1"):
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
