"""The bulk plane over loopback: transfers, cuts, and everybody who should not be let in."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import EverstepError, TransientError, UserError
from everstep.snapshot import block_spans, digest
from everstep.wire.bulk import (
    Caller,
    Corrupt,
    Cut,
    Limits,
    Listener,
    Offer,
    Refused,
    Sink,
    Source,
    Stranger,
    Throttle,
    fetch,
    greet,
)
from everstep.wire.bulk_door import Use, admit, enter, receive

HOST = "127.0.0.1"
KEY = b"the secret of the job, 32 bytes."
BLOCK = 1 << 16
DATA = secrets.token_bytes(20 * BLOCK + 123)
WAIT_S = 30.0
CALLER = Caller(key=KEY, node=1)


class Station:
    """A listener, whom it refused, and which tickets have ended."""

    def __init__(self, limits: Limits | None = None, throttle: Throttle | None = None) -> None:
        self.refused: list[tuple[str, str]] = []
        self.ended: list[bool] = []
        self._news = threading.Condition()
        self.listener = Listener(
            host=HOST,
            ports=[0],
            key=KEY,
            on_refused=self._refuse,
            throttle=throttle or Throttle(None),
            limits=limits or Limits(),
        )

    def _refuse(self, address: str, why: str) -> None:
        with self._news:
            self.refused.append((address, why))
            self._news.notify_all()

    def _end(self, done: bool) -> None:
        with self._news:
            self.ended.append(done)
            self._news.notify_all()

    def until(self, happened: Callable[[], object]) -> None:
        with self._news:
            assert self._news.wait_for(happened, WAIT_S)

    def lend(self, data: bytes = DATA, node: int = 1, lifetime_s: float = WAIT_S) -> Offer:
        source = Source(memoryview(data))
        return self.offer(
            self.listener.lend(source, node=node, lifetime_s=lifetime_s, on_end=self._end)
        )

    def offer(self, ticket: bytes, port: int | None = None) -> Offer:
        return Offer(host=HOST, port=port or self.listener.port, ticket=ticket)


@pytest.fixture
def stations() -> Iterator[Callable[..., Station]]:
    with ExitStack() as stack:

        def make(**kwargs: object) -> Station:
            station = Station(**kwargs)  # type: ignore[arg-type]
            stack.callback(station.listener.close)
            return station

        yield make


@pytest.fixture
def station(stations: Callable[..., Station]) -> Station:
    return stations()


def sink_for(data: bytes = DATA) -> tuple[Sink, bytearray]:
    room = bytearray(len(data))
    spans = block_spans(len(data), BLOCK)
    view = memoryview(data)
    return Sink(memoryview(room), BLOCK, [digest(view[a:b]) for a, b in spans]), room


class Wire:
    """A relay to a port. `limit(n)`: the connection under way is cut after n more bytes towards the
    caller; `carried`: bytes towards the caller."""

    def __init__(self, port: int, cuts: list[int]) -> None:
        self._port = port
        self._cuts = cuts
        self._server = socket.create_server((HOST, 0))
        self.port: int = self._server.getsockname()[1]
        self.carried = 0
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._closed = False
        self._run(self._accept)

    def _run(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            if self._closed:
                near.close()
                return
            far = socket.create_connection((HOST, self._port))
            self._sockets += [near, far]
            limit = self._cuts.pop(0) if self._cuts else 1 << 60
            self._run(self._relay, near, far, None)
            self._run(self._relay, far, near, limit)

    def _relay(self, one: socket.socket, other: socket.socket, limit: int | None) -> None:
        left = limit
        try:
            while data := one.recv(1 << 14 if left is None else min(1 << 14, left)):
                if left is not None:
                    left -= len(data)
                    self.carried += len(data)
                other.sendall(data)
                if left == 0:
                    break
        except OSError:
            pass
        for sock in (one, other):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._closed = True
        self._server.shutdown(socket.SHUT_RDWR)
        for sock in list(self._sockets):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in list(self._threads):
            thread.join(WAIT_S)
        for sock in [self._server, *self._sockets]:
            sock.close()


@pytest.fixture
def wires() -> Iterator[Callable[..., Wire]]:
    with ExitStack() as stack:

        def make(port: int, cuts: list[int]) -> Wire:
            wire = Wire(port, cuts)
            stack.callback(wire.close)
            return wire

        yield make


# ---------------------------------------------------------------- transfers


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, len(DATA)])
@pytest.mark.parametrize("streams", [1, 3])
def test_a_snapshot_is_fetched(station: Station, nbytes: int, streams: int) -> None:
    sink, room = sink_for(DATA[:nbytes])
    offer = station.lend(DATA[:nbytes])
    done = fetch(sink, [offer], CALLER, deadline_s=WAIT_S, streams=streams)
    assert room == DATA[:nbytes]
    assert done.cuts == 0
    assert sink.left == 0
    if nbytes:
        station.until(lambda: station.ended)
        assert station.ended == [True]
    assert station.refused == []


def test_several_sources_share_the_work(stations: Callable[..., Station]) -> None:
    both = [stations(), stations()]
    sink, room = sink_for()
    fetch(sink, [station.lend() for station in both], CALLER, deadline_s=WAIT_S)
    assert room == DATA


def test_a_source_that_is_not_there_costs_nothing(station: Station) -> None:
    with socket.create_server((HOST, 0)) as server:
        nobody = server.getsockname()[1]
    sink, room = sink_for()
    offers = [station.offer(bytes(16), nobody), station.lend()]
    assert fetch(sink, offers, CALLER, deadline_s=WAIT_S).nbytes >= len(DATA)
    assert room == DATA


def test_after_a_cut_only_what_was_on_the_way_is_sent_again(
    station: Station, wires: Callable[..., Wire]
) -> None:
    wire = wires(station.listener.port, [5 * BLOCK, 200, 7 * BLOCK + 99, BLOCK // 2])
    sink, room = sink_for()
    offer = station.offer(station.lend().ticket, wire.port)
    done = fetch(sink, [offer], CALLER, deadline_s=WAIT_S, streams=1)
    assert room == DATA
    assert done.cuts == 4
    talk = 5 * 200  # what is said at the door
    assert wire.carried < len(DATA) + 4 * BLOCK + talk
    assert station.refused == []


def test_what_has_arrived_is_kept_for_the_next_source(
    stations: Callable[..., Station], wires: Callable[..., Wire]
) -> None:
    first, second = stations(), stations()
    wire = wires(first.listener.port, [8 * BLOCK, *[1] * 20])
    sink, room = sink_for()
    offer = first.offer(first.lend().ticket, wire.port)
    with pytest.raises(TransientError, match="given up"):
        fetch(sink, [offer], CALLER, deadline_s=WAIT_S, streams=1)
    assert 0 < sink.left < 21
    arrived = 21 - sink.left
    again = Sink(memoryview(room), BLOCK, sink._digests)
    assert again.keep() == arrived
    onward = wires(second.listener.port, [])
    fetch(again, [second.offer(second.lend().ticket, onward.port)], CALLER, deadline_s=WAIT_S)
    assert room == DATA
    assert onward.carried < (21 - arrived) * BLOCK + 1000


def test_a_corrupt_copy_is_not_taken(station: Station) -> None:
    wrong = bytearray(DATA)
    wrong[3 * BLOCK] ^= 1
    sink, _ = sink_for()
    with pytest.raises(Corrupt, match=rf"bytes {3 * BLOCK} to {4 * BLOCK} from {HOST}"):
        fetch(sink, [station.lend(bytes(wrong))], CALLER, deadline_s=WAIT_S)


def test_a_transfer_can_be_ended_from_outside(station: Station) -> None:
    """It waits for the throttle, which would let go in an hour."""
    sink, _ = sink_for()
    slow = Throttle(1.0)
    slow.book(3600)
    thread = threading.Thread(target=sink.fail, args=(UserError("it is not needed any more"),))
    thread.start()
    with pytest.raises(UserError, match="not needed"):
        fetch(sink, [station.lend()], CALLER, deadline_s=WAIT_S, throttle=slow)
    thread.join()


def test_a_sender_that_stands_still_is_given_up() -> None:
    """It lets the caller in, answers half a block, and no more."""
    sink, _ = sink_for()
    with socket.create_server((HOST, 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            for _ in range(2):
                sock, _ = server.accept()
                held.append(sock)
                admit(sock, KEY, time.monotonic() + WAIT_S, lambda _: (0, len(DATA)))  # type: ignore[arg-type,return-value]
                sock.sendall(DATA[: BLOCK // 2])

        thread = threading.Thread(target=serve)
        thread.start()
        offer = Offer(host=HOST, port=server.getsockname()[1], ticket=bytes(16))
        caller = Caller(key=KEY, node=1, limits=Limits(stall_s=0.05, handshake_s=0.2))
        with pytest.raises(TransientError):
            fetch(sink, [offer], caller, deadline_s=WAIT_S, streams=1)
        thread.join()
        for sock in held:
            sock.close()
    assert sink.left == 21


# ---------------------------------------------------------------- who is not let in


def transfer_under_way(station: Station, wire: Wire) -> tuple[threading.Thread, bytearray]:
    sink, room = sink_for()
    offer = station.offer(station.lend().ticket, wire.port)
    thread = threading.Thread(target=fetch, args=(sink, [offer], CALLER), kwargs={"deadline_s": 30})
    thread.start()
    return thread, room


def say(port: int, data: bytes) -> bytes:
    """Send `data` to a listener, and return what it says until it closes."""
    heard = b""
    with socket.create_connection((HOST, port), WAIT_S) as sock:
        try:
            sock.sendall(data)
            while part := sock.recv(4096):
                heard += part
        except ConnectionError:
            pass
    return heard


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n" * 20, bytes(101), b"\xff" * 5000, b"evsbulk1" * 13]
)
def test_garbage_is_refused_with_its_address_and_disturbs_nobody(
    station: Station, wires: Callable[..., Wire], garbage: bytes
) -> None:
    thread, room = transfer_under_way(station, wires(station.listener.port, []))
    assert len(say(station.listener.port, garbage)) <= 40  # the challenge, and no word more
    thread.join(WAIT_S)
    assert room == DATA
    station.until(lambda: station.refused)
    address, why = station.refused[0]
    assert address.startswith(f"{HOST}:")
    assert "does not know the job's secret" in why


def test_a_wrong_key_gets_nothing(station: Station) -> None:
    sink, room = sink_for()
    wrong = Caller(key=b"x" * 32, node=1)
    offer = station.lend()
    with pytest.raises(TransientError, match="does not have its secret"):
        fetch(sink, [offer], wrong, deadline_s=WAIT_S, streams=1)
    assert not any(room)
    assert all("does not know the job's secret" in why for _, why in station.refused)
    fetch(sink, [offer], CALLER, deadline_s=WAIT_S)  # the ticket is as good as it was
    assert room == DATA


def test_a_crowd_of_strangers_is_told_of_sparingly(stations: Callable[..., Station]) -> None:
    station = stations(limits=Limits(refusals_per_minute=3))
    for _ in range(10):
        say(station.listener.port, bytes(101))
    station.listener.close()
    assert len(station.refused) == 3


def test_a_greeting_shows_that_the_right_listener_is_there_and_opens_nothing(
    stations: Callable[..., Station],
) -> None:
    station, other = stations(), stations()
    door = station.offer(station.listener.greeting)
    for _ in range(3):
        greet(door, CALLER, deadline_s=WAIT_S)
    assert station.refused == []
    sink, _ = sink_for()
    with pytest.raises(Refused, match="unknown"):
        fetch(sink, [door], CALLER, deadline_s=WAIT_S, streams=1)
    with pytest.raises(Refused, match="unknown"):
        greet(other.offer(station.listener.greeting), CALLER, deadline_s=WAIT_S)
    with pytest.raises(Refused, match="unknown"):
        greet(station.lend(), CALLER, deadline_s=WAIT_S)  # a ticket is no greeting
    with pytest.raises(Cut, match="does not have its secret"):
        greet(door, Caller(key=b"x" * 32, node=1), deadline_s=WAIT_S)


def test_a_greeting_that_nobody_answers_takes_its_time_and_no_more() -> None:
    with socket.create_server((HOST, 0)) as silent:
        door = Offer(host=HOST, port=silent.getsockname()[1], ticket=bytes(16))
        with pytest.raises(Cut, match="did not answer in time"):
            greet(door, CALLER, deadline_s=0.1)
    with pytest.raises(Cut, match="Connection refused"):
        greet(door, CALLER, deadline_s=WAIT_S)


def test_a_listener_without_the_key_gets_nothing() -> None:
    heard = []

    def pretend(server: socket.socket) -> None:
        sock, _ = server.accept()
        with sock:
            sock.settimeout(WAIT_S)
            sock.sendall(b"evsbulk1" + bytes(32))
            heard.append(sock.recv(4096))
            sock.sendall(bytes(9 + 32))
            while data := sock.recv(4096):
                heard.append(data)

    with socket.create_server((HOST, 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        offer = Offer(host=HOST, port=server.getsockname()[1], ticket=bytes(16))
        with pytest.raises(Stranger, match="does not know the job's secret"):
            fetch(sink_for()[0], [offer], CALLER, deadline_s=WAIT_S, streams=1)
        thread.join()
    assert len(heard) == 1
    assert KEY not in heard[0]


def test_what_was_recorded_can_not_be_played_again(station: Station) -> None:
    said = []
    offer = station.lend()
    with socket.create_server((HOST, 0)) as tap:
        far = socket.create_connection((HOST, station.listener.port))
        near = socket.create_connection(tap.getsockname())
        middle, _ = tap.accept()

        def relay() -> None:
            middle.sendall(receive(far, 40, time.monotonic() + WAIT_S))
            said.append(receive(middle, 101, time.monotonic() + WAIT_S))
            far.sendall(said[0])
            middle.sendall(receive(far, 41, time.monotonic() + WAIT_S))

        thread = threading.Thread(target=relay)
        thread.start()
        open_door(near, offer.ticket)
        thread.join()
        for sock in (near, middle, far):
            sock.close()
    assert len(say(station.listener.port, said[0])) == 40
    station.until(lambda: station.refused)
    assert "does not know the job's secret" in station.refused[0][1]


def open_door(sock: socket.socket, ticket: bytes, use: Use = Use.READ) -> int:
    return enter(
        sock,
        KEY,
        time.monotonic() + WAIT_S,
        ticket=ticket,
        holder=secrets.token_bytes(16),
        node=1,
        use=use,
    )


def test_a_ticket_is_for_one_transfer(station: Station) -> None:
    offer = station.lend()
    fetch(sink_for()[0], [offer], CALLER, deadline_s=WAIT_S)
    with pytest.raises(Refused, match="has been used"):
        fetch(sink_for()[0], [offer], CALLER, deadline_s=WAIT_S)
    held = station.lend()
    with socket.create_connection((HOST, station.listener.port)) as sock:
        open_door(sock, held.ticket)  # somebody is at it
        with pytest.raises(Refused, match="has been used"):
            fetch(sink_for()[0], [held], CALLER, deadline_s=WAIT_S)
    assert {why for _, why in station.refused} == {"node 1 was refused: the ticket has been used"}


def test_a_ticket_that_has_expired_is_of_no_use(station: Station) -> None:
    offer = station.lend(lifetime_s=0)
    station.until(lambda: station.ended)
    assert station.ended == [False]
    with pytest.raises(Refused, match="expired"):
        fetch(sink_for()[0], [offer], CALLER, deadline_s=WAIT_S)


def test_a_ticket_is_for_its_node(station: Station) -> None:
    sink, room = sink_for()
    with pytest.raises(Refused, match="another node's"):
        fetch(sink, [station.lend(node=2)], CALLER, deadline_s=WAIT_S)
    with pytest.raises(Refused, match="unknown"):
        fetch(sink, [station.offer(bytes(16))], CALLER, deadline_s=WAIT_S)
    assert not any(room)


def test_a_withdrawn_ticket_ends_what_is_under_way(station: Station) -> None:
    offer = station.lend()
    with socket.create_connection((HOST, station.listener.port), WAIT_S) as sock:
        open_door(sock, offer.ticket)
        station.listener.withdraw(offer.ticket)
        assert sock.recv(1) == b""
    station.until(lambda: station.ended)
    station.listener.withdraw(offer.ticket)
    assert station.ended == [False]


@pytest.mark.parametrize(
    ("start", "nbytes"),
    [
        (0, (1 << 30) + 1),
        (0, len(DATA) + 1),
        (len(DATA), 1),
        (1 << 63, 1 << 63),
        (5, (1 << 64) - 1),
    ],
)
def test_a_request_that_is_too_long_is_refused(station: Station, start: int, nbytes: int) -> None:
    offer = station.lend()
    with socket.create_connection((HOST, station.listener.port), WAIT_S) as sock:
        assert open_door(sock, offer.ticket) == len(DATA)
        sock.sendall(struct.pack("<QQ", start, nbytes))
        assert sock.recv(1) == b""
    station.until(lambda: station.refused)
    assert f"it asked for {nbytes} bytes at {start}" in station.refused[0][1]


def test_a_slow_stranger_is_put_out(stations: Callable[..., Station]) -> None:
    station = stations(limits=Limits(handshake_s=0.05))
    heard = say(station.listener.port, b"e")
    assert len(heard) == 40
    station.until(lambda: station.refused)
    assert (
        "it did not show that it has the job's secret: it did not answer" in station.refused[0][1]
    )


def test_a_crowd_of_strangers_keeps_nobody_out(stations: Callable[..., Station]) -> None:
    station = stations(limits=Limits(strangers=3, handshake_s=WAIT_S))
    crowd = []
    for _ in range(10):
        crowd.append(socket.create_connection((HOST, station.listener.port), WAIT_S))
        receive(crowd[-1], 40, time.monotonic() + WAIT_S)
    sink, room = sink_for()
    fetch(sink, [station.lend()], CALLER, deadline_s=WAIT_S, streams=1)
    assert room == DATA
    put_out = [why for _, why in station.refused if "make room" in why]
    assert len(put_out) == 8
    for sock in crowd:
        sock.close()


def test_too_many_streams_wait_for_a_place(stations: Callable[..., Station]) -> None:
    station = stations(limits=Limits(streams=1))
    sink, room = sink_for()
    fetch(sink, [station.lend()], CALLER, deadline_s=WAIT_S, streams=3)
    assert room == DATA


def test_closing_ends_all_and_can_be_done_twice(stations: Callable[..., Station]) -> None:
    station = stations()
    offer = station.lend()
    with (
        socket.create_connection((HOST, station.listener.port), WAIT_S) as friend,
        socket.create_connection((HOST, station.listener.port), WAIT_S) as stranger,
    ):
        open_door(friend, offer.ticket)
        receive(stranger, 40, time.monotonic() + WAIT_S)
        station.listener.close()
        station.listener.close()
        assert friend.recv(1) == b""
        assert stranger.recv(1) == b""
    assert station.ended == [False]
    assert station.refused == []
    with pytest.raises(ValueError, match="closed"):
        station.lend()


def test_secrets_are_not_shown() -> None:
    offer = Offer(host="::1", port=29400, ticket=b"ticket-ticket-ti")
    assert repr(offer) == "Offer([::1]:29400)"
    assert "secret" not in repr(CALLER)
    for make in (
        partial(Caller, node=1),
        partial(Listener, host=HOST, ports=[0], on_refused=print),
    ):
        with pytest.raises(ValueError, match="at least 32"):
            make(key=b"short")
    with pytest.raises(ValueError, match="it has 16"):
        Offer(host=HOST, port=1, ticket=b"short")


# ---------------------------------------------------------------- ports


def test_the_first_free_port_of_the_range_is_taken() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        free = next(p for p in range(port + 1, port + 50) if is_free(p))
        listener = Listener(host=HOST, ports=[port, free], key=KEY, on_refused=lambda *_: None)
        assert listener.port == free
        listener.close()
        with pytest.raises(UserError, match=f"port {port} is not free"):
            Listener(host=HOST, ports=[port], key=KEY, on_refused=lambda *_: None)
    with pytest.raises(UserError, match=r"192\.0\.2\.1"):
        Listener(host="192.0.2.1", ports=[0], key=KEY, on_refused=lambda *_: None)


def is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True


def test_ipv6_is_as_good() -> None:
    try:
        listener = Listener(host="::1", ports=[0], key=KEY, on_refused=lambda *_: None)
    except UserError:
        pytest.skip("this host has no IPv6")
    ticket = listener.lend(
        Source(memoryview(DATA)), node=1, lifetime_s=WAIT_S, on_end=lambda _: None
    )
    sink, room = sink_for()
    offer = Offer(host="::1", port=listener.port, ticket=ticket)
    fetch(sink, [offer], CALLER, deadline_s=WAIT_S)
    assert room == DATA
    listener.close()


# ---------------------------------------------------------------- the throttle and the sink


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=50), st.floats(1, 1e6))
def test_the_rate_holds_over_all_who_share_it(pieces: list[int], rate: float) -> None:
    """Whoever waits as he is told has the last byte no sooner than the rate allows."""
    now = 100.0
    throttle = Throttle(rate, clock=lambda: now)
    delays = [throttle.book(piece) for piece in pieces]
    assert delays == sorted(delays)
    assert delays[-1] == pytest.approx(max(0.0, sum(pieces) / rate - 0.05), abs=1e-6)
    now += delays[-1] + 1000.0
    assert throttle.book(pieces[0]) <= pieces[0] / rate  # and a pause is not saved up


def test_a_throttled_transfer_is_whole(stations: Callable[..., Station]) -> None:
    throttle = Throttle(50e6)
    station = stations(throttle=throttle)
    for _ in range(2):
        sink, room = sink_for()
        fetch(sink, [station.lend()], CALLER, deadline_s=WAIT_S, throttle=Throttle(60e6))
        assert room == DATA


def test_a_throttle_that_never_lets_go_is_refused() -> None:
    for rate in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="never let go"):
            Throttle(rate)
    assert Throttle(None).book(1 << 40) == 0
    assert Throttle(None).piece_bytes is None
    assert [Throttle(rate).piece_bytes for rate in (1.0, 1e6, 1e12)] == [1, 50_000, 256 << 10]


def test_a_throttle_does_not_outwait_the_deadline(station: Station) -> None:
    sink, _ = sink_for()
    slow = Throttle(1.0)
    slow.book(3600)
    with pytest.raises(TransientError, match="given up: the time for the transfer is over"):
        fetch(sink, [station.lend()], CALLER, deadline_s=0.3, throttle=slow)


def test_a_sink_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="digests for"):
        Sink(memoryview(bytearray(10)), 4, ["0" * 32] * 2)
    with pytest.raises(ValueError, match="blocks of"):
        Sink(memoryview(bytearray(10)), 0, [])


def test_the_first_failure_of_a_sink_stays() -> None:
    sink, _ = sink_for()
    first: EverstepError = Cut("first")
    sink.fail(first)
    sink.fail(Cut("second"))
    with pytest.raises(Cut, match="first"):
        sink.check()
    assert sink.over.is_set()
