"""Inner groups on a device: asynchronous errors, aborts from other threads, mended outputs. The
device and nccl are fakes (fakenccl.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest
import torch
import torch.distributed as dist
from tests.unit.fakegroups import FakeInner
from tests.unit.fakenccl import (
    GARBAGE,
    WAIT_S,
    FakeAccelerator,
    FakeEvent,
    FakeNcclGroup,
    NcclWorld,
)
from torch._C._distributed_c10d import ErrorType

from everstep.errors import PeerError, TransientError, UserError
from everstep.worker.accelerator import Event, choose
from everstep.worker.communicators import Answer, QuiesceTimeout
from everstep.worker.control import Stopped
from everstep.worker.groups import OuterGroup
from everstep.worker.guard import Guard
from everstep.worker.nccl import DeviceInner, IdStore, NcclInner, prepare
from everstep.worker.streams import Device, Source, StreamGuard, Watch


@pytest.fixture
def world() -> Iterator[NcclWorld]:
    world = NcclWorld()
    world.communicators.answer = Answer.ZEROS
    yield world
    _end(world)


def _end(world: NcclWorld) -> None:
    """Leave no thread behind."""
    for group in world.nccl:
        group.connected.set()
        group.letting_abort.set()
        for work in group.works:
            work.finish()
    world.accelerator.run()
    world.device.watch.close()
    for thread in threading.enumerate():
        if thread.name.startswith(("everstep-build", "everstep-reaper", "everstep-nccl")):
            thread.join(WAIT_S)
            assert not thread.is_alive(), thread.name


def _elsewhere(run: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """`run` on a thread, and what came of it."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(run())
        except (PeerError, Stopped) as error:
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, outcome


def _join(thread: threading.Thread) -> None:
    thread.join(WAIT_S)
    assert not thread.is_alive()


def _await(what: threading.Event) -> None:
    assert what.wait(WAIT_S)


def _ended(guard: Any) -> None:
    """Wait until the host knows that a collective is over."""
    _join(_elsewhere(guard.await_release)[0])


# ---------------------------------------------------------------- the environment, the device


