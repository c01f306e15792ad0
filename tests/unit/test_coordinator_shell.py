"""The coordinator's shell around a core that does as it is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import pytest

from everstep import chaos
from everstep.coordinator import CoordinatorShell
from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.hang import Evidence, Stance
from everstep.core.overview import Overview
from everstep.keepsakes import Heritage
from everstep.translation import final_cause
from everstep.types import Cause, CauseKind, Decision, Holding, Plan, RankPlan, Record
from everstep.wire import messages as m
from everstep.wire import nodes

PLAN = Plan(
    step=5,
    ranks=(
        RankPlan(decision=Decision.KEEP, sinks=(1,)),
        RankPlan(decision=Decision.FETCH, sources=(0,)),
    ),
    reason="",
)


class ScriptedCore:
    """Answers each event with what the test has put under its type, once."""

    def __init__(self) -> None:
        self.seen: list[ev.Event] = []
        self.answers: dict[type[ev.Event], list[do.Action]] = {}
        self.next_deadline_s: float | None = None
        self.reconvenes = False

    def handle(self, event: ev.Event, now_s: float) -> list[do.Action]:
        self.seen.append(event)
        return self.answers.pop(type(event), [])

    def copies_of(self, rank: int, step: int) -> tuple[int, ...]:
        return (rank, step)

    def overview(self, now_s: float) -> Overview:
        raise AssertionError("a shell does not look")


class Recorder:
    """Effects that are only written down."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.on_kill: Callable[[], None] = lambda: None

    def record(self, record: Record, *, shown: bool = True) -> None:
        self.done.append(("record", record.event, record.fields, shown))

    def spawn(self, order: do.Spawn, heritage: Heritage) -> None:
        self.done.append(("spawn", order.rank, order.incarnation, heritage))

    def probe(self, order: do.Probe) -> list[int]:
        self.done.append(("probe", order))
        return [1]

    def reclaim(self, order: do.Reclaim) -> None:
        self.done.append(("reclaim", order))

    def kill(self, rank: int, incarnation: int, why: str) -> None:
        self.done.append(("kill", rank, incarnation))
        self.on_kill()

    def dismiss(self, node: int, why: str) -> None:
        self.done.append(("dismiss", node, why))

    def peers(self, guardians: Mapping[int, int | None]) -> None:
        self.done.append(("peers", guardians))

    def keepers(self, generation: int, keepers: Mapping[int, int], steps: tuple[int, ...]) -> None:
        self.done.append(("keepers", generation, keepers, steps))

    def copy_order(self, node: int, order: nodes.CopyOrder) -> bool:
        self.done.append(("copy_order", node, order))
        return True

    def cut(self, rank: int, incarnation: int, fault: m.ChaosSpec) -> None:
        self.done.append(("cut", rank, incarnation, fault))

    def fall(self) -> None:
        self.done.append(("fall",))

    def inspect(self) -> None:
        self.done.append(("inspect",))

    def send(self, rank: int, incarnation: int, message: m.ToWorker) -> None:
        self.done.append(("send", rank, incarnation, message))

    def send_all(self, members: Iterable[tuple[int, int]], message: m.ToWorker) -> None:
        for rank, incarnation in members:
            self.send(rank, incarnation, message)

    def metrics(self, rank: int, step: int, log: Mapping[str, float]) -> None:
        self.done.append(("metrics", rank, step, dict(log)))

    def trace(self, rank: int, step: int, record: bytes) -> None:
        self.done.append(("trace", rank, step, record))

    def digests(self, rank: int, digests: Mapping[str, str]) -> None:
        self.done.append(("digests", rank, dict(digests)))

    def end(self, end: do.End) -> None:
        self.done.append(("end", end.exit_code))


class FakeTimer:
    def __init__(self, when_s: float, fire: Callable[[], None]) -> None:
        self.when_s = when_s
        self.fire = fire
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def fault(index: int, rank: int, step: int, **more: Any) -> m.ChaosSpec:
    text = f"kill:rank={rank},step={step}"
    return m.ChaosSpec(index=index, text=text, kind="kill", rank=rank, step=step, at="backward")


