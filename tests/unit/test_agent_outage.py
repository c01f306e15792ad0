"""A network that is cut on purpose: where that is refused, and by whom."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest
from tests.unit.netcases import ANY_PORT, LOCAL, SECRET, News, on_a_loop
from tests.unit.test_agent_tenure import SETTINGS, settings

from everstep.agent import outage
from everstep.agent.agent import _Agent
from everstep.errors import EverstepError, UserError
from everstep.wire import nodes
from everstep.wire.network import Hub

OURS, ANOTHER = (4, 1), (4, 2)


class Machine:
    """What a host has, in the eyes of `outage`: by default all that is needed."""

    def __init__(self) -> None:
        self.networks = {"self": OURS, "1": ANOTHER, "7": OURS, "5": OURS}
        self.ways = {"10.0.0.1": "eth0", "10.0.0.2": "lo"}
        self.closed = ""
        self.done: list[tuple[str, ...]] = []

    def network_of(self, pid: str) -> tuple[int, int]:
        if pid not in self.networks:
            raise PermissionError(13, "Permission denied")
        return self.networks[pid]

    def ip(self, *arguments: str) -> bytes:
        self.done.append(arguments)
        if arguments[-1] == self.closed:
            raise EverstepError(f"`ip {' '.join(arguments)}` failed: no")
        way = self.ways.get(arguments[-1], "")
        return json.dumps([{"dev": way}]).encode() if way else b""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: "/sbin/ip")
    monkeypatch.setattr(outage, "_network_of", made.network_of)
    monkeypatch.setattr(outage, "_ancestors", lambda: [7, 5])
    monkeypatch.setattr(outage, "_ip", made.ip)
    return made


def refusal(coordinator: str = "10.0.0.1") -> str:
    with pytest.raises(UserError) as refused:
        outage.devices(coordinator, "")
    return str(refused.value)


def test_the_way_to_the_coordinator_and_the_interface_that_was_asked_for(machine: Machine) -> None:
    assert outage.devices("10.0.0.1", "") == ("eth0",)
    assert outage.devices("10.0.0.1", "eth0") == ("eth0",)
    assert outage.devices("10.0.0.1", "ib0") == ("eth0", "ib0")
    assert not [done for done in machine.done if "down" in done]


def test_only_root_may(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "the agent is not root" in refusal()


def test_ip_is_needed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "no program `ip`" in refusal()


@pytest.mark.parametrize("others", [{"1": OURS}, {"1": OURS, "7": ANOTHER}, {}])
def test_the_machine_s_own_network_stays(
    machine: Machine, others: dict[str, tuple[int, int]]
) -> None:
    """The first process can't be seen where it is not named."""
    machine.networks = {"self": OURS, "7": OURS, "5": OURS} | others
    assert "not in a network namespace of its own" in refusal()
    assert machine.done == []


def test_where_the_first_process_can_not_be_seen_one_that_led_here_will_do(
    machine: Machine,
) -> None:
    machine.networks = {"self": OURS, "7": OURS, "5": ANOTHER}
    assert outage.devices("10.0.0.1", "") == ("eth0",)


def test_the_coordinator_s_own_host_stays(machine: Machine) -> None:
    assert "the coordinator is on this host" in refusal("10.0.0.2")


def test_who_may_not_change_the_interface_says_so(machine: Machine) -> None:
    machine.closed = "up"
    assert "`ip link set dev eth0 up` failed: no" in refusal()


@on_a_loop
async def test_an_agent_that_can_not_says_so_before_anything_starts(tmp_path: Path) -> None:
    """Here, as everybody is on one host."""
    news = News()
    told: list[nodes.FromNode] = []
    welcome = nodes.Welcome(
        node=0,
        term=0,
        adopted=False,
        settings=msgspec.structs.replace(SETTINGS, cuts_networks=True),
        clock_s=0.0,
        boot_id="",
    )

    def take(peer: int, message: nodes.FromNode) -> None:
        told.append(message)
        if isinstance(message, nodes.Register):
            hub.send(peer, welcome)
        news.tell()

    hub: Hub[nodes.FromNode] = Hub(
        host=LOCAL,
        ports=ANY_PORT,
        secret=SECRET,
        receives=nodes.FromNode,
        on_joined=lambda *_: None,
        on_message=take,
        on_lost=lambda *_: None,
        on_refused=lambda *_: None,
    )
    wanted = dataclasses.replace(settings(tmp_path), coordinator=(LOCAL, hub.port))
    try:
        with pytest.raises(UserError, match="the network of this host can't be cut"):
            await _Agent(wanted, SECRET, {}).run()
        await news.until(lambda: len(told) == 3)
    finally:
        hub.close()
    assert [type(message) for message in told] == [nodes.Register, nodes.Failed, nodes.Gone]
