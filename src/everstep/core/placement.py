"""Which node keeps a copy of which ranks' state.

Theory of operation. Slots are put into *rings*; the copies of a slot's ranks lie on the slot itself
and on the next `copies - 1` of its ring. With rings of just that many slots each ring is a group
whose members keep all of one another (with two copies: pairs); one ring of all slots is the other
extreme. So each slot keeps exactly as much for others as others keep for it, whatever the numbers.

The members of a failure domain are dealt out so that those that follow on one another in a ring lie
in different ones: slots are sorted by domain, the largest first, and then by host, and dealt to the
groups in turn. In groups, and in a ring, no two copies share a domain unless some domain is so
large that two must; then the placement says which, and keeps them on different hosts if it can.

A slot keeps its place when its node is replaced: what must be copied anew is what the lost node
had, and nothing else. Only if the replacement brings two copies into one domain, and another slot
could change places with one of them so that fewer are, are the two exchanged.

What it doesn't know: how large the states are, and who copies when. `benchmarks/survival.py` has
what a placement survives.
"""

from __future__ import annotations

import enum
from collections import ChainMap, Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.core.words import name_ranks


class Scheme(enum.StrEnum):
    """How large the rings are."""

    PAIRS = "pairs"  # as small as can be: fewest sets of nodes whose loss together loses something
    RING = "ring"  # one of all


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a slot is now: `node` holds it, on `host`, in failure domain `domain` (the host's name
    where nobody has said)."""

    slot: int
    node: int
    host: str
    domain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`rings`: the slots, each once. `copies`: of each state, its own included. `crowded`: slots
    whose copies share a failure domain because it could not be avoided. `reason`: what to say to a
    person; empty when there is nothing to say."""

    rings: tuple[tuple[int, ...], ...]
    copies: int
    crowded: tuple[int, ...] = ()
    reason: str = ""

    def holders(self, slot: int) -> tuple[int, ...]:
        """The slots with a copy of what `slot` has: itself first, then the others in order. Raises
        KeyError for a slot that is not placed."""
        for ring in self.rings:
            if slot in ring:
                return _window(ring, ring.index(slot), self.copies)
        raise KeyError(slot)

    def neighbours(self) -> dict[int, int]:
        """By slot, the first that keeps a copy of what it has; slots are left out that have none.
        Linear."""
        if self.copies < 2:
            return {}
        return {
            ring[at]: ring[(at + 1) % len(ring)]
            for ring in self.rings
            if len(ring) > 1
            for at in range(len(ring))
        }


def place(sites: Sequence[Site], copies: int = 2, scheme: Scheme = Scheme.PAIRS) -> Placement:
    """A placement for slots that have none yet.

    `copies`: of each state, its own included; fewer where there are fewer slots, and said so. The
    same sites in another order give the same placement. Pure. Raises ValueError for fewer than one
    copy, and for a slot that is given twice."""
    if copies < 1:
        raise ValueError(f"{copies} copies; the state itself is the first")
    if len({site.slot for site in sites}) != len(sites):
        raise ValueError("a slot is given twice")
    made = min(copies, len(sites))
    if not sites:
        return Placement(rings=(), copies=copies)
    parts = len(sites) // made
    dealt = _deal(_by_domain(sites), parts)
    slots = tuple(tuple(site.slot for site in part) for part in dealt)
    rings = slots if scheme is Scheme.PAIRS else (tuple(slot for part in slots for slot in part),)
    return _described(rings, made, copies, sites)


def replace(before: Placement, sites: Sequence[Site]) -> Placement:
    """`before`, now that its slots are at `sites`: the same, unless slots have become crowded and
    an exchange of two makes them fewer.

    Raises ValueError when the slots are not those of `before`: then a new placement is needed."""
    if {site.slot for site in sites} != {slot for ring in before.rings for slot in ring}:
        raise ValueError("these are not the slots of this placement")
    domains = {site.slot: site.domain for site in sites}
    rings = before.rings
    while crowded := set(_crowded(rings, before.copies, domains)) - set(before.crowded):
        exchange = _best_exchange(rings, before.copies, domains, crowded)
        if exchange is None:
            break
        rings = _exchanged(rings, *exchange)
    return _described(rings, before.copies, before.copies, sites)


