"""Fault specifications: what is understood, and what is refused with what to do."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep import chaos
from everstep.errors import UserError


@pytest.mark.parametrize(
    "kind", ["kill", "term", "segv", "abort", "raise", "stop", "hang", "oom", "corrupt"]
)
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


@pytest.mark.parametrize(
    "place",
    [
        *("forward", "backward", "fence", "optimizer", "commit", "between", "section"),
        *("recovery", "rebuild", "fetch", "serve"),
    ],
)
def test_places(place: str) -> None:
    assert chaos.parse(f"kill:step=2,at={place},rank=0").at == place


@pytest.mark.parametrize("text", ["kill:rank=1,at=setup", "kill:rank=1,step=0,at=setup"])
def test_the_set_up_is_before_all_steps(text: str) -> None:
    assert (chaos.parse(text).step, chaos.parse(text).at) == (0, "setup")


@pytest.mark.parametrize(("text", "factor"), [("slow=3", 3.0), ("slow=1.5", 1.5)])
def test_slow_carries_its_factor(text: str, factor: float) -> None:
    spec = chaos.parse(f"{text}:rank=0,step=1,at=forward")
    assert (spec.kind, spec.factor) == ("slow", factor)


def test_every_kind_and_place_can_be_written_and_is_told_apart() -> None:
    """A kind or a place that a worker is told of is one that a person can ask for."""
    written = {
        "exit": "exit=3",
        "slow": "slow=2",
    }
    for kind in chaos.KINDS:
        who = "index" if kind in chaos.OF_NODES else "rank"
        assert chaos.parse(f"{written.get(kind, kind)}:{who}=0,step=2").kind == kind
    said = {chaos.where(chaos.parse(f"kill:rank=0,step=2,at={p}")) for p in chaos.PLACES[1:]}
    said.add(chaos.where(chaos.parse("kill:rank=0,at=setup")))
    assert len(said) == len(chaos.PLACES)
    assert {"backward of step 2", "fetch in a recovery of step 2 or later"} <= said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kil:rank=1,step=5", "did you mean 'kill'"),
        ("moon:rank=1,step=5", "it is one of kill, term"),
        ("rndom:count=1", "did you mean 'random'"),
        ("kill", "no rank and no step"),
        ("kill:", "is not key=value"),
        ("kill:rank=1", "step is missing"),
        ("kill:at=fence", "rank and step are missing"),
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
        ("kill:rank=1,step=5,at=moon", "fence, optimizer, commit, between, section, recovery"),
        ("kill:rank=1,step=3,at=setup", "is no part of the set-up"),
        ("kill:at=setup", "rank is missing"),
        ("kill:rank=1,at=recovery", "step is missing"),
        ("slow:rank=1,step=5", "a number above 1"),
        ("slow=1:rank=1,step=5", "a number above 1"),
        ("slow=inf:rank=1,step=5", "a number above 1"),
        ("slow=nan:rank=1,step=5", "a number above 1"),
        ("slow=2:rank=1,step=5,at=between", "its place is one of forward"),
        ("slow=2:rank=1,step=5,at=fetch", "its place is one of forward"),
        ("corrupt:rank=1,at=setup", "comes before run.protect"),
        ("corrupt:rank=1,step=5,at=fetch", "is overwritten by what is fetched"),
        ("exit=0:rank=1,step=5", "exit0 for an early end"),
        ("exit=256:rank=1,step=5", "exit=1 to exit=255"),
        ("exit=-1:rank=1,step=5", "exit=1 to exit=255"),
        ("exit=x:rank=1,step=5", "exit=x is not a whole number"),
        ("exit:rank=1,step=5", "exit=1 to exit=255"),
        ("", "is no kind of fault"),
        ("node", "no slot and no step; write node|agent:index=I"),
        ("node:rank=1,step=5", "the keys are index, step, at"),
        ("agent:index=-1,step=5", "slots count from 0"),
        ("agent:step=5", "index is missing"),
    ],
)
def test_refusals_name_the_fault_and_what_to_do(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        chaos.parse(text)
    assert says in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("random", "neither how many nor where"),
        ("random:", "is not key=value"),
        ("random:seed=1", "count and steps are missing"),
        ("random:count=2,seed=1", "steps is missing"),
        ("random:count=2,seed=1,steps=1-9,rank=1", "the keys are count, seed, steps"),
        ("random:count=x,seed=1,steps=1-9", "count=x is not a whole number"),
        ("random:count=0,seed=1,steps=1-9", "count=0 is not 1 to"),
        ("random:count=10,seed=1,steps=1-9", "10 faults do not fit into 9 steps"),
        ("random:count=1,seed=-1,steps=1-9", "seed=-1 is below 0"),
        ("random:count=1,seed=1,steps=9", "steps=9 is not A-B"),
        ("random:count=1,seed=1,steps=-9", "steps=-9 is not A-B"),
        ("random:count=1,seed=1,steps=0-9", "can never fire in step 0"),
        ("random:count=1,seed=1,steps=9-1", "ends before it begins"),
        ("random:count=1,seed=1,steps=1-9,kinds=kill+kil", "did you mean 'kill'"),
        ("random:count=1,seed=1,steps=1-9,kinds=exit=300", "exit=1 to exit=255"),
        ("random:count=1,seed=1,steps=1-9,kinds=kill+", "'' is no kind of fault"),
        ("random:count=1,seed=1,steps=1-9,places=fense", "did you mean 'fence'"),
        (
            "random:count=1,seed=1,steps=1-9,kinds=kill+slow=2,places=between+setup",
            "slow=2 can never fire at between or setup",
        ),
    ],
)
def test_refusals_of_random_faults(text: str, says: str) -> None:
    with pytest.raises(UserError) as checked:
        chaos.check(text)
    with pytest.raises(UserError) as caught:
        chaos.parse_all([text], 4)
    assert says in str(caught.value)
    assert repr(text) in str(caught.value)
    assert str(checked.value) == str(caught.value)


@pytest.mark.parametrize(
    ("text", "world_size", "drawn"),
    [
        (
            "random:count=6,seed=1,steps=3-20",
            4,
            [
                "raise:rank=3,step=3,at=backward",
                "abort:rank=1,step=6,at=commit",
                "exit0:rank=0,step=9,at=fence",
                "segv:rank=0,step=13,at=commit",
                "exit0:rank=3,step=15,at=forward",
                "exit0:rank=2,step=18,at=fence",
            ],
        ),
        (
            "random:count=3,seed=2,steps=1-3,kinds=kill+slow=2+exit=3,places=forward+between",
            2,
            [
                "kill:rank=1,step=1,at=forward",
                "exit=3:rank=1,step=2,at=forward",
                "slow=2:rank=1,step=3,at=forward",
            ],
        ),
        (
            "random:count=4,seed=7,steps=5-30,kinds=corrupt+raise,places=setup+fetch+serve",
            3,
            [
                "raise:rank=0,at=setup",
                "corrupt:rank=1,step=14,at=serve",
                "corrupt:rank=1,step=18,at=serve",
                "corrupt:rank=2,step=26,at=serve",
            ],
        ),
    ],
)
def test_a_seed_gives_these_faults_on_every_machine(
    text: str, world_size: int, drawn: list[str]
) -> None:
    """Golden vectors: a change here changes what everybody's seeds mean."""
    assert [spec.text for spec in chaos.parse_all([text], world_size)] == drawn


