"""The gate that the device keeps: fused optimizers that leave an update out by themselves. The
device and nccl are fakes (fakenccl.py); so is one optimizer, and the others are torch's own."""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.unit.fakenccl import WAIT_S, Fabric, FakeAccelerator, NcclWorld

from everstep.worker.communicators import Answer, QuiesceTimeout
from everstep.worker.foundinf import DeviceGate, Passage
from everstep.worker.groups import OuterGroup

SCHEDULES = 1000


class FakeFused(torch.optim.Optimizer):
    """Its update is launched on the fake device, and reads `found_inf` when it runs there."""

    def __init__(self, parameters: list[torch.Tensor], accelerator: FakeAccelerator) -> None:
        super().__init__(parameters, {"lr": 1.0, "fused": True})
        self._step_supports_amp_scaling = True
        self._accelerator = accelerator
        self.updates = 0
        for parameter in parameters:
            self.state[parameter]["seen"] = torch.zeros(())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        found = getattr(self, "found_inf", None)
        rate = self.param_groups[0]["lr"]
        pairs = [(p.data, p.grad) for p in self.param_groups[0]["params"]]

        def update() -> None:
            if found is not None and float(found) == 1.0:
                return
            self.updates += 1
            for values, gradient in pairs:
                values -= rate * gradient

        self._accelerator.launch(update)


class Rank:
    """One rank: two groups, a parameter, and a gate on the world."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self.world = NcclWorld(rank=rank, size=size)
        self.accelerator = self.world.accelerator
        self.world.communicators.answer = Answer.ZEROS
        self.groups: list[OuterGroup] = [self.world.group("world"), self.world.group("other")]
        self.parameter = torch.zeros(2)
        self.parameter.grad = torch.ones(2)
        self.optimizer = FakeFused([self.parameter], self.accelerator)
        self.gate = DeviceGate(
            self.world.device,
            self.world.communicators,
            lambda cell: self.groups[0].allreduce([cell]),
            world_size=size,
        )

    def update(self, *, fence: bool = True) -> Passage:
        """What the optimizer's hooks and its step do."""
        passage = self.gate.open(self.optimizer, fence=fence)
        self.optimizer.step()
        passage.updated()
        return passage

    def fence(self) -> Any:
        """The fence's kernel."""
        return self.world.work(group=0)

    def pass_fence(self, total: int) -> None:
        work = self.fence()
        work.finish(lambda: work.outputs[0].fill_(total))
        self.accelerator.run()

    def stop(self) -> None:
        self.world.communicators.stop(0)
        for thread in threading.enumerate():
            if thread.name == "everstep-nccl-abort":
                thread.join(WAIT_S)

    def end(self) -> None:
        for group in self.world.nccl:
            for work in group.works:
                work.finish()
        self.accelerator.run()
        self.world.device.watch.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.end()


# ---------------------------------------------------------------- which optimizers


def _trained(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> Any:
    parameter = torch.ones(3, requires_grad=True)
    parameter.grad = torch.ones(3)
    return make([parameter])


FUSED: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_are_left_to_the_device_from_their_second_update(
    rank: Rank, name: str
) -> None:
    """The first one makes the state, and one that is left out would leave that behind."""
    optimizer = _trained(FUSED[name])
    assert rank.gate.takes(optimizer) == (name == "adagrad")  # which has it from the start
    optimizer.step()
    assert rank.gate.takes(optimizer)


def test_sgd_has_no_state_to_wait_for(rank: Rank) -> None:
    assert rank.gate.takes(_trained(lambda parameters: torch.optim.SGD(parameters, fused=True)))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adadelta])
def test_others_go_by_the_hosts_gate(rank: Rank, kind: Any) -> None:
    optimizer = _trained(kind)
    optimizer.step()
    assert not rank.gate.takes(optimizer)


