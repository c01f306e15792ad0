"""Registration: who becomes a node of the job, who is refused, and how a node's part ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from everstep.agent import clocks, remote
from everstep.agent.fleet import Fleet
from everstep.agent.preflight import Plan
from everstep.agent.remote import Registry
from everstep.agent.remote_node import RemoteNode
from everstep.core.coordinator import Coordinator
from everstep.core.ladder import Policy
from everstep.core.nodes import Layout
from everstep.core.overview import Overview
from everstep.observe.view import View
from everstep.types import TERM_STRIDE, Cause, CauseKind, HeldCopy, Record, Stamp
from everstep.wire import nodes
from everstep.wire.bulk import Offer
from everstep.wire.messages import Commit, Keepsake, Once, ScriptSpec
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
        self.reconvenes = False
        self.inhabited = False
        self.manner = (False, 5.0)

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

            def reclaimed(self, message: nodes.Reclaimed) -> None:
                fleet.told.append(("reclaimed", number, message))

            def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
                fleet.told.append(("output", number, rank, line))

        return Berth()

    def joined(
        self, number: int, host: str, domain: str, ranks: int, found: tuple[HeldCopy, ...]
    ) -> None:
        self.told.append(("joined", number, host, domain, ranks, *found))

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
        await self.say_who_it_is(name, pid, **more)
        await until(lambda: bool(self.heard))

    async def until_heard(self, count: int) -> None:
        await until(lambda: len(self.heard) == count)

    async def say_who_it_is(self, name: str = "a", pid: int = 7, **more: Any) -> None:
        await asyncio.wait_for(self.joined.wait(), 10)
        fields: dict[str, Any] = {"versions": VERSIONS, "domain": "", "boot_id": "b", **more}
        self.link.send(nodes.Register(name=name, host="h", address="1.2.3.4", pid=pid, **fields))


class Case:
    """A registry on loopback, and its agents."""

    def __init__(
        self, term: int = 0, secret: Secret | None = None, port: int = 0, needed: int = 0
    ) -> None:
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
            preflight=Plan(needed=needed, ports="", within_s=5.0 if needed else 0.0),
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


def play(act: Callable[[Case], Awaitable[None]], term: int = 0, needed: int = 0) -> None:
    async def run() -> None:
        case = Case(term, needed=needed)
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
        copy = HeldCopy(rank=1, step=4, stamp=Stamp(generation=2, digest="d" * 32))
        agent.link.send(nodes.Joined(script_digest="d", found=(copy,)))
        assert await case.until_told("joined") == ("joined", 0, "h", "rack=1", 2, copy)
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
        case.fleet.reconvenes = True
        theirs = msgspec.structs.replace(report(9), listens=listens)
        await back.register(name="b", pid=8, report=theirs)
        ours = case.fleet.nodes[TERM_STRIDE]
        assert [ours.listens, case.fleet.nodes[9].listens] == [listens, listens]
        order = nodes.Probe(targets={9: listens}, within_s=1.0, turn=4)
        ours.probe(order)
        await until(lambda: agent.heard[-1] == order)
        answer = nodes.Probed(closed=(), turn=4)
        agent.link.send(answer)
        assert await case.until_told("probed") == ("probed", TERM_STRIDE, answer)

    play(act, term=1)


def test_times_are_moved_to_the_coordinators_clock() -> None:
    moved_s = clocks.offset(10.0, 12.0, 111.0)
    assert moved_s == 100.0
    commit = Commit(generation=1, step=2, t=3.0, log={}, record=None)
    moved = clocks.message(commit, moved_s)
    assert isinstance(moved, Commit)
    assert moved.t == 103.0


def said_at(step: int, t: float) -> nodes.Said:
    commit = Commit(generation=1, step=step, t=t, log={}, record=None)
    return nodes.Said(rank=1, incarnation=4, message=commit)


def test_what_a_node_keeps_of_a_lost_one_is_put_together() -> None:
    async def act(case: Case) -> None:
        agent = case.agent()
        await agent.register()
        agent.link.send(nodes.Joined(script_digest="d"))
        await case.until_told("joined")
        for turn in (1, 2):
            once: Keepsake = Once(key="k", value=b"%d" % turn)
            for rank in (3, 4):
                agent.link.send(nodes.Keeps(rank=rank, incarnation=1, message=once))
            agent.link.send(nodes.Reclaimed(turn=turn))
            kept: dict[int, tuple[tuple[int, Keepsake], ...]]
            kept = dict.fromkeys((3, 4), ((1, once),))
            answer = ("reclaimed", 0, nodes.Reclaimed(turn=turn, kept=kept))
            assert await case.until_told(*answer) == answer

    play(act)


def report(node: int, term: int = 0, slot: int = 1, run_id: str = "r") -> nodes.Report:
    return nodes.Report(
        run_id=run_id,
        term=term,
        node=node,
        slot=slot,
        peers=(),
        members=(),
        ended=(),
        copies=(),
    )


def test_an_agent_of_an_earlier_coordinator_is_adopted_where_it_is_waited_for() -> None:
    async def act(case: Case) -> None:
        case.fleet.reconvenes = True
        agent = case.agent()
        await asyncio.wait_for(agent.joined.wait(), 10)
        for rank in (0, 1):
            for key in ("k", "l"):
                once = Once(key=key, value=b"%d" % rank)
                agent.link.send(nodes.Keeps(rank=rank, incarnation=rank + 1, message=once))
        for step in (1, 2):
            agent.link.send(nodes.Unwritten(said=(said_at(step, t=3.0),)))
        clock_s = time.monotonic() - 1e9
        await agent.register(domain="rack=1", report=report(5, term=1), clock_s=clock_s)
        (welcome,) = agent.heard
        assert isinstance(welcome, nodes.Welcome)
        assert (welcome.node, welcome.term, welcome.adopted) == (5, 2, True)
        _, host, domain, told = await case.until_told("back")
        assert (host, domain) == ("h", "rack=1")
        assert told.kept == {
            0: tuple((1, Once(key=key, value=b"0")) for key in ("k", "l")),
            1: tuple((2, Once(key=key, value=b"1")) for key in ("k", "l")),
        }
        moved_s = 1e9  # the other host's clock is behind
        times = []
        for step, said in enumerate(told.unwritten, 1):
            assert isinstance(said.message, Commit)
            assert said.message.step == step
            times.append(said.message.t)
        assert len(times) == 2
        assert times[0] == times[1] == pytest.approx(3.0 + moved_s, abs=1000)
        said = Commit(generation=1, step=2, t=3.0, log={}, record=None)
        agent.link.send(nodes.Said(rank=1, incarnation=4, message=said))
        assert await case.until_told("said") == ("said", 5, 1, 4, said)
        agent.link.close()
        assert (await case.until_told("lost", 5))[1] == 5

    play(act, term=2)


def test_an_agent_that_was_not_waited_for_is_told_and_begins_as_another() -> None:
    async def act(case: Case) -> None:
        agent = case.agent()
        await agent.register(report=report(5, term=1))
        (displaced,) = agent.heard
        assert isinstance(displaced, nodes.Displaced)
        assert "the coordinator of term 2 has not waited for it" in displaced.why
        assert (await case.until_told("displaced", 5))[2] == displaced.why
        # How its workers end is heard on the same connection, and is no reason to hang up.
        cause = Cause(kind=CauseKind.EXIT, text="", signature="")
        agent.link.send(nodes.Died(rank=1, incarnation=1, cause=cause, before_kill=False))
        agent.link.send(nodes.Gone())
        agent.heard.clear()
        await agent.register()
        (welcome,) = agent.heard
        assert isinstance(welcome, nodes.Welcome)
        assert (welcome.node, welcome.adopted) == (2_000_000, False)
        assert list(case.fleet.nodes) == [2_000_000]
        assert not agent.losses

    play(act, term=2)


@pytest.mark.parametrize("ended_by", ["loss", "dismissal"])
def test_a_node_that_this_coordinator_has_lost_is_not_taken_back(ended_by: str) -> None:
    async def act(case: Case) -> None:
        case.fleet.reconvenes = True
        agent = case.agent()
        await agent.register(report=report(5, term=1))
        await case.until_told("back")
        if ended_by == "loss":
            agent.link.close()
            await case.until_told("lost", 5)
        else:
            case.fleet.nodes[5].dismiss("another has taken its place")
            await until(lambda: bool(agent.losses))
        again = case.agent()
        await again.register(report=report(5, term=2))
        (displaced,) = again.heard
        assert isinstance(displaced, nodes.Displaced)
        assert "its connection was lost, and with it its place" in displaced.why
        assert len([told for told in case.fleet.told if told[0] == "back"]) == 1

    play(act, term=2)


@pytest.mark.parametrize(
    ("term", "reported", "says"),
    [
        (0, report(0), "a coordinator of term 0, and nothing is known of that one here"),
        (2, report(0, term=2), "a coordinator of term 2, and nothing is known of that one here"),
        (2, report(0, term=3), "a coordinator of term 3, and nothing is known of that one here"),
    ],
)
def test_an_agent_with_a_part_in_a_job_that_is_not_known_is_let_be_and_nothing_begins(
    monkeypatch: pytest.MonkeyPatch, term: int, reported: nodes.Report, says: str
) -> None:
    monkeypatch.setattr(remote, "_STRAY_S", 0.0)

    async def act(case: Case) -> None:
        case.fleet.reconvenes = term > 0
        agent = case.agent()
        await agent.say_who_it_is(report=reported)
        assert says in (await case.until_told("failed"))[1]
        await until(lambda: bool(agent.losses))
        assert "this is not its coordinator" in agent.losses[0]
        assert not agent.heard  # its workers are nobody's to end
        assert not case.fleet.nodes

    play(act, term=term)


@pytest.mark.parametrize("run_id", ["r", "other"])
def test_a_job_goes_on_beside_an_agent_that_is_none_of_its(run_id: str) -> None:
    async def act(case: Case) -> None:
        case.fleet.inhabited = run_id == "r"  # another run is no reason to begin nothing
        ours, stray = case.agent(), case.agent()
        await ours.register()
        theirs = report(0, run_id=run_id)  # the number of ours, too
        await stray.say_who_it_is(name="s", pid=9, report=theirs)
        note = await case.until_told("note")
        assert "agent s on host h is let be" in note[1]
        assert not any(told[0] in ("failed", "displaced", "lost") for told in case.fleet.told)

    play(act)


def test_one_without_a_slot_is_tried_before_it_is_taken_back() -> None:
    door = Offer(host="1.2.3.4", port=1, ticket=bytes(16))
    here, there = (
        nodes.Listens(door=door, network=network, any_port=2, any_ports=(2, 3)) for network in "ht"
    )

    async def act(case: Case) -> None:
        case.fleet.reconvenes = True
        agents = {number: case.agent() for number in (8, 5, 6)}
        reports = {}
        for number, agent in agents.items():
            slot, listens = (-1, there) if number == 8 else (number - 5, here)
            told = msgspec.structs.replace(report(number, term=1, slot=slot), listens=listens)
            reports[number] = told
            await agent.register(name=f"n{number}", pid=number, report=told)
        for number in (5, 6):
            await case.until_told("back", "h", "", reports[number])
        assert len(case.fleet.told) == 2
        for number, others in ((8, [5, 6]), (5, [8]), (6, [8])):
            agent = agents[number]
            await agent.until_heard(2)
            probe = agent.heard[1]
            assert isinstance(probe, nodes.Probe)
            assert sorted(probe.targets) == others
            agent.link.send(nodes.Probed(closed=()))
        await case.until_told("back", "h", "", reports[8])

    play(act, term=2, needed=2)


def test_one_that_comes_back_after_the_end_is_told_and_ends_in_peace() -> None:
    async def act(case: Case) -> None:
        case.fleet.ended.set_result(None)
        case.fleet.exit_code = 3
        agent = case.agent()
        all_came = asyncio.ensure_future(case.registry.all_came({5}))
        await agent.register(report=report(5, term=1))
        assert agent.heard == [nodes.Finish(terminate=False, wait_s=5.0, exit_code=3)]
        await asyncio.wait_for(all_came, 10)
        assert not case.fleet.nodes[5].gone.is_set()
        agent.link.send(nodes.Gone())
        await asyncio.wait_for(case.fleet.nodes[5].gone.wait(), 10)

    play(act, term=2)


def test_numbers_of_another_term_are_never_those_of_an_earlier_one() -> None:
    async def act(case: Case) -> None:
        case.fleet.reconvenes = True
        for pid, (name, given) in enumerate((("a", report(0)), ("b", None), ("c", None))):
            await case.agent().register(name=name, pid=pid, report=given)
        assert list(case.fleet.nodes) == [0, 1_000_000, 1_000_001]

    play(act, term=1)
