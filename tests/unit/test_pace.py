"""The rate of steps, as it is shown while a run goes on."""

from __future__ import annotations

import pytest

from everstep.observe.pace import Pace


def fed(*steps: tuple[int, float]) -> Pace:
    """By step, when its record was written."""
    pace = Pace()
    for step, at_s in steps:
        pace.see({"event": "step", "step": step, "t": at_s})
    return pace


@pytest.mark.parametrize("step_s", [0.001, 0.05, 0.3, 7.0])
def test_an_even_pace(step_s: float) -> None:
    pace = fed(*((step, 5.0 + step * step_s) for step in range(1, 400)))
    assert pace.steps_per_s == pytest.approx(1 / step_s)


def test_one_moment_says_nothing() -> None:
    assert fed().steps_per_s is None
    assert fed((1, 1.0), (2, 1.05)).steps_per_s is None


def test_steps_that_are_told_at_once_were_made_one_after_the_other() -> None:
    """Two a second, and for a minute nobody wrote them down."""
    before = [(step, step / 2) for step in range(1, 21)]
    at_once = [(step, 70.0 + step / 1e5) for step in range(21, 141)]
    after = [(step, step / 2) for step in range(141, 150)]
    assert fed(*before, *at_once, *after).steps_per_s == pytest.approx(2.0, rel=0.01)
    assert fed(*at_once).steps_per_s is None
    assert fed(*at_once, *after).steps_per_s == pytest.approx(2.0, rel=0.05)
