"""Ways to write a step, found by attacks: each is exact under faults, or refused by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.integration.joblab import SCRIPTS, assert_same_run, assert_survived, run_script

KINDS = SCRIPTS / "kinds.py"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "unpacked", "extra", "scaler", "norm", "nothing"])
def test_it_is_exact(case: str, tmp_path: Path) -> None:
    folders = [tmp_path / "clean", tmp_path / "faulted"]
    faults = (
        "kill:rank=1,step=4,at=backward",
        "raise:rank=2,step=5,at=fence",
        "kill:rank=0,step=6,at=fence",
        "kill:rank=2,step=8,at=between",
    )
    clean = run_script(folders[0], case, script=KINDS, nproc=3)
    result = run_script(folders[1], case, script=KINDS, nproc=3, faults=faults)
    assert_survived(result, *faults)
    assert_same_run(clean, result)
    says = [[line for line in r.lines if "seen" in line][-3:] for r in (clean, result)]
    assert {line.split(": ", 2)[-1] for line in says[0]} == {
        line.split(": ", 2)[-1] for line in says[1]
    }


@pytest.mark.slow
def test_state_changed_after_the_update_is_exact_once_the_step_has_returned(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / "clean", tmp_path / "faulted"]
    faults = ("kill:rank=1,step=4,at=backward", "kill:rank=2,step=7,at=between")
    clean = run_script(folders[0], "state-late", script=KINDS, nproc=3)
    result = run_script(folders[1], "state-late", script=KINDS, nproc=3, faults=faults)
    assert_survived(result, *faults)
    assert_same_run(clean, result)
    assert "late-state" in {note["key"] for note in result.of("note")}  # it is not always so


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("no-sync", "leave `no_sync` for the last micro-batch"),
        ("closure", "those of the first step did not"),
        ("param-before", "changes a protected parameter, or a tensor of an optimizer, before its"),
        ("unprotected", "that is not protected updates in the step"),
        ("scheduler-forgotten", "scheduler that is not protected"),
        ("two-loops", "run.batches was called twice"),
    ],
)
def test_it_is_refused(case: str, says: str, tmp_path: Path) -> None:
    result = run_script(tmp_path, case, script=KINDS, nproc=2, lift_budgets=False)
    assert result.exit_code == 2, result.text + "\n".join(result.lines)
    assert says in result.text


@pytest.mark.slow
def test_parameters_that_are_frozen_for_a_part_of_the_step(tmp_path: Path) -> None:
    folders = [tmp_path / "clean", tmp_path / "faulted"]
    faults = ("kill:rank=1,step=4,at=optimizer", "raise:rank=2,step=6,at=fence")
    clean = run_script(folders[0], "frozen", script=KINDS, nproc=4)
    result = run_script(folders[1], "frozen", script=KINDS, nproc=4, faults=faults)
    assert_same_run(clean, result)
    assert result.fired() == Counter(faults)


@pytest.mark.slow
def test_a_survivor_that_fetches_its_own_step_keeps_what_its_loop_did_since(tmp_path: Path) -> None:
    """Rank 2 is set aside while it is in step 6, and fetches the state after step 5: from before
    the loop's body stepped the schedule, which it will not do again."""
    faults = ("corrupt:rank=2,step=3,at=commit", "kill:rank=0,step=5,at=fence")
    result = run_script(tmp_path, "body-schedule", script=KINDS, nproc=4, faults=faults)
    assert result.exit_code == 0, result.text
    assert result.fired() == Counter(faults)
    first, *others = result.digests.values()
    assert others == [first] * 3


@pytest.mark.slow
def test_what_cannot_be_put_back_is_not_done_twice(tmp_path: Path) -> None:
    """The parameter was changed before the fence, on every rank: no state of a step is left."""
    fault = "kill:rank=1,step=6,at=fence"
    result = run_script(tmp_path, "param-later", script=KINDS, nproc=3, faults=(fault,))
    assert result.exit_code == 137, result.text
    assert "is lost" in result.text


@pytest.mark.slow
def test_a_second_update_that_comes_late_is_never_half_done(tmp_path: Path) -> None:
    """From step 4 on there are two updates; step 4 itself is not covered, and the later are."""
    folders = [tmp_path / "clean", tmp_path / "faulted"]
    faults = ("kill:rank=1,step=6,at=backward", "kill:rank=2,step=8,at=optimizer")
    clean = run_script(folders[0], "second-later", script=KINDS, nproc=3)
    result = run_script(folders[1], "second-later", script=KINDS, nproc=3, faults=faults)
    assert_survived(result, *faults)
    assert_same_run(clean, result)
    assert "more-updates" in {note["key"] for note in result.of("note")}


@pytest.mark.slow
def test_leaving_by_exit_inside_a_step_is_a_failure(tmp_path: Path) -> None:
    result = run_script(tmp_path, "exit", script=KINDS, nproc=2, lift_budgets=False)
    assert result.exit_code != 0
    assert "before the end" in result.text


@pytest.mark.slow
def test_a_buffer_that_starts_to_change_later_is_exact_soon_after(tmp_path: Path) -> None:
    folders = [tmp_path / "clean", tmp_path / "faulted"]
    faults = ("raise:rank=1,step=8,at=backward", "kill:rank=2,step=9,at=backward")
    clean = run_script(folders[0], "late-buffer", script=KINDS, nproc=3)
    result = run_script(folders[1], "late-buffer", script=KINDS, nproc=3, faults=faults)
    assert_survived(result, *faults)
    assert_same_run(clean, result)
