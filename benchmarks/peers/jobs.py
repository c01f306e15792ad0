"""How each contestant is started, awaited and ended.

A job is some processes of ours, each the leader of a session, and whatever they start. This process
is their subreaper: what outlives its parent becomes our child, so that at the end everything that a
job has started is found and ended, and nothing else.

Does not know what the figures are; a job leaves its event files in its directory."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import ROOT
from benchmarks.peers import environments
from benchmarks.peers.environments import Environment
from benchmarks.peers.workload import RANKS

_HERE = Path(__file__).resolve().parent
_LIMIT_S = 120.0
_GRACE_S = 3.0
_POLL_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36


class Failed(Exception):
    """A job did not come to its end. Its text says what is missing."""


@dataclass(slots=True)
class Job:
    """One run of one contestant: its directory, and how to start a process in it."""

    environment: Environment
    directory: Path
    variables: Mapping[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, name: str, command: Sequence[str], **more: str) -> None:
        """Start a process, its output in NAME.txt."""
        with open(self.directory / f"{name}.txt", "wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.directory,
                env={**os.environ, **self.variables, **more},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """Who takes part: `key` in files, `title` for people, how it is run, and for how many steps
    (enough to be at full strength again before the end). `packages`: whose versions are told."""

    key: str
    title: str
    start: Callable[[Job], None]
    environment: Callable[[], Environment]
    packages: tuple[str, ...]
    steps: int = 12


def run(contestant: Contestant, directory: Path, *, fault: bool) -> list[dict[str, Any]]:
    """All events of one run, in order of time. Blocks until all ranks have ended, or for `_LIMIT_S`
    at most. Raises Failed when one has not, Unavailable when the contestant can't be installed."""
    environment = contestant.environment()
    directory.mkdir(parents=True)
    variables = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PEERS_DIR": str(directory),
        "PEERS_FAULT": "1" if fault else "0",
        "PEERS_STEPS": str(contestant.steps),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(":")]),
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    job = Job(environment, directory, variables)
    with _ended(job):
        contestant.start(job)
        _wait(job)
    return _events(directory)


def _events(directory: Path) -> list[dict[str, Any]]:
    lines = [line for file in directory.glob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda event: event["t"])


def _wait(job: Job) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while len(list(job.directory.glob("end.*"))) < RANKS:
        running = any(process.poll() is None for process in job.processes)
        if not running or time.monotonic() > deadline:
            ended = sorted(path.name for path in job.directory.glob("end.*"))
            why = f"after {_LIMIT_S:.0f} s" if running else "when all its processes were gone"
            raise Failed(f"{why} only {ended} of {RANKS} ranks had ended")
        time.sleep(_POLL_S)
    grace = time.monotonic() + _GRACE_S
    while any(process.poll() is None for process in job.processes) and time.monotonic() < grace:
        time.sleep(_POLL_S)


@contextmanager
def _ended(job: Job) -> Iterator[None]:
    """At the end, everything that the job has started is ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    try:
        yield
    finally:
        for process in job.processes:
            process.kill()
            process.wait()
        while children := _children():
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _children() -> list[int]:
    return [
        int(pid)
        for tasks in Path("/proc/self/task").glob("*/children")
        for pid in tasks.read_text().split()
    ]


def _free_ports(count: int) -> list[str]:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in held]


# ---------------------------------------------------------------- the contestants


def start_torchrun(job: Job) -> None:
    """Every process again, from a checkpoint. By default a restart fails under gloo, since the
    second meeting reads the first one's addresses from the shared store: so without sharing it."""
    (port,) = _free_ports(1)
    job.start(
        "torchrun",
        [
            *(str(job.environment.bin / "torchrun"), f"--nproc-per-node={RANKS}"),
            *("--nnodes=1", "--max-restarts=3", "--monitor-interval=0.05"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=peers"),
            str(_HERE / "train_torchrun.py"),
        ],
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )


def start_nvrx(job: Job) -> None:
    """A process for each rank and a spare. Without LOCAL_RANK, which would have it check GPUs."""
    port, group_port = _free_ports(2)
    for rank in range(RANKS + 1):
        job.start(
            f"process{rank}",
            [job.environment.python, str(_HERE / "train_nvrx.py")],
            RANK=str(rank),
            WORLD_SIZE=str(RANKS + 1),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            PEERS_GROUP_PORT=group_port,
        )


def start_torchft(job: Job, *, groups: int = RANKS) -> None:
    """The lighthouse, and a torchrun for each replica group; more groups than ranks are spares."""
    port, *group_ports = _free_ports(1 + groups)
    job.start(
        "lighthouse",
        [
            *(str(job.environment.bin / "torchft_lighthouse"), f"--bind=127.0.0.1:{port}"),
            *("--min_replicas=1", "--quorum_tick_ms=50"),
            *("--heartbeat_timeout_ms=1000", "--join_timeout_ms=10000"),
        ],
    )
    for group, group_port in enumerate(group_ports):
        job.start(
            f"group{group}",
            [
                *(str(job.environment.bin / "torchrun"), "--nnodes=1", "--nproc-per-node=1"),
                *(f"--master-port={group_port}", "--max-restarts=3", "--monitor-interval=0.05"),
                str(_HERE / "train_torchft.py"),
            ],
            REPLICA_GROUP_ID=str(group),
            NUM_REPLICA_GROUPS=str(groups),
            TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}",
            PEERS_SPARE="1" if groups > RANKS else "0",
        )


def start_torchft_spare(job: Job) -> None:
    """With one group to spare."""
    start_torchft(job, groups=RANKS + 1)


def start_everstep(job: Job) -> None:
    """As anybody would."""
    job.start(
        "everstep",
        [
            *(str(job.environment.bin / "everstep"), "run", f"--nproc-per-node={RANKS}"),
            *("--log-dir", str(job.directory / "runs"), str(_HERE / "train_everstep.py")),
        ],
    )


CONTESTANTS = (
    Contestant(
        key="torchrun",
        title="torchrun + DCP",
        start=start_torchrun,
        environment=environments.own,
        packages=("torch",),
    ),
    Contestant(
        key="nvrx",
        title="NVRx in-process, 1 spare",
        start=start_nvrx,
        environment=environments.nvrx,
        packages=("nvidia-resiliency-ext", "torch"),
    ),
    Contestant(
        key="torchft",
        title="torchft",
        start=start_torchft,
        environment=environments.torchft,
        packages=("torchft-nightly", "torch"),
        steps=32,
    ),
    Contestant(
        key="torchft-spare",
        title="torchft, 1 spare",
        start=start_torchft_spare,
        environment=environments.torchft,
        packages=("torchft-nightly", "torch"),
    ),
    Contestant(
        key="everstep",
        title="everstep",
        start=start_everstep,
        environment=environments.own,
        packages=("everstep", "torch"),
    ),
)
