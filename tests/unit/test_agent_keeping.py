"""What an agent keeps, and what its guardian does: on paper, with connections that can be cut."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everstep.agent.keeping import NOBODY, Keeping
from everstep.wire import messages as m
from everstep.wire.nodes import Peers
from everstep.wire.peers import FromPeer, ToPeer, Withdrawn

Member = tuple[int, int]
HOME, GUARDIAN, OTHER = 1, 2, 3
SCRIPT = m.ScriptSpec(target="train.py", module=False, args=())


def spec_of(rank: int, incarnation: int, **more: Any) -> m.WorkerSpec:
    fields: dict[str, Any] = {
        "run_id": "r",
        "local_rank": 0,
        "world_size": 4,
        "generation": 0,
        "joiner": False,
        "script": SCRIPT,
        "progress_path": "",
        "rng_key": None,
        "once": {},
        "faults": (),
        "record": False,
        "collective_timeout_s": 1.0,
        "build_timeout_s": 1.0,
        "meet_timeout_s": 1.0,
        "quiesce_timeout_s": 1.0,
        **more,
    }
    return m.WorkerSpec(rank=rank, incarnation=incarnation, **fields)


def capsule(step: int, turn: int = 0, section: str = "", payload: bytes = b"x") -> m.Capsule:
    return m.Capsule(step=step, payload=payload, section=section, turn=turn)


class Network:
    """Nodes, and what is on its way between them: (from, to), in order. A connection is of the one
    who asks."""

    def __init__(self) -> None:
        self.nodes: dict[int, Keeping] = {}
        self.kept: dict[int, list[tuple[int, int, int]]] = {}
        self.asked: dict[tuple[int, int], deque[ToPeer]] = {}
        self.answers: dict[tuple[int, int], deque[FromPeer]] = {}
        self.counts: dict[str, int] = {}
        self.unread_bytes = 0

    def add(self, node: int) -> Keeping:
        self.kept[node] = []
        self.nodes[node] = Keeping(End(self, node), lambda *what: self.kept[node].append(what))
        return self.nodes[node]

    def join(self, one: int, other: int) -> None:
        if (one, other) not in self.asked:
            self.asked[one, other], self.answers[one, other] = deque(), deque()
            self.nodes[one].joined(other)

    def cut(self, one: int, other: int) -> None:
        if self.asked.pop((one, other), None) is not None:
            del self.answers[one, other]
            self.nodes[one].lost(other)

    def step(self, one: int, other: int, answers: bool) -> bool:
        """One message of the connection arrives; its answers wait for their own turn."""
        way: deque[Any] = (self.answers if answers else self.asked).get((one, other), deque())
        if not way:
            return False
        message = way.popleft()
        name = type(message).__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        if answers:
            self.nodes[one].answered(other, message)
        else:
            self.nodes[other].asked(one, message)
        return True

    def settle(self) -> None:
        """All that is on its way arrives."""
        moved = True
        while moved:
            moved = False
            for one, other in list(self.asked):
                for answers in (False, True):
                    while self.step(one, other, answers):
                        moved = True


class End:
    """A node's end of the network."""

    def __init__(self, network: Network, node: int) -> None:
        self._network = network
        self._node = node

    def ask(self, node: int, message: ToPeer) -> bool:
        way = self._network.asked.get((self._node, node))
        if way is not None:
            way.append(message)
        return way is not None

    def answer(self, node: int, message: FromPeer) -> bool:
        way = self._network.answers.get((node, self._node))
        if way is not None:
            way.append(message)
        return way is not None

    def unread_bytes(self, node: int) -> int:
        return self._network.unread_bytes


class Case:
    """A node, its guardian, and another one."""

    def __init__(self) -> None:
        self.network = Network()
        self.home, self.guardian, self.other = map(self.network.add, (HOME, GUARDIAN, OTHER))

    def peers(self, guardian: int, *nodes: int) -> None:
        """A generation begins at home; `nodes`: the others, two where none are named."""
        self.home.peers(addresses(guardian, *(nodes or (GUARDIAN, OTHER))))

    @property
    def kept(self) -> list[tuple[int, int, int]]:
        return self.network.kept[HOME]


def addresses(guardian: int, *nodes: int) -> Peers:
    return Peers(addresses={node: ("h", node) for node in nodes}, guardian=guardian)


