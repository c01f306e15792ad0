"""What may be removed from a series of checkpoints. Pure.

Theory of operation. Kept are the newest whole checkpoints, as many as are asked for, and at least
one. What is older than all of these goes, whole or not. What is newer than the newest whole stays:
it may be on its way, or there to be looked at. Attempts that are nobody's checkpoint go when they
have not changed for long, or are of a step that is older than all that is kept: even if they came
to an end, they would be removed at once.

It doesn't know a store: it is told what is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from everstep.tiers import names
from everstep.tiers.names import Attempt
from everstep.tiers.store import Entry


@dataclass(slots=True, kw_only=True)
class Found:
    """Objects of one series as a listing has them: commits by step, those of each attempt, and
    commits that were set aside. What is none of these is not ours, and not looked at."""

    commits: dict[int, Entry] = field(default_factory=dict)
    attempts: dict[Attempt, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    aside: dict[Attempt, Entry] = field(default_factory=dict)


def sort(series: str, entries: Iterable[Entry]) -> Found:
    """What is there of `series`."""
    found = Found()
    for entry in entries:
        commit = names.step_of(entry.key)
        part = names.part_of(entry.key)
        aside = names.aside_of(entry.key)
        if commit is not None and commit[0] == series:
            found.commits[commit[1]] = entry
        elif part is not None and part[0].series == series:
            found.attempts[part[0]].append(entry)
        elif aside is not None and aside.series == series:
            found.aside[aside] = entry
    return found


def part_lengths(entries: Iterable[Entry]) -> dict[int, dict[str, int]]:
    """Of one attempt's objects: by rank, the bytes of each kind."""
    lengths: dict[int, dict[str, int]] = defaultdict(dict)
    for entry in entries:
        part = names.part_of(entry.key)
        if part is not None:
            lengths[part[1]][part[2]] = entry.nbytes
    return lengths


def leftovers(found: Found, *, oldest_kept: int | None, before_s: float) -> list[Attempt]:
    """Attempts that may go unless they are a checkpoint's that stays, in order of their steps:
    unchanged since `before_s`, or of a step before `oldest_kept` (None: only age counts)."""
    return sorted(
        attempt
        for attempt, entries in found.attempts.items()
        if (oldest_kept is not None and attempt.step < oldest_kept)
        or max(entry.changed_s for entry in entries) < before_s
    )
