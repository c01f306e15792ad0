"""Whole jobs in which regroups fail, and nodes find that they do not reach each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from everstep.core import severed
from everstep.core.ladder import Policy
from everstep.core.simschedule import Schedule
from everstep.core.simulate import simulate

JOB = Schedule(seed=0, world_size=6, steps=4, nnodes=3, spares=1, node_size=2, hosts=4, returns=1.0)


def run_all(counts: Counter[str], *, policy: Policy, layouts: int = 3) -> None:
    """A collective breaks, and then another one, at every second boundary of the recovery."""
    for after in range(0, 60, 2):
        for layout in range(layouts):
            schedule = replace(
                JOB,
                seed=after * layouts + layout,
                faults=((150, "peer"), (after, "peer"), (6, "peer")),
                spares=(0, 1, 1)[layout],
                shards=(1, 3, 6)[layout],
                fence=("none", "early", "early")[layout],
            )
            found = simulate(schedule, policy)
            counts["ended well"] += found.end.exit_code == 0
            counts["torn"] += "is torn on" in found.end.text  # by the fault itself
            counts["ended in vain"] += "do not reach each other" in found.end.text
            for record in found.records:
                apart = "do not reach each other" in str(record)
                counts[record["event"]] += apart and record["event"] != "job_ended"


def test_nodes_are_given_up_or_waited_for_and_nothing_is_lost() -> None:
    counts: Counter[str] = Counter()
    run_all(counts, policy=Policy(unlimited=True))
    assert counts["node_lost"] > 5, counts
    assert counts["incident_cause"] > counts["node_lost"], counts
    assert counts["ended well"] + counts["torn"] == 90, counts
    assert counts["torn"] < 5, counts


def test_a_job_that_need_not_wait_ends_and_names_the_pair() -> None:
    counts: Counter[str] = Counter()
    run_all(counts, policy=Policy(unlimited=True, spare_wait_s=0.0), layouts=1)
    assert counts["ended in vain"] > 0, counts


def test_a_node_that_alone_holds_a_shard_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it given up, the job would end."""
    monkeypatch.setattr(severed, "_can_do_without", lambda _job, _lost: True)
    with pytest.raises(AssertionError):
        test_nodes_are_given_up_or_waited_for_and_nothing_is_lost()
