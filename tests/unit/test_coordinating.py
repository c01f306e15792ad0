"""A coordinator in its process: when it begins, takes over, leaves alone or ends a job."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.unit.netcases import SECRET, News, on_a_loop

from everstep.agent import identity
from everstep.agent.fleet import Fleet
from everstep.agent.remote import RunGoesOnError
from everstep.agent.zygote import ZygotePlan
from everstep.core.past import Past, recall
from everstep.errors import UserError
from everstep.launch import coordinating as coordinating_module
from everstep.launch.coordinating import (
    Coordinating,
    DeposedError,
    LeftError,
    _refuse_another_job,
    _script_digest,
    _unwritable,
)
from everstep.launch.job import started_fields
from everstep.launch.lease import TERM_FILE, InPlace, LeaseLost
from everstep.observe.journal import JournalWriter, read_journal
from everstep.observe.narrate import Narrator
from everstep.settings import RunSettings
from everstep.wire import nodes
from everstep.wire.messages import ScriptSpec
from everstep.wire.network import Link

PATIENCE_S = 60.0


class Shown:
    """A view that keeps what a person would read."""

    def __init__(self, news: News) -> None:
        self.said: list[str] = []
        self._news = news
        self._narrator = Narrator()

    def record(self, record: dict[str, Any]) -> None:
        self.said += self._narrator.tell(record)
        self._news.tell()

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        raise AssertionError("nothing runs")


@on_a_loop
async def test_it_says_once_for_whom_it_stands_by(tmp_path: Path) -> None:
    news = News()
    view = Shown(news)
    settings = RunSettings(
        script=ScriptSpec(target="train.py", module=False, args=()),
        local_nodes=2,
        run_id="one",
        log_dir=str(tmp_path),
    )
    (tmp_path / "one").mkdir()
    first = await InPlace(tmp_path / "one").acquire(0)
    coordinating = Coordinating(
        settings, view, ZygotePlan(), {}, port=0, resume=True, wait_s=PATIENCE_S
    )
    running = asyncio.ensure_future(coordinating.run())
    await news.until(lambda: view.said)
    coordinating.leave(signal.SIGTERM)
    with pytest.raises(LeftError):
        await running
    [line] = view.said
    assert line.startswith("note: this coordinator stands by: ")
    assert f"process {os.getpid()} " in line
    assert "(term 0)" in line
    # Who has it comes and goes in what is told, and is said once.
    coordinating._stand_by("ada has it")
    coordinating._stand_by("etcd is away")
    coordinating._stand_by("ada has it")
    assert len(view.said) == 3
    await first.release()


# ---------------------------------------------------------------- agents of a job, on loopback


class Agent:
    """One that reports its part in a job, to the coordinator of a run's directory."""

    def __init__(self, port: int) -> None:
        self.heard: list[nodes.ToNode] = []
        self.news = News()
        self.joined = asyncio.Event()
        self.losses: list[str] = []
        self.link: Link[nodes.ToNode] = Link(
            host="127.0.0.1",
            port=port,
            secret=SECRET,
            receives=nodes.ToNode,
            on_joined=self.joined.set,
            on_message=self._take,
            on_lost=self._lost,
            on_waiting=lambda _: None,
        )

    def _take(self, message: nodes.ToNode) -> None:
        self.heard.append(message)
        self.news.tell()

    def _lost(self, why: str) -> None:
        self.losses.append(why)
        self.news.tell()

    async def report(self, node: int, term: int = 0) -> None:
        await asyncio.wait_for(self.joined.wait(), PATIENCE_S)
        part = nodes.Report(
            run_id="one", term=term, node=node, slot=0, peers=(), members=(), ended=(), copies=()
        )
        self.link.send(
            nodes.Register(
                name=f"n{node}",
                host="h",
                address="127.0.0.1",
                domain="",
                pid=node,
                boot_id="b",
                versions=identity.versions(),
                report=part,
            )
        )


def made(folder: Path, *, wait_s: float = 0.0, resume: bool = True, **changes: Any) -> Coordinating:
    script = folder / "train.py"
    script.write_text("")
    known: dict[str, Any] = {"run_id": "one", "log_dir": str(folder), "local_nodes": 1, **changes}
    target = ScriptSpec(target=str(script), module=False, args=())
    environ = {"EVERSTEP_SECRET": SECRET.reveal()}
    return Coordinating(
        RunSettings(script=target, **known),
        Shown(News()),
        ZygotePlan(),
        environ,
        port=0,
        resume=resume,
        wait_s=wait_s,
    )


