"""Placements against every other that is possible, and the survival formulas against counting."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest
from benchmarks.survival import loss_probability, of_placement, ring_sizes, rows, survived_sets
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.core.placement import Placement, Scheme, Site, place, replace

schemes = st.sampled_from(Scheme)


@st.composite
def clusters(draw: st.DrawFn, most: int = 24) -> list[Site]:
    """Slots in domains of any sizes, on hosts of one or two nodes."""
    domains = draw(st.lists(st.integers(0, 5), min_size=1, max_size=most))
    return [
        Site(slot=slot, node=slot, host=f"h{domain}-{slot // 2}", domain=f"rack{domain}")
        for slot, domain in enumerate(domains)
    ]


def windows(placement: Placement, sites: list[Site]) -> list[list[str]]:
    """The domains of each slot's copies."""
    where = {site.slot: site.domain for site in sites}
    return [[where[slot] for slot in placement.holders(site.slot)] for site in sites]


def keeps(placement: Placement, slot: int) -> list[int]:
    """The other slots of which `slot` keeps a copy."""
    others = [other for ring in placement.rings for other in ring if other != slot]
    return [other for other in others if slot in placement.holders(other)]


def survives(placement: Placement, lost: Iterable[int]) -> bool:
    """Whether some copy of everything is left when the slots in `lost` are lost at once."""
    gone, slots = set(lost), [slot for ring in placement.rings for slot in ring]
    return all(not gone.issuperset(placement.holders(slot)) for slot in slots)


def moves(before: Placement, after: Placement, lost: int) -> list[tuple[int, int]]:
    """What must be copied: (whose state, which slot keeps it), for every copy of `after` that is
    not where `before` had it, or was on the slot `lost`."""
    slots = sorted(slot for ring in after.rings for slot in ring)
    had = {slot: set(before.holders(slot)) - {lost} for slot in slots}
    return [(s, other) for s in slots for other in after.holders(s)[1:] if other not in had[s]]


@given(clusters(), st.integers(1, 4), schemes)
def test_every_state_has_its_copies_and_everybody_keeps_alike(
    sites: list[Site], copies: int, scheme: Scheme
) -> None:
    placement = place(sites, copies, scheme)
    made = min(copies, len(sites))
    assert placement.copies == made
    assert ("copies of each state need" in placement.reason) == (made < copies)
    assert sorted(slot for ring in placement.rings for slot in ring) == list(range(len(sites)))
    for site in sites:
        holders = placement.holders(site.slot)
        assert holders[0] == site.slot
        assert len(set(holders)) == made
        assert len(keeps(placement, site.slot)) == made - 1
        assert all(site.slot in placement.holders(kept) for kept in keeps(placement, site.slot))
    assert [len(ring) for ring in placement.rings] == ring_sizes(len(sites), made, scheme)


@given(clusters(), st.integers(1, 4), schemes)
def test_a_slots_neighbour_is_the_first_that_keeps_a_copy(
    sites: list[Site], copies: int, scheme: Scheme
) -> None:
    placement = place(sites, copies, scheme)
    others = {site.slot: placement.holders(site.slot)[1:] for site in sites}
    assert placement.neighbours() == {slot: found[0] for slot, found in others.items() if found}


@given(clusters(), st.integers(1, 4), schemes)
def test_no_domain_has_two_copies_unless_it_is_too_large(
    sites: list[Site], copies: int, scheme: Scheme
) -> None:
    placement = place(sites, copies, scheme)
    sizes = [sum(site.domain == domain for site in sites) for domain in {s.domain for s in sites}]
    crowded = [
        site.slot
        for site, domains in zip(sites, windows(placement, sites), strict=True)
        if len(set(domains)) < len(domains)
    ]
    assert placement.crowded == tuple(sorted(crowded))
    assert ("share a failure domain" in placement.reason) == bool(crowded)
    if max(sizes) <= len(sites) // placement.copies:
        assert not crowded
    else:  # more members than there are sets of slots that share nothing: two must meet
        assert crowded


@given(clusters(most=7), st.integers(2, 3), schemes)
@settings(max_examples=60)
def test_what_is_crowded_could_not_be_avoided(
    sites: list[Site], copies: int, scheme: Scheme
) -> None:
    """Every other way to put the slots into the same rings, one by one."""
    placement = place(sites, copies, scheme)
    if not placement.crowded:
        return
    for order in itertools.permutations(range(len(sites))):
        rest = iter(order)
        rings = tuple(tuple(itertools.islice(rest, len(ring))) for ring in placement.rings)
        other = Placement(rings=rings, copies=placement.copies)
        together = [len(set(d)) < len(d) for d in windows(other, sites)]
        assert any(together)
        if copies == 2:
            assert sum(together) >= len(placement.crowded)


@given(clusters(), st.integers(2, 3), schemes, st.randoms(use_true_random=False))
def test_the_order_of_the_sites_does_not_matter(
    sites: list[Site], copies: int, scheme: Scheme, order: object
) -> None:
    shuffled = list(sites)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert place(shuffled, copies, scheme) == place(sites, copies, scheme)


