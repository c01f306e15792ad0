"""Agent, zygote, shell and core with real processes, and workers without torch (fake_worker.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.fake_worker import after

from everstep import chaos
from everstep.agent import processes
from everstep.agent.zygote import ZygotePlan
from everstep.errors import UserError
from everstep.launch.job import JobResult
from everstep.launch.local import run_job
from everstep.launch.plain import run_plain
from everstep.observe.journal import read_journal
from everstep.settings import RunSettings
from everstep.wire.messages import ScriptSpec

ROOT = Path(__file__).parents[2]
PLAN = ZygotePlan(runner="tests.integration.fake_worker:run_worker", preload=())


class Watcher:
    """A view that keeps everything, and can act on a record or a line."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.lines: list[tuple[int, int, str, str]] = []
        self.on_record: Callable[[dict[str, Any]], None] = lambda _: None
        self.on_line: Callable[[str], None] = lambda _: None

    def record(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self.on_record(record)

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        self.lines.append((rank, incarnation, stream, line))
        self.on_line(line)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["event"] == event]


class Job:
    """One run with two ranks; `settings` may be replaced before it is run."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "script.py"
        self.script.write_text("import json\nimport not_there\n")
        self.watcher = Watcher()
        self.settings = RunSettings(
            script=ScriptSpec(target=str(self.script), module=False, args=("steps=6",)),
            nproc_per_node=2,
            run_id=f"test-{os.getpid()}-{folder.name}"[:64],
            log_dir=str(folder / "runs"),
            record=True,
        )

    def change(self, **fields: Any) -> None:
        self.settings = dataclasses.replace(self.settings, **fields)

    def args(self, *args: str) -> None:
        script = ScriptSpec(target=str(self.script), module=False, args=args)
        self.change(script=script)

    def run(self, *faults: str, plan: ZygotePlan = PLAN) -> JobResult:
        self.change(chaos=tuple(chaos.parse(text, index) for index, text in enumerate(faults)))
        return run_job(self.settings, self.watcher, plan=plan)

    def incidents(self) -> list[tuple[str, str, int]]:
        closed = self.watcher.of("incident_closed")
        return [(r["rung"], r["state_from"], r["steps_lost"]) for r in closed]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    return Job(tmp_path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_whole(job: Job, result: JobResult, steps: int = 6) -> None:
    """The job reached its last step on both ranks with the right state."""
    assert (result.exit_code, result.text) == (0, "")
    digests = json.loads((result.run_dir / "digests.json").read_text())
    assert digests == {rank: {"state": str(after(steps))} for rank in ("0", "1")}
    done = {
        (line["rank"], line["step"]): line for line in read_lines(result.run_dir / "trace.jsonl")
    }
    assert sorted(done) == [(rank, step) for rank in (0, 1) for step in range(1, steps + 1)]
    for (_, step), line in done.items():
        assert line["record"] == {"value": after(step), "samples": [step]}


def test_a_run_in_which_nothing_fails(job: Job) -> None:
    result = job.run()
    assert_whole(job, result)
    assert result.journal == result.run_dir / "journal.jsonl"
    assert read_journal(result.journal) == job.watcher.records
    events = [record["event"] for record in job.watcher.records]
    assert events[:2] == ["journal", "note"]
    assert "not_there" in job.watcher.records[1]["text"]
    assert events[2] == "job_started"
    assert [r["step"] for r in job.watcher.of("step")] == [1, 2, 3, 4, 5, 6]
    assert events[-2:] == ["closed", "job_ended"]
    started = job.watcher.of("job_started")[0]
    assert (started["world_size"], started["script"]) == (2, str(job.script))
    assert started["hash_seed"].isdecimal()
    metrics = read_lines(result.run_dir / "metrics.jsonl")
    assert {"state": after(6), "step": 6, "rank": 1} in metrics
    last = f"rank 0 ends with {after(6)}"
    assert (0, 1, "stdout", last) in job.watcher.lines
    assert (result.run_dir / "logs" / "rank0.1.log").read_text().splitlines()[-1] == last


# What the fake worker has of places.
@pytest.mark.parametrize("at", ["forward", "backward", "optimizer", "between"])
@pytest.mark.parametrize("kind", ["kill", "exit=4", "exit0"])
def test_a_worker_ends_and_the_run_goes_on(job: Job, kind: str, at: str) -> None:
    fault = f"{kind}:rank=1,step=3,at={at}"
    result = job.run(fault)
    assert_whole(job, result)
    assert job.incidents() == [("respawn", "peer", 0)]
    (opened,) = job.watcher.of("incident_opened")
    (fired,) = job.watcher.of("fault_fired")
    assert opened["cause"]["fault"] == fired["text"] == fault
    assert opened["cause"]["at_s"] == fired["fired_t"] <= opened["t"]
    assert "rank 1 set up" in opened["cause"]["detail"]
    # Its second incarnation has the key and the results of the first, and its own log.
    log = (result.run_dir / "logs" / "rank1.2.log").read_text()
    assert "key key of rank 1 from 1, once {'init': b'done'}" in log


def test_where_it_stood_is_said(job: Job) -> None:
    job.run("kill:rank=1,step=3,at=optimizer")
    (opened,) = job.watcher.of("incident_opened")
    assert opened["cause"]["text"] == "rank 1 was killed by SIGKILL in step 3 (optimizer)"


def test_every_way_to_fail_in_one_run(job: Job) -> None:
    job.args("steps=20")
    result = job.run(
        "kill:rank=0,step=1",
        "raise:rank=0,step=3",
        "segv:rank=0,step=5",
        "abort:rank=1,step=7",
        "term:rank=0,step=9",
        "exit=3:rank=1,step=11",
        "kill:rank=0,step=20",
        "kill:rank=1,step=20,at=between",
    )
    assert_whole(job, result, 20)
    assert len(job.watcher.of("fault_fired")) == 8
    rungs = [(r["rung"], r["state_from"]) for r in job.watcher.of("incident_closed")]
    assert rungs[:2] == [("respawn", "script"), ("retry", "process")]
    assert all(rung == ("respawn", "peer") for rung in rungs[2:])


def test_an_error_of_the_script_ends_the_job_with_its_traceback(job: Job) -> None:
    job.args("raises")
    result = job.run()
    assert result.exit_code == 1
    (ended,) = job.watcher.of("job_ended")
    assert "is wrong" in ended["cause"]["text"]
    assert "Traceback" in ended["cause"]["detail"]
    assert "fake_worker.py" in ended["cause"]["detail"]


def test_its_exit_code_is_the_jobs_and_its_last_output_is_shown(job: Job) -> None:
    job.args("exits=3")
    result = job.run()
    assert result.exit_code == 3
    (ended,) = job.watcher.of("job_ended")
    assert ended["cause"]["detail"] == "no newline at the end"


def test_a_process_that_holds_the_channel_does_not_hide_a_death(job: Job) -> None:
    job.args("steps=6", "holder")
    began = time.monotonic()
    assert_whole(job, job.run("kill:rank=1,step=3"))
    assert time.monotonic() - began < 30
    assert job.incidents() == [("respawn", "peer", 0)]


def test_a_process_that_left_the_session_ends_with_the_job(job: Job) -> None:
    job.args("steps=6", "daemon")
    assert_whole(job, job.run())  # the fixture of conftest.py finds what is left


def test_garbage_on_the_channel_costs_the_worker_its_life_only(job: Job) -> None:
    job.args("steps=6", "garbage")
    assert_whole(job, job.run())
    (opened,) = job.watcher.of("incident_opened")
    assert "control channel is broken" in opened["cause"]["text"]


def test_fifty_deaths_leave_descriptors_threads_and_memory_files_as_they_were(
    job: Job, tmp_path: Path
) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    job.args("steps=101")
    job.change(shm_dir=str(shm), lift_budgets=True)
    counts: list[tuple[int, int, int]] = []

    def count(record: dict[str, Any]) -> None:
        if record["event"] == "incident_closed":
            folders = (Path("/proc/self/fd"), Path("/proc/self/task"), shm)
            fds, threads, files = (len(os.listdir(folder)) for folder in folders)
            counts.append((fds, threads, files))

    job.watcher.on_record = count
    result = job.run(*(f"kill:rank={n % 2},step={2 * n}" for n in range(1, 51)))
    assert_whole(job, result, 101)
    assert len(counts) == 50
    # A descriptor or two come and go with a death that is being noticed; none may stay.
    for early, late in zip(
        zip(*counts[:25], strict=True), zip(*counts[25:], strict=True), strict=True
    ):
        assert max(late) <= max(early)
    assert counts[0][2] == 2


# -------------------------------------------------------------------- the zygote


def zygote_of(job: Job, of_rank: int) -> int:
    """The parent of the rank's living worker."""
    *_, pid = (r["pid"] for r in job.watcher.of("started") if r["rank"] == of_rank)
    worker = processes.look_up(pid)
    assert worker is not None
    return worker.parent


