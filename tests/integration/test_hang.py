"""Ranks that are stopped, loop, or call other collectives than their peers, in real jobs."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.integration.joblab import SCRIPTS, Result, assert_same_run, run_script

pytestmark = pytest.mark.slow
HANGS = SCRIPTS / "hangs.py"
# Far above what a step of this script takes on a busy machine, far below what a person waits.
HANG_S = 3.0


def hang(folder: Path, how: str, *args: str, **settings: Any) -> Result:
    """Run the script with a fault in it."""
    own = folder / how
    own.mkdir()
    short = {"hang_timeout_s": HANG_S, "section_timeout_s": HANG_S, **settings}
    return run_script(own, "--how", how, *args, script=HANGS, nproc=3, **short)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run in which nobody hangs."""
    return hang(tmp_path_factory.mktemp("clean"), "never")


def assert_one_hang(result: Result, kind: str, *said: str) -> None:
    """Rank 1 was named, and replaced."""
    (told,) = result.of("hang")
    assert (told["kind"], told["ranks"]) == (kind, [1])
    assert Path(told["file"]).read_text().startswith(told["stacks"][0])
    (opened,) = result.of("incident_opened")
    assert (opened["rank"], opened["cause"]["kind"]) == (1, "hang")
    for words in said:
        assert words in opened["cause"]["text"]
    assert [(r["rung"], r["steps_lost"]) for r in result.closed] == [("respawn", 0)]


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("loop", "hangs in step 5"),
        ("wait", "hangs in step 5"),
        ("after", "hangs in step 5"),
        ("body", "hangs between steps"),
    ],
)
def test_a_rank_that_never_enters_a_collective(
    how: str, where: str, clean: Result, tmp_path: Path
) -> None:
    """An endless loop, a wait for nothing; in the step, after its update, and in the loop's
    body."""
    result = hang(tmp_path, how)
    assert_same_run(clean, result)
    assert_one_hang(result, "absent", where, "ranks 0, 2 wait for it in allreduce #")
    (told,) = result.of("hang")
    assert any(line.startswith("ranks 0, 2: in train_step at hangs.py:") for line in told["stacks"])
    assert any(line.startswith("rank 1: in ") and "hangs.py" in line for line in told["stacks"])


def test_a_rank_that_calls_another_collective(clean: Result, tmp_path: Path) -> None:
    result = hang(tmp_path, "other")
    assert_same_run(clean, result)
    assert_one_hang(result, "mismatch", "entered allgather", "ranks 0, 2 have entered allreduce")


def test_a_rank_that_skips_a_collective(tmp_path: Path) -> None:
    """gloo ends the process that gets too much. Rank 1 lives and skips it again, so it is the
    script's error; who skipped is said with it, since the dead rank did nothing wrong."""
    result = hang(tmp_path, "skip")
    assert result.exit_code != 0
    assert "SIGABRT in step 5" in result.text
    assert ": rank 1 in step 5 has entered allreduce of 195 elements" in result.text


def test_a_rank_that_leaves_its_loop_alone(tmp_path: Path) -> None:
    result = hang(tmp_path, "leave")
    assert result.exit_code == 2
    assert "rank 1 has left its loop after step 4, and ranks 0, 2 wait for it" in result.text
    assert result.closed == []


def test_a_step_that_always_hangs_is_the_scripts_error(tmp_path: Path) -> None:
    """The replacement meets the loop while it rehearses."""
    result = hang(tmp_path, "loop", "--incarnations", "1", "2", join_timeout_s=10.0)
    assert result.exit_code == 1
    assert "rank 1 failed in step 5 with the same error twice" in result.text


def test_ranks_that_are_slow_together_are_left_alone(tmp_path: Path) -> None:
    """Each step is longer than the deadline; and nobody waits that long for anybody."""
    result = hang(
        tmp_path,
        "slow",
        *("--steps", "4", "--pause", "1.5"),
        hang_timeout_s=0.5,
        section_timeout_s=0.5,
    )
    assert result.exit_code == 0, result.text
    assert result.of("incident_opened") == []


@pytest.mark.parametrize("seed", [1, 2])
def test_processes_that_are_stopped_at_any_moment(seed: int, tmp_path: Path) -> None:
    """SIGSTOP by pid, also while they set up, recover or join. Each is noticed and replaced."""
    folders = [tmp_path / "clean", tmp_path / "faulted"]
    for folder in folders:
        folder.mkdir()
    clean = run_script(folders[0], "--steps", "40", "--batchnorm", nproc=3)
    draw = random.Random(seed)
    pids: dict[int, int] = {}
    stopped: list[tuple[int, float]] = []

    def on_record(record: dict[str, Any]) -> None:
        if record["event"] == "started":
            pids[record["rank"]] = record["pid"]
        moments = {"step": 0.08, "regrouped": 0.3, "stopped": 0.3, "started": 0.1, "ready": 0.3}
        if record["event"] not in moments or len(stopped) >= 5:
            return
        if len(pids) < 3 or draw.random() > moments[record["event"]]:
            return
        victim = draw.randrange(1, 3)  # rank 0 lives, so that a copy is left
        stopped.append((victim, record["t"]))
        os.kill(pids[victim], signal.SIGSTOP)

    result = run_script(folders[1], "--steps", "40", "--batchnorm", nproc=3, on_record=on_record)
    assert len(stopped) >= 2
    assert_same_run(clean, result)
    assert {told["kind"] for told in result.of("hang")} == {"stopped"}


def test_a_stopped_rank_is_noticed_within_three_seconds(tmp_path: Path) -> None:
    """The journal says when; the bound is loose here, and measured by benchmarks."""
    folder = tmp_path / "run"
    folder.mkdir()
    pids: dict[int, int] = {}
    at_s: list[float] = []

    def on_record(record: dict[str, Any]) -> None:
        if record["event"] == "started":
            pids[record["rank"]] = record["pid"]
        if record["event"] == "step" and record["step"] == 10:
            at_s.append(record["t"])
            os.kill(pids[1], signal.SIGSTOP)

    result = run_script(folder, "--steps", "20", nproc=3, on_record=on_record)
    assert result.exit_code == 0, result.text
    assert_one_hang(result, "stopped", "rank 1 has been stopped by a signal")
    (opened,) = result.of("incident_opened")
    assert opened["t"] - at_s[0] < 10.0
    (told,) = result.of("hang")
    assert "rank 1: stopped by a signal, so that it can't show its stack" in told["stacks"]


def test_the_watch_can_be_turned_off(tmp_path: Path) -> None:
    """A process that is stopped for longer than it may be, and continued, goes on."""
    folder = tmp_path / "run"
    folder.mkdir()
    pids: dict[int, int] = {}

    def on_record(record: dict[str, Any]) -> None:
        if record["event"] == "started":
            pids[record["rank"]] = record["pid"]
        if record["event"] == "step" and record["step"] == 5:
            # By a process of its own: this thread is the one that watches.
            os.posix_spawn(
                "/bin/sh",
                ["sh", "-c", f"kill -STOP {pids[1]}; sleep 3; kill -CONT {pids[1]}"],
                os.environ,
            )

    result = run_script(
        folder, "--steps", "10", nproc=2, on_record=on_record, watch=False, stopped_timeout_s=0.5
    )
    assert result.exit_code == 0, result.text
    assert result.of("incident_opened") == []