@given(clusters(), st.integers(2, 3), schemes, st.data())
def test_a_replaced_node_moves_only_what_it_had(
    sites: list[Site], copies: int, scheme: Scheme, data: st.DataObject
) -> None:
    before = place(sites, copies, scheme)
    lost = data.draw(st.sampled_from(sites))
    domain = data.draw(st.sampled_from([*{s.domain for s in sites}, "new"]))
    now = [
        site
        if site.slot != lost.slot
        else Site(slot=lost.slot, node=99, host="spare", domain=domain)
        for site in sites
    ]
    after = replace(before, now)
    same = Placement(rings=before.rings, copies=before.copies)
    together = [len(set(d)) < len(d) for d in windows(same, now)]
    assert len(after.crowded) <= sum(together)
    if not any(together):
        assert after.rings == before.rings
        kept = keeps(before, lost.slot)
        assert sorted(moves(before, after, lost.slot)) == sorted((slot, lost.slot) for slot in kept)
    elif after.rings != before.rings:
        assert len(after.crowded) < sum(together)
    if not any(len(set(d)) < len(d) for d in windows(place(now, copies, scheme), now)):
        assert len(after.crowded) <= len(before.crowded)  # it can be mended, so it is
    assert {len(keeps(after, site.slot)) for site in now} == {after.copies - 1}


@given(clusters(most=9), st.integers(1, 4), schemes, st.integers(0, 9))
@settings(max_examples=200)
def test_the_formula_is_what_counting_gives(
    sites: list[Site], copies: int, scheme: Scheme, lost: int
) -> None:
    lost = min(lost, len(sites))
    placement = place(sites, copies, scheme)
    sets = list(itertools.combinations(range(len(sites)), lost))
    destroyed = sum(not survives(placement, chosen) for chosen in sets)
    assert of_placement(placement, lost) == Fraction(destroyed, len(sets))


def test_the_formula_is_what_counting_gives_for_mixed_rings() -> None:
    placement = Placement(rings=((0, 1, 2, 3), (4, 5), (6, 7, 8)), copies=2)
    for lost in range(10):
        sets = list(itertools.combinations(range(9), lost))
        destroyed = sum(not survives(placement, chosen) for chosen in sets)
        assert of_placement(placement, lost) == Fraction(destroyed, len(sets))


@given(st.integers(2, 200))
def test_two_lost_of_many_by_hand(nodes: int) -> None:
    pairs = loss_probability(ring_sizes(2 * nodes, 2, Scheme.PAIRS), 2, 2)
    ring = loss_probability([2 * nodes], 2, 2)
    assert pairs == Fraction(1, 2 * nodes - 1)
    assert ring == Fraction(2, 2 * nodes - 1)


@given(st.integers(2, 40), st.integers(2, 4), st.data())
def test_more_lost_is_never_safer(nodes: int, copies: int, data: st.DataObject) -> None:
    copies = min(copies, nodes)
    for scheme in Scheme:
        sizes = ring_sizes(nodes, copies, scheme)
        chances = [loss_probability(sizes, copies, lost) for lost in range(nodes + 1)]
        assert chances == sorted(chances)
        assert chances[copies - 1] == 0
        assert chances[-1] == 1


def test_rows_leave_out_what_cannot_be() -> None:
    found = rows([2, 4], [2, 3], [1, 2])
    assert [(nodes, copies) for nodes, copies, _, _ in found] == [(2, 2)] * 2 + [(4, 2)] * 2 + [
        (4, 3)
    ] * 2
    assert found[0][3] == [0, 1]


@given(clusters(), st.integers(2, 4), schemes)
def test_without_a_crowd_any_domain_may_be_lost(
    sites: list[Site], copies: int, scheme: Scheme
) -> None:
    placement = place(sites, copies, scheme)
    if placement.crowded or placement.copies == 1:
        return
    for domain in {site.domain for site in sites}:
        assert survives(placement, (site.slot for site in sites if site.domain == domain))


def test_a_thousand_nodes_are_no_work() -> None:
    """Each exchange looks at the neighbourhood of what is crowded, not at the whole."""
    sites = [
        Site(slot=slot, node=slot, host=f"h{slot}", domain=f"r{slot // 10}") for slot in range(1000)
    ]
    before = place(sites, 2, Scheme.RING)
    lost, (_, neighbour) = 500, before.holders(500)
    domain = sites[neighbour].domain
    sites[lost] = Site(slot=lost, node=1000, host="spare", domain=domain)
    after = replace(before, sites)
    assert not after.crowded
    assert len(moves(before, after, lost)) <= 8


def test_what_makes_no_sense_is_refused() -> None:
    site = Site(slot=0, node=0, host="h", domain="d")
    with pytest.raises(ValueError, match="copies"):
        place([site], 0)
    with pytest.raises(ValueError, match="twice"):
        place([site, site])
    with pytest.raises(ValueError, match="not the slots"):
        replace(place([site]), [])
    with pytest.raises(ValueError, match="copies"):
        survived_sets(2, 3, 1)
    with pytest.raises(ValueError, match="lost"):
        loss_probability([2], 2, 3)
    assert place([]).rings == ()
    with pytest.raises(KeyError):
        place([site]).holders(1)


def test_the_table_in_the_pages_is_the_formula() -> None:
    page = (Path(__file__).parents[2] / "docs" / "design" / "copies.md").read_text()
    table = re.findall(r"^\| (\d+) \| (\d) \| (\w+) \| (.+) \|$", page, re.MULTILINE)
    expected = [
        (str(nodes), str(copies), scheme.value, " | ".join(f"{float(p):.2g}" for p in chances))
        for nodes, copies, scheme, chances in rows([8, 64, 256, 1024], [2, 3], [2, 3, 4, 8])
    ]
    assert table == expected
