"""The order of samples: a shuffle of which any place can be computed at once.

Theory of operation
    A recovery asks for the batch of step k with nothing in hand but k. So the order is not drawn
    and stored: it is a keyed permutation, computed place by place in O(1) memory. `position` counts
    samples over all epochs; position p lies in epoch p // size, and each epoch has a permutation
    with a key of its own, made of the seed and the epoch.

    The permutation is an alternating Feistel network on a rectangle of ceil(sqrt(size)) rows, made
    even, and as many columns as hold `size` cells. A cell is (row, column); a round turns the row
    by a hash of the column (mod rows), the next one the column by a hash of the row (mod columns).
    Each round can be undone, whatever the hash gives, so the whole is a permutation of the
    rectangle. The few cells past `size` (fewer than `rows`) are stepped over by applying the
    permutation again until a cell below `size` comes (cycle walking), which leaves a permutation of
    range(size).

    The hash is XXH3 (64 bits, the round's key as its seed) of the eight little-endian bytes of its
    input: it is specified to give the same everywhere, and so does this module, on every platform
    and Python version. The golden vectors in tests/unit/test_order.py hold it to that; an order
    that changed would make old runs irreproducible.

What it does not know
    What a sample is, ranks, batches. It is a shuffle, no cipher: the key can be found by one who
    wants to. Up to about ten samples some permutations come more often than others, and a sample
    stands in some places about one per cent more often. docs/design/data-order.md has the figures.

Source: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (Feistel network
over a product of two moduli; cycle walking). M. Luby, C. Rackoff, SIAM J. Comput. 17(2), 1988 (four
rounds are the least).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt

from xxhash import xxh3_64_intdigest, xxh3_128_digest

MAX_SIZE = 2**63
"""The largest size: sample numbers fit a signed 64-bit integer."""

_ROUND_PAIRS = 6
"""Rounds in twos (row, column). Two pairs are the least that look random to one who sees single
places; the other four are for small sizes, where the rectangle is so narrow that a round moves
little (docs/design/data-order.md)."""


def permute(index: int, size: int, key: int | bytes) -> int:
    """Where `index` goes in the permutation of range(size) that `key` names.

    Args: `index` in range(size); `size` from 1 to 2**63; `key` any integer or bytes (an integer and
    its text are two different keys). Returns an integer in range(size); over all indexes each is
    returned once. Raises ValueError when `index` or `size` is out of range. Blocks: no. Any thread.
    """
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"size is {size}; it must be from 1 to 2**63")
    if not 0 <= index < size:
        raise ValueError(f"index is {index}; it must be in range({size})")
    return _permute_all((index,), size, _round_keys(_encode(key)))[0]


class Order:
    """The shuffled order of a data set of `size` samples, epoch after epoch without end.

    Every epoch holds each sample once. Equal (size, seed) give equal orders everywhere. Any thread;
    blocks nowhere.
    """

    __slots__ = ("_epoch_keys", "_seed", "_size")

    def __init__(self, size: int, seed: int | bytes) -> None:
        """Args: `size` in samples, from 1 to 2**63; `seed` any integer or bytes. Raises ValueError
        for another size."""
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"size is {size}; it must be from 1 to 2**63")
        self._size = size
        self._seed = _encode(seed)
        self._epoch_keys: tuple[int, _RoundKeys] | None = None

    def sample(self, position: int) -> int:
        """The sample at `position`, counted from 0 over all epochs. Raises ValueError when it is
        negative."""
        return self.samples(position, 1)[0]

    def samples(self, start: int, count: int) -> list[int]:
        """The samples at positions `start` to `start + count - 1`; about 2 us each.

        Raises ValueError when `start` or `count` is negative.
        """
        if start < 0 or count < 0:
            raise ValueError(f"start is {start} and count is {count}; neither may be negative")
        found: list[int] = []
        end = start + count
        while start < end:
            epoch, first = divmod(start, self._size)
            last = min(first + end - start, self._size)
            found += _permute_all(range(first, last), self._size, self._keys_of(epoch))
            start += last - first
        return found

    def _keys_of(self, epoch: int) -> _RoundKeys:
        """The keys of `epoch`; the last epoch's are kept. One assignment of a tuple, so any thread
        may come in."""
        kept = self._epoch_keys
        if kept is None or kept[0] != epoch:
            kept = (epoch, _round_keys(b"epoch %d of " % epoch + self._seed))
            self._epoch_keys = kept
        return kept[1]


_RoundKeys = tuple[tuple[int, int], ...]


def _permute_all(indexes: Iterable[int], size: int, keys: _RoundKeys) -> list[int]:
    """The permutation of range(size) under `keys`, for each of `indexes`. The hot loop: everything
    in it is local."""
    rows = isqrt(size - 1) + 1
    rows += rows % 2  # turns of an odd cycle are even permutations: no odd one would ever come
    columns = -(-size // rows)
    hash_of = xxh3_64_intdigest
    found: list[int] = []
    for index in indexes:
        cell = index
        while True:
            row, column = divmod(cell, columns)
            for row_key, column_key in keys:
                row = (row + hash_of(column.to_bytes(8, "little"), row_key)) % rows
                column = (column + hash_of(row.to_bytes(8, "little"), column_key)) % columns
            cell = row * columns + column
            if cell < size:
                break
        found.append(cell)
    return found


def _encode(key: int | bytes) -> bytes:
    """Bytes that name `key`: decimal text for an integer, so that any size and sign has one
    form."""
    return b"int:%d" % key if isinstance(key, int) else b"bytes:" + key


def _round_keys(key: bytes) -> _RoundKeys:
    """Two 64-bit keys for each pair of rounds, by hashing `key` and the pair's number."""
    pairs = []
    for number in range(_ROUND_PAIRS):
        digest = xxh3_128_digest(b"everstep order 1 round %d " % number + key)
        pairs.append((int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")))
    return tuple(pairs)
