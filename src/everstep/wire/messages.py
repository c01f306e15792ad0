"""The messages of the control channel, as msgspec structs (MessagePack, tagged, strict).

Three dialogues: agent and zygote (`ToZygote`, `FromZygote`), agent to worker (`ToWorker`), worker
to agent (`FromWorker`). A worker's identity (rank, incarnation) is not in its messages: the channel
it speaks on is its own, inherited at the fork, and the agent knows whose it is. Every message that
depends on the membership carries the generation. Times are seconds on the host's monotonic clock
(`time.monotonic()`, one clock for all processes of a host)."""

from __future__ import annotations

from typing import Literal

import msgspec

from everstep.types import Cause, Holding, RankPlan


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


# ---------------------------------------------------------------- agent <-> zygote


class ScriptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers run. `target`: a path of a script, or a module's name when `module`. `args`:
    its arguments."""

    target: str
    module: bool
    args: tuple[str, ...]


class ChaosSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One fault on purpose: in step `step` (1 is the first) of `rank`, at `at`, do `kind`. `index`
    names it in the job; `text` is the specification as the user wrote it, or could have written it;
    `code` is the exit code for kind `exit`, `factor` how many times as long the step takes for kind
    `slow`. `step` is 0 for the place `setup`, which comes before all steps. Kinds `node` and
    `agent` end the rank's node, or its agent: the rank stands still, and the coordinator does it.
    Kind `net` cuts the node's network, for `lasts_s` seconds, or for ever if that is 0, and kind
    `coordinator` ends that: the rank goes on."""

    index: int
    text: str
    kind: Literal[
        "kill",
        "term",
        "segv",
        "abort",
        "raise",
        "exit",
        "stop",
        "hang",
        "oom",
        "slow",
        "corrupt",
        "node",
        "agent",
        "net",
        "coordinator",
    ]
    rank: int
    step: int
    at: Literal[
        "setup",
        "forward",
        "backward",
        "fence",
        "optimizer",
        "commit",
        "between",
        "section",
        "recovery",
        "rebuild",
        "fetch",
        "serve",
    ]
    code: int = 0
    factor: float = 1.0
    lasts_s: float = 0.0


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a rank's tape: what a collective told it. `key`: which collective, as
    worker.tape makes it. `value`: its outputs (worker.codec). `source`: the rank in the group it
    came from, where only the collective knew. `refusal`: if not empty, the value could not be kept,
    and why a replacement can't do without."""

    key: str
    value: bytes = b""
    source: int = 0
    refusal: str = ""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker knows at its birth. `joiner`: its peers hold committed state. `rng_key`:
    the key of the rank's random streams, if an earlier incarnation has made one. `once`: recorded
    results of `run.once` on this rank. `progress_path`: the file in shared memory in which it shows
    where it stands. `record`: report a digest of what each step returned and consumed (for
    `everstep prove`). `stacks_path`: the file to which it writes its stacks when a signal asks for
    them; empty: it doesn't. `tape`: for a joiner, what its rank was told. `collective_timeout_s`,
    `build_timeout_s`: of the inner groups. `meet_timeout_s`: how long the ranks of a group may take
    to come to where the script makes it. `faults`: those still to fire on this rank. `device`: the
    setting. `host`: the address at which its communicators listen. `local_world_size`: ranks on its
    node. `own_series`: the setting."""

    run_id: str
    rank: int
    local_rank: int
    world_size: int
    incarnation: int
    generation: int
    joiner: bool
    script: ScriptSpec
    progress_path: str
    rng_key: bytes | None
    once: dict[str, bytes]
    faults: tuple[ChaosSpec, ...]
    record: bool
    collective_timeout_s: float
    build_timeout_s: float
    meet_timeout_s: float
    quiesce_timeout_s: float
    stacks_path: str = ""
    tape: tuple[Told, ...] = ()
    device: str = "cpu"
    host: str = "127.0.0.1"
    local_world_size: int = 1
    own_series: bool = False


class Load(Message):
    """First message to the zygote: import what the script imports (`with_imports`), then say
    `Ready`."""

    script: ScriptSpec
    with_imports: bool


class Fork(Message):
    """Fork a worker. Three descriptors come along: control channel, stdout, stderr."""

    spec: WorkerSpec
    environment: dict[str, str]


class Ready(Message):
    """The zygote has imported everything. `threads`: threads it has beside its main thread; if any,
    it will not fork. `failed`: module name to error, for imports that failed (the worker will meet
    the error itself). `torch`: the version found."""

    threads: tuple[str, ...]
    failed: dict[str, str]
    torch: str


class Forked(Message):
    """The worker's process id."""

    rank: int
    incarnation: int
    pid: int


