"""Who needs copies, where they are, and what the coordinator makes of them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core_driver import Driver
from tests.unit.test_core_nodes import OnNodes

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.copies import CopyTable, need_copies
from everstep.types import Decision, Rung, StateFrom

# -------------------------------------------------------------------- who needs them


@pytest.mark.parametrize(
    ("shards", "per_place", "needed"),
    [
        ("abcd", 1, {0, 1, 2, 3}),  # full shard
        ("aaaa", 1, set()),  # replicas
        ("aabb", 1, set()),  # HSDP, on one machine
        ("aabb", 2, {0, 1, 2, 3}),  # its replicas lie on one node each
        ("abab", 2, set()),  # across nodes
        ("aaab", 1, {3}),
        ("aaab", 2, {3}),
        ("a", 1, {0}),
        ("", 1, set()),
    ],
)
def test_who_lies_in_one_place_only_needs_copies(
    shards: str, per_place: int, needed: set[int]
) -> None:
    assert need_copies(dict(enumerate(shards)), lambda rank: rank // per_place) == needed


# -------------------------------------------------------------------- the table


def told(table: CopyTable, *copies: tuple[int, int, int]) -> None:
    for rank, step, node in copies:
        table.kept(rank, step, node)


def test_it_is_known_where_copies_lie() -> None:
    table = CopyTable()
    told(table, (0, 2, 0), (0, 3, 0), (0, 3, 4))
    assert table.steps(0) == [2, 3]
    assert table.nodes(0, 3) == [0, 4]
    assert table.nodes(0, 1) == []
    assert table.nodes(7, 3) == []
    assert table.steps(7) == []
    table.spoiled(0, 3, 0)
    assert table.nodes(0, 3) == [4]
    table.spoiled(0, 3, 4)
    table.spoiled(0, 9, 4)
    assert table.steps(0) == [2]


def in_pairs() -> CopyTable:
    """Rank 0 on node 0, rank 1 on node 1, each the other's keeper."""
    table = CopyTable()
    table.assign(frozenset({0, 1}), {0: 1, 1: 0}, {0: 0, 1: 1})
    return table


def test_what_agents_have_given_up_is_forgotten() -> None:
    """A copy gives its place when all newer ones are where they belong, and that step is
    committed."""
    table = in_pairs()
    for step in (1, 2):
        told(table, (0, step, 0), (1, step, 1), (0, step, 1))
    assert table.settle(2) == []
    assert table.steps(0) == [1, 2], "rank 1's are not with its keeper"
    told(table, (1, 1, 0), (1, 2, 0))
    table.settle(1)
    assert table.steps(0) == [1, 2], "nobody has passed the fence of step 2"
    before = table.version
    table.settle(2)
    assert table.steps(0) == [2]
    assert table.version != before
    before = table.version
    table.settle(2)
    assert table.version == before


def test_what_a_loss_takes_had_been_given_up_before_it() -> None:
    table = in_pairs()
    for step in (1, 2):
        told(table, (0, step, 0), (1, step, 1), (0, step, 1), (1, step, 0))
    table.lose(1)
    table.settle(2)
    assert table.nodes(1, 1) == [], "its agent may have written over it, with step 3"
    assert table.nodes(1, 2) == [0]


def test_a_keeper_that_has_no_room_is_not_waited_for() -> None:
    table = in_pairs()
    for step in (1, 2):
        told(table, (0, step, 0), (1, step, 1), (0, step, 1))
        table.waive(1, step)
    table.settle(2)
    assert table.steps(0) == table.steps(1) == [2]


def test_where_nobody_knows_the_keepers_the_newest_are_known() -> None:
    table = CopyTable()
    for step in range(1, 20):
        told(table, (0, step, 0))
        table.settle(step)
    assert table.steps(0) == list(range(12, 20))


def test_two_steps_that_all_ranks_have_stay_at_a_regroup() -> None:
    table = in_pairs()
    for step in (1, 2, 3, 4, 5):
        told(table, (0, step, 0), (1, step, 1))
    table.spoiled(1, 3, 1)
    table.regroup(4)
    assert list(table.needed) == [2, 4]
    assert table.steps(0) == [2, 4]
    table.regroup(3)
    assert list(table.needed) == [2]
    table.lose(1)
    table.regroup(3)
    assert list(table.needed) == []
    assert table.steps(0) == []


