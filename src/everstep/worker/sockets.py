"""Finding and shutting the TCP sockets of one communicator.

gloo has no call that wakes a blocked operation; shutting the connection's socket does, within
milliseconds. A socket is found by its addresses: it belongs to a communicator if its own end is the
communicator's listening address (accepted there) or its far end is a listening address of one of
its peers (connected from here). Descriptor numbers are reused by other threads at any time, so each
is duplicated first and looked at second: what is shut is what was looked at. The listening socket
itself is never touched: gloo ends the process when it is shut.

Does not know: generations, gloo's objects.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

Address = tuple[str, int]


@contextmanager
def _duplicate(number: int) -> Iterator[socket.socket | None]:
    """A socket object on a copy of descriptor `number`; None where it is no TCP socket, or gone."""
    try:
        copy = os.dup(number)
    except OSError:
        yield None
        return
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # not a socket; the copy is still ours to close
        os.close(copy)
        yield None
        return
    try:
        inet = sock.family in (socket.AF_INET, socket.AF_INET6)
        yield sock if inet and sock.type == socket.SOCK_STREAM else None
    finally:
        sock.close()


def _descriptors() -> list[int]:
    numbers = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since the listing
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                numbers.append(int(name))
    return numbers


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def listening_addresses() -> set[Address]:
    """Addresses on which this process listens (TCP)."""
    found = set()
    for number in _descriptors():
        with _duplicate(number) as sock:
            if sock is not None and _is_listening(sock):
                found.add(sock.getsockname()[:2])
    return found


def _belongs(sock: socket.socket, own: Address, peers: frozenset[Address]) -> bool:
    try:
        if _is_listening(sock):
            return False
        return sock.getsockname()[:2] == own or sock.getpeername()[:2] in peers
    except OSError:  # not connected
        return False


def shut(own: Address, peers: frozenset[Address]) -> int:
    """Shut every connection of the communicator that listens at `own` and whose peers listen at
    `peers`.

    Returns how many were shut. Does not block; any thread. Safe against descriptors that are closed
    or reused meanwhile."""
    count = 0
    for number in _descriptors():
        with _duplicate(number) as sock:
            if sock is not None and _belongs(sock, own, peers):
                with suppress(OSError):  # the far end was faster
                    sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def connected(own: Address, peers: frozenset[Address]) -> int:
    """How many connections of the communicator are still open in this process."""
    total = 0
    for number in _descriptors():
        with _duplicate(number) as sock:
            total += sock is not None and _belongs(sock, own, peers)
    return total
