"""Blocks of parts that were read and checked, kept for the next range beside them."""

from __future__ import annotations

import threading
from collections import OrderedDict


class BlockCache:
    """Blocks that were read and checked, the least used going first when they exceed a cap. Any
    thread."""

    def __init__(self, cap_bytes: int) -> None:
        self._cap, self._held = cap_bytes, 0
        self._blocks: OrderedDict[tuple[int, int], memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int]) -> memoryview | None:
        """The block, if it is here. `key`: rank and number."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            return block

    def put(self, key: tuple[int, int], block: memoryview) -> None:
        """Keep a block, and drop others for it."""
        with self._lock:
            if key in self._blocks or block.nbytes > self._cap:
                return
            self._blocks[key] = block
            self._held += block.nbytes
            while self._held > self._cap:
                self._held -= self._blocks.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._blocks.clear()
            self._held = 0
