"""What flows over an open connection of the bulk plane: requests one way, bytes the other.

Theory of operation. The receiver asks for ranges, sixteen bytes a request, and keeps `WINDOW` of
them on the way, so that the sender never waits for it; the sender answers each with exactly these
bytes, straight from the memory where they lie, and they are received straight into the memory where
they shall lie. A block whose digest is right has arrived and is never asked for again; one that was
cut or is wrong goes back to those that are missing, and the next stream that is free takes it. So
streams share the work as each is able, whichever source they lead to, and a cut costs the blocks
that were on the way.

Deadlines are the kernel's, set once on the socket: a call that moves nothing for `stall_s` ends.

What it doesn't know: who connected, what the bytes mean, and where the digests come from.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import xxhash

from everstep.errors import EverstepError, TransientError
from everstep.wire.bulk_door import Cut, Stranger
from everstep.wire.bulk_throttle import Throttle

WINDOW = 2
"""Requests of one stream that are on the way: one that is being answered, and the next."""
MAX_REQUEST_BYTES = 1 << 30
"""Largest range to ask for, and largest block."""
_WRONG_TIMES = 3  # a block whose digest was wrong so often is wrong at its source

_REQUEST = struct.Struct("<QQ")
_END = _REQUEST.pack(0, 0)
_TIMEVAL = struct.Struct("@ll")


class Corrupt(EverstepError):
    """A source's bytes are not what its manifest says. Another copy must be taken."""


