"""Who comes to the hub's socket: its connections by descriptor, and the refusal of strangers.

Theory of operation. ZeroMQ asks by ZAP (RFC 27) whether the key of a client that has proved to hold
it may pass, and tells the address. All else that a stranger may do (no handshake, garbage, another
protocol, a replayed session, a frame that is too large) ends in the monitor, where a connection
opens and closes without having become a peer in between. Its address is asked of its descriptor
when it opens, and only then ZeroMQ is let read from it. Who closes at once is gone before that.

Refusals are told at most so many a minute.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils import z85

from everstep.wire.frames import Sparingly
from everstep.wire.plumbing import UNKNOWN, Monitor, Watched, address_text, begin

_ENDPOINT: Final = "inproc://zeromq.zap.01"
_MAX_DENIED: Final = 1000
_FAILURES: Final = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it broke off the handshake, or began none",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "its handshake is not one with this job's secret",
}


class Gate:
    """Lets clients with `public_key`, as ZeroMQ writes it, pass to `router`, which is not bound
    yet.

    `on_closed(fd)`: a connection closed; answers whether it was a peer's. `on_refused(address,
    why)`: it was not. Loop thread only.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: zmq.Context[zmq.Socket[bytes]],
        router: zmq.Socket[bytes],
        *,
        public_key: bytes,
        refusals_per_minute: int,
        on_closed: Callable[[int], bool],
        on_refused: Callable[[str, str], None],
    ) -> None:
        self.addresses: dict[int, str] = {}
        """Of the open connections, by descriptor. Up to date after `drain`."""
        self._loop = loop
        self._key = z85.decode(public_key)
        self._on_closed = on_closed
        self._on_refused = on_refused
        self._denied: Counter[str] = Counter()  # open connections that ZAP has refused, by host
        self._failure = ""
        self._open = True
        self._sparingly = Sparingly(refusals_per_minute)
        zap = context.socket(zmq.REP)
        zap.bind(_ENDPOINT)
        router.setsockopt(zmq.ZAP_DOMAIN, b"everstep")
        self._zap = Watched(loop, zap, self._authenticate)
        self._monitor = Monitor(loop, context, router, self._events)

    def drain(self) -> None:
        """Take note of everything that has happened so far."""
        self._monitor.drain()

    def refuse(self, address: str, why: str) -> None:
        """Tell of a refusal, if there were not too many."""
        held_back = self._sparingly.admit(self._loop.time())
        if held_back is not None:
            more = f" ({held_back} more were refused and not told)" if held_back else ""
            self._loop.call_soon(self._tell, address, f"{why}{more}")

    def close(self) -> None:
        """Close the sockets; nothing is told after. Before the router is closed."""
        self._open = False
        self._monitor.close()
        self._zap.close()

    def _tell(self, address: str, why: str) -> None:
        if self._open:
            self._on_refused(address, why)

    def _events(self, events: list[tuple[int, int]]) -> None:
        for index, (event, value) in enumerate(events):
            # A number whose connection has closed may be that of the next one already.
            closed = event == zmq.EVENT_ACCEPTED and (
                (zmq.EVENT_DISCONNECTED, value) in events[index + 1 :]
            )
            self._event(event, value, closed)

    def _event(self, event: int, value: int, closed: bool) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self.addresses[value] = UNKNOWN if closed else begin(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._disconnected(value)
        elif event in _FAILURES:
            self._failure = _FAILURES[zmq.Event(event)]  # whose, the next event tells

    def _disconnected(self, fd: int) -> None:
        address = self.addresses.pop(fd, UNKNOWN)
        failure, self._failure = self._failure, ""
        if self._on_closed(fd):
            return
        host = address.rpartition(":")[0]
        if self._denied[host] > 0:
            self._denied[host] -= 1  # told by `_authenticate`
        else:
            self.refuse(address, failure or "it sent nothing that begins a connection")

    def _authenticate(self) -> bool:
        """Answer one question of ZeroMQ's: may this key pass?"""
        try:
            request = self._zap.sock.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        version, number, _, host, _, mechanism, *credentials = request
        passes = mechanism == b"CURVE" and hmac.compare_digest(credentials[0], self._key)
        status = (b"200", b"") if passes else (b"400", b"this key is not the job's")
        self._zap.sock.send_multipart([version, number, *status, b"", b""])
        if not passes:
            text = host.decode("ascii", "replace").removeprefix("::ffff:")
            text = address_text(text, 0).rpartition(":")[0]
            if len(self._denied) < _MAX_DENIED:
                self._denied[text] += 1
            self.refuse(text, "its key is not this job's")
        return True
