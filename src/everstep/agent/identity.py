"""What a host is to the job: its address, its versions, and the script as it lies there.

Nothing here imports torch or the script."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import ipaddress
import platform
import socket
import struct
from pathlib import Path

from everstep import __version__
from everstep.errors import UserError
from everstep.wire.messages import ScriptSpec

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")
_GLOBAL = "00"  # the scope of an address that others can reach, in /proc/net/if_inet6


def versions() -> dict[str, str]:
    """Of everstep, torch and Python; "" where torch is not installed."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return {"everstep": __version__, "torch": torch, "Python": platform.python_version()}


def script_digest(script: ScriptSpec) -> str:
    """SHA-256 of the script's text; "" for a module, which can lie anywhere. Blocks on the disk.

    Raises UserError if it can't be read.
    """
    if script.module:
        return ""
    try:
        return hashlib.sha256(Path(script.target).read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(
            f"{script.target}: the script can't be read on host {socket.gethostname()} "
            f"({error.strerror}; looked from {Path.cwd()}); put it there, or start the agent in "
            "the directory that has it"
        ) from error


def address_towards(host: str, port: int) -> str:
    """The numeric address of this host on the way to a coordinator. Blocks and raises as
    `way_towards`."""
    return way_towards(host, port)[0]


def way_towards(host: str, port: int) -> tuple[str, str]:
    """The numeric addresses of the way to a coordinator, here and there. Sends nothing; may block
    for the name.

    Raises UserError where there is no way.
    """
    refusal: OSError | None = None
    try:
        ways = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        ways, refusal = [], error
    for family, kind, protocol, _, target in ways:  # a name may have both families, a host one
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0]), str(probe.getpeername()[0])
        except OSError as error:
            refusal = refusal or error
    raise UserError(
        f"this host has no way to the coordinator at {host}: "
        f"{refusal.strerror if refusal else 'it has no address'}; look at its name and routes, or "
        "name the interface with --interface"
    ) from refusal


def numeric(host: str, *, alone: bool = True) -> str:
    """A numeric address of a host's name: one of this host's, if there is one, and rather not a
    loopback device's. `alone`: no other host need reach it. Blocks for the name. Raises
    UserError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"the coordinator's host {host} has no address here: {error.strerror}; correct the "
            "name, or give its address"
        ) from error
    addresses = sorted(dict.fromkeys(str(entry[4][0]) for entry in found), key=_is_loopback)
    address = next((each for each in addresses if can_listen(each, 0)), addresses[0])
    if _is_loopback(address) and not alone and not _means_loopback(host):
        raise UserError(
            f"the coordinator's host {host} is {address} on this host (see /etc/hosts), where no "
            "other host can reach it; correct the name there, or give its address in --coordinator"
        )
    return address


def has_address(host: str) -> bool:
    """Whether a host's name leads anywhere by now. Blocks for the name."""
    try:
        return bool(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _means_loopback(host: str) -> bool:
    """Whether who wrote this has asked for a loopback device."""
    try:
        return _is_loopback(host)
    except ValueError:
        return "localhost" in host


def can_listen(address: str, port: int) -> bool:
    """Whether a numeric address is this host's, and nobody listens at `port` of it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def address_of(interface: str) -> str:
    """The numeric address of a network interface: IPv4, else a global IPv6. Raises UserError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24])
        except OSError:
            pass  # it has none, or is not there: both are told below, unless it has IPv6
    lines = _IF_INET6.read_text().splitlines() if _IF_INET6.exists() else []
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope == _GLOBAL:
            return str(ipaddress.IPv6Address(int(digits, 16)))
    known = ", ".join(name for _, name in socket.if_nameindex())
    raise UserError(f"--interface {interface}: no such interface with an address; here are {known}")
