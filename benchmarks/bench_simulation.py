"""The core at scale: one node of a large world dies in mid-step, and everybody recovers, with every
message of every rank simulated. In the first layouts its agent lives and starts its ranks again; in
the last the node itself is lost, and a spare takes over.

Each world is run twice. First whole: the coordinator, and a simulated worker for each rank, with
its collectives, transfers and delays in virtual time. Then what the coordinator was told is told to
a fresh one, which alone is timed: what a coordinator's process would spend. Both are CPU seconds of
one thread. An event is anything that happens; a message is what the coordinator is told.

    python benchmarks/bench_simulation.py [--worlds 1024 4096 16384]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.figures import save, table

from everstep.core import events as ev
from everstep.core.coordinator import Coordinator
from everstep.core.ladder import Policy
from everstep.core.simschedule import Schedule
from everstep.core.simulate import Simulation, simulate

BAR_S = 30.0  # for the whole incident at the largest world, simulation and all
NODE = 8
LAYOUTS = {
    "DDP": Schedule(seed=1, world_size=NODE, steps=2, node_size=NODE),
    "HSDP, 64 shards": Schedule(
        seed=1, world_size=NODE, steps=2, node_size=NODE, shards=64, fence="early"
    ),
    "HSDP, 64 shards, a spare": Schedule(
        seed=1,
        world_size=NODE,
        steps=2,
        node_size=NODE,
        shards=64,
        fence="early",
        nnodes=1,
        spares=1,
    ),
}
_POLICY = Policy(unlimited=True)


class Recorder(Simulation):
    """Keeps what the coordinator is told, and when."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule, _POLICY)
        self.told: list[tuple[ev.Event, float]] = []

    def _tell(self, event: ev.Event) -> None:
        self.told.append((event, self.now_s))
        super()._tell(event)


def measure(world_size: int, layout: Schedule) -> dict[str, Any]:
    """One world: a node dies in the middle of the last step."""
    clean = replace(layout, world_size=world_size)
    if layout.nnodes:
        clean = replace(clean, nnodes=world_size // NODE, hosts=world_size // NODE + 1)
    fault, rung = ("fell", "replace") if layout.nnodes else ("node", "respawn")
    clean_events = simulate(clean).events
    # The end of the job (closing, finishing) is some 5 events a rank, a step some 6.
    fault_at = clean_events - 8 * world_size
    began_s = time.process_time()
    recorder = Recorder(replace(clean, faults=((fault_at, fault),)))
    outcome = recorder.run()
    whole_s = time.process_time() - began_s
    assert outcome.end.exit_code == 0, outcome.end.text
    closed = [line for line in outcome.records if line["event"] == "incident_closed"]
    assert [line["rung"] for line in closed] == [rung], closed
    opened_s = next(line["t"] for line in outcome.records if line["event"] == "incident_opened")
    incident = [t for _, t in recorder.told if opened_s <= t <= closed[0]["t"]]
    coordinator = Coordinator(world_size, _POLICY, recorder.nodes.layout)
    began_s = time.process_time()
    for event, now_s in recorder.told:
        coordinator.handle(event, now_s)
    core_s = time.process_time() - began_s
    return {
        "ranks": world_size,
        "events": outcome.events,
        "messages": len(recorder.told),
        "messages_of_incident": len(incident),
        "whole_s": whole_s,
        "events_per_s": outcome.events / whole_s,
        "core_s": core_s,
        "core_us_a_message": 1e6 * core_s / len(recorder.told),
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", type=int, nargs="+", default=[1024, 4096, 16384])
    worlds = parser.parse_args().worlds
    figures: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        found = figures[name] = [measure(world, layout) for world in worlds]
        print(f"\n{name}: a node of {NODE} ranks dies in step {layout.steps}")
        columns = list(found[0])
        print(
            table(
                columns,
                [
                    [
                        f"{each[column]:,.0f}" if each[column] >= 1000 else each[column]
                        for column in columns
                    ]
                    for each in found
                ],
            )
        )
    largest = max(rows[-1]["whole_s"] for rows in figures.values())
    verdict = "met" if largest < BAR_S else "MISSED"
    print(f"\nbar: the largest world in under {BAR_S:g} s of CPU: {verdict} ({largest:.1f} s)")
    print(f"kept in {save('simulation', {'bar_s': BAR_S, 'layouts': figures})}")


if __name__ == "__main__":
    main()
