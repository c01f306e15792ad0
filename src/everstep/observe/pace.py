"""How fast a run goes, while it goes: rate of steps, and goodput so far.

Both are as the ledger defines them, from commit to commit with incidents left out, but told from
the records seen so far and kept in a few numbers.

Steps that were made without a coordinator are all written when there is one again, in one moment
that says nothing of their pace. So the rate is taken between moments, with all steps between them,
and what comes at almost the same time is one moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

_RATE_OVER_MOMENTS = 32
_APART_S = 0.1


class Pace:
    """Is fed every record in the journal's order. Not thread-safe."""

    def __init__(self) -> None:
        self._moments: deque[tuple[float, int]] = deque(maxlen=_RATE_OVER_MOMENTS)  # and the step
        self._begun_s = 0.0  # the last of them
        self._first_s: float | None = None
        self._last_s = 0.0
        self._good_s = 0.0
        self._good_from_s: float | None = None
        self._open: set[int] = set()

    def see(self, record: Mapping[str, Any]) -> None:
        """Take note of a journal record."""
        now_s = float(record.get("t", self._last_s))
        self._first_s = now_s if self._first_s is None else self._first_s
        self._last_s = now_s
        match record.get("event"):
            case "step" if not self._open:
                self._see_step(now_s, int(record["step"]))
                self._good_s += now_s - (now_s if self._good_from_s is None else self._good_from_s)
                self._good_from_s = now_s
            case "setup_done" if not self._open:
                self._good_from_s = now_s
            case "incident_opened":
                self._open.add(record["incident"])
                self._moments.clear()
            case "incident_closed":
                self._open.discard(record["incident"])
                self._good_from_s = now_s

    def _see_step(self, now_s: float, step: int) -> None:
        if self._moments and now_s - self._begun_s < _APART_S:
            self._moments[-1] = (now_s, step)
        else:
            self._moments.append((now_s, step))
            self._begun_s = now_s

    @property
    def recovering(self) -> bool:
        """An incident is open."""
        return bool(self._open)

    @property
    def steps_per_s(self) -> float | None:
        """Steps a second, of late; None where it is not known."""
        if len(self._moments) < 2:
            return None
        (first_s, first), (last_s, last) = self._moments[0], self._moments[-1]
        return (last - first) / (last_s - first_s)

    @property
    def share(self) -> float | None:
        """Goodput so far, 0 to 1; None where it is not known."""
        if self._first_s is None or self._last_s <= self._first_s:
            return None
        return self._good_s / (self._last_s - self._first_s)

    def rate(self) -> list[str]:
        """`12.3 steps/s`, where it is known."""
        rate = self.steps_per_s
        return [] if rate is None else [f"{rate:.1f} steps/s"]

    def goodput(self) -> list[str]:
        """`goodput 98.1 %`, where it is known."""
        share = self.share
        return [] if share is None else [f"goodput {100 * share:.1f} %"]
