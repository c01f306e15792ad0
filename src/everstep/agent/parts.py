"""What agents tell in parts, put together again on the coordinator's side.

Theory of operation: what an agent keeps of its ranks and of others, and what may not be written
yet, can be too large for one message. So it comes in several, before the message that it belongs
to: a registration with a report, or the answer to `Reclaim`. Times in a report are on the clock of
the agent's host, since it did not know the coordinator's when it wrote it, and are moved here.

It does not know what is kept, nor who may register. Loop thread only; nothing blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from everstep.agent import clocks
from everstep.wire import nodes
from everstep.wire.messages import Keepsake


@dataclass(slots=True)
class _Told:
    kept: dict[int, list[tuple[int, Keepsake]]] = field(default_factory=dict)
    unwritten: list[nodes.Said] = field(default_factory=list)

    def all_kept(self) -> dict[int, tuple[tuple[int, Keepsake], ...]]:
        return {rank: tuple(kept) for rank, kept in self.kept.items()}


class Parts:
    """Of all connections, by peer."""

    def __init__(self) -> None:
        self._told: dict[int, _Told] = {}

    def take(self, peer: int, part: nodes.Keeps | nodes.Unwritten) -> None:
        """A part has come."""
        told = self._told.setdefault(peer, _Told())
        match part:
            case nodes.Keeps(rank=rank, incarnation=incarnation, message=message):
                told.kept.setdefault(rank, []).append((incarnation, message))
            case nodes.Unwritten(said=said):
                told.unwritten += said

    def register(self, peer: int, who: nodes.Register, now_s: float) -> nodes.Register:
        """The registration with all of its report, its times on this host's monotonic clock, which
        is at `now_s`."""
        told = self._told.pop(peer, _Told())
        if who.report is None:
            return who
        report = msgspec.structs.replace(
            who.report, kept=told.all_kept(), unwritten=tuple(told.unwritten)
        )
        if who.boot_id != clocks.boot_id():
            report = clocks.report(report, now_s - who.clock_s)
        return msgspec.structs.replace(who, report=report)

    def reclaimed(self, peer: int, answer: nodes.Reclaimed) -> nodes.Reclaimed:
        """The answer with all that it tells."""
        told = self._told.pop(peer, _Told())
        return msgspec.structs.replace(answer, kept=told.all_kept())

    def lost(self, peer: int) -> None:
        """The connection has ended."""
        self._told.pop(peer, None)
