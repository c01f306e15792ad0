"""Deadlines, and pauses between two looks at a store.

Theory of operation. A pause grows from one look to the next, and is drawn at random from its upper
half, so that ranks that began together do not go on asking together. None is longer than what is
left of the deadline. Who must be able to end a wait hands in an event.

It does not know what is waited for.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from everstep.tiers.store import Stopped, StoreError

_RANDOM = random.SystemRandom()  # the script's own stream must not move by a draw here

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0
_GROWTH = 1.6


class Deadline:
    """`seconds` from now on, by `clock` (monotonic). `stop`: ends waits when it is set. `pause`:
    how it waits where there is no `stop`."""

    def __init__(
        self,
        seconds: float,
        *,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.seconds = seconds
        self.stop = stop
        self._clock = clock
        self._sleep = pause
        self._end = clock() + seconds
        self._next_s = FIRST_PAUSE_S

    def left(self) -> float:
        """Seconds that are left; 0 when it is over."""
        return max(0.0, self._end - self._clock())

    def check(self) -> None:
        """Raises Stopped when it was told to stop, StoreError when it is over."""
        if self.stop is not None and self.stop.is_set():
            raise Stopped("it was told to stop")
        if not self.left():
            raise StoreError(f"it was not done within {self.seconds:g} s")

    def wait(self, seconds: float) -> None:
        """Wait so long. Raises as `check`, at once when the deadline will be over by then."""
        if seconds > self.left():
            raise StoreError(f"it would not be done within {self.seconds:g} s")
        if seconds > 0:
            if self.stop is not None:
                self.stop.wait(seconds)
            else:
                self._sleep(seconds)
        self.check()

    def pause(self) -> bool:
        """Wait until it is time for the next look. False, and no wait, when the deadline is over.
        Raises Stopped."""
        left = self.left()
        if left <= 0:
            return False
        seconds = min(left, self.draw())
        if self.stop is None:
            self._sleep(seconds)
        elif self.stop.wait(seconds):
            raise Stopped("it was told to stop")
        return True

    def draw(self) -> float:
        """Seconds of the next pause, without waiting."""
        drawn = self._next_s * _RANDOM.uniform(0.5, 1.0)
        self._next_s = min(self._next_s * _GROWTH, LONGEST_PAUSE_S)
        return drawn
