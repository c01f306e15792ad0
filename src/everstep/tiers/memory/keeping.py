"""What may go from a host's memory, and where copies go. Pure.

A checkpoint in memory is of use until newer ones are there. So when a commit comes, each host drops
by itself what is older: all commits of the series but the `retained` that came last, the parts of
their steps, and the parts of attempts that never committed. By then two later checkpoints have been
committed since the last word of such an attempt, and a rank has only one save under way. What came
last counts, not the number of the step: a training that went back saves smaller numbers, and what
it has just saved must not go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from everstep.core.placement import Placement, Site, place
from everstep.tiers import names
from everstep.tiers.memory import talk

_FORGOTTEN_AFTER = 2  # commits of the series


class Kept(NamedTuple):
    """An object, and the order in which it came."""

    key: str
    order: int


def outdated(series: str, objects: Iterable[Kept], retained: int) -> list[str]:
    """The keys that may go, now that a commit of `series` has come. A commit goes before the parts
    that it names."""
    commits: dict[int, Kept] = {}
    parts: dict[int, list[tuple[str, Kept]]] = {}
    for kept in objects:
        commit = names.step_of(kept.key)
        part = names.part_of(kept.key)
        if commit is not None and commit[0] == series:
            commits[commit[1]] = kept
        elif part is not None and part[0].series == series:
            parts.setdefault(part[0].step, []).append((part[0].name, kept))
    order = sorted(commits.values(), key=lambda kept: kept.order)
    gone = {step for step, kept in commits.items() if kept in order[:-retained]}
    out = [commits[step].key for step in sorted(gone)]
    last = order[-_FORGOTTEN_AFTER].order if len(order) >= _FORGOTTEN_AFTER else 0
    for step, there in sorted(parts.items()):
        if step in gone:
            out += [kept.key for _, kept in there]
        elif step not in commits:
            newest: dict[str, int] = {}
            for attempt, kept in there:
                newest[attempt] = max(newest.get(attempt, 0), kept.order)
            out += [kept.key for attempt, kept in there if newest[attempt] < last]
    return out


def is_shared(key: str) -> bool:
    """Whether an object is put on all hosts: a commit, by which each knows what may go and each
    rank that its save is done; and what else ends an attempt, which all wait for."""
    part = names.part_of(key)
    return names.step_of(key) is not None or (part is not None and part[2] in ("failed", "same"))


def placed(sites: Sequence[talk.Site], copies: int) -> Placement:
    """Which hosts keep copies of which: slots are the sites' places in `sites`."""
    slots = [
        Site(slot=slot, node=slot, host=site.host, domain=site.domain)
        for slot, site in enumerate(sites)
    ]
    return place(slots, copies)


def deciders(key: str, sites: Iterable[str]) -> list[str]:
    """The hosts in the order in which they are asked whether an object may be put, where there
    must be none yet: the same order on every host."""

    def weight(site: str) -> bytes:
        return hashlib.sha256(f"{site}\0{key}".encode()).digest()

    return sorted(sites, key=weight)
