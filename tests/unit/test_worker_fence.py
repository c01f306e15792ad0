"""What ranks agree on in the second step, and what they refuse."""

from __future__ import annotations

import pytest

from everstep.core.agreement import groups_of_all
from everstep.errors import UserError
from everstep.worker.fence import _check_replicas
from everstep.worker.forecast import pattern_of
from everstep.worker.shards import WHOLE

ALIKE = [[0, 7, 1, 1], [0, 7, 1, 1], [0, 8, 2, 1], [0, 8, 2, 1]]


def changed(rank: int, column: int) -> list[list[int]]:
    rows = [list(row) for row in ALIKE]
    rows[rank][column] = 99
    return rows


def test_replicas_that_are_equal_pass() -> None:
    for rank in range(4):
        _check_replicas(ALIKE, rank, WHOLE)


@pytest.mark.parametrize(
    ("column", "words"),
    [(2, "the tensors of rank 0 and of rank 1"), (3, "values of rank 0 and of rank 1")],
)
def test_replicas_that_have_parted_are_refused_on_both(column: int, words: str) -> None:
    rows = changed(1, column)
    with pytest.raises(UserError, match=words):
        _check_replicas(rows, 0, "shard 0 (ab)")
    with pytest.raises(UserError, match="of rank 1 and of rank 0"):
        _check_replicas(rows, 1, "shard 0 (ab)")
    _check_replicas(rows, 2, "shard 1 (cd)")  # another shard's ranks have nothing to do with it


def test_a_broadcast_does_not_change_the_pattern() -> None:
    steady = [("allreduce", 10), ("allreduce", 4)]
    assert pattern_of([("broadcast", 17), ("broadcast", 1), *steady]) == pattern_of(steady)
    assert pattern_of(reversed(steady)) != pattern_of(steady)
    assert pattern_of([("allreduce", 14)]) != pattern_of(steady)


def test_groups_that_all_their_ranks_hold() -> None:
    world, pair = ("0", 3), ("1", 2)
    assert groups_of_all({0: (world, pair), 1: (world, pair), 2: (world,)}) == ("0", "1")
    assert groups_of_all({0: (world, pair), 1: (world,), 2: (world,)}) == ("0",)
    assert groups_of_all({}) == ()