@given(
    st.integers(1, 300),
    st.integers(0, 2**64),
    st.integers(1, 50),
    st.integers(0, 900),
    st.integers(1, 9),
)
def test_random_faults_are_spread_and_never_meet(
    count: int, seed: int, first: int, more: int, world_size: int
) -> None:
    text = f"random:count={count},seed={seed},steps={first}-{first + count - 1 + more}"
    specs = chaos.parse_all([text], world_size)
    assert specs == chaos.parse_all([text], world_size)
    assert [spec.index for spec in specs] == list(range(count))
    steps = [spec.step for spec in specs]
    assert steps[0] >= first
    assert steps[-1] < first + count + more
    apart = 2 if more >= count else 1  # two steps or more for each: one stays free
    assert all(two - one >= apart for one, two in itertools.pairwise(steps))
    assert all(spec.rank < world_size for spec in specs)
    assert all(spec == chaos.parse(spec.text, spec.index) for spec in specs)


def test_random_faults_are_numbered_among_the_others() -> None:
    texts = ["kill:rank=0,step=1", "random:count=2,seed=5,steps=2-9", "raise:rank=1,step=9"]
    specs = chaos.parse_all(texts, world_size=2)
    assert [spec.index for spec in specs] == [0, 1, 2, 3]
    assert [specs[0].text, specs[3].text] == [texts[0], texts[2]]


