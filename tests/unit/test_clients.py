"""Those who ask about a job: what they are answered, and that the job does not notice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_agent_remote import VERSIONS, Case, until

from everstep.agent.desk import Desk, RecentLines
from everstep.agent.fleet import Fleet
from everstep.agent.remote import CutOffError
from everstep.core.actions import End
from everstep.errors import TransientError, UserError
from everstep.launch.client import (
    _QUEUED,
    Contact,
    NoJobError,
    _Writer,
    ask_status,
    read_logs,
    stop_job,
)
from everstep.wire import clients, nodes
from everstep.wire.clients import AskLogs, AskStop, Line
from everstep.wire.messages import ScriptSpec
from everstep.wire.secret import make_secret

PATIENCE_S = 20.0


class Kept:
    """A printer that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.gaps: list[tuple[int, int]] = []

    def line(self, line: Line) -> None:
        self.lines.append(line)

    def missed(self, rank: int, count: int) -> None:
        self.gaps.append((rank, count))

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines]


class Client:
    """Asks the job of a case, each time in a thread of its own."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._port = case.registry.port
        self.patience_s = PATIENCE_S
        self.said: list[str] = []

    async def status(self) -> clients.Status:
        return await asyncio.to_thread(ask_status, self.contact())

    async def logs(self, *ranks: int, follow: bool = False, tail: int = -1) -> list[str]:
        printer = Kept()
        await self.read(printer, AskLogs(ranks=ranks, follow=follow, tail=tail))
        return printer.texts

    async def read(self, printer: Kept, asked: AskLogs) -> None:
        await asyncio.to_thread(read_logs, self.contact(), asked, printer)

    async def stop(self, *, now: bool) -> None:
        await asyncio.to_thread(stop_job, self.contact(), now=now)

    def contact(self, **other: Any) -> Contact:
        known: dict[str, Any] = {
            "where": ("127.0.0.1", self._port),
            "secret": self._case.secret,
            "timeout_s": self.patience_s,
            "say": self.said.append,
        }
        return Contact(**known | other)


def play(act: Callable[[Case, Client], Awaitable[None]]) -> None:
    async def run() -> None:
        case = Case()
        try:
            await act(case, Client(case))
        finally:
            for agent in case.agents:
                agent.link.close()
            case.registry.close()

    asyncio.run(run())


def over(case: Case, exit_code: int = 0, text: str = "") -> None:
    ended = cast("asyncio.Future[End]", case.fleet.ended)
    ended.set_result(End(exit_code=exit_code, text=text))
    case.fleet.exit_code = exit_code


# ---------------------------------------------------------------- answers


def test_a_status_has_what_the_core_knows_and_who_has_registered() -> None:
    async def act(case: Case, client: Client) -> None:
        await case.agent().register(name="a")
        status = await client.status()
        assert (status.run_id, status.script) == ("r", "train.py")
        assert status.overview == case.fleet.overview()
        assert [(agent.node, agent.name, agent.joined) for agent in status.agents] == [
            (0, "a", False)
        ]
        assert status.wall_s >= 0
        assert client.said == []

    play(act)


def test_a_client_is_no_node_and_its_end_is_nobodys_loss() -> None:
    async def act(case: Case, client: Client) -> None:
        await client.status()
        agent = case.agent()
        await asyncio.wait_for(agent.joined.wait(), 10)
        agent.link.send(clients.AskStatus())  # whose answer is no word for an agent
        await until(lambda: bool(agent.losses))
        await client.status()
        assert case.fleet.told == []
        assert case.fleet.nodes == {}

    play(act)


def test_who_has_asked_can_not_register() -> None:
    async def act(case: Case, client: Client) -> None:
        agent = case.agent()
        await asyncio.wait_for(agent.joined.wait(), 10)
        agent.link.send(clients.AskLogs(ranks=(), follow=True))
        agent.link.send(
            nodes.Register(
                name="a", host="h", address="x", pid=1, versions=VERSIONS, domain="", boot_id="b"
            )
        )
        (_, text) = await case.until_told("note")
        assert "it has asked as a client" in text
        assert case.fleet.nodes == {}

    play(act)


@pytest.mark.parametrize("now", [False, True])
def test_a_stop_is_asked_for_once_and_waits_for_the_end(now: bool) -> None:
    async def act(case: Case, client: Client) -> None:
        asking = asyncio.create_task(client.stop(now=now))
        assert await case.until_told("end") == ("end", now)
        (_, note) = await case.until_told("note")
        assert f"has asked the job to end{' at once' if now else ''} (everstep stop)" in note
        await until(lambda: bool(client.said))
        assert client.said == [f"run r is asked to end{' at once' if now else ''}"]
        over(case, 130, "the job was asked to end by SIGINT")
        await until(lambda: len(client.said) == 2)
        assert client.said[1] == "it ends with exit code 130: the job was asked to end by SIGINT"
        assert not asking.done()
        case.registry.close()
        await asyncio.wait_for(asking, PATIENCE_S)

    play(act)


def test_who_asks_for_a_stop_again_writes_nothing() -> None:
    async def act(case: Case, client: Client) -> None:
        script = ScriptSpec(target="t", module=False, args=())
        fleet = cast(Fleet, case.fleet)
        desk = Desk(fleet, Jam(), lambda: (), run_id="r", script=script, term=0)
        for now in (False, False, True, False, True):
            desk.take(0, AskStop(who="ada", now=now))
        assert [told[0] for told in case.fleet.told].count("note") == 2
        over(case)
        await asyncio.sleep(0)
        desk.take(0, AskStop(who="bob", now=True))
        assert [told[0] for told in case.fleet.told].count("note") == 2
        desk.close()

    play(act)


def test_a_job_that_goes_on_without_this_coordinator_is_not_over() -> None:
    async def act(case: Case, client: Client) -> None:
        case.fleet.ended.set_exception(CutOffError("nobody is heard"))
        assert (await client.status()).exit_code is None

    play(act)


def test_after_the_end_everybody_is_told_so() -> None:
    async def act(case: Case, client: Client) -> None:
        over(case, 1, "why")
        status = await client.status()
        assert (status.exit_code, status.text) == (1, "why")
        asking = asyncio.create_task(client.stop(now=False))
        await until(lambda: len(client.said) == 2)
        assert client.said[1] == "it ends with exit code 1: why"
        case.registry.close()
        await asyncio.wait_for(asking, PATIENCE_S)

    play(act)


# ---------------------------------------------------------------- lines


def test_lines_of_all_of_some_ranks_and_the_newest() -> None:
    async def act(case: Case, client: Client) -> None:
        for number in range(6):
            case.fleet.view.output(number % 3, 1, "stdout", f"line {number}")
        case.fleet.view.record({"event": "note", "t": 1.0, "text": "look", "rank": None})
        everything = [*(f"line {number}" for number in range(6)), "note: look"]
        assert await client.logs() == everything
        assert await client.logs(1) == ["line 1", "line 4"]
        assert await client.logs(0, 2) == ["line 0", "line 2", "line 3", "line 5"]
        assert await client.logs(tail=2) == ["line 5", "note: look"]
        assert await client.logs(1, tail=1) == ["line 4"]
        assert await client.logs(tail=0) == []
        for follow in (False, True):
            with pytest.raises(UserError, match="the job has ranks 0-3, and not rank 7"):
                await client.logs(7, 1, follow=follow)

    play(act)


def test_who_follows_has_the_old_lines_and_the_new_ones_up_to_the_end() -> None:
    async def act(case: Case, client: Client) -> None:
        printer = Kept()
        case.fleet.view.output(0, 1, "stdout", "old")
        reading = asyncio.create_task(client.read(printer, AskLogs(ranks=(), follow=True)))
        await until(lambda: printer.texts == ["old"])
        case.fleet.view.output(0, 2, "stderr", "new")
        await until(lambda: printer.texts == ["old", "new"])
        assert printer.lines[1].incarnation == 2
        assert printer.lines[1].stream == "stderr"
        case.fleet.view.output(0, 2, "stdout", "last")
        over(case)
        await asyncio.sleep(0)
        case.registry.close()
        await asyncio.wait_for(reading, PATIENCE_S)
        assert printer.texts == ["old", "new", "last"]
        assert printer.gaps == []

    play(act)


def test_who_follows_a_job_that_says_nothing_is_in_touch_with_it() -> None:
    async def act(case: Case, client: Client) -> None:
        client.patience_s = 2.0
        reading = asyncio.create_task(client.read(Kept(), AskLogs(ranks=(), follow=True)))
        await until(lambda: bool(case.registry._desk._readers))
        case.registry.close()
        await until(lambda: bool(client.said))
        assert "waiting up to 2 s for a coordinator" in client.said[0]
        with pytest.raises(NoJobError, match="it was tried for 2 s"):
            await reading

    play(act)


def test_a_coordinator_that_comes_back_is_asked_again() -> None:
    async def act(case: Case, client: Client) -> None:
        printer = Kept()
        case.fleet.view.output(0, 1, "stdout", "before")
        reading = asyncio.create_task(client.read(printer, AskLogs(ranks=(0,), follow=True)))
        await until(lambda: printer.texts == ["before"])
        port = case.registry.port
        case.registry.close()
        await until(lambda: bool(client.said))
        assert "waiting up to 20 s for a coordinator" in client.said[0]
        again = Case(secret=case.secret, port=port)
        try:
            again.fleet.view.output(0, 3, "stdout", "after")
            again.fleet.view.output(1, 3, "stdout", "of another rank")
            await until(lambda: printer.texts == ["before", "after"])
            over(again)
            await asyncio.sleep(0)
        finally:
            again.registry.close()
        await asyncio.wait_for(reading, PATIENCE_S)
        assert printer.texts == ["before", "after"]
        assert printer.gaps == []

    play(act)


class Jam:
    """A connection that takes nothing while it is jammed."""

    def __init__(self) -> None:
        self.jammed = True
        self.sent: list[Any] = []

    def send(self, peer: int, message: msgspec.Struct) -> bool:
        self.sent.append(message)
        return True

    def unread_bytes(self, peer: int) -> int:
        return 1 << 30 if self.jammed else 0

    def lines(self) -> list[Line]:
        return [line for lines in self.sent for line in lines.lines]


def test_a_slow_reader_falls_behind_and_the_numbers_say_how_far() -> None:
    async def act(case: Case, client: Client) -> None:
        jam = Jam()
        script = ScriptSpec(target="t", module=False, args=())
        fleet = cast(Fleet, case.fleet)
        desk = Desk(fleet, jam, lambda: (), run_id="r", script=script, term=0)
        desk._recent = RecentLines(max_lines=10)
        desk.take(0, AskLogs(ranks=(), follow=True))
        for number in range(100):
            desk.output(number % 2, 1, "stdout", str(number))
        await asyncio.sleep(0)
        assert jam.lines() == []
        jam.jammed = False
        await until(lambda: bool(jam.lines()))
        assert [line.text for line in jam.lines()] == [str(number) for number in range(90, 100)]
        assert [line.number for line in jam.lines()[:2]] == [46, 46]
        desk.close()

    play(act)


def one(number: int) -> clients.Lines:
    return clients.Lines(source="s", lines=(Line(number, number, 0, 1, "stdout", ""),), last=False)


def test_a_reader_who_stops_reading_is_told_what_he_missed() -> None:
    begun, free, emptied = threading.Event(), threading.Event(), threading.Event()
    room = 1 + _QUEUED  # the one that is being printed, and those that wait

    class Stuck(Kept):
        def line(self, line: Line) -> None:
            super().line(line)
            begun.set()
            assert free.wait(PATIENCE_S)
            if len(self.lines) == room:
                emptied.set()

    printer = Stuck()
    writer = _Writer(printer)
    writer.put(one(1))
    assert begun.wait(PATIENCE_S)
    for number in range(2, 1000):
        writer.put(one(number))
    free.set()
    assert emptied.wait(PATIENCE_S)
    writer.put(one(1000))
    writer.close()
    assert [line.number for line in printer.lines] == [*range(1, room + 1), 1000]
    assert printer.gaps == [(0, 999 - room)]


def test_an_error_of_the_stream_ends_the_reading() -> None:
    class Broken(Kept):
        def line(self, line: Line) -> None:
            raise OSError("no space left")

    writer = _Writer(Broken())
    writer.put(one(1))
    with pytest.raises(OSError, match="no space"):
        writer.close()


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40))),
    st.integers(1, 60),
    st.integers(1, 10),
    st.integers(0, 30),
    st.frozensets(st.integers(0, 2)),
    st.integers(1, 50),
)
def test_a_ring_is_the_end_of_all_lines(
    printed: list[tuple[int, int]],
    max_bytes: int,
    max_lines: int,
    at: int,
    ranks: frozenset[int],
    batch_bytes: int,
) -> None:
    ring = RecentLines(max_bytes=max_bytes, max_lines=max_lines)
    for rank, length in printed:
        ring.add(rank, 1, "stdout", "x" * length)
    assert ring.end == len(printed)
    at = min(at, ring.end)
    found: list[Line] = []
    place = at
    while place < ring.end:
        lines, further = ring.after(place, ranks, batch_bytes)
        assert further > place
        assert sum(len(line.text) for line in lines[:-1]) < batch_bytes
        found += lines
        place = further
    kept = _kept(printed, max_bytes, max_lines)
    assert [line.at for line in found] == [
        number for number in kept if number > at and (not ranks or printed[number - 1][0] in ranks)
    ]
    for line in found:
        before = [rank for rank, _ in printed[: line.at] if rank == line.rank]
        assert line.number == len(before)
    for count in range(4):
        behind = ring.tail(count, ranks)
        newest = [line.at for line in RingReader(ring).all(ranks)][-count:] if count else []
        assert [line.at for line in ring.after(behind, ranks, 1 << 20)[0]] == newest


class RingReader:
    """All that a ring still has."""

    def __init__(self, ring: RecentLines) -> None:
        self._ring = ring

    def all(self, ranks: frozenset[int]) -> list[Line]:
        return self._ring.after(0, ranks, 1 << 20)[0]


def _kept(printed: list[tuple[int, int]], max_bytes: int, max_lines: int) -> list[int]:
    """The numbers of the lines that are still there."""
    kept: list[int] = []
    for number in range(1, len(printed) + 1):
        kept.append(number)
        while len(kept) > max_lines or sum(printed[n - 1][1] for n in kept) > max_bytes:
            kept.pop(0)
    return kept


# ---------------------------------------------------------------- nobody there


def test_a_coordinator_that_moves_is_looked_for_before_each_attempt() -> None:
    async def act(case: Case, client: Client) -> None:
        asked: list[str] = []

        async def find() -> tuple[str, int]:
            asked.append("where?")
            if len(asked) == 1:
                raise TransientError("nobody coordinates now")
            return "127.0.0.1", case.registry.port

        contact = client.contact(where=("", 0), find=find)
        assert (await asyncio.to_thread(ask_status, contact)).run_id == "r"
        assert client.said == ["nobody coordinates now; trying for 20 s"]

    play(act)


def test_where_nobody_listens_the_error_says_so() -> None:
    said: list[str] = []
    with pytest.raises(NoJobError, match=r"nobody listens there.*it was tried for 0\.3 s") as error:
        ask_status(
            Contact(where=("127.0.0.1", 1), secret=make_secret(), timeout_s=0.3, say=said.append)
        )
    assert error.value.exit_code == 3
    assert "trying for 0.3 s" in said[0]


def test_another_secret_is_refused_with_words_at_both_ends() -> None:
    async def act(case: Case, client: Client) -> None:
        with pytest.raises(NoJobError, match="is its secret the same"):
            await asyncio.to_thread(ask_status, client.contact(secret=make_secret(), timeout_s=0.5))
        (_, note) = await case.until_told("note")
        assert "was refused" in note
        assert "secret" in note

    play(act)
