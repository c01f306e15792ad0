"""Journal records in plain words: one or two lines for each incident, as it happens.

The narrator is fed every record in the journal's order and keeps only what an open incident needs,
so it can follow a run of any length. What it says of times is what the ledger's fold says: an
incident begins when the fault happened, if anybody knows that, and else when it was noticed.

A rank that lost touch with a peer has seldom failed itself: a moment later it is known who did. So
that is held back until a real failure is known, which is then told alone, or until all survivors
stand still and there was none.

It does not know how a run is to be shown: a console, the proof and later others print its lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep.core.goodput import read_cause
from everstep.core.ladder import is_echo
from everstep.types import Cause, CauseKind, StateFrom

Record = Mapping[str, Any]
_PROCESS_LIVES = (CauseKind.EXCEPTION, CauseKind.PEER, CauseKind.RECEIPT)
_DEATHS = (CauseKind.SIGNAL, CauseKind.EXIT, CauseKind.EARLY_EXIT)
# Where the reason that follows says it, too.
_SAID_BY_REASON = (StateFrom.PROCESS, StateFrom.SCRIPT)
_OF_A_RANK = ("lost touch", "failed in")  # how core.words.name_break begins
_ON_PURPOSE = re.compile(r"\bChaosError\b")
# A death in the step function, of which nothing narrower is known; a narrower place has its name.
_IN_STEP = re.compile(r"\bin step \d+$")


@dataclass(slots=True)
class _Open:
    """An incident that goes on. `echo`: what was noticed so far is only the echo of a failure
    elsewhere. `held`: the line that is still to be told, if no better one comes."""

    noticed_s: float
    began_s: float
    echo: bool
    held: str | None = None


class Narrator:
    """Says what a person should know of each record. Not thread-safe."""

    def __init__(self) -> None:
        self.step = 0
        """Steps that every rank has committed."""
        self.incidents = 0
        """Incidents opened so far."""
        self._fired_s: dict[str, float] = {}
        self._open: dict[int, _Open] = {}

    def tell(self, record: Record) -> list[str]:
        """The lines for one journal record; none for most."""
        match record.get("event"):
            case "step":
                self.step = max(self.step, int(record["step"]))
            case "fault_fired":
                self._fired_s[str(record["text"])] = float(record["fired_t"])
            case "incident_opened":
                return self._opened(record)
            case "incident_cause":
                return self._further(record)
            case "stopped" | "job_ended":
                return self._held()
            case "incident_closed":
                now_s, held = float(record["t"]), self._held()
                incident = self._open.pop(record["incident"], None)
                total_s = 0.0 if incident is None else now_s - incident.began_s
                return [*held, recovery(record, total_s)]
            case "hang":
                return [f"where all ranks stood is in {record['file']}"]
            case "note":
                return [f"note{_of_rank(record)}: {record['text']}"]
        return []

    def _opened(self, record: Record) -> list[str]:
        cause, noticed_s = read_cause(record["cause"]), float(record["t"])
        incident = _Open(noticed_s, self._began_s(cause, noticed_s), is_echo(cause))
        self._open[record["incident"]] = incident
        self.incidents += 1
        line = self._first_line(record, cause)
        if cause.kind is CauseKind.PEER:
            incident.held = line
            return []
        return [line]

    def _further(self, record: Record) -> list[str]:
        """A further failure: the one that the first was the echo of, or one more."""
        cause = read_cause(record["cause"])
        incident = self._open.get(record["incident"])
        if incident is None or not incident.echo or is_echo(cause):
            held = self._held()
            return [*held, f"meanwhile {failure(record)}"]
        incident.echo = False
        incident.began_s = self._began_s(cause, incident.noticed_s)
        told, incident.held = incident.held is None, None
        if told:
            return [f"{failure(record)}; {_measure(cause)}"]
        return [self._first_line(record, cause)]

    def _first_line(self, record: Record, cause: Cause) -> str:
        """An incident's failure, and what is done about it."""
        if self.step == 0 and int(record["step"]) <= 1:
            return f"{failure(record)}; nothing is committed yet, all ranks start again"
        return f"{failure(record)}; stopping, {_measure(cause)}"

    def _held(self) -> list[str]:
        """The lines that were held back: nothing better has come."""
        lines = []
        for incident in self._open.values():
            if incident.held is not None:
                lines.append(incident.held)
                incident.held = None
        return lines

    def _began_s(self, cause: Cause, noticed_s: float) -> float:
        fired_s = self._fired_s.get(cause.fault or "")
        known_s = cause.at_s if fired_s is None else fired_s
        return noticed_s if known_s is None else min(noticed_s, known_s)


def failure(record: Record) -> str:
    """The failure of an `incident_opened` or `incident_cause` record, with rank and step."""
    return failure_of(int(record["rank"]), int(record["step"]), read_cause(record["cause"]))


def failure_of(rank: int, step: int, cause: Cause) -> str:
    """A failure as a clause: `rank 1 was killed by SIGKILL in step 5 (backward)`."""
    who, where = f"rank {rank}", f"step {step}"
    text = cause_in_words(cause)
    if cause.kind is CauseKind.PEER and text.startswith(_OF_A_RANK):
        text = f"{who} {text}"
    elif not _names(text, who):
        text = f"{who}: {text}"
    return text if _names(text, where) else f"{text} in {where}"


def cause_in_words(cause: Cause) -> str:
    """A cause's text as a person should read it, in one line."""
    text = " ".join(cause.text.split())
    if cause.fault is not None and cause.kind is CauseKind.EXCEPTION and _ON_PURPOSE.search(text):
        return f"fault on purpose ({cause.fault})"
    if cause.kind in _DEATHS and _IN_STEP.search(text):
        return f"{text} (forward or backward)"
    return text


def _measure(cause: Cause) -> str:
    """What is done about a failure."""
    if cause.kind in _PROCESS_LIVES:
        return "the step is done again"
    return "a warm process takes its place"


def recovery(closed: Record, total_s: float) -> str:
    """The end of an incident, from its `incident_closed` record and the seconds it took."""
    reason = f" ({closed['reason']})" if closed.get("reason") else ""
    lost = f"{counted(int(closed['steps_lost']), 'step')} lost"
    how = [str(closed["rung"]), f"state from {source_in_words(str(closed['state_from']))}", lost]
    if reason and closed["state_from"] in _SAID_BY_REASON:
        del how[1]
    return f"step {closed['step']} done again after {total_s:.2f} s - {', '.join(how)}{reason}"


def source_in_words(state_from: str) -> str:
    """A StateFrom as it reads in a sentence."""
    words = {
        "process": "the ranks' own memory",
        "peer": "peers",
        "memory": "a copy in memory",
        "durable": "a checkpoint",
        "script": "the script's set-up",
        "none": "nowhere",
    }
    return words.get(state_from, state_from)


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _names(text: str, what: str) -> bool:
    """Whether `what`, which ends in a number, is in `text`; `rank 1` is not in `rank 12`."""
    return re.search(rf"\b{what}\b", text) is not None


def _of_rank(record: Record) -> str:
    rank = record.get("rank")
    return "" if rank is None else f" (rank {rank})"