def test_the_page_explains_every_kind_and_place() -> None:
    page = (Path(__file__).parents[2] / "docs/howto/inject-faults.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted([*chaos.WRITTEN_KINDS, *chaos.PLACES])


def test_every_kind_and_place_is_drawn_some_time() -> None:
    specs = chaos.parse_all(["random:count=500,seed=3,steps=1-1000"], 4)
    assert {spec.at for spec in specs} == set(chaos.DEFAULT_RANDOM_PLACES)
    assert {spec.rank for spec in specs} == {0, 1, 2, 3}
    kinds = {spec.text.partition(":")[0] for spec in specs}
    assert kinds == set(chaos.DEFAULT_RANDOM_KINDS)


def test_a_fault_of_a_node_stands_at_the_first_rank_of_its_slot() -> None:
    texts = ["node:index=2,step=5", "agent:index=0,at=setup"]
    first, second = chaos.parse_all(texts, world_size=6, nproc_per_node=2)
    assert (first.kind, first.rank, first.step, first.at) == ("node", 4, 5, "backward")
    assert (second.kind, second.rank, second.step, second.at) == ("agent", 0, 0, "setup")


def test_a_fault_of_a_node_needs_nodes() -> None:
    with pytest.raises(UserError, match="no nodes to lose; give it nodes with --local-nodes"):
        chaos.parse_all(["node:index=0,step=5"], world_size=2)
    with pytest.raises(UserError, match=r"index=3 can never fire; the job has slots 0 to 2"):
        chaos.parse_all(["node:index=3,step=5"], world_size=6, nproc_per_node=2)


@pytest.mark.parametrize(("seconds", "lasts_s"), [("", 0.0), (",seconds=1.5", 1.5)])
def test_a_fault_of_the_network_is_of_a_slot_and_may_pass(seconds: str, lasts_s: float) -> None:
    text = f"net:index=1,step=5,at=fence{seconds}"
    [fault] = chaos.parse_all([text], world_size=6, nproc_per_node=2, hosts=True)
    assert (fault.kind, fault.rank, fault.step, fault.at) == ("net", 2, 5, "fence")
    assert fault.lasts_s == lasts_s


@pytest.mark.parametrize(
    ("text", "hosts", "says"),
    [
        ("net:index=0,step=5", False, "on one machine and share its network"),
        ("net:index=3,step=5", True, "the job has slots 0 to 2"),
        ("net:rank=0,step=5", True, "the keys are index, step, at, seconds"),
        ("net:index=0", True, r"step is missing; write net:index=I,step=S\[,at=PLACE\]\[,seconds"),
        ("net:index=0,step=5,seconds=0", True, "no number above 0; leave it out for a cut that"),
        ("net:index=0,step=5,seconds=inf", True, "no number above 0"),
        ("net:index=0,step=5,seconds=long", True, "no number above 0"),
        ("node:index=0,step=5,seconds=1", True, "'seconds' is no key"),
    ],
)
def test_a_fault_of_the_network_that_can_not_be(text: str, hosts: bool, says: str) -> None:
    with pytest.raises(UserError, match=says):
        chaos.parse_all([text], world_size=6, nproc_per_node=2, hosts=hosts)


def test_a_fault_of_the_coordinator_is_told_by_a_rank_that_goes_on() -> None:
    texts = ["coordinator:step=5", "coordinator:rank=3,step=2,at=commit", "coordinator:at=setup"]
    faults = chaos.parse_all(texts, world_size=4, nproc_per_node=2)
    found = [(fault.kind, fault.rank, fault.step, fault.at) for fault in faults]
    assert found == [
        ("coordinator", 0, 5, "backward"),
        ("coordinator", 3, 2, "commit"),
        ("coordinator", 0, 0, "setup"),
    ]
    assert all(fault.kind in chaos.NO_FAILURE for fault in faults)


@pytest.mark.parametrize(
    ("text", "nproc_per_node", "says"),
    [
        ("coordinator:step=5", None, "no coordinator of its own to lose"),
        ("coordinator", 2, r"write coordinator:\[rank=R,\]step=S"),
        ("coordinator:rank=1", 2, "step is missing"),
        ("coordinator:index=0,step=5", 2, "'index' is no key"),
        ("coordinator:rank=4,step=5", 2, "rank=4 can never fire"),
    ],
)
def test_a_fault_of_the_coordinator_that_can_not_be(
    text: str, nproc_per_node: int | None, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        chaos.parse_all([text], world_size=4, nproc_per_node=nproc_per_node)


def test_random_faults_may_be_of_nodes() -> None:
    text = "random:count=12,seed=1,steps=1-90,kinds=node+agent+net+kill"
    specs = chaos.parse_all([text], world_size=6, nproc_per_node=2, hosts=True)
    of_nodes = [spec for spec in specs if spec.kind in chaos.OF_NODES]
    assert {spec.kind for spec in of_nodes} == set(chaos.OF_NODES)
    assert all(spec.rank == 2 * int(spec.text.split("index=")[1][0]) for spec in of_nodes)


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
