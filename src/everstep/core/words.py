"""How ranks, signals and broken connections are named in sentences.

Purpose: every reason and error names them in the same short way. Pure; knows nothing of what the
ranks do.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

STOP_COMMAND = "`everstep stop`"
"""By what a person asks for the end from elsewhere."""
NODE_LEFT = "node left"
"""The signature of a cause: somebody has ended the node, which has said so."""
_BREAKS = {  # what an error of a communication library says, and what it means
    "connection reset": "connection reset",
    "connection closed": "connection closed",
    "connection refused": "connection refused",
    "broken pipe": "connection closed",
    "timed out": "timed out",
    "timeout": "timed out",
}
_SOURCE_PLACES = re.compile(r"^(?:\s*\[[^\]]*\]\s*)+")
_LONGEST = 120


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks for a sentence: "rank 1", "ranks 0, 2, 3", "ranks 0-7"; "no rank" when there are
    none.

    Three and more neighbours are joined, so that a thousand ranks still fit on a line.
    """
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    parts: list[str] = []
    start = 0
    for i in range(1, len(ordered) + 1):
        if i < len(ordered) and ordered[i] == ordered[i - 1] + 1:
            continue
        run = ordered[start:i]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) >= 3 else [str(rank) for rank in run]
        start = i
    return f"rank {parts[0]}" if len(ordered) == 1 else f"ranks {', '.join(parts)}"


def verb(ranks: Iterable[int], singular: str, plural: str) -> str:
    """`name_ranks(ranks)` followed by the form of the verb that fits their number."""
    listed = sorted(set(ranks))
    return f"{name_ranks(listed)} {singular if len(listed) == 1 else plural}"


def name_signal(number: int) -> str:
    """The name of a signal, "SIGKILL" for 9; "signal 99" when this system has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def name_break(error: str) -> str:
    """An error of a collective in one short line: "lost touch with a peer (connection reset)".

    The libraries name their source files, addresses, and where to look; that is detail. An error
    that is no broken connection keeps its own first sentence: "failed in a collective (...)".
    """
    lowered = error.lower()
    for sign, meaning in _BREAKS.items():
        if sign in lowered:
            return f"lost touch with a peer ({meaning})"
    first = next((line for line in error.splitlines() if line.strip()), "")
    sentence = _SOURCE_PLACES.sub("", first).strip().split(". ")[0].rstrip(".")
    if len(sentence) > _LONGEST:
        sentence = sentence[: _LONGEST - 3] + "..."
    return f"failed in a collective ({sentence})" if sentence else "failed in a collective"
