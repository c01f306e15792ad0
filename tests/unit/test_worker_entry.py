"""A failed attempt leaves no trace: Entry and Undo put back all that it touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.worker.entry import Entry, GradientPolicy, Undo
from everstep.worker.state import State

torch.set_num_threads(1)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("constant", torch.full((2,), 5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.norm(self.linear(x))
        return value


class Rig:
    """A model, an optimizer and a scheduler, protected, and what a script does with them."""

    def __init__(self, optimizer: str = "adamw") -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(self.net.parameters(), lr=0.1)
            if optimizer == "adamw"
            else torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1.0 / (n + 1))
        self.state = State(
            {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}
        )

    def backward(self, seed: int = 1) -> None:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        self.net(x).square().sum().backward()

    def step(self, seed: int = 1) -> None:
        self.backward(seed)
        self.optimizer.step()
        self.scheduler.step()

    def everything(self) -> dict[str, Any]:
        grads = {
            name: None if parameter.grad is None else (id(parameter.grad), parameter.grad.tolist())
            for name, parameter in self.net.named_parameters()
        }
        return {"digests": self.state.digests(), "grads": grads}


# ---------------------------------------------------------------- Entry


def _nothing(rig: Rig) -> None:
    return None


ATTEMPTS: dict[str, Any] = {
    "nothing": _nothing,
    "backward": Rig.backward,
    "zero_grad": lambda rig: rig.optimizer.zero_grad(),
    "zero_grad in place": lambda rig: rig.optimizer.zero_grad(set_to_none=False),
    "zero_grad, backward": lambda rig: (rig.optimizer.zero_grad(), rig.backward()),
    "backward, zero_grad, backward": lambda rig: (
        rig.backward(),
        rig.optimizer.zero_grad(),
        rig.backward(2),
    ),
    "clip": lambda rig: (
        rig.backward(),
        torch.nn.utils.clip_grad_norm_(rig.net.parameters(), 1e-3),
    ),
    "grad of another tensor": lambda rig: setattr(rig.net.linear.weight, "grad", torch.ones(3, 3)),
    "scheduler": lambda rig: [rig.scheduler.step() for _ in range(3)],
    "learning rate by hand": lambda rig: rig.optimizer.param_groups[0].update(lr=9.0, extra=1),
    "batch norm": lambda rig: rig.net(torch.randn(8, 3)),
}


@pytest.mark.parametrize("name", ATTEMPTS)
@pytest.mark.parametrize("at_entry", ["none", "zeros", "gradients"])
def test_put_back_leaves_no_trace_as_often_as_asked(name: str, at_entry: str) -> None:
    rig = Rig()
    rig.step()
    rig.optimizer.zero_grad(set_to_none=at_entry == "none")
    if at_entry == "gradients":
        rig.backward(5)
    rig.state.changing = tuple(f"model/norm.{b}" for b, _ in rig.net.norm.named_buffers())
    before = rig.everything()
    buffers = {name: buffer.clone() for name, buffer in rig.net.named_buffers()}
    entry = Entry(rig.state, copy_gradients=True)
    for _ in range(2):
        ATTEMPTS[name](rig)
        entry.put_back()
        assert rig.everything() == before
        for key, buffer in rig.net.named_buffers():
            assert torch.equal(buffer, buffers[key]), key


def test_gradients_that_need_not_be_kept_are_put_back_as_none() -> None:
    rig = Rig()
    rig.backward()
    entry = Entry(rig.state, copy_gradients=False)
    rig.backward()
    entry.put_back()
    assert all(parameter.grad is None for parameter in rig.net.parameters())


def test_gradients_that_need_not_be_kept_are_not_held_in_memory() -> None:
    import weakref

    rig = Rig()
    rig.backward()
    grad = weakref.ref(rig.net.linear.weight.grad)
    entry = Entry(rig.state, copy_gradients=False)
    rig.optimizer.zero_grad()
    assert grad() is None
    assert not entry.carried()


def test_while_buffers_are_being_learned_all_are_put_back() -> None:
    rig = Rig()
    before = {name: buffer.clone() for name, buffer in rig.net.named_buffers()}
    entry = Entry(rig.state, copy_gradients=True, learn_buffers=True)
    rig.net(torch.randn(8, 3))
    entry.put_back()
    for name, buffer in rig.net.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_buffers_changed_before_the_update_are_local_and_those_after_it_are_replicas() -> None:
    rig = Rig()
    entry = Entry(rig.state, copy_gradients=True, learn_buffers=True)
    rig.net.get_buffer("norm.running_mean").add_(1)
    rig.net.get_buffer("norm.running_var").add_(1)
    entry.at_gate()
    rig.net.get_buffer("constant").add_(1)
    rig.net.get_buffer("norm.running_var").add_(1)
    entry.learn_buffers()
    assert rig.state.changing == ("model/norm.running_mean",)


def test_a_buffer_that_became_nan_has_changed_and_one_that_is_nan_has_not() -> None:
    rig = Rig()
    rig.net.get_buffer("constant").fill_(float("nan"))
    entry = Entry(rig.state, copy_gradients=True, learn_buffers=True)
    rig.net.get_buffer("norm.running_mean").fill_(float("nan"))
    entry.at_gate()
    entry.learn_buffers()
    assert rig.state.changing == ("model/norm.running_mean",)


def test_an_expanded_buffer_can_be_put_back() -> None:
    """Its elements share memory, so it can't be written as a whole."""
    rig = Rig()
    rig.net.register_buffer("wide", torch.arange(4.0).expand(3, 4))
    wide = rig.net.get_buffer("wide")
    entry, undo = Entry(rig.state, copy_gradients=True, learn_buffers=True), Undo(rig.state)
    undo.put_back()
    entry.put_back()
    wide[0].add_(1)
    entry.put_back()
    assert wide.tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3
    wide[0].add_(1)
    undo.put_back()
    assert wide.tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3


