"""Listening in a range of ports: the first free one, who holds the others, and what is no range."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import UserError
from everstep.wire import ports

HOST = "127.0.0.1"
PORTS = st.integers(1, 65535)


@pytest.fixture
def taken() -> Iterator[range]:
    """Three ports in a row, the first two of which this process listens on."""
    for first in range(20000, 29000, 3):
        with ExitStack() as held:
            try:
                for port in range(first, first + 3):
                    held.enter_context(socket.create_server((HOST, port)))
            except OSError:
                continue
            held.pop_all().close()
            with socket.create_server((HOST, first)), socket.create_server((HOST, first + 1)):
                yield range(first, first + 3)
            return
    pytest.fail("no three ports in a row are free")


@given(PORTS, PORTS)
def test_a_range_is_read_as_it_is_written(one: int, other: int) -> None:
    first, last = sorted((one, other))
    found = ports.ports_of(f"{first}-{last}")
    assert (found[0], found[-1], len(found)) == (first, last, last - first + 1)
    assert ports.ports_of(ports.in_words(found)) == found


@given(st.text("0123456789-, ", max_size=12))
def test_any_other_text_is_refused(text: str) -> None:
    try:
        found = ports.ports_of(text)
    except ValueError:
        return
    assert found == ports.ANY if not text else 0 < found[0] <= found[-1] < 65536


def test_the_first_free_port_is_taken(taken: range) -> None:
    with ports.listen(HOST, taken, 8) as sock:
        assert sock.getsockname()[1] == taken[2]


def test_a_port_that_is_left_to_another_is_not_taken() -> None:
    assert list(ports.without(range(5, 9), 7)) == [5, 6, 8]
    assert ports.without(range(5, 9), 9) == range(5, 9)
    with pytest.raises(UserError, match="has only the coordinator's"):
        ports.listen(HOST, ports.without(range(5, 6), 5), 8)


def test_a_full_range_is_refused_with_who_holds_it(taken: range) -> None:
    with pytest.raises(UserError) as caught:
        ports.listen(HOST, taken[:2], 8)
    name = f"python (process {os.getpid()})"
    assert f"no port of {ports.in_words(taken[:2])} is free on {HOST}" in str(caught.value)
    assert f"{taken[0]} is held by " in str(caught.value)
    assert str(caught.value).count(name[name.index("(") :]) == 2
    assert "--ports" in str(caught.value)


def test_another_process_is_named_and_a_connection_is_not_a_holder() -> None:
    code = "import socket,sys; s=socket.create_server(('::1',0),family=socket.AF_INET6); "
    code += "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        with socket.create_connection(("::1", port)) as sock:
            own = sock.getsockname()[1]
            found = ports.holders([port, own])
        assert found.keys() == {port}
        assert f"(process {child.pid})" in found[port]
        child.communicate("")


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(UserError, match=r"\[2001:db8::1\]:0.*numeric address of this host"):
        ports.listen("2001:db8::1", ports.ANY, 8)


def test_the_system_chooses_from_a_range() -> None:
    first, last = ports.chosen_by_the_system()
    with ports.listen(HOST, ports.ANY, 1) as sock:
        assert first <= sock.getsockname()[1] <= last
