"""The few calls of etcd that a lease needs, over its JSON gateway.

Theory of operation. Each attempt has a session of aiohttp, and each POST a connection: calls are
rare (a few in a lease), so nothing is gained by keeping them, none outlives a change of the
network, and a client has nothing to close. A member that fails or is too slow gives way to the
next, and is the last to be asked from then on; nothing else is tried again. A call that failed may
have been carried out; callers must be able to bear that.

In etcd's JSON bytes are base64 and 64-bit numbers are strings; zero and empty are left out.

It does not know what is kept in etcd, or for how long. aiohttp comes with the extra `etcd`: who has
no etcd does not import this.

Source: https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import parse_qsl, urlsplit

import aiohttp
import msgspec
from aiohttp import ClientSession, ClientTimeout, TCPConnector
from yarl import URL

from everstep.errors import TransientError, UserError

_PORT: Final = 2379
_MAX_ANSWER_BYTES: Final = 1 << 20  # ours are a few hundred
_QUERY: Final = frozenset({"user", "password-file", "ca", "cert", "key"})
_FORM: Final = (
    "etcd://HOST:PORT[,HOST:PORT...][?user=NAME&password-file=PATH], or etcds:// with TLS"
)
# gRPC's codes
_UNKNOWN: Final = 2
_CALLERS_FAULT: Final = frozenset({3, 7, 12, 16})  # invalid, not permitted, no such call, no user
_TOKEN_IS_OLD: Final = frozenset({3, 16})  # 3: users or roles have been changed since

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """Where etcd is, and who asks. `endpoints`: host and port of members, any of which will do.
    Paths are of PEM files, except that of the password."""

    endpoints: tuple[tuple[str, int], ...]
    tls: bool = False
    user: str = ""
    password_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""


class KeyValue(msgspec.Struct, frozen=True):
    """A key that exists. Revisions are etcd's counters: of the change that made it, and of the
    newest."""

    key: bytes
    create_revision: int
    mod_revision: int
    value: bytes = b""
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Unchanged:
    """A condition: the key's revision is still this; 0: there is no such key."""

    key: bytes
    revision: int
    which: Literal["CREATE", "MOD"] = "MOD"


@dataclass(frozen=True, slots=True)
class Put:
    """A key to be set, for as long as `lease` lives; 0: for good."""

    key: bytes
    value: bytes
    lease: int = 0


class _Header(msgspec.Struct):
    revision: int


class _Lease(msgspec.Struct):
    lease: int = msgspec.field(name="ID")
    ttl_s: int = msgspec.field(name="TTL", default=0)


class _Streamed(msgspec.Struct):
    result: _Lease


class _Range(msgspec.Struct):
    kvs: list[KeyValue] = []


class _Transaction(msgspec.Struct):
    header: _Header
    succeeded: bool = False


class _Token(msgspec.Struct):
    token: str


class _StreamError(msgspec.Struct):
    grpc_code: int = _UNKNOWN
    message: str = ""


class _Error(msgspec.Struct):
    """What a call answers that failed; the second form is of those that are streamed."""

    error: str | _StreamError
    code: int = _UNKNOWN


class _Refused(TransientError):
    """etcd has answered, with an error."""

    def __init__(self, call: str, failed: _Error) -> None:
        error = failed.error
        said, self.code = (
            (error, failed.code) if isinstance(error, str) else (error.message, error.grpc_code)
        )
        super().__init__(f"etcd refuses {call} ({said})")


class EtcdClient:
    """Asks the members at `address`. One attempt with one of them takes `attempt_s` at most, half
    of which to connect; a call takes as many as there are members. Loop thread only.

    All calls raise TransientError when no member answers as it should, UserError when they refuse
    whoever asks. Raises UserError if a file of TLS can't be read.
    """

    def __init__(self, address: EtcdAddress, attempt_s: float) -> None:
        self._address = address
        self._attempt_s = attempt_s
        scheme = "https" if address.tls else "http"
        self._members = deque(
            URL.build(scheme=scheme, host=host, port=port) for host, port in address.endpoints
        )
        self._tls = _tls_context(address) if address.tls else True
        self._token = ""

    async def grant(self, ttl_s: int) -> tuple[int, int]:
        """A new lease, and after how many seconds without renewal it ends; never fewer than asked
        for."""
        answer = await self._ask("lease/grant", {"TTL": ttl_s}, _Lease)
        return answer.lease, answer.ttl_s

    async def keep_alive(self, lease: int) -> int:
        """Renew a lease: seconds until it ends, from when etcd had the call; 0 if it has ended."""
        answer = await self._ask("lease/keepalive", {"ID": lease}, _Streamed)
        return answer.result.ttl_s

    async def revoke(self, lease: int) -> None:
        """End a lease, and all keys that live by it."""
        await self._ask("lease/revoke", {"ID": lease}, dict[str, Any])

    async def read(self, prefix: bytes) -> dict[bytes, KeyValue]:
        """All keys that begin with `prefix`, as they were at one moment after the call."""
        end = prefix[:-1] + bytes([prefix[-1] + 1])
        answer = await self._ask("kv/range", {"key": prefix, "range_end": end}, _Range)
        return {kv.key: kv for kv in answer.kvs}

    async def put_if(self, conditions: Sequence[Unchanged], puts: Sequence[Put]) -> int | None:
        """Set all keys if all conditions hold: the revision of the change; else None, and nothing
        is set."""
        compare = [
            {"key": c.key, "target": c.which, f"{c.which.lower()}_revision": c.revision}
            for c in conditions
        ]
        success = [
            {"request_put": {"key": p.key, "value": p.value, "lease": p.lease}} for p in puts
        ]
        question = {"compare": compare, "success": success}
        answer = await self._ask("kv/txn", question, _Transaction)
        return answer.header.revision if answer.succeeded else None

    async def _ask(self, call: str, question: Mapping[str, Any], answer: type[T]) -> T:
        failures = []
        for _ in range(len(self._members)):
            member = self._members[0]
            try:
                async with asyncio.timeout(self._attempt_s), self._session(member) as session:
                    return await self._ask_member(session, call, question, answer)
            except TimeoutError:
                failures.append(f"{member.authority}: no answer within {self._attempt_s:g} s")
            except TransientError as error:
                failures.append(f"{member.authority}: {error}")
                if isinstance(error, _Refused) and error.code in _CALLERS_FAULT:
                    raise UserError(
                        f"{failures[-1]}; look at user, password-file and cert in coordinator_lease"
                    ) from error
            if self._members[0] == member:  # no other call has put it last meanwhile
                self._members.rotate(-1)
        raise TransientError(f"etcd can't be asked ({'; '.join(failures)})")

    def _session(self, member: URL) -> ClientSession:
        return ClientSession(
            member,
            connector=TCPConnector(ssl=self._tls, force_close=True),
            timeout=ClientTimeout(total=self._attempt_s, connect=self._attempt_s / 2),
        )

    async def _ask_member(
        self, session: ClientSession, call: str, question: Mapping[str, Any], answer: type[T]
    ) -> T:
        """Ask one member, as the user that we are; a token that it doesn't take is made anew."""
        if self._address.user and self._token:
            try:
                return await _say(session, call, question, answer, self._token)
            except _Refused as refused:
                if refused.code not in _TOKEN_IS_OLD:
                    raise
        if self._address.user:
            password = _read(self._address.password_file, "password").strip()
            who = {"name": self._address.user, "password": password}
            self._token = (await _say(session, "auth/authenticate", who, _Token)).token
        return await _say(session, call, question, answer, self._token)


