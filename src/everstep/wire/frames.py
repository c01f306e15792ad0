"""What a network connection carries, and the accounts that each of its sides keeps. Pure.

A frame is one byte that tells its kind, and MessagePack. *Data* frames carry the caller's messages;
*control* frames are those of this page: `Hello` and `Welcome` begin a connection, `Beat` shows life
and says how much has been received, `Bye` ends it with words.

A `Ledger` holds what is sent and not yet known to be received. ZeroMQ tells nobody how much lies in
its queues and the kernel's, so the receiver says it: with each beat, and as soon as an eighth of
the allowed backlog has come in since the last. A `LeaseClock` runs only while its owner looks at
it, so that a process that was suspended does not blame its peers for the silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec

from everstep.wire.channel import ChannelError

PROTOCOL: Final = 1
TICKS_PER_LEASE: Final = 12
TICKS_PER_BEAT: Final = 4
"""Both ends look at the time so often in a lease, and beat once in so many looks."""
_CONTROL: Final = b"\x00"
_DATA: Final = b"\x01"
_MAX_CONTROL_BYTES: Final = 4096
_MAX_WHY_CHARS: Final = 1000
_MESSAGE_OVERHEAD_BYTES: Final = 128  # what a queue needs to hold an empty message
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of the control plane's connections. The hub's lease and sizes hold for both sides."""

    lease_s: float = 2.0
    """Seconds without any frame after which a peer counts as lost. Short, since training stands
    still meanwhile; long beside any pause of a healthy event loop."""

    connect_s: float = 5.0
    """Seconds one attempt to connect may take, its handshake included, and seconds a stranger may
    hold a connection without one. Two lost packets' retries in TCP."""

    max_retry_s: float = 1.0
    """Most seconds between two attempts to connect. A second is short for a person who waits, and a
    thousand hosts that try once a second are no load."""

    max_message_bytes: int = 64 << 20
    """Largest message. Far above the largest that is sent, the tapes of a worker with long
    set-up."""

    backlog_bytes: int = 256 << 20
    """Bytes that may be sent to a peer and not be received, before it counts as lost. Several of
    the largest messages."""

    refusals_per_minute: int = 20
    """Refused connections that are told one by one. Enough to see who; a scan of ports does not
    fill a journal."""

    def __post_init__(self) -> None:
        if not 0 < self.lease_s < 3600:
            raise ValueError(f"lease_s is {self.lease_s}; it must be in (0, 3600)")
        if not 0 < self.max_message_bytes <= self.backlog_bytes:
            raise ValueError("backlog_bytes must hold at least one message of max_message_bytes")


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """A link's first frame, sent once in a connection."""

    protocol: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """The hub's answer: the link is known from now on, under these bounds."""

    lease_s: float
    max_message_bytes: int
    backlog_bytes: int


class Beat(msgspec.Struct, frozen=True, tag="beat", forbid_unknown_fields=True):
    """Sign of life. `received_bytes`: what its sender has received in this connection so far."""

    received_bytes: int


class Bye(msgspec.Struct, frozen=True, tag="bye", forbid_unknown_fields=True):
    """Its sender gives the connection up, and says why."""

    why: str


Control = Hello | Welcome | Beat | Bye
_control_decoder = msgspec.msgpack.Decoder(Control)
_encoder = msgspec.msgpack.Encoder()


def encode_control(control: Control) -> bytes:
    """One control frame. The words of a `Bye` are cut where they are too long."""
    if isinstance(control, Bye):
        control = Bye(control.why[:_MAX_WHY_CHARS])
    return _CONTROL + _encoder.encode(control)


def encode_data(message: msgspec.Struct, max_bytes: int) -> bytes:
    """One data frame. Raises ChannelError when the message is larger than `max_bytes`."""
    body = _encoder.encode(message)
    if len(body) > max_bytes:
        raise ChannelError(
            f"a {type(message).__name__} of {len(body)} bytes exceeds the cap of {max_bytes}"
        )
    return _DATA + body


