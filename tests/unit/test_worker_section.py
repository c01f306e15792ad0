"""Sections, seen from one rank: what is kept and when, what a failed attempt leaves, and who
commits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from everstep.errors import UserError
from everstep.types import Decision
from everstep.wire import messages
from everstep.worker import codec, rng
from everstep.worker.kept import Done
from everstep.worker.mean import mean_over_ranks
from everstep.worker.own import MAX_BYTES, Own
from everstep.worker.place import Place, kept_before_steps
from everstep.worker.progress import Phase
from everstep.worker.recovery import Outcome
from everstep.worker.section import Sections
from everstep.worker.state import State

torch.set_num_threads(1)


def counts(tries: list[int], result: Callable[[], Any]) -> Callable[[], Any]:
    """A section that writes down that it was tried."""

    def section() -> Any:
        tries.append(1)
        return result()

    return section


class Rig:
    """A worker after step 3, whose fence and recovery the test has in hand."""

    def __init__(self) -> None:
        self.linear, self.norm = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
        self.net = torch.nn.Sequential(self.linear, self.norm)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.state = State({"model": self.net, "optimizer": self.optimizer})
        self.sent: list[Any] = []
        self.notes: list[str] = []
        self.fired: list[str] = []
        self.stood: tuple[Phase, int | None] = Phase.BETWEEN, None
        self.stood_at_fault: list[tuple[Phase, int | None]] = []
        self.parked: list[dict[str, Any]] = []
        self.outcomes: list[Outcome] = []
        self.at_fence: list[Callable[[], bool]] = []
        self.meetings = 0
        self.exceptions: list[BaseException] = []
        self.communicators: Any = SimpleNamespace(
            poisoned=False,
            touched=False,
            trace=[],
            tape=None,
            generation=0,
            before_launch=None,
            drain=lambda: None,
            hold=lambda _: setattr(self.communicators, "poisoned", True),
        )
        self.worker: Any = SimpleNamespace(
            spec=SimpleNamespace(rank=1, world_size=3),
            communicators=self.communicators,
            control=SimpleNamespace(send=self.sent.append),
            copies=SimpleNamespace(on=False),
            place=Place(),
            state=self.state,
            values={},
            log={},
            carry=False,
            committed=3,
            joining=False,
            base=0,
            faults=SimpleNamespace(fire=self._fire),
            phase=self._phase,
            hand_over=self._hand_over,
            seed=lambda *_: None,
            streams=lambda: None,
            restore_streams=lambda _: None,
            note=lambda key, text: self.notes.append(key),
            report_exception=lambda error, step: self.exceptions.append(error),
        )
        recovery = SimpleNamespace(run=self._recover, advanced=lambda: True, gradients=False)
        between = SimpleNamespace(at_section=lambda *_: None, after_section=lambda _: None)
        self.in_step = False
        self.sections = Sections(
            cast("Any", self.worker),
            cast("Any", recovery),
            cast("Any", between),
            lambda: self.in_step,
        )
        self.sections.fence = cast("Any", SimpleNamespace(meet=self._meet))

    def set(self, *, in_step: bool = False, protected: bool = True, alike: bool = True) -> Rig:
        """Where the next section is called, and whether peers call the same."""
        self.in_step = in_step
        self.worker.state = self.state if protected else None
        self.at_fence = [lambda: alike]
        return self

    def section(self, function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        return self.sections.make(function, **{"ranks": None, "undo": False, **how})

    def _phase(self, phase: Phase, step: int | None = None) -> None:
        self.stood = phase, step

    def _fire(self, place: str) -> None:
        self.fired.append(place)
        self.stood_at_fault.append(self.stood)

    def _hand_over(self, step: int, payload: bytes, section: str) -> None:
        self.sent.append(messages.Capsule(step=step, payload=payload, section=section))

    def _meet(self, number: int) -> bool:
        self.meetings += 1
        assert self.kept(), "what is kept is with the agent before the fence"
        return self.at_fence.pop(0)() if self.at_fence else True

    def breaks(self) -> bool:
        """The fence loses a peer."""
        self.communicators.poisoned = self.communicators.touched = True
        return True

    def _recover(self, *, settle: Any = None, **how: Any) -> Outcome:
        self.parked.append(how)
        outcome = self.outcomes.pop(0)
        if settle is not None and outcome.decision is not Decision.ADVANCE:
            settle()
        if outcome.decision is Decision.FETCH:
            self.worker.place.sections = outcome.sections
        self.communicators.poisoned = self.communicators.touched = False
        return outcome

    def kept(self) -> list[tuple[int, str, Any]]:
        """What went to the agent for a replacement: step, section, result."""
        found = []
        for message in self.sent:
            if isinstance(message, messages.Capsule):
                done = msgspec.msgpack.decode(message.payload, type=Done)
                found.append((message.step, message.section, codec.decode(done.result)))
            if isinstance(message, messages.Once):
                found.append((0, message.key, None))
        return found

    def commits(self) -> list[tuple[int, int]]:
        return [(m.step, m.sections) for m in self.sent if isinstance(m, messages.Commit)]


def keep(sections: int = 0) -> Outcome:
    return Outcome(decision=Decision.KEEP, step=3, sections=sections, capsule=None)


def advance() -> Outcome:
    return Outcome(decision=Decision.ADVANCE, step=3, sections=1, capsule=None)


# ---------------------------------------------------------------- committing


def test_it_commits_after_its_fence_and_each_has_its_place() -> None:
    rig = Rig()
    evaluate = rig.section(lambda x: x + 1)
    assert [evaluate(1), evaluate(2)] == [2, 3]
    assert rig.kept() == [
        (3, "section 1 of the last step", 2),
        (3, "section 2 of the last step", 3),
    ]
    assert rig.commits() == [(3, 1), (3, 2)]
    assert rig.fired == ["section", "section"]
    assert (rig.worker.place.sections, rig.worker.place.called) == (2, 2)


def test_before_the_first_step_it_is_kept_where_a_replacement_finds_it_early() -> None:
    rig = Rig()
    rig.worker.committed = 0
    rig.section(lambda: None)()
    once = next(message for message in rig.sent if isinstance(message, messages.Once))
    assert list(kept_before_steps({once.key: once.value, "f": b""})) == [
        "section 1 of the last step"
    ]


def test_an_exception_is_reported_once_and_the_attempt_leaves_no_trace() -> None:
    rig = Rig()
    rig.worker.values["n"], rig.net.training = 1, True
    tries: list[bool] = []

    def evaluate() -> int:
        tries.append(rig.net.training)
        rig.net.eval()
        rig.worker.values["n"] += 1
        rig.optimizer.param_groups[0]["lr"] = 5.0
        if len(tries) == 1:
            raise ValueError("once")
        rig.optimizer.param_groups[0]["lr"] = 0.1
        rig.net.train()
        return int(rig.worker.values["n"])

    rig.outcomes = [keep()]
    assert rig.section(evaluate)() == 2
    assert tries == [True, True]
    assert [str(error) for error in rig.exceptions] == ["once"]
    assert rig.parked == [{"torn": False, "can_advance": False, "in_section": True}]
    assert rig.optimizer.param_groups[0]["lr"] == 0.1
    assert rig.commits() == [(3, 1)]


def test_a_broken_collective_is_not_the_scripts_and_its_garbage_is_not_kept() -> None:
    rig = Rig()
    tries: list[int] = []

    def evaluate() -> int:
        tries.append(1)
        if len(tries) == 1:
            rig.breaks()
            raise ZeroDivisionError  # of what a poisoned collective gave
        return len(tries)

    rig.outcomes = [keep()]
    assert rig.section(evaluate)() == 2
    assert not rig.exceptions
    assert [result for *_, result in rig.kept()] == [2]
    assert rig.meetings == 1


def test_who_stood_in_the_broken_fence_commits_by_itself_if_a_peer_has_passed() -> None:
    rig = Rig()
    rig.at_fence, rig.outcomes = [rig.breaks], [advance()]
    tries: list[int] = []
    assert rig.section(counts(tries, lambda: "own"))() == "own"
    assert rig.parked == [{"torn": False, "can_advance": True, "in_section": True}]
    assert (rig.commits(), tries) == ([(3, 1)], [1])


def test_who_stood_in_the_broken_fence_does_it_again_if_nobody_has_passed() -> None:
    rig = Rig()
    rig.at_fence, rig.outcomes = [rig.breaks], [keep()]
    tries: list[int] = []
    assert rig.section(counts(tries, lambda: len(tries)))() == 2
    assert rig.commits() == [(3, 1)]


def test_a_stop_before_it_began_is_met_first() -> None:
    rig = Rig()
    rig.communicators.poisoned, rig.outcomes = True, [keep()]
    assert rig.section(lambda: 5)() == 5
    assert rig.parked == [{"torn": False}]


def test_written_parameters_make_a_failed_attempt_torn_unless_there_is_a_copy() -> None:
    for undo, torn in ((False, True), (True, False)):
        rig = Rig()
        before = rig.linear.weight.detach().clone()
        tries: list[int] = []

        def swap(rig: Rig = rig, tries: list[int] = tries) -> None:
            tries.append(1)
            if len(tries) == 1:
                with torch.no_grad():
                    rig.linear.weight.zero_()
                raise ValueError

        rig.outcomes = [keep()]
        rig.section(swap, undo=undo)()
        assert rig.parked[0]["torn"] is torn
        assert torch.equal(rig.linear.weight, before) is undo


# ---------------------------------------------------------------- coming back


def replacement(*results: Any, called: int = 0) -> Rig:
    """A rank whose predecessor had done some sections after step 3."""
    donor = Rig()
    donor.worker.values, donor.worker.log = {"n": 7}, {3: {"loss": 0.5}}
    section = donor.section(lambda value: value)
    for result in results:
        donor.worker.values["n"] += 1
        section(result)
    rig = Rig()
    rig.worker.place.sections = len(results)
    rig.worker.place.kept = {
        message.section: message.payload
        for message in donor.sent
        if isinstance(message, messages.Capsule)
    }
    return rig


def test_what_is_done_is_not_done_again() -> None:
    rig = replacement(torch.tensor([1.5]), "second")
    tries: list[int] = []
    section = rig.section(counts(tries, lambda: "third"))
    assert section().tolist() == [1.5]
    assert rig.worker.values == {"n": 8}
    assert section() == "second"
    assert rig.worker.values == {"n": 9}
    assert rig.worker.log == {3: {"loss": 0.5}}
    assert (rig.sent, tries) == ([], [])
    assert section() == "third"
    assert rig.commits() == [(3, 3)]


def test_what_came_after_the_draw_is_found_from_there() -> None:
    donor = Rig()
    section = donor.section(lambda value: value)
    section("tail")
    donor.worker.place.draw()
    section("top")
    rig = Rig()
    rig.worker.joining = True
    rig.worker.place.kept = {m.section: m.payload for m in donor.sent if hasattr(m, "section")}
    rig.worker.place.draw()
    assert rig.section(lambda: "never")() == "top"


def test_a_replacement_that_takes_another_way_is_refused() -> None:
    rig = replacement("first")
    rig.worker.place.kept = {}
    with pytest.raises(UserError, match="had called none before"):
        rig.section(lambda: None)()
    with pytest.raises(UserError, match="after 0 of the 1 sections"):
        replacement("first").worker.place.check_all_called(4)


def test_a_rank_that_was_overtaken_takes_what_it_had_kept() -> None:
    rig = Rig()
    kept = replacement("from before").worker.place.kept
    rig.at_fence = [rig.breaks]
    rig.outcomes = [
        Outcome(decision=Decision.FETCH, step=3, sections=1, capsule=None, kept=kept),
    ]
    assert rig.section(lambda: "now")() == "from before"
    assert rig.commits() == []


# ---------------------------------------------------------------- of some ranks only


def test_only_the_named_ranks_do_it_and_only_once() -> None:
    rig = Rig()
    assert rig.section(lambda: "mine", ranks=[1])() == "mine"
    assert rig.section(lambda: "not mine", ranks=[0, 2])() is None
    assert rig.kept() == [(3, "alone 1 of the last step", "mine")]
    assert (rig.meetings, rig.commits()) == (0, [])
    again = Rig()
    again.worker.place.kept = {m.section: m.payload for m in rig.sent}
    assert again.section(lambda: "never", ranks=[1])() == "mine"


@pytest.mark.parametrize("ranks", [None, [1]])
def test_who_fails_at_its_end_stands_in_a_section_after_the_step(ranks: list[int] | None) -> None:
    rig = Rig()
    rig.section(lambda: 1, ranks=ranks)()
    assert rig.stood_at_fault == [(Phase.SECTION, 3)]
    assert rig.stood[0] is Phase.BETWEEN


def test_a_collective_in_it_is_refused() -> None:
    rig = Rig()
    section = rig.section(lambda: rig.communicators.before_launch(0), ranks=[1])
    with pytest.raises(UserError, match=r"called a collective, and only ranks \[1\]"):
        section()
    assert rig.communicators.before_launch is None


# ---------------------------------------------------------------- what is refused


def _change(rig: Rig) -> None:
    with torch.no_grad():
        rig.linear.bias.add_(1)


REFUSED: dict[str, tuple[Callable[[Rig], Any], str]] = {
    "in a step": (lambda rig: rig.set(in_step=True).section(lambda: 1)(), "inside a step"),
    "in a section": (
        lambda rig: rig.section(lambda: rig.section(lambda: 1)())(),
        "called inside the section",
    ),
    "before protect": (
        lambda rig: rig.set(protected=False).section(lambda: 1)(),
        "before run.protect",
    ),
    "an iterator": (lambda rig: rig.section(lambda data: 1)(iter([1])), "was given an iterator"),
    "what is no data": (lambda rig: rig.section(lambda: print)(), "only plain data"),
    "too much": (lambda rig: rig.section(lambda: torch.zeros(1 << 18))(), "1.0 MiB, and 1 MiB"),
    "changed state": (
        lambda rig: rig.section(lambda: _change(rig))(),
        r"changes model/0.bias.*undo=True",
    ),
    "changed state, alone": (
        lambda rig: rig.section(lambda: _change(rig), ranks=[1])(),
        r"changes model/0.bias",
    ),
    "another section on another rank": (
        lambda rig: rig.set(alike=False).section(lambda: 1)(),
        "another rank is in another one",
    ),
    "no rank": (lambda rig: rig.section(lambda: 1, ranks=[]), "name at least one rank"),
    "a rank that is not there": (lambda rig: rig.section(lambda: 1, ranks=[3]), "of 0 to 2"),
    "undo of some ranks": (
        lambda rig: rig.section(lambda: 1, ranks=[0], undo=True),
        "nothing to undo",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused(case: str) -> None:
    act, says = REFUSED[case]
    rig = Rig()
    with pytest.raises(UserError, match=says):
        act(rig)
    assert rig.commits() == []
    assert rig.worker.place.inside == ""


def test_a_section_that_borrows_the_weights_is_told_and_has_a_copy_from_then_on() -> None:
    rig = Rig()

    def borrow() -> None:
        kept = rig.linear.weight.detach().clone()
        with torch.no_grad():
            rig.linear.weight.zero_()
            rig.linear.weight.copy_(kept)

    section = rig.section(borrow)
    section()
    section()
    assert len(rig.notes) == 1
    assert "changed-in-section" in rig.notes[0]


def test_buffers_of_the_rank_alone_may_change_and_are_kept() -> None:
    rig = Rig()
    rig.state.changing = ("model/1.running_mean",)
    mean = rig.norm.running_mean
    assert mean is not None

    def forward() -> None:
        mean.fill_(4.0)

    rig.section(forward)()
    done = msgspec.msgpack.decode(rig.sent[0].payload, type=Done)
    assert list(done.buffers) == ["model/1.running_mean"]
    again = Rig()
    again.state.changing = rig.state.changing
    again.worker.place.sections = 1
    again.worker.place.kept = {rig.sent[0].section: rig.sent[0].payload}
    again.section(forward)()
    assert again.norm.running_mean is not None
    assert again.norm.running_mean.tolist() == [4.0, 4.0]


# ---------------------------------------------------------------- place, own, streams, mean


def test_what_is_done_once_is_found_again_wherever_a_script_comes_by() -> None:
    place = Place()
    first = [place.once_key("f", 0, inside=False) for _ in range(2)]
    assert len(set(first)) == 2
    place.next_step()
    place.draw()
    place.new_attempt()
    inside = place.once_key("f", 3, inside=True)
    place.new_attempt()
    assert place.once_key("f", 3, inside=True) == inside
    assert place.once_key("f", 3, inside=True) != inside
    later = Place()  # of a replacement, which had not called the sections before the draw
    place.called = later.called = 0
    later.draw()
    assert later.once_key("f", 3, inside=True) == inside


class Cursor:
    at: Any = 0

    def state_dict(self) -> Any:
        return self.at

    def load_state_dict(self, state: Any) -> None:
        self.at = state


def test_objects_of_the_rank_alone_come_back() -> None:
    one, two = Cursor(), Cursor()
    own = Own({"one": one, "two": two})
    one.at, two.at = 5, [1, 2]
    values = own.values()
    one.at, two.at = 6, None
    own.load(values)
    assert (one.at, two.at) == (5, [1, 2])
    assert Own([one]).names == ["local.0"]
    assert not Own()


def test_objects_of_the_rank_alone_are_small_and_have_a_state() -> None:
    large = Cursor()
    large.at = bytes(MAX_BYTES + 1)
    with pytest.raises(UserError, match=r"state of large is 1.0 MiB, and 1 MiB is the most"):
        Own({"large": large})
    with pytest.raises(UserError, match="thing is a object, which has no state_dict"):
        Own({"thing": object()})
    with pytest.raises(UserError, match="by name or in a list, not a Cursor"):
        Own(cast("Any", Cursor()))


@pytest.fixture
def generators() -> Iterator[None]:
    saved = rng.states()
    yield
    rng.restore(saved)


@pytest.mark.usefixtures("generators")
def test_carried_streams_go_on_where_they_were() -> None:
    import numpy

    def draw() -> tuple[Any, ...]:
        return random.gauss(), torch.randn(2).tolist(), numpy.random.standard_normal(3).tolist()

    random.seed(3)
    draw()  # leaves half of a pair of normal numbers in the generators
    states = rng.states()
    drawn = draw()
    rng.restore(states)
    assert draw() == drawn
    assert rng.carries("carry")
    assert not rng.carries("keyed")
    with pytest.raises(UserError, match='"keyed"'):
        rng.carries("kept")


def test_a_mean_is_of_few_real_values() -> None:
    for value, says in (
        (torch.zeros(2, 2), "at most one dimension"),
        (torch.zeros(1025), "1024 elements"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        ("1", "not a str"),
    ):
        with pytest.raises(UserError, match=says):
            mean_over_ranks(value, None)


def test_a_section_that_changes_state_is_refused_where_copies_would_not_know() -> None:
    rig = Rig()
    rig.worker.copies.on = True
    section = rig.sections.make(lambda: None, ranks=None, undo=True)
    with pytest.raises(UserError, match="--copies"):
        section()
