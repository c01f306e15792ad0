"""What a job is doing, on a screen.

Theory of operation: one value, `wire.clients.Status`, has it, whether the coordinator has said it
(launch/client.py) or it was read from the journal (retrace.py). Ranks that are alike share a row.

It does not know where the value came from."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from everstep.core.overview import Overview, SlotMissing
from everstep.core.words import name_ranks
from everstep.observe.narrate import counted, failure_of
from everstep.observe.screen import Screen
from everstep.wire.clients import Status

_INDENT = (0, 0, 0, 4)
_GAP = 2  # columns between others
_LISTED = 8  # slots that nobody holds, one by one


def show(status: Status, screen: Screen) -> None:
    """Say what the job does. Blocks on the screen."""
    overview = status.overview
    screen.say(f"everstep run {status.run_id}: {headline(status)}", "bold")
    screen.put(f"  script     {status.script}")
    screen.say(f"  job        {_size(status)}")
    screen.say(f"  incidents  {_incidents(status)}")
    if status.text:
        screen.say(f"  end        {status.text}")
    if overview.nodes or status.agents:
        screen.say("  nodes")
        screen.draw(_table(("node", "host", "address", "slot", "state"), _node_rows(status)))
    for line in _missing(overview):
        screen.say(f"  missing    {line}", "yellow")
    if overview.ranks:
        screen.say("  ranks")
        screen.draw(_table(("ranks", "incarnation", "state", "committed"), _rank_rows(overview)))


def as_json(status: Status) -> str:
    """All of it, as one JSON object without a line's end."""
    fields = msgspec.to_builtins(status)
    del fields["type"]  # of the wire
    return msgspec.json.encode(fields).decode()


def headline(status: Status) -> str:
    """In a few words: whether it runs, how far it is and how fast."""
    overview = status.overview
    if status.exit_code is not None:
        how = "finished" if status.exit_code == 0 else f"ended with exit code {status.exit_code}"
        return f"{how} after {counted(overview.step, 'step')}"
    parts = [overview.phase, f"step {overview.step}"]
    if status.steps_per_s is not None:
        parts.append(f"{status.steps_per_s:.1f} steps/s")
    if status.goodput is not None and overview.step:
        parts.append(f"goodput {100 * status.goodput:.1f} %")
    return ", ".join(parts)


def _size(status: Status) -> str:
    overview = status.overview
    parts = [counted(overview.world_size, "rank"), f"generation {overview.generation}"]
    if status.agents:
        spares = sum(node.slot is None for node in overview.nodes)
        parts += [counted(spares, "spare"), f"coordinator of term {status.term}"]
    return ", ".join([*parts, f"for {_duration(status.wall_s)}"])


def _duration(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}"


def _incidents(status: Status) -> str:
    number = str(status.incidents or "none")
    incident = status.overview.incident
    if incident is None or status.exit_code is not None:
        return number
    return f"{number}, one open: {failure_of(incident.rank, incident.step, incident.cause)}"


def _missing(overview: Overview) -> list[str]:
    """Which slots nobody holds, and whether a node is waited for."""
    lines = [_slot(missing) for missing in overview.missing[:_LISTED]]
    more = len(overview.missing) - len(lines)
    if more:
        lines.append(f"{counted(more, 'slot')} more")
    if overview.wait_s is not None:
        lines.append(f"a node is waited for, another {overview.wait_s:.0f} s")
    return lines


def _slot(missing: SlotMissing) -> str:
    who = f", which {missing.lost} had" if missing.lost else ""
    return f"slot {missing.slot} ({missing.ranks}){who}"


def _node_rows(status: Status) -> list[tuple[str, ...]]:
    agents = {agent.node: agent for agent in status.agents}
    rows: list[tuple[str, ...]] = []
    for node in status.overview.nodes:
        agent = agents.pop(node.node, None)
        host = node.host if node.domain in ("", node.host) else f"{node.host} ({node.domain})"
        state = "spare" if node.slot is None else "working"
        state += ", its host is set aside" if node.aside else ""
        slot = "-" if node.slot is None else str(node.slot)
        rows.append((str(node.node), host, agent.address if agent else "-", slot, state))
    for agent in agents.values():
        state = "lost" if agent.joined else "starting"
        rows.append((str(agent.node), agent.host, agent.address, "-", state))
    return rows


def _rank_rows(overview: Overview) -> list[tuple[str, ...]]:
    """Ranks that are alike share a row, so that a thousand of them still fit on a screen."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in overview.ranks:
        incarnation = str(rank.incarnation) if rank.incarnation else "-"
        done = f"step {rank.step}"
        if rank.sections:
            done += f", {counted(rank.sections, 'section')}"
        alike.setdefault((incarnation, rank.state, done), []).append(rank.rank)
    return [
        (name_ranks(ranks).split(maxsplit=1)[1], *what)
        for what, ranks in sorted(alike.items(), key=lambda item: item[1][0])
    ]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Padding:
    table = Table(
        box=None, padding=(0, _GAP, 0, 0), pad_edge=False, show_edge=False, header_style="bold"
    )
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return Padding(table, _INDENT, expand=False)
