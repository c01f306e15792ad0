"""Copies that come back: a node and its keeper are gone at once, and agents that are started again
on their hosts find what they had."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.unit.core_driver import killed
from tests.unit.test_core_copies import Copied
from tests.unit.test_core_resume import Resuming

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.copies import CopyTable
from everstep.core.overview import AWAITING, overview
from everstep.types import HeldCopy, Rung, Stamp, StateFrom

MINUTE_S = 60.0


def copy(rank: int, step: int, made_in: int = 0, digest: str = "") -> HeldCopy:
    stamp = Stamp(generation=made_in, digest=digest or f"rank {rank} at {step} in {made_in}")
    return HeldCopy(rank=rank, step=step, stamp=stamp)


class Stamped(Copied):
    """Two nodes of two ranks each, without spares, whose copies are known by their stamps."""

    def __init__(self, nnodes: int = 2, spares: int = 0, wait_s: float = MINUTE_S) -> None:
        super().__init__(nnodes, spares, spare_wait_s=wait_s)

    def copied(self, rank: int, step: int, *at: int) -> None:
        stamp = copy(rank, step, self.generation).stamp
        for node in at or (self.node_of[rank], self.keepers[rank]):
            self.tell(ev.Copied(**self.here(rank), step=step, node=node, stamp=stamp))

    def comes(self, node: int, found: Iterable[HeldCopy], host: str = "") -> None:
        """An agent joins with what it has found."""
        found, host = tuple(found), host or f"h{node}"
        self.tell(ev.NodeJoined(node=node, host=host, domain="", ranks=2, found=found))

    def kept(self) -> tuple[HeldCopy, ...]:
        """What the node that came last was told to keep."""
        return self.got(do.JudgeCopies, everything=True)[-1].keep


def all_lost() -> Stamped:
    """Step 4 is committed by all; both nodes are gone."""
    d = Stamped()
    d.at(4)
    d.lose(1)
    d.lose(0)
    return d


ALL = [copy(rank, step) for rank in range(4) for step in (3, 4)]


def test_all_nodes_are_lost_and_the_copies_of_one_bring_all_back() -> None:
    d = all_lost()
    (line,) = d.journal("copy_awaited")
    assert line == {"incident": 1, "ranks": [0, 1, 2, 3], "hosts": ["h0", "h1"], "wait_s": MINUTE_S}
    assert d.coordinator.next_deadline_s == d.now_s + MINUTE_S
    d.comes(2, ALL, host="h0")
    assert d.kept() == tuple(copy(rank, 4) for rank in range(4)), "step 3 was given up before"
    (line,) = d.journal("copies_found")
    assert line["taken"] == [[rank, 4] for rank in range(4)]
    assert line["refused"] == [[rank, 3] for rank in range(4)]
    assert d.coordinator.copies_of(1, 4) == [2]
    d.comes(3, ALL, host="h1")
    for rank in d.ranks:
        d.join(rank)
    plan = d.one(do.SendRegroup).plan
    assert plan.step == 4
    assert all(part.copy for part in plan.ranks)
    d.regroup()
    d.run_to(5, first=5)
    (closed,) = d.journal("incident_closed")
    found = (closed["rung"], closed["state_from"], closed["steps_lost"])
    assert found == (Rung.REPLACE, StateFrom.MEMORY, 0)


def test_replacements_start_while_a_copy_is_awaited() -> None:
    """Ranks 0 and 1, and whoever kept their copies, are gone; a spare is there."""
    d = Stamped(nnodes=3, spares=2)
    d.at(4)
    keeper = d.keepers[0]
    (rest,) = {0, 1, 2} - {0, keeper}
    d.lose(0)
    d.lose(keeper)
    survivors = [rank for rank in d.ranks if d.node_of[rank] == rest]
    d.parks(*survivors)
    assert [line["ranks"] for line in d.journal("copy_awaited")] == [[0, 1]]
    assert d.node_of[0] in (3, 4), "its process can set itself up meanwhile"
    for rank in set(d.ranks) - set(survivors):
        d.start(rank)
        d.protect(rank)
        d.tell(ev.Waiting(**d.who(rank)))
    d.wait(MINUTE_S - 1)
    d.comes(5, [copy(0, 4), copy(1, 4)], host=f"h{keeper}")
    assert [(p.rank, p.step) for p in d.got(do.SendPosition)] == [
        (rank, 4) for rank in d.ranks if rank not in survivors
    ]


def test_a_spare_that_lends_what_it_has_found_is_known_to_those_that_take_it() -> None:
    """Two empty nodes have taken the slots; the one that comes back with the copies has none."""
    d = Stamped(nnodes=2, spares=2)
    d.at(4)
    d.lose(1)
    d.lose(0)
    d.comes(4, ALL, host="h0")
    for rank in d.ranks:
        d.join(rank)
    assert {d.node_of[rank] for rank in d.ranks} == {2, 3}
    assert d.one(do.SendRegroup).plan.step == 4
    guardians = d.got(do.SendPeers, everything=True)[-1].guardians
    assert guardians == {2: 3, 3: 2, 4: None}


def test_nobody_comes_and_the_job_ends_with_what_was_awaited() -> None:
    d = all_lost()
    d.wait(MINUTE_S - 1)
    assert not d.got(do.End)
    d.wait(1)
    assert d.ended.exit_code != 0
    assert "the state of step 4 is lost" in d.ended.text
    assert (
        "no node has come back with the copies of ranks 0-3 that were in the memory of h0 and h1, "
        "within 60 s (--spare-wait)" in d.ended.text
    )


def test_a_host_that_was_swept_brings_nothing() -> None:
    d = all_lost()
    d.node_joins(2, "h0")
    d.node_joins(3, "h1")
    assert d.got(do.JudgeCopies, everything=True) == []
    d.wait(MINUTE_S)
    assert "no node has come back with the copies of ranks 0-3" in d.ended.text


@pytest.mark.parametrize(
    "wrong",
    [
        copy(0, 4, made_in=1),
        copy(0, 4, digest="of something else"),
        copy(0, 3),  # it was settled
        copy(0, 5),  # of an attempt that is done again, or of no attempt
        copy(9, 4),
    ],
)
def test_what_is_not_known_is_given_up(wrong: HeldCopy) -> None:
    d = all_lost()
    d.comes(2, [wrong, copy(1, 4)], host="h0")
    assert d.kept() == (copy(1, 4),)
    assert d.coordinator.copies_of(0, 4) == []
    text = d.journal("copies_found")[0]["text"]
    assert text.startswith("node 2 (host h0) has found in its memory copies of rank 1 at step 4, ")
    assert f"rank {wrong.rank} at step {wrong.step}, which are not known" in text
    d.wait(MINUTE_S)
    assert "'s0'" in d.ended.text


def test_without_a_wait_the_job_ends_at_once_and_says_where_copies_lay() -> None:
    d = Stamped(wait_s=0.0)
    d.at(4)
    d.lose(1)
    d.lose(0)
    assert "in the memory of h0 and h1, and none is waited for" in d.ended.text


def test_a_copy_that_is_corrupt_is_not_awaited_twice() -> None:
    d = all_lost()
    d.comes(2, ALL, host="h0")
    d.comes(3, ALL, host="h1")
    for rank in d.ranks:
        d.join(rank)
    assert d.one(do.SendRegroup).plan.step == 4
    for rank in d.ranks:
        d.tell(ev.Regrouped(**d.here(rank)))
    for rank in (0, 1, 2):
        d.restored(rank)
    for node in (2, 3):
        d.tell(ev.CopySpoiled(rank=3, step=4, node=node))
    d.restored(3, ok=False, text="the copy of rank 3 at step 4 is corrupt in bytes 0 to 9 (w)")
    d.parks(0, 1, 2)
    d.park(3, 0, torn=True, shard="s3")
    assert "is corrupt in bytes 0 to 9" in d.ended.text
    assert "the state of step 4 is lost" in d.ended.text


def test_what_was_done_again_is_refused() -> None:
    """Node 1 makes copies of step 5 and is lost before anybody has committed it. The others go on
    from 4, and make 5 again; then it comes back, when node 0 and its keeper are gone."""
    d = Stamped(spares=1)
    d.at(4)
    for rank in d.ranks:
        d.copied(rank, 5, 1)
    d.lose(1)
    d.parks(0, 1)
    d.recover(2, 3)
    assert d.generation == 1
    d.lose(2)
    d.lose(0)
    old = [copy(rank, step) for rank in d.ranks for step in (4, 5)]
    d.comes(3, old, host="h1")
    assert d.kept() == ()
    d.comes(4, [copy(rank, 5, made_in=1) for rank in d.ranks], host="h0")
    assert len(d.kept()) == 4
    for rank in d.ranks:
        d.join(rank)
    assert d.one(do.SendRegroup).plan.step == 5


def test_while_nobody_needs_them_copies_are_given_up() -> None:
    d = Stamped(spares=1)
    d.at(4)
    d.comes(3, ALL)
    assert d.kept() == ()
    (line,) = d.journal("copies_found")
    assert line["taken"] == []
    first = Stamped()
    first.tell(ev.JobStarted())
    first.comes(0, ALL)
    assert first.kept() == (), "of a job of the same name"


def test_in_a_regroup_the_judgement_waits() -> None:
    d = Stamped(spares=1)
    d.at(4)
    d.lose(1)
    d.parks(0, 1)
    d.join(2)
    d.join(3)
    assert d.coordinator.phase == "regrouping"
    d.comes(3, [copy(0, 4), copy(1, 4)], host="h1")
    assert d.got(do.JudgeCopies, everything=True) == []
    d.lose(0)
    assert d.kept() == (copy(0, 4), copy(1, 4))
    d.parks(2, 3)
    assert not d.got(do.End, everything=True)


def test_who_came_and_is_gone_again_is_not_judged() -> None:
    d = Stamped(spares=1)
    d.at(4)
    d.lose(1)
    d.parks(0, 1)
    d.join(2)
    d.join(3)
    d.comes(3, [copy(0, 4)], host="h1")
    d.lose(3)
    d.lose(0)
    assert d.got(do.JudgeCopies, everything=True) == []


def test_what_came_back_may_be_lost_and_come_back_again() -> None:
    d = all_lost()
    for number in (2, 3, 4):
        d.comes(number, ALL, host="h0")
        assert len(d.kept()) == 4
        d.lose(number)
    assert d.coordinator.phase == "stopping"
    d.wait(MINUTE_S)
    assert "the copies of ranks 0-3" in d.ended.text


def test_a_wait_for_a_copy_shows() -> None:
    d = all_lost()
    d.wait(20.0)
    seen = overview(d.coordinator._job, d.now_s)
    assert (seen.phase, seen.wait_s) == (AWAITING, MINUTE_S - 20.0)


def test_what_a_step_lost_before_the_first_record_is_not_awaited() -> None:
    """All start again from the script."""
    d = Stamped()
    d.gather()
    d.set_up()
    for rank in d.ranks:
        d.copied(rank, 1)
    d.commit(0, 1)
    d.lose(1, killed())
    d.lose(0, killed())
    assert d.coordinator.phase == "setting up"
    assert not d.journal("copy_awaited")


# -------------------------------------------------------------------- another coordinator


def test_a_coordinator_that_does_not_know_a_copy_refuses_it() -> None:
    table = CopyTable()
    table.kept(0, 4, node=1)  # told without a stamp
    table.lose(1, "h1")
    assert table.by_shard({0: "a"}, lost=True) == {}
    assert table.regain(2, "h1", [copy(0, 4)]) == ()


def test_a_node_that_was_sent_away_keeps_nothing() -> None:
    table = CopyTable()
    table.kept(0, 4, 1, copy(0, 4).stamp)
    table.lose(1)
    assert table.by_shard({0: "a"}, lost=True) == {}
    assert table.lost_on(0, 4) == []


def test_copies_of_another_making_displace_what_was_lost() -> None:
    table = CopyTable()
    table.kept(0, 4, 1, copy(0, 4).stamp)
    table.lose(1, "h1")
    assert table.lost_on(0, 4) == ["h1"]
    table.kept(0, 4, 2, copy(0, 4, made_in=3).stamp)
    table.spoiled(0, 4, 2)
    assert table.lost_on(0, 4) == []
    assert table.regain(5, "h1", [copy(0, 4)]) == ()


@pytest.mark.parametrize("newer_first", [True, False])
def test_copies_of_two_makings_are_never_taken_for_one(newer_first: bool) -> None:
    """To another coordinator also nodes report that were left behind, with what was made again."""
    table = CopyTable()
    told = [(1, copy(0, 4, made_in=3).stamp), (2, copy(0, 4, made_in=5).stamp)]
    for node, stamp in reversed(told) if newer_first else told:
        table.kept(0, 4, node, stamp)
    assert table.nodes(0, 4) == [2]
    table.lose(1, "h1")
    table.lose(2, "h2")
    assert table.regain(6, "h1", [copy(0, 4, made_in=3)]) == ()
    assert len(table.regain(7, "h2", [copy(0, 4, made_in=5)])) == 1


@pytest.mark.parametrize("known", [True, False])
def test_what_a_node_has_reported_is_known_to_the_next_coordinator(known: bool) -> None:
    """Node 0 comes back to it and is lost again; nobody else has copies of ranks 0 and 1."""
    d = Resuming(shards=4, copies=True, spare_wait_s=MINUTE_S).resume()
    held = tuple(copy(rank, 7, made_in=3) for rank in (0, 1))
    d.back(0, copies=held if known else ())
    d.lose(0)
    d.back(1, copies=(copy(2, 7, made_in=3), copy(3, 7, made_in=3)))
    d.tell(ev.NodeJoined(node=2, host="h0", domain="", ranks=2, found=held))
    assert d.coordinator.phase == "reconvening"
    assert not d.got(do.JudgeCopies, everything=True), "it is not known yet who is there"
    d.wait(10.0)
    d.parks(2, 3, step=7)
    judged = d.got(do.JudgeCopies, everything=True)
    assert [each.keep for each in judged] == [held if known else ()]
    if known:
        d.join(0)
        d.join(1)
        assert d.one(do.SendRegroup).plan.step == 7
    else:
        assert "the state of step 7 is lost" in d.ended.text
