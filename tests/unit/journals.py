"""Journals made by hand, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from everstep.observe.journal import JournalWriter

Record = dict[str, Any]
FAULT = "kill:rank=1,step=5,at=backward"


def record(t: float, event: str, **fields: Any) -> Record:
    return {"t": t, "event": event} | fields


def begin(run_id: str = "one", world_size: int = 4) -> list[Record]:
    """Up to the moment at which the set-up is done: one second."""
    job = {
        "world_size": world_size,
        "script": "train.py",
        "args": [],
        "torch": "2.13",
        "python": "3.11",
    }
    return [
        record(0.0, "journal", format="everstep-journal", version=1, run_id=run_id, wall_time=1.0),
        record(0.1, "job_started", **job, everstep="0.1.0"),
        record(1.0, "setup_done"),
    ]


def steps(first: int, last: int, begin_s: float, step_s: float = 0.5) -> list[Record]:
    return [
        record(begin_s + step_s * (number - first + 1), "step", step=number, generation=0)
        for number in range(first, last + 1)
    ]


def cause(**more: Any) -> Record:
    told = {
        "kind": "signal",
        "text": "rank 1 was killed by SIGKILL in step 5 (backward)",
        "detail": "",
    }
    return (
        told
        | {"signature": "SIGKILL", "exit_code": None, "signal": 9, "at_s": None, "fault": None}
        | more
    )


def opened(t: float, incident: int = 1, rank: int = 1, step: int = 5, **of_cause: Any) -> Record:
    named = {"incident": incident, "rank": rank, "incarnation": 1, "step": step, "generation": 0}
    return record(t, "incident_opened", **named, cause=cause(**of_cause))


def recovery(
    at_s: float, incident: int = 1, rung: str = "respawn", state_from: str = "peer", **more: Any
) -> list[Record]:
    """From the stop to the first step after it: 10, 20, 30, 40 and 50 ms."""
    reason = "rank 1 takes step 4 from ranks 0, 2, 3"
    in_words = {"rung": rung, "state_from": state_from, "reason": reason}
    stage = {"incident": incident, "generation": 1}
    step = more.pop("step", 5)
    return [
        record(at_s + 0.01, "stopped", **stage),
        record(at_s + 0.03, "ready", **stage),
        record(at_s + 0.03, "planned", **stage, step=step - 1, **in_words),
        record(at_s + 0.06, "regrouped", **stage),
        record(at_s + 0.10, "restored", **stage, nbytes=100),
        record(at_s + 0.15, "step", step=step, generation=1),
        record(
            at_s + 0.15, "incident_closed", incident=incident, step=step, steps_lost=0, **in_words
        ),
    ]


def fired(t: float, fired_t: float, index: int = 0, text: str = FAULT, **where: Any) -> Record:
    return record(
        t,
        "fault_fired",
        index=index,
        text=text,
        fired_t=fired_t,
        **({"rank": 1, "step": 5} | where),
    )


def end(t: float, exit_code: int = 0, text: str = "", cause: Record | None = None) -> list[Record]:
    return [record(t, "job_ended", exit_code=exit_code, text=text, cause=cause)]


def clean(run_id: str = "one") -> list[Record]:
    """Eight steps, nothing failed; five seconds in all."""
    return [*begin(run_id), *steps(1, 8, 1.0), *end(5.0)]


def killed_and_recovered(run_id: str = "one") -> list[Record]:
    """Eight steps; a kill in step 5 at 3.2 s, noticed after 5 ms, over after 155."""
    return [
        *begin(run_id),
        *steps(1, 4, 1.0),
        fired(3.201, 3.2),
        opened(3.205, fault=FAULT),
        *recovery(3.205),
        *steps(6, 8, 3.355),
        *end(5.2),
    ]


def write(path: Path, records: Iterable[Record]) -> None:
    """Write records as a journal's file; the first is the header, which the writer makes by
    itself."""
    header, *others = records
    times = iter([header["t"], *(one["t"] for one in others)])
    writer = JournalWriter(
        path, run_id=header["run_id"], wall_time=header["wall_time"], clock=lambda: next(times)
    )
    for one in others:
        writer.write(
            one["event"], {name: value for name, value in one.items() if name not in ("t", "event")}
        )
    writer.close()
