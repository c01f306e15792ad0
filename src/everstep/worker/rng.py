"""Keyed random streams: every generator is seeded anew, from (key, step), at each step's start and end.

Theory of operation: at `protect`, the states of the rank's generators (Python, NumPy if it is imported, torch's CPU
and devices) are hashed into the rank's key. A step starts with all generators seeded from (key, step, "step"), so a
second attempt draws the same numbers as the first; after the commit they are seeded from (key, step, "after"). So no
state of a generator ever needs to be saved, a replacement has its own rank's streams and never its donor's, and ranks
that the script had seeded alike stay alike.
"""

from __future__ import annotations

import random
import sys

import torch
import xxhash

from everstep.worker.codec import buffer_of


def make_key() -> bytes:
    """16 bytes that stand for the present states of all generators. Draws from none of them."""
    digest = xxhash.xxh3_128()
    digest.update(repr(random.getstate()).encode())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        digest.update(repr((name, rest)).encode())
        digest.update(keys.tobytes())
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    for state in states:
        digest.update(buffer_of(state))
    return digest.digest()


def seed_all(key: bytes, step: int, moment: str) -> None:
    """Seed every generator from (key, step, moment). `moment`: "step", "after" or "data"."""
    material = key + step.to_bytes(8, "little") + moment.encode()
    seed = xxhash.xxh3_64_intdigest(material)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
