"""The network of this host, cut on purpose and mended: what the fault `net` does.

Theory of operation: the interface that leads to the coordinator is taken down by `ip`, and with it
that of `--interface`. Going down takes the routes and the
IPv6 addresses away, so they are saved before, and restored when the interface is up again.

A machine on which other things live must never lose its network to a test. So it is done only by
root, in a network namespace of its own, and where the coordinator is not cut off as well. `devices`
refuses all else; it is asked when the node registers, before any worker starts.

It does not know when the network is to fail or to be back (agent.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from typing import Any

from everstep.agent import processes
from everstep.errors import EverstepError, UserError

_COMMAND_TIMEOUT_S = 5.0
_FAMILIES = ("-4", "-6")
_LOOPBACK = "lo"
_KEPT_BY_THE_KERNEL = "local"  # a table whose routes come and go with the addresses


class Outage:
    """The interfaces `devices` are down from now on, until `end`. Raises EverstepError where `ip`
    fails, and then what is down stays down. Each takes a few milliseconds, and blocks."""

    def __init__(self, devices: Collection[str]) -> None:
        self._devices = devices
        self._saved: list[tuple[tuple[str, ...], bytes]] = []  # what restores it, and its input
        for device in devices:
            self._keep(("address",), "dev", device)
            for family in _FAMILIES:
                for table in _tables(family, device):
                    self._keep((family, "route"), "table", table, "dev", device)
        for device in devices:
            _ip("link", "set", "dev", device, "down")

    def _keep(self, what: tuple[str, ...], *which: str) -> None:
        self._saved.append((what, _ip(*what, "save", *which)))

    def end(self) -> None:
        """The interfaces are as they were."""
        for device in self._devices:
            _ip("link", "set", "dev", device, "up")
        for what, state in self._saved:
            _ip(*what, "restore", given=state)  # what is there by itself is passed over


def devices(coordinator: str, interface: str) -> tuple[str, ...]:
    """The interfaces to be taken down. `coordinator`: its numeric address. `interface`: that at
    which other nodes reach this one, if another was asked for. Blocks for some milliseconds.

    Raises UserError where the network of this host can't be cut, or must not."""
    if os.geteuid() != 0:
        raise _refusal("the agent is not root")
    if shutil.which("ip") is None:
        raise _refusal("there is no program `ip` (of iproute2)")
    if not _network_is_own():
        raise _refusal(
            "as far as it can see the agent is not in a network namespace of its own, so that the "
            "machine would lose its network"
        )
    try:
        found = {_device_towards(coordinator)} | ({interface} if interface else set())
        for device in found:
            _ip("link", "set", "dev", device, "up")  # which it is: this only asks for permission
    except EverstepError as error:
        raise _refusal(str(error)) from error
    if _LOOPBACK in found:
        raise _refusal(
            "the coordinator is on this host, and would be cut off with it; start it on a host of "
            "its own, by `everstep coordinator`"
        )
    return tuple(sorted(found))


def _refusal(why: str) -> UserError:
    return UserError(
        "the job has a fault on purpose of kind `net`, and the network of this host can't be cut: "
        f"{why}. Leave the fault out, or read docs/howto/inject-faults.md"
    )


def _network_is_own() -> bool:
    """Whether the process with pid 1 has another network than this one; where that can't be seen,
    whether one of those has from which this process comes."""
    own = _network_of("self")
    try:
        return _network_of("1") != own
    except OSError:
        return any(_network_of(str(pid)) != own for pid in _ancestors())


def _network_of(pid: str) -> tuple[int, int]:
    status = os.stat(f"/proc/{pid}/ns/net")
    return status.st_dev, status.st_ino


def _ancestors() -> list[int]:
    """The processes from which this one comes, but for the first of all."""
    found = []
    process = processes.look_up(os.getppid())
    while process is not None and process.pid > 1:
        found.append(process.pid)
        process = processes.look_up(process.parent)
    return found


def _device_towards(address: str) -> str:
    [route] = json.loads(_ip("-json", "route", "get", address))
    return str(route["dev"])


def _tables(family: str, device: str) -> list[str]:
    """The tables that have routes by `device`."""
    found = _ip("-json", family, "route", "show", "table", "all", "dev", device)
    routes: list[dict[str, Any]] = json.loads(found or b"[]")
    return sorted({str(route.get("table", "main")) for route in routes} - {_KEPT_BY_THE_KERNEL})


def _ip(*arguments: str, given: bytes = b"") -> bytes:
    """What `ip` prints. Raises EverstepError where it fails."""
    command = ["ip", *arguments]
    try:
        with tempfile.TemporaryFile() as file:  # it seeks in what it reads
            file.write(given)
            file.seek(0)
            done = subprocess.run(
                command, stdin=file, capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=True
            )
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip()
        raise EverstepError(f"`{' '.join(command)}` failed: {why}") from error
    except subprocess.TimeoutExpired as error:
        raise EverstepError(f"`{' '.join(command)}` did not end in {error.timeout:g} s") from error
    return done.stdout
