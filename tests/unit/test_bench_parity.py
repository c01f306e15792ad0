"""The trade between copies and parity, against counting."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from benchmarks.parity import by_copies, by_parity


@pytest.mark.parametrize(("hosts", "group"), [(4, 2), (7, 3), (8, 4), (9, 4)])
def test_parity_loses_what_loses_two_of_a_group(hosts: int, group: int) -> None:
    groups = hosts // group
    of = sorted(host % groups for host in range(hosts))
    losses = range(hosts + 1)
    for lost, found in zip(losses, by_parity(hosts, group, 2, losses).loss, strict=True):
        sets = list(itertools.combinations(range(hosts), lost))
        fatal = [each for each in sets if len({of[host] for host in each}) < lost]
        assert found == Fraction(len(fatal), len(sets))


def test_parity_of_two_is_a_copy() -> None:
    one, other = by_parity(8, 2, 2, [1, 2, 3]), by_copies(8, 2, 2, [1, 2, 3])
    assert (one.memory, one.sent, one.read, one.loss) == (
        other.memory,
        other.sent,
        other.read,
        other.loss,
    )


def test_more_in_a_group_is_less_memory_and_more_loss() -> None:
    small, large = by_parity(64, 4, 2, [1, 2]), by_parity(64, 16, 2, [1, 2])
    assert large.memory < small.memory < by_copies(64, 2, 2, [1]).memory
    assert small.loss[0] == large.loss[0] == 0
    assert small.loss[1] < large.loss[1]
