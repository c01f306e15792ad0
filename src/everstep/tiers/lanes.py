"""One save on its way to the tiers, and the thread of each tier that takes one after the other.

Theory of operation. A save is one copy of this rank's state (`Staged`) and one attempt to make a
checkpoint of it in each tier. A tier's *lane* digests it, puts the part, and then, on the one rank
that commits, waits for the others' parts and commits; on the others, it learns from the store how
that ended. So nothing here talks to another rank, and no tier waits for another.

It does not know torch, which saves there should be (`saver.py`), nor how the ranks agree.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from everstep import snapshot
from everstep.errors import EverstepError
from everstep.tiers import signing
from everstep.tiers.catalog import Checkpoint, Origin, Whole
from everstep.tiers.names import Attempt
from everstep.tiers.policy import DURABLE, MEMORY, Failure, Standing
from everstep.tiers.series import Failed, SaveFailed, Series
from everstep.tiers.stack import Stack
from everstep.tiers.staging import Staged
from everstep.tiers.store import Stopped

REMEMBERED = 64
"""Attempts that a rank can still say it took part in."""
_NICE = 10
_LEFTOVERS_S = 24 * 3600.0


class SaveWarning(UserWarning):
    """A save that failed, or that was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the committer knows of a checkpoint beside its parts. `origin` is asked in the
    background."""

    world: int
    tensors: dict[str, Whole]
    values: dict[str, bytes]
    paths: dict[str, tuple[str | int, ...]]
    origin: Callable[[], Origin]


class Save:
    """One rank's part of one checkpoint, on its way. `broken`: why there is none; `raised`: which
    its script has been told. Any thread."""

    def __init__(
        self,
        *,
        attempt: Attempt,
        rank: int,
        tiers: Sequence[str],
        staged: Staged | None,
        layout: snapshot.Layout | None,
        about: snapshot.About | None,
        commits: bool,
        broken: str = "",
        raised: bool = False,
    ) -> None:
        self.attempt, self.rank, self.tiers = attempt, rank, tuple(tiers)
        self.layout, self.about = layout, about
        self.commits, self.broken, self.raised = commits, broken, raised
        self._stops = {tier: threading.Event() for tier in tiers}
        self._staged = {tier: staged.share() for tier in tiers} if staged is not None else {}
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._made: tuple[snapshot.Manifest, tuple[str, ...]] | None = None
        self._changed = threading.Condition()
        self._contents: Contents | None = None
        self._put: set[str] = set()
        self._ended: dict[str, Failure | None] = {}

    def area(self, tier: str) -> memoryview:
        """The bytes that are saved."""
        return self._staged[tier].area

    def manifest(self, tier: str, *, signed: bool) -> tuple[snapshot.Manifest, tuple[str, ...]]:
        """What the part holds, and the SHA-256 of its blocks if it is signed. The first call blocks
        for digests of all."""
        assert self.layout is not None
        assert self.about is not None
        with self._making:  # not `_lock`, for which the training may wait
            if self._made is None:
                made = snapshot.describe(self.area(tier), self.layout, self.about)
                sha: tuple[str, ...] = ()
                if signed:
                    sha = signing.block_sha256(self.area(tier), made.block_bytes)
                self._made = made, sha
            return self._made

    def give(self, contents: Contents | None) -> None:
        """What the committer needs; None: it will never come, and the save is given up."""
        with self._changed:
            self._contents = contents
            self._changed.notify_all()
        if contents is None:
            for tier in self.tiers:
                self.give_up(tier)

    def contents(self, tier: str, deadline_s: float) -> Contents:
        """Wait for what the committer needs. Raises Stopped, SaveFailed."""
        stop = self._stops[tier]
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._contents is not None or stop.is_set(), deadline_s
            )
            if self._contents is not None:
                return self._contents
        if there:
            raise Stopped("the save was given up before all ranks had copied their state")
        raise SaveFailed(f"not all ranks had copied their state in {deadline_s:.0f} s")

    def stop(self, tier: str) -> threading.Event:
        """Set when it is given up in that tier."""
        return self._stops[tier]

    def give_up(self, tier: str) -> None:
        """Stop it in a tier, wherever it is."""
        self._stops[tier].set()
        with self._changed:
            self._changed.notify_all()

    def mark_put(self, tier: str) -> None:
        """The part is in the tier; its bytes are not needed any more for that."""
        with self._changed:
            self._put.add(tier)
            self._changed.notify_all()

    def is_put(self, tier: str) -> bool:
        """Whether the part is in the tier."""
        return tier in self._put

    def let_go(self, tier: str) -> None:
        """A tier needs the bytes no more."""
        with self._lock:
            staged = self._staged.pop(tier, None)
        if staged is not None:
            staged.release()

    def end(self, tier: str, failure: Failure | None) -> None:
        """It has ended in a tier."""
        with self._changed:
            self._ended[tier] = failure
            self._changed.notify_all()

    def wait_put(self, deadline_s: float) -> None:
        """Wait until the part is in every tier. Raises SaveFailed where it will not be."""
        self._wait(lambda: all(t in self._put or t in self._ended for t in self.tiers), deadline_s)
        lacking = [tier for tier in self.tiers if tier not in self._put]
        if lacking:
            failure = self._ended[lacking[0]]
            raise SaveFailed(str(failure) if failure else "the save was given up", self.rank)

    def wait(self, deadline_s: float) -> None:
        """Wait until it has ended in every tier. Raises SaveFailed with the first cause."""
        self._wait(lambda: len(self._ended) == len(self.tiers), deadline_s)
        for failure in self._ended.values():
            if failure is not None:
                raise SaveFailed(str(failure), failure.rank)
        if any(stop.is_set() for stop in self._stops.values()):
            raise SaveFailed(f"the save of step {self.attempt.step} was given up")

    def _wait(self, done: Callable[[], bool], deadline_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(done, deadline_s):
                raise SaveFailed(
                    f"the save of step {self.attempt.step} has not ended in {deadline_s:.0f} s"
                )


@dataclass(slots=True)
class _Queue:
    """What a lane has to do."""

    under_way: Save | None = None
    waiting: deque[Save] = field(default_factory=deque)
    put: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


class Lane:
    """The saves of one rank to one tier, one after the other, on a thread of its own. `report`: is
    told what failed; `done`: what this rank has committed. Both on that thread."""

    def __init__(
        self,
        tier: str,
        stack: Stack,
        report: Callable[[Failure], None],
        done: Callable[[Checkpoint], None],
    ) -> None:
        self.tier, self._stack, self._report, self._done = tier, stack, report, done
        self._changed = threading.Condition()
        self._queue = _Queue()
        self._closed = False
        self.committed = 0
        self.remarks: deque[str] = deque(maxlen=REMEMBERED)
        """What a person should know, and has not been told."""
        self._thread: threading.Thread | None = None

    def standing(self) -> Standing:
        """What is in the background."""
        with self._changed:
            now = self._queue.under_way
            going_on = now is not None and not now.stop(self.tier).is_set()
            return Standing(
                under_way=now.attempt.name if now is not None and going_on else "",
                waiting=tuple(save.attempt.name for save in self._queue.waiting),
                put=tuple(self._queue.put),
            )

    def add(self, save: Save) -> None:
        """Take a save. Does not block."""
        with self._changed:
            self._queue.waiting.append(save)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"everstep-saves-{self.tier}", daemon=True
                )
                self._thread.start()

    def give_up(self, attempts: Iterable[str] | None) -> list[Save]:
        """Give up attempts, or all (None). Returns those that were going on here."""
        with self._changed:
            queue = self._queue
            every = [*queue.waiting, *([queue.under_way] if queue.under_way is not None else [])]
            gone = [
                save
                for save in every
                if (attempts is None or save.attempt.name in attempts)
                and not save.stop(self.tier).is_set()
            ]
            dropped = [save for save in gone if save in queue.waiting]
            for save in dropped:
                queue.waiting.remove(save)
        for save in gone:
            save.give_up(self.tier)
        for save in dropped:
            save.let_go(self.tier)
            save.end(self.tier, None)
        with self._changed:
            self._changed.notify_all()
        return gone

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until nothing is in the background; whether that is so."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, deadline_s)

    def close(self, deadline_s: float) -> None:
        """End the thread when the save under way has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(deadline_s)

    def _is_idle(self) -> bool:
        return self._queue.under_way is None and not self._queue.waiting

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # the training is first
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue.waiting or self._closed)
                if not self._queue.waiting:
                    return
                save = self._queue.under_way = self._queue.waiting.popleft()
            failure = self._do(save)
            save.let_go(self.tier)
            given_up = save.stop(self.tier).is_set()
            if failure is not None and not save.raised and not given_up:
                self._report(failure)
            with self._changed:
                self._queue.under_way = None
                self.committed += failure is None and not given_up
                self._changed.notify_all()
            save.end(self.tier, failure)

    def _do(self, save: Save) -> Failure | None:
        """One save. What went wrong, if it did; None also where it was given up."""
        try:
            return self._put(save)
        except Stopped:
            return None
        except Exception as error:  # noqa: BLE001 - whatever it was, it is told, and is not done
            if save.stop(self.tier).is_set():
                return None
            why = f"{type(error).__name__}: {error}"
            if save.commits or not save.is_put(self.tier):
                self._say(save, why)
            return self._failure(save, save.rank, why)

    def _say(self, save: Save, why: str) -> None:
        """Tell the other ranks why there will be no checkpoint."""
        try:
            series = self._stack.series(self.tier)
            series.fail(save.attempt, save.rank, why, deadline_s=self._stack.settings.deadline_s)
        except (EverstepError, OSError):
            pass  # they learn it by their deadline; what went wrong first is what is told here

    def _put(self, save: Save) -> Failure | None:
        series, settings = self._stack.series(self.tier), self._stack.settings
        if save.broken:
            series.fail(save.attempt, save.rank, save.broken, deadline_s=settings.deadline_s)
            return self._failure(save, save.rank, save.broken)
        manifest, sha256 = save.manifest(self.tier, signed=self._stack.key is not None)
        series.put_part(
            save.attempt,
            save.rank,
            save.area(self.tier),
            manifest,
            block_sha256=sha256 or None,
            deadline_s=settings.deadline_s,
            stop=save.stop(self.tier),
        )
        save.let_go(self.tier)
        with self._changed:
            self._queue.put.append(save.attempt.name)
        save.mark_put(self.tier)
        self._make_ready(manifest.nbytes)
        return self._settle(series, save)

    def _make_ready(self, nbytes: int) -> None:
        """What the next save will need: warm memory, and where other hosts find this one's."""
        try:
            self._stack.staging(self.tier).warm(nbytes)
            if self.tier == MEMORY:
                self._stack.card(anew=True)
        except (EverstepError, OSError):
            pass  # this save has all that it needs; the next one asks again, and is told

    def _settle(self, series: Series, save: Save) -> Failure | None:
        """The part is there: make the checkpoint exist, or learn whether it does."""
        settings = self._stack.settings
        if save.commits:
            contents = save.contents(self.tier, settings.deadline_s)
            try:
                checkpoint = series.commit(
                    save.attempt,
                    world=contents.world,
                    tensors=contents.tensors,
                    values=contents.values,
                    paths=contents.paths,
                    origin=contents.origin(),
                    rank=save.rank,
                    deadline_s=settings.deadline_s,
                    stop=save.stop(self.tier),
                )
            except SaveFailed as error:
                return self._failure(save, -1 if error.rank is None else error.rank, str(error))
            self._done(checkpoint)
            self._prune(series, save)
            return None
        outcome = series.outcome(
            save.attempt, committer=0, deadline_s=settings.deadline_s, stop=save.stop(self.tier)
        )
        if isinstance(outcome, Failed):
            return self._failure(save, -1 if outcome.rank is None else outcome.rank, outcome.why)
        return None

    def _prune(self, series: Series, save: Save) -> None:
        """Remove what is older than what is to stay; hosts' memory does so by itself. That it could
        not is no failure of a save."""
        keep = self._stack.settings.durable_retained
        if self.tier != DURABLE or not keep:
            return
        try:
            series.prune(
                keep=keep,
                older_than_s=_LEFTOVERS_S,
                now=time.time(),
                saved=save.attempt.step,
                stop=save.stop(self.tier),
            )
        except Stopped:
            pass  # the next one does it
        except (EverstepError, OSError) as error:
            self.remarks.append(
                f"old checkpoints at {series.store.where} could not be removed: {error}"
            )

    def _failure(self, save: Save, rank: int, why: str) -> Failure:
        return Failure(
            step=save.attempt.step,
            tier=self.tier,
            attempt=save.attempt.name,
            rank=rank,
            why=why,
        )
