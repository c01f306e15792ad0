"""What ranks agree on in the second step, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.core.agreement import groups_of_all
from everstep.errors import UserError
from everstep.worker.communicators import Communicators
from everstep.worker.fence import _check_replicas
from everstep.worker.forecast import pattern_of
from everstep.worker.groups import OuterGroup
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


def test_groups_of_one_name_in_c10d_are_told_apart_by_their_ranks() -> None:
    """Each half of a split world is split again: c10d numbers the parts alike in both."""
    held: dict[int, list[tuple[str, int]]] = {}
    for rank in range(4):
        communicators = Communicators(_no_inner, _no_fault, generation=0, solo=True)
        half = (0, 1) if rank < 2 else (2, 3)
        for ranks in ((0, 1, 2, 3), half, (rank,), half):
            OuterGroup(communicators, ranks.index(rank), len(ranks), str(len(ranks)), ranks)
        if rank == 3:
            communicators.forget(communicators.groups[1])
        held[rank] = list(communicators.held())
    halves = ["of ranks 0, 1", "of ranks 0, 1 (2)", "of ranks 2, 3 (2)"]
    alone = [f"of rank {rank}" for rank in range(4)]
    assert sorted(groups_of_all(held)) == sorted(["of ranks 0-3", *halves, *alone])


def _no_inner(_group: OuterGroup, _generation: int) -> Any:
    raise AssertionError("solo groups have no inner ones")


def _no_fault(_generation: int, error: BaseException) -> None:
    raise error
