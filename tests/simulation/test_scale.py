"""A world of thousands of ranks: it recovers, and an event costs what it costs in a small one."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from everstep.core import events as ev
from everstep.core.coordinator import Coordinator
from everstep.core.ladder import Policy
from everstep.core.simschedule import Schedule
from everstep.core.simulate import Outcome, Simulation, simulate

NODE = 8
POLICY = Policy(unlimited=True)
Told = list[tuple[ev.Event, float]]


class Recorder(Simulation):
    """Keeps what the coordinator is told, and when."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule, POLICY)
        self.told: Told = []

    def _tell(self, event: ev.Event) -> None:
        self.told.append((event, self.now_s))
        super()._tell(event)


def lose_a_node(schedule: Schedule) -> tuple[Outcome, Told]:
    """A node dies in the middle of the last step."""
    fault_at = simulate(schedule).events - 8 * schedule.world_size
    recorder = Recorder(replace(schedule, faults=((fault_at, "node"),)))
    return recorder.run(), recorder.told


def cost_s(world_size: int, told: Told) -> float:
    """CPU seconds that a coordinator takes for a message; the best of three."""
    costs = []
    for _ in range(3):
        coordinator = Coordinator(world_size, POLICY)
        began_s = time.process_time()
        for event, now_s in told:
            coordinator.handle(event, now_s)
        costs.append((time.process_time() - began_s) / len(told))
    return min(costs)


@pytest.mark.slow
def test_an_event_costs_no_more_in_a_large_world() -> None:
    costs = {}
    for world_size in (64, 2048):
        schedule = Schedule(seed=1, world_size=world_size, steps=2, node_size=NODE)
        outcome, told = lose_a_node(schedule)
        assert outcome.end.exit_code == 0, outcome.end.text
        (closed,) = (line for line in outcome.records if line["event"] == "incident_closed")
        assert (closed["rung"], closed["steps_lost"]) == ("respawn", 0)
        costs[world_size] = cost_s(world_size, told)
    # To look at each of 2,048 ranks for every message would cost more than ten times as much.
    assert costs[2048] < 5 * costs[64], costs


@pytest.mark.slow
def test_shards_and_sections_in_a_large_world() -> None:
    schedule = Schedule(
        seed=2,
        world_size=512,
        steps=2,
        shards=64,
        fence="late",
        sections=(0, 1),
        node_size=NODE,
    )
    outcome, _ = lose_a_node(schedule)
    assert outcome.end.exit_code == 0, outcome.end.text
    full = replace(schedule, world_size=256, shards=256)
    outcome, _ = lose_a_node(full)
    assert outcome.end.exit_code == 137
    assert "was held only by processes that are gone" in outcome.end.text
    assert "and 5 more" in outcome.end.text  # of the eight shards that went with the node
