"""Steps that are not like each other: a replacement has rehearsed one of them only."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.joblab import SCRIPTS, assert_same_run, assert_survived, run_script

MOODS = SCRIPTS / "moods.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "faults"),
    [
        # GradScaler leaves its scale with a fused optimizer whose update was cut off.
        ("scaler", ("kill:rank=1,step=4", "raise:rank=0,step=7,at=fence")),
        # A buffer of each rank's own that the rehearsed step does not change.
        ("sometimes", ("kill:rank=1,step=6", "kill:rank=2,step=8,at=commit")),
        # One update in some steps and two in others, with a fence.
        ("in-turn", ("kill:rank=1,step=5", "kill:rank=2,step=8,at=optimizer")),
        # A second update from step 6 on: the gate had let the first pass for the last.
        ("joins", ("kill:rank=1,step=6,at=optimizer", "kill:rank=2,step=8,at=optimizer")),
        # A mode that only the rest of the step would have put back.
        ("teacher", ("raise:rank=1,step=5,at=forward", "kill:rank=0,step=7")),
        # Evaluation mode from step 4 on.
        ("mode", ("kill:rank=1,step=6", "kill:rank=0,step=9")),
        # A step that raises on what the tape tells of another step; several buckets.
        ("checks", ("kill:rank=1,step=4", "kill:rank=0,step=7")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_is_the_same_run(case: str, faults: tuple[str, ...], tmp_path: Path) -> None:
    folders = [tmp_path / "clean", tmp_path / "faulted"]
    clean = run_script(folders[0], case, script=MOODS, nproc=3)
    result = run_script(folders[1], case, script=MOODS, nproc=3, faults=faults)
    assert_same_run(clean, result)
    assert_survived(result, *faults)


@pytest.mark.slow
def test_a_tensor_that_the_body_made_is_not_changed_twice(tmp_path: Path) -> None:
    result = run_script(tmp_path, "made", script=MOODS, nproc=2)
    assert result.exit_code == 2
    assert "the loop's body made" in result.text


@pytest.mark.slow
def test_a_wrapper_that_the_rehearsed_step_does_not_use_is_refused(tmp_path: Path) -> None:
    """Its buckets would be laid out otherwise than on the peers, and gloo would add what does not
    belong together."""
    result = run_script(tmp_path, "rare", script=MOODS, nproc=2, faults=("kill:rank=1,step=5",))
    assert result.exit_code == 2
    assert "DistributedDataParallel modules 2 have been used, and only 1" in result.text


@pytest.mark.slow
def test_an_optimizers_tensor_that_is_changed_before_the_update_is_not_changed_twice(
    tmp_path: Path,
) -> None:
    result = run_script(tmp_path, "damped", script=MOODS, nproc=2, faults=("kill:rank=1,step=5",))
    assert result.exit_code != 0
    assert "is torn" in result.text
    assert [note["key"] for note in result.of("note")] == ["changed-before-update"]


@pytest.mark.slow
def test_gradients_that_are_carried_from_some_step_on_are_never_dropped(tmp_path: Path) -> None:
    """There is no copy yet in the first step that adds to those of the step before: the run ends,
    unless a rank was a step behind, from where all can go on."""
    folders = [tmp_path / "clean", tmp_path / "faulted"]
    clean = run_script(folders[0], "carried", script=MOODS, nproc=3)
    faults = ("kill:rank=1,step=6",)
    result = run_script(folders[1], "carried", script=MOODS, nproc=3, faults=faults)
    if result.exit_code == 0:
        assert_same_run(clean, result)
    else:
        assert "is torn" in result.text
