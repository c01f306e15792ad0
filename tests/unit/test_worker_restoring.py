"""Which of a checkpoint's ranks a rank takes after, where there are more of them now, or fewer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from everstep.errors import UserError
from everstep.worker import restoring
from everstep.worker.contents import RankOnly


def only(rank: int, streams: bytes | None = None) -> RankOnly:
    return RankOnly(
        rng_key=bytes([rank]) * 48,
        values=b"",
        local={"mine": bytes([rank])},
        streams=streams,
        buffers={"mean": bytes([rank])},
        log={5: {"loss": float(rank)}},
    )


def taken(rank: int, world: int, *, before: int, carry: bool = False) -> tuple[RankOnly, list[str]]:
    """What a rank of `world` takes after `before` ranks, and what is said."""
    said: list[str] = []
    worker: Any = SimpleNamespace(
        spec=SimpleNamespace(rank=rank, world_size=world),
        carry=carry,
        note=lambda _, text: said.append(text),
    )
    own = {
        "world": before,
        "step": 5,
        "carried": carry,
        "position": 40,
        "rank": {
            str(r): msgspec.msgpack.encode(only(r, b"s" if carry else None)) for r in range(before)
        },
    }
    return restoring._of_rank(worker, own), said


def test_as_many_ranks_take_what_was_theirs() -> None:
    assert taken(1, 2, before=2) == (only(1), [])
    assert taken(1, 2, before=2, carry=True)[0] == only(1, b"s")


def test_of_more_ranks_each_has_a_key_of_its_own() -> None:
    found = [taken(rank, 5, before=2)[0] for rank in range(5)]
    assert found[:2] == [only(0), only(1)]
    assert [each.buffers["mean"][0] for each in found] == [0, 1, 0, 1, 0]
    assert [each.local for each in found[2:]] == [{}] * 3
    assert [each.log for each in found[2:]] == [{}] * 3
    assert len({each.rng_key for each in found}) == 5
    assert {len(each.rng_key) for each in found} == {48}
    assert found == [taken(rank, 5, before=2)[0] for rank in range(5)]


@pytest.mark.parametrize(
    ("world", "what"), [(1, "those of ranks 1, 2 are gone"), (4, "rank 3 begins with those")]
)
def test_it_is_said_what_others_have_lost(world: int, what: str) -> None:
    (said,) = taken(0, world, before=3)[1]
    assert f"made by 3 ranks, and {world} go on" in said
    assert what in said
    assert "where the data goes on" not in said
    assert taken(1, 4, before=3)[1] == []


def test_carried_streams_are_not_shared_out() -> None:
    with pytest.raises(UserError, match="can't go on with its random streams"):
        taken(0, 3, before=2, carry=True)
