"""A launcher's hold on the process that coordinates its job.

Theory of operation: the process is started as the leader of a session, so that a terminal's Ctrl-C
is the launcher's alone, and with one socket to it (relay.py). A pidfd tells of its death; what it
had said before is read first. If the launcher is killed the kernel asks the process to end.

It does not know what the process does (coordinator_main.py), nor whether one that has died is
started again (supervisor.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import IO

from everstep.agent import processes
from everstep.agent.channel import AgentChannel
from everstep.agent.ending import END_TIMEOUT_S
from everstep.launch.relay import News, Order

MODULE = "everstep.launch.coordinator_main"
_TAIL_BYTES = 4096


class CoordinatorProcess:
    """One process that coordinates. Starts at once; `send` relay.Begin first. `on_news` is called
    for what it says. `ended`: its exit code, negative for a signal, when it is gone and all that it
    said is delivered. Loop thread only."""

    def __init__(self, environ: Mapping[str, str], on_news: Callable[[News], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        self._loop = loop
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it ends
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._popen = _start(environ, theirs.fileno(), self._log)
        except BaseException:
            ours.close()
            self._log.close()
            raise
        self.pid = self._popen.pid
        self.last_words = ""
        """The end of what it printed, once it has ended."""
        self._pidfd = os.pidfd_open(self.pid)
        self._channel: AgentChannel[News] = AgentChannel(loop, ours, News, on_news, self._garbage)
        loop.add_reader(self._pidfd, self._gone)

    def send(self, order: Order) -> None:
        """Tell it something. Nothing, if it is dead."""
        self._channel.send(order)

    def kill(self) -> None:
        """SIGKILL it; `ended` follows."""
        if not self.ended.done():
            self._popen.kill()

    async def close(self) -> None:
        """Kill it if it lives, and reap it."""
        self.kill()
        await asyncio.wait_for(asyncio.shield(self.ended), END_TIMEOUT_S)

    def _gone(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        try:
            self._channel.drain()
        finally:
            self._channel.close()
            code = self._popen.wait(timeout=END_TIMEOUT_S)
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            self.last_words = self._log.read().decode(errors="replace").strip()
            self._log.close()
            self.ended.set_result(code)

    def _garbage(self, why: str) -> None:
        self._popen.kill()
        raise RuntimeError(f"the coordinator (process {self.pid}) breaks the protocol: {why}")


def _start(environ: Mapping[str, str], fd: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, str(fd)],
        env=dict(environ),
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    processes.set_parent_death_signal(signal.SIGTERM)
