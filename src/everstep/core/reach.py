"""Who of the nodes reaches whom: what is tried, what is known of it, and whom it costs the least to
give up.

Theory of operation. Nodes are asked to try each other, and answer with those that they could not
reach. With up to 17 nodes all try all. With more, each tries the 16 that follow it in the row of
numbers, those that follow these the next time, and so on; and those whose ranks complained try, and
are tried by, some more. A pair is closed when one of it could not connect to the other and both
have answered: why a node is silent is not for others to say.

The nodes to give up are the fewest whose loss leaves no closed pair (a smallest vertex cover of the
graph of closed pairs); of several such sets the one with most closed pairs, and of those the one
that is worth least. The search branches on
a node with most pairs: it goes, or all do that it does not reach. Beyond `_EXACT` nodes those with
most pairs are taken, one after the other, which may be more than are needed.

Pure. It does not know how one tries, and what a node holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from everstep.core import actions as do

Pair = tuple[int, int]
"""Two nodes: who tries whom; or two that do not reach each other, the lower number first."""
MOST: Final = 16
"""Others that a node tries, where there are more; and as many for the sake of complaints."""
WITHIN_S: Final = 4.0
"""For the tries: TCP asks three times in it whether anybody is there."""
_ANSWER_S: Final = 2.0  # beyond that, until an answer counts as missing
_COMPLAINTS: Final = 8  # nodes that are looked at more closely
_EXACT: Final = 8


@dataclass(slots=True)
class Reach:
    """The tries of one job. `turn`: of the newest ones. `over`: they are, and what they have found
    is to be judged. `again_s`: when all try again, since some pairs are closed. `patient_until_s`:
    how long that may go on."""

    turn: int = 0
    over: bool = False
    again_s: float | None = None
    patient_until_s: float | None = None
    complained: frozenset[int] = frozenset()
    _until_s: float | None = None
    _unanswered: set[int] = field(default_factory=set)
    _answered: set[int] = field(default_factory=set)
    _closed: dict[Pair, str] = field(default_factory=dict)  # who could not reach whom, and how

    @property
    def waits(self) -> bool:
        """Something is still to come, or to be judged."""
        return self._until_s is not None or self.over or self.again_s is not None

    @property
    def next_deadline_s(self) -> float | None:
        """When to call `late`."""
        return self.again_s if self._until_s is None else self._until_s

    def number_from(self, turn: int) -> None:
        """Turns up to this one may have been given by others."""
        self.turn = turn

    def ask(self, nodes: Sequence[int], now_s: float) -> do.Probe:
        """Have `nodes`, in order, try each other."""
        self.turn += 1
        pairs = pairs_to_try(nodes, self.complained, self.turn)
        self.over, self.again_s, self._until_s = False, None, now_s + WITHIN_S + _ANSWER_S
        self._unanswered, self._answered, self._closed = {asker for asker, _ in pairs}, set(), {}
        self._look()
        return do.Probe(turn=self.turn, pairs=tuple(sorted(pairs)), within_s=WITHIN_S)

    def answered(self, node: int, turn: int, closed: Mapping[int, str]) -> None:
        """A node has tried. Nothing, if it was not asked, or is too late."""
        if turn != self.turn or node not in self._unanswered:
            return
        self._unanswered.discard(node)
        self._answered.add(node)
        self._closed |= {(node, other): how for other, how in closed.items()}
        self._look()

    def lost(self, node: int) -> None:
        """A node is gone: it neither answers, nor is it in anybody's way."""
        self._unanswered.discard(node)
        self._answered.discard(node)
        self._look()

    def explained(self) -> None:
        """It is known after all why a regroup has failed. Pairs that are known to be closed stay a
        matter of their own."""
        if self.patient_until_s is None:
            self.clear()

    def late(self) -> None:
        """Wait for no more answers."""
        self._unanswered.clear()
        self._look()

    def closed(self) -> dict[Pair, str]:
        """The closed pairs, and how that was noticed, first by the one of the lower number."""
        found: dict[Pair, str] = {}
        for (asker, target), how in sorted(self._closed.items()):
            if {asker, target} <= self._answered:
                found.setdefault((min(asker, target), max(asker, target)), how)
        return found

    def clear(self) -> None:
        """Nothing is wrong, or it is another world's matter."""
        self.over, self.again_s, self.patient_until_s, self._until_s = False, None, None, None
        self.complained = frozenset()
        self._unanswered, self._answered, self._closed = set(), set(), {}

    def _look(self) -> None:
        if self._until_s is not None and not self._unanswered:
            self.over, self._until_s = True, None


def pairs_to_try(nodes: Sequence[int], complained: Collection[int], turn: int) -> set[Pair]:
    """Who tries whom of `nodes`, in the turn `turn`, 1 or more."""
    count = len(nodes)
    if count <= MOST + 1:
        return {(one, other) for one in nodes for other in nodes if one != other}
    steps = [1 + step % (count - 1) for step in range((turn - 1) * MOST, turn * MOST)]
    pairs = {
        (number, nodes[(place + step) % count])
        for place, number in enumerate(nodes)
        for step in steps
    }
    some = sorted(set(complained) & set(nodes))[:_COMPLAINTS]
    spread = [nodes[place * count // MOST] for place in range(MOST)]
    for one in some:
        for other in {*spread, *some} - {one}:
            pairs |= {(one, other), (other, one)}
    return pairs


def fewest(
    closed: Collection[Pair],
    most: int,
    may_go: Callable[[frozenset[int]], bool],
    worth: Mapping[int, int] | None = None,
) -> frozenset[int]:
    """The nodes to give up, that no pair of `closed` is left; none where that takes more than
    `most`, or takes nodes that may not go. `may_go`: whether all of a set may; if so, all of its
    subsets may. `worth`: of each node; 0 where nothing is said."""
    counts = Counter(node for pair in closed for node in pair)
    values = worth or {}

    def preference(nodes: frozenset[int]) -> tuple[int, int, list[int]]:
        pairs, value = sum(map(counts.__getitem__, nodes)), sum(values.get(n, 0) for n in nodes)
        return pairs, -value, sorted(nodes, reverse=True)

    for size in range(1, min(most, _EXACT) + 1):
        found = [nodes for nodes in _covers(list(closed), size) if may_go(nodes)]
        if found:
            return max(found, key=preference)
    if most > _EXACT:
        greedy = _greedy(list(closed))
        if len(greedy) <= most and may_go(greedy):
            return greedy
    return frozenset()


def _covers(closed: list[Pair], size: int) -> set[frozenset[int]]:
    """Sets of at most `size` nodes of which every pair has one; all those of which no part is
    one, too."""
    if not closed:
        return {frozenset()}
    ((node, pairs),) = Counter(node for pair in closed for node in pair).most_common(1)
    if len(closed) > size * pairs:
        return set()
    others = frozenset(a if b == node else b for a, b in closed if node in (a, b))
    found = set()
    for gone in (frozenset({node}), others):
        if len(gone) <= size:
            left = [pair for pair in closed if gone.isdisjoint(pair)]
            found |= {gone | more for more in _covers(left, size - len(gone))}
    return found


def _greedy(closed: list[Pair]) -> frozenset[int]:
    gone = set()
    while closed:
        counts = Counter(node for pair in closed for node in pair)
        node = max(counts, key=lambda node: (counts[node], node))
        gone.add(node)
        closed = [pair for pair in closed if node not in pair]
    return frozenset(gone)
