"""What a recorded run left behind to be compared: read it, and find the first difference between
two runs.

A recorded run writes one line per rank and step (`trace.jsonl`: what the step returned and which
samples it consumed) and the digests of each rank's state at the end (`digests.json`). Floats are in
them as exact bits, so equal text is equal bits, and a NaN equals itself. A step that was done again
after a failure is recorded again; the records of one rank and step must agree, for only one of them
can have been seen by the script.

It does not know why two runs differ. It names the earliest place at which they do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError

TRACE_FILE = "trace.jsonl"
DIGESTS_FILE = "digests.json"
_SHOWN_CHARACTERS = 160
_EXACT = re.compile(r"-?0x[01](?:\.[0-9a-f]+)?p[+-]\d+")  # as float.hex writes it


class EvidenceError(EverstepError):
    """A run left nothing to compare, or something that can not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place at which two runs differ. `step` None: at the end. `left`, `right`: what each
    of them has."""

    rank: int
    step: int | None
    what: str
    left: str
    right: str

    def __str__(self) -> str:
        where = "at the end" if self.step is None else f"in step {self.step}"
        sides = f"{_readable(self.left)} against {_readable(self.right)}"
        return f"rank {self.rank}, {where}: {self.what} differs: {sides}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One run's records. `trace`: (step, rank) to the record's parts, each as canonical text.
    `digests`: rank to name to digest. `contradiction`: a rank and step recorded twice and not
    alike, if there is one."""

    trace: Mapping[tuple[int, int], Mapping[str, str]]
    digests: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    contradiction: Difference | None = None

    @property
    def steps(self) -> int:
        """The last step recorded; 0 without any."""
        return max((step for step, _ in self.trace), default=0)

    @property
    def silent(self) -> bool:
        """No step returned or logged anything, so that of the steps only samples can be
        compared."""
        return all(parts.get("value") == "[]" for parts in self.trace.values())


def read(run_dir: Path) -> Evidence:
    """The evidence in a run's directory.

    Raises EvidenceError when it is missing, empty or not readable as what it should be. Blocks on
    the disk."""
    try:
        with (run_dir / TRACE_FILE).open(encoding="utf-8") as lines:
            trace, contradiction = fold_trace(json.loads(line) for line in lines)
        digests = json.loads((run_dir / DIGESTS_FILE).read_text(encoding="utf-8"))
        by_rank = {int(rank): dict(named) for rank, named in digests.items()}
    except FileNotFoundError as error:
        raise EvidenceError(
            f"the run left no {Path(error.filename).name} in {run_dir}: "
            "it ended before it could be compared"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvidenceError(f"the records in {run_dir} can not be read: {error!r}") from error
    if not trace:
        raise EvidenceError(
            f"no step was recorded in {run_dir}; a script to be proved must call its step "
            "through run.step"
        )
    return Evidence(trace=trace, digests=by_rank, contradiction=contradiction)


def fold_trace(
    lines: Iterable[Mapping[str, Any]],
) -> tuple[dict[tuple[int, int], dict[str, str]], Difference | None]:
    """The last record of each (step, rank), and the first contradiction between two of one (step,
    rank)."""
    trace: dict[tuple[int, int], dict[str, str]] = {}
    contradiction = None
    for line in lines:
        step, rank = int(line["step"]), int(line["rank"])
        parts = _parts(line["record"])
        earlier = trace.get((step, rank))
        if earlier is not None and contradiction is None:
            contradiction = _compare_parts(
                rank, step, earlier, parts, " (recorded twice by one run)"
            )
        trace[step, rank] = parts
    return trace, contradiction


def first_difference(left: Evidence, right: Evidence) -> Difference | None:
    """The earliest step, and in it the lowest rank, at which two runs differ; then the state at the
    end; else None."""
    for evidence in (left, right):
        if evidence.contradiction is not None:
            return evidence.contradiction
    for step, rank in sorted(left.trace.keys() | right.trace.keys()):
        found = _compare_parts(
            rank, step, left.trace.get((step, rank)), right.trace.get((step, rank))
        )
        if found is not None:
            return found
    for rank in sorted(left.digests.keys() | right.digests.keys()):
        found = _compare_parts(rank, None, left.digests.get(rank), right.digests.get(rank))
        if found is not None:
            return found
    return None


def _compare_parts(
    rank: int,
    step: int | None,
    left: Mapping[str, str] | None,
    right: Mapping[str, str] | None,
    remark: str = "",
) -> Difference | None:
    if left is None or right is None:
        if left is right:
            return None
        what = "what was recorded" if step is not None else "the digest of the state"
        sides = ["nothing" if side is None else "a record" for side in (left, right)]
        return Difference(rank=rank, step=step, what=what + remark, left=sides[0], right=sides[1])
    for name in sorted(left.keys() | right.keys()):
        values = left.get(name, "nothing"), right.get(name, "nothing")
        if values[0] != values[1]:
            return Difference(
                rank=rank, step=step, what=name + remark, left=values[0], right=values[1]
            )
    return None


def _parts(record: Any) -> dict[str, str]:
    """A record's parts as canonical text; text and not values, so that NaN equals itself and 1 is
    not 1.0."""
    if not isinstance(record, Mapping):
        record = {"record": record}
    return {str(name): json.dumps(value, sort_keys=True) for name, value in record.items()}


def _readable(text: str) -> str:
    """Cut to a length that can be read, and each float's exact bits followed by its decimal
    form."""
    if len(text) > _SHOWN_CHARACTERS:
        text = text[: _SHOWN_CHARACTERS - 3] + "..."
    return _EXACT.sub(lambda bits: f"{bits[0]} ({float.fromhex(bits[0])!r})", text)
