"""What an agent has to say to its coordinator, as fast as that reads it.

Theory of operation: a connection whose other side leaves too much unread is given up. What is said
as it happens is far from that; a report of all that an agent knows may not be. So a report is sent
in parts, of which only so much is on its way at a time, and what is said meanwhile waits behind it.
The end of the connection ends it all: to the next one the report is made anew.

It does not know what the messages mean. Loop thread only; nothing blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from everstep.wire.nodes import FromNode

_MOST_UNREAD_BYTES: Final = 32 << 20  # far below the backlog at which a connection is given up
_MOST_WAITING: Final = 100_000  # messages; minutes of what the workers of a node say


class Connection(Protocol):
    """What is used of wire.link.Link."""

    @property
    def unread_bytes(self) -> int:
        """Bytes on their way."""
        ...

    def leave(self, why: str) -> None:
        """Give the connection up."""
        ...


class Outbox:
    """`send`: over `link`, at once."""

    def __init__(self, link: Connection, send: Callable[[FromNode], object]) -> None:
        self._link = link
        self._put = send
        self._waiting: deque[FromNode] = deque()

    @property
    def waits(self) -> bool:
        """Whether something is not sent yet."""
        return bool(self._waiting)

    def send(self, message: FromNode) -> None:
        """Send a message, after all that waits."""
        if not self._waiting:
            self._put(message)
            return
        self._waiting.append(message)
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.clear()
            self._link.leave("it reads so slowly that no report can be made to it")

    def send_all(self, messages: Iterable[FromNode]) -> None:
        """Send messages as fast as they are read.

        Raises ChannelError when one is too large.
        """
        self._waiting.extend(messages)
        self.go_on()

    def go_on(self) -> None:
        """More has been read: send what waits, as far as the connection takes it without being
        given up. Raises as `send_all`."""
        while self._waiting and self._link.unread_bytes <= _MOST_UNREAD_BYTES:
            self._put(self._waiting.popleft())

    def clear(self) -> None:
        """The connection has ended."""
        self._waiting.clear()
