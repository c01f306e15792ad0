"""The agent's shelf of copies in shared memory, and the budget for it."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from everstep import snapshot
from everstep.agent.shelf import Area, Shelf, create_locked, is_left, refusal, sweep
from everstep.errors import UserError
from everstep.shm.budget import Budget, measure, size
from everstep.snapshot import About, Layout, Manifest, SnapshotError, Tensor

PLENTY = Budget(limit_bytes=1 << 30)
LAYOUT = Layout([Tensor(name="w", dtype="torch.uint8", item_bytes=1, shape=(1000,))])


def fill(area: Area, step: int, rank: int | None = None) -> Manifest:
    about = About(
        run_id="run", rank=area.rank if rank is None else rank, world=8, shard="all", step=step
    )
    with area.bytes() as view:
        return snapshot.write(view, LAYOUT, about, {"w": bytes([step % 256]) * 1000})


def begin(shelf: Shelf, keep: Collection[int] = (), **more: int) -> Area:
    asked = {"rank": 0, "incarnation": 1, "nbytes": LAYOUT.nbytes, **more}
    area = shelf.begin(keep=keep, **asked)
    if area.fd < 0:
        try:
            assert shelf.furnish(area, create_locked(area.path, area.nbytes))
        except OSError as error:
            shelf.abandon(area)
            raise refusal(area.path, error) from error
    return area


def put(shelf: Shelf, step: int, keep: Collection[int] = (), **more: int) -> Area:
    area = begin(shelf, keep, **more)
    shelf.commit(area, fill(area, step))
    return area


def steps(shelf: Shelf, rank: int = 0) -> list[int]:
    return [area.step for area in shelf.complete(rank)]


def held(shelf: Shelf) -> list[tuple[int, int]]:
    return [(copy.rank, copy.step) for copy in shelf.held()]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(tmp_path, "run", 3, PLENTY)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_a_copy_is_there_when_its_manifest_is(shelf: Shelf) -> None:
    area = begin(shelf, rank=2, incarnation=5)
    assert area.path.name == "n3-r2.5-1"
    assert area.path.parent.name == "everstep-copies-run"
    assert area.path.stat().st_blocks * 512 >= LAYOUT.nbytes
    manifest = fill(area, 4)
    assert shelf.newest(2) is None
    shelf.commit(area, manifest)
    assert shelf.newest(2) is area
    assert held(shelf) == [(2, 4)]
    with area.bytes() as view:
        assert view.readonly
        snapshot.verify(manifest, view)
    assert snapshot.decode(area.manifest_path.read_bytes()) == manifest


def test_areas_take_turns_and_what_is_needed_is_never_touched(shelf: Shelf) -> None:
    first, second = put(shelf, 1), put(shelf, 2, keep=[1])
    assert steps(shelf) == [2, 1]
    third = begin(shelf, keep=[2])
    assert third is first
    assert steps(shelf) == [2]
    assert not first.manifest_path.exists()
    shelf.commit(third, fill(third, 3))
    assert steps(shelf) == [3, 2]
    assert put(shelf, 4, keep=[3]) is second
    assert shelf.nbytes == 2 * LAYOUT.nbytes
    assert put(shelf, 5, keep=[3, 4]) not in (first, second)
    assert steps(shelf) == [5, 4, 3]


def test_a_copy_that_is_made_again_takes_its_own_place(shelf: Shelf) -> None:
    """Another attempt at the step, by the same process: no third area, and no new memory."""
    first, second = put(shelf, 1), put(shelf, 2, keep=[1])
    assert begin(shelf, keep=[1]) is second
    assert begin(shelf, keep=[1]) is second
    assert steps(shelf) == [1]
    shelf.commit(second, fill(second, 2))
    assert begin(shelf, keep=[2]) is first
    assert shelf.nbytes == 2 * LAYOUT.nbytes


def test_what_is_read_is_not_written_over(shelf: Shelf) -> None:
    """Its memory goes with the reader, and counts until then."""
    first = put(shelf, 1)
    put(shelf, 2, keep=[1])
    with first.bytes() as view:
        third = put(shelf, 3, keep=[2])
        assert third is not first
        assert view[-1] == 1
        assert not first.path.exists()
        assert shelf.nbytes == 3 * LAYOUT.nbytes
    assert shelf.nbytes == 2 * LAYOUT.nbytes


def test_memory_may_come_when_nobody_wants_it_any_more(shelf: Shelf) -> None:
    area = shelf.begin(rank=0, incarnation=1, nbytes=LAYOUT.nbytes)
    assert area.fd == -1
    assert shelf.nbytes == LAYOUT.nbytes, "it counts from when it is asked for"
    again = shelf.begin(rank=0, incarnation=1, nbytes=LAYOUT.nbytes)
    assert again is not area
    fd = create_locked(area.path, area.nbytes)
    assert not shelf.furnish(area, fd)
    assert not area.path.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert shelf.nbytes == LAYOUT.nbytes


def test_a_new_incarnation_never_writes_where_an_old_one_may(shelf: Shelf) -> None:
    first = put(shelf, 1)
    slow = begin(shelf, keep=[1])
    with slow.bytes() as zombie:
        area = put(shelf, 2, keep=[1], incarnation=2)
        zombie[:] = b"x" * len(zombie)  # the old writer wakes up
        with area.bytes() as view:
            assert area.manifest is not None
            snapshot.verify(area.manifest, view)
        with pytest.raises(ValueError, match="is not being written"):
            shelf.commit(slow, fill_like(slow))
    assert steps(shelf) == [2, 1]
    third = put(shelf, 3, keep=[2], incarnation=2)
    assert third.path not in (first.path, area.path, slow.path)
    assert shelf.nbytes == 2 * LAYOUT.nbytes


def fill_like(area: Area) -> Manifest:
    about = About(run_id="run", rank=area.rank, world=8, shard="all", step=9)
    data = memoryview(bytearray(LAYOUT.nbytes))
    return snapshot.write(data, LAYOUT, about, {"w": bytes(1000)})


def test_an_abandoned_copy_destroys_nothing(shelf: Shelf) -> None:
    put(shelf, 1)
    put(shelf, 2, keep=[1])
    area = begin(shelf, keep=[2])
    shelf.abandon(area)
    shelf.abandon(area)
    assert steps(shelf) == [2]
    assert not area.path.exists()


def test_another_size_gets_another_area(shelf: Shelf) -> None:
    first = put(shelf, 1)
    put(shelf, 2, keep=[1])
    area = begin(shelf, keep=[2], nbytes=LAYOUT.nbytes + 5)
    assert area is not first
    assert not first.path.exists()
    assert area.path.stat().st_size == LAYOUT.nbytes + 5


def test_steps_to_which_nobody_goes_back_are_given_up(shelf: Shelf) -> None:
    put(shelf, 1)
    put(shelf, 2, keep=[1])
    put(shelf, 2, rank=7)
    half = begin(shelf, rank=8)
    shelf.retain([1])
    assert held(shelf) == [(0, 1)]
    assert half.under_way
    put(shelf, 2, keep=[1])
    assert steps(shelf) == [2, 1]
    shelf.drop(0, 2)
    assert steps(shelf) == [1]
    shelf.drop(0)
    assert steps(shelf) == []


def test_a_manifest_of_something_else_is_refused(shelf: Shelf) -> None:
    put(shelf, 5)
    area = begin(shelf, keep=[5])
    with pytest.raises(SnapshotError, match="manifest of rank 1 came"):
        shelf.commit(area, fill(area, 6, rank=1))
    manifest = fill(area, 6)
    with area.bytes() as view:
        view[0] ^= 1
    with pytest.raises(SnapshotError, match="header"):
        shelf.commit(area, manifest)
    manifest = fill(area, 6)
    with area.bytes(), pytest.raises(ValueError, match="in its writer's hands"):
        shelf.commit(area, manifest)
    shelf.commit(area, manifest)


def test_memory_goes_with_its_last_user(shelf: Shelf) -> None:
    area = put(shelf, 1)
    with area.bytes() as view:
        shelf.drop(0)
        assert held(shelf) == []
        assert not area.path.exists()
        assert view[-1] == 1
        assert area.fd >= 0
    assert area.fd == -1
    with pytest.raises(ValueError, match="given up"), area.bytes():
        pass


def test_an_agent_that_comes_back_adopts_what_is_complete(tmp_path: Path) -> None:
    before = Shelf(tmp_path, "run", 0, PLENTY)
    put(before, 1, rank=4)
    put(before, 2, keep=[1], rank=4)
    put(before, 1, rank=5)
    half = begin(before, keep=[1], rank=5)
    before.close(keep=True)
    half.path.write_bytes(b"half")
    after = Shelf(tmp_path, "run", 7, Budget(limit_bytes=LAYOUT.nbytes))
    found = after.adopt()
    assert held(after) == [], "they are not judged yet"
    assert after.nbytes == 3 * LAYOUT.nbytes
    after.release(found)
    assert after.held() == found
    assert held(after) == [(4, 1), (4, 2), (5, 1)]
    assert steps(after, 4) == [2, 1]
    assert not half.path.exists()
    newest = after.newest(4)
    assert newest is not None
    assert newest.manifest is not None
    with newest.bytes() as view:
        snapshot.verify(newest.manifest, view)
    area = put(after, 3, keep=[2], rank=4)  # the adopted ones are within the budget
    assert area.path.name.startswith("n7-r4.1-")
    after.close()
    assert list(tmp_path.iterdir()) == []


def test_what_the_job_has_no_use_for_is_given_up(tmp_path: Path) -> None:
    """What was made here meanwhile stays."""
    before = Shelf(tmp_path, "run", 0, PLENTY)
    put(before, 1)
    put(before, 2, keep=[1])
    before.close(keep=True)
    after = Shelf(tmp_path, "run", 1, PLENTY)
    first, second = after.adopt()
    assert (first.step, second.step) == (1, 2)
    assert first.stamp != second.stamp
    put(after, 1, rank=3)
    after.release([second])
    assert held(after) == [(0, 2), (3, 1)]
    after.release([])
    assert held(after) == [(0, 2), (3, 1)], "it was judged once"
    after.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_judged_is_no_copy(tmp_path: Path) -> None:
    """Of the same rank and step another one may be made meanwhile."""
    before = Shelf(tmp_path, "run", 0, PLENTY)
    put(before, 4)
    before.close(keep=True)
    after = Shelf(tmp_path, "run", 1, PLENTY)
    (found,) = after.adopt()
    assert after.newest(0) is None
    made = put(after, 4)
    assert after.complete(0) == [made]
    after.retain([])
    assert after.held() == ()
    after.release([found])
    assert after.held() == (found,), "nobody else could give it up"
    after.close()
    assert list(tmp_path.iterdir()) == []


def test_what_another_user_has_put_there_was_not_left_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_left(tmp_path, "run")
    Shelf(tmp_path, "run", 0, PLENTY).close(keep=True)
    assert is_left(tmp_path, "run")
    (tmp_path / "everstep-copies-linked").symlink_to(tmp_path / "everstep-copies-run")
    assert not is_left(tmp_path, "linked")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not is_left(tmp_path, "run")


def test_an_agent_does_not_adopt_what_another_holds(tmp_path: Path) -> None:
    one, other = Shelf(tmp_path, "run", 0, PLENTY), Shelf(tmp_path, "run", 1, PLENTY)
    put(one, 1)
    put(other, 1, rank=1)
    third = Shelf(tmp_path, "run", 2, PLENTY)
    assert third.adopt() == ()
    third.close()
    one.close()
    assert held(other) == [(1, 1)]
    assert sweep(tmp_path) == []
    assert other.newest(1) is not None
    other.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    ["short", "torn", "text", "other", "fifo", "link", "folder", "manifest fifo", "manifest link"],
)
def test_what_is_damaged_is_not_adopted(tmp_path: Path, damage: str) -> None:
    before = Shelf(tmp_path, "run", 0, PLENTY)
    area = put(before, 1)
    before.close(keep=True)
    match damage:
        case "short":
            os.truncate(area.path, 10)
        case "torn":
            area.path.write_bytes(bytes(LAYOUT.nbytes))
        case "text":
            area.manifest_path.write_bytes(b"{")
        case "other":
            manifest = snapshot.decode(area.manifest_path.read_bytes())
            text = snapshot.encode(manifest).replace(b'"rank":0', b'"rank":1')
            area.manifest_path.write_bytes(text)
        case _:
            path = area.manifest_path if damage.startswith("manifest") else area.path
            moved = path.rename(tmp_path / "moved")
            match damage.split()[-1]:
                case "fifo":
                    os.mkfifo(path)
                case "link":
                    path.symlink_to(moved)
                case "folder":
                    path.mkdir()
    after = Shelf(tmp_path, "run", 1, PLENTY)
    assert after.adopt() == ()
    assert held(after) == []
    after.close()
    assert list(tmp_path.glob("everstep-*")) == []


def test_the_sweep_removes_what_no_living_job_holds(tmp_path: Path) -> None:
    dead, living = Shelf(tmp_path, "dead", 0, PLENTY), Shelf(tmp_path, "living", 0, PLENTY)
    put(dead, 1)
    put(living, 1)
    dead.close(keep=True)
    (tmp_path / "everstep-run-3.2").write_bytes(b"a worker's file")
    assert sweep(tmp_path, "dead") == []
    assert sweep(tmp_path) == ["everstep-copies-dead"]
    assert steps(living) == [1]
    living.close()
    assert [path.name for path in tmp_path.iterdir()] == ["everstep-run-3.2"]


def test_a_sweep_that_comes_in_between_costs_one_more_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Shelf(tmp_path, "run", 0, PLENTY).close(keep=True)
    opened = os.open

    def open_and_sweep(*args: object, **kwargs: object) -> int:
        monkeypatch.setattr(os, "open", opened)
        fd = opened(*args, **kwargs)  # type: ignore[arg-type]
        assert sweep(tmp_path) == ["everstep-copies-run"]
        return fd

    monkeypatch.setattr(os, "open", open_and_sweep)
    shelf = Shelf(tmp_path, "run", 1, PLENTY)
    put(shelf, 1)
    assert sweep(tmp_path) == []
    shelf.close()


@pytest.mark.parametrize("comes", [False, True])
def test_a_sweep_that_comes_late_touches_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """Another one has swept the same directory, and an agent of that job may be back."""
    Shelf(tmp_path, "run", 0, PLENTY).close(keep=True)
    locked, back = fcntl.flock, list[Shelf]()

    def sweep_and_lock(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", locked)
        assert sweep(tmp_path) == ["everstep-copies-run"]
        if comes:
            back.append(Shelf(tmp_path, "run", 1, PLENTY))
        locked(fd, how)

    monkeypatch.setattr(fcntl, "flock", sweep_and_lock)
    assert sweep(tmp_path) == []
    for shelf in back:
        put(shelf, 1)
        shelf.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_copies_outlive_a_killed_agent(tmp_path: Path) -> None:
    """A process fills a shelf, begins another copy, and is killed; the next one has the first."""
    script = f"""
