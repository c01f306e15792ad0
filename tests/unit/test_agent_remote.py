"""Registration: who becomes a node of the job, who is refused, and how a node's part ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import msgspec
import pytest

from everstep.agent import clocks
from everstep.agent.fleet import Fleet
from everstep.agent.remote import Registry, RemoteNode
from everstep.core.coordinator import Coordinator
from everstep.core.ladder import Policy
from everstep.core.nodes import Layout
from everstep.core.overview import Overview
from everstep.observe.view import View
from everstep.types import Cause, Record
from everstep.wire import nodes
from everstep.wire.bulk import Offer
from everstep.wire.messages import Commit, Once, ScriptSpec
from everstep.wire.network import Link
from everstep.wire.secret import Secret, make_secret

VERSIONS = {"everstep": "1.0", "torch": "2.13.0", "Python": "3.11.7"}
SETTINGS = nodes.NodeSettings(
    run_id="r",
    script=ScriptSpec(target="train.py", module=False, args=()),
    hash_seed="1",
    watch=True,
    stopped_timeout_s=1.0,
    hang_timeout_s=1.0,
    first_step_timeout_s=1.0,
    section_timeout_s=1.0,
    runner="a:b",
    preload=(),
)


class FleetOnPaper:
    """A fleet that only writes down."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.exit_code = 0
        self.nodes: dict[int, RemoteNode] = {}
        self.told: list[tuple[Any, ...]] = []
        self.waits_for: set[int] = set()

    def expects(self, report: nodes.Report) -> bool:
        return report.node in self.waits_for

    def back(self, host: str, domain: str, report: nodes.Report) -> None:
        self.told.append(("back", host, domain, report))

    def add(self, number: int, node: RemoteNode) -> None:
        self.nodes[number] = node

    def berth(self, number: int) -> Any:
        fleet = self

        class Berth:
            def said(self, rank: int, incarnation: int, message: Any) -> None:
                fleet.told.append(("said", number, rank, incarnation, message))

            def probed(self, message: nodes.Probed) -> None:
                fleet.told.append(("probed", number, message))

            def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
                fleet.told.append(("output", number, rank, line))

        return Berth()

    def joined(self, number: int, host: str, domain: str, ranks: int) -> None:
        self.told.append(("joined", number, host, domain, ranks))

    def lost(self, number: int, cause: Cause) -> None:
        self.told.append(("lost", number, cause.text))

    def record(self, record: Record, *, shown: bool = True) -> None:
        if record.event == "node_displaced":
            self.told.append(("displaced", record.fields["node"], record.fields["text"]))
        if record.event == "note":
            self.told.append(("note", record.fields["text"]))

    def failed(self, error: BaseException) -> None:
        self.told.append(("failed", str(error)))

    def also_show(self, view: View) -> None:
        self.view = view

    def overview(self) -> Overview:
        core = Coordinator(4, Policy(), Layout(nproc_per_node=2, nnodes=2))
        return core.overview(0.0)

    def end_asked(self, *, now: bool) -> None:
        self.told.append(("end", now))


class Agent:
    """The other end of a connection."""

    def __init__(self, case: Case) -> None:
        self.heard: list[nodes.ToNode] = []
        self.losses: list[str] = []
        self.joined = asyncio.Event()
        self.link: Link[nodes.ToNode] = Link(
            host="127.0.0.1",
            port=case.registry.port,
            secret=case.secret,
            receives=nodes.ToNode,
            on_joined=self.joined.set,
            on_message=self.heard.append,
            on_lost=self.losses.append,
            on_waiting=lambda _: None,
        )

    async def register(self, name: str = "a", pid: int = 7, **more: Any) -> None:
        await asyncio.wait_for(self.joined.wait(), 10)
        fields: dict[str, Any] = {"versions": VERSIONS, "domain": "", "boot_id": "b", **more}
        self.link.send(nodes.Register(name=name, host="h", address="1.2.3.4", pid=pid, **fields))
        await until(lambda: bool(self.heard))


