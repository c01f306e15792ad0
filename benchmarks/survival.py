"""How likely it is that nodes lost at once take all copies of something with them.

Theory of operation. Of N nodes, k are lost, every set of k as likely as any other. A placement
survives a set that holds no `copies` slots in a row of any ring (`core/placement.py`). The sets of
k slots of one ring that are survived can be counted: the m - k survivors of a ring of m leave as
many gaps between them, each shorter than `copies`, and one divides by how often a turned ring is
counted. Rings are independent, so the counts of several multiply as polynomials do, in whole
numbers; the probability is exact.

What it doesn't know: that nodes of one rack are lost together more often than others. A placement
without crowded slots survives the loss of any one domain.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from everstep.core.placement import Placement, Scheme


def survived_sets(ring: int, copies: int, lost: int) -> int:
    """How many sets of `lost` slots of a ring of `ring` are survived: those with no `copies` in a
    row. Raises ValueError for a ring shorter than `copies`."""
    if not 1 <= copies <= ring:
        raise ValueError(f"{copies} copies in a ring of {ring}")
    left = ring - lost
    if lost == 0:
        return 1
    if left <= 0:
        return 0
    # Gaps of 0 to copies - 1 behind each survivor, by inclusion and exclusion.
    gaps = sum(
        (-1 if long % 2 else 1)
        * math.comb(left, long)
        * math.comb(ring - long * copies - 1, left - 1)
        for long in range(lost // copies + 1)
    )
    return ring * gaps // left


def loss_probability(rings: Iterable[int], copies: int, lost: int) -> Fraction:
    """The probability that the loss of `lost` slots, drawn from all, destroys all copies of
    something. `rings`: the rings' sizes. Raises ValueError when there are not so many slots."""
    sizes = sorted(rings)
    total = sum(sizes)
    if not 0 <= lost <= total:
        raise ValueError(f"{lost} of {total} slots can't be lost")
    counts = [1]
    for size, group in itertools.groupby(sizes):
        one = [survived_sets(size, copies, k) for k in range(min(size, lost) + 1)]
        counts = _times(counts, _power(one, len(list(group)), lost), lost)
    survived = counts[lost] if lost < len(counts) else 0
    return 1 - Fraction(survived, math.comb(total, lost))


def of_placement(placement: Placement, lost: int) -> Fraction:
    """`loss_probability` of a placement."""
    return loss_probability((len(ring) for ring in placement.rings), placement.copies, lost)


def ring_sizes(nodes: int, copies: int, scheme: Scheme) -> list[int]:
    """The sizes of the rings that `placement.place` makes of so many nodes. Raises ValueError for
    fewer nodes than copies."""
    if not 1 <= copies <= nodes:
        raise ValueError(f"{copies} copies on {nodes} nodes")
    if scheme is Scheme.RING:
        return [nodes]
    groups = nodes // copies
    return [nodes // groups + (group < nodes % groups) for group in range(groups)]


def rows(
    nodes: Sequence[int], copies: Sequence[int], losses: Sequence[int]
) -> list[tuple[int, int, Scheme, list[Fraction]]]:
    """A table: for each number of nodes and copies and each scheme, the probability that something
    is lost for each number of lost nodes. Impossible combinations are left out."""
    return [
        (
            count,
            kept,
            scheme,
            [loss_probability(ring_sizes(count, kept, scheme), kept, k) for k in losses],
        )
        for count in nodes
        for kept in copies
        for scheme in Scheme
        if kept <= count and max(losses) <= count
    ]


def _times(one: Sequence[int], other: Sequence[int], highest: int) -> list[int]:
    """The product of two polynomials, up to the power `highest`."""
    product = [0] * min(len(one) + len(other) - 1, highest + 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other[: len(product) - i]):
            product[i + j] += a * b
    return product


def _power(base: Sequence[int], exponent: int, highest: int) -> list[int]:
    result = [1]
    square = list(base)
    while exponent:
        if exponent & 1:
            result = _times(result, square, highest)
        square = _times(square, square, highest)
        exponent >>= 1
    return result
