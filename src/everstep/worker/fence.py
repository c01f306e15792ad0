"""The fence: "I am here, and none of my collectives was poisoned", said by all ranks to all.

Theory of operation. Where every rank holds the whole state no fence is needed (`none`): whoever is
behind takes the newest state from a peer. Where a shard has fewer holders than the world, or
something of a rank is only known after its last collective, one all-reduce of a few bytes on the
world stands before the last update (`early`): if any rank has passed it, all have entered it with
everything they need for the step, so that each can make it by itself. Where the update itself
communicates or runs the model (LBFGS, ZeroRedundancyOptimizer), or the script asks for it
(`run.step(undo=True)`), it stands at the end of the function (`late`), and what the updates change
is copied before, so that it can be undone. Where all ranks train on devices the early fence is a
collective of the devices (`device`), which the host need not wait for (foundinf.py).

Each rank learns in the first step which it wants; in the second all agree on the largest. With it
goes a check that the replicas are what the shard keys say: equal after a step of training.

Does not know: attempts, recovery.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from everstep.core.words import name_ranks
from everstep.errors import UserError
from everstep.worker.runtime import Worker
from everstep.worker.shards import WHOLE
from everstep.worker.state import digest_of

KINDS = ("none", "early", "device", "late")
FENCES = KINDS[1:]


class Fence:
    """The fence of one worker's steps. Main thread; `agree` and `enter` block in a collective, and
    leave it when it is poisoned."""

    def __init__(self, worker: Worker, *, late: bool) -> None:
        self._worker = worker
        self.kind: str | None = None
        """What the job has agreed on, from the commit of that step on; None before: in a retry all
        agree again, since a joiner knows nothing of it."""
        self.wish = KINDS.index("late") if late else 0
        """What this rank wants, as an index of KINDS."""

    def want(self, kind: str) -> None:
        """This rank needs at least `kind`."""
        self.wish = max(self.wish, KINDS.index(kind))

    def enter(self, *numbers: int) -> list[int]:
        """I am here, and none of my collectives was poisoned. Returns the least of each of the
        `numbers` with which the ranks came; for nothing where the collective was poisoned."""
        options = dist.AllreduceOptions()
        least: Any = dist.ReduceOp.MIN
        options.reduceOp = least
        cells = torch.tensor([1, *numbers], dtype=torch.int64)
        self._alone("allreduce", [cells], options)
        found: list[int] = cells.tolist()
        return found[1:]

    def meet(self, number: int) -> bool:
        """As `enter`; returns whether all ranks came with the same `number`, which is for nothing
        where the collective was poisoned."""
        least, most = self.enter(number, -number)
        return least == -most

    def agree(self) -> str | None:
        """All ranks take the fence that the neediest wants. Returns its kind; None if the
        collective was poisoned. Raises UserError where ranks with one shard key hold different
        states."""
        worker = self._worker
        state = worker.state
        assert state is not None
        if state.shard != WHOLE:
            self.want("early")
        stored = [tensor for _, tensor in state.replicas()]
        values = state.leaves().digest()  # with what the loop's body has made of it since
        own = [self.wish, _number(state.shard.encode()), _number(b"", stored), _number(values)]
        own.append(int(worker.device is not None))
        cells = torch.tensor(own, dtype=torch.int64)
        size = worker.spec.world_size
        everybody = torch.zeros(size * len(own), dtype=torch.int64)
        self._alone("all_gather_single", everybody, cells)
        if worker.communicators.poisoned:
            return None
        rows: list[list[int]] = everybody.view(size, len(own)).tolist()
        _check_replicas(rows, worker.spec.rank, state.shard)
        kind = KINDS[max(row[0] for row in rows)]
        return "device" if kind == "early" and all(row[-1] for row in rows) else kind

    def launch(self, cell: torch.Tensor) -> Any:
        """Sum a device's int32 over all ranks, in place; returns the Work. Does not block."""
        return self._launch("allreduce", [cell], dist.AllreduceOptions())

    def _alone(self, operation: str, *arguments: Any) -> None:
        self._launch(operation, *arguments).wait()

    def _launch(self, operation: str, *arguments: Any) -> Any:
        """A collective of everstep's own, which is no part of the step's trace, nor of the tape."""
        communicators = self._worker.communicators
        before, communicators.before_launch = communicators.before_launch, None
        tape, communicators.tape = communicators.tape, None
        try:
            work = getattr(self._worker.world, operation)(*arguments)
        finally:
            communicators.before_launch, communicators.tape = before, tape
        communicators.trace.pop()
        return work


def _number(data: bytes, tensors: list[torch.Tensor] | None = None) -> int:
    return int(digest_of(tensors or [], data)[:15], 16)


def _check_replicas(rows: list[list[int]], rank: int, shard: str) -> None:
    """`rows`: by rank, its wish, numbers for its shard key, its tensors, its other values, and
    whether it has a device."""
    same = [peer for peer, row in enumerate(rows) if row[1] == rows[rank][1]]
    for column, what, reasons in (
        (2, "tensors", _TENSORS_DIFFER),
        (3, "optimizer's or scheduler's values", _VALUES_DIFFER),
    ):
        odd = [peer for peer in same if rows[peer][column] != rows[rank][column]]
        if odd:
            raise UserError(
                f"the {what} of rank {rank} and of {name_ranks(odd)} were equal when the first "
                f"step began and are not any more, so they are no replicas (each holds "
                f"{_whose(shard)}). {reasons}"
            )


_TENSORS_DIFFER = (
    "Parts of the model that are each rank's own (experts, stages), an average that takes in "
    "BatchNorm's buffers, or a missing all-reduce can be the reason: say by "
    "protect(replicas=<the ranks that hold the same as this one>) who holds the same, or make them "
    "equal"
)
_VALUES_DIFFER = (
    "An optimizer or a scheduler that is given each rank's own loss (LBFGS's closure, "
    "ReduceLROnPlateau) can be the reason: give it the mean over the ranks"
)


def _whose(shard: str) -> str:
    return "the whole state" if shard == WHOLE else f"the shard {shard}"
