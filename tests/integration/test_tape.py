"""What peers told a rank before the first commit is told to its replacements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.integration.joblab import SCRIPTS, Result, assert_same_run, assert_survived, run_script


def told(folder: Path, case: str, **options: Any) -> Result:
    """A run of its own folder, where the script counts its starts."""
    folder.mkdir()
    script = SCRIPTS / "told.py"
    return run_script(folder / "runs", case, str(folder), script=script, nproc=4, **options)


def assert_told_again(folder: Path, case: str, *faults: str) -> Result:
    """The run with the faults, which is the run without."""
    clean = told(folder / "clean", case)
    faulted = told(folder / "faulted", case, faults=faults)
    assert_survived(faulted, *faults)
    assert_same_run(clean, faulted)
    return faulted


@pytest.mark.slow
def test_every_rank_can_be_told_again(tmp_path: Path) -> None:
    """Rank 1 twice: its tape outlives its incarnations."""
    faults = (
        "kill:rank=1,step=3,at=backward",
        "kill:rank=0,step=4,at=fence",
        "kill:rank=2,step=5,at=between",
        "kill:rank=1,step=6,at=forward",
        "kill:rank=3,step=8,at=optimizer",
    )
    assert_told_again(tmp_path, "small", *faults)


@pytest.mark.slow
def test_a_rank_that_dies_early_can_be_told_again(tmp_path: Path) -> None:
    """In the first step all start again, with a new tape; in the second the tape is complete but
    for that step."""
    faults = ("kill:rank=2,step=1,at=backward", "kill:rank=1,step=2,at=backward")
    assert_told_again(tmp_path, "wide", *faults)


@pytest.mark.slow
def test_the_order_of_buckets_is_told_again(tmp_path: Path) -> None:
    """Gradients come in another order on odd ranks; the layout of buckets is rank 0's on all, told
    when step 2 begins."""
    faults = ("kill:rank=1,step=2,at=backward", "kill:rank=3,step=6,at=backward")
    assert_told_again(tmp_path, "order", *faults)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["table", "wide"])
def test_large_things_that_are_state_need_no_tape(case: str, tmp_path: Path) -> None:
    faults = ("kill:rank=0,step=4,at=backward", "kill:rank=2,step=6,at=backward")
    faulted = assert_told_again(tmp_path, case, *faults)
    assert not [note for note in faulted.of("note") if note["key"].startswith("untold")]


@pytest.mark.slow
def test_a_large_thing_that_is_no_state_is_refused_by_name(tmp_path: Path) -> None:
    clean = told(tmp_path / "clean", "large")
    assert clean.exit_code == 0
    (note, *_) = [note for note in clean.of("note") if note["key"].startswith("untold")]
    assert "was told 1.2 MB by a collective (broadcast) in set-up (told.py:" in note["text"]
    faulted = told(tmp_path / "faulted", "large", faults=("kill:rank=1,step=4,at=backward",))
    assert faulted.exit_code == 2
    assert "rank 1 was told 1.2 MB by a collective (broadcast)" in faulted.text
    assert "run.protect" in faulted.text


@pytest.mark.slow
def test_a_rank_that_would_tell_otherwise_is_named(tmp_path: Path) -> None:
    """Objects that rank 0 broadcasts stay its own, so its replacement keeps its own as well."""
    result = told(tmp_path / "own", "own", faults=("kill:rank=0,step=4,at=backward",))
    assert_survived(result, "kill:rank=0,step=4,at=backward")
    (note,) = [note for note in result.of("note") if note["key"].startswith("told-otherwise")]
    assert "rank 0" in note["text"]
    assert "run.once" in note["text"]


@pytest.mark.slow
def test_a_pipeline_learns_its_shapes_from_the_tape(tmp_path: Path) -> None:
    faults = ("kill:rank=1,step=4,at=backward", "kill:rank=2,step=6,at=forward")
    script = SCRIPTS / "layouts.py"
    clean = run_script(tmp_path / "clean", "pipeline", script=script, nproc=4)
    faulted = run_script(tmp_path / "faulted", "pipeline", script=script, nproc=4, faults=faults)
    assert_survived(faulted, *faults)
    assert_same_run(clean, faulted)
