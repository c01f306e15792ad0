"""Between a launcher and the coordinator's process that it has started: what is shown goes one way,
what a person wants the other.

Theory of operation: messages of MessagePack on a socketpair. What the coordinator shows is never
waited for: a launcher that reads slowly (a terminal that stands still, a Ctrl-Z) must not hold up
a recovery. When it lags behind, first lines of output are let go, then also records, and both are
counted and said when it has caught up; the logs and the journal have them. Only what the launcher
itself must know, which nodes there are, it is always told.

It does not know what else is in a record. Loop thread only; nothing blocks.
"""

from __future__ import annotations

import time
from typing import Any

from everstep.agent.channel import AgentChannel
from everstep.settings import RunSettings
from everstep.wire.messages import Message

_MOST_UNREAD_BYTES = 16 << 20  # lines are let go above this
_MOST_UNREAD_RECORDS_BYTES = 4 * _MOST_UNREAD_BYTES
_MUST_BE_KNOWN = frozenset({"node_registered", "node_joined"})


class Begin(Message):
    """Coordinate the job, whose directory is there. `port`: where to listen. `runner`, `preload`:
    as agent.zygote.ZygotePlan has them. `resume`: as Coordinating has it."""

    settings: RunSettings
    port: int
    runner: str
    preload: tuple[str, ...]
    resume: bool


class Stop(Message):
    """Signal `signal` asks for the job's end; the second one, for an end at once."""

    signal: int


class Fail(Message):
    """The job can't go on; `text` says why."""

    text: str
    exit_code: int


Order = Begin | Stop | Fail


class Recorded(Message):
    """A record of the journal, to be shown."""

    record: dict[str, Any]


class Printed(Message):
    """A line that a worker printed."""

    rank: int
    incarnation: int
    stream: str
    line: str


class Ended(Message):
    """The job is over, and all its nodes have been told."""

    exit_code: int
    text: str


class Raised(Message):
    """Something prevents the job or has broken it; `text` is for the person who must act."""

    text: str
    exit_code: int


News = Recorded | Printed | Ended | Raised


class RelayedView:
    """Shows a job at the other end of `channel`. Implements `observe.view.View`."""

    def __init__(self, channel: AgentChannel[Order]) -> None:
        self._channel = channel
        self._unshown_lines = 0
        self._unshown_records = 0

    def record(self, record: dict[str, Any]) -> None:
        """A journal record."""
        late = self._channel.backlog_bytes > _MOST_UNREAD_RECORDS_BYTES
        if late and record["event"] not in _MUST_BE_KNOWN:
            self._unshown_records += 1
            return
        self._catch_up()
        self._channel.send(Recorded(record=record))

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """A line that a worker printed."""
        if self._channel.backlog_bytes > _MOST_UNREAD_BYTES:
            self._unshown_lines += 1
            return
        self._catch_up()
        self._channel.send(Printed(rank=rank, incarnation=incarnation, stream=stream, line=line))

    def _catch_up(self) -> None:
        lines, records = self._unshown_lines, self._unshown_records
        if not (lines or records) or self._channel.backlog_bytes > _MOST_UNREAD_BYTES:
            return
        self._unshown_lines = self._unshown_records = 0
        text = (
            f"{lines} lines of output and {records} records came too fast to be shown; see the "
            "logs and the journal"
        )
        note = {"t": time.monotonic(), "event": "note", "key": "unshown", "text": text}
        self._channel.send(Recorded(record={**note, "rank": None}))
