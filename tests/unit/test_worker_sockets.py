"""Only the communicator's own connections are found and shut; all other sockets are left."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from everstep.worker import sockets

HOST = "127.0.0.1"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _listener(stack: ExitStack, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    host = HOST if family == socket.AF_INET else "::1"
    sock = stack.enter_context(socket.socket(family))
    sock.bind((host, 0))
    sock.listen()
    return sock


def _connect(stack: ExitStack, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """(connecting end, accepted end)."""
    ours = stack.enter_context(socket.socket(listener.family))
    ours.connect(listener.getsockname())
    theirs, _ = listener.accept()
    stack.enter_context(theirs)
    for sock in (ours, theirs):
        sock.settimeout(5)
    return ours, theirs


def _address(sock: socket.socket) -> sockets.Address:
    host, port = sock.getsockname()[:2]
    return host, port


def _alive(one: socket.socket, other: socket.socket) -> bool:
    try:
        one.sendall(b"x")
        return other.recv(1) == b"x"
    except OSError:
        return False


def test_listening_addresses_come_and_go(stack: ExitStack) -> None:
    before = sockets.listening_addresses()
    listener = _listener(stack)
    assert sockets.listening_addresses() - before == {_address(listener)}
    listener.close()
    assert sockets.listening_addresses() == before


def test_an_accepted_connection_is_shut_by_our_own_address(stack: ExitStack) -> None:
    listener = _listener(stack)
    _, accepted = _connect(stack, listener)
    # Both ends are in this process; only the accepted one's own address is the listening one.
    assert sockets.shut(_address(listener), frozenset()) == 1
    assert accepted.recv(1) == b""


def test_a_connection_to_a_peer_is_shut_by_the_peers_address(stack: ExitStack) -> None:
    own, peer = _listener(stack), _listener(stack)
    ours, _ = _connect(stack, peer)
    assert sockets.shut(_address(own), frozenset({_address(peer)})) == 1
    assert ours.recv(1) == b""


def test_a_thread_that_waits_in_a_shut_connection_is_woken(stack: ExitStack) -> None:
    import threading

    listener = _listener(stack)
    _, accepted = _connect(stack, listener)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(accepted.recv(1)))
    thread.start()
    sockets.shut(_address(listener), frozenset())
    thread.join(5)
    assert got == [b""]


def test_everybody_elses_sockets_are_left_alone(stack: ExitStack) -> None:
    own, peer, stranger = _listener(stack), _listener(stack), _listener(stack)
    others = [_connect(stack, stranger)]
    pair = socket.socketpair()
    udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    udp.bind((HOST, 0))
    unconnected = stack.enter_context(socket.socket())
    for sock in pair:
        stack.enter_context(sock)
    others.append(pair)
    read, write = os.pipe()
    stack.callback(os.close, read)
    stack.callback(os.close, write)
    assert sockets.shut(_address(own), frozenset({_address(peer)})) == 0
    assert all(_alive(*two) and _alive(*reversed(two)) for two in others)
    assert udp.getsockname()
    assert unconnected.fileno() >= 0
    _connect(stack, own)  # it still listens
    _connect(stack, peer)


def test_a_udp_socket_on_the_same_port_is_no_connection(stack: ExitStack) -> None:
    listener = _listener(stack)
    udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    udp.bind(_address(listener))
    assert sockets.shut(_address(listener), frozenset()) == 0
    assert sockets.connected(_address(listener), frozenset()) == 0


def test_the_count_is_of_connections(stack: ExitStack) -> None:
    own, peer = _listener(stack), _listener(stack)
    at, peers = _address(own), frozenset({_address(peer)})
    assert sockets.connected(at, peers) == 0
    _, accepted = _connect(stack, own)
    ours, _ = _connect(stack, peer)
    assert sockets.connected(at, peers) == 2
    accepted.close()
    ours.close()
    assert sockets.connected(at, peers) == 0


def test_shutting_twice_and_after_the_far_end_left_is_harmless(stack: ExitStack) -> None:
    listener = _listener(stack)
    ours, _ = _connect(stack, listener)
    ours.close()
    for _ in range(2):
        sockets.shut(_address(listener), frozenset())
    _connect(stack, listener)


def test_ipv6_is_found_too(stack: ExitStack) -> None:
    try:
        listener = _listener(stack, socket.AF_INET6)
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    _connect(stack, listener)
    assert _address(listener) in sockets.listening_addresses()
    assert sockets.shut(_address(listener), frozenset()) == 1


def test_a_descriptor_that_is_gone_or_reused_is_looked_at_again(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the listing and the look the numbers may come to mean something else."""
    own, stranger = _listener(stack), _listener(stack)
    ours, theirs = _connect(stack, stranger)
    read, write = os.pipe()
    os.close(write)
    stack.callback(os.close, read)
    monkeypatch.setattr(sockets, "_descriptors", lambda: [ours.fileno(), read, write, 10_000])
    assert sockets.shut(_address(own), frozenset()) == 0
    assert sockets.connected(_address(own), frozenset()) == 0
    assert _alive(ours, theirs)


def test_nothing_is_left_open(stack: ExitStack) -> None:
    listener = _listener(stack)
    _connect(stack, listener)
    before = os.listdir("/proc/self/fd")
    sockets.listening_addresses()
    sockets.connected(_address(listener), frozenset())
    sockets.shut(_address(listener), frozenset())
    assert len(os.listdir("/proc/self/fd")) == len(before)
