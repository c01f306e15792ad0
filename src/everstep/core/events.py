"""What the coordinator is told. Frozen values; `rank` and `incarnation` say who speaks,
`generation` in which world.

An event of an incarnation that no longer holds its rank is stale and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.core.hang import Evidence
from everstep.core.ladder import Incident
from everstep.core.words import name_signal
from everstep.types import Cause, HeldCopy, Holding, Position, Stamp, StateFrom


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted(Event):
    """The shell is ready to spawn workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined(Event):
    """An agent has registered, under a number that no agent had before. `host`: its machine.
    `domain`: what fails together with it (a rack, a switch); "" where that is only the host.
    `ranks`: how many workers it can run. `found`: the copies that an agent of the same job had left
    in its host's memory; it keeps them until `JudgeCopies`."""

    node: int
    host: str
    domain: str
    ranks: int
    found: tuple[HeldCopy, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(Event):
    """The agent of `node` can't be reached, or is gone: so are all its workers, as far as the job
    is concerned, and no `Died` need come for them. `cause.text`: how that was noticed."""

    node: int
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimed(Event):
    """The answer of `node` to `Reclaim(turn)`."""

    node: int
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed(Event):
    """The answer of `node` to `Probe(turn)`. `closed`: the nodes that it could not reach, and how
    it tried ("10.0.0.2 -> 10.0.0.3:29403: no connection (timed out)")."""

    node: int
    turn: int
    closed: dict[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent(Event):
    """Something a worker said, or was seen to do."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(WorkerEvent):
    """The process runs and its control channel is open."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected(WorkerEvent):
    """`protect` was called. `digests`: name to digest of every tensor that must be equal on all
    replicas of `shard`; `manifest`: one digest over names, shapes and dtypes."""

    shard: str
    manifest: str
    digests: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberBack:
    """A living worker, as its agent tells of it to a coordinator that begins anew.

    `joining`: it has not been part of a world yet (no `SendRegroup` has reached it, and its peers
    held committed state when it was spawned). `settled`: it is in its loop or after it, in the
    world of `generation`: it was told to go, or has restored, and has not been stopped since, nor
    has it failed. `stopped`: it was stopped in that world, whatever it may
    have restored. `position`: what it has committed, or restored. `left_at`, `finished`: as the
    events Closing and Finished say. `closed`: it was told that the closing fence is open. `bye`: it
    was told that it may exit. `base`: the step of the checkpoint at which it began, if it did."""

    rank: int
    incarnation: int
    generation: int
    joining: bool
    settled: bool
    stopped: bool = False
    position: Position = (0, 0)
    left_at: int | None = None
    finished: bool = False
    closed: bool = False
    bye: bool = False
    base: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """Instead of JobStarted, the first event of a coordinator that takes over a job that runs:
    number `term`, 1 or more; each term is given once. What the journal tells: `recorded`, the
    newest step in it; `incidents`, how many were opened; `open_incident`, the one that has not
    been closed, if any; `holders`: by slot, the node that held it last, as far
    as is known. `base`: the step of the checkpoint at which its ranks began; `saved`: by tier, the
    newest checkpoint that there is."""

    term: int
    recorded: int = 0
    incidents: int = 0
    open_incident: Incident | None = None
    holders: dict[int, Holder] = field(default_factory=dict)
    base: int = 0
    saved: dict[StateFrom, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A node that holds a slot by the journal, or did until it was `lost`."""

    node: int
    host: str
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBack(Event):
    """An agent of an earlier coordinator's has come, with all that it knows. `node`: its number
    then, and now. `slot`: which it holds; None for a spare. `members`: its living workers. `ended`:
    its workers that are dead, the newest of each rank at most, with their cause. `protected`: what
    ranks said in set-up, as far as it knows, also of ranks elsewhere. `copies`: those in its
    memory. `peers`: the nodes that held slots when its newest world began; none
    where it has not been told. `saved`: by tier, the newest checkpoint of which its ranks know."""

    node: int
    host: str
    domain: str
    slot: int | None
    members: tuple[MemberBack, ...] = ()
    ended: tuple[Died, ...] = ()
    protected: tuple[Protected, ...] = ()
    copies: tuple[HeldCopy, ...] = ()
    peers: tuple[int, ...] = ()
    saved: dict[StateFrom, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(WorkerEvent):
    """The worker committed `step` (1 is the first), or section number `sections` after it. `at_s`:
    when, on the host's monotonic clock."""

    generation: int
    step: int
    at_s: float
    sections: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(WorkerEvent):
    """Before its first step the rank has taken its part of the checkpoint of `step`; 0: there is
    none. `ok` False: there are some, and none can be had. `text`: what was refused on the way, and
    why. `newest`: the newest step that any tier says it has. `tier`: that which gave the most;
    `parts`: (part's rank, tier, where, bytes) of all that was read, in `seconds`."""

    generation: int
    step: int
    ok: bool = True
    text: str = ""
    newest: int = 0
    tier: StateFrom = StateFrom.DURABLE
    parts: tuple[tuple[int, str, str, int], ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(WorkerEvent):
    """The checkpoint of `step` exists in `tier`."""

    step: int
    tier: StateFrom


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(WorkerEvent):
    """Node `node` keeps a copy of the rank's state at `step`; it said so in `generation`. `stamp`:
    by which the copy is known again; None: it never is."""

    generation: int
    step: int
    node: int
    stamp: Stamp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyWaived(WorkerEvent):
    """The keeper of the rank can't have its copy of `step`."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySpoiled(Event):
    """The copy of `rank` at `step` on `node` is not there, or not what was written."""

    rank: int
    step: int
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Died(WorkerEvent):
    """The process is gone and its whole session has been killed and reaped. `before_kill`: it is
    known to have ended before any kill of ours could reach it."""

    cause: Cause
    before_kill: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted(WorkerEvent):
    """The process lives, but its attempt at `step` failed in `generation` (an exception, or a
    broken collective)."""

    generation: int
    step: int
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(WorkerEvent):
    """A joiner has set itself up and asks at which step its peers stand, to draw the batch it
    rehearses with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked(WorkerEvent):
    """The worker stands still after `Stop(generation)` and holds `holding`. A joiner sends it once
    it has rehearsed. `rehearsed_passes`: how many passes that took."""

    generation: int
    holding: Holding
    rehearsed_passes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped(WorkerEvent):
    """The worker's communicators of `generation` are up."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(WorkerEvent):
    """The worker has done its part of the plan of `generation`: served, fetched and checked its
    receipt, or kept.

    `ok` False: the receipt did not match; `text` says how. `nbytes`: bytes fetched, from the ranks
    `sources`; `digest`: of the state now held. `held`: where the sources do not agree, what each
    says that it holds, as a digest by rank. `at_s`: when it was done, on the host's monotonic
    clock; None where nobody knows."""

    generation: int
    ok: bool
    text: str = ""
    nbytes: int = 0
    sources: tuple[int, ...] = ()
    digest: str = ""
    held: dict[int, str] = field(default_factory=dict)
    at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing(WorkerEvent):
    """The worker left its loop after `step` committed steps and waits for all others before it goes
    on."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(WorkerEvent):
    """The worker's script has ended with code 0; the process waits for leave to exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked(Event):
    """A person or the system asked the job to end, by a signal (Ctrl-C, SIGTERM), or as by one.
    `by`: what it was then, in words."""

    signal: int
    by: str = ""

    @property
    def text(self) -> str:
        """In words, for the end."""
        return f"the job was asked to end by {self.by or name_signal(self.signal)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(WorkerEvent):
    """The worker found input that must not start (UserError); the job ends with `text` and
    `exit_code`."""

    text: str
    exit_code: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent(Event):
    """Some rank has been silent for longer than it may; `evidence` is of all ranks that live. Comes
    again and again while it is so."""

    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected(Event):
    """The answer to `Inspect`. `evidence`: of all ranks that live, as it is now. `stacks`: where
    they stand, a line for each different stack; `file` has them whole."""

    evidence: tuple[Evidence, ...]
    stacks: tuple[str, ...] = ()
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time has passed; deadlines are looked at."""