def test_the_zygotes_death_is_nothing_to_its_workers(job: Job) -> None:
    killed = []

    def kill_zygote(record: dict[str, Any]) -> None:
        if record["event"] == "step" and record["step"] == 2:
            killed.append(zygote_of(job, of_rank=0))
            os.kill(killed[-1], signal.SIGKILL)

    job.watcher.on_record = kill_zygote
    result = job.run("kill:rank=1,step=4", "kill:rank=0,step=6")
    assert_whole(job, result)
    assert len(killed) == 1
    assert job.incidents() == [("respawn", "peer", 0)] * 2
    lost = [r for r in job.watcher.of("note") if r["key"] == "zygote-lost"]
    assert len(lost) == 1


def test_a_fork_that_was_asked_of_a_dying_zygote_is_made_by_the_next(job: Job) -> None:
    first = iter([True])

    def once(record: dict[str, Any]) -> None:
        # The record of the spawn comes just before the spawn.
        if record["event"] == "spawned" and record["incarnation"] == 2 and next(first, False):
            os.kill(zygote_of(job, of_rank=0), signal.SIGKILL)

    job.watcher.on_record = once
    assert_whole(job, job.run("kill:rank=1,step=3"))
    assert job.incidents() == [("respawn", "peer", 0)]
    assert [r for r in job.watcher.of("note") if r["key"] == "zygote-lost"]


