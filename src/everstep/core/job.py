"""The state of one job, as the coordinator knows it, and the moves that change it as a whole.

Theory of operation. A job goes through the phases

  NEW -> GATHERING -> SETTING_UP -> RUNNING -> STOPPING -> REGROUPING -> RUNNING ... -> ENDED

GATHERING lasts until enough nodes have joined; a job of one node, which is there from the start,
leaves it out. A coordinator that takes over a job that runs begins with RECONVENING instead, and
goes on where the job is found (`core.resume`). A failure before any commit leads back to
SETTING_UP: all workers are killed and start again. A later one leads to STOPPING: the survivors are
told to park, and the dead are replaced by joiners. When every rank has a parked process the planner
decides, and REGROUPING carries the plan out in a new generation. A failure in STOPPING keeps the
generation; one in REGROUPING stops the new one.

The moves here are those that a failure forces: stop, start again, doom a worker, end. What an event
says is judged in `core.coordinator`, and what has become possible is done in `core.settle`.

What it doesn't know: clocks, sockets and processes (the shell's), and what is done about a node
that is lost (`core.handover`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from everstep.core import actions as do
from everstep.core import events as ev
from everstep.core.commits import Commits
from everstep.core.copies import CopyTable, need_copies
from everstep.core.ladder import Backoff, Budget, Incident, Policy, Repeats, is_echo
from everstep.core.membership import Member, Membership, Status
from everstep.core.nodes import Layout, Nodes
from everstep.core.outbox import Outbox
from everstep.core.placement import Placement, Site, place, replace
from everstep.core.reach import Reach
from everstep.core.reclaim import Reclaims
from everstep.core.rejoined import Rejoined
from everstep.core.words import name_ranks, verb
from everstep.types import Cause, CauseKind, HeldCopy, Holding, Plan, Position, StateFrom

_COPIES_DIFFER = (
    "the copies differ: those ranks are no replicas of each other, or a copy is corrupt. Look for "
    "updates that depend on the rank (another seed, another batch without an all-reduce, buffers "
    "changed by hand); if there are none, have this host's memory tested"
)

_NO_COPY = (
    "there is no copy in memory that could be taken. If it is said to be corrupt, have this host's "
    "memory tested"
)
COPY = "copy"
"""The signature of a receipt that failed since a copy in memory could not be taken."""


class Phase(enum.StrEnum):
    """What the job as a whole is doing."""

    NEW = "new"
    GATHERING = "gathering"
    RECONVENING = "reconvening"
    SETTING_UP = "setting up"
    RUNNING = "running"
    STOPPING = "stopping"
    REGROUPING = "regrouping"
    ENDED = "ended"


class Job:
    """What is known of one job of `world_size` ranks. `layout`: how they lie on nodes, which are
    still to join; None: on one node, number 0, which is there. Pure state; not thread-safe."""

    def __init__(self, world_size: int, policy: Policy, layout: Layout | None = None) -> None:
        if layout is not None and layout.world_size != world_size:
            raise ValueError(f"{layout} has {layout.world_size} ranks, not {world_size}")
        self.policy = policy
        self.gathers = layout is not None
        self.world_size = world_size
        self.membership = Membership(world_size)
        self.nodes = Nodes(layout or Layout(nproc_per_node=world_size, nnodes=1), policy)
        self.rejoined: Rejoined | None = None  # who has come back, in RECONVENING
        # In which world the survivors were when this coordinator took over: until they are in one
        # of its own, what they did there counts.
        self.found_in: int | None = None
        self.reclaims = Reclaims()  # what is to be had of ranks whose node is lost
        self.reach = Reach()  # whether the nodes reach each other, where that is in doubt
        self.node_deadline_s: float | None = None  # by when a node must come for an empty slot
        self.budget = Budget(policy)
        self.repeats = Repeats()
        self.backoff = Backoff(policy)
        self.inspect_again_s = 0.0  # not before then: one is under way, or has just found nobody
        self.spared: set[str] = set()  # hangs whose culprits hold the only copy; each is said once
        self.out = Outbox()
        self.now_s = 0.0
        self.phase = Phase.NEW
        self.deadline_s: float | None = None  # of the phase; members have their own
        self.incident: Incident | None = None
        self.commits = Commits(world_size)
        self.copies = CopyTable()
        self.found: dict[int, tuple[HeldCopy, ...]] = {}  # copies by who found them, to be judged
        self.copy_deadline_s: float | None = None  # by when a node must come back with a copy
        self.placement: Placement | None = None  # of copies, on several nodes
        self.recorded = 0  # the newest step in the journal
        self.ever = 0  # the newest that was ever there
        self.base = 0  # the step at which all began: of the checkpoint that they took
        self.begun = False  # it is known at which checkpoint
        self.must_begin = False  # they have to take one: there were steps before
        self.keeps = False  # the script keeps checkpoints
        self.saved: dict[StateFrom, int] = {}  # by tier, the newest checkpoint that is known
        self.protected: dict[int, ev.Protected] = {}  # what each rank said in the job's set-up
        self.first_of: dict[str, ev.Protected] = {}  # of those, the first of each shard
        self.resumed_at: Position = (0, 0)  # where the ranks stood after the last recovery
        # Where the ranks will go on: decided when all survivors stand still, and again whenever
        # what it was decided from (`chosen_from`) has changed. The step is told to joiners.
        self.chosen: Position | None = None
        self.chosen_from: tuple[int, int, Position] | None = None
        self.told_step: int | None = None
        self.closed = False
        self.stop_seen = False  # "stopped" is in the journal for this stop
        self.plan: Plan | None = None  # of this generation, until all have followed it
        self.regrouped: set[int] = set()
        self.regroup_seen = False  # "regrouped" is in the journal for this generation
        self.answered: set[int] = set()  # ranks whose receipt of this generation has come
        self.restored: dict[int, int] = {}  # rank to bytes fetched
        if layout is None and (alone := self.nodes.join(0, "", "")) is not None:
            self.nodes.give(0, alone)

    @property
    def generation(self) -> int:
        """The number of the current world."""
        return self.membership.generation

    def step_of(self, member: Member) -> int:
        """The step that is under way where `member` stands; a joiner stands where its predecessor
        did."""
        return self.commits[member.rank] + 1

    @property
    def shards(self) -> dict[int, str]:
        """By rank, the key of its part of the state."""
        return {rank: said.shard for rank, said in self.protected.items()}

    def copied(self) -> frozenset[int]:
        """The ranks whose state is copied. O(ranks)."""
        if not self.policy.copies:
            return frozenset()
        layout = self.nodes.layout
        place_of = layout.slot_of if layout.nnodes > 1 else lambda rank: rank
        needed = need_copies(self.shards, place_of)
        return frozenset(self.shards) if needed and self.policy.copy_every else needed

    def go(self, to: tuple[tuple[int, int], ...]) -> do.SendGo:
        """`protect` may return for those listed. O(ranks)."""
        return do.SendGo(to=to, copied=self.copied(), copy_every=self.policy.copy_every)

    def settle_copies(self) -> None:
        """Forget the copies that agents have given up, and have those given up that lie where
        nobody needs them any more."""
        for rank, node in self.copies.settle(self.commits.newest[0]):
            self.out.put(do.DropCopies(generation=self.generation, rank=rank, node=node))

    def assign_peers(self) -> None:
        """Say which node keeps what for which other, now that every slot is held: what belongs to
        its ranks alone, and copies of their state. O(ranks), where there are copies."""
        copied, layout = self.copied(), self.nodes.layout
        keepers = {}
        if self.gathers:
            keeper = self._neighbours(warn=bool(copied))
            if layout.nnodes > 1:
                keepers = {rank: keeper[layout.slot_of(rank)] for rank in sorted(copied)}
        if not copied:
            return
        nodes = {rank: self.nodes.holder(rank) for rank in copied}
        homes = {rank: node.number for rank, node in nodes.items() if node is not None}
        self.copies.assign(copied, keepers, homes)
        self.out.put(
            do.SendKeepers(generation=self.generation, keepers=keepers, steps=self.copies.needed)
        )

    def _neighbours(self, *, warn: bool) -> dict[int, int]:
        """By slot, the node that keeps what must not be lost with it; nodes are told. `warn`: where
        two of one failure domain keep the same, a person is."""
        layout = self.nodes.layout
        sites = [site for slot in range(layout.nnodes) if (site := self._site(slot)) is not None]
        placement = place(sites) if self.placement is None else replace(self.placement, sites)
        if warn and placement.reason and placement != self.placement:
            self.out.record("note", key="placement", text=placement.reason, rank=None)
        self.placement = placement
        at = {site.slot: site.node for site in sites}
        keeper = {slot: at[other] for slot, other in placement.neighbours().items()}
        beside = dict.fromkeys(self.copies.holders)  # a spare may have found what it must lend
        guardians = beside | {at[slot]: keeper.get(slot) for slot in at}
        self.out.put(do.SendPeers(guardians=guardians))
        return keeper

    def _site(self, slot: int) -> Site | None:
        node = self.nodes.holder(self.nodes.layout.ranks_of(slot)[0])
        if node is None:
            return None
        return Site(slot=slot, node=node.number, host=node.host, domain=node.domain)

    def write_steps(self) -> None:
        """Write down the steps that every rank has committed, and that are not written yet."""
        done, _ = self.commits.least
        self.recorded = min(self.recorded, done)
        while self.recorded < done:
            self.recorded += 1
            self.out.record("step", step=self.recorded, generation=self.generation)
        self.ever = max(self.ever, self.recorded)

    def nothing(self, rank: int) -> Holding:
        """The holding of a rank whose process has no state."""
        return Holding(committed=0, torn=True, shard=self.protected[rank].shard)

    # ------------------------------------------------------------------ what a failure forces

    def fail(self, member: Member, step: int, cause: Cause, others: Sequence[int] = ()) -> None:
        """Take a cause that counts: remember it, stop or start again what runs, and end the job
        when it is one too many. `step`: the step that was under way where `member` stood. `others`:
        ranks that failed with it, by the same cause."""
        rank = member.rank
        if self.repeated(rank, step, cause):
            return
        if not is_echo(cause):
            self.reach.explained()
        opened_in = self.generation if self.incident is None else None
        if self.incident is None:
            number = self.budget.opened()
            self.incident = Incident(number=number, rank=rank, step=step, cause=cause)
        if self.incident.blame(rank, step, cause) or opened_in is not None:
            self.budget.caused(cause, self.now_s)
        self.incident.failed |= dict.fromkeys(others, cause)
        self.out.failed(self.incident, member, step, cause, opened_in)
        if self.phase is Phase.STOPPING:
            if member.joining:
                self.budget.joiner_lost(rank)
        else:
            failed = name_ranks([rank, *others])
            since = f" after step {self.base}" if self.base else ""
            self.stop_all(f"{failed} failed before any step was committed{since}")
        if cause.fault is not None:
            self.budget.on_purpose()
        elif not is_echo(cause) and cause.kind is not CauseKind.NODE:
            self.backoff.failed(rank, self.now_s)
        spent = self.budget.exceeded()
        if spent is not None:
            self.end_incident(spent)

    def explain(self, member: Member, step: int, cause: Cause) -> None:
        """Take the cause behind an echo: the open incident has already stopped or started again all
        that runs, and `member` with it, so nothing is to be done but to show it."""
        assert self.incident is not None
        if self.repeated(member.rank, step, cause):
            return
        if not is_echo(cause):
            self.reach.explained()
        if self.incident.blame(member.rank, step, cause):
            self.budget.caused(cause, self.now_s)
        self.out.failed(self.incident, member, step, cause, None)
        if cause.fault is not None:
            self.budget.on_purpose()

    def repeated(self, rank: int, step: int, cause: Cause) -> bool:
        """Remember a cause; when it is one that no recovery helps against, end the job."""
        if not self.repeats.again(rank, step, cause):
            return False
        if cause.kind is CauseKind.RECEIPT:
            why = _NO_COPY if cause.signature == COPY else _COPIES_DIFFER
            text = f"{cause.text}. It is the second time at this step, so {why}"
        else:
            text = f"rank {rank} failed in step {step} with the same error twice: {cause.text}"
        self.end(cause.job_exit_code(), text, cause, rank)
        return True

    def stop_all(self, reason: str) -> None:
        """A failed attempt: stop what runs, or, while nothing is committed, start it again for
        `reason`."""
        self.budget.stopped()
        if self.commits.newest[0] <= self.base:
            self.start_again(reason)
        else:
            self.stop()

    def start_again(self, reason: str) -> None:
        """Nothing is committed, or only what a checkpoint has: kill all that live. `settle` spawns
        each rank anew when its process has been reaped."""
        assert self.incident is not None
        if self.base and not self.incident.reloads:
            self.incident.reload(*newest(self.saved or {StateFrom.DURABLE: self.base}))
        self.membership.advance()
        self.phase, self.closed, self.stop_seen = Phase.SETTING_UP, False, False
        self.deadline_s = self.now_s + self.policy.setup_timeout_s
        self.commits, self.resumed_at = Commits(self.world_size), (0, 0)
        self.recorded = self.base = 0
        self.begun, self.must_begin = False, self.ever > 0
        self.copies, self.copy_deadline_s = CopyTable(), None
        self.reclaims.clear()
        self.reach.clear()
        self.protected, self.first_of = {}, {}
        self.plan = None
        everybody = verb(range(self.world_size), "starts", "start")
        where = "a checkpoint" if self.incident.reloads else "the script"
        self.incident.start_again(f"{reason}; {everybody} again from {where}")
        for member in self.membership.members():
            if not member.doomed:
                self.doom(member, f"{reason}; all ranks start again")

    def stop(self) -> None:
        """Tell the world of this generation to park."""
        self.phase, self.deadline_s = Phase.STOPPING, None
        self.stop_seen = False
        members = self.membership.survivors()
        deadline_s = self.now_s + self.policy.park_timeout_s
        for member in members:
            self.membership.move(member, Status.STOPPING, deadline_s=deadline_s)
        if members:
            to = tuple(member.identity for member in members)
            self.out.put(do.SendStop(generation=self.generation, to=to))

    def doom(self, member: Member, why: str, cause: Cause | None = None) -> None:
        """Kill a worker. `cause`: what its death will stand for; None when it is no news."""
        deadline_s = self.now_s + self.policy.reap_timeout_s
        self.membership.move(member, Status.DOOMED, deadline_s=deadline_s)
        member.doom = cause
        self.out.put(do.Kill(rank=member.rank, incarnation=member.incarnation, why=why))

    # ------------------------------------------------------------------ the end

    def close_incident(self) -> None:
        """What failed has been made good."""
        assert self.incident is not None
        self.budget.progress()
        self.out.incident_closed(self.incident)
        self.incident = None

    def end_incident(
        self, text: str, exit_code: int | None = None, show: tuple[int, Cause] | None = None
    ) -> None:
        """End the job inside an incident: its first cause is shown, `text` says what it led to.
        `exit_code`: None for the cause's own. `show`: the rank and cause to show instead."""
        assert self.incident is not None
        rank, cause = show or (self.incident.rank, self.incident.cause)
        step = self.commits[rank] + 1 if show else self.incident.step
        first = f"First cause, rank {rank} in step {step}: {cause.text}"
        code = cause.job_exit_code() if exit_code is None else exit_code
        self.end(code, f"{text.rstrip('.')}. {first}", cause, rank)

    def end(
        self, exit_code: int, text: str, cause: Cause | None = None, rank: int | None = None
    ) -> None:
        """End the job. Does nothing when it has ended."""
        if self.phase is not Phase.ENDED:
            self.out.end(exit_code, text, cause, rank)
            self.phase = Phase.ENDED

    # ------------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Assert what must hold between any two events. For tests and simulation: O(ranks)."""
        self.membership.validate()
        self.commits.validate()
        self.nodes.validate()
        members, phase = list(self.membership.members()), self.phase
        if phase in (Phase.NEW, Phase.ENDED):
            return
        joining = phase in (Phase.GATHERING, Phase.RECONVENING)
        timed = joining or phase in (Phase.SETTING_UP, Phase.REGROUPING)
        unmanned = phase is Phase.SETTING_UP and self.nodes.any_empty
        assert (self.deadline_s is not None) == (timed and not unmanned), phase
        if joining:
            known = set() if self.rejoined is None else set(self.rejoined.members)
            assert known == {member.rank for member in members}, (known, members)
            return
        empty = [self.nodes.layout.ranks_of(slot) for slot in self.nodes.empty()]
        unheld = [rank for ranks in empty for rank in ranks]
        assert self.membership.vacant() == unheld, "a rank without a process, or without a node"
        assert not empty or not self.nodes.spares, "a slot is empty, and a spare is there"
        assert not empty or phase in (Phase.SETTING_UP, Phase.STOPPING), phase
        assert self.node_deadline_s is None or empty, "a node is awaited, and none is missing"
        assert self.copy_deadline_s is None or phase is Phase.STOPPING, phase
        assert self.recorded == self.commits.least[0], (self.recorded, self.commits.least)
        assert self.incident is not None or phase in (Phase.SETTING_UP, Phase.RUNNING), phase
        assert self.plan is not None or phase is not Phase.REGROUPING
        assert self.plan is None or phase in (Phase.REGROUPING, Phase.STOPPING), phase
        expected = {Phase.RUNNING: Status.RUNNING, Phase.REGROUPING: Status.REGROUPING}.get(phase)
        for member in members:
            assert not member.joining or member.doomed or phase is Phase.STOPPING, member
            assert expected is None or member.status is expected, (phase, member)
            still = member.holding is not None or member.status is Status.WAITING
            waits = member.doomed or (phase is Phase.STOPPING and not still)
            assert (member.deadline_s is not None) == waits, (phase, member)


def newest(saved: Mapping[StateFrom, int]) -> tuple[int, StateFrom]:
    """The newest of the checkpoints that are known, and the nearest tier that has it."""
    step = max(saved.values())
    return step, StateFrom.MEMORY if saved.get(StateFrom.MEMORY) == step else StateFrom.DURABLE
