"""Faults on purpose: from what a person writes to what a worker obeys.

A specification is `KIND:rank=R,step=S[,at=PLACE]`. KIND is `kill`, `term`, `segv`, `abort`,
`raise`, `exit0` or `exit=N`; PLACE is where in the step it fires. A fault fires once in a job:
whoever wants two writes two, and two equal ones are two faults, the second of which meets the step
when it is done again. A rank that took the step from a peer, and so never came to the place, meets
the fault at that place of its next step.

Parsing refuses what can be known to never fire (a rank that does not exist, step 0). It does not
know how many steps the script makes; `everstep prove` says afterwards which faults did not fire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args, get_type_hints

from everstep.errors import UserError
from everstep.spelling import nearest
from everstep.wire.messages import ChaosSpec

_HINTS = get_type_hints(ChaosSpec)
KINDS: tuple[str, ...] = get_args(_HINTS["kind"])
PLACES: tuple[str, ...] = get_args(_HINTS["at"])
WRITTEN_KINDS = (*(kind for kind in KINDS if kind != "exit"), "exit0", "exit=N")
FORM = "KIND:rank=R,step=S[,at=" + "|".join(PLACES) + "]"
DEFAULT_PLACE = "backward"
_KEYS = ("rank", "step", "at")


def parse(text: str, index: int = 0) -> ChaosSpec:
    """The fault that `text` describes. `index` is its number in the job.

    Raises UserError that names the part of `text` that is wrong and what may stand there. Does not
    block."""
    head, colon, tail = text.strip().partition(":")
    kind, code = _parse_kind(text, head)
    if not colon:
        raise _refusal(text, f"it names no rank and no step; write {FORM}")
    values = _parse_pairs(text, tail)
    missing = [key for key in ("rank", "step") if key not in values]
    if missing:
        raise _refusal(text, f"{' and '.join(missing)} is missing; write {FORM}")
    rank = _number(text, "rank", values["rank"])
    step = _number(text, "step", values["step"])
    if rank < 0:
        raise _refusal(text, f"rank={rank} can never fire; ranks count from 0")
    if step < 1:
        raise _refusal(text, f"step={step} can never fire; steps count from 1")
    place = values.get("at", DEFAULT_PLACE)
    if place not in PLACES:
        raise _refusal(
            text,
            f"at={place} is no place{_nearest(place, PLACES)}; it is one of {', '.join(PLACES)}",
        )
    return ChaosSpec(
        index=index,
        text=text.strip(),
        kind=kind,  # type: ignore[arg-type]  # one of KINDS, which are the Literal's own values
        rank=rank,
        step=step,
        at=place,  # type: ignore[arg-type]  # one of PLACES, likewise
        code=code,
    )


def parse_all(texts: Iterable[str], world_size: int) -> tuple[ChaosSpec, ...]:
    """All faults of a job of `world_size` ranks, numbered in the order given.

    Raises UserError as `parse` does, and for a rank that the job does not have.
    """
    specs = tuple(parse(text, index) for index, text in enumerate(texts))
    check_world(specs, world_size)
    return specs


def check_world(specs: Sequence[ChaosSpec], world_size: int) -> None:
    """Raise UserError if one of `specs` is for a rank that a job of `world_size` ranks does not
    have."""
    for spec in specs:
        if spec.rank >= world_size:
            last = "only rank 0" if world_size == 1 else f"ranks 0 to {world_size - 1}"
            raise _refusal(
                spec.text,
                f"rank={spec.rank} can never fire; the job has {last} "
                f"(--nproc-per-node {world_size})",
            )


def _parse_kind(text: str, head: str) -> tuple[str, int]:
    """The kind and the exit code that the part before the colon stands for."""
    if head == "exit0":
        return "exit", 0
    name, equals, number = head.partition("=")
    if name == "exit":
        code = _number(text, "exit", number) if equals else 0
        if not 1 <= code <= 255:
            raise _refusal(
                text, "an exit code is exit=1 to exit=255, or exit0 for an early end with code 0"
            )
        return "exit", code
    if head not in KINDS:
        choices = ", ".join(WRITTEN_KINDS)
        raise _refusal(
            text,
            f"{head!r} is no kind of fault{_nearest(head, WRITTEN_KINDS)}; it is one of {choices}",
        )
    return head, 0


def _parse_pairs(text: str, tail: str) -> dict[str, str]:
    """The `key=value` pairs after the colon; each key once."""
    values: dict[str, str] = {}
    for part in tail.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise _refusal(text, f"{part.strip()!r} is not key=value; write {FORM}")
        if key not in _KEYS:
            raise _refusal(
                text, f"{key!r} is no key{_nearest(key, _KEYS)}; the keys are {', '.join(_KEYS)}"
            )
        if key in values:
            raise _refusal(text, f"{key} is given twice; give each key once")
        values[key] = value
    return values


def _number(text: str, key: str, value: str) -> int:
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise _refusal(text, f"{key}={value} is not a whole number")
    return int(value)


def _nearest(word: str, words: Sequence[str]) -> str:
    found = nearest(word, words)
    return f" (did you mean {found!r}?)" if found else ""


def _refusal(text: str, why: str) -> UserError:
    return UserError(f"the fault {text.strip()!r} is refused: {why}")
