"""Answers those who ask about the job from elsewhere: what it does, what it prints, that it end.

Theory of operation: the desk watches the job as a view does, and keeps what was printed of late in
a ring of bounded size. Who asks for lines has a place in the ring, and is sent what lies behind it,
a little at a time, as long as he takes it. So nothing is queued for a slow reader: he falls behind
in the ring, and what leaves it meanwhile he has missed, which the lines' numbers tell him. The job
waits for nobody.

It does not decide anything. It does not know what a client is but its connection's number; who may
connect has been judged before (wire/hub.py). Loop thread only; no call blocks.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from everstep.agent.fleet import Fleet, LeaveError
from everstep.core.words import name_ranks
from everstep.observe.narrate import Narrator
from everstep.observe.pace import Pace
from everstep.types import Record
from everstep.wire import clients
from everstep.wire.clients import AgentNow, Line
from everstep.wire.messages import ScriptSpec

_KEPT_BYTES: Final = 8 << 20  # an hour of a quiet job, and some seconds of one that floods
_KEPT_LINES: Final = 50_000  # short lines cost more than their bytes
_MOST_UNREAD_BYTES: Final = 4 << 20  # on the way to one client
_BATCH_BYTES: Final = 256 << 10
_PAUSE_S: Final = 0.1  # between looks for new lines: as fast as a person reads


class RecentLines:
    """The newest lines of output, of all ranks. `source` names this ring among all others."""

    def __init__(self, max_bytes: int = _KEPT_BYTES, max_lines: int = _KEPT_LINES) -> None:
        self.source = secrets.token_hex(8)
        self.end = 0
        """The number of the newest line; 0 before the first."""
        self._max_bytes = max_bytes
        self._max_lines = max_lines
        self._lines: deque[Line] = deque()
        self._nbytes = 0
        self._of_rank: Counter[int] = Counter()

    def add(self, rank: int, incarnation: int, stream: str, text: str) -> None:
        """Keep a line, and let the oldest go."""
        self.end += 1
        self._of_rank[rank] += 1
        self._lines.append(Line(self.end, self._of_rank[rank], rank, incarnation, stream, text))
        self._nbytes += len(text)
        while self._nbytes > self._max_bytes or len(self._lines) > self._max_lines:
            self._nbytes -= len(self._lines.popleft().text)

    def after(
        self, at: int, ranks: Collection[int], max_bytes: int = _BATCH_BYTES
    ) -> tuple[list[Line], int]:
        """Lines of `ranks` (of all, where that is empty) behind the line `at`, about `max_bytes` of
        them; and up to which line this looked."""
        found: list[Line] = []
        if at >= self.end:  # the usual case, for one who follows
            return found, at
        skipped = max(0, len(self._lines) - (self.end - at))
        for line in itertools.islice(self._lines, skipped, None):
            if not ranks or line.rank in ranks:
                found.append(line)
                max_bytes -= len(line.text)
                if max_bytes <= 0:
                    return found, line.at
        return found, self.end

    def tail(self, count: int, ranks: Collection[int]) -> int:
        """The line behind which the newest `count` lines of `ranks` stand."""
        wanted = (line.at for line in reversed(self._lines) if not ranks or line.rank in ranks)
        newest = list(itertools.islice(wanted, count))
        return newest[-1] - 1 if newest else self.end


@dataclass(slots=True, eq=False, kw_only=True)
class _Reader:
    """One who reads lines. `at`: the last one that he was sent. `until`: the last that he is to
    have; None: he follows. `timer`: until the next look."""

    peer: int
    ranks: frozenset[int]
    at: int
    until: int | None
    timer: asyncio.TimerHandle | None = None


class Outgoing(Protocol):
    """What the desk needs of wire.hub.Hub."""

    def send(self, peer: int, message: msgspec.Struct) -> bool:
        """Queue a message."""
        ...

    def unread_bytes(self, peer: int) -> int:
        """What was sent and is not known to be received."""
        ...


class Desk:
    """Answers the clients of one job. Implements `observe.view.View`.

    `agents()`: those that have registered. `term`: of this coordinator.
    """

    def __init__(
        self,
        fleet: Fleet,
        outgoing: Outgoing,
        agents: Callable[[], tuple[AgentNow, ...]],
        *,
        run_id: str,
        script: ScriptSpec,
        term: int,
    ) -> None:
        self._fleet = fleet
        self._outgoing = outgoing
        self._agents = agents
        self._run_id = run_id
        self._script = " ".join([script.target, *script.args])
        self._term = term
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._recent = RecentLines()
        self._narrator = Narrator()
        self._pace = Pace()
        self._clients: set[int] = set()
        self._readers: dict[int, _Reader] = {}
        self._is_over = False  # and those who were there have been told so
        self._stops: set[bool] = set()  # what was asked for and written down: whether at once
        fleet.also_show(self)
        fleet.ended.add_done_callback(lambda _: self._ended())

    def knows(self, peer: int) -> bool:
        """Whether a peer is a client."""
        return peer in self._clients

    def take(self, peer: int, asked: clients.FromClient) -> None:
        """A client's message."""
        self._clients.add(peer)
        match asked:
            case clients.AskStatus():
                self._outgoing.send(peer, self._status())
            case clients.AskLogs():
                self._read(peer, asked)
            case clients.AskStop(now=now, who=who):
                self._stop(now=now, who=who)
                self._outgoing.send(peer, clients.Stopping(run_id=self._run_id))
        if self._is_over:
            self._tell_over(peer)

    def lost(self, peer: int) -> None:
        """A client has gone."""
        self._clients.discard(peer)
        reader = self._readers.pop(peer, None)
        if reader is not None and reader.timer is not None:
            reader.timer.cancel()

    def close(self) -> None:
        """Send the readers what is left for them, as far as they take it, and answer no more."""
        for reader in list(self._readers.values()):
            self._serve(reader)
            self.lost(reader.peer)

    # ------------------------------------------------------------ View

    def record(self, record: dict[str, Any]) -> None:
        """A line of the journal."""
        self._pace.see(record)
        for text in self._narrator.tell(record):
            self._recent.add(clients.OWN, 0, "stderr", text)

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """A line that a worker printed."""
        self._recent.add(rank, incarnation, stream, line)

    # ------------------------------------------------------------ answers

    def _status(self) -> clients.Status:
        pace, (exit_code, text) = self._pace, self._outcome()
        return clients.Status(
            run_id=self._run_id,
            script=self._script,
            term=self._term,
            wall_s=self._loop.time() - self._began_s,
            steps_per_s=pace.steps_per_s,
            goodput=pace.share,
            incidents=self._narrator.incidents,
            overview=self._fleet.overview(),
            agents=self._agents(),
            exit_code=exit_code,
            text=text,
        )

    def _stop(self, *, now: bool, who: str) -> None:
        if now not in self._stops and not self._is_over:  # who asks again changes nothing
            self._stops.add(now)
            how = "to end at once" if now else "to end"
            text = f"{who} has asked the job {how} (everstep stop)"
            fields = {"key": f"stop-asked-{now}", "text": text, "rank": None}
            self._fleet.record(Record(event="note", fields=fields))
        self._fleet.end_asked(now=now)

    def _ended(self) -> None:
        self._is_over = True
        for peer in list(self._clients):
            self._tell_over(peer)

    def _tell_over(self, peer: int) -> None:
        exit_code, text = self._outcome()
        if exit_code is not None:
            self._outgoing.send(peer, clients.Over(exit_code=exit_code, text=text))

    def _outcome(self) -> tuple[int | None, str]:
        """The job's exit code and the words for it; None and "" while it runs, and when only this
        coordinator leaves it."""
        ended = self._fleet.ended
        if not ended.done() or ended.cancelled():
            return None, ""
        error = ended.exception()
        if isinstance(error, LeaveError):
            return None, ""
        return self._fleet.exit_code, ended.result().text if error is None else str(error)

    # ------------------------------------------------------------ lines

    def _read(self, peer: int, asked: clients.AskLogs) -> None:
        self.lost(peer)  # what it was reading
        self._clients.add(peer)
        ranks = frozenset(asked.ranks)
        if objection := self._objection(ranks):
            self._outgoing.send(peer, clients.Declined(text=objection))
            return
        at = asked.after if asked.source == self._recent.source else 0
        if at == 0 and asked.tail >= 0:
            at = self._recent.tail(asked.tail, ranks)
        until = None if asked.follow else self._recent.end
        self._readers[peer] = reader = _Reader(peer=peer, ranks=ranks, at=at, until=until)
        self._send(peer, [], last=False)  # heard, though there may be nothing
        self._look(reader)

    def _objection(self, ranks: Collection[int]) -> str:
        """What is wrong with the question; "" if nothing is."""
        if not ranks:
            return ""
        world_size = self._fleet.overview().world_size
        unknown = [rank for rank in ranks if not 0 <= rank < world_size]
        if not unknown:
            return ""
        return f"the job has {name_ranks(range(world_size))}, and not {name_ranks(unknown)}"

    def _look(self, reader: _Reader) -> None:
        """Serve a reader, and look again later unless that was all."""
        if self._serve(reader):
            self._readers.pop(reader.peer, None)
        elif self._readers.get(reader.peer) is reader:
            reader.timer = self._loop.call_later(_PAUSE_S, self._look, reader)

    def _serve(self, reader: _Reader) -> bool:
        """Send a reader lines while he takes them. Whether he has all that he is to have."""
        ring, peer = self._recent, reader.peer
        while self._outgoing.unread_bytes(peer) < _MOST_UNREAD_BYTES:
            lines, reader.at = ring.after(reader.at, reader.ranks)
            if reader.until is not None and reader.at >= reader.until:
                return self._send(peer, lines, last=True)
            if lines and not self._send(peer, lines, last=False):
                return True  # he has gone
            if reader.at >= ring.end:
                break
        return False

    def _send(self, peer: int, lines: list[Line], *, last: bool) -> bool:
        batch = clients.Lines(source=self._recent.source, lines=tuple(lines), last=last)
        return self._outgoing.send(peer, batch)
