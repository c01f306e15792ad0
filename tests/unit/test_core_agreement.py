"""What is said when ranks that should be replicas are not."""

from __future__ import annotations

from everstep.core.agreement import disagreement, joiner_disagreement, shared
from everstep.core.events import Protected


def said(rank: int, *, shard: str = "all", manifest: str = "m", **digests: str) -> Protected:
    return Protected(rank=rank, incarnation=1, shard=shard, manifest=manifest, digests=digests)


def about(*each: Protected) -> str | None:
    return disagreement({protected.rank: protected for protected in each})


def test_replicas_that_agree() -> None:
    assert about(said(0, w="1"), said(1, w="1")) is None
    assert about(said(0)) is None


def test_ranks_of_other_shards_need_not_agree() -> None:
    assert about(said(0, shard="a", w="1"), said(1, shard="b", w="2")) is None


def test_the_odd_rank_out_stands_last_and_more_tensors_are_counted() -> None:
    text = about(
        said(0, a="1", b="1", c="7", d="1", e="1"),
        said(1, a="2", b="2", c="7", d="2", e="2"),
        said(2, a="1", b="1", c="7", d="1", e="1"),
    )
    assert text is not None
    assert text.startswith(
        "parameter a differs: ranks 0, 2 hold 1, rank 1 holds 2 (so do b, d, e)."
    )
    assert "seed every rank alike" in text


def test_one_other_tensor() -> None:
    text = about(said(0, a="1", b="1"), said(1, a="2", b="2"))
    assert text is not None
    assert "rank 0 holds 1, rank 1 holds 2 (so does b)." in text


def test_many_other_tensors_are_counted() -> None:
    names = [f"w{number}" for number in range(10)]
    text = about(said(0, **dict.fromkeys(names, "1")), said(1, **dict.fromkeys(names, "2")))
    assert text is not None
    assert "(so do w1, w2, w3 and 6 more)" in text


def test_another_layout_is_told_by_name() -> None:
    text = about(said(0, a="1"), said(1, manifest="n", a="1", b="1"), said(2, a="1"))
    assert text is not None
    assert text.startswith(
        "ranks protect different state: rank 1 differs from ranks 0, 2: b is there in addition."
    )
    text = about(said(0, a="1", b="2"), said(1, manifest="n", c="1"))
    assert text is not None
    assert "rank 1 differs from rank 0: a, b are missing and c is there in addition" in text


def test_another_shape_has_no_name_but_is_told() -> None:
    text = about(said(0, a="1"), said(1, manifest="n", a="1"))
    assert text is not None
    assert "the names are the same, but a shape or a dtype is not" in text


def test_a_joiners_values_are_not_compared() -> None:
    assert joiner_disagreement(said(1, a="9"), {0: said(0, a="1")}) is None


def test_a_joiner_of_an_unknown_shard() -> None:
    text = joiner_disagreement(said(1, shard="x"), {0: said(0, shard="a"), 2: said(2, shard="b")})
    assert text is not None
    assert "built shard 'x', which is no part of this job (it has 'a', 'b')" in text


def test_a_joiners_layout_must_be_the_jobs() -> None:
    text = joiner_disagreement(said(1, manifest="n", a="1"), {0: said(0, a="1", b="1")})
    assert text is not None
    assert "rank 1's replacement (incarnation 1) built other state" in text
    assert "b is missing" in text


def test_a_joiner_that_sends_no_digests_is_not_said_to_lack_all_tensors() -> None:
    text = joiner_disagreement(said(1, manifest="n"), {0: said(0, a="1", b="1")})
    assert text is not None
    assert "other state than the job holds: a name, a shape or a dtype is another." in text
    assert "missing" not in text


def test_a_joiner_that_built_another_ranks_shard_is_refused() -> None:
    peers = {0: said(0, shard="a"), 1: said(1, shard="b")}
    assert joiner_disagreement(said(1, shard="b"), peers) is None
    text = joiner_disagreement(said(1, shard="a"), peers)
    assert text is not None
    assert "built shard 'a', and the rank's part of the state is 'b'" in text


def test_equal_replicas_share_one_table_of_digests() -> None:
    first_of: dict[str, Protected] = {}
    one, other, odd = (
        shared(said(rank, a=value), first_of) for rank, value in ((0, "1"), (1, "1"), (2, "2"))
    )
    assert one.digests is other.digests
    assert odd.digests == {"a": "2"}
    assert first_of == {one.shard: one}
    assert disagreement({0: one, 1: other}) is None
    assert disagreement({0: one, 1: other, 2: odd}) is not None