def test_what_may_do_more_than_its_update_goes_by_the_hosts_gate(rank: Rank) -> None:
    class Own(torch.optim.AdamW):
        """Looks like torch's, and may change weights before or after."""

    own = _trained(lambda parameters: Own(parameters, fused=True))
    hooked = _trained(FUSED["adamw"])
    for optimizer in (own, hooked):
        optimizer.step()
    assert not rank.gate.takes(own)
    assert rank.gate.takes(hooked)
    hook = hooked.register_step_post_hook(lambda *_: None)
    assert not rank.gate.takes(hooked)
    hook.remove()
    hooked.register_step_pre_hook(lambda *_: None)
    assert not rank.gate.takes(hooked)


def test_a_parameter_that_joins_later_has_its_first_update_by_the_host(rank: Rank) -> None:
    optimizer = _trained(FUSED["adamw"])
    optimizer.step()
    late = torch.ones(1, requires_grad=True)
    optimizer.add_param_group({"params": [late]})
    assert rank.gate.takes(optimizer)  # it has no gradient, so no update
    late.grad = torch.ones(1)
    assert not rank.gate.takes(optimizer)


# ---------------------------------------------------------------- passing


def test_the_host_launches_the_update_before_the_collectives_have_ended(rank: Rank) -> None:
    gradient = rank.parameter.grad
    assert gradient is not None
    rank.groups[1].allreduce([gradient])  # nobody has waited for it
    passage = rank.update()  # and here nothing blocks
    assert not hasattr(rank.optimizer, "found_inf")
    rank.accelerator.run()
    assert not rank.fence().started  # it stands behind the gradients
    assert rank.optimizer.updates == 0
    rank.world.work(group=1).finish(lambda: gradient.fill_(4))
    rank.accelerator.run()
    assert rank.fence().started
    assert rank.optimizer.updates == 0
    rank.pass_fence(2)
    assert passage.confirm(WAIT_S)
    assert rank.optimizer.updates == 1
    assert rank.parameter.tolist() == [-4.0, -4.0]


def test_without_a_fence_the_ranks_own_collectives_decide(rank: Rank) -> None:
    gradient = rank.parameter.grad
    assert gradient is not None
    for stopped in (False, True):
        rank.groups[1].allreduce([gradient])
        passage = rank.update(fence=False)
        if stopped:
            rank.stop()
        else:
            rank.world.work(group=1).finish()
            rank.accelerator.run()
        assert passage.confirm(WAIT_S) is not stopped
    assert rank.optimizer.updates == 1


@pytest.mark.parametrize("total", [0, 1])
def test_a_fence_that_somebody_did_not_enter_clean_leaves_the_update_out(
    rank: Rank, total: int
) -> None:
    passage = rank.update()
    rank.accelerator.run()
    rank.pass_fence(total)
    assert not passage.confirm(WAIT_S)
    assert rank.optimizer.updates == 0
    assert rank.parameter.tolist() == [0.0, 0.0]


def test_an_aborted_fence_leaves_it_out(rank: Rank) -> None:
    passage = rank.update()
    rank.accelerator.run()
    rank.stop()
    assert not passage.confirm(WAIT_S)
    assert rank.optimizer.updates == 0


def test_a_fence_that_was_passed_before_the_abort_is_passed(rank: Rank) -> None:
    """A peer may have made the step by then; so has this rank, and says so."""
    passage = rank.update()
    rank.accelerator.run()
    fence = rank.fence()
    fence.finish(lambda: fence.outputs[0].fill_(2))
    rank.stop()
    rank.accelerator.run()
    assert passage.confirm(WAIT_S)
    assert rank.optimizer.updates == 1


def test_a_stopped_rank_takes_part_in_no_fence(rank: Rank) -> None:
    """The stop came when the fence was on the stream already, behind a collective of another
    group: its abort lets the fence run, in a group that may still be whole."""
    rank.groups[1].allreduce([torch.ones(1)])
    passage = rank.update()
    rank.accelerator.run()
    rank.world.nccl[0].letting_abort.clear()  # the fence's own group is late
    rank.world.communicators.stop(0)
    assert rank.world.nccl[1].killed.wait(WAIT_S)
    rank.accelerator.run()
    fence = rank.fence()
    assert fence.started
    assert fence.outputs[0].tolist() == [0]  # what it adds to the sum
    rank.world.nccl[0].letting_abort.set()
    assert not passage.confirm(WAIT_S)


