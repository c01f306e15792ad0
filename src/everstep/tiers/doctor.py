"""What is wrong with how tiers are used: said before it costs something.

Theory of operation. It looks at what is there: the records in each tier say how often is saved, and
how each save was meant (`origin.config["everstep"]`, where the training has put it); the agent of
this host says whether it has anything; a directory's mode, and a bucket that answers one who shows
no credentials, say who else can read. What can't be seen is said as such, and not taken for fine.

It changes nothing, and does not know the training's script.
"""

from __future__ import annotations

import itertools
import os
import stat
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from everstep.errors import EverstepError
from everstep.tiers.look import Listed, Torn, survey
from everstep.tiers.open import CLOUDS
from everstep.tiers.places import Place, Places
from everstep.tiers.store import Denied, Missing, StoreError

_OLD_S = 86400.0
_ANONYMOUS_S = 10.0


class Remark(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was seen. `problem`: it will cost something; `note`: it may; `unseen`: it
    could not be looked at. `what`: for a person, with what to do."""

    kind: Literal["problem", "note", "unseen"]
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Meant:
    """How the newest save of a series was meant; None where its record does not say."""

    memory_every: int | None = None
    durable_every: int | None = None


def examine(
    places: Places, *, memory_error: str, loss_budget: int | None, now_s: float
) -> list[Remark]:
    """Look at all tiers. `memory_error`: why there is no memory tier among the places; empty when
    there is one. `loss_budget`: steps that may be lost with the memory of all hosts; None: not
    stated. `now_s`: seconds since 1970. Blocks on the stores. Raises StoreError."""
    listed, torn = survey(places)
    remarks = []
    durable = [place for place in places.places if place.tier == "durable"]
    for series in sorted({one.series for one in listed}):
        checkpoints = [one for one in listed if one.series == series]
        remarks += _of_series(places, series, checkpoints, memory_error, loss_budget)
    if not listed:
        remarks.append(_note("no checkpoint is anywhere yet: how often is saved can't be seen"))
    if not memory_error and not any(_in(one, "memory") for one in listed):
        remarks.append(
            _problem(
                "an agent keeps memory for checkpoints on this host, and nobody saves to it: set "
                "memory_every in the training, or stop the agent"
            )
        )
    if not durable:
        remarks.append(
            _note("no destination was named: whether anything survives the loss of all hosts")
        )
    remarks += _of_leftovers(torn, now_s)
    for place in durable:
        remarks += _of_access(place)
    return remarks


def meant_by(config: Mapping[str, Any]) -> Meant:
    """The cadences that a record tells of."""
    said = config.get("everstep")
    if not isinstance(said, dict):
        return Meant()
    found = {name: said.get(name) for name in ("memory_every", "durable_every")}
    return Meant(**{name: value for name, value in found.items() if isinstance(value, int)})


def cadence(steps: list[int]) -> int | None:
    """Steps between two saves, usually: of the last few; None of fewer than two."""
    gaps = [after - before for before, after in itertools.pairwise(sorted(steps)[-9:])]
    return int(statistics.median_high(gaps)) if gaps else None


def _of_series(
    places: Places,
    series: str,
    checkpoints: list[Listed],
    memory_error: str,
    loss_budget: int | None,
) -> list[Remark]:
    remarks = []
    meant = _meant(places, series)
    near = [one.step for one in checkpoints if _in(one, "memory")]
    far = [one.step for one in checkpoints if _in(one, "durable")]
    if memory_error and meant.memory_every:
        remarks.append(
            _problem(
                f"{series}: saves go to the memory of the hosts (every {meant.memory_every} "
                f"steps), and no agent keeps it here: {memory_error}"
            )
        )
    if near and far and max(near) < max(far):
        remarks.append(
            _problem(
                f"{series}: saves no longer reach the memory of the hosts: the newest there is "
                f"step {max(near)}, the destination has {max(far)}; see the training's warnings"
            )
        )
    has_durable = any(place.tier == "durable" for place in places.places)
    if has_durable:
        remarks += _of_budget(series, near, far, meant, loss_budget)
    newest = checkpoints[-1]
    for kept in newest.kept:
        if kept.problem:
            remarks.append(
                _problem(
                    f"{series}: the newest checkpoint, step {newest.step}, is not whole in "
                    f"{kept.tier}: {kept.problem}"
                )
            )
        elif kept.signature == "absent" and kept.tier == "durable":
            remarks.append(
                _note(
                    f"{series}: checkpoints are not signed: who can write to {kept.where} can "
                    "change the model (docs/reference/trust.md)"
                )
            )
    return remarks


def _of_budget(
    series: str, near: list[int], far: list[int], meant: Meant, loss_budget: int | None
) -> list[Remark]:
    """What the loss of all memory would cost."""
    if not far:
        return [
            _problem(
                f"{series}: nothing of it is at the destination: the loss of all hosts loses all "
                "of it; set durable_every"
            )
        ]
    every = cadence(far) or meant.durable_every
    if loss_budget is None:
        return [] if every is None else [_note(f"{series}: a checkpoint is durable every {every}")]
    if every is None:
        return [
            Remark(
                kind="unseen",
                what=f"{series}: how often a checkpoint becomes durable: there is only one",
            )
        ]
    if every > loss_budget:
        return [
            _problem(
                f"{series}: a checkpoint becomes durable every {every} steps, and no more than "
                f"{loss_budget} may be lost: set durable_every to {loss_budget} or less"
            )
        ]
    behind = max(near, default=0) - max(far)
    if behind > loss_budget:
        return [
            _problem(
                f"{series}: the newest durable checkpoint is {behind} steps behind memory, and no "
                f"more than {loss_budget} may be lost: uploads fail, or are too slow"
            )
        ]
    return []


def _meant(places: Places, series: str) -> Meant:
    """How the newest record that can be read was meant."""
    newest: tuple[int, Meant] = (-1, Meant())
    for place in places.places:
        reader = places.reader(place, series)
        try:
            for step in reader.steps()[-1:]:
                newest = max(
                    newest,
                    (step, meant_by(reader.read(step).origin.config)),
                    key=lambda found: found[0],
                )
        except StoreError:
            continue  # the survey has named it
    return newest[1]


def _of_leftovers(torn: list[Torn], now_s: float) -> list[Remark]:
    old = [one for one in torn if now_s - one.changed_s > _OLD_S]
    if not old:
        return []
    nbytes = sum(one.nbytes for one in old)
    return [
        _note(
            f"{len(old)} attempts that never became a checkpoint have lain for more than a day, "
            f"{nbytes} bytes: `everstep ckpt prune` removes them"
        )
    ]


def _of_access(place: Place) -> list[Remark]:
    """Who else can get at a durable tier."""
    where = place.store.where
    if where.startswith(CLOUDS):
        return _of_bucket(where)
    try:
        mode = os.stat(Path(where)).st_mode
    except OSError as error:
        return [Remark(kind="unseen", what=f"who can get at {where}: {error.strerror}")]
    if mode & stat.S_IWOTH:
        sticky = " (its sticky bit keeps them from removing what is yours)" * bool(
            mode & stat.S_ISVTX
        )
        return [_problem(f"every user of the host can write to {where}{sticky}: chmod o-w {where}")]
    remarks = []
    if mode & stat.S_IROTH and mode & stat.S_IXOTH:
        remarks.append(_note(f"every user of the host can read {where}: chmod o-rx {where}"))
    if mode & stat.S_IWGRP:
        remarks.append(_note(f"the group of {where} can write to it: is each of them trusted?"))
    return remarks


def _of_bucket(where: str) -> list[Remark]:
    """Ask it without credentials."""
    hidden = (
        "who else has rights to it can't be seen from here: ask the provider for its policy and "
        "its access lists"
    )
    try:
        from everstep.tiers.objects import open_bucket

        store = open_bucket(where, config={"skip_signature": True})
        try:
            next(iter(store.list("", deadline_s=_ANONYMOUS_S)), None)
        finally:
            store.close()
    except (Denied, Missing):
        return [
            Remark(kind="unseen", what=f"{where} refuses one who shows no credentials; {hidden}")
        ]
    except EverstepError as error:
        return [
            Remark(kind="unseen", what=f"{where}, asked without credentials: {error}; {hidden}")
        ]
    return [
        _problem(
            f"anybody can read {where}: it answers one who shows no credentials; close it to the "
            "public"
        )
    ]


def _in(one: Listed, tier: str) -> bool:
    return any(kept.tier == tier for kept in one.kept)


def _problem(what: str) -> Remark:
    return Remark(kind="problem", what=what)


def _note(what: str) -> Remark:
    return Remark(kind="note", what=what)
