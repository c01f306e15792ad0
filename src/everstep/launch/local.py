"""A job that is coordinated by this process: on one node within it, or on several.

Theory of operation: sweep what dead jobs left in shared memory, make the run's directory, run the
fleet on an event loop until the job is over, and leave nothing behind. The fleet has one node in
this process; or agents register with it, which are started here (`--local-nodes`) or on their own
hosts. SIGINT, SIGTERM and SIGHUP ask the job to end, and a second one does not wait for it.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep import __version__
from everstep.agent import identity
from everstep.agent.fleet import Fleet
from everstep.agent.leftovers import sweep
from everstep.agent.node import Ground, Node, failures_go_to, new_mark
from everstep.agent.workers import free_port
from everstep.agent.zygote import ZygotePlan
from everstep.core.actions import End
from everstep.core.coordinator import Coordinator
from everstep.core.ladder import Policy
from everstep.core.nodes import Layout
from everstep.errors import EverstepError
from everstep.observe.rundir import RunDirectory
from everstep.observe.view import View as View
from everstep.settings import RunSettings, endpoint, has_secret, secret_of
from everstep.types import Record
from everstep.wire.nodes import NodeSettings

LOOPBACK = "127.0.0.1"
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
    hash_seed = _hash_seed(environ)
    fleet = Fleet(
        settings=settings,
        core=Coordinator(settings.world_size, policy(settings), _layout(settings)),
        directory=directory,
        view=view,
        master=(_meeting_host(settings), settings.master_port or free_port()),
    )
    failures_go_to(fleet.failed)
    shared = node_settings(settings, hash_seed, plan)
    tend = _with_agents if settings.on_nodes else _alone
    with ending_by_signals(fleet.stop_asked):
        view.record(directory.journal.header)
        async with tend(settings, fleet, shared, environ, directory.logs):
            try:
                return await fleet.ended
            except EverstepError as error:
                fields = {"exit_code": error.exit_code, "text": str(error), "cause": None}
                fleet.record(Record(event="job_ended", fields=fields))
                raise


@asynccontextmanager
async def _alone(
    settings: RunSettings,
    fleet: Fleet,
    shared: NodeSettings,
    environ: Mapping[str, str],
    logs: Path,
) -> AsyncIterator[None]:
    """The job's one node is in this process."""
    ground = Ground(
        environ=environ,
        shm_dir=Path(settings.shm_dir),
        shm_name=settings.run_id,
        logs=logs,
        zygote_log=logs / "zygote.log",
        host=LOOPBACK,
        mark=new_mark(),
    )
    node = Node(shared, ground, fleet.berth(0))
    fleet.add(0, node)
    opening = asyncio.create_task(_open(settings, fleet, node, shared.hash_seed))
    try:
        yield
    finally:
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        await fleet.close()


@asynccontextmanager
async def _with_agents(
    settings: RunSettings,
    fleet: Fleet,
    shared: NodeSettings,
    environ: Mapping[str, str],
    logs: Path,
) -> AsyncIterator[None]:
    """The job's nodes are agents: all on this machine, or one here and the others elsewhere."""
    # ZeroMQ is imported only where something is sent to another process.
    from everstep.agent.remote import Registry
    from everstep.launch.pool import LocalAgents
    from everstep.wire.secret import make_secret

    elsewhere = bool(settings.coordinator)
    secret = secret_of(environ) if elsewhere or has_secret(environ) else make_secret()
    versions, host = identity.versions(), _meeting_host(settings)
    port = endpoint(settings.coordinator)[1] if elsewhere else 0
    registry = Registry(
        fleet,
        host=host,
        ports=range(port, port + 1),
        secret=secret,
        lease_s=settings.lease_s,
        settings=shared,
        versions=versions,
        script_digest=identity.script_digest(settings.script),
        nproc_per_node=settings.nproc_per_node,
        must_start=not elsewhere,
    )

    def failed(error: EverstepError) -> None:
        if not fleet.ended.done():  # an agent that was told to finish has the job's exit code
            fleet.failed(error)

    agents = LocalAgents(settings, secret, logs, environ, failed)
    try:
        fields = _started(settings, versions["torch"], shared.hash_seed)
        fleet.record(Record(event="job_started", fields=fields))
        listens = {"host": host, "port": registry.port}
        fleet.record(Record(event="listening", fields=listens))
        fleet.start()
        here = 1 if elsewhere else settings.slots + settings.spares
        agents.start(here, host, registry.port)
        yield
    finally:
        try:
            await fleet.close()
        finally:
            registry.close()
            await agents.close()


async def _open(settings: RunSettings, fleet: Fleet, node: Node, hash_seed: str) -> None:
    """Begin the job as soon as its one node can fork; what prevents it ends the job."""
    try:
        ready = await node.open(range(settings.world_size))
    except Exception as error:  # noqa: BLE001 - whoever waits for the job's end raises it
        fleet.failed(error)
        return
    fields = _started(settings, ready.torch, hash_seed)
    fleet.record(Record(event="job_started", fields=fields))
    fleet.start()


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


def _meeting_host(settings: RunSettings) -> str:
    """The numeric address at which the coordinator listens, and MASTER_ADDR of the script."""
    if not settings.coordinator:
        return LOOPBACK
    return identity.numeric(endpoint(settings.coordinator)[0])


def _layout(settings: RunSettings) -> Layout | None:
    if not settings.on_nodes:
        return None
    return Layout(
        nproc_per_node=settings.nproc_per_node, nnodes=settings.slots, spares=settings.spares
    )


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
        join_nodes_timeout_s=settings.join_nodes_timeout_s,
        spare_wait_s=settings.spare_wait_s,
        max_node_failures=settings.max_node_failures,
        copies=settings.copies == "sync",
    )


def node_settings(settings: RunSettings, hash_seed: str, plan: ZygotePlan) -> NodeSettings:
    """What every node of the job is told of its settings."""
    return NodeSettings(
        run_id=settings.run_id,
        script=settings.script,
        hash_seed=hash_seed,
        watch=settings.watch,
        stopped_timeout_s=settings.stopped_timeout_s,
        hang_timeout_s=settings.hang_timeout_s,
        first_step_timeout_s=settings.first_step_timeout_s,
        section_timeout_s=settings.section_timeout_s,
        runner=plan.runner,
        preload=plan.preload,
    )


def _hash_seed(environ: Mapping[str, str]) -> str:
    """PYTHONHASHSEED of all workers: the user's, or one drawn for the job. The order of a set must
    not differ between a rank and its replacement."""
    given = environ.get("PYTHONHASHSEED", "")
    return given if given.isdecimal() else str(secrets.randbelow(1 << 32))


def _started(settings: RunSettings, torch: str, hash_seed: str) -> dict[str, Any]:
    return {
        "world_size": settings.world_size,
        "script": settings.script.target,
        "args": settings.script.args,
        "chaos": [spec.text for spec in settings.chaos],
        "torch": torch,
        "python": platform.python_version(),
        "everstep": __version__,
        "hash_seed": hash_seed,
    }