class Source:
    """Bytes to be sent. `view`: stays valid and unchanged until the transfer has ended."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.nbytes = view.nbytes


class Sink:
    """Where bytes arrive: which blocks have, and which are missing. Any thread.

    `view`: writable; `digests`: XXH3 (128 bits, hexadecimal) of each `block_bytes` of it. `over` is
    set when all have arrived, or the transfer has failed. Raises ValueError when they do not fit
    one another."""

    def __init__(self, view: memoryview, block_bytes: int, digests: Sequence[str]) -> None:
        if not 0 < block_bytes <= MAX_REQUEST_BYTES:
            raise ValueError(f"blocks of {block_bytes} bytes; at most {MAX_REQUEST_BYTES}")
        if len(digests) != -(-view.nbytes // block_bytes):
            raise ValueError(f"{len(digests)} digests for {view.nbytes} bytes")
        self.view = view
        self.nbytes = view.nbytes
        self.over = threading.Event()
        self._block_bytes = block_bytes
        self._digests = digests
        self._changed = threading.Condition()
        self._missing = deque(range(len(digests)))
        self._left = len(digests)
        self._wrong: dict[int, int] = {}
        self.failure: EverstepError | None = None
        self._sockets: set[socket.socket] = set()
        if not digests:
            self.over.set()

    def keep(self) -> int:
        """Before a transfer: look for blocks that are there already, from one that was cut, and
        return their number. Blocks for a digest of all."""
        with self._changed:
            missing = [block for block in self._missing if not self._is_right(block)]
            found = len(self._missing) - len(missing)
            self._missing = deque(missing)
            self._left -= found
            if not self._left:
                self.over.set()
        return found

    @property
    def arrived_bytes(self) -> int:
        """Of the blocks that have arrived, and are right; the last one counts as a whole."""
        return (len(self._digests) - self._left) * self._block_bytes

    @property
    def left(self) -> int:
        """How many blocks have not arrived."""
        return self._left

    def span(self, block: int) -> tuple[int, int]:
        """First byte of a block, and the one behind its last."""
        start = block * self._block_bytes
        return start, min(start + self._block_bytes, self.nbytes)

    def take(self, wait: bool, deadline_s: float) -> int | None:
        """A block to ask for. None when none is left to ask for; with `wait` only when all have
        arrived: a block that is on its way elsewhere may come back. Raises what the transfer failed
        of, and Cut at the deadline."""
        with self._changed:
            while self.failure is None:
                if self._missing:
                    return self._missing.popleft()
                if not self._left or not wait:
                    return None
                if not self._changed.wait(deadline_s - time.monotonic()):
                    raise Cut(f"{self._left} blocks did not arrive in time")
            raise self.failure

    def arrived(self, block: int, peer: str) -> None:
        """All bytes of `block` are here: accept them if their digest is right. Raises Corrupt when
        it never is."""
        right = self._is_right(block)
        with self._changed:
            if right:
                self._left -= 1
                if not self._left:
                    self.over.set()
            else:
                self._wrong[block] = self._wrong.get(block, 0) + 1
                self._missing.append(block)
            self._changed.notify_all()
        if not right and self._wrong[block] >= _WRONG_TIMES:
            start, end = self.span(block)
            self.fail(
                Corrupt(
                    f"bytes {start} to {end} from {peer} have a wrong digest, {_WRONG_TIMES} times "
                    "in a row: the copy there is corrupt; take another one"
                )
            )

    def give_back(self, blocks: Sequence[int]) -> None:
        """Blocks that were asked for and did not come."""
        with self._changed:
            self._missing.extendleft(reversed(blocks))
            self._changed.notify_all()

    def fail(self, error: EverstepError) -> None:
        """End the transfer, whoever is in it: the first error stays. A sink that is full stays
        so."""
        with self._changed:
            if not self._left or self.failure is not None:
                return
            self.failure = error
            self.over.set()
            self._changed.notify_all()
            for sock in self._sockets:
                _shut(sock)

    def check(self) -> None:
        """Raises what the transfer failed of, if it did, and TransientError while blocks are
        missing."""
        if self.failure is not None:
            raise self.failure
        if self._left:
            raise TransientError(f"{self._left} of {len(self._digests)} blocks have not arrived")

    def attach(self, sock: socket.socket) -> None:
        """`fail` is to shut this socket too."""
        with self._changed:
            self._sockets.add(sock)
            if self.failure is not None:
                _shut(sock)

    def detach(self, sock: socket.socket) -> None:
        """Before the socket is closed."""
        with self._changed:
            self._sockets.discard(sock)

    def _is_right(self, block: int) -> bool:
        start, end = self.span(block)
        with self.view[start:end] as part:
            return xxhash.xxh3_128_hexdigest(part) == self._digests[block]


def prepare(sock: socket.socket, stall_s: float) -> None:
    """Give the socket the kernel's deadlines. From here on it blocks for at most `stall_s` a
    call."""
    sock.settimeout(None)
    seconds = int(stall_s)
    deadline = _TIMEVAL.pack(seconds, int((stall_s - seconds) * 1e6) or (seconds == 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, deadline)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def receive_all(
    sock: socket.socket, sink: Sink, throttle: Throttle, deadline_s: float, peer: str
) -> None:
    """Fetch blocks over `sock`, beside other streams of the same sink, until all have arrived.

    `deadline_s`: on the monotonic clock. Blocks. Raises Cut, Corrupt, and what `Sink.fail` was
    given."""
    asked: deque[int] = deque()
    sink.attach(sock)
    try:
        while True:
            while len(asked) < WINDOW:
                block = sink.take(wait=not asked, deadline_s=deadline_s)
                if block is None:
                    break
                asked.append(block)
                start, end = sink.span(block)
                _send(sock, memoryview(_REQUEST.pack(start, end - start)), deadline_s)
            if not asked:
                _send(sock, memoryview(_END), deadline_s)
                return
            for first, last in _pieces(*sink.span(asked[0]), throttle):
                _book(throttle, last - first, sink.over, deadline_s)
                with sink.view[first:last] as part:
                    if not _receive(sock, part, deadline_s):
                        raise Cut("the sender closed the connection")
            sink.arrived(asked.popleft(), peer)
    finally:
        sink.detach(sock)
        sink.give_back(asked)


def send_all(
    sock: socket.socket,
    source: Source,
    throttle: Throttle,
    deadline_s: float,
    stop: threading.Event,
) -> None:
    """Answer requests over `sock` until the receiver says that it has all.

    `deadline_s`: on the monotonic clock; `stop` ends a wait for the throttle. Blocks. Raises Cut,
    and Stranger for a request that no receiver of ours would send."""
    request = bytearray(_REQUEST.size)
    while True:
        with memoryview(request) as view:
            if not _receive(sock, view, deadline_s, patient=True):
                raise Cut("the receiver closed the connection")
        start, nbytes = _REQUEST.unpack(request)
        if not nbytes:
            return
        if nbytes > MAX_REQUEST_BYTES or start + nbytes > source.nbytes:
            raise Stranger(
                f"it asked for {nbytes} bytes at {start} of a snapshot of {source.nbytes}"
            )
        for first, last in _pieces(start, start + nbytes, throttle):
            _book(throttle, last - first, stop, deadline_s)
            with source.view[first:last] as part:
                _send(sock, part, deadline_s)


def _pieces(start: int, end: int, throttle: Throttle) -> Iterator[tuple[int, int]]:
    """The range in pieces that the throttle takes at a time; whole where there is no limit."""
    piece = throttle.piece_bytes or max(end - start, 1)
    for first in range(start, end, piece):
        yield first, min(first + piece, end)


def _book(throttle: Throttle, nbytes: int, stop: threading.Event, deadline_s: float) -> None:
    """Wait until `nbytes` may go, or for the end of the transfer."""
    delay_s = min(throttle.book(nbytes), max(deadline_s - time.monotonic(), 0.0))
    if stop.is_set() or (delay_s and stop.wait(delay_s)):
        raise Cut("the transfer was ended")


def _send(sock: socket.socket, data: memoryview, deadline_s: float) -> None:
    sent = 0
    while sent < data.nbytes:
        _check(deadline_s)
        try:
            with data[sent:] as rest:
                sent += sock.send(rest)
        except BlockingIOError as error:
            raise Cut("the receiver took nothing for too long") from error
        except OSError as error:
            raise Cut(str(error)) from error


def _receive(
    sock: socket.socket, data: memoryview, deadline_s: float, *, patient: bool = False
) -> bool:
    """Fill `data`; False when the stream ended before. `patient`: it may begin late, until the
    deadline."""
    have = 0
    while have < data.nbytes:
        _check(deadline_s)
        try:
            with data[have:] as rest:
                count = sock.recv_into(rest, rest.nbytes, socket.MSG_WAITALL)
        except BlockingIOError as error:
            if patient and not have:
                continue
            raise Cut("the sender sent nothing for too long") from error
        except OSError as error:
            raise Cut(str(error)) from error
        if not count:
            return False
        have += count
    return True


def _check(deadline_s: float) -> None:
    if time.monotonic() >= deadline_s:
        raise Cut("the time for the transfer is over")


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is not connected any more: nobody waits in it