class Case:
    def __init__(self, *faults: m.ChaosSpec) -> None:
        self.core = ScriptedCore()
        self.effects = Recorder()
        self.timers: list[FakeTimer] = []
        self.now_s = 100.0
        self.shell = CoordinatorShell(
            self.core, self.effects, faults, self.call_at, lambda: self.now_s
        )

    def call_at(self, when_s: float, fire: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(when_s, fire))
        return self.timers[-1]

    def armed(self) -> list[float]:
        return [timer.when_s for timer in self.timers if not timer.cancelled]

    def act(self, *todo: do.Action) -> list[tuple[Any, ...]]:
        """Have the core ask for `todo`; returns what was done."""
        before = len(self.effects.done)
        self.core.answers[ev.Waiting] = list(todo)
        self.shell.message(0, 1, m.Wait())
        return self.effects.done[before:]

    def heritage(self, rank: int) -> Heritage:
        ((_, _, _, heritage),) = self.act(
            do.Spawn(rank=rank, incarnation=9, generation=0, joiner=True)
        )
        assert isinstance(heritage, Heritage)
        return heritage

    def sent(self, *todo: do.Action) -> list[tuple[Any, ...]]:
        return [done[1:] for done in self.act(*todo) if done[0] == "send"]


CAUSE = Cause(kind=CauseKind.SIGNAL, text="killed", signal=9, detail="last output")


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (m.Hello(pid=7, t=1.0), ev.Started(rank=1, incarnation=2, pid=7)),
        (
            m.Commit(generation=3, step=4, t=5.0, log={}, record=None),
            ev.Committed(rank=1, incarnation=2, generation=3, step=4, at_s=5.0),
        ),
        (
            m.Protect(shard="s", manifest="m", digests={"w": "d"}, rng_key=b"k"),
            ev.Protected(rank=1, incarnation=2, shard="s", manifest="m", digests={"w": "d"}),
        ),
        (
            m.Fault(generation=3, step=4, cause=CAUSE),
            ev.Faulted(rank=1, incarnation=2, generation=3, step=4, cause=CAUSE),
        ),
        (m.Wait(), ev.Waiting(rank=1, incarnation=2)),
        (
            m.Park(generation=3, holding=Holding(committed=4), rehearsed_passes=2),
            ev.Parked(
                rank=1,
                incarnation=2,
                generation=3,
                holding=Holding(committed=4),
                rehearsed_passes=2,
            ),
        ),
        (m.Built(generation=3), ev.Regrouped(rank=1, incarnation=2, generation=3)),
        (
            m.Receipt(
                generation=3,
                ok=False,
                t=1.0,
                text="differs",
                nbytes=6,
                sources=(0, 2),
                digest="ab",
            ),
            ev.Restored(
                rank=1,
                incarnation=2,
                generation=3,
                ok=False,
                text="differs",
                nbytes=6,
                sources=(0, 2),
                digest="ab",
                at_s=1.0,
            ),
        ),
        (
            m.Close(generation=3, step=4),
            ev.Closing(rank=1, incarnation=2, generation=3, step=4),
        ),
        (m.Finish(digests={}), ev.Finished(rank=1, incarnation=2)),
        (
            m.Refuse(text="no", exit_code=3),
            ev.Refused(rank=1, incarnation=2, text="no", exit_code=3),
        ),
    ],
)
def test_what_a_worker_says_becomes_an_event(message: m.FromWorker, event: ev.Event) -> None:
    case = Case()
    case.shell.message(1, 2, message)
    assert case.core.seen == [event]


def test_what_the_agent_says_becomes_an_event() -> None:
    case = Case()
    case.shell.start()
    case.shell.stop_asked(15)
    case.shell.died(1, 2, CAUSE)
    case.shell.died(0, 1, CAUSE, before_kill=True)
    assert case.core.seen == [
        ev.JobStarted(),
        ev.StopAsked(signal=15),
        ev.Died(rank=1, incarnation=2, cause=CAUSE),
        ev.Died(rank=0, incarnation=1, cause=CAUSE, before_kill=True),
    ]


