"""Which steps and sections each rank has committed, whoever held it.

Theory of operation. A rank's *position* is (steps committed, sections done after the last of them);
positions are ordered as pairs are. Beside each rank's position stands how many ranks are at each,
so that the least and the newest of all cost nothing to know: ranks are never far apart, since a
step's collectives hold them together.

A message that comes late, or twice, is of a position that its rank has passed: `made` takes only
what leads on. Only a plan takes a rank back (`cut`).

What it doesn't know: who holds a rank, and what a step is.
"""

from __future__ import annotations

from collections import Counter

from everstep.types import Position

_START: Position = (0, 0)


class Commits:
    """The position of every rank of a world, which all begin at `start`. Pure state."""

    def __init__(self, world_size: int, start: Position = _START) -> None:
        self._of = [start] * world_size
        self._ranks_at = Counter({start: world_size})

    def __getitem__(self, rank: int) -> int:
        """The steps that `rank` has committed."""
        return self._of[rank][0]

    def position(self, rank: int) -> Position:
        """Where `rank` stands."""
        return self._of[rank]

    def made(self, rank: int, position: Position) -> None:
        """`rank` has come to `position`. Nothing when it is there, or further."""
        if position > self._of[rank]:
            self._put(rank, position)

    def cut(self, position: Position) -> None:
        """All ranks that stand after `position` go back to it. O(ranks) if there are any."""
        if self.newest <= position:
            return
        for rank, stands_at in enumerate(self._of):
            if stands_at > position:
                self._put(rank, position)

    def _put(self, rank: int, position: Position) -> None:
        before = self._of[rank]
        self._ranks_at[before] -= 1
        if not self._ranks_at[before]:
            del self._ranks_at[before]
        self._ranks_at[position] += 1
        self._of[rank] = position

    @property
    def least(self) -> Position:
        """The position that every rank has reached."""
        return min(self._ranks_at)

    @property
    def newest(self) -> Position:
        """The furthest position of any rank."""
        return max(self._ranks_at)

    def validate(self) -> None:
        """Assert that the counts are those of the positions. O(ranks)."""
        assert self._ranks_at == Counter(self._of), self._ranks_at