def test_a_zygote_that_hangs_is_replaced(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.agent.node.END_TIMEOUT_S", 1.0)

    def stop_zygote(record: dict[str, Any]) -> None:
        if record["event"] == "step" and record["step"] == 2:
            os.kill(zygote_of(job, of_rank=0), signal.SIGSTOP)

    job.watcher.on_record = stop_zygote
    assert_whole(job, job.run("kill:rank=1,step=4"))
    assert job.incidents() == [("respawn", "peer", 0)]


def test_imports_that_start_threads_are_left_to_the_workers(job: Job) -> None:
    module = job.script.parent / "starts_a_thread.py"
    module.write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()\n"
    )
    job.script.write_text("import starts_a_thread\n")
    assert_whole(job, job.run())
    keys = [record["key"] for record in job.watcher.of("note")]
    assert keys == ["zygote-threads"]


def test_threads_that_cannot_be_left_out_are_refused(job: Job) -> None:
    preload = job.script.parent / "preloaded_thread.py"
    preload.write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()\n"
    )
    os.environ["PYTHONPATH"] += os.pathsep + str(job.script.parent)
    plan = dataclasses.replace(PLAN, preload=("preloaded_thread",))
    with pytest.raises(UserError, match="cannot be forked"):
        job.run(plan=plan)
    (ended,) = job.watcher.of("job_ended")
    assert ended["exit_code"] == 2


def test_what_cannot_be_imported_is_refused(job: Job) -> None:
    plan = dataclasses.replace(PLAN, preload=("no_such_torch",))
    with pytest.raises(UserError, match="no_such_torch cannot be imported"):
        job.run(plan=plan)


def test_an_old_torch_is_refused(job: Job) -> None:
    (job.script.parent / "torch.py").write_text('__version__ = "2.7.1+cpu"\n')
    os.environ["PYTHONPATH"] += os.pathsep + str(job.script.parent)
    plan = dataclasses.replace(PLAN, preload=("torch",))
    with pytest.raises(UserError, match=r"torch 2\.7\.1\+cpu is not supported"):
        job.run(plan=plan)


def test_an_import_that_ends_the_process_is_reported_with_its_last_words(job: Job) -> None:
    (job.script.parent / "ends_it.py").write_text(
        "import os\nprint('goodbye', flush=True)\nos._exit(9)\n"
    )
    job.script.write_text("import ends_it\n")
    with pytest.raises(Exception, match=r"(?s)ended with code 9 while it imported.*goodbye"):
        job.run()


# -------------------------------------------------------------------- being ended


def end_by(job: Job, *numbers: signal.Signals) -> JobResult:
    """Run a job that hangs, and send this process signals once it does."""
    left = list(numbers)

    def send(line: str) -> None:
        if line == "hanging" and sum(said == line for *_, said in job.watcher.lines) == 2:
            for number in left:
                os.kill(os.getpid(), number)

    job.watcher.on_line = send
    return job.run()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_job_in_order(job: Job, number: signal.Signals) -> None:
    # Under nohup a hang-up is ignored, and stays so: here it must not be.
    inherited = signal.getsignal(number)
    if inherited is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    job.args("hangs=politely")
    job.change(grace_s=60.0)
    try:
        result = end_by(job, number)
        assert result.exit_code == 128 + number
        assert number.name in result.text
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, inherited)


def test_the_deaf_are_killed_after_the_grace(job: Job) -> None:
    job.args("hangs=deaf")
    job.change(grace_s=0.05)
    assert end_by(job, signal.SIGTERM).exit_code == 143


def test_a_second_signal_does_not_wait_for_the_grace(job: Job) -> None:
    job.args("hangs=deaf")
    job.change(grace_s=60.0)
    began = time.monotonic()
    assert end_by(job, signal.SIGINT, signal.SIGTERM).exit_code == 130
    assert time.monotonic() - began < 30


