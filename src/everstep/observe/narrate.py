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
from everstep.core.ladder import is_echo, is_repeatable
from everstep.core.words import name_ranks
from everstep.settings import RunSettings
from everstep.types import Cause, CauseKind, StateFrom

Record = Mapping[str, Any]
_PROCESS_LIVES = (CauseKind.EXCEPTION, CauseKind.PEER, CauseKind.RECEIPT)
_DEATHS = (CauseKind.SIGNAL, CauseKind.EXIT, CauseKind.EARLY_EXIT)
_HERE = (CauseKind.EXCEPTION, CauseKind.PEER, CauseKind.WORKER)  # their texts name no place
# Where the reason that follows says it, too.
_SAID_BY_REASON = (StateFrom.PROCESS, StateFrom.SCRIPT)
_OF_A_RANK = ("lost touch", "failed in")  # how core.words.name_break begins
_ON_PURPOSE = re.compile(r"\bChaosError\b")
# A death in the step function, of which nothing narrower is known; a narrower place has its name.
_IN_STEP = re.compile(r"\bin step \d+$")
_SECTION = re.compile(r"in a (section (?:after|before) step \d+)")
_RECOVERY = "in a recovery"
_OUTSIDE = ("between steps", "in its set-up", "after its last step", "after the end")
_AGAIN = 3  # steps in which one rank fails alike before a note says so: twice may be chance


@dataclass(slots=True)
class _Open:
    """An incident that goes on. `echo`: what was noticed so far is only the echo of a failure
    elsewhere. `section`: the one it fell into, "section after step 5". `held`: the line that is
    still to be told, if no better one comes."""

    noticed_s: float
    began_s: float
    echo: bool
    section: str = ""
    held: str | None = None


class Narrator:
    """Says what a person should know of each record. Not thread-safe."""

    def __init__(self) -> None:
        self.step = 0
        """Steps that every rank has committed."""
        self.incidents = 0
        """Incidents opened so far."""
        self._base = 0  # the step of the checkpoint at which all ranks began
        self._begun_in = -1  # and in which generation
        self._fired_s: dict[str, float] = {}
        self._open: dict[int, _Open] = {}
        self._ranks = 0  # how many there are; 0: not known
        self._failed: dict[tuple[int, CauseKind, str], list[int]] = {}  # alike, in which steps
        self.spares: int | None = None
        """Nodes that hold no ranks; None where the job has no nodes of its own."""

    def tell(self, record: Record) -> list[str]:
        """The lines for one journal record; none for most."""
        match record.get("event"):
            case "step":
                self.step = max(self.step, int(record["step"]))
            case "job_started":
                self._ranks = int(record["world_size"])
            case "fault_fired":
                self._fired_s[str(record["text"])] = float(record["fired_t"])
            case "incident_opened":
                return [*self._opened(record), *self._again(record)]
            case "incident_cause":
                return [*self._further(record), *self._again(record)]
            case "stopped" | "job_ended":
                return self._held()
            case "incident_closed":
                now_s, held = float(record["t"]), self._held()
                incident = self._open.pop(record["incident"], None)
                total_s = 0.0 if incident is None else now_s - incident.began_s
                return [*held, recovery(record, total_s, incident.section if incident else "")]
            case "coordinator_started" if record["term"] > 0:
                self.step = max(self.step, int(record["step"]))
                term = record["term"]
                return [f"the coordinator begins anew (term {term}); steps go on meanwhile"]
            case "coordinator_left":
                return [str(record["text"])]
            case "gathered":
                return self._gathered(record)
            case "node_joined" if self.spares is not None:
                self.spares += 1
                return [f"node {record['node']} (host {record['host']}) joined as a spare"]
            case "node_lost" if not record["ranks"]:
                self.spares = max(0, (self.spares or 0) - 1)
                return [str(record["text"])]
            case "node_replaced":
                self.spares = max(0, (self.spares or 0) - 1)
            case "node_awaited":
                ranks = name_ranks(record["ranks"])
                return [f"no spare is left for {ranks}: waiting {record['wait_s']:g} s for a node"]
            case "copy_awaited":
                ranks, hosts = name_ranks(record["ranks"]), " and ".join(record["hosts"])
                left = f"the copies of {ranks} were in the memory of {hosts}, whose nodes are lost"
                return [f"{left}: waiting {record['wait_s']:g} s for a node that comes back there"]
            case "checkpoint_loaded":
                return self._began(record)
            case "node_set_aside" | "coordinator_resumed" | "copies_found":
                return [str(record["text"])]
            case "hang":
                return [f"where all ranks stood is in {record['file']}"]
            case "note":
                return [f"note{_of_rank(record)}: {record['text']}"]
        return []

    def _began(self, record: Record) -> list[str]:
        """All ranks begin at a checkpoint, which the first of them tells."""
        if self._begun_in == record["generation"]:
            return []
        self._begun_in, self._base = int(record["generation"]), int(record["step"])
        self.step = max(self.step, self._base)
        return [f"all ranks begin {beginning(record)}"]

    def _gathered(self, record: Record) -> list[str]:
        nodes, self.spares = counted(len(record["nodes"]), "node"), int(record["spares"])
        ready = f", {counted(self.spares, 'spare')} ready" if self.spares else ""
        return [f"{nodes} joined{ready}"]

    def _opened(self, record: Record) -> list[str]:
        cause, noticed_s = read_cause(record["cause"]), float(record["t"])
        began_s = self._began_s(cause, noticed_s)
        incident = _Open(noticed_s, began_s, is_echo(cause), _section(cause))
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
        incident.section = _section(cause)
        told, incident.held = incident.held is None, None
        if told:
            return ["; ".join([failure(record), *self._measures(cause)])]
        return [self._first_line(record, cause)]

    def _first_line(self, record: Record, cause: Cause) -> str:
        """An incident's failure, and what is done about it."""
        if self.step <= self._base and int(record["step"]) <= self._base + 1:
            since = f" after step {self._base}" if self._base else ""
            return f"{failure(record)}; nothing is committed yet{since}, all ranks start again"
        return f"{failure(record)}; {', '.join(['stopping', *self._measures(cause)])}"

    def _measures(self, cause: Cause) -> list[str]:
        """What is done about a failure; nothing that is not sure to be done."""
        if cause.kind is CauseKind.NODE:
            return ["a spare takes its place"] if self.spares else []
        if cause.kind is CauseKind.COORDINATOR:
            return []
        if cause.kind in _PROCESS_LIVES and not _ends_script(cause):
            return [f"the {'section' if _section(cause) else 'step'} is done again"]
        return ["a warm process is started for it"] if self._ranks != 1 else []

    def _again(self, record: Record) -> list[str]:
        """A note, once, if a rank has failed alike in several steps."""
        cause, rank, step = read_cause(record["cause"]), int(record["rank"]), int(record["step"])
        if not is_repeatable(cause):
            return []
        steps = self._failed.setdefault((rank, cause.kind, cause.signature or cause.text), [])
        if step in steps:
            return []
        steps.append(step)
        if len(steps) != _AGAIN:
            return []
        listed = ", ".join(str(step) for step in steps)
        return [
            f"note (rank {rank}): it fails alike again and again, so far in steps {listed}: "
            f"{cause_in_words(cause)}. Each time is made good and costs an incident; look for the "
            "cause in the script"
        ]

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
    """A failure as a clause: `rank 1 was killed by SIGKILL in step 5 (optimizer)`, or `rank 2 in
    step 9: ValueError: odd`. The texts of the core and the agent name their places."""
    who, text = f"rank {rank}", cause_in_words(cause)
    if cause.kind in (CauseKind.NODE, CauseKind.COORDINATOR):  # it names all its ranks
        return f"{text}, in step {step}"
    if cause.kind in _HERE:
        where = _of_step(cause.where or f"in step {step}", step)
        lost = cause.kind is CauseKind.PEER and text.startswith(_OF_A_RANK)
        return f"{who} {text} {where}" if lost else f"{who} {where}: {text}"
    if cause.kind in _DEATHS:
        text = _of_step(text, step)
    return text if _names(text, who) else f"{who}: {text}"


