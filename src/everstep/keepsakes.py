"""What is kept of each rank for its next process.

Theory of operation: a rank's random key, the results of `run.once`, its tape and its newest
capsules outlive the process that made them. They are carried and never decided upon: nobody reads
what is in them before the next process of the rank does.

The same things are kept by the coordinator, by the rank's agent and by another one, and one may be
told again by the other what it knows already, or what is older. So what is kept does not depend on
the order in which it comes: a later incarnation's word displaces an earlier one's, never the other
way round.

Does not know: who lives, what a capsule holds. Loop thread only; nothing blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from everstep.types import Decision, Plan
from everstep.wire import messages
from everstep.wire.messages import ChaosSpec, Keepsake

# A rank may have sent its capsule of step k+1 while another still stands at k-1. If that one is the
# only survivor all go on from there, and a replacement's script begins with what was kept of k-2.
_CAPSULES_KEPT = 4
_TAPE_PART_BYTES = 8 << 20  # a tape in one message could be too large for it
_BORN_WITH = messages.Once, messages.Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Heritage:
    """What a rank's new incarnation is given from its earlier ones. `kept`: all else that is kept
    of the rank, for its agent: who said it, and what."""

    rng_key: bytes | None
    once: dict[str, bytes]
    faults: tuple[ChaosSpec, ...]
    tape: tuple[messages.Told, ...] = ()
    kept: tuple[tuple[int, Keepsake], ...] = ()


class Belongings:
    """Of one rank."""

    def __init__(self) -> None:
        self._protect: tuple[int, messages.Protect] | None = None
        self._once: dict[str, tuple[int, messages.Once]] = {}
        self._tape: tuple[int, dict[str, messages.Told]] | None = None
        self._capsules: dict[tuple[int, str], tuple[int, messages.Capsule]] = {}

    def take(self, incarnation: int, message: Keepsake) -> None:
        """Keep what `incarnation` has said. A tape is continued by the incarnation that has begun
        it, and begun anew by a later one, if only with nothing: the job begins again."""
        match message:
            case messages.Protect():
                if self._protect is None or incarnation >= self._protect[0]:
                    self._protect = incarnation, message
            case messages.Once(key=key):
                if key not in self._once or incarnation >= self._once[key][0]:
                    self._once[key] = incarnation, message
            case messages.Tape(items=items):
                if self._tape is None or incarnation > self._tape[0]:
                    self._tape = incarnation, {}
                if incarnation == self._tape[0]:
                    self._tape[1].update((item.key, item) for item in items)
            case messages.Capsule():
                self._take_capsule(incarnation, message)

    def _take_capsule(self, incarnation: int, capsule: messages.Capsule) -> None:
        kept = self._capsules.values()
        if any(by > incarnation and _leaves_behind(other, capsule) for by, other in kept):
            return
        place = capsule.step, capsule.section
        if place in self._capsules:
            by, other = self._capsules[place]
            if by == incarnation and other.turn > capsule.turn:  # of an attempt before that one
                return
        left = {
            key: (by, other)
            for key, (by, other) in self._capsules.items()
            if by >= incarnation or not _leaves_behind(capsule, other)
        }
        left[place] = incarnation, capsule
        steps = sorted({step for step, _ in left})
        since = max(other.since for _, other in left.values() if other.step == steps[-1])
        stay = {*steps[-_CAPSULES_KEPT:], *(step for step in steps if 0 <= since <= step)}
        self._capsules = {key: left[key] for key in sorted(left) if key[0] in stay}

    def listed(self) -> list[tuple[int, Keepsake]]:
        """All of it: who said it, and what. Who takes it keeps the same."""
        found: list[tuple[int, Keepsake]] = []
        if self._protect is not None:
            found.append(self._protect)
        found += self._once.values()
        if self._tape is not None:
            incarnation, items = self._tape
            found += [(incarnation, part) for part in _tape_in_parts(items.values())]
        found += self._capsules.values()
        return found

    @property
    def rng_key(self) -> bytes | None:
        """The key of the rank's random streams."""
        return None if self._protect is None else self._protect[1].rng_key

    @property
    def once(self) -> dict[str, bytes]:
        """The results of `run.once`, by key."""
        return {key: message.value for key, (_, message) in self._once.items()}

    @property
    def tape(self) -> tuple[messages.Told, ...]:
        """What the rank was told since the job last began from nothing."""
        return () if self._tape is None else tuple(self._tape[1].values())

    def after(self, step: int) -> tuple[bytes | None, dict[str, bytes]]:
        """The capsule of `step`, if there is one, and what was kept of the sections after it."""
        payload = None
        sections = {}
        for (at, section), (_, capsule) in self._capsules.items():
            if at == step and section:
                sections[section] = capsule.payload
            elif at == step:
                payload = capsule.payload
        return payload, sections

    def newest(self, step: int) -> int | None:
        """The newest step up to `step` of which there is something."""
        return max((at for at, _ in self._capsules if at <= step), default=None)


