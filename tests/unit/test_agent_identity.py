"""A host's addresses: of a name with several, on the way to another, of an interface."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

from everstep.agent import identity
from everstep.errors import UserError

Names = Callable[[dict[str, list[str]]], None]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Have names resolve to these addresses, in this order."""
    real = socket.getaddrinfo

    def known(addresses: dict[str, list[str]]) -> None:
        def resolve(host: str, port: int | None, **more: Any) -> list[Any]:
            return [entry for each in addresses[host] for entry in real(each, port, **more)]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)

    return known


def test_of_several_addresses_this_host_s_own_is_taken(names: Names) -> None:
    names({"both": ["192.0.2.7", "2001:db8::7", "::1"], "other": ["2001:db8::7", "192.0.2.7"]})
    assert identity.numeric("both") == "::1"
    assert identity.numeric("other") == "2001:db8::7"
    assert identity.can_listen("::1", 0)
    assert not identity.can_listen("2001:db8::7", 0)


def test_a_name_that_leads_to_loopback_is_no_place_for_others_to_meet(names: Names) -> None:
    names(
        {"node0": ["127.0.1.1"], "localhost": ["::1"], "::1": ["::1"], "127.0.0.1": ["127.0.0.1"]}
    )
    assert identity.numeric("node0") == "127.0.1.1"
    with pytest.raises(UserError, match=r"node0 is 127\.0\.1\.1 on this host \(see /etc/hosts\)"):
        identity.numeric("node0", alone=False)
    for meant in ("localhost", "::1", "127.0.0.1"):
        assert identity.numeric(meant, alone=False)


def test_the_address_towards_another_is_of_a_family_that_this_host_has(names: Names) -> None:
    # Nothing is sent; a broadcast is no way.
    names({"node0": ["255.255.255.255", "::1"], "four": ["127.0.0.1"]})
    assert identity.address_towards("node0", 29400) == "::1"
    assert identity.address_towards("four", 29400) == "127.0.0.1"


def test_a_name_that_is_unknown_is_told() -> None:
    with pytest.raises(UserError, match="has no address here"):
        identity.numeric("no-such-host.invalid")
    with pytest.raises(UserError, match="has no way to the coordinator at no-such-host"):
        identity.address_towards("no-such-host.invalid", 29400)


def test_an_interface_has_an_address_or_is_refused() -> None:
    assert identity.address_of("lo") == "127.0.0.1"
    with pytest.raises(UserError, match="here are lo"):
        identity.address_of("nothing0")
