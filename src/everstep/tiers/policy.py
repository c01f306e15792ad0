"""What becomes of a save, decided by one rank for all. Pure.

Theory of operation. When a save begins, every rank says how it stands (`Wish`): which saves it
still has in the background, and which it knows to have failed. One rank makes an `Order` of them,
and all obey it. So no rank saves what another leaves out, and a failure that one rank has seen is
told to all, once.

What waits may be displaced although a rank has just begun with it: an attempt that not all ranks
make is never committed, and the next save is the newer one.

It does not know how wishes and orders travel, nor time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.errors import UserError
from everstep.tiers.settings import TierSettings

MEMORY, DURABLE = "memory", "durable"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Failure:
    """A save that failed. `rank`: whose failure was the first, -1 where it is not known."""

    step: int
    tier: str
    attempt: str
    rank: int
    why: str

    def __str__(self) -> str:
        who = f" (rank {self.rank})" if self.rank >= 0 else ""
        return f"the save of step {self.step} to the {self.tier} tier failed{who}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a rank has in the background for one tier, by the names of attempts. `under_way`: "" for
    nothing. `waiting`: those that have not begun. `put`: the last whose part is there."""

    under_way: str = ""
    waiting: tuple[str, ...] = ()
    put: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a rank says when a save begins. `known`: failures that not all ranks have been told.
    `card`: how its host's memory tier is reached; `met`: `digest` of those that it has been given.
    `everywhere`: to all tiers, whatever is due."""

    rank: int
    step: int
    standing: dict[str, Standing]
    known: tuple[Failure, ...] = ()
    card: str = ""
    met: str = ""
    everywhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What all ranks do. `tiers`: to which the step is saved, as the attempt called `attempt`.
    `displaced`: tiers and attempts that are given up for this one; `lost`: those that can't end
    well, as a rank that took part began anew. `wait`: tiers whose saves are to have ended first.
    `skipped`: tiers that are busy, and left out. `failures`: to be told; `raised`: attempts whose
    failure all ranks have seen already. `cards`: of all hosts, when a rank lacks some."""

    step: int
    attempt: str
    world: int
    tiers: tuple[str, ...]
    displaced: tuple[tuple[str, str], ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    wait: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
    raised: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()


def due(settings: TierSettings, step: int) -> tuple[str, ...]:
    """The tiers to which `step` is saved by the cadences; none for most steps."""
    found = []
    if settings.memory_every and step % settings.memory_every == 0:
        found.append(MEMORY)
    if settings.destination and settings.durable_every and step % settings.durable_every == 0:
        found.append(DURABLE)
    return tuple(found)


def wanted(settings: TierSettings, step: int, *, everywhere: bool = False) -> tuple[str, ...]:
    """The tiers of a save that is asked for: those that are due; or all that there are, also where
    none is due, since whoever asks between them means it."""
    every = [MEMORY] if settings.memory_every else []
    every += [DURABLE] if settings.destination else []
    return tuple(every) if everywhere else due(settings, step) or tuple(every)


def digest(cards: Sequence[str]) -> str:
    """Tells sets of cards apart."""
    return hashlib.sha256("\n".join(cards).encode()).hexdigest() if cards else ""


def decide(
    wishes: Sequence[Wish], settings: TierSettings, attempt: str, raised: Sequence[str] = ()
) -> Order:
    """The order for one save. `raised`: attempts that failed before all ranks had copied, which
    all of them have seen. Raises UserError when the ranks save different steps."""
    steps = {wish.step: wish.rank for wish in wishes}
    if len(steps) > 1:
        (one, first), (other, second) = sorted(steps.items())[:2]
        raise UserError(
            f"rank {first} saves step {one} and rank {second} step {other}; a checkpoint is of one "
            "step: give all ranks the same checkpoint_id"
        )
    tiers = wanted(settings, wishes[0].step, everywhere=wishes[0].everywhere)
    busy: list[str] = []
    lost: list[tuple[str, str]] = []
    displaced: dict[tuple[str, str], None] = {}
    for tier in tiers:
        standing = [wish.standing.get(tier, Standing()) for wish in wishes]
        without = _lost(standing)
        lost += [(tier, name) for name in without]
        if any(not {each.under_way, *each.waiting} <= {"", *without} for each in standing):
            busy.append(tier)
        if settings.on_busy == "newest":
            displaced |= dict.fromkeys((tier, name) for each in standing for name in each.waiting)
    skipped = busy if settings.on_busy == "skip" else []
    cards = tuple(sorted({wish.card for wish in wishes if wish.card}))
    every = sorted(failure for wish in wishes for failure in wish.known)
    known = {(f.attempt, f.tier): f for f in every}  # of two, that which knows whose it was
    failures = sorted(f for f in known.values() if f.attempt not in raised)
    return Order(
        step=wishes[0].step,
        attempt=attempt,
        world=len(wishes),
        tiers=tuple(tier for tier in tiers if tier not in skipped),
        displaced=tuple(displaced),
        lost=tuple(lost),
        wait=tuple(busy) if settings.on_busy == "wait" else (),
        skipped=tuple(skipped),
        failures=tuple(failures),
        raised=tuple(raised),
        cards=cards if any(wish.met != digest(cards) for wish in wishes) else (),
    )


def _lost(standing: Sequence[Standing]) -> tuple[str, ...]:
    """Attempts that some ranks still make, and of which another knows nothing."""
    seen = [{each.under_way, *each.waiting, *each.put} for each in standing]
    open_ = dict.fromkeys(n for each in standing for n in (each.under_way, *each.waiting) if n)
    return tuple(name for name in open_ if any(name not in names for names in seen))
