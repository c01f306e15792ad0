"""A node's part in the preflight: it lets others try whether they reach it, and tries them.

Theory of operation. Two listeners stand for all. The bulk plane's lies in the range of ports that
is everstep's own; who tries it shows that it has the job's key, and hears that it is this node's
that answers, and not another's at the same address. gloo and nccl can't be told a range: they take
ports that the system chooses; so the second listener does as they do, until a little after the
first tries, which all nodes make at the same time. What connects there is let go again at once.

It does not know which nodes must reach each other (agent/preflight.py). Loop thread only, but for
the tries themselves, each on a thread; none lasts longer than it was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from everstep.agent import clocks
from everstep.agent.shipping import Shipping
from everstep.errors import EverstepError
from everstep.wire import nodes
from everstep.wire.bulk import Caller, Refused, greet
from everstep.wire.ports import ANY, chosen_by_the_system, listen

_BACKLOG: Final = 64


class Reach:
    """Of the node that `shipping` is of. `listens`: what others need to try it. `tell`: the answers
    to `probe`. Raises UserError when it can't listen."""

    def __init__(self, shipping: Shipping, tell: Callable[[nodes.Probed], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._caller = shipping.caller
        self._tell = tell
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._socket = listen(shipping.door.host, ANY, _BACKLOG)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._let_go)
        self.listens = nodes.Listens(
            door=shipping.door,
            network=_network(),
            any_port=self._socket.getsockname()[1],
            any_ports=chosen_by_the_system(),
        )

    def probe(self, order: nodes.Probe) -> None:
        """Try what is ordered, and tell. Nothing after `close`."""
        if self._closed:
            return
        if self._timer is None:
            self._timer = self._loop.call_later(2 * order.within_s, self._listen_no_longer)
        task = self._loop.create_task(self._answer(order))
        self._tasks.add(task)
        task.add_done_callback(self._answered)

    def close(self) -> None:
        """Listen no longer; nothing is told after. May be called twice."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._listen_no_longer()

    def _listen_no_longer(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    async def _answer(self, order: nodes.Probe) -> None:
        self._tell(await probe(order, self._caller))

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    def _let_go(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # it has gone already
            self._socket.accept()[0].close()


async def probe(order: nodes.Probe, caller: Caller) -> nodes.Probed:
    """Try all targets at the same time. Takes `order.within_s` at most."""
    tries = [
        (node, listens, chosen)
        for node, listens in order.targets.items()
        for chosen in (False, True)
        if listens.any_port or not chosen
    ]
    if not tries:
        return nodes.Probed(closed=())
    loop = asyncio.get_running_loop()
    threads = ThreadPoolExecutor(len(tries), thread_name_prefix="everstep-probe")
    try:
        found = await asyncio.gather(
            *(loop.run_in_executor(threads, _try, *each, caller, order.within_s) for each in tries)
        )
    finally:
        threads.shutdown(wait=False)  # each ends by its own deadline
    return nodes.Probed(closed=tuple(closed for closed in found if closed is not None))


def _try(
    node: int, listens: nodes.Listens, chosen: bool, caller: Caller, within_s: float
) -> nodes.Closed | None:
    """What is wrong with one listener, if anything is. Blocks."""
    door = listens.door
    port = listens.any_port if chosen else door.port
    try:
        if chosen:
            socket.create_connection((door.host, port), within_s).close()
        else:
            greet(door, caller, deadline_s=within_s)
    except Refused:
        why = "another agent of the job answers there"
    except EverstepError as error:
        why = str(error)
    except OSError as error:
        why = f"no connection ({error.strerror or error})"
    else:
        return None
    return nodes.Closed(node=node, host=door.host, port=port, chosen=chosen, why=why)


def _network() -> str:
    """Of this process: the host's, or that of a container with a network of its own."""
    return f"{clocks.boot_id()}/{os.stat('/proc/self/ns/net').st_ino}"
