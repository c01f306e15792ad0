"""Which ranks are replicas, worked out from wrappers and meshes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from everstep.errors import UserError
from everstep.worker.shards import WHOLE, shard_key

SCRIPT = Path(__file__).parents[1] / "scripts" / "shard_keys.py"
APART = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.fixture(scope="module")
def keys() -> dict[str, list[str]]:
    """For each case, the keys of eight ranks."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def groups(keys: list[str]) -> list[list[int]]:
    """The ranks that have a key together, by their first."""
    return [[r for r, k in enumerate(keys) if k == key] for key in dict.fromkeys(keys)]


@pytest.mark.parametrize(
    ("case", "replicas"),
    [
        ("full", [[rank] for rank in range(8)]),
        ("replicated", APART),
        ("three", APART),
        ("pairs", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("said-mesh", APART),
        ("said-group", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # Five rows over eight ranks: the last three hold nothing, which is alike.
        ("uneven", [[0], [1], [2], [3], [4], [5, 6, 7]]),
    ],
)
def test_who_holds_the_same(
    case: str, replicas: list[list[int]], keys: dict[str, list[str]]
) -> None:
    assert groups(keys[case]) == replicas


@pytest.mark.parametrize("case", ["plain", "ddp"])
def test_whole_models(case: str, keys: dict[str, list[str]]) -> None:
    assert set(keys[case]) == {WHOLE}


@pytest.mark.parametrize(
    ("case", "rank", "words"),
    [("full", 3, "shard 3"), ("three", 3, "tp 1"), ("pairs", 2, "of ranks 2, 3")],
)
def test_a_key_says_what_it_is(
    case: str, rank: int, words: str, keys: dict[str, list[str]]
) -> None:
    assert words in keys[case][rank]


def test_what_cannot_be() -> None:
    with pytest.raises(UserError, match=r"rank 1 is not among the ranks \[2, 3\]"):
        shard_key({"m": nn.Linear(2, 2)}, {}, [2, 3], rank=1, world_size=8)
    with pytest.raises(UserError, match="not a float"):
        shard_key({"m": nn.Linear(2, 2)}, {}, 1.5, rank=1, world_size=8)
