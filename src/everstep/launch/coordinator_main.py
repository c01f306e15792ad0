"""The process that coordinates a job below a launcher: `python -m everstep.launch.coordinator_main
FD`, with the socket to its launcher at FD.

Theory of operation: it is told what to coordinate, and says how that ended as its last word. What
a person asks of the launcher comes over the socket, too. A signal asks for the job's end, as it
would in the launcher; when the launcher is dead, for an end at once, since nobody starts this
process again.

It does not know what becomes of it after its last word.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
from typing import Final

from everstep.agent.channel import AgentChannel
from everstep.agent.zygote import ZygotePlan
from everstep.errors import EverstepError
from everstep.launch.coordinating import Coordinating
from everstep.launch.job import ending_by_signals
from everstep.launch.relay import Begin, Ended, Fail, Order, Raised, RelayedView, Stop

_BEGIN_TIMEOUT_S: Final = 30.0
_LOCK_TIMEOUT_S: Final = 5.0  # the lock of one that was killed is free when the kernel has ended it


class _Main:
    """The process, from its first word to its last."""

    def __init__(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._parent = os.getppid()
        self._begun: asyncio.Future[Coordinating] = loop.create_future()
        self._channel: AgentChannel[Order] = AgentChannel(
            loop, sock, Order, self._take, self._garbage
        )

    async def run(self) -> int:
        """Coordinate, and tell how it ended. Returns the exit code."""
        coordinating = await asyncio.wait_for(self._begun, _BEGIN_TIMEOUT_S)
        with ending_by_signals(self._asked):
            try:
                end = await coordinating.run()
                last: Ended | Raised = Ended(exit_code=end.exit_code, text=end.text)
            except EverstepError as error:
                last = Raised(text=str(error), exit_code=error.exit_code)
            self._channel.send(last)
            await self._channel.flushed()  # for as long as a launcher lives that may yet read it
        return last.exit_code

    def _take(self, order: Order) -> None:
        match order:
            case Begin():
                self._begun.set_result(_coordinating(order, RelayedView(self._channel)))
            case Stop(signal=number):
                self._begun.result().stop_asked(number)
            case Fail(text=text, exit_code=exit_code):
                error = EverstepError(text)
                error.exit_code = exit_code
                self._begun.result().failed(error)

    def _asked(self, number: int) -> None:
        """A signal asks for the end; that of a launcher that is dead, at once."""
        coordinating = self._begun.result()
        coordinating.stop_asked(number)
        if os.getppid() != self._parent:
            coordinating.stop_asked(number)

    def _garbage(self, why: str) -> None:
        raise RuntimeError(f"the launcher (process {self._parent}) breaks the protocol: {why}")


def _coordinating(begin: Begin, view: RelayedView) -> Coordinating:
    settings = begin.settings
    return Coordinating(
        settings,
        view,
        ZygotePlan(runner=begin.runner, preload=begin.preload),
        os.environ,
        port=begin.port,
        resume=begin.resume,
        wait_s=math.inf if settings.coordinator_lease else _LOCK_TIMEOUT_S,
    )


async def _main(sock: socket.socket) -> int:
    return await _Main(sock).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(socket.socket(fileno=int(sys.argv[1])))))