async def port_of(folder: Path) -> int:
    """Where the coordinator of the run listens, as soon as it does."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if (folder / "one" / TERM_FILE).exists() and (
                place := await InPlace(folder / "one").where()
            ):
                return place.port
            await asyncio.sleep(0.005)


def begun(folder: Path, *more: tuple[str, dict[str, Any]]) -> None:
    """The journal of a run in which node 0 has joined."""
    (folder / "one").mkdir()
    settings = made(folder)._settings
    fields = started_fields(settings, "2", "1", 29500, "d")
    events = [("coordinator_started", {"term": 0}), ("job_started", fields)]
    events += [("node_joined", {"node": 0, "host": "h", "domain": "h"}), *more]
    journal = JournalWriter(folder / "one" / "journal.jsonl", run_id="one", wall_time=0.0)
    for event, values in events:
        journal.write(event, values)
    journal.close()


def events_of(folder: Path) -> list[str]:
    return [record["event"] for record in read_journal(folder / "one" / "journal.jsonl")]


@on_a_loop
async def test_a_job_of_which_nothing_is_known_is_neither_begun_again_nor_ended(
    tmp_path: Path,
) -> None:
    coordinating = made(tmp_path)
    running = asyncio.ensure_future(coordinating.run())
    agent = Agent(await port_of(tmp_path))
    await agent.report(0)
    with pytest.raises(RunGoesOnError, match=r"agent n0 on host h.*nothing is known"):
        await running
    await agent.news.until(lambda: agent.losses)
    agent.link.close()
    assert agent.heard == []
    assert "job_ended" not in events_of(tmp_path)


@on_a_loop
async def test_nodes_that_have_not_heard_of_the_end_are_told_by_the_next_one(
    tmp_path: Path,
) -> None:
    end = {"exit_code": 143, "text": "asked to end by SIGTERM", "cause": None}
    begun(tmp_path, ("job_ended", end))
    coordinating = made(tmp_path)
    running = asyncio.ensure_future(coordinating.run())
    agent = Agent(await port_of(tmp_path))
    await agent.report(0)
    await agent.news.until(lambda: agent.heard)
    grace_s = coordinating._settings.grace_s
    agent.link.send(nodes.Gone())
    ended = await asyncio.wait_for(running, PATIENCE_S)
    agent.link.close()
    # To one that comes it is said at once, and to all when all have come.
    finish = nodes.Finish(terminate=True, wait_s=grace_s, exit_code=143)
    assert agent.heard in ([finish], [finish, finish])
    assert (ended.exit_code, ended.text) == (143, "asked to end by SIGTERM")
    assert coordinating.told_late
    assert events_of(tmp_path).count("job_ended") == 1


@on_a_loop
async def test_where_all_nodes_had_been_lost_nobody_is_waited_for(tmp_path: Path) -> None:
    lost = {"node": 0, "host": "h", "slot": 0, "ranks": [0], "text": "gone"}
    end = {"exit_code": 1, "text": "no node is left", "cause": None}
    begun(tmp_path, ("node_lost", lost), ("job_ended", end))
    coordinating = made(tmp_path, rejoin_timeout_s=1e6)
    ended = await asyncio.wait_for(coordinating.run(), PATIENCE_S)
    assert (ended.exit_code, coordinating.told_late) == (1, False)


@on_a_loop
@pytest.mark.parametrize("told", [[0], []])
async def test_nodes_that_have_been_told_are_not_waited_for(
    tmp_path: Path, told: list[int]
) -> None:
    end = {"exit_code": 0, "text": "", "cause": None}
    begun(tmp_path, ("job_ended", end), ("nodes_told", {"nodes": told}))
    coordinating = made(tmp_path, lease_s=600.0 if told else 0.1)
    await asyncio.wait_for(coordinating.run(), PATIENCE_S)
    view = coordinating._view
    assert isinstance(view, Shown)
    words = "1 node may not have heard of that, and can come back for 0.5 s"
    assert view.said == ([] if told else [f"note: this run is over already; {words}"])
    assert events_of(tmp_path)[-1] == "nodes_told"


@pytest.mark.parametrize(
    "changes",
    [
        {"nproc_per_node": 2, "local_nodes": 1},
        {"copies": "sync"},
        {"replicate_every": 7},
    ],
)
def test_a_job_that_is_laid_out_otherwise_is_another(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = RunSettings(
        script=ScriptSpec(target="t", module=False, args=()),
        **{"local_nodes": 2, "nproc_per_node": 1, "copies": "async", **changes},
    )
    before = RunSettings(script=settings.script, local_nodes=2, copies="async")
    fields = started_fields(before, "2", "1", 29500, "d") | {"args": []}
    past = Past(started=fields)
    (what,) = changes.keys() - {"local_nodes"}
    with pytest.raises(UserError, match=f"another job: its {what} is"):
        _refuse_another_job(settings, past, tmp_path)
    _refuse_another_job(before, past, tmp_path)


@on_a_loop
async def test_a_long_journal_does_not_keep_the_lease_from_being_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = {"exit_code": 0, "text": "", "cause": None}
    begun(tmp_path, ("job_ended", end))
    loop = asyncio.get_running_loop()
    read: list[int] = []

    def slow(records: Any) -> Past:
        # The loop goes on meanwhile, as what renews the lease must.
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE_S)
        read.append(1)
        past = recall(records)
        past.here.clear()
        return past

    monkeypatch.setattr(coordinating_module, "recall", slow)
    await asyncio.wait_for(made(tmp_path).run(), PATIENCE_S)
    assert len(read) == 2


class Elapsed:
    """A tenancy that ends when it is to say where it is."""

    term = 0

    def __init__(self) -> None:
        self.holds = True
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def publish(self, host: str, port: int) -> None:
        self.holds = False
        self.lost.set_result("it was not renewed in time")
        raise LeaseLost("the lease is lost")

    async def release(self) -> None:
        self.holds = False


@on_a_loop
async def test_one_that_loses_its_lease_while_it_says_where_it_is_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Of:
        async def acquire(self, *_: Any, **__: Any) -> Elapsed:
            return Elapsed()

    async def close(_: Fleet) -> None:
        raise AssertionError("nodes are told to end")

    monkeypatch.setattr(coordinating_module, "make_lease", lambda *_: Of())
    monkeypatch.setattr(Fleet, "close", close)
    with pytest.raises(DeposedError, match="it was not renewed in time"):
        await made(tmp_path).run()
    assert "job_ended" not in events_of(tmp_path)


@on_a_loop
@pytest.mark.parametrize("ours", [False, True])
async def test_an_order_to_end_waits_for_the_lease_where_the_job_is_ours(
    tmp_path: Path, ours: bool
) -> None:
    coordinating = made(tmp_path, wait_s=math.inf, resume=ours)
    coordinating.stop_asked(signal.SIGINT)
    assert coordinating._asked == ([signal.SIGINT] if ours else [])
    assert coordinating._cut.done() is not ours


@on_a_loop
async def test_a_lease_that_comes_with_the_order_to_leave_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenancies: list[Elapsed] = []
    asked = asyncio.Event()

    class Of:
        async def acquire(self, *_: Any, **__: Any) -> Elapsed:
            asked.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # it comes at this moment
                tenancies.append(Elapsed())
            return tenancies[0]

    monkeypatch.setattr(coordinating_module, "make_lease", lambda *_: Of())
    coordinating = made(tmp_path)
    running = asyncio.ensure_future(coordinating.run())
    await asyncio.wait_for(asked.wait(), PATIENCE_S)
    coordinating.leave(signal.SIGTERM)
    with pytest.raises(LeftError):
        await running
    assert not tenancies[0].holds


def test_the_script_of_a_job_is_the_one_with_which_it_began(tmp_path: Path) -> None:
    """It may be edited while the job runs: who has the new one can't take part."""
    script = tmp_path / "train.py"
    script.write_text("lr = 0.01\n")
    target = ScriptSpec(target=str(script), module=False, args=())
    first = _script_digest(None, target)
    script.write_text("lr = 0.02\n")
    assert _script_digest({"script_digest": first}, target) == first
    assert _script_digest(None, target) != first


def test_a_full_disk_is_said_with_the_path_and_what_to_do(tmp_path: Path) -> None:
    error = _unwritable(tmp_path / "one", OSError(errno.ENOSPC, "No space left on device"))
    assert str(error).startswith(f"{tmp_path}/one: the run's directory can't be written (No space")
    assert "Free room there" in str(error)
