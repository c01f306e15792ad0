"""A laboratory for communicators: real processes, real gloo, the real control protocol, and a hub
instead of an agent.

`Lab(size, role)` forks `size` processes (fork: torch is imported once); each runs `role(Member)`.
The hub answers the exchange of addresses, sends stops and regroups when told to, and collects what
members report."""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from everstep.wire import messages
from everstep.wire.channel import FrameReader, encode
from everstep.worker.communicators import Communicators
from everstep.worker.control import Control
from everstep.worker.groups import BACKEND, OuterGroup, register
from everstep.worker.inner import GlooInner


class Member:
    """One process's side of the laboratory."""

    def __init__(self, rank: int, size: int, sock: socket.socket, build_timeout_s: float) -> None:
        torch.set_num_threads(1)
        self.rank, self.size = rank, size
        self.stop_seen = 0.0
        self.control = Control(sock, self._stopped)
        self.communicators = Communicators(self._make, self._fault, generation=0, solo=False)
        self.build_timeout_s = build_timeout_s
        self.control.start()

    def _stopped(self, generation: int) -> None:
        self.stop_seen = time.monotonic()
        self.communicators.stop(generation)

    def _fault(self, generation: int, error: BaseException) -> None:
        self.say("fault", f"{generation} {error}")

    def _make(self, group: OuterGroup, generation: int) -> GlooInner:
        return GlooInner(
            group.rank(),
            group.size(),
            lambda payload: self.control.exchange(
                generation, group.name, group.rank(), group.size(), payload, self.build_timeout_s
            ),
            host="127.0.0.1",
            build_timeout_s=self.build_timeout_s,
            collective_timeout_s=60.0,
            on_address=lambda inner: self.communicators.being_built(generation, inner),
        )

    def join(self) -> None:
        """Make the world group through c10d."""
        register(self.communicators)
        dist.init_process_group(BACKEND, store=HashStore(), rank=self.rank, world_size=self.size)

    def say(self, key: str, text: str = "") -> None:
        """Report to the hub."""
        self.control.send(messages.Note(key=key, text=text))

    def recover(self, generation: int) -> None:
        """Wait for the stop of `generation`, quiesce, rebuild as `generation + 1`."""
        self.control.wait_stop(generation, 30)
        self.communicators.quiesce(10)
        self.communicators.rebuild(generation + 1)


class Lab:
    """Use as a context manager; `notes` yields (rank, key, text) as members report."""

    def __init__(
        self, size: int, role: Callable[[Member], None], build_timeout_s: float = 5.0
    ) -> None:
        self.size = size
        self._selector = selectors.DefaultSelector()
        self._entries: dict[tuple[int, str], dict[int, bytes]] = {}
        self._readers: dict[int, FrameReader[messages.FromWorker]] = {}
        self.sockets: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}
        sys.stdout.flush()
        for rank in range(size):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                self._child(rank, theirs, ours, role, build_timeout_s)
            theirs.close()
            self.sockets[rank], self.pids[rank] = ours, pid
            self._readers[rank] = FrameReader(messages.FromWorker)
            self._selector.register(ours, selectors.EVENT_READ, rank)

    def _child(
        self,
        rank: int,
        sock: socket.socket,
        ours: socket.socket,
        role: Callable[[Member], None],
        timeout_s: float,
    ) -> None:
        code = 1
        try:
            ours.close()
            for other in self.sockets.values():
                other.close()
            self._selector.close()
            role(Member(rank, self.size, sock, timeout_s))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def send(self, rank: int, message: msgspec.Struct) -> None:
        """To one member."""
        self.sockets[rank].sendall(encode(message))

    def stop(self, generation: int, ranks: list[int] | None = None) -> float:
        """Send a stop; returns when."""
        now = time.monotonic()
        for rank in self.sockets if ranks is None else ranks:
            self.send(rank, messages.Stop(generation=generation))
        return now

    def notes(self, timeout_s: float = 30.0) -> Any:
        """Yield (rank, key, text); raises TimeoutError when nothing comes. Ends when all members
        have left."""
        while self.sockets:
            ready = self._selector.select(timeout_s)
            if not ready:
                raise TimeoutError("no member said anything")
            for key, _ in ready:
                rank = key.data
                try:
                    data = self.sockets[rank].recv(1 << 16)
                except ConnectionResetError:  # it left and had not read all
                    data = b""
                if not data:
                    sock = self.sockets.pop(rank)
                    self._selector.unregister(sock)
                    sock.close()
                    yield rank, "left", ""
                    continue
                for message in self._readers[rank].feed(data):
                    if isinstance(message, messages.Address):
                        self._collect(message)
                    elif isinstance(message, messages.Note):
                        yield rank, message.key, message.text

    def wait_for(self, key: str, ranks: list[int]) -> dict[int, str]:
        """Wait until all `ranks` have reported `key`; returns their texts."""
        found: dict[int, str] = {}
        for rank, said, text in self.notes():
            if said == key:
                found[rank] = text
            if set(ranks) <= set(found):
                return found
        raise TimeoutError(f"members left before {key}: {sorted(found)}")

    def _collect(self, message: messages.Address) -> None:
        entries = self._entries.setdefault((message.generation, message.group), {})
        entries[message.rank] = message.payload
        if len(entries) == message.size:
            answer = messages.Addresses(
                generation=message.generation, group=message.group, entries=entries
            )
            for rank in entries:
                if rank in self.sockets:
                    self.send(rank, answer)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self.sockets.values():
            sock.close()
        self._selector.close()
        deadline = time.monotonic() + 10
        codes = {}
        for rank, pid in self.pids.items():
            while (done := os.waitpid(pid, os.WNOHANG))[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(pid, 9)
                    done = os.waitpid(pid, 0)
                    break
                time.sleep(0.005)
            codes[rank] = os.waitstatus_to_exitcode(done[1])
        self.codes = codes
