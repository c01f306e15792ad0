"""All communicators of this process: their generation, their poison, their building and taking
down.

Theory of operation: the script holds outer groups, which never change (groups.py); each has an
inner group that lives in one generation. The first failure on any group poisons all groups of the
process, so garbage never reaches a clean peer; poison belongs to a generation, so neither a late
callback nor a late stop can touch a newer one, and a rebuild never clears a newer stop. The main
thread never waits inside an inner group: it waits on a guard (guard.Guard), which is opened by the
inner operation's completion or by the stop, whichever comes first. What an aborted operation may
still write to is waited for (`quiesce`) before anybody uses the memory again.

Does not know: steps, state, the coordinator's decisions.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from everstep.core.words import name_ranks
from everstep.errors import EverstepError, PeerError, UserError
from everstep.worker.control import Stopped
from everstep.worker.inner import Inner

if TYPE_CHECKING:
    from everstep.worker.groups import OuterGroup
    from everstep.worker.guard import Guard
    from everstep.worker.progress import Progress
    from everstep.worker.tape import Tape


_PROMPT_S = 0.05  # within which an aborted operation ends, unless gloo has lost it
_INNER_THREADS = 2  # that gloo runs a group's operations on


class Answer(enum.Enum):
    """What a poisoned collective does to its caller."""

    ZEROS = "zeros"  # inside a step: outputs are zeros, the step unwinds by its own path
    NANS = "nans"  # after the update: the result is lost for good, and must be seen to be
    RAISE = "raise"  # outside of steps: it can't be done again, so the script must know


class QuiesceTimeout(EverstepError):
    """An aborted operation did not end; its memory must not be used again, so this process must be
    replaced."""


class Builder(threading.Thread):
    """Builds one inner group; `done` is called on this thread when it is up or has failed."""

    def __init__(
        self, group: OuterGroup, generation: int, make: MakeInner, done: Callable[[Builder], None]
    ) -> None:
        super().__init__(name=f"everstep-build-{group.group_name}-{generation}", daemon=True)
        self.group, self.generation = group, generation
        self.inner: Inner | None = None
        self.error: Exception | None = None
        self.finished = False
        self.abandoned = (
            False  # nobody waits for it any more: what it still builds is its own to take down
        )
        self._make, self._done = make, done

    def run(self) -> None:
        try:
            self.inner = self._make(self.group, self.generation)
        except Exception as error:
            self.error = without_frames(error)
        self._done(self)


MakeInner = Callable[["OuterGroup", int], Inner]


class Communicators:
    """The registry. `make_inner(group, generation)` builds an inner group and may block;
    `on_fault(generation, error)` is told once a generation that a collective failed here, on the
    thread where that was seen."""

    def __init__(
        self,
        make_inner: MakeInner,
        on_fault: Callable[[int, BaseException], None],
        *,
        generation: int,
        solo: bool,
    ) -> None:
        self._make_inner = make_inner
        self._on_fault = on_fault
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._running: dict[int, Guard] = {}
        self._reapers: list[threading.Thread] = []
        self._unbuilt: list[tuple[int, Inner]] = []
        self.open: dict[int, Guard] = {}
        self.groups: list[OuterGroup] = []
        self._made: Counter[tuple[int, ...]] = Counter()  # groups of these ranks, destroyed or not
        self.generation = generation
        self.stopped = -1
        self.solo = solo
        self.poisoned = False
        self.complete = False  # the first step is over: no group may be added any more
        self.replaying = False  # the loop's body runs again: peers have done its collectives
        self.cut_off = False  # inside a step that the peers have made: they will not come
        self.touched = False  # whether a collective since the step's start was poisoned
        self.answer = Answer.RAISE
        self.error: BaseException | None = None
        self.bound = 0  # collectives a step may have once it is poisoned; 0: no bound
        self.unwind: type[BaseException] = Stopped
        self.on_outside: Callable[[str], None] | None = None
        self.before_launch: Callable[[int], None] | None = None
        self.trace: list[tuple[str, int]] = []
        self.tape: Tape | None = None  # what peers tell, while it is recorded or played
        self.progress: Progress | None = None  # where the agent sees what has been entered

    # ------------------------------------------------------------ the hot path, called by
    # groups.OuterGroup

    def note(self, operation: str, elements: int) -> None:
        """Count a collective that is about to be launched, and tell `before_launch` its index in
        the step."""
        trace = self.trace
        if self.before_launch is not None:
            self.before_launch(len(trace))
        trace.append((operation, elements))
        if self.poisoned and self.bound and len(trace) > self.bound:
            raise self.unwind  # a loop that waits for what a poisoned collective never says

    def outside(self, operation: str) -> None:
        """A collective outside of steps is about to be launched. Raises PeerError where the loop's
        body runs again in a replacement: its peers have done the collective and will not come."""
        if self.replaying:
            raise PeerError(
                f"the loop's body called a collective ({operation}), which a replacement would "
                "have to do again without its peers; move it into the step function, or into a "
                "section (@run.section)"
            )
        if self.on_outside is not None:
            self.on_outside(operation)

    def launched(self, guard: Guard) -> None:
        """A guard's inner operation is under way."""
        key = id(guard)
        self.open[key] = guard
        if not guard.detached:
            self._running[key] = guard
            self._show_running()
        if self.poisoned:  # the stop came between the check and here, and did not see this guard
            _abort(self._present())
            guard.release(poisoned=True)

    def ended(self, guard: Guard, error: BaseException | None) -> None:
        """The inner operation of `guard` ended; on the inner group's thread."""
        if error is not None:
            self.fail(guard.generation, error)
        guard.release(poisoned=error is not None)
        self._running.pop(id(guard), None)
        self._show_running()
        if self.poisoned:
            with self._changed:
                self._changed.notify_all()

    def _show_running(self) -> None:
        if self.progress is not None:
            self.progress.inside(self._running)

    # ------------------------------------------------------------ failure

    def fail(self, generation: int, error: BaseException) -> None:
        """A collective of `generation` failed here: poison everything and report it, once. Any
        thread."""
        with self._lock:
            if generation != self.generation or self.poisoned:
                return
            self._poison(error)
        self._on_fault(generation, error)

    def hold(self, error: BaseException) -> None:
        """This rank's own attempt failed, and the agent has been told: garbage must not leave the
        process."""
        with self._lock:
            if not self.poisoned:
                self._poison(error)

    def fail_build(self, error: BaseException) -> None:
        """The groups of the present generation could not be built: give up what there is of them,
        and report it."""
        _abort(self._present())
        self._on_fault(self.generation, error)

    def stop(self, generation: int) -> None:
        """Stop `generation` and all older ones: free the main thread, shut the sockets. Any
        thread."""
        with self._lock:
            self.stopped = max(self.stopped, generation)
            if generation < self.generation:
                return
            if self.poisoned:
                _abort(self._present())
            else:
                self._poison(Stopped(generation))
            self._changed.notify_all()

    def _poison(self, error: BaseException) -> None:
        """The connections are shut before any guard is opened: an opened guard's tensors are
        filled, and gloo may still be sending from them to a peer that is clean."""
        self.poisoned = True
        self.error = error
        _abort(self._present())
        for guard in list(self.open.values()):
            guard.release(poisoned=True)

    def being_built(self, generation: int, inner: Inner) -> None:
        """An inner group under construction can be aborted from now on. On the builder's thread."""
        with self._lock:
            self._unbuilt.append((generation, inner))
            stopped = self.stopped >= generation
        if stopped:
            raise Stopped(self.stopped)

    def _present(self) -> list[Inner]:
        """The inner groups of now. Looked up together with the poisoning: later ones may be of a
        newer generation."""
        with self._lock:
            inners = [inner for _, inner in self._unbuilt]
            inners += [group.inner for group in self.groups if group.inner is not None]
        return inners

    # ------------------------------------------------------------ waiting

    def drain(self) -> None:
        """Wait until every collective launched so far has ended or has been poisoned."""
        while self.open:
            try:
                guard = next(iter(self.open.values()))
            except (StopIteration, RuntimeError):  # another thread just took it
                continue
            guard.await_release()

    def quiesce(self, timeout_s: float) -> None:
        """After a stop: wait until no aborted operation can write to the script's tensors any more,
        then hand the old inner groups to the reaper. Raises QuiesceTimeout.

        gloo loses a send whose socket breaks at the wrong moment: its thread then sits out the
        operation's time-out. Such a thread can do no harm once the group's connections are closed
        and it has been seen asleep, so it is left behind; only operations that may still be queued
        behind it (a group has two threads) could write, and are waited for."""
        self.drain()
        deadline = time.monotonic() + timeout_s
        if not self._wait_idle(min(_PROMPT_S, timeout_s)):
            inners = [group.inner for group in self.groups if group.inner is not None]
            harmless = False
            while not self._wait_idle(_PROMPT_S):
                with self._lock:
                    left = [guard.operation for guard in self._running.values()]
                    if harmless and len(left) <= _INNER_THREADS:
                        self._running.clear()
                        self._show_running()
                        break
                if time.monotonic() >= deadline:
                    names = ", ".join(sorted(left))
                    raise QuiesceTimeout(
                        f"aborted collectives did not end in {timeout_s:g} s: {names}"
                    )
                harmless = all(inner.silent() and inner.asleep(_PROMPT_S) for inner in inners)
        for group in self.groups:
            inner, group.inner = group.inner, None
            if inner is not None:
                self._reap(inner)

    def _wait_idle(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def _reap(self, inner: Inner) -> None:
        self._reapers = [thread for thread in self._reapers if thread.is_alive()]
        reaper = threading.Thread(target=inner.destroy, name="everstep-reaper", daemon=True)
        self._reapers.append(reaper)
        reaper.start()

    # ------------------------------------------------------------ building

    def name_for(self, ranks: tuple[int, ...]) -> str:
        """The name of a group of `ranks` that is about to be made here. All its members come to the
        same one, in whichever other groups each of them is, as does a joiner."""
        with self._lock:
            self._made[ranks] += 1
            number = self._made[ranks]
        return f"of {name_ranks(ranks)}" + (f" ({number})" if number > 1 else "")

    def add(self, group: OuterGroup) -> None:
        """Register an outer group that the script just made, and build its inner group unless solo.
        Blocks. Raises UserError after the first step: a replacement would not have it."""
        if self.complete:
            raise UserError(
                f"a process group (of ranks {list(group.ranks)}) was made after the first step; a "
                "replacement of one of them would not have it. Make all groups and meshes before "
                "run.protect"
            )
        with self._lock:
            self.groups.append(group)
        if self.progress is not None:
            name = "world" if group is self.groups[0] else group.name
            group.row = self.progress.join(name, group.ranks)
        if not self.solo:
            try:
                self._build([group], self.generation)
            except BaseException:
                self.forget(group)
                raise

    def forget(self, group: OuterGroup) -> None:
        """The script destroyed the group. The world stays: a peer that needs a recovery after this
        script's last line still needs it."""
        with self._lock:
            if self.groups and group is self.groups[0]:
                return
            if group in self.groups:
                self.groups.remove(group)
                if self.progress is not None:
                    self.progress.leave(group.row)
            inner, group.inner = group.inner, None
        if inner is not None:
            inner.retire()
            self._reap(inner)

    def held(self) -> tuple[tuple[str, int], ...]:
        """The outer groups that the script holds, as (name, how many ranks it has)."""
        with self._lock:
            return tuple((group.name, group.size()) for group in self.groups)

    def rebuild(self, generation: int, names: Container[str] | None = None) -> None:
        """Build the inner groups of the outer groups called `names` (None: of all) under
        `generation`; the others have lost ranks for good, since those destroyed them. Blocks.
        Raises Stopped if it is stopped."""
        with self._lock:
            if self.stopped >= generation:
                raise Stopped(self.stopped)
            self.generation = generation
        if self.progress is not None:
            self.progress.regroup(generation)
        for group in self.groups:
            group.abandoned = names is not None and group.name not in names
        self._build([group for group in self.groups if not group.abandoned], generation)
        with self._lock:
            if self.stopped >= generation:
                raise Stopped(self.stopped)
            self.solo = False
            self.poisoned = False
            self.error = None

    def _build(self, groups: Iterable[OuterGroup], generation: int) -> None:
        builders = [Builder(group, generation, self._make_inner, self._built) for group in groups]
        with self._changed:
            self._unbuilt = [(g, inner) for g, inner in self._unbuilt if g >= generation]
            for builder in builders:
                builder.start()
            while not all(b.finished for b in builders) and self.stopped < generation:
                self._changed.wait()  # bounded: builders end by their exchange's and build timeouts
            stopped = self.stopped >= generation
            ended = [b for b in builders if b.finished]
            for builder in builders:
                builder.abandoned = not builder.finished
            failed = next((b for b in builders if b.error is not None), None)
            if not stopped and failed is None:
                for builder in builders:
                    builder.group.inner = builder.inner
                self._unbuilt.clear()
        if stopped or failed is not None:
            for builder in ended:
                if builder.inner is not None:
                    self._reap(builder.inner)
            if stopped:
                raise Stopped(self.stopped)
            assert failed is not None and failed.error is not None
            raise failed.error

    def _built(self, builder: Builder) -> None:
        with self._changed:
            builder.finished = True
            self._changed.notify_all()
            abandoned = builder.abandoned
        if abandoned and builder.inner is not None:
            self._reap(builder.inner)


def _abort(inners: list[Inner]) -> None:
    for inner in inners:
        inner.abort()


E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """The error without its tracebacks: their frames would hold a communicator and its tensors
    beyond their end, in a cycle, and the garbage collector would end gloo on the main thread."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:  # `raise e from e` makes a ring
        seen.add(id(link))
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def tensors_of(value: Any) -> Iterable[Any]:
    """The tensors in a nested list of outputs."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif value is not None:
        yield value