class Exited(Message):
    """A child of the zygote has been reaped. `status` as from `os.waitpid`."""

    pid: int
    status: int


class ZygoteFailed(Message):
    """The zygote cannot serve: `text` says why (no torch, an unsupported one, ...)."""

    text: str


ToZygote = Load | Fork
FromZygote = Ready | Forked | Exited | ZygoteFailed

# ---------------------------------------------------------------- agent -> worker


class Stop(Message):
    """Abort all communicators of `generation` and older, run to the boundary, park."""

    generation: int


class Position(Message):
    """To a joiner: its peers hold `step` committed steps. `capsule` and `kept`: what the agent has
    of the step before, as in `Regroup`: the script runs from there to the call of `step`."""

    step: int
    capsule: bytes | None = None
    kept: dict[str, bytes] = {}


class Regroup(Message):
    """Build the communicators of `generation`, then follow `plan` to `sections` sections after
    `step`. `capsule`: for FETCH, the rank's own newest capsule up to `step`, if the agent has one.
    An older one than `step` is good for nothing but the fence that it names. `kept`: what the rank
    has kept of the sections after `step`, by their names. `groups`: the communicators that all
    their ranks hold; others are not built. `copies`: the steps of which all shards have copies."""

    generation: int
    step: int
    plan: RankPlan
    capsule: bytes | None
    groups: tuple[str, ...]
    sections: int = 0
    kept: dict[str, bytes] = {}
    copies: tuple[int, ...] = ()


class Addresses(Message):
    """All ranks' entries for the communicator `group` of `generation`: rank in the group to what it
    put."""

    generation: int
    group: str
    entries: dict[int, bytes]


class Go(Message):
    """`protect` may return. `copies`: some shard of the job has no natural replica, and its state
    is copied; `copy`: so is this rank's. `copy_every`: 0: in each step, which waits until its copy
    is where it belongs; else in every so many steps, which don't."""

    copies: bool = False
    copy: bool = False
    copy_every: int = 0


class Shelf(Message):
    """Where the copy may be written, or why not. `turn`: of the request that is answered."""

    turn: int
    path: str = ""
    refusal: str = ""


class Kept(Message):
    """The copy, or the capsule, is as safe as was asked for; or `refusal` says why it can't be
    kept. `turn`: of the request that is answered."""

    turn: int
    refusal: str = ""


class Safe(Message):
    """The copy of request `turn` is where the rank's copies are kept, or as near to it as can be:
    it need not be waited for any more."""

    turn: int


class Recalled(Message):
    """Where the rank's copy lies on this node, and its manifest; or why there is none. `turn`: of
    the request that is answered."""

    turn: int
    path: str = ""
    manifest: bytes = b""
    refusal: str = ""


class Closed(Message):
    """All ranks have left their loops."""


class Bye(Message):
    """The process may exit."""


ToWorker = (
    Stop | Position | Regroup | Addresses | Go | Shelf | Kept | Safe | Recalled | Closed | Bye
)

# ---------------------------------------------------------------- worker -> agent


class Hello(Message):
    """The process runs. `t`: when its first line ran."""

    pid: int
    t: float


class Protect(Message):
    """`protect` was called. `digests`: name to digest of tensors that must be equal on all replicas
    of `shard`; `manifest`: one digest over all names, shapes and dtypes. `rng_key`: the key of this
    rank's random streams."""

    shard: str
    manifest: str
    digests: dict[str, str]
    rng_key: bytes


class Capsule(Message):
    """What belongs to this rank alone after step `step`, should the step commit anywhere. Sent
    before this rank's last contribution to the step, so no peer can commit the step before the
    capsule is with the agent. `section`: it is of this section after the step, likewise; "" for
    the step itself. `turn`: if not 0, the rank makes no contribution before it is answered with
    `Kept`: its node may be lost as a whole. `since`: capsules of this step and later ones are still
    needed, however many these are; -1: only the newest few, as always."""

    step: int
    payload: bytes
    section: str = ""
    turn: int = 0
    since: int = -1


class Commit(Message):
    """Step `step` is committed here, or section number `sections` after it. `log`: scalars logged
    since the last commit, by the step they belong to. `record`: for `prove`."""

    generation: int
    step: int
    t: float
    log: dict[int, dict[str, float]]
    record: bytes | None
    sections: int = 0


