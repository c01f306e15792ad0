"""`everstep agent` without a coordinator: what is refused, and what it is given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from everstep import cli
from everstep.agent import memory_agent
from everstep.agent.memory_agent import MemoryAgentSettings
from everstep.wire.secret import make_secret


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory without settings, and none from outside."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("EVERSTEP"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EVERSTEP_SHM_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[MemoryAgentSettings]:
    """What it would be run with."""
    seen: list[MemoryAgentSettings] = []

    def run(settings: MemoryAgentSettings, say: Any) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(memory_agent, "run_memory_agent", run)
    return seen


def agent(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["agent", *arguments])


def test_what_it_is_given(given: list[MemoryAgentSettings], tmp_path: Path) -> None:
    make_secret().write(tmp_path / "secret")
    result = agent(
        *("--secret-file", "secret", "--name", "n", "--host", "h", "--domain", "rack=1"),
        *("--ports", "29400-29401", "--peers", "10.0.0.1:1, [::1]:2", "--memory-share", "0.25"),
        *("--recovery-bandwidth", "2GiB/s", "--keep"),
    )
    assert result.exit_code == 0, result.output
    (settings,) = given
    assert settings.secret is not None
    assert (settings.name, settings.host, settings.domain) == ("n", "h", "rack=1")
    assert list(settings.ports) == [29400, 29401]
    assert settings.peers == [("10.0.0.1", 1), ("::1", 2)]
    assert (settings.share, settings.bytes_per_s, settings.keep) == (0.25, 2 << 30, True)
    assert settings.shm_dir == tmp_path


def test_without_a_secret_it_is_for_this_host(given: list[MemoryAgentSettings]) -> None:
    assert agent().exit_code == 0
    assert given[0].secret is None
    assert given[0].name == given[0].host


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--keep", "--coordinator", "h:1"), "without a coordinator"),
        (("--peers", "h:1", "--coordinator", "h:1"), "without a coordinator"),
        (("--peers", "nowhere"), "is not HOST:PORT"),
        (("--memory-share", "1.5"), "must be above 0, at most 1"),
        (("--secret-file", "none"), "can't be read"),
        (("--name", "a b"), "another --name"),
        (("--interface", "nothing0"), "no such interface"),
        (("--interface", "lo", "--peers", "h:1"), "with a secret only"),
    ],
)
def test_refusals(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    if "nothing0" in arguments:
        make_secret().write(tmp_path / "secret")
        arguments = (*arguments, "--secret-file", "secret")
    result = agent(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
