"""What a rank keeps of a section it has done, so that a replacement need not do it again.

It is to a section what the capsule is to a step, and goes to the agent before the section's fence.
A replacement's script calls the sections that its predecessor has done; each call takes from here
what was returned, and all else that the section made of the rank's own.

Does not know: when a section is done, which ones are to be skipped.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from everstep.errors import UserError
from everstep.wire import messages
from everstep.worker import codec
from everstep.worker.capsule import MAX_RESULT_BYTES
from everstep.worker.place import key_before_steps
from everstep.worker.runtime import Worker
from everstep.worker.state import Leaves, State, local

KEPT_BYTES = 64 << 20  # of all sections after one step


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank keeps of a section it has done. `result`: codec bytes of what it returned.
    `state`: `run.state` after it; `log`, `local`, `streams`: likewise, as in a capsule. `buffers`:
    those of the rank's own that it changed. `leaves`: param_groups and objects, where it changed
    them."""

    result: bytes
    state: bytes
    log: dict[int, dict[str, float]]
    local: dict[str, bytes]
    streams: bytes | None
    buffers: dict[str, bytes]
    leaves: Leaves | None = None


class Before:
    """What is needed of a section's beginning to tell what it has changed. `leaves`: it may change
    param_groups and objects."""

    def __init__(self, state: State, *, leaves: bool) -> None:
        self.state = state
        self.leaves = state.leaves() if leaves else None
        self._versions = {name: buffer._version for name, buffer in own_buffers(state)}

    def changed_leaves(self) -> Leaves | None:
        """param_groups and objects as they are now, if they were to be looked at and are others."""
        now = self.state.leaves() if self.leaves is not None else None
        return now if now != self.leaves else None

    def changed_buffers(self) -> dict[str, bytes]:
        """Those of the rank's own that were written to, as codec bytes."""
        return {
            name: codec.encode(buffer, name)
            for name, buffer in own_buffers(self.state)
            if buffer._version != self._versions.get(name)
        }


def done_of(worker: Worker, name: str, result: Any, before: Before) -> Done:
    """What is to be kept of the section `name`, which returns `result`. Raises UserError if that
    may not be kept."""
    encoded = codec.encode(result, f"what the section {name} returned")
    if len(encoded) > MAX_RESULT_BYTES:
        raise UserError(
            f"the section {name} returned {len(encoded) / 2**20:.1f} MiB, and "
            f"{MAX_RESULT_BYTES >> 20} MiB is the most, since a replacement of this rank has to be "
            "told it; return less, or write it to a file"
        )
    return Done(
        result=encoded,
        state=codec.encode(worker.values, "run.state"),
        log={step: dict(scalars) for step, scalars in worker.log.items()},
        local=before.state.own.values(),
        streams=worker.streams(),
        buffers=before.changed_buffers(),
        leaves=before.changed_leaves(),
    )


def keep(worker: Worker, place: str, done: Done) -> None:
    """Give it to the agent; `place` tells the section from the others after the same step."""
    payload = msgspec.msgpack.encode(done)
    worker.place.kept_bytes += len(payload)
    if worker.place.kept_bytes > KEPT_BYTES:
        raise UserError(
            f"what the sections after step {worker.committed} return and change of the rank's own "
            f"is more than {KEPT_BYTES >> 20} MiB ({place}); a replacement of rank "
            f"{worker.spec.rank} has to be told all of it. Return less, or write it to a file"
        )
    if worker.committed == worker.base:  # a replacement has to know it before it has joined
        worker.control.send(messages.Once(key=key_before_steps(place), value=payload))
    else:
        worker.hand_over(worker.committed, payload, place)


def return_kept(worker: Worker, place: str, name: str) -> Any:
    """A predecessor has done this section: what it returned; all else that it made of the rank's
    own is made so here. Raises UserError if it had done none."""
    kept, state = worker.place.kept.get(place), worker.state
    assert state is not None
    if kept is None:
        raise UserError(
            f"this replacement's script called the section {name}, where rank {worker.spec.rank} "
            "had called none before; whether a section is called must follow from run.committed, "
            "run.state, and what steps and sections returned"
        )
    done = msgspec.msgpack.decode(kept, type=Done)
    worker.values.clear()
    worker.values.update(codec.decode(done.state))
    worker.log = {step: dict(scalars) for step, scalars in done.log.items()}
    state.own.load(done.local)
    if done.leaves is not None:
        state.load_leaves(done.leaves)
    buffers = dict(own_buffers(state))
    with torch.no_grad():
        for buffer, data in done.buffers.items():
            if buffer in buffers:
                local(buffers[buffer]).copy_(codec.decode(data))
    worker.seed(f"after {place}")
    worker.restore_streams(done.streams)
    return codec.decode(done.result)


def own_buffers(state: State) -> list[tuple[str, torch.Tensor]]:
    """Buffers that belong to the rank alone."""
    if not state.changing:
        return []
    return [(name, buffer) for name, buffer in state.buffers() if name in state.changing]
