"""A worker as the agent holds it: whose kill was it?"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.agent.progress import ProgressFile
from everstep.agent.workers import Worker
from everstep.wire.messages import ScriptSpec, WorkerSpec


def spec(progress: ProgressFile) -> WorkerSpec:
    return WorkerSpec(
        run_id="r",
        rank=0,
        local_rank=0,
        world_size=1,
        incarnation=1,
        generation=0,
        joiner=False,
        script=ScriptSpec(target="", module=False, args=()),
        progress_path=str(progress.path),
        rng_key=None,
        once={},
        faults=(),
        record=False,
        collective_timeout_s=1.0,
        build_timeout_s=1.0,
        meet_timeout_s=1.0,
        quiesce_timeout_s=1.0,
    )


def wait_dead(pid: int) -> None:
    """Until the process is a zombie, whom its parent has still to reap."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def before(worker: Worker, child: subprocess.Popen[bytes]) -> None:
    """It dies, and only then everstep kills it; nobody has seen the death yet."""
    os.kill(child.pid, signal.SIGKILL)
    wait_dead(child.pid)
    worker.kill("all ranks start again")


def seen(worker: Worker, child: subprocess.Popen[bytes]) -> None:
    """It dies, its death is being worked off, and then everstep kills it."""
    os.kill(child.pid, signal.SIGKILL)
    wait_dead(child.pid)
    worker.drain()
    worker.kill("all ranks start again")


def ours(worker: Worker, child: subprocess.Popen[bytes]) -> None:
    worker.kill("all ranks start again")


@pytest.mark.parametrize(("death", "killed"), [(before, False), (seen, False), (ours, True)])
def test_only_a_kill_that_met_a_living_process_is_everstep_s(
    death: Callable[[Worker, subprocess.Popen[bytes]], None], killed: bool, tmp_path: Path
) -> None:
    async def case() -> None:
        loop = asyncio.get_running_loop()
        progress = ProgressFile(tmp_path, "r", 0, 1)
        worker = Worker(loop, spec(progress), {}, progress, tmp_path / "log")
        with subprocess.Popen(["sleep", "60"]) as child:
            worker.attach(child.pid, lambda: None)
            death(worker, child)
            wait_dead(child.pid)
            assert worker.killed is killed
            assert ("by everstep (all ranks" in worker.cause(signal.SIGKILL).text) is killed
        worker.close()

    asyncio.run(case())