def _tape_in_parts(items: Iterable[messages.Told]) -> Iterator[messages.Tape]:
    """At least one, which may be empty."""
    part: list[messages.Told] = []
    nbytes = 0
    for item in items:
        if part and nbytes + len(item.value) > _TAPE_PART_BYTES:
            yield messages.Tape(items=tuple(part))
            part, nbytes = [], 0
        part.append(item)
        nbytes += len(item.value)
    yield messages.Tape(items=tuple(part))


def _leaves_behind(capsule: messages.Capsule, other: messages.Capsule) -> bool:
    """Whether a process that says `capsule` does again, or has never seen done, what an earlier one
    of its rank has said with `other`."""
    if capsule.step != other.step:
        return capsule.step < other.step
    return capsule.section in ("", other.section)


class Keepsakes:
    """Of all ranks of one job."""

    def __init__(self) -> None:
        self._ranks: dict[int, Belongings] = {}

    def take(self, rank: int, incarnation: int, message: Keepsake) -> None:
        """Keep what a process of `rank` has said."""
        if isinstance(message, messages.Protect):  # digests of all ranks would be too many
            message = msgspec.structs.replace(message, digests={})
        self._ranks.setdefault(rank, Belongings()).take(incarnation, message)

    def begin_tape(self, rank: int, incarnation: int) -> None:
        """The job begins from nothing, and with it the rank's tape."""
        self.take(rank, incarnation, messages.Tape(items=()))

    # ------------------------------------------------------------ what is handed on

    def heritage(self, rank: int, faults: Iterable[ChaosSpec]) -> Heritage:
        """All that a new process of `rank` is born with; `faults`: those still to fire there."""
        kept = self._of(rank)
        return Heritage(
            rng_key=kept.rng_key,
            once=kept.once,
            faults=tuple(faults),
            tape=kept.tape,
            kept=tuple(each for each in kept.listed() if not isinstance(each[1], _BORN_WITH)),
        )

    def after(self, rank: int, step: int) -> tuple[bytes | None, dict[str, bytes]]:
        """The capsule of `step`, if there is one, and what was kept of the sections after it."""
        return self._of(rank).after(step)

    def for_plan(self, rank: int, plan: Plan) -> tuple[bytes | None, dict[str, bytes]]:
        """The newest capsule of `rank` that is not newer than the plan's step, and what it has kept
        of the sections after that step. The capsule may be older than the step: the worker then
        takes nothing from it but the fence that the job has agreed on, and knows so by the
        capsule's own step."""
        if plan.ranks[rank].decision is not Decision.FETCH:
            return None, {}
        kept = self._of(rank)
        newest = kept.newest(plan.step)
        if newest is None:
            return None, {}
        payload, sections = kept.after(newest)
        return payload, sections if newest == plan.step else {}

    def _of(self, rank: int) -> Belongings:
        return self._ranks.get(rank) or Belongings()
