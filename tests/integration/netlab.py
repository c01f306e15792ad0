"""Hosts of their own on one machine: network namespaces on a switch whose faults can be chosen.

Theory of operation. Each host is a network namespace whose interface is a TUN device; all devices
are held by one process, the switch, which hands each packet to the host of its destination. So a
fault is a rule of the switch, between any two hosts and for either direction alone: packets are
dropped, lost by chance, held back, or dropped by their destination's port. This needs no module of
the kernel beyond TUN (netem is not everywhere), and a rule holds from the moment in which
`Lab.rules` returns.

A host has a name (a UTS namespace) and a hosts file of its own, which can be changed while its
processes run. When the switch ends, the interfaces are gone.

It does not know everstep. Root is needed. It has no IPv6, and answers nothing itself: what is
dropped is dropped in silence, as a firewall or a dead host does.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

NET = "10.79.32"
_TUN = Path("/dev/net/tun")
_FIRST = 11
_MTU = 1500
_TUNSETIFF, _TUNSETCARRIER = 0x400454CA, 0x400454E2
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_TCP = 6
_SYN, _ACK = 0x02, 0x10
_MOST_HELD = 20_000  # packets; beyond, the switch drops them, as a real one would
_READS = 64  # of one host, before the next has its turn
_PATIENCE_S = 20.0


def address_of(host: int) -> str:
    """The address of a host."""
    return f"{NET}.{_FIRST + host}"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What goes wrong on the way. `dropped`: pairs (from, to). `unplugged`: hosts without a
    carrier. `loss`: the share of packets that are lost, `delay_s`: how long each is held back.
    `closed`: (from, to, first port, last port); no TCP connection to these ports begins. `seed`: of
    the losses."""

    dropped: Sequence[tuple[int, int]] = ()
    unplugged: Sequence[int] = ()
    loss: float = 0.0
    delay_s: float = 0.0
    closed: Sequence[tuple[int, int, int, int]] = ()
    seed: int = 0


def apart(*sides: Sequence[int]) -> Rules:
    """Each of `sides` reaches itself only."""
    cut = [
        (a, b) for side in sides for a in side for other in sides if other != side for b in other
    ]
    return Rules(dropped=cut)


# ---------------------------------------------------------------------- the switch's process


