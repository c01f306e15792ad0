"""Checkpoints by an address, as a person writes it: `s3://bucket/prefix#run/42`.

An address is a place, and behind a `#` a series and a step, if they are meant. A place is a
directory, the URL of an object store, or the word `memory`: that of the hosts, by the agent that
runs on this one.

It does not know what is asked of them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everstep.errors import UserError
from everstep.tiers import names
from everstep.tiers.find import Tier
from everstep.tiers.open import open_store
from everstep.tiers.reading import Reader
from everstep.tiers.series import Series
from everstep.tiers.store import Store

MEMORY = "memory"
LIST_S = 120.0
"""Deadline of a listing of all that is in a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Parts of an address; None for what it does not say."""

    place: str
    series: str | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A store that is open. `tier`: `memory` or `durable`."""

    tier: str
    store: Store

    def source(self, series: Reader) -> Tier:
        """It as a tier, of which `series` is read."""
        return Tier.memory(series) if self.tier == MEMORY else Tier.durable(series)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Several places, the nearest first, and what in them is meant. `key`: signs and checks."""

    places: tuple[Place, ...]
    series: str | None
    step: int | None
    key: bytes | None
    require_signature: bool

    def reader(self, place: Place, series: str) -> Series:
        """A series in a place."""
        return Series(place.store, series, key=self.key, require_signature=self.require_signature)

    def tiers(self, series: str) -> list[Tier]:
        """All places, to load a series from."""
        return [place.source(self.reader(place, series)) for place in self.places]

    def all_series(self) -> list[str]:
        """Series that any place has, or the one that is meant. Lists all objects."""
        if self.series is not None:
            return [self.series]
        return sorted({name for place in self.places for name in series_in(place.store)})

    def one_series(self) -> str:
        """The series that is meant, or the only one that there is. Raises UserError."""
        found = self.all_series()
        if len(found) == 1:
            return found[0]
        where = " or ".join(place.store.where for place in self.places)
        if not found:
            raise UserError(f"no checkpoint is in {where}")
        raise UserError(
            f"{where} has several series ({', '.join(found[:8])}): name one behind the address, "
            f"as in {where}#{found[0]}"
        )


def parse(text: str) -> Address:
    """The parts of an address. Raises UserError."""
    place, mark, rest = text.rpartition("#")
    if not mark:
        return Address(place=text)
    match = re.fullmatch(r"([^/]+)(?:/(\d{1,10}))?", rest)
    if not place or match is None:
        raise UserError(f"{text!r} is no address of checkpoints like DIRECTORY#SERIES/STEP")
    try:
        names.check_series(match[1])
    except ValueError as error:
        raise UserError(str(error)) from error
    return Address(place=place, series=match[1], step=int(match[2]) if match[2] else None)


@contextlib.contextmanager
def opened(
    texts: Sequence[str], *, key: bytes | None = None, require_signature: bool = False
) -> Iterator[Places]:
    """The places at these addresses, which must not name different series or steps. Raises
    UserError."""
    addresses = [parse(text) for text in texts]
    series = {address.series for address in addresses} - {None}
    steps = {address.step for address in addresses} - {None}
    if len(series) > 1 or len(steps) > 1:
        raise UserError(f"{' and '.join(texts)} name different checkpoints; ask for one at a time")
    with contextlib.ExitStack() as stack:
        places = []
        for address in addresses:
            place = _open(address.place)
            stack.callback(place.store.close)
            places.append(place)
        yield Places(
            places=tuple(places),
            series=next(iter(series), None),
            step=next(iter(steps), None),
            key=key,
            require_signature=require_signature,
        )


def series_in(store: Store) -> set[str]:
    """Names of the series in a store that have a commit, or a part of one. Lists all objects."""
    found = set()
    for entry in store.list("", deadline_s=LIST_S):
        commit, part = names.step_of(entry.key), names.part_of(entry.key)
        if commit is not None:
            found.add(commit[0])
        elif part is not None:
            found.add(part[0].series)
    return found


def memory_error() -> str:
    """Why the memory of the hosts can't be asked; empty when it can."""
    try:
        _open(MEMORY).store.close()
    except UserError as error:
        return str(error)
    return ""


def _open(place: str) -> Place:
    if place != MEMORY:
        return Place(tier="durable", store=open_store(place))
    from everstep.tiers.memory.client import connect

    return Place(tier=MEMORY, store=connect())
