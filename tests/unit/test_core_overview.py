"""What the core says of a job, in each of its phases."""

from __future__ import annotations

from tests.unit.core_driver import Driver, killed

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.nodes import Layout
from everstep.core.overview import AWAITING, VACANT, Overview
from everstep.types import Cause, CauseKind

LOST = Cause(kind=CauseKind.NODE, text="its connection closed", signature="node lost")


def look(driver: Driver) -> Overview:
    return driver.coordinator.overview(driver.now_s)


def join(driver: Driver, *numbers: int) -> None:
    for number in numbers:
        host, per_node = f"h{number}", driver.world_size
        driver.tell(ev.NodeJoined(node=number, host=host, domain=f"rack={number}", ranks=per_node))


def gathering(**policy: float) -> Driver:
    driver = Driver(4, Layout(nproc_per_node=2, nnodes=2, spares=1), **policy)
    driver.tell(ev.JobStarted())
    return driver


def test_a_job_on_one_node_from_its_start_to_its_end() -> None:
    driver = Driver(2)
    assert (look(driver).phase, look(driver).step) == ("new", 0)
    driver.set_up()
    driver.commit(0, 1)
    seen = look(driver)
    assert (seen.phase, seen.generation, seen.step) == ("running", 0, 0)
    assert [(r.rank, r.incarnation, r.state, r.step) for r in seen.ranks] == [
        (0, 1, "running", 1),
        (1, 1, "running", 0),
    ]
    assert (seen.missing, seen.wait_s, seen.incident) == ((), None, None)
    driver.commit(1, 1)
    assert look(driver).step == 1
    driver.tell(ev.StopAsked(signal=2))
    assert look(driver).phase == "ended"


def test_an_open_incident_is_named_and_its_ranks_show_what_they_do() -> None:
    driver = Driver(3)
    driver.set_up()
    for rank in driver.ranks:
        driver.commit(rank, 1)
    driver.die(1)
    seen = look(driver)
    assert seen.phase == "stopping"
    assert seen.incident is not None
    assert (seen.incident.incident, seen.incident.rank, seen.incident.step) == (1, 1, 2)
    assert seen.incident.cause == killed()
    assert [r.state for r in seen.ranks] == ["stopping", "starting", "stopping"]
    assert seen.ranks[1].incarnation == 2


def test_who_gathers_waits_for_nodes_and_says_how_long() -> None:
    driver = gathering(join_nodes_timeout_s=60.0)
    join(driver, 0)
    driver.wait(20.0)
    seen = look(driver)
    assert (seen.phase, seen.wait_s) == ("gathering", 40.0)
    assert [(n.node, n.host, n.slot) for n in seen.nodes] == [(0, "h0", None)]
    assert [(m.slot, m.ranks, m.lost) for m in seen.missing] == [
        (0, "ranks 0, 1", ""),
        (1, "ranks 2, 3", ""),
    ]
    assert {r.state for r in seen.ranks} == {VACANT}


def test_nodes_have_their_slots_and_a_lost_one_without_a_spare_is_missing() -> None:
    driver = gathering(spare_wait_s=30.0)
    join(driver, 0, 1)
    driver.set_up()
    for rank in driver.ranks:
        driver.commit(rank, 1)
    assert [(n.node, n.slot, n.domain) for n in look(driver).nodes] == [
        (0, 0, "rack=0"),
        (1, 1, "rack=1"),
    ]
    driver.tell(ev.NodeLost(node=1, cause=LOST))
    driver.park(0, 1)
    driver.park(1, 1)
    for asked in driver.got(do.Reclaim):
        driver.tell(ev.Reclaimed(node=0, turn=asked.turn))
    driver.now_s += 10.0
    seen = look(driver)
    assert [n.node for n in seen.nodes] == [0]
    assert [(m.slot, m.lost) for m in seen.missing] == [(1, "node 1 (host h1)")]
    assert (seen.phase, seen.wait_s) == (AWAITING, 20.0)
    assert [(r.node, r.state) for r in seen.ranks] == [
        (0, "parked"),
        (0, "parked"),
        (None, VACANT),
        (None, VACANT),
    ]
    join(driver, 7)
    assert (look(driver).phase, look(driver).missing) == ("stopping", ())
    assert [(n.node, n.slot) for n in look(driver).nodes] == [(0, 0), (7, 1)]


def test_a_picture_stays_as_it_was() -> None:
    driver = Driver(2)
    driver.set_up()
    before = look(driver)
    driver.commit(0, 1)
    driver.commit(1, 1)
    assert (before.step, look(driver).step) == (0, 1)
