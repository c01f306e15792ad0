"""A rank's connection to the desk of its host: one question and its answer at a time.

Theory of operation. A frame is a length and MessagePack; a descriptor comes with the length. Who is
at the other end is asked of the kernel: a desk of another user is none. A connection on which an
answer did not come in time, or not as it should, is closed: what comes late is nobody's.

It does not know what is asked. One thread at a time.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from everstep.errors import TransientError
from everstep.tiers.memory import talk
from everstep.tiers.store import StoreError

HEADER: Final = struct.Struct("<I")
SOCKET: Final = "socket"
"""The name of a desk's socket in its directory."""
VARIABLE: Final = "EVERSTEP_TIER_SOCKET"
"""Names the socket of the host's desk, for processes that are not told otherwise."""
_CREDENTIALS: Final = struct.Struct("3i")
_GRACE_S = 5.0  # beyond the deadline: the desk keeps it, and says why it could not
_CONNECT_S = 10.0
A = TypeVar("A", bound=talk.Message)
_decoder = msgspec.msgpack.Decoder(talk.Answer)


class Gone(TransientError):
    """The desk is not there, or ended before it answered."""


@contextmanager
def address_of(name: str) -> Iterator[str | bytes]:
    """The address of a Unix socket for bind and connect: `@NAME` has no file, and a path may be
    longer than such an address. Raises OSError where its directory is not there."""
    if name.startswith("@"):
        yield b"\0" + name[1:].encode()
        return
    path = Path(name)
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def user_of(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


class Wire:
    """Connects to the desk at `name`. Raises Gone where there is none, StoreError where it is
    another user's."""

    def __init__(self, name: str) -> None:
        self.usable = True
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(_CONNECT_S)
            with address_of(name) as address:
                self._sock.connect(address)
            if user_of(self._sock) != os.geteuid():
                raise StoreError(f"{name} is served by user {user_of(self._sock)}: not asked")
        except OSError as error:
            self._sock.close()
            raise Gone(f"no agent keeps checkpoints there ({error.strerror or error})") from error
        except BaseException:
            self._sock.close()
            raise

    def ask(self, asked: talk.Message, answer: Any, deadline_s: float) -> tuple[Any, int]:
        """The answer, of type `answer`, and the descriptor that came with it, or -1. Raises what
        the desk says, Gone when it ends, StoreError when it does not answer in time."""
        body = msgspec.msgpack.encode(asked)
        try:
            self._sock.settimeout(deadline_s + _GRACE_S)
            self._sock.sendall(HEADER.pack(len(body)) + body)
        except OSError as error:
            raise self._end(error, deadline_s) from error
        return self.receive(answer, deadline_s)

    def receive(self, answer: Any, deadline_s: float) -> tuple[Any, int]:
        """The next answer, as `ask` has it."""
        end_s = time.monotonic() + deadline_s + _GRACE_S
        fds: list[int] = []
        try:
            header = self._read(HEADER.size, end_s, fds)
            (length,) = HEADER.unpack(header)
            if length > talk.MAX_FRAME_BYTES:
                raise OSError(f"an answer of {length} bytes")
            said = _decoder.decode(self._read(length, end_s, fds))
        except (OSError, msgspec.MsgspecError) as error:
            for fd in fds:
                os.close(fd)
            raise self._end(error, deadline_s) from error
        except BaseException:
            self.usable = False
            raise
        if isinstance(said, answer):
            return said, fds[0] if fds else -1
        for fd in fds:
            os.close(fd)
        if isinstance(said, talk.Failed):
            raise talk.error_of(said)
        self.usable = False
        raise StoreError(f"the agent answered with {type(said).__name__}")

    def is_idle(self) -> bool:
        """Whether it still stands, and nothing unasked has come."""
        if not self.usable:
            return False
        self._sock.setblocking(False)
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass  # it has ended
        return False

    def close(self) -> None:
        """End it. May be called twice."""
        self.usable = False
        self._sock.close()

    def _read(self, nbytes: int, end_s: float, fds: list[int]) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            self._sock.settimeout(max(end_s - time.monotonic(), 0.001))
            part, came, _, _ = socket.recv_fds(
                self._sock, min(nbytes - len(data), 1 << 20), 1, socket.MSG_CMSG_CLOEXEC
            )
            fds += came
            if not part:
                raise ConnectionResetError("the agent has ended")
            data += part
        return bytes(data)

    def _end(self, error: Exception, deadline_s: float) -> Exception:
        self.usable = False
        if isinstance(error, TimeoutError):
            return StoreError(f"the agent did not answer within {deadline_s:.0f} s")
        return Gone(f"the agent has ended ({error})")
