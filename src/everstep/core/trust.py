"""Whose copy is believed when replicas of one state hold different bits.

Theory of operation. A rank that takes the state from several others is told by each what it holds,
as one digest. Where they differ, what is held by more than half of them is right, by the same
reasoning that makes replicas worth having; the others dissent. Once may be an accident on the way;
a rank that dissents in two receipts is *set aside*: what it holds counts as torn, so that it is
served no more, and takes the state from the others itself. So a corrupt copy is neither restored
for ever, nor the end of the job.

What it doesn't know: which bits differ, and why. Where no more than half of the sources agree
(there are only two, say), nobody is known to be wrong and nobody is set aside, but all of them are
suspects: one that then dissents from a majority is set aside at once. The second receipt without a
majority ends the job (`core.ladder`). A copy that is corrupt where it is the only one is believed:
nothing here could tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

TWICE = 2
"""Receipts in which a rank dissents before it is set aside."""


def dissent(held: Mapping[int, str]) -> tuple[int, ...]:
    """The ranks that hold something else than more than half of all do; none where no digest is
    held by so many.

    `held`: rank to the digest of the state that it holds. Pure.
    """
    if not held:
        return ()
    most, count = Counter(held.values()).most_common(1)[0]
    if 2 * count <= len(held):
        return ()
    return tuple(sorted(rank for rank, digest in held.items() if digest != most))