def test_confirm_waits_for_the_device_and_only_for_the_verdict(rank: Rank) -> None:
    passage = rank.update()
    rank.accelerator.launch(lambda: behind.wait(WAIT_S) and None)  # the rest of the step
    behind = threading.Event()
    outcome: list[bool] = []
    thread = threading.Thread(target=lambda: outcome.append(passage.confirm(WAIT_S)))
    thread.start()
    rank.accelerator.main.run()
    assert outcome == []
    fence = rank.fence()
    fence.finish(lambda: fence.outputs[0].fill_(2))
    running = threading.Thread(target=rank.accelerator.run)
    running.start()
    thread.join(WAIT_S)
    assert outcome == [True]  # while the device is busy with what came after
    behind.set()
    running.join(WAIT_S)


def test_a_device_that_does_not_come_there_is_not_waited_for_without_end(rank: Rank) -> None:
    for group in rank.world.nccl:
        group.runs_on = False
    rank.accelerator.launch(lambda: None)
    passage = rank.gate.open(rank.optimizer, fence=False)
    rank.stop()
    with pytest.raises(QuiesceTimeout, match="did not come to the update"):
        passage.confirm(0.1)


def test_a_lost_device_is_said_to_be_lost(rank: Rank) -> None:
    rank.accelerator.lost = RuntimeError("CUDA error: unspecified launch failure")
    passage = rank.update(fence=False)
    with pytest.raises(QuiesceTimeout, match="unspecified launch failure"):
        passage.confirm(WAIT_S)


# ---------------------------------------------------------------- making it after all


class Prompt(FakeAccelerator):
    """A device on which all runs at once, for optimizers that run on the CPU."""

    def put(self, item: Callable[[], bool]) -> None:
        super().put(item)
        self.run()


class Real:
    """A rank with one of torch's own fused optimizers."""

    def __init__(self, name: str) -> None:
        self.rank = Rank()
        self.rank.accelerator.__class__ = Prompt
        self.parameter = torch.linspace(-1, 1, 5).requires_grad_()
        self.optimizer: Any = FUSED[name]([self.parameter])
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def step(self, number: int, *, by: str, remake: bool = False) -> None:
        self.parameter.grad = torch.linspace(0, number, 5)
        passage = None
        if by != "host":
            clean = self.rank.world.device.clean(0)
            clean._cell.fill_(by == "device")
            passage = self.rank.gate.open(self.optimizer, fence=False)
        self.optimizer.step()
        self.let_through = passage is None or passage.confirm(WAIT_S)
        if passage is not None and remake and not self.let_through:
            passage.redo()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def state(self) -> list[Any]:
        entry = self.optimizer.state[self.parameter]
        return [self.parameter.tolist(), {k: v.tolist() for k, v in entry.items()}]


@pytest.mark.parametrize("name", FUSED)
def test_an_update_that_was_left_out_leaves_no_trace_and_can_be_made_after_all(name: str) -> None:
    expected, real = Real(name), Real(name)
    for number in (1, 2):
        expected.step(number, by="host")
    real.step(1, by="host")
    before = real.state()
    forgetful = copy.deepcopy(real.optimizer.state_dict())
    real.step(2, by="nobody")
    assert not real.let_through
    assert real.state() == before
    real.optimizer.load_state_dict(forgetful)  # the rate, which the scheduler has changed
    real.step(2, by="nobody", remake=True)
    assert real.state() == expected.state()
    for each in (expected, real):
        each.step(3, by="host")
    assert real.state() == expected.state()
    for each in (expected, real):
        each.rank.end()


