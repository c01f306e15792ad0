"""Copies after which the training failed again: set aside after the second time. Data, pure.

Theory of operation. A copy can be wrong in a way that no digest tells: it was saved wrong. Who has
restored from copies, and then failed before anything newer was saved, says so with the receipt of
that load (`after`). A copy that this has happened to twice is not loaded any more: the same part of
another tier is, else an older step. As with replicas (`core/trust.py`), once may be an accident on
the way.

All of it is plain data, so that whoever starts the next attempt can hand it on.

It does not know what failed, nor whether the copy was the cause.
"""

from __future__ import annotations

import msgspec

from everstep.core.trust import TWICE
from everstep.tiers.receipt import Receipt


class Suspects(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often a failure followed a restore from each copy. `failures`: by `named`."""

    failures: dict[str, int] = {}

    def after(self, receipt: Receipt) -> Suspects:
        """With one more failure of the copies that `receipt` has."""
        failures = dict(self.failures)
        for part in receipt.parts:
            copy = named(part.tier, part.where, receipt.step, part.rank)
            failures[copy] = failures.get(copy, 0) + 1
        return Suspects(failures=failures)

    def aside(self, step: int) -> tuple[str, ...]:
        """The copies of `step` that are set aside, by name."""
        return tuple(
            sorted(
                copy
                for copy, count in self.failures.items()
                if count >= TWICE and copy.startswith(f"{step}/")
            )
        )


def named(tier: str, where: str, step: int, rank: int) -> str:
    """A copy of rank's part."""
    return f"{step}/{rank} {tier} {where}"
