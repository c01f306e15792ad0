"""A job's status: folded from its journal, shown, and written as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from tests.unit.journals import begin, cause, opened, record, steps

from everstep.core.overview import NodeNow, Overview, RankNow, SlotMissing
from everstep.observe.journal import JournalWriter
from everstep.observe.retrace import NoRunError, is_written, status_of, status_of_run
from everstep.observe.screen import Screen
from everstep.observe.status import as_json, show
from everstep.wire.clients import AgentNow, Status


def shown(status: Status) -> str:
    out = io.StringIO()
    show(status, Screen(out))
    return out.getvalue()


def spawned(rank: int, t: float = 0.2, incarnation: int = 1, node: int = 0) -> dict[str, object]:
    named = {"rank": rank, "incarnation": incarnation, "generation": 0, "joiner": False}
    return record(t, "spawned", **named, node=node)


def test_a_run_that_goes_on() -> None:
    ranks = [spawned(rank) for rank in range(4)]
    status = status_of([*begin()[:2], *ranks, begin()[2], *steps(1, 6, 1.0)])
    assert (status.run_id, status.script, status.exit_code) == ("one", "train.py", None)
    assert status.overview.phase == "running"
    assert status.overview.step == 6
    assert status.steps_per_s == pytest.approx(2.0)
    assert {rank.state for rank in status.overview.ranks} == {"running"}
    text = shown(status)
    assert "everstep run one: running, step 6, 2.0 steps/s" in text
    assert "0-3    1            running  step 6" in text
    assert "incidents  none" in text
    assert "nodes" not in text


def test_an_open_incident_and_a_replacement() -> None:
    ranks = [spawned(rank) for rank in range(4)]
    begun = [*begin()[:2], *ranks, begin()[2], *steps(1, 4, 1.0)]
    status = status_of([*begun, opened(3.2), spawned(1, 3.3, incarnation=2)])
    assert status.overview.phase == "stopping"
    assert status.overview.incident is not None
    assert status.overview.incident.rank == 1
    assert [(r.incarnation, r.state) for r in status.overview.ranks][:2] == [
        (1, "running"),
        (2, "starting"),
    ]
    assert "1, one open: rank 1 was killed by SIGKILL in step 5" in shown(status)


@pytest.mark.parametrize("by", ["node_awaited", "copy_awaited"])
def test_nodes_of_a_journal(by: str) -> None:
    joined = [
        record(0.2, "node_joined", node=node, host=f"h{node}", domain="") for node in range(3)
    ]
    gathered = record(0.3, "gathered", nodes=[0, 2], spares=1)
    lost = record(4.0, "node_lost", node=2, host="h2", slot=1, ranks=[2, 3], text="gone")
    begun = [*begin()[:2], *joined, gathered, *[spawned(rank) for rank in range(4)], begin()[2]]
    before = status_of([*begun, *steps(1, 2, 1.0)])
    assert [(n.node, n.slot) for n in before.overview.nodes] == [(0, 0), (1, None), (2, 1)]
    after = status_of([*begun, *steps(1, 2, 1.0), opened(4.0, rank=2), lost])
    assert [n.node for n in after.overview.nodes] == [0, 1]
    assert [(m.slot, m.ranks) for m in after.overview.missing] == [(1, "ranks 2, 3")]
    assert "slot 1 (ranks 2, 3), which node 2 (host h2) had" in shown(after)
    awaited = record(4.05, by, incident=1, ranks=[2, 3], wait_s=300.0)
    waiting = status_of([*begun, *steps(1, 2, 1.0), opened(4.0, rank=2), lost, awaited])
    assert waiting.overview.phase == "waiting for a node"
    replaced = record(4.1, "node_replaced", slot=1, lost=2, node=1, host="h1", reason="")
    again = status_of([*begun, *steps(1, 2, 1.0), opened(4.0, rank=2), lost, awaited, replaced])
    assert (again.overview.phase, again.overview.missing) == ("regrouping", ())
    assert [(n.node, n.slot) for n in again.overview.nodes] == [(0, 0), (1, 1)]


def test_a_coordinator_that_comes_back() -> None:
    joined = [record(0.2, "node_joined", node=node, host="h", domain="") for node in range(2)]
    gathered = record(0.3, "gathered", nodes=[0, 1], spares=0)
    listening = {"host": "h", "port": 1}
    here = {"boot_id": "b", "wall_time": 1.0}
    records = [
        begin()[0],
        record(0.05, "coordinator_started", term=0, step=0, **here),
        begin()[1],
        record(0.15, "listening", **listening),
        *joined,
        gathered,
        *[spawned(rank) for rank in range(4)],
        begin()[2],
        *steps(1, 2, 1.0),
        record(5.0, "coordinator_started", term=1, step=2, **here),
        record(5.1, "listening", **listening),
        record(5.2, "coordinator_resumed", term=1, undisturbed=True, text="back"),
        *steps(3, 4, 5.5),
    ]
    phases = [status_of(records[: number + 1]).overview.phase for number in range(len(records))]
    assert phases[3:7] == ["gathering", "gathering", "gathering", "setting up"]
    assert phases[11:] == [*["running"] * 3, "reconvening", "reconvening", *["running"] * 3]
    assert status_of(records).term == 1


def test_one_that_has_ended() -> None:
    ranks = [spawned(rank) for rank in range(4)]
    end = record(9.0, "job_ended", exit_code=3, text="rank 1 was killed", cause=cause())
    status = status_of([*begin()[:2], *ranks, begin()[2], *steps(1, 4, 1.0), end])
    assert (status.exit_code, status.overview.phase) == (3, "ended")
    assert status.steps_per_s is None
    assert status.overview.ranks == ()
    text = shown(status)
    assert "everstep run one: ended with exit code 3 after 4 steps" in text
    assert "end        rank 1 was killed" in text


@pytest.mark.parametrize("cut", range(9))
def test_a_journal_may_end_anywhere(cut: int) -> None:
    records = [*begin()[:2], spawned(0), begin()[2], *steps(1, 2, 1.0), opened(3.0), spawned(1)]
    assert shown(status_of(records[:cut])).startswith("everstep run ")


def test_a_coordinators_answer_with_all_that_can_be_missing() -> None:
    ranks = [
        RankNow(rank=rank, incarnation=1, state="running", node=0, step=7, sections=0)
        for rank in range(1000)
    ]
    ranks[3] = RankNow(rank=3, incarnation=0, state="vacant", node=None, step=7, sections=2)
    status = Status(
        run_id="r",
        script="train.py --lr 1",
        term=2,
        wall_s=3723.0,
        steps_per_s=None,
        goodput=0.5,
        incidents=1,
        overview=Overview(
            phase="stopping",
            generation=5,
            step=7,
            world_size=1000,
            nodes=(NodeNow(node=0, host="a", domain="rack=1", slot=0),),
            missing=(SlotMissing(slot=1, ranks="rank 3", lost="node 1 (host b)"),),
            wait_s=12.0,
            ranks=tuple(ranks),
            incident=None,
        ),
        agents=(
            AgentNow(node=0, name="a-1", host="a", address="10.0.0.1", pid=1, joined=True),
            AgentNow(node=2, name="c-1", host="c", address="10.0.0.3", pid=3, joined=False),
        ),
    )
    text = shown(status)
    assert "stopping, step 7, goodput 50.0 %" in text
    assert "1000 ranks, generation 5, 0 spares, coordinator of term 2, for 1:02:03" in text
    assert "0     a (rack=1)  10.0.0.1  0     working" in text
    assert "2     c           10.0.0.3  -     starting" in text
    assert "a node is waited for, another 12 s" in text
    assert "0-2, 4-999  1            running  step 7" in text
    assert "3           -            vacant   step 7, 2 sections" in text
    fields = json.loads(as_json(status))
    assert "\n" not in as_json(status)
    assert fields["overview"]["missing"][0]["slot"] == 1
    assert len(fields["overview"]["ranks"]) == 1000
    assert fields["steps_per_s"] is None


def test_a_run_is_found_and_seen_to_be_written(tmp_path: Path) -> None:
    with pytest.raises(NoRunError, match="no such journal"):
        status_of_run(tmp_path)
    path = tmp_path / "journal.jsonl"
    writer = JournalWriter(path, run_id="r", wall_time=1.0)
    assert is_written(tmp_path)
    assert is_written(path)
    writer.close()
    assert not is_written(tmp_path)
    assert status_of_run(tmp_path).run_id == status_of_run(path).run_id == "r"
