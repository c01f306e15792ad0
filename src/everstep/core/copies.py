"""Where there are copies of ranks' states in memory, and which ranks need them.

Theory of operation. A rank's shard is safe by itself when another place holds it too: another
rank, or, on several nodes, a rank on another node. The others have their state copied in each step;
of each such rank the newest two steps are known, and on which nodes they lie. A node that is lost
takes its copies with it. A shard can be restored at a step when each of its ranks has a copy of it.

What it doesn't know: how copies are made and moved, and what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

_KEPT = 2  # steps: the one that all have committed, and the one that is about to be


def need_copies(shards: Mapping[int, str], place_of: Callable[[int], int]) -> frozenset[int]:
    """The ranks whose shard lies in one place only. `shards`: by rank, its shard's key. `place_of`:
    the place of a rank: what is lost together. Pure."""
    places: dict[str, set[int]] = {}
    for rank, shard in shards.items():
        places.setdefault(shard, set()).add(place_of(rank))
    return frozenset(rank for rank, shard in shards.items() if len(places[shard]) < 2)


class CopyTable:
    """The copies that are known. Pure state; not thread-safe."""

    def __init__(self) -> None:
        self._nodes: dict[int, dict[int, set[int]]] = {}  # by rank and step
        self.version = 0
        """Another number whenever it has changed."""

    def kept(self, rank: int, step: int, node: int) -> None:
        """Node `node` keeps a copy of `rank` at `step`."""
        steps = self._nodes.setdefault(rank, {})
        steps.setdefault(step, set()).add(node)
        for old in sorted(steps)[:-_KEPT]:
            del steps[old]
        self.version += 1

    def lose(self, node: int) -> None:
        """Node `node` is gone."""
        for steps in self._nodes.values():
            for step in [step for step, nodes in steps.items() if node in nodes]:
                steps[step].discard(node)
                if not steps[step]:
                    del steps[step]
        self.version += 1

    def cut(self, step: int) -> None:
        """All go on from `step`: what is newer is of attempts that are done again."""
        for steps in self._nodes.values():
            for newer in [known for known in steps if known > step]:
                del steps[newer]
        self.version += 1

    def steps(self, rank: int) -> Collection[int]:
        """The steps of which there is a copy of `rank`."""
        return self._nodes.get(rank, {}).keys()

    def nodes(self, rank: int, step: int) -> Collection[int]:
        """The nodes that have a copy of `rank` at `step`."""
        return sorted(self._nodes.get(rank, {}).get(step, ()))

    def by_shard(self, shards: Mapping[int, str]) -> dict[str, set[int]]:
        """By shard, the steps of which all its ranks have copies; shards without any are left out.
        `shards`: by rank, its shard's key. O(ranks), where there are copies."""
        found: dict[str, set[int]] = {}
        if not self._nodes:
            return found
        for rank, shard in shards.items():
            steps = set(self.steps(rank))
            found[shard] = found[shard] & steps if shard in found else steps
        return {shard: steps for shard, steps in found.items() if steps}