def test_a_former_keepers_copies_are_of_use_until_there_are_newer_ones() -> None:
    table = in_pairs()
    told(table, (0, 4, 0), (1, 4, 1), (0, 4, 1), (1, 4, 0))
    table.regroup(4)
    table.assign(frozenset({0, 1}), {0: 2, 1: 3}, {0: 0, 1: 1})
    assert table.settle(4) == []
    told(table, (0, 5, 0), (1, 5, 1), (0, 5, 2))
    assert table.settle(5) == []
    told(table, (1, 5, 3))
    assert table.settle(4) == []
    assert table.settle(5) == [(0, 1), (1, 0)]
    assert table.settle(5) == []


def test_a_lost_node_takes_its_copies_with_it() -> None:
    table = CopyTable()
    for rank, step, node in [(0, 4, 0), (0, 4, 1), (0, 5, 0), (1, 4, 1)]:
        table.kept(rank, step, node)
    before = table.version
    table.lose(0)
    assert table.version != before
    assert list(table.steps(0)) == [4]
    assert table.nodes(0, 4) == [1]
    table.lose(1)
    assert not list(table.steps(0))
    assert not list(table.steps(1))
    assert table.by_shard({0: "a", 1: "b"}) == {}


def test_what_is_done_again_is_forgotten() -> None:
    table = CopyTable()
    for step in (4, 5):
        table.kept(0, step, node=0)
    table.regroup(4)
    assert list(table.steps(0)) == [4]
    table.kept(0, 5, node=0)
    assert sorted(table.steps(0)) == [4, 5]


def test_a_shard_is_there_at_a_step_when_all_its_ranks_are() -> None:
    table = CopyTable()
    shards = {0: "a", 1: "a", 2: "b"}
    assert table.by_shard(shards) == {}
    for rank, steps in {0: (4, 5), 1: (5,), 2: (4,)}.items():
        for step in steps:
            table.kept(rank, step, node=0)
    assert table.by_shard(shards) == {"a": {5}, "b": {4}}
    assert table.by_shard({**shards, 3: "b"}) == {"a": {5}}


# -------------------------------------------------------------------- on one node


class Alone(Driver):
    """One node, a shard on each rank."""

    def __init__(self, world_size: int = 3, **policy: Any) -> None:
        super().__init__(world_size, copies=True, **policy)

    def protect(self, rank: int, manifest: str = "m", **digests: str) -> list[do.Action]:
        digests = digests or {"w": "ab" * 8}
        return self.tell(
            ev.Protected(**self.who(rank), shard=f"s{rank}", manifest=manifest, digests=digests)
        )

    def copied(self, rank: int, step: int, node: int = 0) -> None:
        self.tell(ev.Copied(**self.here(rank), step=step, node=node))

    def run_to(self, step: int, first: int = 1) -> None:
        for number in range(first, step + 1):
            for rank in self.ranks:
                self.copied(rank, number)
            for rank in self.ranks:
                self.commit(rank, number)

    def park(self, rank: int, committed: int, **more: Any) -> list[do.Action]:
        return super().park(rank, committed, **{"shard": f"s{rank}", **more})


def test_ranks_are_told_who_copies() -> None:
    d = Alone()
    d.set_up()
    (go,) = d.got(do.SendGo, everything=True)
    assert go.copied == {0, 1, 2}
    (keepers,) = d.got(do.SendKeepers, everything=True)
    assert keepers == do.SendKeepers(generation=0, keepers={}, steps=())
    off = Driver(3)
    off.set_up()
    (go,) = off.got(do.SendGo, everything=True)
    assert go.copied == frozenset()


def test_a_dead_rank_takes_its_copy() -> None:
    d = Alone()
    d.running(4)
    d.copied(1, 5)  # of the step that it died in: not every rank has one
    d.die(1)
    d.park(0, 4)
    d.park(2, 4)
    d.join(1)
    (regroup,) = d.got(do.SendRegroup)
    assert regroup.plan.step == 4
    parts = regroup.plan.ranks
    assert [part.copy for part in parts] == [False, True, False]
    assert parts[1].decision is Decision.FETCH
    assert parts[1].sources == ()
    d.regroup()
    assert d.coordinator.phase == "running"
    d.run_to(5, first=5)
    (closed,) = d.journal("incident_closed")
    assert (closed["rung"], closed["steps_lost"]) == (Rung.RESPAWN, 0)


def test_what_the_dead_had_committed_is_not_made_twice() -> None:
    """All have a copy of step 5, since one has passed its fence."""
    d = Alone()
    d.running(4)
    for rank in d.ranks:
        d.copied(rank, 5)
    d.commit(1, 5)
    d.die(1)
    d.park(0, 4, torn=True)
    d.park(2, 4)
    d.join(1)
    (regroup,) = d.got(do.SendRegroup)
    assert regroup.plan.step == 5
    assert all(part.copy for part in regroup.plan.ranks)