def test_actions_are_carried_out_in_order() -> None:
    to = ((0, 1), (1, 2))
    done = Case().act(
        do.Record(record=Record(event="step", fields={"step": 1})),
        do.Kill(rank=1, incarnation=1, why="late"),
        do.SendStop(generation=3, to=to),
        do.SendPosition(rank=1, incarnation=2, step=5),
        do.SendRegroup(generation=4, plan=PLAN, to=to),
        do.SendGo(to=to[:1]),
        do.SendClosed(to=to[:1]),
        do.SendBye(to=to[:1]),
        do.End(exit_code=3),
    )
    keep, fetch = PLAN.ranks
    assert done == [
        ("record", "step", {"step": 1}, True),
        ("kill", 1, 1),
        ("send", 0, 1, m.Stop(generation=3)),
        ("send", 1, 2, m.Stop(generation=3)),
        ("send", 1, 2, m.Position(step=5)),
        ("send", 0, 1, m.Regroup(generation=4, step=5, plan=keep, capsule=None, groups=())),
        ("send", 1, 2, m.Regroup(generation=4, step=5, plan=fetch, capsule=None, groups=())),
        ("send", 0, 1, m.Go()),
        ("send", 0, 1, m.Closed()),
        ("send", 0, 1, m.Bye()),
        ("end", 3),
    ]


def test_nothing_is_heeded_after_the_end() -> None:
    case = Case()
    case.core.next_deadline_s = 200.0
    case.act(do.End(exit_code=0))
    case.shell.message(0, 1, m.Wait())
    case.shell.died(0, 1, CAUSE)
    assert case.core.seen == [ev.Waiting(rank=0, incarnation=1)]
    assert case.armed() == []


def test_one_event_is_finished_before_the_next_begins() -> None:
    case = Case()
    case.effects.on_kill = lambda: case.shell.died(1, 1, CAUSE)
    case.core.answers[ev.Died] = [do.SendGo(to=((0, 1),))]
    done = case.act(do.Kill(rank=1, incarnation=1, why=""), do.SendBye(to=((0, 1),)))
    assert done == [("kill", 1, 1), ("send", 0, 1, m.Bye()), ("send", 0, 1, m.Go())]


class TestTimer:
    def test_it_follows_the_next_deadline(self) -> None:
        case = Case()
        case.shell.start()
        assert case.armed() == []
        case.core.next_deadline_s = 150.0
        case.act()
        case.act()
        assert case.armed() == [150.0]
        assert len(case.timers) == 1
        case.core.next_deadline_s = 120.0
        case.act()
        assert case.armed() == [120.0]
        case.core.next_deadline_s = None
        case.act()
        assert case.armed() == []

    def test_it_ticks(self) -> None:
        case = Case()
        case.core.next_deadline_s = 150.0
        case.act()
        case.now_s = 150.0
        case.core.next_deadline_s = 170.0
        case.timers[0].fire()
        assert case.core.seen[-1] == ev.Tick()
        assert case.timers[-1].when_s == 170.0

    def test_a_deadline_that_is_not_moved_does_not_spin(self) -> None:
        case = Case()
        case.core.next_deadline_s = 90.0
        case.act()
        case.timers[0].fire()
        assert len(case.timers) == 2
        assert all(timer.when_s > case.now_s for timer in case.timers)


