"""Saves of one state again and again: as DCP would plan each, and planned anew when it changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict_saver import save

from everstep.errors import UserError
from everstep.tiers import TieredWriter, again, load_newest
from everstep.tiers.settings import TierSettings

PATIENCE_S = 30.0


@pytest.fixture
def settings(tmp_path: Path) -> TierSettings:
    return TierSettings(series="run", destination=str(tmp_path), durable_every=1, on_busy="wait")


@pytest.fixture
def writer(settings: TierSettings) -> Iterator[TieredWriter]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    made = TieredWriter(settings)
    yield made
    made.close()
    dist.destroy_process_group()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that DCP has planned."""
    steps: list[int] = []
    plan = save

    def count(state: Any, *, checkpoint_id: str, **how: Any) -> Any:
        steps.append(int(checkpoint_id))
        return plan(state, checkpoint_id=checkpoint_id, **how)

    monkeypatch.setattr(again, "dcp_save", count)
    return steps


def found(writer: TieredWriter, settings: TierSettings, like: dict[str, Any]) -> dict[str, Any]:
    assert writer.wait(PATIENCE_S)
    writer.check()
    target = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for key, value in like.items()
    }
    load_newest(target, settings)
    return target


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
    )


def test_a_plan_serves_as_long_as_the_state_keeps_its_shape(
    writer: TieredWriter, settings: TierSettings, planned: list[int]
) -> None:
    weight = torch.ones(4)
    states: list[dict[str, Any]] = [
        {"w": weight, "v": weight.view(-1), "lr": 0.1},
        {"w": weight * 2, "v": weight * 3, "lr": [0.2]},  # no longer one tensor: planned anew
        {"w": weight * 4, "v": weight * 5, "lr": None},
        {"w": weight * 6, "v": torch.ones(2, 3), "lr": 1},  # another shape
        {"w": weight * 7, "v": torch.ones(2, 3), "lr": 2, "more": 3},
        {"w": weight * 8, "v": torch.ones(2, 3).half(), "lr": 2, "more": 3},
        {"w": weight * 9, "v": torch.zeros(2, 3).half(), "lr": 5, "more": 6},
    ]
    for step, state in enumerate(states, 1):
        writer.save(state, step)
        assert same(found(writer, settings, state), state), step
    assert planned == [1, 2, 4, 5, 6]


def test_one_process_needs_no_group(settings: TierSettings) -> None:
    writer = TieredWriter(settings)
    for step in (1, 2):
        writer.save({"w": torch.full((2,), float(step))}, step)
    assert found(writer, settings, {"w": torch.ones(2)})["w"].tolist() == [2.0, 2.0]
    writer.close()


def test_what_cannot_be_saved_is_named(
    writer: TieredWriter, settings: TierSettings, planned: list[int]
) -> None:
    for step in (1, 3):  # planned by DCP, and by the plan that is kept
        with pytest.raises(UserError, match=r"odd is a builtins\.object"):
            writer.save({"w": torch.ones(2), "odd": object()}, step)
        state = {"w": torch.ones(2), "odd": step}
        writer.save(state, step + 1)
        assert same(found(writer, settings, state), state)
    assert planned == [1, 2]
