"""The store that is a bucket: S3 and what speaks like it, Google's and Microsoft's, by obstore.

Theory of operation. An object store has a store's properties by itself: an object appears whole,
and `If-None-Match` lets one of several create it. What is left to do is to wait well. Each request
is tried again after a growing random pause, as long as the deadline allows, when what went wrong
may pass: a throttle (503 SlowDown, 429), a server's error, a connection that broke or timed out. An
error that ends it names what went wrong first, for the last is often only the deadline.

Large objects go up in parts (multipart), straight from the caller's memory, a few at a time; a part
that fails is sent again by itself. They come down in ranges, straight into the caller's memory. The
limit on bandwidth counts parts as they begin.

Credentials, region and endpoint are those of the environment, by obstore: AWS_ACCESS_KEY_ID, web
identity, the container's or the instance's role, AWS_PROFILE where boto3 is installed; GOOGLE_* and
AZURE_* likewise. Plain HTTP is refused unless AWS_ALLOW_HTTP=true. EVERSTEP_BUCKET_OWNER goes with
all requests to S3 but listings, and S3 refuses them where the bucket is another account's.

What dies in the middle of an upload leaves parts that nobody sees and that are paid for: a rule on
the bucket (AbortIncompleteMultipartUpload) removes them; obstore can't list them.

It does not know what the bytes are.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from everstep.errors import UserError
from everstep.tiers.names import check_key, check_prefix, is_key
from everstep.tiers.store import Denied, Entry, Exists, Full, Missing, StoreError
from everstep.tiers.waiting import Deadline
from everstep.wire.bulk_throttle import UNLIMITED, Throttle

try:
    import obstore
    from obstore import exceptions
    from obstore.store import from_url
except ModuleNotFoundError as error:
    raise UserError(
        "checkpoints in an object store need obstore: pip install 'everstep[store]'"
    ) from error

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode
    from obstore.store import ObjectStore

_Result = TypeVar("_Result")

PART_BYTES = 8 << 20
"""Of one part of an upload; larger where an object would have more than `MAX_PARTS`."""
MAX_PARTS = 9_000  # S3 allows 10,000
PARTS_AT_ONCE = 4
RANGE_BYTES = 16 << 20
"""Of one request of a download: what is lost when it breaks."""
_TIMEOUTS_S = (1, 2, 4, 8, 16, 32, 64)  # of one request: the first that is not below what is left
_LIST_AT_ONCE = 1000
_AWS = ("s3", "s3a")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<]*)</Message>)?")
_QUERY = re.compile(r"\?\S*")  # may hold a signature
_FULL = re.compile(r"status code: 507|QuotaExceeded|StorageFull|InsufficientCapacity")
_PASSING = {"408", "409", "425", "429"}  # besides 5xx; 409: another is creating it right now
_METADATA = "//169.254.169.254/"  # where a machine's role is asked for, when nothing else is set
_TRIES_METADATA = 3
_SETUP = re.compile(r"builder error|BadScheme|invalid|unable to recognise", re.IGNORECASE)


def open_bucket(
    url: str, *, throttle: Throttle = UNLIMITED, config: dict[str, Any] | None = None
) -> BucketStore:
    """The store at `s3://bucket/prefix` and the like. `config`: obstore's, over the environment's.
    Asks nobody. Raises UserError for an address that can't be one."""
    scheme, _, rest = url.partition("://")
    rest = rest.rstrip("/")
    bucket, _, prefix = rest.partition("/")
    if not bucket or (prefix and not is_key(prefix)):
        raise UserError(
            f"{url!r} is no place for checkpoints: {scheme}://BUCKET/PREFIX, the prefix of "
            "letters, digits, dots, underscores, hyphens and slashes"
        )
    options = dict(config or {})
    plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("true", "1")
    plain = options.pop("allow_http", plain)
    headers = _owner(scheme)
    profile = _profile(scheme)
    if profile is not None:
        options.setdefault("credential_provider", profile)

    def connect(timeout_s: int, retries: int, lists: bool) -> ObjectStore:
        return from_url(
            f"{scheme}://{rest}",
            client_options={
                "timeout": timedelta(seconds=timeout_s),
                "connect_timeout": timedelta(seconds=min(5, timeout_s)),
                "allow_http": plain,
                # obstore signs them in all requests but listings, where they must not be then.
                "default_headers": {} if lists else headers,
            },
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=timeout_s),
            },
            **options,
        )

    try:
        connect(1, 0, False)
    except (exceptions.BaseError, ValueError) as error:
        raise UserError(f"{url} can't be used for checkpoints: {_words(error)}") from error
    return BucketStore(f"{scheme}://{rest}", connect, throttle=throttle)


