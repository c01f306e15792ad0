"""What the agent keeps of each rank for its next process.

Theory of operation: a rank's random key, the results of `run.once`, its tape and its newest
capsules outlive the process that made them. They are carried and never decided upon: nobody reads
what is in them before the next process of the rank does.

Does not know: who lives, what a capsule holds. Loop thread only; nothing blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from everstep.types import Decision, Plan
from everstep.wire import messages
from everstep.wire.messages import ChaosSpec

# A rank may have sent its capsule of step k+1 while another still stands at k-1. If that one is the
# only survivor all go on from there, and a replacement's script begins with what was kept of k-2.
_CAPSULES_KEPT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Heritage:
    """What a rank's new incarnation is given from its earlier ones."""

    rng_key: bytes | None
    once: dict[str, bytes]
    faults: tuple[ChaosSpec, ...]
    tape: tuple[messages.Told, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Kept:
    """A rank's capsule of one step, and of the sections after it, by their names."""

    payload: bytes | None = None
    sections: dict[str, bytes] = dataclasses.field(default_factory=dict)


@dataclass(slots=True)
class _Tape:
    """What one rank was told since the job last began from nothing, and by which incarnation it is
    recorded."""

    incarnation: int
    items: dict[str, messages.Told] = dataclasses.field(default_factory=dict)


class Keepsakes:
    """Of all ranks of one job."""

    def __init__(self) -> None:
        self._rng_keys: dict[int, bytes] = {}
        self._once: dict[int, dict[str, bytes]] = {}
        self._tapes: dict[int, _Tape] = {}
        self._capsules: dict[int, dict[int, _Kept]] = {}

    # ------------------------------------------------------------ what comes in

    def rng_key(self, rank: int, key: bytes) -> None:
        """The key of the rank's random streams."""
        self._rng_keys[rank] = key

    def once(self, rank: int, message: messages.Once) -> None:
        """What `run.once` made there."""
        self._once.setdefault(rank, {})[message.key] = message.value

    def begin_tape(self, rank: int, incarnation: int, *, anew: bool = True) -> None:
        """The job begins from nothing, and with it the rank's tape. Not `anew`: one that this
        incarnation records goes on."""
        tape = self._tapes.get(rank)
        if anew or tape is None or tape.incarnation != incarnation:
            self._tapes[rank] = _Tape(incarnation)

    def tape(self, rank: int, incarnation: int, message: messages.Tape) -> None:
        """More of the rank's tape; one that an earlier beginning recorded is not wanted."""
        tape = self._tapes.get(rank)
        if tape is not None and tape.incarnation == incarnation:
            tape.items.update((item.key, item) for item in message.items)

    def capsule(self, rank: int, capsule: messages.Capsule) -> None:
        """A capsule of a step, or of a section after one."""
        kept = self._capsules.setdefault(rank, {})
        if capsule.section:
            kept.setdefault(capsule.step, _Kept()).sections[capsule.section] = capsule.payload
        else:
            kept[capsule.step] = _Kept(payload=capsule.payload)
        # A rank that goes back takes its newer capsules with it; of the rest the newest are kept.
        usable = sorted(step for step in kept if step <= capsule.step)[-_CAPSULES_KEPT:]
        self._capsules[rank] = {step: kept[step] for step in usable}

    # ------------------------------------------------------------ what is handed on

    def heritage(self, rank: int, faults: Iterable[ChaosSpec]) -> Heritage:
        """All that a new process of `rank` is born with; `faults`: those still to fire there."""
        return Heritage(
            rng_key=self._rng_keys.get(rank),
            once=dict(self._once.get(rank, {})),
            faults=tuple(faults),
            tape=tuple(self._tapes[rank].items.values()) if rank in self._tapes else (),
        )

    def after(self, rank: int, step: int) -> tuple[bytes | None, dict[str, bytes]]:
        """The capsule of `step`, if there is one, and what was kept of the sections after it."""
        kept = self._capsules.get(rank, {}).get(step, _Kept())
        return kept.payload, kept.sections

    def for_plan(self, rank: int, plan: Plan) -> tuple[bytes | None, dict[str, bytes]]:
        """The newest capsule of `rank` that is not newer than the plan's step, and what it has kept
        of the sections after that step. The capsule may be older than the step: the worker then
        takes nothing from it but the fence that the job has agreed on, and knows so by the
        capsule's own step."""
        if plan.ranks[rank].decision is not Decision.FETCH:
            return None, {}
        kept = self._capsules.get(rank, {})
        newest = max((step for step in kept if step <= plan.step), default=None)
        if newest is None:
            return None, {}
        return kept[newest].payload, kept[newest].sections if newest == plan.step else {}
