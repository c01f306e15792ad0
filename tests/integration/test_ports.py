"""Jobs whose network is not wide open: everything of everstep's own within a range of ports, a port
that is closed between two hosts, and IPv6 alone."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.joblab import TINY
from tests.integration.netlab import Lab, Rules
from tests.integration.test_agent import ROOT, read_lines
from tests.integration.test_hosts import HOSTS, Hosts

from everstep.wire.ports import holders
from everstep.wire.secret import make_secret

pytestmark = pytest.mark.slow
PATIENCE_S = 120.0
RANGE = "27400-27408"  # just enough for three nodes and a spare


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory for what is shared that no other test uses: all that runs here has one, whatever
    its network is. It is left empty. In /dev/shm it would be taken for another test's leak."""
    path = tmp_path / "memory"
    path.mkdir()
    monkeypatch.setenv("EVERSTEP_SHM_DIR", str(path))
    yield
    path.rmdir()


def run(folder: Path, *options: str, steps: int = 20, secret: str = "") -> subprocess.Popen[bytes]:
    """Start a job; what it prints goes to `log` in the folder."""
    command = [sys.executable, "-m", "everstep.cli", *options]
    if options[0] == "run":
        command += ["--run-id", "job", "--log-dir", str(folder / "runs")]
        command += [str(TINY), "--steps", str(steps)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    environ |= {"EVERSTEP_SECRET": secret} if secret else {}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command, env=environ, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )


def until(true: Callable[[], object], story: Callable[[], str]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end_s, story()
        time.sleep(0.02)


def test_all_that_agents_listen_on_lies_in_the_range(tmp_path: Path) -> None:
    job = run(
        tmp_path, "run", "--local-nodes", "3", "--spares", "1", "--ports", RANGE, steps=1_000_000
    )
    journal = tmp_path / "runs" / "job" / "journal.jsonl"

    def records(event: str) -> list[dict[str, object]]:
        text = journal.read_text() if journal.exists() else ""
        whole, _, _ = text.rpartition("\n")  # the last line may be half written
        found = [json.loads(line) for line in whole.splitlines() if f'"{event}"' in line]
        return [record for record in found if record["event"] == event]

    def story() -> str:
        return (tmp_path / "log").read_text()

    try:
        until(lambda: records("step") and len(records("node_joined")) == 4, story)
        agents = {record["pid"] for record in records("node_registered")}
        (coordinator,) = records("listening")
        found = holders(range(1, 65536))
        ours: dict[int, list[int]] = {}
        for port, who in found.items():
            match = re.search(r"\(process (\d+)\)", who)
            if match is not None:
                ours.setdefault(int(match[1]), []).append(port)
        first, last = map(int, RANGE.split("-"))
        assert first <= int(str(coordinator["port"])) <= last
        for pid in agents:
            ports = ours[int(str(pid))]
            assert len(ports) == 2
            assert all(first <= port <= last for port in ports), (pid, ports)
    finally:
        job.terminate()
        job.wait(30)


def test_a_range_that_others_hold_is_refused_with_their_names(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 27450)):
        job = run(
            tmp_path,
            *("run", "--nnodes", "1", "--coordinator", "127.0.0.1:27451"),
            *("--ports", "27450-27451"),
            secret=make_secret().reveal(),
        )
        assert job.wait(PATIENCE_S) in (1, 2)
    said = (tmp_path / "log").read_text()
    assert re.search(rf"27450 is held by \S+ \(process {os.getpid()}\)", said), said


def test_nodes_may_meet_at_the_loopback_address_of_ipv6(tmp_path: Path) -> None:
    secret = make_secret().reveal()
    where = ("--coordinator", "[::1]:27461")
    head = run(
        tmp_path, "run", "--nnodes", "2", "--chaos", "kill:rank=1,step=9", *where, secret=secret
    )
    other = run(tmp_path, "agent", *where, "--name", "other", "--host", "other", secret=secret)
    try:
        codes = head.wait(PATIENCE_S), other.wait(PATIENCE_S)
        assert codes == (0, 0), (tmp_path / "log").read_text()
    finally:
        for process in (head, other):
            process.terminate()
            process.wait(30)
    records = read_lines(tmp_path / "runs" / "job" / "journal.jsonl")
    assert {r["address"] for r in records if r["event"] == "node_registered"} == {"::1"}
    assert [r["rung"] for r in records if r["event"] == "incident_closed"] == ["respawn"]


