"""The control channel: length-prefixed MessagePack messages on a stream socket.

A frame is a 4-byte little-endian length and that many bytes. The sender's bytes outlive it: what a
worker wrote before it was killed can still be read. A frame cut by a death is dropped, never
half-decoded. Lengths are capped before memory is taken."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

from everstep.errors import EverstepError

_HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20
T = TypeVar("T")


class ChannelError(EverstepError):
    """The peer sent something that is not a message of this channel."""


class FrameReader(Generic[T]):
    """Turns bytes into messages, whatever the cuts between them. Not thread-safe.

    `decoder_type` is the union of message types that may arrive.
    """

    def __init__(self, decoder_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(decoder_type)
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[T]:
        """Take bytes that arrived and return the messages that are now complete.

        Raises ChannelError on a frame that is too long or does not decode.
        """
        self._buffer += data
        messages: list[T] = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ChannelError(
                    f"a control message of {length} bytes exceeds the cap of {MAX_FRAME_BYTES}"
                )
            end = start + _HEADER.size + length
            if len(self._buffer) < end:
                break
            try:
                with memoryview(self._buffer) as view, view[start + _HEADER.size : end] as frame:
                    messages.append(self._decoder.decode(frame))
            except msgspec.MsgspecError as error:
                raise ChannelError(f"a control message does not decode: {error}") from error
            start = end
        del self._buffer[:start]
        return messages


def encode(message: msgspec.Struct) -> bytes:
    """One frame with `message` in it."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ChannelError(
            f"a {type(message).__name__} of {len(body)} bytes exceeds the cap of {MAX_FRAME_BYTES}"
        )
    return _HEADER.pack(len(body)) + body


class BlockingChannel(Generic[T]):
    """The worker's end. `send` may be called on any thread and blocks until the kernel has the
    bytes; `receive` is for one thread and blocks until a message or the end of the stream
    arrives."""

    def __init__(self, sock: socket.socket, decoder_type: Any) -> None:
        self._sock = sock
        self._reader: FrameReader[T] = FrameReader(decoder_type)
        self._lock = threading.Lock()
        self._pending: list[T] = []

    def send(self, message: msgspec.Struct) -> None:
        """Send one message. Raises OSError when the other end is gone."""
        frame = encode(message)
        with self._lock:
            self._sock.sendall(frame)

    def receive(self) -> T | None:
        """The next message, or None at the end of the stream."""
        while not self._pending:
            data = self._sock.recv(1 << 16)
            if not data:
                return None
            self._pending.extend(self._reader.feed(data))
        return self._pending.pop(0)

    def close(self) -> None:
        """Close the socket; a thread in `receive` on another descriptor copy is not woken."""
        self._sock.close()
