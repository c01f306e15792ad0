"""`everstep agent` without a coordinator, as processes that are killed: what it keeps, what it
clears, and what others have of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.integration.joblab import SCRIPTS, run_script

from everstep import snapshot
from everstep.tiers import names
from everstep.tiers.memory.client import MemoryStore, connect
from everstep.tiers.memory.ownership import PREFIX, directory_of
from everstep.tiers.series import Series
from everstep.tiers.store import Exists
from everstep.wire.secret import Secret

SECRET = "0123456789abcdefghijklmnopqrstuvwxyz-secret"
S = 30.0
AGENT = (sys.executable, "-m", "everstep.cli", "agent", "--interface", "lo")
WRITER = """
import sys
from everstep.tiers.memory.client import connect
store = connect(sys.argv[1], copies=1)
reserved = store.reserve(32 << 20, deadline_s=20)
reserved.area[:10] = b"x" * 10
print("ready", flush=True)
sys.stdin.read()
"""
SAVER = SCRIPTS / "memory_saver.py"


class Lab:
    """Agents of hosts that share a directory in place of their memories."""

    def __init__(self, folder: Path) -> None:
        self.shm_dir = folder
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self.where: dict[str, str] = {}
        self.others: list[subprocess.Popen[str]] = []

    def start(self, name: str, *options: str) -> list[str]:
        """What it says at its start."""
        given = {key: value for key, value in os.environ.items() if not key.startswith("EVERSTEP")}
        agent = subprocess.Popen(
            [*AGENT, "--name", name, "--host", name, *options],
            env=given | {"EVERSTEP_SECRET": SECRET, "EVERSTEP_SHM_DIR": str(self.shm_dir)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.agents[name] = agent
        assert agent.stderr is not None
        said = []
        for line in agent.stderr:
            said.append(line)
            if "other hosts find it" in line:
                self.where[name] = line.split(" at ")[1].split(" ")[0]
            if "may keep" in line:
                break
        assert name in self.where, said
        return said

    def directory(self, name: str) -> Path:
        return directory_of(self.shm_dir, Secret(SECRET, "the test"), name)

    def store(self, name: str, copies: int = 2) -> MemoryStore:
        return connect(str(self.directory(name) / "socket"), copies=copies)

    def run(self, script: str, name: str) -> subprocess.Popen[str]:
        """A rank on a host, once it is ready."""
        rank = subprocess.Popen(
            [sys.executable, "-c", script, str(self.directory(name) / "socket")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.others.append(rank)
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        return rank

    def end(self, name: str, how: signal.Signals) -> str:
        """The rest of what it said."""
        agent = self.agents.pop(name)
        agent.send_signal(how)
        _, said = agent.communicate(timeout=60)
        assert agent.returncode == (0 if how == signal.SIGTERM else -how)
        return said

    def close(self) -> None:
        for process in [*self.others, *self.agents.values()]:
            process.kill()
            process.communicate(timeout=60)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    try:
        yield made
    finally:
        made.close()


def until(done: Callable[[], bool]) -> None:
    gate = threading.Event()
    for _ in range(1500):
        if done():
            return
        gate.wait(0.02)
    pytest.fail("it did not come about")


@pytest.mark.slow
def test_what_was_complete_outlives_an_agent_that_is_killed(lab: Lab) -> None:
    lab.start("a")
    data = bytes(range(256)) * (16 << 10)
    store = lab.store("a")
    store.put("run/x", [memoryview(data)], deadline_s=S)
    reserved = store.reserve(1 << 20, deadline_s=S)
    lab.end("a", signal.SIGKILL)
    assert len(list((lab.directory("a") / "way").iterdir())) == 1
    said = lab.start("a")
    assert "it keeps 1 objects, 4.0 MiB, of an earlier agent" in said[-1]
    assert not list((lab.directory("a") / "way").iterdir())
    assert store.get("run/x", deadline_s=S) == data
    store.put("run/y", [reserved.area], deadline_s=S)  # the area's agent is dead, its bytes are not
    assert store.size("run/y", deadline_s=S) == 1 << 20
    store.close()
    lab.end("a", signal.SIGTERM)
    assert not list(lab.shm_dir.glob(PREFIX + "*"))


@pytest.mark.slow
def test_asked_to_keep_it_leaves_what_is_complete(lab: Lab) -> None:
    lab.start("a", "--keep")
    store = lab.store("a")
    store.put("run/x", [memoryview(b"x")], deadline_s=S)
    store.close()
    assert "stay for the next agent of this name" in lab.end("a", signal.SIGTERM)
    lab.start("b")  # another's start lets it be
    assert (lab.directory("a") / "objects" / "run" / "x").read_bytes() == b"x"
    lab.end("b", signal.SIGTERM)
    lab.start("a")
    lab.end("a", signal.SIGTERM)
    assert not list(lab.shm_dir.glob(PREFIX + "*"))


@pytest.mark.slow
def test_memory_of_a_rank_that_is_killed_is_free(lab: Lab) -> None:
    lab.start("a")
    rank = lab.run(WRITER, "a")
    store = lab.store("a")
    assert store.about().taken_bytes == 32 << 20
    rank.kill()
    until(lambda: store.about().taken_bytes == 0)
    store.close()


@pytest.mark.slow
def test_a_host_is_lost_and_others_have_its_copies(lab: Lab) -> None:
    lab.start("a")
    lab.start("b", "--peers", lab.where["a"])
    lab.start("c", "--peers", f"{lab.where['a']},{lab.where['b']}")
    data = bytes(range(256)) * (32 << 10)
    stores = {name: lab.store(name) for name in "abc"}
    cards = [store.card() for store in stores.values()]
    for store in stores.values():
        store.introduce(cards)
    for name, store in stores.items():
        store.put(f"run/{name}", [memoryview(data)], deadline_s=S)
    assert [store.notes() for store in stores.values()] == [[], [], []]
    stores["a"].put(names.commit_key("run", 1), [memoryview(b"c")], absent=True, deadline_s=S)
    lab.end("a", signal.SIGKILL)
    for name in "bc":
        for key in ("run/a", "run/b", "run/c"):
            assert stores[name].get(key, deadline_s=S) == data
        with pytest.raises(Exists):
            stores[name].put(
                names.commit_key("run", 1), [memoryview(b"d")], absent=True, deadline_s=S
            )
    stores["b"].put("run/later", [memoryview(data)], deadline_s=S)
    assert stores["c"].get("run/later", deadline_s=S) == data
    for store in stores.values():
        store.close()


class Saver:
    """Saves on hosts a and b until it is killed. `newest`: the last step that it has committed."""

    def __init__(self, lab: Lab, after: int) -> None:
        sockets = [str(lab.directory(name) / "socket") for name in "ab"]
        self.process = subprocess.Popen(
            [sys.executable, str(SAVER), *sockets, str(after)], stdout=subprocess.PIPE, text=True
        )
        lab.others.append(self.process)
        self.newest = after
        self.failed: list[str] = []
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("committed"):
                self.newest = int(line.split()[1])
            else:
                self.failed.append(line)

    def is_beyond(self, step: int) -> bool:
        return self.newest > step

    def kill(self) -> None:
        self.process.kill()
        self.thread.join()
        self.process.communicate()


@pytest.mark.slow
def test_kills_in_the_middle_of_saves_lose_no_checkpoint_that_was_committed(lab: Lab) -> None:
    lab.start("a")
    lab.start("b", "--peers", lab.where["a"])
    saver = Saver(lab, 0)
    for victim in ("a", "saver", "b", "saver", "b", "a"):
        seen = saver.newest
        until(partial(saver.is_beyond, seen))  # the next one is on its way
        if victim == "saver":
            saver.kill()
        else:
            lab.end(victim, signal.SIGKILL)
            lab.start(victim, "--peers", lab.where["b" if victim == "a" else "a"])
        top = max(look(lab, name, saver.newest) for name in "ab")
        if victim == "saver":
            saver = Saver(lab, top)
    saver.kill()
    assert not saver.failed


def _sees_all(store: MemoryStore) -> bool:
    return not store.about().lost


def look(lab: Lab, host: str, known: int) -> int:
    """The newest step that a rank on `host` finds, which is whole, and not older than `known`."""
    store = lab.store(host)
    series = Series(store, "run", key=None)
    until(partial(_sees_all, store))
    newest = max(series.steps())
    assert newest >= known
    checkpoint = series.read(newest)
    for part in checkpoint.parts:
        manifest = series.part_manifest(checkpoint, part.rank).snapshot
        attempt = names.Attempt(series="run", step=newest, name=checkpoint.attempt)
        data = series.store.get(attempt.part(part.rank, "safetensors"), deadline_s=S)
        snapshot.verify(manifest, memoryview(data))
        assert data[-1] == newest % 251
    store.close()
    return newest


@pytest.mark.slow
def test_a_node_of_a_job_keeps_what_its_ranks_put_and_others_copies(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob(PREFIX + "*"))
    result = run_script(
        tmp_path / "jobs",
        script=SCRIPTS / "in_memory.py",
        nproc=1,
        local_nodes=3,
        spares=1,
        faults=("node:index=0,step=3",),
    )
    assert result.exit_code == 0, result.text + "\n".join(result.lines)
    told = [line.split(": ", 1)[1] for line in result.lines]
    assert told.count("notes []") == 3
    assert told.count("all are there") == 3
    assert set(Path("/dev/shm").glob(PREFIX + "*")) == before


@pytest.mark.slow
def test_a_job_on_one_machine_keeps_what_its_ranks_put(tmp_path: Path) -> None:
    result = run_script(
        tmp_path / "jobs", script=SCRIPTS / "in_memory.py", nproc=2, faults=("kill:rank=1,step=2",)
    )
    assert result.exit_code == 0, result.text + "\n".join(result.lines)
    assert sum("all are there" in line for line in result.lines) == 2
    assert sum("and has no secret" in line for line in result.lines) >= 1