@pytest.fixture
def case() -> Case:
    """With a guardian that is there."""
    case = Case()
    case.network.join(HOME, GUARDIAN)
    case.peers(GUARDIAN)
    return case


class TestSafety:
    def test_a_capsule_is_safe_when_the_guardian_says_so(self, case: Case) -> None:
        case.home.said(0, 1, capsule(1, turn=7))
        assert case.network.step(HOME, GUARDIAN, answers=False)
        assert case.guardian.report() == {0: ((1, capsule(1, turn=7)),)}
        assert case.kept == []
        assert case.network.step(HOME, GUARDIAN, answers=True)
        assert case.kept == [(0, 1, 7)]

    def test_what_nobody_waits_for_is_deposited_and_not_told(self, case: Case) -> None:
        protect = m.Protect(shard="s", manifest="m", digests={"a": "b"}, rng_key=b"k")
        once, tape = m.Once(key="k", value=b"1"), m.Tape(items=(m.Told(key="c", value=b"2"),))
        said: list[m.FromWorker] = [protect, once, tape, capsule(1)]
        for message in said:
            case.home.said(0, 1, message)
        case.network.settle()
        assert case.guardian.report() == {0: tuple((1, message) for message in said)}
        assert case.guardian.report() == case.home.report()
        assert case.kept == []

    def test_other_words_are_not_kept(self, case: Case) -> None:
        case.home.said(0, 1, m.Wait())
        case.home.said(0, 1, m.Note(key="k", text="t"))
        case.network.settle()
        assert case.home.report() == case.guardian.report() == {}
        assert case.network.counts == {}

    def test_alone_a_capsule_is_as_safe_as_can_be(self) -> None:
        case = Case()
        case.home.said(0, 1, capsule(1, turn=1))
        assert case.kept == []  # a guardian may still be named
        case.home.peers(addresses(NOBODY))
        assert case.kept == [(0, 1, 1)]
        case.home.said(0, 1, capsule(2, turn=2))
        assert case.kept == [(0, 1, 1), (0, 1, 2)]

    def test_a_capsule_waits_for_a_guardian_that_is_not_there_yet(self) -> None:
        case = Case()
        case.home.said(0, 1, capsule(1, turn=1))
        case.peers(GUARDIAN)
        case.home.said(1, 1, capsule(1, turn=1))
        case.network.join(HOME, GUARDIAN)
        case.network.settle()
        assert case.kept == [(0, 1, 1), (1, 1, 1)]

    def test_nobody_waits_for_a_guardian_that_is_not_reached(self, case: Case) -> None:
        case.home.said(0, 1, capsule(1, turn=1))
        case.network.cut(HOME, GUARDIAN)
        case.home.unreached(OTHER)
        assert case.kept == []
        case.home.unreached(GUARDIAN)
        case.home.said(1, 1, capsule(1, turn=1))
        assert case.kept == [(0, 1, 1), (1, 1, 1)]
        case.network.join(HOME, GUARDIAN)
        case.home.said(0, 1, capsule(2, turn=2))
        assert case.kept == [(0, 1, 1), (1, 1, 1)]
        case.network.settle()
        assert case.kept == [(0, 1, 1), (1, 1, 1), (0, 1, 2)]
        assert case.guardian.report() == case.home.report()

    def test_after_a_cut_all_is_deposited_again(self, case: Case) -> None:
        case.home.said(0, 1, m.Once(key="k", value=b"1"))
        case.home.said(0, 1, capsule(1, turn=1))
        case.network.cut(HOME, GUARDIAN)
        case.home.said(1, 1, capsule(1, turn=1))
        case.network.join(HOME, GUARDIAN)
        case.network.settle()
        assert case.guardian.report() == case.home.report()
        assert sorted(case.kept) == [(0, 1, 1), (1, 1, 1)]

    def test_an_acknowledgement_from_before_is_none_of_what_came_after(self, case: Case) -> None:
        """The guardian was another one for a while, and its answer was under way meanwhile."""
        case.network.join(HOME, OTHER)
        case.home.said(0, 1, m.Once(key="k", value=b"1"))
        case.network.step(HOME, GUARDIAN, answers=False)
        case.peers(OTHER)
        case.home.said(0, 1, capsule(1, turn=1))
        case.peers(GUARDIAN)
        case.network.step(HOME, GUARDIAN, answers=True)
        assert case.kept == []
        case.network.settle()
        assert case.kept == [(0, 1, 1)]

    def test_a_stale_turn_is_not_told(self, case: Case) -> None:
        case.home.said(0, 1, capsule(1, turn=1))
        case.home.said(0, 1, capsule(1, turn=2))  # the first was stopped
        case.network.settle()
        assert case.kept == [(0, 1, 2)]
        case.home.said(0, 1, capsule(2, turn=3))
        case.home.launched(spec_of(0, 2, joiner=True))
        case.network.settle()
        assert case.kept == [(0, 1, 2)]


