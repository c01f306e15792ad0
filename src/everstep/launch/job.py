"""What every way to launch a job has in common: how it ends, and what it is told of its settings.

Does not know where its coordinator runs, nor its nodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import platform
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep import __version__
from everstep.agent import identity
from everstep.agent.zygote import ZygotePlan
from everstep.chaos import OF_NETWORK
from everstep.core.ladder import Policy
from everstep.settings import RunSettings, endpoint
from everstep.wire.nodes import NodeSettings

LOOPBACK = "127.0.0.1"
LEASE_LOST_EXIT_CODE = 75
"""Of a coordinator that has lost its lease: EX_TEMPFAIL, to be tried again."""
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended. `journal`: its path; a run without protection writes none. `text`: for the
    person who must act; empty on success."""

    exit_code: int
    run_dir: Path
    journal: Path
    text: str


def run_directory(settings: RunSettings) -> Path:
    """Where the run's journal and logs are."""
    return Path(settings.log_dir) / settings.run_id


def meeting_host(settings: RunSettings) -> str:
    """The numeric address at which the coordinator listens, and MASTER_ADDR of the script. Blocks
    for the name. Raises UserError."""
    if not settings.coordinator:
        return LOOPBACK
    return identity.numeric(endpoint(settings.coordinator)[0], alone=settings.nnodes == 1)


@contextmanager
def ending_by_signals(stop_asked: Callable[[int], None]) -> Iterator[None]:
    """While it is entered, signals that ask for an end call `stop_asked` on the running loop. Main
    thread."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    taken = [number for number in END_SIGNALS if before[number] != signal.SIG_IGN]
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
        join_nodes_timeout_s=settings.join_nodes_timeout_s,
        spare_wait_s=settings.spare_wait_s,
        max_node_failures=settings.max_node_failures,
        rejoin_timeout_s=settings.rejoin_timeout_s,
        silence_timeout_s=settings.coordinator_timeout_s,
        copies=settings.copies != "off",
        copy_every=settings.replicate_every if settings.copies == "async" else 0,
    )


def node_settings(settings: RunSettings, seed: str, plan: ZygotePlan) -> NodeSettings:
    """What every node of the job is told of its settings. `seed`: PYTHONHASHSEED of all workers."""
    return NodeSettings(
        run_id=settings.run_id,
        script=settings.script,
        hash_seed=seed,
        watch=settings.watch,
        stopped_timeout_s=settings.stopped_timeout_s,
        hang_timeout_s=settings.hang_timeout_s,
        first_step_timeout_s=settings.first_step_timeout_s,
        section_timeout_s=settings.section_timeout_s,
        runner=plan.runner,
        preload=plan.preload,
        nproc_per_node=settings.nproc_per_node,
        recovery_bytes_per_s=settings.recovery_bytes_per_s,
        transfer_timeout_s=settings.transfer_timeout_s,
        transfer_stall_s=settings.transfer_stall_s,
        preflight_s=settings.preflight_s,
        cuts_networks=any(fault.kind == OF_NETWORK for fault in settings.chaos),
    )


def hash_seed(environ: Mapping[str, str], run_id: str) -> str:
    """PYTHONHASHSEED of all workers: the user's, or one made from the run's name, so that every
    coordinator of a run has the same. The order of a set must not differ between a rank and its
    replacement."""
    given = environ.get("PYTHONHASHSEED", "")
    if given.isdecimal():
        return given
    return str(int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:4]))


def started_fields(
    settings: RunSettings, torch: str, seed: str, master_port: int, script_digest: str
) -> dict[str, Any]:
    """The fields of the record `job_started`."""
    return {
        "world_size": settings.world_size,
        "script": settings.script.target,
        "script_digest": script_digest,
        "args": settings.script.args,
        "chaos": [spec.text for spec in settings.chaos],
        "nproc_per_node": settings.nproc_per_node,
        "copies": settings.copies,
        "replicate_every": settings.replicate_every,
        "torch": torch,
        "python": platform.python_version(),
        "everstep": __version__,
        "hash_seed": seed,
        "master_port": master_port,
    }
