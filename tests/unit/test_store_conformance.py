"""What every store of checkpoints must do, whatever it is made of: `everstep.tiers.store`.

A backend is a function that opens an empty store, and is added to BACKENDS. Those that are called
flaky have something go wrong at every request that they survive.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests import buckets
from tests.unit.checkpoints import DictStore
from tests.unit.memorydesks import Hosts

from everstep.tiers.files import FileStore
from everstep.tiers.store import Exists, Missing, Stopped, Store, StoreError

LONG_S = 60.0
SOON_S = 1.0
pytestmark = pytest.mark.usefixtures("bucket")  # started before a test counts what there is
Backend = Callable[[pytest.FixtureRequest], AbstractContextManager[Store]]


@contextmanager
def in_directory(request: pytest.FixtureRequest) -> Iterator[Store]:
    yield FileStore(request.getfixturevalue("tmp_path") / "store")


@contextmanager
def in_directory_without_unnamed_files(request: pytest.FixtureRequest) -> Iterator[Store]:
    """As on NFS."""
    patch = request.getfixturevalue("monkeypatch")
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *args, **kwargs)

    patch.setattr(os, "open", refuse)
    yield FileStore(request.getfixturevalue("tmp_path") / "store")


@contextmanager
def in_bucket(request: pytest.FixtureRequest) -> Iterator[Store]:
    with closing(request.getfixturevalue("bucket").open(uuid4().hex)) as store:
        yield store


@contextmanager
def in_flaky_bucket(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Every second request is throttled, or its connection breaks."""
    bucket = request.getfixturevalue("bucket")
    with (
        buckets.proxy(bucket.port) as proxy,
        closing(bucket.open(uuid4().hex, port=proxy.port)) as store,
    ):
        proxy.faults.extend(["503", "ok", "reset", "ok"] * 50)
        yield store


@contextmanager
def in_dict(request: pytest.FixtureRequest) -> Iterator[Store]:
    yield DictStore()


@contextmanager
def in_memory(request: pytest.FixtureRequest) -> Iterator[Store]:
    with closing(Hosts(request.getfixturevalue("tmp_path"))) as hosts:
        hosts.start("a")
        yield hosts.store("a", copies=1)


