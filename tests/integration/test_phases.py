"""The phase that a worker shows after it has come back: the one in which it was stopped. The
deadline of its silence goes by it, so a wrong one is a false alarm or a hang that nobody sees."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.integration.joblab import SCRIPTS, Result, assert_same_run, run_script

pytestmark = pytest.mark.slow
NEVER_S = 600.0
# Far above what this script takes for anything on a busy machine, far below what a person waits.
SOON_S = 3.0
SHOWN = {  # by where rank 1 dies, where its peers come to rest, and what they show afterwards
    "step": ("FENCE", "step: STEP"),  # to which they run on zeros
    "fence": ("FENCE", "fence: FENCE"),
    "section": ("SECTION", "section: SECTION"),
    "between": ("BETWEEN", "between: BETWEEN"),
    "closing": ("CLOSING", "closing: CLOSING"),
}


def job(folder: Path, phase: str, *args: str, **settings: Any) -> Result:
    arrivals = folder / "arrivals"
    os.mkfifo(arrivals)
    own = ("--phase", phase, "--arrivals", str(arrivals))
    script = SCRIPTS / "phases.py"
    return run_script(folder / "runs", *own, *args, script=script, nproc=3, **settings)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Nobody dies."""
    return job(tmp_path_factory.mktemp("clean"), "none")


def said(result: Result, rank: int) -> list[str]:
    """What the rank's first process said of its phases."""
    who = f"{rank}.1: "
    return [line.removeprefix(who) for line in result.lines if line.startswith(who)]


@pytest.mark.parametrize("phase", SHOWN)
def test_a_worker_that_comes_back_shows_the_phase_that_it_left(
    phase: str, clean: Result, tmp_path: Path
) -> None:
    result = job(tmp_path, phase)
    assert_same_run(clean, result)
    assert len(result.closed) == 1
    name, there = SHOWN[phase]
    for rank in (0, 2):
        before, after = Counter(said(clean, rank)), Counter(said(result, rank))
        came_back = f"back in {name}: {name}"
        assert after[came_back] == 1, (rank, said(result, rank))
        # Every place shows its own phase, in the attempt after the recovery as well.
        assert set(after) == {*before, came_back}, (rank, said(result, rank))
        assert after[there] == before[there] + (phase != "between")


def test_set_up_that_begins_again_shows_set_up(clean: Result, tmp_path: Path) -> None:
    """All start again, in new processes, and may take longer for it than any step."""
    result = job(
        tmp_path,
        *("setup", "--then", "long", "--pause", str(2 * SOON_S)),
        hang_timeout_s=SOON_S,
        section_timeout_s=SOON_S,
    )
    assert_same_run(clean, result)
    assert [record["state_from"] for record in result.closed] == ["script"]
    assert {line for line in result.lines if ": setup" in line} >= {
        f"{rank}.2: setup: SETUP" for rank in range(3)
    }
    assert result.of("hang") == []


@pytest.mark.parametrize(
    ("phase", "deadlines", "says"),
    [
        ("step", {"hang_timeout_s": SOON_S, "section_timeout_s": NEVER_S}, "in step 5"),
        ("fence", {"hang_timeout_s": SOON_S, "section_timeout_s": NEVER_S}, "in step 5"),
        ("section", {"hang_timeout_s": NEVER_S, "section_timeout_s": SOON_S}, "section"),
    ],
)
def test_a_hang_after_the_recovery_has_the_deadline_of_its_phase(
    phase: str, deadlines: dict[str, float], says: str, clean: Result, tmp_path: Path
) -> None:
    """Rank 2 has come back, and does not move any more; any other deadline is never reached."""
    result = job(tmp_path, phase, "--then", "hang", **deadlines)
    assert_same_run(clean, result)
    (told,) = result.of("hang")
    assert told["ranks"] == [2]
    causes = [record["cause"] for record in result.of("incident_cause")]
    assert any(cause["kind"] == "hang" and says in cause["text"] for cause in causes), causes
    assert len(result.closed) == 1


def test_who_waits_for_the_others_to_leave_the_loop_has_no_deadline(
    clean: Result, tmp_path: Path
) -> None:
    """Also after a recovery there: it is rank 1's replacement that is late."""
    result = job(
        tmp_path,
        *("closing", "--then", "long", "--pause", str(2 * SOON_S)),
        hang_timeout_s=SOON_S,
        section_timeout_s=4 * SOON_S,
    )
    assert_same_run(clean, result)
    assert result.of("hang") == []
    assert len(result.closed) == 1
