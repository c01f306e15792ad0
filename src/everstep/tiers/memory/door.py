"""Where a host's ranks come to the desk: a Unix socket, its questions and answers.

Theory of operation. The socket lies in a directory that only this user enters, or has a name that
nobody can guess and no file (`@...`); who connects must be of this user besides, as the kernel
says. A connection asks one thing at a time. Memory is handed over as a descriptor, never as a path.
What a connection has reserved and not published is given up when it ends, however that comes about;
so nothing that a dead rank was writing stays.

It does not know the rules by which objects are put and found: `desk.py`. Loop thread only.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep.errors import EverstepError
from everstep.tiers.memory import talk
from everstep.tiers.memory.desk import Desk
from everstep.tiers.memory.vault import Area
from everstep.tiers.memory.wire import HEADER, address_of, user_of
from everstep.tiers.store import StoreError

_BACKLOG = 128
_CONNECTIONS = 1024
_FULL_PAUSE_S = 0.1


@dataclass(slots=True, eq=False)
class _Holding:
    """What a connection has in hand: an area to write, or leave to read an object."""

    area: Area | None = None
    using: ExitStack = field(default_factory=ExitStack)


class Door:
    """Serves ranks at `name` until it is closed. `first`: awaited when somebody comes, before he is
    answered. Raises OSError where it can't listen."""

    def __init__(self, desk: Desk, name: str, first: Callable[[], Awaitable[None]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._desk = desk
        self._first = first
        self._path = None if name.startswith("@") else Path(name)
        self._connections: set[asyncio.Task[None]] = set()
        self._decoder = msgspec.msgpack.Decoder(talk.FromRank)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
            with address_of(name) as address:
                self._socket.bind(address)
            self._socket.listen(_BACKLOG)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        self._open = True
        self._listen()

    async def close(self) -> None:
        """End all connections."""
        self._open = False
        self._loop.remove_reader(self._socket)
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _listen(self) -> None:
        if self._open:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Somebody comes. A callback, not a task: one that is cancelled would lose who has just
        come."""
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # he has gone again
        except OSError:  # no descriptor is left: who waits is served when there is one
            self._loop.remove_reader(self._socket)
            self._loop.call_later(_FULL_PAUSE_S, self._listen)
            return
        sock.setblocking(False)
        if user_of(sock) != os.geteuid() or len(self._connections) >= _CONNECTIONS:
            sock.close()
            return
        task = self._loop.create_task(self._serve(sock))
        self._connections.add(task)
        task.add_done_callback(lambda done: self._left(done, sock))

    def _left(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        self._connections.discard(task)
        sock.close()  # a task that was cancelled before it began has not closed it

    async def _serve(self, sock: socket.socket) -> None:
        holding = _Holding()
        try:
            while (frame := await self._read(sock)) is not None:
                try:
                    await self._first()
                    await self._answer(sock, self._decoder.decode(frame), holding)
                except (EverstepError, ValueError, OSError, msgspec.MsgspecError) as error:
                    if isinstance(error, ConnectionError):
                        return
                    if isinstance(error, msgspec.MsgspecError):
                        error = StoreError(f"this is no question that is known here: {error}")
                    await self._send(sock, talk.failure(error))
        except ConnectionError:
            pass  # it is gone
        finally:
            self._let_go(holding)

    def _let_go(self, holding: _Holding) -> None:
        if holding.area is not None:
            self._desk.vault.abandon(holding.area)
            holding.area = None
        holding.using.close()

    async def _answer(self, sock: socket.socket, asked: talk.FromRank, holding: _Holding) -> None:
        desk = self._desk
        match asked:
            case talk.Reserve(nbytes=nbytes):
                self._let_go(holding)
                holding.area = await desk.reserve(nbytes)
                await self._send(sock, talk.Reserved(), holding.area.fd)
            case talk.Publish(key=key, terms=terms):
                if holding.area is None:
                    raise StoreError("nothing is reserved on this connection")
                held, notes = await desk.put(key, holding.area, terms)
                holding.area = None
                if not held.gone:
                    holding.using.enter_context(desk.vault.using(held))
                await self._send(sock, talk.Done(notes=notes))
            case talk.Put(key=key, data=data, terms=terms):
                _, notes = await desk.put(key, data, terms)
                await self._send(sock, talk.Done(notes=notes))
            case talk.Open(key=key):
                self._let_go(holding)
                own = desk.vault.find(key)
                if own is None:
                    await self._send(sock, talk.Away())
                else:
                    fd = holding.using.enter_context(desk.vault.using(own))
                    await self._send(sock, talk.Opened(nbytes=own.nbytes), fd)
            case talk.Release():
                self._let_go(holding)
                await self._send(sock, talk.Done())
            case talk.Names():
                await self._send_names(sock, await desk.finding.names(asked))
            case _:
                await self._send(sock, await self._look(asked))

    async def _look(self, asked: talk.FromRank) -> talk.Answer:
        desk = self._desk
        match asked:
            case talk.Introduce(sites=sites):
                await desk.circle.introduce(sites)
                return talk.Done()
            case talk.About():
                return await desk.about(asked)
            case talk.Holders(key=key, deadline_s=deadline_s):
                return talk.Held(sites=tuple(await desk.finding.holders(key, deadline_s)))
            case talk.Delete():
                await desk.delete(asked)
                return talk.Done()
            case talk.Get() | talk.Lend() | talk.Size():
                return await desk.finding.get(asked)
            case _:
                raise StoreError(f"{type(asked).__name__} is not asked here")

    async def _send_names(self, sock: socket.socket, entries: list[talk.Listed]) -> None:
        for start in range(0, max(len(entries), 1), talk.PAGE_ENTRIES):
            page = tuple(entries[start : start + talk.PAGE_ENTRIES])
            more = start + len(page) < len(entries)
            await self._send(sock, talk.Page(entries=page, more=more))

    async def _read(self, sock: socket.socket) -> bytes | None:
        header = await self._receive(sock, HEADER.size)
        if header is None:
            return None
        (length,) = HEADER.unpack(header)
        return None if length > talk.MAX_FRAME_BYTES else await self._receive(sock, length)

    async def _receive(self, sock: socket.socket, nbytes: int) -> bytes | None:
        data = bytearray(nbytes)
        have = 0
        with memoryview(data) as view:
            while have < nbytes:
                count = await self._loop.sock_recv_into(sock, view[have:])
                if not count:
                    return None
                have += count
        return bytes(data)

    async def _send(self, sock: socket.socket, answer: talk.Answer, fd: int = -1) -> None:
        body = msgspec.msgpack.encode(answer)
        header = HEADER.pack(len(body))
        if fd >= 0:  # nothing else is on its way to who waits for an answer: there is room
            socket.send_fds(sock, [header], [fd])
            await self._loop.sock_sendall(sock, body)
        else:
            await self._loop.sock_sendall(sock, header + body)
