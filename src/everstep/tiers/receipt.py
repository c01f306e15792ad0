"""The receipt of a load: which step, from which tiers, what was refused and why. Data and words."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """What was not taken. `tier`, `where`: of the copy; `step`: of the checkpoint, None where the
    whole tier did not answer; `rank`: of the part, None for the whole checkpoint; `why`: for a
    person; `damaged`: it is gone or wrong, and not only out of reach."""

    tier: str
    where: str
    step: int | None = None
    rank: int | None = None
    why: str
    damaged: bool = False

    def __str__(self) -> str:
        what = [] if self.step is None else [f"step {self.step}"]
        what += [] if self.rank is None else [f"rank {self.rank}'s part"]
        return f"{', '.join([*what, self.tier])} ({self.where}): {self.why}"


class PartSource(msgspec.Struct, frozen=True, kw_only=True):
    """From where bytes of a part came. `nbytes`: those that were read there."""

    rank: int
    tier: str
    where: str
    nbytes: int


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What one process loaded. `behind`: steps between this one and the newest that any tier says
    it has. `seconds`: spent in reads. `nbytes`: read and checked, whole blocks."""

    series: str
    step: int
    newest: int
    parts: tuple[PartSource, ...] = ()
    seconds: float = 0.0
    refused: tuple[Refusal, ...] = ()

    @property
    def behind(self) -> int:
        """Steps behind the newest that was seen."""
        return self.newest - self.step

    @property
    def nbytes(self) -> int:
        """Bytes that were read."""
        return sum(part.nbytes for part in self.parts)

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that gave bytes, that which gave the most first."""
        return by_bytes(self.parts)

    @property
    def tier(self) -> str:
        """The tier that answered; several with a plus between them; `none`: nothing was read."""
        return "+".join(self.tiers) or "none"

    def __str__(self) -> str:
        late = f", {self.behind} behind the newest seen" if self.behind else ""
        refused = "".join(f"; refused: {refusal}" for refusal in self.refused)
        return (
            f"step {self.step} of {self.series} from {self.tier}: {self.nbytes} bytes in "
            f"{self.seconds:.3f} s{late}{refused}"
        )


def by_bytes(parts: Iterable[PartSource]) -> tuple[str, ...]:
    """Tiers by the bytes that they gave, most first."""
    given: dict[str, int] = {}
    for part in parts:
        given[part.tier] = given.get(part.tier, 0) + part.nbytes
    return tuple(sorted(given, key=lambda tier: (-given[tier], tier)))
