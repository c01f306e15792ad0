"""What the coordinator wants done. Frozen values. Ordering duties of the shell stand on each.

Actions of one `handle` call are carried out in list order.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.types import Cause, HeldCopy, Plan
from everstep.types import Record as JournalRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Base of all actions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Action):
    """Append to the journal. Before any later action of the same list."""

    record: JournalRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn(Action):
    """Fork a worker for `rank` on `node`. The previous incarnation of the rank has been reaped, or
    its node is lost. `joiner`: peers hold committed state, so it sets up solo and joins; else it
    sets up together with all others. `generation`: the one it is told. `delay_s`: wait so long
    before, since the rank has failed often of late."""

    rank: int
    incarnation: int
    generation: int
    joiner: bool
    delay_s: float = 0.0
    node: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Action):
    """SIGKILL the worker's whole session; `Died` follows when it is reaped."""

    rank: int
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss(Action):
    """`node` has no part in the job any more: its agent ends all workers that it has, now or when
    it can be reached again, and nothing that they say counts. It may come again under a new number.
    No `Died` is awaited for its workers."""

    node: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim(Action):
    """To the agents of `nodes`: tell what you keep of `ranks`, whose node is gone. Each answers;
    `Reclaimed` is told when the answer has been taken in."""

    turn: int
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Action):
    """Have nodes try whether they reach others, for `within_s` at most. `pairs`: who tries whom.
    Each that tries answers with `Probed`; it may be lost before."""

    turn: int
    pairs: tuple[tuple[int, int], ...]
    within_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect(Action):
    """Have all workers show their stacks, and answer with `Inspected`, soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStop(Action):
    """To every listed (rank, incarnation): abort the communicators of `generation` and older, and
    park."""

    generation: int
    to: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPosition(Action):
    """To a joiner that waits: its peers hold `step` committed steps."""

    rank: int
    incarnation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRegroup(Action):
    """To all listed, rank by rank: build the communicators of `generation` and follow `plan`.
    `copies`: the steps of which all ranks have copies, where they make any."""

    generation: int
    plan: Plan
    copies: tuple[int, ...] = ()
    to: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPeers(Action):
    """To all nodes that hold slots, before anything else of a generation: which nodes these are,
    and by node its guardian, the one that keeps what belongs to its ranks alone beside it; None for
    a node that is the only one."""

    guardians: dict[int, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendKeepers(Action):
    """To all nodes, before anything else of a generation: by rank, the node that keeps the copies
    of its state beside its own. `steps`: copies of other steps are of no use any more."""

    generation: int
    keepers: dict[int, int]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCopies(Action):
    """The copies of `rank` on `node` are of no use any more: others keep newer ones."""

    generation: int
    rank: int
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCopies(Action):
    """Of the copies that `node` has found when it joined, those in `keep` are of use. It gives the
    others up."""

    node: int
    keep: tuple[HeldCopy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGo(Action):
    """All replicas are equal at set-up: `protect` may return. (A joiner gets it at once, when its
    manifest fits.) `copied`: the ranks whose state is copied; `copy_every`: as the policy has
    it."""

    to: tuple[tuple[int, int], ...]
    copied: frozenset[int] = frozenset()
    copy_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SendClosed(Action):
    """All ranks have left their loops: the closing fence is open."""

    to: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendBye(Action):
    """Every script has ended: the processes may exit."""

    to: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Action):
    """The job is over. The shell kills and reaps what still runs. `cause`: the first cause, None on
    success. `text`: for the person who must act; empty on success."""

    exit_code: int
    cause: Cause | None = None
    rank: int | None = None
    text: str = ""
