"""What workers and agents say, as events of the core. Pure functions.

They know messages and events, and neither who speaks on which connection nor what becomes of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from everstep.core import events
from everstep.types import Cause, CauseKind, StateFrom
from everstep.wire import messages, nodes
from everstep.wire.messages import ChaosSpec, FromWorker


def node_back(
    host: str, domain: str, report: nodes.Report, protected: Iterable[events.Protected]
) -> events.NodeBack:
    """The event of an agent's report. `protected`: what ranks said in set-up, as the report's
    `kept` has it."""
    return events.NodeBack(
        node=report.node,
        host=host,
        domain=domain,
        slot=None if report.slot < 0 else report.slot,
        members=tuple(
            events.MemberBack(
                rank=member.rank,
                incarnation=member.incarnation,
                generation=member.generation,
                joining=member.joining,
                settled=member.settled,
                stopped=member.stopped,
                position=(member.step, member.sections),
                left_at=member.left_at,
                finished=member.finished,
                closed=member.closed,
                bye=member.bye,
                base=member.base,
            )
            for member in report.members
        ),
        ended=tuple(
            events.Died(
                rank=died.rank,
                incarnation=died.incarnation,
                cause=died.cause,
                before_kill=died.before_kill,
            )
            for died in report.ended
        ),
        protected=tuple(protected),
        copies=report.copies,
        peers=report.peers,
        saved={StateFrom(tier): step for tier, step in report.saved.items()},
    )


def protected(rank: int, incarnation: int, message: messages.Protect) -> events.Protected:
    """The event of a rank's word in set-up."""
    return events.Protected(
        rank=rank,
        incarnation=incarnation,
        shard=message.shard,
        manifest=message.manifest,
        digests=message.digests,
    )


def plain_event(rank: int, incarnation: int, message: FromWorker) -> events.Event:
    """The event of a message that says all that the event holds."""
    match message:
        case messages.Hello(pid=pid):
            return events.Started(rank=rank, incarnation=incarnation, pid=pid)
        case messages.Protect():
            return protected(rank, incarnation, message)
        case messages.Commit(generation=generation, step=step, sections=sections, t=at_s):
            return events.Committed(
                rank=rank,
                incarnation=incarnation,
                generation=generation,
                step=step,
                sections=sections,
                at_s=at_s,
            )
        case messages.Loaded():
            return events.Loaded(
                rank=rank,
                incarnation=incarnation,
                generation=message.generation,
                step=message.step,
                ok=message.ok,
                text=message.text,
                newest=message.newest,
                tier=StateFrom(message.tier),
                parts=message.parts,
                seconds=message.seconds,
            )
        case messages.Saved(step=step, tier=tier):
            return events.Saved(rank=rank, incarnation=incarnation, step=step, tier=StateFrom(tier))
        case messages.Wait():
            return events.Waiting(rank=rank, incarnation=incarnation)
        case messages.Park(generation=generation, holding=holding, rehearsed_passes=passes):
            return events.Parked(
                rank=rank,
                incarnation=incarnation,
                generation=generation,
                holding=holding,
                rehearsed_passes=passes,
            )
        case messages.Built(generation=generation):
            return events.Regrouped(rank=rank, incarnation=incarnation, generation=generation)
        case messages.Receipt():
            return events.Restored(
                rank=rank,
                incarnation=incarnation,
                generation=message.generation,
                ok=message.ok,
                text=message.text,
                nbytes=message.nbytes,
                sources=message.sources,
                digest=message.digest,
                held=message.held,
                at_s=message.t,
            )
        case messages.Close(generation=generation, step=step):
            return events.Closing(
                rank=rank, incarnation=incarnation, generation=generation, step=step
            )
        case messages.Finish():
            return events.Finished(rank=rank, incarnation=incarnation)
        case messages.Refuse(text=text, exit_code=exit_code):
            return events.Refused(
                rank=rank, incarnation=incarnation, text=text, exit_code=exit_code
            )
        case _:
            raise TypeError(f"a worker said {type(message).__name__}, which is no event")


def final_cause(seen: Cause, raised: Cause | None, fired: tuple[ChaosSpec, float] | None) -> Cause:
    """What is known of a failure from outside, made complete. Pure.

    `seen`: the exit, or the fault that the worker reported. `raised`: the worker's last words, the
    traceback; it is the cause of an exit, and detail to a signal. `fired`: the fault on purpose
    that had just fired there, and when, on the host's monotonic clock in seconds.
    """
    cause = seen
    if raised is not None and seen.kind in (CauseKind.EXIT, CauseKind.EARLY_EXIT):
        cause = dataclasses.replace(raised, exit_code=seen.exit_code or raised.exit_code)
    elif raised is not None:
        cause = dataclasses.replace(seen, detail=raised.detail)
    if fired is not None:
        fault, at_s = fired
        cause = dataclasses.replace(cause, fault=fault.text, at_s=at_s)
    return cause
