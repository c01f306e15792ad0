"""What one `handle` call answers: the actions in their order, and the journal's lines in the
journal's words.

Purpose: the vocabulary of the journal (docs/reference/journal.md) stands in one place, apart from
the decisions. Pure.

What it doesn't know: when a line is due, and the time, which the journal's writer stamps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from everstep.core import actions as do
from everstep.core.events import Loaded, Restored
from everstep.core.ladder import Incident
from everstep.core.membership import Member
from everstep.core.nodes import Node
from everstep.types import Cause, Holding, Record


class Outbox:
    """Collects actions until they are taken."""

    def __init__(self) -> None:
        self._actions: list[do.Action] = []

    def take(self) -> list[do.Action]:
        """Return what has been collected, and begin anew."""
        taken, self._actions = self._actions, []
        return taken

    def put(self, action: do.Action) -> None:
        """Add an action after all earlier ones."""
        self._actions.append(action)

    def record(self, event: str, **fields: Any) -> None:
        """Add a line for the journal."""
        self.put(do.Record(record=Record(event=event, fields=fields)))

    def spawn(self, member: Member, node: int, generation: int, delay_s: float = 0.0) -> None:
        """Spawn the process for a new tenure on `node`, after `delay_s`."""
        rank, incarnation = member.identity
        known = {"generation": generation, "joiner": member.joining, "node": node}
        self.record("spawned", rank=rank, incarnation=incarnation, **known)
        self.put(
            do.Spawn(
                rank=rank,
                incarnation=incarnation,
                generation=generation,
                joiner=member.joining,
                delay_s=delay_s,
                node=node,
            )
        )

    def parked(
        self, member: Member, holding: Holding, generation: int, rehearsed_passes: int
    ) -> None:
        """A worker stands still."""
        self.record(
            "parked",
            rank=member.rank,
            incarnation=member.incarnation,
            generation=generation,
            committed=holding.committed,
            torn=holding.torn,
            can_advance=holding.can_advance,
            joiner=member.joining,
            rehearsed_passes=rehearsed_passes,
        )

    def receipt(self, restored: Restored, step: int) -> None:
        """A rank has taken the state of `step`, and has compared it with its sources'."""
        self.record(
            "receipt",
            rank=restored.rank,
            generation=restored.generation,
            step=step,
            sources=list(restored.sources),
            digest=restored.digest,
            nbytes=restored.nbytes,
            ok=restored.ok,
            at_s=restored.at_s,
        )

    def loaded(self, loaded: Loaded) -> None:
        """A rank has taken its part of a checkpoint."""
        self.record(
            "checkpoint_loaded",
            rank=loaded.rank,
            generation=loaded.generation,
            step=loaded.step,
            newest=loaded.newest,
            tier=loaded.tier.value,
            parts=[list(part) for part in loaded.parts],
            seconds=loaded.seconds,
            text=loaded.text,
        )

    def failed(
        self, incident: Incident, member: Member, step: int, cause: Cause, opened_in: int | None
    ) -> None:
        """A cause has shown itself. `opened_in`: the generation, when it opens the incident; else
        None."""
        known = {
            "incident": incident.number,
            "rank": member.rank,
            "incarnation": member.incarnation,
            "step": step,
            "cause": cause_fields(cause),
        }
        if opened_in is None:
            self.record("incident_cause", **known)
        else:
            self.record("incident_opened", **known, generation=opened_in)

    def planned(self, incident: Incident, generation: int) -> None:
        """It is decided how the ranks go on, in the new `generation`."""
        self.record(
            "planned",
            incident=incident.number,
            generation=generation,
            step=incident.floor,
            rung=incident.rung.value,
            state_from=incident.state_from.value,
            reason=incident.reason,
        )

    def node_joined(self, node: Node) -> None:
        """A node has come; it is a spare until it is given a slot."""
        self.record("node_joined", node=node.number, host=node.host, domain=node.domain)

    def gathered(self, nodes: Sequence[Node], spares: int) -> None:
        """The job has the nodes that it needs. `nodes`: by slot."""
        self.record("gathered", nodes=[node.number for node in nodes], spares=spares)

    def node_lost(self, node: Node, ranks: Sequence[int], text: str) -> None:
        """A node is gone. `ranks`: those that it held; none of a spare, which is no incident."""
        self.record(
            "node_lost",
            node=node.number,
            host=node.host,
            slot=node.slot,
            ranks=list(ranks),
            text=text,
        )

    def node_set_aside(self, host: str, losses: int, text: str) -> None:
        """A host has lost too many nodes."""
        self.record("node_set_aside", host=host, losses=losses, text=text)

    def node_awaited(self, incident: Incident, ranks: Sequence[int], wait_s: float) -> None:
        """No spare is left for `ranks`, and one is waited for."""
        self.record("node_awaited", incident=incident.number, ranks=list(ranks), wait_s=wait_s)

    def copy_awaited(
        self, incident: Incident, ranks: Sequence[int], hosts: Sequence[str], wait_s: float
    ) -> None:
        """No copy of what `ranks` hold is left; a node may come back with what lies in the memory
        of `hosts`."""
        self.record(
            "copy_awaited",
            incident=incident.number,
            ranks=list(ranks),
            hosts=list(hosts),
            wait_s=wait_s,
        )

    def node_replaced(self, incident: Incident, slot: int, lost: Node, node: Node) -> None:
        """`node` takes the slot of `lost`."""
        self.record(
            "node_replaced",
            incident=incident.number,
            slot=slot,
            lost=lost.number,
            node=node.number,
            host=node.host,
            reason=incident.takeovers[slot],
        )

    def incident_closed(self, incident: Incident) -> None:
        """All ranks have committed a step after the failure."""
        self.record(
            "incident_closed",
            incident=incident.number,
            rung=incident.rung.value,
            state_from=incident.state_from.value,
            reason=incident.reason,
            step=incident.step,
            steps_lost=incident.steps_lost,
        )

    def end(self, exit_code: int, text: str, cause: Cause | None, rank: int | None) -> None:
        """The job is over. Nothing may be put after it."""
        known = None if cause is None else cause_fields(cause)
        self.record("job_ended", exit_code=exit_code, text=text, cause=known)
        self.put(do.End(exit_code=exit_code, cause=cause, rank=rank, text=text))


def cause_fields(cause: Cause) -> dict[str, Any]:
    """A cause as the journal writes it: plain values only."""
    return asdict(cause) | {"kind": cause.kind.value}
