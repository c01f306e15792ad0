"""When a worker has been silent for too long: with files, times and a kernel that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.agent.progress import Standing
from everstep.agent.watch import PERIOD_S, Limits, Member, Process, Silence, Watch
from everstep.worker.progress import Phase

LIMITS = Limits(
    stopped_timeout_s=2.0,
    hang_timeout_s=10.0,
    first_step_timeout_s=100.0,
    section_timeout_s=50.0,
)


class Case:
    """Two workers, looked at once a period."""

    def __init__(self) -> None:
        self.processes: dict[Member, Process] = {}
        self.asked: list[Member] = []
        self.watch = Watch(LIMITS, self.process)
        self.now_s = 1000.0
        self.changes = 0
        self.standings = {
            (rank, 1): Standing(step=5, phase=Phase.STEP, changed_ns=0) for rank in (0, 1)
        }
        self.look()

    def process(self, member: Member) -> Process:
        self.asked.append(member)
        return self.processes.get(member, Process(stopped=False, traced=False))

    def move(self, rank: int, step: int = 5, phase: Phase = Phase.STEP, **more: Any) -> None:
        self.changes += 1
        self.standings[rank, 1] = Standing(step=step, phase=phase, changed_ns=self.changes, **more)

    def look(self) -> dict[Member, Silence]:
        return self.watch.look(self.now_s, self.standings)

    def wait(self, seconds: float, *moving: int) -> dict[Member, Silence]:
        """Look once a period; the ranks `moving` move before each look."""
        for _ in range(round(seconds / PERIOD_S)):
            self.now_s += PERIOD_S
            for rank in moving:
                self.move(rank)
            silences = self.look()
        return silences

    def overdue(self, seconds: float) -> bool:
        """Whether rank 1 is overdue after so much more silence, and was not just before."""
        assert not self.wait(seconds - PERIOD_S, 0)[1, 1].overdue
        return self.wait(2 * PERIOD_S, 0)[1, 1].overdue


def test_who_moves_is_not_silent_and_the_kernel_is_not_asked() -> None:
    case = Case()
    case.wait(60.0, 0, 1)
    assert case.asked == []


def test_who_does_not_move_is_overdue() -> None:
    case = Case()
    assert case.overdue(10.0)
    assert case.wait(1.0, 0)[0, 1].silent_s == 0.0


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [
        (Phase.STEP, 10.0),
        (Phase.FENCE, 10.0),
        (Phase.UPDATE, 10.0),
        (Phase.COMPILE, 100.0),
        (Phase.BETWEEN, 50.0),
        (Phase.SECTION, 50.0),
    ],
)
def test_phases_have_their_own_deadlines(phase: Phase, limit_s: float) -> None:
    case = Case()
    case.move(1, phase=phase)
    case.wait(PERIOD_S, 0)
    assert case.overdue(limit_s)


@pytest.mark.parametrize(
    "phase", [Phase.SETUP, Phase.PARKED, Phase.RECOVER, Phase.CLOSING, Phase.FINISHED, Phase.COPY]
)
def test_some_phases_have_none_here(phase: Phase) -> None:
    case = Case()
    case.move(1, phase=phase)
    assert not case.wait(1000.0, 0)[1, 1].overdue


@pytest.mark.parametrize("step", [1, 2])
def test_the_first_steps_may_take_long(step: int) -> None:
    case = Case()
    case.move(1, step=step)
    case.wait(PERIOD_S, 0)
    assert case.overdue(100.0)


def test_a_job_that_is_slow_has_more_time() -> None:
    """Five times the longest silence of late, on whatever rank it was."""
    case = Case()
    case.wait(8.0, 1)  # rank 0 is silent for 8 s in its step, and goes on
    case.move(1)
    assert not case.wait(38.0, 0)[1, 1].overdue
    assert case.wait(5.0, 0)[1, 1].overdue


def test_what_was_slow_is_forgotten() -> None:
    case = Case()
    case.wait(8.0, 1)
    case.wait(1200.0, 0, 1)  # two half-lives
    case.move(1)
    case.wait(PERIOD_S, 0)
    assert case.overdue(10.25)


def test_a_silence_that_everstep_ends_teaches_nothing() -> None:
    case = Case()
    case.wait(9.0, 1)
    case.watch.interrupted((0, 1))
    case.move(1)
    case.wait(PERIOD_S, 0)
    assert case.overdue(10.0)


def test_a_stopped_process_is_noticed_soon() -> None:
    case = Case()
    case.processes[1, 1] = Process(stopped=True, traced=False)
    assert not case.wait(2.0, 0)[1, 1].stopped
    silence = case.wait(2 * PERIOD_S, 0)[1, 1]
    assert silence.stopped
    assert silence.stopped_s == pytest.approx(2.25)
    case.processes.clear()
    assert not case.wait(PERIOD_S, 0)[1, 1].stopped


def test_a_process_that_is_stopped_now_and_then_is_left_alone() -> None:
    case = Case()
    for _ in range(5):
        case.processes[1, 1] = Process(stopped=True, traced=False)
        assert not case.wait(1.5, 0)[1, 1].stopped
        case.processes.clear()
        case.wait(PERIOD_S, 0)


def test_a_pause_of_the_agent_is_no_silence_of_the_workers() -> None:
    """The agent was stopped, or the whole machine suspended: its own timer jumps."""
    case = Case()
    case.processes[1, 1] = Process(stopped=True, traced=False)
    case.wait(1.0, 0)
    case.now_s += 3600.0
    silence = case.look()[1, 1]
    assert not silence.stopped
    assert not silence.overdue
    assert silence.silent_s <= 2.0


def test_a_debugger_suspends_the_watch_of_all() -> None:
    """TracerPid of one: the others wait for it, and would be silent soon."""
    case = Case()
    case.processes[1, 1] = Process(stopped=True, traced=True)
    silences = case.wait(500.0)
    assert case.watch.held_by == {(1, 1)}
    assert not any(s.overdue or s.stopped for s in silences.values())
    case.processes.clear()
    assert not case.wait(9.0)[0, 1].overdue  # counted from where it was let go
    assert case.watch.held_by == frozenset()
    assert case.wait(2.0)[0, 1].overdue


def test_a_debugger_in_the_process_does_too() -> None:
    case = Case()
    case.move(1, debugged=True)
    assert not any(s.overdue for s in case.wait(500.0).values())
    assert case.watch.held_by == {(1, 1)}


def test_a_replacement_starts_anew() -> None:
    case = Case()
    case.wait(9.0, 0)
    standing = case.standings.pop((1, 1))
    case.standings[1, 2] = standing
    assert case.wait(5.0, 0)[1, 2].silent_s == pytest.approx(5.0 - PERIOD_S)
