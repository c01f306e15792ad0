"""The messages between the coordinator and the agents of nodes, as msgspec structs.

Two directions: coordinator to agent (`ToNode`) and agent to coordinator (`FromNode`). What goes to
or comes from a worker is carried in `Tell` and `Said` as it is; the worker's identity stands beside
it, since many share the connection. An agent says `Register` first, is answered by `Welcome` or
`Refuse`, and takes part in the job once it has said `Joined`. When the connection has ended it says
`Register` again, with a report of its part so far: `Welcome` then says that this holds on, and
`Displaced` that the job has gone on without. Times in what an agent forwards are on the
coordinator's monotonic clock: the agent translates (agent/clocks.py)."""

from __future__ import annotations

import msgspec

from everstep.core.hang import Evidence
from everstep.types import Cause, HeldCopy, Stamp
from everstep.wire.bulk import Offer
from everstep.wire.messages import (
    ChaosSpec,
    FromWorker,
    Keepsake,
    Message,
    ScriptSpec,
    ToWorker,
    WorkerSpec,
)


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What must be the same on every node of a job. `hash_seed`: PYTHONHASHSEED of all workers.
    `runner`, `preload`: what zygotes run and import, as `agent.zygote.ZygotePlan` has them.
    `recovery_bytes_per_s`: of the setting recovery_bandwidth, None for no limit. `preflight_s`: of
    preflight_timeout_s, 0 where there is none. `cuts_networks`: there is a fault on purpose of kind
    `net`, which each node must be able to meet. The others are the settings of these names."""

    run_id: str
    script: ScriptSpec
    hash_seed: str
    watch: bool
    stopped_timeout_s: float
    hang_timeout_s: float
    first_step_timeout_s: float
    section_timeout_s: float
    runner: str
    preload: tuple[str, ...]
    nproc_per_node: int = 1
    recovery_bytes_per_s: float | None = None
    transfer_timeout_s: float = 600.0
    transfer_stall_s: float = 15.0
    preflight_s: float = 0.0
    cuts_networks: bool = False


class Listens(msgspec.Struct, frozen=True, kw_only=True):
    """How others can try whether they reach a node. `door`: its bulk plane and what to show there.
    `network`: the same for all who share a loopback device. `any_port`: where it listens at a port
    that the system has chosen, as communicators do. `any_ports`: the first and last that the system
    chooses from."""

    door: Offer
    network: str
    any_port: int
    any_ports: tuple[int, int]


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """A listener that can't be reached. `chosen`: its port was chosen by the system. `own`: who
    tries lacks something for it, so that this says nothing of the other."""

    node: int
    host: str
    port: int
    chosen: bool
    why: str
    own: bool = False


# ---------------------------------------------------------------- coordinator -> agent


class Welcome(Message):
    """The node has its number. `clock_s`: the coordinator's monotonic clock when it wrote this,
    `boot_id` of its host: on one host there is one clock. `term`: which of the job's coordinators
    it is, one after the other. `adopted`: what the node reported holds on, with its old number;
    else it reported nothing."""

    node: int
    term: int
    adopted: bool
    settings: NodeSettings
    clock_s: float
    boot_id: str


class Displaced(Message):
    """The job has gone on without what the node reported, since `why`: it ends its workers, and
    registers anew, with nothing. `term`: as in Welcome."""

    why: str
    term: int = 0


class Refuse(Message):
    """The node can not take part; `text` says why and what to do. `term`: as in Welcome."""

    text: str
    term: int = 0


class Launch(Message):
    """Fork a worker after `delay_s`. The paths in `spec` are the agent's to choose. `kept`: what
    the coordinator keeps of its rank beside what the spec tells: who said it, and what."""

    spec: WorkerSpec
    environment: dict[str, str]
    delay_s: float
    kept: tuple[tuple[int, Keepsake], ...] = ()


class Kill(Message):
    """SIGKILL a worker's whole session."""

    rank: int
    incarnation: int
    why: str


class Tell(Message):
    """A message for workers; `to`: rank and incarnation of each."""

    to: tuple[tuple[int, int], ...]
    message: ToWorker


class Look(Message):
    """Say what your workers show: `Looked`."""


class Inspect(Message):
    """Have your workers show their stacks: `Shown`, within a second or two."""


class Probe(Message):
    """Try within `within_s` whether these nodes can be reached, and say so: `Probed`. `turn`: 0 for
    the preflight."""

    targets: dict[int, Listens]
    within_s: float
    turn: int = 0


class Written(Message):
    """All ranks' commits up to `step` are written down: they need not be told again."""

    step: int


