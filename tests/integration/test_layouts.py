"""Ways to spread a model over ranks and to write an update, each under faults of every kind at
every place, proved bitwise.

One run of a layout carries six faults, one at each place; the kinds are dealt out so that over all
layouts every pair of (layout, place), (layout, kind) and (kind, place) comes up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.joblab import SCRIPTS, Result, assert_same_run, assert_survived, run_script

SCRIPT = SCRIPTS / "layouts.py"
PLACES = ("forward", "backward", "fence", "optimizer", "commit", "between")
KINDS = ("kill", "raise", "segv", "exit=3")
STEPS = 12
REPLICATED = (
    "plain",
    "unused",
    "static",
    "tied",
    "frozen",
    "syncbn",
    "checkpointed",
    "no-sync",
    "objects",
    "gan",
    "closure",
    "lbfgs",
    "scaler",
    "undo",
    "hsdp",
    "hsdp-keep",
    "hsdp-accumulate",
    "hsdp-tail",
    "tp",
    "pipeline",
    "experts",
    "split",
)
UNDONE = ("closure", "lbfgs", "undo", "hsdp-tail", "zero")  # their fence is late
ALONE = ("fsdp", "fsdp-keep", "fsdp-mixed", "fsdp-prefetch", "zero")
Job = Callable[..., Result]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """`job(layout, *faults, nproc=4)` runs it in a folder of its own."""

    def run(layout: str, *faults: str, nproc: int = 4) -> Result:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        arguments = (layout, "--steps", str(STEPS))
        return run_script(folder, *arguments, script=SCRIPT, nproc=nproc, faults=faults)

    return run


def assert_exact(job: Job, layout: str, *faults: str, nproc: int = 4) -> None:
    """The run with the faults is the run without."""
    result = job(layout, *faults, nproc=nproc)
    assert_same_run(job(layout, nproc=nproc), result)
    assert_survived(result, *faults)


def deal(layout: str, nproc: int = 4) -> tuple[str, ...]:
    """A fault at each place, two steps apart, with kinds and ranks that turn with the layout."""
    turn = [*REPLICATED, "compiled", "hsdp-tp"].index(layout)
    return tuple(
        f"{_possible(KINDS[(turn + index) % len(KINDS)], place, layout)}"
        f":rank={(turn + 3 * index) % nproc},step={2 * index + 2},at={place}"
        for index, place in enumerate(PLACES)
    )


def _possible(kind: str, place: str, layout: str) -> str:
    """An exception between two steps is the loop's own: it ends the script there, and twice over.
    One after the update, likewise."""
    return "kill" if kind == "raise" and place in ("between", "commit") else kind


def test_the_deal_covers_all_pairs() -> None:
    pairs = set()
    for layout in REPLICATED:
        for fault in deal(layout):
            kind, _, place = fault.partition(":")[0], None, fault.rpartition("at=")[2]
            pairs |= {(kind, place), (layout, place), (layout, kind)}
    wanted = {(layout, place) for layout in REPLICATED for place in PLACES}
    wanted |= {
        (kind, place) for kind in KINDS for place in PLACES if _possible(kind, place, "") == kind
    }
    wanted |= {(layout, kind) for layout in REPLICATED for kind in KINDS}
    assert wanted <= pairs


@pytest.mark.slow
@pytest.mark.parametrize("layout", REPLICATED)
def test_a_layout_under_all_faults(layout: str, job: Job) -> None:
    assert_exact(job, layout, *deal(layout))


@pytest.mark.slow
def test_a_compiled_model(job: Job) -> None:
    assert_exact(job, "compiled", *deal("compiled", nproc=2)[:3], nproc=2)


@pytest.mark.slow
def test_a_compiled_wrapper(job: Job) -> None:
    """Its collectives run inside what is compiled."""
    faults = ("kill:rank=1,step=4,at=backward", "raise:rank=0,step=7,at=forward")
    assert_exact(job, "compiled-ddp", *faults, nproc=2)
    assert not job("compiled-ddp", nproc=2).of("incident_opened")


@pytest.mark.slow
def test_three_mesh_dimensions(job: Job) -> None:
    assert_exact(job, "hsdp-tp", *deal("hsdp-tp", nproc=8)[:4], nproc=8)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ALONE)
def test_exceptions_where_no_shard_has_a_second_copy(layout: str, job: Job) -> None:
    places = PLACES[:4] if layout in UNDONE else PLACES[:3]
    faults = tuple(
        f"raise:rank={index % 2},step={3 * index + 2},at={place}"
        for index, place in enumerate(places)
    )
    assert_exact(job, layout, *faults, nproc=2)


@pytest.mark.slow
def test_a_shard_without_a_second_copy_is_lost_by_name(job: Job) -> None:
    result = job("fsdp", "kill:rank=1,step=5", nproc=2)
    assert result.exit_code == 128 + 9
    assert "shard 1" in result.text
    assert "rank 1" in result.text
    assert "One more replica of every shard" in result.text


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["hsdp", "pipeline", "lbfgs"])
@pytest.mark.parametrize("place", ["backward", "fence"])
def test_two_at_once_in_the_first_and_last_step(layout: str, place: str, job: Job) -> None:
    """Ranks 0 and 3 hold different shards; each has a replica that lives."""
    faults = tuple(
        f"kill:rank={rank},step={step},at={place}" for step in (1, 5, STEPS) for rank in (0, 3)
    )
    assert_exact(job, layout, *faults)


@pytest.mark.slow
def test_both_replicas_of_a_shard_die(job: Job) -> None:
    result = job("hsdp", "kill:rank=1,step=5", "kill:rank=3,step=5")
    assert result.exit_code == 128 + 9
    assert "is lost" in result.text
    assert "ranks 1, 3" in result.text