class TestHeritage:
    def test_a_first_incarnation_has_none(self) -> None:
        assert Case().heritage(0) == Heritage(rng_key=None, once={}, faults=())

    def test_key_and_results_are_its_ranks_own(self) -> None:
        case = Case()
        for rank in (0, 1):
            protect = m.Protect(shard="", manifest="", digests={}, rng_key=b"key %d" % rank)
            case.shell.message(rank, 1, protect)
            case.shell.message(rank, 1, m.Once(key="k", value=b"value %d" % rank))
        heritage = case.heritage(1)
        expected = Heritage(rng_key=b"key 1", once={"k": b"value 1"}, faults=())
        assert dataclasses.replace(heritage, kept=()) == expected
        assert [type(said) for _, said in heritage.kept] == [m.Protect]  # the spec has the other

    def test_who_can_not_try_whether_it_reaches_others_is_not_waited_for(self) -> None:
        case = Case()
        case.act(do.Probe(turn=3, pairs=((1, 2), (2, 1)), within_s=4.0))
        assert case.core.seen[-1] == ev.Probed(node=2, turn=3, closed={})
        case.shell.probed(1, 3, {2: "shut"})
        assert case.core.seen[-1] == ev.Probed(node=1, turn=3, closed={2: "shut"})

    def test_what_other_nodes_keep_of_a_lost_one_is_taken_in_before_the_core_goes_on(self) -> None:
        case = Case()
        case.act(do.Reclaim(turn=3, ranks=(1,), nodes=(0, 2)))
        assert ("reclaim", do.Reclaim(turn=3, ranks=(1,), nodes=(0, 2))) in case.effects.done
        kept: dict[int, tuple[tuple[int, m.Keepsake], ...]]
        kept = {1: ((4, m.Once(key="k", value=b"v")),)}
        case.shell.reclaimed(2, nodes.Reclaimed(turn=3, kept=kept))
        assert case.core.seen[-1] == ev.Reclaimed(node=2, turn=3)
        assert case.heritage(1).once == {"k": b"v"}

    def test_a_tape_is_its_ranks_until_it_begins_anew(self) -> None:
        def say(incarnation: int, key: str, value: bytes) -> None:
            told = m.Told(key=key, value=value)
            case.shell.message(1, incarnation, m.Tape(items=(told,)))

        def begin(incarnation: int) -> None:
            case.act(do.Spawn(rank=1, incarnation=incarnation, generation=0, joiner=False))

        case = Case()
        begin(1)
        say(1, "a", b"1")
        say(1, "b", b"2")
        say(1, "a", b"3")
        kept = (m.Told(key="a", value=b"3"), m.Told(key="b", value=b"2"))
        assert case.heritage(1).tape == kept
        assert case.heritage(1).tape == kept  # a joiner takes nothing away
        assert case.heritage(0).tape == ()
        begin(3)
        say(1, "late", b"")
        assert case.heritage(1).tape == ()

    def test_a_fault_that_fired_is_not_given_again(self) -> None:
        mine, later, other = fault(0, 1, 5), fault(1, 1, 6), fault(2, 0, 5)
        case = Case(mine, later, other)
        assert case.heritage(1).faults == (mine, later)
        case.shell.message(1, 1, m.Fired(index=0, t=99.5))
        case.shell.message(1, 1, m.Fired(index=0, t=99.6))
        assert case.heritage(1).faults == (later,)
        fields = {"index": 0, "text": mine.text, "rank": 1, "step": 5, "fired_t": 99.5}
        records = [done for done in case.effects.done if done[0] == "record"]
        assert records == [("record", "fault_fired", fields, True)]


