"""Jobs on several nodes, each an agent process of its own on this machine: what happens when nodes,
agents and launchers end.

Most jobs here have workers without torch (fake_worker.py), so that a case costs a second; the last
ones train, and are held bit for bit against a run in which nothing failed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.fake_worker import after
from tests.integration.joblab import (
    SCRIPTS,
    TINY,
    Result,
    assert_same_run,
    assert_survived,
    run_script,
)
from tests.integration.test_agent import PLAN, ROOT, Watcher, read_lines

from everstep.agent import processes
from everstep.launch.job import JobResult
from everstep.launch.local import run_job
from everstep.settings import RunSettings, faults_of
from everstep.wire.messages import ScriptSpec
from everstep.wire.secret import make_secret

pytestmark = pytest.mark.slow
LEASE_S = 0.6


class Job:
    """A run without torch on two nodes of two ranks; `settings` may be changed before it is
    run."""

    def __init__(self, folder: Path) -> None:
        script = folder / "script.py"
        script.write_text("import json\n")
        self.watcher = Watcher()
        self.settings = RunSettings(
            script=ScriptSpec(target=str(script), module=False, args=("steps=6",)),
            local_nodes=2,
            nproc_per_node=2,
            run_id=f"test-{os.getpid()}-{folder.name}"[:64],
            log_dir=str(folder / "runs"),
            record=True,
            lift_budgets=True,
            lease_s=LEASE_S,
        )
        self.pids: dict[int, int] = {}
        self._when: list[tuple[Callable[[dict[str, Any]], bool], Callable[[], None]]] = []
        self.watcher.on_record = self._on_record

    def change(self, **fields: Any) -> None:
        self.settings = dataclasses.replace(self.settings, **fields)

    def steps(self, count: int) -> None:
        target = self.settings.script.target
        self.change(script=ScriptSpec(target=target, module=False, args=(f"steps={count}",)))

    def when(self, event: str, do: Callable[[], None], **fields: Any) -> None:
        """Once a record of `event` with `fields` is written, `do`."""

        def fits(record: dict[str, Any]) -> bool:
            return record["event"] == event and fields.items() <= record.items()

        self._when.append((fits, do))

    def _on_record(self, record: dict[str, Any]) -> None:
        if record["event"] == "node_registered":
            self.pids[record["node"]] = record["pid"]
        for fits, do in list(self._when):
            if fits(record):
                self._when.remove((fits, do))
                do()

    def of(self, event: str) -> list[dict[str, Any]]:
        return self.watcher.of(event)

    def node_of(self, slot: int) -> int:
        """The node that holds a slot now."""
        holder = int(self.of("gathered")[0]["nodes"][slot])
        for record in self.of("node_replaced"):
            holder = int(record["node"]) if record["slot"] == slot else holder
        return holder

    def kill(self, node: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[node], number)

    def kill_slot(self, slot: int, number: int = signal.SIGKILL) -> None:
        self.kill(self.node_of(slot), number)

    def run(self, *faults: str) -> JobResult:
        self.change(chaos=faults_of(self.settings, faults))
        return run_job(self.settings, self.watcher, plan=PLAN)

    def incidents(self) -> list[tuple[str, str, int]]:
        closed = self.of("incident_closed")
        return [(r["rung"], r["state_from"], r["steps_lost"]) for r in closed]

    def story(self) -> str:
        return "\n".join(str(record)[:300] for record in self.watcher.records)


class Latecomers:
    """Agents that are started by hand while a job runs."""

    def __init__(self, job: Job, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setenv("EVERSTEP_SECRET", make_secret().reveal())
        monkeypatch.setenv("EVERSTEP_LOG_DIR", str(Path(job.settings.log_dir).absolute()))
        self._job = job
        self._folder = folder
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *options: str, cwd: Path | None = None) -> None:
        where = self._job.of("listening")[0]
        command = [sys.executable, "-m", "everstep.cli", "agent", "--name", name, *options]
        command += ["--coordinator", f"{where['host']}:{where['port']}"]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._agents[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=cwd)

    def ended(self, name: str) -> tuple[int, str]:
        """Its exit code, and what it said."""
        code = self._agents[name].wait(20)
        return code, (self._folder / f"{name}.log").read_text()

    def __enter__(self) -> Latecomers:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents.values():
            agent.kill()
            agent.wait()


REPLACED = ("replace", "peer", 0)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    return Job(tmp_path)


def assert_whole(job: Job, result: JobResult, steps: int = 6) -> None:
    """The job reached its last step on all ranks with the right state."""
    assert (result.exit_code, result.text) == (0, ""), job.story()
    ranks = range(job.settings.world_size)
    digests = json.loads((result.run_dir / "digests.json").read_text())
    assert digests == {str(rank): {"state": str(after(steps))} for rank in ranks}
    done = {
        (line["rank"], line["step"]): line for line in read_lines(result.run_dir / "trace.jsonl")
    }
    assert sorted(done) == [(rank, step) for rank in ranks for step in range(1, steps + 1)]
    for (_, step), line in done.items():
        assert line["record"] == {"value": after(step), "samples": [step]}


# -------------------------------------------------------------------- nothing fails


def test_ranks_lie_on_nodes_as_torchrun_lays_them(job: Job) -> None:
    result = job.run()
    assert_whole(job, result)
    assert job.incidents() == []
    nodes = {record["rank"]: record["node"] for record in job.of("spawned")}
    slots = job.of("gathered")[0]["nodes"]
    assert [nodes[rank] for rank in range(4)] == [slots[0], slots[0], slots[1], slots[1]]
    assert (2, 1, "stdout", f"rank 2 ends with {after(6)}") in job.watcher.lines
    log = (result.run_dir / "logs" / "rank2.1.log").read_text()
    assert log.splitlines()[-1] == f"rank 2 ends with {after(6)}"


def test_a_worker_that_dies_is_respawned_on_its_node(job: Job) -> None:
    job.change(spares=1)
    assert_whole(job, job.run("kill:rank=2,step=3"))
    assert job.incidents() == [("respawn", "peer", 0)]
    first, second = (r["node"] for r in job.of("spawned") if r["rank"] == 2)
    assert first == second


def test_a_worker_that_stands_still_is_found_by_what_all_nodes_see(job: Job) -> None:
    job.steps(50)

    def stop() -> None:
        (pid,) = (r["pid"] for r in job.of("started") if r["rank"] == 3)
        os.kill(pid, signal.SIGSTOP)

    job.when("step", stop, step=3)
    job.change(stopped_timeout_s=0.5)
    assert_whole(job, job.run(), 50)
    assert job.incidents() == [("respawn", "peer", 0)]
    (hang,) = job.of("hang")
    assert (hang["kind"], hang["ranks"]) == ("stopped", [3])
    whose = [line.partition(":")[0] for line in hang["stacks"]]
    assert whose == ["ranks 0-2", "rank 3"]  # of both nodes


# -------------------------------------------------------------------- a node is lost


@pytest.mark.parametrize("kind", ["node", "agent"])
def test_a_spare_takes_the_place_of_a_lost_node(job: Job, kind: str) -> None:
    job.change(spares=1)
    fault = f"{kind}:index=1,step=4"
    assert_whole(job, job.run(fault))
    assert job.incidents() == [REPLACED]
    (opened,) = job.of("incident_opened")
    (fired,) = job.of("fault_fired")
    assert opened["cause"]["fault"] == fired["text"] == fault
    assert "connection closed" in opened["cause"]["text"]
    assert opened["t"] - fired["fired_t"] < 1.0  # by the closed connection, before any lease
    (replaced,) = job.of("node_replaced")
    spawned = [r["node"] for r in job.of("spawned") if r["rank"] in (2, 3)]
    assert spawned == [replaced["lost"]] * 2 + [replaced["node"]] * 2


def test_before_any_commit_all_begin_again(job: Job) -> None:
    job.change(spares=1)
    assert_whole(job, job.run("node:index=0,step=1"))
    assert [r["state_from"] for r in job.of("incident_closed")] == ["script"]


def test_an_idle_spare_may_be_lost(job: Job) -> None:
    job.change(spares=2)
    job.steps(400)
    lost: list[int] = []

    def kill_a_spare() -> None:
        *_, last = job.of("node_joined")
        lost.append(last["node"])
        job.kill(last["node"])

    job.when("gathered", lambda: job.when("node_joined", kill_a_spare))
    assert_whole(job, job.run("node:index=1,step=350"), 400)
    assert job.incidents() == [REPLACED]
    assert [r["node"] for r in job.of("node_lost") if not r["ranks"]] == lost


def test_a_spare_that_is_lost_while_it_takes_over(job: Job) -> None:
    job.change(spares=2)
    job.when("node_replaced", lambda: job.kill(job.of("node_replaced")[0]["node"]))
    assert_whole(job, job.run("node:index=1,step=4"))
    assert job.incidents() == [REPLACED]
    first, second = job.of("node_replaced")
    assert first["node"] == second["lost"]
    assert first["incident"] == second["incident"]


def test_two_nodes_at_once(job: Job) -> None:
    job.change(local_nodes=3, spares=2)

    def kill_two() -> None:
        job.kill_slot(0)
        job.kill_slot(2)

    job.when("step", kill_two, step=3)
    assert_whole(job, job.run())
    assert job.incidents() == [REPLACED]
    assert sorted(record["slot"] for record in job.of("node_replaced")) == [0, 2]


def test_without_a_spare_the_job_ends_with_what_would_have_helped(job: Job) -> None:
    job.change(spare_wait_s=0.0)
    result = job.run("node:index=1,step=3")
    assert result.exit_code != 0
    assert "no spare node is left for ranks 2, 3" in result.text
    assert "--spares 1" in result.text


def test_a_node_that_comes_late_takes_the_place(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Latecomers(job, monkeypatch, tmp_path) as late:
        job.when("node_awaited", lambda: late.start("late", "--domain", "rack=r9"))
        assert_whole(job, job.run("node:index=1,step=3"))
        code, said = late.ended("late")
        looks, joined, slot, over = said.splitlines()
        assert (code, over) == (0, "everstep: the job is over, with exit code 0")
        assert "this node looks for its coordinator at " in looks
        assert "this is node 2 of run " in joined
        assert slot == "everstep: node 2 holds slot 1: ranks 2, 3"
    assert job.incidents() == [REPLACED]
    assert [r["domain"] for r in job.of("node_joined")][-1] == "rack=r9"


def test_an_agent_that_stands_still_is_replaced_and_comes_back_as_a_spare(job: Job) -> None:
    job.change(spares=1, local_nodes=2)
    job.steps(1500)  # enough for the agent to come back on a busy machine
    stopped: list[int] = []
    workers: list[int] = []

    def stop() -> None:
        stopped.append(job.node_of(1))
        workers.extend(r["pid"] for r in job.of("started") if r["rank"] in (2, 3))
        job.kill(stopped[0], signal.SIGSTOP)

    def go_on() -> None:
        job.kill(stopped[0], signal.SIGCONT)

    def kill_the_other() -> None:
        assert not any(processes.is_there(pid) for pid in workers)
        job.kill_slot(0)

    job.when("step", stop, step=3)
    job.when("incident_closed", go_on)
    job.when("node_joined", kill_the_other, node=3)
    assert_whole(job, job.run(), 1500)
    assert job.incidents() == [REPLACED] * 2
    assert "nothing was heard of it for 0.6 s" in job.of("incident_opened")[0]["cause"]["text"]
    assert [record["node"] for record in job.of("node_replaced")][1] == 3
    assert job.pids[3] == job.pids[stopped[0]]


def test_many_nodes_one_after_another(job: Job) -> None:
    job.change(spares=4)
    job.steps(12)
    faults = [f"{kind}:index={n % 2},step={2 * n + 2}" for n, kind in enumerate(["node"] * 4)]
    assert_whole(job, job.run(*faults), 12)
    assert job.incidents() == [REPLACED] * 4


# -------------------------------------------------------------------- refused


def test_an_agent_with_another_script_is_refused_by_name(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job.change(script=ScriptSpec(target="script.py", module=False, args=("steps=6",)))
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "script.py").write_text("import os\n")
    with Latecomers(job, monkeypatch, tmp_path) as late:
        job.when("node_awaited", lambda: late.start("stranger", cwd=other))
        job.when("note", lambda: late.start("late"), key="refused-stranger")
        assert_whole(job, job.run("node:index=1,step=3"))
        code, said = late.ended("stranger")
        assert (code, late.ended("late")[0]) == (2, 0)
    assert "its script.py has other contents than the coordinator's" in said
    (note,) = [r["text"] for r in job.of("note") if r["key"] == "refused-stranger"]
    assert note.startswith("agent stranger on host ")


# -------------------------------------------------------------------- ends


ENDLESS = """
import everstep, torch

