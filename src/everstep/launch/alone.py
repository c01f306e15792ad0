"""A job on one node, which is in this process, as its coordinator is.

Theory of operation: make the run's directory, run the node and the coordinator on one event loop
until the job is over, and leave nothing behind. SIGINT, SIGTERM and SIGHUP ask the job to end, and
a second one does not wait for it.

It knows no other node; see supervisor.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from everstep.agent import identity
from everstep.agent.fleet import Fleet
from everstep.agent.node import Ground, Node, failures_go_to, new_mark
from everstep.agent.workers import free_port
from everstep.agent.zygote import ZygotePlan
from everstep.core.actions import End
from everstep.core.coordinator import Coordinator
from everstep.errors import EverstepError
from everstep.launch.job import (
    LOOPBACK,
    JobResult,
    ending_by_signals,
    hash_seed,
    node_settings,
    policy,
    run_directory,
    started_fields,
)
from everstep.observe.rundir import RunDirectory
from everstep.observe.view import View
from everstep.settings import RunSettings
from everstep.tiers.memory.circle import DeskSettings
from everstep.tiers.memory.serving import desk_name, in_job
from everstep.types import Record


async def run_alone(
    settings: RunSettings, view: View, plan: ZygotePlan, environ: Mapping[str, str]
) -> JobResult:
    """Run a job to its end. Raises as `launch.local.run_job` does."""
    run_dir = run_directory(settings)
    directory = RunDirectory(run_dir, run_id=settings.run_id, recorded=settings.record)
    try:
        end = await _coordinate(settings, view, plan, environ, directory)
    finally:
        directory.close()
    return JobResult(
        exit_code=end.exit_code, run_dir=run_dir, journal=directory.journal.path, text=end.text
    )


async def _coordinate(
    settings: RunSettings,
    view: View,
    plan: ZygotePlan,
    environ: Mapping[str, str],
    directory: RunDirectory,
) -> End:
    master_port = settings.master_port or free_port()
    fleet = Fleet(
        settings=settings,
        core=Coordinator(settings.world_size, policy(settings)),
        directory=directory,
        view=view,
        master=(LOOPBACK, master_port),
    )
    failures_go_to(fleet.failed)
    with ending_by_signals(fleet.stop_asked):
        view.record(directory.journal.header)
        async with (
            in_job(_desk(settings), environ) as inherited,
            _node(settings, fleet, plan, inherited, directory.logs, master_port),
        ):
            try:
                return await fleet.ended
            except EverstepError as error:
                fields = {"exit_code": error.exit_code, "text": str(error), "cause": None}
                fleet.record(Record(event="job_ended", fields=fields))
                raise


def _desk(settings: RunSettings) -> DeskSettings:
    """The memory for checkpoints of a job that knows no other host."""
    return DeskSettings(
        shm_dir=Path(settings.shm_dir),
        name=desk_name(settings.run_id, settings.run_id),
        host=LOOPBACK,
        domain=settings.domain,
        secret=None,
        listen_host=lambda: LOOPBACK,
        share=settings.memory_share,
    )


@asynccontextmanager
async def _node(
    settings: RunSettings,
    fleet: Fleet,
    plan: ZygotePlan,
    environ: Mapping[str, str],
    logs: Path,
    master_port: int,
) -> AsyncIterator[None]:
    """While it is entered, the job has its node; it begins when that can fork."""
    ground = Ground(
        environ=environ,
        shm_dir=Path(settings.shm_dir),
        shm_name=settings.run_id,
        logs=logs,
        zygote_log=logs / "zygote.log",
        host=LOOPBACK,
        mark=new_mark(),
    )
    seed = hash_seed(environ, settings.run_id)
    node = Node(node_settings(settings, seed, plan), ground, fleet.berth(0))
    fleet.add(0, node)
    opening = asyncio.create_task(_open(settings, fleet, node, seed, master_port))
    try:
        yield
    finally:
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await fleet.close()


async def _open(
    settings: RunSettings, fleet: Fleet, node: Node, seed: str, master_port: int
) -> None:
    """Begin the job as soon as its one node can fork; what prevents it ends the job."""
    try:
        digest = identity.script_digest(settings.script)
        ready = await node.open(range(settings.world_size))
    except Exception as error:  # noqa: BLE001 - whoever waits for the job's end raises it
        fleet.failed(error)
        return
    fields = started_fields(settings, ready.torch, seed, master_port, digest)
    fleet.record(Record(event="job_started", fields=fields))
    fleet.start()
