"""The agent's eye on its workers: who is silent, and what there is to know of it.

Theory of operation: a timer reads every worker's file in shared memory and gives it to the watch
(watch.py). While somebody is silent for too long, what all ranks show is told to the core at each
look. If the core sees a culprit in it, it asks for an inspection: all workers that can are made to
show their stacks, what they show is looked at once more, and both go to the core, which decides.
Where a job has several nodes, lookout.py puts together what their sentries see.

A debugger, a profiler, or the setting `watch` suspend it; the first two are said in the journal,
once for each worker that is held.

It decides nothing. Loop thread only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from everstep.agent import processes, stacks
from everstep.agent.progress import Standing
from everstep.agent.watch import PERIOD_S, Limits, Member, Process, Silence, Watch
from everstep.agent.workers import Worker
from everstep.core.hang import Evidence, Stance, mismatch
from everstep.types import Cause
from everstep.wire.nodes import NodeSettings, Shown
from everstep.worker.progress import ROWS, Phase, place_in_words
from everstep.worker.stacks import SIGNAL

_STANCES = {
    Phase.SETUP: Stance.APART,
    Phase.PARKED: Stance.APART,
    Phase.RECOVER: Stance.APART,
    Phase.CLOSING: Stance.LEFT,
    Phase.FINISHED: Stance.LEFT,
}


class Sentry:
    """Watches the workers of one node. `start` once, then `stop`.

    `workers`: all that have not been buried, as they are now. `on_silent(evidence)` is called at
    each look while somebody has been silent for too long. `note(key, text)` writes to the journal.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: NodeSettings,
        workers: Mapping[Member, Worker],
        on_silent: Callable[[tuple[Evidence, ...]], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._loop = loop
        self._workers = workers
        self._on_silent = on_silent
        self._note = note
        self._on = settings.watch
        limits = Limits(
            stopped_timeout_s=settings.stopped_timeout_s,
            hang_timeout_s=settings.hang_timeout_s,
            first_step_timeout_s=settings.first_step_timeout_s,
            section_timeout_s=settings.section_timeout_s,
        )
        self._watch = Watch(limits, self._process)
        self._silences: dict[Member, Silence] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._noted: set[str] = set()

    def start(self) -> None:
        """Look from now on, unless the setting `watch` is off."""
        if self._on:
            self._timer = self._loop.call_later(PERIOD_S, self._on_timer)

    def stop(self) -> None:
        """Look no longer. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def interrupted(self, member: Member) -> None:
        """`member` is told to stop, so its silence will end, but not by itself."""
        self._watch.interrupted(member)

    def look(self) -> tuple[Evidence, ...]:
        """What all workers show now."""
        self._look()
        return self._evidence()

    async def inspect(self) -> Shown:
        """Have all workers show their stacks, and return what is known. Takes a second at the
        most."""
        asked, unable = {}, {}
        for (rank, _), worker in self._living().items():
            why = self._cannot_answer(worker)
            if why:
                unable[rank] = why
            else:
                worker.signal(SIGNAL)
                asked[rank] = worker.stacks
        answers = await stacks.collect(asked)
        return Shown(evidence=self.look(), answers=answers, unable=unable)

    def explain_abort(self, dead: Worker, cause: Cause) -> Cause:
        """The cause of a worker's end by SIGABRT, as gloo ends it when collectives of different
        sizes meet: with who called what, if it was that."""
        workers = self._living() | {(dead.spec.rank, dead.spec.incarnation): dead}
        standings = {member: worker.progress.read() for member, worker in workers.items()}
        late = Silence(silent_s=0.0, overdue=True, stopped=False, stopped_s=None)
        generation = standings[dead.spec.rank, dead.spec.incarnation].generation
        met = [
            replace(_evidence(member, standing, late, 0.0), where=_called_from(standing))
            for member, standing in sorted(standings.items())
            if standing.generation == generation
        ]
        verdict = mismatch(met)
        if verdict is None:
            return cause
        return replace(cause, text=f"{cause.text}: {'; '.join(verdict.culprits.values())}")

    # ------------------------------------------------------------ looking

    def _on_timer(self) -> None:
        self._timer = self._loop.call_later(PERIOD_S, self._on_timer)
        self._look()
        if any(silence.overdue or silence.stopped for silence in self._silences.values()):
            self._on_silent(self._evidence())

    def _look(self) -> None:
        seen = {member: worker.progress.glance() for member, worker in self._living().items()}
        self._silences = self._watch.look(time.monotonic(), seen)
        for rank, incarnation in sorted(self._watch.held_by):
            self._say(
                f"watch-suspended-{rank}.{incarnation}",
                f"a debugger or profiler holds rank {rank}: while it does, no rank that is silent "
                "counts as hanging, stopped or slow",
            )
        for (rank, _), standing in seen.items():
            if standing.unlisted > 0:
                self._say(
                    "unlisted-groups",
                    f"rank {rank} has {standing.unlisted} more communicators than the {ROWS} whose "
                    "collectives are counted; a hang in those has no culprit by name. Destroy "
                    "those that are no longer used",
                )
        if seen and all(s.stopped for s in self._silences.values()):
            self._say(
                "all-stopped",
                f"{'all ranks are' if len(seen) > 1 else 'the only rank is'} stopped by a signal; "
                "nothing is done about it, since the state would be lost: continue them with "
                "`kill -CONT`",
            )

    def _living(self) -> dict[Member, Worker]:
        return {
            member: worker
            for member, worker in self._workers.items()
            if worker.pid is not None and not worker.dying and not worker.killed
        }

    def _process(self, member: Member) -> Process:
        pid = self._workers[member].pid
        assert pid is not None
        return Process(stopped=processes.is_stopped(pid), traced=processes.is_traced(pid))

    def _say(self, key: str, text: str) -> None:
        if key not in self._noted:
            self._noted.add(key)
            self._note(key, text)

    # ------------------------------------------------------------ what is known

    def _evidence(self) -> tuple[Evidence, ...]:
        now_s = time.monotonic()
        living = self._living()
        return tuple(
            _evidence(member, living[member].progress.read(), silence, now_s)
            for member, silence in sorted(self._silences.items())
            if member in living
        )

    @staticmethod
    def _cannot_answer(worker: Worker) -> str:
        """Why a worker can't show its stacks; empty if it can."""
        assert worker.pid is not None
        if processes.is_stopped(worker.pid):
            return "stopped by a signal, so that it can't show its stack"
        if not worker.progress.glance().answers:
            return "has not come far enough to show its stack"
        return ""


def _called_from(standing: Standing) -> str:
    """Where a rank was when it called its newest collective; by now it may be parked."""
    inside = Phase.SECTION if standing.passed == Phase.SECTION else Phase.STEP
    return place_in_words(inside, standing.step)


def _evidence(member: Member, standing: Standing, silence: Silence, now_s: float) -> Evidence:
    rank, incarnation = member
    stance = _STANCES.get(standing.phase, Stance.WORKING)
    if stance is Stance.WORKING and standing.waiting:
        stance = Stance.WAITING
    silent_s = silence.silent_s if silence.stopped_s is None else silence.stopped_s
    return Evidence(
        rank=rank,
        incarnation=incarnation,
        stance=stance,
        where=standing.words(),
        step=standing.step,
        generation=standing.generation,
        silent_s=silence.silent_s,
        since_s=now_s - silent_s,
        overdue=silence.overdue,
        stopped=silence.stopped,
        inside=standing.inside,
        groups=standing.groups,
    )
