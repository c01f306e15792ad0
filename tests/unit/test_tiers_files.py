"""The directory as a store: what a file system does to it, and what a stranger in it can't."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import UserError
from everstep.tiers.files import FileStore
from everstep.tiers.open import open_store
from everstep.tiers.store import Denied, Full, Missing, Stopped, StoreError
from everstep.wire.bulk_throttle import Throttle

LONG_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def put(store: FileStore, key: str, data: bytes, **options: Any) -> None:
    store.put(key, [memoryview(data)], deadline_s=LONG_S, **options)


def everything(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*"))


def failing(
    monkeypatch: pytest.MonkeyPatch, name: str, code: int, when: Callable[..., bool]
) -> None:
    """`os.name` fails where `when` says so of its arguments."""
    real = getattr(os, name)

    def call(*args: Any, **options: Any) -> Any:
        if when(*args, **options):
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("unnamed", [True, False], ids=["O_TMPFILE", "named"])
@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, Full), (errno.EDQUOT, Full), (errno.EIO, StoreError), (errno.EROFS, Denied)],
)
def test_a_put_that_fails_leaves_nothing(
    store: FileStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unnamed: bool,
    call: str,
    code: int,
    kind: type[StoreError],
) -> None:
    put(store, "a/b", b"there")
    if not unnamed:
        tmpfile = os.O_TMPFILE
        failing(
            monkeypatch,
            "open",
            errno.EOPNOTSUPP,
            lambda path, flags, *a, **k: flags & tmpfile == tmpfile,
        )
    before = everything(tmp_path)
    failing(monkeypatch, call, code, lambda *args: True)
    with pytest.raises(kind, match="store/a/c: put: ") as caught:
        put(store, "a/c", b"x")
    assert ("bytes are free" in str(caught.value)) == (kind is Full)
    monkeypatch.undo()
    assert everything(tmp_path) == before


@pytest.mark.root
def test_a_real_disk_that_is_full_and_then_read_only(tmp_path: Path) -> None:
    where = tmp_path / "small"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", where], check=True)
    try:
        store = FileStore(where / "store")
        put(store, "a", bytes(100_000))
        with pytest.raises(Full, match=r"No space left on device \(\d+ of 1048576 bytes are free"):
            put(store, "b", bytes(2 << 20))
        assert [entry.key for entry in store.list("", deadline_s=LONG_S)] == ["a"]
        put(store, "c", bytes(100_000))
        subprocess.run(["mount", "-o", "remount,ro", where], check=True)
        with pytest.raises(Denied, match="Read-only file system"):
            put(store, "d", b"x")
        with pytest.raises(Denied, match="Read-only file system"):
            store.delete("a", deadline_s=LONG_S)
        assert store.size("a", deadline_s=LONG_S) == 100_000
    finally:
        subprocess.run(["umount", where], check=True)


def test_who_may_not_is_told(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "a/b", b"x")
    failing(monkeypatch, "open", errno.EACCES, lambda path, *a, **k: path in ("b", "a"))
    with pytest.raises(Denied, match="store/a/b: get: Permission denied"):
        store.get("a/b", deadline_s=LONG_S)
    with pytest.raises(Denied, match="Permission denied"):
        put(store, "a/c", b"x")


def test_without_hard_links_it_says_what_to_do(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "link", errno.EPERM, lambda *a, **k: True)
    with pytest.raises(StoreError, match=r"makes no hard links.*name a directory on another"):
        put(store, "a", b"x", absent=True)
    monkeypatch.undo()
    assert everything(Path(store.where)) == []


def test_a_put_can_be_done_again(store: FileStore) -> None:
    """By the rank whose first try ended with an error after all was done."""
    put(store, "a", b"first")
    put(store, "a", b"again")
    assert store.get("a", deadline_s=LONG_S) == b"again"
    assert everything(Path(store.where)) == ["a"]


def test_a_folder_that_is_removed_meanwhile_is_made_again(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a/b/old", b"x")
    real = os.fsync
    calls = iter(range(100))

    def remove(fd: int) -> None:
        real(fd)
        if next(calls) == 0:  # its folders are open, and its bytes are written
            store.delete("a/b/old", deadline_s=LONG_S)

    monkeypatch.setattr(os, "fsync", remove)
    put(store, "a/b/new", b"y")
    assert store.get("a/b/new", deadline_s=LONG_S) == b"y"
    assert everything(Path(store.where)) == ["a", "a/b", "a/b/new"]


def test_links_lead_nowhere(store: FileStore, tmp_path: Path) -> None:
    """Who may write to the directory can't make us read or write outside of it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    put(store, "run/a", b"x")
    root = Path(store.where)
    (root / "run/file").symlink_to(outside / "secret")
    (root / "run/folder").symlink_to(outside)
    (root / "run/up").symlink_to("..")
    for key in ("run/file", "run/folder/secret", "run/up/run/a"):
        with pytest.raises(StoreError):
            store.get(key, deadline_s=LONG_S)
        with pytest.raises(StoreError):
            store.size(key, deadline_s=LONG_S)
    with pytest.raises(StoreError):
        put(store, "run/folder/new", b"x")
    put(store, "run/file", b"ours")  # replaces the link, and leaves what it led to
    with pytest.raises(StoreError):
        store.delete("run/folder/secret", deadline_s=LONG_S)
    assert [entry.key for entry in store.list("", deadline_s=LONG_S)] == ["run/a", "run/file"]
    assert everything(outside) == ["secret"]
    assert (outside / "secret").read_text() == "secret"


