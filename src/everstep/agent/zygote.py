"""The agent's hold on a zygote, the process from which workers are forked.

Theory of operation: the zygote is a child of the agent with one socket to it. It is started before
the workers and, if it dies, once more; its workers do not notice. What a forked worker must find
the same in every incarnation and on every rank (one thread for OpenMP and the BLASes, one
PYTHONHASHSEED) is in its environment from the start. Its own output goes to a file.

Source: a fork server with preloaded modules is Python's own `multiprocessing` idea; here it also
reaps. Loop thread only.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.agent.channel import AgentChannel
from everstep.errors import EverstepError, UserError
from everstep.wire.messages import (
    Exited,
    Fork,
    Forked,
    FromZygote,
    Load,
    Ready,
    ScriptSpec,
    ZygoteFailed,
)

END_TIMEOUT_S = 10.0
_LOG_TAIL_BYTES = 4096
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygotePlan:
    """What a zygote holds. `runner`: `module:function` that a worker runs. `preload`: modules
    imported first."""

    runner: str = "everstep.worker.process:run_worker"
    preload: tuple[str, ...] = (
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "torch.nn.parallel",
        "torch.distributed.fsdp",
        "torch.optim",
    )


class Zygote:
    """One zygote process. Starts at once; `load` must be the first call.

    `on_message` is called with Forked and Exited; `on_death` when it had been ready and is gone,
    and all it said is delivered. `gone` is done when the process is gone. `log`: the file for what
    it prints.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        plan: ZygotePlan,
        environment: Mapping[str, str],
        log: Path,
        on_message: Callable[[Forked | Exited], None],
        on_death: Callable[[Zygote], None],
    ) -> None:
        self.gone: asyncio.Future[None] = loop.create_future()
        self.ready = False
        self._loop = loop
        self._log = log
        self._on_message = on_message
        self._on_death = on_death
        self._answer: asyncio.Future[Ready] = loop.create_future()
        ours, theirs = socket.socketpair()
        self._process = _start(plan, environment, log, ours, theirs)
        self.pid = self._process.pid
        self._pidfd: int | None = os.pidfd_open(self.pid)
        self._channel: AgentChannel[FromZygote] = AgentChannel(
            loop, ours, FromZygote, self._take, self._on_garbage
        )
        loop.add_reader(self._pidfd, self._ended)

    async def load(self, script: ScriptSpec, *, with_imports: bool) -> Ready:
        """Have it import everything. Returns its report; whoever cancels must `close`.

        Raises UserError when it cannot serve (no torch), EverstepError when it dies over it.
        """
        self._channel.send(Load(script=script, with_imports=with_imports))
        return await self._answer

    def fork(self, message: Fork, fds: Sequence[int]) -> None:
        """Ask for a worker; `Forked` follows. `fds` (control, stdout, stderr) are the zygote's from
        now on."""
        self._channel.send(message, fds)

    def kill(self) -> None:
        """SIGKILL it; `on_death` follows. For one that does not answer."""
        self._process.kill()

    async def close(self) -> None:
        """Close its socket, at which it kills its workers' sessions and exits; kill it if it takes
        too long."""
        self._channel.close()
        if not self.ready:
            self._process.kill()  # it imports, and would not look at its socket until it is through
        try:
            await asyncio.wait_for(asyncio.shield(self.gone), END_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await asyncio.wait_for(asyncio.shield(self.gone), END_TIMEOUT_S)

    def _take(self, message: FromZygote) -> None:
        match message:
            case Ready():
                if not self._answer.done():
                    self.ready = True
                    self._answer.set_result(message)
            case ZygoteFailed(text=text):
                if self._answer.done():
                    raise EverstepError(text)
                self._answer.set_exception(UserError(text))
            case _:
                self._on_message(message)

    def _on_garbage(self, why: str) -> None:
        self._process.kill()
        raise EverstepError(f"the zygote (process {self.pid}) does not keep to the protocol: {why}")

    def _ended(self) -> None:
        """The process is dead."""
        if self._pidfd is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
        self._channel.drain()
        self._channel.close()
        code = self._process.wait(timeout=END_TIMEOUT_S)
        self.gone.set_result(None)
        if not self._answer.done():
            self._answer.set_exception(ZygoteDiedError(self._epitaph(code)))
        if self.ready:
            self.ready = False
            self._on_death(self)

    def _epitaph(self, code: int) -> str:
        ended = f"by signal {-code}" if code < 0 else f"with code {code}"
        tail = self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        said = f"; its last words:\n{tail}" if tail else ""
        return (
            f"the process that imports for the workers ended {ended} while it imported; an import "
            "of the script may end the process, or this machine may be out of memory; all it "
            f"printed is in {self._log}{said}"
        )


def _start(
    plan: ZygotePlan,
    environment: Mapping[str, str],
    log: Path,
    ours: socket.socket,
    theirs: socket.socket,
) -> subprocess.Popen[bytes]:
    """Start the process; `theirs` is closed here, and `ours` too if it does not start."""
    try:
        with theirs, log.open("ab") as output:
            return subprocess.Popen(
                command(plan, theirs.fileno()),
                env=dict(environment),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A terminal's Ctrl-C is for the agent alone.
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise


class ZygoteDiedError(EverstepError):
    """A zygote ended while it imported."""


def command(plan: ZygotePlan, fd: int) -> list[str]:
    """The command line of a zygote that finds its socket at `fd`."""
    return [sys.executable, "-m", "everstep.worker.zygote", str(fd), plan.runner, *plan.preload]


def environment(base: Mapping[str, str], hash_seed: str, mark: str) -> dict[str, str]:
    """The zygote's environment, and so its workers'. `mark`: NAME=value by which the job's
    processes are known."""
    name, _, value = mark.partition("=")
    found = dict.fromkeys(_ONE_THREAD, "1")
    return found | dict(base) | {"PYTHONHASHSEED": hash_seed, "PYTHONUNBUFFERED": "1", name: value}
