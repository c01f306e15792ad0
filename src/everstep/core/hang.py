"""Who makes the others wait: the culprit of a hang, from what each rank shows of itself.

Theory of operation. Every rank counts, for each communicator, the collectives that it has entered
in this generation, and shows the kind and size of the newest. A rank whose count of a communicator
is higher than another member's waits for that member, or will. So the counts make a graph of who
waits for whom, and the culprit is found in it:

- *stopped*: the kernel says that a process stands still by a signal. No more is needed.
- *left*: a rank has left its loop, and others wait for it in a collective. The script is at fault.
- *mismatch*: ranks stand at the same count of one communicator, in collectives of different kinds
  (or sizes, where all must bring the same). The few are named, the many are taken to be right.
- *absent*: a rank that stands still in its own code, waits for nobody, and is waited for. One that
  is inside a collective that all have entered may wait there, and is not accused.
- *deadlock*: ranks wait for each other in a ring, in different communicators.

Only ranks that have not moved for longer than their own deadline are looked at (`overdue`), the
accused and somebody who waits alike. So a job whose ranks are all slow together, or one of which
saves while the others wait, has no culprit. If all are stopped there is none either: somebody
suspended the whole job, and killing would lose the state.

What it doesn't know: deadlines and clocks (the agent's), what is done about a culprit
(`core.silence`), why a collective that all have entered does not end, and messages between two
ranks, which have no common count: for them a rank says only that it waits.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.core.words import name_ranks, verb


class Stance(enum.StrEnum):
    """What a rank is about, as far as others may wait for it."""

    WORKING = "working"  # in its own code, as far as it shows: a step, or between steps
    WAITING = "waiting"  # its main thread waits for a collective or a message
    LEFT = "left"  # it has left its loop, and waits for the others to do so
    APART = "apart"  # in set-up, parked, recovering: other deadlines hold there


class Kind(enum.StrEnum):
    """How a hang came about; see the module's text."""

    STOPPED = "stopped"
    LEFT = "left"
    MISMATCH = "mismatch"
    ABSENT = "absent"
    DEADLOCK = "deadlock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """What a rank has entered of one communicator. `count`: collectives in this generation.
    `kind`, `elements`: of the newest. `name`: the communicator's."""

    count: int
    kind: str = "collective"
    elements: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one rank shows. `where`: in words, "in step 5 (optimizer)". `silent_s`: since it last
    moved, in seconds; `overdue`: that is longer than it may be. `since_s`: when that was, on the
    host's monotonic clock. `stopped`: a signal has stopped the process, for longer than it may.
    `inside`: a collective or message that it has entered has not ended; where WORKING, it may be
    waiting for that all the same, in code that doesn't say so (DDP's C++).
    `groups`: identity of each communicator to what was entered. `fault`: the fault on purpose that
    had fired there."""

    rank: int
    incarnation: int
    stance: Stance
    where: str
    step: int = 0
    generation: int = 0
    silent_s: float = 0.0
    since_s: float | None = None
    overdue: bool = False
    stopped: bool = False
    inside: bool = False
    groups: Mapping[int, Entered] = field(default_factory=dict)
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Who makes the others wait, and why that is believed: culprit to one sentence."""

    kind: Kind
    culprits: Mapping[int, str]


_ALIKE = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce"})


def judge(evidence: Sequence[Evidence]) -> Verdict | None:
    """The culprit of a hang, or None when there is no hang, or nobody can be named. Pure.

    `evidence`: of all ranks that live. O(ranks * communicators).
    """
    stopped = [each for each in evidence if each.stopped]
    if stopped:
        if len(stopped) == len(evidence):
            return None
        return _verdict(Kind.STOPPED, {e.rank: _stopped(e, evidence) for e in stopped})
    generation = max((each.generation for each in evidence), default=0)
    present = [e for e in evidence if e.generation == generation and e.stance is not Stance.APART]
    late = [each for each in present if each.overdue]
    if not late:
        return None
    return (
        _judge_left(present)
        or mismatch(late)
        or _judge_absent(present, late)
        or _judge_deadlock(late)
    )