def test_pipes_and_folders_are_no_objects(store: FileStore) -> None:
    put(store, "run/a", b"x")
    os.mkfifo(Path(store.where, "run/pipe"))
    for key in ("run/pipe", "run"):
        with pytest.raises(StoreError, match="not a regular file"):
            store.get(key, deadline_s=LONG_S)
    assert [entry.key for entry in store.list("", deadline_s=LONG_S)] == ["run/a"]


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    put(FileStore(tmp_path / "link"), "a/b", b"x")
    assert (tmp_path / "disk/a/b").read_bytes() == b"x"


def test_files_with_odd_names_are_not_listed(store: FileStore) -> None:
    put(store, "run/a", b"x")
    for name in (".put-0123", "ä", "a b", ".hidden"):
        Path(store.where, "run", name).write_bytes(b"x")
    Path(store.where, ".git").mkdir()
    assert [entry.key for entry in store.list("", deadline_s=LONG_S)] == ["run/a"]


def test_a_limit_holds(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    booked: list[int] = []

    class Counting(Throttle):
        def book(self, nbytes: int) -> float:
            booked.append(nbytes)
            return 0.0

    limited = FileStore(Path(store.where), throttle=Counting(1e6))
    put(limited, "a", bytes(200_000))
    assert sum(booked) == 200_000
    assert max(booked) == 50_000  # a twentieth of a second's, so that others have their turn


def test_a_limit_that_the_deadline_does_not_allow_is_an_error_at_once(tmp_path: Path) -> None:
    slow = FileStore(tmp_path, throttle=Throttle(1000))
    with pytest.raises(StoreError, match=r"put: it would not be done within 0\.5 s"):
        slow.put("a", [memoryview(bytes(1 << 20))], deadline_s=0.5)
    assert everything(tmp_path) == []


def test_a_put_stops_between_two_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    store = FileStore(tmp_path)
    real = os.write
    written: list[int] = []

    def write(fd: int, data: memoryview) -> int:
        written.append(real(fd, data))
        stop.set()
        return written[-1]

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(Stopped):
        put(store, "a", bytes(20 << 20), stop=stop)
    assert written == [8 << 20]
    assert everything(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from everstep.tiers.files import FileStore

when, tmpfile = sys.argv[2], sys.argv[3] == "O_TMPFILE"
real_open, real_link = os.open, os.link

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def open_(path, flags, *args, **options):
    if flags & os.O_TMPFILE == os.O_TMPFILE and not tmpfile:
        raise OSError(95, "no")
    return real_open(path, flags, *args, **options)

def link(*args, **options):
    real_link(*args, **options)
    die()

os.open = open_
if when == "linked":
    os.link = link
else:
    setattr(os, when, die)
FileStore(Path(sys.argv[1])).put("a/b", [memoryview(b"whole")], deadline_s=60, absent=True)
"""


@pytest.mark.parametrize("how", ["O_TMPFILE", "named"])
@pytest.mark.parametrize("when", ["write", "link", "linked"])
def test_killed_in_a_put_it_is_there_whole_or_not_at_all(
    tmp_path: Path, when: str, how: str
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, when, how], timeout=LONG_S)
    assert done.returncode == -signal.SIGKILL
    store = FileStore(tmp_path)
    if when == "linked":
        assert store.get("a/b", deadline_s=LONG_S) == b"whole"
    else:
        with pytest.raises(Missing):
            store.get("a/b", deadline_s=LONG_S)
    left = [name for name in everything(tmp_path) if ".put-" in name]
    assert len(left) == (how == "named")
    assert store.sweep(older_than_s=3600, deadline_s=LONG_S) == 0
    assert store.sweep(older_than_s=0, deadline_s=LONG_S) == len(left)
    assert [name for name in everything(tmp_path) if ".put-" in name] == []


@pytest.mark.parametrize("url", ["", "ftp://x/y", "s3://", "s3://b/../c", "s3://b/a b", "gs:///x"])
def test_what_is_no_destination_is_said(url: str) -> None:
    with pytest.raises(UserError, match=r"is no (destination|place) for checkpoints"):
        open_store(url)


def test_a_directory_by_its_address(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}"):
        assert open_store(url).where == str(tmp_path)


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Files of a shared directory have the modes that the user's umask gives them."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_modes_are_the_users(store: FileStore) -> None:
    put(store, "a/b", b"x")
    assert Path(store.where, "a/b").stat().st_mode & 0o777 == 0o640
    assert Path(store.where, "a").stat().st_mode & 0o777 == 0o750