class Case:
    """A registry on loopback, and its agents."""

    def __init__(self, term: int = 0, secret: Secret | None = None, port: int = 0) -> None:
        self.secret = secret or make_secret()
        self.fleet = FleetOnPaper()
        self.registry = Registry(
            cast(Fleet, self.fleet),
            host="127.0.0.1",
            ports=range(port, port + 1),
            secret=self.secret,
            lease_s=2.0,
            settings=SETTINGS,
            versions=VERSIONS,
            script_digest="d",
            nproc_per_node=2,
            must_start=False,
            term=term,
        )
        self.agents: list[Agent] = []

    def agent(self) -> Agent:
        self.agents.append(Agent(self))
        return self.agents[-1]

    async def until_told(self, *begin: Any) -> tuple[Any, ...]:
        def found() -> list[tuple[Any, ...]]:
            return [each for each in self.fleet.told if each[: len(begin)] == begin]

        await until(lambda: bool(found()))
        return found()[0]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.005)


def play(act: Callable[[Case], Awaitable[None]], term: int = 0) -> None:
    async def run() -> None:
        case = Case(term)
        try:
            await act(case)
        finally:
            for agent in case.agents:
                agent.link.close()
            case.registry.close()

    asyncio.run(run())


def test_a_node_joins_once_it_can_fork_and_is_lost_with_its_connection() -> None:
    async def act(case: Case) -> None:
        agent = case.agent()
        await agent.register(domain="rack=1")
        (welcome,) = agent.heard
        assert isinstance(welcome, nodes.Welcome)
        assert (welcome.node, welcome.settings) == (0, SETTINGS)
        assert not case.fleet.told
        agent.link.send(nodes.Joined(script_digest="d"))
        assert await case.until_told("joined") == ("joined", 0, "h", "rack=1", 2)
        said = Commit(generation=1, step=2, t=3.0, log={}, record=None)
        agent.link.send(nodes.Said(rank=1, incarnation=4, message=said))
        assert await case.until_told("said") == ("said", 0, 1, 4, said)
        agent.link.close()
        lost = await case.until_told("lost", 0)
        assert "left" in lost[2]
        assert case.fleet.nodes[0].gone.is_set()

    play(act)


@pytest.mark.parametrize("what", list(VERSIONS))
def test_another_version_is_refused_by_name_at_both_ends(what: str) -> None:
    async def act(case: Case) -> None:
        agent = case.agent()
        await agent.register(name="old", versions=VERSIONS | {what: "0.1"})
        (refuse,) = agent.heard
        assert isinstance(refuse, nodes.Refuse)
        assert f"it has {what} 0.1, and the job has {VERSIONS[what]}" in refuse.text
        (note,) = case.fleet.told
        assert note[1].startswith("agent old on host h is refused: it has")
        await until(lambda: bool(agent.losses))
        assert not case.fleet.nodes

    play(act)


def test_another_script_is_refused() -> None:
    async def act(case: Case) -> None:
        agent = case.agent()
        await agent.register()
        agent.link.send(nodes.Joined(script_digest="other"))
        await until(lambda: len(agent.heard) == 2)
        assert isinstance(agent.heard[1], nodes.Refuse)
        assert "train.py has other contents" in agent.heard[1].text
        assert not any(told[0] == "joined" for told in case.fleet.told)

    play(act)


def test_a_name_is_for_one_living_agent() -> None:
    async def act(case: Case) -> None:
        first, second = case.agent(), case.agent()
        await first.register(name="n", pid=1)
        await second.register(name="n", pid=2)
        (refuse,) = second.heard
        assert isinstance(refuse, nodes.Refuse)
        assert "node 0 on host h (process 1) has that name already" in refuse.text
        assert not first.losses

    play(act)


