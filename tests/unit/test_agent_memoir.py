"""What an agent remembers of its workers for another coordinator."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.agent import clocks
from everstep.agent.memoir import Memoirs
from everstep.types import Cause, CauseKind, Decision, Holding, RankPlan
from everstep.wire import messages as m
from everstep.wire import nodes
from everstep.wire.messages import ScriptSpec, WorkerSpec

SIGKILLED = Cause(kind=CauseKind.SIGNAL, text="killed", signal=9)


def spec(
    rank: int, incarnation: int = 1, *, generation: int = 0, joiner: bool = False
) -> WorkerSpec:
    return WorkerSpec(
        run_id="r",
        rank=rank,
        local_rank=rank % 2,
        local_world_size=2,
        world_size=4,
        incarnation=incarnation,
        generation=generation,
        joiner=joiner,
        script=ScriptSpec(target="x.py", module=False, args=()),
        progress_path="",
        rng_key=None,
        once={},
        faults=(),
        record=False,
        collective_timeout_s=1.0,
        build_timeout_s=1.0,
        meet_timeout_s=1.0,
        quiesce_timeout_s=1.0,
    )


def commit(step: int, generation: int = 0, sections: int = 0) -> m.Commit:
    return m.Commit(generation=generation, step=step, t=0.0, log={}, record=None, sections=sections)


def park(generation: int, committed: int, *, torn: bool = False) -> m.Park:
    return m.Park(generation=generation, holding=Holding(committed=committed, torn=torn))


def regroup(generation: int, step: int) -> m.Regroup:
    plan = RankPlan(decision=Decision.KEEP)
    return m.Regroup(generation=generation, step=step, plan=plan, capsule=None, groups=())


def receipt(generation: int, *, ok: bool = True) -> m.Receipt:
    return m.Receipt(generation=generation, ok=ok, t=0.0)


class Told:
    """A node that holds slot 1 of a job, with ranks 2 and 3."""

    def __init__(self) -> None:
        self.memoirs = Memoirs()
        for rank in (2, 3):
            self.memoirs.launched(spec(rank))

    def both(self, message: m.FromWorker | m.ToWorker) -> None:
        for rank in (2, 3):
            if isinstance(message, m.FromWorker):
                self.memoirs.said(rank, 1, message)
            else:
                self.memoirs.told(rank, 1, message)

    def report(self) -> nodes.Report:
        return self.memoirs.report(run_id="r", term=3, node=7, peers=(), copies=())

    def unwritten(self) -> list[nodes.Said]:
        return [said for part in self.memoirs.unwritten() for said in part.said]

    def of(self, rank: int) -> nodes.MemberReport:
        return next(member for member in self.report().members if member.rank == rank)


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_worker_is_settled_once_it_was_told_to_go(told: Told) -> None:
    assert not told.of(3).settled
    told.both(m.Go())
    told.both(commit(1))
    assert not told.memoirs.disturbed
    assert told.of(3) == nodes.MemberReport(
        rank=3,
        incarnation=1,
        generation=0,
        joining=False,
        settled=True,
        stopped=False,
        step=1,
        sections=0,
        left_at=None,
        finished=False,
        closed=False,
        bye=False,
    )
    assert (told.report().slot, told.report().node, told.report().term) == (1, 7, 3)


def test_a_spare_has_no_slot_and_disturbs_nobody() -> None:
    memoirs = Memoirs()
    assert memoirs.report(run_id="r", term=0, node=0, peers=(), copies=()).slot == -1
    assert not memoirs.disturbed


@pytest.mark.parametrize(
    "message",
    [
        m.Stop(generation=0),
        m.Stop(generation=5),
        park(0, 1),
        m.Fault(generation=0, step=2, cause=SIGKILLED),
    ],
)
def test_whatever_ends_its_world_unsettles_it(
    told: Told, message: m.FromWorker | m.ToWorker
) -> None:
    told.both(m.Go())
    told.both(message)
    assert told.memoirs.disturbed
    assert not told.memoirs.settled()


def test_a_stop_that_comes_late_does_not(told: Told) -> None:
    told.both(m.Go())
    told.both(m.Stop(generation=0))
    told.both(regroup(1, 3))
    assert not told.of(2).settled
    told.both(receipt(1))
    told.both(m.Stop(generation=0))
    told.both(m.Fault(generation=0, step=3, cause=SIGKILLED))
    assert told.of(2).settled
    assert told.memoirs.settled() == [((2, 1), 1), ((3, 1), 1)]


def test_a_receipt_after_the_stop_of_its_generation_settles_nobody(told: Told) -> None:
    told.both(m.Go())
    told.both(m.Stop(generation=0))
    told.both(regroup(1, 3))
    told.both(m.Stop(generation=1))
    told.both(receipt(1))
    assert not told.of(2).settled


def test_a_receipt_that_does_not_hold_settles_nobody(told: Told) -> None:
    told.both(m.Go())
    told.both(m.Stop(generation=0))
    told.both(regroup(1, 3))
    told.both(receipt(1, ok=False))
    assert told.memoirs.disturbed


def test_a_joiner_joins_with_its_regroup(told: Told) -> None:
    told.both(m.Go())
    cause = nodes.Died(rank=2, incarnation=1, cause=SIGKILLED, before_kill=True)
    told.memoirs.died(cause)
    assert told.memoirs.disturbed
    assert told.report().ended == (cause,)
    told.memoirs.launched(spec(2, 2, joiner=True))
    told.memoirs.told(2, 2, m.Go())
    assert told.report().ended == ()
    assert told.of(2).joining
    assert not told.of(2).settled
    told.memoirs.told(2, 2, regroup(1, 3))
    assert not told.of(2).joining
    told.memoirs.said(2, 2, receipt(1))
    assert told.of(2).settled


def test_who_has_left_its_loop_asks_again_after_a_regroup_until_the_fence_has_opened(
    told: Told,
) -> None:
    told.both(m.Go())
    told.both(m.Close(generation=0, step=9))
    assert told.of(2).left_at == 9
    assert told.of(2).step == 9
    told.memoirs.told(2, 1, regroup(1, 9))
    assert told.of(2).left_at is None
    told.memoirs.told(3, 1, m.Closed())
    told.memoirs.told(3, 1, regroup(1, 9))
    assert told.of(3).left_at == 9
    told.memoirs.told(3, 1, m.Bye())
    assert told.of(3).closed
    assert told.of(3).bye


def test_a_park_tells_what_is_committed_unless_the_state_is_torn(told: Told) -> None:
    told.both(m.Go())
    told.memoirs.said(2, 1, park(0, 4))
    told.memoirs.said(3, 1, park(0, 4, torn=True))
    assert (told.of(2).step, told.of(3).step) == (4, 0)


def test_what_must_be_written_is_kept_until_it_is(told: Told) -> None:
    note = m.Note(key="k", text="t")
    for message in (commit(1), note, commit(2), m.Hello(pid=1, t=0.0), commit(2, sections=1)):
        told.memoirs.said(2, 1, message)
    told.memoirs.said(3, 1, commit(1))
    told.memoirs.written(1)
    assert [said.message for said in told.unwritten()] == [
        note,
        commit(2),
        commit(2, sections=1),
    ]
    told.memoirs.written(2)
    assert told.unwritten() == []


def test_the_oldest_is_let_go_and_that_is_said(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.agent.memoir._MOST_UNWRITTEN_BYTES", 3 * 700)
    for step in range(1, 6):
        told.memoirs.said(2, 1, commit(step))
    *kept, last = told.unwritten()
    assert [said.message for said in kept] == [commit(3), commit(4), commit(5)]
    assert isinstance(last.message, m.Note)
    assert last.message.text.startswith("2 messages of rank 2 are lost")


def test_large_ones_are_let_go_sooner_and_told_in_parts(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = [msgspec.structs.replace(commit(step), record=bytes(3000)) for step in range(1, 6)]
    for message in large:
        told.both(message)
    monkeypatch.setattr("everstep.agent.memoir._PART_BYTES", 8000)
    parts = [[said.message for said in part.said] for part in told.memoirs.unwritten()]
    assert [len(part) for part in parts] == [2, 2, 2, 2, 2]
    assert [message for part in parts for message in part] == large + large
    monkeypatch.setattr("everstep.agent.memoir._PART_BYTES", 10)
    assert [len(part.said) for part in told.memoirs.unwritten()] == [1] * 10
    monkeypatch.setattr("everstep.agent.memoir._MOST_UNWRITTEN_BYTES", 8000)
    told.both(commit(6))
    assert [said.message for said in told.unwritten() if said.rank == 2][:3] == [
        *large[-2:],
        commit(6),
    ]
    told.memoirs.written(6)
    told.both(large[0])  # what is written makes room
    told.both(large[1])
    said = [said.message for said in told.unwritten() if said.rank == 3]
    assert said[:2] == large[:2]


def test_what_is_not_answered_is_said_again(told: Told) -> None:
    def unanswered() -> list[m.FromWorker]:
        return [said.message for said in told.memoirs.unanswered() if said.rank == 2]

    def address(group: str, generation: int = 0) -> m.Address:
        return m.Address(generation=generation, group=group, rank=2, size=2, payload=b"")

    fault = m.Fault(generation=0, step=2, cause=SIGKILLED)
    for message in (address("a"), address("b"), address("c", generation=-1), fault):
        told.memoirs.said(2, 1, message)
    assert unanswered() == [address("a"), address("b"), fault]
    told.memoirs.told(2, 1, m.Addresses(generation=0, group="a", entries={}))
    assert unanswered() == [address("b"), fault]
    told.both(regroup(1, 3))
    assert unanswered() == []


def test_times_stay_on_this_hosts_clock(told: Told) -> None:
    """Which the next coordinator is told with the report."""
    cause = Cause(kind=CauseKind.EXIT, text="", at_s=1.0)
    told.memoirs.said(2, 1, m.Fired(index=0, t=2.0))
    told.memoirs.died(nodes.Died(rank=3, incarnation=1, cause=cause, before_kill=True))
    report = msgspec.structs.replace(told.report(), unwritten=tuple(told.unwritten()))
    moved = clocks.report(report, 100.0)
    assert [died.cause.at_s for died in moved.ended] == [101.0]
    assert [said.message for said in moved.unwritten] == [m.Fired(index=0, t=102.0)]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("commit"), st.integers(2, 3)),
            st.tuples(st.just("note"), st.integers(2, 3)),
            st.tuples(st.just("written"), st.just(0)),
        ),
        max_size=60,
    )
)
def test_nothing_unwritten_is_forgotten(happenings: list[tuple[str, int]]) -> None:
    """Against a coordinator that writes all it is told, and says so at times."""
    told, steps = Told(), {2: 0, 3: 0}
    said: list[tuple[int, m.FromWorker]] = []
    for what, rank in happenings:
        if what == "written":
            step = min(steps.values())
            told.memoirs.written(step)
            newest = {
                rank: max(
                    (
                        n
                        for n, (r, each) in enumerate(said)
                        if r == rank and isinstance(each, m.Commit) and each.step <= step
                    ),
                    default=-1,
                )
                for rank in steps
            }
            said = [(r, each) for n, (r, each) in enumerate(said) if n > newest[r]]
            continue
        steps[rank] += what == "commit"
        message: m.FromWorker = (
            commit(steps[rank]) if what == "commit" else m.Note(key=str(len(said)), text="")
        )
        said.append((rank, message))
        told.memoirs.said(rank, 1, message)
    for rank in steps:
        kept = [each.message for each in told.unwritten() if each.rank == rank]
        assert kept == [message for r, message in said if r == rank]
