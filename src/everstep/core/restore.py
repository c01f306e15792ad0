"""The restore planner: given what every rank holds, decide where all of them go on, and how each
gets there.

Theory of operation. The state is cut into shards; ranks with the same shard key are replicas. A
*position* is (steps committed, sections done after the last of them). A rank *reaches* a position
when its state is whole and it stands there (it keeps), or when it stands in the fence of the step
or section that leads there with all that this needs (it advances). A position is possible when
every shard has a rank that reaches it. The newest possible one wins. One that no rank has committed
is never taken, though all could advance to it: redoing it costs the same and needs nobody to have
been right about the fence. Everybody else fetches, from all replicas that keep (they are ready
first), or from those that advance when none keeps; where there are more than `most_sources`, from
some of them, spread evenly, each rank from others.

Which position wins depends on which different holdings there are, not on how many ranks have them:
`choose` costs by shards, and so can be asked whenever something has changed; `plan` costs by ranks.

Step 0 is special: nothing is fetched for it, since the script's own set-up makes it. A plan with
step 0 is an order to start every rank again from its script, and all its parts are KEEP.

What it doesn't know: why a rank failed, who is a joiner, where a copy lies, and whether a source's
bytes are right (receipts find that out).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.core.words import name_ranks, verb
from everstep.types import Decision, Holding, Plan, Position, RankPlan

MOST_SOURCES = 64
"""From how many replicas a rank fetches at most. With so many its own link is the bottleneck, and
each source costs a connection."""

_SHOWN = 3  # shards that a sentence names before it counts the rest
_OWN_COPY = ("its copy in memory", "their copies in memory")
_NO_COPIES: Mapping[str, Collection[int]] = {}
_KEEP = RankPlan(decision=Decision.KEEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """No position can be reached by all shards. `shards`: the keys that stand in the way. `reason`:
    why, in words."""

    shards: tuple[str, ...]
    reason: str


def choose(
    held: Collection[Holding],
    shards: Collection[str],
    seen: Position = (0, 0),
    copied: Mapping[str, Collection[int]] = _NO_COPIES,
    base: int = 0,
) -> Position | None:
    """The newest position for which every one of `shards` has a holding that reaches it; (`base`,
    0) when all must start again from where they began: from the script, or at the checkpoint of
    step `base`; None when there is no such position.

    `held`: what the ranks hold, each different holding at least once; ranks that hold nothing may
    be left out. `seen`: the newest position that any process has ever committed, also one that is
    dead. `copied`: by shard, the steps of which all its ranks have copies in memory; sections do
    not change what is copied. Pure. Costs by holdings and positions, not by ranks.
    """
    candidates = sorted(_committed(held, seen, copied), reverse=True)
    if candidates[0][0] <= base:
        return base, 0
    for position in candidates:
        if not lacking(held, shards, position, copied):
            return position if position[0] > base else (base, 0)
    return None


def lacking(
    held: Collection[Holding],
    shards: Collection[str],
    position: Position,
    copied: Mapping[str, Collection[int]],
) -> set[str]:
    """Those of `shards` that nobody reaches `position` with. The arguments are as `choose` has
    them. Pure."""
    reached = {h.shard for h in held if _way(h, position) is not Decision.FETCH}
    reached |= {shard for shard, steps in copied.items() if position[0] in steps}
    return set(shards) - reached


def plan(
    holdings: Sequence[Holding],
    seen: Position = (0, 0),
    copied: Mapping[str, Collection[int]] = _NO_COPIES,
    *,
    most_sources: int = MOST_SOURCES,
) -> Plan | Lost:
    """Decide the position and every rank's part in reaching it.

    `holdings[r]` is what logical rank r holds; a rank that has nothing holds `torn=True,
    committed=0`. At least one. `seen`, `copied`: as in `choose`. `most_sources`: from how many
    replicas a rank fetches at most. Pure, does not block. Raises ValueError without holdings.
    """
    if not holdings:
        raise ValueError("a plan needs the holding of at least one rank")
    different = set(holdings)
    shards = sorted({holding.shard for holding in different})
    position = choose(different, shards, seen, copied)
    if position is None:
        return _lost(holdings, shards, seen, copied)
    if position[0] == 0:
        return _start_again(len(holdings))
    return _plan_for(position, holdings, most_sources)


def _committed(
    held: Collection[Holding], seen: Position, copied: Mapping[str, Collection[int]]
) -> set[Position]:
    """All positions that somebody is known to have committed: where ranks stand, and, before that,
    the steps of which there are copies."""
    found = {holding.position for holding in held} | {seen}
    newest = max(found)
    steps = {step for steps in copied.values() for step in steps}
    return found | {(step, 0) for step in steps if (step, 0) < newest}


def _way(holding: Holding, position: Position) -> Decision:
    """How a rank with `holding` comes to `position`."""
    if not holding.torn and holding.position == position:
        return Decision.KEEP
    if not holding.torn and holding.can_advance and holding.ahead == position:
        return Decision.ADVANCE
    return Decision.FETCH


def _start_again(world_size: int) -> Plan:
    everybody = verb(range(world_size), "starts", "start")
    return Plan(
        step=0,
        ranks=(_KEEP,) * world_size,
        reason=f"nothing is committed yet: {everybody} again from the script",
    )


def _plan_for(position: Position, holdings: Sequence[Holding], most_sources: int) -> Plan:
    """Pair those that fetch with their sources. Every shard has a rank that reaches `position`."""
    way_of = {holding: _way(holding, position) for holding in set(holdings)}
    ways = [way_of[holding] for holding in holdings]
    keepers: dict[str, list[int]] = {}
    advancers: dict[str, list[int]] = {}
    for rank, (holding, way) in enumerate(zip(holdings, ways, strict=True)):
        if way is not Decision.FETCH:
            group = keepers if way is Decision.KEEP else advancers
            group.setdefault(holding.shard, []).append(rank)
    sources: dict[int, tuple[int, ...]] = {}
    sinks: dict[int, list[int]] = {}
    for rank, (holding, way) in enumerate(zip(holdings, ways, strict=True)):
        if way is Decision.FETCH:
            found = keepers.get(holding.shard) or advancers.get(holding.shard)
            if found is None:
                continue  # its own copy
            sources[rank] = _some(found, most_sources, turn=len(sources))
            for source in sources[rank]:
                sinks.setdefault(source, []).append(rank)
    parts = tuple(
        RankPlan(
            decision=way,
            sources=sources.get(rank, ()),
            sinks=tuple(sinks.get(rank, ())),
            copy=way is Decision.FETCH and rank not in sources,
        )
        if way is not Decision.KEEP or rank in sinks
        else _KEEP
        for rank, way in enumerate(ways)
    )
    step, sections = position
    return Plan(
        step=step, sections=sections, ranks=parts, reason=_reason(position, parts, holdings)
    )


def _some(ranks: Sequence[int], most: int, *, turn: int) -> tuple[int, ...]:
    """All of `ranks`, or `most` of them: spread evenly, and others in each `turn`."""
    if len(ranks) <= most:
        return tuple(ranks)
    chosen = {(turn + i * len(ranks) // most) % len(ranks) for i in range(most)}
    return tuple(ranks[i] for i in sorted(chosen))


def _reason(position: Position, parts: Sequence[RankPlan], holdings: Sequence[Holding]) -> str:
    """The plan in words, what is unusual first."""
    fetching: dict[tuple[int, ...], list[int]] = {}
    for rank, part in enumerate(parts):
        if part.decision is Decision.FETCH:
            fetching.setdefault(part.sources, []).append(rank)
    said = [
        f"{verb(ranks, 'takes', 'take')} {name_position(position)} from "
        f"{name_ranks(sources) if sources else _OWN_COPY[len(ranks) > 1]}"
        for sources, ranks in fetching.items()
    ]
    advancing = [rank for rank, part in enumerate(parts) if part.decision is Decision.ADVANCE]
    if advancing:
        own = "its own" if len(advancing) == 1 else "their own"
        what = "results" if position[1] else "gradients"
        said.append(
            f"{verb(advancing, 'makes', 'make')} {name_position(position)} from {own} {what}"
        )
    if not said:
        own = "its own memory" if len(parts) == 1 else "their own memory"
        in_section = any(h.in_section for h in holdings if h.position == position)
        again = Holding(committed=position[0], sections=position[1], in_section=in_section).ahead
        said.append(
            f"{verb(range(len(parts)), 'redoes', 'redo')} {name_position(again)} from {own}"
        )
    return "; ".join(said)


def name_position(position: Position) -> str:
    """A position in words: "step 5", "section 2 after step 5"."""
    step, sections = position
    return f"section {sections} after step {step}" if sections else f"step {step}"


def _lost(
    holdings: Sequence[Holding],
    shards: Sequence[str],
    seen: Position,
    copied: Mapping[str, Collection[int]],
) -> Lost:
    """Name the shards for which no position, or no common one, is left."""
    ranks: dict[str, list[int]] = {shard: [] for shard in shards}
    for rank, holding in enumerate(holdings):
        ranks[holding.shard].append(rank)
    reached = _reached(holdings, shards, seen, copied)
    gone = tuple(shard for shard in shards if not reached[shard])
    if gone:
        said = [
            f"shard {shard!r} {_whereabouts(ranks[shard], holdings)}" for shard in gone[:_SHOWN]
        ]
        return Lost(shards=gone, reason=f"no whole copy is left: {_listed(said, len(gone))}")
    held_by = Counter(position for held in reached.values() for position in held)
    best = max(held_by, key=lambda position: (held_by[position], position))
    missing = tuple(shard for shard in shards if best not in reached[shard])
    others = [shard for shard in shards if best in reached[shard]]
    named = [*missing[:_SHOWN], *others[:_SHOWN]]
    said = [
        f"shard {shard!r} is at {', '.join(map(name_position, sorted(reached[shard])))}"
        for shard in sorted(named)
    ]
    text = f"no step is held by every shard: {_listed(said, len(shards))}"
    return Lost(shards=missing, reason=text)


def _reached(
    holdings: Sequence[Holding],
    shards: Iterable[str],
    seen: Position,
    copied: Mapping[str, Collection[int]],
) -> dict[str, set[Position]]:
    """By shard, the positions that a rank of it, or its copies, reach, if they were committed by
    anybody."""
    committed = _committed(holdings, seen, copied)
    reached: dict[str, set[Position]] = {shard: set() for shard in shards}
    for holding in set(holdings):
        for position in (holding.position, holding.ahead):
            if position in committed and _way(holding, position) is not Decision.FETCH:
                reached[holding.shard].add(position)
    for shard, steps in copied.items():
        reached[shard] |= {position for position in committed if position[0] in steps}
    return reached


def _whereabouts(ranks: Sequence[int], holdings: Sequence[Holding]) -> str:
    torn = [rank for rank in ranks if holdings[rank].committed > 0]
    if torn:
        return f"is torn on {name_ranks(torn)}, and nobody else holds it"
    return f"was held only by processes that are gone ({name_ranks(ranks)})"


def _listed(said: Sequence[str], number: int) -> str:
    rest = number - len(said)
    return "; ".join([*said, f"and {rest} more"] if rest > 0 else said)
