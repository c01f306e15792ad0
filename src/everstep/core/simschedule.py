"""What a simulated job is and what befalls it, drawn from a seed.

Theory of operation. A schedule says how the state is laid out (one shard: every rank holds all, as
under DDP; several: replicas of shards, as under HSDP; one a rank: no replicas, as under FSDP), how
a step is fenced, which sections follow which step, and which faults come how many events after one
another. `draw_schedule` draws small jobs of every kind: the faults are found by number, not by
size.

What it doesn't know: what becomes of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from everstep.types import WHOLE, Position

Fence = Literal["none", "early", "late"]

FAULTS = (
    "kill",  # a process dies
    "node",  # all processes of a node die at one instant
    "raise",  # the script raises
    "peer",  # a collective breaks, and nobody is dead
    "replace",  # the worker's own code asks to be replaced
    "receipt",  # the next state that is fetched arrives corrupted
    "hang",  # a process no longer answers when next it must
    "stall",  # a process stands still, as by SIGSTOP
    "lose",  # a message from or to a worker is lost
    "twice",  # what a worker says next comes twice, the second time late
)
NODE_FAULTS = (
    "fell",  # a node is gone at one instant, with what it had under way
    "cut",  # a node can't be reached any more, and lives
    "spare",  # a spare is gone
    "late",  # one more node comes
    "stuck",  # a process stands still and can't be ended
    "unlink",  # a node loses the coordinator, and nobody else
)
COORDINATOR_FAULTS = (
    "crash",  # the coordinator dies
    "depose",  # another one begins, while it lives
)
_LAYOUTS = (  # ranks and shards
    *((1, 1), (2, 1), (2, 1), (3, 1), (3, 1), (4, 1), (5, 1)),  # DDP
    *((4, 2), (5, 2), (6, 2), (6, 3)),  # HSDP
    *((2, 2), (3, 3)),  # FSDP
)
_ON_NODES = (  # nodes, ranks of each, and shards
    *((2, 1, 1), (2, 2, 1), (3, 1, 1), (3, 2, 1), (4, 1, 1)),  # DDP
    *((2, 2, 2), (3, 2, 2), (4, 1, 2)),  # HSDP
    *((3, 1, 3), (2, 2, 4)),  # FSDP
)
_OFTEN = ("kill", "kill", "raise", "peer", *FAULTS)
_OFTEN_ON_NODES = (*("fell",) * 10, *("cut",) * 6, *NODE_FAULTS, "spare", *_OFTEN)
_WITH_COORDINATORS = (*_OFTEN_ON_NODES, *("crash",) * 24, *("depose",) * 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A job and its faults.

    `shards`: parts of the state, dealt to the ranks in turn. `fence`: none, before the last update,
    or at the step's end. `updates`: of a step, 1 or 2. `undoes`: without a fence, a rank keeps a
    copy to undo the first of two updates with; fenced ones always do where they must. `sections`:
    how many follow step 0 (the set-up), 1, 2, ...; none after those that aren't named. `faults`:
    how many events after the one before it each fault comes, and which it is. `node_size`: ranks of
    one node. `slow_s`: the longest delay.

    `nnodes`: nodes that have to join, with `node_size` ranks each; 0: one, whose agent never fails.
    `spares`: nodes that come beside them. `hosts`: machines on which the nodes lie in turn; two are
    a failure domain. `returns`: how probable it is that a node that was lost comes back; `tardy`:
    that one turns to a coordinator that has begun anew when that waits no longer."""

    seed: int
    world_size: int
    steps: int
    shards: int = 1
    fence: Fence = "none"
    updates: int = 1
    undoes: bool = False
    sections: tuple[int, ...] = ()
    faults: tuple[tuple[int, str], ...] = ()
    node_size: int = 1
    slow_s: float = 0.1
    nnodes: int = 0
    spares: int = 0
    hosts: int = 1
    returns: float = 0.0
    tardy: float = 0.0

    def shard(self, rank: int) -> str:
        """The key of what `rank` holds."""
        return f"s{rank % self.shards}" if self.shards > 1 else WHOLE

    def after(self, position: Position) -> Position | None:
        """What the script does next at `position`: where it stands after that; None: it leaves its
        loop."""
        step, done = position
        if done < (self.sections[step] if step < len(self.sections) else 0):
            return step, done + 1
        return (step + 1, 0) if step < self.steps else None

    @property
    def copies(self) -> bool:
        """Whether a rank copies its state before the first update of a step."""
        if self.fence == "none":
            return self.undoes and self.updates > 1
        return self.fence == "late" or self.updates > 1


def draw_schedule(seed: int) -> Schedule:
    """A schedule with everything drawn from `seed`: small jobs, up to five faults, most of them
    close behind the one before."""
    draw = random.Random(seed)
    world_size, shards = draw.choice(_LAYOUTS)
    fences: tuple[Fence, ...] = ("none", "none", "early", "late")
    if shards > 1:
        fences = ("early", "late")  # without a fence, shards could end at different steps
    fence = draw.choice(fences)
    gaps = [draw.randrange(50 * world_size)]
    gaps += [draw.randrange(draw.choice((6, 12, 30, 150))) for _ in range(4)]
    faults = tuple((gap, draw.choice(_OFTEN)) for gap in gaps[: draw.randrange(6)])
    steps = draw.randrange(1, 6)
    sectioned = draw.random() < 0.5
    sections = tuple(draw.choice((0, 0, 1, 2)) for _ in range(steps + 1)) if sectioned else ()
    schedule = Schedule(
        seed=seed,
        world_size=world_size,
        steps=steps,
        shards=shards,
        fence=fence,
        # Half an update without a copy is no state of any step. A shard that is left so on its only
        # replica is lost; that is told apart by the onlooker, and wanted.
        updates=draw.choice((1, 1, 2)),
        undoes=draw.random() < 0.5,
        sections=sections,
        faults=faults,
        node_size=draw.choice((1, 1, 2, 3)),
        slow_s=draw.choice((0.01, 0.1, 1.0)),
    )
    return schedule if draw.random() < 0.6 else _on_nodes(schedule, draw)


def _on_nodes(schedule: Schedule, draw: random.Random) -> Schedule:
    """The same job on several nodes, which fail too."""
    nnodes, node_size, shards = draw.choice(_ON_NODES)
    spares, fence = draw.choice((0, 0, 1, 1, 2, 3)), schedule.fence
    world_size = nnodes * node_size
    kinds = _WITH_COORDINATORS if draw.random() < 0.6 else _OFTEN_ON_NODES
    gaps = [draw.randrange(draw.choice((6, 60 * world_size, 60 * world_size)))]
    gaps += [draw.randrange(draw.choice((6, 12, 30, 150))) for _ in range(4)]
    return replace(
        schedule,
        world_size=world_size,
        shards=shards,
        fence="early" if shards > 1 and fence == "none" else fence,
        faults=tuple((gap, draw.choice(kinds)) for gap in gaps[: draw.randrange(6)]),
        node_size=node_size,
        nnodes=nnodes,
        spares=spares,
        hosts=draw.randrange(1, nnodes + spares + 1),
        returns=draw.choice((0.0, 0.5, 1.0)),
        tardy=draw.choice((0.0, 0.0, 0.1)),
    )
