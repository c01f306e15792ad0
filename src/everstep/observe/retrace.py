"""What a job is doing, or did at its end, as far as its journal tells.

Theory of operation: the records are folded, in their order, into the value that a coordinator
answers with. The journal knows the steps that all ranks have committed and who holds each rank, but
not where each stands in its step. Whether a job without an end still runs is asked of the kernel:
whoever writes its journal has it open.

It does not know how the value is shown (status.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from everstep.core.goodput import Ledger, fold
from everstep.core.overview import (
    AWAITING,
    VACANT,
    IncidentNow,
    NodeNow,
    Overview,
    RankNow,
    SlotMissing,
)
from everstep.core.words import name_ranks
from everstep.errors import EverstepError
from everstep.observe.journal import read_journal
from everstep.observe.pace import Pace
from everstep.observe.report import JOURNAL_FILE
from everstep.wire.clients import Status

Record = Mapping[str, Any]
_PHASES = {  # which a record begins
    "coordinator_started": "reconvening",  # or, if it is the first, nothing yet
    "coordinator_left": "left alone by its coordinator",
    "job_started": "setting up",
    "gathered": "setting up",
    "setup_done": "running",
    "incident_opened": "stopping",
    "node_awaited": AWAITING,
    "copy_awaited": AWAITING,
    "planned": "regrouping",
    "incident_closed": "running",
    "job_ended": "ended",
}


class NoRunError(EverstepError):
    """There is no such run."""

    exit_code = 3


def status_of_run(run: Path) -> Status:
    """What the journal of a run tells. `run`: its directory, or its journal. Blocks on the disk.

    Raises NoRunError without a journal there, JournalError as `read_journal` does.
    """
    journal = _journal(run)
    if not journal.is_file():
        raise NoRunError(
            f"{journal}: no such journal; give the directory of a run, like everstep-runs/RUN_ID, "
            "or --coordinator HOST:PORT of a job that runs elsewhere"
        )
    return status_of(read_journal(journal))


def is_written(run: Path) -> bool:
    """Whether a process on this machine has the run's journal open, and so the job runs. Processes
    of other users can't be seen. Reads /proc."""
    wanted = str(_journal(run).resolve())
    return any(_leads_to(fd, wanted) for fd in Path("/proc").glob("[0-9]*/fd/*"))


def _leads_to(fd: Path, wanted: str) -> bool:
    try:
        return os.readlink(fd) == wanted
    except OSError:  # it was closed meanwhile
        return False


def _journal(run: Path) -> Path:
    return run if run.is_file() else run / JOURNAL_FILE


def status_of(records: Sequence[Record]) -> Status:
    """What the records of a journal tell. Pure; raises KeyError or ValueError on a known record
    without its fields."""
    ledger, pace, scene = fold(records), Pace(), _Scene()
    for record in records:
        pace.see(record)
        scene.see(record)
    return Status(
        run_id=ledger.run_id,
        script=scene.script,
        term=scene.term,
        wall_s=ledger.wall_s,
        steps_per_s=pace.steps_per_s if ledger.exit_code is None else None,
        goodput=ledger.goodput,
        incidents=len(ledger.incidents),
        overview=scene.overview(ledger),
        exit_code=ledger.exit_code,
        text=ledger.text,
    )


class _Scene:
    """Who is there and what goes on, after the records seen so far."""

    def __init__(self) -> None:
        self.script = ""
        self.term = 0
        self._phase = "new"
        self._generation = 0
        self._nodes: dict[int, NodeNow] = {}
        self._missing: dict[int, SlotMissing] = {}
        self._ranks: dict[int, RankNow] = {}

    def see(self, record: Record) -> None:
        """Take the next record."""
        event = record["event"]
        self._phase = _PHASES.get(event, self._phase)
        self._generation = max(self._generation, int(record.get("generation", 0)))
        self.term = int(record.get("term", self.term))
        match event:
            case "listening" if not self._nodes:
                self._phase = "gathering"
            case "coordinator_resumed":
                self._phase = "running" if record["undisturbed"] else "stopping"
            case "job_started":
                self.script = " ".join([record["script"], *record["args"]])
            case "spawned":
                self._ranks[record["rank"]] = RankNow(
                    rank=record["rank"],
                    incarnation=record["incarnation"],
                    state="starting",
                    node=record.get("node"),
                    step=0,
                    sections=0,
                )
            case "started":
                self._move([record["rank"]], "setting up")
            case "setup_done" | "incident_closed":
                self._move(list(self._ranks), "running")
            case "node_joined" | "gathered" | "node_lost" | "node_replaced":
                self._see_of_nodes(event, record)

    def overview(self, ledger: Ledger) -> Overview:
        """All of it, with the run's figures. After the end nobody is there any more."""
        ended = self._phase == "ended"
        ranks = [] if ended else [self._ranks[rank] for rank in sorted(self._ranks)]
        nodes = [] if ended else [self._nodes[node] for node in sorted(self._nodes)]
        return Overview(
            phase=self._phase,
            generation=self._generation,
            step=ledger.steps,
            world_size=ledger.world_size,
            nodes=tuple(nodes),
            missing=tuple(self._missing[slot] for slot in sorted(self._missing)),
            wait_s=None,
            ranks=tuple(replace(rank, step=ledger.steps) for rank in ranks),
            incident=_open(ledger),
        )

    def _see_of_nodes(self, event: str, record: Record) -> None:
        match event:
            case "node_joined":
                node, host, domain = record["node"], record["host"], record["domain"]
                self._nodes[node] = NodeNow(node=node, host=host, domain=domain, slot=None)
            case "gathered":
                for slot, node in enumerate(record["nodes"]):
                    self._give(slot, node)
            case "node_replaced":
                self._give(record["slot"], record["node"])
                if self._phase == AWAITING and not self._missing:
                    self._phase = "regrouping"
            case "node_lost":
                self._nodes.pop(record["node"], None)
                if record["ranks"]:
                    slot, ranks = record["slot"], name_ranks(record["ranks"])
                    lost = f"node {record['node']} (host {record['host']})"
                    self._missing[slot] = SlotMissing(slot=slot, ranks=ranks, lost=lost)
                    for rank in record["ranks"]:
                        self._ranks[rank] = RankNow(
                            rank=rank, incarnation=0, state=VACANT, node=None, step=0, sections=0
                        )

    def _give(self, slot: int, node: int) -> None:
        self._missing.pop(slot, None)
        if node in self._nodes:
            self._nodes[node] = replace(self._nodes[node], slot=slot)

    def _move(self, ranks: Sequence[int], state: str) -> None:
        for rank in ranks:
            if rank in self._ranks:
                self._ranks[rank] = replace(self._ranks[rank], state=state)


def _open(ledger: Ledger) -> IncidentNow | None:
    """The incident that has not been closed."""
    last = ledger.incidents[-1] if ledger.incidents else None
    if last is None or last.closed:
        return None
    return IncidentNow(incident=last.incident, rank=last.rank, step=last.step, cause=last.cause)