class Peers(Message):
    """To a node that holds a slot, before anything else of a generation: where the other nodes
    listen for their peers, and which of them is this node's guardian, who keeps what belongs to its
    ranks alone beside it. `guardian`: -1 where there is no other node."""

    addresses: dict[int, tuple[str, int]]
    guardian: int


class Reclaim(Message):
    """Tell what you keep of `ranks`, whose node is gone: `Reclaimed`."""

    turn: int
    ranks: tuple[int, ...]


class Finish(Message):
    """The job is over: end all workers, say `Gone`, and leave with `exit_code`. `terminate`: by
    SIGTERM first. `wait_s`: how long they may take to end by themselves. A second one, with 0,
    makes haste."""

    terminate: bool
    wait_s: float
    exit_code: int


class Cut(Message):
    """Have this fault on purpose happen to your node: of kind `node`, `agent` or `net`."""

    fault: ChaosSpec


class Keepers(Message):
    """Which node keeps the copies of which rank, beside the rank's own, in `generation`. Copies of
    other ranks stay where they are made. All other words about copies are of a generation, too, and
    mean nothing in the next. `steps`: copies of other steps are of no use any more."""

    generation: int
    keepers: dict[int, int]
    steps: tuple[int, ...]


class Take(Message):
    """Fetch a copy of `rank` at `step` that node `source` offers, and keep it. `incarnation`: of
    its writer. `keep`: the steps of which the rank's copies are still needed beside it."""

    rank: int
    incarnation: int
    generation: int
    step: int
    keep: tuple[int, ...]
    manifest: bytes
    offer: Offer
    source: int


class Secured(Message):
    """The keeper of your rank has the copy of `step`, or can't have it."""

    rank: int
    incarnation: int
    generation: int
    step: int


class Lend(Message):
    """Offer the copy of `rank` at `step` to node `to`."""

    rank: int
    incarnation: int
    generation: int
    step: int
    to: int


class Missing(Message):
    """Nobody has the copy that was sought."""

    rank: int
    generation: int
    step: int


class Drop(Message):
    """Others keep the copies of `rank`: those that are here are of no use any more."""

    rank: int
    generation: int


class Judged(Message):
    """Of the copies that you have found when you joined, the job has a use for those in `keep`.
    Unlike other words about copies it is of no generation."""

    keep: tuple[HeldCopy, ...]


CopyOrder = Keepers | Take | Secured | Lend | Missing | Drop | Judged

ToNode = (
    Welcome
    | Displaced
    | Refuse
    | Launch
    | Kill
    | Tell
    | Look
    | Inspect
    | Probe
    | Written
    | Peers
    | Reclaim
    | Finish
    | Cut
    | CopyOrder
)

# ---------------------------------------------------------------- agent -> coordinator


class Said(Message):
    """What a worker said."""

    rank: int
    incarnation: int
    message: FromWorker


