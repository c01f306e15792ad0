"""Times that one host wrote, on another's clock.

Every host has its own monotonic clock, and all that is decided and written to the journal is on the
coordinator's. An agent measures the difference once, when it registers: the answer's time, less
half of the round trip, against its own. What it reports before it has the answer is moved by the
coordinator, which knows only when it came. On one host there is one clock, which is known by the
kernel's boot id, and the difference is exactly 0. Drift between clocks of real hosts is some
milliseconds in a minute at most; nothing is decided by such times, they only cut an incident into
stages. Pure, but for the reading of the boot id.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from everstep.core.hang import Evidence
from everstep.types import Cause
from everstep.wire import messages, nodes
from everstep.wire.messages import FromWorker

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """What tells this start of this host from all others; "" where the kernel doesn't say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def offset(asked_s: float, answered_s: float, theirs_s: float) -> float:
    """Seconds to add to our clock to have theirs. `asked_s`, `answered_s`: ours when we asked and
    when the answer came; `theirs_s`: the clock in the answer."""
    return theirs_s - (asked_s + answered_s) / 2


def message(said: FromWorker, offset_s: float) -> FromWorker:
    """A worker's message with its times moved by `offset_s`."""
    match said:
        case messages.Hello() | messages.Commit() | messages.Receipt() | messages.Fired():
            return msgspec.structs.replace(said, t=said.t + offset_s)
        case messages.Fault() | messages.Raised():
            return msgspec.structs.replace(said, cause=cause(said.cause, offset_s))
        case _:
            return said


def cause(told: Cause, offset_s: float) -> Cause:
    """A cause likewise."""
    return told if told.at_s is None else replace(told, at_s=told.at_s + offset_s)


def evidence(seen: tuple[Evidence, ...], offset_s: float) -> tuple[Evidence, ...]:
    """What a sentry saw, likewise."""
    return tuple(
        each if each.since_s is None else replace(each, since_s=each.since_s + offset_s)
        for each in seen
    )


def report(told: nodes.Report, offset_s: float) -> nodes.Report:
    """What an agent reports, likewise."""
    replaced = msgspec.structs.replace
    return replaced(
        told,
        ended=tuple(replaced(died, cause=cause(died.cause, offset_s)) for died in told.ended),
        unwritten=tuple(
            replaced(said, message=message(said.message, offset_s)) for said in told.unwritten
        ),
    )
