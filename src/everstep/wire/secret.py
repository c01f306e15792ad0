"""The job's secret, and the keys that are derived from it.

Theory of operation. Who has the secret belongs to the job; there are no users and no roles beyond
that. It is a line of text, so that it fits a file and a variable. No key is the secret itself:
each is the output of HKDF-SHA256 (RFC 5869: extract with a fixed salt, expand with the purpose),
so that a key that leaks says nothing about the others. Two purposes are private keys of
Curve25519, which any 32 bytes are.

A secret shows itself only when it is asked to (`reveal`, `write`): not in a repr, not in an
error's text, not in a copy by pickle. It must never be an argument of a command, where every user
of the host can read it.

It does not know where a setting came from; whoever reads the environment hands in text or path. It
can't tell a good secret from a long one: it refuses only what is plainly too short or too plain.

Source: H. Krawczyk, P. Eronen, RFC 5869.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Final, NoReturn, final

from everstep.errors import UserError

KEY_BYTES: Final = 32
MIN_CHARS: Final = 32
MAX_CHARS: Final = 1024
_MIN_DIFFERENT_CHARS: Final = 8
_SALT: Final = b"everstep secret 1"
_HOW_TO_MAKE: Final = "make one with `everstep secret`"


@final
class Secret:
    """One job's secret. Two are equal when their texts are."""

    __slots__ = ("_root", "_text")

    def __init__(self, text: str, origin: str) -> None:
        """`text` as a person or a file gives it; white space around it is not part of it. `origin`
        names its place in errors.

        Raises UserError when it is too short, too long, too plain, or no single line of printable
        ASCII.
        """
        text = text.strip()
        if len(text) < MIN_CHARS:
            raise UserError(
                f"the secret from {origin} has {len(text)} characters; at least {MIN_CHARS} are "
                f"needed, or it could be guessed: {_HOW_TO_MAKE}"
            )
        if len(text) > MAX_CHARS:
            raise UserError(
                f"the secret from {origin} has {len(text)} characters, more than {MAX_CHARS}: is "
                "it the right file?"
            )
        if not (text.isascii() and text.isprintable()):
            raise UserError(
                f"the secret from {origin} must be one line of printable ASCII characters: "
                f"{_HOW_TO_MAKE}"
            )
        if len(set(text)) < _MIN_DIFFERENT_CHARS:
            raise UserError(
                f"the secret from {origin} repeats a few characters and could be guessed: "
                f"{_HOW_TO_MAKE}"
            )
        self._text = text
        self._root = hmac.digest(_SALT, text.encode(), hashlib.sha256)

    @classmethod
    def from_file(cls, path: str | Path) -> Secret:
        """Read it from a file. Blocks on the file system.

        Raises UserError when the file can't be read, is not a regular one, or when others may read
        or change it. A group may read a file that root owns: that is how Kubernetes mounts one.
        """
        try:
            # A pipe without a writer would block the open.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UserError(
                f"the secret's file {path} can't be read: {error.strerror}; {_HOW_TO_MAKE}"
            ) from error
        try:
            _check_access(path, os.fstat(fd))
            data = os.read(fd, 4 * MAX_CHARS)
        finally:
            os.close(fd)
        try:
            text = data.decode("ascii")
        except UnicodeDecodeError:
            # Without its cause: a decoding error carries the bytes that it was given.
            raise UserError(f"the secret's file {path} holds more than ASCII text") from None
        return cls(text, str(path))

    def write(self, path: str | Path) -> None:
        """Write it to a new file that its owner alone can read. Blocks on the file system.

        Raises UserError when the file is there already or can't be made.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o600)
        except FileExistsError as error:
            raise UserError(
                f"{path} is there already, and a running job may be using it: name another file"
            ) from error
        except OSError as error:
            raise UserError(f"the secret's file {path} can't be made: {error.strerror}") from error
        with open(fd, "w", encoding="ascii") as file:
            file.write(f"{self._text}\n")

    def reveal(self) -> str:
        """The text, for a child's environment or a terminal that asked for it."""
        return self._text

    def coordinator_private_key(self) -> bytes:
        """Curve25519 private key of the coordinator, 32 bytes."""
        return self._derive(b"curve coordinator")

    def agent_private_key(self) -> bytes:
        """Curve25519 private key that all agents of the job share, 32 bytes."""
        return self._derive(b"curve agent")

    def bulk_key(self) -> bytes:
        """Symmetric key of the bulk plane's challenges, 32 bytes."""
        return self._derive(b"bulk plane")

    def checkpoint_key(self) -> bytes:
        """Symmetric key that signs checkpoints, 32 bytes."""
        return self._derive(b"checkpoints")

    def memory_tag(self) -> str:
        """Names what is kept in a host's memory for those who have the secret: 12 hexadecimal
        digits, which say nothing of it."""
        return self._derive(b"memory tier").hex()[:12]

    def _derive(self, purpose: bytes) -> bytes:
        """HKDF's expand step for one block, which is as long as a key."""
        return hmac.digest(self._root, purpose + b"\x01", hashlib.sha256)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._root, other._root)

    def __hash__(self) -> int:
        return hash(self._root)

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not copied by pickle")


def make_secret() -> Secret:
    """A new secret with 256 random bits."""
    return Secret(secrets.token_urlsafe(KEY_BYTES), "make_secret")


def _check_access(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"the secret's file {path} is not a regular file")
    if status.st_uid not in (0, os.geteuid()):
        raise UserError(
            f"the secret's file {path} belongs to user {status.st_uid}, who could change it: it "
            "must be yours or root's"
        )
    forbidden = stat.S_IRWXO | stat.S_IWGRP
    if status.st_uid != 0:
        forbidden |= stat.S_IRGRP
    if status.st_mode & forbidden:
        mode = stat.S_IMODE(status.st_mode)
        raise UserError(
            f"the secret's file {path} has mode {mode:04o}, so that others can use it: "
            f"chmod 600 {path}, and make a new secret if others may have read this one"
        )
