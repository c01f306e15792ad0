"""A run begins at its newest checkpoint: after the death of everything, and when its state is lost;
and it is the run that nothing has disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.joblab import SCRIPTS, TINY, Result, assert_same_run, run_script
from tests.integration.test_agent import descendants
from tests.integration.test_operations import until

pytestmark = pytest.mark.slow
LAYOUTS = SCRIPTS / "layouts.py"
USUAL = ("--steps", "8", "--batchnorm")


def _same_from(clean: Result, resumed: Result, step: int) -> None:
    """From `step` on the resumed run is the clean one."""
    assert clean.exit_code == resumed.exit_code == 0, resumed.text + "\n".join(resumed.lines[-30:])
    assert resumed.trace == {key: each for key, each in clean.trace.items() if key[1] >= step}
    assert clean.digests == resumed.digests


def _loaded(result: Result) -> tuple[int, str]:
    """At which step all ranks began, and what was passed over."""
    ((step, text),) = {(each["step"], each["text"]) for each in result.of("checkpoint_loaded")}
    return step, text


def _spoil(folder: Path, step: int) -> None:
    """Flip a bit in each part of the checkpoint of `step`."""
    parts = list(folder.glob(f"*/parts/{step:010d}/*/*.safetensors"))
    assert parts, sorted(folder.rglob("*"))
    for path in parts:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.chmod(0o600)
        path.write_bytes(data)


# -------------------------------------------------------------------- the same command again


def _killed(folder: Path, *arguments: str) -> None:
    """A job of two ranks, of which nothing lives any more after its seventh step."""
    given = {key: value for key, value in os.environ.items() if not key.startswith("EVERSTEP")}
    command = [sys.executable, "-m", "everstep.cli", "run", "--nproc-per-node", "2"]
    command += ["--run-id", f"killed-{os.getpid()}", str(TINY), "--linger", "60", *arguments]
    journal = folder / "everstep-runs" / f"killed-{os.getpid()}" / "journal.jsonl"
    with subprocess.Popen(command, cwd=folder, env=given, stderr=subprocess.DEVNULL) as job:
        seen: set[tuple[str, int]] = set()

        def far_enough() -> bool:
            lines = journal.read_text().splitlines() if journal.exists() else []
            rows = [json.loads(line) for line in lines if line.endswith("}")]
            seen.update((row["event"], row["step"]) for row in rows if "step" in row)
            return {("step", 7), ("checkpoint_saved", 6)} <= seen

        until(far_enough)
        for pid in [job.pid, *descendants(job.pid)]:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What nothing has disturbed."""
    return run_script(tmp_path_factory.mktemp("clean"), *USUAL, nproc=2)


def test_everything_is_killed_and_the_same_command_goes_on(clean: Result, tmp_path: Path) -> None:
    arguments = (*USUAL, "--checkpoint", str(tmp_path / "kept"))
    _killed(tmp_path, *arguments)
    resumed = run_script(tmp_path / "again", *arguments, nproc=2)
    assert _loaded(resumed) == (6, "")
    assert [record["step"] for record in resumed.of("step")] == [7, 8]
    _same_from(clean, resumed, 7)
    over = run_script(tmp_path / "over", *arguments, nproc=2)
    assert over.exit_code == 0, over.text
    assert _loaded(over) == (8, "")
    assert over.digests == clean.digests
    assert not over.trace
    other = run_script(tmp_path / "other", "--steps", "8", *arguments[-2:], nproc=2)
    assert other.exit_code == 2
    assert "begin another series" in other.text


def test_the_newest_is_spoiled_and_a_replacement_takes_no_checkpoint(
    clean: Result, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    arguments = (*USUAL, "--checkpoint", str(kept))
    run_script(tmp_path / "first", *arguments, "--steps", "4", nproc=2)
    _spoil(kept, 4)
    faults = ("kill:rank=1,step=3", "kill:rank=0,step=4,at=commit", "kill:rank=1,step=7")
    resumed = run_script(tmp_path / "second", *arguments, nproc=2, faults=faults)
    first, *_ = resumed.of("checkpoint_loaded")
    assert (first["step"], first["newest"]) == (2, 4)
    assert "step 4, rank" in first["text"]
    _same_from(clean, resumed, 3)
    assert resumed.fired().keys() == set(faults)
    # The first failed before a step was committed; then there were peers.
    rungs = [(each["rung"], each["steps_lost"]) for each in resumed.closed]
    assert rungs == [("durable", 0), ("respawn", 0), ("respawn", 0)]
    assert len(resumed.of("checkpoint_loaded")) == 4
    for step in (2, 4, 6, 8):
        _spoil(kept, step)
    none = run_script(tmp_path / "third", *arguments, nproc=2)
    assert none.exit_code == 1
    assert "could not begin at a checkpoint: no whole checkpoint is left" in none.text


# -------------------------------------------------------------------- the rung


def _sharded(folder: Path, *arguments: str, **more: Any) -> Result:
    given = ("fsdp", "--steps", "10", *arguments)
    return run_script(folder, *given, script=LAYOUTS, **more)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What nothing has disturbed, where each rank has a shard of its own."""
    return _sharded(tmp_path_factory.mktemp("sharded"), nproc=2)


@pytest.mark.parametrize("tier", ["durable", "memory"])
def test_a_lost_shard_comes_from_the_newest_checkpoint(
    tier: str, sharded: Result, tmp_path: Path
) -> None:
    kept: tuple[str, ...] = ("--checkpoint", str(tmp_path / "kept"))
    if tier == "memory":
        kept = (*kept, "--memory-every", "1")
    result = _sharded(tmp_path, *kept, nproc=2, faults=("kill:rank=1,step=8,at=backward",))
    assert_same_run(sharded, result)
    (closed,) = result.closed
    assert (closed["rung"], closed["state_from"]) == (tier, tier)
    (began,) = {record["step"] for record in result.of("checkpoint_loaded")}
    assert closed["steps_lost"] == 7 - began
    assert began in (3, 6) if tier == "durable" else began >= 6


def test_all_nodes_are_lost_at_once_and_others_go_on(sharded: Result, tmp_path: Path) -> None:
    faults = tuple(f"node:index={index},step=8" for index in range(2))
    nodes = {"nproc": 1, "local_nodes": 2, "spares": 2}
    result = _sharded(tmp_path, "--checkpoint", str(tmp_path / "kept"), faults=faults, **nodes)
    assert_same_run(sharded, result)
    assert [(closed["rung"], closed["state_from"]) for closed in result.closed] == [
        ("durable", "durable")
    ]