def _of_step(text: str, step: int) -> str:
    """`text`, with the step of a recovery that it ends with."""
    return f"{text} of step {step}" if text.endswith(_RECOVERY) else text


def _ends_script(cause: Cause) -> bool:
    """An exception outside of step and section: nothing catches it, and the process ends."""
    return cause.kind is CauseKind.EXCEPTION and cause.where.startswith(_OUTSIDE)


def _section(cause: Cause) -> str:
    """The section that the rank was in, `section after step 5`; "" if it was in none."""
    found = _SECTION.match(cause.where)
    return found[1] if found else ""


def cause_in_words(cause: Cause) -> str:
    """A cause's text as a person should read it, in one line."""
    text = " ".join(cause.text.split())
    if cause.fault is not None and cause.kind is CauseKind.EXCEPTION and _ON_PURPOSE.search(text):
        return f"fault on purpose ({cause.fault})"
    if cause.kind in _DEATHS and _IN_STEP.search(text):
        return f"{text} (forward or backward)"
    return text


def recovery(closed: Record, total_s: float, section: str = "") -> str:
    """The end of an incident, from its `incident_closed` record and the seconds it took. `section`:
    the one that was done again, if it was no step."""
    again = section or f"step {closed['step']}"
    reason = f" ({closed['reason']})" if closed.get("reason") else ""
    lost = f"{counted(int(closed['steps_lost']), 'step')} lost"
    how = [str(closed["rung"]), f"state from {source_in_words(str(closed['state_from']))}", lost]
    if reason and closed["state_from"] in _SAID_BY_REASON:
        del how[1]
    return f"{again} done again after {total_s:.2f} s - {', '.join(how)}{reason}"


def beginning(loaded: Record) -> str:
    """Where a job begins, from a `checkpoint_loaded` record."""
    behind = int(loaded["newest"]) - int(loaded["step"])
    late = f", {counted(behind, 'step')} behind the newest seen" if behind else ""
    passed = f" (passed over: {loaded['text']})" if loaded["text"] else ""
    where = "memory" if loaded["tier"] == "memory" else "the durable tier"
    return f"after step {loaded['step']}, with its checkpoint from {where}{late}{passed}"


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


def size_in_words(settings: RunSettings) -> str:
    """`4 ranks`, or `6 ranks of 3 nodes, 1 spare`."""
    ranks = counted(settings.world_size, "rank")
    if not settings.on_nodes:
        return ranks
    spares = f", {counted(settings.spares, 'spare')}" if settings.spares else ""
    return f"{ranks} of {counted(settings.slots, 'node')}{spares}"


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _names(text: str, what: str) -> bool:
    """Whether `what`, which ends in a number, is in `text`; `rank 1` is not in `rank 12`."""
    return re.search(rf"\b{what}\b", text) is not None


def _of_rank(record: Record) -> str:
    rank = record.get("rank")
    return "" if rank is None else f" (rank {rank})"
