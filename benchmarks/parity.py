"""What parity over groups of hosts would save in memory, and what it would cost, beside copies.

Theory of operation. Each host has S bytes of a checkpoint. With *copies* (c of them, its own
included) it keeps c times S, sends (c - 1) times S at a save, and a lost host's part is read from
one other. With *parity* over groups of g hosts, as RAID 5 has it, each host cuts its part into
g - 1 pieces, and keeps the exclusive-or of one piece of each other member: S / (g - 1) beside its
own part. At a save it sends S and receives as much; all members must take part in one save; and a
lost host's part is made from all that the others of its group have, which is (g - 1) times S over
the network. A group survives the loss of one of its members, whichever.

A part that is retained is kept so many times over, and one more is on its way. Losses are of hosts
drawn from all with equal probability, as in survival.py; each figure is exact.

    python benchmarks/parity.py [HOSTS]
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.survival import loss_probability, ring_sizes

from everstep.core.placement import Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Trade:
    """In parts of a host (S). `memory`: a host keeps, `retained` checkpoints and one on its way;
    `sent`: a host sends at a save; `read`: over the network to bring a lost host's part back.
    `loss`: by number of hosts lost at once, the probability that something is gone."""

    way: str
    memory: float
    sent: float
    read: float
    loss: tuple[Fraction, ...]


def by_copies(hosts: int, copies: int, retained: int, losses: Sequence[int]) -> Trade:
    """With copies, placed in pairs (or threes). Raises ValueError for fewer hosts than copies."""
    sizes = ring_sizes(hosts, copies, Scheme.PAIRS)
    return Trade(
        way=f"{copies} copies",
        memory=float(copies * (retained + 1)),
        sent=float(copies - 1),
        read=1.0,
        loss=tuple(loss_probability(sizes, copies, lost) for lost in losses),
    )


def by_parity(hosts: int, group: int, retained: int, losses: Sequence[int]) -> Trade:
    """With parity over groups of `group` hosts; the rest is spread over the groups. Raises
    ValueError for a group of one, or fewer hosts."""
    if not 2 <= group <= hosts:
        raise ValueError(f"groups of {group} of {hosts} hosts")
    groups = hosts // group
    sizes = [hosts // groups + (each < hosts % groups) for each in range(groups)]
    return Trade(
        way=f"parity of {group}",
        memory=(1 + 1 / (group - 1)) * (retained + 1),
        sent=1.0,
        read=float(group - 1),
        loss=tuple(1 - Fraction(_survived(sizes, k), math.comb(hosts, k)) for k in losses),
    )


def _survived(sizes: Sequence[int], lost: int) -> int:
    """How many sets of `lost` hosts have at most one of each group: the coefficient of x^lost in
    the product of (1 + size x)."""
    counts = [1] + [0] * lost
    for size in sizes:
        for k in range(lost, 0, -1):
            counts[k] += counts[k - 1] * size
    return counts[lost]


def main() -> None:
    hosts = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    losses, retained = (1, 2, 3), 2
    trades = [by_copies(hosts, copies, retained, losses) for copies in (1, 2, 3)]
    trades += [by_parity(hosts, group, retained, losses) for group in (4, 8, 16) if group <= hosts]
    print(f"{hosts} hosts, {retained} checkpoints retained and one on its way\n")
    print("| | memory | sent | read back | lost with 1 | with 2 | with 3 |")
    print("|---|---|---|---|---|---|---|")
    for trade in trades:
        back = f"{trade.read:g} S" if trade.loss[0] < 1 else "-"
        cells = [f"{trade.memory:.1f} S", f"{trade.sent:g} S", back]
        cells += [f"{float(loss):.2g}" for loss in trade.loss]
        print(" | ".join(itertools.chain([f"| {trade.way}"], cells)), "|")


if __name__ == "__main__":
    main()
