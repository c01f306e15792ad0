"""The commands that look at a job: what they refuse, and what they read from a journal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from everstep.cli import main
from everstep.observe.journal import JournalWriter
from everstep.wire.secret import make_secret

NOWHERE = "127.0.0.1:1"


def call(*words: str, **environ: str) -> Result:
    names = ("COORDINATOR", "COORDINATOR_LEASE", "RUN_ID", "SECRET", "SECRET_FILE")
    unset = dict.fromkeys((f"EVERSTEP_{name}" for name in names), None)
    return CliRunner().invoke(main, words, env=unset | environ)


@pytest.mark.parametrize("command", ["status", "logs", "stop"])
def test_which_job_must_be_said(command: str) -> None:
    result = call(command, EVERSTEP_SECRET=make_secret().reveal())
    assert result.exit_code == 2
    assert "which job? give --coordinator HOST:PORT" in result.output


@pytest.mark.parametrize("command", ["status", "logs", "stop"])
def test_the_secret_must_be_there(command: str) -> None:
    result = call(command, "--coordinator", NOWHERE)
    assert result.exit_code == 2
    assert "EVERSTEP_SECRET" in result.output


@pytest.mark.parametrize("given", ["option", "environment"])
def test_where_nobody_answers_the_exit_code_says_so(given: str) -> None:
    secret = {"EVERSTEP_SECRET": make_secret().reveal()}
    if given == "option":
        result = call("stop", "--timeout", "0.2", "--coordinator", NOWHERE, **secret)
    else:
        result = call("stop", "--timeout", "0.2", EVERSTEP_COORDINATOR=NOWHERE, **secret)
    assert result.exit_code == 3
    assert f"no connection to the coordinator at {NOWHERE}" in result.output


def test_a_lease_without_the_runs_name_finds_nothing() -> None:
    lease = {"EVERSTEP_COORDINATOR_LEASE": "etcd://127.0.0.1:1"}
    result = call("status", EVERSTEP_SECRET=make_secret().reveal(), **lease)
    assert result.exit_code == 2
    assert "or --run-id" in result.output


def test_a_job_is_asked_or_its_journal_read(tmp_path: Path) -> None:
    result = call("status", "--coordinator", NOWHERE, str(tmp_path))
    assert result.exit_code == 2
    assert "give --coordinator or RUN_DIR" in result.output


def test_no_such_run(tmp_path: Path) -> None:
    result = call("status", str(tmp_path))
    assert result.exit_code == 3
    assert "no such journal" in result.output


def test_the_status_of_a_journal(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "journal.jsonl", run_id="one", wall_time=1.0)
    running = call("status", "--json", str(tmp_path))
    assert running.exit_code == 0
    assert json.loads(running.stdout)["run_id"] == "one"
    writer.close()
    killed = call("status", str(tmp_path))
    assert killed.exit_code == 3
    assert "its journal has no end, and nobody on this machine writes it" in killed.output
