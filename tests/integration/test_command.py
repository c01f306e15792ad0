"""The command as a person runs it: a process of its own, its streams no terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.joblab import TINY

WAITS = "import signal\nprint('ready', flush=True)\nsignal.pause()\n"
BROKEN = "def main():\n    raise ValueError('no such data')\n\n\nmain()\n"


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    given = {key: value for key, value in os.environ.items() if not key.startswith("EVERSTEP")}
    return subprocess.Popen(
        [sys.executable, "-m", "everstep.cli", "run", *arguments],
        cwd=folder,
        env=given | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("off", [False, True])
def test_ctrl_c_stops_a_run_and_is_no_failure(off: bool, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    with start(tmp_path, "waits.py", EVERSTEP="off" if off else "") as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "[rank0] ready\n"
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
    assert command.returncode == 130
    assert "stopped by SIGINT" in err
    assert "failed" not in err
    assert "correct the cause" not in err


@pytest.mark.slow
def test_an_unprotected_run_says_so_once(tmp_path: Path) -> None:
    arguments = ("--nproc-per-node", "2", str(TINY), "--steps", "2")
    with start(tmp_path, *arguments, EVERSTEP="off") as command:
        _, err = command.communicate(timeout=60)
    assert command.returncode == 0, err
    assert err.count("not protected") == 1
    assert "everstep: EVERSTEP=off: this run is not protected" in err


@pytest.mark.slow
def test_an_error_in_the_set_up_is_shown_as_the_script_s(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    with start(tmp_path, "--run-id", "one", "--nproc-per-node", "2", "broken.py") as command:
        _, err = command.communicate(timeout=60)
    assert command.returncode == 1
    assert err.startswith("everstep: run one on 2 ranks, kept in everstep-runs/one\n")
    lines = err.splitlines()
    heads = [line for line in lines if line.endswith("Traceback (most recent call last):")]
    assert len(heads) == 2, err  # when it came first, and as the first cause of the end
    files = [line.partition('File "')[2].partition('"')[0] for line in lines if 'File "' in line]
    assert files == ["broken.py"] * 4, err
    journal = (tmp_path / "everstep-runs" / "one" / "journal.jsonl").read_text()
    assert "worker/process.py" in journal
