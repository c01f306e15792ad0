"""The protected state: names, refusals, digests; a receiver is made to fit its donor's manifest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.fakegroups import FakeWorld, in_c10d
from torch.utils.data import DataLoader, TensorDataset

from everstep.errors import UserError
from everstep.worker.state import State, digest_of

torch.set_num_threads(1)


class Net(torch.nn.Module):
    """A bit of everything: tied weights, a 0-dim parameter, an empty one, buffers of both kinds."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.one = torch.nn.Linear(width, width)
        self.tied = torch.nn.Linear(width, width)
        self.tied.weight = self.one.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.none = torch.nn.Parameter(torch.empty(0, 2))
        self.norm = torch.nn.BatchNorm1d(width)
        self.register_buffer("mask", torch.ones(2, 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.norm(self.tied(self.one(x))) * self.scale
        return value


class Box:
    """An object with a state, kept as its attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def adamw(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1)


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def plain_sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def adagrad(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(net.parameters(), lr=0.1)


def adafactor(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for p in net.parameters() if p.numel()], lr=0.1)


def capturable(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1))


def lbfgs(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([p for p in net.parameters() if p.numel()], max_iter=2)


OPTIMIZERS = [adamw, sgd, plain_sgd, adagrad, adafactor, capturable]


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(4, 3, generator=generator)

        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()


def make(make_optimizer: Any, steps: int, seed: int = 0) -> State:
    torch.manual_seed(seed)
    net = Net()
    optimizer = make_optimizer(net)
    train(net, optimizer, steps, seed)
    return State({"model": net, "optimizer": optimizer})


def copy_state(donor: State, receiver: State, *, gradients: bool = False) -> None:
    """What a transfer does, without the wire."""
    replicas = donor.replicas(gradients)
    targets = receiver.adopt([spec for spec, _ in replicas])
    with torch.no_grad():
        for target, (_, tensor) in zip(targets, replicas, strict=True):
            target.copy_(tensor)
    receiver.load_leaves(donor.leaves())


# ---------------------------------------------------------------- what is protected


def test_names_are_stable_and_each_tensor_comes_once() -> None:
    state = make(adamw, 1)
    names = [spec.name for spec, _ in state.replicas()]
    assert names[:3] == ["model/scale", "model/none", "model/one.weight"]
    assert len(names) == len(set(names))
    assert "model/tied.weight" not in names  # the same tensor as one.weight
    assert {"model/mask", "model/norm.running_mean", "optimizer/0/0/exp_avg"} <= set(names)


def test_lists_are_named_by_place() -> None:
    net, other = Net(), torch.nn.Linear(1, 1)
    state = State(
        {"nets": [net, [other]], "optimizers": (adamw(net), sgd(other)), "schedulers": [Box(a=1)]}
    )
    assert set(state.modules) == {"nets.0", "nets.1.0"}
    assert set(state.optimizers) == {"optimizers.0", "optimizers.1"}
    assert set(state.objects) == {"schedulers.0"}


@pytest.mark.parametrize(
    ("things", "words"),
    [
        (lambda n: {"model": n}, "no optimizer"),
        (lambda n: {"model": [], "optimizer": adamw(n)}, "no module"),
        (
            lambda n: {"model": torch.nn.Linear(1, 1), "optimizer": adamw(n)},
            "belongs to no protected module",
        ),
        (lambda n: {"a/b": n, "optimizer": adamw(n)}, "must not contain"),
        (lambda n: {"model": n, "optimizer": adamw(n), "x": 3}, "has no state_dict"),
        (lambda n: {"model": n, "optimizer": adamw(n), "x": [None]}, "has no state_dict"),
        (lambda n: {"model": n, "x": DataLoader(TensorDataset())}, r"DataLoader.*x = run.data\("),
        (lambda n: {"model": n, "x": TensorDataset()}, r"x = run.data\(dataset, batch_size="),
        (lambda n: {"model": n, "x": iter([1])}, r"run.data\(dataset, batch_size="),
        (lambda n: {"model": n, "x": torch.ones(1)}, "Tensor has no .* put it into a module"),
        (lambda n: {"model": n, "optimizer": adamw(n), "x": Box(a=object())}, "does not keep"),
        (lambda n: {"m": [n], "m.0": Net(), "optimizer": adamw(n)}, "two things are named 'm.0'"),
    ],
)
def test_what_cannot_be_protected_is_refused(things: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        State(things(Net()))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # at the import
def test_zero_keeps_each_ranks_part_of_the_optimizer() -> None:
    """What the outer one has is param_groups; the state is its own optimizer's."""
    with in_c10d(FakeWorld(solo=True)):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        net = torch.nn.Linear(2, 2)
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
        )
        state = State({"model": net, "optimizer": optimizer})
        assert list(state.optimizers) == ["optimizer", "optimizer.local"]
        overlapping = ZeroRedundancyOptimizer(
            net.parameters(), optimizer_class=torch.optim.SGD, lr=0.1
        )
        overlapping._overlap_with_ddp = True
        with pytest.raises(UserError, match="inside the backward pass"):
            State({"model": net, "optimizer": overlapping})


# ---------------------------------------------------------------- a receiver is made equal


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("donor_steps", "receiver_steps"), [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_a_receiver_becomes_its_donor_and_trains_on_like_it(
    make_optimizer: Any, donor_steps: int, receiver_steps: int
) -> None:
    donor = make(make_optimizer, donor_steps, seed=1)
    receiver = make(make_optimizer, receiver_steps, seed=2)
    before = {name: id(tensor) for name, tensor in receiver.parameters()}
    copy_state(donor, receiver)
    assert receiver.digests() == donor.digests()
    assert {name: id(tensor) for name, tensor in receiver.parameters()} == before
    for state in (donor, receiver):
        train(state.modules["model"], state.optimizers["optimizer"], 2, seed=9)
    assert receiver.digests() == donor.digests()


def test_a_capturable_learning_rate_stays_the_same_tensor() -> None:
    donor, receiver = make(capturable, 1), make(capturable, 0)
    donor.optimizers["optimizer"].param_groups[0]["lr"].fill_(0.25)
    held = receiver.optimizers["optimizer"].param_groups[0]["lr"]
    copy_state(donor, receiver)
    assert held is receiver.optimizers["optimizer"].param_groups[0]["lr"]
    assert float(held) == 0.25


def test_values_in_param_groups_are_created_and_removed_by_the_donor() -> None:
    donor, receiver = make(sgd, 1), make(sgd, 1)
    donor.optimizers["optimizer"].param_groups[0].update(z=1, initial_lr=0.5)
    receiver.optimizers["optimizer"].param_groups[0].update(stale=1, initial_lr=0.1)
    copy_state(donor, receiver)
    assert "stale" not in receiver.optimizers["optimizer"].param_groups[0]
    assert receiver.digests() == donor.digests()
    assert receiver.leaves().digest() == donor.leaves().digest()


def test_scalars_in_optimizer_state_are_created_and_removed_by_the_donor() -> None:
    donor, receiver = make(sgd, 1), make(sgd, 1)
    first = donor.optimizers["optimizer"].param_groups[0]["params"][0]
    donor.optimizers["optimizer"].state[first].update(count=3, history=[torch.ones(2)])
    mine = receiver.optimizers["optimizer"].param_groups[0]["params"][0]
    receiver.optimizers["optimizer"].state[mine].update(stale=1, count=torch.zeros(1))
    copy_state(donor, receiver)
    entry = receiver.optimizers["optimizer"].state[mine]
    assert entry["count"] == 3
    assert "stale" not in entry
    assert receiver.digests() == donor.digests()


def test_an_object_that_keeps_its_values_in_another_order_is_no_corrupt_copy() -> None:
    torch.manual_seed(0)
    net = Net()
    one = State({"model": net, "optimizer": sgd(net), "box": Box(a=1, b=2)})
    other = State({"model": net, "optimizer": sgd(net), "box": Box(b=0, a=0)})
    other.load_leaves(one.leaves())
    assert other.leaves().digest() == one.leaves().digest()
    assert other.digests() == one.digests()
    other.objects["box"].a = 3
    assert other.leaves().digest() != one.leaves().digest()
    assert other.digests() != one.digests()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_travel_where_they_are_carried(dtype: torch.dtype) -> None:
    donor, receiver = make(sgd, 1, seed=1), make(sgd, 1, seed=2)
    for parameter in donor.modules["model"].parameters():
        parameter.grad = torch.full_like(parameter, 7)
    extra = receiver.modules["model"].get_parameter("scale")
    donor.modules["model"].get_parameter("scale").grad = None
    extra.grad = torch.ones_like(extra)
    copy_state(donor, receiver, gradients=True)
    assert not _has_grad(extra)
    weight = receiver.modules["model"].get_parameter("one.weight")
    assert weight.grad is not None
    assert weight.grad.eq(7).all()


def test_without_gradients_the_receivers_own_are_dropped() -> None:
    donor, receiver = make(sgd, 1), make(sgd, 1)
    copy_state(donor, receiver)
    assert all(parameter.grad is None for _, parameter in receiver.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.register_parameter("more", torch.nn.Parameter(torch.ones(1))),
        lambda net: setattr(net, "scale", None),
        lambda net: setattr(net, "scale", torch.nn.Parameter(torch.ones(1))),
        lambda net: net.double(),
        lambda net: net.register_buffer("mask", torch.ones(3)),
        lambda net: setattr(net, "mask", None),
    ],
)
def test_a_process_with_another_model_is_refused(change: Any) -> None:
    donor = make(plain_sgd, 0)
    net = Net()
    change(net)
    receiver = State({"model": net, "optimizer": plain_sgd(net)})
    with pytest.raises(UserError, match="same model each time"):
        receiver.adopt([spec for spec, _ in donor.replicas()])


def test_changing_buffers_are_no_replicas() -> None:
    state = make(adamw, 1)
    state.changing = ("model/norm.running_mean",)
    names = [spec.name for spec, _ in state.replicas()]
    assert "model/norm.running_mean" not in names
    assert "model/norm.running_var" in names


def _has_grad(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None


# ---------------------------------------------------------------- digests


@settings(deadline=None)
@given(st.data())
def test_one_changed_bit_anywhere_changes_the_digest(data: st.DataObject) -> None:
    state = make(adamw, 1)
    before = state.digests()
    replicas = [(spec, tensor) for spec, tensor in state.replicas() if tensor.numel()]
    spec, tensor = data.draw(st.sampled_from(replicas), label="tensor")
    raw = tensor.reshape(-1).view(torch.uint8)
    index = data.draw(st.integers(0, raw.numel() - 1), label="byte")
    raw[index] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    after = state.digests()
    assert {name for name in after if after[name] != before[name]} == {spec.name}


def test_the_manifest_digest_sees_names_shapes_and_dtypes() -> None:
    def digest(net: torch.nn.Module, data: str = "d") -> str:
        return State({"model": net, "optimizer": plain_sgd(net)}).manifest_digest(data)

    same = digest(Net())
    assert digest(Net()) == same
    assert len({same, digest(Net(4)), digest(Net().double()), digest(Net(), "e")}) == 4


def test_a_digest_is_one_of_content_not_of_layout() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert digest_of([tensor.t().contiguous().t()]) == digest_of([tensor])
    assert digest_of([tensor], b"x") != digest_of([tensor])


@pytest.mark.parametrize("enabled", [False, True])
def test_a_scaler_is_put_back_whether_it_is_enabled_or_not(enabled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State({"model": model, "optimizer": optimizer, "scaler": scaler})
    scaler.scale(torch.ones(()))
    steering = state.steering()
    scaler.update(16.0)
    state.load_steering(steering)
    assert scaler.get_scale() == (4.0 if enabled else 1.0)
