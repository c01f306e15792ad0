"""Whether ranks that should be replicas hold the same tensors when set-up ends, and if not, which
and where.

Theory of operation. Every rank's `Protected` carries one digest over names, shapes and dtypes (the
manifest) and one per tensor that must be equal on the replicas of its shard. Those that disagree
are grouped by what they hold, the largest group first, so that the odd rank out stands last.

What it doesn't know: the tensors themselves, and who is right. A majority is named, never obeyed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from everstep.core.events import Protected
from everstep.core.words import name_ranks, verb

_SHOWN_TENSORS = 3
_SHOWN_DIGEST = 8
_ADVICE = (
    "Replicas must start from the same values: seed every rank alike before the model is built, "
    "load the same weights on each, or wrap the model in DistributedDataParallel before protect."
)


def disagreement(protected: Mapping[int, Protected]) -> str | None:
    """What differs between ranks at set-up, for the person who wrote the script; None when all
    agree.

    `protected`: what each rank said, by rank. Pure.
    """
    return _different_layouts(protected) or _different_values(protected)


def shared(said: Protected, first_of: dict[str, Protected]) -> Protected:
    """`said`, with the digests of the first replica of its shard where they are equal: thousands of
    ranks then share one table. `first_of`: by shard, what its first replica said; kept up here."""
    first = first_of.setdefault(said.shard, said)
    same = said.digests is not first.digests and said.digests == first.digests
    return replace(said, digests=first.digests) if same else said


def joiner_disagreement(joiner: Protected, peers: Mapping[int, Protected]) -> str | None:
    """What differs between a joiner's set-up and its job's; None when it fits.

    `peers`: what each rank said in the job's set-up. Values are not compared, and a joiner need not
    send digests: it takes its values from its peers. Pure.
    """
    who = f"rank {joiner.rank}'s replacement (incarnation {joiner.incarnation})"
    reference = peers.get(joiner.rank)  # what its predecessor said
    if reference is None or reference.shard != joiner.shard:
        found = next((peer for peer in peers.values() if peer.shard == joiner.shard), None)
        if found is not None and reference is not None:
            return (
                f"{who} built shard {joiner.shard!r}, and the rank's part of the state is "
                f"{reference.shard!r}. The script must build the same state each time it starts; "
                "look for what depends on the order in which processes come up."
            )
        reference = found
    if reference is None:
        known = ", ".join(repr(shard) for shard in sorted({p.shard for p in peers.values()}))
        return (
            f"{who} built shard {joiner.shard!r}, which is no part of this job (it has {known}). "
            "The script must build the same state each time it starts."
        )
    if joiner.manifest == reference.manifest:
        return None
    difference = "a name, a shape or a dtype is another"
    if joiner.digests:  # which names it has is known from them alone
        difference = _layout_difference(joiner, reference)
    return (
        f"{who} built other state than the job holds: {difference}. "
        "The script must build the same model and optimizer each time it starts; look for what "
        "depends on time, chance, or files that the run has changed."
    )


def groups_of_all(held: Mapping[int, Sequence[tuple[str, int]]]) -> tuple[str, ...]:
    """The names of the communicators that all their ranks hold; one that was destroyed on some, or
    made after set-up where a replacement has not come yet, can't be built. In a fixed order.

    `held`: by rank, its communicators as (name, how many ranks it has); a name belongs to one set
    of ranks. Pure."""
    count: dict[tuple[str, int], int] = {}
    for groups in held.values():
        for group in groups:
            count[group] = count.get(group, 0) + 1
    return tuple(name for (name, size), ranks in count.items() if ranks == size)


def _different_layouts(protected: Mapping[int, Protected]) -> str | None:
    shards: dict[str, dict[str, list[int]]] = {}
    for rank, said in sorted(protected.items()):
        shards.setdefault(said.shard, {}).setdefault(said.manifest, []).append(rank)
    groups = next((by_manifest for by_manifest in shards.values() if len(by_manifest) > 1), None)
    if groups is None:
        return None
    most, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    odd = others[0]
    return (
        f"ranks protect different state: {verb(odd, 'differs', 'differ')} from {name_ranks(most)}: "
        f"{_layout_difference(protected[odd[0]], protected[most[0]])}. "
        "Build the same model and optimizer on every rank, or say by protect(replicas=...) which "
        "ranks hold the same."
    )


def _layout_difference(one: Protected, other: Protected) -> str:
    missing = sorted(other.digests.keys() - one.digests.keys())
    extra = sorted(one.digests.keys() - other.digests.keys())
    said = []
    if missing:
        said.append(f"{_name_some(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    if extra:
        said.append(f"{_name_some(extra)} {'is' if len(extra) == 1 else 'are'} there in addition")
    return " and ".join(said) or "the names are the same, but a shape or a dtype is not"


def _different_values(protected: Mapping[int, Protected]) -> str | None:
    shards: dict[str, list[int]] = {}
    for rank, said in sorted(protected.items()):
        shards.setdefault(said.shard, []).append(rank)
    differing: dict[str, list[int]] = {}
    for ranks in shards.values():
        if len({id(protected[rank].digests) for rank in ranks}) == 1:
            continue  # one table, shared by all
        for name in sorted(set().union(*(protected[rank].digests for rank in ranks))):
            if len({protected[rank].digests.get(name) for rank in ranks}) > 1:
                differing.setdefault(name, ranks)
    if not differing:
        return None
    name, ranks = next(iter(differing.items()))
    others = [other for other in differing if other != name]
    more = f" (so {'does' if len(others) == 1 else 'do'} {_name_some(others)})" if others else ""
    return f"parameter {name} differs: {_who_holds_what(name, ranks, protected)}{more}. {_ADVICE}"


def _who_holds_what(name: str, ranks: list[int], protected: Mapping[int, Protected]) -> str:
    groups: dict[str | None, list[int]] = {}
    for rank in ranks:
        groups.setdefault(protected[rank].digests.get(name), []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    return ", ".join(
        f"{verb(holders, 'holds', 'hold')} {digest[:_SHOWN_DIGEST] if digest else 'none'}"
        for digest, holders in ordered
    )


def _name_some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN_TENSORS])
    rest = len(names) - _SHOWN_TENSORS
    return f"{shown} and {rest} more" if rest > 0 else shown
