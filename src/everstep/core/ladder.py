"""How much may fail before the job ends, which failure is the one to show, and which rung a
recovery stands on.

Theory of operation. Three budgets bound what is tried: incidents in the whole job; incidents of one
kind of cause within a window of time, where faults on purpose and mere echoes of a failure are left
out; and failed attempts in a row with no commit by all ranks in between. An attempt is a world that
was stopped, or one more replacement of the same rank that died before it joined; several ranks that
fail in one attempt count once, since a node that takes eight ranks with it is one failure. Beside
the budgets stands the repeat rule: the same error on the same rank at the same step twice will come
a third time, because nothing that a recovery changes is its cause. It is the user's error, and the
job ends with it. SIGKILL, SIGTERM and SIGSTOP come from outside and are no repeats; neither is a
fault that was injected on purpose. State that arrives at a rank twice and twice is not what its
sources hold is judged alike: a third transfer would bring the same.

A rank whose process has died of itself twice within a minute is not started again at once: its
back-off doubles with each further death, so that a place that is broken (a full disk, a port that
is taken) is given time, and does not spend the budgets in a second.

Where the budgets are lifted (`everstep prove`) there is no back-off; the repeat rule stays, and so
does one last bound on attempts that fail with no fault on purpose: what fails that often by itself
would fail for ever.

What it doesn't know: which nodes there are, and which of their hosts are set aside (`core.nodes`).
A node that is lost with all its ranks is one failed attempt like any other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from everstep.core.words import name_signal
from everstep.types import Cause, CauseKind, Decision, Plan, Position, Rung, StateFrom

_REPEATABLE = frozenset(
    {CauseKind.EXCEPTION, CauseKind.EXIT, CauseKind.EARLY_EXIT, CauseKind.RECEIPT}
)
_REPEATABLE_HANGS = frozenset({"absent", "mismatch", "deadlock"})
_REPEATABLE_SIGNALS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"})
_ECHOES = frozenset({CauseKind.PEER, CauseKind.TIMEOUT, CauseKind.COORDINATOR})
_BY_SCRIPT = frozenset({CauseKind.EXCEPTION, CauseKind.EXIT, CauseKind.EARLY_EXIT})
_HOPELESS = 20  # failed attempts in a row with no commit and no fault on purpose: never "bad luck"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The limits of one job."""

    max_incidents: int = 100
    """Incidents in the whole job (torchrun: max restarts). A hundred is days of bad luck, yet ends
    a restart storm."""

    max_failures_without_progress: int = 4
    """Failed attempts in a row with no step committed by all. Four rides out a double fault in a
    recovery."""

    max_per_cause: int = 20
    """Incidents of one kind of cause within `incident_window_s`. One every three minutes for an
    hour: the machine is broken, and will not mend itself."""

    incident_window_s: float = 3600.0
    """For how long an incident counts against `max_per_cause`, in seconds."""

    backoff_s: float = 0.5
    """How long the second start of a rank within `quick_failure_s` waits; doubled with each
    more."""

    max_backoff_s: float = 30.0
    """The longest such wait. All other ranks wait with it."""

    quick_failure_s: float = 60.0
    """A rank that has lived longer than this since its last failure is taken to be well, and starts
    at once. Some dozens of starts."""

    setup_timeout_s: float = 600.0
    """From spawn until every rank has called `protect`. Large models take minutes to build; nothing
    is at stake yet."""

    park_timeout_s: float = 300.0
    """From `Stop` until a survivor stands still. It bounds one step run to its boundary, or a save
    or compile in it."""

    join_timeout_s: float = 300.0
    """From a joiner's spawn until it is set up, and again from when it is told its peers' step
    until it has rehearsed. It bounds the script's set-up, done alone, and two steps."""

    regroup_timeout_s: float = 60.0
    """From `Regroup` until every rank holds the plan's step. Groups take milliseconds, a transfer a
    second a gigabyte."""

    reap_timeout_s: float = 30.0
    """From a kill until the death is seen. Only a process in an uninterruptible wait takes longer
    than a second."""

    join_nodes_timeout_s: float = 600.0
    """From the start until as many nodes have joined as the job needs. A scheduler that starts them
    one after another takes minutes; the cluster is idle meanwhile."""

    rejoin_timeout_s: float = 30.0
    """How long a coordinator that takes over a job waits for the nodes that held its slots, in
    seconds. An agent tries again several times a second; who is not there by then is lost, and the
    steps have gone on meanwhile if nothing else was wrong."""

    silence_timeout_s: float = 300.0
    """How long it waits for the first node, in seconds; `rejoin_timeout_s` counts from there. Where
    nobody comes there is nobody to go on with, and its own host may be the one that is cut off."""

    copies: bool = False
    """Whether ranks whose shard has no natural replica are copied in each step. Costs a copy of the
    shard in time and two in memory; without it, such a shard is lost with its rank."""

    copy_every: int = 0
    """0: a step waits until its copy is where it belongs. n: a copy is made every n steps, and is
    on its way while the next ones run; a node that is lost before it has come costs these steps.
    Then all ranks make copies, since all must be able to go back."""

    spare_wait_s: float = 300.0
    """How long the ranks stay parked until a node comes, where one was lost and no spare is there,
    or no other copy of its state, in seconds; 0: not at all. A machine that reboots is back in five
    minutes; all others wait."""

    max_node_failures: int = 3
    """Losses of nodes on one host within `incident_window_s` after which the host is set aside:
    another node is taken before one of its. Twice may be bad luck."""

    unlimited: bool = False
    """Lift both budgets (`everstep prove`, which injects its faults). The repeat rule stays, and 20
    failed attempts in a row with neither a commit nor a fault on purpose still end the job."""


