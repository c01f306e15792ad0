"""Saves into the memory of hosts, and from there to the destination; hosts may be lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.unit import fake_dcp
from tests.unit.memorydesks import Hosts
from torch.distributed.tensor import Shard

from everstep.errors import StateLost
from everstep.tiers import newest
from everstep.tiers.find import decide
from everstep.tiers.load import load
from everstep.tiers.series import SaveFailed
from everstep.tiers.settings import TierSettings
from everstep.tiers.stack import Stack
from everstep.tiers.store import Full, Store

PATIENCE_S = 30.0
HOSTS = ("one", "two")


class HostStack(Stack):
    """The tiers as a rank on one of the test's hosts has them."""

    def __init__(self, settings: TierSettings, hosts: Hosts, name: str) -> None:
        super().__init__(settings, {})
        self._hosts, self._name = hosts, name

    def _memory(self) -> Store:
        return self._hosts.store(
            self._name, copies=self.settings.copies, retained=self.settings.memory_retained
        )


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    for name in HOSTS:
        made.start(name)
    yield made
    made.close()


@pytest.fixture
def ranks(hosts: Hosts) -> Iterator[Callable[[TierSettings], list[fake_dcp.Writer]]]:
    made: list[fake_dcp.Writer] = []

    def make(settings: TierSettings) -> list[fake_dcp.Writer]:
        writers = [fake_dcp.Writer(settings, HostStack(settings, hosts, name)) for name in HOSTS]
        made.extend(writers)
        return writers

    yield make
    for writer in made:
        writer.own.close(PATIENCE_S)


def save(writers: list[fake_dcp.Writer], step: int) -> None:
    whole = torch.full((6, 3), float(step))
    states = [
        {"w": fake_dcp.shard_of(whole, rank, (2,), [Shard(0)]), "step": step} for rank in range(2)
    ]
    fake_dcp.save(states, writers, step)
    for writer in writers:
        assert writer.wait(PATIENCE_S)
        writer.check()


def value_and_tier(stack: Stack, rank: int = 1) -> tuple[float, str]:
    """What is read of the newest checkpoint's rank, and from which tier."""

    def read(opened: object) -> float:
        (span,) = opened.layout(rank).spans()  # type: ignore[attr-defined]
        data = bytearray(opened.read(rank, span[1], span[2]))  # type: ignore[attr-defined]
        return float(torch.frombuffer(data, dtype=torch.float32)[0])

    value, receipt = load(stack.tiers(), read)
    return value, receipt.tier


def test_a_host_that_is_lost_takes_no_checkpoint_along(
    hosts: Hosts, ranks: Callable[[TierSettings], list[fake_dcp.Writer]]
) -> None:
    settings = TierSettings(series="run", memory_every=1)
    writers = ranks(settings)
    for step in (1, 2, 3):
        save(writers, step)
    hosts.stop("two")
    stack = HostStack(settings, hosts, "one")
    assert decide(stack.tiers(), deadline_s=PATIENCE_S).checkpoint.step == 3
    assert value_and_tier(stack) == (3.0, "memory")
    assert stack.series("memory").steps()[-2:] == [2, 3]
    stack.close()


def test_one_copy_serves_both_tiers_and_the_nearer_one_answers(
    hosts: Hosts, tmp_path: Path, ranks: Callable[[TierSettings], list[fake_dcp.Writer]]
) -> None:
    settings = TierSettings(
        series="run", destination=str(tmp_path / "far"), memory_every=1, durable_every=2
    )
    writers = ranks(settings)
    for step in (1, 2):
        save(writers, step)
    stack = HostStack(settings, hosts, "two")
    assert stack.series("durable").steps() == [2]
    near, far = (stack.series(tier).read(2) for tier in ("memory", "durable"))
    assert (near.attempt, near.parts) == (far.attempt, far.parts)
    assert value_and_tier(stack) == (2.0, "memory")
    stack.close()
    for name in HOSTS:
        hosts.stop(name)
    alone = Stack(TierSettings(series="run", destination=str(tmp_path / "far")), {})
    assert value_and_tier(alone) == (2.0, "durable")
    alone.close()


def own_threads() -> list[str]:
    """Of this process; the desks' pools, which grow as they are used, are others' elsewhere."""
    every = (thread.name for thread in threading.enumerate())
    return sorted(name for name in every if not name.startswith("everstep-tier"))


