"""Savers killed with signal 9 at random moments: what is there afterwards is whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.buckets import Bucket

SCRIPT = Path(__file__).parents[1] / "scripts" / "kill_saves.py"


def kill_savers(url: str, kills: int, environ: dict[str, str]) -> int:
    """How many were killed in a save."""
    done = subprocess.run(
        [sys.executable, SCRIPT, url, str(kills), "1"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(r"(\d+) killed, (\d+) in a save, (\d+) checkpoints loaded\n", done.stdout)
    assert said is not None, done.stdout
    assert int(said[1]) == kills
    assert int(said[3]) > 0
    return int(said[2])


def test_killed_savers_leave_whole_checkpoints_in_a_directory(tmp_path: Path) -> None:
    assert kill_savers(str(tmp_path / "store"), 20, {}) > 0


@pytest.mark.slow
def test_killed_savers_leave_whole_checkpoints_in_a_bucket(bucket: Bucket) -> None:
    assert kill_savers("s3://everstep/kill", 8, bucket.environ()) > 0
