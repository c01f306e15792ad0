"""Saves in the background: what this process has on its way, and what became of it.

Theory of operation. Each tier has a lane (`lanes.py`), with at most one save under way and a few
that wait; what is done when there are more is decided for all ranks alike (`policy.py`) and obeyed
here. A save that failed is kept until it has been told; it is never counted as done.

Lanes are threads that end with the process, so its end waits for them: `close`, up to the grace.

It does not know torch, nor how the ranks agree.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from everstep.tiers.catalog import Checkpoint
from everstep.tiers.hook import Durable, run_hook
from everstep.tiers.lanes import REMEMBERED, Contents, Lane, Save, SaveWarning
from everstep.tiers.policy import DURABLE, MEMORY, Failure, Order, Standing, digest
from everstep.tiers.series import SaveFailed
from everstep.tiers.settings import TierSettings
from everstep.tiers.stack import Stack
from everstep.tiers.staging import Staged

_HOOKS = 16  # calls that wait


@dataclass(slots=True, kw_only=True)
class Counts:
    """What became of the saves of this rank, by tier and save. `copy_s`: how long the training
    waited for copies; `nbytes`: copied."""

    failed: int = 0
    displaced: int = 0
    skipped: int = 0
    lost: int = 0
    nbytes: int = 0
    copy_s: float = 0.0


class Saver:
    """All saves of one process by one configuration. What begins and ends a save is called on one
    thread; the others on any."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.counts = Counts()
        self._lock = threading.Lock()
        self._known: list[Failure] = []
        self._told: deque[tuple[str, str]] = deque(maxlen=REMEMBERED)
        self._hooks = Hooks(stack.settings)
        self._lanes = {
            tier: Lane(tier, stack, self._note, partial(self._committed, tier))
            for tier in stack.names()
        }
        self.on_commit: Callable[[str, int], None] | None = None
        """Is told the tier and the step of what this rank has committed, on another thread."""
        self._over = False
        self._begun = ""
        self._save: Save | None = None
        self.met = ""
        """Digest of the memory tiers' cards that this process was given."""
        self.raised: deque[str] = deque(maxlen=REMEMBERED)
        """Attempts that ended before all ranks had copied: all of them have seen it."""

    def standing(self) -> dict[str, Standing]:
        """What is in the background, by tier."""
        return {tier: lane.standing() for tier, lane in self._lanes.items()}

    def known(self) -> tuple[Failure, ...]:
        """Failures that have not been told."""
        with self._lock:
            return tuple(self._known)

    def begin(self, attempt: str = "") -> None:
        """On the rank that commits: a save begins. An earlier one that was never finished is given
        up: why, its ranks have seen."""
        if self._begun:
            self.raised.append(self._begun)
        if self._save is not None:
            self._save.give(None)
        self._begun, self._save = attempt, None

    def obey(self, order: Order) -> list[Failure]:
        """Give up what is to be given up, and wait for what is to be waited for. Returns failures
        that are to be told now. Raises SaveFailed when an earlier save does not end."""
        settings = self.stack.settings
        self.counts.skipped += len(order.skipped)
        self._meet(order.cards)
        failed = {(failure.attempt, failure.tier) for failure in order.failures}
        with self._lock:  # that an attempt was given up may be seen as a failure before it is told
            given_up = [(name, tier) for tier, name in (*order.displaced, *order.lost)]
            self._told.extend(each for each in given_up if each not in failed)
            self._told.extend((name, tier) for name in order.raised for tier in self._lanes)
        for tier, name in order.displaced:
            self.counts.displaced += len(self._lanes[tier].give_up([name]))
        for tier, name in order.lost:
            self.counts.lost += len(self._lanes[tier].give_up([name]))
        failures = self._news(order.failures)
        for tier in order.wait:
            if not self._lanes[tier].wait_idle(settings.deadline_s):
                raise SaveFailed(
                    f"the save before that of step {order.step} is still on its way to the {tier} "
                    f"tier after {settings.deadline_s:.0f} s"
                )
        return failures

    def take(self, tiers: Sequence[str], nbytes: int) -> Staged:
        """Memory for the copy to `tiers`, the nearest first; of the memory tier where that takes
        part, as its part then lies where it stays. Raises as `Staging.take`."""
        return self.stack.staging(tiers[0]).take(nbytes)

    def add(self, save: Save) -> None:
        """Let a save go on in the background. Does not block."""
        if save.commits and not save.broken:
            self._save = save
        for tier in save.tiers:
            self._lanes[tier].add(save)

    def finish(self, contents: Contents) -> None:
        """On the rank that commits: all have copied their state, and it goes on."""
        if self._save is not None:
            self._save.give(contents)
        self._begun, self._save = "", None

    def news(self) -> list[Failure]:
        """What this process knows to have failed, and has not told. Does not block."""
        return self._news(self.known())

    def wait(self, deadline_s: float) -> bool:
        """Wait until nothing is in the background; whether that is so."""
        end = time.monotonic() + deadline_s
        return all(
            lane.wait_idle(max(0.0, end - time.monotonic())) for lane in self._lanes.values()
        )

    def end(self, grace_s: float) -> None:
        """Nothing more is saved: wait up to `grace_s` for what is under way. What has not ended by
        then is given up, and has failed. May be called twice."""
        if self._over:
            return
        self._over = True
        if self.wait(grace_s):
            return
        why = f"it had not ended after {grace_s:.0f} s; raise grace_s, or save less often"
        for tier, lane in self._lanes.items():
            for save in lane.give_up(None):
                attempt = save.attempt
                self._note(
                    Failure(step=attempt.step, tier=tier, attempt=attempt.name, rank=-1, why=why)
                )

    def close(self, grace_s: float) -> None:
        """`end`, and let go of everything. Failures that were not told are warnings."""
        self.end(grace_s)
        for lane in self._lanes.values():
            lane.close(self.stack.settings.deadline_s)
        self._hooks.close(grace_s)
        for text in [*map(str, self.news()), *self._of_lanes()]:
            _warn(text)
        self.stack.close()

    @property
    def committed(self) -> int:
        """Saves that ended as checkpoints."""
        return sum(lane.committed for lane in self._lanes.values())

    def remarks(self) -> list[str]:
        """What a person should know of the tiers, since the last call."""
        near = self.stack.memory().notes() if MEMORY in self._lanes else []
        return near + self._of_lanes()

    def _of_lanes(self) -> list[str]:
        found = []
        for lane in self._lanes.values():
            while lane.remarks:
                found.append(lane.remarks.popleft())
        return found

    def _meet(self, cards: Sequence[str]) -> None:
        """Make the hosts' memory tiers known to each other."""
        if cards:
            self.stack.memory().introduce(cards)
            self.met = digest(cards)

    def _note(self, failure: Failure) -> None:
        with self._lock:
            self.counts.failed += 1
            if (failure.attempt, failure.tier) not in self._told:
                self._known.append(failure)

    def _news(self, failures: Sequence[Failure]) -> list[Failure]:
        with self._lock:
            new = [f for f in failures if (f.attempt, f.tier) not in self._told]
            self._told.extend((failure.attempt, failure.tier) for failure in new)
            self._known = [f for f in self._known if (f.attempt, f.tier) not in self._told]
        return new

    def _committed(self, tier: str, checkpoint: Checkpoint) -> None:
        """This rank has made a checkpoint exist. On the lane's thread."""
        if tier == DURABLE:
            self._hooks.add(checkpoint)
        if self.on_commit is not None:
            self.on_commit(tier, checkpoint.step)


