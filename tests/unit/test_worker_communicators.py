"""The registry of communicators: building, stopping and taking down, with fake inner groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.fakegroups import FakeInner, FakeWorld

from everstep.errors import EverstepError
from everstep.worker.communicators import Answer, Communicators, QuiesceTimeout, tensors_of
from everstep.worker.control import Stopped
from everstep.worker.groups import OuterGroup

WAIT_S = 20


class SlowWorld(FakeWorld):
    """Builders wait for `go` and may fail; they announce themselves as gloo's do."""

    def __init__(self, *, announce: bool = True) -> None:
        super().__init__(solo=True)
        self.building = threading.Semaphore(0)
        self.go = threading.Event()
        self.error: Exception | None = None
        self.announce = announce
        self.ended = threading.Semaphore(0)
        self.main: threading.Thread | None = None
        self.raised: list[BaseException] = []

    def make(self, group: OuterGroup, generation: int) -> FakeInner:
        inner = FakeInner(group, generation)
        self.made.append(inner)
        try:
            if self.announce:
                self.communicators.being_built(generation, inner)
            self.building.release()
            assert self.go.wait(WAIT_S)
            if self.error is not None:
                raise self.error
        finally:
            self.ended.release()
        return inner

    def rebuild(self, generation: int) -> None:
        """On a thread, as the main thread would; returns when all builders are under way."""

        def run() -> None:
            try:
                self.communicators.rebuild(generation)
            except (Stopped, RuntimeError) as error:
                self.raised.append(error)

        self.main = threading.Thread(target=run)
        self.main.start()
        for _ in self.communicators.groups:
            assert self.building.acquire(timeout=WAIT_S)

    def join(self) -> list[BaseException]:
        assert self.main is not None
        self.main.join(WAIT_S)
        assert not self.main.is_alive(), "the main thread is not free"
        return self.raised

    def let_go(self) -> None:
        self.go.set()
        for _ in self.made:
            assert self.ended.acquire(timeout=WAIT_S)
        for thread in threading.enumerate():
            if thread.name.startswith(("everstep-build", "everstep-reaper")):
                thread.join(WAIT_S)


@pytest.fixture
def slow() -> SlowWorld:
    world = SlowWorld()
    world.group("world")
    world.group("other")
    return world


def test_a_rebuild_builds_every_group_and_ends_solo_and_poison(slow: SlowWorld) -> None:
    communicators = slow.communicators
    communicators.stop(0)
    assert communicators.poisoned
    slow.rebuild(1)
    slow.go.set()
    assert slow.join() == []
    assert (communicators.solo, communicators.poisoned, communicators.error) == (False, False, None)
    assert [group.inner for group in communicators.groups] == sorted(
        slow.made,
        key=lambda inner: inner.group.group_name == "other",  # type: ignore[union-attr]
    )
    assert [inner.destroyed for inner in slow.made] == [0, 0]


def test_a_stop_before_the_build(slow: SlowWorld) -> None:
    slow.communicators.stop(1)
    with pytest.raises(Stopped):
        slow.communicators.rebuild(1)
    assert slow.made == []
    assert slow.communicators.poisoned


@pytest.mark.parametrize("newer", [1, 2, 9])
def test_a_stop_during_the_build_frees_the_main_thread_and_takes_down_once(
    slow: SlowWorld, newer: int
) -> None:
    slow.communicators.stop(0)
    slow.rebuild(1)
    slow.communicators.stop(newer)
    (error,) = slow.join()  # the builders are still stuck in gloo's constructor
    assert isinstance(error, Stopped)
    assert error.generation == newer
    assert slow.communicators.poisoned
    assert [inner.aborted for inner in slow.made] == [1, 1]
    slow.let_go()
    assert [inner.destroyed for inner in slow.made] == [1, 1]
    assert all(group.inner is None for group in slow.communicators.groups)


def test_an_older_stop_during_the_build_is_ignored(slow: SlowWorld) -> None:
    slow.communicators.stop(0)
    slow.rebuild(5)
    slow.communicators.stop(4)
    slow.go.set()
    assert slow.join() == []
    assert not slow.communicators.poisoned
    assert [inner.aborted for inner in slow.made] == [0, 0]


def test_a_builder_that_announces_itself_after_the_stop_ends_there() -> None:
    world = SlowWorld()
    world.group()
    gate, stopped = threading.Event(), threading.Event()
    made = world.communicators.being_built

    def late(generation: int, inner: Any) -> None:
        gate.set()
        assert stopped.wait(WAIT_S)
        made(generation, inner)

    world.communicators.being_built = late  # type: ignore[method-assign]
    world.communicators.stop(0)
    world.main = threading.Thread(
        target=lambda: _expect(Stopped, lambda: world.communicators.rebuild(1), world)
    )
    world.main.start()
    assert gate.wait(WAIT_S)
    world.communicators.stop(1)
    world.join()
    stopped.set()
    world.let_go()
    assert [inner.destroyed for inner in world.made] == [0]  # it never became a group
    assert len(world.raised) == 1


