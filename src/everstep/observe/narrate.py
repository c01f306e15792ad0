"""Journal records in plain words: one or two lines for each incident, as it happens.

The narrator is fed every record in the journal's order and keeps only what an open incident needs,
so it can follow a run of any length. What it says of times is what the ledger's fold says: an
incident begins when the fault happened, if anybody knows that, and else when it was noticed.

It does not know how a run is to be shown: a console, the proof and later others print its lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from everstep.types import CauseKind

Record = Mapping[str, Any]
_PROCESS_LIVES = (CauseKind.EXCEPTION, CauseKind.PEER, CauseKind.RECEIPT)


class Narrator:
    """Says what a person should know of each record. Not thread-safe."""

    def __init__(self) -> None:
        self.step = 0
        """Steps that every rank has committed."""
        self.incidents = 0
        """Incidents opened so far."""
        self._fired_s: dict[str, float] = {}
        self._began_s: dict[int, float] = {}

    def tell(self, record: Record) -> list[str]:
        """The lines for one journal record; none for most."""
        match record.get("event"):
            case "step":
                self.step = max(self.step, int(record["step"]))
            case "fault_fired":
                self._fired_s[str(record["text"])] = float(record["fired_t"])
            case "incident_opened":
                self.incidents += 1
                self._began_s[record["incident"]] = began_s(record, self._fired_s)
                return [f"{failure(record)}; {self._measure(record)}"]
            case "incident_cause":
                return [f"meanwhile {failure(record)}"]
            case "incident_closed":
                began = self._began_s.pop(record["incident"], float(record["t"]))
                return [recovery(record, float(record["t"]) - began)]
            case "note":
                return [f"note{_of_rank(record)}: {record['text']}"]
        return []

    def _measure(self, record: Record) -> str:
        """What is done about a failure; the rest of the sentence that names it."""
        if self.step == 0 and int(record["step"]) <= 1:
            return "nothing is committed yet, all ranks start again"
        if record["cause"]["kind"] in _PROCESS_LIVES:
            return "stopping, the step is done again"
        return "stopping, a warm process takes its place"


def began_s(opened: Record, fired_s: Mapping[str, float]) -> float:
    """When the incident of an `incident_opened` record began, in seconds on the host's monotonic
    clock.

    `fired_s`: text of each fault on purpose to when it fired.
    """
    cause = opened["cause"]
    noticed = float(opened["t"])
    fired = fired_s.get(cause.get("fault") or "")
    known = cause.get("at_s") if fired is None else fired
    return min(noticed, noticed if known is None else float(known))


def failure(record: Record) -> str:
    """The failure of an `incident_opened` or `incident_cause` record, with rank and step."""
    text = str(record["cause"]["text"]).strip()
    who, where = f"rank {record['rank']}", f"step {record['step']}"
    if not _names(text, who):
        text = f"{who}: {text}"
    return text if _names(text, where) else f"{text} in {where}"


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
