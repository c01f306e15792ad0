"""One tenure of a rank, and what is counted of all tenures.

Theory of operation. What the table is asked after every event (do all survivors stand still? has
everybody left?) is a number of rows. So each change of a row takes it out of the tallies and counts
it in again. `core.membership` does that; nobody else changes what is tallied.

What it doesn't know: which rows there are, and what is made of the numbers.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

from everstep.types import Cause, Holding

_Key = TypeVar("_Key")


class Status(enum.StrEnum):
    """What a process that holds a rank is doing, as far as it has said."""

    STARTING = "starting"  # spawned, has not spoken
    SETTING_UP = "setting up"  # it runs; `protect` is still to come
    PROTECTED = "protected"  # it called `protect`
    RUNNING = "running"  # in the loop, or after it
    WAITING = "waiting"  # a joiner that is set up and needs its peers' position
    REHEARSING = "rehearsing"  # a joiner that knows its position
    STOPPING = "stopping"  # told to stop, has not parked
    PARKED = "parked"  # stands still; its holding is known
    REGROUPING = "regrouping"  # told to regroup, has not done its part of the plan
    DOOMED = "doomed"  # we killed it; its death has not been seen


@dataclass(slots=True, kw_only=True)
class Member:
    """One tenure of a rank. What has a leading underscore is tallied: only the table changes it.

    `position`: the step a joiner was told. `distrusted`: its last receipt did not match, or it was
    set aside as a source (`core.trust`), so what it holds counts as torn until it has fetched.
    `dissents`: receipts in which it held something else than most. `faulted`: the failures that it
    reported, by generation. `doom`: the cause that its death stands for when we killed it for being
    late; None when its death is no news.
    """

    rank: int
    incarnation: int
    position: int | None = None
    distrusted: bool = False
    dissents: int = 0
    faulted: set[tuple[int, Cause]] = field(default_factory=set)
    doom: Cause | None = None
    _joining: bool
    _status: Status = Status.STARTING
    _left_at: int | None = None
    _finished: bool = False
    _holding: Holding | None = None
    _deadline_s: float | None = None

    @property
    def identity(self) -> tuple[int, int]:
        """(rank, incarnation), as actions name it."""
        return self.rank, self.incarnation

    @property
    def status(self) -> Status:
        """What it is doing."""
        return self._status

    @property
    def joining(self) -> bool:
        """It was spawned to join and has not yet been told to regroup; it holds no state."""
        return self._joining

    @property
    def left_at(self) -> int | None:
        """The step after which it left its loop; it waits (or has waited) for the others."""
        return self._left_at

    @property
    def finished(self) -> bool:
        """Its script ended with code 0."""
        return self._finished

    @property
    def holding(self) -> Holding | None:
        """What it holds, while parked."""
        return self._holding

    @property
    def deadline_s(self) -> float | None:
        """By when it must do what its status waits for."""
        return self._deadline_s

    @property
    def closing(self) -> bool:
        """It has left its loop."""
        return self._left_at is not None

    @property
    def doomed(self) -> bool:
        """We killed it and wait for its death; nothing else it says counts."""
        return self._status is Status.DOOMED

    @property
    def survivor(self) -> bool:
        """It lives and was part of the world that stopped."""
        return not self._joining and self._status is not Status.DOOMED


class Tallies:
    """How many rows are what. `parked`: of the survivors; `held`: what those hold. `left_at`: the
    steps after which loops were left. `ended`: rows that have left their loop or finished."""

    def __init__(self) -> None:
        self.by_status: Counter[Status] = Counter()
        self.survivors = 0
        self.parked = 0
        self.held: Counter[Holding] = Counter()
        self.held_version = 0  # rises when another holding comes in, or the last of one goes
        self.left_at: Counter[int] = Counter()
        self.finished = 0
        self.ended = 0
        self.waiting: set[int] = set()  # ranks of joiners that need a position

    def count(self, member: Member, sign: int) -> None:
        """Count a row in (1) or out (-1)."""
        status = member._status
        self.by_status[status] += sign
        if member.survivor:
            self.survivors += sign
            if member._holding is not None:
                self.parked += sign
                self.held_version += _add(self.held, member._holding, sign)
        if member._left_at is not None:
            _add(self.left_at, member._left_at, sign)
        if member._finished:
            self.finished += sign
        if member._finished or member._left_at is not None:
            self.ended += sign
        if status is Status.WAITING and sign > 0:
            self.waiting.add(member.rank)
        elif status is Status.WAITING:
            self.waiting.discard(member.rank)


def _add(counter: Counter[_Key], key: _Key, sign: int) -> bool:
    """Count `key`, and forget keys that are counted no more. Whether the keys are others now."""
    number = counter[key] + sign
    if number:
        counter[key] = number
    else:
        del counter[key]
    return number == (sign > 0)
