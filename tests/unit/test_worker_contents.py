"""What a checkpoint of a run holds: names that torch gives, each tensor once, nothing made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from everstep.worker import codec, contents
from everstep.worker.state import State


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def worker_of(state: State, **more: Any) -> Any:
    spec = SimpleNamespace(rank=1, world_size=2)
    usual = {"committed": 5, "carry": False, "values": {"best": 1.5}, "rng_key": b"key", "log": {}}
    return SimpleNamespace(
        state=state, spec=spec, source=None, streams=lambda: None, **(usual | more)
    )


def trained() -> tuple[Tied, torch.optim.AdamW, State]:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    state = State({"model": model, "optimizer": optimizer})
    model.head(model.norm(model.embed(torch.arange(4)))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, state


def test_torch_finds_its_names() -> None:
    model, optimizer, state = trained()
    packed = contents.pack(worker_of(state), gradients=False)
    expected = model.state_dict()
    assert packed["model"].keys() == expected.keys()
    assert all(torch.equal(packed["model"][key], expected[key]) for key in expected)
    theirs: Any = get_optimizer_state_dict(model, optimizer)
    assert packed["optimizer"]["state"].keys() == theirs["state"].keys()
    for name, entry in theirs["state"].items():
        ours = packed["optimizer"]["state"][name]
        assert all(torch.equal(ours[key], entry[key]) for key in entry)
    (group,) = packed["optimizer"]["param_groups"]
    assert group == theirs["param_groups"][0]


def test_nothing_is_copied_or_made() -> None:
    model, optimizer, state = trained()
    before = state.updates_seen(), len(optimizer.state)
    packed = contents.pack(worker_of(state), gradients=False)
    assert packed["model"]["head.weight"] is model.embed.weight
    assert (state.updates_seen(), len(optimizer.state)) == before
    fresh = State({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    assert "state" not in contents.pack(worker_of(fresh), gradients=False)["optimizer"]


def test_every_tensor_has_the_name_that_peers_know_it_by() -> None:
    model, _, state = trained()
    state.changing = ("model/norm.running_mean",)
    model.norm.weight.grad = torch.ones(3)
    packed = contents.pack(worker_of(state), gradients=True)
    keys = contents.tensor_keys(state, gradients=True)
    flat = flatten_state_dict(packed)[0]
    tensors = {key for key, value in flat.items() if isinstance(value, torch.Tensor)}
    assert keys.keys() == tensors
    replicas = {spec.name: tensor for spec, tensor in state.replicas(gradients=True)}
    assert set(keys.values()) == replicas.keys() | {"model/norm.running_mean"}
    for key, name in keys.items():
        if name in replicas:
            assert torch.equal(flat[key], replicas[name]), key


def test_what_belongs_to_the_rank_stands_under_its_number() -> None:
    model, _, state = trained()
    state.changing = ("model/norm.running_mean",)
    packed = contents.pack(worker_of(state), gradients=False)["everstep"]
    assert (packed["world"], packed["step"], packed["position"]) == (2, 5, None)
    assert packed["rank"].keys() == {"1"}
    own = contents.rank_only(packed["rank"]["1"])
    assert codec.decode(own.values) == {"best": 1.5}
    assert own.rng_key == b"key"
    assert own.buffers.keys() == {"model/norm.running_mean"}
    assert model.norm.running_mean is not None
    kept = codec.decode(own.buffers["model/norm.running_mean"])
    assert torch.equal(kept, model.norm.running_mean)


@pytest.mark.parametrize("said", [(0, 1), (1,)])
def test_where_others_hold_something_else_under_a_name_it_has_another(
    said: tuple[int, ...],
) -> None:
    _, _, state = trained()
    state.said = said
    packed = contents.pack(worker_of(state), gradients=False)
    whose = "-".join(map(str, said))
    assert packed.keys() == {f"model@{whose}", f"optimizer@{whose}", "everstep"}
    assert all(
        key.startswith((f"model@{whose}.", f"optimizer@{whose}."))
        for key in contents.tensor_keys(state)
    )


def test_parameters_of_several_modules_keep_apart() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9)
    state = State({"one": one, "two": two, "optimizer": optimizer})
    (one(torch.ones(2)) + two(torch.ones(2))).sum().backward()
    optimizer.step()
    packed = contents.pack(worker_of(state), gradients=False)
    assert packed["optimizer"]["state"].keys() == {
        "one.weight",
        "one.bias",
        "two.weight",
        "two.bias",
    }
