"""Failures around a recovery: joiners that die, kills from outside at any moment, many kills."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.integration.joblab import SCRIPTS, TINY, assert_same_run, assert_survived, run_script

FRAIL = SCRIPTS / "frail.py"


@pytest.mark.slow
@pytest.mark.parametrize("when", ["import", "setup", "rehearsal", "joined"])
def test_the_joiner_is_killed_while_it_joins(when: str, tmp_path: Path) -> None:
    folders = [tmp_path / "clean", tmp_path / "faulted"]
    clean = run_script(folders[0], "--when", "never", script=FRAIL, nproc=3)
    fault = "kill:rank=1,step=4,at=backward"
    result = run_script(
        folders[1],
        *("--when", when, "--incarnations", "2", "3"),
        script=FRAIL,
        nproc=3,
        faults=(fault,),
    )
    assert_same_run(clean, result)
    spawned = Counter(record["rank"] for record in result.of("spawned"))
    assert spawned[1] == 4  # the first, two that died while joining, one that made it


@pytest.mark.slow
def test_a_death_after_the_last_step(tmp_path: Path) -> None:
    """The peers have left their loops, and wait with the final state until everybody has ended."""
    folders = [tmp_path / "clean", tmp_path / "faulted"]
    clean = run_script(folders[0], "--when", "never", script=FRAIL, nproc=3)
    result = run_script(folders[1], "--when", "after", "--incarnations", "1", script=FRAIL, nproc=3)
    assert_same_run(clean, result)
    assert [record["rung"] for record in result.closed] == ["respawn"]
    assert sum("ends" in line for line in result.lines) == 3


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--tail", "--opaque"])
def test_a_result_that_nobody_can_have_again_is_nan(option: str, tmp_path: Path) -> None:
    """What is made after the update is lost with a rank that dies in it: NaN, and said. The state
    is exact all the same."""
    folders = [tmp_path / "clean", tmp_path / "faulted"]
    clean = run_script(folders[0], option)
    fault = "kill:rank=1,step=6,at=optimizer"
    result = run_script(folders[1], option, faults=(fault,))
    assert_survived(result, fault)
    assert clean.digests == result.digests
    # The script sums up what it is returned in run.state, so only the values are compared.
    different = {k for k in clean.trace if clean.trace[k]["value"] != result.trace[k]["value"]}
    assert {step for _, step in different} == {6}
    notes = {record["key"] for record in result.of("note")}
    assert notes & {"result-lost-1-6", "lost-after-update"}


@pytest.mark.slow
def test_replacements_that_never_make_it_end_the_job(tmp_path: Path) -> None:
    result = run_script(
        tmp_path,
        *("--when", "setup", "--incarnations", *map(str, range(2, 40))),
        script=FRAIL,
        nproc=2,
        faults=("kill:rank=1,step=3,at=backward",),
        lift_budgets=False,
    )
    assert result.exit_code == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in result.text
    assert len(result.of("spawned")) < 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kills_from_outside_at_any_moment(seed: int, tmp_path: Path) -> None:
    """SIGKILL by pid, at moments that no place names: also in recoveries, also two at once."""
    folders = [tmp_path / "clean", tmp_path / "faulted"]
    clean = run_script(folders[0], "--steps", "40", "--batchnorm")
    draw = random.Random(seed)
    pids: dict[int, int] = {}
    killed: list[int] = []

    def on_record(record: dict[str, Any]) -> None:
        if record["event"] == "started":
            pids[record["rank"]] = record["pid"]
        moments = {"step": 0.12, "regrouped": 0.2, "stopped": 0.2, "ready": 0.2}
        if record["event"] not in moments or len(killed) >= 12:
            return
        if record.get("step", 9) < 3 or draw.random() > moments[record["event"]]:
            return
        victim = draw.randrange(1, 4)  # rank 0 lives, so that a copy is left
        killed.append(victim)
        os.kill(pids[victim], signal.SIGKILL)

    result = run_script(folders[1], "--steps", "40", "--batchnorm", on_record=on_record)
    assert len(killed) >= 3
    assert_same_run(clean, result)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fifty_kills_leave_nothing_behind(tmp_path: Path) -> None:
    """Descriptors, threads and memory of the survivor are flat after the third kill.

    gloo may lose a send when a socket breaks and sits out the collective's time-out (sockets and
    threads of that group stay until then), so the time-out is short here and the last steps are
    given time to see the end of it.
    """
    steps = 160
    places = ("forward", "backward", "fence")
    faults = tuple(
        f"kill:rank={1 + index % 3},step={3 + 3 * index},at={places[index % 3]}"
        for index in range(50)
    )
    result = run_script(
        tmp_path,
        *("--steps", str(steps), "--resources", "--linger", "4"),
        faults=faults,
        collective_timeout_s=2.0,
    )
    assert result.exit_code == 0, result.text
    assert_survived(result, *faults)
    rows = [result.metrics[0, step] for step in range(1, steps + 1)]
    early, late = rows[12], rows[-1]
    assert late["descriptors"] <= early["descriptors"], (early, late)
    assert late["threads"] <= early["threads"], (early, late)
    assert late["rss_mib"] <= early["rss_mib"] * 1.1 + 4, (early, late)


@pytest.mark.slow
def test_nothing_outlives_an_agent_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL the command: workers, the zygote and shared memory are gone within a second."""
    command = [sys.executable, "-c", "from everstep.cli import main; main()", "run"]
    run_id = f"killed-{os.getpid()}"
    command += ["--nproc-per-node", "2", "--log-dir", str(tmp_path), "--run-id", run_id]
    command += [str(TINY), "--steps", "100000"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        _wait_for(lambda: _steps_of(tmp_path) > 3, 60)
        family = _descendants(process.pid)
        assert len(family) >= 3
        assert [name for name in os.listdir("/dev/shm") if run_id in name]
    finally:
        process.kill()
        process.wait()
    _wait_for(lambda: not any(_alive(pid) for pid in family), 1.5)
    # What a dead job left in shared memory is swept when the next one starts.
    run_script(tmp_path, "--steps", "2", nproc=1)
    assert not [name for name in os.listdir("/dev/shm") if run_id in name]


def _wait_for(condition: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def _steps_of(folder: Path) -> int:
    return sum(path.read_text().count('"step"') for path in folder.glob("*/journal.jsonl"))


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found