async def _say(
    session: ClientSession, call: str, question: Mapping[str, Any], answer: type[T], token: str = ""
) -> T:
    headers = {"Content-Type": "application/json"} | ({"Authorization": token} if token else {})
    body = msgspec.json.encode(question)
    status = 0
    try:
        # What is asked may hold a password: it goes nowhere else.
        asking = session.post(f"/v3/{call}", data=body, headers=headers, allow_redirects=False)
        async with asking as response:
            status, body = response.status, await _capped(response.content)
        if status == 200 and not body.startswith(b'{"error"'):
            return msgspec.json.decode(body, type=answer, strict=False)
        failed = msgspec.json.decode(body, type=_Error, strict=False)
    except aiohttp.ClientOSError as error:
        raise TransientError(error.strerror or str(error)) from error
    except aiohttp.ConnectionTimeoutError as error:
        raise TransientError(f"no connection within {session.timeout.connect:g} s") from error
    except (aiohttp.ClientError, msgspec.MsgspecError) as error:
        raise TransientError(
            f"HTTP {status} and no answer of etcd's gateway to /v3/{call}; is it etcd 3.4 or "
            "newer, with its gRPC gateway on?"
        ) from error
    raise _Refused(call, failed)


async def _capped(content: aiohttp.StreamReader) -> bytes:
    try:
        return await content.readexactly(_MAX_ANSWER_BYTES)
    except asyncio.IncompleteReadError as end:
        return end.partial


def parse_address(text: str) -> EtcdAddress:
    """The address that `text` is. Raises UserError for one that is not of the form, or that holds a
    password."""
    form = UserError(f"coordinator_lease: {text!r} is no address of etcd; give {_FORM}")
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise form from error
    if parts.scheme not in ("etcd", "etcds") or not parts.netloc or parts.path.strip("/"):
        raise form
    if "@" in parts.netloc:
        raise UserError(
            "coordinator_lease: an address shows itself in process lists and logs; give the user "
            "as ?user=NAME&password-file=PATH, not before the host"
        )
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(query) - _QUERY):
        raise UserError(
            f"coordinator_lease: {', '.join(unknown)} in {text!r}: known are "
            f"{', '.join(sorted(_QUERY))}"
        )
    if bool(query.get("user")) != bool(query.get("password-file")):
        raise UserError(f"coordinator_lease: {text!r}: user and password-file belong together")
    if query.keys() & {"ca", "cert", "key"} and parts.scheme != "etcds":
        raise UserError(f"coordinator_lease: {text!r}: ca, cert and key need etcds://")
    return EtcdAddress(
        endpoints=tuple(_endpoint(where, text) for where in parts.netloc.split(",")),
        tls=parts.scheme == "etcds",
        **{name.replace("-", "_"): value for name, value in query.items()},
    )


def _endpoint(where: str, text: str) -> tuple[str, int]:
    try:
        url = URL(f"http://{where}")
        host, port = url.host or "", url.explicit_port
        host.encode("idna")  # as the resolver will
    except ValueError:
        host, port = "", None
    if not host:
        raise UserError(f"coordinator_lease: {where!r} in {text!r} is no HOST:PORT")
    return host, _PORT if port is None else port


def _tls_context(address: EtcdAddress) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=address.ca or None)
        if address.cert:
            context.load_cert_chain(address.cert, address.key or None)
    except OSError as error:  # SSLError is one
        raise UserError(
            f"coordinator_lease: ca {address.ca!r}, cert {address.cert!r}, key {address.key!r}: "
            f"no PEM files for TLS ({error.strerror or error})"
        ) from error
    return context


def _read(path: str, what: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"coordinator_lease: {path}: etcd's {what} can't be read ({error.strerror})"
        ) from error