def test_torch_is_told_not_to_end_the_process() -> None:
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"}
    assert prepare(environment) == ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environment["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert prepare(environment) == []
    with pytest.raises(UserError, match="DETAIL"):
        prepare({"TORCH_DISTRIBUTED_DEBUG": "detail"})


def test_the_device_is_chosen_alike_by_all_ranks() -> None:
    def chosen(wanted: str, devices: int) -> list[int | None]:
        return [choose(wanted, devices=devices, local_rank=rank, local_size=2) for rank in range(2)]

    assert chosen("auto", 2) == chosen("cuda", 8) == [0, 1]
    assert chosen("auto", 1) == chosen("auto", 0) == chosen("cpu", 8) == [None, None]
    with pytest.raises(UserError, match="2 ranks on this machine, and torch sees 1"):
        chosen("cuda", 1)


# ---------------------------------------------------------------- building


def test_the_giver_of_the_id_waits_until_it_has_one() -> None:
    sent: list[bytes] = []

    def exchange(own: bytes) -> dict[int, bytes]:
        sent.append(own)
        return {0: msgspec.msgpack.encode({"0": b"\x01id"}), 1: own}

    giver, taker = IdStore(exchange, gives=True), IdStore(exchange, gives=False)
    assert not taker.check(["0"])
    taker.set("mine", b"x")
    assert sent == []
    assert taker.get("0") == b"\x01id"
    giver.set("0", b"\x01id")
    assert giver.multi_get(["0"]) == [b"\x01id"]
    assert len(sent) == 2
    giver.set("exception_dump", b"later")  # torch's watchdog, after an error
    assert giver.check(["exception_dump"])
    assert len(sent) == 2
    with pytest.raises(KeyError, match="p2p"):
        taker.get("p2p")


def test_a_group_is_built_on_a_thread_with_the_device_set(world: NcclWorld) -> None:
    group = world.group()
    assert isinstance(group.inner, NcclInner)
    assert not group.inner.silent()
    assert any(name.startswith("everstep-build") for name in world.accelerator.entered)


def test_a_peer_that_dies_while_the_group_is_built_is_no_hang(world: NcclWorld) -> None:
    first, built = world.group(), threading.Event()

    def hold(group: FakeNcclGroup) -> None:
        group.connected.clear()
        built.set()

    world.prepare = hold
    thread, outcome = _elsewhere(lambda: world.group("second"))
    _await(built)
    world.communicators.stop(0)
    _join(thread)
    assert isinstance(outcome[0], Stopped)
    for other in threading.enumerate():
        if other.name.startswith("everstep-build"):
            _join(other)
    assert world.nccl[1].killed.wait(WAIT_S)
    assert world.communicators.groups == [first]


def test_a_build_has_a_deadline() -> None:
    accelerator = FakeAccelerator()

    def make(store: Any, rank: int, size: int, name: str, timeout_s: float) -> FakeNcclGroup:
        group = FakeNcclGroup(accelerator, rank, size, name)
        group.connected.clear()
        return group

    with pytest.raises(TransientError, match=r"not connected within 0\.01 s"):
        NcclInner(
            0,
            2,
            lambda own: {0: own},
            name="world",
            generation=1,
            device=Device(accelerator),
            build_timeout_s=0.01,
            collective_timeout_s=9,
            make=make,
        )


def test_the_error_of_the_exchange_is_raised_not_what_torch_makes_of_it() -> None:
    accelerator = FakeAccelerator()

    def exchange(own: bytes) -> dict[int, bytes]:
        raise Stopped(3)

    def make(store: Any, *_: Any) -> FakeNcclGroup:
        try:
            store.get("0")
        except Exception as error:
            raise RuntimeError("got error in store->get") from error
        raise AssertionError

    with pytest.raises(Stopped):
        NcclInner(
            1,
            2,
            exchange,
            name="world",
            generation=1,
            device=Device(accelerator),
            build_timeout_s=9,
            collective_timeout_s=9,
            make=make,
        )


# ---------------------------------------------------------------- the good path


def test_wait_holds_the_stream_and_not_the_host(world: NcclWorld) -> None:
    group = world.group()
    tensor, seen = torch.ones(2), []
    guard: Any = group.allreduce([tensor])
    assert isinstance(guard, StreamGuard)
    assert guard.wait()  # the kernel has not even started
    world.accelerator.launch(lambda: seen.append(tensor.tolist()))
    world.accelerator.run()
    assert world.work().started
    assert seen == []
    assert not guard.is_completed()
    world.work().finish(lambda: tensor.fill_(5))
    world.accelerator.run()
    assert seen == [[5.0, 5.0]]
    _ended(guard)
    assert guard.is_success()
    assert guard.get_future() is world.work().future
    world.communicators.drain()
    assert not world.communicators.touched


def test_drain_is_what_waits_for_the_device(world: NcclWorld) -> None:
    group = world.group()
    group.allreduce([torch.ones(2)]).wait()
    world.accelerator.run()
    thread, outcome = _elsewhere(world.communicators.drain)
    assert outcome == []
    world.work().finish()
    world.accelerator.run()
    _join(thread)
    assert outcome == [None]


def test_a_synchronous_call_is_seen_too(world: NcclWorld) -> None:
    group = world.group()
    options = dist.AllreduceOptions()
    options.asyncOp = False  # what dist.all_reduce says by default; nccl would return nothing
    assert isinstance(group.allreduce([torch.ones(1)], options), StreamGuard)


def test_tensors_are_held_until_the_host_knows(world: NcclWorld) -> None:
    group = world.group()
    output, own = torch.zeros(6), torch.ones(2)
    guard: Any = group.all_gather_single(output, own)
    held = guard._work
    assert any(argument is own for argument in held._arguments)
    world.work().finish()
    world.accelerator.run()
    _ended(guard)
    assert held._arguments is None


def test_a_collective_is_not_captured_into_a_graph(world: NcclWorld) -> None:
    group = world.group()
    world.accelerator.is_capturing = True
    with pytest.raises(UserError, match="captured into a CUDA graph"):
        group.allreduce([torch.ones(1)])
    assert world.faults == []


def test_a_wrong_argument_is_the_scripts_own_error(world: NcclWorld) -> None:
    group = world.group()
    world.nccl[0].raises = ValueError("Tensors must be contiguous")
    with pytest.raises(ValueError, match="contiguous"):
        group.allreduce([torch.ones(1)])
    assert not world.communicators.poisoned


# ---------------------------------------------------------------- failure


def test_an_error_is_found_by_asking_and_poisons_everything(world: NcclWorld) -> None:
    first, second = world.group("world"), world.group("other")
    guards: list[Any] = [first.allreduce([torch.ones(1)]), second.allreduce([torch.ones(1)])]
    world.accelerator.run()
    world.nccl[1].error = ErrorType.COMM_ERROR
    for guard in guards:
        _ended(guard)
    assert world.communicators.poisoned
    ((generation, error),) = world.faults
    assert generation == 0
    assert f"nccl group {second.name} lost a peer" in str(error)
    assert [guard.is_success() for guard in guards] == [False, False]
    world.communicators.quiesce(WAIT_S)
    assert all(group.killed.is_set() for group in world.nccl)
    assert len(world.faults) == 1


def test_a_time_out_is_said_to_be_one(world: NcclWorld) -> None:
    group = world.group()
    guard = group.allreduce([torch.ones(1)])
    world.nccl[0].error = ErrorType.TIMEOUT
    _ended(guard)
    assert "timed out" in str(world.faults[0][1])


def test_a_call_on_a_broken_communicator_is_a_fault_and_no_error_of_the_scripts(
    world: NcclWorld,
) -> None:
    group = world.group()
    world.nccl[0].raises = dist.DistBackendError("NCCL communicator was aborted on rank 1")
    tensor = torch.ones(2)
    guard = group.allreduce([tensor])
    assert len(world.faults) == 1
    assert guard.get_future().done()
    guard.wait()
    world.accelerator.run()
    assert tensor.tolist() == [0.0, 0.0]


def test_a_stop_aborts_on_another_thread_with_the_device_set_and_waits_for_nothing(
    world: NcclWorld,
) -> None:
    group = world.group()
    guard: Any = group.allreduce([torch.ones(1)])
    world.accelerator.run()
    inner, nccl = group.inner, world.nccl[0]
    nccl.letting_abort.clear()
    begun = threading.Event()
    nccl.on_abort = begun.set
    world.communicators.stop(0)  # returns although the abort is stuck
    _await(begun)
    assert nccl.aborts == ["everstep-nccl-abort"]
    assert "everstep-nccl-abort" in world.accelerator.entered
    assert guard.is_completed()  # the main thread is free
    assert not inner.silent()
    assert not inner.asleep(0)
    nccl.letting_abort.set()
    world.communicators.quiesce(WAIT_S)
    assert inner.silent()
    world.communicators.stop(0)
    inner.abort()
    assert len(nccl.aborts) == 1
    assert world.faults == []


def test_a_dropped_group_is_gone_with_its_kernels(world: NcclWorld) -> None:
    group = world.group()
    group.allreduce([torch.ones(1)])
    inner = group.inner
    world.communicators.stop(0)
    world.communicators.quiesce(WAIT_S)
    _reaped()
    assert "group" not in inner.__dict__
    assert "everstep-reaper" in world.accelerator.entered
    inner.probe()  # the watch may come by once more


def _reaped() -> None:
    for thread in threading.enumerate():
        if thread.name == "everstep-reaper":
            _join(thread)


def test_a_group_that_the_script_destroys_ends_its_work_and_spoils_nothing(
    world: NcclWorld,
) -> None:
    world.group()
    other, sizes = world.group("other"), torch.ones(2, dtype=torch.int64)
    other.allreduce([sizes]).wait()
    other.shutdown()
    assert world.nccl[1].aborts == []
    world.work(group=1).finish(lambda: sizes.fill_(6))
    world.accelerator.run()
    _reaped()
    assert len(world.nccl[1].aborts) == 1
    assert sizes.tolist() == [6, 6]
    assert world.device.clean(0).whole
    assert not world.communicators.touched


def test_a_destroyed_group_does_not_outlive_a_stop(world: NcclWorld) -> None:
    world.group()
    other = world.group("other")
    guard: Any = other.allreduce([torch.ones(2)])
    other.shutdown()
    world.communicators.stop(0)
    world.communicators.quiesce(WAIT_S)
    _reaped()
    assert len(world.nccl[1].aborts) == 1
    assert not guard.is_success()


def test_memory_is_not_used_again_while_an_abort_is_stuck(world: NcclWorld) -> None:
    group = world.group()
    group.allreduce([torch.ones(1)])
    world.accelerator.run()
    world.nccl[0].letting_abort.clear()
    world.communicators.stop(0)
    with pytest.raises(QuiesceTimeout, match="allreduce"):
        world.communicators.quiesce(0.1)


def test_the_generation_is_marked_before_anything_is_aborted_and_the_fences_group_is_first(
    world: NcclWorld,
) -> None:
    for name in ("world", "a", "b"):
        world.group(name)
    clean = world.device.clean(0)
    seen: list[int] = []
    for nccl in world.nccl:
        nccl.on_abort = lambda: seen.append(int(clean._cell))
    order: list[str] = []
    for group in world.communicators.groups:
        abort = group.inner.abort

        def watched(group: OuterGroup = group, abort: Any = abort) -> None:
            order.append(group.group_name)
            abort()

        group.inner.abort = watched
    world.communicators.stop(0)
    _end(world)
    assert order[0] == "world"
    assert seen == [0, 0, 0]


def test_the_next_generation_is_clean(world: NcclWorld) -> None:
    group = world.group()
    group.allreduce([torch.ones(1)])
    world.communicators.stop(0)
    world.regroup(1)
    assert int(world.device.clean(1)._cell) == 1
    tensor = torch.ones(1)
    guard: Any = group.allreduce([tensor])
    guard.wait()
    world.work(group=1).finish(lambda: tensor.fill_(3))
    world.accelerator.run()
    _ended(guard)
    assert tensor.item() == 3
    assert not world.communicators.poisoned


def test_a_lost_device_fails_what_ran_on_it(world: NcclWorld) -> None:
    group = world.group()
    world.accelerator.lost = RuntimeError("CUDA error: an illegal memory access")
    guard = group.allreduce([torch.ones(1)])
    _ended(guard)
    assert "illegal memory access" in str(world.faults[0][1])


# ---------------------------------------------------------------- the watch


def _at_its_end(event: Event, watch: Watch, source: Source) -> list[BaseException | None]:
    """Have the watch await `event` and wait until it has said how it ended."""
    told, come = list[BaseException | None](), threading.Event()

    def ended(error: BaseException | None) -> None:
        told.append(error)
        come.set()

    watch.add(source, event, ended)
    _await(come)
    return told


class Idle:
    """A source; `error` is what its probe raises."""

    error: Exception | None = None

    def probe(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("broken", ["probe", "receiver", "event", "device"])
def test_a_watch_that_fails_fails_what_it_awaits_and_lives_on(
    broken: str, capfd: pytest.CaptureFixture[str]
) -> None:
    accelerator, source, error = FakeAccelerator(), Idle(), KeyError("not foreseen")
    watch, never = Watch(accelerator), FakeEvent()

    def fail(*_: object) -> NoReturn:
        raise error

    if broken == "probe":
        source.error = error
    elif broken == "receiver":
        come = FakeEvent()
        come.reach()
        watch.add(Idle(), come, fail)
    elif broken == "event":
        watch.add(Idle(), SimpleNamespace(query=fail), lambda _: None)
    else:
        accelerator.enter = fail  # type: ignore[method-assign]
    # One that fails while it is told does not keep it from the others.
    watch.add(source, never, fail)
    assert _at_its_end(never, watch, source) == [error]
    assert "not foreseen" in capfd.readouterr().err
    source.error = None
    if broken == "device":
        del accelerator.enter
    assert _at_its_end(accelerator_event(accelerator), watch, source) == [None]
    watch.close()


def accelerator_event(accelerator: FakeAccelerator) -> FakeEvent:
    """One that has come."""
    event = accelerator.here()
    accelerator.run()
    return event


# ---------------------------------------------------------------- outputs


def test_a_collective_that_was_stopped_before_its_wait_is_zeros_behind_the_aborted_kernel(
    world: NcclWorld,
) -> None:
    group = world.group()
    tensor = torch.ones(2)
    guard = group.allreduce([tensor])
    world.accelerator.run()
    world.nccl[0].letting_abort.clear()
    world.communicators.stop(0)
    guard.wait()
    world.accelerator.run()
    assert tensor.tolist() == [1.0, 1.0]  # not yet: nccl may still read from it for a clean peer
    world.nccl[0].letting_abort.set()
    world.communicators.quiesce(WAIT_S)
    world.accelerator.run()
    assert tensor.tolist() == [0.0, 0.0]


def test_sizes_that_are_read_after_a_late_abort_are_zeros(world: NcclWorld) -> None:
    """The script has waited, on the stream, and reads: split sizes must not be garbage."""
    group = world.group()
    sizes, values, large = (
        torch.ones(4, dtype=torch.int64),
        torch.ones(4),
        torch.ones(1 << 14, dtype=torch.int64),
    )
    read: list[Any] = []
    for output in (sizes, values, large):
        group.all_to_all_single(output, output.clone(), None, None).wait()
    world.accelerator.launch(lambda: read.extend([sizes.tolist(), values.tolist(), large[:2]]))
    world.accelerator.run()
    assert read == []
    world.communicators.stop(0)
    world.communicators.quiesce(WAIT_S)
    world.accelerator.run()
    assert read[0] == [0, 0, 0, 0]
    assert read[1] == [GARBAGE] * 4  # numbers: no update lets them out
    assert read[2].tolist() == [GARBAGE] * 2


def test_sizes_that_came_whole_stay(world: NcclWorld) -> None:
    group = world.group()
    sizes = torch.ones(4, dtype=torch.int64)
    group.all_to_all_single(sizes, sizes.clone(), None, None).wait()
    world.work().finish(lambda: sizes.fill_(6))
    world.accelerator.run()
    assert sizes.tolist() == [6] * 4


@pytest.mark.parametrize("shape", [(), (3,)])
def test_indices_of_a_broadcast_stay_as_they_were(world: NcclWorld, shape: Any) -> None:
    group = world.group()
    indices = torch.full(shape, 7, dtype=torch.int32)
    group.broadcast([indices]).wait()
    world.accelerator.run()
    world.communicators.stop(0)
    world.communicators.quiesce(WAIT_S)
    world.accelerator.run()
    assert indices.eq(7).all()


def test_a_result_that_was_lost_after_the_update_is_nan(world: NcclWorld) -> None:
    group = world.group()
    world.communicators.answer = Answer.NANS
    early, late, count = torch.ones(1), torch.ones(1), torch.ones(1, dtype=torch.int64)
    guard = group.allreduce([early])
    group.allreduce([late]).wait()
    group.allreduce([count]).wait()
    world.accelerator.run()
    world.communicators.stop(0)
    guard.wait()
    world.communicators.quiesce(WAIT_S)
    world.accelerator.run()
    assert early.isnan().all()
    assert late.isnan().all()
    assert count.item() == 0
    assert world.communicators.touched


def test_outside_of_steps_the_host_waits_and_is_told(world: NcclWorld) -> None:
    group = world.group()
    world.communicators.answer = Answer.RAISE
    guard = group.allreduce([torch.ones(1)])
    thread, outcome = _elsewhere(guard.wait)
    assert outcome == []
    world.communicators.stop(0)
    _join(thread)
    assert isinstance(outcome[0], PeerError)


def test_a_wait_with_a_time_out_stops_the_host(world: NcclWorld) -> None:
    import datetime

    group = world.group()
    guard = group.allreduce([torch.ones(1)])
    with pytest.raises(RuntimeError, match=r"did not end within 0\.01 s"):
        guard.wait(datetime.timedelta(seconds=0.01))


# ---------------------------------------------------------------- gloo beside it


class _Parts:
    """A DeviceInner over fakes; `order` is in which its parts were aborted."""

    def __init__(self, *, stopped_after: int = 9) -> None:
        self.cpu, self.nccl = FakeInner(), FakeInner()
        self.order: list[str] = []
        self.begun: list[Any] = []
        self.cpu.abort = lambda: self.order.append("gloo")  # type: ignore[method-assign]
        self.nccl.abort = lambda: self.order.append("nccl")  # type: ignore[method-assign]
        self._stopped_after = stopped_after

    def make(self) -> DeviceInner:
        def part(inner: FakeInner) -> Callable[[Any], Any]:
            def make(begun: Any) -> FakeInner:
                begun(inner)
                if len(self.begun) == self._stopped_after:
                    self.begun[0].abort()
                return inner

            return make

        return DeviceInner(part(self.cpu), part(self.nccl), self.begun.append)


def test_tensors_go_by_the_group_of_their_device() -> None:
    parts = _Parts()
    inner = parts.make()
    here, there = torch.ones(1), torch.ones(1, device="meta")
    inner.operation("allreduce")([here], dist.AllreduceOptions())
    inner.operation("allreduce")([there], dist.AllreduceOptions())
    inner.operation("allgather")([[there, there]], [there], None)
    inner.operation("barrier")(dist.BarrierOptions())
    assert [name for name, _ in parts.cpu.calls] == ["allreduce", "barrier"]
    assert [name for name, _ in parts.nccl.calls] == ["allreduce", "allgather"]
    assert inner.group is parts.cpu.group
    assert inner.patience == parts.cpu.patience
    parts.cpu.is_silent = True
    assert not inner.silent()
    parts.nccl.is_silent = True
    assert inner.silent()
    assert inner.asleep(0)
    inner.abort()
    assert parts.order == ["nccl", "gloo"]
    inner.destroy()
    assert (parts.cpu.destroyed, parts.nccl.destroyed) == (1, 1)


def test_both_groups_can_be_aborted_while_the_second_is_not_there_yet() -> None:
    parts = _Parts(stopped_after=1)
    with pytest.raises(TransientError, match="stopped while it was built"):
        parts.make()
    assert len(parts.begun) == 1
    assert "gloo" in parts.order
    assert "nccl" in parts.order


def test_a_collective_on_the_cpu_keeps_its_guard() -> None:
    world = NcclWorld()
    parts = _Parts()
    world.communicators._make_inner = lambda group, generation: parts.make()
    world.communicators.answer = Answer.ZEROS
    group = world.group()
    guard = group.allreduce([torch.ones(1)])
    assert type(guard) is Guard
    parts.cpu.works[0].end()
    assert guard.wait()
