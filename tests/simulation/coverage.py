"""What simulated schedules have met: rungs, causes, faults by phase, events by phase and status.

A simulation that never comes to a place proves nothing about it, so it is counted and shown.
Knows nothing of how a schedule is drawn."""

from __future__ import annotations

from collections import Counter

from everstep.core.job import Phase
from everstep.core.simulate import Outcome

_PHASES = [phase.value for phase in Phase if phase not in (Phase.NEW, Phase.ENDED)]


class Coverage:
    """Counts over many outcomes. `met`: by words of the journal and some of our own. `hits`:
    (fault, phase of the job, whom). `events`: (phase of the job, event, status of the sender)."""

    def __init__(self) -> None:
        self.schedules = 0
        self.met: Counter[str] = Counter()
        self.hits: Counter[tuple[str, str, str]] = Counter()
        self.events: Counter[tuple[str, str, str]] = Counter()

    def add(self, outcome: Outcome) -> None:
        """Count one more run."""
        self.schedules += 1
        self.hits += outcome.hits
        self.events += outcome.met
        for line in outcome.records:
            self.met[line["event"]] += 1
            match line["event"]:
                case "incident_closed":
                    self.met[f"{line['rung']} {line['state_from']}"] += 1
                case "incident_opened" | "incident_cause":
                    self.met[line["cause"]["kind"]] += 1
                case "planned":
                    self.met["advance"] += "own gradients" in line["reason"]
                    self.met["advance"] += "own results" in line["reason"]
                    self.met["section"] += "section" in line["reason"]
                case "parked":
                    self.met["torn"] += line["torn"] and not line["joiner"]
        self.met["ahead"] += outcome.ahead
        self.met["lost"] += "lost" in outcome.end.text
        self.met["messages lost"] += outcome.lost
        self.met["resumed"] += outcome.resumed
        self.met["undone"] += outcome.undone
        self.met["ended well"] += outcome.end.exit_code == 0

    def merge(self, other: Coverage) -> None:
        """Add what another has counted."""
        self.schedules += other.schedules
        self.met += other.met
        self.hits += other.hits
        self.events += other.events

    def table(self) -> str:
        """All counts, for people."""
        lines = [f"{self.schedules} schedules"]
        lines += ["", "faults by phase of the job"]
        lines += _by_phase(_folded(self.hits, first=0, second=1))
        joiners = {key: n for key, n in self.hits.items() if key[2] == "joiner"}
        lines += ["", "of those, on joiners"]
        lines += _by_phase(_folded(joiners, first=0, second=1))
        lines += ["", "events by phase of the job"]
        lines += _by_phase(_folded(self.events, first=1, second=0))
        stale = {key: n for key, n in self.events.items() if key[2] in ("stale", "doomed")}
        lines += ["", "of those, from processes that no longer count"]
        lines += _by_phase(_folded(stale, first=1, second=0))
        lines += ["", "met"]
        lines += [f"  {what:<24}{count:>10,}" for what, count in sorted(self.met.items())]
        return "\n".join(lines)


def _folded(
    counts: dict[tuple[str, str, str], int], *, first: int, second: int
) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for key, count in counts.items():
        found[key[first], key[second]] += count
    return found


def _by_phase(counts: Counter[tuple[str, str]]) -> list[str]:
    rows = sorted({what for what, _ in counts})
    head = "  " + " " * 14 + "".join(f"{phase:>14}" for phase in _PHASES)
    return [head] + [
        f"  {row:<14}" + "".join(f"{counts[row, phase]:>14,}" for phase in _PHASES) for row in rows
    ]