@contextmanager
def in_memory_of_another_host(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Who puts reads what another host has: its own forgets each object as soon as it is put."""
    with closing(Hosts(request.getfixturevalue("tmp_path"))) as hosts:
        for name in "ab":
            hosts.start(name)
        stores = [hosts.store(name, copies=2) for name in "ab"]
        hosts.acquaint(stores)
        hosts.forget_own("a")
        yield stores[0]


BACKENDS: dict[str, Backend] = {
    "memory": in_memory,
    "memory of another host": in_memory_of_another_host,
    "directory": in_directory,
    "directory without O_TMPFILE": in_directory_without_unnamed_files,
    "bucket": in_bucket,
    "flaky bucket": in_flaky_bucket,
    "dict": in_dict,
}


@pytest.fixture(params=sorted(BACKENDS))
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with BACKENDS[request.param](request) as opened:
        yield opened


def put(store: Store, key: str, data: bytes, *, absent: bool = False) -> None:
    store.put(key, [memoryview(data)], absent=absent, deadline_s=LONG_S)


def get(store: Store, key: str) -> bytes:
    return store.get(key, deadline_s=LONG_S)


def keys(store: Store, prefix: str = "") -> list[str]:
    return [entry.key for entry in store.list(prefix, deadline_s=LONG_S)]


def test_it_is_a_store(store: Store) -> None:
    assert isinstance(store, Store)
    assert store.where


def test_what_was_put_is_there(store: Store) -> None:
    put(store, "run/parts/a.bin", b"abc")
    assert get(store, "run/parts/a.bin") == b"abc"
    assert store.size("run/parts/a.bin", deadline_s=LONG_S) == 3


def test_pieces_follow_each_other(store: Store) -> None:
    pieces = [memoryview(b"ab"), memoryview(b""), memoryview(bytearray(b"cdef"))[1:3]]
    store.put("a", pieces, deadline_s=LONG_S)
    assert get(store, "a") == b"abde"


def test_an_empty_object(store: Store) -> None:
    put(store, "empty", b"")
    assert get(store, "empty") == b""
    assert store.size("empty", deadline_s=LONG_S) == 0
    store.get_into("empty", memoryview(bytearray()), deadline_s=LONG_S)
    assert keys(store) == ["empty"]


def test_ranges(store: Store) -> None:
    put(store, "a", b"0123456789")
    assert store.get("a", start=3, deadline_s=LONG_S) == b"3456789"
    assert store.get("a", start=3, end=5, deadline_s=LONG_S) == b"34"
    assert store.get("a", start=10, end=10, deadline_s=LONG_S) == b""
    area = bytearray(4)
    store.get_into("a", memoryview(area), start=6, deadline_s=LONG_S)
    assert area == b"6789"


def test_a_range_beyond_the_end_is_an_error(store: Store) -> None:
    put(store, "a", b"0123456789")
    with pytest.raises(StoreError):
        store.get("a", start=8, end=11, deadline_s=LONG_S)
    with pytest.raises(StoreError):
        store.get("a", start=20, end=21, deadline_s=LONG_S)
    with pytest.raises(StoreError):
        store.get_into("a", memoryview(bytearray(4)), start=8, deadline_s=LONG_S)


def test_large_objects(store: Store) -> None:
    """Of several parts of an upload and several ranges of a download, none of them even."""
    data = os.urandom(1 << 20) * 19 + b"end"
    area = memoryview(bytearray(data))
    store.put("large", [area[:7], area[7:]], deadline_s=LONG_S)
    assert store.size("large", deadline_s=LONG_S) == len(data)
    back = bytearray(len(data) - 5)
    store.get_into("large", memoryview(back), start=5, deadline_s=LONG_S)
    assert bytes(back) == data[5:]
    area.release()


def test_what_is_not_there_is_missing(store: Store) -> None:
    put(store, "a/b", b"x")
    for key in ("b", "a/c", "a/b2", "c/d"):
        with pytest.raises(Missing):
            store.get(key, deadline_s=LONG_S)
        with pytest.raises(Missing):
            store.get(key, start=0, end=1, deadline_s=LONG_S)
        with pytest.raises(Missing):
            store.get_into(key, memoryview(bytearray(1)), deadline_s=LONG_S)
        with pytest.raises(Missing):
            store.size(key, deadline_s=LONG_S)
        store.delete(key, deadline_s=LONG_S)
    assert keys(store) == ["a/b"]


def test_absent_puts_once(store: Store) -> None:
    put(store, "run/commits/1.json", b"first", absent=True)
    with pytest.raises(Exists):
        put(store, "run/commits/1.json", b"second", absent=True)
    assert get(store, "run/commits/1.json") == b"first"


def test_of_several_at_once_one_puts(store: Store) -> None:
    gate = threading.Barrier(6)
    outcomes: dict[int, str] = {}

    def race(number: int) -> None:
        gate.wait()
        try:
            put(store, "commit", b"%d" % number, absent=True)
            outcomes[number] = "put"
        except Exists:
            outcomes[number] = "exists"

    threads = [threading.Thread(target=race, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    winners = [number for number, outcome in outcomes.items() if outcome == "put"]
    assert len(outcomes) == 6
    assert len(winners) == 1
    assert get(store, "commit") == b"%d" % winners[0]


def test_the_listing_is_in_order_and_of_whole_folders(store: Store) -> None:
    names = ["a-b/c", "a/b", "a/c/d", "a/c-d", "a.b", "ab/c", "a0", "z/0000000010", "z/0000000009"]
    for name in names:
        put(store, name, name.encode())
    assert keys(store) == sorted(names)
    assert keys(store, "a/") == ["a/b", "a/c-d", "a/c/d"]
    assert keys(store, "a/c/") == ["a/c/d"]
    assert keys(store, "nothing/") == []
    assert [entry.nbytes for entry in store.list("z/", deadline_s=LONG_S)] == [12, 12]


def test_when_it_was_put(store: Store) -> None:
    put(store, "a", b"x")
    put(store, "b", b"x")
    first, second = store.list("", deadline_s=LONG_S)
    assert abs(first.changed_s - second.changed_s) < 3600


def test_what_was_deleted_is_gone_and_may_come_again(store: Store) -> None:
    put(store, "a/b/c", b"x")
    put(store, "a/d", b"y")
    store.delete("a/b/c", deadline_s=LONG_S)
    store.delete("a/b/c", deadline_s=LONG_S)
    with pytest.raises(Missing):
        get(store, "a/b/c")
    assert keys(store) == ["a/d"]
    put(store, "a/b/c", b"z", absent=True)
    assert get(store, "a/b/c") == b"z"


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "../a", "a/../b", "a//b", ".a", "a/.b", "a b", "a\n", "ä", "a" * 600]
)
def test_what_is_no_key_is_refused(store: Store, key: str) -> None:
    area = memoryview(bytearray(1))
    asks: list[Callable[[], object]] = [
        lambda: put(store, key, b"x"),
        lambda: get(store, key),
        lambda: store.get_into(key, area, deadline_s=LONG_S),
        lambda: store.size(key, deadline_s=LONG_S),
        lambda: store.delete(key, deadline_s=LONG_S),
        lambda: list(store.list(f"{key}/", deadline_s=LONG_S)),
    ]
    for ask in asks:
        with pytest.raises(ValueError, match=r"is no (key|prefix)"):
            ask()


def test_a_put_that_is_stopped_leaves_nothing(store: Store) -> None:
    if isinstance(store, DictStore):
        pytest.skip("a put to memory is too quick to be stopped")
    stop = threading.Event()
    stop.set()
    data = bytes(20 << 20)
    with pytest.raises(Stopped):
        store.put("a", [memoryview(data)], deadline_s=LONG_S, stop=stop)
    with pytest.raises(Missing):
        store.size("a", deadline_s=LONG_S)
    assert keys(store) == []


def test_a_sweep_leaves_objects_alone(store: Store) -> None:
    put(store, "a/b", b"x")
    store.sweep(older_than_s=0.0, deadline_s=LONG_S)
    assert keys(store) == ["a/b"]


def test_closing_twice(store: Store, tmp_path: Path) -> None:
    put(store, "a", b"x")
    store.close()
    store.close()
