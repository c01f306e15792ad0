"""Carries what nodes tell of copies to those whom it is for, on the coordinator's side.

Theory of operation: a rank's node and its keeper speak with each other (peering.py); that a copy is
there, or can't be, is told here too, and goes to the core. A process that needs a copy which its
node does not have is lent it by a node that does; one that turns out not to have it, or not
whole, is not asked again, and the next one is, until nobody is left. All of it belongs to one
generation, and is forgotten with it.

Does not know: who makes copies and who keeps them (core), what is in them. Loop thread only;
nothing blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from everstep.wire import nodes


class Harbour(Protocol):
    """What a ferry needs of the fleet."""

    def copy_order(self, node: int, order: nodes.CopyOrder) -> bool:
        """Tell a node. False if it is not there."""
        ...

    def home_of(self, rank: int, incarnation: int) -> int | None:
        """The node on which a process is."""
        ...

    def note(self, key: str, text: str) -> None:
        """Something a person should know."""
        ...


class Harbourmaster(Protocol):
    """What a ferry needs of the coordinator's shell."""

    def copied(self, news: nodes.Took, node: int) -> None:
        """A copy is complete on `node`."""
        ...

    def copy_waived(self, news: nodes.Untaken) -> None:
        """The keeper of a rank can't have its copy."""
        ...

    def copy_spoiled(self, rank: int, step: int, node: int) -> None:
        """The copy of `rank` at `step` on `node` is not there, or not what was written."""
        ...

    def copies_of(self, rank: int, step: int) -> Collection[int]:
        """The nodes that have a copy of `rank` at `step`."""
        ...


@dataclass(slots=True)
class _Search:
    """For a copy that a node seeks. `asked`: who was asked last; `without`: who does not have it,
    or not whole."""

    asked: int | None = None
    without: set[int] = field(default_factory=set)


_Key = tuple[int, int, int, int]  # rank, incarnation, step, and which node seeks
_About = nodes.Seek | nodes.Untaken | nodes.Lack


class Ferry:
    """The way of copies' news. `all_nodes()`: the numbers of those that are there."""

    def __init__(
        self, harbour: Harbour, master: Harbourmaster, all_nodes: Callable[[], Iterable[int]]
    ) -> None:
        self._harbour, self._master, self._all_nodes = harbour, master, all_nodes
        self._alone: set[int] = set()  # ranks of which it was said that no keeper has their copy
        self._searches: dict[_Key, _Search] = {}

    def keepers(self, generation: int, keepers: Mapping[int, int], steps: tuple[int, ...]) -> None:
        """A generation begins: tell all nodes who keeps whose copies."""
        self._searches.clear()
        order = nodes.Keepers(generation=generation, keepers=dict(keepers), steps=steps)
        for node in self._all_nodes():
            self._harbour.copy_order(node, order)

    def take(self, number: int, news: nodes.CopyNews) -> None:
        """Node `number` tells something."""
        match news:
            case nodes.Took():
                self._master.copied(news, number)
            case nodes.Untaken(rank=rank, incarnation=incarnation):
                if self._harbour.home_of(rank, incarnation) == number:
                    self._find_another(news, number, news.source)
                else:
                    self._say_alone(news, number)
                    self._master.copy_waived(news)
            case nodes.Seek():
                if news.spoiled:
                    self._master.copy_spoiled(news.rank, news.step, number)
                search = self._search(news, number)
                if search.asked is not None:  # what it was lent was no better
                    search.without.add(search.asked)
                self._find(news, number, search)
            case nodes.Lack(to=to):
                self._find_another(news, to, number)

    def _say_alone(self, news: nodes.Untaken, number: int) -> None:
        if news.rank in self._alone:
            return
        self._alone.add(news.rank)
        self._harbour.note(
            f"copy-not-kept-{news.rank}",
            f"node {number} can't keep the copy of rank {news.rank} at step {news.step}, which is "
            f"only on the rank's own node now: {news.text}",
        )

    def _find_another(self, news: _About, to: int, lacking: int) -> None:
        """Node `lacking` does not have the copy that node `to` seeks."""
        self._master.copy_spoiled(news.rank, news.step, lacking)
        search = self._search(news, to)
        search.without.add(lacking)
        self._find(news, to, search)

    def _search(self, news: _About, to: int) -> _Search:
        return self._searches.setdefault((news.rank, news.incarnation, news.step, to), _Search())

    def _find(self, news: _About, to: int, search: _Search) -> None:
        """Have the copy offered to node `to` by one that has it."""
        for holder in self._master.copies_of(news.rank, news.step):
            if holder == to or holder in search.without:
                continue
            lend = nodes.Lend(
                rank=news.rank,
                incarnation=news.incarnation,
                generation=news.generation,
                step=news.step,
                to=to,
            )
            if self._harbour.copy_order(holder, lend):
                search.asked = holder
                return
        missing = nodes.Missing(rank=news.rank, generation=news.generation, step=news.step)
        self._harbour.copy_order(to, missing)
