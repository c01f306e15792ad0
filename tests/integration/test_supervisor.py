"""The process that coordinates a job on nodes: it is ended, stands still or is asked to leave, and
the job goes on; the launcher of both leaves nothing behind, whatever happens.

Workers without torch (fake_worker.py) need the coordinator for each step; so where steps must go on
without it the job trains."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from pathlib import Path

import pytest
from tests.integration.joblab import TINY, Result, assert_same_run, run_script
from tests.integration.test_agent import ROOT
from tests.integration.test_nodes import Job, assert_whole, below, launched

from everstep.errors import EverstepError, UserError
from everstep.launch import coordinator_process, supervisor
from everstep.observe.journal import read_journal
from everstep.wire.secret import make_secret

pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    return Job(tmp_path)


def coordinator_of(job: Job) -> int:
    """The process id of the newest coordinator."""
    return int(job.of("coordinator_started")[-1]["pid"])


def kill_coordinator(job: Job, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was killed for a record before this one
        os.kill(coordinator_of(job), number)


# -------------------------------------------------------------------- it dies and comes back


def test_one_that_dies_while_nodes_gather_is_followed_by_another(job: Job) -> None:
    job.change(spares=1)
    job.when("node_registered", lambda: kill_coordinator(job))
    result = job.run()
    assert_whole(job, result)
    assert [record["term"] for record in job.of("coordinator_started")] == [0, 1]
    first, second = job.of("listening")
    assert (first["host"], first["port"]) == (second["host"], second["port"])
    events = [record["event"] for record in read_journal(result.journal)]
    assert [events.count(event) for event in ("journal", "job_started", "job_ended")] == [1, 1, 1]
    assert job.incidents() == []


def test_one_that_dies_when_all_is_said_is_not_followed(job: Job) -> None:
    job.when("job_ended", lambda: kill_coordinator(job))
    result = job.run()
    assert_whole(job, result)
    assert [r["event"] for r in read_journal(result.journal)].count("job_ended") == 1


def test_one_that_dies_again_and_again_ends_the_job(job: Job) -> None:
    job.change(lift_budgets=False)
    job.watcher.on_record = lambda record: (
        kill_coordinator(job) if record["event"] == "listening" else None
    )
    with pytest.raises(EverstepError, match="has died 5 times within 60 s, the last time by SIG"):
        job.run()
    journal = Path(job.settings.log_dir) / job.settings.run_id / "journal.jsonl"
    *_, last = read_journal(journal)
    assert (last["event"], last["exit_code"]) == ("job_ended", 1)
    assert job.watcher.records[-1] == last


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("clean"))


def train(folder: Path, *faults: str) -> Result:
    return run_script(
        folder, "--steps", "60", script=TINY, nproc=1, local_nodes=2, spares=1, faults=faults
    )


def test_training_goes_on_while_there_is_none(clean: Result, tmp_path: Path) -> None:
    faults = ("coordinator:step=20", "coordinator:rank=1,step=30,at=commit")
    faulted = train(tmp_path, *faults)
    assert_same_run(clean, faulted)
    assert sorted(faulted.fired()) == sorted(faults)
    terms = [record["term"] for record in faulted.of("coordinator_started")]
    assert terms == [0, 1, 2]
    assert all(record["undisturbed"] for record in faulted.of("coordinator_resumed"))
    assert faulted.of("incident_opened") == []
    assert [record["step"] for record in faulted.of("step")] == list(range(1, 61))
    assert faulted.repeated == []


def test_a_node_that_is_lost_meanwhile_is_replaced(clean: Result, tmp_path: Path) -> None:
    faults = ("coordinator:step=20", "node:index=1,step=25")
    faulted = train(tmp_path, *faults)
    assert_same_run(clean, faulted)
    assert sorted(faulted.fired()) == sorted(faults)
    (closed,) = faulted.closed
    assert (closed["rung"], closed["steps_lost"]) == ("replace", 0)
    assert len(faulted.of("incident_opened")) == 1


# -------------------------------------------------------------------- what it can't do itself


def test_what_prevents_the_job_is_told_by_the_launcher(job: Job, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    job.change(log_dir=str(blocked))
    with pytest.raises(UserError, match="the run cannot have its directory"):
        job.run()
    assert job.watcher.records == []


def test_a_port_that_is_taken_is_told(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_SECRET", make_secret().reveal())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job.change(local_nodes=0, coordinator=f"127.0.0.1:{port}")
        with pytest.raises(UserError, match=str(port)):
            job.run()


def test_an_agent_that_can_not_start_ends_the_job(job: Job) -> None:
    job.change(interface="not-there0")
    with pytest.raises(EverstepError, match="not-there0"):
        job.run()
    (ended,) = job.of("job_ended")
    assert "not-there0" in ended["text"]


def test_one_that_ends_without_a_word_is_an_error(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_process, "MODULE", "tests.not_there")
    with pytest.raises(EverstepError, match=r"ended with code 1 without a word(.|\n)*not_there"):
        job.run()


def test_a_view_that_fails_leaves_nothing_behind(job: Job) -> None:
    class BrokenError(Exception):
        pass

    def fail() -> None:
        raise BrokenError("no terminal")

    job.when("step", fail)
    with pytest.raises(BrokenError):
        job.run()


# -------------------------------------------------------------------- it is asked to end


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
def test_one_that_stands_still_when_it_is_asked_to_end_is_killed(
    job: Job, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]
) -> None:
    monkeypatch.setattr(supervisor, "_END_TIMEOUT_S", 0.5 if len(numbers) == 1 else 60.0)
    monkeypatch.setattr(supervisor, "_HURRY_TIMEOUT_S", 0.5)
    job.change(grace_s=0.1)

    def stand_still_and_ask() -> None:
        kill_coordinator(job, signal.SIGSTOP)
        for number in numbers:
            os.kill(os.getpid(), number)

    job.when("gathered", stand_still_and_ask)
    result = job.run()
    assert result.exit_code == 128 + numbers[0]
    assert "did not end in time" in result.text
    assert read_journal(result.journal)[-1]["text"] == result.text


def test_one_that_dies_when_it_is_asked_to_end_is_followed_by_one_that_ends(job: Job) -> None:
    def kill_and_ask() -> None:
        kill_coordinator(job)
        os.kill(os.getpid(), signal.SIGINT)

    job.when("node_joined", kill_and_ask)
    result = job.run()
    assert result.exit_code == 130
    (ended,) = job.of("job_ended")
    assert "SIGINT" in ended["text"]


def test_a_coordinator_whose_launcher_is_killed_ends_with_the_agents(tmp_path: Path) -> None:
    with launched(tmp_path, "--spares", "1") as launcher:
        started = below(launcher)
        assert len(started) == 4
        pidfds = [os.pidfd_open(pid) for pid in started]
        launcher.kill()
        deadline = time.monotonic() + 20
        for pidfd in pidfds:
            gone, _, _ = select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
            os.close(pidfd)
            assert gone
