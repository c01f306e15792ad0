"""A bucket as a store, against a real server: what breaks on the way, and what is said of it."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from uuid import uuid4

import pytest
from obstore import exceptions
from tests import buckets
from tests.buckets import Bucket, Proxy

from everstep.errors import UserError
from everstep.tiers import objects
from everstep.tiers.objects import BucketStore
from everstep.tiers.open import open_store
from everstep.tiers.store import Denied, Exists, Missing, Stopped, StoreError

pytestmark = pytest.mark.usefixtures("bucket")
LONG_S = 60.0
SOON_S = 0.5


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[Proxy]:
    with buckets.proxy(bucket.port) as control:
        yield control


@pytest.fixture
def store(bucket: Bucket, proxy: Proxy) -> Iterator[BucketStore]:
    with closing(bucket.open(uuid4().hex, port=proxy.port)) as opened:
        yield opened


def put(store: BucketStore, key: str, data: bytes, deadline_s: float = LONG_S) -> None:
    store.put(key, [memoryview(data)], deadline_s=deadline_s)


def test_what_passes_is_tried_again(store: BucketStore, proxy: Proxy) -> None:
    proxy.faults.extend(["503", "reset", "lost", "503"])
    put(store, "a", b"abc")
    proxy.faults.extend(["503", "reset", "cut", "ok"])
    assert store.get("a", start=0, end=3, deadline_s=LONG_S) == b"abc"
    proxy.faults.extend(["reset", "503"])
    assert [entry.key for entry in store.list("", deadline_s=LONG_S)] == ["a"]
    proxy.faults.extend(["503", "reset"])
    store.delete("a", deadline_s=LONG_S)
    with pytest.raises(Missing):
        store.size("a", deadline_s=LONG_S)
    assert not proxy.faults


@pytest.mark.parametrize(
    ("fault", "words"),
    [("503", r"SlowDown: Please reduce your rate"), ("reset", "error sending request")],
)
def test_what_does_not_pass_is_told_with_its_first_cause(
    store: BucketStore, proxy: Proxy, fault: str, words: str
) -> None:
    proxy.always = fault
    with pytest.raises(StoreError, match=rf"/a: put: .*{words}; tried \d+ times; .* within 0\.5 s"):
        put(store, "a", b"x", deadline_s=SOON_S)
    with pytest.raises(StoreError, match=r"/a: size: .*; tried \d+ times; "):
        store.size("a", deadline_s=SOON_S)


def test_the_first_cause_is_the_one_that_is_told(store: BucketStore, proxy: Proxy) -> None:
    proxy.faults.extend(["503"])
    proxy.always = "reset"
    with pytest.raises(StoreError, match="SlowDown"):
        put(store, "a", b"x", deadline_s=SOON_S)


def test_a_server_that_says_nothing_does_not_keep_us(store: BucketStore, proxy: Proxy) -> None:
    proxy.always = "stall"
    with pytest.raises(StoreError, match=r"within 0\.5 s"):
        store.size("a", deadline_s=SOON_S)


def test_pauses_grow_and_are_drawn(store: BucketStore, proxy: Proxy) -> None:
    """Half a second of throttling is some tries, not a thousand."""
    proxy.always = "503"
    with pytest.raises(StoreError):
        store.size("a", deadline_s=SOON_S)
    assert 2 <= len(proxy.seen) <= 12


def test_parts_that_fail_are_sent_again(store: BucketStore, proxy: Proxy) -> None:
    proxy.only = "PUT"
    proxy.faults.extend(["ok", "503", "reset", "ok", "lost"])
    data = bytes(range(256)) * (80 << 10)
    put(store, "large", data)
    assert not proxy.faults
    assert store.get("large", deadline_s=LONG_S) == data


def test_ranges_that_fail_are_asked_for_again(store: BucketStore, proxy: Proxy) -> None:
    data = bytes(range(256)) * (140 << 10)
    put(store, "large", data)
    proxy.only = "GET"
    proxy.faults.extend(["cut", "ok", "503", "cut"])
    area = bytearray(len(data))
    store.get_into("large", memoryview(area), deadline_s=LONG_S)
    assert area == data


def test_a_put_whose_answer_was_lost_looks_taken(store: BucketStore, proxy: Proxy) -> None:
    """`Series` compares what is there: see its tests."""
    proxy.faults.extend(["lost"])
    with pytest.raises(Exists):
        store.put("commit", [memoryview(b"mine")], absent=True, deadline_s=LONG_S)
    assert store.get("commit", deadline_s=LONG_S) == b"mine"


def test_an_upload_that_dies_is_not_seen(store: BucketStore) -> None:
    stop = threading.Event()

    class Stopping(list[memoryview]):
        def __iter__(self) -> Iterator[memoryview]:
            yield from super().__iter__()
            stop.set()
            yield memoryview(bytes(16 << 20))

    pieces = Stopping([memoryview(bytes(20 << 20))])
    with pytest.raises(Stopped, match="/large: put: it was told to stop"):
        store.put("large", pieces, deadline_s=LONG_S, stop=stop)
    with pytest.raises(Missing):
        store.size("large", deadline_s=LONG_S)
    assert list(store.list("", deadline_s=LONG_S)) == []


def test_an_upload_takes_no_memory_of_its_own(bucket: Bucket) -> None:
    area = memoryview(bytearray(96 << 20))
    area[::4096] = bytes(len(area[::4096]))
    grown: list[int] = []
    over = threading.Event()
    before = _resident()

    def watch() -> None:
        while not over.wait(0.005):
            grown.append(_resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with closing(bucket.open(uuid4().hex)) as store:
            store.put("large", [area], deadline_s=LONG_S)
            store.get_into("large", area, deadline_s=LONG_S)
    finally:
        over.set()
        watcher.join()
        area.release()
    assert max(grown) < 48 << 20


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_who_may_not_is_told_at_once(bucket: Bucket, proxy: Proxy) -> None:
    with closing(bucket.open("shared", writer=False, port=proxy.port)) as reader:
        with pytest.raises(Denied, match="AccessDenied"):
            put(reader, "a", b"x")
        assert proxy.seen == ["PUT"]


def test_a_listing_that_is_refused_is_told_at_once(bucket: Bucket) -> None:
    store = objects.open_bucket(
        "s3://everstep/x",
        config={
            "endpoint": f"http://127.0.0.1:{bucket.port}",
            "access_key_id": "stranger",
            "secret_access_key": "unknown",
            "allow_http": True,
        },
    )
    with closing(store), pytest.raises(Denied, match="InvalidAccessKeyId"):
        list(store.list("", deadline_s=LONG_S))


def test_no_server_is_told(bucket: Bucket) -> None:
    with (
        closing(bucket.open("x", port=1)) as store,
        pytest.raises(StoreError, match=r"127\.0\.0\.1:1/"),
    ):
        store.size("a", deadline_s=SOON_S)


def test_the_environment_says_where_and_who(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environ().items():
        monkeypatch.setenv(name, value)
    with closing(open_store("s3://everstep/from/environ/")) as store:
        store.put("a", [memoryview(b"x")], deadline_s=LONG_S)
        assert store.where == "s3://everstep/from/environ"
    with closing(bucket.open("from/environ")) as again:
        assert again.get("a", deadline_s=LONG_S) == b"x"


def test_plain_http_must_be_asked_for(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with closing(open_store("s3://everstep/x")) as store, pytest.raises(StoreError):
        store.size("a", deadline_s=LONG_S)


def test_a_profile_needs_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "training")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "obstore.auth.boto3", raising=False)
    with pytest.raises(UserError, match="AWS_PROFILE=training needs boto3"):
        open_store("s3://bucket/prefix")


def test_whose_the_bucket_must_be(
    bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_BUCKET_OWNER", "111122223333")
    with closing(bucket.open(uuid4().hex, port=proxy.port)) as store:
        put(store, "a", b"x")
        put(store, "large", bytes(9 << 20))
        assert store.get("a", deadline_s=LONG_S) == b"x"
        assert len(list(store.list("", deadline_s=LONG_S))) == 2
        store.delete("a", deadline_s=LONG_S)
    for head in proxy.heads:
        if "?list-type" in head.partition("\r\n")[0]:
            continue
        assert "\r\nx-amz-expected-bucket-owner: 111122223333\r\n" in head
        assert re.search(r"signedheaders=\S*x-amz-expected-bucket-owner", head)
    monkeypatch.setenv("EVERSTEP_BUCKET_OWNER", "me")
    with pytest.raises(UserError, match="EVERSTEP_BUCKET_OWNER=me can't be asked for"):
        bucket.open("x")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("status code: 507 Insufficient Storage", "Full"),
        ("status code: 400 Bad Request: <Code>QuotaExceeded</Code>", "Full"),
    ],
)
def test_a_bucket_that_is_full(text: str, kind: str) -> None:
    error = exceptions.GenericError(f"Generic S3 error: Server returned {text}")
    assert not objects._may_pass(error)
    assert objects._kind(error).__name__ == kind


def test_without_credentials_it_is_said_soon() -> None:
    error = exceptions.GenericError(
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1ms - "
        "HTTP error: error sending request"
    )

    def connect(timeout_s: int, retries: int, lists: bool) -> None:
        raise error

    store = BucketStore("s3://everstep/x", connect)  # type: ignore[arg-type]
    with pytest.raises(Denied, match="/a: size: there are no credentials in the environment"):
        store.size("a", deadline_s=LONG_S)


def test_no_secret_is_in_an_error() -> None:
    error = exceptions.GenericError(
        "Error performing PUT https://a.blob.core.windows.net/c/x?sig=secret&se=1 in 3ms"
    )
    assert "secret" not in objects._words(error)