class TestCapsules:
    REGROUP = do.SendRegroup(generation=4, plan=PLAN, to=((0, 1), (1, 2)))

    def given(self, *steps: int) -> bytes | None:
        """The capsule of step 5 that rank 1 is given after capsules of `steps` came. Only a new
        process goes back."""
        case = Case()
        incarnation = 1
        for before, step in pairwise((0, *steps)):
            incarnation += step < before
            case.shell.message(1, incarnation, m.Capsule(step=step, payload=b"%d" % step))
            case.shell.message(0, 1, m.Capsule(step=step, payload=b"of rank 0"))
        (keep, fetch) = case.sent(self.REGROUP)
        assert keep[2].capsule is None
        capsule = fetch[2].capsule
        assert capsule is None or isinstance(capsule, bytes)
        return capsule

    def test_the_plans_step_is_given(self) -> None:
        assert self.given(4, 5) == b"5"
        assert self.given(4, 5, 6) == b"5"

    def test_an_older_one_is_given_where_the_plans_is_missing(self) -> None:
        """It still says which fence the job has agreed on."""
        assert self.given(3, 4) == b"4"
        assert self.given(4, 6) == b"4"

    def test_as_many_are_kept_as_a_recovery_can_ask_for(self) -> None:
        """A rank is at most two steps ahead of the only survivor, where a replacement begins with
        what was kept of the step before."""
        assert self.given(5, 6, 7) == b"5"
        assert self.given(5, 6, 7, 8) == b"5"
        assert self.given(5, 6, 7, 8, 9) is None

    def test_a_rank_that_went_back_has_no_newer_ones(self) -> None:
        assert self.given(4, 5, 6, 4) == b"4"
        assert self.given(5, 6, 7, 5) == b"5"

    def test_the_newest_of_one_step_counts(self) -> None:
        case = Case()
        for payload in (b"old", b"new"):
            case.shell.message(1, 1, m.Capsule(step=5, payload=payload))
        assert case.sent(self.REGROUP)[1][2].capsule == b"new"

    def test_what_was_kept_of_the_sections_after_a_step_comes_with_it(self) -> None:
        case = Case()
        for step, section in ((4, ""), (4, "a"), (5, ""), (5, "a"), (5, "b"), (5, "a")):
            payload = f"{step}{section}".encode()
            case.shell.message(1, 1, m.Capsule(step=step, section=section, payload=payload))
        keep, fetch = (sent[2] for sent in case.sent(self.REGROUP))
        assert (keep.kept, keep.sections) == ({}, 0)
        assert (fetch.capsule, fetch.kept) == (b"5", {"a": b"5a", "b": b"5b"})
        position = case.sent(do.SendPosition(rank=1, incarnation=2, step=5))[0][2]
        assert (position.capsule, position.kept) == (b"4", {"a": b"4a"})

    def test_a_step_that_is_done_again_has_no_sections_yet(self) -> None:
        case = Case()
        for incarnation, section in ((1, ""), (1, "a"), (2, "")):
            capsule = m.Capsule(step=5, section=section, payload=b"x")
            case.shell.message(1, incarnation, capsule)
        assert case.sent(self.REGROUP)[1][2].kept == {}


class TestAddresses:
    def put(self, case: Case, generation: int, member: tuple[int, int], group: str = "g") -> None:
        rank, incarnation = member
        entry = m.Address(
            generation=generation, group=group, rank=rank, size=2, payload=b"at %d" % rank
        )
        case.shell.message(rank, incarnation, entry)

    def test_all_get_all_when_all_are_there(self) -> None:
        case = Case()
        self.put(case, 4, (1, 2))
        self.put(case, 4, (1, 2), "another")
        assert case.effects.done == []
        self.put(case, 4, (0, 1))
        answer = m.Addresses(generation=4, group="g", entries={0: b"at 0", 1: b"at 1"})
        assert sorted(done[:3] for done in case.effects.done) == [("send", 0, 1), ("send", 1, 2)]
        assert {id(done[3]) for done in case.effects.done} == {id(case.effects.done[0][3])}
        assert case.effects.done[0][3] == answer

    @pytest.mark.parametrize(
        ("decision", "forgotten"),
        [
            (do.SendStop(generation=4, to=()), True),
            (do.SendStop(generation=3, to=()), False),
            (do.SendRegroup(generation=5, plan=PLAN, to=()), True),
            (do.SendRegroup(generation=4, plan=PLAN, to=()), False),
            (do.Spawn(rank=0, incarnation=2, generation=5, joiner=False), True),
            (do.Spawn(rank=0, incarnation=2, generation=4, joiner=True), False),
        ],
    )
    def test_an_old_generation_is_never_completed(
        self, decision: do.Action, forgotten: bool
    ) -> None:
        case = Case()
        self.put(case, 4, (1, 2))
        case.act(decision)
        self.put(case, 4, (0, 1))
        assert any(done[0] == "send" for done in case.effects.done) is not forgotten


def test_what_a_commit_carries_is_kept() -> None:
    case = Case()
    case.shell.message(
        1, 1, m.Commit(generation=0, step=3, t=1.0, log={3: {"loss": 0.5}}, record=b"r")
    )
    case.shell.message(1, 1, m.Commit(generation=0, step=4, t=1.0, log={}, record=None))
    case.shell.message(1, 1, m.Finish(digests={"w": "d"}))
    assert case.effects.done == [
        ("metrics", 1, 3, {"loss": 0.5}),
        ("trace", 1, 3, b"r"),
        ("digests", 1, {"w": "d"}),
    ]


