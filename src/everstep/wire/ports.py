"""The ports of a job's listeners: the range that a firewall has to open, and a free one of it.

Theory of operation. Everything of everstep's own that listens (the coordinator, each agent for its
peers, its bulk plane) takes the first free port of one range, on one address. The coordinator's own
port is left to it, since it must be free when it comes back. Where no port of the range is free,
the kernel's table says who holds them.

It does not know the ports of the communicators: gloo and nccl let the system choose.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from everstep.errors import UserError

ANY: Final = range(1)
"""Port 0: the system chooses one that is free."""
_RANGE: Final = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_LISTENING: Final = "0A"  # a socket's state in /proc/net/tcp
_TOLD: Final = 4  # holders that a refusal names
_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_CHOSEN: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def ports_of(text: str) -> range:
    """The ports that a setting names: "29400-29499", or one; any for the empty text. Raises
    ValueError."""
    if not text:
        return ANY
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not FIRST-LAST")
    first = int(match[1])
    last = int(match[2] or first)
    if not 0 < first <= last < 65536:
        raise ValueError(f"{text!r} is no range of ports from 1 to 65535")
    return range(first, last + 1)


def without(ports: Sequence[int], port: int) -> Sequence[int]:
    """`ports` without one that is somebody else's."""
    return [other for other in ports if other != port] if port in ports else ports


def in_words(ports: Sequence[int]) -> str:
    """Ports for a person: "29400-29499"."""
    return f"{ports[0]}-{ports[-1]}" if len(ports) > 1 else str(ports[0])


def chosen_by_the_system() -> tuple[int, int]:
    """The first and last of the ports from which the system chooses for who names none, in this
    process's network."""
    first, last = _CHOSEN.read_text().split()
    return int(first), int(last)


def listen(host: str, ports: Sequence[int], backlog: int) -> socket.socket:
    """A listening socket on the first free one of `ports`. `host`: a numeric address of either
    family, or `*` for all of both.

    Raises UserError when there is none, with who holds them where that can be known, or when the
    address is not one of this host's.
    """
    anywhere = host == "*"
    family = socket.AF_INET6 if anywhere and socket.has_dualstack_ipv6() else socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    for port in ports:
        try:
            return socket.create_server(
                ("" if anywhere else host, port),
                family=family,
                backlog=backlog,
                dualstack_ipv6=anywhere and family == socket.AF_INET6,
            )
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                continue
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise UserError(
                f"can't listen on {where}: {os.strerror(error.errno or 0)}; "
                "give a numeric address of this host"
            ) from error
    raise UserError(_refusal(host, ports))


def _refusal(host: str, ports: Sequence[int]) -> str:
    if not ports:
        return "the range of ports has only the coordinator's; give a wider one with --ports"
    found = holders(ports)
    told = [f"{port} is held by {found[port]}" for port in ports if port in found]
    more = len(told) - _TOLD
    who = ": " + ", ".join(told[:_TOLD]) if told else ""
    who += f" and {more} more" if more > 0 else ""
    if len(ports) == 1:
        return (
            f"port {ports[0]} is not free on {host}{who}; end what holds it, or choose another: in "
            "--coordinator on all hosts, if it is the coordinator's, else with --ports"
        )
    return (
        f"no port of {in_words(ports)} is free on {host}{who}; give a wider range with --ports, or "
        "end what holds them"
    )


def holders(ports: Sequence[int]) -> dict[int, str]:
    """Who listens on `ports` of this host: a process, or that it can't be known. Reads the
    descriptors of all processes of this user, which may take a second on a busy host."""
    inodes = _listeners(ports)
    names = _owners(set(inodes.values()))
    return {port: names.get(inode, "a process of another user") for port, inode in inodes.items()}


def _listeners(ports: Sequence[int]) -> dict[int, int]:
    """The inode of a socket that listens on each of `ports`."""
    found = {}
    for table in _TABLES:
        with contextlib.suppress(FileNotFoundError):  # a host without this family
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                port = int(fields[1].rpartition(":")[2], 16)
                if fields[3] == _LISTENING and port in ports:
                    found[port] = int(fields[9])
    return found


def _owners(inodes: set[int]) -> dict[int, str]:
    """A process that has each of these sockets, in words."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, str] = {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        # It may have ended, or be another user's.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    inode = wanted.get(os.readlink(f"/proc/{pid}/fd/{fd}"))
                    if inode is not None and inode not in found:
                        name = Path(f"/proc/{pid}/comm").read_text().strip()
                        found[inode] = f"{name} (process {pid})"
    return found
