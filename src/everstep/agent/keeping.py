"""What an agent keeps of its own ranks, and has another agent keep as well.

Theory of operation: what a rank's next process needs (keepsakes.py) goes down with the rank's node,
so each node has a *guardian*, another node that keeps it too. What a worker says is deposited there
as it is said. The guardian acknowledges each deposit, in order, and a capsule that is acknowledged
is safe: only then its rank may make its last contribution to the step. So in a step nobody waits
for the coordinator.

A deposit may be lost with its connection. So when a connection to the guardian stands, all that is
kept is deposited first, as it is with a new guardian; without one nothing is sent, and nothing
waits but what is kept anyway. A guardian that has some of it loses nothing by that. When much is on
its way, the rest waits for acknowledgements, so that the connection is not given up for it.

What is kept for another node stays when that node is lost: for that it is kept. It is given up when
the node says that somebody else has it, and in the second generation that begins without the node:
in the first, the next processes of its ranks have begun.

It does not know who is whose guardian and why, nor what is in a capsule. Loop thread only; nothing
blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from everstep.keepsakes import Belongings
from everstep.wire.messages import Capsule, FromWorker, Keepsake, Once, Tape, WorkerSpec
from everstep.wire.nodes import Peers
from everstep.wire.peers import Deposit, Deposited, FromPeer, ToPeer, Withdrawn

NOBODY: Final = -1
"""The guardian of a node that is alone."""
_MOST_UNREAD_BYTES: Final = 32 << 20  # far below the backlog at which a connection is given up
_MOST_MISSED: Final = 2


class Neighbours(Protocol):
    """What is used of agent.neighbours.Neighbours."""

    def ask(self, node: int, message: ToPeer) -> bool:
        """Send a message to a node."""
        ...

    def answer(self, node: int, message: FromPeer) -> bool:
        """Answer a node."""
        ...

    def unread_bytes(self, node: int) -> int:
        """Bytes on their way to a node."""
        ...


@dataclass(slots=True)
class _Ward:
    """A rank whose guardian this node is. `node`: where it runs. `missed`: generations that have
    begun without that node."""

    node: int
    missed: int = 0


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A deposit that is not acknowledged. `turn`: of the capsule in it; 0 where nobody waits."""

    number: int
    rank: int
    incarnation: int
    turn: int