def test_all_processes_die_and_their_copies_are_left() -> None:
    d = Alone()
    d.running(4)
    for rank in d.ranks:
        d.die(rank)
    assert d.coordinator.phase == "stopping"
    for rank in d.ranks:
        d.join(rank)
    (regroup,) = d.got(do.SendRegroup)
    assert regroup.plan.step == 4
    assert all(part.copy for part in regroup.plan.ranks)


def test_a_torn_rank_without_a_copy_of_the_step_ends_the_job() -> None:
    d = Alone()
    d.set_up()
    for number in (1, 2):
        for rank in d.ranks:
            d.commit(rank, number)  # copies that nobody has told of
    d.die(1)
    for rank in (0, 2):
        d.park(rank, 2)
    assert d.ended.exit_code != 0
    assert "was held only by processes that are gone (rank 1)" in d.ended.text


def test_without_a_commit_there_is_nothing_to_go_back_to() -> None:
    """Copies of the first step that not all have made count for nothing."""
    d = Alone()
    d.set_up()
    d.copied(0, 1)
    d.die(0)
    assert d.coordinator.phase == "setting up"
    assert d.coordinator.copies_of(0, 1) == []


# -------------------------------------------------------------------- on several


class Copied(OnNodes):
    """Nodes of two ranks each, a shard on each rank; copies lie at home and at the keeper's."""

    def __init__(self, nnodes: int = 2, spares: int = 1, **policy: Any) -> None:
        super().__init__(nnodes, spares, shards=2 * nnodes, copies=True, **policy)
        self.keepers: dict[int, int] = {}

    def tell(self, event: ev.Event) -> list[do.Action]:
        super().tell(event)
        for order in self.got(do.SendKeepers):
            self.keepers = order.keepers
        return self.last

    def copied(self, rank: int, step: int, *at: int) -> None:
        for node in at or (self.node_of[rank], self.keepers[rank]):
            self.tell(ev.Copied(**self.here(rank), step=step, node=node))

    def run_to(self, step: int, first: int = 1) -> None:
        for number in range(first, step + 1):
            for rank in self.ranks:
                self.copied(rank, number)
            for rank in self.ranks:
                self.commit(rank, number)


def before(d: Driver, first: type[do.Action], then: type[do.Action]) -> bool:
    kinds = [type(action) for action in d.last]
    return kinds.index(first) < kinds.index(then)


def test_keepers_are_named_before_the_first_step() -> None:
    d = Copied()
    d.gather()
    d.set_up()
    assert before(d, do.SendKeepers, do.SendGo)
    assert d.one(do.SendGo).copied == set(d.ranks)
    assert d.keepers == {0: 1, 1: 1, 2: 0, 3: 0}


def test_keepers_lie_in_other_failure_domains() -> None:
    d = Copied(nnodes=4, spares=0)
    d.gather("r1", "r1", "r2", "r2")
    d.set_up()
    rack = {0: "r1", 1: "r1", 2: "r2", 3: "r2"}
    for rank, keeper in d.keepers.items():
        assert rack[d.node_of[rank]] != rack[keeper]


def test_without_copies_nobody_is_named() -> None:
    d = OnNodes(shards=4).gather()
    d.set_up()
    assert d.got(do.SendKeepers, everything=True) == []


def test_a_lost_nodes_shards_come_from_their_keepers() -> None:
    d = Copied()
    d.at(4)
    assert d.coordinator.copies_of(2, 4) == [0, 1]
    d.lose(1)
    assert d.coordinator.copies_of(2, 4) == [0]
    d.parks(0, 1)
    for rank in (2, 3):
        d.join(rank)
    plan = d.one(do.SendRegroup).plan
    assert plan.step == 4
    assert [part.copy for part in plan.ranks] == [False, False, True, True]
    assert before(d, do.SendKeepers, do.SendRegroup)
    assert d.keepers == {0: 2, 1: 2, 2: 0, 3: 0}, "the replacement keeps what the lost node kept"
    d.regroup()
    d.copied(2, 4, 2)  # fetched to the rank's new home
    assert d.coordinator.copies_of(2, 4) == [0, 2]
    d.run_to(5, first=5)
    (closed,) = d.journal("incident_closed")
    assert (closed["rung"], closed["steps_lost"]) == (Rung.REPLACE, 0)


def test_both_nodes_of_a_copy_lost_end_the_job_by_name() -> None:
    d = Copied(spares=2)
    d.at(4)
    d.lose(1)
    d.lose(0)
    assert d.ended.exit_code != 0
    assert "the state of step 4 is lost" in d.ended.text