class BucketStore:
    """Objects below a bucket's prefix. `connect`: makes a client whose requests take at most so
    many seconds and are tried again so often, for listings or for all else. `throttle`: of what is
    sent."""

    def __init__(
        self,
        where: str,
        connect: Callable[[int, int, bool], ObjectStore],
        *,
        throttle: Throttle = UNLIMITED,
    ) -> None:
        self._where = where
        self._connect = connect
        self._throttle = throttle
        self._lock = threading.Lock()
        self._clients: dict[tuple[int, int, bool], ObjectStore] = {}

    @property
    def where(self) -> str:
        """The address, without credentials."""
        return self._where

    def put(
        self,
        key: str,
        pieces: Sequence[memoryview],
        *,
        absent: bool = False,
        deadline_s: float,
        stop: threading.Event | None = None,
    ) -> None:
        """See `Store.put`."""
        check_key(key)
        deadline = Deadline(deadline_s, stop=stop)
        nbytes = sum(piece.nbytes for piece in pieces)
        if not absent and nbytes > PART_BYTES:
            self._put_parts(key, pieces, nbytes, deadline)
            return
        data = b"".join(pieces)

        def send(client: ObjectStore) -> None:
            deadline.wait(self._throttle.book(nbytes))
            mode: PutMode = "create" if absent else "overwrite"
            obstore.put(client, key, data, mode=mode, use_multipart=False)

        self._try(key, "put", deadline, send)

    def get(self, key: str, *, start: int = 0, end: int | None = None, deadline_s: float) -> bytes:
        """See `Store.get`."""
        check_key(key)
        deadline = Deadline(deadline_s)
        if end is None or end <= start:
            nbytes = self.size(key, deadline_s=deadline.left())
            end = nbytes if end is None else end
            if not 0 <= start <= end <= nbytes:
                raise StoreError(
                    f"{self._where}/{key}: get: it has {nbytes} bytes; {start} to {end} were asked "
                    "for"
                )
        area = bytearray(end - start)
        self._fill(key, memoryview(area), start, deadline)
        return bytes(area)

    def get_into(self, key: str, area: memoryview, *, start: int = 0, deadline_s: float) -> None:
        """See `Store.get_into`."""
        check_key(key)
        deadline = Deadline(deadline_s)
        with area.cast("B") as raw:
            if not raw.nbytes:
                self.size(key, deadline_s=deadline.left())
            self._fill(key, raw, start, deadline)

    def size(self, key: str, *, deadline_s: float) -> int:
        """See `Store.size`."""
        check_key(key)
        about = self._try(
            key, "size", Deadline(deadline_s), lambda client: obstore.head(client, key)
        )
        return about["size"]

    def list(self, prefix: str, *, deadline_s: float) -> Iterator[Entry]:
        """See `Store.list`."""
        check_prefix(prefix)
        found = self._try(
            prefix, "list", Deadline(deadline_s), partial(_pages, prefix=prefix), retries=3
        )
        for about in sorted(found, key=lambda about: about["path"]):
            if is_key(about["path"]):
                yield Entry(
                    key=about["path"],
                    nbytes=about["size"],
                    changed_s=about["last_modified"].timestamp(),
                )

    def delete(self, key: str, *, deadline_s: float) -> None:
        """See `Store.delete`."""
        check_key(key)
        try:
            self._try(
                key, "delete", Deadline(deadline_s), lambda client: obstore.delete(client, key)
            )
        except Missing:
            pass  # some say so, others don't

    def sweep(self, *, older_than_s: float, deadline_s: float) -> int:
        """See `Store.sweep`: what is left here is a rule's to remove."""
        return 0

    def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            self._clients.clear()

    def _put_parts(
        self, key: str, pieces: Sequence[memoryview], nbytes: int, deadline: Deadline
    ) -> None:
        part_bytes = max(PART_BYTES, -(-nbytes // MAX_PARTS))

        def parts() -> Iterator[memoryview]:
            for piece in pieces:
                raw = piece.cast("B")
                for start in range(0, raw.nbytes, part_bytes):
                    part = raw[start : start + part_bytes]
                    deadline.wait(self._throttle.book(part.nbytes))
                    yield part

        self._try(
            key,
            "put",
            deadline,
            lambda client: obstore.put(
                client,
                key,
                parts(),
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=PARTS_AT_ONCE,
            ),
            retries=3,
        )

    def _fill(self, key: str, area: memoryview, start: int, deadline: Deadline) -> None:
        for at in range(0, area.nbytes, RANGE_BYTES):
            want = area[at : at + RANGE_BYTES]
            first = start + at
            ask = partial(obstore.get_range, path=key, start=first, end=first + want.nbytes)
            got = memoryview(self._try(key, "get", deadline, ask))
            if got.nbytes != want.nbytes:
                raise StoreError(
                    f"{self._where}/{key}: get: it ends at byte {first + got.nbytes}; "
                    f"{start} to {start + area.nbytes} were asked for"
                )
            want[:] = got

    def _client(self, seconds: float, retries: int, lists: bool) -> ObjectStore:
        timeout_s = next((limit for limit in _TIMEOUTS_S if limit >= seconds), _TIMEOUTS_S[-1])
        with self._lock:
            kind = (timeout_s, retries, lists)
            if kind not in self._clients:
                self._clients[kind] = self._connect(*kind)
            return self._clients[kind]

    def _try(
        self,
        key: str,
        what: str,
        deadline: Deadline,
        act: Callable[[ObjectStore], _Result],
        *,
        retries: int = 0,
    ) -> _Result:
        """Do it, again and again while that may help. `retries`: of single requests within it."""
        name = f"{self._where}/{key}: {what}"
        first: Exception | None = None
        tries = 0
        while True:
            try:
                deadline.check()
                tries += 1
                return act(self._client(deadline.left(), retries, what == "list"))
            except (exceptions.BaseError, FileNotFoundError) as error:
                if not _may_pass(error) or (_METADATA in str(error) and tries >= _TRIES_METADATA):
                    raise _kind(error)(f"{name}: {_words(error)}") from error
                first = first or error
                deadline.pause()
            except StoreError as error:  # from the deadline, in the middle of an upload too
                cause = f"{_words(first)}; tried {tries} times; " if first is not None else ""
                raise type(error)(f"{name}: {cause}{error}") from first


def _pages(client: ObjectStore, prefix: str) -> list[ObjectMeta]:
    """All objects. Not every server lists them in order, so none is asked to go on from a key."""
    pages = obstore.list(client, prefix=prefix.rstrip("/") or None, chunk_size=_LIST_AT_ONCE)
    return [about for page in pages for about in page]


def _owner(scheme: str) -> dict[str, str]:
    """The header (signed like the others) that says whose the bucket must be."""
    owner = os.environ.get("EVERSTEP_BUCKET_OWNER")
    if not owner:
        return {}
    if scheme not in _AWS or not re.fullmatch(r"\d{12}", owner):
        raise UserError(
            f"EVERSTEP_BUCKET_OWNER={owner} can't be asked for at {scheme}://: it is the number of "
            "an account of AWS, twelve digits, for a bucket on S3"
        )
    return {"x-amz-expected-bucket-owner": owner}


def _profile(scheme: str) -> object | None:
    """What answers for a named profile of AWS, which obstore by itself does not read."""
    named = os.environ.get("AWS_PROFILE")
    if not named or scheme not in _AWS or "AWS_ACCESS_KEY_ID" in os.environ:
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise UserError(
            f"AWS_PROFILE={named} needs boto3, which is not installed: pip install boto3, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    return Boto3CredentialProvider()


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed when it is made again."""
    if not isinstance(error, exceptions.GenericError) or _FULL.search(str(error)):
        return False
    status = _STATUS.search(str(error))
    if status is None:  # a connection that broke, or nothing was asked at all
        return _SETUP.search(str(error)) is None
    return status[1] in _PASSING or status[1].startswith("5")


def _kind(error: Exception) -> type[StoreError]:
    text = str(error)
    if _METADATA in text:
        return Denied
    if _FULL.search(text):
        return Full
    if isinstance(error, FileNotFoundError):
        return StoreError if "NoSuchBucket" in text else Missing
    if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
        return Exists
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return Denied
    status = _STATUS.search(text)  # a listing's errors are all generic
    return Denied if status is not None and status[1] in ("401", "403") else StoreError


def _words(error: Exception) -> str:
    """What obstore says, in a line, and without what may be secret."""
    text = str(error).partition("\n\nDebug source")[0]
    line = _QUERY.sub("", text.partition("\n")[0].partition("<")[0]).strip(" :")
    if _METADATA in text:
        line = f"there are no credentials in the environment, and the machine gives none: {line}"
    code = _CODE.search(text)
    return f"{line}: {': '.join(filter(None, code.groups()))}" if code else line
