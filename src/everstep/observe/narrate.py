"""Journal records in plain words: one or two lines for each incident, as it happens.

The narrator is fed every record in the journal's order and keeps only what an open incident needs,
so it can follow a run of any length. What it says of times is what the ledger's fold says: an
incident begins when the fault happened, if anybody knows that, and else when it was noticed.

It does not know how a run is to be shown: a console, the proof and later others print its lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep.core.goodput import read_cause
from everstep.core.ladder import is_echo
from everstep.types import Cause, CauseKind

Record = Mapping[str, Any]
_PROCESS_LIVES = (CauseKind.EXCEPTION, CauseKind.PEER, CauseKind.RECEIPT)


@dataclass(slots=True)
class _Open:
    """An incident that goes on. `echo`: what was noticed so far is only the echo of a failure
    elsewhere."""

    noticed_s: float
    began_s: float
    echo: bool


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
                return [self._opened(record)]
            case "incident_cause":
                return [self._further(record)]
            case "incident_closed":
                now_s = float(record["t"])
                incident = self._open.pop(record["incident"], None)
                return [recovery(record, 0.0 if incident is None else now_s - incident.began_s)]
            case "note":
                return [f"note{_of_rank(record)}: {record['text']}"]
        return []

    def _opened(self, record: Record) -> str:
        cause, noticed_s = read_cause(record["cause"]), float(record["t"])
        began_s = self._began_s(cause, noticed_s)
        echo = is_echo(cause)
        self._open[record["incident"]] = _Open(noticed_s, began_s, echo)
        self.incidents += 1
        if self.step == 0 and int(record["step"]) <= 1:
            return f"{failure(record)}; nothing is committed yet, all ranks start again"
        return f"{failure(record)}; stopping{'' if echo else ', ' + _measure(cause)}"

    def _further(self, record: Record) -> str:
        """A further failure: the one that the first was the echo of, or one more."""
        cause = read_cause(record["cause"])
        incident = self._open.get(record["incident"])
        if incident is None or not incident.echo or is_echo(cause):
            return f"meanwhile {failure(record)}"
        incident.echo = False
        incident.began_s = self._began_s(cause, incident.noticed_s)
        return f"{failure(record)}; {_measure(cause)}"

    def _began_s(self, cause: Cause, noticed_s: float) -> float:
        fired_s = self._fired_s.get(cause.fault or "")
        known_s = cause.at_s if fired_s is None else fired_s
        return noticed_s if known_s is None else min(noticed_s, known_s)


def failure(record: Record) -> str:
    """The failure of an `incident_opened` or `incident_cause` record, with rank and step."""
    who, where = f"rank {record['rank']}", f"step {record['step']}"
    if record["cause"]["kind"] == CauseKind.PEER:
        # The library's own text names no rank and tells people to look elsewhere; the journal keeps
        # it.
        return f"{who} lost touch with a peer in {where}"
    text = str(record["cause"]["text"]).strip()
    if not _names(text, who):
        text = f"{who}: {text}"
    return text if _names(text, where) else f"{text} in {where}"


def _measure(cause: Cause) -> str:
    """What is done about a failure."""
    if cause.kind in _PROCESS_LIVES:
        return "the step is done again"
    return "a warm process takes its place"


def recovery(closed: Record, total_s: float) -> str:
    """The end of an incident, from its `incident_closed` record and the seconds it took."""
    reason = f" ({closed['reason']})" if closed.get("reason") else ""
    lost = counted(int(closed["steps_lost"]), "step")
    return (
        f"step {closed['step']} done again after {total_s:.2f} s - {closed['rung']}, "
        f"state from {source_in_words(str(closed['state_from']))}, {lost} lost{reason}"
    )


def source_in_words(state_from: str) -> str:
    """A StateFrom as it reads in a sentence."""
    words = {
        "process": "the ranks' own memory",
        "peer": "peers",
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
