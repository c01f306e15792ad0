"""Who holds which slot of the job, who is spare, who is lost: the one table of nodes.

Theory of operation. A node is one agent with its workers; it gets a number when it registers, which
is never used again, so that an agent that comes back is another node and what is said of the old
one finds nobody. A *slot* is a node's place in the job: slot s holds the ranks s*nproc_per_node to
(s+1)*nproc_per_node-1. A slot is held by at most one node; a node that holds none is a spare.

The slot of a lost node is taken by a spare: best by one whose failure domain holds no replica of
the state that the slot's ranks hold, so that the next failure of a domain can't take both; else by
any. A *host* whose nodes were lost too often of late (a machine that reboots, a card that falls off
its bus) is set aside: a node on it is taken only when there is no other.

What it doesn't know: ranks' processes (`core.membership`), which state they hold, and how a loss is
noticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from everstep.core.ladder import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the ranks of a job lie on nodes. `spares`: how many nodes were asked for beyond `nnodes`;
    the job does not wait for them.

    Raises ValueError for numbers that make no job."""

    nproc_per_node: int
    nnodes: int
    spares: int = 0

    def __post_init__(self) -> None:
        if self.nproc_per_node < 1 or self.nnodes < 1 or self.spares < 0:
            raise ValueError(f"a job needs nodes with ranks, not {self}")

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.nproc_per_node * self.nnodes

    def slot_of(self, rank: int) -> int:
        """The slot that holds `rank`."""
        return rank // self.nproc_per_node

    def ranks_of(self, slot: int) -> range:
        """The ranks of a slot."""
        return range(slot * self.nproc_per_node, (slot + 1) * self.nproc_per_node)


@dataclass(slots=True, kw_only=True)
class Node:
    """One agent. `domain`: what fails together with it; its host where nothing else is known.
    `slot`: the one that it holds; None for a spare. Only the table changes it."""

    number: int
    host: str
    domain: str
    slot: int | None = None

    def __str__(self) -> str:
        return f"node {self.number} (host {self.host})" if self.host else f"node {self.number}"


@dataclass(slots=True, kw_only=True)
class _Slot:
    """`last`: the node that held it last, while nobody does."""

    holder: Node | None = None
    last: Node | None = None


@dataclass(slots=True)
class Offenders:
    """Which hosts lose their nodes too often."""

    policy: Policy
    _lost_s: dict[str, deque[float]] = field(default_factory=dict)  # by host, when

    def lost(self, host: str, now_s: float) -> int:
        """A node of `host` was lost. Returns how many were within the window."""
        times = self._lost_s.setdefault(host, deque())
        times.append(now_s)
        return self._recent(host, now_s)

    def aside(self, host: str, now_s: float) -> bool:
        """Whether `host` is set aside."""
        return self._recent(host, now_s) >= self.policy.max_node_failures

    def _recent(self, host: str, now_s: float) -> int:
        times = self._lost_s.get(host)
        while times and times[0] <= now_s - self.policy.incident_window_s:
            times.popleft()
        return len(times or ())


class Nodes:
    """The table of nodes and slots. Pure state; not thread-safe. What is asked after every event
    costs the same for four nodes as for thousands."""

    def __init__(self, layout: Layout, policy: Policy) -> None:
        self.layout = layout
        self.offenders = Offenders(policy)
        self._slots = [_Slot() for _ in range(layout.nnodes)]
        self._living: dict[int, Node] = {}
        self._spares: dict[int, Node] = {}
        self._empty: set[int] = set(range(layout.nnodes))
        self._lost: set[int] = set()

    # ------------------------------------------------------------------ who is there

    def get(self, number: int) -> Node | None:
        """The living node of this number."""
        return self._living.get(number)

    def is_lost(self, number: int) -> bool:
        """Whether a node of this number was there and is lost."""
        return number in self._lost

    def holder(self, rank: int) -> Node | None:
        """The node that holds the slot of `rank`; None while nobody does."""
        return self._slots[self.layout.slot_of(rank)].holder

    def holder_of(self, slot: int) -> Node | None:
        """The node that holds `slot`; None while nobody does."""
        return self._slots[slot].holder

    def last_holder(self, slot: int) -> Node | None:
        """Who lost `slot`, while nobody holds it."""
        return self._slots[slot].last

    @property
    def living(self) -> list[Node]:
        """All nodes that are there, by number. O(nodes)."""
        return [self._living[number] for number in sorted(self._living)]

    @property
    def spares(self) -> Collection[Node]:
        """The nodes that hold no slot."""
        return self._spares.values()

    @property
    def any_empty(self) -> bool:
        """A slot is held by nobody."""
        return bool(self._empty)

    def empty(self) -> list[int]:
        """The slots that nobody holds, in order."""
        return sorted(self._empty)

    # ------------------------------------------------------------------ what becomes of them

    def join(self, number: int, host: str, domain: str) -> Node | None:
        """Take a node in, as a spare. None, and nothing is done, when its number has been used."""
        if number in self._living or number in self._lost:
            return None
        node = Node(number=number, host=host, domain=domain or host)
        self._living[number] = self._spares[number] = node
        return node

    def lose(self, node: Node, now_s: float) -> int:
        """Take a node out; its slot is empty then, and the node still says which it was. Returns
        how many nodes its host has lost of late."""
        self.expel(node)
        return self.offenders.lost(node.host, now_s)

    def expel(self, node: Node) -> None:
        """Take a node out that the job has no place for; it speaks not against its host."""
        del self._living[node.number]
        self._spares.pop(node.number, None)
        self._lost.add(node.number)
        if node.slot is not None:
            slot = self._slots[node.slot]
            slot.holder, slot.last = None, node
            self._empty.add(node.slot)

    def vacate(self, slot: int, last: Node) -> None:
        """`last` held an empty slot, in the time of an earlier coordinator."""
        assert slot in self._empty, slot
        self._slots[slot].last = last

    def preferred(self, avoid: Collection[str], now_s: float) -> list[Node]:
        """The spares in the order in which they should take a slot. `avoid`: the failure domains
        that hold replicas of the slot's state. O(spares)."""

        def order(node: Node) -> tuple[bool, bool, int]:
            return self.offenders.aside(node.host, now_s), node.domain in avoid, node.number

        return sorted(self._spares.values(), key=order)

    def give(self, slot: int, node: Node) -> None:
        """A spare takes an empty slot. Raises ValueError for one that is no spare, or when the slot
        is held."""
        if node.number not in self._spares or slot not in self._empty:
            raise ValueError(f"slot {slot} can't be given to {node}")
        del self._spares[node.number]
        self._empty.discard(slot)
        self._slots[slot].holder, self._slots[slot].last = node, None
        node.slot = slot

    # ------------------------------------------------------------------ in words, and invariants

    def validate(self) -> None:
        """Assert what must always hold of the table. O(nodes)."""
        assert not self._lost & self._living.keys(), "a lost node lives"
        holders = [slot.holder.number for slot in self._slots if slot.holder is not None]
        assert len(holders) == len(set(holders)), "a node holds two slots"
        assert set(holders).isdisjoint(self._spares), "a spare holds a slot"
        assert set(holders) | self._spares.keys() == self._living.keys(), "a node is not counted"
        for number, slot in enumerate(self._slots):
            assert (slot.holder is None) == (number in self._empty), number
            assert slot.holder is None or slot.holder.slot == number, number
        assert all(node.slot is None for node in self._spares.values())


def name_nodes(nodes: Iterable[Node]) -> str:
    """Nodes for a sentence: "node 0 (host a), node 3 (host b)"; "no node" for none."""
    return ", ".join(map(str, nodes)) or "no node"