class Loaded(Message):
    """Before its first step the rank has taken its part of the checkpoint of `step`; 0: there is
    none. `ok` False: there are some, and none can be had. `text`: what was refused, and why.
    `newest`: the newest step that any tier says it has. `tier`: that which gave the most; `parts`:
    (part's rank, tier, where, bytes) of all that was read, in `seconds`."""

    generation: int
    step: int
    ok: bool = True
    text: str = ""
    newest: int = 0
    tier: Literal["memory", "durable"] = "durable"
    parts: tuple[tuple[int, str, str, int], ...] = ()
    seconds: float = 0.0


class Saved(Message):
    """The checkpoint of `step` exists in `tier`."""

    step: int
    tier: Literal["memory", "durable"]


class Fault(Message):
    """An attempt at `step` failed in `generation` and the process lives."""

    generation: int
    step: int
    cause: Cause


class Wait(Message):
    """A joiner has set up and asks for its peers' position."""


class Park(Message):
    """Standing still after `Stop(generation)`. `rehearsed_passes`: for a joiner, how many
    rehearsals it took. `groups`: the communicators that the script holds here, as (name, how many
    ranks it has)."""

    generation: int
    holding: Holding
    rehearsed_passes: int = 0
    groups: tuple[tuple[str, int], ...] = ()


class Address(Message):
    """This rank's entry for the communicator `group` of `generation`; all entries come back as
    `Addresses` when `size` ranks have put theirs."""

    generation: int
    group: str
    rank: int
    size: int
    payload: bytes


class Built(Message):
    """All communicators of `generation` are up."""

    generation: int


class Receipt(Message):
    """The rank's part of the plan is done, at `t`. `ok` False: `text` says what does not match.
    `nbytes`: bytes fetched; `sources`: from whom; `digest`: of the whole state held now (empty
    where nothing was fetched or served). `held`: where the sources do not agree, what each says
    that it holds."""

    generation: int
    ok: bool
    t: float
    text: str = ""
    nbytes: int = 0
    sources: tuple[int, ...] = ()
    digest: str = ""
    held: dict[int, str] = {}


class Shelve(Message):
    """The rank is about to copy its state of `step`: `nbytes` of shared memory are wanted. `keep`:
    the steps of which its copies are still needed. `turn`: rises with each request, so that the
    answer to one that was stopped is not taken for another's."""

    turn: int
    step: int
    nbytes: int
    keep: tuple[int, ...]


class Shelved(Message):
    """The copy of `step` is written. `manifest`: as snapshot.py has it. `wait`: `Kept` is to come
    when the rank's keeper has it as well; else as soon as it is complete here, and `Safe` when the
    keeper has it. `turn`: see `Shelve`."""

    turn: int
    step: int
    manifest: bytes
    wait: bool


class Recall(Message):
    """The rank takes its state from its copy of `step`. `spoiled`: the one that it was shown before
    is not what was written. `turn`: see `Shelve`."""

    turn: int
    step: int
    spoiled: bool = False


class Close(Message):
    """The loop has ended after `step` committed steps; waiting for all others. `log`: as in
    `Commit`."""

    generation: int
    step: int
    log: dict[int, dict[str, float]] = {}


class Finish(Message):
    """The script has ended with code 0. `digests`: for `prove`, name to digest of the final
    state."""

    digests: dict[str, str]


class Fired(Message):
    """A fault on purpose fires now. Sent before it does; the agent remembers it for the whole
    job."""

    index: int
    t: float


class Once(Message):
    """`run.once` ran `key` on this rank; `value` is its result (MessagePack)."""

    key: str
    value: bytes


class Tape(Message):
    """New on this rank's tape, for its next incarnations. An item of a known key replaces it."""

    items: tuple[Told, ...]


class Refuse(Message):
    """Input that must not start was found; the job must end and show `text`."""

    text: str
    exit_code: int = 2


class Note(Message):
    """Something a person should know; goes to the journal and, once per `key`, to the terminal."""

    key: str
    text: str


class Raised(Message):
    """Last word before a process that raised exits: the traceback, so that the first cause can be
    shown."""

    cause: Cause


FromWorker = (
    Hello
    | Protect
    | Capsule
    | Commit
    | Loaded
    | Saved
    | Fault
    | Wait
    | Park
    | Address
    | Built
    | Receipt
    | Shelve
    | Shelved
    | Recall
    | Close
    | Finish
    | Fired
    | Once
    | Tape
    | Refuse
    | Note
    | Raised
)

Keepsake = Protect | Once | Tape | Capsule
"""What is kept of what a worker says, for the next process of its rank."""