def test_a_signal_while_the_zygote_imports(job: Job) -> None:
    asked = f"import os, signal\nos.kill({os.getpid()}, signal.SIGTERM)\nsignal.pause()\n"
    (job.script.parent / "asks.py").write_text(asked)
    job.script.write_text("import asks\n")
    result = job.run()
    assert result.exit_code == 143
    assert "before any worker was started" in result.text


def test_a_view_that_fails_leaves_nothing_behind(job: Job) -> None:
    class BrokenError(Exception):
        pass

    def fail(record: dict[str, Any]) -> None:
        if record["event"] == "step":
            raise BrokenError("no terminal")

    job.watcher.on_record = fail
    with pytest.raises(BrokenError):
        job.run()


@contextlib.contextmanager
def agent_process(job: Job, code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs the job, and prints each line of its workers."""
    program = textwrap.dedent(
        f"""
        import sys
        from everstep.agent.zygote import ZygotePlan
        from everstep.launch.local import run_job
        from everstep.settings import RunSettings
        from everstep.wire.messages import ScriptSpec
        class View:
            def record(self, record): pass
            def output(self, rank, incarnation, stream, line): print(line, flush=True)
        args = {job.settings.script.args!r}
        script = ScriptSpec(target={str(job.script)!r}, module=False, args=args)
        settings = RunSettings(
            script=script, nproc_per_node=2, run_id={job.settings.run_id!r},
            log_dir={job.settings.log_dir!r}, shm_dir={job.settings.shm_dir!r},
        )
        run_job(settings, View(), plan=ZygotePlan(runner={PLAN.runner!r}, preload=()))
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program + code], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()
        process.wait(timeout=10)


def test_no_orphan_outlives_a_killed_agent_by_a_second(job: Job, tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    job.args("hangs=deaf")
    job.change(shm_dir=str(shm))
    with agent_process(job, "") as agent:
        assert agent.stdout is not None
        assert [agent.stdout.readline() for _ in range(2)] == ["hanging\n"] * 2
        below = descendants(agent.pid)
        assert len(below) == 3  # the zygote and two workers
        pidfds = [os.pidfd_open(pid) for pid in below]
        agent.kill()
        deadline = time.monotonic() + 1
        for pidfd in pidfds:
            ended, _, _ = select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
            assert ended, "an orphan is left"
            os.close(pidfd)
    # What it left in shared memory is swept by the next job.
    assert len(list(shm.iterdir())) == 2
    job.args("steps=6")
    job.change(run_id=job.settings.run_id[:60] + "-b")
    assert_whole(job, job.run())
    assert list(shm.iterdir()) == []


def descendants(pid: int) -> list[int]:
    children = [p.pid for p in processes.process_table() if p.parent == pid]
    return children + [below for child in children for below in descendants(child)]


# -------------------------------------------------------------------- without protection


def plain(job: Job, code: str, *args: str) -> JobResult:
    job.script.write_text(textwrap.dedent(code))
    job.args(*args)
    return run_plain(job.settings, job.watcher)


def test_unprotected_ranks_know_who_they_are(job: Job) -> None:
    code = """
        import os, sys
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "EVERSTEP")
        print(*(os.environ[name] for name in names), *sys.argv[1:], sep="|")
        assert int(os.environ["MASTER_PORT"]) > 0
    """
    result = plain(job, code, "--lr", "0.1")
    assert (result.exit_code, result.text) == (0, "")
    assert sorted(job.watcher.lines) == [
        (0, 1, "stdout", "0|0|2|2|127.0.0.1|off|--lr|0.1"),
        (1, 1, "stdout", "1|1|2|2|127.0.0.1|off|--lr|0.1"),
    ]
    assert (result.run_dir / "logs" / "rank1.1.log").read_text().startswith("1|1|2")


@pytest.mark.parametrize(
    ("failure", "exit_code", "says"),
    [
        ("sys.exit(5)", 5, "exited with code 5"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by SIGSEGV"),
    ],
)
def test_the_first_failure_ends_an_unprotected_run(
    job: Job, failure: str, exit_code: int, says: str
) -> None:
    code = f"""
        import os, signal, sys
        if os.environ["RANK"] == "1":
            {failure}
        if os.fork() == 0:
            signal.pause()
        signal.pause()
    """
    result = plain(job, code)
    assert result.exit_code == exit_code
    assert says in result.text


def test_a_signal_ends_an_unprotected_run(job: Job) -> None:
    code = """
        import signal
        print("hanging", flush=True)
        signal.pause()
    """
    job.watcher.on_line = lambda _: os.kill(os.getpid(), signal.SIGTERM)
    job.change(grace_s=60.0, nproc_per_node=1)
    assert plain(job, code).exit_code == 143