def test_an_agent_that_comes_again_ends_its_own_old_node() -> None:
    async def act(case: Case) -> None:
        first, again = case.agent(), case.agent()
        await first.register(name="n", pid=1)
        await again.register(name="n", pid=1)
        (welcome,) = again.heard
        assert isinstance(welcome, nodes.Welcome)
        assert welcome.node == 1
        assert "come again" in (await case.until_told("lost", 0))[2]
        await until(lambda: bool(first.losses))

    play(act)


def test_a_node_that_is_dismissed_is_hung_up_on_and_nothing_it_says_counts() -> None:
    async def act(case: Case) -> None:
        agent = case.agent()
        await agent.register()
        agent.link.send(nodes.Joined(script_digest="d"))
        await case.until_told("joined")
        case.fleet.nodes[0].dismiss("another has its place")
        await until(lambda: bool(agent.losses))
        assert "another has its place" in agent.losses[0]
        assert not any(told[0] == "lost" for told in case.fleet.told)

    play(act)


def test_after_the_end_nobody_joins() -> None:
    async def act(case: Case) -> None:
        case.fleet.ended.set_result(None)
        agent = case.agent()
        await agent.register()
        (refuse,) = agent.heard
        assert isinstance(refuse, nodes.Refuse)
        assert "the job is over" in refuse.text

    play(act)


def test_a_close_waits_until_the_node_is_gone() -> None:
    async def act(case: Case) -> None:
        agent = case.agent()
        await agent.register()
        case.fleet.exit_code = 3
        closing = asyncio.create_task(case.fleet.nodes[0].close(terminate=True, wait_s=5.0))
        await until(lambda: len(agent.heard) == 2)
        assert agent.heard[1] == nodes.Finish(terminate=True, wait_s=5.0, exit_code=3)
        assert not closing.done()
        agent.link.send(nodes.Gone())
        await asyncio.wait_for(closing, 10)

    play(act)


def test_one_that_fails_before_it_has_joined_is_lost_with_its_words() -> None:
    async def act(case: Case) -> None:
        agent = case.agent()
        await agent.register()
        agent.link.send(nodes.Failed(text="no room", exit_code=2))
        assert (await case.until_told("lost", 0))[2] == "its agent failed: no room"

    play(act)


def test_one_that_leaves_is_lost_at_once_and_ends_its_workers_in_peace() -> None:
    async def act(case: Case) -> None:
        agent = case.agent()
        await agent.register(name="n")
        agent.link.send(nodes.Joined(script_digest="d"))
        await case.until_told("joined")
        agent.link.send(nodes.Leaving(signal=15, grace_s=5.0))
        lost = await case.until_told("lost", 0)
        assert lost[2] == "its agent was asked to end by SIGTERM"
        assert case.fleet.nodes[0].gone.is_set()
        late = Commit(generation=1, step=2, t=3.0, log={}, record=None)
        agent.link.send(nodes.Said(rank=1, incarnation=4, message=late))
        agent.link.send(nodes.Output(rank=1, incarnation=4, stream="stdout", line="saved"))
        assert await case.until_told("output") == ("output", 0, 1, "saved")
        assert not agent.losses
        again = case.agent()  # its successor need not wait for its end
        await again.register(name="n", pid=8)
        assert isinstance(again.heard[0], nodes.Welcome)
        agent.link.send(nodes.Gone())
        agent.link.close()
        again.link.close()
        await case.until_told("lost", 1)
        assert [told[:2] for told in case.fleet.told if told[0] in ("lost", "said")] == [
            ("lost", 0),
            ("lost", 1),
        ]

    play(act)


