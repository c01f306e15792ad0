"""The file in which a worker shows where it stands."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.unit.fakegroups import FakeWorld

from everstep.agent.progress import ProgressFile, sweep
from everstep.core.hang import Entered
from everstep.errors import UserError
from everstep.worker.progress import NAME_BYTES, ROWS, SIZE_BYTES, Phase, Progress


def test_the_agent_sees_what_the_worker_stores(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path, "run", 3, 2)
    assert file.path.name == "everstep-run-3.2"
    fresh = file.read()
    assert (fresh.step, fresh.phase, fresh.changed_ns) == (0, Phase.SETUP, 0)
    worker = Progress(file.path)
    before = time.monotonic_ns()
    worker.step, worker.phase = 1 << 40, Phase.UPDATE
    seen = file.read()
    assert (seen.step, seen.phase) == (1 << 40, Phase.UPDATE)
    assert before <= seen.changed_ns <= time.monotonic_ns()
    assert (worker.step, worker.phase) == (1 << 40, Phase.UPDATE)
    assert seen.words() == f"in step {1 << 40} (optimizer)"
    worker.close()
    assert file.read() == seen
    file.remove()
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_phase_that_is_none_does_not_end_the_agent(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path, "run", 0, 1)
    worker = Progress(file.path)
    worker.phase = 77
    assert file.read().phase is Phase.BETWEEN
    worker.close()
    file.remove()


def test_where_a_worker_stands_in_words(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path, "run", 0, 1)
    worker = Progress(file.path)

    def words(phase: Phase, step: int | None = None) -> str:
        if step is not None:
            worker.step = step
        worker.phase = phase
        assert file.read().words() == worker.words()
        return worker.words()

    # A replacement that has begun no step yet names none.
    assert words(Phase.PARKED) == "while parked"
    assert words(Phase.RECOVER) == "in a recovery"
    assert words(Phase.BETWEEN) == "between steps"
    assert words(Phase.SECTION, 0) == "in a section before step 1"
    assert words(Phase.STEP, 5) == "in step 5"
    assert words(Phase.FENCE) == "in step 5 (fence)"
    assert words(Phase.UPDATE) == "in step 5 (optimizer)"
    assert words(Phase.STEP) == "in step 5 (after an update)"
    assert words(Phase.PARKED) == "while parked at step 5"
    assert words(Phase.RECOVER) == "in a recovery"
    assert words(Phase.STEP, 5) == "in step 5"  # another attempt
    assert words(Phase.BETWEEN) == "between steps 5 and 6"
    assert words(Phase.SECTION, 5) == "in a section after step 5"
    assert words(Phase.COMPILE) == "in a section after step 5 (compilation)"
    assert words(Phase.FENCE) == "in a section after step 5 (fence)"
    assert words(Phase.STEP, 6) == "in step 6"
    worker.close()
    file.remove()


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_words(tmp_path: Path, phase: Phase) -> None:
    file = ProgressFile(tmp_path, "run", 0, 1)
    worker = Progress(file.path)
    worker.phase = phase
    assert file.read().words()
    worker.close()
    file.remove()


def test_a_file_that_is_too_short_is_refused_before_a_store_can_kill(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * (SIZE_BYTES - 1))
    with pytest.raises(OSError, match="shorter than 4096"):
        Progress(tmp_path / "short")


def test_its_space_is_taken(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path, "run", 0, 1)
    assert file.path.stat().st_blocks * 512 >= SIZE_BYTES
    file.remove()


def test_no_room_is_said_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("everstep.agent.progress.os.posix_fallocate", full)
    with pytest.raises(UserError, match=r"has \d+ bytes free, and each worker needs 4096"):
        ProgressFile(tmp_path, "run", 0, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file or directory"):
        ProgressFile(tmp_path / "none", "run", 0, 1)


def test_the_sweep_removes_what_the_dead_left_and_nothing_else(tmp_path: Path) -> None:
    living = ProgressFile(tmp_path, "living", 0, 1)
    dead = ProgressFile(tmp_path, "dead", 0, 1)
    dying = dead.path.read_bytes()
    dead.remove()
    dead.path.write_bytes(dying)  # as a killed agent leaves it: whole, and locked by nobody
    (tmp_path / "everstep-of-another-program").write_bytes(b"\0" * SIZE_BYTES)
    (tmp_path / "everstep-small").write_bytes(b"")
    (tmp_path / "other").write_bytes(dying)
    (tmp_path / "everstep-link").symlink_to(tmp_path / "other")
    (tmp_path / "everstep-directory").mkdir()
    assert sweep(tmp_path) == [dead.path.name]
    assert sweep(tmp_path) == []
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        living.path.name,
        "everstep-of-another-program",
        "everstep-small",
        "other",
        "everstep-link",
        "everstep-directory",
    }
    living.remove()


def entered(file: ProgressFile) -> list[Entered]:
    return sorted(file.read().groups.values(), key=lambda each: each.name)


def test_what_was_entered_of_each_communicator(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path, "run", 0, 1)
    worker = Progress(file.path)
    world, pair = worker.join("world", range(4)), worker.join("pair", (0, 2))
    worker.entered(world, "allreduce", 1 << 40)
    worker.entered(world, "broadcast", 7)
    worker.entered(pair, "no such kind", 1)
    assert entered(file) == [
        Entered(count=1, kind="collective", elements=1, name="pair"),
        Entered(count=2, kind="broadcast", elements=7, name="world"),
    ]
    assert file.glance().groups == {}
    # A message is between two: its count would differ from that of the other members.
    worker.entered(pair, "send", 5)
    assert entered(file)[0].count == 1
    worker.regroup(3)
    assert file.read().generation == 3
    assert [each.count for each in entered(file)] == [0, 0]
    worker.leave(pair)
    assert [each.name for each in entered(file)] == ["world"]
    worker.close()
    file.remove()


def test_what_was_entered_and_has_not_ended(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path, "run", 0, 1)
    world = FakeWorld()
    world.communicators.progress = Progress(file.path)
    group = world.group()
    assert not file.glance().inside
    group.allreduce([torch.ones(1)])
    group.allreduce([torch.ones(1)])
    before = file.glance()
    assert before.inside
    first, second = world.made[0].works
    first.end()
    assert file.glance().inside
    second.end()
    after = file.glance()
    assert not after.inside
    assert after.changed_ns == before.changed_ns  # that something ends is no move
    group.allreduce([torch.ones(1)])
    assert file.glance().inside
    world.made[0].works[2].end(RuntimeError("Connection closed by peer"))
    assert not file.glance().inside
    world.communicators.progress.close()
    file.remove()


def test_communicators_of_one_name_are_told_apart_by_their_ranks(tmp_path: Path) -> None:
    """The halves of a split have one name."""
    identities = []
    for rank, ranks in enumerate([(0, 1), (0, 1), (2, 3)]):
        file = ProgressFile(tmp_path, "run", rank, 1)
        worker = Progress(file.path)
        worker.join("half", ranks)
        identities.append(set(file.read().groups))
        worker.close()
        file.remove()
    assert identities[0] == identities[1] != identities[2]


def test_a_table_that_is_full_says_so(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path, "run", 0, 1)
    worker = Progress(file.path)
    rows = [worker.join(f"{'x' * NAME_BYTES}{number}", (number,)) for number in range(ROWS)]
    assert len(set(rows)) == len(file.read().groups) == ROWS
    extra = worker.join("extra", (0, 1))
    assert (extra, file.read().unlisted) == (0, 1)
    worker.entered(extra, "allreduce", 3)  # counted among all, and nowhere else
    assert {each.count for each in entered(file)} == {0}
    worker.leave(extra)
    worker.leave(rows[5])
    assert file.read().unlisted == 0
    assert worker.join("extra", (0, 1)) == rows[5]
    worker.close()
    file.remove()


def test_a_debugger_in_the_process_is_seen_at_the_next_step(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path, "run", 0, 1)
    worker = Progress(file.path)
    before = sys.getprofile()
    try:
        sys.setprofile(lambda *_: None)
        worker.step = 5
        assert file.glance().debugged
    finally:
        sys.setprofile(before)
    worker.waits(True)
    assert file.glance().waiting
    worker.close()
    file.remove()