def test_a_node_that_is_lost_before_its_shards_are_copied_again_ends_the_job() -> None:
    """The spare has taken over, but holds no copy yet of what the other node has."""
    d = Copied(spares=2)
    d.at(4)
    d.lose(1)
    d.parks(0, 1)
    d.join(2)
    d.join(3)
    d.regroup()
    d.lose(0)
    d.parks(2, 3)
    assert d.ended.exit_code != 0
    assert "'s0'" in d.ended.text
    assert "'s1'" in d.ended.text


def test_two_losses_one_after_the_other_lose_nothing() -> None:
    d = Copied(spares=2)
    d.at(4)
    d.lose(1)
    d.parks(0, 1)
    d.recover(2, 3)
    d.lose(0)
    d.parks(2, 3, step=5)
    d.join(0)
    d.join(1)
    plan = d.one(do.SendRegroup).plan
    assert plan.step == 5
    assert [part.copy for part in plan.ranks] == [True, True, False, False]


def test_all_processes_of_a_node_die_and_its_agent_lives() -> None:
    d = Copied()
    d.at(4)
    d.die(2)
    d.die(3)
    d.parks(0, 1)
    for rank in (2, 3):
        assert d.node_of[rank] == 1, "at home, where its copy is"
        d.join(rank)
    plan = d.one(do.SendRegroup).plan
    assert [part.copy for part in plan.ranks] == [False, False, True, True]


def test_the_copies_of_a_stopped_attempt_are_forgotten() -> None:
    d = Copied()
    d.at(4)
    d.copied(0, 5)
    d.copied(1, 5)
    d.lose(1)
    d.parks(0, 1)
    d.join(2)
    d.join(3)
    assert d.coordinator.copies_of(0, 5) == []
    assert d.coordinator.copies_of(0, 4) == [0]


def test_what_a_lost_node_says_of_copies_counts_for_nothing() -> None:
    d = Copied()
    d.at(4)
    d.lose(1)
    d.copied(0, 4, 1)
    assert d.coordinator.copies_of(0, 4) == [0]


def test_replicas_across_nodes_need_no_copy_and_come_first() -> None:
    """Ranks 0 and 2, 1 and 3 are replicas: nothing is copied."""
    d = OnNodes(nnodes=2, spares=1, shards=2, copies=True).at(4)
    (go,) = d.got(do.SendGo, everything=True)
    assert go.copied == frozenset()
    assert d.got(do.SendKeepers, everything=True) == []
    d.lose(1)
    d.parks(0, 1)
    d.join(2)
    d.join(3)
    plan = d.one(do.SendRegroup).plan
    assert [part.copy for part in plan.ranks] == [False] * 4
    assert plan.ranks[2].sources == (0,)


# -------------------------------------------------------------------- steps that don't wait


class Async(Copied):
    """Copies are on their way while the next step runs."""

    def __init__(self, **policy: Any) -> None:
        super().__init__(copy_every=1, **policy)

    def run_to(self, step: int, first: int = 1, behind: int = 1) -> None:
        """All copies of a step are with their keepers `behind` steps later."""
        for number in range(first, step + 1):
            for rank in self.ranks:
                self.copied(rank, number, self.node_of[rank])
            for rank in self.ranks if number > behind else ():
                self.copied(rank, number - behind, self.keepers[rank])
            for rank in self.ranks:
                self.commit(rank, number)


def test_all_ranks_make_copies_if_any_must() -> None:
    """Since all must be able to go back."""
    mixed = OnNodes(nnodes=2, spares=1, shards=3, copies=True, copy_every=2).gather()
    mixed.set_up()
    (go,) = mixed.got(do.SendGo, everything=True)
    assert (set(go.copied), go.copy_every) == ({0, 1, 2, 3}, 2)
    assert set(mixed.one(do.SendKeepers).keepers) == {0, 1, 2, 3}
    none = OnNodes(nnodes=2, spares=1, shards=2, copies=True, copy_every=2).gather()
    none.set_up()
    (go,) = none.got(do.SendGo, everything=True)
    assert go.copied == frozenset()


def test_a_node_that_is_lost_before_its_copy_has_come_costs_the_step() -> None:
    d = Async()
    d.at(5)
    d.lose(1)
    d.parks(0, 1, step=5)
    killed = [kill.rank for kill in d.got(do.Kill, everything=True)]
    assert killed == [0, 1], "a script can't be led back behind what it has been given"
    d.die(0)
    d.die(1)
    for rank in d.ranks:
        d.join(rank)
    regroup = d.one(do.SendRegroup)
    assert regroup.plan.step == 4
    assert [part.copy for part in regroup.plan.ranks] == [True] * 4
    assert regroup.copies == (4,)
    d.regroup()
    d.run_to(6, first=5)
    (closed,) = d.journal("incident_closed")
    found = (closed["rung"], closed["state_from"], closed["steps_lost"])
    assert found == (Rung.MEMORY, StateFrom.MEMORY, 1)
    assert [step["step"] for step in d.journal("step")] == [1, 2, 3, 4, 5, 5, 6]