class Hosts6(Hosts):
    """Hosts with IPv6 addresses only."""

    def address(self, host: int) -> str:
        return f"fd00:79:31::{10 + host}"

    def up(self) -> None:
        super().up()
        until(lambda: not any(self._tentative(host) for host in range(HOSTS)), lambda: "tentative")

    def _tentative(self, host: int) -> str:
        command = ["ip", "-6", "-n", self._space(host), "addr", "show", "tentative"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts6(tmp_path: Path) -> Iterator[Hosts6]:
    made = Hosts6(tmp_path)
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.mark.root
@pytest.mark.apt("ip")
def test_a_host_is_lost_on_a_network_of_ipv6_alone(hosts6: Hosts6) -> None:
    for host in (2, 1, 0):
        chaos = ("--chaos", "node:index=1,step=150")
        hosts6.start(host, *chaos, "--ports", "29400-29402", steps=200)
    assert hosts6.wait(0) == 0, hosts6.log(0).read_text()
    registered = {record["address"] for record in hosts6.of("node_registered")}
    assert registered == {hosts6.address(host) for host in range(HOSTS)}
    (closed,) = hosts6.of("incident_closed")
    assert (closed["rung"], closed["steps_lost"]) == ("replace", 0)
    for host in (1, 2):
        hosts6.wait(host)


def start_on(lab: Lab, *options: str) -> None:
    """The same command on each host of a laboratory."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "EVERSTEP_PREFLIGHT_TIMEOUT_S": "2"}
    environ["EVERSTEP_SECRET"] = make_secret().reveal()
    for host in lab.hosts:
        command = [sys.executable, "-m", "everstep.cli", "run", "--nnodes", str(len(lab.hosts))]
        command += ["--coordinator", f"{lab.address(lab.hosts[0])}:29400", *options]
        command += ["--run-id", "job", "--log-dir", str(lab.folder / f"runs-{host}")]
        lab.start(host, [*command, "--ports", "29400-29499", str(TINY)], environ)


@pytest.mark.root
@pytest.mark.apt("ip", "unshare")
def test_a_job_needs_no_port_but_two_ranges(tmp_path: Path) -> None:
    """As docs/reference/ports-and-secret.md says: everstep's own, and the system's made smaller."""
    with Lab(tmp_path, ["ada", "bob"]) as lab:
        for host in lab.hosts:
            setting = "net.ipv4.ip_local_port_range=29500 29999"
            space = f"{lab._name}-{host}"
            command = ["ip", "netns", "exec", space, "sysctl", "-w", setting]
            subprocess.run(command, check=True, capture_output=True)
        closed = [
            (a, b, *ports) for a, b in ((0, 1), (1, 0)) for ports in ((1, 29399), (30000, 65535))
        ]
        lab.rules(Rules(closed=closed))
        start_on(lab, "--copies", "sync", "--chaos", "kill:rank=1,step=6")
        assert lab.processes["ada"].wait(PATIENCE_S) == 0, lab.log("ada").read_text()
        lab.processes["bob"].wait(PATIENCE_S)


@pytest.mark.root
@pytest.mark.apt("ip", "unshare")
@pytest.mark.parametrize(
    ("first", "last", "says"),
    [
        (
            29400,
            29499,
            r"at 10\.79\.32\.12:294\d\d: no connection \(timed out\); open the port range",
        ),
        (30000, 65535, r"gloo and nccl take such ports: open 32768-60999 \(net\.ipv4\."),
    ],
)
def test_a_pair_that_is_closed_is_named_before_a_worker_starts(
    tmp_path: Path, first: int, last: int, says: str
) -> None:
    with Lab(tmp_path, ["ada", "bob", "cyd"]) as lab:
        lab.rules(Rules(closed=[(2, 1, first, last)]))
        start_on(lab)
        assert lab.processes["ada"].wait(PATIENCE_S) == 2, lab.log("ada").read_text()
        said = lab.log("ada").read_text()
    assert re.search(r"\(host cyd, 10\.79\.32\.13\) can't reach node \d \(host bob\)", said), said
    assert re.search(says, said), said
    journal = read_lines(tmp_path / "runs-ada" / "job" / "journal.jsonl")
    assert not [record for record in journal if record["event"] == "spawned"]