def test_nodes_try_each_other_at_the_fleets_word() -> None:
    door = Offer(host="1.2.3.4", port=1, ticket=bytes(16))
    listens = nodes.Listens(door=door, network="n", any_port=2, any_ports=(2, 3))

    async def act(case: Case) -> None:
        agent, back = case.agent(), case.agent()
        await agent.register()
        agent.link.send(nodes.Joined(script_digest="d", listens=listens))
        await case.until_told("joined")
        case.fleet.waits_for = {9}
        await back.register(name="b", report=msgspec.structs.replace(report(9), listens=listens))
        assert [case.fleet.nodes[number].listens for number in (0, 9)] == [listens, listens]
        order = nodes.Probe(targets={9: listens}, within_s=1.0, turn=4)
        case.fleet.nodes[0].probe(order)
        await until(lambda: agent.heard[-1] == order)
        answer = nodes.Probed(closed=(), turn=4)
        agent.link.send(answer)
        assert await case.until_told("probed") == ("probed", 0, answer)

    play(act)


def test_times_are_moved_to_the_coordinators_clock() -> None:
    moved_s = clocks.offset(10.0, 12.0, 111.0)
    assert moved_s == 100.0
    commit = Commit(generation=1, step=2, t=3.0, log={}, record=None)
    moved = clocks.message(commit, moved_s)
    assert isinstance(moved, Commit)
    assert moved.t == 103.0


def report(node: int, term: int = 0) -> nodes.Report:
    return nodes.Report(
        term=term,
        node=node,
        slot=1,
        peers=(),
        members=(),
        ended=(),
        kept={},
        unwritten=(),
        copies=(),
    )


def test_an_agent_of_an_earlier_coordinator_is_adopted_where_it_is_waited_for() -> None:
    async def act(case: Case) -> None:
        case.fleet.waits_for = {5}
        agent = case.agent()
        await asyncio.wait_for(agent.joined.wait(), 10)
        for rank in (0, 1):
            once = Once(key="k", value=b"%d" % rank)
            agent.link.send(nodes.Keeps(rank=rank, kept=((rank + 1, once),)))
        await agent.register(domain="rack=1", report=report(5, term=1))
        (welcome,) = agent.heard
        assert isinstance(welcome, nodes.Welcome)
        assert (welcome.node, welcome.term, welcome.adopted) == (5, 2, True)
        kept = {0: ((1, Once(key="k", value=b"0")),), 1: ((2, Once(key="k", value=b"1")),)}
        back = ("back", "h", "rack=1", msgspec.structs.replace(report(5, term=1), kept=kept))
        assert await case.until_told("back") == back
        said = Commit(generation=1, step=2, t=3.0, log={}, record=None)
        agent.link.send(nodes.Said(rank=1, incarnation=4, message=said))
        assert await case.until_told("said") == ("said", 5, 1, 4, said)
        agent.link.close()
        assert (await case.until_told("lost", 5))[1] == 5

    play(act, term=2)


@pytest.mark.parametrize(
    ("term", "why"),
    [(2, "its connection was lost"), (1, "the coordinator of term 2 has not waited for it")],
)
def test_an_agent_whose_place_was_given_away_is_told_and_begins_as_another(
    term: int, why: str
) -> None:
    async def act(case: Case) -> None:
        agent = case.agent()
        await agent.register(report=report(5, term=term))
        (displaced,) = agent.heard
        assert isinstance(displaced, nodes.Displaced)
        assert why in displaced.why
        assert (await case.until_told("displaced", 5))[2] == displaced.why
        agent.heard.clear()
        await agent.register()
        (welcome,) = agent.heard
        assert isinstance(welcome, nodes.Welcome)
        assert (welcome.node, welcome.adopted) == (2_000_000, False)
        assert list(case.fleet.nodes) == [2_000_000]

    play(act, term=2)


def test_numbers_of_another_term_are_never_those_of_an_earlier_one() -> None:
    async def act(case: Case) -> None:
        case.fleet.waits_for = {0}
        for name, given in (("a", report(0)), ("b", None), ("c", None)):
            await case.agent().register(name=name, report=given)
        assert list(case.fleet.nodes) == [0, 1_000_000, 1_000_001]

    play(act, term=1)
