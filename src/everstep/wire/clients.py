"""The messages between a job's coordinator and those who only ask about it, as msgspec structs.

A client has the job's secret and connects as an agent does, but it never registers: its first
message is one of `FromClient`, and it may send the same again after a loss, to another coordinator
of the job. It is answered by `Status`, `Lines`, `Stopping` or `Declined`; whoever is still there
when the job ends is told so by `Over`.

Lines of output have two numbers. `at` counts all lines that one coordinator has seen, and says
where to go on. `number` counts those of one rank, so that a reader knows how many it has missed,
wherever they were left out."""

from __future__ import annotations

import msgspec

from everstep.core.overview import Overview
from everstep.wire.messages import Message

OWN = -1  # in place of a rank: a line of everstep's own

# ---------------------------------------------------------------- client -> coordinator


class AskStatus(Message):
    """What is the job doing? Answered by `Status`."""


class AskLogs(Message):
    """The lines of `ranks`, or of all and everstep's own where that is empty; with `follow`, those
    that are still to come, too. `source`, `after`: the last that was received, as `Lines` had
    them. `tail`: of what is kept, only so many; -1: all of it."""

    ranks: tuple[int, ...]
    follow: bool
    source: str = ""
    after: int = 0
    tail: int = -1


class AskStop(Message):
    """End the job: in order, or with `now` at once. `who`: asks for it, in words. To ask again
    changes nothing, unless `now` is new."""

    now: bool
    who: str


FromClient = AskStatus | AskLogs | AskStop

# ---------------------------------------------------------------- coordinator -> client


class AgentNow(msgspec.Struct, frozen=True, kw_only=True):
    """A node's agent, as it registered. `joined`: it can fork workers; else it still imports what
    the script imports."""

    node: int
    name: str
    host: str
    address: str
    pid: int
    joined: bool


class Status(Message):
    """What the job is doing. `term`: which of the job's coordinators says so. `script`: with its
    arguments. `wall_s`: seconds since the job began, or since this coordinator took it over.
    `steps_per_s`, `goodput`: of this time, None where nothing is known yet. `incidents`: opened so
    far. `agents`: empty where nodes are no processes of their own. `exit_code`, `text`: of its end,
    None and "" before."""

    run_id: str
    script: str
    term: int
    wall_s: float
    steps_per_s: float | None
    goodput: float | None
    incidents: int
    overview: Overview
    agents: tuple[AgentNow, ...] = ()
    exit_code: int | None = None
    text: str = ""


class Line(msgspec.Struct, frozen=True, array_like=True):
    """A line of output. `at`, `number`: see the module's text. `stream`: "stdout" or "stderr"."""

    at: int
    number: int
    rank: int
    incarnation: int
    stream: str
    text: str


class Lines(Message):
    """Some lines, in the order in which they came. `source`: names the coordinator that counted
    them. `last`: there are no more of those that were asked for."""

    source: str
    lines: tuple[Line, ...]
    last: bool


class Stopping(Message):
    """The job `run_id` has been asked to end."""

    run_id: str


class Declined(Message):
    """What was asked can't be answered; `text` says why."""

    text: str


class Over(Message):
    """The job is over; its processes end now."""

    exit_code: int
    text: str


ToClient = Status | Lines | Stopping | Declined | Over
