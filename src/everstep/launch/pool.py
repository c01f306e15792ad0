"""Agents on this machine, each a process of its own: those of `--local-nodes`, or the coordinating
host's own.

Theory of operation: the launcher starts them with the job's secret in their environment, each the
leader of a session, so that a terminal's Ctrl-C is the launcher's alone. All that an agent starts
inherits a mark; when an agent ends, whatever of it is left is found by the mark and killed, as its
host's power cut would have done. Its files in shared memory are removed, but for copies, which go
with the job: an agent that is started by hand may adopt them. If the launcher is killed the kernel
asks the agents to end, and they take their workers with them.

It does not speak with agents (agent/remote.py), nor replace one that has ended: that is what spares
are for.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.agent import processes
from everstep.agent.ending import END_TIMEOUT_S, end_marked
from everstep.agent.leftovers import sweep
from everstep.errors import EverstepError
from everstep.settings import RunSettings, without_secret
from everstep.tiers.memory import ownership
from everstep.tiers.memory.serving import desk_name
from everstep.wire.secret import Secret

_MARK = "EVERSTEP_NODE"
_END_TIMEOUT_S = 5.0
_TAIL_BYTES = 2048


@dataclass(slots=True)
class _Process:
    """One agent. `mark`: what all that it starts has in its environment. `gone`: it has ended, and
    nothing of it is left."""

    name: str
    popen: subprocess.Popen[bytes]
    pidfd: int
    mark: str
    log: Path
    gone: asyncio.Event


class LocalAgents:
    """The agents of one job. `logs`: where what they print is kept.

    `on_end` is called when one has ended by itself, before `close`: with its name, its process id,
    its exit code, negative for a signal, and what it printed last. `on_failure` is called with what
    could not be done about it. Loop thread only."""

    def __init__(
        self,
        settings: RunSettings,
        secret: Secret,
        logs: Path,
        environ: Mapping[str, str],
        on_end: Callable[[str, int, int, str], None],
        on_failure: Callable[[EverstepError], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._secret = secret
        self._logs = logs
        self._environ = environ
        self._on_end = on_end
        self._on_failure = on_failure
        self._running: list[_Process] = []
        self._desks: list[Path] = []  # where the agents keep checkpoints
        self._burials: set[asyncio.Task[None]] = set()
        self._closing = False
        self._was_subreaper = processes.set_child_subreaper(True)

    @property
    def alive(self) -> int:
        """How many have not ended."""
        return len(self._running)

    def start(self, count: int, host: str, port: int) -> None:
        """Start `count` agents that look for their coordinator at `host` and `port`."""
        for index in range(count):
            self._start(f"local-{index}", host, port)

    async def close(self) -> None:
        """End the agents that have not ended by themselves, and leave nothing of them."""
        self._closing = True
        for process in self._running:
            stopped = processes.is_stopped(process.popen.pid)
            process.popen.send_signal(signal.SIGKILL if stopped else signal.SIGTERM)
        for process in list(self._running):
            try:
                await asyncio.wait_for(process.gone.wait(), _END_TIMEOUT_S)
            except TimeoutError:
                process.popen.kill()
                await asyncio.wait_for(process.gone.wait(), 2 * END_TIMEOUT_S)
        await asyncio.gather(*self._burials)
        sweep(Path(self._settings.shm_dir))
        for desk in self._desks:
            ownership.forget(desk)
        processes.set_child_subreaper(self._was_subreaper)

    def _start(self, name: str, host: str, port: int) -> None:
        mark = f"{_MARK}={uuid.uuid4().hex}"
        variable, _, value = mark.partition("=")
        settings = self._settings
        environment = {
            **without_secret(self._environ),  # which may name its file
            variable: value,
            "EVERSTEP_SECRET": self._secret.reveal(),
            "EVERSTEP_COORDINATOR_LEASE": settings.coordinator_lease,
            "EVERSTEP_RUN_ID": settings.run_id,
            "EVERSTEP_LOG_DIR": str(Path(settings.log_dir).absolute()),
            "EVERSTEP_SHM_DIR": settings.shm_dir,
            "EVERSTEP_DOMAIN": settings.domain,
            "EVERSTEP_INTERFACE": settings.interface,
            "EVERSTEP_PORTS": settings.ports,
            "EVERSTEP_RECOVERY_BANDWIDTH": settings.recovery_bandwidth,
            "EVERSTEP_MEMORY_SHARE": str(settings.memory_share),
            "EVERSTEP_LEASE_S": str(settings.lease_s),
            "EVERSTEP_GRACE_S": str(settings.grace_s),
            "EVERSTEP_COORDINATOR_TIMEOUT_S": str(settings.coordinator_timeout_s),
            "EVERSTEP_JOIN_NODES_TIMEOUT_S": str(settings.join_nodes_timeout_s),
        }
        log = self._logs / f"agent-{name}.log"
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        who = ["--quiet", "--coordinator", where, "--name", name]
        if settings.local_nodes:  # else there is one, and it stands for the machine
            who += ["--host", name]
        machine = name if settings.local_nodes else socket.gethostname()
        desk = desk_name(machine, name)
        self._desks.append(ownership.directory_of(Path(settings.shm_dir), self._secret, desk))
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", "everstep.cli", "agent", *who],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        pidfd = os.pidfd_open(popen.pid)
        process = _Process(name, popen, pidfd, mark, log, asyncio.Event())
        self._running.append(process)
        self._loop.add_reader(pidfd, self._on_death, process)

    def _on_death(self, process: _Process) -> None:
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        burial = self._loop.create_task(self._bury(process))
        self._burials.add(burial)
        burial.add_done_callback(self._on_buried)

    async def _bury(self, process: _Process) -> None:
        code = process.popen.wait(timeout=END_TIMEOUT_S)
        await end_marked(process.mark)
        # While the job goes on, its copies stay for an agent that somebody starts instead.
        sweep(Path(self._settings.shm_dir), self._settings.run_id)
        self._running.remove(process)
        process.gone.set()
        if not self._closing:
            tail = process.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
            words = f"agent {process.name}: {tail}"
            self._on_end(process.name, process.popen.pid, code, words)

    def _on_buried(self, burial: asyncio.Task[None]) -> None:
        self._burials.discard(burial)
        error = None if burial.cancelled() else burial.exception()
        if error is not None:
            self._on_failure(EverstepError(f"an agent that ended left something behind: {error}"))


def _end_with_parent() -> None:
    processes.set_parent_death_signal(signal.SIGTERM)
