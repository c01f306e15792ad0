"""Faults on purpose: from what a person writes to what a worker obeys.

A specification is `KIND:rank=R,step=S[,at=PLACE]`, KIND what happens and PLACE where in the step. A
fault fires once in a job: whoever wants two writes two, and two equal ones are two faults, the
second of which meets the step when it is done again. A rank that took the step from a peer, and so
never came to the place, meets the fault at that place of its next step.

`node:index=I,step=S` cuts the power of a whole node, `agent:index=I,step=S` ends its agent alone:
of the node that holds slot I, when the first rank of the slot comes to the place.
`coordinator:[rank=R,]step=S` kills the coordinator when the rank, 0 unless said otherwise, comes to
the place; the rank goes on. All three need a job whose nodes are processes of their own.
`net:index=I,step=S[,seconds=T]` cuts the network of the node that holds slot I, for ever or for T
seconds, as soon as its first rank has come to the place, and that goes on. It needs nodes on hosts
of their own.

`random:count=N,seed=K,steps=A-B[,kinds=a+b][,places=c+d]` stands for N faults, drawn here, before
anything starts, and from then on like any that was written. Equal seed, steps and world give equal
faults, on every machine and version of Python: only `Random.random` is used, which Python promises
to keep. The steps are cut into N stretches of equal length with one fault each; where a stretch is
two steps or more, its last one stays free, so that a fault never meets the recovery of another, for
ranks are never more than one step apart.

Parsing refuses what can be known to never fire (a rank that does not exist, step 0) or to do
nothing. It does not know how many steps the script makes; `everstep prove` says afterwards which
faults did not fire.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import get_args, get_type_hints

import msgspec

from everstep.errors import UserError
from everstep.spelling import nearest
from everstep.wire.messages import ChaosSpec

_HINTS = get_type_hints(ChaosSpec)
KINDS: tuple[str, ...] = get_args(_HINTS["kind"])
PLACES: tuple[str, ...] = get_args(_HINTS["at"])
WRITTEN_KINDS = (
    *(kind for kind in KINDS if kind not in ("exit", "slow")),
    "exit0",
    "exit=N",
    "slow=F",
)

SETUP = "setup"
IN_STEP = ("forward", "backward", "fence", "optimizer", "commit")
"""Places that a step comes to each time it is tried."""
IN_RECOVERY = ("recovery", "rebuild", "fetch", "serve")
"""Places that a rank comes to only when something has failed."""

OF_COORDINATOR = "coordinator"
"""The kind that ends the coordinator."""
OF_NETWORK = "net"
"""The kind that takes a node's network away."""
NO_FAILURE = ("slow", "corrupt", OF_COORDINATOR)
"""Kinds after which the rank goes on: a failure that comes later is another's."""
SILENT = ("stop", "hang")
"""Kinds that nobody is told of: the rank does not go on, and is found by its silence."""
OF_NODES = ("node", "agent", OF_NETWORK)
"""Kinds that the coordinator carries out, on the node where the rank is."""

FORM = "KIND:rank=R,step=S[,at=" + "|".join(PLACES) + "]"
NODE_FORM = "node|agent:index=I,step=S[,at=PLACE]"
NETWORK_FORM = "net:index=I,step=S[,at=PLACE][,seconds=T]"
COORDINATOR_FORM = "coordinator:[rank=R,]step=S[,at=PLACE]"
RANDOM = "random"
RANDOM_FORM = "random:count=N,seed=K,steps=A-B[,kinds=KIND+...][,places=PLACE+...]"
DEFAULT_PLACE = "backward"
DEFAULT_RANDOM_KINDS = ("kill", "term", "segv", "abort", "raise", "exit0")
"""What random faults are unless said otherwise: each is noticed at once."""
DEFAULT_RANDOM_PLACES = (*IN_STEP, "between")
"""Where random faults fire unless said otherwise: every step comes to each of them."""

_KEYS = ("rank", "step", "at")
_NODE_KEYS = ("index", "step", "at")
_NETWORK_KEYS = (*_NODE_KEYS, "seconds")
_RANDOM_KEYS = ("count", "seed", "steps", "kinds", "places")
_MOST = 100_000  # random faults: nobody means more, and all of them are written to the journal