def test_many_saves_leave_nothing_behind(hosts: Hosts, tmp_path: Path) -> None:
    """200 saves of one rank into both tiers: no file, no descriptor and no thread is left."""
    settings = TierSettings(
        series="run",
        destination=str(tmp_path / "far"),
        memory_every=1,
        durable_every=10,
        copies=1,
    )
    before: set[str] = set()
    threads: list[str] = []
    writer = fake_dcp.Writer(settings, HostStack(settings, hosts, "one"))
    for step in range(1, 201):
        writer.save({"w": torch.full((500,), float(step)), "step": step}, step)
        assert writer.wait(PATIENCE_S)
        writer.check()
        if step == 20:
            before, threads = set(os.listdir("/proc/self/fd")), own_threads()
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 2  # an area ahead, at most
    assert own_threads() == threads
    assert writer.own.committed == 200 + 20
    writer.own.close(PATIENCE_S)
    hosts.stop("one")
    assert not [p for p in (tmp_path / "shm").glob("*one*/**/*") if p.is_file()]


def test_saves_leave_nothing_in_memory_but_what_is_retained(
    hosts: Hosts, tmp_path: Path, ranks: Callable[[TierSettings], list[fake_dcp.Writer]]
) -> None:
    settings = TierSettings(series="run", memory_every=1, memory_retained=2)
    writers = ranks(settings)
    for step in range(1, 4):
        save(writers, step)
    few = sum(1 for path in (tmp_path / "shm").rglob("*") if path.is_file())
    for step in range(4, 20):
        save(writers, step)
    many = sum(1 for path in (tmp_path / "shm").rglob("*") if path.is_file())
    assert many <= few + 4  # a reservation ahead, a commit not yet swept
    for writer in writers:
        writer.own.close(PATIENCE_S)
    for name in HOSTS:
        hosts.stop(name)
    assert not [path for path in (tmp_path / "shm").rglob("*") if path.is_file()]


def test_a_load_makes_hosts_known_to_one_that_has_begun_anew(
    hosts: Hosts,
    ranks: Callable[[TierSettings], list[fake_dcp.Writer]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it does not know of would seem lost, and be set aside."""
    settings = TierSettings(series="run", memory_every=1, copies=1)
    writers = ranks(settings)
    save(writers, 1)
    for writer in writers:
        writer.own.close(PATIENCE_S)
    hosts.stop("one", keep=True)
    hosts.start("one")
    stacks = [HostStack(settings, hosts, name) for name in HOSTS]
    with pytest.raises(StateLost, match=r"no tier has the parts of ranks \[1\] whole"):
        decide(stacks[0].tiers(), deadline_s=PATIENCE_S)
    cards = [stack.card() for stack in stacks]
    monkeypatch.setattr(newest, "Stack", lambda _: HostStack(settings, hosts, "one"))
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    gathered = {cards[0]: cards}
    monkeypatch.setattr(
        dist,
        "all_gather_object",
        lambda into, mine, group: into.__setitem__(slice(None), gathered[mine]),
    )
    newest._introduce(settings, None)
    assert decide(stacks[0].tiers(), deadline_s=PATIENCE_S).checkpoint.step == 1
    for stack in stacks:
        stack.close()


def test_a_full_memory_takes_nothing_from_the_destination(
    hosts: Hosts,
    tmp_path: Path,
    ranks: Callable[[TierSettings], list[fake_dcp.Writer]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = TierSettings(
        series="run", destination=str(tmp_path / "far"), memory_every=1, durable_every=1
    )
    writers = ranks(settings)

    def full(*args: object, **more: object) -> None:
        raise Full("all of it is taken")

    monkeypatch.setattr(writers[1].own.stack.memory(), "reserve", full)
    states = [{"w": fake_dcp.shard_of(torch.ones(4), r, (2,), [Shard(0)])} for r in range(2)]
    fake_dcp.save(states, writers, 1)
    for writer in writers:
        assert writer.wait(PATIENCE_S)
        with pytest.raises(SaveFailed, match=r"memory tier failed \(rank 1\).*it is taken"):
            writer.check()
    stack = HostStack(settings, hosts, "one")
    assert (stack.series("memory").steps(), stack.series("durable").steps()) == ([], [1])
    stack.close()
