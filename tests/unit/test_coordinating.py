"""A coordinator that can't have the lease yet."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.unit.netcases import News, on_a_loop

from everstep.agent.zygote import ZygotePlan
from everstep.launch.coordinating import Coordinating, LeftError
from everstep.launch.lease import InPlace
from everstep.observe.narrate import Narrator
from everstep.settings import RunSettings
from everstep.wire.messages import ScriptSpec

PATIENCE_S = 60.0


class Shown:
    """A view that keeps what a person would read."""

    def __init__(self, news: News) -> None:
        self.said: list[str] = []
        self._news = news
        self._narrator = Narrator()

    def record(self, record: dict[str, Any]) -> None:
        self.said += self._narrator.tell(record)
        self._news.tell()

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        raise AssertionError("nothing runs")


@on_a_loop
async def test_it_says_once_for_whom_it_stands_by(tmp_path: Path) -> None:
    news = News()
    view = Shown(news)
    settings = RunSettings(
        script=ScriptSpec(target="train.py", module=False, args=()),
        local_nodes=2,
        run_id="one",
        log_dir=str(tmp_path),
    )
    (tmp_path / "one").mkdir()
    first = await InPlace(tmp_path / "one").acquire(0)
    coordinating = Coordinating(
        settings, view, ZygotePlan(), {}, port=0, resume=True, wait_s=PATIENCE_S
    )
    running = asyncio.ensure_future(coordinating.run())
    await news.until(lambda: view.said)
    coordinating.leave(signal.SIGTERM)
    with pytest.raises(LeftError):
        await running
    [line] = view.said
    assert line.startswith("note: this coordinator stands by: ")
    assert f"process {os.getpid()} " in line
    assert "(term 0)" in line
    # Who has it comes and goes in what is told, and is said once.
    coordinating._stand_by("ada has it")
    coordinating._stand_by("etcd is away")
    coordinating._stand_by("ada has it")
    assert len(view.said) == 3
    await first.release()