class TestGuardians:
    def test_a_new_guardian_is_given_all_and_the_old_one_gives_up(self, case: Case) -> None:
        case.home.said(0, 1, m.Once(key="k", value=b"1"))
        case.home.said(0, 1, capsule(1, turn=1))
        case.network.settle()
        case.network.join(HOME, OTHER)
        case.peers(OTHER)
        assert case.network.step(HOME, OTHER, answers=False)
        assert case.network.step(HOME, OTHER, answers=True)
        assert not case.network.asked[HOME, GUARDIAN]  # the other has not all yet
        case.network.settle()
        assert case.guardian.report() == {}
        assert case.other.report() == case.home.report() != {}

    def test_what_is_another_homes_by_now_is_not_given_up(self, case: Case) -> None:
        case.home.said(0, 1, capsule(1))
        case.network.settle()
        case.guardian.asked(OTHER, Withdrawn(ranks=(0, 1)))
        assert case.guardian.report() != {}
        case.guardian.asked(HOME, Withdrawn(ranks=(0, 1)))
        assert case.guardian.report() == {}

    def test_a_lost_nodes_ranks_are_kept_for_a_generation(self, case: Case) -> None:
        case.home.said(0, 1, capsule(1))
        case.network.settle()
        case.guardian.peers(addresses(OTHER, OTHER))
        assert case.guardian.report() == {0: ((1, capsule(1)),)}
        case.guardian.peers(addresses(OTHER, OTHER, HOME))  # it was no loss
        case.guardian.peers(addresses(OTHER, OTHER))
        assert case.guardian.report() == {0: ((1, capsule(1)),)}
        case.guardian.peers(addresses(OTHER, OTHER))
        assert case.guardian.report() == {}

    def test_the_next_home_goes_on_with_what_was_kept(self, case: Case) -> None:
        case.home.said(0, 1, capsule(1))
        case.network.settle()
        case.network.join(OTHER, GUARDIAN)
        case.other.peers(addresses(GUARDIAN, GUARDIAN))
        case.guardian.peers(addresses(OTHER, OTHER))
        case.other.said(0, 2, capsule(2))
        case.network.settle()
        case.guardian.peers(addresses(OTHER, OTHER))
        case.guardian.peers(addresses(OTHER, OTHER))
        assert case.guardian.report() == {0: ((1, capsule(1)), (2, capsule(2)))}

    def test_a_guardian_that_takes_over_the_rank_keeps_it_as_its_own(self, case: Case) -> None:
        case.home.said(0, 1, capsule(1))
        case.network.settle()
        case.guardian.launched(spec_of(0, 2, joiner=True))
        for _ in range(3):
            case.guardian.peers(addresses(NOBODY))
        assert (1, capsule(1)) in case.guardian.report()[0]

    def test_much_is_deposited_piece_by_piece(self) -> None:
        """A connection with too much unread is given up, and the next would be, too."""
        case = Case()
        for rank in range(4):
            for step in range(1, 4):
                case.home.said(rank, 1, capsule(step, turn=step))
        case.network.unread_bytes = 1 << 30
        case.network.join(HOME, GUARDIAN)
        case.peers(GUARDIAN)
        case.network.cut(HOME, GUARDIAN)
        case.network.join(HOME, GUARDIAN)
        for done in range(12):
            assert len(case.network.asked[HOME, GUARDIAN]) == 1, done
            assert case.network.step(HOME, GUARDIAN, answers=False)
            assert case.network.step(HOME, GUARDIAN, answers=True)
        assert not case.network.asked[HOME, GUARDIAN]
        assert case.guardian.report() == case.home.report()
        assert sorted(case.kept) == [(rank, 1, 3) for rank in range(4)]


