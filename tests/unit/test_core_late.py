"""Messages that come late, twice, or not at all; and positions that are sections."""

from __future__ import annotations

from typing import Any

from tests.unit.core_driver import Driver, broken, raised

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.commits import Commits
from everstep.types import Decision, Holding


def recovering(**policy: Any) -> Driver:
    """Rank 1 has died in step 5; ranks 0 and 2 have parked."""
    d = Driver(3, **policy).running(4)
    d.die(1)
    for rank in (0, 2):
        d.park(rank, 4)
    return d


# ---------------------------------------------------------------------- twice


def test_a_failure_that_is_told_twice_is_one() -> None:
    d = Driver(3).running(4)
    d.fault(1, 5, raised())
    d.fault(1, 5, broken())
    d.fault(1, 5, raised())
    assert len(d.journal("incident_opened")) == 1
    assert not d.journal("incident_cause")
    for rank in d.ranks:
        d.park(rank, 4)
    d.regroup()
    assert d.coordinator.phase == "running"


def test_a_bad_receipt_that_is_told_twice_is_one() -> None:
    d = recovering()
    d.join(1)
    for rank in d.ranks:
        d.tell(ev.Regrouped(**d.here(rank)))
    d.restored(1, ok=False, text="digest a, and not b")
    d.restored(1, ok=False, text="digest a, and not b")
    assert d.coordinator.phase == "stopping"
    assert len(d.journal("receipt")) == 1


def test_what_a_worker_said_in_its_set_up_is_nothing_later() -> None:
    d = Driver(3).running(4)
    d.protect(1)
    d.start(1)
    assert d.coordinator.phase == "running"
    d.die(1)
    d.park(0, 4)
    d.park(2, 4)
    d.join(1)
    assert d.one(do.SendRegroup)
    d.tell(ev.Waiting(**d.who(1)))
    assert not d.last


def test_the_same_parking_twice_is_written_once() -> None:
    d = Driver(3).running(4)
    d.fault(1, 5, raised())
    d.park(0, 4)
    d.park(0, 3)
    assert [line["committed"] for line in d.journal("parked")] == [4]


def test_who_waits_at_the_closing_fence_is_let_through_once() -> None:
    d = Driver(2).running(4)
    for rank in d.ranks:
        d.close(rank, 4)
    assert d.one(do.SendClosed).to == ((0, 1), (1, 1))
    d.close(0, 4)
    assert not d.got(do.SendClosed)


# ---------------------------------------------------------------------- late, or never


def test_a_late_commit_takes_nobody_back() -> None:
    d = Driver(2).running(4)
    d.commit(0, 2)
    assert [line["step"] for line in d.journal("step")] == [1, 2, 3, 4]
    d.commit(0, 5)
    d.commit(1, 5)
    assert d.journal("step")[-1]["step"] == 5


def test_a_commit_that_is_lost_is_known_by_what_follows_from_it() -> None:
    d = Driver(2).running(4)
    d.commit(0, 5)
    d.close(1, 5)
    assert d.journal("step")[-1]["step"] == 5
    d = Driver(2).running(4)
    d.commit(0, 5)
    d.fault(0, 6, broken())
    d.park(1, 5)
    assert d.journal("step")[-1]["step"] == 5


def test_a_replacement_that_waits_for_a_slow_survivor_is_not_late() -> None:
    d = Driver(3, park_timeout_s=300, join_timeout_s=100).running(4)
    d.die(1)
    d.park(0, 4)
    d.join(1)
    d.wait(200)  # rank 2 is in a long step
    assert not d.got(do.Kill, everything=True)
    d.park(2, 4)
    assert d.one(do.SendPosition).rank == 1
    d.wait(99)
    assert not d.got(do.Kill)
    d.wait(2)
    assert d.one(do.Kill).rank == 1


# ---------------------------------------------------------------------- sections


def test_ranks_go_on_from_a_section() -> None:
    d = Driver(3).running(4)
    for rank in (0, 1):
        d.tell(ev.Committed(**d.here(rank), step=4, at_s=d.now_s, sections=1))
    d.die(2)
    d.park(0, 4, sections=1)
    d.park(1, 4, sections=1)
    d.join(2)
    regroup = d.one(do.SendRegroup)
    assert regroup.plan.position == (4, 1)
    assert regroup.plan.ranks[2].decision is Decision.FETCH
    assert regroup.plan.reason == "rank 2 takes section 1 after step 4 from ranks 0, 1"


def test_who_stands_in_a_sections_fence_that_a_peer_has_passed_commits_it() -> None:
    d = Driver(2).running(4)
    d.tell(ev.Committed(**d.here(0), step=4, at_s=d.now_s, sections=1))
    d.fault(1, 5, broken())
    d.park(0, 4, sections=1)
    d.park(1, 4, can_advance=True, in_section=True)
    plan = d.one(do.SendRegroup).plan
    assert plan.position == (4, 1)
    assert [part.decision for part in plan.ranks] == [Decision.KEEP, Decision.ADVANCE]
    assert plan.reason == "rank 1 makes section 1 after step 4 from its own results"


def test_a_section_by_all_ends_an_incident() -> None:
    d = Driver(2).running(4)
    d.fault(1, 5, broken())
    for rank in d.ranks:
        d.park(rank, 4, in_section=True)
    assert d.one(do.SendRegroup).plan.reason == (
        "ranks 0, 1 redo section 1 after step 4 from their own memory"
    )
    d.regroup()
    for rank in d.ranks:
        assert not d.journal("incident_closed")
        d.tell(ev.Committed(**d.here(rank), step=4, at_s=d.now_s, sections=1))
    assert len(d.journal("incident_closed")) == 1


def test_a_rank_that_stands_where_not_every_shard_can_follow_begins_again() -> None:
    d = Driver(3).running(4)
    for rank, shard in ((0, "all"), (1, "all"), (2, "all")):
        assert shard == d.coordinator._job.protected[rank].shard
    d.commit(0, 5)
    d.fault(1, 5, broken())
    d.park(1, 4)
    d.park(2, 4)
    # Rank 0 has made step 5 and its state is torn since: nobody can make that step any more.
    d.park(0, 5, torn=True)
    kill = d.one(do.Kill)
    assert kill.rank == 0
    assert "it stands at step 5, which not every shard can reach any more" in kill.why
    d.die(0)
    d.join(0)
    assert d.one(do.SendRegroup).plan.position == (4, 0)


# ---------------------------------------------------------------------- the counts behind it


def test_commits() -> None:
    commits = Commits(3)
    assert (commits.least, commits.newest) == ((0, 0), (0, 0))
    commits.made(0, (2, 0))
    commits.made(1, (1, 1))
    commits.made(1, (1, 0))  # it has passed that
    assert (commits[1], commits.position(1)) == (1, (1, 1))
    assert (commits.least, commits.newest) == ((0, 0), (2, 0))
    commits.cut((1, 0))
    assert [commits.position(rank) for rank in range(3)] == [(1, 0), (1, 0), (0, 0)]
    commits.validate()


def test_a_holding_knows_where_its_attempt_leads() -> None:
    assert Holding(committed=4).ahead == (5, 0)
    assert Holding(committed=4, sections=1).ahead == (5, 0)
    assert Holding(committed=4, sections=1, in_section=True).ahead == (4, 2)
