"""A tenure without its coordinator: what it reports, however much it is, on which clock, and what
does not end it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from tests.unit.netcases import on_a_loop
from tests.unit.test_agent_memoir import commit, spec

from everstep.agent import clocks
from everstep.agent.agent import _Agent
from everstep.agent.neighbours import Neighbours
from everstep.agent.node import Node
from everstep.agent.peering import Home, Peering
from everstep.agent.tenure import Tenure
from everstep.agent.terms import AgentSettings, Where
from everstep.errors import TransientError, UserError
from everstep.types import Cause, CauseKind, HeldCopy
from everstep.wire import messages as m
from everstep.wire import nodes
from everstep.wire.network import Link
from everstep.wire.secret import make_secret

SETTINGS = nodes.NodeSettings(
    run_id="r",
    script=m.ScriptSpec(target="x.py", module=False, args=()),
    hash_seed="1",
    watch=False,
    stopped_timeout_s=1.0,
    hang_timeout_s=1.0,
    first_step_timeout_s=1.0,
    section_timeout_s=1.0,
    runner="a:b",
    preload=(),
)
EXITED = Cause(kind=CauseKind.EXIT, text="exit", at_s=5.0)


class Paper:
    """The link and the neighbours of a tenure, and what its worker was told. Each message is a
    large one."""

    host = "127.0.0.1"
    port = 1

    def __init__(self) -> None:
        self.sent: list[nodes.FromNode] = []
        self.told: list[tuple[int, int, m.ToWorker]] = []
        self.unread_bytes = 0

    def send(self, message: nodes.FromNode) -> bool:
        self.sent.append(message)
        self.unread_bytes += 20 << 20
        return True

    def leave(self, why: str) -> None:
        raise AssertionError(why)

    def begin(self, node: int) -> None: ...

    def peers(self, order: nodes.Peers) -> None: ...


class NodeOnPaper:
    """What a tenure uses of its node here."""

    def __init__(self, paper: Paper) -> None:
        self._paper = paper
        self.orders: list[nodes.CopyOrder] = []

    def copy_order(self, order: nodes.CopyOrder) -> None:
        self.orders.append(order)

    def send(self, rank: int, incarnation: int, message: m.ToWorker) -> None:
        self._paper.told.append((rank, incarnation, message))

    def launch(self, *_: Any) -> None: ...

    def dismiss(self, why: str) -> None: ...

    def hurry(self) -> None: ...

    def copies_held(self) -> tuple[HeldCopy, ...]:
        return ()


def settings(folder: Path, where: Where | None = None) -> AgentSettings:
    return AgentSettings(
        coordinator=("", 0),
        where=where,
        name="ada",
        host="ada",
        domain="",
        interface="",
        ports=range(1),
        log_dir=folder,
        shm_dir=folder,
        join_timeout_s=1.0,
        coordinator_timeout_s=60.0,
        grace_s=1.0,
    )


def begun(paper: Paper, folder: Path, said: list[str] | None = None) -> Tenure:
    """A tenure that has joined as node 7 and has one worker, rank 0. `said`: to whoever started
    it."""
    told = [] if said is None else said
    tenure = Tenure(
        dataclasses.replace(settings(folder), say=told.append),
        {},
        cast(Link[nodes.ToNode], paper),
        cast(Neighbours, paper),
        bytes(32),
    )
    home = Home(
        send=lambda *_: None, obey=lambda _: None, tell=lambda _: None, note=lambda *_: None
    )
    tenure._node = cast(Node, NodeOnPaper(paper))
    tenure._script_digest, tenure._number = "d", 7
    tenure.peering = Peering(cast(Neighbours, paper), 7, home)
    tenure.take(nodes.Launch(spec=spec(0), environment={}, delay_s=0.0))
    tenure.take(nodes.Tell(to=((0, 1),), message=m.Go()))
    return tenure


@on_a_loop
async def test_a_person_is_told_what_becomes_of_the_node(paper: Paper, tmp_path: Path) -> None:
    said: list[str] = []
    tenure = begun(paper, tmp_path, said)
    assert said == ["node 7 holds slot 0: ranks 0, 1"]
    tenure.take(nodes.Launch(spec=spec(1), environment={}, delay_s=0.0))
    tenure.lost("it broke")
    tenure.take(nodes.Displaced(why="too late"))
    assert said[1:] == [
        "the coordinator is gone (it broke); the workers go on, and it, or another, is awaited "
        "for 60 s",
        "the job has gone on without this node (too late), which joins anew",
    ]


@on_a_loop
async def test_a_person_is_told_the_end_once(paper: Paper, tmp_path: Path) -> None:
    said: list[str] = []
    tenure = begun(paper, tmp_path, said)
    for wait_s in (1.0, 0.0):
        tenure.take(nodes.Finish(terminate=False, wait_s=wait_s, exit_code=3))
    assert said[1:] == ["the job is over, with exit code 3"]


@pytest.fixture
def paper() -> Paper:
    return Paper()


def rest(tenure: Tenure, paper: Paper) -> list[nodes.FromNode]:
    """All that is sent, read as it comes."""
    while True:
        before = len(paper.sent)
        paper.unread_bytes = 0
        tenure.read()
        if len(paper.sent) == before:
            return paper.sent


@on_a_loop
async def test_a_report_goes_out_in_parts_and_what_is_said_meanwhile_behind_it(
    paper: Paper, tmp_path: Path
) -> None:
    tenure = begun(paper, tmp_path)
    for step in (1, 2, 3):
        tenure.said(0, 1, m.Capsule(step=step, payload=bytes(10)))
        tenure.said(0, 1, commit(step))
    tenure.lost("why")
    paper.sent.clear()
    paper.unread_bytes = 0
    tenure.found()
    assert len(paper.sent) == 2  # as much as the window holds
    tenure.said(0, 1, commit(4))
    tenure.output(0, 1, "stdout", "it is in the log")
    assert len(paper.sent) == 2
    *parts, register, late = rest(tenure, paper)
    assert {type(part) for part in parts} == {nodes.Keeps, nodes.Unwritten}
    assert isinstance(register, nodes.Register)
    assert register.report is not None
    assert [member.step for member in register.report.members] == [3]
    assert isinstance(late, nodes.Said)
    assert late.message == commit(4)
    kept = [part.message for part in parts if isinstance(part, nodes.Keeps)]
    assert [each.step for each in kept if isinstance(each, m.Capsule)] == [1, 2, 3]
    unwritten = [said.message for p in parts if isinstance(p, nodes.Unwritten) for said in p.said]
    assert unwritten == [commit(1), commit(2), commit(3)]
    tenure._end_absence()


@on_a_loop
async def test_a_report_that_was_cut_off_is_made_anew(paper: Paper, tmp_path: Path) -> None:
    tenure = begun(paper, tmp_path)
    for step in (1, 2, 3):
        tenure.said(0, 1, m.Capsule(step=step, payload=bytes(10)))
    tenure.lost("why")
    tenure.found()
    tenure.lost("why")
    paper.sent.clear()
    tenure.said(0, 1, m.Capsule(step=4, payload=bytes(10)))
    paper.sent.clear()
    tenure.found()
    *parts, register = rest(tenure, paper)
    kept = [part.message for part in parts if isinstance(part, nodes.Keeps)]
    assert [each.step for each in kept if isinstance(each, m.Capsule)] == [1, 2, 3, 4]
    assert isinstance(register, nodes.Register)
    tenure._end_absence()


@on_a_loop
async def test_what_is_kept_of_lost_ranks_is_told_one_by_one(paper: Paper, tmp_path: Path) -> None:
    tenure = begun(paper, tmp_path)
    for step in (1, 2):
        tenure.said(0, 1, m.Capsule(step=step, payload=bytes(10)))
    paper.sent.clear()
    paper.unread_bytes = 0
    tenure.take(nodes.Reclaim(turn=4, ranks=(0, 9)))
    *parts, answer = rest(tenure, paper)
    assert answer == nodes.Reclaimed(turn=4)
    assert {type(part) for part in parts} == {nodes.Keeps}
    assert len(parts) == 3  # and the tape


@on_a_loop
async def test_what_happened_is_told_on_the_clock_of_who_is_told(
    paper: Paper, tmp_path: Path
) -> None:
    tenure = begun(paper, tmp_path)
    tenure._offset_s = 1000.0  # of the coordinator that is lost
    tenure.said(0, 1, m.Fault(generation=0, step=1, cause=EXITED))
    said = paper.sent[-1]
    assert isinstance(said, nodes.Said)
    assert isinstance(said.message, m.Fault)
    assert said.message.cause.at_s == 1005.0
    tenure.lost("why")
    tenure.died(0, 1, EXITED, before_kill=True)
    paper.sent.clear()
    tenure.found()
    register = rest(tenure, paper)[-1]
    assert isinstance(register, nodes.Register)
    assert register.report is not None
    assert [died.cause.at_s for died in register.report.ended] == [5.0]
    assert register.clock_s == tenure._asked_s > 0
    tenure._end_absence()


@on_a_loop
async def test_a_failure_is_told_again_on_the_clock_of_who_adopts_it(
    paper: Paper, tmp_path: Path
) -> None:
    tenure = begun(paper, tmp_path)
    tenure.said(0, 1, m.Fault(generation=0, step=1, cause=EXITED))
    tenure.lost("why")
    tenure.found()
    rest(tenure, paper).clear()
    theirs = nodes.Welcome(
        node=7,
        term=1,
        adopted=True,
        settings=SETTINGS,
        clock_s=tenure._asked_s + 1e6,
        boot_id=clocks.boot_id() + "other",
    )
    tenure.take(theirs)
    (said,) = rest(tenure, paper)
    assert isinstance(said, nodes.Said)
    assert isinstance(said.message, m.Fault)
    assert said.message.cause.at_s == pytest.approx(5.0 + 1e6, abs=1000)
    node = cast(NodeOnPaper, tenure._node)
    assert node.orders == [nodes.Judged(keep=())], "nobody will judge what it has found"


class Away:
    """A tenure for an agent. `absent`: it has a part, and no coordinator."""

    def __init__(self, absent: bool) -> None:
        self.absent = absent


@pytest.mark.parametrize(
    ("tenure", "error"), [(None, UserError), (False, UserError), (True, TransientError)]
)
@on_a_loop
async def test_who_may_not_ask_for_its_coordinator_goes_on_while_its_workers_do(
    tenure: bool | None, error: type[Exception], tmp_path: Path
) -> None:
    async def where() -> tuple[str, int, int] | None:
        raise UserError("permission denied")

    agent = _Agent(settings(tmp_path, where), make_secret(), {})
    agent._tenure = None if tenure is None else cast(Tenure, Away(tenure))
    with pytest.raises(error, match="permission denied"):
        await agent._find()


class LinkOnPaper:
    def __init__(self) -> None:
        self.left: list[str] = []

    def leave(self, why: str) -> None:
        self.left.append(why)

    def close(self) -> None: ...


@pytest.mark.parametrize("what", [nodes.Displaced(why="w", term=1), nodes.Refuse(text="t", term=1)])
@on_a_loop
async def test_a_coordinator_that_has_been_replaced_is_not_obeyed(
    what: nodes.ToNode, tmp_path: Path
) -> None:
    taken: list[nodes.ToNode] = []

    class Taking(Away):
        def take(self, message: nodes.ToNode) -> None:
            taken.append(message)

    agent, link = _Agent(settings(tmp_path), make_secret(), {}), LinkOnPaper()
    agent._tenure, agent._link = cast(Tenure, Taking(True)), cast(Link[nodes.ToNode], link)
    agent._newest_term = 2
    agent._take(what)
    assert link.left == ["term 1 has ended: that of 2 has begun"]
    assert not taken
    newer = msgspec.structs.replace(what, term=3)
    agent._take(newer)
    assert taken == [newer]
    assert agent._newest_term == 3
