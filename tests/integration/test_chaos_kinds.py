"""Every kind of fault and every place that test_proof.py does not have: the run is the clean one.

A kind that no recovery can undo (a bit that flips where nobody looks) is seen instead.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.joblab import TINY, Result, assert_same_run, assert_survived, run_script
from tests.integration.leaks import Held, Workers, growth

from everstep import chaos
from everstep.launch.prove import prove
from everstep.settings import RunSettings
from everstep.wire.messages import ScriptSpec

pytestmark = pytest.mark.slow
# Far above what a step of the script takes on a busy machine, far below what a person waits.
HANG_S = 3.0
COLLECTIVE_TIMEOUT_S = 5.0
ARGS = ("--steps", "12", "--batchnorm")
Clean = Callable[..., Result]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """The clean run with the given arguments, run once."""
    known: dict[tuple[object, ...], Result] = {}

    def get(*args: str, nproc: int = 3) -> Result:
        if (args, nproc) not in known:
            folder = tmp_path_factory.mktemp("clean")
            known[args, nproc] = run_script(folder, *(args or ARGS), nproc=nproc)
        return known[args, nproc]

    return get


def test_a_failure_between_the_update_and_its_commit(clean: Clean, tmp_path: Path) -> None:
    """Peers may have committed the step by then; an exception there leaves the state torn."""
    faults = (
        "kill:rank=1,step=3,at=commit",
        "raise:rank=2,step=5,at=commit",
        "exit0:rank=0,step=7,at=commit",
        "oom:rank=1,step=9,at=commit",
        "raise:rank=0,step=12,at=commit",
    )
    result = run_script(tmp_path, *ARGS, faults=faults, nproc=3)
    assert_survived(result, *faults)
    assert_same_run(clean(), result)
    assert {record["state_from"] for record in result.closed} == {"peer"}


@pytest.mark.parametrize("kind", ["kill", "raise", "exit0", "exit=3"])
def test_the_set_up_fails_twice(kind: str, clean: Clean, tmp_path: Path) -> None:
    """Before the first commit all start again; and two equal faults are two."""
    faults = (f"{kind}:rank=1,at=setup", f"{kind}:rank=1,at=setup")
    result = run_script(tmp_path, *ARGS, faults=faults, nproc=3)
    assert_survived(result, *faults)
    assert_same_run(clean(), result)
    assert {record["state_from"] for record in result.closed} == {"script"}


@pytest.mark.parametrize(
    ("place", "rank"),
    [("recovery", 1), ("recovery", 2), ("rebuild", 1), ("rebuild", 2), ("fetch", 1), ("serve", 2)],
)
@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_a_second_failure_in_the_recovery(
    kind: str, place: str, rank: int, clean: Clean, tmp_path: Path
) -> None:
    """Of the joiner, which is rank 1, and of a survivor."""
    faults = ("kill:rank=1,step=5,at=forward", f"{kind}:rank={rank},step=5,at={place}")
    result = run_script(tmp_path, *ARGS, faults=faults, nproc=3)
    assert_survived(result, *faults)
    assert_same_run(clean(), result)


def test_a_slow_rank_is_no_incident(clean: Clean, tmp_path: Path) -> None:
    faults = tuple(
        f"slow={factor}:rank={index % 3},step={2 + index},at={place}"
        for index, (factor, place) in enumerate(zip((2, 3, 4, 5, 6), chaos.IN_STEP, strict=True))
    )
    result = run_script(tmp_path, *ARGS, faults=faults, nproc=3)
    assert sum(result.fired().values()) == len(faults)
    assert result.of("incident_opened") == []
    assert_same_run(clean(), result)


def test_random_faults_are_survived(clean: Clean, tmp_path: Path) -> None:
    args = ("--steps", "24", "--batchnorm")
    text = "random:count=8,seed=11,steps=2-23"
    result = run_script(tmp_path, *args, faults=(text,), nproc=3)
    assert_survived(result, *(spec.text for spec in chaos.parse_all([text], 3)))
    assert_same_run(clean(*args), result)


@pytest.mark.timeout(600)
def test_two_hundred_random_faults_leave_nothing_behind(clean: Clean, tmp_path: Path) -> None:
    """In this process, in which the agent runs, in /dev/shm, and in each worker."""
    args = ("--steps", "420", "--batchnorm")
    text = "random:count=200,seed=7,steps=2-410"
    agent: list[Held] = []
    names: list[int] = []
    workers = Workers(collective_timeout_s=COLLECTIVE_TIMEOUT_S)

    def on_record(record: dict[str, Any]) -> None:
        workers.on_record(record)
        if record["event"] == "incident_closed":
            held = Held.by(os.getpid())
            assert held is not None
            agent.append(held)
            own = f"everstep-t{os.getpid()}"
            names.append(sum(name.startswith(own) for name in os.listdir("/dev/shm")))

    result = run_script(
        tmp_path,
        *args,
        faults=(text,),
        nproc=3,
        on_record=on_record,
        collective_timeout_s=COLLECTIVE_TIMEOUT_S,
    )
    assert_survived(result, *(spec.text for spec in chaos.parse_all([text], 3)))
    assert_same_run(clean(*args), result)
    slack = Held(descriptors=1, threads=1, shared=1, rss_mib=16.0)
    assert list(growth(agent[3:], slack)) == []
    assert max(names[-20:]) <= max(names[3:23]) + 1, names
    assert workers.growth() == []


# ---------------------------------------------------------------- silence


@pytest.mark.parametrize("place", ["forward", "backward", "optimizer", "between"])
@pytest.mark.parametrize("kind", ["stop", "hang"])
def test_a_silent_rank_is_found_and_replaced(
    kind: str, place: str, clean: Clean, tmp_path: Path
) -> None:
    faults = (f"{kind}:rank=1,step=5,at={place}",)
    result = run_script(
        tmp_path,
        *ARGS,
        faults=faults,
        nproc=3,
        hang_timeout_s=HANG_S,
        section_timeout_s=HANG_S,
    )
    assert_survived(result, *faults)
    assert_same_run(clean(), result)
    (incident,) = result.of("incident_opened")
    assert (incident["rank"], incident["cause"]["fault"]) == (1, faults[0])


@pytest.mark.parametrize(("kind", "place"), [("stop", "rebuild"), ("hang", "serve")])
def test_a_rank_falls_silent_in_the_recovery(
    kind: str, place: str, clean: Clean, tmp_path: Path
) -> None:
    faults = ("kill:rank=1,step=5,at=forward", f"{kind}:rank=2,step=5,at={place}")
    result = run_script(tmp_path, *ARGS, faults=faults, nproc=3, park_timeout_s=5.0)
    assert_survived(result, *faults)
    assert_same_run(clean(), result)


# ---------------------------------------------------------------- corruption


@pytest.mark.parametrize(
    "faults",
    [
        ("kill:rank=1,step=5", "corrupt:rank=2,step=5,at=recovery"),
        ("kill:rank=1,step=5", "corrupt:rank=0,step=5,at=serve"),
        ("corrupt:rank=3,step=4,at=commit", "kill:rank=1,step=5,at=forward"),
    ],
    ids=["parked", "serving", "step-before"],
)
def test_a_corrupt_copy_is_not_restored(
    faults: tuple[str, ...], clean: Clean, tmp_path: Path
) -> None:
    """Two of three sources agree: the third is set aside, takes their state, and all goes on."""
    result = run_script(tmp_path, *ARGS, faults=faults, nproc=4)
    assert_survived(result, *faults)
    assert_same_run(clean(nproc=4), result)
    causes = [record["cause"]["text"] for record in result.of("incident_cause")]
    assert any("is set aside" in text for text in causes), causes


def test_where_nobody_can_say_which_copy_is_right_the_job_ends(tmp_path: Path) -> None:
    faults = ("kill:rank=1,step=5", "corrupt:rank=2,step=5,at=recovery")
    result = run_script(tmp_path, *ARGS, faults=faults, nproc=3)
    assert result.exit_code == 1
    assert "the copies differ" in result.text


def test_a_flipped_bit_that_meets_no_transfer_is_seen_at_the_end(
    clean: Clean, tmp_path: Path
) -> None:
    """Nothing fails, so nothing looks: only a comparison shows it."""
    fault = "corrupt:rank=1,step=5,at=between"
    result = run_script(tmp_path, *ARGS, faults=(fault,), nproc=3)
    assert result.exit_code == 0
    assert result.of("incident_opened") == []
    assert result.digests["1"] != clean().digests["1"]
    assert result.digests["0"] != result.digests["1"]


# ---------------------------------------------------------------- prove


def _prove(folder: Path, *faults: str) -> tuple[int, dict[str, object], str]:
    out = io.StringIO()
    settings = RunSettings(
        script=ScriptSpec(target=str(TINY), module=False, args=ARGS),
        nproc_per_node=3,
        run_id="p",
        log_dir=str(folder),
    )
    code = prove(settings, chaos.parse_all(faults, 3), folder / "verdict.json", out)
    return code, json.loads((folder / "verdict.json").read_text()), out.getvalue()


def test_prove_with_random_faults_and_a_slow_rank(tmp_path: Path) -> None:
    texts = ("random:count=3,seed=4,steps=3-11,kinds=kill+raise", "slow=2:rank=0,step=2")
    code, verdict, said = _prove(tmp_path, *texts)
    assert code == 0, said
    drawn = [spec.text for spec in chaos.parse_all(texts, 3)]
    assert verdict["faults"] == drawn
    incidents = verdict["incidents"]
    assert isinstance(incidents, list)
    assert [incident["fault"] for incident in incidents] == drawn[:3]


def test_prove_sees_a_flipped_bit(tmp_path: Path) -> None:
    code, verdict, said = _prove(tmp_path, "corrupt:rank=1,step=5,at=between")
    assert code == 1
    assert verdict["equal"] is False
    assert "the faulted run differs from the clean one" in said