class _Switch:
    """Forwards packets between TUN devices, under the rules that come in by standard input."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._fds = [_open_tun(device) for device in devices]
        self._host_of = {bytes(map(int, address_of(h).split("."))): h for h in range(len(devices))}
        self._held: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._obey(Rules())

    def _obey(self, rules: Rules) -> None:
        self._dropped = {(a, b) for a, b in rules.dropped}
        self._loss, self._delay_s = rules.loss, rules.delay_s
        self._closed = rules.closed
        self._random = random.Random(rules.seed)
        for host, fd in enumerate(self._fds):
            carrier = 0 if host in rules.unplugged else 1
            # Fails while the interface is down, which it is before it has moved to its host.
            with contextlib.suppress(OSError):
                fcntl.ioctl(fd, _TUNSETCARRIER, struct.pack("i", carrier))
        self._dropped |= {
            pair
            for host in rules.unplugged
            for other in range(len(self._fds))
            for pair in ((host, other), (other, host))
        }

    def run(self) -> None:
        poll = select.poll()
        for fd in (0, *self._fds):
            poll.register(fd, select.POLLIN)
        print("ready", flush=True)
        orders = sys.stdin
        host_of_fd = {fd: host for host, fd in enumerate(self._fds)}
        while True:
            for fd, _ in poll.poll(self._until_due_ms()):
                if fd:
                    self._read(host_of_fd[fd])
                    continue
                line = orders.readline()
                if not line:
                    return
                for host in range(len(self._fds)):
                    self._read(host)  # what was sent before is treated as before
                self._obey(Rules(**json.loads(line)))
                print("done", flush=True)
            self._release()

    def _until_due_ms(self) -> float | None:
        if not self._held:
            return None
        return max(0.0, self._held[0][0] - time.monotonic()) * 1000

    def _read(self, source: int) -> None:
        for _ in range(_READS):
            try:
                packet = os.read(self._fds[source], 65536)
            except BlockingIOError:
                return
            target = self._host_of.get(packet[16:20])
            if target is not None and self._passes(source, target, packet):
                self._forward(target, packet)

    def _passes(self, source: int, target: int, packet: bytes) -> bool:
        if (source, target) in self._dropped:
            return False
        if self._loss and self._random.random() < self._loss:
            return False
        if self._closed and packet[9] == _TCP:
            start = (packet[0] & 15) * 4
            (port,) = struct.unpack_from("!H", packet, start + 2)
            begins = packet[start + 13] & (_SYN | _ACK) == _SYN
            for a, b, first, last in self._closed:
                if begins and (a, b) == (source, target) and first <= port <= last:
                    return False
        return True

    def _forward(self, target: int, packet: bytes) -> None:
        if not self._delay_s:
            self._write(target, packet)
        elif len(self._held) < _MOST_HELD:
            self._count += 1
            due_s = time.monotonic() + self._delay_s
            heapq.heappush(self._held, (due_s, self._count, target, packet))

    def _release(self) -> None:
        now_s = time.monotonic()
        while self._held and self._held[0][0] <= now_s:
            _, _, target, packet = heapq.heappop(self._held)
            self._write(target, packet)

    def _write(self, target: int, packet: bytes) -> None:
        # Its queue is full, or its interface is down: a packet like any that is lost.
        with contextlib.suppress(OSError):
            os.write(self._fds[target], packet)


def _open_tun(name: str) -> int:
    fd = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


# ---------------------------------------------------------------------- the laboratory


@dataclass
class Lab:
    """`hosts` names the hosts, in the order of their addresses. A context manager: at its end all
    their processes are gone, and so are the hosts. `folder`: for what processes print."""

    folder: Path
    hosts: Sequence[str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._name = f"el{os.getpid() % 100_000}"
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Lab:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._down()

    def number(self, host: str) -> int:
        """Its place among the hosts, as `Rules` has it."""
        return self.hosts.index(host)

    def numbers(self, *hosts: str) -> list[int]:
        """The places of several hosts."""
        return [self.number(host) for host in hosts]

    def address(self, host: str) -> str:
        """Its address."""
        return address_of(self.number(host))

    def rules(self, rules: Rules | None = None) -> None:
        """From now on, `rules` hold on the switch and no others."""
        assert self._switch is not None
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps(asdict(rules or Rules())) + "\n")
        self._switch.stdin.flush()
        self._hear("done")

    def namespace(self, host: str) -> Path:
        """The file by which its network can be entered."""
        return Path("/run/netns", self._space(host))

    def link(self, host: str) -> str:
        """The state of its interface, as the kernel tells it there."""
        command = ["ip", "-n", self._space(host), "link", "show", "eth0"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def know(self, host: str, names: Mapping[str, str]) -> None:
        """From now on `host` knows these names, with their addresses, and no others."""
        lines = [f"{address} {name}" for name, address in names.items()]
        # In place: its processes have the file, not the name.
        self._hosts_file(host).write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def start(
        self,
        host: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host; what it prints goes to `log(host)`."""
        named = f'echo {host} >/proc/sys/kernel/hostname; exec "$0" "$@"'
        whole = ["ip", "netns", "exec", self._space(host), "unshare", "--uts", "sh", "-c", named]
        with self.log(host).open("ab") as log:
            process = subprocess.Popen(
                [*whole, *command], env=environ, stdout=log, stderr=log, stdin=stdin
            )
        self.processes[host] = process
        return process

    def power_off(self, host: str) -> None:
        """All processes of a host end at once. A word of their end still leaves it, unless it was
        cut off before."""
        found = subprocess.run(
            ["ip", "netns", "pids", self._space(host)], capture_output=True, text=True, check=False
        )
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def log(self, host: str) -> Path:
        """Where what runs on a host prints."""
        return self.folder / f"{host}.log"

    def _up(self) -> None:
        if not _TUN.exists():
            raise RuntimeError(f"there is no {_TUN} on this machine: load the kernel's module tun")
        devices = [f"{self._name}t{host}" for host in range(len(self.hosts))]
        self._switch = subprocess.Popen(
            [sys.executable, __file__, *devices],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._hear("ready")
        for host, device in zip(self.hosts, devices, strict=True):
            space = self._space(host)
            files = Path("/etc/netns", space)
            files.mkdir(parents=True, exist_ok=True)
            self.know(host, {host: self.address(host)})
            (files / "resolv.conf").write_text("")
            _ip("netns", "add", space)
            _ip("link", "set", device, "netns", space, "name", "eth0")
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "mtu", str(_MTU), "up")
            _ip("-n", space, "link", "set", "lo", "up")
        self.rules()

    def _down(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for host in self.hosts:
            self.power_off(host)
        if self._switch is not None:
            assert self._switch.stdin is not None
            assert self._switch.stdout is not None
            self._switch.stdin.close()
            try:
                self._switch.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._switch.kill()
                self._switch.wait()
            self._switch.stdout.close()
        for host in self.hosts:
            _ip("netns", "del", self._space(host), check=False)
            files = Path("/etc/netns", self._space(host))
            for file in files.glob("*"):
                file.unlink()
            with contextlib.suppress(FileNotFoundError):
                files.rmdir()

    def _hear(self, word: str) -> None:
        assert self._switch is not None
        assert self._switch.stdout is not None
        ready, _, _ = select.select([self._switch.stdout], [], [], _PATIENCE_S)
        said = self._switch.stdout.readline().strip() if ready else "nothing"
        if said != word:
            raise RuntimeError(f"the switch said {said!r}, not {word!r}")

    def _space(self, host: str) -> str:
        return f"{self._name}-{host}"

    def _hosts_file(self, host: str) -> Path:
        return Path("/etc/netns", self._space(host), "hosts")


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


if __name__ == "__main__":
    _Switch(sys.argv[1:]).run()