def test_a_note_is_shown_once_a_key() -> None:
    case = Case()
    for rank in (0, 1):
        case.shell.message(rank, 1, m.Note(key="k", text="mind this"))
    assert case.effects.done == [
        ("record", "note", {"key": "k", "text": "mind this", "rank": 0}, True),
        ("record", "note", {"key": "k", "text": "mind this", "rank": 1}, False),
    ]


class TestCauses:
    RAISED = Cause(
        kind=CauseKind.EXCEPTION, text="ValueError: no", detail="Traceback", signature="V"
    )
    EXIT = Cause(kind=CauseKind.EXIT, text="exited with code 1", exit_code=1, detail="output")

    def test_the_traceback_is_the_cause_of_an_exit(self) -> None:
        cause = final_cause(self.EXIT, self.RAISED, None)
        assert cause == Cause(
            kind=CauseKind.EXCEPTION,
            text="ValueError: no",
            detail="Traceback",
            signature="V",
            exit_code=1,
        )

    def test_and_detail_to_a_signal(self) -> None:
        cause = final_cause(CAUSE, self.RAISED, None)
        assert (cause.kind, cause.text, cause.detail) == (CauseKind.SIGNAL, "killed", "Traceback")

    def test_without_either_it_is_what_was_seen(self) -> None:
        assert final_cause(CAUSE, None, None) is CAUSE

    def died(self, *said: m.FromWorker) -> Cause:
        case = Case(fault(0, 1, 5))
        for message in said:
            case.shell.message(1, 1, message)
        case.shell.died(1, 1, self.EXIT)
        event = case.core.seen[-1]
        assert isinstance(event, ev.Died)
        return event.cause

    FIRED = m.Fired(index=0, t=99.5)

    @staticmethod
    def commit(step: int) -> m.Commit:
        return m.Commit(generation=0, step=step, t=1.0, log={}, record=None)

    def test_a_death_after_a_fault_on_purpose_is_its_work(self) -> None:
        for said in ([self.FIRED], [self.FIRED, self.commit(5)]):
            cause = self.died(*said)
            assert (cause.fault, cause.at_s) == ("kill:rank=1,step=5", 99.5)

    def test_a_death_long_after_it_is_not(self) -> None:
        assert self.died(self.FIRED, self.commit(5), self.commit(6)).fault is None

    def test_raised_is_used_once(self) -> None:
        assert self.died(m.Raised(cause=self.RAISED)).text == "ValueError: no"
        assert self.died().text == "exited with code 1"

    def test_a_fault_on_purpose_is_the_cause_of_the_failed_attempt_alone(self) -> None:
        case = Case(fault(0, 1, 5))
        case.shell.message(1, 1, self.FIRED)
        case.shell.message(1, 1, m.Fault(generation=0, step=5, cause=self.RAISED))
        case.shell.died(1, 1, self.EXIT)
        faulted, died = case.core.seen
        assert isinstance(faulted, ev.Faulted)
        assert isinstance(died, ev.Died)
        assert (faulted.cause.fault, faulted.cause.at_s) == ("kill:rank=1,step=5", 99.5)
        assert died.cause.fault is None


def test_silence_goes_to_the_core_with_the_fault_that_had_fired() -> None:
    case = Case(fault(0, rank=1, step=3))
    case.core.answers[ev.Silent] = [do.Inspect()]
    case.shell.message(1, 1, m.Fired(index=0, t=77.0))
    evidence = tuple(
        Evidence(rank=rank, incarnation=1, stance=Stance.WORKING, where="", since_s=90.0)
        for rank in (0, 1)
    )
    case.shell.silent(evidence)
    assert case.effects.done[-1] == ("inspect",)
    case.shell.inspected(ev.Inspected(evidence=evidence, stacks=("s",), file="f"))
    for event in case.core.seen[-2:]:
        assert isinstance(event, (ev.Silent, ev.Inspected))
        assert [(each.fault, each.since_s) for each in event.evidence] == [
            (None, 90.0),
            ("kill:rank=1,step=3", 77.0),
        ]