@dataclass(slots=True, kw_only=True)
class Incident:
    """An open incident. `cause`: the one to show, of `rank`, where `step` was under way; a later
    one replaces it when the first was only an echo. `failed`: how each rank failed that did so
    since all ranks last stood at one step, by rank. `floor`: the step from which the ranks go on;
    the first commit above it ends the incident. `respawned`: a process was replaced in it.
    `replaced`: a node was lost in it, so that its ranks go to another. `takeovers`: by slot, who
    took it over, in words. `went_back`: all ranks went to copies of a step before the newest that
    was committed. `fetched`: a rank has taken state from a peer in it. `steps_lost`: steps that
    all ranks had committed and that are done again. `reloads`: all ranks begin at a checkpoint.
    `decision`: how they go on, in words."""

    number: int
    rank: int
    step: int
    cause: Cause
    floor: int = 0
    respawned: bool = False
    replaced: bool = False
    went_back: bool = False
    fetched: bool = False
    steps_lost: int = 0
    reloads: bool = False
    state_from: StateFrom = StateFrom.PROCESS
    decision: str = ""
    takeovers: dict[int, str] = field(default_factory=dict)
    failed: dict[int, Cause] = field(default_factory=dict)

    @property
    def rung(self) -> Rung:
        """Who runs afterwards."""
        if self.reloads:
            return Rung.MEMORY if self.state_from is StateFrom.MEMORY else Rung.DURABLE
        if self.went_back:
            return Rung.MEMORY
        if self.replaced:
            return Rung.REPLACE
        return Rung.RESPAWN if self.respawned else Rung.RETRY

    @property
    def reason(self) -> str:
        """Who took over, and how the ranks go on, in words."""
        return "; ".join([*self.takeovers.values(), self.decision])

    def blame(self, rank: int, step: int, cause: Cause) -> bool:
        """Take note of a cause, and of the step that was under way where `rank` stood: it is shown
        instead of the first if the first was only its echo. Returns whether it is."""
        self.failed[rank] = cause
        better = is_echo(self.cause) and not is_echo(cause)
        if better:
            self.rank, self.step, self.cause = rank, step, cause
        return better

    def follow(self, plan: Plan, newest: Position) -> None:
        """Take note of the plan by which the ranks go on; `newest`: what any had committed."""
        fetches = any(part.decision is Decision.FETCH for part in plan.ranks)
        self.floor, self.decision = plan.step, plan.reason
        self.failed.clear()
        if self.reloads:
            return
        if any(part.copy for part in plan.ranks):
            self.state_from = StateFrom.MEMORY
            self.went_back |= plan.position < newest
        else:
            self.state_from = StateFrom.PEER if fetches or self.fetched else StateFrom.PROCESS

    def start_again(self, reason: str) -> None:
        """Take note that all ranks start again: from the script, since nothing is committed, or
        from a checkpoint."""
        self.decision = reason
        self.failed.clear()
        self.respawned = True
        if not self.reloads:
            self.floor, self.state_from = 0, StateFrom.SCRIPT

    def reload(self, step: int, tier: StateFrom) -> None:
        """Take note that all ranks will begin at a checkpoint, most likely that of `step`."""
        self.reloads, self.floor, self.state_from = True, step, tier

    def reloaded(self, step: int, tier: StateFrom, refused: str) -> None:
        """Take note that they have begun at that of `step`, from `tier`. `refused`: what was not
        taken, and why."""
        self.steps_lost += self.floor - step
        self.reload(step, tier)
        where = "memory" if tier is StateFrom.MEMORY else "the durable tier"
        passed = f" (passed over: {refused})" if refused else ""
        self.decision += f"; they took the checkpoint of step {step} from {where}{passed}"


