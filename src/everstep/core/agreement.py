"""Whether ranks that should be replicas hold the same tensors when set-up ends, and if not, which
and where.

Theory of operation. Every rank's `Protected` carries one digest over names, shapes and dtypes (the
manifest) and one per tensor that must be equal on the replicas of its shard. Those that disagree
are grouped by what they hold, the largest group first, so that the odd rank out stands last.

What it doesn't know: the tensors themselves, and who is right. A majority is named, never obeyed.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def joiner_disagreement(joiner: Protected, peers: Mapping[int, Protected]) -> str | None:
    """What differs between a joiner's set-up and its job's; None when it fits.

    `peers`: what each rank said in the job's set-up. Values are not compared: the joiner takes them
    from its peers. Pure.
    """
    who = f"rank {joiner.rank}'s replacement (incarnation {joiner.incarnation})"
    reference = next((peer for peer in peers.values() if peer.shard == joiner.shard), None)
    if reference is None:
        known = ", ".join(repr(shard) for shard in sorted({p.shard for p in peers.values()}))
        return (
            f"{who} built shard {joiner.shard!r}, which is no part of this job (it has {known}). "
            "The script must build the same state each time it starts."
        )
    if joiner.manifest == reference.manifest:
        return None
    return (
        f"{who} built other state than the job holds: {_layout_difference(joiner, reference)}. "
        "The script must build the same model and optimizer each time it starts; look for what "
        "depends on time, chance, or files that the run has changed."
    )


def _different_layouts(protected: Mapping[int, Protected]) -> str | None:
    groups: dict[str, list[int]] = {}
    for rank, said in sorted(protected.items()):
        groups.setdefault(said.manifest, []).append(rank)
    if len(groups) <= 1:
        return None
    most, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    odd = others[0]
    return (
        f"ranks protect different state: {verb(odd, 'differs', 'differ')} from {name_ranks(most)}: "
        f"{_layout_difference(protected[odd[0]], protected[most[0]])}. "
        "Build the same model and optimizer on every rank."
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