# -------------------------------------------------------------------- nodes


def test_a_node_is_told_to_the_core_and_dismissed_for_it() -> None:
    case = Case()
    case.shell.node_joined(3, "host", "rack", 2)
    assert case.core.seen == [ev.NodeJoined(node=3, host="host", domain="rack", ranks=2)]
    assert case.act(do.Dismiss(node=3, why="lost")) == [("dismiss", 3, "lost")]


@pytest.mark.parametrize("kind", chaos.OF_NODES)
def test_a_fault_of_a_node_is_written_down_and_then_carried_out(kind: Any) -> None:
    spec = m.ChaosSpec(index=0, text=f"{kind}:...", kind=kind, rank=2, step=5, at="backward")
    case = Case(spec)
    case.shell.message(2, 1, m.Fired(index=0, t=50.0))
    assert [done[0] for done in case.effects.done] == ["record", "cut"]
    assert case.effects.done[1] == ("cut", 2, 1, spec)
    case.shell.node_lost(4, Cause(kind=CauseKind.NODE, text="closed"), [(2, 1), (3, 1)])
    (lost,) = case.core.seen
    assert isinstance(lost, ev.NodeLost)
    assert (lost.node, lost.cause.fault, lost.cause.at_s) == (4, spec.text, 50.0)
    assert case.heritage(2).faults == ()


@pytest.mark.parametrize(
    ("lasts_s", "at_s", "known"), [(0.0, 99.0, True), (3.0, 52.0, True), (3.0, 54.0, False)]
)
def test_a_network_is_cut_on_purpose_until_its_rank_commits_after_it(
    lasts_s: float, at_s: float, known: bool
) -> None:
    """The rank may commit steps before the network is gone."""
    text = "net:index=1,step=5"
    spec = m.ChaosSpec(
        index=0, text=text, kind="net", rank=2, step=5, at="backward", lasts_s=lasts_s
    )
    case = Case(spec)
    case.shell.message(2, 1, m.Fired(index=0, t=50.0))
    case.now_s = at_s
    case.shell.message(2, 1, m.Commit(generation=0, step=7, t=at_s, log={}, record=None))
    case.shell.node_lost(4, Cause(kind=CauseKind.NODE, text="closed"), [(2, 1)])
    lost = case.core.seen[-1]
    assert isinstance(lost, ev.NodeLost)
    assert lost.cause.fault == (text if known else None)


def test_a_fault_of_the_coordinator_is_written_down_and_happens_once() -> None:
    text = "coordinator:step=5"
    spec = m.ChaosSpec(index=0, text=text, kind="coordinator", rank=0, step=5, at="backward")
    case = Case(spec)
    case.shell.message(0, 1, m.Fired(index=0, t=50.0))
    assert [done[0] for done in case.effects.done] == ["record", "fall"]
    successor = Case(spec)
    successor.shell.resume(ev.Resumed(term=1), fired=[0])
    successor.shell.message(0, 1, m.Fired(index=0, t=50.0))  # the agent tells what it was told
    assert successor.effects.done == []
    assert successor.heritage(0).faults == ()


def test_what_was_not_written_is_written_before_anything_is_decided() -> None:
    """What is decided may say that it is written, and this coordinator may die then."""
    case = Case()
    step = Record(event="step", fields={"step": 1})
    case.core.answers[ev.NodeBack] = [do.Record(record=step)]
    commit = m.Commit(generation=0, step=1, t=0.0, log={}, record=b"kept")
    report = nodes.Report(
        term=0,
        node=0,
        slot=0,
        peers=(),
        members=(),
        ended=(),
        kept={},
        unwritten=(nodes.Said(rank=1, incarnation=1, message=commit),),
        copies=(),
    )
    case.shell.node_back("h", "", report)
    done = [each[0] for each in case.effects.done]
    assert done.index("trace") < done.index("record")
