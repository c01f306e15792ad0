"""What the agent's sentry makes of what it sees."""

from __future__ import annotations

from typing import Any

from everstep.agent import sentry
from everstep.agent.progress import Standing
from everstep.agent.watch import Silence
from everstep.core.hang import Stance
from everstep.worker.progress import Phase


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
