"""What the script of a simulated rank does and sees: results, state of its own, capsules.

Theory of operation. The model's state after step k is a number that only the updates of steps 1 to
k, in their order, make; an update comes in two halves, so that a step can be cut in its middle.
Beside it each rank has what no peer holds: what its step returned, and a number of its own that
each step changes (`run.state`). Both travel in a capsule, which the worker gives to its agent
before its last contribution to the step; the agent keeps the newest three of each rank. `Scripts`
watches what each rank's script is given: f(rank, 1), f(rank, 2), ... once each, where a replacement
begins with the step that its peers stand at.

What it doesn't know: time, messages, and who is alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

_MODULUS = (1 << 61) - 1
_KEPT = 3


def first_half(state: int, step: int) -> int:
    """The first half of the update of `step`; what it gives is the state of no step."""
    return (state * 6364136223846793005 + step) % _MODULUS


def second_half(half: int, step: int) -> int:
    """The second half; no other order of halves gives the same state."""
    return (half * 3935559000370003845 + 7 * step + 1) % _MODULUS


@cache
def state_after(step: int) -> int:
    """What every rank must hold after `step` committed steps."""
    return 1 if step == 0 else second_half(first_half(state_after(step - 1), step), step)


def own_forward(rank: int, own: int, step: int) -> int:
    """What `step` makes of a rank's own state."""
    return (own * 2862933555777941757 + 31 * step + rank) % _MODULUS


@cache
def own_after(rank: int, step: int) -> int:
    """What `rank` must hold of its own after `step` committed steps."""
    return rank if step == 0 else own_forward(rank, own_after(rank, step - 1), step)


def result_of(rank: int, step: int) -> tuple[int, int]:
    """What the step function returns on `rank`."""
    return rank, step * step


@dataclass(frozen=True, slots=True, kw_only=True)
class Capsule:
    """What belongs to one rank alone after `step`."""

    step: int
    result: tuple[int, int]
    own: int


class Capsules:
    """The agent's store, as the coordinator's shell keeps it."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, Capsule]] = {}

    def keep(self, rank: int, capsule: Capsule) -> None:
        """Take a capsule; newer ones are of a future that the rank has left."""
        kept = {**self._kept.get(rank, {}), capsule.step: capsule}
        usable = sorted(step for step in kept if step <= capsule.step)[-_KEPT:]
        self._kept[rank] = {step: kept[step] for step in usable}

    def newest(self, rank: int, step: int) -> Capsule | None:
        """The newest that is not newer than `step`."""
        kept = self._kept.get(rank, {})
        return max(
            (capsule for capsule in kept.values() if capsule.step <= step),
            key=lambda capsule: capsule.step,
            default=None,
        )


class Scripts:
    """What each rank's script has been given, over all processes that held the rank. `check`: told
    whether what must hold does, and what it is."""

    def __init__(self, check: Callable[[bool, str], None]) -> None:
        self._check = check
        self._seen: dict[int, int] = {}  # rank to the newest step that a script of it has seen
        self._here: dict[tuple[int, int], int] = {}  # the same, of one incarnation

    def sees(
        self, rank: int, incarnation: int, step: int, result: tuple[int, int], *, at_least: int
    ) -> None:
        """The call of `step` returns `result` to the script. `at_least`: the step that all ranks
        are known to have committed; nobody may be set back behind it."""
        who = f"the script of rank {rank}.{incarnation}"
        before = self._here.get((rank, incarnation))
        if before is not None:
            self._check(step == before + 1, f"{who} sees step {step} after step {before}")
        else:
            latest = self._seen.get(rank, 0) + 1
            self._check(step <= latest, f"{who} begins at {step}, and {latest} is still to be seen")
            self._check(step >= at_least, f"{who} begins at {step}, and all have {at_least}")
        self._check(result == result_of(rank, step), f"{who} sees {result} of step {step}")
        self._seen[rank] = self._here[rank, incarnation] = step

    def last(self, rank: int, incarnation: int) -> int | None:
        """The newest step that the script of this process has seen."""
        return self._here.get((rank, incarnation))
