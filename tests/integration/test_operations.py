"""What a person does to a running job from outside: looks at it, reads what it prints, ends it, and
takes a node from it.

The job's workers are without torch (fake_worker.py). What a person types runs beside it, in
processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.test_agent import ROOT, read_lines
from tests.integration.test_nodes import REPLACED, Job, assert_whole

from everstep.agent import processes
from everstep.wire.secret import make_secret

pytestmark = pytest.mark.slow
ENDLESS = 1_000_000
PATIENCE_S = 60.0


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    monkeypatch.setenv("EVERSTEP_SECRET", make_secret().reveal())
    return Job(tmp_path)


class Person:
    """Types commands for a job, whose coordinator's place is filled in."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def types(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            self._command(*words), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    @contextlib.contextmanager
    def typing(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command meanwhile."""
        command = self._command(*words)
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def _command(self, *words: str) -> list[str]:
        where = self._job.of("listening")[-1]
        coordinator = f"{where['host']}:{where['port']}"
        name, *options = words
        command = [sys.executable, "-m", "everstep.cli", name]
        return [*command, "--coordinator", coordinator, *options]

    def begins(self, act: Callable[[], None], step: int) -> None:
        """From `step` on, do what `act` does, beside the job."""

        def run() -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 - raised by `done`
                self._failure = error
                self.types("stop", "--now")

        def begin() -> None:
            self._thread = threading.Thread(target=run)
            self._thread.start()

        self._job.when("step", begin, step=step)

    def done(self) -> None:
        """Wait for the end of that."""
        assert self._thread is not None, self._job.story()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure


# ---------------------------------------------------------------- looking, reading, ending


def test_a_person_looks_reads_and_stops_the_job(job: Job) -> None:
    person = Person(job)
    job.change(spares=1, run_id="looked-at")
    job.steps(ENDLESS)

    def act() -> None:
        asked = person.types("status", "--json")
        assert (asked.returncode, asked.stderr) == (0, "")
        seen = json.loads(asked.stdout)
        assert seen["run_id"] == "looked-at"
        assert seen["overview"]["phase"] == "running"
        assert seen["overview"]["step"] >= 5
        assert sorted(agent["pid"] for agent in seen["agents"]) == sorted(job.pids.values())
        text = person.types("status").stdout
        assert "everstep run looked-at: running, step " in text
        assert "4 ranks" in text
        read = person.types("logs", "--rank", "2")
        assert (read.returncode, read.stderr) == (0, "")
        (line,) = read.stdout.splitlines()
        assert line.startswith("[rank2] rank 2 set up")
        refused = person.types("logs", "--rank", "4")
        assert refused.returncode == 2
        assert "the job has ranks 0-3, and not rank 4" in refused.stderr
        stopped = person.types("stop")
        assert stopped.returncode == 0, stopped.stderr
        assert "run looked-at is asked to end\n" in stopped.stderr
        assert "it ends with exit code 130" in stopped.stderr

    person.begins(act, step=5)
    result = job.run()
    person.done()
    assert (result.exit_code, result.text) == (130, "the job was asked to end by `everstep stop`")
    (note,) = (r for r in job.of("note") if r["key"].startswith("stop-asked"))
    assert "has asked the job to end (everstep stop)" in note["text"]


def test_one_who_follows_sees_the_end_and_the_incidents(job: Job) -> None:
    person = Person(job)
    job.steps(ENDLESS)
    read: list[tuple[str, str]] = []

    def act() -> None:
        with person.typing("logs", "--follow") as reader:
            assert reader.stdout is not None
            assert "set up" in reader.stdout.readline()
            job.kill_slot(1)
            person.types("stop", "--now")
            read.append(reader.communicate(timeout=PATIENCE_S))
            assert reader.returncode == 0, read

    job.change(spares=1)
    person.begins(act, step=5)
    assert job.run().exit_code == 130
    person.done()
    [(_, told)] = read
    assert "was lost, and ranks 2, 3 with it" in told
    assert "has asked the job to end at once" in told


def test_a_reader_that_stands_still_holds_nobody_up(job: Job) -> None:
    person = Person(job)
    job.steps(ENDLESS)

    def act() -> None:
        with person.typing("logs", "--follow", "--timeout", "0.5") as reader:
            assert reader.stdout is not None
            assert "set up" in reader.stdout.readline()
            reader.send_signal(signal.SIGSTOP)
            before = len(job.of("step"))
            until(lambda: len(job.of("step")) > before + 500)
            assert person.types("stop").returncode == 0
            reader.send_signal(signal.SIGCONT)
            reader.communicate(timeout=PATIENCE_S)
            assert reader.returncode in (0, 3)  # it had the job's last word, or found nobody

    person.begins(act, step=2)
    assert job.run().exit_code == 130
    person.done()
    assert job.incidents() == []


def test_a_coordinator_that_dies_and_comes_back_is_asked_again(job: Job) -> None:
    person = Person(job)
    job.steps(ENDLESS)

    def act() -> None:
        with person.typing("logs", "--follow") as reader:
            assert reader.stdout is not None
            assert "set up" in reader.stdout.readline()
            os.kill(job.of("coordinator_started")[0]["pid"], signal.SIGKILL)
            seen = json.loads(person.types("status", "--json").stdout)
            assert seen["term"] == 1
            until(lambda: bool(job.of("coordinator_resumed")))
            assert person.types("stop").returncode == 0
            _, told = reader.communicate(timeout=PATIENCE_S)
            assert "waiting up to 10 s for a coordinator" in told
            assert "has asked the job to end" in told
            assert reader.returncode == 0

    person.begins(act, step=5)
    assert job.run().exit_code == 130
    person.done()
    assert job.incidents() == []


def test_who_has_another_secret_learns_and_changes_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    person = Person(job)
    job.steps(ENDLESS)

    def act() -> None:
        with monkeypatch.context() as elsewhere:  # what fails here must end the job with its secret
            elsewhere.setenv("EVERSTEP_SECRET", make_secret().reveal())
            for command in (("status",), ("logs",), ("stop", "--now")):
                refused = person.types(*command, "--timeout", "2")
                assert (refused.returncode, refused.stdout) == (3, "")
                assert "is its secret the same" in refused.stderr
        assert person.types("stop").returncode == 0

    person.begins(act, step=5)
    assert job.run().exit_code == 130
    person.done()
    assert job.incidents() == []
    assert any("was refused" in record["text"] for record in job.of("note"))


# ---------------------------------------------------------------- a node is asked to end


@pytest.mark.parametrize(
    "signals", [(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)]
)
def test_an_agent_that_is_asked_to_end_is_replaced_at_once(
    job: Job, signals: tuple[int, ...]
) -> None:
    job.change(spares=1, grace_s=30.0)
    job.steps(400)

    def ask() -> None:
        for number in signals:
            job.kill_slot(1, number)

    job.when("step", ask, step=4)
    assert_whole(job, job.run(), 400)
    assert job.incidents() == [REPLACED]
    (opened,) = job.of("incident_opened")
    text = opened["cause"]["text"]
    assert f"its agent was asked to end by {signal.Signals(signals[0]).name}" in text
    assert " left, and ranks 2, 3 with it: " in text
    assert job.of("incident_cause") == []  # its workers' deaths are no failures


def test_nobody_waits_for_a_worker_that_will_not_end(job: Job) -> None:
    """The lost ranks go on elsewhere while the node still waits for its workers, which are killed
    after the grace."""
    job.change(spares=1, grace_s=2.0)
    job.steps(ENDLESS)
    target = job.settings.script
    job.change(script=type(target)(target=target.target, module=False, args=(*target.args, "deaf")))
    person = Person(job)
    gone: list[int] = []

    def act() -> None:
        pids = [r["pid"] for r in job.of("started") if r["rank"] in (2, 3)]
        agent = job.pids[job.node_of(1)]
        job.kill_slot(1, signal.SIGTERM)
        until(lambda: bool(job.of("incident_closed")))
        assert all(is_alive(pid) for pid in [*pids, agent]), "they had no grace"
        until(lambda: not any(is_alive(pid) for pid in pids))
        gone.extend(pids)
        person.types("stop")

    person.begins(act, step=4)
    assert job.run().exit_code == 130
    person.done()
    assert len(gone) == 2
    assert job.incidents() == [REPLACED]


def is_alive(pid: int) -> bool:
    found = processes.look_up(pid)
    return found is not None and found.state != "Z"


def until(true: Callable[[], bool]) -> None:
    """Look until it is true, which another process makes it."""
    tries = threading.Event()
    for _ in range(int(PATIENCE_S * 100)):
        if true():
            return
        tries.wait(0.01)
    raise AssertionError("it does not come true")


# ---------------------------------------------------------------- without a coordinator to ask


def test_a_run_without_nodes_is_looked_at_by_its_journal(job: Job) -> None:
    job.change(local_nodes=0)
    job.steps(ENDLESS)
    run = Path(job.settings.log_dir) / job.settings.run_id
    command = [sys.executable, "-m", "everstep.cli", "status", str(run)]

    def look() -> tuple[int, str]:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        return asked.returncode, asked.stdout

    def act() -> None:
        code, text = look()
        assert code == 0
        assert ": running, step " in text
        os.kill(os.getpid(), signal.SIGINT)

    person = Person(job)
    person.begins(act, step=5)
    assert job.run().exit_code == 130
    person.done()
    code, text = look()
    assert code == 0
    assert ": ended with exit code 130 after " in text
    whole = (run / "journal.jsonl").read_bytes()
    (run / "journal.jsonl").write_bytes(whole[: whole.rindex(b'{"t"')])
    assert read_lines(run / "journal.jsonl")[-1]["event"] != "job_ended"
    assert look()[0] == 3
