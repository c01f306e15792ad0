"""The capsule of the step under way, sent before this rank's last contribution to it.

When that is, and what the function is going to return, is learned from the steps before: see
capsule.ResultReader for the second. A forecast that fails is said once; a replacement of this rank
then returns NaN from the one step whose result nobody has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import xxhash

from everstep.worker import codec
from everstep.worker.attempt import Attempt
from everstep.worker.capsule import Contents, ResultReader, encode_result
from everstep.worker.fence import FENCES
from everstep.worker.runtime import Worker
from everstep.worker.state import local

_BOUND_SLACK = 64
_FIRST_STEP_BUFFER_BYTES = 8 << 20  # while it is not known which buffers change, larger ones wait


def pattern_of(trace: Iterable[tuple[str, int]]) -> str:
    """What tells one layout of a step's collectives from another. Broadcasts do not count: DDP has
    some in the step in which it lays out its buckets anew, which then are as they will be."""
    steady = [entry for entry in trace if entry[0] != "broadcast"]
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(steady))


class Forecast:
    """Makes and sends capsules. `wants_fence`: something of them is only known after the last
    collective, so that a fence must stand between."""

    def __init__(self, worker: Worker, function: Callable[..., Any]) -> None:
        self._worker = worker
        self._reader = ResultReader(function, worker.main_thread_id)
        # How many collectives recent steps had before their update. The capsule goes out before the
        # last one; after a regroup DDP has some more once, so the fewest count.
        self._counts: deque[int] = deque([1], maxlen=4)
        self.wants_fence = False
        self.updates = 1
        """The most that a step has made."""
        self.pattern = ""
        """That of the newest whole step's collectives; in a replacement, of a predecessor's."""

    def bound(self) -> int:
        """How many collectives a poisoned step may launch before it is taken for a loop that waits
        for an answer it can't get."""
        return 2 * max(self._counts) + _BOUND_SLACK

    # ------------------------------------------------------------ in the step

    def before_collective(self, attempt: Attempt, index: int) -> None:
        """The `index`-th collective of the step is about to be launched."""
        if attempt.sealed:
            return
        if attempt.rehearsal:
            attempt.captured_names = attempt.last_names = self._reader.locals()
        elif attempt.fence in (None, "none") and index + 1 >= min(self._counts):
            self.capture(attempt)
            attempt.last_names = attempt.captured_names

    def at_gate(self, attempt: Attempt) -> None:
        """The last update is about to pass."""
        attempt.gate_names = self._reader.locals()
        if attempt.rehearsal:
            return
        captured = attempt.before_gate = attempt.captured
        if captured is None or attempt.fence in FENCES:
            self.capture(attempt)
            return
        moved = self._moved(attempt, captured)
        if moved and attempt.fence is None:
            self.wants_fence = True
        if moved or captured.result is None:
            self.capture(attempt)

    def _moved(self, attempt: Attempt, captured: Contents) -> bool:
        """Whether what belongs to the rank has changed since `captured`, its result aside."""
        worker = self._worker
        assert worker.state is not None
        kept = worker.values or worker.state.changing or worker.state.own or worker.carry
        if not kept and worker.log == captured.log:
            return False
        return _of_rank(self._contents(attempt)) != _of_rank(captured)

    def capture(self, attempt: Attempt) -> None:
        """Send the capsule as it is known now."""
        attempt.captured_names = self._reader.locals() or attempt.captured_names
        attempt.captured = self._contents(attempt)
        self._send(attempt.captured)

    def _contents(self, attempt: Attempt) -> Contents:
        worker = self._worker
        assert worker.state is not None
        names = self._reader.locals() or attempt.captured_names
        known = attempt.result
        changing, first = worker.state.changing, attempt.number == 1
        buffers = {
            name: codec.encode(local(buffer), name)
            for name, buffer in (worker.state.buffers() if changing or first else ())
            if name in changing or (first and buffer.nbytes <= _FIRST_STEP_BUFFER_BYTES)
        }
        return Contents(
            step=attempt.step,
            result=self._reader.predict(names) if known is None else encode_result(known[0]),
            candidates=self._reader.candidates(names) if known is None else {},
            buffers=buffers,
            state=codec.encode(worker.values, "run.state"),
            log={step: dict(scalars) for step, scalars in worker.log.items()},
            fence=attempt.fence,
            pattern=self.pattern,
            updates=self.updates,
            used=self._worker.wrappers.used,
            local=worker.state.own.values(),
            streams=worker.streams(),
        )

    def _send(self, contents: Contents) -> None:
        payload = msgspec.msgpack.encode(contents)
        self._worker.hand_over(contents.step, payload)

    # ------------------------------------------------------------ after the step

    def settle(self, attempt: Attempt, result: Any) -> None:
        """The step has returned: correct the capsule if it was wrong, and learn from it."""
        encoded = encode_result(result)
        self.pattern = pattern_of(self._worker.communicators.trace)
        self.learn(attempt, result)
        early = attempt.before_gate
        if attempt.number == 1 and early is not None and early.candidates:
            # It was another value yet when the last collective began.
            self.wants_fence |= self._reader.from_candidates(early.candidates) != encoded
        if attempt.captured is None:
            self.capture(attempt)
        sent = attempt.captured
        assert sent is not None
        moved = self._moved(attempt, sent)
        if moved and sent.result is not None:
            self._worker.note(
                "late-state",
                "run.state, what was logged, a buffer or object that is each rank's own, or a "
                "carried random stream changed in the step after its update; should this rank die "
                "between the update and the step's return, its replacement has the values from "
                "before. Change it before the update, or after the step",
            )
        if sent.result is not None and sent.result != encoded:
            self._give_up()
        if moved or sent.result != encoded:
            whole = self._contents(attempt) if moved else sent
            self._send(msgspec.structs.replace(whole, result=encoded, candidates={}))

    def learn(self, attempt: Attempt, result: Any) -> None:
        """The function returned `result`: from which of its variables?"""
        self._counts.append(max(1, attempt.collectives))
        names = attempt.gate_names or attempt.captured_names
        if names and not self._reader.failed and not self._reader.knows(names):
            self._reader.learn(result, names)
            self.wants_fence |= not self._reader.knows(attempt.last_names or names)
        if self._reader.failed:
            self._give_up()

    def _give_up(self) -> None:
        self._reader.failed = True
        self._worker.note(
            "result-unknown",
            "what the step function returns can't be told before it returns; should this rank die "
            "between its last collective and its return, its replacement gets NaN for that one "
            "step. Return a local variable, as in `return loss.detach()`, of plain data to 1 MiB",
        )

    # ------------------------------------------------------------ from a predecessor

    def result_of(self, capsule: Contents | None, step: int) -> Any:
        """What this rank returned from `step`, as its capsule has it; NaN, and a note, if lost."""
        encoded = None
        if capsule is not None and capsule.step == step:
            encoded = capsule.result or self._reader.from_candidates(capsule.candidates)
        if encoded is not None:
            return codec.decode(encoded)
        rank = self._worker.spec.rank
        self._worker.note(
            f"result-lost-{rank}-{step}",
            f"what rank {rank} returned from step {step} is lost with its predecessor; the call "
            "returns NaN this once. Parameters, optimizer and data are exact",
        )
        return self._reader.placeholder()


def _of_rank(contents: Contents) -> tuple[Any, ...]:
    """What belongs to the rank, the step's result aside."""
    return contents.state, contents.buffers, contents.log, contents.local, contents.streams
