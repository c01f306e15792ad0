"""Shards that no other rank holds, kept by copies in memory: processes and whole nodes die, and no
step is lost."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.integration.joblab import SCRIPTS, Result, assert_same_run, assert_survived, run_script

pytestmark = pytest.mark.slow

LAYOUTS = SCRIPTS / "layouts.py"
STEPS = 12


def _run(folder: Path, layout: str, *faults: str, nproc: int, **settings: Any) -> Result:
    arguments = (layout, "--steps", str(STEPS))
    options = {"copies": "sync", **settings}
    return run_script(folder, *arguments, script=LAYOUTS, nproc=nproc, faults=faults, **options)


def _assert_same(folder: Path, layout: str, *faults: str, nproc: int, **settings: Any) -> Result:
    clean = _run(folder / "clean", layout, nproc=nproc, **settings)
    result = _run(folder / "faulted", layout, *faults, nproc=nproc, **settings)
    assert_same_run(clean, result)
    return result


def _assert_kept(folder: Path, layout: str, *faults: str, nproc: int, **settings: Any) -> Result:
    result = _assert_same(folder, layout, *faults, nproc=nproc, **settings)
    assert_survived(result, *faults)
    return result


@pytest.mark.parametrize("layout", ["fsdp", "fsdp-keep", "fsdp-mixed", "zero"])
def test_a_process_dies_that_alone_held_its_shard(layout: str, tmp_path: Path) -> None:
    faults = (
        "kill:rank=1,step=2,at=backward",
        "segv:rank=0,step=4,at=optimizer",
        "kill:rank=2,step=6,at=fence",
        "raise:rank=1,step=8,at=optimizer",
        "kill:rank=2,step=10,at=commit",
        "kill:rank=0,step=11,at=between",
    )
    result = _assert_kept(tmp_path, layout, *faults, nproc=3)
    assert "memory" in {record["state_from"] for record in result.closed}


def test_a_step_that_some_had_committed_is_not_made_twice(tmp_path: Path) -> None:
    """The first step, where nothing can be undone, and all processes of the job at once."""
    faults = (
        "kill:rank=0,step=1,at=commit",
        *(f"kill:rank={rank},step=6,at=commit" for rank in range(3)),
    )
    _assert_kept(tmp_path, "fsdp", *faults, nproc=3)


def test_a_corrupt_copy_is_never_trained_on(tmp_path: Path) -> None:
    """Bits that flip in shared memory: the receipt fails, twice, and the job says so."""
    spoiled: list[Path] = []

    def spoil(record: dict[str, Any]) -> None:
        if record["event"] == "stopped" and not spoiled:
            for folder in Path("/dev/shm").glob("everstep-copies-*"):
                for path in folder.glob("n0-r1.1-*"):
                    if path.suffix != ".json":
                        data = bytearray(path.read_bytes())
                        data[len(data) // 2] ^= 1
                        path.write_bytes(data)
                        spoiled.append(path)

    arguments = ("fsdp", "--steps", str(STEPS))
    result = run_script(
        tmp_path,
        *arguments,
        script=LAYOUTS,
        nproc=2,
        faults=("kill:rank=1,step=5",),
        on_record=spoil,
        copies="sync",
    )
    assert spoiled
    assert result.exit_code != 0
    assert "corrupt in bytes" in result.text


def test_a_corrupt_copy_is_taken_from_another_node(tmp_path: Path) -> None:
    """A rank can't undo its update from its own copy, so its state is torn; and it can't take the
    step from there, so it takes it from its keeper."""
    home: list[int] = []
    spoiled: list[Path] = []

    def spoil(record: dict[str, Any]) -> None:
        if record["event"] == "spawned" and record["rank"] == 0:
            home.append(record["node"])
        elif record["event"] == "fault_fired":  # rank 1 stands still, and is not yet missed
            folder = Path(f"/dev/shm/everstep-copies-t{os.getpid()}-0")
            for manifest in folder.glob(f"n{home[0]}-r0.*.json"):
                if json.loads(manifest.read_text())["about"]["step"] == 4:
                    with manifest.with_suffix("").open("r+b") as file:
                        data = bytearray(file.read())
                        data[len(data) // 2] ^= 1
                        file.seek(0)
                        file.write(data)
                    spoiled.append(manifest)

    fault = "stop:rank=1,step=5,at=optimizer"
    nodes = {"nproc": 1, "local_nodes": 2}
    clean = _run(tmp_path / "clean", "fsdp", **nodes)
    result = _run(tmp_path / "faulted", "fsdp", fault, on_record=spoil, **nodes)
    assert len(spoiled) == 1
    assert_same_run(clean, result)
    assert_survived(result, fault)
    assert "not-undone" in {record["key"] for record in result.of("note")}
    # Of rank 0 alone, where rank 1 had its state before rank 0's was found to be spoiled.
    assert re.search(r"takes? step 4 from (its|their) cop", result.closed[0]["reason"])


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_node_dies_and_a_spare_takes_its_shards(nproc: int, tmp_path: Path) -> None:
    faults = ("node:index=1,step=4", "kill:rank=0,step=7,at=optimizer", "node:index=0,step=9")
    result = _assert_kept(
        tmp_path, "fsdp", *faults, nproc=nproc, local_nodes=3 - nproc // 2, spares=2
    )
    assert [record["rung"] for record in result.closed].count("replace") == 2


def test_without_copies_the_shards_of_a_node_are_lost_by_name(tmp_path: Path) -> None:
    result = _run(
        tmp_path, "fsdp", "node:index=1,step=4", nproc=1, local_nodes=2, spares=1, copies="off"
    )
    assert result.exit_code != 0
    assert "--copies sync" in result.text


# ---------------------------------------------------------------- steps that don't wait


ON_NODES: dict[str, Any] = {"nproc": 1, "local_nodes": 3, "spares": 1, "copies": "async"}


def test_a_node_dies_while_its_copy_is_under_way(tmp_path: Path) -> None:
    """At most a step is lost, and only where the copy had not come."""
    result = _assert_same(tmp_path, "fsdp", "node:index=1,step=9", **ON_NODES)
    (closed,) = result.closed
    assert closed["state_from"] == "memory"
    assert (closed["rung"], closed["steps_lost"]) in (("replace", 0), ("memory", 0), ("memory", 1))


def test_steps_that_outrun_their_copies_are_lost_by_number(tmp_path: Path) -> None:
    """A network on which a copy takes longer than a step."""
    result = _assert_same(
        tmp_path, "fsdp", "node:index=1,step=9", recovery_bandwidth="100KB/s", **ON_NODES
    )
    (closed,) = result.closed
    assert (closed["rung"], closed["state_from"]) == ("memory", "memory")
    assert 1 <= closed["steps_lost"] <= 4
    assert "ranks 0-2 take step" in closed["reason"]
    assert "copy-skipped" in {record.get("key") for record in result.records}


@pytest.mark.parametrize("layout", ["fsdp-keep", "zero"])
def test_a_process_that_dies_costs_no_step(layout: str, tmp_path: Path) -> None:
    """Its own node has the copy. One after the other, in all places, also on one machine."""
    faults = (
        "kill:rank=1,step=2,at=backward",
        "kill:rank=2,step=5,at=fence",
        "segv:rank=0,step=7,at=optimizer",
        "kill:rank=2,step=10,at=commit",
    )
    result = _assert_kept(tmp_path, layout, *faults, nproc=3, copies="async")
    assert {record["steps_lost"] for record in result.closed} == {0}
    assert {record["rung"] for record in result.closed} == {"respawn"}