def test_a_process_that_dies_costs_no_step() -> None:
    """Its copy is on its node, wherever else it is not."""
    d = Async()
    d.at(5)
    d.die(3)
    d.parks(0, 1, 2, step=5)
    d.join(3)
    regroup = d.one(do.SendRegroup)
    assert regroup.plan.step == 5
    assert [part.copy for part in regroup.plan.ranks] == [False, False, False, True]
    assert regroup.copies == (4, 5)
    d.regroup()
    d.run_to(6, first=6)
    (closed,) = d.journal("incident_closed")
    assert (closed["rung"], closed["steps_lost"]) == (Rung.RESPAWN, 0)


def test_a_node_whose_copy_has_come_costs_no_step() -> None:
    d = Async()
    d.at(5)
    for rank in (2, 3):
        d.copied(rank, 5, d.keepers[rank])
    d.lose(1)
    d.parks(0, 1, step=5)
    d.join(2)
    d.join(3)
    assert d.one(do.SendRegroup).plan.step == 5
    d.regroup()
    d.run_to(6, first=6)
    (closed,) = d.journal("incident_closed")
    assert (closed["rung"], closed["steps_lost"]) == (Rung.REPLACE, 0)


def test_where_only_some_had_committed_the_step_none_is_lost() -> None:
    """The step was made by a rank, so all go back behind it; but no one had heard of it."""
    d = Async()
    d.at(4)
    for rank in d.ranks:
        d.copied(rank, 4, d.keepers[rank])
        d.copied(rank, 5, d.node_of[rank])
    d.commit(0, 5)
    d.lose(1)
    d.park(0, 5, shard="s0")
    d.park(1, 4, shard="s1")
    d.die(0)
    for rank in (0, 2, 3):
        d.join(rank)
    regroup = d.one(do.SendRegroup)
    assert regroup.plan.step == 4
    assert [part.copy for part in regroup.plan.ranks] == [True, False, True, True]
    d.regroup()
    d.run_to(6, first=5)
    (closed,) = d.journal("incident_closed")
    assert (closed["rung"], closed["steps_lost"]) == (Rung.MEMORY, 0)


def test_a_copy_that_is_found_spoiled_leads_further_back() -> None:
    d = Async()
    d.at(5)
    d.die(3)
    d.parks(0, 1, 2, step=5)
    d.join(3)
    assert d.one(do.SendRegroup).plan.step == 5
    for rank in d.ranks:
        d.tell(ev.Regrouped(**d.here(rank)))
    for rank in (0, 1, 2):
        d.restored(rank)
    d.tell(ev.CopySpoiled(rank=3, step=5, node=d.node_of[3]))
    d.restored(3, ok=False, text="it is corrupt")
    d.parks(0, 1, 2, step=5)
    d.park(3, 0, torn=True, shard="s3")
    for rank in (0, 1, 2):
        d.die(rank)
        d.join(rank)
    regroup = d.one(do.SendRegroup)
    assert regroup.plan.step == 4
    assert [part.copy for part in regroup.plan.ranks] == [True] * 4


def test_former_keepers_are_told_when_they_are_not_needed_any_more() -> None:
    """The replacement would bring two copies into one rack, so two slots change places."""
    racks = ("a", "a", "b", "b", "c", "c", "a")
    d = Copied(nnodes=6, spares=1)
    d.gather(*racks)
    d.set_up()
    d.run_to(4)
    before = dict(d.keepers)
    lost = next(
        home
        for rank, home in d.node_of.items()
        if racks[home] == "b" and racks[before[rank]] == "a"
    )
    gone = [rank for rank in d.ranks if d.node_of[rank] == lost]
    others = [rank for rank in d.ranks if rank not in gone]
    d.lose(lost)
    d.parks(*others)
    for rank in gone:
        d.join(rank)
    d.regroup()
    former = {(r, before[r]) for r in d.ranks if d.keepers[r] != before[r] and before[r] != lost}
    assert former
    assert d.got(do.DropCopies, everything=True) == []
    d.run_to(6, first=5)
    dropped = [(order.rank, order.node) for order in d.got(do.DropCopies, everything=True)]
    assert set(dropped) == former
    assert len(dropped) == len(former)
