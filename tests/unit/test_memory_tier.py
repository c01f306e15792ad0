"""The memory tier: what one host keeps, what several keep for one another, and what is lost."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec
import pytest
from tests.unit.memorydesks import Hosts

from everstep.errors import UserError
from everstep.snapshot import BLOCK_BYTES, SnapshotError, block_spans, digest
from everstep.tiers import names
from everstep.tiers.memory import door, pool, wire
from everstep.tiers.memory.client import MemoryStore, connect
from everstep.tiers.memory.desk import Desk
from everstep.tiers.memory.ownership import PREFIX
from everstep.tiers.memory.wire import HEADER, address_of
from everstep.tiers.store import Exists, Full, Missing, Stopped, StoreError
from everstep.wire.secret import Secret

S = 20.0


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    try:
        yield made
    finally:
        made.close()


def _bytes(nbytes: int, seed: int = 1) -> bytes:
    return bytes((seed + i * 7) % 251 for i in range(251)) * (nbytes // 251 + 1)


def _put(store: MemoryStore, key: str, data: bytes, *, absent: bool = False) -> None:
    store.put(key, [memoryview(data)], absent=absent, deadline_s=S)


def _keys(store: MemoryStore, prefix: str = "") -> list[str]:
    return [entry.key for entry in store.list(prefix, deadline_s=S)]


@pytest.mark.parametrize("nbytes", [0, 1, 5000, (1 << 20) + 1, 3 * BLOCK_BYTES + 7])
def test_what_is_put_is_read(hosts: Hosts, nbytes: int) -> None:
    hosts.start("a")
    store = hosts.store("a")
    data = _bytes(nbytes)[:nbytes]
    _put(store, "run/x", data)
    assert store.size("run/x", deadline_s=S) == nbytes
    assert store.get("run/x", deadline_s=S) == data
    assert (
        store.get("run/x", start=nbytes // 3, end=nbytes // 2, deadline_s=S)
        == (data[nbytes // 3 : nbytes // 2])
    )
    with pytest.raises(StoreError):
        store.get("run/x", start=0, end=nbytes + 1, deadline_s=S)
    store.delete("run/x", deadline_s=S)
    with pytest.raises(Missing):
        store.size("run/x", deadline_s=S)


def test_a_reserved_area_is_published_without_a_copy_and_stays_readable(hosts: Hosts) -> None:
    hosts.start("a")
    store = hosts.store("a", copies=1)
    nbytes = 2 * BLOCK_BYTES + 11
    with store.reserve(nbytes, deadline_s=S) as reserved:
        reserved.area[:] = _bytes(nbytes)[:nbytes]
        store.put("run/x", [reserved.area], deadline_s=S)
        held = hosts.desks["a"].vault.get("run/x")
        with held.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
        assert hosts.desks["a"].vault.taken_bytes == -(-nbytes // 4096) * 4096
        store.delete("run/x", deadline_s=S)  # it is in use: its memory is not given to others
        with store.reserve(nbytes, deadline_s=S) as other:
            other.area[:] = bytes(nbytes)
            assert bytes(reserved.area) == _bytes(nbytes)[:nbytes]
    assert inode


def test_the_memory_of_a_deleted_object_serves_the_next_of_its_size(hosts: Hosts) -> None:
    hosts.start("a")
    store = hosts.store("a", copies=1)
    nbytes = 2 << 20
    _put(store, "run/x", bytes(nbytes))
    inode = hosts.desks["a"].vault.get("run/x").path.stat().st_ino
    hosts.run(_settled())
    store.delete("run/x", deadline_s=S)
    _put(store, "run/y", _bytes(nbytes)[:nbytes])
    assert hosts.desks["a"].vault.get("run/y").path.stat().st_ino == inode
    assert store.get("run/y", deadline_s=S) == _bytes(nbytes)[:nbytes]


async def _settled() -> None:
    """The loop has come round: closed connections have been noticed."""


def test_what_a_dead_rank_reserved_is_given_up(hosts: Hosts) -> None:
    hosts.start("a")
    store, other = hosts.store("a"), hosts.store("a")
    reserved = other.reserve(1 << 20, deadline_s=S)
    vault = hosts.desks["a"].vault
    assert vault.taken_bytes == 1 << 20
    reserved._wire._sock.close()  # type: ignore[union-attr]  # as its death does
    store.about()
    _until(lambda: not vault.taken_bytes)
    assert not list((vault.directory / "way").iterdir())


def _until(done: Callable[[], bool]) -> None:
    gate = threading.Event()
    for _ in range(500):
        if done():
            return
        gate.wait(0.01)
    pytest.fail("it did not come about")


def test_one_of_many_is_first(hosts: Hosts) -> None:
    hosts.start("a")
    hosts.start("b")
    stores = [hosts.store(name, copies=2) for name in ("a", "b") for _ in range(3)]
    hosts.acquaint(stores)
    key = names.commit_key("run", 7)
    won: list[int] = []

    def try_it(number: int) -> None:
        try:
            _put(stores[number], key, b"%d" % number, absent=True)
        except Exists:
            return
        won.append(number)

    threads = [threading.Thread(target=try_it, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert {store.get(key, deadline_s=S) for store in stores} == {b"%d" % won[0]}


def test_copies_are_on_another_host_and_survive_the_own(hosts: Hosts) -> None:
    for name in "abc":
        hosts.start(name)
    stores = {name: hosts.store(name, copies=2) for name in "abc"}
    hosts.acquaint(list(stores.values()))
    large, small = _bytes(2 * BLOCK_BYTES)[: BLOCK_BYTES + 99], b"small"
    _put(stores["a"], "run/large", large)
    _put(stores["a"], "run/small", small)
    assert stores["a"].notes() == []
    have = [name for name in "abc" if hosts.desks[name].vault.find("run/large")]
    assert len(have) == 2
    assert "a" in have
    hosts.stop("a")
    for name in "bc":
        assert _keys(stores[name]) == ["run/large", "run/small"]
        assert stores[name].get("run/large", deadline_s=S) == large
        assert stores[name].get("run/large", start=5, end=9, deadline_s=S) == large[5:9]
        assert stores[name].get("run/small", deadline_s=S) == small
        assert stores[name].size("run/large", deadline_s=S) == len(large)


def test_copies_avoid_a_failure_domain(hosts: Hosts) -> None:
    for name, rack in {"a": "r1", "b": "r1", "c": "r2", "d": "r2"}.items():
        hosts.start(name, rack)
    stores = {name: hosts.store(name, copies=2) for name in "abcd"}
    hosts.acquaint(list(stores.values()))
    for name, store in stores.items():
        _put(store, f"run/{name}", b"x")
        (other,) = [
            each
            for each in "abcd"
            if each != name and hosts.desks[each].vault.find(f"run/{name}") is not None
        ]
        assert {name, other} & {"a", "b"}
        assert {name, other} & {"c", "d"}


def test_a_lost_neighbour_stops_no_save_and_is_told_once(hosts: Hosts) -> None:
    for name in "ab":
        hosts.start(name)
    stores = {name: hosts.store(name, copies=2) for name in "ab"}
    hosts.acquaint(list(stores.values()))
    _put(stores["a"], "run/0", b"x")
    hosts.stop("b")
    _put(stores["a"], "run/1", b"x")
    _put(stores["a"], "run/2", b"x")
    (note,) = stores["a"].notes()
    assert "of 2 copies of each part 1 are kept: b:" in note
    assert hosts.said.count(note) == 1


def test_a_host_that_is_full_keeps_no_copy_and_says_the_numbers(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    try:
        hosts.start("a")
        hosts.share = 1e-6
        hosts.start("b")
        stores = {name: hosts.store(name, copies=2) for name in "ab"}
        hosts.acquaint(list(stores.values()))
        _put(stores["a"], "run/x", bytes(1 << 20))
        (note,) = stores["a"].notes()
        assert "checkpoints here take 0 bytes of the" in note
        with pytest.raises(Full, match="raise the share of memory"):
            stores["b"].reserve(1 << 20, deadline_s=S)
    finally:
        hosts.close()


def test_commits_and_failures_are_on_all_hosts(hosts: Hosts) -> None:
    for name in "abc":
        hosts.start(name)
    stores = {name: hosts.store(name, copies=1) for name in "abc"}
    hosts.acquaint(list(stores.values()))
    attempt = names.new_attempt("run", 3)
    _put(stores["a"], names.commit_key("run", 3), b"commit", absent=True)
    _put(stores["b"], attempt.part(0, "failed"), b"why")
    _put(stores["b"], attempt.part(1, "json"), b"part")
    for name in "abc":
        there = [held.key for held in hosts.desks[name].vault.list("")]
        assert names.commit_key("run", 3) in there
        assert attempt.part(0, "failed") in there
        assert (attempt.part(1, "json") in there) == (name == "b")


def test_what_is_older_than_the_retained_goes_everywhere(hosts: Hosts) -> None:
    for name in "ab":
        hosts.start(name)
    stores = {name: hosts.store(name, copies=2, retained=2) for name in "ab"}
    hosts.acquaint(list(stores.values()))
    for step in (1, 2, 3, 4):
        for rank, name in enumerate("ab"):
            attempt = names.Attempt(series="run", step=step, name=f"{step:016x}")
            _put(stores[name], attempt.part(rank, "safetensors"), b"x" * 9)
        _put(stores["a"], names.commit_key("run", step), b"c", absent=True)
    for name in "ab":
        steps = {key.split("/")[2].removesuffix(".json") for key in _keys(stores[name])}
        assert steps == {f"{3:010}", f"{4:010}"}
        assert len(hosts.desks[name].vault.list("")) == 2 * 3


def test_a_desk_that_comes_back_has_what_was_complete(hosts: Hosts) -> None:
    hosts.start("a")
    store = hosts.store("a")
    _put(store, "run/x", _bytes(3 << 20))
    store.reserve(1 << 20, deadline_s=S)
    hosts.stop("a", keep=True)
    hosts.start("a")
    again = hosts.store("a")
    assert again.get("run/x", deadline_s=S) == _bytes(3 << 20)
    vault = hosts.desks["a"].vault
    assert [held.key for held in vault.list("")] == ["run/x"]
    assert not list((vault.directory / "way").iterdir())


def test_an_agent_that_comes_back_is_waited_for(hosts: Hosts) -> None:
    hosts.start("a")
    store = hosts.store("a", patience_s=20)
    with store.reserve(2 << 20, deadline_s=S) as reserved:
        reserved.area[:] = _bytes(2 << 20)[: 2 << 20]
        hosts.stop("a", keep=True)
        started = threading.Thread(target=hosts.start, args=("a",))
        started.start()
        store.put("run/x", [reserved.area], deadline_s=S)
        started.join()
        assert store.get("run/x", deadline_s=S) == bytes(reserved.area)


def test_nothing_is_left_after_an_orderly_end(hosts: Hosts) -> None:
    hosts.start("a")
    _put(hosts.store("a"), "run/x", b"x")
    hosts.stop("a")
    assert not list(hosts.shm_dir.glob(PREFIX + "*"))


def test_a_checked_read_finds_a_flipped_bit_here_and_elsewhere(hosts: Hosts) -> None:
    for name in "ab":
        hosts.start(name)
    stores = {name: hosts.store(name, copies=1) for name in "ab"}
    hosts.acquaint(list(stores.values()))
    data = bytearray(_bytes(3 * BLOCK_BYTES)[: 2 * BLOCK_BYTES + 100])
    with memoryview(data) as view:
        blocks = [digest(view[s:e]) for s, e in block_spans(len(data), BLOCK_BYTES)]
    _put(stores["a"], "run/x", bytes(data))
    area = memoryview(bytearray(BLOCK_BYTES + 100))
    for name in "ab":
        stores[name].get_checked(
            "run/x",
            area,
            start=BLOCK_BYTES,
            block_bytes=BLOCK_BYTES,
            digests=blocks[1:],
            deadline_s=S,
        )
        assert area == memoryview(data)[BLOCK_BYTES:]
    with hosts.desks["a"].vault.get("run/x").path.open("r+b") as file:
        file.seek(2 * BLOCK_BYTES + 3)
        file.write(b"\0\0")
    for name in "ab":
        with pytest.raises(SnapshotError):
            stores[name].get_checked(
                "run/x",
                area,
                start=BLOCK_BYTES,
                block_bytes=BLOCK_BYTES,
                digests=blocks[1:],
                deadline_s=S,
            )


def test_a_corrupt_copy_is_passed_by_for_another(hosts: Hosts) -> None:
    for name in "abc":
        hosts.start(name)
    stores = {name: hosts.store(name, copies=2) for name in "abc"}
    hosts.acquaint(list(stores.values()))
    data = _bytes(BLOCK_BYTES)[:BLOCK_BYTES]
    _put(stores["a"], "run/x", data)
    (without,) = [name for name in "abc" if hosts.desks[name].vault.find("run/x") is None]
    views = stores[without].copies("run/x", deadline_s=S)
    assert len(views) == 2
    with hosts.desks["a"].vault.get("run/x").path.open("r+b") as file:
        file.write(b"\xff\xfe")
    area = memoryview(bytearray(BLOCK_BYTES))
    stores[without].get_checked(
        "run/x",
        area,
        start=0,
        block_bytes=BLOCK_BYTES,
        digests=[digest(memoryview(data))],
        deadline_s=S,
    )
    assert area == data
    seen = {view.get("run/x", start=0, end=2, deadline_s=S) for view in views}
    assert seen == {b"\xff\xfe", data[:2]}
    for view in views:
        view.close()


def test_without_a_secret_there_is_one_host(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, secret=None)
    try:
        hosts.start("a")
        store = hosts.store("a", copies=2)
        assert store.card() == ""
        store.introduce([""])
        _put(store, "run/x", b"x")
        (note,) = store.notes()
        assert "of 2 copies of each part 1 are kept: this agent knows of 1 host, and has no" in note
    finally:
        hosts.close()


def test_a_door_survives_what_is_no_question(hosts: Hosts) -> None:
    hosts.start("a")
    store = hosts.store("a")
    _put(store, "run/x", b"x")
    garbage = [
        HEADER.pack(5) + b"hello",
        HEADER.pack(1 << 31) + b"much",
        HEADER.pack(100) + b"cut",
        b"\xff",
    ]
    for sent in garbage:
        with socket.socket(socket.AF_UNIX) as raw, address_of(hosts.socket("a")) as address:
            raw.settimeout(S)
            raw.connect(address)
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
            answer = b""
            with suppress(ConnectionResetError):  # hung up on with words unread
                while part := raw.recv(4096):
                    answer += part
        assert (b"no question" in answer) == (sent == garbage[0])
    assert store.get("run/x", deadline_s=S) == b"x"


def test_another_user_is_not_served_and_not_believed(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.start("a")
    where = hosts.socket("a")
    with monkeypatch.context() as patch:
        patch.setattr(door, "user_of", lambda _: os.geteuid() + 1)
        with pytest.raises(UserError, match="no agent keeps checkpoints at"):
            connect(where, patience_s=0.1)
    monkeypatch.setattr(wire, "user_of", lambda _: os.geteuid() + 1)
    with pytest.raises(UserError, match="is served by user"):
        connect(where, patience_s=0.1)


def test_who_comes_as_an_agent_ends_is_hung_up_on() -> None:
    """Its task is ended before it has begun."""
    name = f"@everstep-test-{os.getpid()}"

    async def first() -> None:
        pass

    async def come_and_end() -> None:
        door_ = door.Door(cast(Desk, None), name, first)
        with address_of(name) as address:
            caller.connect(address)
        door_._accept()
        await door_.close()

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(10)
        asyncio.run(come_and_end())
        assert caller.recv(1) == b""


def test_hosts_with_another_secret_or_the_same_name_are_strangers(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    try:
        hosts.start("a")
        hosts.secret = Secret("another secret of so many characters, 12345", "the test")
        hosts.start("b")
        stores = [hosts.store(name, copies=2) for name in "ab"]
        hosts.acquaint(stores)
        _put(stores[0], "run/x", b"x")
        (note,) = stores[0].notes()
        assert "of 2 copies of each part 1 are kept: b: " in note
        assert stores[0].about().lost == ("b",)
        _until(lambda: any("was refused" in said for said in hosts.said))
    finally:
        hosts.close()


def test_an_agent_that_has_become_another_is_not_taken_for_the_one_before(hosts: Hosts) -> None:
    for name in "ab":
        hosts.start(name)
    stores = {name: hosts.store(name, copies=2) for name in "ab"}
    card = msgspec.json.decode(stores["b"].card()) | {"name": "c"}
    stores["a"].introduce([msgspec.json.encode(card).decode()])
    _put(stores["a"], "run/x", b"x")
    (note,) = stores["a"].notes()
    assert "c is not here: this is b" in note


def test_refusals(hosts: Hosts) -> None:
    hosts.start("a")
    store = hosts.store("a")
    for key in ("", "../x", "a//b", "/x", "a/.b", "x" * 600):
        with pytest.raises(ValueError, match="no key"):
            _put(store, key, b"x")
        with pytest.raises(ValueError, match="no key"):
            store.get(key, deadline_s=S)
    with pytest.raises(UserError, match="another --name"):
        hosts.start("a")
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        store.put("run/x", [memoryview(b"x")], deadline_s=S, stop=stop)
    with pytest.raises(ValueError, match="no card"):
        store.introduce(["{}"])
    where = hosts.socket("a")
    hosts.stop("a")
    with pytest.raises(StoreError, match="no agent keeps checkpoints there"):
        store.size("run/x", deadline_s=S)
    with pytest.raises(UserError, match="start `everstep agent` on this host"):
        connect(where, patience_s=0.1)


def test_an_agent_that_does_not_come_back_is_waited_for_once(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that saves on must not stand still in each save."""
    tries: list[str] = []

    def counted(name: str) -> wire.Wire:
        tries.append(name)
        return wire.Wire(name)

    def asked(store: MemoryStore) -> int:
        tries.clear()
        with pytest.raises(StoreError, match="no agent keeps checkpoints there"):
            store.reserve(100, deadline_s=S)
        return len(tries)

    monkeypatch.setattr(pool, "Wire", counted)
    hosts.start("a")
    store = hosts.store("a", patience_s=0.2)
    hosts.stop("a", keep=True)
    assert asked(store) > 1
    assert asked(store) == 1
    hosts.start("a")
    _put(store, "run/x", b"there again")
    hosts.stop("a")
    assert asked(store) > 1
