"""Leases: one holder at a time, terms that rise, and what is found over stays over."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.netcases import LOCAL, on_a_loop

from everstep.errors import TransientError, UserError
from everstep.launch.etcd import EtcdLease
from everstep.launch.etcd_client import EtcdAddress, EtcdClient, Put, Unchanged, parse_address
from everstep.launch.lease import (
    LOCK_FILE,
    TERM_FILE,
    Countdown,
    InPlace,
    LeaseHeld,
    LeaseLost,
    Place,
    at_rest,
    found,
    make_finder,
    make_lease,
)

# ---------------------------------------------------------------- in place


@on_a_loop
async def test_in_place_each_holder_has_the_next_term(tmp_path: Path) -> None:
    for term in range(3):
        tenancy = await InPlace(tmp_path).acquire(0)
        assert (tenancy.term, tenancy.holds, tenancy.holds_until_s) == (term, True, math.inf)
        await tenancy.release()
        assert not tenancy.holds
        await tenancy.release()  # twice is once


@on_a_loop
async def test_in_place_a_second_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    tenancy = await InPlace(tmp_path).acquire(0)
    with pytest.raises(LeaseHeld, match=rf"process {os.getpid()} on .*\(term 0\) coordinates"):
        await InPlace(tmp_path).acquire(0)
    assert tenancy.holds
    await tenancy.release()


@on_a_loop
async def test_in_place_a_second_waits_for_the_first(tmp_path: Path) -> None:
    first = await InPlace(tmp_path).acquire(0)
    told = asyncio.Queue[str]()
    lease = InPlace(tmp_path)
    waiting = asyncio.ensure_future(lease.acquire(20, on_waiting=told.put_nowait))
    assert f"process {os.getpid()} " in await told.get()
    assert not waiting.done()
    await first.release()
    second = await waiting
    assert (second.term, told.empty()) == (1, True)
    await second.release()


@on_a_loop
async def test_in_place_the_term_is_above_all_that_is_known(tmp_path: Path) -> None:
    first = await InPlace(tmp_path).acquire(0, known_term=6)
    await first.release()
    second = await InPlace(tmp_path).acquire(0, known_term=3)
    assert (first.term, second.term) == (7, 8)
    await second.release()


@on_a_loop
async def test_in_place_says_where_it_listens(tmp_path: Path) -> None:
    lease = InPlace(tmp_path)
    assert await lease.where() is None
    tenancy = await lease.acquire(0)
    with pytest.raises(TransientError, match="does not listen yet"):
        await found(lease)
    await tenancy.publish("::1", 29400)
    assert await lease.where() == Place(host="::1", port=29400, term=0)
    assert await found(lease) == ("::1", 29400)
    await tenancy.release()
    with pytest.raises(LeaseLost):
        await tenancy.publish("::1", 29401)


@on_a_loop
async def test_in_place_a_cut_write_leaves_the_old_term(tmp_path: Path) -> None:
    await (await InPlace(tmp_path).acquire(0)).release()
    (tmp_path / f"{TERM_FILE}.new").write_bytes(b'{"term":')
    tenancy = await InPlace(tmp_path).acquire(0)
    assert tenancy.term == 1
    await tenancy.release()


@on_a_loop
async def test_in_place_a_foreign_file_is_named_and_nothing_is_held(tmp_path: Path) -> None:
    (tmp_path / TERM_FILE).write_text("zero")
    with pytest.raises(UserError, match=TERM_FILE):
        await InPlace(tmp_path).acquire(0)
    (tmp_path / TERM_FILE).unlink()
    await (await InPlace(tmp_path).acquire(0)).release()


@on_a_loop
async def test_in_place_one_can_see_to_it_that_nobody_begins(tmp_path: Path) -> None:
    tenancy = await InPlace(tmp_path).acquire(0)
    with at_rest(tmp_path) as free:
        assert not free
    await tenancy.release()
    with at_rest(tmp_path) as free:
        assert free
        with pytest.raises(LeaseHeld):
            await InPlace(tmp_path).acquire(0)
    await (await InPlace(tmp_path).acquire(0)).release()
    assert (tmp_path / LOCK_FILE).stat().st_mode & 0o077 == 0


def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    for name in ("etcd", "etcd_client"):
        monkeypatch.delitem(sys.modules, f"everstep.launch.{name}")
    with pytest.raises(UserError, match=r"pip install everstep\[etcd\]"):
        make_lease("etcd://a", "one", tmp_path, 2.0)
    with pytest.raises(UserError, match=r"pip install everstep\[etcd\]"):
        make_finder("etcd://a", "one", 2.0)
    assert isinstance(make_lease("", "one", tmp_path, 2.0), InPlace)


def test_the_setting_chooses(tmp_path: Path) -> None:
    assert isinstance(make_lease("", "one", tmp_path, 2.0), InPlace)
    assert make_finder("", "one", 2.0) is None
    assert isinstance(make_lease("etcd://a", "one", tmp_path, 2.0), EtcdLease)
    assert isinstance(make_finder("etcd://a", "one", 2.0), EtcdLease)


# ---------------------------------------------------------------- the countdown


@on_a_loop
async def test_what_was_found_over_stays_so() -> None:
    now_s = 10.0
    countdown = Countdown(12.0, lambda: now_s)
    countdown.extend(11.0)  # never shortened
    assert countdown.left_s() == 2.0
    countdown.doubt = "etcd is silent"
    now_s = 12.0
    countdown.extend(20.0)  # an answer that came too late
    assert countdown.left_s() == 0.0
    now_s = 11.0
    assert countdown.left_s() == 0.0
    assert await countdown.lost == "it was not renewed in time (etcd is silent)"
    countdown.lose("again")


@on_a_loop
async def test_the_end_is_told_without_being_asked_for() -> None:
    countdown = Countdown(asyncio.get_running_loop().time(), asyncio.get_running_loop().time)
    assert "not renewed" in await asyncio.wait_for(countdown.lost, 20)


@on_a_loop
async def test_nobody_is_told_of_a_release() -> None:
    countdown = Countdown(math.inf, lambda: 0.0)
    countdown.close()
    countdown.lose("afterwards")
    assert countdown.left_s() == 0.0
    assert not countdown.lost.done()


# ---------------------------------------------------------------- etcd's address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("etcd://a", EtcdAddress(endpoints=(("a", 2379),))),
        ("etcd://a:1,[::1]:2", EtcdAddress(endpoints=(("a", 1), ("::1", 2)))),
        (
            "etcd://a/?user=u&password-file=/p",
            EtcdAddress(endpoints=(("a", 2379),), user="u", password_file="/p"),
        ),
        (
            "etcds://a?ca=/c&cert=/d&key=/k",
            EtcdAddress(endpoints=(("a", 2379),), tls=True, ca="/c", cert="/d", key="/k"),
        ),
    ],
)
def test_addresses(text: str, address: EtcdAddress) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("http://a", "is no address of etcd"),
        ("etcd:", "is no address of etcd"),
        ("etcd://[::1", "is no address of etcd"),
        ("etcd://a/b", "is no address of etcd"),
        ("etcd://a,,b", "is no HOST:PORT"),
        ("etcd://a:99999", "is no HOST:PORT"),
        ("etcd://a..b", "is no HOST:PORT"),
        ("etcd://u:secret@a", "password-file=PATH"),
        ("etcd://a?usr=u", "usr in .*: known are ca, cert, key, password-file, user"),
        ("etcd://a?user=u", "belong together"),
        ("etcd://a?ca=/c", "need etcds://"),
    ],
)
def test_addresses_that_are_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        parse_address(text)
    assert "secret" not in str(refused.value)


def test_files_that_are_no_certificates_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no")
    with pytest.raises(UserError, match="no PEM files"):
        EtcdLease.at(f"etcds://a?ca={tmp_path / 'ca.pem'}", "one", 2.0)


# ---------------------------------------------------------------- what etcd answers


class Member:
    """Answers each call with the next of `answers`, whatever is asked; None: not at all."""

    def __init__(self, answers: Sequence[bytes | None]) -> None:
        self._answers = list(answers)
        self.asked: list[bytes] = []
        self._closing: list[StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._serve, LOCAL, 0)
        host, port = self._server.sockets[0].getsockname()
        return host, port

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()
        for writer in self._closing:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._closing.append(writer)
        self.asked.append(await reader.readuntil(b"\r\n\r\n"))
        answer = self._answers.pop(0)
        if answer is None:
            await reader.read()  # until the other gives up
        else:
            writer.write(answer)
        writer.close()


def answer(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.0 {status}\r\nContent-Type: application/json\r\n\r\n{body}".encode()


GRANTED = answer('{"header":{"revision":"1"},"ID":"4111120346107202566","TTL":"6"}')


@on_a_loop
async def test_numbers_bytes_and_what_is_left_out_are_understood() -> None:
    member = Member(
        [
            GRANTED,
            answer('{"result":{"ID":"7","TTL":"6"}}\n'),
            answer('{"result":{"ID":"7"}}\n'),
            answer('{"kvs":[{"key":"YQ==","create_revision":"2","mod_revision":"3"}]}'),
            answer('{"header":{"revision":"9"},"succeeded":true}'),
            answer('{"header":{"revision":"9"}}'),
        ]
    )
    async with member as endpoint:
        client = EtcdClient(EtcdAddress(endpoints=(endpoint,)), 20)
        assert await client.grant(6) == (4111120346107202566, 6)
        assert await client.keep_alive(7) == 6
        assert await client.keep_alive(7) == 0
        there = await client.read(b"a")
        assert [(kv.create_revision, kv.mod_revision, kv.value) for kv in there.values()] == [
            (2, 3, b"")
        ]
        change = [Unchanged(b"a", 0, "CREATE")], [Put(b"a", b"b")]
        assert await client.put_if(*change) == 9
        assert await client.put_if(*change) is None


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (answer('{"error":"etcdserver: no leader","code":14}', "503 x"), "no leader"),
        (answer('{"error":{"grpc_code":14,"message":"etcdserver: no leader"}}'), "no leader"),
        (answer("Not Found\n", "404 Not Found"), "HTTP 404 and no answer of etcd's gateway"),
        (answer('{"ID":"x"}'), "no answer of etcd's gateway"),
        (b"", "HTTP 0"),
        (b"SSH-2.0-OpenSSH\r\n", "HTTP 0"),
        (answer("", "307 x\r\nLocation: /v3/lease/grant"), "HTTP 307"),
        (answer('{"error":"' + (1 << 20) * "x" + '"}'), "HTTP 200 and no answer"),
    ],
)
@on_a_loop
async def test_a_member_that_fails_gives_way_to_the_next(bad: bytes, says: str) -> None:
    one, other = Member([bad, bad]), Member([GRANTED, GRANTED])
    async with one as first, other as second:
        client = EtcdClient(EtcdAddress(endpoints=(first, second)), 20)
        assert (await client.grant(6))[1] == 6
        assert (await client.grant(6))[1] == 6
        assert len(one.asked) == 1  # the second call begins where the first succeeded
        alone = EtcdClient(EtcdAddress(endpoints=(first,)), 20)
        with pytest.raises(TransientError, match=says):
            await alone.grant(6)


@on_a_loop
async def test_a_silent_member_is_not_waited_for() -> None:
    async with Member([None]) as endpoint:
        client = EtcdClient(EtcdAddress(endpoints=(endpoint,)), 0.05)
        with pytest.raises(TransientError, match=r"no answer within 0\.05 s"):
            await client.grant(6)


@on_a_loop
async def test_a_member_that_cannot_be_reached_is_not_waited_for() -> None:
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind((LOCAL, 0))
        full.listen(0)
        for _ in range(4):  # more than fit its queue: the kernel does not answer the next
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        client = EtcdClient(EtcdAddress(endpoints=(full.getsockname(),)), 0.2)
        with pytest.raises(TransientError, match=r"no connection within 0\.1 s"):
            await client.grant(6)


@on_a_loop
async def test_a_member_that_is_not_there_is_named() -> None:
    async with Member([]) as endpoint:
        pass
    client = EtcdClient(EtcdAddress(endpoints=(endpoint,)), 20)
    with pytest.raises(TransientError, match=f"{LOCAL}:{endpoint[1]}"):
        await client.read(b"a")


@on_a_loop
async def test_who_may_not_ask_is_told_at_once() -> None:
    member = Member([answer('{"error":"etcdserver: permission denied","code":7}', "403 x")])
    async with member as endpoint:
        client = EtcdClient(EtcdAddress(endpoints=(endpoint, endpoint)), 20)
        with pytest.raises(UserError, match="permission denied"):
            await client.read(b"a")


@on_a_loop
async def test_a_token_that_is_old_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("pass word\n")
    old = answer('{"error":"etcdserver: invalid auth token","code":16}', "401 x")
    tokens = [answer(f'{{"token":"t{number}"}}') for number in range(2)]
    member = Member([tokens[0], GRANTED, old, tokens[1], GRANTED])
    async with member as endpoint:
        address = EtcdAddress(
            endpoints=(endpoint,), user="u", password_file=str(tmp_path / "password")
        )
        client = EtcdClient(address, 20)
        await client.grant(6)
        await client.grant(6)
    with_token = [b"Authorization: t" in head for head in member.asked]
    assert with_token == [False, True, True, False, True]
