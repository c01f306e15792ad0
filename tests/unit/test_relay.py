"""What a coordinator's process shows by way of its launcher: all of it, or what was left out."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from everstep.agent.channel import AgentChannel
from everstep.launch import relay
from everstep.launch.relay import News, Order, Printed, Recorded, RelayedView
from everstep.settings import RunSettings, faults_of
from everstep.wire.messages import ScriptSpec


class Case:
    """Both ends of a relay. The launcher reads when it is asked to."""

    def __init__(self) -> None:
        self.news: list[News] = []
        self.orders: list[Order] = []
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self.launcher: AgentChannel[News] = AgentChannel(
            loop, ours, News, self.news.append, pytest.fail
        )
        self.coordinator: AgentChannel[Order] = AgentChannel(
            loop, theirs, Order, self.orders.append, pytest.fail
        )
        self.view = RelayedView(self.coordinator)

    async def read(self) -> None:
        """Read until all that was sent has come."""
        async with asyncio.timeout(10):
            await self.coordinator.flushed()
        self.launcher.drain()

    def close(self) -> None:
        self.launcher.close()
        self.coordinator.close()


def run(scenario: Any) -> None:
    async def whole() -> None:
        case = Case()
        try:
            await scenario(case)
        finally:
            case.close()

    asyncio.run(whole())


def test_what_is_shown_comes_in_order() -> None:
    async def scenario(case: Case) -> None:
        record = {"t": 1.5, "event": "step", "step": 3, "cause": None, "ranks": [1, 2]}
        case.view.record(record)
        case.view.output(1, 2, "stderr", "a line \u00f6")
        await case.read()
        line = Printed(rank=1, incarnation=2, stream="stderr", line="a line \u00f6")
        assert case.news == [Recorded(record=record), line]

    run(scenario)


def test_all_settings_arrive_as_they_were() -> None:
    async def scenario(case: Case) -> None:
        settings = RunSettings(
            script=ScriptSpec(target="train.py", module=False, args=("--x", "1")),
            local_nodes=2,
            run_id="r",
        )
        faults = faults_of(settings, ["coordinator:step=5", "kill:rank=1,step=2,at=fence"])
        settings = RunSettings(**{**vars(settings), "chaos": faults})
        begin = relay.Begin(
            settings=settings, port=29400, runner="a:b", preload=("torch",), resume=True
        )
        case.launcher.send(begin)
        async with asyncio.timeout(10):
            await case.launcher.flushed()
        case.coordinator.drain()
        assert case.orders == [begin]

    run(scenario)


def test_a_launcher_that_does_not_read_misses_lines_first_and_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "_MOST_UNREAD_BYTES", 100_000)
    monkeypatch.setattr(relay, "_MOST_UNREAD_RECORDS_BYTES", 400_000)

    async def scenario(case: Case) -> None:
        line = "x" * 1000
        for _ in range(2000):
            case.view.output(0, 1, "stdout", line)
        for step in range(2000):
            case.view.record({"event": "step", "step": step, "text": line})
        joined = {"event": "node_joined", "node": 1}
        case.view.record(joined)  # by which the launcher goes
        assert case.coordinator.backlog_bytes < 500_000
        await case.read()
        lines = sum(isinstance(news, Printed) for news in case.news)
        assert case.news.pop() == Recorded(record=joined)
        steps = [news.record["step"] for news in case.news if isinstance(news, Recorded)]
        assert 0 < lines < 2000
        assert steps == list(range(len(steps)))  # the first ones, without a hole
        assert lines < len(steps) < 2000
        case.news.clear()
        case.view.output(0, 1, "stdout", "the last")
        await case.read()
        note, last = case.news
        assert isinstance(note, Recorded)
        missed = f"{2000 - lines} lines of output and {2000 - len(steps)} records came too fast"
        assert note.record["text"].startswith(missed)
        assert isinstance(last, Printed)

    run(scenario)


def test_a_launcher_that_is_gone_is_not_waited_for() -> None:
    async def scenario(case: Case) -> None:
        case.view.output(0, 1, "stdout", "x" * 10_000_000)
        waiting = asyncio.create_task(case.coordinator.flushed())
        await asyncio.wait([waiting], timeout=0)
        assert not waiting.done()
        case.launcher.close()
        async with asyncio.timeout(10):
            await waiting
        case.view.output(0, 1, "stdout", "nobody hears it")

    run(scenario)
