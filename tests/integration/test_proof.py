"""The faulted run equals the clean run, bit for bit: every kind of fault, at every place.

One job carries several faults, so that a recovery also starts from the state that a recovery left.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.joblab import Result, assert_same_run, assert_survived, run_script

KINDS = ("kill", "term", "segv", "abort", "raise", "exit0", "exit=3")
PLACES = ("forward", "backward", "fence", "optimizer", "between")
Clean = Callable[..., Result]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """The clean run with the given arguments, run once."""
    known: dict[tuple[str, ...], Result] = {}

    def get(*args: str) -> Result:
        if args not in known:
            known[args] = run_script(tmp_path_factory.mktemp("clean"), *args)
        return known[args]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_at_every_place(kind: str, clean: Clean, tmp_path: Path) -> None:
    args = ("--steps", "14", "--batchnorm")
    faults = tuple(
        f"{kind}:rank={(index + KINDS.index(kind)) % 4},step={3 + 2 * index},at={place}"
        for index, place in enumerate(PLACES)
    )
    result = run_script(tmp_path, *args, faults=faults)
    assert_survived(result, *faults)
    assert_same_run(clean(*args), result)
    rungs = {record["rung"] for record in result.closed}
    assert rungs == ({"retry", "respawn"} if kind == "raise" else {"respawn"})


def test_a_kill_and_a_raise(clean: Clean, tmp_path: Path) -> None:
    faults = ("kill:rank=1,step=5,at=backward", "raise:rank=2,step=8,at=forward")
    result = run_script(tmp_path, faults=faults)
    assert_survived(result, *faults)
    assert_same_run(clean(), result)
    first, second = result.closed
    assert (first["rung"], first["state_from"]) == ("respawn", "peer")
    assert second["rung"] == "retry"  # from memory, or from a peer that was a step ahead


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["kill", "raise"])
@pytest.mark.parametrize("step", [1, 12])
def test_first_and_last_step(
    kind: str, place: str, step: int, clean: Clean, tmp_path: Path
) -> None:
    """Before the first commit all ranks start again; after the last the closing fence is open."""
    faults = (f"{kind}:rank=1,step={step},at={place}",)
    result = run_script(tmp_path, faults=faults)
    assert_survived(result, *faults)
    assert_same_run(clean(), result)


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ("--zero-first",),
        ("--accumulate", "3"),
        ("--accumulate", "3", "--batchnorm"),
        ("--updates", "2"),
        ("--find-unused",),
        ("--item",),
        ("--ema",),
        ("--body-scheduler",),
        ("--sgd",),
        ("--function-data",),
    ],
    ids=" ".join,
)
def test_ways_to_train(args: tuple[str, ...], clean: Clean, tmp_path: Path) -> None:
    faults: tuple[str, ...] = (
        "kill:rank=1,step=4,at=backward",
        "raise:rank=2,step=5,at=forward",
        "kill:rank=0,step=6,at=optimizer",
        "raise:rank=3,step=7,at=backward",
        "kill:rank=3,step=9,at=fence",
        "raise:rank=0,step=10,at=backward",
        "kill:rank=2,step=11,at=between",
    )
    result = run_script(tmp_path, *args, faults=faults)
    assert_survived(result, *faults)
    assert_same_run(clean(*args), result)


@pytest.mark.slow
def test_two_ranks_at_once(clean: Clean, tmp_path: Path) -> None:
    faults = (
        "kill:rank=1,step=4,at=backward",
        "kill:rank=2,step=4,at=backward",
        "raise:rank=0,step=4,at=forward",
        "kill:rank=0,step=7,at=forward",
        "kill:rank=1,step=7,at=forward",
        "kill:rank=3,step=7,at=forward",
    )
    result = run_script(tmp_path, faults=faults)
    assert result.fired().total() >= 5  # a raise may be overtaken by the stop
    assert_same_run(clean(), result)


@pytest.mark.slow
def test_the_same_rank_again_and_again(clean: Clean, tmp_path: Path) -> None:
    faults = tuple(f"kill:rank=1,step={step},at=backward" for step in range(2, 12))
    result = run_script(tmp_path, faults=faults)
    assert_survived(result, *faults)
    assert_same_run(clean(), result)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_small_worlds(nproc: int, tmp_path: Path) -> None:
    (tmp_path / "clean").mkdir()
    (tmp_path / "faulted").mkdir()
    # Alone, a rank that dies takes the only copy with it; it may still raise.
    faults: tuple[str, ...] = ("raise:rank=0,step=4,at=backward",)
    if nproc > 1:
        faults += ("kill:rank=0,step=6,at=optimizer", "kill:rank=1,step=8,at=backward")
    result = run_script(tmp_path / "faulted", faults=faults, nproc=nproc)
    assert_survived(result, *faults)
    assert_same_run(run_script(tmp_path / "clean", nproc=nproc), result)
