"""Networks that are cut on purpose: by the agent itself, in a network namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.netlab import Lab
from tests.integration.test_partitions import HEAD, OTHERS, Job, values_of_a_clean_run

pytestmark = [pytest.mark.root, pytest.mark.apt("ip", "unshare")]
CUT_AND_MENDED = """
from everstep.agent.outage import Outage, devices
import subprocess

SHOWN = (
    "link show",
    "-4 address show scope global",
    "-6 address show scope global",
    "-4 route show table main",
    "-4 route show table 77",
    "-6 route show table main",
)

def show(what):
    for each in SHOWN:
        subprocess.run(["ip", *each.split(), "dev", "eth0"], check=True)
    print(what, flush=True)

show("before")
outage = Outage(devices("10.79.33.9", ""))
show("cut")
outage.end()
show("mended")
"""


@pytest.fixture
def space() -> Iterator[str]:
    """A network namespace whose eth0 has addresses and routes of all sorts."""
    name = f"en{os.getpid()}"
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        for device in ("lo", "eth1", "eth0"):
            ip("-n", name, "link", "set", device, "up")
        for address in ("10.79.33.2/24", "10.79.33.3/24", "fd79::2/64"):
            no_wait = ["nodad"] if ":" in address else []
            ip("-n", name, "address", "add", address, "dev", "eth0", *no_wait)
        for route in (
            "default via 10.79.33.1 metric 50",
            "10.80.0.0/16 via 10.79.33.9 src 10.79.33.3",
            "default via 10.79.33.7 table 77",
            "default via fd79::1",
            "fd80::/64 via fd79::9 metric 7",
        ):
            ip("-n", name, "route", "add", *route.split(), "dev", "eth0")
        yield name
    finally:
        ip("netns", "del", name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def test_what_was_there_is_there_again(space: str) -> None:
    done = subprocess.run(
        ["ip", "netns", "exec", space, sys.executable, "-c", CUT_AND_MENDED],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, rest = done.stdout.split("before\n")
    cut, rest = rest.split("cut\n")
    mended, _ = rest.split("mended\n")
    assert "fd80::/64 via fd79::9" in before
    assert "state DOWN" in cut
    assert "via" not in cut
    assert mended == before


@pytest.mark.slow
@pytest.mark.timeout(240)  # as those of test_partitions
def test_a_moment_a_while_and_for_ever(tmp_path: Path) -> None:
    """On one job. A cut that is shorter than the lease harms nobody. After a longer one the node
    is back as a spare, which then takes the place of the one whose network is gone for good."""
    faults = (
        "net:index=0,step=8,seconds=0.3",
        "net:index=1,step=20,seconds=2.5",
        "net:index=2,step=70",
    )
    clean = values_of_a_clean_run(tmp_path / "clean", ranks_per_node=1)
    with Lab(tmp_path, (HEAD, *OTHERS)) as lab:
        job = Job(lab)
        job.start(HEAD, *OTHERS, faults=faults)
        job.until(lambda: len(job.of("incident_closed")) == 2, "the ends of both incidents")
        job.hurry()
        assert job.wait(HEAD) == 0, job.story()
        assert job.incidents() == [("replace", 0)] * 2
        assert [record["text"] for record in job.of("fault_fired")] == list(faults)
        assert [r["cause"]["fault"] for r in job.of("incident_opened")] == list(faults[1:])
        job.assert_one_history(clean)
        lost, (_, taken) = job.of("node_lost")[0], job.of("node_replaced")
        assert (taken["host"], taken["node"]) == (lost["host"], len(OTHERS))
        said = "\n".join(lab.log(host).read_text() for host in OTHERS)
    for words in (
        "this node looks for its coordinator at 10.79.32.11:29400",
        "of run job, and ready; a spare until it is given a slot",
        "fault on purpose: no network for 2.5 s",
        "fault on purpose: the network is back",
        "the job has gone on without this node",
        "the job is over, with exit code 0",
    ):
        assert words in said, said