import sys
from pathlib import Path
from tests.unit.test_shelf import PLENTY, Shelf, begin, put
shelf = Shelf(Path({str(tmp_path)!r}), "run", 0, PLENTY)
put(shelf, 6)
area = begin(shelf, keep=[6])
print("ready", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "ready\n"
        assert sweep(tmp_path) == []
        beside = Shelf(tmp_path, "run", 1, PLENTY)
        assert beside.adopt() == ()
        beside.close()
        agent.send_signal(signal.SIGKILL)
    after = Shelf(tmp_path, "run", 2, PLENTY)
    after.release(after.adopt())
    assert steps(after) == [6]
    after.close()
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- budget


def test_the_budget_refuses_before_memory_is_taken(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, "run", 0, Budget(limit_bytes=int(1.5 * LAYOUT.nbytes)))
    put(shelf, 1)
    with pytest.raises(UserError, match=r"a copy of rank 0 on node 0 needs 1\.\d KiB.*take 1\.\d"):
        begin(shelf, keep=[1])
    assert steps(shelf) == [1]
    shelf.close()


def test_a_full_directory_is_said_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    shelf = Shelf(tmp_path, "run", 0, PLENTY)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(UserError, match="bytes free, too few for another copy"):
        begin(shelf)
    assert shelf.nbytes == 0
    shelf.close()
    assert list(tmp_path.iterdir()) == []


def kernel(tmp_path: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "proc", tmp_path / "cgroup"


def test_the_narrowest_bound_is_the_budget(tmp_path: Path) -> None:
    gib = 1 << 30
    proc, cgroups = kernel(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {100 << 20} kB\n",
            "proc/self/cgroup": "0::/job/step\n",
            "cgroup/job/step/memory.max": "max\n",
            "cgroup/job/step/memory.current": "5\n",
            "cgroup/job/memory.max": f"{10 << 20}\n",
            "cgroup/job/memory.current": f"{6 << 20}\n",
            "cgroup/job/memory.stat": f"anon 3\ninactive_file {1 << 20}\n",
        },
    )
    budget = measure(tmp_path, proc=proc, cgroups=cgroups)
    assert budget.limit_bytes == int((5 << 20) * 0.9)
    assert "control group /job uses 5.0 MiB of 10.0 MiB" in budget.bounds[0].what
    with pytest.raises(UserError, match=r"/job uses 5\.0 MiB of 10\.0 MiB.*raise its memory limit"):
        budget.check(0, gib, "a copy")
    budget.check(0, budget.limit_bytes, "a copy")
    assert budget.plus(7).limit_bytes == budget.limit_bytes + 7


def test_control_groups_of_version_1_count_too(tmp_path: Path) -> None:
    proc, cgroups = kernel(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,memory:/x\n3:cpu:/y\n",
            "cgroup/memory/x/memory.limit_in_bytes": f"{2 << 20}\n",
            "cgroup/memory/x/memory.usage_in_bytes": f"{3 << 20}\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cgroup/memory/memory.usage_in_bytes": "1\n",
        },
    )
    assert measure(tmp_path, proc=proc, cgroups=cgroups).limit_bytes == 0


def test_where_the_kernel_says_nothing_the_directory_decides(tmp_path: Path) -> None:
    budget = measure(tmp_path, proc=tmp_path / "none", cgroups=tmp_path / "none")
    assert len(budget.bounds) == 1
    assert f"{tmp_path} has" in budget.bounds[0].what


def test_sizes_are_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 30, 3 << 40, 1 << 60)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "5.0 GiB",
        "3.0 TiB",
        "1048576.0 TiB",
    ]
