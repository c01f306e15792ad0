"""The laboratory's switch does what its rules say: a fault that does not happen proves nothing.

Sockets are made in the hosts' namespaces by threads that enter them, so no process is needed. A
packet that was dropped is known by a later one that comes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest
from tests.integration.netlab import Lab, Rules, apart

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.apt("ip", "unshare")]
HOSTS = ("ada", "bob", "cyd")
PORT = 5000
LAST = b"last"
PATIENCE_S = 20.0
CLONE_NEWNET = 0x40000000
T = TypeVar("T")


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab"), HOSTS) as made:
        yield made


def on(lab: Lab, host: str, make: Callable[[], T]) -> T:
    """What `make` makes on a host."""

    def enter() -> T:
        libc = ctypes.CDLL(None, use_errno=True)
        with lab.namespace(host).open("rb") as space:
            if libc.setns(space.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns failed")
        return make()

    with ThreadPoolExecutor(max_workers=1) as thread:  # it ends where it has entered
        return thread.submit(enter).result()


def udp() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def listener(address: str, port: int) -> socket.socket:
    return socket.create_server((address, port))


@contextlib.contextmanager
def mailboxes(lab: Lab) -> Iterator[dict[str, socket.socket]]:
    """A UDP socket on each host."""
    with contextlib.ExitStack() as stack:
        boxes = {host: stack.enter_context(on(lab, host, udp)) for host in HOSTS}
        for host, box in boxes.items():
            box.bind((lab.address(host), PORT))
            box.settimeout(PATIENCE_S)
        yield boxes


def delivered(lab: Lab, boxes: dict[str, socket.socket], rules: Rules) -> set[tuple[str, str]]:
    """Between whom a packet passes under `rules`."""
    pairs = [(one, other) for one in HOSTS for other in HOSTS if one != other]
    lab.rules(rules)
    for one, other in pairs:
        boxes[one].sendto(one.encode(), (lab.address(other), PORT))
    lab.rules()
    found = set()
    for host in HOSTS:
        boxes["ada" if host != "ada" else "bob"].sendto(LAST, (lab.address(host), PORT))
        while (said := boxes[host].recv(64)) != LAST:
            found.add((said.decode(), host))
    return found


def test_what_is_dropped_is_dropped_and_nothing_else(lab: Lab) -> None:
    with mailboxes(lab) as boxes:
        every = delivered(lab, boxes, Rules())
        assert len(every) == 6
        assert delivered(lab, boxes, Rules(dropped=[(0, 1)])) == every - {("ada", "bob")}
        of_ada = {("ada", "cyd"), ("cyd", "ada")}
        assert delivered(lab, boxes, apart(lab.numbers("ada", "cyd"), [1])) == of_ada


def test_a_host_sees_that_its_cable_is_out(lab: Lab) -> None:
    """The kernel tells it when it gets to it."""
    for rules, seen in ((Rules(unplugged=[1]), "NO-CARRIER"), (Rules(), "LOWER_UP")):
        lab.rules(rules)
        end_s = time.monotonic() + PATIENCE_S
        while seen not in lab.link("bob"):
            assert time.monotonic() < end_s
            time.sleep(0.02)


def test_what_is_lost_depends_on_the_seed_alone(lab: Lab) -> None:
    def arrived(seed: int) -> list[bytes]:
        lab.rules(Rules(loss=0.25, seed=seed))
        for number in range(40):
            boxes["ada"].sendto(b"%d" % number, (lab.address("bob"), PORT))
        lab.rules()
        boxes["ada"].sendto(LAST, (lab.address("bob"), PORT))
        return list(iter(lambda: boxes["bob"].recv(64), LAST))

    with mailboxes(lab) as boxes:
        first = arrived(1)
        assert 15 < len(first) < 40
        assert arrived(1) == first
        assert arrived(2) != first


def test_what_is_delayed_comes_later_and_in_order(lab: Lab) -> None:
    with mailboxes(lab) as boxes:
        lab.rules(Rules(delay_s=0.05))
        began_s = time.monotonic()
        for number in range(5):
            boxes["ada"].sendto(b"%d" % number, (lab.address("bob"), PORT))
        assert [boxes["bob"].recv(64) for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
        assert time.monotonic() - began_s >= 0.05


def test_a_closed_port_is_closed_to_new_connections_from_there(lab: Lab) -> None:
    def connection(host: str, port: int, timeout_s: float) -> socket.socket:
        return on(
            lab, host, lambda: socket.create_connection((lab.address("bob"), port), timeout_s)
        )

    with contextlib.ExitStack() as stack:
        for port in (PORT, PORT + 1):
            stack.enter_context(on(lab, "bob", partial(listener, lab.address("bob"), port)))
        before = stack.enter_context(connection("ada", PORT, PATIENCE_S))
        lab.rules(Rules(closed=[(0, 1, PORT, PORT)]))
        with pytest.raises(TimeoutError):
            connection("ada", PORT, 0.2)
        stack.enter_context(connection("ada", PORT + 1, PATIENCE_S))
        stack.enter_context(connection("cyd", PORT, PATIENCE_S))
        before.sendall(b"still open")


def test_a_host_has_its_own_name_and_knows_what_it_is_told(lab: Lab) -> None:
    lab.know("ada", {"ada": "127.0.1.1"})
    names = "cat /proc/sys/kernel/hostname; getent hosts ada bob; read line; getent hosts bob"
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as told:
        process = lab.start("ada", ["sh", "-c", names], os.environ, stdin=reader)
        os.close(reader)
        end_s = time.monotonic() + PATIENCE_S
        while "127.0.1.1" not in lab.log("ada").read_text():
            assert time.monotonic() < end_s
            time.sleep(0.02)
        lab.know("ada", {"ada": "127.0.1.1", "bob": lab.address("bob")})
        told.write("go on\n")
    process.wait(PATIENCE_S)
    words = lab.log("ada").read_text().split()
    assert words == ["ada", "127.0.1.1", "ada", lab.address("bob"), "bob"]
