"""What a person may have meant who wrote a word that is none of those known.

Theory of operation: the most alike of the known words, by the share of characters they have in
common in order; a known word's beginning counts as much as the whole of it, so that `nproc` finds
`nproc_per_node`. It does not know what the words stand for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The known word that `word` was probably meant for, "" if none is near enough.

    `likeness`: the least that counts, 0 to 1. Pure."""

    def alike(name: str) -> tuple[float, float]:
        whole, begun = (
            difflib.SequenceMatcher(None, word, part).ratio() for part in (name, name[: len(word)])
        )
        return max(whole, begun), whole

    best = max(known, key=alike, default="")
    return best if best and alike(best)[0] >= likeness else ""