class TestLaunches:
    TAPE = (m.Told(key="a", value=b"1"), m.Told(key="b", value=b"2"))

    def test_a_beginning_from_nothing_begins_the_tape(self, case: Case) -> None:
        case.home.launched(spec_of(0, 1))
        case.home.said(0, 1, m.Tape(items=self.TAPE))
        case.home.launched(spec_of(0, 2, once={"k": b"1"}))
        case.network.settle()
        expected = ((2, m.Once(key="k", value=b"1")), (2, m.Tape(items=())))
        assert case.guardian.report()[0] == case.home.report()[0] == expected

    def test_a_replacement_goes_on_with_its_predecessors_tape(self, case: Case) -> None:
        case.home.launched(spec_of(0, 1))
        case.home.said(0, 1, m.Once(key="k", value=b"1"))
        case.home.said(0, 1, m.Tape(items=self.TAPE))
        case.network.settle()
        before, counts = case.home.report(), dict(case.network.counts)
        case.home.launched(spec_of(0, 2, joiner=True, tape=self.TAPE, once={"k": b"1"}))
        case.network.settle()
        assert case.home.report() == case.guardian.report() == before
        assert case.network.counts == counts  # nothing is new

    def test_a_new_home_knows_what_its_worker_is_born_with(self, case: Case) -> None:
        born = spec_of(0, 5, joiner=True, tape=self.TAPE, once={"k": b"1"})
        kept = [(3, capsule(7)), (4, capsule(8)), (4, capsule(8, section="a"))]
        case.home.launched(born, kept)
        case.network.settle()
        expected = (
            (5, m.Once(key="k", value=b"1")),
            (5, m.Tape(items=self.TAPE)),
            *kept,
        )
        assert case.guardian.report()[0] == case.home.report()[0] == expected


def test_messages_of_a_step_are_two_for_each_rank_and_none_of_them_the_coordinators() -> None:
    """A thousand nodes of eight ranks: nobody carries more than four messages for each of its own
    ranks, the two of its own and the two of its ward's."""
    nodes, ranks = 1000, 8
    network = Network()
    for node in range(nodes):
        network.add(node)
    for node, keeping in network.nodes.items():
        guardian = (node + 1) % nodes
        network.join(node, guardian)
        keeping.peers(addresses(guardian, guardian, (node - 1) % nodes))
        for local in range(ranks):
            keeping.said(node * ranks + local, 1, capsule(1, turn=1))
    network.settle()
    assert network.counts == {"Deposit": nodes * ranks, "Deposited": nodes * ranks}
    assert all(len(kept) == ranks for kept in network.kept.values())
    for node, keeping in network.nodes.items():
        own = range(node * ranks, (node + 1) * ranks)
        ward = range((node - 1) % nodes * ranks, ((node - 1) % nodes + 1) * ranks)
        assert set(keeping.report()) == {*own, *ward}


