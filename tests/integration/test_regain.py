"""A node and the one that keeps its copies lose all their processes at once; agents that are
started again on their hosts find the copies in memory, and the job goes on with them.

Three nodes, each with memory of its own: of any two of them one keeps the other's copies. The
launcher has one, which stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.joblab import SCRIPTS, Result, assert_same_run, run_script
from tests.integration.test_agent import ROOT

from everstep.agent.leftovers import sweep
from everstep.agent.workers import free_port
from everstep.wire.secret import make_secret

pytestmark = pytest.mark.slow
HOSTS = ("ada", "ben")
STEPS = 8
LOST_AFTER = 4
Tamper = Callable[[list[Path]], None]


class Hosts:
    """Agents that are started by hand, by host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._where = f"127.0.0.1:{free_port()}"
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._workers: dict[int, int] = {}  # by rank
        self._homes: dict[int, str] = {}  # by node, its host
        self._nodes: dict[int, int] = {}  # by rank

    def killed(self, tamper: Tamper, *, come_back: bool = True, **settings: Any) -> Result:
        """A job whose nodes but one die after a step, and come back after `tamper` had their
        memory, if they do."""

        def lose() -> None:
            self._kill()
            tamper([self._memory(host) for host in HOSTS])
            for host in HOSTS if come_back else ():
                self._start(host)

        return self._run(lose, lambda: None, **settings)

    def stopped(self) -> Result:
        """A job whose nodes but one are not heard for so long that they are given up."""
        return self._run(
            lambda: self._signal(signal.SIGSTOP), lambda: self._signal(signal.SIGCONT), lease_s=3.0
        )

    def _run(self, lose: Callable[[], None], awaited: Callable[[], None], **more: Any) -> Result:
        def look(record: dict[str, Any]) -> None:
            match record["event"]:
                case "listening":
                    for host in HOSTS:
                        self._start(host)
                case "node_registered":
                    self._homes[record["node"]] = record["host"]
                case "spawned":
                    self._nodes[record["rank"]] = record["node"]
                case "started":
                    self._workers[record["rank"]] = record["pid"]
                case "step" if record["step"] == LOST_AFTER:
                    lose()
                case "copy_awaited":
                    awaited()

        options: dict[str, Any] = {"spare_wait_s": 60.0, **more}
        try:
            return run_script(
                self._folder / "runs",
                *("fsdp", "--steps", str(STEPS)),
                script=SCRIPTS / "layouts.py",
                nproc=1,
                on_record=look,
                nnodes=3,
                coordinator=self._where,
                copies="sync",
                **options,
            )
        finally:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            for agent in self._agents.values():
                agent.wait(20)

    def _signal(self, number: int) -> None:
        for agent in self._agents.values():
            agent.send_signal(number)

    def _memory(self, host: str) -> Path:
        return self._folder / f"memory-{host}"

    def _start(self, host: str) -> None:
        memory = self._memory(host)
        memory.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "everstep.cli", "agent", "--coordinator", self._where]
        environ = {**os.environ, "EVERSTEP_SHM_DIR": str(memory)}
        with (self._folder / f"{host}.log").open("ab") as log:
            self._agents[host] = subprocess.Popen(
                [*command, "--name", host, "--host", host], env=environ, stdout=log, stderr=log
            )

    def _kill(self) -> None:
        ranks = [rank for rank, node in self._nodes.items() if self._homes[node] in HOSTS]
        assert len(ranks) == len(HOSTS)
        for pid in [a.pid for a in self._agents.values()] + [self._workers[r] for r in ranks]:
            os.kill(pid, signal.SIGKILL)
        for agent in self._agents.values():
            agent.wait()


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    monkeypatch.setenv("EVERSTEP_SECRET", make_secret().reveal())
    monkeypatch.setenv("EVERSTEP_LOG_DIR", str(tmp_path / "agents"))
    return Hosts(tmp_path)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Result:
    arguments = ("fsdp", "--steps", str(STEPS))
    folder = tmp_path_factory.mktemp("clean")
    return run_script(folder, *arguments, script=SCRIPTS / "layouts.py", nproc=3, copies="sync")


def spoil(memories: list[Path]) -> None:
    """Flip a bit in each copy."""
    spoiled = [copy for memory in memories for copy in memory.glob("everstep-copies-*/*.json")]
    assert len(spoiled) >= 2 * len(memories)
    for manifest in spoiled:
        with manifest.with_suffix("").open("r+b") as file:
            data = bytearray(file.read())
            data[len(data) // 2] ^= 1
            file.seek(0)
            file.write(data)


def story(result: Result) -> str:
    return "\n".join(str(record)[:400] for record in result.records)


def assert_back(clean: Result, result: Result) -> None:
    assert_same_run(clean, result)
    (closed,) = result.closed
    told = (closed["rung"], closed["state_from"], closed["steps_lost"])
    assert told == ("replace", "memory", 0), story(result)
    assert {record["host"] for record in result.of("copies_found")} == set(HOSTS)
    assert all(record["taken"] for record in result.of("copies_found"))


def test_a_node_and_its_keeper_come_back_with_their_copies(clean: Result, hosts: Hosts) -> None:
    """One of the two hosts has lost what it had; each shard is on the other as well."""
    assert_back(clean, hosts.killed(lambda memories: spoil(memories[:1])))


def test_a_node_and_its_keeper_that_were_given_up_come_back_with_their_copies(
    clean: Result, hosts: Hosts
) -> None:
    assert_back(clean, hosts.stopped())


def test_copies_that_were_spoiled_meanwhile_are_never_trained_on(hosts: Hosts) -> None:
    result = hosts.killed(spoil)
    assert result.exit_code != 0
    assert "does not hold" in result.text, story(result)
    assert "corrupt" in result.text
    assert result.of("step")[-1]["step"] == LOST_AFTER


def test_copies_that_another_jobs_start_has_swept_are_missed_by_name(hosts: Hosts) -> None:
    def start_another(memories: list[Path]) -> None:
        for memory in memories:
            assert list(memory.glob("everstep-copies-*"))
            sweep(memory, "another-run")
            assert not list(memory.glob("everstep-copies-*"))

    result = hosts.killed(start_another, come_back=False, spare_wait_s=1.0)
    assert result.exit_code != 0
    assert "is lost: no whole copy is left" in result.text, story(result)
    assert "that were in the memory of ada and ben, within 1 s (--spare-wait)" in result.text