def _groups(evidence: Iterable[Evidence]) -> dict[int, dict[int, Entered]]:
    """Communicator to its members to what each has entered of it."""
    found: dict[int, dict[int, Entered]] = {}
    for each in evidence:
        for identity, entered in each.groups.items():
            found.setdefault(identity, {})[each.rank] = entered
    return found


def _behind(evidence: Sequence[Evidence]) -> dict[int, tuple[dict[int, Entered], int]]:
    """Each rank that others wait for by the counts, to the communicator in which most do, and how
    many of its collectives the rank has entered."""
    found: dict[int, tuple[dict[int, Entered], int, int]] = {}
    for group in _groups(evidence).values():
        newest = max(entered.count for entered in group.values())
        ordered = sorted(entered.count for entered in group.values())
        for rank, entered in group.items():
            if entered.count < newest:
                waiters = len(ordered) - bisect_right(ordered, entered.count)
                if rank not in found or waiters > found[rank][2]:
                    found[rank] = group, entered.count, waiters
    return {rank: (group, count) for rank, (group, count, _) in found.items()}


def _ahead(evidence: Iterable[Evidence]) -> set[int]:
    """The ranks that wait for somebody by the counts."""
    found: set[int] = set()
    for group in _groups(evidence).values():
        oldest = min(entered.count for entered in group.values())
        found |= {rank for rank, entered in group.items() if entered.count > oldest}
    return found


# ---------------------------------------------------------------------- the ways to hang


def _judge_left(present: Sequence[Evidence]) -> Verdict | None:
    behind = _behind(present)
    by_rank = {each.rank: each for each in present}
    culprits = {}
    for rank, (group, count) in behind.items():
        each = by_rank[rank]
        waiters = [r for r, e in group.items() if e.count > count and by_rank[r].overdue]
        if each.stance is Stance.LEFT and any(
            by_rank[r].stance is not Stance.LEFT for r in waiters
        ):
            culprits[rank] = (
                f"rank {rank} has left its loop after step {each.step}, and "
                f"{_waiters(group, count)}. Every rank must make the same steps: give run.batches "
                "the same `until` on all, and leave the loop early on all of them or on none"
            )
    return _verdict(Kind.LEFT, culprits)


def mismatch(late: Sequence[Evidence]) -> Verdict | None:
    """Ranks of one generation that stand at the same count of a communicator in collectives that
    don't fit; None if all do."""
    where = {each.rank: each.where for each in late}
    for group in _groups(late).values():
        at_count: dict[int, dict[tuple[str, int], list[int]]] = {}
        for rank, entered in sorted(group.items()):
            if entered.count:
                elements = entered.elements if entered.kind in _ALIKE else 0
                kinds = at_count.setdefault(entered.count, {})
                kinds.setdefault((entered.kind, elements), []).append(rank)
        for count, kinds in sorted(at_count.items()):
            if len(kinds) < 2:
                continue
            # The most ranks, and of as many those with the lowest rank, are taken to be right.
            right = max(kinds, key=lambda kind: (len(kinds[kind]), -min(kinds[kind])))
            name = next(iter(group.values())).name
            culprits = {
                rank: f"rank {rank} {where[rank]} has entered {_sized(kind, right)} as collective "
                f"#{count} of {_called(name)}, where {verb(kinds[right], 'has', 'have')} entered "
                f"{_sized(right, kind)}; every rank must call the same collectives in the same "
                "order"
                for kind, ranks in kinds.items()
                if kind != right
                for rank in ranks
            }
            return _verdict(Kind.MISMATCH, culprits)
    return None


