"""Tiers under torch's own trainings: other worlds, other meshes, `async_save`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _script(name: str, *args: str) -> str:
    """Run a script of tests/scripts to its end, and return its last line."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/scripts" / name), *args],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "MASTER_ADDR": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_training_goes_on_in_any_world(tmp_path: Path) -> None:
    """Sharded state of 4 ranks is loaded by 2, by 8 and by 3: equal bit for bit."""
    said = _script("elastic.py", str(tmp_path), "4", "2", "8", "3")
    assert said == "4 worlds, each from the one before"


@pytest.mark.slow
def test_async_saves_are_done_when_their_future_is(tmp_path: Path) -> None:
    assert _script("async_saves.py", str(tmp_path)) == "thread and process"
