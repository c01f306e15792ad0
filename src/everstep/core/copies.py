"""Where there are copies of ranks' states in memory, and which ranks need them.

Theory of operation. A rank's shard is safe by itself when another place holds it too: another
rank, or, on several nodes, a rank on another node. The others have their state copied in each step;
of each such rank and step it is known on which nodes the copies lie. A node that is lost takes its
copies with it. A shard can be restored at a step when each of its ranks has a copy of it.

A node's memory outlives its processes, so another agent may come back with what a lost node had.
Such a copy counts again if it is one of which the table was told, and which still counts: its stamp
says so. What was done again since has another one, or none yet; of what nobody has told a stamp,
nothing is believed.

Agents give up old copies by themselves: those before the newest step, of those that somebody has
committed, of which all copies were once where they belong. (A rank that begins another copy has
passed a fence by which it knew that.) So these count for nothing here either, whatever was lost
since.

What it doesn't know: how copies are made and moved, and what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from everstep.types import HeldCopy, Stamp

_NEEDED = 2  # steps of which copies stay when the ranks regroup: room is left for one more
_MOST_UNSETTLED = 8  # steps that are known where nobody knows who keeps what


def need_copies(shards: Mapping[int, str], place_of: Callable[[int], int]) -> frozenset[int]:
    """The ranks whose shard lies in one place only. `shards`: by rank, its shard's key. `place_of`:
    the place of a rank: what is lost together. Pure."""
    places: dict[str, set[int]] = {}
    for rank, shard in shards.items():
        places.setdefault(shard, set()).add(place_of(rank))
    return frozenset(rank for rank, shard in shards.items() if len(places[shard]) < 2)


@dataclass(slots=True)
class _Step:
    """The copies of one step. `nodes`: by rank, where they lie. `settled`: the ranks whose copies
    have been where they belong, or can't come there. `stamps`: by rank, of its copies. `lost`: by
    rank, on which nodes others lay that are gone, and on which hosts these were."""

    nodes: dict[int, set[int]] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    stamps: dict[int, Stamp | None] = field(default_factory=dict)
    lost: dict[int, dict[int, str]] = field(default_factory=dict)


class CopyTable:
    """The copies that are known. Pure state; not thread-safe."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._copied: frozenset[int] | None = None  # the ranks that make copies; None: not known
        self._keepers: Mapping[int, int] = {}
        self._strays: list[tuple[int, int]] = []
        self.needed: tuple[int, ...] = ()
        """The steps of which copies were left when the ranks regrouped, the oldest first."""
        self.version = 0
        """Another number whenever it has changed."""

    # ------------------------------------------------------------ what is told

    def kept(self, rank: int, step: int, node: int, stamp: Stamp | None = None) -> None:
        """Node `node` keeps a copy of `rank` at `step`. `stamp`: by which it is known again, if
        ever."""
        known = self._steps.setdefault(step, _Step())
        before = known.stamps.get(rank)
        if before is not None and stamp is not None and stamp.generation < before.generation:
            return  # it was made again since
        if before != stamp:  # they were others
            known.lost.pop(rank, None)
            known.nodes.pop(rank, None)
        known.stamps[rank] = stamp
        known.nodes.setdefault(rank, set()).add(node)
        if self._keepers.get(rank, node) == node:
            known.settled.add(rank)
        self.version += 1

    def waive(self, rank: int, step: int) -> None:
        """The keeper of `rank` can't have its copy of `step`: the rank's own is all there will
        be."""
        self._steps.setdefault(step, _Step()).settled.add(rank)

    def spoiled(self, rank: int, step: int, node: int) -> None:
        """There is no copy of `rank` at `step` on `node`, or it is not what was written."""
        known = self._steps.get(step)
        if known is not None:
            _take_from(known, rank, node)
            self.version += 1

    def lose(self, node: int, host: str | None = None) -> None:
        """Node `node` is gone. `host`: in whose memory its copies may still be; None: they are
        not."""
        for known in self._steps.values():
            for rank in [rank for rank, nodes in known.nodes.items() if node in nodes]:
                _take_from(known, rank, node)
                if host is not None and known.stamps.get(rank) is not None:
                    known.lost.setdefault(rank, {})[node] = host
        self._strays = [stray for stray in self._strays if stray[1] != node]
        self.version += 1

    def regain(self, node: int, host: str, found: Iterable[HeldCopy]) -> tuple[HeldCopy, ...]:
        """Node `node` has found copies in the memory of `host`. Returns those that count again."""
        taken = []
        for copy in found:
            known = self._steps.get(copy.step)
            if known is None or known.stamps.get(copy.rank) != copy.stamp:
                continue
            taken.append(copy)
            known.nodes.setdefault(copy.rank, set()).add(node)
            lost = known.lost.get(copy.rank, {})
            before = next((other for other, where in lost.items() if where == host), None)
            if before is not None:
                del lost[before]
            self.version += 1
        return tuple(taken)

    def settle(self, committed: int) -> list[tuple[int, int]]:
        """Forget what agents have given up, now that somebody has committed step `committed`.
        Returns the copies that nobody will give up by himself and that have become useless: (rank,
        node), each once. O(1) where nothing has changed."""
        if self._copied is None:
            self._bound()
            return []
        whole = [
            step
            for step, known in self._steps.items()
            if step <= committed and len(known.settled) >= len(self._copied)
        ]
        newest = max(whole, default=-1)
        if newest <= min(self._steps, default=newest):
            return []
        self._steps = {step: known for step, known in self._steps.items() if step >= newest}
        self.version += 1
        strays: list[tuple[int, int]] = []
        if newest > max(self.needed, default=-1):
            strays, self._strays = self._strays, []
        return strays

    def regroup(self, step: int) -> None:
        """All go on from `step`: what is newer is of attempts that are done again, and of what is
        older no more is needed than the newest that all ranks have. O(ranks), where there are
        copies."""
        ranks = self._copied or frozenset(
            rank for known in self._steps.values() for rank in known.nodes
        )
        whole = [
            older
            for older, known in self._steps.items()
            if older <= step and ranks and ranks <= known.nodes.keys()
        ]
        self.needed = tuple(sorted(whole)[-_NEEDED:])
        self._steps = {s: known for s, known in self._steps.items() if s in self.needed}
        self.version += 1

    def assign(
        self, copied: frozenset[int], keepers: Mapping[int, int], homes: Mapping[int, int]
    ) -> None:
        """From now on `copied` make copies, and `keepers` has, by rank, which node keeps them
        beside its own, in `homes`. Those that are elsewhere stay until there are newer ones."""
        self._copied, self._keepers = copied, keepers
        found = {
            (rank, node)
            for known in self._steps.values()
            for rank, nodes in known.nodes.items()
            for node in nodes
            if node not in (homes.get(rank), keepers.get(rank))
        }
        self._strays = sorted(found)

    # ------------------------------------------------------------ what is asked

    def steps(self, rank: int) -> Collection[int]:
        """The steps of which there is a copy of `rank`."""
        return sorted(step for step, known in self._steps.items() if rank in known.nodes)

    def nodes(self, rank: int, step: int) -> Collection[int]:
        """The nodes that have a copy of `rank` at `step`."""
        known = self._steps.get(step)
        return [] if known is None else sorted(known.nodes.get(rank, ()))

    @property
    def holders(self) -> set[int]:
        """The nodes that have copies."""
        kept = (nodes for known in self._steps.values() for nodes in known.nodes.values())
        return {node for nodes in kept for node in nodes}

    def lost_on(self, rank: int, step: int) -> Collection[str]:
        """The hosts of lost nodes that had a copy of `rank` at `step`, where no other is left."""
        known = self._steps.get(step, _Step())
        return [] if rank in known.nodes else sorted(set(known.lost.get(rank, {}).values()))

    def by_shard(
        self, shards: Mapping[int, str], without: Collection[int] = (), *, lost: bool = False
    ) -> dict[str, set[int]]:
        """By shard, the steps of which all its ranks have copies; shards without any are left out.
        `shards`: by rank, its shard's key. `without`: nodes whose copies don't count. `lost`: also
        copies count that a node may come back with. O(ranks), where there are copies."""
        found: dict[str, set[int]] = {}
        gone = set(without)
        for step, known in self._steps.items():
            there = {rank for rank, nodes in known.nodes.items() if not nodes <= gone}
            there |= {rank for rank, hosts in known.lost.items() if lost and hosts}
            lacking = {shard for rank, shard in shards.items() if rank not in there}
            for shard in set(shards.values()) - lacking:
                found.setdefault(shard, set()).add(step)
        return found

    def _bound(self) -> None:
        for step in sorted(self._steps)[:-_MOST_UNSETTLED]:
            del self._steps[step]


def _take_from(known: _Step, rank: int, node: int) -> None:
    nodes = known.nodes.get(rank, set())
    nodes.discard(node)
    if not nodes:
        known.nodes.pop(rank, None)
