"""One picture from what the sentries of several nodes see.

Theory of operation: whoever is to blame for a silence is found by comparing all ranks, so what one
node tells is told to the coordinator only together with what the others show. A node that reports a
silence sets off a look at all others; the picture goes out when the last has answered. A node that
is lost meanwhile is waited for no longer. Of stacks likewise, which are also kept in a file
`hang-N.txt` of the run's directory, the newest hundred.

It decides nothing. Loop thread only; nothing blocks but the writing of that file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from everstep.agent import stacks
from everstep.core.events import Inspected
from everstep.core.hang import Evidence
from everstep.wire.nodes import Shown

_KEPT_FILES = 100  # as many as incidents are allowed; some kilobytes each


class Lookout:
    """Of one job. `on_silent` and `on_inspected` are called with what is of all nodes."""

    def __init__(
        self,
        directory: Path,
        on_silent: Callable[[tuple[Evidence, ...]], None],
        on_inspected: Callable[[Inspected], None],
    ) -> None:
        self._directory = directory
        self._on_silent = on_silent
        self._on_inspected = on_inspected
        self._seen: dict[int, tuple[Evidence, ...]] = {}
        self._unseen: set[int] = set()
        self._shown: dict[int, Shown] = {}
        self._unshown: set[int] = set()
        self._inspections = 0

    def silent(
        self,
        node: int,
        evidence: tuple[Evidence, ...],
        others: Collection[int],
        look: Callable[[int], None],
    ) -> None:
        """`node` reports a silence, and `look(n)` has the node `n` of `others` say what it sees."""
        self._seen[node] = evidence
        if self._unseen:
            return  # they are being asked
        self._seen = {node: evidence}
        self._unseen = set(others)
        for other in others:
            look(other)
        self._tell_seen()

    def looked(self, node: int, evidence: tuple[Evidence, ...]) -> None:
        """What `node` sees."""
        if node in self._unseen:
            self._seen[node] = evidence
            self._unseen.discard(node)
            self._tell_seen()

    def inspect(self, nodes: Collection[int], inspect: Callable[[int], None]) -> None:
        """Have all `nodes` show their stacks, by `inspect(n)`; one that is asked again answers
        once more."""
        self._shown, self._unshown = {}, set(nodes)
        for node in nodes:
            inspect(node)

    def shown(self, node: int, shown: Shown) -> None:
        """What `node` shows."""
        if node in self._unshown:
            self._shown[node] = shown
            self._unshown.discard(node)
            self._tell_shown()

    def lost(self, node: int) -> None:
        """`node` will answer no more."""
        self._seen.pop(node, None)
        self._shown.pop(node, None)
        if node in self._unseen:
            self._unseen.discard(node)
            self._tell_seen()
        if node in self._unshown:
            self._unshown.discard(node)
            self._tell_shown()

    def _tell_seen(self) -> None:
        if not self._unseen and self._seen:
            self._on_silent(tuple(each for node in sorted(self._seen) for each in self._seen[node]))

    def _tell_shown(self) -> None:
        if self._unshown:
            return
        all_shown = [self._shown[node] for node in sorted(self._shown)]
        answers = {rank: text for shown in all_shown for rank, text in shown.answers.items()}
        unable = {rank: why for shown in all_shown for rank, why in shown.unable.items()}
        lines = stacks.group(answers, unable)
        path = self._keep(stacks.written(answers, lines))
        evidence = tuple(each for shown in all_shown for each in shown.evidence)
        self._on_inspected(Inspected(evidence=evidence, stacks=lines, file=str(path)))

    def _keep(self, text: str) -> Path:
        self._inspections += 1
        path = self._directory / f"hang-{self._inspections}.txt"
        path.write_text(text, encoding="utf-8")
        if self._inspections > _KEPT_FILES:
            old = self._directory / f"hang-{self._inspections - _KEPT_FILES}.txt"
            old.unlink(missing_ok=True)
        return path
