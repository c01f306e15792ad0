"""When a worker has been silent for too long.

Theory of operation: `look` is called a few times a second with what each worker's file says. A
worker is silent while nothing in it changes. How long it may be depends on its phase: in a step,
`hang_timeout_s` or five times the longest silence of late on any rank, whichever is longer, so that
the deadline follows a job that is slow, or becomes slower; far longer in its first steps, while it
compiles, and between steps, where a save or an evaluation may stand; without end where the
coordinator has deadlines of its own (set-up, parked, recovering, waiting for the others to leave
the loop). A process that the kernel shows as stopped is certain, and has a short deadline in every
phase.

Time is counted on a clock of the watch's own, which only runs while the watch does: a pause of the
agent, or of the whole machine, is not a silence of its workers. While a debugger holds one process
all others wait for it, so the watch is suspended, and counts from zero afterwards.

It decides nothing: that somebody is silent is told to the core, which looks for the culprit. Pure:
times, files and the process table are given to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from everstep.agent.progress import Standing
from everstep.worker.progress import Phase

Member = tuple[int, int]  # rank and incarnation

PERIOD_S = 0.25
_LONGEST_GAP_S = 2 * PERIOD_S  # between two looks; what is longer was a pause of the agent itself
_FACTOR = 5.0  # times the usual silence; the bar is five step times
_HALF_LIFE_S = 600.0  # of the memory for a long silence: an hour after a slow step it is forgotten
_FRESH_STEPS = 2  # DDP rebuilds its buckets after the first, and compilers look again
_UNUSUAL_STEPS = 1  # from which nothing is learned about the steps to come

_STEPS = frozenset({Phase.STEP, Phase.FENCE, Phase.UPDATE})
_SECTIONS = frozenset({Phase.BETWEEN, Phase.SECTION})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a worker may be silent, in seconds; see the settings of the same names."""

    stopped_timeout_s: float = 1.5
    hang_timeout_s: float = 60.0
    first_step_timeout_s: float = 1800.0
    section_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What the kernel says of a worker. `stopped`: by a signal. `traced`: a debugger holds it."""

    stopped: bool
    traced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """How long a worker has been silent, in seconds, and whether that is too long. `stopped`: it
    has been stopped for too long. `stopped_s`: since it was first seen stopped, or None."""

    silent_s: float
    overdue: bool
    stopped: bool
    stopped_s: float | None


@dataclass(slots=True)
class _Track:
    """What is remembered of one worker. Times are on the watch's clock."""

    changed_ns: int
    step: int
    phase: Phase
    moved_s: float
    interrupted: bool = False
    stopped_since_s: float | None = None


class Watch:
    """Says who is silent. `look` often, in one thread.

    `process(member)` asks the kernel; it is called only for those that have not moved since the
    last look.
    """

    def __init__(self, limits: Limits, process: Callable[[Member], Process]) -> None:
        self._limits = limits
        self._process = process
        self._tracks: dict[Member, _Track] = {}
        self._now_s = 0.0
        self._looked_s: float | None = None
        self._pace_s = 0.0
        self.held_by: frozenset[Member] = frozenset()
        """The workers that a debugger or profiler holds; while there is one nobody is silent."""

    def look(self, now_s: float, seen: Mapping[Member, Standing]) -> dict[Member, Silence]:
        """What of each worker is to be thought at `now_s` (monotonic seconds). `seen`: of all that
        live."""
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        passed_s = min(max(passed_s, 0.0), _LONGEST_GAP_S)
        self._now_s += passed_s
        self._pace_s *= 0.5 ** (passed_s / _HALF_LIFE_S)
        for member in self._tracks.keys() - seen.keys():
            del self._tracks[member]
        still = [member for member, standing in seen.items() if not self._moved(member, standing)]
        held = {member for member, standing in seen.items() if standing.debugged}
        stopped = set()
        for member in still:
            process = self._process(member)
            if process.traced:
                held.add(member)
            elif process.stopped:
                stopped.add(member)
        self.held_by = frozenset(held)
        if held:
            for track in self._tracks.values():
                track.moved_s, track.stopped_since_s = self._now_s, None
        return {member: self._silence(member, member in stopped and not held) for member in seen}

    def interrupted(self, member: Member) -> None:
        """`member` is told to stop: what ends its silence is everstep, and says nothing of how long
        it is usually silent."""
        track = self._tracks.get(member)
        if track is not None:
            track.interrupted = True

    def _moved(self, member: Member, standing: Standing) -> bool:
        """Whether the worker has moved since the last look; a worker that is new has."""
        track = self._tracks.get(member)
        if track is not None and track.changed_ns == standing.changed_ns:
            return False
        usual = track is not None and track.phase in _STEPS and track.step > _UNUSUAL_STEPS
        if track is not None and usual and not track.interrupted:
            self._pace_s = max(self._pace_s, self._now_s - track.moved_s)
        self._tracks[member] = _Track(
            standing.changed_ns, standing.step, standing.phase, self._now_s
        )
        return True

    def _silence(self, member: Member, stopped: bool) -> Silence:
        track = self._tracks[member]
        if not stopped:
            track.stopped_since_s = None
        elif track.stopped_since_s is None:
            track.stopped_since_s = self._now_s
        silent_s = self._now_s - track.moved_s
        since_s = track.stopped_since_s
        stopped_s = None if since_s is None else self._now_s - since_s
        return Silence(
            silent_s=silent_s,
            overdue=silent_s > self._limit_s(track),
            stopped=stopped_s is not None and stopped_s >= self._limits.stopped_timeout_s,
            stopped_s=stopped_s,
        )

    def _limit_s(self, track: _Track) -> float:
        """How long a worker may be silent, in seconds; infinite where others hold its deadline."""
        limits = self._limits
        if track.phase is Phase.COMPILE:
            return limits.first_step_timeout_s
        if track.phase in _SECTIONS:
            return limits.section_timeout_s
        if track.phase not in _STEPS:
            return math.inf
        fresh = track.step <= _FRESH_STEPS
        floor_s = limits.first_step_timeout_s if fresh else limits.hang_timeout_s
        return max(floor_s, _FACTOR * self._pace_s)