class Draw(msgspec.Struct, frozen=True, kw_only=True):
    """What `random:` stands for, until the world is known. `text`: as it was written."""

    text: str
    count: int
    seed: int
    first: int
    last: int
    kinds: tuple[str, ...]
    places: tuple[str, ...]


# ---------------------------------------------------------------------- what others call


def parse(text: str, index: int = 0, nproc_per_node: int = 1) -> ChaosSpec:
    """The one fault that `text` describes. `index` is its number in the job, `nproc_per_node` how
    many ranks a slot has.

    Raises UserError that names the part of `text` that is wrong and what may stand there. Does not
    block."""
    head, colon, tail = text.strip().partition(":")
    kind, code, factor = _parse_kind(text, head)
    of_node = kind in OF_NODES
    form, keys = _grammar(kind)
    if not colon:
        where = "no slot" if of_node else "no rank"
        raise _refusal(text, f"it names {where} and no step; write {form}")
    values = _parse_pairs(text, tail, keys, form)
    if kind == OF_COORDINATOR:
        values.setdefault("rank", "0")
    place = _parse_place(text, values.get("at", DEFAULT_PLACE))
    _need(text, values, keys[:1] if place == SETUP else keys[:2], form)
    who = _number(text, keys[0], values[keys[0]])
    step = _number(text, "step", values.get("step", "0"))
    if who < 0:
        raise _refusal(text, f"{keys[0]}={who} can never fire; {_counted(kind)} count from 0")
    if place == SETUP and step != 0:
        raise _refusal(text, f"step={step} is no part of the set-up; leave it out, or write step=0")
    if place != SETUP and step < 1:
        raise _refusal(text, f"step={step} can never fire; steps count from 1")
    unfit = _unfit(kind, place)
    if unfit:
        raise _refusal(text, unfit)
    return ChaosSpec(
        index=index,
        text=text.strip(),
        kind=kind,  # type: ignore[arg-type]  # one of KINDS, which are the Literal's own values
        rank=who * nproc_per_node if of_node else who,
        step=step,
        at=place,  # type: ignore[arg-type]  # one of PLACES, likewise
        code=code,
        factor=factor,
        lasts_s=_seconds(text, values["seconds"]) if "seconds" in values else 0.0,
    )


def parse_all(
    texts: Iterable[str],
    world_size: int,
    nproc_per_node: int | None = None,
    *,
    hosts: bool = False,
) -> tuple[ChaosSpec, ...]:
    """All faults of a job of `world_size` ranks, random ones drawn, numbered in the order given.
    `nproc_per_node`: of a job whose nodes are processes of their own; None where the job has none.
    `hosts`: each of them is on a host of its own.

    Raises UserError as `parse` does, and for what the job does not have.
    """
    per_node = nproc_per_node or world_size
    written: list[str] = []
    for text in texts:
        drawn = _parse_random(text)
        written += [text] if drawn is None else _draw(drawn, world_size, per_node)
    specs = tuple(parse(text, index, per_node) for index, text in enumerate(written))
    for spec in specs:
        if spec.kind in (*OF_NODES, OF_COORDINATOR) and nproc_per_node is None:
            lost = "nodes" if spec.kind in OF_NODES else "coordinator of its own"
            raise _refusal(
                spec.text, f"this job has no {lost} to lose; give it nodes with --local-nodes"
            )
        if spec.kind == OF_NETWORK and not hosts:
            raise _refusal(
                spec.text,
                "the nodes of this job are on one machine and share its network; it takes "
                "`everstep run` on a host for each node (--nnodes, --coordinator)",
            )
    check_world(specs, world_size, per_node)
    return specs


def check(text: str) -> None:
    """Raise UserError for what is wrong with `text` in a job of any size."""
    if _parse_random(text) is None:
        parse(text)


