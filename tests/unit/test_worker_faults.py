"""Faults in the worker: when one is due, and what a flipped bit does to a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from everstep import chaos
from everstep.wire import messages
from everstep.worker import faults
from everstep.worker.faults import ChaosError, Faults, flip_bit


class Bench:
    """The faults of a rank, and what was told of them."""

    def __init__(self, *texts: str) -> None:
        self.told: list[messages.Fired] = []
        self.committed = 0
        specs = tuple(chaos.parse(text, index) for index, text in enumerate(texts))
        control: Any = self
        self.faults = Faults(specs, control, lambda: self.committed)

    def send(self, message: messages.Fired) -> None:
        self.told.append(message)

    def fires(self, at: str, step: int | None = None) -> bool:
        """Whether a fault of kind `raise` fires at `at`."""
        before = len(self.told)
        try:
            self.faults.fire(at, step)
        except ChaosError:
            assert len(self.told) == before + 1
            return True
        assert len(self.told) == before
        return False


@pytest.mark.parametrize("place", chaos.IN_STEP)
def test_in_a_step_and_not_in_a_rehearsal(place: str) -> None:
    bench = Bench(f"raise:rank=0,step=3,at={place}")
    assert not bench.fires(place)  # a rehearsal: no step is under way
    bench.faults.step = 2
    assert not bench.fires(place)
    bench.faults.step = 3
    assert not bench.fires("between")
    assert bench.fires(place)
    assert not bench.fires(place)  # once in a job


def test_one_whose_place_was_passed_meets_the_next_step() -> None:
    bench = Bench("raise:rank=0,step=3,at=fence")
    bench.faults.step = 4
    assert bench.fires("fence")


def test_two_equal_ones_are_two() -> None:
    text = "raise:rank=0,step=3,at=fence"
    bench = Bench(text, text)
    bench.faults.step = 3
    assert bench.fires("fence")
    assert bench.fires("fence")
    assert not bench.fires("fence")
    assert [fired.index for fired in bench.told] == [0, 1]


@pytest.mark.parametrize("place", ["between", "section"])
def test_after_a_step(place: str) -> None:
    bench = Bench(f"raise:rank=0,step=3,at={place}")
    bench.committed = 2
    bench.faults.step = 3  # still under way: not after it
    assert not bench.fires(place)
    bench.committed = 3
    assert bench.fires(place)


def test_in_a_process_that_has_not_joined_nothing_comes_after_a_step() -> None:
    bench = Bench("raise:rank=0,step=1,at=between")
    assert not bench.fires("between")


@pytest.mark.parametrize("place", chaos.IN_RECOVERY)
def test_in_a_recovery_of_the_step_or_a_later_one(place: str) -> None:
    bench = Bench(f"raise:rank=0,step=3,at={place}")
    assert not bench.fires(place, 2)
    assert bench.fires(place, 4)


def test_in_the_set_up() -> None:
    bench = Bench("raise:rank=0,at=setup", "raise:rank=0,step=1,at=forward")
    assert bench.fires("setup")
    assert not bench.fires("setup")


def test_hooks_stand_in_the_middle_of_both_passes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    bench = Bench("raise:rank=0,step=1,at=forward", "raise:rank=0,step=1,at=backward")
    bench.faults.attach(model)
    bench.faults.step = 1
    with pytest.raises(ChaosError, match="at=forward"):
        model(torch.ones(2))
    loss = model(torch.ones(2)).sum()
    with pytest.raises(ChaosError, match="at=backward"):
        loss.backward()


def test_slow_takes_its_factor_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime(100.0)
    monkeypatch.setattr(faults, "time", clock)
    bench = Bench("slow=4:rank=0,step=2,at=fence", "slow=3:rank=0,step=1,at=fence")
    bench.faults.step = 1
    clock.now_s += 2.0
    bench.faults.fire("fence")  # nothing is known yet but the two seconds so far
    clock.now_s += 1.0
    bench.faults.step = 0
    clock.now_s += 50.0  # between the steps
    bench.faults.step = 2
    bench.faults.fire("fence")
    assert clock.slept == [4.0, 21.0]  # (3 - 1) * 2, (4 - 1) * (2 + 4 + 1)


class FakeTime:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
@pytest.mark.parametrize("layout", ["plain", "transposed", "scalar"])
def test_a_flipped_bit_is_one_and_silent(dtype: torch.dtype, layout: str) -> None:
    shape = () if layout == "scalar" else (3, 5)
    values = torch.randn(shape, dtype=dtype)
    parameter = nn.Parameter(values.t() if layout == "transposed" else values)
    before, version = parameter.detach().clone(), parameter._version
    flip_bit(parameter)
    changed = (parameter.detach() != before).reshape(-1)
    assert int(changed.sum()) == 1
    assert int(changed.nonzero()) == int(before.abs().reshape(-1).argmax())
    assert bool(torch.isfinite(parameter.detach()).all())
    assert parameter._version == version
    one, two = (
        t.detach().reshape(-1).contiguous().view(torch.uint8).tolist() for t in (before, parameter)
    )
    assert sum((a ^ b).bit_count() for a, b in zip(one, two, strict=True)) == 1


def test_corrupt_flips_a_bit_of_what_is_stored_here() -> None:
    model = nn.ParameterList([torch.empty(0), torch.ones(2), torch.ones(2)])
    bench = Bench("corrupt:rank=0,step=1,at=between")
    bench.faults.attach(model)
    bench.committed = 1
    bench.faults.fire("between")
    assert [int((parameter != 1).sum()) for parameter in model] == [0, 1, 0]