class Keeping:
    """Of one node, in one tenure. `on_kept(rank, incarnation, turn)`: the capsule that this worker
    has said with this turn is safe; told once."""

    def __init__(self, neighbours: Neighbours, on_kept: Callable[[int, int, int], None]) -> None:
        self._neighbours = neighbours
        self._on_kept = on_kept
        self._kept: dict[int, Belongings] = {}
        self._wards: dict[int, _Ward] = {}  # those of `_kept` that are not this node's own
        self._awaited: dict[int, tuple[int, int]] = {}  # by rank: whose capsule is to be safe
        self._guardian: int | None = None  # None until it is told
        self._former: set[int] = set()  # guardians before it, which need not keep anything now
        self._joined: set[int] = set()
        self._unreached = False  # the guardian is, so that nobody waits for it
        self._number = 0
        self._outbox: deque[tuple[int, int, Keepsake]] = deque()
        self._under_way: deque[_UnderWay] = deque()
        self._complete_at = 0  # with the deposit of this number, the guardian has all

    # ------------------------------------------------------------ what happens here

    def launched(self, spec: WorkerSpec, kept: Iterable[tuple[int, Keepsake]] = ()) -> None:
        """A worker is to be forked here. `kept`: what the coordinator keeps of its rank, as
        Keepsakes lists it, of which this node may know nothing yet."""
        self._wards.pop(spec.rank, None)
        self._awaited.pop(spec.rank, None)
        known = self._kept.setdefault(spec.rank, Belongings())
        for incarnation, message in kept:
            self._keep(spec.rank, incarnation, message)
        for key, value in spec.once.items():
            if known.once.get(key) != value:
                self._keep(spec.rank, spec.incarnation, Once(key=key, value=value))
        tape = spec.tape if spec.joiner else ()
        if not spec.joiner or known.tape != tape:
            self._keep(spec.rank, spec.incarnation, Tape(items=tape))

    def said(self, rank: int, incarnation: int, message: FromWorker) -> None:
        """A worker of this node said something."""
        if not isinstance(message, Keepsake):
            return
        if isinstance(message, Capsule) and message.turn:
            self._awaited[rank] = incarnation, message.turn
        self._keep(rank, incarnation, message)
        if self._guardian == NOBODY or self._unreached:
            self._release_all()

    def peers(self, order: Peers) -> None:
        """A generation begins: which nodes there are, and which of them is the guardian."""
        for rank, ward in list(self._wards.items()):
            ward.missed = 0 if ward.node in order.addresses else ward.missed + 1
            if ward.missed >= _MOST_MISSED:
                self._give_up(rank)
        if order.guardian == self._guardian:
            return
        if self._guardian is not None:
            self._former.add(self._guardian)
        self._former &= order.addresses.keys() - {order.guardian}
        self._guardian = order.guardian
        self._unreached = False
        if order.guardian == NOBODY:
            self._release_all()
        elif order.guardian in self._joined:
            self._deposit_all()

    # ------------------------------------------------------------ what peers say

    def joined(self, node: int) -> None:
        """There is a connection to ask a node."""
        self._joined.add(node)
        if node == self._guardian:
            self._unreached = False
            self._deposit_all()

    def lost(self, node: int) -> None:
        """There is none any more."""
        self._joined.discard(node)

    def unreached(self, node: int) -> None:
        """There has been none for too long. Nobody waits for the guardian until there is: what is
        kept is on this node alone meanwhile."""
        if node == self._guardian:
            self._unreached = True
            self._release_all()

    def asked(self, node: int, message: Deposit | Withdrawn) -> None:
        """Another node wants something kept, or no longer."""
        match message:
            case Deposit(rank=rank):
                self._keep_for(node, message)
                self._neighbours.answer(node, Deposited(number=message.number))
            case Withdrawn(ranks=ranks):
                for rank in ranks:
                    if rank in self._wards and self._wards[rank].node == node:
                        self._give_up(rank)

    def answered(self, node: int, message: Deposited) -> None:
        """Another node keeps what it was asked to."""
        if node != self._guardian:
            return
        under_way = self._under_way
        while under_way and under_way[0].number <= message.number:
            deposit = under_way.popleft()
            self._release(deposit.rank, deposit.incarnation, deposit.turn)
        if message.number >= self._complete_at:
            self._withdraw()
        self._send()

    # ------------------------------------------------------------ what is asked

    def report(self) -> dict[int, tuple[tuple[int, Keepsake], ...]]:
        """All that is kept here, as nodes.Report has it."""
        return {rank: tuple(self._kept[rank].listed()) for rank in sorted(self._kept)}

    # ------------------------------------------------------------ keeping

    def _keep(self, rank: int, incarnation: int, message: Keepsake) -> None:
        self._kept.setdefault(rank, Belongings()).take(incarnation, message)
        if self._guardian in self._joined:
            self._outbox.append((rank, incarnation, message))
            self._send()

    def _keep_for(self, node: int, deposit: Deposit) -> None:
        rank = deposit.rank
        if rank not in self._kept or rank in self._wards:
            self._wards[rank] = _Ward(node)
        self._kept.setdefault(rank, Belongings()).take(deposit.incarnation, deposit.message)

    def _give_up(self, rank: int) -> None:
        del self._wards[rank], self._kept[rank]

    # ------------------------------------------------------------ depositing

    def _own(self) -> list[int]:
        return [rank for rank in self._kept if rank not in self._wards]

    def _deposit_all(self) -> None:
        self._outbox.clear()
        self._under_way.clear()
        for rank in self._own():
            for incarnation, message in self._kept[rank].listed():
                self._outbox.append((rank, incarnation, message))
        self._complete_at = self._number + len(self._outbox)
        self._send()

    def _send(self) -> None:
        """Deposit what waits, as far as the connection takes it without being given up."""
        assert self._guardian is not None
        while self._outbox and (
            not self._under_way
            or self._neighbours.unread_bytes(self._guardian) <= _MOST_UNREAD_BYTES
        ):
            rank, incarnation, message = self._outbox.popleft()
            self._number += 1
            turn = message.turn if isinstance(message, Capsule) else 0
            self._under_way.append(_UnderWay(self._number, rank, incarnation, turn))
            deposit = Deposit(
                number=self._number, rank=rank, incarnation=incarnation, message=message
            )
            self._neighbours.ask(self._guardian, deposit)  # where it fails, `lost` follows

    def _withdraw(self) -> None:
        """The guardian has all: those before it need not keep it."""
        for node in self._former & self._joined:
            self._neighbours.ask(node, Withdrawn(ranks=tuple(self._own())))
        self._former.clear()

    # ------------------------------------------------------------ capsules that are safe

    def _release(self, rank: int, incarnation: int, turn: int) -> None:
        if turn and self._awaited.get(rank) == (incarnation, turn):
            del self._awaited[rank]
            self._on_kept(rank, incarnation, turn)

    def _release_all(self) -> None:
        for rank, (incarnation, turn) in list(self._awaited.items()):
            self._release(rank, incarnation, turn)
