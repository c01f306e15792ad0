"""From a run's events to its figures. Pure: no clock, no file.

An event is what workload.Events writes: `t` in seconds, `event`, and by its kind
- `fault`: `step`, `rank`: the process is about to be killed in that step;
- `step`: `step`, `rank` (None for a spare that made it with the others), `world` (ranks that took
  part), `attempt` (rises when all begin again), `loss`;
- `end`: `rank`, `digest` of the final state.

Does not know any contestant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Any

Event = Mapping[str, Any]
_LEARNING_STEPS = 2  # slower than the others, and not what a step costs


class NotMeasured(Exception):
    """The events hold no fault, or nothing after it. Its text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What one fault cost. `first_step_s`: from the fault until some rank has made a step again.
    `full_strength_s`: until all ranks have made one step together that is not before the one in
    which the fault came; None when the run ended before. `steps_lost`: steps that had been made and
    were made again. `short_steps`: steps made after it with fewer ranks."""

    first_step_s: float
    full_strength_s: float | None
    steps_lost: int
    short_steps: int


def recovery(events: Sequence[Event], ranks: int) -> Recovery:
    """The one recovery in the events of a run with `ranks` ranks. Raises NotMeasured."""
    fault = next((event for event in events if event["event"] == "fault"), None)
    if fault is None:
        raise NotMeasured("the fault never fired")
    after = [event for event in events if _is_after(event, fault)]
    if not after:
        raise NotMeasured("no step was made after the fault")
    redone: dict[int, dict[int, float]] = defaultdict(dict)
    for event in after:
        if event["step"] >= fault["step"] and event["world"] == ranks and event["rank"] is not None:
            redone[event["step"]].setdefault(event["rank"], event["t"])
    full = [max(times.values()) for times in redone.values() if len(times) == ranks]
    short = {event["step"] for event in after if event["world"] < ranks}
    return Recovery(
        first_step_s=min(event["t"] for event in after) - fault["t"],
        full_strength_s=min(full) - fault["t"] if full else None,
        steps_lost=fault["step"] - min(event["step"] for event in after),
        short_steps=len(short),
    )


def _is_after(event: Event, fault: Event) -> bool:
    """Whether a step was made by the recovered job. A rank may write down late a step that it made
    before the fault, and a replacement may say again the last one of its predecessor."""
    if event["event"] != "step" or event["t"] < fault["t"]:
        return False
    return bool(event["attempt"] > 0 or event["step"] >= fault["step"])


def step_s(events: Iterable[Event]) -> float:
    """The mean step of a clean run, with the checkpoints between, in seconds. Raises NotMeasured
    when there are too few."""
    times = sorted(
        event["t"] for event in events if event["event"] == "step" and event["rank"] == 0
    )
    steps: list[float] = [after - before for before, after in pairwise(times[_LEARNING_STEPS:])]
    if not steps:
        raise NotMeasured("too few steps")
    return mean(steps)


def difference(clean: Sequence[Event], faulted: Sequence[Event]) -> str:
    """What first differs between two runs: a loss, or the final state, bit for bit. Empty when
    nothing does."""
    ours, theirs = _losses(clean), _losses(faulted)
    for step, rank in sorted(ours.keys() | theirs.keys()):
        if ours.get((step, rank)) != theirs.get((step, rank)):
            return f"loss of rank {rank} in step {step}"
    if _digests(clean) != _digests(faulted):
        return "final state"
    return ""


def _losses(events: Iterable[Event]) -> dict[tuple[int, int], float]:
    """The loss of each (step, rank), as it was made last."""
    return {
        (event["step"], event["rank"]): event["loss"]
        for event in events
        if event["event"] == "step" and event["rank"] is not None
    }


def _digests(events: Iterable[Event]) -> set[str]:
    return {event["digest"] for event in events if event["event"] == "end"}
