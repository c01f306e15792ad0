"""A limit in bytes a second that several streams share, so that copies leave room on the fabric.

Theory of operation. Whoever wants to move bytes books them: the booking says when the bytes before
it will have gone, and he waits until then. Bookings are in order and add up, so the rate holds over
all streams together, however many they are. What is not used is not saved up, but for `BURST_S`.

It doesn't know what the fabric could carry, nor what others send on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 0.05
"""Seconds' worth of bytes that may go at once after a pause: about a timer's grain on a busy host.
"""
PIECE_BYTES = 256 << 10
"""Most bytes to book at a time, and fewer where they would take longer than `BURST_S`: the others
wait for a stream's whole turn."""


class Throttle:
    """`bytes_per_s` over all that share it; None is no limit. Any thread. `clock`: monotonic
    seconds."""

    def __init__(
        self, bytes_per_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"a throttle of {bytes_per_s} bytes a second would never let go")
        self._rate = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_s = float("-inf")  # when all that is booked will have gone

    @property
    def piece_bytes(self) -> int | None:
        """Most bytes to book at a time; None when there is no limit."""
        if self._rate is None:
            return None
        return max(1, min(PIECE_BYTES, int(self._rate * BURST_S)))

    def book(self, nbytes: int) -> float:
        """Seconds to wait before `nbytes` may go. Does not block."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(self._free_s, now - BURST_S)
            self._free_s = start + nbytes / self._rate
            return max(0.0, self._free_s - now)


UNLIMITED = Throttle(None)
