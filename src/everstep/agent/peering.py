"""One node's dealings with other nodes: what belongs to its ranks alone, and copies.

Theory of operation: a step must not wait for the coordinator, which may be away. So what a step
waits for is said from node to node: capsules are acknowledged by the guardian (keeping.py), and a
copy is offered to its keeper, which answers the rank's node. What was offered and is not answered
is offered again when the connection has been lost and stands again; who is offered again what he
has taken, or is about to, only says so. The coordinator hears of copies too, and first: no rank can
commit a step of which it is not about to know the copies.

When a guardian or a keeper can't be reached nobody waits for it, until it is: what is kept is then
on one node only, and a note says so.

It does not know which node is whose guardian or keeper, nor what is said to workers and why. Loop
thread only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container

from everstep.agent.keeping import Keeping
from everstep.agent.neighbours import Events, Neighbours
from everstep.wire import nodes, peers
from everstep.wire.messages import FromWorker, Keepsake, Kept, ToWorker, WorkerSpec

Member = tuple[int, int]  # rank and incarnation
_MOST_TAKEN = 4  # of one rank: the copies of two steps at most are under way


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """What the peering uses of its node. `send(rank, incarnation, message)`: to a worker. `obey`: a
    word about copies. `tell`: the coordinator. `note(key, text)`: something a person should
    know."""

    send: Callable[[int, int, ToWorker], None]
    obey: Callable[[nodes.CopyOrder], None]
    tell: Callable[[nodes.CopyNews], None]
    note: Callable[[str, str], None]


@dataclasses.dataclass(slots=True)
class _Taken:
    """What a node has offered to this one, and what it was answered."""

    node: int
    take: nodes.Take
    answer: nodes.Secured | peers.Declined | None = None


class Peering:
    """Of one node, in one tenure. `number`: the node's."""

    def __init__(self, neighbours: Neighbours, number: int, home: Home) -> None:
        self._neighbours = neighbours
        self._number = number
        self._home = home
        self._keeping = Keeping(neighbours, self._on_kept)
        self._newest: nodes.Peers | None = None
        self._offered: list[nodes.Offered] = []  # and not answered yet
        self._taken: dict[int, list[_Taken]] = {}  # by rank, the newest
        self._unreached: dict[int, str] = {}  # who can't be reached, and why
        neighbours.begin(number)

    @property
    def listed(self) -> tuple[int, ...]:
        """The nodes of the newest generation of which this one was told."""
        return () if self._newest is None else tuple(sorted(self._newest.addresses))

    def kept(self, ranks: Container[int] | None = None) -> list[nodes.Keeps]:
        """What is kept here: of `ranks`, or of all."""
        return [
            nodes.Keeps(rank=rank, incarnation=incarnation, message=message)
            for rank, kept in self._keeping.report().items()
            if ranks is None or rank in ranks
            for incarnation, message in kept
        ]

    # ------------------------------------------------------------ what happens here

    def launched(self, spec: WorkerSpec, kept: tuple[tuple[int, Keepsake], ...]) -> None:
        """A worker is to be forked. `kept`: what the coordinator keeps of its rank."""
        self._keeping.launched(spec, kept)

    def said(self, rank: int, incarnation: int, message: FromWorker) -> None:
        """A worker said something."""
        self._keeping.said(rank, incarnation, message)

    def began(self, order: nodes.Peers) -> None:
        """A generation begins."""
        self._newest = order
        self._offered.clear()
        self._taken.clear()
        self._neighbours.peers(order)
        self._keeping.peers(order)
        for node in self._unreached.keys() - order.addresses.keys():
            del self._unreached[node]
        if order.guardian in self._unreached:  # which is not told again
            self._not_kept(order.guardian)

    def copy_news(self, news: nodes.CopyNews) -> None:
        """Something about copies, for whom it concerns."""
        match news:
            case nodes.Offered(to=to, take=take):
                overtaken = [o for o in self._offered if _overtakes(news, o)]
                self._offered = [o for o in self._offered if o not in overtaken]
                for before in overtaken:
                    self._settled(before.take)
                self._neighbours.ask(to, take)
                if to in self._unreached:
                    self._settled(take)
                else:
                    self._offered.append(news)
            case nodes.Took(rank=rank, incarnation=incarnation, step=step):
                self._home.tell(news)
                secured = nodes.Secured(
                    rank=rank, incarnation=incarnation, generation=news.generation, step=step
                )
                self._answer(secured)
            case nodes.Untaken(rank=rank, incarnation=incarnation, step=step, text=text):
                self._home.tell(news)
                declined = peers.Declined(
                    rank=rank,
                    incarnation=incarnation,
                    generation=news.generation,
                    step=step,
                    text=text,
                )
                self._answer(declined)
            case _:
                self._home.tell(news)

    def _answer(self, answer: nodes.Secured | peers.Declined) -> None:
        for taken in self._taken.get(answer.rank, ()):  # none of a copy that was made here
            take = taken.take
            if (take.incarnation, take.step) == (answer.incarnation, answer.step):
                taken.answer = answer
                self._neighbours.answer(taken.node, answer)

    def _on_kept(self, rank: int, incarnation: int, turn: int) -> None:
        self._home.send(rank, incarnation, Kept(turn=turn))

    # ------------------------------------------------------------ what other nodes say

    def joined(self, node: int) -> None:
        """There is a connection to ask a node."""
        self._unreached.pop(node, None)
        self._keeping.joined(node)
        for offered in self._offered:
            if offered.to == node:
                self._neighbours.ask(node, offered.take)

    def lost(self, node: int) -> None:
        """There is none any more."""
        self._keeping.lost(node)

    def unreached(self, node: int, why: str) -> None:
        """There is none, and one is needed."""
        self._unreached[node] = why
        if self._newest is not None and self._newest.guardian == node:
            self._not_kept(node)
        else:
            self._note_unreached(node)
        for offered in self._offered:
            if offered.to == node:
                self._settled(offered.take)
        self._offered = [offered for offered in self._offered if offered.to != node]

    def _not_kept(self, guardian: int) -> None:
        """The guardian can't be reached."""
        self._keeping.unreached(guardian)
        self._note_unreached(
            guardian,
            ". What belongs to its ranks alone is kept on no second node meanwhile: should this "
            "node be lost now, a step may not be done again exactly",
        )

    def _note_unreached(self, node: int, more: str = "") -> None:
        text = f"node {self._number} can't reach node {node}: {self._unreached[node]}{more}"
        self._home.note(f"unreached-{node}", text)

    def asked(self, node: int, message: peers.ToPeer) -> None:
        """A node asks something of this one."""
        match message:
            case peers.Deposit() | peers.Withdrawn():
                self._keeping.asked(node, message)
            case nodes.Take():
                self._take(node, message)

    def _take(self, node: int, take: nodes.Take) -> None:
        before = self._taken.setdefault(take.rank, [])
        for taken in before:
            if taken.take == take:  # the connection was lost meanwhile
                if taken.answer is not None:
                    self._neighbours.answer(node, taken.answer)
                return
        before.append(_Taken(node, take))
        del before[:-_MOST_TAKEN]
        self._home.obey(take)

    def _settled(self, copy: nodes.Take | nodes.Secured | peers.Declined) -> None:
        """The copy need not be waited for any more."""
        self._home.obey(
            nodes.Secured(
                rank=copy.rank,
                incarnation=copy.incarnation,
                generation=copy.generation,
                step=copy.step,
            )
        )

    def answered(self, node: int, message: peers.FromPeer) -> None:
        """A node answers."""
        match message:
            case peers.Deposited():
                self._keeping.answered(node, message)
            case nodes.Secured() | peers.Declined():
                answered = node, message.rank, message.step
                self._offered = [o for o in self._offered if _place(o) != answered]
                self._settled(message)


def _place(offered: nodes.Offered) -> tuple[int, int, int]:
    return offered.to, offered.take.rank, offered.take.step


def _overtakes(offered: nodes.Offered, before: nodes.Offered) -> bool:
    """Whether the copy offered `before` is of no use once this one is."""
    same = (offered.to, offered.take.rank) == (before.to, before.take.rank)
    return same and before.take.step not in offered.take.keep


def events_for(
    peering: Callable[[], Peering | None], on_refused: Callable[[str, str], None]
) -> Events:
    """What neighbours tell, for the peering of the present tenure, if there is one."""

    def tell(do: Callable[[Peering], None]) -> None:
        current = peering()
        if current is not None:
            do(current)

    return Events(
        on_joined=lambda node: tell(lambda p: p.joined(node)),
        on_lost=lambda node, _: tell(lambda p: p.lost(node)),
        on_unreached=lambda node, why: tell(lambda p: p.unreached(node, why)),
        on_asked=lambda node, message: tell(lambda p: p.asked(node, message)),
        on_answered=lambda node, message: tell(lambda p: p.answered(node, message)),
        on_refused=on_refused,
    )
