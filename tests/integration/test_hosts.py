"""Jobs on hosts of their own: network namespaces on a bridge, each with its own address.

Every host starts the same command. What is held here is what one machine can't show: that the hosts
find each other in any order, that workers listen at their host's address, and that a cut cable is
the loss of a node, whose workers end."""

from __future__ import annotations

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

from everstep.agent import processes
from everstep.wire.secret import make_secret

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.apt("ip")]
HOSTS = 3
NET = "10.79.31"
PATIENCE_S = 60.0


class Hosts:
    """Three hosts on one switch; `name` tells these from others of this machine."""

    def __init__(self, folder: Path) -> None:
        self.name = f"es{os.getpid() % 10000}"
        self.folder = folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.secret = make_secret().reveal()

    def up(self) -> None:
        _ip("link", "add", self.name, "type", "bridge")
        _ip("link", "set", self.name, "up")
        for host in range(HOSTS):
            space, cable = self._space(host), self._cable(host)
            _ip("netns", "add", space)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", cable, "master", self.name, "up")
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def down(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for host in range(HOSTS):
            # By its name: the namespace's own end comes later.
            _ip("link", "del", self._cable(host), check=False)
            _ip("netns", "del", self._space(host), check=False)
        _ip("link", "del", self.name, check=False)

    def _space(self, host: int) -> str:
        return f"{self.name}h{host}"

    def _cable(self, host: int) -> str:
        return f"{self.name}c{host}"

    def address(self, host: int) -> str:
        return f"{NET}.{10 + host}"

    def plug(self, host: int, state: str) -> None:
        """Put a host's cable in (`up`) or pull it out (`down`)."""
        _ip("link", "set", self._cable(host), state)

    def start(self, host: int, *options: str, steps: int) -> None:
        """The same command on each host."""
        command = ["ip", "netns", "exec", self._space(host)]
        command += [sys.executable, "-m", "everstep.cli", "run", "--nnodes", "2"]
        command += ["--coordinator", f"{self.address(0)}:29400", "--domain", f"rack=r{host}"]
        command += ["--run-id", "job", "--log-dir", str(self.folder / f"runs{host}"), *options]
        command += [str(TINY), "--steps", str(steps)]
        memory = self.folder / f"memory{host}"
        memory.mkdir(exist_ok=True)
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "EVERSTEP_SECRET": self.secret,
            "EVERSTEP_SHM_DIR": str(memory),  # of the host alone
        }
        with self.log(host).open("wb") as log:
            self.processes[host] = subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def log(self, host: int) -> Path:
        return self.folder / f"host{host}.log"

    def journal(self) -> list[dict[str, Any]]:
        path = self.folder / "runs0" / "job" / "journal.jsonl"
        return read_lines(path) if path.exists() else []

    def of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.journal() if record["event"] == event]

    def until(self, true: Callable[[], Any]) -> None:
        """Look until it is true. Fails after a minute, with what the coordinator said."""
        end_s = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < end_s, self.log(0).read_text()
            time.sleep(0.05)

    def wait(self, host: int) -> int:
        return self.processes[host].wait(PATIENCE_S)


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    try:
        made.up()
        yield made
    finally:
        made.down()


def test_a_host_is_lost_in_the_middle_of_a_step(hosts: Hosts) -> None:
    for host in (2, 1, 0):  # the coordinator last
        hosts.start(host, "--chaos", "node:index=1,step=150", steps=200)
    assert hosts.wait(0) == 0, hosts.log(0).read_text()
    registered = {record["address"] for record in hosts.of("node_registered")}
    assert registered == {hosts.address(host) for host in range(HOSTS)}
    (closed,) = hosts.of("incident_closed")
    assert (closed["rung"], closed["steps_lost"]) == ("replace", 0)
    # Slot 1 may lie on the coordinator's host, whose agent is not the command itself.
    assert {hosts.wait(host) for host in (1, 2)} <= {0, -signal.SIGKILL}


def test_a_host_whose_cable_is_pulled_out_is_replaced_and_ends_its_workers(hosts: Hosts) -> None:
    for host in range(2):
        hosts.start(host, steps=100_000)
    hosts.until(lambda: hosts.of("step"))
    hosts.start(2, steps=100_000)
    hosts.until(lambda: len(hosts.of("node_joined")) == HOSTS)
    (lost,) = [r["node"] for r in hosts.of("node_registered") if r["address"] == hosts.address(1)]
    ranks = {r["rank"] for r in hosts.of("spawned") if r["node"] == lost}
    pids = [r["pid"] for r in hosts.of("started") if r["rank"] in ranks]
    hosts.plug(1, "down")
    hosts.until(lambda: hosts.of("incident_closed"))
    (closed,) = hosts.of("incident_closed")
    assert (closed["rung"], closed["steps_lost"]) == ("replace", 0)
    # Its workers stand still till then: it can't know that the others have gone on.
    hosts.plug(1, "up")
    hosts.until(lambda: not any(processes.is_there(pid) for pid in pids))
    hosts.until(lambda: len(hosts.of("node_joined")) == HOSTS + 1)  # it is back, as a spare
    hosts.processes[0].send_signal(signal.SIGINT)
    assert hosts.wait(0) == 130
    assert [hosts.wait(host) for host in (1, 2)] == [130, 130]