def test_what_is_known_to_change_stays_known() -> None:
    rig = Rig()
    rig.state.changing = ("model/norm.running_mean",)
    entry = Entry(rig.state, copy_gradients=True, learn_buffers=True)
    entry.at_gate()
    entry.learn_buffers()
    assert rig.state.changing == ("model/norm.running_mean",)


# ---------------------------------------------------------------- GradientPolicy


def _run(script: Any, steps: int) -> GradientPolicy:
    """`script(rig, step)` is the step function; the policy learns as a run does."""
    rig, policy = Rig("sgd"), GradientPolicy()
    for step in range(1, steps + 1):
        entry = Entry(rig.state, copy_gradients=policy.copies)
        script(rig, step)
        policy.learn(entry)
    return policy


def _first(rig: Rig, step: int) -> None:
    rig.optimizer.zero_grad()
    rig.step(step)


def _last(rig: Rig, step: int) -> None:
    rig.step(step)
    rig.optimizer.zero_grad()


def _in_place(rig: Rig, step: int) -> None:
    rig.optimizer.zero_grad(set_to_none=False)
    rig.step(step)


def _accumulate_two(rig: Rig, step: int) -> None:
    if step % 2 == 1:
        rig.optimizer.zero_grad()
    rig.backward(step)
    if step % 2 == 0:
        rig.optimizer.step()


def _accumulate_late(rig: Rig, step: int) -> None:
    if step < 4:
        _first(rig, step)
    else:
        rig.backward(step)


@pytest.mark.parametrize(
    ("script", "copies"),
    [
        (_first, False),
        (_last, True),
        (_in_place, True),
        (_accumulate_two, True),
        (_accumulate_late, True),
    ],
)
def test_the_policy_learns_what_the_script_does(script: Any, copies: bool) -> None:
    assert _run(script, 6).copies is copies


def test_accumulation_with_a_clearing_step_between_is_copied_for_good() -> None:
    """Seen once, a clearing step must not switch the copies off that the step after it needs."""
    policy = GradientPolicy()
    rig = Rig("sgd")
    for step in range(1, 12):
        entry = Entry(rig.state, copy_gradients=policy.copies)
        before = rig.everything()["grads"]
        _accumulate_two(rig, step)
        policy.learn(entry)
        if step % 2 == 0:  # a failure in the accumulating half: what was accumulated must come back
            entry.put_back()
            assert rig.everything()["grads"] == before, step


# ---------------------------------------------------------------- Undo


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("steps_before", [0, 2])
@settings(deadline=None, max_examples=10)
@given(st.lists(st.sampled_from(["step", "scheduler", "weights", "group"]), min_size=1, max_size=4))
def test_undo_takes_back_any_updates(optimizer: str, steps_before: int, actions: list[str]) -> None:
    rig = Rig(optimizer)
    for _ in range(steps_before):
        rig.step()
    rig.optimizer.zero_grad()
    rig.state.changing = tuple(f"model/norm.{b}" for b, _ in rig.net.norm.named_buffers())
    before = rig.everything()
    parameters = [id(parameter) for parameter in rig.net.parameters()]
    entry, undo = Entry(rig.state, copy_gradients=True), Undo(rig.state)
    for action in actions:
        if action == "step":
            rig.step()
        elif action == "scheduler":
            rig.scheduler.step()
        elif action == "weights":
            with torch.no_grad():
                rig.net.linear.weight.mul_(3)
        else:
            rig.optimizer.param_groups[0]["lr"] = 77.0
    undo.put_back()
    entry.put_back()
    assert rig.everything() == before
    assert [id(parameter) for parameter in rig.net.parameters()] == parameters
    again = Rig(optimizer)
    for _ in range(steps_before):
        again.step()
    again.optimizer.zero_grad()
    for one in (rig, again):
        one.state.changing = ()
        one.step(3)
    assert rig.state.digests() == again.state.digests()
