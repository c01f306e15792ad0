"""`everstep coordinator`: a coordinator in the foreground, without a node of its own, that somebody
else starts again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.joblab import TINY
from tests.integration.test_agent import ROOT, read_lines
from tests.integration.test_etcd_lease import Etcd

from everstep.agent.workers import free_port
from everstep.launch.job import LEASE_LOST_EXIT_CODE
from everstep.wire.secret import make_secret

pytestmark = pytest.mark.slow
PATIENCE_S = 60.0


class Apart:
    """A job on two agents, and its coordinators. All are processes of their own."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self._folder = folder
        self._where = f"127.0.0.1:{free_port()}"
        self._run_id = f"apart-{os.getpid()}"  # no other job's on this machine
        secret = make_secret().reveal()
        self._environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "EVERSTEP_SECRET": secret}
        self._environ |= variables
        self._processes: list[subprocess.Popen[bytes]] = []

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        everstep = [sys.executable, "-m", "everstep.cli", *command]
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                everstep, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._processes.append(process)
        return process

    def coordinator(
        self, name: str, steps: int = 100_000, where: str = "", nnodes: int = 2
    ) -> subprocess.Popen[bytes]:
        command = ["coordinator", "--nnodes", str(nnodes), "--coordinator", where or self._where]
        command += ["--run-id", self._run_id, "--log-dir", str(self._folder / "runs")]
        return self._start(name, *command, str(TINY), "--steps", str(steps))

    def launcher(self, name: str, where: str) -> subprocess.Popen[bytes]:
        """A command that would coordinate, too, and is a node."""
        command = ["run", "--nnodes", "1", "--coordinator", where, "--run-id", self._run_id]
        command += ["--log-dir", str(self._folder / name), str(TINY), "--steps", "20"]
        return self._start(name, *command)

    def agents(self) -> list[subprocess.Popen[bytes]]:
        command = ["agent", "--coordinator", self._where, "--run-id", self._run_id, "--name"]
        return [self._start(name, *command, name) for name in "ab"]

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def of(self, event: str) -> list[dict[str, Any]]:
        journal = self._folder / "runs" / self._run_id / "journal.jsonl"
        lines = read_lines(journal) if journal.exists() else []
        return [record for record in lines if record["event"] == event]

    def until(self, true: Callable[[], Any]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not true():
            said = [path.read_text() for path in self._folder.glob("*.log")]
            assert time.monotonic() < end_s, "\n".join(said)
            time.sleep(0.05)

    def steps(self) -> int:
        return max((int(record["step"]) for record in self.of("step")), default=0)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    made = Apart(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_steps_go_on_from_one_coordinator_to_the_next_until_one_is_asked_to_end_the_job(
    apart: Apart,
) -> None:
    agents, first = apart.agents(), apart.coordinator("first")
    apart.until(lambda: apart.steps() >= 20)
    rival = apart.coordinator("rival")
    assert rival.wait(PATIENCE_S) == 2
    assert f"process {first.pid} on " in apart.log("rival").read_text()

    first.send_signal(signal.SIGTERM)
    assert first.wait(PATIENCE_S) == 143
    assert "the job goes on" in apart.log("first").read_text()
    assert all(agent.poll() is None for agent in agents)

    wrong = apart.coordinator("wrong", steps=9)
    assert wrong.wait(PATIENCE_S) == 2
    assert "the run there is another job: its args is" in apart.log("wrong").read_text()

    second = apart.coordinator("second")
    apart.until(lambda: apart.of("coordinator_resumed"))
    second.kill()
    second.wait()
    third = apart.coordinator("third")
    apart.until(lambda: len(apart.of("coordinator_resumed")) == 2)
    here = apart.steps()
    apart.until(lambda: apart.steps() > here)
    third.send_signal(signal.SIGINT)
    assert third.wait(PATIENCE_S) == 130
    assert [agent.wait(PATIENCE_S) for agent in agents] == [130, 130]
    assert [record["undisturbed"] for record in apart.of("coordinator_resumed")] == [True, True]
    assert [record["step"] for record in apart.of("step")] == list(range(1, apart.steps() + 1))
    assert apart.of("incident_opened") == []
    assert len(apart.of("coordinator_left")) == len(apart.of("job_ended")) == 1

    late = apart.coordinator("late")
    assert late.wait(PATIENCE_S) == 2
    said = apart.log("late").read_text()
    assert "may not have heard of that" not in said  # all have, and nobody is waited for
    assert "this run is over, and a run never writes over another's journal" in said


@pytest.mark.apt("etcd")
def test_with_a_lease_another_one_takes_over_and_the_one_that_slept_knows(
    etcd: Etcd, tmp_path: Path
) -> None:
    variables = {"EVERSTEP_COORDINATOR_LEASE": etcd.url, "EVERSTEP_LEASE_S": "1"}
    with contextlib.closing(Apart(tmp_path, **variables)) as apart:
        agents = apart.agents()
        coordinators = {}
        for name in ("first", "second"):
            coordinators[name] = apart.coordinator(name, where=f"127.0.0.1:{free_port()}")
        apart.until(lambda: apart.steps() >= 20)
        holder = apart.of("coordinator_started")[0]["pid"]
        [sleeper] = [p for p in coordinators.values() if p.pid == holder]
        [other] = [p for p in coordinators.values() if p.pid != holder]

        sleeper.send_signal(signal.SIGSTOP)
        apart.until(lambda: apart.of("coordinator_resumed"))
        here = apart.steps()
        apart.until(lambda: apart.steps() > here)
        sleeper.send_signal(signal.SIGCONT)
        assert sleeper.wait(PATIENCE_S) == LEASE_LOST_EXIT_CODE

        [_, second] = apart.of("coordinator_started")
        assert (second["pid"], second["term"]) == (other.pid, 1)
        assert other.poll() is None
        third = apart.coordinator("third", where=f"127.0.0.1:{free_port()}")
        other.kill()
        apart.until(lambda: len(apart.of("coordinator_resumed")) == 2)
        here = apart.steps()
        apart.until(lambda: apart.steps() > here)
        third.send_signal(signal.SIGINT)
        assert third.wait(PATIENCE_S) == 130
        assert [agent.wait(PATIENCE_S) for agent in agents] == [130, 130]
        assert [record["undisturbed"] for record in apart.of("coordinator_resumed")] == [True] * 2
        assert [record["step"] for record in apart.of("step")] == list(range(1, apart.steps() + 1))
        assert len(apart.of("job_ended")) == 1


@pytest.mark.apt("etcd")
def test_a_launcher_that_does_not_get_the_lease_is_a_node_and_ends_with_the_job(
    etcd: Etcd, tmp_path: Path
) -> None:
    with contextlib.closing(Apart(tmp_path, EVERSTEP_COORDINATOR_LEASE=etcd.url)) as apart:
        holder = apart.coordinator("holder", steps=20, nnodes=1)
        apart.until(lambda: apart.of("listening"))
        launcher = apart.launcher("launcher", f"127.0.0.1:{free_port()}")
        assert holder.wait(PATIENCE_S) == 0
        assert launcher.wait(PATIENCE_S) == 0, apart.log("launcher").read_text()
        assert [record["step"] for record in apart.of("step")] == list(range(1, 21))
