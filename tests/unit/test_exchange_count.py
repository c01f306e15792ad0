"""What an exchange of addresses costs the coordinator, counted at the real shell."""

from __future__ import annotations

import functools

import pytest
from benchmarks.bench_exchange import (
    RANKS_PER_NODE,
    count,
    gloo_payload,
    largest_gloo_world,
    nccl_payload,
    store_calls,
)

from everstep.wire import messages, nodes
from everstep.wire.channel import ChannelError
from everstep.wire.frames import Limits, encode_data


@pytest.mark.parametrize("world", [8, 64, 1000 * RANKS_PER_NODE])
def test_a_rank_sends_one_message_and_a_node_gets_one(world: int) -> None:
    counts = count(world, nccl_payload)
    assert (counts.messages_in, counts.messages_out) == (world, world // RANKS_PER_NODE)
    assert counts.messages_in + counts.messages_out < store_calls(world) / world


def test_what_goes_out_is_what_came_in_once_for_each_node() -> None:
    """Beside the entries there are some bytes for each, and for each message."""
    world = 64
    there = world // RANKS_PER_NODE
    payload = functools.partial(gloo_payload, world)
    counts = count(world, payload)
    entries = there * sum(len(payload(rank)) for rank in range(world))
    assert entries < counts.bytes_out < entries + there * (world * 6 + 128)
    assert counts.bytes_in < world * (len(payload(world)) + 128)


def test_the_largest_gloo_group_is_bounded_by_the_largest_message() -> None:
    """gloo's entry grows with the group."""

    def answer(world: int) -> bytes:
        entries = dict.fromkeys(range(world), gloo_payload(world, world))
        addresses = messages.Addresses(generation=0, group="world", entries=entries)
        told = nodes.Tell(to=((0, 0),), message=addresses)
        return encode_data(told, Limits().max_message_bytes)

    largest = largest_gloo_world()
    assert answer(largest)
    with pytest.raises(ChannelError, match="exceeds the cap"):
        answer(largest + 2)
