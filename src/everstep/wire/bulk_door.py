"""How a connection of the bulk plane begins: each side shows the other that it has the key.

Theory of operation. The listener sends a fresh random challenge. Who connects answers with a
challenge of its own, a ticket, and a keyed hash (HMAC, SHA-256) of all that was said; the listener
looks at the ticket only if the hash is right, and answers with its verdict and a keyed hash of the
whole conversation, its own role included. So what was recorded can't be played again, a listener
without the key is found out before a byte of state goes to it, and a stranger hears nothing but a
random number. Every message has one fixed length: there is none to lie about.

What follows is not encrypted. Who can write into an established connection can disturb a transfer;
digests, which came by the control plane, keep it from passing for the state.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from everstep.errors import EverstepError, TransientError

MAGIC = b"evsbulk1"
NONCE_BYTES = 32
TICKET_BYTES = 16
KEY_BYTES = 32
"""The shortest key that is taken."""

_MAC_BYTES = 32
_CHALLENGE = struct.Struct(f"<{len(MAGIC)}s{NONCE_BYTES}s")
_CLAIM = struct.Struct(f"<{NONCE_BYTES}s{TICKET_BYTES}s{TICKET_BYTES}sIB")
_VERDICT = struct.Struct("<BQ")


class Use(enum.IntEnum):
    """What a ticket is for. GREET: to see who is there, and go."""

    READ = 1
    GREET = 2


class Verdict(enum.IntEnum):
    """What a listener says to a claim."""

    WELCOME = 0
    UNKNOWN = 1
    EXPIRED = 2
    USED = 3
    WRONG_USE = 4
    WRONG_NODE = 5
    BUSY = 6
    DONE = 7


_WORDS = {
    Verdict.UNKNOWN: "the ticket is unknown there",
    Verdict.EXPIRED: "the ticket has expired or was withdrawn",
    Verdict.USED: "the ticket has been used",
    Verdict.WRONG_USE: "the ticket is for another use",
    Verdict.WRONG_NODE: "the ticket is another node's",
    Verdict.BUSY: "it has too many connections",
    Verdict.DONE: "the transfer is done",
}


class Claim(NamedTuple):
    """What one who connects asks for. `holder`: made at random for each transfer: it ties all
    connections of it to one another, and the ticket to it. `node`: who asks."""

    nonce: bytes
    ticket: bytes
    holder: bytes
    node: int
    use: int


class Stranger(EverstepError):
    """One who does not know the key, or does not speak the protocol."""


class Refused(EverstepError):
    """The other side, which has the key, refuses the ticket. Trying again is of no use."""


class Done(EverstepError):
    """The transfer that this connection belongs to has been completed by others."""


class Cut(TransientError):
    """A connection ended or stood still in the middle."""


def words(verdict: Verdict) -> str:
    """A verdict that is no welcome, for a sentence."""
    return _WORDS[verdict]


def admit(
    sock: socket.socket,
    key: bytes,
    deadline_s: float,
    judge: Callable[[Claim], tuple[Verdict, int]],
) -> tuple[Claim, Verdict]:
    """The listener's side. `judge` says what is to be said to a claim that came with the key, and
    how many bytes the snapshot has. `deadline_s`: on the monotonic clock, for all of it.

    Blocks. Raises Stranger, and Cut when the connection ends."""
    challenge = _CHALLENGE.pack(MAGIC, secrets.token_bytes(NONCE_BYTES))
    send(sock, challenge, deadline_s)
    answer = receive(sock, _CLAIM.size + _MAC_BYTES, deadline_s)
    said, mac = answer[: _CLAIM.size], answer[_CLAIM.size :]
    if not hmac.compare_digest(mac, _mac(key, b"caller", challenge, said)):
        raise Stranger("it does not know the job's secret")
    claim = Claim(*_CLAIM.unpack(said))
    verdict, nbytes = judge(claim)
    reply = _VERDICT.pack(verdict, nbytes)
    send(sock, reply + _mac(key, b"listener", challenge, answer, reply), deadline_s)
    return claim, verdict


def enter(
    sock: socket.socket,
    key: bytes,
    deadline_s: float,
    *,
    ticket: bytes,
    holder: bytes,
    node: int,
    use: Use,
) -> int:
    """The caller's side: how many bytes the snapshot has.

    Blocks. Raises Refused for a ticket that is not taken, Done for one whose transfer is complete,
    Stranger when the listener does not have the key, Cut when the connection ends (as it does for a
    caller without the key)."""
    challenge = receive(sock, _CHALLENGE.size, deadline_s)
    if not challenge.startswith(MAGIC):
        raise Stranger("it does not speak this version of the bulk plane")
    said = _CLAIM.pack(secrets.token_bytes(NONCE_BYTES), ticket, holder, node, use)
    answer = said + _mac(key, b"caller", challenge, said)
    send(sock, answer, deadline_s)
    try:
        reply = receive(sock, _VERDICT.size + _MAC_BYTES, deadline_s)
    except Cut as error:
        raise Cut(f"{error}; a listener says nothing to who does not have its secret") from error
    said, mac = reply[: _VERDICT.size], reply[_VERDICT.size :]
    if not hmac.compare_digest(mac, _mac(key, b"listener", challenge, answer, said)):
        raise Stranger("it does not know the job's secret")
    code, nbytes = _VERDICT.unpack(said)
    if code == Verdict.BUSY:
        raise Cut(words(Verdict.BUSY))
    if code == Verdict.DONE:
        raise Done(words(Verdict.DONE))
    if code != Verdict.WELCOME:
        raise Refused(_WORDS.get(code, f"it says {code}, which this version does not know"))
    return int(nbytes)


def send(sock: socket.socket, data: bytes, deadline_s: float) -> None:
    """Send all of `data`. Raises Cut when it can't be done by the deadline."""
    try:
        sock.settimeout(_left(deadline_s))
        sock.sendall(data)
    except OSError as error:
        raise Cut(_why(error)) from error


def receive(sock: socket.socket, nbytes: int, deadline_s: float) -> bytes:
    """Exactly `nbytes` bytes. Raises Cut when they do not come by the deadline."""
    data = bytearray()
    while len(data) < nbytes:
        try:
            sock.settimeout(_left(deadline_s))
            part = sock.recv(nbytes - len(data))
        except OSError as error:
            raise Cut(_why(error)) from error
        if not part:
            raise Cut(f"the connection was closed after {len(data)} of {nbytes} bytes")
        data += part
    return bytes(data)


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _why(error: OSError) -> str:
    return "it did not answer in time" if isinstance(error, TimeoutError) else str(error)


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Of parts of fixed lengths, the role first: so no two conversations have the same text."""
    return hmac.digest(key, b"".join(parts), "sha256")