def _expect(kind: type[BaseException], run: Callable[[], None], world: SlowWorld) -> None:
    try:
        run()
    except kind as error:
        world.raised.append(error)


def test_a_rebuild_never_clears_a_newer_stop() -> None:
    """The stop comes when all is built, before the main thread has seen it."""
    world = FakeWorld(solo=True)
    world.group()
    world.communicators.stop(0)
    build = world.communicators._build

    def build_then_stop(*arguments: Any) -> None:
        build(*arguments)
        world.communicators.stop(1)

    world.communicators._build = build_then_stop  # type: ignore[assignment,method-assign]
    with pytest.raises(Stopped):
        world.communicators.rebuild(1)
    assert world.communicators.poisoned
    world.communicators._build = build  # type: ignore[method-assign]
    world.communicators.quiesce(WAIT_S)
    world.communicators.rebuild(2)
    old, new = world.made
    old.wait_gone()
    assert (old.aborted, old.destroyed, new.destroyed) == (1, 1, 0)
    assert not world.communicators.poisoned


def test_a_build_that_fails_raises_its_error_and_takes_down_the_rest(slow: SlowWorld) -> None:
    make, failing = slow.make, threading.Event()

    def one_fails(group: OuterGroup, generation: int) -> FakeInner:
        inner = make(group, generation)
        if group.group_name == "other":
            failing.set()
            raise RuntimeError("connection refused")
        return inner

    slow.communicators._make_inner = one_fails
    slow.communicators.stop(0)
    slow.rebuild(1)
    slow.go.set()
    (error,) = slow.join()
    assert "connection refused" in str(error)
    good = next(inner for inner in slow.made if inner.group is slow.communicators.groups[0])
    good.wait_gone()
    assert good.destroyed == 1
    assert slow.communicators.poisoned
    slow.communicators.fail_build(error)
    assert slow.faults == [(1, error)]
    slow.communicators.stop(1)
    slow.communicators._make_inner = slow.make
    slow.regroup(2)
    assert not slow.communicators.poisoned


def test_after_a_stop_in_the_build_the_next_generation_builds(slow: SlowWorld) -> None:
    slow.communicators.stop(0)
    slow.rebuild(1)
    slow.communicators.stop(1)
    slow.join()
    old = list(slow.made)
    slow.rebuild(2)
    slow.let_go()  # the old builders end only now, after those of the new generation began
    slow.main.join(WAIT_S)  # type: ignore[union-attr]
    assert not slow.communicators.poisoned
    assert [inner.destroyed for inner in old] == [1, 1]
    now = [group.inner for group in slow.communicators.groups]
    assert sorted(map(id, now)) == sorted(id(inner) for inner in slow.made if inner.generation == 2)
    assert all(inner.destroyed == 0 for inner in now)


def test_a_group_made_in_a_stopped_generation_is_refused_and_forgotten() -> None:
    world = FakeWorld()
    first = world.group()
    world.communicators.stop(0)
    with pytest.raises(Stopped):
        world.group("second")
    assert world.communicators.groups == [first]
    for inner in world.made[1:]:
        inner.wait_gone()
        assert inner.destroyed == 1


def test_a_stop_is_told_once_and_reaches_every_group() -> None:
    world = FakeWorld()
    for name in "abc":
        world.group(name)
    for _ in range(3):
        world.communicators.stop(0)
    assert world.communicators.stopped == 0
    assert all(inner.aborted for inner in world.made)
    assert world.faults == []
    assert isinstance(world.communicators.error, Stopped)


def test_a_fault_is_reported_once_a_generation() -> None:
    world = FakeWorld()
    world.group()
    for _ in range(2):
        world.communicators.fail(0, RuntimeError("one"))
    world.communicators.hold(RuntimeError("mine"))
    assert [str(error) for _, error in world.faults] == ["one"]
    world.communicators.stop(0)
    assert str(world.communicators.error) == "one"  # the first cause stays
    world.regroup(1)
    world.communicators.fail(0, RuntimeError("late"))
    assert not world.communicators.poisoned
    world.communicators.fail(1, RuntimeError("two"))
    assert [str(error) for _, error in world.faults] == ["one", "two"]


def test_what_this_rank_told_itself_is_not_reported_again() -> None:
    world = FakeWorld()
    world.group()
    world.communicators.hold(RuntimeError("mine"))
    world.communicators.fail(0, RuntimeError("echo"))
    assert world.communicators.poisoned
    assert world.faults == []
    assert world.made[0].aborted == 1


