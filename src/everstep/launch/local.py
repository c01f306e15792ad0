"""A job on this machine: one agent, its workers, no other node.

Theory of operation: sweep what dead jobs left in shared memory, make the run's directory, run the
agent on an event loop until the job is over, and leave nothing behind. SIGINT, SIGTERM and SIGHUP
ask the job to end, and a second one does not wait for it.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep import __version__
from everstep.agent.agent import Agent, Surroundings
from everstep.agent.progress import sweep
from everstep.agent.workers import free_port
from everstep.agent.zygote import ZygotePlan
from everstep.core.actions import End
from everstep.core.coordinator import Coordinator
from everstep.core.ladder import Policy
from everstep.errors import EverstepError
from everstep.observe.rundir import RunDirectory
from everstep.observe.view import View as View
from everstep.settings import RunSettings
from everstep.types import Record

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended. `journal`: its path; a run without protection writes none. `text`: for the
    person who must act; empty on success."""

    exit_code: int
    run_dir: Path
    journal: Path
    text: str


def run_job(settings: RunSettings, view: View, *, plan: ZygotePlan | None = None) -> JobResult:
    """Run a job to its end. Main thread; blocks until every process of the job is gone.

    `plan`: what the workers are forked from; the default trains. Raises UserError for what must be
    changed before it can start, EverstepError when this machine does not let it run or end; then,
    too, nothing is left running.
    """
    return asyncio.run(_run(settings, view, plan or ZygotePlan(), dict(os.environ)))


async def _run(
    settings: RunSettings, view: View, plan: ZygotePlan, environ: Mapping[str, str]
) -> JobResult:
    run_dir = Path(settings.log_dir) / settings.run_id
    sweep(Path(settings.shm_dir))
    directory = RunDirectory(run_dir, run_id=settings.run_id, recorded=settings.record)
    try:
        end = await _supervise(settings, view, plan, environ, directory)
    finally:
        directory.close()
    return JobResult(
        exit_code=end.exit_code, run_dir=run_dir, journal=directory.journal.path, text=end.text
    )


async def _supervise(
    settings: RunSettings,
    view: View,
    plan: ZygotePlan,
    environ: Mapping[str, str],
    directory: RunDirectory,
) -> End:
    surroundings = Surroundings(
        environ=environ,
        hash_seed=_hash_seed(environ),
        master_port=settings.master_port or free_port(),
    )
    agent = Agent(
        settings=settings,
        surroundings=surroundings,
        core=Coordinator(settings.nproc_per_node, policy(settings)),
        directory=directory,
        view=view,
        plan=plan,
        make_started=lambda torch: _started(settings, torch, surroundings.hash_seed),
    )
    with ending_by_signals(agent.stop_asked):
        try:
            view.record(directory.journal.header)
            return await agent.run()
        except EverstepError as error:
            fields = {"exit_code": error.exit_code, "text": str(error), "cause": None}
            agent.record(Record(event="job_ended", fields=fields))
            raise
        finally:
            await agent.close()


@contextmanager
def ending_by_signals(stop_asked: Callable[[int], None]) -> Iterator[None]:
    """While it is entered, signals that ask for an end call `stop_asked` on the running loop. Main
    thread."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _END_SIGNALS}
    taken = [number for number in _END_SIGNALS if before[number] != signal.SIG_IGN]
    for number in taken:
        loop.add_signal_handler(number, stop_asked, number)
    try:
        yield
    finally:
        for number in taken:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


def policy(settings: RunSettings) -> Policy:
    """The core's limits as the settings have them."""
    return Policy(
        max_incidents=settings.max_restarts,
        setup_timeout_s=settings.setup_timeout_s,
        park_timeout_s=settings.park_timeout_s,
        join_timeout_s=settings.join_timeout_s,
        regroup_timeout_s=settings.regroup_timeout_s,
        max_per_cause=settings.max_per_cause,
        incident_window_s=settings.incident_window_s,
        backoff_s=settings.backoff_s,
        max_backoff_s=settings.max_backoff_s,
        unlimited=settings.lift_budgets,
    )


def _hash_seed(environ: Mapping[str, str]) -> str:
    """PYTHONHASHSEED of all workers: the user's, or one drawn for the job. The order of a set must
    not differ between a rank and its replacement."""
    given = environ.get("PYTHONHASHSEED", "")
    return given if given.isdecimal() else str(secrets.randbelow(1 << 32))


def _started(settings: RunSettings, torch: str, hash_seed: str) -> dict[str, Any]:
    return {
        "world_size": settings.nproc_per_node,
        "script": settings.script.target,
        "args": settings.script.args,
        "chaos": [spec.text for spec in settings.chaos],
        "torch": torch,
        "python": platform.python_version(),
        "everstep": __version__,
        "hash_seed": hash_seed,
    }
