"""Two hundred faults of all kinds in one run: of processes, agents, nodes, and the coordinator.
What living workers hold does not grow; what the others leave behind is found as in every test.

A node that was lost comes back after a while, as a machine that reboots does: here a new agent is
started for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.integration.joblab import TINY, Result, assert_same_run, run_script
from tests.integration.leaks import Workers

from everstep import chaos
from everstep.wire.secret import make_secret

pytestmark = pytest.mark.slow
STEPS, NODES = 420, 3
ARGS = ("--steps", str(STEPS), "--batchnorm")
END_S = 60.0
COLLECTIVE_TIMEOUT_S = 5.0


class Reboots:
    """Starts an agent for each that is lost. As a context: none is left afterwards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._where = ""
        self._agents: list[subprocess.Popen[bytes]] = []
        self.workers = Workers(collective_timeout_s=COLLECTIVE_TIMEOUT_S)

    def on_record(self, record: dict[str, Any]) -> None:
        self.workers.on_record(record)
        if record["event"] == "listening":
            self._where = f"{record['host']}:{record['port']}"
        elif record["event"] == "node_lost":
            self._start(f"again-{len(self._agents)}")

    def _start(self, name: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            who = ["--coordinator", self._where, "--name", name, "--host", name]
            agent = subprocess.Popen(
                [sys.executable, "-m", "everstep.cli", "agent", *who],
                env=os.environ | {"EVERSTEP_LOG_DIR": str(self._folder / "runs")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._agents.append(agent)

    def __enter__(self) -> Reboots:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for agent in self._agents:
                agent.wait(timeout=END_S)
        finally:
            for agent in self._agents:
                agent.kill()


def drawn(seed: int, count: int, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Faults of nodes and of the coordinator, one in each stretch of the run."""
    random = Random(seed)
    stretch = (STEPS - 20) // count
    faults = []
    for number in range(count):
        step = 10 + number * stretch + int(random.random() * (stretch - 2))
        kind = kinds[int(random.random() * len(kinds))]
        place = chaos.IN_STEP[int(random.random() * len(chaos.IN_STEP))]
        if kind == "coordinator":
            faults.append(f"coordinator:step={step},at={place}")
        else:
            faults.append(f"{kind}:index={int(random.random() * NODES)},step={step},at={place}")
    return tuple(faults)


def run(folder: Path, *faults: str, reboots: Reboots | None = None, **more: Any) -> Result:
    return run_script(
        folder,
        *ARGS,
        script=TINY,
        nproc=1,
        faults=faults,
        local_nodes=NODES,
        spares=1 if faults else 0,
        spare_wait_s=120.0,
        collective_timeout_s=COLLECTIVE_TIMEOUT_S,
        on_record=reboots.on_record if reboots else lambda _: None,
        **more,
    )


@pytest.mark.timeout(900)
def test_two_hundred_random_faults_of_all_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_SECRET", make_secret().reveal())
    clean = run(tmp_path / "clean")
    random = f"random:count=176,seed=5,steps=2-{STEPS - 10}"
    faults = (random, *drawn(6, 16, ("node", "agent")), *drawn(7, 8, ("coordinator",)))
    (tmp_path / "reboots").mkdir()
    with Reboots(tmp_path / "reboots") as reboots:
        faulted = run(tmp_path / "faulted", *faults, reboots=reboots)
    assert_same_run(clean, faulted)
    fired = faulted.fired()
    assert sum(fired.values()) == 200, sorted(set(faults) - fired.keys())
    assert [record["steps_lost"] for record in faulted.closed] == [0] * len(faulted.closed)
    assert len(faulted.closed) == len(faulted.of("incident_opened"))
    assert reboots.workers.growth() == []
