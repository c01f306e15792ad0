"""The restore planner: given what every rank holds, decide at which step all of them go on, and how
each gets there.

Theory of operation. The state is cut into shards; ranks with the same shard key are replicas. A
rank *reaches* step s when its state is whole and it has committed s (it keeps), or has committed
s-1 and stands in the fence with its reduced gradients (it advances). Step s is possible when every
shard has a rank that reaches it. The newest possible step wins. A step that no rank has committed
is never taken, though all could advance to it: redoing it costs the same and needs nobody to have
been right about the fence. Everybody else fetches, from all replicas that keep (they are ready
first), or from those that advance when none keeps.

Step 0 is special: nothing is fetched for it, since the script's own set-up makes it. A plan with
step 0 is an order to start every rank again from its script, and all its parts are KEEP.

What it doesn't know: why a rank failed, who is a joiner, what older copies exist (this planner sees
processes only), and whether a source's bytes are right (receipts find that out).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.core.words import name_ranks, verb
from everstep.types import Decision, Holding, Plan, RankPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """No step can be reached by all shards. `shards`: the keys that stand in the way. `reason`:
    why, in words."""

    shards: tuple[str, ...]
    reason: str


def plan(holdings: Sequence[Holding], seen: int = 0) -> Plan | Lost:
    """Decide the step and every rank's part in reaching it.

    `holdings[r]` is what logical rank r holds; a rank that has nothing holds `torn=True,
    committed=0`. At least one. `seen`: the newest step that any process has ever committed, also
    one that is dead; ranks advance to it if they can. Pure, does not block. Raises ValueError
    without holdings.
    """
    if not holdings:
        raise ValueError("a plan needs the holding of at least one rank")
    shards = sorted({holding.shard for holding in holdings})
    candidates = sorted({holding.committed for holding in holdings} | {seen}, reverse=True)
    for step in candidates:
        ways = [_way(holding, step) for holding in holdings]
        reached = {
            holding.shard
            for holding, way in zip(holdings, ways, strict=True)
            if way is not Decision.FETCH
        }
        if step == 0 and (len(reached) == len(shards) or candidates[0] == 0):
            return _start_again(len(holdings))
        if step > 0 and len(reached) == len(shards):
            return _plan_for(step, holdings, ways)
    return _lost(holdings, shards)


def _way(holding: Holding, step: int) -> Decision:
    """How a rank with `holding` comes to `step`."""
    if not holding.torn and holding.committed == step:
        return Decision.KEEP
    if not holding.torn and holding.can_advance and holding.committed == step - 1:
        return Decision.ADVANCE
    return Decision.FETCH


def _start_again(world_size: int) -> Plan:
    parts = (RankPlan(decision=Decision.KEEP),) * world_size
    everybody = verb(range(world_size), "starts", "start")
    return Plan(
        step=0,
        ranks=parts,
        reason=f"nothing is committed yet: {everybody} again from the script",
    )


def _plan_for(step: int, holdings: Sequence[Holding], ways: Sequence[Decision]) -> Plan:
    """Pair those that fetch with all their sources. Every shard has a rank that reaches `step`."""
    keepers: dict[str, list[int]] = {}
    advancers: dict[str, list[int]] = {}
    for rank, (holding, way) in enumerate(zip(holdings, ways, strict=True)):
        if way is not Decision.FETCH:
            group = keepers if way is Decision.KEEP else advancers
            group.setdefault(holding.shard, []).append(rank)
    sources: list[tuple[int, ...]] = []
    sinks: list[list[int]] = [[] for _ in holdings]
    for rank, (holding, way) in enumerate(zip(holdings, ways, strict=True)):
        fetches = way is Decision.FETCH
        found = (keepers.get(holding.shard) or advancers[holding.shard]) if fetches else []
        sources.append(tuple(found))
        for source in found:
            sinks[source].append(rank)
    parts = tuple(
        RankPlan(decision=way, sources=from_, sinks=tuple(to))
        for way, from_, to in zip(ways, sources, sinks, strict=True)
    )
    return Plan(step=step, ranks=parts, reason=_reason(step, parts))


def _reason(step: int, parts: Sequence[RankPlan]) -> str:
    """The plan in words, what is unusual first."""
    fetching: dict[tuple[int, ...], list[int]] = {}
    for rank, part in enumerate(parts):
        if part.decision is Decision.FETCH:
            fetching.setdefault(part.sources, []).append(rank)
    said = [
        f"{verb(ranks, 'takes', 'take')} step {step} from {name_ranks(sources)}"
        for sources, ranks in fetching.items()
    ]
    advancing = [rank for rank, part in enumerate(parts) if part.decision is Decision.ADVANCE]
    if advancing:
        own = "its own gradients" if len(advancing) == 1 else "their own gradients"
        said.append(f"{verb(advancing, 'makes', 'make')} step {step} from {own}")
    if not said:
        own = "its own memory" if len(parts) == 1 else "their own memory"
        said.append(f"{verb(range(len(parts)), 'redoes', 'redo')} step {step + 1} from {own}")
    return "; ".join(said)


def _lost(holdings: Sequence[Holding], shards: Sequence[str]) -> Lost:
    """Name the shards for which no step, or no common step, is left."""
    steps = {shard: _steps(holdings, shard) for shard in shards}
    gone = tuple(shard for shard in shards if not steps[shard])
    if gone:
        said = "; ".join(f"shard {shard!r} {_whereabouts(holdings, shard)}" for shard in gone)
        return Lost(shards=gone, reason=f"no whole copy is left: {said}")
    every = sorted(set().union(*steps.values()), reverse=True)
    best = min(every, key=lambda step: sum(step not in held for held in steps.values()))
    missing = tuple(shard for shard in shards if best not in steps[shard])
    return Lost(shards=missing, reason=f"no step is held by every shard: {_spread(steps)}")


def _steps(holdings: Sequence[Holding], shard: str) -> set[int]:
    """The steps that a rank of `shard` reaches, if the step was committed by anybody."""
    committed = {holding.committed for holding in holdings}
    return {
        step
        for holding in holdings
        if holding.shard == shard
        for step in (holding.committed, holding.committed + 1)
        if step in committed and _way(holding, step) is not Decision.FETCH
    }


def _whereabouts(holdings: Sequence[Holding], shard: str) -> str:
    torn = [
        rank
        for rank, holding in enumerate(holdings)
        if holding.shard == shard and holding.committed > 0
    ]
    if torn:
        return f"is torn on {name_ranks(torn)}, and nobody else holds it"
    ranks = [rank for rank, holding in enumerate(holdings) if holding.shard == shard]
    return f"was held only by processes that are gone ({name_ranks(ranks)})"


def _spread(steps: Mapping[str, set[int]]) -> str:
    return "; ".join(
        f"shard {shard!r} is at step {', '.join(map(str, sorted(held)))}"
        for shard, held in sorted(steps.items())
    )
