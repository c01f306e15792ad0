"""A world of thousands of ranks: it recovers, and an event costs what it costs in a small one.

Where its nodes may be lost themselves ("fell"), a spare takes over; else ("node") their agents live
and all processes of one die."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from everstep.core import events as ev
from everstep.core.coordinator import Coordinator
from everstep.core.ladder import Policy
from everstep.core.nodes import Layout
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


def on_nodes(schedule: Schedule) -> Schedule:
    """The same on nodes that may be lost, with a spare."""
    nnodes = schedule.world_size // NODE
    return replace(schedule, nnodes=nnodes, spares=1, hosts=nnodes + 1)


def lose_a_node(schedule: Schedule) -> tuple[Outcome, Told]:
    """A node dies in the middle of the last step."""
    fault_at = simulate(schedule).events - 8 * schedule.world_size
    kind = "fell" if schedule.nnodes else "node"
    recorder = Recorder(replace(schedule, faults=((fault_at, kind),)))
    return recorder.run(), recorder.told


def cost_s(layout: Layout, told: Told, *, gathers: bool) -> float:
    """CPU seconds that a coordinator takes for a message; the best of three."""
    costs = []
    for _ in range(3):
        coordinator = Coordinator(layout.world_size, POLICY, layout if gathers else None)
        began_s = time.process_time()
        for event, now_s in told:
            coordinator.handle(event, now_s)
        costs.append((time.process_time() - began_s) / len(told))
    return min(costs)


@pytest.mark.slow
@pytest.mark.parametrize("rung", ["respawn", "replace"])
def test_an_event_costs_no_more_in_a_large_world(rung: str) -> None:
    costs = {}
    for world_size in (64, 2048):
        schedule = Schedule(seed=1, world_size=world_size, steps=2, node_size=NODE)
        if rung == "replace":
            schedule = on_nodes(schedule)
        outcome, told = lose_a_node(schedule)
        assert outcome.end.exit_code == 0, outcome.end.text
        (closed,) = (line for line in outcome.records if line["event"] == "incident_closed")
        assert (closed["rung"], closed["steps_lost"]) == (rung, 0)
        layout = Layout(nproc_per_node=NODE, nnodes=world_size // NODE)
        costs[world_size] = cost_s(layout, told, gathers=rung == "replace")
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
