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