class Died(Message):
    """A worker is gone, its session killed and reaped."""

    rank: int
    incarnation: int
    cause: Cause
    before_kill: bool


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """A living worker, to a coordinator that begins anew; core.events.MemberBack has the words."""

    rank: int
    incarnation: int
    generation: int
    joining: bool
    settled: bool
    stopped: bool
    step: int
    sections: int
    left_at: int | None
    finished: bool
    closed: bool
    bye: bool
    base: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows that has lost its coordinator. `term`: of that one. `node`: the number it
    had. `slot`: -1 without one. `peers`: the nodes of the newest `Peers` that it got. `members`:
    its living workers. `ended`: its dead ones, the newest of each rank. `copies`: those in its
    memory. `listens`: as it was when it joined. `run_id`: of the run in which all
    that was. `saved`: by tier, the newest checkpoint of which its ranks know. Times are on its own
    clock.

    The following comes before it, in parts that the coordinator puts together (`Keeps`,
    `Unwritten`): all of it could be too large for one message. `kept`: what it keeps of its own
    ranks and of those whose guardian it is, by rank, in the order in which it was said:
    (incarnation, message). `unwritten`: commits of which it doesn't know that they were written,
    with all that ranks said since that must be."""

    term: int
    node: int
    slot: int
    peers: tuple[int, ...]
    members: tuple[MemberReport, ...]
    ended: tuple[Died, ...]
    copies: tuple[HeldCopy, ...]
    listens: Listens | None = None
    run_id: str = ""
    saved: dict[str, int] = msgspec.field(default_factory=dict)
    kept: dict[int, tuple[tuple[int, Keepsake], ...]] = msgspec.field(default_factory=dict)
    unwritten: tuple[Said, ...] = ()


class Keeps(Message):
    """Before a `Register` with a report, or before `Reclaimed`: something that it keeps of `rank`;
    `incarnation` has said it."""

    rank: int
    incarnation: int
    message: Keepsake


class Unwritten(Message):
    """Before a `Register` with a report: some of what may not be written yet."""

    said: tuple[Said, ...]


class Register(Message):
    """A node offers itself. `host`: the machine's name. `address`: at which its workers listen.
    `peer_port`: at which its agent listens for its peers, 0 where it doesn't. `domain`: its failure
    domain, "" where that is only the host. `versions`: of everstep, torch and Python. `name`: of
    the agent; two that live may not share it. `pid`, `boot_id`: of its process, so that one that
    comes back is known. `clock_s`: its host's monotonic clock when it wrote this. `report`: of its
    part in the job so far; None where it has none."""

    name: str
    host: str
    address: str
    domain: str
    pid: int
    boot_id: str
    versions: dict[str, str]
    peer_port: int = 0
    clock_s: float = 0.0
    report: Report | None = None


class Joined(Message):
    """The node has imported what the script imports and is ready to fork. `script_digest`: of the
    script's text as it is here, "" for a module. `listens`: None where nobody can try. `found`: the
    copies that an agent of the same job has left in this host's memory; they are kept until
    `Judged` comes."""

    script_digest: str
    listens: Listens | None = None
    found: tuple[HeldCopy, ...] = ()


class Probed(Message):
    """The answer to `Probe` of this `turn`. `closed`: what could not be reached."""

    closed: tuple[Closed, ...]
    turn: int = 0


class Output(Message):
    """A line that a worker printed. `stream`: "stdout" or "stderr"."""

    rank: int
    incarnation: int
    stream: str
    line: str


class Silent(Message):
    """Some worker here has been silent for longer than it may; `evidence` is of all that live
    here."""

    evidence: tuple[Evidence, ...]


class Looked(Message):
    """The answer to `Look`."""

    evidence: tuple[Evidence, ...]


class Shown(Message):
    """The answer to `Inspect`. `answers`: rank to the stacks it showed, "" where none came in time;
    `unable`: rank to why it was not asked."""

    evidence: tuple[Evidence, ...] = ()
    answers: dict[int, str] = msgspec.field(default_factory=dict)
    unable: dict[int, str] = msgspec.field(default_factory=dict)


class Note(Message):
    """Something a person should know."""

    key: str
    text: str


class Reclaimed(Message):
    """The answer to `Reclaim` of this `turn`. `kept`: as Report has it; it comes before, as
    `Keeps`."""

    turn: int
    kept: dict[int, tuple[tuple[int, Keepsake], ...]] = msgspec.field(default_factory=dict)


class Offered(Message):
    """A copy is lent: node `to` is to `take` it."""

    to: int
    take: Take


class Took(Message):
    """A copy of `rank` at `step` is complete on this node. `incarnation`: of its writer. `stamp`:
    by which it is known again; its generation may be an older one than that of this message."""

    rank: int
    incarnation: int
    generation: int
    step: int
    stamp: Stamp | None = None


class Untaken(Message):
    """A copy that node `source` offered could not be fetched; `text` says why."""

    rank: int
    incarnation: int
    generation: int
    step: int
    source: int
    text: str


class Seek(Message):
    """A process of `rank` here needs the copy of `step`, which this node does not have. `spoiled`:
    the one that it had is not what was written, and is gone."""

    rank: int
    incarnation: int
    generation: int
    step: int
    spoiled: bool


class Lack(Message):
    """The copy that was to be lent to node `to` is not here."""

    rank: int
    incarnation: int
    generation: int
    step: int
    to: int


CopyNews = Offered | Took | Untaken | Seek | Lack


class Failed(Message):
    """The agent can not go on; `text` says why. `exit_code`: 2 where a person must change
    something."""

    text: str
    exit_code: int


class Leaving(Message):
    """The agent was asked to end by `signal`: from now on its node has no part in the job. Its
    workers get SIGTERM now, and SIGKILL after `grace_s`."""

    signal: int
    grace_s: float


class Gone(Message):
    """All workers have ended and nothing of them is left; the connection ends now."""


FromNode = (
    Keeps
    | Unwritten
    | Register
    | Joined
    | Probed
    | Said
    | Died
    | Output
    | Silent
    | Looked
    | Shown
    | Note
    | Reclaimed
    | CopyNews
    | Failed
    | Leaving
    | Gone
)
