"""What the agent's sentry makes of what it sees."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from everstep.agent import sentry
from everstep.agent.progress import Standing
from everstep.agent.watch import Silence
from everstep.core.hang import Stance
from everstep.settings import RunSettings
from everstep.wire.messages import ScriptSpec
from everstep.worker.progress import Phase


def test_the_newest_inspections_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentry, "_KEPT_FILES", 3)

    async def inspect() -> list[str]:
        settings = RunSettings(script=ScriptSpec(target="a.py", module=False, args=()))
        loop = asyncio.get_running_loop()
        one = sentry.Sentry(loop, settings, {}, lambda _: None, lambda *_: None, tmp_path)
        return [Path((await one.inspect()).file).name for _ in range(5)]

    assert asyncio.run(inspect()) == [f"hang-{number}.txt" for number in range(1, 6)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "hang-3.txt",
        "hang-4.txt",
        "hang-5.txt",
    ]


def test_what_is_shown_becomes_evidence() -> None:
    silence = Silence(silent_s=7.0, overdue=True, stopped=False, stopped_s=None)

    def shown(**more: Any) -> tuple[Stance, bool]:
        standing = Standing(step=5, phase=Phase.STEP, changed_ns=1, **more)
        found = sentry._evidence((1, 2), standing, silence, 100.0)
        assert (found.rank, found.incarnation, found.since_s) == (1, 2, 93.0)
        return found.stance, found.inside

    assert shown() == (Stance.WORKING, False)
    assert shown(inside=True) == (Stance.WORKING, True)
    assert shown(inside=True, waiting=True) == (Stance.WAITING, True)
