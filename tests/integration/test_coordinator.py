"""A coordinator that is killed comes back, and the job is the one in which nothing failed.

It is killed when something is written in the journal: at each kind of moment, and at twenty drawn
ones of a run with faults."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.integration.joblab import SCRIPTS, TINY, Result, assert_same_run, run_script

pytestmark = pytest.mark.slow
ARGS = ("--steps", "14", "--batchnorm")
KILL = "kill:rank=1,step=5,at=forward"
Record = dict[str, Any]


class Killer:
    """Kills the coordinator when `due(record)` says so. `kills`: at which records it has."""

    def __init__(self, due: Callable[[Record], bool]) -> None:
        self._due = due
        self._pid = 0
        self.kills: list[str] = []

    def __call__(self, record: Record) -> None:
        if record["event"] == "coordinator_started":
            self._pid = record["pid"]
        elif self._due(record) and self._pid:
            pid, self._pid = self._pid, 0
            os.kill(pid, signal.SIGKILL)
            self.kills.append(record["event"])


def once(event: str, **fields: Any) -> Callable[[Record], bool]:
    """The first record of `event` with these fields is due."""
    done = False

    def due(record: Record) -> bool:
        nonlocal done
        fits = not done and record["event"] == event and fields.items() <= record.items()
        done = done or fits
        return fits

    return due


def run(folder: Path, *faults: str, args: tuple[str, ...] = ARGS, **more: Any) -> Result:
    options: dict[str, Any] = {"nproc": 1, "local_nodes": 2, "lease_s": 1.0, **more}
    return run_script(folder, *args, faults=faults, **options)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    @functools.cache
    def get(args: tuple[str, ...] = ARGS, local_nodes: int = 2) -> Result:
        folder = tmp_path_factory.mktemp("clean")
        return run(folder, args=args, local_nodes=local_nodes)

    return get


def assert_nothing_is_open(result: Result) -> None:
    opened = {record["incident"] for record in result.of("incident_opened")}
    assert {record["incident"] for record in result.closed} == opened
    assert [record["steps_lost"] for record in result.closed] == [0] * len(result.closed)


# ---------------------------------------------------------------- at each kind of moment


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("node_registered", {"node": 1}),
        ("node_joined", {"node": 0}),
        ("started", {"rank": 1}),
        ("setup_done", {}),
        ("step", {"step": 1}),
        ("step", {"step": 14}),
        ("closed", {}),
    ],
)
def test_a_coordinator_dies_in_a_run_without_faults(
    event: str, fields: dict[str, Any], clean: Callable[..., Result], tmp_path: Path
) -> None:
    killer = Killer(once(event, **fields))
    result = run(tmp_path, on_record=killer)
    assert killer.kills == [event]
    assert_same_run(clean(), result)
    for resumed in result.of("coordinator_resumed"):
        assert resumed["term"] == 1


@pytest.mark.parametrize(
    "event", ["incident_opened", "stopped", "parked", "ready", "planned", "regrouped", "restored"]
)
def test_a_coordinator_dies_in_a_recovery(
    event: str, clean: Callable[..., Result], tmp_path: Path
) -> None:
    killer = Killer(once(event))
    result = run(tmp_path, KILL, on_record=killer)
    assert killer.kills == [event]
    assert_same_run(clean(), result)
    assert_nothing_is_open(result)
    assert sum(result.fired().values()) == 1


@pytest.mark.parametrize(
    "fault",
    [
        "kill:rank=1,step=6,at=forward",
        "raise:rank=0,step=6,at=backward",
        "exit0:rank=1,step=6,at=commit",
        "node:index=1,step=6",
        "agent:index=0,step=6",
    ],
)
def test_what_fails_while_nobody_coordinates_is_mended_afterwards(
    fault: str, clean: Callable[..., Result], tmp_path: Path
) -> None:
    result = run(tmp_path, "coordinator:step=5", fault, spares=1)
    assert_same_run(clean(), result)
    assert_nothing_is_open(result)
    assert sum(result.fired().values()) == 2


def test_shards_without_a_replica_outlive_node_and_coordinator(tmp_path: Path) -> None:
    script, args = SCRIPTS / "layouts.py", ("fsdp", "--steps", "12")
    options: dict[str, Any] = {"copies": "sync", "script": script, "args": args}
    whole = run(tmp_path / "clean", **options)
    faults = ("coordinator:step=5", "node:index=1,step=7")
    result = run(tmp_path / "faulted", *faults, spares=1, **options)
    assert_same_run(whole, result)
    assert_nothing_is_open(result)
    (incident,) = result.closed
    assert incident["rung"] == "replace"


# ---------------------------------------------------------------- at moments that are drawn


@pytest.mark.timeout(600)
def test_a_coordinator_dies_at_twenty_moments_of_a_run_with_faults(
    clean: Callable[..., Result], tmp_path: Path
) -> None:
    args = ("--steps", "160", "--batchnorm")
    random, gap, seen = Random(3), 4, 0

    def due(record: Record) -> bool:
        """After as many records as were drawn; those are counted that a coordinator writes when it
        acts."""
        nonlocal gap, seen
        seen += 1
        if seen < gap or len(killer.kills) == 20:
            return False
        gap, seen = 3 + int(random.random() * 14), 0
        return True

    killer = Killer(due)
    faults = (
        "random:count=12,seed=2,steps=2-150",
        "node:index=1,step=60",
        "agent:index=0,step=110",
    )
    result = run(
        tmp_path,
        *faults,
        args=args,
        spares=2,
        script=TINY,
        on_record=killer,
        collective_timeout_s=10.0,
    )
    assert len(killer.kills) == 20
    assert_same_run(clean(args), result)
    assert sum(result.fired().values()) == 14
    assert_nothing_is_open(result)