def _judge_absent(present: Sequence[Evidence], late: Sequence[Evidence]) -> Verdict | None:
    ahead, behind = _ahead(present), _behind(present)
    idle = {e.rank for e in late if e.stance is Stance.WAITING}
    idle |= {e.rank for e in present if e.stance is Stance.LEFT}
    overdue = {each.rank for each in late}
    culprits = {}
    for each in late:
        rank = each.rank
        if each.stance is not Stance.WORKING or each.inside or rank in ahead:
            continue  # inside and not ahead: all others have entered that, too
        text = f"rank {rank} hangs {each.where}: it has not moved for {each.silent_s:.1f} s"
        if rank in behind:
            group, count = behind[rank]
            if any(r in overdue for r, e in group.items() if e.count > count):
                culprits[rank] = f"{text}, and {_waiters(group, count)}"
        if rank not in culprits and idle - {rank}:
            culprits[rank] = f"{text}, and {verb(idle - {rank}, 'waits', 'wait')} for it"
    return _verdict(Kind.ABSENT, culprits)


def _judge_deadlock(late: Sequence[Evidence]) -> Verdict | None:
    """All that are left wait; a ring among those that are overdue can't open by itself."""
    ring = _ring(late)
    if not ring:
        return None
    behind = _behind(late)
    parts = [
        f"rank {rank} has not entered {_kind_at(*behind[rank])} #{behind[rank][1] + 1} of "
        f"{_called(_name(behind[rank][0]))}"
        for rank in ring
    ]
    text = (
        f"{name_ranks(ring)} wait for each other: {', '.join(parts)}; every rank must call the "
        "collectives of its communicators in the same order"
    )
    return _verdict(Kind.DEADLOCK, {ring[0]: text})


def _ring(late: Sequence[Evidence]) -> list[int]:
    """The ranks of one ring of waits, in order; none if there is no ring."""
    left = list(late)
    while left:  # who waits for nobody that is left is in no ring
        ahead = _ahead(left)
        if len(ahead) == len(left):
            break
        left = [each for each in left if each.rank in ahead]
    if not left:
        return []
    groups = _groups(left)
    by_rank = {each.rank: each for each in left}
    path: list[int] = []
    rank = min(by_rank)
    while rank not in path:
        path.append(rank)
        mine = by_rank[rank].groups
        rank = min(
            other
            for identity, entered in mine.items()
            for other, seen in groups[identity].items()
            if seen.count < entered.count
        )
    return sorted(path[path.index(rank) :])


# ---------------------------------------------------------------------- words


def _verdict(kind: Kind, culprits: Mapping[int, str]) -> Verdict | None:
    return Verdict(kind=kind, culprits=dict(sorted(culprits.items()))) if culprits else None


def _stopped(each: Evidence, evidence: Sequence[Evidence]) -> str:
    text = f"rank {each.rank} has been stopped by a signal (SIGSTOP or the like) {each.where}"
    waited = _behind(evidence).get(each.rank)
    return text if waited is None else f"{text}, and {_waiters(*waited)}"


def _waiters(group: Mapping[int, Entered], count: int) -> str:
    """ "ranks 0, 2, 3 wait for it in allreduce #12 of group dp"."""
    ranks = [rank for rank, entered in group.items() if entered.count > count]
    which = f"{_kind_at(group, count)} #{count + 1} of {_called(_name(group))}"
    return f"{verb(ranks, 'waits', 'wait')} for it in {which}"


def _kind_at(group: Mapping[int, Entered], count: int) -> str:
    """The kind of the collective after the `count`-th, as far as a rank still stands in it."""
    kinds = {e.kind for e in group.values() if e.count == count + 1}
    return kinds.pop() if len(kinds) == 1 else "collective"


def _sized(kind: tuple[str, int], other: tuple[str, int]) -> str:
    """The kind, with its size where only that differs."""
    return f"{kind[0]} of {kind[1]} elements" if kind[0] == other[0] else kind[0]


def _name(group: Mapping[int, Entered]) -> str:
    return next(iter(group.values())).name


def _called(name: str) -> str:
    return "the world" if name == "world" else f"group {name}"
