"""The agent's end of a control channel, on its event loop.

Theory of operation: a non-blocking stream socket with frames of wire/channel. What is sent is
queued, at most `MAX_BACKLOG_BYTES`, and written as the peer reads; descriptors travel with the
first byte of their frame. A peer that is gone is not an error here: its death is told by its pidfd,
and what it wrote before can still be drained. Loop thread only.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from everstep.wire.channel import MAX_FRAME_BYTES, ChannelError, FrameReader, encode

MAX_BACKLOG_BYTES = 2 * MAX_FRAME_BYTES
# What was read stays here only until it is fed to a reader, on the one loop thread.
_scratch = memoryview(bytearray(1 << 16))
T = TypeVar("T")


@dataclass(slots=True)
class _Outgoing:
    data: memoryview
    fds: tuple[int, ...]


class AgentChannel(Generic[T]):
    """Messages to and from one process.

    `decoder_type`: the union of messages that may arrive. `on_message` is called for each.
    `on_error` is called once, with the reason, when the peer breaks the protocol or reads nothing
    while its backlog fills; nothing is read after.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        decoder_type: Any,
        on_message: Callable[[T], None],
        on_error: Callable[[str], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._reader: FrameReader[T] = FrameReader(decoder_type)
        self._on_message = on_message
        self._on_error = on_error
        self._outgoing: deque[_Outgoing] = deque()
        self._backlog_bytes = 0
        self._emptied: asyncio.Future[None] | None = None
        self._open_for_reading = True
        self._open_for_writing = True
        loop.add_reader(sock, self._readable)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Queue one message. `fds` are the channel's from now on; it closes them when they are
        sent."""
        frame = encode(message)
        if not self._open_for_writing:
            _close_all(fds)
            return
        if self._backlog_bytes + len(frame) > MAX_BACKLOG_BYTES:
            _close_all(fds)
            self._fail(f"it has left {self._backlog_bytes} bytes of its control channel unread")
            return
        self._outgoing.append(_Outgoing(memoryview(frame), tuple(fds)))
        self._backlog_bytes += len(frame)
        if len(self._outgoing) == 1:
            self._flush()

    @property
    def backlog_bytes(self) -> int:
        """What was sent and the peer has not read, as far as it is held here."""
        return self._backlog_bytes

    async def flushed(self) -> None:
        """Wait until the peer's kernel has all that was sent, or the peer is gone."""
        if self._outgoing:
            self._emptied = self._emptied or self._loop.create_future()
            await self._emptied

    def drain(self) -> None:
        """Deliver all that the peer wrote and the kernel still holds. For a peer that is dead."""
        while self._open_for_reading and self._read_once():
            pass

    def close(self) -> None:
        """Close the socket and forget what was not sent. May be called twice."""
        self._stop_reading()
        self._stop_writing()
        self._sock.close()

    def _readable(self) -> None:
        self._read_once()

    def _read_once(self) -> bool:
        """Deliver one piece. False: nothing is there now, or nothing will come any more."""
        try:
            count = self._sock.recv_into(_scratch)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            count = 0
        if not count:
            self._stop_reading()
            return False
        try:
            messages = self._reader.feed(_scratch[:count])
        except ChannelError as error:
            self._fail(str(error))
            return False
        for message in messages:
            self._on_message(message)
        return True

    def _flush(self) -> None:
        while self._outgoing:
            first = self._outgoing[0]
            try:
                if first.fds:
                    sent = socket.send_fds(self._sock, [first.data], list(first.fds))
                else:
                    sent = self._sock.send(first.data)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except (BrokenPipeError, ConnectionResetError):
                self._stop_writing()
                return
            _close_all(first.fds)
            first.fds = ()
            first.data = first.data[sent:]
            self._backlog_bytes -= sent
            if not first.data:
                self._outgoing.popleft()
        self._loop.remove_writer(self._sock)
        self._tell_emptied()

    def _fail(self, why: str) -> None:
        if self._open_for_reading:
            self._stop_reading()
            self._on_error(why)

    def _stop_reading(self) -> None:
        if self._open_for_reading:
            self._open_for_reading = False
            self._loop.remove_reader(self._sock)

    def _stop_writing(self) -> None:
        if self._open_for_writing:
            self._open_for_writing = False
            self._loop.remove_writer(self._sock)
            for outgoing in self._outgoing:
                _close_all(outgoing.fds)
            self._outgoing.clear()
            self._backlog_bytes = 0
            self._tell_emptied()

    def _tell_emptied(self) -> None:
        emptied, self._emptied = self._emptied, None
        if emptied is not None and not emptied.done():
            emptied.set_result(None)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
