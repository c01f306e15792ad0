"""Whether nodes reach each other: a node lets others try whether they reach it, and tries them.

Theory of operation. Two listeners stand for all. The bulk plane's lies in the range of ports that
is everstep's own; who tries it shows that it has the job's key, and hears that it is this node's
that answers, and not another's at the same address. gloo and nccl can't be told a range: they take
ports that the system chooses; so the second listener does as they do. What connects there is let go
again at once.

It does not know which nodes must reach each other, before a job begins (agent/preflight.py) or when
a regroup has failed (core/severed.py). Loop thread only, but for
the tries themselves, each on a thread; none lasts longer than it was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from everstep.agent import clocks
from everstep.agent.shipping import Shipping
from everstep.errors import EverstepError
from everstep.wire import nodes
from everstep.wire.bulk import Caller, Refused, greet
from everstep.wire.plumbing import address_text
from everstep.wire.ports import ANY, chosen_by_the_system, listen

_BACKLOG: Final = 64
_ITS_OWN: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL}
)
"""What says that one could not try, and nothing about the other."""


class Reach:
    """Of the node that `shipping` is of. `listens`: what others need to try it. `tell`: the answers
    to `probe`. Raises UserError when it can't listen."""

    def __init__(self, shipping: Shipping, tell: Callable[[nodes.Probed], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._caller = shipping.caller
        self._tell = tell
        self._tasks: set[asyncio.Task[None]] = set()
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
        task = self._loop.create_task(self._answer(order))
        self._tasks.add(task)
        task.add_done_callback(self._answered)

    def close(self) -> None:
        """Listen no longer; nothing is told after. May be called twice."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
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
    ]
    if not tries:
        return nodes.Probed(closed=(), turn=order.turn)
    loop = asyncio.get_running_loop()
    threads = ThreadPoolExecutor(len(tries), thread_name_prefix="everstep-probe")
    try:
        found = await asyncio.gather(
            *(loop.run_in_executor(threads, _try, *each, caller, order.within_s) for each in tries)
        )
    finally:
        threads.shutdown(wait=False)  # each ends by its own deadline
    closed = tuple(each for each in found if each is not None)
    return nodes.Probed(closed=closed, turn=order.turn)


def _try(
    node: int, listens: nodes.Listens, chosen: bool, caller: Caller, within_s: float
) -> nodes.Closed | None:
    """What is wrong with one listener, if anything is. Blocks."""
    door, cause = listens.door, None
    port = listens.any_port if chosen else door.port
    try:
        if chosen:
            socket.create_connection((door.host, port), within_s).close()
        else:
            greet(door, caller, deadline_s=within_s)
    except Refused:
        why = "another agent of the job answers there"
    except EverstepError as error:
        why, cause = str(error), error.__cause__
    except OSError as error:
        why, cause = f"no connection ({error.strerror or error})", error
    else:
        return None
    own = isinstance(cause, OSError) and cause.errno in _ITS_OWN
    return nodes.Closed(node=node, host=door.host, port=port, chosen=chosen, why=why, own=own)


def targets(
    pairs: Iterable[tuple[int, int]], listens: Mapping[int, nodes.Listens | None]
) -> dict[int, dict[int, nodes.Listens]]:
    """By node, the others that it is to try. `pairs`: who should try whom; left out are those that
    can't, and those between which lies no network. Pure."""
    found: dict[int, dict[int, nodes.Listens]] = {}
    for asker, target in pairs:
        one, other = listens.get(asker), listens.get(target)
        if one is None or other is None:
            continue
        if (one.network, one.door.host) != (other.network, other.door.host):
            found.setdefault(asker, {})[target] = other
    return found


def unreached(source: str, closed: Sequence[nodes.Closed]) -> dict[int, str]:
    """By node that could not be reached from the address `source`, the first way that was tried, in
    words. What says nothing of the other is left out. Pure."""
    found: dict[int, str] = {}
    for each in closed:
        if not each.own:
            where = address_text(each.host, each.port)
            found.setdefault(each.node, f"{source} -> {where}: {each.why}")
    return found


def _network() -> str:
    """Of this process: the host's, or that of a container with a network of its own."""
    return f"{clocks.boot_id()}/{os.stat('/proc/self/ns/net').st_ino}"
