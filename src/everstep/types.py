"""The words of everstep: enumerations and small values that every layer may use.

Imports nothing of everstep. Words are torchrun's and torchft's where they have one; see
docs/reference/words.md."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

OLDEST_TORCH = (2, 8)
"""The oldest version of torch that is supported: major, minor."""
TERM_STRIDE = 1_000_000
"""What the coordinator of term t numbers anew (nodes, incarnations, generations) begins at t times
this, so no number that an earlier coordinator may have given is given again, also one of which
nobody is left who could tell. A job's first coordinator has term 0."""


class Rung(enum.StrEnum):
    """A recovery level: who runs afterwards. From the cheapest to the dearest."""

    RETRY = "retry"
    RESPAWN = "respawn"
    REPLACE = "replace"
    SHRINK = "shrink"
    MEMORY = "memory"
    DURABLE = "durable"
    STOP = "stop"


class StateFrom(enum.StrEnum):
    """Where the state of the recovered ranks came from."""

    PROCESS = "process"
    PEER = "peer"
    MEMORY = "memory"
    DURABLE = "durable"
    SCRIPT = "script"  # nothing was committed yet: the script's own set-up made it again
    NONE = "none"  # rung stop: no state was restored


class Stage(enum.StrEnum):
    """The parts of an incident's wall time; they are contiguous and sum to it."""

    DETECT = "detect"
    STOP = "stop"
    START = "start"
    REGROUP = "regroup"
    STATE = "state"
    DATA = "data"
    FIRST_STEP = "first_step"
    LOST_STEPS = "lost_steps"


class CauseKind(enum.StrEnum):
    """How a failure showed itself."""

    SIGNAL = "signal"  # the process was ended by a signal
    EXIT = "exit"  # the process exited with a code other than 0
    EARLY_EXIT = "early_exit"  # the process exited with 0 before the end
    EXCEPTION = "exception"  # the script raised; the process lives
    PEER = "peer"  # a collective failed and nobody is known to be dead
    TIMEOUT = "timeout"  # a deadline of the coordinator passed
    COORDINATOR = "coordinator"  # it died, and a recovery was under way, or was wanted meanwhile
    RECEIPT = "receipt"  # restored state does not match its source's digest
    HANG = "hang"  # the process lives and has not moved for too long, while others wait for it
    WORKER = "worker"  # everstep's own worker code asked to be replaced
    NODE = "node"  # a node is gone, and all its ranks with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What went wrong, for people and for the repeat rules.

    `text` is one line. `detail` is a traceback or the last lines of output. `signature` names the
    error for the "same error twice" rule (type and message of an exception, name of a signal).
    `at_s` is when the fault happened on the host's monotonic clock, if the one who saw it knows;
    else None. `fault` is the chaos spec that caused it. `where` is where the rank stood, for a
    sentence ("in step 5 (optimizer)"), if that is known."""

    kind: CauseKind
    text: str
    detail: str = ""
    signature: str = ""
    exit_code: int | None = None
    signal: int | None = None
    at_s: float | None = None
    fault: str | None = None
    where: str = ""

    def job_exit_code(self) -> int:
        """The exit code of a job that ends by this cause: 128+signal, the script's code, else 1."""
        if self.signal is not None:
            return 128 + self.signal
        if self.exit_code:
            return self.exit_code
        return 1


WHOLE = "all"
"""The key of a part of the state that is all of it, where every rank holds all."""

Position = tuple[int, int]
"""Where a rank stands: (steps committed, sections done after the last of them). Ordered as
pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a parked worker holds, as it reports it.

    `committed`: steps committed (0 before the first). `sections`: sections done after the last of
    them. `torn`: its state is not the state of any step and must be restored. `can_advance`: it
    stands in the fence with all that the attempt needs (a step's gradients reduced, a section's
    collectives done), so that it can commit it by itself. `in_section`: the attempt was a section,
    not a step. `shard`: the key of the part of the state it holds; ranks with equal keys are
    replicas."""

    committed: int
    torn: bool = False
    can_advance: bool = False
    shard: str = WHOLE
    sections: int = 0
    in_section: bool = False

    @property
    def position(self) -> Position:
        """Where it stands."""
        return self.committed, self.sections

    @property
    def ahead(self) -> Position:
        """Where it stands after its attempt."""
        step, sections = self.position
        return (step, sections + 1) if self.in_section else (step + 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """By what a copy in memory is known again. `generation`: in which it was made. `digest`: of all
    its bytes."""

    generation: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCopy:
    """A complete copy of the state of `rank` at `step` in a node's memory."""

    rank: int
    step: int
    stamp: Stamp


class Decision(enum.StrEnum):
    """What a rank does in a regroup to reach the plan's step."""

    KEEP = "keep"  # it is there
    ADVANCE = "advance"  # it applies its own gradients and is there
    FETCH = "fetch"  # it takes the state from `sources`


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's part in a plan. `sources`: for FETCH the ranks that hold the state, striped over
    all of them. `sinks`: the ranks to which this rank sends its stripe. `copy`: for FETCH without
    sources: from the rank's own copy in memory."""

    decision: Decision
    sources: tuple[int, ...] = ()
    sinks: tuple[int, ...] = ()
    copy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How all ranks come to stand at one position. `step`: steps committed after the restore;
    `sections`: sections done after the last of them. `ranks[r]`: rank r's part. `reason`: the
    decision in words."""

    step: int
    ranks: tuple[RankPlan, ...]
    reason: str
    sections: int = 0

    @property
    def position(self) -> Position:
        """Where all ranks stand after the restore."""
        return self.step, self.sections


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of the journal, without the time that the writer stamps on it."""

    event: str
    fields: dict[str, Any] = field(default_factory=dict)
