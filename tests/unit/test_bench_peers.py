"""How the comparison with peers folds events into figures."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.peers import fold, picture

RANKS = 2
FAULT = {"t": 10.0, "event": "fault", "step": 4, "rank": 1}


def step(t: float, number: int, rank: int | None, **more: Any) -> dict[str, Any]:
    fields = {"world": RANKS, "attempt": 0, "loss": 1.0 / number, **more}
    return {"t": t, "event": "step", "step": number, "rank": rank, **fields}


def end(rank: int, digest: str = "same") -> dict[str, Any]:
    return {"t": 99.0, "event": "end", "rank": rank, "digest": digest}


CLEAN = [
    *(step(float(number), number, rank) for number in range(1, 7) for rank in range(RANKS)),
    *(end(rank) for rank in range(RANKS)),
]


def test_the_step_is_done_again_by_all() -> None:
    late = step(10.1, 3, 0)  # written down late, made before the fault
    again = step(10.9, 3, 1)  # said again by the replacement
    events = [FAULT, late, again, step(11.0, 4, 0), step(11.5, 4, 1)]
    assert fold.recovery(events, RANKS) == fold.Recovery(
        first_step_s=1.0, full_strength_s=1.5, steps_lost=0, short_steps=0
    )


def test_back_to_a_checkpoint_is_caught_up_at_the_step_of_the_fault() -> None:
    redone = [
        step(15.0 + number + rank / 8, number, rank, attempt=1)
        for number in (2, 3, 4)
        for rank in range(RANKS)
    ]
    assert fold.recovery([FAULT, *redone], RANKS) == fold.Recovery(
        first_step_s=7.0,
        full_strength_s=9.125,
        steps_lost=2,
        short_steps=0,
    )


def test_steps_with_fewer_ranks_are_not_full_strength() -> None:
    events = [
        FAULT,
        step(12.0, 4, 0, world=1),
        step(13.0, 5, 0, world=1),
        step(13.1, 5, None, world=1),  # one that makes the step without taking part
        step(14.0, 6, 0),
        step(14.25, 6, 1),
    ]
    assert fold.recovery(events, RANKS) == fold.Recovery(
        first_step_s=2.0, full_strength_s=4.25, steps_lost=0, short_steps=2
    )
    assert fold.recovery(events[:3], RANKS).full_strength_s is None


@pytest.mark.parametrize("events", [[], CLEAN, [*CLEAN, FAULT]])
def test_what_was_not_measured_is_not_guessed(events: list[dict[str, Any]]) -> None:
    with pytest.raises(fold.NotMeasured):
        fold.recovery([e for e in events if e["t"] < 11.0], RANKS)


def test_the_last_making_of_a_step_counts_for_equality() -> None:
    wrong_first = [step(4.5, 4, 0, loss=7.0), step(4.6, 4, 0), *CLEAN]
    assert fold.difference(CLEAN, wrong_first) == ""
    assert fold.difference(CLEAN, [*CLEAN, step(9.0, 5, 1, loss=7.0)]) == "loss of rank 1 in step 5"
    assert fold.difference(CLEAN, [*CLEAN[:-1], end(1, "other")]) == "final state"
    assert fold.difference(CLEAN, CLEAN[:-4]) == "loss of rank 0 in step 6"


def test_a_clean_step_is_the_mean_without_the_first() -> None:
    assert fold.step_s(CLEAN) == pytest.approx(1.0)
    with pytest.raises(fold.NotMeasured):
        fold.step_s(CLEAN[:6])


def test_the_picture_names_what_it_shows() -> None:
    bar = picture.Bar(2.0, 1.5, 9.0)
    drawn = picture.draw("a & b", ("one", "two"), [picture.Row("<name>", "remark", (bar, None))])
    assert "a &amp; b" in drawn
    assert "&lt;name&gt;" in drawn
    assert ">2.0 s<" in drawn
    assert "not measured" in drawn