run = everstep.init()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = run.data(lambda step, rank, world: torch.ones(1, 2))
run.protect(model=model, optimizer=optimizer, data=data)


@run.step
def train_step(batch):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


for batch in run.batches(until=1_000_000):
    train_step(batch)
    print("trains", flush=True)
"""


@contextlib.contextmanager
def launched(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A job of endless steps by the command line, once it trains."""
    script = folder / "endless.py"
    script.write_text(ENDLESS)
    command = [sys.executable, "-m", "everstep.cli", "run", "--local-nodes", "2", *options]
    command += ["--log-dir", str(folder / "runs"), str(script)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "EVERSTEP_GRACE_S": "2"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            ready, _, _ = select.select([launcher.stdout], [], [], 60)
            assert ready, "it does not train"
            assert "trains" in launcher.stdout.readline()
            yield launcher
        finally:
            launcher.kill()


def below(launcher: subprocess.Popen[str]) -> list[int]:
    """The agents and the coordinator of a launcher."""
    return [p.pid for p in processes.process_table() if p.parent == launcher.pid]


@pytest.mark.parametrize(
    ("signals", "code"),
    [((signal.SIGINT,), 130), ((signal.SIGINT, signal.SIGINT), 130), ((signal.SIGTERM,), 143)],
)
def test_a_launcher_that_is_asked_to_end_leaves_nothing(
    tmp_path: Path, signals: tuple[int, ...], code: int
) -> None:
    with launched(tmp_path, "--spares", "1") as launcher:
        for number in signals:
            launcher.send_signal(number)
        launcher.communicate(timeout=20)
        assert launcher.returncode == code


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path) as launcher:
        began_s = time.monotonic()
        started = below(launcher)
        assert len(started) == 3
        launcher.kill()
        launcher.communicate(timeout=20)
        for pid in started:
            while (found := processes.look_up(pid)) is not None and found.state != "Z":
                assert time.monotonic() - began_s < 20
                select.select([], [], [], 0.01)


