"""Deadlines, and pauses between two looks at a store.

Theory of operation. A pause grows from one look to the next, and is drawn at random from its upper
half, so that ranks that began together do not go on asking together. None is longer than what is
left of the deadline.

It does not know what is waited for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0
_GROWTH = 1.6


class Deadline:
    """`seconds` from now on, by a monotonic clock. `pause`: how it waits; who must be able to stop
    a wait hands in one that raises."""

    def __init__(
        self,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.seconds = seconds
        self._clock = clock
        self._pause = pause
        self._end = clock() + seconds
        self._next_s = FIRST_PAUSE_S

    def left(self) -> float:
        """Seconds that are left; 0 when it is over."""
        return max(0.0, self._end - self._clock())

    def pause(self) -> bool:
        """Wait until it is time for the next look. False, and no wait, when the deadline is
        over."""
        left = self.left()
        if left <= 0:
            return False
        self._pause(min(left, self.draw()))
        return True

    def draw(self) -> float:
        """Seconds of the next pause, without waiting."""
        drawn = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._next_s * _GROWTH, LONGEST_PAUSE_S)
        return drawn
