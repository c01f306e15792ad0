"""Comparing two runs, on records made by hand: no processes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from everstep.launch import evidence
from everstep.launch.evidence import Evidence, EvidenceError

Line = dict[str, Any]


def line(step: int, rank: int, value: Any = None, samples: Any = (1, 2)) -> Line:
    value = f"0x1.{step}{rank}p+0" if value is None else value
    return {"rank": rank, "step": step, "record": {"value": value, "samples": list(samples)}}


def lines(steps: int = 3, ranks: int = 2) -> list[Line]:
    return [line(step, rank) for step in range(1, steps + 1) for rank in range(ranks)]


def made_of(trace: Iterable[Line], digests: dict[int, dict[str, str]] | None = None) -> Evidence:
    folded, contradiction = evidence.fold_trace(trace)
    return Evidence(trace=folded, digests=digests or {}, contradiction=contradiction)


def difference(left: Evidence, right: Evidence) -> str:
    found = evidence.first_difference(left, right)
    assert found is not None
    return str(found)


def test_equal_runs_do_not_differ_whatever_the_order_of_their_lines() -> None:
    digests = {0: {"model.w": "ab"}, 1: {"model.w": "cd"}}
    left, right = (
        made_of(lines(), digests),
        made_of(reversed(lines()), dict(reversed(digests.items()))),
    )
    assert evidence.first_difference(left, right) is None
    assert left.steps == 3


def test_the_earliest_step_is_named_and_in_it_the_lowest_rank() -> None:
    other = [
        line(1, 0),
        line(1, 1),
        line(3, 0, "x"),
        line(3, 1),
        line(2, 1, "y"),
        line(2, 0, samples=(1, 3)),
    ]
    text = difference(made_of(lines()), made_of(other))
    assert text == "rank 0, in step 2: samples differs: [1, 2] against [1, 3]"


@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_record_that_is_missing_is_a_difference(at: int) -> None:
    some = lines()
    gone = some[at]
    text = difference(made_of(lines()), made_of(some[:at] + some[at + 1 :]))
    where = f"rank {gone['rank']}, in step {gone['step']}"
    assert text == f"{where}: what was recorded differs: a record against nothing"
    assert "nothing against a record" in difference(
        made_of(some[:at] + some[at + 1 :]), made_of(lines())
    )


def test_a_part_that_one_run_lacks_is_a_difference() -> None:
    shorter = lines()
    del shorter[0]["record"]["samples"]
    assert "samples differs: [1, 2] against nothing" in difference(
        made_of(lines()), made_of(shorter)
    )


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        (1, 1.0, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        (None, 0, False),
        ("ab" * 500, "ab" * 499 + "ac", False),
    ],
)
def test_values_are_compared_as_they_are_written(left: Any, right: Any, equal: bool) -> None:
    sides = [
        made_of([{"rank": 0, "step": 1, "record": {"value": value}}]) for value in (left, right)
    ]
    found = evidence.first_difference(*sides)
    assert (found is None) is equal
    assert found is None or len(str(found)) < 500


def test_a_step_recorded_twice_alike_is_one_and_not_alike_is_a_contradiction() -> None:
    twice = made_of([*lines(), line(2, 1)])
    assert evidence.first_difference(made_of(lines()), twice) is None
    torn = made_of([*lines(), line(2, 1, "other"), line(3, 0, "later")])
    text = difference(made_of(lines()), torn)
    assert text.startswith("rank 1, in step 2: value (recorded twice by one run) differs:")
    assert difference(torn, made_of(lines())) == text


def test_a_contradiction_is_found_even_when_the_last_record_agrees() -> None:
    torn = made_of([line(1, 0, "x"), line(1, 0)])
    assert evidence.first_difference(made_of([line(1, 0)]), torn) is not None


def test_the_state_at_the_end_is_compared_last() -> None:
    left = made_of(lines(), {0: {"model.w": "ab", "optimizer.m": "cd"}})
    right = made_of(lines(), {0: {"model.w": "ab", "optimizer.m": "ce"}})
    assert difference(left, right) == "rank 0, at the end: optimizer.m differs: cd against ce"
    gone = made_of(lines(), {})
    assert (
        "rank 0, at the end: the digest of the state differs: a record against nothing"
        in difference(left, gone)
    )


def write_run(folder: Path, trace: Iterable[Line], digests: Any) -> Path:
    (folder / "trace.jsonl").write_text("".join(json.dumps(one) + "\n" for one in trace))
    (folder / "digests.json").write_text(json.dumps(digests))
    return folder


def test_reading_a_run_s_directory(tmp_path: Path) -> None:
    found = evidence.read(write_run(tmp_path, lines(), {"0": {"model.w": "ab"}}))
    assert found == made_of(lines(), {0: {"model.w": "ab"}})


def test_what_can_not_be_compared_is_said(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"left no trace\.jsonl"):
        evidence.read(tmp_path)
    (tmp_path / "trace.jsonl").write_text("")
    with pytest.raises(EvidenceError, match=r"left no digests\.json"):
        evidence.read(tmp_path)
    with pytest.raises(EvidenceError, match=r"must call its step through run\.step"):
        evidence.read(write_run(tmp_path, [], {}))
    with pytest.raises(EvidenceError, match="can not be read"):
        evidence.read(write_run(tmp_path, [{"rank": 1}], {}))
    with pytest.raises(EvidenceError, match="can not be read"):
        evidence.read(write_run(tmp_path, lines(), [1]))
    (tmp_path / "trace.jsonl").write_text('{"rank": 0, "st')
    with pytest.raises(EvidenceError, match="can not be read"):
        evidence.read(tmp_path)


def test_exact_floats_are_shown_with_their_decimal_form() -> None:
    one, other = (1.0 / 3).hex(), (-0.1).hex()
    left, right = ([line(1, 0, [["torch.float32", bits]])] for bits in (one, other))
    text = difference(made_of(left), made_of(right))
    assert f'"{one} (0.3333333333333333)"' in text
    assert f'"{other} (-0.1)"' in text
    left, right = ([line(1, 0, bits)] for bits in ((0.0).hex(), "nan"))
    assert '"0x0.0p+0 (0.0)" against "nan"' in difference(made_of(left), made_of(right))


def test_a_run_that_recorded_no_value_is_silent() -> None:
    assert made_of([line(1, 0, []), line(1, 1, [])]).silent
    assert not made_of([line(1, 0, []), line(1, 1)]).silent
