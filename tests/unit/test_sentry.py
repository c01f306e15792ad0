"""What the agent's sentry makes of what it sees."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from everstep.agent import sentry
from everstep.agent.progress import Standing
from everstep.agent.watch import Silence
from everstep.core.hang import Entered, Stance
from everstep.types import Cause, CauseKind
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


ABORTED = Cause(kind=CauseKind.SIGNAL, text="rank 0 was killed by SIGABRT in step 6", signal=6)


def explained(*shown: tuple[Standing, int]) -> str:
    """The text of rank 0's end by SIGABRT, where each rank shows a standing and the elements of its
    newest all-reduce."""

    def worker(rank: int, standing: Standing, elements: int) -> Any:
        entered = Entered(count=12, kind="allreduce", elements=elements, name="world")
        seen = replace(standing, groups={1: entered})
        spec = SimpleNamespace(rank=rank, incarnation=1)
        return SimpleNamespace(
            spec=spec,
            pid=100 + rank,
            dying=rank == 0,
            killed=False,
            progress=SimpleNamespace(read=lambda: seen),
        )

    workers = {(rank, 1): worker(rank, *each) for rank, each in enumerate(shown)}
    eye: Any = SimpleNamespace(_workers=workers)
    eye._living = lambda: sentry.Sentry._living(eye)
    return sentry.Sentry.explain_abort(eye, workers[0, 1], ABORTED).text


def standing(phase: Phase, step: int, passed: int = 0) -> Standing:
    return Standing(step=step, phase=phase, changed_ns=1, passed=passed)


def test_an_abort_over_collectives_that_differ_is_told_with_them() -> None:
    in_section = standing(Phase.SECTION, 5, Phase.SECTION), 1
    assert explained(in_section, (standing(Phase.STEP, 6), 63520)) == (
        "rank 0 was killed by SIGABRT in step 6: rank 1 in step 6 has entered allreduce of 63520 "
        "elements as collective #12 of the world, where rank 0 has entered allreduce of 1 "
        "elements; every rank must call the same collectives in the same order"
    )
    # A rank that is parked by now called it where it was before.
    parked = standing(Phase.PARKED, 5, Phase.SECTION), 1
    others = [(standing(Phase.PARKED, 6), 63520)] * 2
    assert ": rank 2 in a section after step 5 has entered" in explained(*others, parked)


def test_an_abort_where_all_called_alike_is_only_that() -> None:
    alike = standing(Phase.STEP, 6), 63520
    assert explained(alike, alike) == ABORTED.text