class Hooks:
    """Calls what is to be called when a checkpoint has become durable, one after the other, on a
    thread of its own: it may take longer than to the next one."""

    def __init__(self, settings: TierSettings) -> None:
        self._settings = settings
        self._queue: queue.Queue[Durable | None] = queue.Queue(_HOOKS)
        self._thread: threading.Thread | None = None

    def add(self, checkpoint: Checkpoint) -> None:
        """A checkpoint has become durable. Does not block."""
        if not self._settings.on_durable:
            return
        durable = Durable(
            series=checkpoint.series,
            step=checkpoint.step,
            destination=self._settings.destination,
            nbytes=sum(part.nbytes for part in checkpoint.parts),
            origin=checkpoint.origin,
        )
        try:
            self._queue.put_nowait(durable)
        except queue.Full:
            _warn(f"on_durable is not called for step {durable.step}: {_HOOKS} calls wait already")
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="everstep-hooks", daemon=True)
            self._thread.start()

    def close(self, grace_s: float) -> None:
        """Wait for the calls that are to be made, up to `grace_s`."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=grace_s)
        except queue.Full:
            return  # it is a daemon, and one call alone has taken all of the grace
        self._thread.join(grace_s)

    def _run(self) -> None:
        settings = self._settings
        while (durable := self._queue.get()) is not None:
            trouble = run_hook(
                settings.on_durable, durable, timeout_s=settings.on_durable_timeout_s
            )
            if trouble is not None:
                _warn(trouble)


def _warn(text: str) -> None:
    warnings.warn(text, SaveWarning, stacklevel=3)