class Interleavings(RuleBasedStateMachine):
    """Workers of one node speak, die and begin again; connections are cut at any message, and the
    guardian is another one, or a new one, at any time. What is told to be safe is with the guardian
    at that moment; in the end it has all that the home has."""

    RANKS = (0, 1)

    @initialize()
    def begin(self) -> None:
        self.network = Network()
        self.home = self.network.add(HOME)
        self.network.nodes[HOME]._on_kept = self.safe
        self.guardian = NOBODY
        self.named = False
        self.next_node = GUARDIAN
        self.incarnations = dict.fromkeys(self.RANKS, 0)
        self.steps = dict.fromkeys(self.RANKS, 0)
        self.turns = dict.fromkeys(self.RANKS, 0)
        self.waiting: dict[int, m.Capsule] = {}
        self.told: set[tuple[int, int, int]] = set()
        for rank in self.RANKS:
            self.launch(rank, joiner=False)

    def safe(self, rank: int, incarnation: int, turn: int) -> None:
        assert (rank, incarnation, turn) not in self.told
        self.told.add((rank, incarnation, turn))
        assert self.incarnations[rank] == incarnation
        waited = self.waiting.pop(rank)
        assert waited.turn == turn
        assert self.named
        if self.guardian != NOBODY:
            kept = self.network.nodes[self.guardian].report()
            assert (incarnation, waited) in kept[rank]

    def launch(self, rank: int, *, joiner: bool, back: int = 0) -> None:
        self.waiting.pop(rank, None)
        self.incarnations[rank] += 1
        self.steps[rank] = max(0, self.steps[rank] - back) if joiner else 0
        kept = dict(self.home.report()).get(rank, ())
        tape = tuple(item for _, said in kept if isinstance(said, m.Tape) for item in said.items)
        self.home.launched(spec_of(rank, self.incarnations[rank], joiner=joiner, tape=tape))

    def say(self, rank: int, message: m.FromWorker) -> None:
        self.home.said(rank, self.incarnations[rank], message)

    ranks = st.sampled_from(RANKS)

    @rule(rank=ranks, section=st.sampled_from(["", "", "a", "b"]))
    def hand_over(self, rank: int, section: str) -> None:
        """A worker waits for its capsule before it does anything else."""
        if rank in self.waiting:
            return
        self.turns[rank] += 1
        self.steps[rank] += not section
        payload = f"{self.incarnations[rank]}/{self.turns[rank]}".encode()
        self.waiting[rank] = capsule(self.steps[rank], self.turns[rank], section, payload)
        self.say(rank, self.waiting[rank])

    @rule(rank=ranks)
    def try_again(self, rank: int) -> None:
        """The generation was stopped; the attempt is made again."""
        if rank not in self.waiting or self.waiting[rank].section:
            return
        self.turns[rank] += 1
        payload = f"{self.incarnations[rank]}/{self.turns[rank]}".encode()
        self.waiting[rank] = capsule(self.steps[rank], self.turns[rank], payload=payload)
        self.say(rank, self.waiting[rank])

    @rule(rank=ranks, key=st.sampled_from("ab"))
    def keep_once(self, rank: int, key: str) -> None:
        self.say(rank, m.Once(key=key, value=b"%d" % self.incarnations[rank]))

    @rule(rank=ranks)
    def protect(self, rank: int) -> None:
        self.say(rank, m.Protect(shard="s", manifest="m", digests={}, rng_key=b"k"))

    @rule(rank=ranks, joiner=st.booleans(), back=st.integers(0, 2))
    def die(self, rank: int, joiner: bool, back: int) -> None:
        self.launch(rank, joiner=joiner, back=back)
        if not joiner:
            self.say(rank, m.Tape(items=(m.Told(key="c", value=b"%d" % self.turns[rank]),)))

    @rule(node=st.integers(GUARDIAN, 6), new=st.booleans())
    def generation(self, node: int, new: bool) -> None:
        """Another guardian, or none. A new one has nothing yet."""
        if new or not self.network.nodes.keys() & {node}:
            node = self.next_node
            self.next_node += 1
            self.network.add(node)
        self.named, self.guardian = True, node
        others = [other for other in self.network.nodes if other != HOME]
        self.home.peers(addresses(node, *others))

    @rule()
    def alone(self) -> None:
        self.named, self.guardian = True, NOBODY
        for other in [other for other in self.network.nodes if other != HOME]:
            self.network.cut(HOME, other)
        self.home.peers(addresses(NOBODY))

    @rule(answers=st.booleans(), count=st.integers(1, 5))
    def deliver(self, answers: bool, count: int) -> None:
        for _ in range(count):
            for way in list(self.network.asked):
                self.network.step(*way, answers)

    @precondition(lambda self: self.guardian != NOBODY)
    @rule()
    def join(self) -> None:
        self.network.join(HOME, self.guardian)

    @precondition(lambda self: self.network.asked)
    @rule()
    def cut(self) -> None:
        for way in list(self.network.asked):
            self.network.cut(*way)

    @rule(full=st.booleans())
    def crowd(self, full: bool) -> None:
        self.network.unread_bytes = 1 << 30 if full else 0

    @precondition(lambda self: self.guardian != NOBODY)
    @rule()
    def calm(self) -> None:
        """Everything arrives."""
        self.network.join(HOME, self.guardian)
        self.network.settle()
        assert self.waiting == {}
        ours, theirs = self.home.report(), self.network.nodes[self.guardian].report()
        for rank in self.RANKS:
            mine = [each for each in ours[rank] if not isinstance(each[1], m.Capsule)]
            assert [each for each in theirs[rank] if not isinstance(each[1], m.Capsule)] == mine
            # It may have older capsules from a time when it was the guardian before.
            capsules = [each for each in ours[rank] if isinstance(each[1], m.Capsule)]
            assert list(theirs[rank])[len(theirs[rank]) - len(capsules) :] == capsules

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "network"):
            return
        for keeping in self.network.nodes.values():
            for said in keeping.report().values():
                steps = {message.step for _, message in said if isinstance(message, m.Capsule)}
                assert len(steps) <= 4


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=100, stateful_step_count=40)
