"""What an onlooker who sees everything holds a simulated job to: in its journal, and at its end.

Theory of operation. A line of the journal is judged when it is written, against the ones before it.
At the end, a job that ended well has every rank's script through all its results and the state of a
run without a fault; one that ended badly has its reason, and the onlooker agrees with it.

What it doesn't know: how the coordinator decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.core.actions import End
from everstep.core.job import Phase
from everstep.core.simscript import state_after
from everstep.core.simworker import Place

if TYPE_CHECKING:
    from everstep.core.simulate import Simulation

_ROUNDED_S = 1e-6  # coordinators have clocks of their own
_STILL = ("hang", "stall", "lose")
_PHASES = [*(phase.value for phase in Phase), "away"]


def check_record(sim: Simulation, line: dict[str, Any]) -> None:
    """Judge a line of the journal that is about to be written."""
    match line["event"]:
        case "step":
            sim.newest_step += 1
            follows = line["step"] == sim.newest_step
            sim.check(follows, f"step {line['step']} is out of order, lost or done twice")
        case "incident_opened":
            sim.check(not sim.open_incident, "an incident opens inside another")
            sim.open_incident = line["incident"]
        case "incident_closed":
            sim.check(line["steps_lost"] == 0, "a committed step was lost")
            sim.check(line["incident"] == sim.open_incident, "another incident was open")
            replaced = (line["rung"] == "replace") == sim.replaces
            sim.check(replaced, f"rung {line['rung']}, where nodes were lost: {sim.replaces}")
            sim.open_incident, sim.replaces = 0, False
        case "node_lost":
            sim.replaces |= bool(line["ranks"])
        case "coordinator_resumed" if not sim.open_incident:
            sim.replaces = False  # the last one had seen a loss, and died before it did anything
        case "node_awaited":
            sim.awaited_s = line["t"]


def check_end(sim: Simulation, end: End) -> None:
    """Judge the end of a job."""
    if end.exit_code == 0:
        _check_good_end(sim)
        return
    if "went down with its node and its guardian" in end.text:
        return
    if "not known which part" in end.text:
        unknown = [r for r in range(sim.schedule.world_size) if not sim.nodes.keeping.knows(r)]
        sim.check(bool(unknown) and sim.schedule.shards > 1, f"it was known: {end.text}")
        return
    sim.check(end.cause is not None, "no first cause")
    if "allowed" in end.text and not sim.policy.unlimited:
        return
    if "the copies differ" in end.text:
        twice = end.rank is not None and sim.faults.corrupted[end.rank] >= 2
        sim.check(twice, f"rank {end.rank} had no two bad receipts: {end.text}")
        return
    if _ends_by_nodes(sim, end.text):
        return
    if "was not ready within" in end.text:  # by the repeat rule, a rehearsal that never ends
        stuck = sum(sim.faults.hits[kind, phase, "joiner"] for kind in _STILL for phase in _PHASES)
        sim.check(stuck >= 2, f"no two joiners stood still: {end.text}")
        return
    sim.check("lost" in end.text, f"the job ended with: {end.text}")
    sim.check(not _recoverable(sim), f"the state was there: {end.text}")
    sim.check(sim.newest_step > 0, "nothing was to lose")
    named = sim.schedule.shards == 1 or "shard 's" in end.text or "no process" in end.text
    sim.check(named, f"the shard is not named: {end.text}")


def _ends_by_nodes(sim: Simulation, text: str) -> bool:
    """Whether the job ended for want of a node; then there was none."""
    text = text.split("First cause")[0]
    if "not joined within" in text:
        few = len(sim.nodes.usable_nodes) < sim.schedule.nnodes
        sim.check(few, f"there were enough nodes: {text}")
    elif "no spare node is left" in text:
        sim.check(not sim.nodes.spares, f"spares {sim.nodes.spares} were there: {text}")
        until_s = None if sim.awaited_s is None else sim.awaited_s + sim.policy.spare_wait_s
        waited = until_s is not None and sim.now_s >= until_s - _ROUNDED_S
        sim.check(waited, f"no node was waited for: {text}")
    elif "do not reach each other" in text:
        until_s = None if sim.awaited_s is None else sim.awaited_s + sim.policy.spare_wait_s
        waited = sim.policy.spare_wait_s == 0 or (
            until_s is not None and sim.now_s >= until_s - _ROUNDED_S
        )
        sim.check(waited, f"it was not waited until the way opened: {text}")
    elif "could not be ended" in text:
        stuck = any(worker.stuck for worker in sim.workers.values())
        sim.check(stuck and not sim.nodes.spares, f"its node could have been given up: {text}")
    else:
        return False
    return True


def _check_good_end(sim: Simulation) -> None:
    schedule = sim.schedule
    sim.check(not sim.open_incident, f"incident {sim.open_incident} was left open")
    sim.check(sim.newest_step == schedule.steps, f"the journal ends at step {sim.newest_step}")
    sim.check(len(sim.workers) == schedule.world_size, "a rank was never there")
    for worker in sim.workers.values():
        train, last = worker.train, sim.scripts.last(*worker.identity)
        sim.check(train.state == state_after(schedule.steps), f"{worker} ends with a wrong state")
        own = train.own == sim.scripts.own_after(worker.rank, train.position)
        sim.check(own, f"{worker} ends with a wrong state of its own")
        through = last is not None and schedule.after(last) is None
        sim.check(through, f"{worker} missed a result")
        sim.check(worker.place is Place.FINISHED, f"{worker} has not ended")


def _recoverable(sim: Simulation) -> bool:
    """Whether the living hold a whole state of one position; each position is tried."""
    living = [w for w in sim.workers.values() if w.alive and not w.dying and w.in_reach]
    holders = [w for w in living if w.has_state and sim.nodes.usable(w)]
    held = [worker.train.holding for worker in holders]
    shards = {sim.schedule.shard(rank) for rank in range(sim.schedule.world_size)}
    for position in {holding.position for holding in held if holding.committed > 0}:
        reached = {
            holding.shard
            for holding in held
            if not holding.torn
            and (
                holding.position == position or (holding.can_advance and holding.ahead == position)
            )
        }
        if reached == shards:
            return True
    return False
