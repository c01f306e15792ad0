"""Keyed random streams: every generator is seeded anew, from (key, step), at each step's start and
end.

Theory of operation: at `protect`, the state of each of the rank's generators (torch with its
devices, Python, NumPy) is hashed into that generator's key; the three together are the rank's key.
A step starts with all generators seeded from (their key, step, "step"), so a second attempt draws
the same numbers as the first; after the commit they are seeded from (key, step, "after"). So no
state of a generator ever needs to be saved, a replacement has its own rank's streams and never its
donor's, and ranks that the script had seeded alike stay alike. Each generator has a key of its own,
so that one which the script did not seed does not make the others differ from run to run.

Where the script's own streams are carried instead (`everstep.init(rng="carry")`), nobody seeds: the
states of all generators (`states`) are put back before a second attempt, and travel in the rank's
capsule. Only data is still drawn from a keyed stream, beside the script's own."""

from __future__ import annotations

import array
import random
import sys
from typing import Any

import msgspec
import torch
import xxhash

from everstep.errors import UserError
from everstep.worker.codec import buffer_of

KEYED, CARRY = "keyed", "carry"

_PART_BYTES = 16


def make_key() -> bytes:
    """The rank's key: 16 bytes each for torch, Python and NumPy. Draws from none of them."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    of_torch = xxhash.xxh3_128()
    for state in states:
        of_torch.update(buffer_of(state))
    of_python = xxhash.xxh3_128(repr(random.getstate()).encode())
    of_numpy = xxhash.xxh3_128()
    numpy = sys.modules.get("numpy")
    if numpy is None:  # imported later, it follows torch's
        of_numpy.update(of_torch.digest())
    else:
        name, keys, *rest = numpy.random.get_state()
        of_numpy.update(repr((name, rest)).encode())
        of_numpy.update(keys.tobytes())
    return of_torch.digest() + of_python.digest() + of_numpy.digest()


def _seed_torch(number: int) -> None:
    """As `torch.manual_seed`, which costs a hundred times more where there is no device to seed."""
    if torch.cuda.is_available() and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.manual_seed(number)  # it queues the seed for the day the device is initialized
        return
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


def seed_all(key: bytes, step: int, moment: str) -> None:
    """Seed every generator from (key, step, moment). `moment`: "step", "after", "data", or the name
    of a section."""
    suffix = step.to_bytes(8, "little") + moment.encode()

    def seed(part: int) -> int:
        return xxhash.xxh3_64_intdigest(key[part * _PART_BYTES : (part + 1) * _PART_BYTES] + suffix)

    _seed_torch(seed(0))
    random.seed(seed(1))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed(2) & 0xFFFFFFFF)


def carries(mode: str) -> bool:
    """Whether `mode` says that the script's own streams are kept. Raises UserError for no mode."""
    if mode not in (KEYED, CARRY):
        raise UserError(
            f'everstep.init(rng={mode!r}): it is "{KEYED}" (each step seeds the generators; the '
            f'default) or "{CARRY}" (the script\'s own streams go on)'
        )
    return mode == CARRY


def states() -> bytes:
    """The states of all generators; some 10 KB and 50 us without devices. Waits for devices."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": _bytes(torch.get_rng_state()),
        "python": [version, array.array("I", words).tobytes(), gauss],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = [name, keys.tobytes(), *rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = [_bytes(state) for state in torch.cuda.get_rng_state_all()]
    return msgspec.msgpack.encode(found)


def restore(data: bytes) -> None:
    """Put back what `states` returned, in this or another process of the rank."""
    found = msgspec.msgpack.decode(data)
    torch.set_rng_state(_tensor(found["torch"]))
    version, words, gauss = found["python"]
    unpacked = array.array("I")
    unpacked.frombytes(words)
    random.setstate((version, tuple(unpacked), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in found:
        name, keys, *rest = found["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
    if "cuda" in found:
        torch.cuda.set_rng_state_all([_tensor(state) for state in found["cuda"]])


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(buffer_of(state))


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
