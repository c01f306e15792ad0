"""What belongs to ranks alone whose node is gone is fetched from who keeps it beside that node.

Theory of operation. A rank's capsule is safe when its node's guardian has it; that the coordinator
has it, too, nobody waits for. So where a node is lost, the newest that its ranks left may be with
the guardian only, and peers may have committed the step that needs it. Hence, when all survivors
stand still, and nobody can commit any more, all nodes that hold slots are asked what they keep of
these ranks. The ranks are led on when all of them have answered that live. There is no deadline:
a node whose agent lives answers, and one whose agent does not is lost.

What it doesn't know: what is kept (the shell's), and who is whose guardian: after a coordinator has
taken over a job, nobody does but the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from everstep.core import actions as do
from everstep.core.nodes import Nodes
from everstep.core.outbox import Outbox


@dataclass(slots=True)
class Reclaims:
    """What is asked. `ranks`: whose node was lost since the newest world began."""

    ranks: set[int] = field(default_factory=set)
    _asked: frozenset[int] = frozenset()
    _turn: int = 0
    _unanswered: set[int] = field(default_factory=set)

    def lost(self, ranks: Iterable[int]) -> None:
        """The node of `ranks` is gone."""
        self.ranks.update(ranks)

    def ask(self, nodes: Nodes, out: Outbox) -> None:
        """All survivors stand still: ask for what is not asked for yet."""
        wanted = frozenset(self.ranks)
        if wanted <= self._asked:
            return
        self._asked, self._turn = wanted, self._turn + 1
        self._unanswered = {node.number for node in nodes.living if node.slot is not None}
        out.put(
            do.Reclaim(
                turn=self._turn,
                ranks=tuple(sorted(wanted)),
                nodes=tuple(sorted(self._unanswered)),
            )
        )

    def answered(self, node: int, turn: int) -> None:
        """A node has told what it keeps."""
        if turn == self._turn:
            self._unanswered.discard(node)

    def waits(self, nodes: Nodes) -> bool:
        """Whether an answer is still to come."""
        self._unanswered = {node for node in self._unanswered if nodes.get(node) is not None}
        return bool(self._unanswered)

    def clear(self) -> None:
        """A world begins, in which all ranks have what is theirs."""
        self.ranks, self._asked, self._unanswered = set(), frozenset(), set()