@pytest.mark.parametrize("name", FUSED)
def test_the_devices_gate_changes_no_bit(name: str) -> None:
    expected, real = Real(name), Real(name)
    for number in range(1, 5):
        expected.step(number, by="host")
        real.step(number, by="device" if number > 1 else "host")
        assert real.let_through
    assert real.state() == expected.state()
    for each in (expected, real):
        each.rank.end()


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("clean", [False, True])
def test_with_a_grad_scaler(overflow: bool, clean: bool) -> None:
    """Its own found_inf still counts, and it finds the attribute that it deletes."""
    real = Real("adamw")
    real.step(1, by="host")
    before = real.state()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    real.parameter.grad = torch.full((5,), float("inf") if overflow else 4.0)
    scaler.scale(torch.ones(1))
    real.rank.world.device.clean(0)._cell.fill_(clean)
    passages: list[Passage] = []
    before_hook = real.optimizer.register_step_pre_hook(
        lambda *_: passages.append(real.rank.gate.open(real.optimizer, fence=False))
    )

    def confirm(*_: Any) -> None:
        hook.remove()
        before_hook.remove()
        assert passages[0].confirm(WAIT_S) is clean  # an overflow is no fault: the step was made
        assert (real.state() == before) is (overflow or not clean)
        if not clean:
            passages[0].redo()

    hook = real.optimizer.register_step_post_hook(confirm)
    scaler.step(real.optimizer)
    assert (real.state() == before) is overflow
    assert not hasattr(real.optimizer, "found_inf")
    assert not hasattr(real.optimizer, "grad_scale")
    scaler.update()
    assert scaler.get_scale() == (2.0 if overflow else 4.0)
    real.rank.end()


# ---------------------------------------------------------------- many ranks


@pytest.mark.slow
def test_who_passes_the_fence_knows_that_all_came_there_clean() -> None:
    """Any order of hosts, streams and stops: if one rank made its update, then every rank has all
    its gradients, whatever it was told since."""
    outcomes: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        draw = random.Random(seed)
        size = draw.choice([2, 3])
        ranks = [Rank(number, size) for number in range(size)]
        try:
            outcomes[_shuffle(draw, ranks)] += 1
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}") from error
        finally:
            for rank in ranks:
                rank.end()
    assert min(outcomes[who] for who in ("none", "some", "all")) >= SCHEDULES // 100, outcomes


def _shuffle(draw: random.Random, ranks: list[Rank]) -> str:
    """One schedule; says which ranks made their update."""
    size = len(ranks)
    fabrics = [Fabric(size), Fabric(size)]
    for rank in ranks:
        for group, fabric in zip(rank.world.nccl, fabrics, strict=True):
            group.fabric, group.runs_on = fabric, False
    gradients = [[torch.ones(2) for _ in range(3)] for _ in ranks]
    passages: list[Passage | None] = [None] * size
    programs = [_program(rank, gradients[n], passages, n) for n, rank in enumerate(ranks)]
    slow = draw.randrange(2 * size), draw.randrange(5)  # a stream that hardly ever gets on

    def stream_of(n: int, count: int) -> int:
        return draw.choice([i for i in range(count) if (n, i) != slow or draw.random() < 0.01])

    host_moves, stops = draw.choice([0.2, 0.8]), draw.choice([0.0005, 0.005, 0.03])
    for _ in range(draw.randrange(100, 500)):
        n, kind = draw.randrange(size), draw.random()
        if kind < stops:
            ranks[n].stop()
        elif draw.random() < host_moves:
            next(programs[n], None)
        else:
            ranks[n].accelerator.run_some(functools.partial(stream_of, n), 4)
    for rank in ranks:
        rank.stop()
        rank.accelerator.run()
    made = [n for n, rank in enumerate(ranks) if rank.optimizer.updates]
    if made:
        for own in gradients:
            assert [tensor.tolist() for tensor in own] == [[size, size]] * 3
    for n, passage in enumerate(passages):
        if passage is not None:
            assert passage.confirm(WAIT_S) is (n in made)
    return "all" if len(made) == size else "some" if made else "none"


def _program(
    rank: Rank, gradients: list[torch.Tensor], passages: list[Passage | None], n: int
) -> Iterator[None]:
    """What the host of one rank does, move by move."""
    for index, gradient in enumerate(gradients):
        guard = rank.groups[index % 2].allreduce([gradient])
        yield
        if index != 1:  # one that nobody waits for before the gate
            guard.wait()
            yield
    passages[n] = rank.update()
    yield