def check_world(
    specs: Sequence[ChaosSpec], world_size: int, nproc_per_node: int | None = None
) -> None:
    """Raise UserError if one of `specs` is for a rank or a slot that a job of `world_size` ranks,
    `nproc_per_node` on a node, does not have."""
    per_node = nproc_per_node or world_size
    for spec in specs:
        if spec.rank < world_size:
            continue
        if spec.kind in OF_NODES:
            raise _refusal(
                spec.text,
                f"index={spec.rank // per_node} can never fire; the job has slots 0 to "
                f"{world_size // per_node - 1}, and a spare has none",
            )
        last = "only rank 0" if world_size == 1 else f"ranks 0 to {world_size - 1}"
        raise _refusal(
            spec.text,
            f"rank={spec.rank} can never fire; the job has {last} (--nproc-per-node {per_node})",
        )


def where(spec: ChaosSpec) -> str:
    """The place of a fault, for a sentence: `backward of step 5`."""
    if spec.at == SETUP:
        return "the end of its set-up"
    if spec.at in IN_RECOVERY:
        place = "" if spec.at == "recovery" else f"{spec.at} in "
        return f"{place}a recovery of step {spec.step} or later"
    return f"{spec.at} of step {spec.step}"


# ---------------------------------------------------------------------- one fault


def _parse_kind(text: str, head: str) -> tuple[str, int, float]:
    """The kind, the exit code and the factor that the part before the colon stands for."""
    if head == "exit0":
        return "exit", 0, 1.0
    name, equals, number = head.partition("=")
    if name == "exit":
        code = _number(text, "exit", number) if equals else 0
        if not 1 <= code <= 255:
            raise _refusal(
                text, "an exit code is exit=1 to exit=255, or exit0 for an early end with code 0"
            )
        return "exit", code, 1.0
    if name == "slow":
        return "slow", 0, _factor(text, number)
    if head not in KINDS:
        choices = ", ".join(WRITTEN_KINDS)
        raise _refusal(
            text,
            f"{head!r} is no kind of fault{_nearest(head, (*WRITTEN_KINDS, RANDOM))}; it is one of "
            f"{choices}, or {RANDOM}",
        )
    return head, 0, 1.0


def _factor(text: str, number: str) -> float:
    factor = _decimal(number)
    if not factor > 1:
        raise _refusal(
            text, "slow=F takes how many times as long the step is to take, a number above 1"
        )
    return factor


def _seconds(text: str, number: str) -> float:
    seconds = _decimal(number)
    if not seconds > 0:
        raise _refusal(
            text, f"seconds={number} is no number above 0; leave it out for a cut that never ends"
        )
    return seconds


def _decimal(number: str) -> float:
    """A finite number, or nan."""
    try:
        value = float(number)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _grammar(kind: str) -> tuple[str, Sequence[str]]:
    """How a fault of `kind` is written, and its keys."""
    if kind == OF_NETWORK:
        return NETWORK_FORM, _NETWORK_KEYS
    if kind in OF_NODES:
        return NODE_FORM, _NODE_KEYS
    return COORDINATOR_FORM if kind == OF_COORDINATOR else FORM, _KEYS


def _counted(kind: str) -> str:
    return "slots" if kind in OF_NODES else "ranks"


def _parse_place(text: str, place: str) -> str:
    if place not in PLACES:
        raise _refusal(
            text,
            f"at={place} is no place{_nearest(place, PLACES)}; it is one of {', '.join(PLACES)}",
        )
    return place


def _unfit(kind: str, place: str) -> str:
    """Why a fault of `kind` does nothing at `place`; "" where it does."""
    if kind == "slow" and place not in IN_STEP:
        return f"slow makes a step longer, so its place is one of {', '.join(IN_STEP)}"
    if kind == "corrupt" and place == SETUP:
        return "corrupt needs a protected parameter, and at=setup comes before run.protect"
    if kind == "corrupt" and place == "fetch":
        return "what corrupt would change is overwritten by what is fetched; take at=recovery"
    return ""


