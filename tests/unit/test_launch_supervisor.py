"""What a launcher does about its coordinator, which is one on paper here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.unit.netcases import SECRET, on_a_loop

from everstep.agent.zygote import ZygotePlan
from everstep.errors import EverstepError
from everstep.launch import supervisor
from everstep.launch.job import LEASE_LOST_EXIT_CODE
from everstep.launch.lease import InPlace
from everstep.launch.relay import Begin, Ended, News, Order, Raised, Recorded
from everstep.launch.supervisor import Supervisor
from everstep.observe.journal import JournalWriter, read_journal
from everstep.settings import RunSettings
from everstep.wire.messages import ScriptSpec

LEASE = "etcd://a"
LOST = Raised(text="the lease is lost", exit_code=LEASE_LOST_EXIT_CODE)


class Unseen:
    """A view that nobody looks at."""

    def record(self, record: dict[str, Any]) -> None:
        pass

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        pass


def made(folder: Path, **changes: Any) -> Supervisor:
    settings = RunSettings(
        script=ScriptSpec(target="train.py", module=False, args=()),
        run_id="one",
        log_dir=str(folder),
        coordinator="127.0.0.1:29400",
        **changes,
    )
    environ = {"EVERSTEP_SECRET": SECRET.reveal()}
    return Supervisor(settings, Unseen(), ZygotePlan(), environ)


def begun(folder: Path) -> Path:
    """The journal of a run that goes on, its last line half written."""
    (folder / "one").mkdir()
    path = folder / "one" / "journal.jsonl"
    JournalWriter(path, run_id="one", wall_time=0.0).close()
    with path.open("ab") as file:
        file.write(b'{"t":')
    return path


# ---------------------------------------------------------------- the end that nobody has written


@on_a_loop
async def test_a_journal_that_another_coordinator_writes_is_let_be(tmp_path: Path) -> None:
    path = begun(tmp_path)
    before = path.read_bytes()
    tenancy = await InPlace(tmp_path / "one").acquire(0)
    made(tmp_path)._close_journal(1, "it died")
    assert path.read_bytes() == before
    await tenancy.release()
    made(tmp_path, coordinator_lease=LEASE)._close_journal(1, "it died")
    assert path.read_bytes() == before


@on_a_loop
async def test_a_journal_of_nobody_gets_its_end_once(tmp_path: Path) -> None:
    path = begun(tmp_path)
    for _ in range(2):
        made(tmp_path)._close_journal(3, "it died")
    [_, ended] = read_journal(path)
    assert (ended["event"], ended["exit_code"], ended["text"]) == ("job_ended", 3, "it died")


# ---------------------------------------------------------------- lives of coordinators


class Lives:
    """Coordinators one after the other. `plan`: how each ends, a signal or its last word; `comes`:
    whether agents come to it."""

    def __init__(self, *plan: int | News, comes: bool = False) -> None:
        self.begun: list[Begin] = []
        self._plan = list(plan)
        self._comes = comes

    def __call__(self, environ: Mapping[str, str], on_news: Callable[[News], None]) -> Coordinator:
        how = self._plan.pop(0)
        if self._comes:
            record = {"event": "node_registered", "node": 0, "name": "a", "pid": 1}
            on_news(Recorded(record=record))
        return Coordinator(self, how, on_news)


class Coordinator:
    pid = 1
    last_words = ""

    def __init__(self, lives: Lives, how: int | News, on_news: Callable[[News], None]) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._lives, self._how, self._on_news = lives, how, on_news

    def send(self, order: Order) -> None:
        assert isinstance(order, Begin)
        self._lives.begun.append(order)
        if isinstance(self._how, int):
            self.ended.set_result(self._how)
        else:
            self._on_news(self._how)
            self.ended.set_result(0)

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        pass


class NoAgents:
    alive = 1

    def __init__(self, *_: Any) -> None:
        pass

    def start(self, count: int, host: str, port: int) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LocalAgents", NoAgents)
    monkeypatch.setattr(supervisor, "_BACKOFF_S", 0.0)


@on_a_loop
async def test_a_lease_that_is_lost_is_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(*[LOST] * 9, Ended(exit_code=0, text=""))
    monkeypatch.setattr(supervisor, "CoordinatorProcess", lives)
    result = await made(tmp_path, coordinator_lease=LEASE).run()
    assert result.exit_code == 0
    assert [begin.resume for begin in lives.begun] == [False] * 10


@on_a_loop
async def test_one_that_is_killed_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "CoordinatorProcess", Lives(*[-9] * 5))
    with pytest.raises(EverstepError, match="died 5 times"):
        await made(tmp_path).run()


@on_a_loop
@pytest.mark.parametrize(
    ("lease", "comes", "resume"),
    [("", False, True), (LEASE, False, False), (LEASE, True, True)],
)
async def test_the_next_one_goes_on_with_a_job_that_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease: str, comes: bool, resume: bool
) -> None:
    lives = Lives(-9, LOST, Ended(exit_code=0, text=""), comes=comes)
    monkeypatch.setattr(supervisor, "CoordinatorProcess", lives)
    await made(tmp_path, coordinator_lease=lease).run()
    assert lives.begun[1].resume is resume
    assert lives.begun[2].resume is False  # another one may have it


# ---------------------------------------------------------------- agents


@on_a_loop
async def test_an_agent_of_ours_is_not_taken_for_one_elsewhere_of_the_same_number(
    tmp_path: Path,
) -> None:
    launcher = made(tmp_path)
    for node, name in ((0, "local-0"), (1, "pod")):  # in containers all have number 7
        launcher._note({"event": "node_registered", "node": node, "name": name, "pid": 7})
    launcher._note({"event": "node_joined", "node": 0})
    launcher._agent_ended("local-0", 7, 1, "no room")  # a lost node, which the coordinator knows
    assert not launcher._timers
    launcher._agent_ended("pod", 7, 1, "no room")
    (timer,) = launcher._timers
    timer.cancel()