def is_echo(cause: Cause) -> bool:
    """A broken collective or a passed deadline is what others notice of a failure, seldom the
    failure itself. Nor is it that a coordinator was away when it was needed."""
    return cause.kind in _ECHOES


def is_of_script(cause: Cause) -> bool:
    """The script itself ended this rank's part: it raised, or it exited. Another replica would have
    run the same lines."""
    return cause.kind in _BY_SCRIPT and cause.fault is None


def is_repeatable(cause: Cause) -> bool:
    """An error that no recovery changes the cause of, so that the same one twice means it will come
    again."""
    if cause.fault is not None:
        return False
    if cause.kind is CauseKind.HANG:
        return cause.signature in _REPEATABLE_HANGS
    if cause.kind is CauseKind.SIGNAL:
        return cause.signal is not None and name_signal(cause.signal) in _REPEATABLE_SIGNALS
    return cause.kind in _REPEATABLE


@dataclass(slots=True)
class Repeats:
    """Remembers every error of the script, by rank and step. Bounded by the number of failures in a
    job."""

    _seen: set[tuple[int, int, CauseKind, str]] = field(default_factory=set)

    def again(self, rank: int, step: int, cause: Cause) -> bool:
        """Remember `cause` on `rank` in `step`; True when the same one was there before."""
        if not is_repeatable(cause):
            return False
        key = (rank, step, cause.kind, _signature(cause))
        seen = key in self._seen
        self._seen.add(key)
        return seen


def _signature(cause: Cause) -> str:
    """What makes two causes of one kind the same error."""
    if cause.kind is CauseKind.SIGNAL:
        return str(cause.signal)
    if cause.kind is CauseKind.RECEIPT:
        return cause.signature  # not its text, which has digests that need not come out alike
    return cause.signature or (f"exit code {cause.exit_code}" if cause.exit_code else cause.text)


