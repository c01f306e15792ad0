"""The script run unprotected, for `EVERSTEP=off`: what torchrun does on one node, and nothing more.

Theory of operation: one fresh Python for each rank, each the leader of a session, with torchrun's
environment. The first that fails ends the others, and its exit code is the job's. Output is kept
and shown as in a protected run. If the launcher is killed the kernel kills the workers with it.

It does not restart anything and writes no journal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from everstep.agent import processes
from everstep.agent.ending import end_session
from everstep.agent.output import Output
from everstep.agent.workers import Place, free_port, torchrun_environment
from everstep.errors import UserError
from everstep.launch.job import LOOPBACK, JobResult, ending_by_signals
from everstep.observe.view import View
from everstep.settings import RunSettings
from everstep.wire.messages import ScriptSpec

_INCARNATION = 1


def run_plain(settings: RunSettings, view: View) -> JobResult:
    """Run the script on every rank without protection. Main thread; blocks until every process is
    gone.

    Raises UserError if the run's directory cannot be made.
    """
    return asyncio.run(_run(settings, view, dict(os.environ)))


async def _run(settings: RunSettings, view: View, environ: Mapping[str, str]) -> JobResult:
    run_dir = Path(settings.log_dir) / settings.run_id
    try:
        (run_dir / "logs").mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"{run_dir}: the run's directory cannot be made ({error.strerror}); choose another "
            "--run-id or --log-dir"
        ) from error
    job = _PlainJob(settings, view, run_dir / "logs")
    with ending_by_signals(job.stop_asked):
        try:
            exit_code, text = await job.run(environ)
        finally:
            await job.close()
    return JobResult(
        exit_code=exit_code, run_dir=run_dir, journal=run_dir / "journal.jsonl", text=text
    )


class _PlainJob:
    def __init__(self, settings: RunSettings, view: View, logs: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._view = view
        self._logs = logs
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[int, int] = {}
        self._outputs: dict[int, Output] = {}
        self._ended: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self._asked_by: int | None = None

    async def run(self, environ: Mapping[str, str]) -> tuple[int, str]:
        """Start all ranks and wait for the last or for the first failure: exit code and text."""
        self._loop.set_exception_handler(self._on_loop_exception)
        nproc_per_node, world_size = self._settings.nproc_per_node, self._settings.world_size
        port = self._settings.master_port or free_port()
        for rank in range(world_size):
            place = Place(rank=rank, nproc_per_node=nproc_per_node, world_size=world_size)
            environment = {**environ, **torchrun_environment(place, LOOPBACK, port)}
            environment |= {"EVERSTEP": "off", "EVERSTEP_RUN_ID": self._settings.run_id}
            environment["EVERSTEP_DEVICE"] = self._settings.device
            environment.setdefault("OMP_NUM_THREADS", "1")
            self._start(rank, environment)
        return await self._ended

    def stop_asked(self, number: int) -> None:
        """A signal asks for the end: SIGTERM to all, SIGKILL after the grace or at the second
        signal."""
        name = signal.Signals(number).name
        if self._asked_by is not None:
            text = f"stopped by {name}, the second signal: what still ran was killed"
            self._end(128 + self._asked_by, text)
            return
        self._asked_by = number
        for process in self._running.values():
            process.terminate()
        grace_s = self._settings.grace_s
        text = f"stopped by {name}; what still ran after {grace_s:g} s was killed"
        self._loop.call_later(grace_s, self._end, 128 + number, text)

    async def close(self) -> None:
        """Kill what still runs, reap it, read its output to the end."""
        for rank, process in list(self._running.items()):
            self._unwatch(rank)
            processes.kill_session(process.pid)
            process.wait(timeout=10.0)
            await end_session(process.pid)
        for output in self._outputs.values():
            output.drain()
            output.close()

    def _start(self, rank: int, environment: Mapping[str, str]) -> None:
        show = partial(self._view.output, rank, _INCARNATION)
        output = Output(self._loop, self._logs / f"rank{rank}.{_INCARNATION}.log", show)
        self._outputs[rank] = output
        out, err = output.open_pipe("stdout"), output.open_pipe("stderr")
        try:
            process = subprocess.Popen(
                command(self._settings.script),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        finally:
            os.close(out)
            os.close(err)
        self._running[rank] = process
        self._pidfds[rank] = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfds[rank], self._on_death, rank)

    def _on_death(self, rank: int) -> None:
        self._unwatch(rank)
        process = self._running.pop(rank)
        processes.kill_session(process.pid)
        code = process.wait(timeout=10.0)
        if code != 0 and self._asked_by is None:
            status = -code if code < 0 else code << 8  # back to what os.waitpid gives
            cause = processes.cause_of_exit(rank, status, "in a run without protection", "")
            self._end(cause.job_exit_code(), cause.text)
        elif not self._running:
            if self._asked_by is None:
                self._end(0, "")
            else:
                text = f"stopped by {signal.Signals(self._asked_by).name}"
                self._end(128 + self._asked_by, text)

    def _unwatch(self, rank: int) -> None:
        fd = self._pidfds.pop(rank)
        self._loop.remove_reader(fd)
        os.close(fd)

    def _end(self, exit_code: int, text: str) -> None:
        if not self._ended.done():
            self._ended.set_result((exit_code, text))

    def _on_loop_exception(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, object]
    ) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException) and not self._ended.done():
            self._ended.set_exception(error)
        else:
            loop.default_exception_handler(context)


def command(script: ScriptSpec) -> list[str]:
    """The command line that runs the script as it would be run by hand, with its output not held
    back."""
    target = ["-m", script.target] if script.module else [script.target]
    return [sys.executable, "-u", *target, *script.args]


def _die_with_parent() -> None:
    processes.set_parent_death_signal(signal.SIGKILL)