def _window(ring: tuple[int, ...], at: int, copies: int) -> tuple[int, ...]:
    return tuple(ring[(at + i) % len(ring)] for i in range(min(copies, len(ring))))


def _by_domain(sites: Sequence[Site]) -> list[Site]:
    """The largest domain first, in it the largest host first; ties by name, then by slot."""
    domains = Counter(site.domain for site in sites)
    hosts = Counter((site.domain, site.host) for site in sites)
    return sorted(
        sites,
        key=lambda site: (
            -domains[site.domain],
            site.domain,
            -hosts[site.domain, site.host],
            site.host,
            site.slot,
        ),
    )


def _deal(sites: Sequence[Site], parts: int) -> list[list[Site]]:
    """Deal `sites` to `parts` groups in turn. Neighbours in the order come to different groups; and
    where the groups follow on one another in one ring, no two members of a domain that is not
    larger than `parts` come closer to one another than a group is long: a domain of just `parts`
    members begins at the first group, since those that are as large come first, and a smaller one
    that wraps around leaves a group between."""
    return [list(sites[first::parts]) for first in range(parts)]


def _is_crowded(window: Iterable[int], domains: Mapping[int, str]) -> bool:
    found = [domains[slot] for slot in window]
    return len(set(found)) < len(found)


def _crowded(
    rings: Sequence[tuple[int, ...]], copies: int, domains: Mapping[int, str]
) -> tuple[int, ...]:
    """The slots of which two copies are in one domain."""
    return tuple(
        sorted(
            ring[at]
            for ring in rings
            for at in range(len(ring))
            if _is_crowded(_window(ring, at, copies), domains)
        )
    )


def _best_exchange(
    rings: Sequence[tuple[int, ...]],
    copies: int,
    domains: Mapping[int, str],
    crowded: Collection[int],
) -> tuple[int, int] | None:
    """The two slots whose exchange leaves the fewest crowded; None when none leaves fewer.

    One of them is within reach of a slot in `crowded`. To exchange two slots is to exchange the
    domains at their places, and only what has a copy at one of these places can change."""
    windows = {ring[at]: _window(ring, at, copies) for ring in rings for at in range(len(ring))}
    touching: dict[int, list[tuple[int, ...]]] = {slot: [] for slot in windows}
    for window in windows.values():
        for slot in window:
            touching[slot].append(window)
    before = dict(domains)
    best, most = None, 0
    for one in sorted({slot for owner in crowded for slot in windows[owner]}):
        for other in sorted(windows):
            if domains[one] == domains[other]:
                continue
            near = {*touching[one], *touching[other]}
            tried = ChainMap({one: domains[other], other: domains[one]}, before)
            saved = sum(_is_crowded(window, domains) for window in near)
            saved -= sum(_is_crowded(window, tried) for window in near)
            if saved > most:
                best, most = (one, other), saved
    return best


def _exchanged(
    rings: tuple[tuple[int, ...], ...], one: int, other: int
) -> tuple[tuple[int, ...], ...]:
    swap = {one: other, other: one}
    return tuple(tuple(swap.get(slot, slot) for slot in ring) for ring in rings)


def _described(
    rings: tuple[tuple[int, ...], ...], made: int, asked: int, sites: Sequence[Site]
) -> Placement:
    """The placement, and in words what a person should know of it."""
    domains = {site.slot: site.domain for site in sites}
    crowded = _crowded(rings, made, domains)
    said = []
    if made < asked:
        said.append(
            f"{asked} copies of each state need {asked} nodes, there are {len(sites)}: "
            + ("no node keeps a copy for another" if made == 1 else f"{made} copies are kept")
        )
    if crowded:
        sizes = Counter(domains.values())
        largest, count = max(sizes.items(), key=lambda item: (item[1], item[0]))
        said.append(
            f"copies of {_name_slots(crowded)} share a failure domain ({count} of {len(sites)} "
            f"nodes are in {largest}): the loss of that domain may lose what they hold"
        )
    return Placement(rings=rings, copies=made, crowded=crowded, reason="; ".join(said))


def _name_slots(slots: Iterable[int]) -> str:
    return name_ranks(slots).replace("rank", "slot", 1)
