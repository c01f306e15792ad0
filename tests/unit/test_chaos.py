"""Fault specifications: what is understood, and what is refused with what to do."""

from __future__ import annotations

import pytest

from everstep import chaos
from everstep.errors import UserError


@pytest.mark.parametrize("kind", ["kill", "term", "segv", "abort", "raise"])
def test_kinds_are_taken_as_written(kind: str) -> None:
    spec = chaos.parse(f"{kind}:rank=1,step=5,at=fence", index=3)
    assert (spec.kind, spec.rank, spec.step, spec.at, spec.code, spec.index) == (
        kind,
        1,
        5,
        "fence",
        0,
        3,
    )
    assert spec.text == f"{kind}:rank=1,step=5,at=fence"


@pytest.mark.parametrize(("text", "code"), [("exit0", 0), ("exit=1", 1), ("exit=255", 255)])
def test_exits_carry_their_code(text: str, code: int) -> None:
    spec = chaos.parse(f"{text}:rank=0,step=1")
    assert (spec.kind, spec.code) == ("exit", code)


def test_the_place_is_backward_unless_given() -> None:
    assert chaos.parse("kill:rank=0,step=1").at == "backward"


@pytest.mark.parametrize("place", ["forward", "backward", "fence", "optimizer", "between"])
def test_places(place: str) -> None:
    assert chaos.parse(f"kill:step=2,at={place},rank=0").at == place


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kil:rank=1,step=5", "did you mean 'kill'"),
        ("hang:rank=1,step=5", "it is one of kill, term"),
        ("kill", "no rank and no step"),
        ("kill:", "is not key=value"),
        ("kill:rank=1", "step is missing"),
        ("kill:at=fence", "rank and step is missing"),
        ("kill:rank=1,step", "'step' is not key=value"),
        ("kill:rank=1,step=", "'step=' is not key=value"),
        ("kill:rank=1,stpe=5", "did you mean 'step'"),
        ("kill:rank=1,step=5,when=now", "the keys are rank, step, at"),
        ("kill:rank=1,rank=2,step=5", "rank is given twice"),
        ("kill:rank=one,step=5", "rank=one is not a whole number"),
        ("kill:rank=1.5,step=5", "rank=1.5 is not a whole number"),
        ("kill:rank=²,step=5", "not a whole number"),
        ("kill:rank=-1,step=5", "ranks count from 0"),
        ("kill:rank=1,step=0", "step=0 can never fire"),
        ("kill:rank=1,step=-3", "steps count from 1"),
        ("kill:rank=1,step=5,at=backwards", "did you mean 'backward'"),
        ("kill:rank=1,step=5,at=moon", "forward, backward, fence, optimizer, between"),
        ("exit=0:rank=1,step=5", "exit0 for an early end"),
        ("exit=256:rank=1,step=5", "exit=1 to exit=255"),
        ("exit=-1:rank=1,step=5", "exit=1 to exit=255"),
        ("exit=x:rank=1,step=5", "exit=x is not a whole number"),
        ("exit:rank=1,step=5", "exit=1 to exit=255"),
        ("", "is no kind of fault"),
    ],
)
def test_refusals_name_the_fault_and_what_to_do(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        chaos.parse(text)
    assert says in str(caught.value)
    assert repr(text) in str(caught.value)


def test_all_are_numbered_in_order_and_equal_ones_are_two() -> None:
    text = "kill:rank=1,step=5"
    specs = chaos.parse_all([text, "raise:rank=3,step=9", text], world_size=4)
    assert [spec.index for spec in specs] == [0, 1, 2]


@pytest.mark.parametrize(
    ("rank", "world_size", "says"), [(4, 4, "ranks 0 to 3"), (1, 1, "only rank 0")]
)
def test_a_rank_that_the_job_does_not_have_can_never_fire(
    rank: int, world_size: int, says: str
) -> None:
    with pytest.raises(UserError, match="can never fire") as caught:
        chaos.parse_all([f"kill:rank={rank},step=1"], world_size)
    assert says in str(caught.value)
