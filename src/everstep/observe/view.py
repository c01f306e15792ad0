"""Who watches a job: what the agent shows, and to what."""

from __future__ import annotations

from typing import Any, Protocol


class View(Protocol):
    """Shows a job while it runs. Called on the agent's loop: what blocks here holds up every
    recovery."""

    def record(self, record: dict[str, Any]) -> None:
        """A journal record, as it was just written; notes of a key that was shown before are left
        out."""
        ...

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """A line that a worker printed, without its end. `stream`: "stdout" or "stderr"."""
        ...


class Both:
    """Two views of one job; `first` is shown everything first."""

    def __init__(self, first: View, second: View) -> None:
        self._views = (first, second)

    def record(self, record: dict[str, Any]) -> None:
        """A journal record."""
        for view in self._views:
            view.record(record)

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """A line that a worker printed."""
        for view in self._views:
            view.output(rank, incarnation, stream, line)
