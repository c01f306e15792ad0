"""One worker, as the agent holds it: its channel, its output, its shared memory, its death.

Theory of operation: a worker exists here from the order to spawn it until it is buried. It is
`open`ed when a zygote is there to fork it, `attach`ed when its process id is known, and dead when
its pidfd says so or the zygote has reaped it, whichever is heard first; the control channel is no
witness, since a process that the worker forked may hold its other end. Loop thread only.

It does not decide when to spawn or bury, nor what a death means.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.agent import processes
from everstep.agent.channel import AgentChannel
from everstep.agent.output import Output
from everstep.agent.progress import ProgressFile
from everstep.agent.stacks import StackFile
from everstep.agent.zygote import Zygote
from everstep.core.actions import Spawn
from everstep.keepsakes import Heritage
from everstep.settings import RunSettings
from everstep.types import Cause
from everstep.wire.messages import FromWorker, ToWorker, WorkerSpec

OnMessage = Callable[[FromWorker], None]
OnLine = Callable[[str, str], None]


class Worker:
    """One incarnation of a rank."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spec: WorkerSpec,
        variables: Mapping[str, str],
        progress: ProgressFile,
        log: Path,
    ) -> None:
        self.spec = spec
        self.variables = variables
        self.pid: int | None = None
        self.zygote: Zygote | None = None
        self.status: asyncio.Future[int] = loop.create_future()
        self.dying = False
        self.progress = progress
        self.stacks = StackFile(Path(spec.stacks_path))
        self._loop = loop
        self._log = log
        self._pidfd: int | None = None
        self._channel: AgentChannel[FromWorker] | None = None
        self._output: Output | None = None
        self._why = ""

    def open(
        self, on_message: OnMessage, on_line: OnLine, on_error: Callable[[str], None]
    ) -> tuple[int, int, int]:
        """Make channel and pipes. Returns the worker's ends, which are the caller's: control,
        stdout, stderr."""
        ours, theirs = socket.socketpair()
        self._channel = AgentChannel(self._loop, ours, FromWorker, on_message, on_error)
        self._output = Output(self._loop, self._log, on_line)
        return theirs.detach(), self._output.open_pipe("stdout"), self._output.open_pipe("stderr")

    def attach(self, pid: int, on_death: Callable[[], None]) -> None:
        """The process is there: watch it. One that was to be killed meanwhile is killed now."""
        self.pid = pid
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # it is dead and reaped; the zygote's word for it is on its way
        self._loop.add_reader(self._pidfd, on_death)
        if self._why:
            self.signal(signal.SIGKILL)

    def send(self, message: ToWorker) -> None:
        """Send a message; nothing happens if the process is dead or not yet there to be told."""
        if self._channel is not None:
            self._channel.send(message)

    @property
    def killed(self) -> bool:
        """`kill` found the process alive, or not yet there."""
        return bool(self._why)

    def kill(self, why: str) -> None:
        """SIGKILL the process; what else is in its session is killed when it is buried. Nothing, if
        it has ended by itself: then its death is not everstep's."""
        if self.pid is None or not self._has_ended():
            self._why = self._why or why
            self.signal(signal.SIGKILL)

    def _has_ended(self) -> bool:
        """Whether the process is dead, though nobody may have been told yet."""
        if self._pidfd is None:
            return True
        watch = select.poll()
        watch.register(self._pidfd, select.POLLIN)
        return bool(watch.poll(0))

    def terminate(self) -> None:
        """SIGTERM the process: it may end itself in its own way."""
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended or is not yet there."""
        if self._pidfd is not None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass  # it has ended; the pidfd says so, too

    def drain(self) -> None:
        """Deliver all messages that a dead worker had written, and watch it no longer."""
        self._stop_watching()
        if self._channel is not None:
            self._channel.drain()

    def cause(self, status: int | None) -> Cause:
        """How it ended and where it stood. `status`: as from `os.waitpid`, None if it was lost."""
        if self._output is not None:
            self._output.drain()
        return processes.cause_of_exit(
            self.spec.rank,
            status,
            self.progress.read().words(),
            self._output.detail() if self._output is not None else "",
            self._why,
        )

    def detach(self) -> None:
        """Undo `open`: the process, if there ever was one, is gone unheard, and another one is to
        be forked."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._output is not None:
            self._output.drain()
            self._output.close()
            self._output = None

    def close(self) -> None:
        """Close all and remove the file in shared memory. May be called twice."""
        self._stop_watching()
        self.detach()
        self.progress.remove()
        if self.spec.stacks_path:
            self.stacks.remove()

    def _stop_watching(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands in the world: `nproc_per_node` ranks in a row make a slot, which one node
    holds."""

    rank: int
    nproc_per_node: int
    world_size: int

    @property
    def slot(self) -> int:
        """Which logical node of the job it is on."""
        return self.rank // self.nproc_per_node

    @property
    def local_rank(self) -> int:
        """Which of the ranks of its slot it is."""
        return self.rank % self.nproc_per_node


def worker_spec(
    settings: RunSettings, place: Place, order: Spawn, heritage: Heritage
) -> WorkerSpec:
    """What the worker that `order` asks for knows at its birth, but for what its node adds."""
    return WorkerSpec(
        run_id=settings.run_id,
        rank=place.rank,
        local_rank=place.local_rank,
        local_world_size=place.nproc_per_node,
        world_size=place.world_size,
        incarnation=order.incarnation,
        generation=order.generation,
        joiner=order.joiner,
        script=settings.script,
        progress_path="",
        rng_key=heritage.rng_key,
        once=heritage.once,
        faults=heritage.faults,
        record=settings.record,
        collective_timeout_s=settings.collective_timeout_s,
        build_timeout_s=settings.build_timeout_s,
        # Set-up has its time from when all nodes are there; the coordinator ends it.
        meet_timeout_s=settings.setup_timeout_s + settings.spare_wait_s,
        quiesce_timeout_s=settings.quiesce_timeout_s,
        tape=heritage.tape,
        device=settings.device,
        own_series=settings.own_series,
    )


def torchrun_environment(place: Place, master_host: str, master_port: int) -> dict[str, str]:
    """The variables by which torchrun tells a worker who it is."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.nproc_per_node),
        "GROUP_RANK": str(place.slot),
        "GROUP_WORLD_SIZE": str(place.world_size // place.nproc_per_node),
        "MASTER_ADDR": master_host,
        "MASTER_PORT": str(master_port),
    }


def free_port() -> int:
    """A TCP port that nothing on this host listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