@dataclass(slots=True)
class _Attempts:
    """Failed attempts since `clear`."""

    stops: int = 0
    lost_joiners: dict[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many: ranks that fail together count once."""
        return self.stops + max(self.lost_joiners.values(), default=0)

    def joiner_lost(self, rank: int) -> None:
        self.lost_joiners[rank] = self.lost_joiners.get(rank, 0) + 1

    def clear(self) -> None:
        self.stops = 0
        self.lost_joiners.clear()


@dataclass(slots=True)
class Budget:
    """Counts what has failed against a policy."""

    policy: Policy
    incidents: int = 0
    _caused_s: dict[CauseKind, deque[float]] = field(default_factory=dict)
    _flooded: CauseKind | None = None
    _failed: _Attempts = field(default_factory=_Attempts)  # since the last commit by all ranks
    _unforced: _Attempts = field(default_factory=_Attempts)  # and since the last fault on purpose

    @property
    def failures_without_progress(self) -> int:
        """Failed attempts since the last commit by all ranks."""
        return self._failed.count

    def opened(self) -> int:
        """Count an incident and return its number; 1 is the first."""
        self.incidents += 1
        return self.incidents

    def caused(self, cause: Cause, now_s: float) -> None:
        """Count the cause of an incident, once it is known what it was."""
        if cause.fault is not None or is_echo(cause):
            return
        times = self._caused_s.setdefault(cause.kind, deque())
        times.append(now_s)
        while times[0] <= now_s - self.policy.incident_window_s:
            times.popleft()
        self._flooded = cause.kind if len(times) > self.policy.max_per_cause else None

    def stopped(self) -> None:
        """Count a world that had to be stopped or started again."""
        self._failed.stops += 1
        self._unforced.stops += 1

    def joiner_lost(self, rank: int) -> None:
        """Count a replacement of `rank` that died before it joined."""
        self._failed.joiner_lost(rank)
        self._unforced.joiner_lost(rank)

    def on_purpose(self) -> None:
        """What has just been counted, or is still to show its cause, was a fault on purpose. Each
        fires once, so this can't go on for ever."""
        self._unforced.clear()

    def progress(self) -> None:
        """All ranks have committed a step."""
        self._failed.clear()
        self._unforced.clear()

    def exceeded(self) -> str | None:
        """Which budget is spent, in words; None while all hold."""
        if self.policy.unlimited:
            return self._hopeless()
        if self.incidents > self.policy.max_incidents:
            return (
                f"the job has had {self.incidents} incidents, and "
                f"{self.policy.max_incidents} are allowed (--max-restarts)"
            )
        if self._flooded is not None:
            return (
                f"more than {self.policy.max_per_cause} incidents of the kind "
                f"{self._flooded.value} within {self.policy.incident_window_s:g} s "
                "(max_per_cause, incident_window_s)"
            )
        if self.failures_without_progress > self.policy.max_failures_without_progress:
            return (
                f"{self.failures_without_progress} attempts in a row failed with no step committed "
                f"by all ranks, and {self.policy.max_failures_without_progress} are allowed"
            )
        return None

    def _hopeless(self) -> str | None:
        if self._unforced.count < _HOPELESS:
            return None
        return (
            f"{self._unforced.count} attempts in a row failed with no step committed by all ranks "
            "and no fault on purpose among them; it will not pass by itself"
        )


@dataclass(slots=True)
class Backoff:
    """How long the next process of a rank waits before it starts, by how its predecessors died."""

    policy: Policy
    _failed: dict[int, tuple[int, float]] = field(default_factory=dict)  # rank: how often, when

    def failed(self, rank: int, now_s: float) -> None:
        """A process of `rank` has died, and not of a fault on purpose."""
        times, last_s = self._failed.get(rank, (0, now_s))
        quick = now_s - last_s <= self.policy.quick_failure_s
        self._failed[rank] = (times + 1 if quick else 1, now_s)

    def delay_s(self, rank: int, now_s: float) -> float:
        """Seconds that the next process of `rank` waits: 0, then `backoff_s`, doubled each time, up
        to `max_backoff_s`."""
        times, last_s = self._failed.get(rank, (0, now_s))
        if self.policy.unlimited or times < 2 or now_s - last_s > self.policy.quick_failure_s:
            return 0.0
        doublings = min(times - 2, 30)  # beyond which any float is above the bound
        return min(self.policy.max_backoff_s, self.policy.backoff_s * 2.0**doublings)
