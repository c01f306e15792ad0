"""Checkpoints on a screen: which there are, what one is made of, whether it is right, what differs.

It does not know where it all came from."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from everstep.errors import EverstepError
from everstep.observe.narrate import counted
from everstep.observe.screen import Screen
from everstep.shm.budget import size
from everstep.tiers import values
from everstep.tiers.catalog import Checkpoint
from everstep.tiers.diff import Compared
from everstep.tiers.look import Kept, Listed, Torn, Verdict
from everstep.tiers.signing import Standing

_GAP = 2  # columns between others
_SHOWN = 200  # characters of a value
_LINES = 40  # of a table, unless all is asked for
_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)])
_SIGNATURES = {"valid": "valid", "unchecked": "not checked: no key", "absent": "none", None: "-"}


def show_list(listed: Sequence[Listed], torn: Sequence[Torn], now_s: float, screen: Screen) -> None:
    """Which checkpoints there are, and which attempts are none. `now_s`: wall time."""
    rows = [
        (
            f"{one.series}/{one.step}",
            ", ".join(kept.tier + (" (not whole)" if kept.problem else "") for kept in one.kept),
            _count(one.ranks),
            "-" if one.nbytes is None else size(one.nbytes),
            _count(one.tensors),
            _signatures(one.kept),
            _age(one.written_s, now_s),
            one.run_id or "-",
            one.commit[:10] or "-",
        )
        for one in listed
    ]
    names = ("checkpoint", "tiers", "ranks", "size", "tensors", "signature", "age", "run", "commit")
    if rows:
        _draw(screen, names, rows)
    for one in listed:
        for kept in one.kept:
            if kept.problem:
                place = f"{one.series}/{one.step} in {kept.tier} ({kept.where})"
                screen.say(f"{place}: {kept.problem}", "yellow")
    for attempt in torn:
        what = "failed" if attempt.failed else "under way, or left behind"
        screen.say(
            f"{attempt.series}/{attempt.step} in {attempt.tier}: attempt {attempt.attempt} is no "
            f"checkpoint ({what}): {counted(attempt.objects, 'object')}, {size(attempt.nbytes)}, "
            f"last changed {_age(attempt.changed_s, now_s)} ago"
        )


def show_checkpoint(
    checkpoint: Checkpoint, standing: Standing, tiers: str, screen: Screen, *, everything: bool
) -> None:
    """What a checkpoint is made of. `tiers`: where its parts are."""
    origin = checkpoint.origin
    nbytes = sum(part.nbytes for part in checkpoint.parts)
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(origin.written_s))
    screen.say(f"step {checkpoint.step} of {checkpoint.series}", "bold")
    for name, value in (
        ("in", tiers),
        ("size", f"{size(nbytes)} in {counted(len(checkpoint.parts), 'part')}"),
        ("signature", _SIGNATURES[standing]),
        ("written", written if origin.written_s else ""),
        ("run", origin.run_id),
        ("commit", origin.commit),
        ("world", f"{origin.world}" + _mesh(origin.mesh)),
        ("parent", origin.parent),
        ("config", ", ".join(f"{key}={value!r}" for key, value in origin.config.items())),
        ("packages", _packages(origin.packages, everything=everything)),
    ):
        if value:
            screen.say(f"  {name:10} {value}")
    rows = [
        (
            name,
            whole.dtype.removeprefix("torch."),
            "x".join(map(str, whole.shape)) or "scalar",
            str(len(whole.pieces)),
            str(math.prod(whole.shape)),
        )
        for name, whole in sorted(checkpoint.tensors.items())
    ]
    _draw(screen, ("tensor", "type", "shape", "pieces", "elements"), _some(rows, everything))
    kept = [(key, _value(raw)) for key, raw in sorted(checkpoint.values.items())]
    if kept:
        _draw(screen, ("value", "is"), _some(kept, everything))
    if not everything and max(len(rows), len(kept)) > _LINES:
        screen.say(f"{len(rows)} tensors and {len(kept)} values in all: --all shows them")


def show_verdicts(verdicts: Sequence[Verdict], screen: Screen) -> None:
    """What was found in each checkpoint of each tier."""
    for verdict in verdicts:
        place = f"{verdict.series}/{verdict.step} in {verdict.tier} ({verdict.where})"
        speed = f"{size(verdict.nbytes)} in {verdict.seconds:.1f} s"
        if not verdict.findings:
            signature = _SIGNATURES[verdict.signature]
            screen.say(f"{place}: whole, {speed}; signature: {signature}", "green")
            continue
        found = counted(len(verdict.findings), "finding")
        screen.say(f"{place}: {found}, {speed}", "red")
        for finding in verdict.findings:
            rank = "" if finding.rank is None else f" rank {finding.rank}:"
            screen.say(f"  {finding.kind}:{rank} {finding.why}")


def show_difference(compared: Compared, screen: Screen) -> None:
    """What differs between two checkpoints."""
    for one in compared.differences:
        screen.say(f"{one.key}: {one.kind}: {one.what}")
    alike = (
        "equal" if not compared.differences else counted(len(compared.differences), "difference")
    )
    screen.say(
        f"{alike}: {counted(compared.tensors, 'tensor')} and {counted(compared.values, 'value')} "
        f"in both, {compared.unread} equal by their digests, {size(compared.nbytes)} read of each",
        "bold",
    )


def _draw(screen: Screen, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(
        box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_edge=False, header_style="bold"
    )
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        # Names are a stranger's: none may move the cursor.
        table.add_row(*(Text(cell.translate(_CONTROLS)) for cell in row))
    screen.draw(Padding(table, (0, 0, 0, 2), expand=False))


def _some(rows: Sequence[Sequence[str]], everything: bool) -> Sequence[Sequence[str]]:
    return rows if everything else rows[:_LINES]


def _value(raw: bytes) -> str:
    try:
        text = repr(values.decode(raw))
    except EverstepError as error:
        return f"unreadable: {error}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _packages(versions: dict[str, str], *, everything: bool) -> str:
    shown = versions if everything else {"python", "torch", "everstep"} & versions.keys()
    return ", ".join(f"{name} {versions[name]}" for name in sorted(shown))


def _mesh(mesh: dict[str, int]) -> str:
    return f" ({', '.join(f'{name} {extent}' for name, extent in mesh.items())})" if mesh else ""


def _signatures(kept: Sequence[Kept]) -> str:
    return ", ".join(dict.fromkeys(_SIGNATURES[one.signature] for one in kept))


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _age(then_s: float, now_s: float) -> str:
    if not then_s:
        return "-"
    seconds = max(0, int(now_s - then_s))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"