# ---------------------------------------------------------------- quiesce and drain


def _quiesce_elsewhere(
    communicators: Communicators, timeout_s: float
) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def run() -> None:
        try:
            communicators.quiesce(timeout_s)
            outcome.append("quiet")
        except EverstepError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_quiesce_waits_for_running_operations_in_whatever_order_they_end() -> None:
    world = FakeWorld()
    group = world.group()
    world.communicators.answer = Answer.ZEROS
    tensors = [torch.ones(1) for _ in range(5)]
    for tensor in tensors:
        group.allreduce([tensor])
    world.communicators.stop(0)
    thread, outcome = _quiesce_elsewhere(world.communicators, WAIT_S)
    for index in (3, 1, 4, 0):
        world.made[0].works[index].end(RuntimeError("closed"))
        assert outcome == []
        assert world.made[0].destroyed == 0
    world.made[0].works[2].end()
    thread.join(WAIT_S)
    assert outcome == ["quiet"]
    world.made[0].wait_gone()
    assert world.made[0].destroyed == 1
    assert group.inner is None
    world.communicators.quiesce(0)  # and once more changes nothing
    assert world.made[0].destroyed == 1


def test_quiesce_gives_up_on_operations_whose_connections_stay_open() -> None:
    """They may still write: neither few nor many of them may be left behind."""
    for count in (1, 5):
        world = FakeWorld()
        group = world.group()
        world.communicators.answer = Answer.ZEROS
        for _ in range(count):
            group.allreduce([torch.ones(1)])
        world.communicators.stop(0)
        with pytest.raises(QuiesceTimeout, match="allreduce"):
            world.communicators.quiesce(0)
        assert world.made[0].destroyed == 0


def test_quiesce_leaves_lost_operations_behind_when_nothing_can_arrive_any_more() -> None:
    world = FakeWorld()
    group = world.group()
    world.communicators.answer = Answer.ZEROS
    for _ in range(2):
        group.send([torch.ones(1)], 0)
    world.made[0].is_silent = True
    world.communicators.stop(0)
    world.regroup(1)
    for work in world.made[0].works:
        work.end(RuntimeError("timed out at last"))
    assert not world.communicators.poisoned
    assert world.faults == []


def test_drain_returns_when_all_have_ended_or_were_stopped() -> None:
    world = FakeWorld()
    group = world.group()
    world.communicators.answer = Answer.ZEROS
    for _ in range(3):
        group.allreduce([torch.ones(1)])
    drained = threading.Event()

    def drain() -> None:
        world.communicators.drain()
        drained.set()

    thread = threading.Thread(target=drain)
    thread.start()
    world.made[0].works[1].end()
    assert not drained.is_set()
    world.communicators.stop(0)
    thread.join(WAIT_S)
    assert drained.is_set()
    for index in (0, 2):
        world.made[0].works[index].end()
    world.communicators.quiesce(WAIT_S)


def test_a_worker_that_is_born_into_a_stop_stays_solo_until_its_rebuild() -> None:
    world = FakeWorld(solo=True)
    world.communicators.stopped = 0
    group = world.group()
    world.communicators.stop(0)
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    assert tensor.item() == 3.0
    assert world.made == []
    world.regroup(1)
    assert len(world.made) == 1
    assert not world.communicators.solo


def test_tensors_of_nested_outputs() -> None:
    a, b = torch.ones(1), torch.ones(2)
    assert [t.numel() for t in tensors_of([[a, (b,)], None, [], b])] == [1, 2, 2]


def test_connections_are_shut_before_a_tensor_is_filled() -> None:
    """gloo may still be sending from it to a peer that is clean."""
    world = FakeWorld()
    group = world.group()
    world.communicators.answer = Answer.ZEROS
    tensor = torch.ones(2)
    group.allreduce([tensor])
    seen: list[list[float]] = []
    abort = world.made[0].abort

    def watched() -> None:
        seen.append(tensor.tolist())
        abort()

    world.made[0].abort = watched  # type: ignore[method-assign]
    world.communicators.stop(0)
    assert seen[0] == [1.0, 1.0]
    assert tensor.tolist() == [0.0, 0.0]


def test_a_poisoned_loop_ends() -> None:
    """It waits for what a poisoned collective never says."""
    world = FakeWorld()
    group = world.group()
    world.communicators.answer = Answer.ZEROS
    world.communicators.bound, world.communicators.unwind = 10, KeyError
    world.communicators.stop(0)
    for _ in range(10):
        group.allreduce([torch.ones(1)])
    with pytest.raises(KeyError):
        group.allreduce([torch.ones(1)])
