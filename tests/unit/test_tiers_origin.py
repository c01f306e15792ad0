"""Where a checkpoint comes from, and what is called when it is durable."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from everstep.tiers.catalog import Origin
from everstep.tiers.hook import Durable, run_hook
from everstep.tiers.origin import commit_of, origin, packages

SAVED = Durable(
    series="run", step=7, destination="/data", nbytes=12, origin=Origin(run_id="r", commit="abc")
)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder under git, with one commit."""

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "train.py").write_text("1\n")
    git("add", ".")
    git("commit", "-m", "one")
    return tmp_path


def test_the_commit_is_named_and_marked_when_files_differ(code: Path) -> None:
    commit_of.cache_clear()
    clean = commit_of(code)
    assert len(clean) == 40
    (code / "train.py").write_text("2\n")
    commit_of.cache_clear()
    assert commit_of(code) == f"{clean}-dirty"


def test_there_need_be_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_of.cache_clear()
    assert commit_of(tmp_path) == ""
    commit_of.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path) == ""


def test_an_origin_says_what_is_installed_and_what_it_was_given() -> None:
    made = origin(world=4, mesh={"dp": 2, "tp": 2}, config={"lr": 0.1}, parent="run/3", run_id="r")
    assert (made.world, made.mesh, made.config) == (4, {"dp": 2, "tp": 2}, {"lr": 0.1})
    assert (made.parent, made.run_id) == ("run/3", "r")
    assert made.packages["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "torch" in packages()


def test_a_command_is_told_about_the_checkpoint_but_not_the_secret(tmp_path: Path) -> None:
    told = tmp_path / "told"
    environ = {"PATH": "/usr/bin:/bin", "EVERSTEP_SECRET": "s"}
    assert run_hook(f"sh -c 'env > {told}'", SAVED, timeout_s=30, environ=environ) is None
    lines = told.read_text().splitlines()
    assert "EVERSTEP_CHECKPOINT_STEP=7" in lines
    assert "EVERSTEP_CHECKPOINT_DESTINATION=/data" in lines
    assert not [line for line in lines if line.startswith("EVERSTEP_SECRET")]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("sh -c 'echo no luck; exit 3'", "ended with code 3: no luck"),
        ("/no/such/program", "could not be started"),
        ("'unbalanced", "could not be started"),
        ("", "could not be started"),
    ],
)
def test_a_command_that_fails_is_a_warning(command: str, why: str) -> None:
    said = run_hook(command, SAVED, timeout_s=30)
    assert said is not None
    assert why in said


def test_a_command_that_takes_too_long_is_ended_with_its_children() -> None:
    said = run_hook("sh -c 'sleep 1000 & sleep 1000'", SAVED, timeout_s=0.2)
    assert said is not None
    assert "was not done in 0.2 s" in said


def test_a_function_is_given_the_checkpoint() -> None:
    seen: list[Durable] = []
    assert run_hook(seen.append, SAVED, timeout_s=30) is None
    assert seen == [SAVED]


def test_a_function_that_raises_or_stands_still_is_a_warning() -> None:
    def raises(_: Durable) -> None:
        raise RuntimeError("no luck")

    said = run_hook(raises, SAVED, timeout_s=30)
    assert said is not None
    assert "raised RuntimeError: no luck" in said

    gate = threading.Event()
    said = run_hook(lambda _: gate.wait(60), SAVED, timeout_s=0.1)
    gate.set()
    assert said is not None
    assert "left to itself" in said
