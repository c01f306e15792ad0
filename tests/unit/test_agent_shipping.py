"""A node's bulk plane: copies between two of them, and the limit that holds in each direction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from everstep.agent.shelf import Area
from everstep.agent.shipping import Dock, Shipping
from everstep.errors import TransientError
from everstep.snapshot import Manifest, block_spans, digest

KEY = b"the secret of the job, 32 bytes."
BLOCK = 1 << 16
DATA = bytes(range(256)) * 1024
SLOW = 100.0  # bytes a second: `DATA` takes three quarters of an hour


class Room:
    """An area of a shelf, on paper."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    @contextmanager
    def bytes(self) -> Iterator[memoryview]:
        yield memoryview(self.data)


def manifest() -> Manifest:
    spans = block_spans(len(DATA), BLOCK)
    blocks = [digest(memoryview(DATA)[a:b]) for a, b in spans]
    made = SimpleNamespace(nbytes=len(DATA), block_bytes=BLOCK, blocks=blocks)
    return cast(Manifest, made)


async def ship(lender: dict[str, Any], taker: dict[str, Any]) -> bytearray:
    """A copy goes from node 1 to node 2, whose docks have these limits."""

    def shipping(number: int, limits: dict[str, Any]) -> Shipping:
        dock = Dock(host="127.0.0.1", ports=[0], key=KEY, on_refused=lambda *_: None, **limits)
        return Shipping(dock, number)

    one, two = shipping(1, lender), shipping(2, taker)
    empty = Room(bytes(len(DATA)))
    try:
        offer = one.lend(cast(Area, Room(DATA)), 2)
        await two.fetch(cast(Area, empty), manifest(), offer)
    finally:
        two.close()
        one.close()
        await asyncio.sleep(0)
    return empty.data


def run(lender: dict[str, Any], taker: dict[str, Any]) -> bytearray:
    return asyncio.run(asyncio.wait_for(ship(lender, taker), 60))


def test_a_copy_arrives_under_a_limit_that_leaves_room_for_it() -> None:
    assert run({"bytes_per_s": 1e9}, {"bytes_per_s": 1e9}) == DATA


@pytest.mark.parametrize("slow", ["lender", "taker"])
def test_the_limit_holds_for_what_goes_out_and_for_what_comes_in(slow: str) -> None:
    limits: dict[str, dict[str, Any]] = {"lender": {}, "taker": {}}
    limits[slow]["bytes_per_s"] = SLOW
    limits["taker"]["transfer_timeout_s"] = 0.3
    limits["lender"]["transfer_timeout_s"] = 0.3
    with pytest.raises(TransientError):
        run(**limits)