def _parse_pairs(text: str, tail: str, keys: Sequence[str], form: str) -> dict[str, str]:
    """The `key=value` pairs after the colon; each key once."""
    values: dict[str, str] = {}
    for part in tail.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise _refusal(text, f"{part.strip()!r} is not key=value; write {form}")
        if key not in keys:
            raise _refusal(
                text, f"{key!r} is no key{_nearest(key, keys)}; the keys are {', '.join(keys)}"
            )
        if key in values:
            raise _refusal(text, f"{key} is given twice; give each key once")
        values[key] = value
    return values


def _need(text: str, values: Mapping[str, str], keys: Sequence[str], form: str) -> None:
    missing = [key for key in keys if key not in values]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise _refusal(text, f"{' and '.join(missing)} {verb} missing; write {form}")


# ---------------------------------------------------------------------- random faults


def _parse_random(text: str) -> Draw | None:
    """What a `random:` text asks for; None for any other text."""
    head, colon, tail = text.strip().partition(":")
    if head != RANDOM:
        return None
    if not colon:
        raise _refusal(text, f"it says neither how many nor where; write {RANDOM_FORM}")
    values = _parse_pairs(text, tail, _RANDOM_KEYS, RANDOM_FORM)
    _need(text, values, ("count", "seed", "steps"), RANDOM_FORM)
    count, seed = (_number(text, key, values[key]) for key in ("count", "seed"))
    if not 1 <= count <= _MOST:
        raise _refusal(text, f"count={count} is not 1 to {_MOST}")
    if seed < 0:
        raise _refusal(text, f"seed={seed} is below 0, and Python's generator takes -1 for 1")
    first, last = _parse_steps(text, values["steps"])
    if count > last - first + 1:
        raise _refusal(
            text,
            f"count={count} faults do not fit into {last - first + 1} steps, one in each: two at "
            "once may hit all holders of a shard, and then no copy is left",
        )
    kinds = _parts(values.get("kinds"), DEFAULT_RANDOM_KINDS)
    places = _parts(values.get("places"), DEFAULT_RANDOM_PLACES)
    for place in places:
        _parse_place(text, place)
    for kind in kinds:
        if not _places_for(_parse_kind(text, kind)[0], places):
            unfit = _unfit(_parse_kind(text, kind)[0], places[0])
            raise _refusal(text, f"{kind} can never fire at {' or '.join(places)}: {unfit}")
    return Draw(
        text=text, count=count, seed=seed, first=first, last=last, kinds=kinds, places=places
    )


def _parse_steps(text: str, value: str) -> tuple[int, int]:
    first, dash, last = value.partition("-")
    if not (dash and first and last):
        raise _refusal(text, f"steps={value} is not A-B, the first and the last step; write 3-40")
    low, high = _number(text, "steps", first), _number(text, "steps", last)
    if low < 1:
        raise _refusal(text, f"steps={value} can never fire in step {low}; steps count from 1")
    if high < low:
        raise _refusal(text, f"steps={value} ends before it begins; write the smaller one first")
    return low, high


def _parts(value: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    return default if value is None else tuple(part.strip() for part in value.split("+"))


def _places_for(kind: str, places: Sequence[str]) -> list[str]:
    return [place for place in places if not _unfit(kind, place)]


def _draw(draw: Draw, world_size: int, nproc_per_node: int) -> list[str]:
    """The faults that `draw` stands for in a job of `world_size` ranks, as a person would write
    them, in the order of their steps."""
    random = Random(draw.seed)
    length = draw.last - draw.first + 1
    written = []
    for number in range(draw.count):
        begin = draw.first + length * number // draw.count
        end = draw.first + length * (number + 1) // draw.count
        step = begin + int(random.random() * max(1, end - begin - 1))
        rank = int(random.random() * world_size)
        kind = draw.kinds[int(random.random() * len(draw.kinds))]
        places = _places_for(kind.partition("=")[0], draw.places)
        place = places[int(random.random() * len(places))]
        when = "" if place == SETUP else f"step={step},"
        who = f"index={rank // nproc_per_node}" if kind in OF_NODES else f"rank={rank}"
        written.append(f"{kind}:{who},{when}at={place}")
    return written


# ---------------------------------------------------------------------- words


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
