"""Leases against a real etcd: it is killed and comes back, is slow, is cut off; holders are killed
and stopped. Each test has an etcd of its own on free ports of the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.integration.joblab import SCRIPTS
from tests.integration.netlab import Lab, apart
from tests.unit.netcases import LOCAL, on_a_loop

from everstep.errors import TransientError, UserError
from everstep.launch.etcd import LEASES_PER_TTL, EtcdLease
from everstep.launch.etcd_client import EtcdAddress, EtcdClient, Put
from everstep.launch.lease import LeaseHeld, LeaseLost, Place, Tenancy, now_s

pytestmark = [pytest.mark.slow, pytest.mark.apt("etcd")]
PATIENCE_S = 60.0
SHORT_S = 2 / LEASES_PER_TTL  # a TTL of 2 s: for what shall be lost
LONG_S = 12 / LEASES_PER_TTL  # for what must not be, on a machine that is busy

PATHS = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind((LOCAL, 0))
        return [sock.getsockname()[1] for sock in sockets]


class Etcd:
    """One member. `options` are added to its command line."""

    def __init__(self, folder: Path, scheme: str = "http", options: Sequence[str] = ()) -> None:
        self.port, peers = free_ports(2)
        client, peer = f"{scheme}://{LOCAL}:{self.port}", f"http://{LOCAL}:{peers}"
        self._folder = folder
        self._command = ["etcd", "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"]
        self._command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        self._command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        self._command += ["--initial-cluster", f"default={peer}"]
        self._command += ["--heartbeat-interval", "10", "--election-timeout", "100", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def start(self) -> None:
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def url(self) -> str:
        return f"etcd://{LOCAL}:{self.port}"

    def lease(self, lease_s: float, port: int | None = None) -> EtcdLease:
        """Of the run `one`, by way of another port where one is given."""
        return EtcdLease.at(f"etcd://{LOCAL}:{port or self.port}", "one", lease_s)

    def client(self) -> EtcdClient:
        return EtcdClient(EtcdAddress(endpoints=((LOCAL, self.port),)), PATIENCE_S)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path)
    server.start()
    yield server
    server.kill()


class Way:
    """A way to etcd, at a port of its own, that can be held up and cut."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self.open = asyncio.Event()
        self.open.set()
        self.waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Way:
        self._server = await asyncio.start_server(self._serve, LOCAL, 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there = None
        try:
            from_etcd, there = await asyncio.open_connection(LOCAL, self._etcd.port)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            there.write(head + await reader.readexactly(length))
            answer = await from_etcd.read(-1)
            self.waiting += 1
            await self.open.wait()
            writer.write(answer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of the two has given up
        finally:
            for side in (writer, there):
                if side is not None:
                    side.close()
                    with contextlib.suppress(OSError):
                        await side.wait_closed()


async def lost(tenancy: Tenancy) -> str:
    """Why the lease is lost, when it is."""
    return await asyncio.wait_for(tenancy.lost, PATIENCE_S)


@on_a_loop
async def test_one_holds_and_is_found_and_the_next_comes_at_once(etcd: Etcd) -> None:
    finder = etcd.lease(LONG_S)
    first = await etcd.lease(LONG_S).acquire(PATIENCE_S)
    assert await finder.where() is None
    await first.publish("::1", 29400)
    await first.publish("::1", 29401)
    assert await finder.where() == Place(host="::1", port=29401, term=0)
    with pytest.raises(LeaseHeld, match=rf"process {os.getpid()} .*\(term 0\)"):
        await etcd.lease(LONG_S).acquire(0)
    assert first.holds
    await first.release()
    await first.release()
    assert (first.holds, await finder.where()) == (False, None)
    second = await etcd.lease(LONG_S).acquire(0, known_term=6)
    assert second.term == 7
    await second.release()
    with pytest.raises(LeaseLost):
        await second.publish("::1", 29400)


@on_a_loop
async def test_it_is_renewed(etcd: Etcd) -> None:
    tenancy = await etcd.lease(SHORT_S * 2).acquire(PATIENCE_S)
    first_s = tenancy.holds_until_s
    contender = asyncio.ensure_future(etcd.lease(SHORT_S * 2).acquire(5.0))
    with pytest.raises(LeaseHeld, match="after 5 s"):
        await contender
    assert tenancy.holds_until_s > first_s
    assert tenancy.holds
    await tenancy.release()


@on_a_loop
async def test_of_many_that_ask_at_once_one_has_it(etcd: Etcd) -> None:
    await (await etcd.lease(LONG_S).acquire(PATIENCE_S)).release()
    asked = [etcd.lease(LONG_S).acquire(0) for _ in range(8)]
    got = await asyncio.gather(*asked, return_exceptions=True)
    [holder] = [one for one in got if not isinstance(one, LeaseHeld)]
    assert not isinstance(holder, BaseException)
    assert holder.term == 1
    await holder.release()


@on_a_loop
async def test_etcd_that_comes_back_in_time_costs_nothing(etcd: Etcd) -> None:
    tenancy = await etcd.lease(LONG_S).acquire(PATIENCE_S)
    etcd.kill()
    etcd.start()
    await tenancy.publish("host", 1)  # waits for it
    assert tenancy.holds
    assert await etcd.lease(LONG_S).where() == Place(host="host", port=1, term=0)
    await tenancy.release()


@on_a_loop
async def test_without_etcd_it_is_lost_and_the_terms_go_on(etcd: Etcd) -> None:
    tenancy = await etcd.lease(SHORT_S).acquire(PATIENCE_S)
    etcd.kill()
    assert f"{LOCAL}:{etcd.port}" in await lost(tenancy)
    assert not tenancy.holds
    with pytest.raises(TransientError, match=f"{LOCAL}:{etcd.port}"):
        await etcd.lease(SHORT_S).where()
    with pytest.raises(TransientError, match=f"{LOCAL}:{etcd.port}"):
        await etcd.lease(SHORT_S).acquire(0)
    told = asyncio.Queue[str]()
    lease = etcd.lease(SHORT_S)
    waiting = asyncio.ensure_future(lease.acquire(PATIENCE_S, on_waiting=told.put_nowait))
    assert f"{LOCAL}:{etcd.port}" in await told.get()
    etcd.start()
    second = await waiting
    assert second.term > tenancy.term
    assert not tenancy.holds
    await second.release()
    await tenancy.release()


@on_a_loop
async def test_an_answer_that_comes_after_the_end_counts_for_nothing(etcd: Etcd) -> None:
    async with Way(etcd) as way:
        tenancy = await etcd.lease(SHORT_S, way.port).acquire(PATIENCE_S)
        way.open.clear()
        assert "no answer within" in await lost(tenancy)
        assert way.waiting  # etcd has renewed it
        way.open.set()
        with pytest.raises(LeaseLost):
            await tenancy.publish("host", 1)
        assert not tenancy.holds
        second = await etcd.lease(SHORT_S).acquire(PATIENCE_S)
        assert second.term == 1
        await second.release()
        await tenancy.release()


@on_a_loop
async def test_an_etcd_that_stands_still_gives_no_second_lease(etcd: Etcd) -> None:
    tenancy = await etcd.lease(SHORT_S).acquire(PATIENCE_S)
    etcd.send(signal.SIGSTOP)
    waiting = asyncio.ensure_future(etcd.lease(SHORT_S).acquire(PATIENCE_S))
    assert "no answer within" in await lost(tenancy)
    etcd.send(signal.SIGCONT)
    second = await waiting
    assert not tenancy.holds
    assert second.term > tenancy.term
    await second.release()
    await tenancy.release()


@on_a_loop
async def test_a_lease_whose_giving_was_not_heard_of_is_given_up(etcd: Etcd) -> None:
    async with Way(etcd) as way:
        await (await etcd.lease(LONG_S).acquire(PATIENCE_S)).release()
        way.open.clear()
        with pytest.raises(TransientError, match="no answer within"):
            await etcd.lease(SHORT_S, way.port).acquire(0)
        way.open.set()
        second = await etcd.lease(LONG_S).acquire(PATIENCE_S)
        await second.release()


@on_a_loop
async def test_a_cut_that_heals_in_time_costs_nothing(etcd: Etcd) -> None:
    async with Way(etcd) as way:
        tenancy = await etcd.lease(LONG_S, way.port).acquire(PATIENCE_S)
        way.open.clear()
        publishing = asyncio.ensure_future(tenancy.publish("host", 1))
        async with asyncio.timeout(PATIENCE_S):
            while way.waiting < 4:  # read, grant, set; and now one that waits
                await asyncio.sleep(0.01)
        way.open.set()
        await publishing
        assert tenancy.holds
        await tenancy.release()


@pytest.mark.parametrize("what", ["lease", "key"])
@on_a_loop
async def test_a_lease_that_somebody_ends_is_lost(what: str, etcd: Etcd) -> None:
    tenancy = await etcd.lease(LONG_S).acquire(PATIENCE_S)
    [kv] = [kv for kv in (await etcd.client().read(b"everstep/")).values() if kv.lease]
    if what == "lease":
        await etcd.client().revoke(kv.lease)
    else:
        await etcd.client()._ask("kv/deleterange", {"key": kv.key}, dict)
    assert "has ended it" in await lost(tenancy)
    second = await etcd.lease(LONG_S).acquire(PATIENCE_S)
    assert second.term == 1
    await second.release()
    await tenancy.release()


@on_a_loop
async def test_runs_do_not_see_one_another_nor_what_is_foreign(etcd: Etcd) -> None:
    tenancy = await etcd.lease(LONG_S).acquire(PATIENCE_S)
    other = await EtcdLease.at(etcd.url, "one1", LONG_S).acquire(0)
    await etcd.client().put_if([], [Put(b"everstep/two/term", b"many")])
    with pytest.raises(UserError, match="everstep/two/term has a value that no coordinator"):
        await EtcdLease.at(etcd.url, "two", LONG_S).acquire(0)
    await other.release()
    assert tenancy.holds
    await tenancy.release()


# ---------------------------------------------------------------- processes


class Holder:
    """lease_holder.py: a process that holds the lease or waits for it."""

    def __init__(self, lease: str, folder: Path) -> None:
        program = [sys.executable, str(SCRIPTS / "lease_holder.py")]
        self._process = subprocess.Popen(
            [*program, lease, "one", str(folder), str(SHORT_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    def ask(self) -> None:
        self._in.write("?\n")
        self._in.flush()

    def says(self) -> str:
        return self._out.readline().partition(" ")[2].strip()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()


@pytest.fixture
def holders() -> Iterator[list[Holder]]:
    """Those in the list are ended."""
    started: list[Holder] = []
    yield started
    for holder in started:
        holder.end()


def test_who_was_stopped_knows_before_it_acts(
    etcd: Etcd, tmp_path: Path, holders: list[Holder]
) -> None:
    first = Holder(etcd.url, tmp_path)
    holders.append(first)
    assert first.says() == "holds 0"
    first.ask()
    assert first.says() == "acts"
    first.send(signal.SIGSTOP)
    first.ask()
    second = Holder(etcd.url, tmp_path)
    holders.append(second)
    assert second.says() == "holds 1"
    first.send(signal.SIGCONT)
    assert {first.says(), first.says()} == {"refuses", "lost"}
    second.ask()
    assert second.says() == "acts"


@pytest.mark.parametrize("in_place", [True, False])
def test_a_holder_that_is_killed_is_succeeded(
    in_place: bool, etcd: Etcd, tmp_path: Path, holders: list[Holder]
) -> None:
    for term in range(2):
        holder = Holder("" if in_place else etcd.url, tmp_path)
        holders.append(holder)
        assert holder.says() == f"holds {term}"
        holder.send(signal.SIGKILL)


def test_in_place_who_was_stopped_still_holds(tmp_path: Path, holders: list[Holder]) -> None:
    first, second = Holder("", tmp_path), None
    holders.append(first)
    assert first.says() == "holds 0"
    first.send(signal.SIGSTOP)
    second = Holder("", tmp_path)
    holders.append(second)
    first.ask()
    first.send(signal.SIGCONT)
    assert first.says() == "acts"
    first.send(signal.SIGKILL)
    assert second.says() == "holds 1"


@pytest.mark.root
@pytest.mark.apt("ip", "unshare")
def test_a_host_that_is_cut_off_knows_before_another_holds(tmp_path: Path) -> None:
    with Lab(tmp_path, ["store", "ada", "bob"]) as lab:
        client = f"http://{lab.address('store')}:2379"
        serve = ["etcd", "--data-dir", str(tmp_path / "etcd"), "--unsafe-no-fsync"]
        serve += ["--listen-client-urls", client, "--advertise-client-urls", client]
        lab.start("store", serve, os.environ)
        url = f"etcd://{lab.address('store')}"
        hold = [sys.executable, str(SCRIPTS / "lease_holder.py"), url, "one", str(tmp_path)]

        def start(host: str) -> None:
            inbox = tmp_path / f"{host}.in"
            os.mkfifo(inbox)  # open for writing, too, in the holder: so it never ends
            reads = ["sh", "-c", f'exec <>{inbox}; exec "$0" "$@"']
            lab.start(host, [*reads, *hold, str(SHORT_S)], {**os.environ, **PATHS})

        def time_of(host: str, what: str) -> float:
            deadline_s = now_s() + PATIENCE_S
            while now_s() < deadline_s:
                for line in lab.log(host).read_text().splitlines():
                    if line.endswith(what):
                        return float(line.split()[0])
                time.sleep(0.05)
            raise AssertionError(f"{host} never said {what}: {lab.log(host).read_text()}")

        start("ada")
        time_of("ada", "holds 0")
        lab.rules(apart(lab.numbers("ada"), lab.numbers("store", "bob")))
        start("bob")
        assert time_of("ada", "lost") < time_of("bob", "holds 1")


# ---------------------------------------------------------------- who may ask


@on_a_loop
async def test_a_user_with_a_password(etcd: Etcd, tmp_path: Path) -> None:
    calls: list[tuple[str, dict[str, object]]] = [
        ("auth/user/add", {"name": "root", "password": "open sesame"}),
        ("auth/role/add", {"name": "root"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/enable", {}),
    ]
    await (await etcd.lease(LONG_S).acquire(PATIENCE_S)).release()
    for call, question in calls:
        await etcd.client()._ask(call, question, dict)
    with pytest.raises(UserError, match="user, password-file"):
        await etcd.lease(LONG_S).acquire(0)
    password = tmp_path / "password"
    url = f"{etcd.url}?user=root&password-file={password}"
    with pytest.raises(UserError, match="password can't be read"):
        await EtcdLease.at(url, "one", LONG_S).acquire(0)
    password.write_text("wrong\n")
    with pytest.raises(UserError, match="authentication failed"):
        await EtcdLease.at(url, "one", LONG_S).acquire(0)
    password.write_text("open sesame\n")
    tenancy = await EtcdLease.at(url, "one", LONG_S).acquire(0)
    added = {"name": "other", "password": "x"}
    user = EtcdClient(
        EtcdAddress(endpoints=((LOCAL, etcd.port),), user="root", password_file=str(password)),
        PATIENCE_S,
    )
    await user._ask("auth/user/add", added, dict)  # all tokens are old now
    await tenancy.publish("host", 1)
    await tenancy.release()


@pytest.mark.apt("openssl")
@on_a_loop
async def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    make += ["-subj", "/CN=everstep", "-addext", f"subjectAltName=IP:{LOCAL}"]
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make += ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(make, check=True, capture_output=True, timeout=PATIENCE_S)
    options = ["--cert-file", str(cert), "--key-file", str(key)]
    options += ["--client-cert-auth", "--trusted-ca-file", str(cert)]
    etcd = Etcd(tmp_path, "https", options)
    etcd.start()
    try:
        base = f"etcds://{LOCAL}:{etcd.port}?ca={cert}"
        lease = EtcdLease.at(f"{base}&cert={cert}&key={key}", "one", LONG_S)
        tenancy = await lease.acquire(PATIENCE_S)
        await tenancy.publish("host", 1)
        await tenancy.release()
        for bad in (base, base.replace("etcds", "etcd").partition("?")[0]):
            with pytest.raises(TransientError, match=f"{LOCAL}:{etcd.port}"):
                await EtcdLease.at(bad, "one", LONG_S).acquire(0)
        unknown = f"etcds://{LOCAL}:{etcd.port}"
        with pytest.raises(TransientError, match="certificate verify failed"):
            await EtcdLease.at(unknown, "one", LONG_S).acquire(0)
    finally:
        etcd.kill()
