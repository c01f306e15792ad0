"""The few calls of etcd that a lease needs, over its JSON gateway.

Theory of operation. Each call is one POST on a connection of its own, in HTTP 1.0, where the end of
the connection is the end of the answer, also of those that etcd streams. A call is rare (a few in a
lease), so nothing is gained by keeping connections, and none outlives a change of the network. An
endpoint that fails or is too slow gives way to the next, and is the last to be asked from then on.
A call that failed may have been carried out; callers must be able to bear that.

In etcd's JSON bytes are base64 and 64-bit numbers are strings; zero and empty are left out.

It does not know what is kept in etcd, or for how long.

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

import msgspec

from everstep.errors import TransientError, UserError

_PORT: Final = 2379
_MAX_ANSWER_BYTES: Final = 1 << 20  # ours are a few hundred
_QUERY: Final = frozenset({"user", "password-file", "ca", "cert", "key"})
_FORM: Final = (
    "etcd://HOST:PORT[,HOST:PORT...][?user=NAME&password-file=PATH], or etcds:// with TLS"
)
# gRPC's codes
_UNKNOWN: Final = 2
_CALLERS_FAULT: Final = frozenset(
    {3, 7, 12, 16}
)  # invalid, not permitted, no such call, not let in
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

    def __init__(self, where: str, call: str, error: _Error) -> None:
        if isinstance(error.error, str):
            self.code, said = error.code, error.error
        else:
            self.code, said = error.error.grpc_code, error.error.message
        super().__init__(f"{where}: etcd refuses {call} ({said})")


class EtcdClient:
    """Asks the members at `address`. One attempt with one of them takes `attempt_s` at most, a call
    as often as there are members. Loop thread only.

    All calls raise TransientError when no member answers as it should, UserError when they refuse
    whoever asks. Raises UserError if a file of TLS can't be read.
    """

    def __init__(self, address: EtcdAddress, attempt_s: float) -> None:
        self._address = address
        self._attempt_s = attempt_s
        self._endpoints = deque(address.endpoints)
        self._tls = _tls_context(address) if address.tls else None
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
        for _ in range(len(self._endpoints)):
            endpoint = self._endpoints[0]
            try:
                async with asyncio.timeout(self._attempt_s):
                    return await self._ask_member(endpoint, call, question, answer)
            except TimeoutError:
                where = _name(endpoint)
                failures.append(f"{where}: no answer within {self._attempt_s:g} s")
            except _Refused as refused:
                if refused.code in _CALLERS_FAULT:
                    raise UserError(
                        f"{refused}; look at user, password-file and cert in coordinator_lease"
                    ) from refused
                failures.append(str(refused))
            except TransientError as error:
                failures.append(str(error))
            if self._endpoints[0] == endpoint:  # no other call has put it last meanwhile
                self._endpoints.rotate(-1)
        raise TransientError(f"etcd can't be asked ({'; '.join(failures)})")

    async def _ask_member(
        self, endpoint: tuple[str, int], call: str, question: Mapping[str, Any], answer: type[T]
    ) -> T:
        """Ask one member, as the user that we are; a token that it doesn't take is made anew."""
        if self._address.user and self._token:
            try:
                return await self._say(endpoint, call, question, answer, self._token)
            except _Refused as refused:
                if refused.code not in _TOKEN_IS_OLD:
                    raise
        if self._address.user:
            password = _read(self._address.password_file, "password").strip()
            who = {"name": self._address.user, "password": password}
            self._token = (await self._say(endpoint, "auth/authenticate", who, _Token, "")).token
        return await self._say(endpoint, call, question, answer, self._token)

    async def _say(
        self,
        endpoint: tuple[str, int],
        call: str,
        question: Mapping[str, Any],
        answer: type[T],
        token: str,
    ) -> T:
        where = _name(endpoint)
        try:
            status, body = await self._post(endpoint, call, msgspec.json.encode(question), token)
        except TimeoutError:
            raise
        except OSError as error:
            raise TransientError(f"{where}: {error.strerror or error}") from error
        try:
            if status == 200 and not body.startswith(b'{"error"'):
                return msgspec.json.decode(body, type=answer, strict=False)
            failed = msgspec.json.decode(body, type=_Error, strict=False)
        except msgspec.MsgspecError as error:
            raise TransientError(
                f"{where}: HTTP {status} and no answer of etcd's gateway to /v3/{call}; is it etcd "
                "3.4 or newer, with its gRPC gateway on?"
            ) from error
        raise _Refused(where, call, failed)

    async def _post(
        self, endpoint: tuple[str, int], call: str, body: bytes, token: str
    ) -> tuple[int, bytes]:
        """The status and body of the answer; 0 where there is none. Raises OSError."""
        host, port = endpoint
        head = [f"POST /v3/{call} HTTP/1.0", f"Host: {_name(endpoint)}"]
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if token:
            head.append(f"Authorization: {token}")
        reader, writer = await asyncio.open_connection(host, port, ssl=self._tls)
        try:
            writer.write("\r\n".join([*head, "", ""]).encode() + body)
            try:
                answer = await reader.readexactly(_MAX_ANSWER_BYTES)
            except asyncio.IncompleteReadError as end:
                answer = end.partial
        finally:
            writer.transport.abort()  # nothing is under way, and a dead network must not hold us
        line, _, rest = answer.partition(b"\r\n")
        words = line.split()
        status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
        return status, rest.partition(b"\r\n\r\n")[2]


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
        parts = urlsplit(f"//{where}")
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as the resolver will
    except ValueError:
        host, port = "", None
    if not host:
        raise UserError(f"coordinator_lease: {where!r} in {text!r} is no HOST:PORT")
    return host, _PORT if port is None else port


def _name(endpoint: tuple[str, int]) -> str:
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