class FrameDecoder(Generic[T]):
    """Decodes frames. `receives`: the union of message types that may arrive."""

    def __init__(self, receives: Any, max_bytes: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)
        self._max_bytes = max_bytes

    def data(self, frame: bytes) -> T:
        """The message in a data frame. Raises ChannelError on anything else."""
        if len(frame) - 1 > self._max_bytes:
            raise ChannelError(f"a frame of {len(frame)} bytes exceeds the cap")
        if frame[:1] != _DATA:
            raise ChannelError(f"a frame of unknown kind {frame[:1].hex() or 'none'}")
        try:
            return self._decoder.decode(memoryview(frame)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ChannelError(f"a message does not decode: {error}") from error


def is_control(frame: bytes) -> bool:
    """Whether a frame is one of this page's own."""
    return frame[:1] == _CONTROL


def decode_control(frame: bytes) -> Control:
    """The control message in a frame. Raises ChannelError on anything else."""
    if not is_control(frame) or len(frame) > _MAX_CONTROL_BYTES:
        raise ChannelError("a control frame was expected")
    try:
        return _control_decoder.decode(memoryview(frame)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ChannelError(f"a control frame does not decode: {error}") from error


class Ledger:
    """One side's account of one connection. `heard_s`: when the peer was last heard, on the clock
    of the owner's choice."""

    __slots__ = ("_acknowledged", "_backlog_bytes", "_received", "_sent", "_told", "heard_s")

    def __init__(self, backlog_bytes: int, heard_s: float) -> None:
        self.heard_s = heard_s
        self._backlog_bytes = backlog_bytes
        self._sent = self._acknowledged = 0
        self._received = self._told = 0

    @property
    def unread_bytes(self) -> int:
        """Bytes that were sent and are not known to be received."""
        return self._sent - self._acknowledged

    def take(self, frame: bytes) -> bool:
        """Enter a frame that is about to be sent. False: the backlog is full, and it was not. To a
        peer that has received all, one frame may always be sent."""
        cost = len(frame) + _MESSAGE_OVERHEAD_BYTES
        if self.unread_bytes and self.unread_bytes + cost > self._backlog_bytes:
            return False
        self._sent += cost
        return True

    def receive(self, frame: bytes) -> bool:
        """Enter a frame that arrived. True: the peer should be told soon, by a beat."""
        self._received += len(frame) + _MESSAGE_OVERHEAD_BYTES
        return self._received - self._told > self._backlog_bytes // 8

    def beat(self) -> Beat:
        """What to tell the peer now."""
        self._told = self._received
        return Beat(self._received)

    def acknowledge(self, beat: Beat) -> None:
        """Enter what the peer says that it has received. Raises ChannelError when it can't have."""
        if not self._acknowledged <= beat.received_bytes <= self._sent:
            raise ChannelError(
                f"a beat acknowledges {beat.received_bytes} bytes; {self._acknowledged} to "
                f"{self._sent} were possible"
            )
        self._acknowledged = beat.received_bytes


class LeaseClock:
    """Seconds for which its owner was there to look. A gap between two looks counts at most
    `most_s`."""

    def __init__(self, now_s: float, most_s: float) -> None:
        self._last_s = now_s
        self._most_s = most_s
        self._elapsed_s = 0.0

    def look(self, now_s: float) -> float:
        """The clock's time at `now_s`, which is on any monotonic clock."""
        self._elapsed_s += min(max(now_s - self._last_s, 0.0), self._most_s)
        self._last_s = now_s
        return self._elapsed_s


class Sparingly:
    """Lets so many a minute through and counts the others."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._since_s = float("-inf")
        self._passed = 0
        self._held_back = 0

    def admit(self, now_s: float) -> int | None:
        """None: hold this one back. Else how many were held back since the last that passed."""
        if now_s - self._since_s >= 60:
            self._since_s, self._passed = now_s, 0
        if self._passed >= self._per_minute:
            self._held_back += 1
            return None
        self._passed += 1
        held_back, self._held_back = self._held_back, 0
        return held_back