# -------------------------------------------------------------------- training


def nodes(folder: Path, *args: str, **more: Any) -> Result:
    """A run that trains on nodes."""
    options: dict[str, Any] = {"local_nodes": 3, "nproc": 1, "spares": 1, **more}
    return run_script(folder, *args, **options)


def test_ddp_on_three_nodes_is_the_run_without_a_fault(tmp_path: Path) -> None:
    args = ("--steps", "60", "--batchnorm")
    clean = nodes(tmp_path, *args, script=TINY)
    fault = "node:index=1,step=40"
    faulted = nodes(tmp_path, *args, script=TINY, faults=(fault,))
    assert_same_run(clean, faulted)
    assert_survived(faulted, fault)
    assert [record["rung"] for record in faulted.closed] == ["replace"]


def test_hsdp_on_two_nodes_is_the_run_without_a_fault(tmp_path: Path) -> None:
    def run(*faults: str) -> Result:
        options: dict[str, Any] = {"nproc": 2, "local_nodes": 2, "spares": 2}
        script = SCRIPTS / "layouts.py"
        return nodes(tmp_path, "hsdp", "--steps", "60", script=script, faults=faults, **options)

    faults = ("agent:index=0,step=30", "node:index=1,step=50")
    clean, faulted = run(), run(*faults)
    assert_same_run(clean, faulted)
    assert_survived(faulted, *faults)
    assert [record["rung"] for record in faulted.closed] == ["replace"] * 2
