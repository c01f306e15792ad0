"""What is wrong with how tiers are used, said before it costs something."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit.checkpoints import KEY, DictStore, Made, draft

from everstep import cli
from everstep.tiers import doctor
from everstep.tiers.catalog import Origin
from everstep.tiers.doctor import cadence, meant_by
from everstep.tiers.places import Place, Places
from everstep.tiers.store import Denied, Entry, StoreError

NOW_S = 1e9
NO_AGENT = "no agent runs here"


def saved(store: DictStore, *steps: int, every: int | None = None, signed: bool = True) -> None:
    config: dict[str, Any] = {"everstep": {"memory_every": every}} if every else {}
    for step in steps:
        made = draft(
            step,
            {"w": Made(shape=(2,), data=bytes(8))},
            signed=signed,
            origin=Origin(config=config),
        )
        made.put(store, KEY if signed else None)


def remarks(
    near: DictStore | None,
    far: DictStore | None,
    *,
    loss_budget: int | None = None,
    memory_error: str = "",
) -> list[tuple[str, str]]:
    stores = [("memory", near), ("durable", far)]
    places = Places(
        places=tuple(Place(tier=tier, store=store) for tier, store in stores if store is not None),
        series=None,
        step=None,
        key=KEY,
        require_signature=False,
    )
    found = doctor.examine(places, memory_error=memory_error, loss_budget=loss_budget, now_s=NOW_S)
    return [(one.kind, one.what) for one in found]


@pytest.fixture
def far(tmp_path: Path) -> DictStore:
    tmp_path.chmod(0o700)
    return DictStore(str(tmp_path))


def said(found: list[tuple[str, str]], kind: str, *words: str) -> bool:
    return any(one == kind and all(word in what for word in words) for one, what in found)


def test_all_is_well(far: DictStore) -> None:
    near = DictStore("near")
    saved(near, 10, 20, 30, 40)
    saved(far, 20, 40)
    assert remarks(near, far, loss_budget=20) == []


def test_an_agent_that_nobody_saves_to(far: DictStore) -> None:
    saved(far, 20, 40)
    assert said(remarks(DictStore("near"), far), "problem", "nobody saves to it")


def test_saves_to_memory_that_nobody_keeps(far: DictStore) -> None:
    saved(far, 20, 40, every=5)
    found = remarks(None, far, memory_error=NO_AGENT)
    assert said(found, "problem", "every 5 steps", NO_AGENT)
    assert not said(remarks(None, DictStore(far.where), memory_error=NO_AGENT), "problem")


def test_saves_that_no_longer_reach_memory(far: DictStore) -> None:
    near = DictStore("near")
    saved(near, 10)
    saved(far, 20, 40)
    assert said(remarks(near, far), "problem", "no longer reach")


def test_a_cadence_longer_than_the_budget(far: DictStore) -> None:
    saved(far, 100, 200, 300)
    found = remarks(None, far, loss_budget=50, memory_error=NO_AGENT)
    assert said(found, "problem", "every 100 steps", "durable_every to 50")
    assert remarks(None, far, loss_budget=100, memory_error=NO_AGENT) == []
    assert said(remarks(None, far, memory_error=NO_AGENT), "note", "durable every 100")


def test_uploads_that_lag(far: DictStore) -> None:
    near = DictStore("near")
    saved(near, 500)
    saved(far, 100, 110)
    assert said(remarks(near, far, loss_budget=50), "problem", "390 steps behind")


def test_nothing_durable(far: DictStore) -> None:
    near = DictStore("near")
    saved(near, 10)
    assert said(remarks(near, far), "problem", "loses all")
    assert said(remarks(near, None), "note", "no destination")


def test_one_checkpoint_shows_no_cadence(far: DictStore) -> None:
    saved(far, 10)
    found = remarks(None, far, loss_budget=5, memory_error=NO_AGENT)
    assert said(found, "unseen", "there is only one")


def test_what_is_not_signed_not_whole_or_left_behind(far: DictStore) -> None:
    saved(far, 10, 20, signed=False)
    assert said(remarks(None, far), "note", "not signed")
    [part] = [key for key in far.objects if "0000000020/" in key and key.endswith("safetensors")]
    del far.objects[part]
    assert said(remarks(None, far), "problem", "step 20, is not whole")
    del far.objects["run/commits/0000000020.json"]
    assert said(remarks(None, far), "note", "everstep ckpt prune")


@pytest.mark.parametrize(
    ("mode", "kind", "word"),
    [
        (0o777, "problem", "can write"),
        (0o1777, "problem", "sticky"),
        (0o755, "note", "can read"),
        (0o770, "note", "the group"),
    ],
)
def test_a_directory_that_is_open_to_others(
    far: DictStore, mode: int, kind: str, word: str
) -> None:
    saved(far, 10)
    Path(far.where).chmod(mode)
    assert said(remarks(None, far), kind, word)


def test_a_directory_that_cant_be_looked_at() -> None:
    far = DictStore("/no/such/place")
    saved(far, 10)
    assert said(remarks(None, far), "unseen", "/no/such/place")


@pytest.mark.parametrize(
    ("answer", "kind", "word"),
    [
        (None, "problem", "anybody can read"),
        (Denied("403"), "unseen", "refuses one who shows no credentials"),
        (StoreError("no route"), "unseen", "no route"),
    ],
)
def test_a_bucket_is_asked_without_credentials(
    monkeypatch: pytest.MonkeyPatch, answer: StoreError | None, kind: str, word: str
) -> None:
    asked = []

    class Anonymous(DictStore):
        def list(self, prefix: str, *, deadline_s: float) -> Iterator[Entry]:
            if answer is not None:
                raise answer
            return iter(())

    def open_bucket(url: str, *, config: dict[str, Any]) -> DictStore:
        asked.append((url, config))
        return Anonymous(url)

    fake = ModuleType("everstep.tiers.objects")
    fake.open_bucket = open_bucket  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    far = DictStore("s3://bucket/prefix")
    saved(far, 10)
    assert said(remarks(None, far), kind, word)
    assert asked == [("s3://bucket/prefix", {"skip_signature": True})]


@pytest.mark.parametrize(
    ("steps", "every"), [([], None), ([7], None), ([10, 20], 10), ([10, 20, 30, 75], 10)]
)
def test_the_usual_cadence(steps: list[int], every: int | None) -> None:
    assert cadence(steps) == every


@pytest.mark.parametrize("config", [{}, {"everstep": 3}, {"everstep": {"memory_every": "x"}}])
def test_a_record_need_not_say_how_it_was_meant(config: dict[str, Any]) -> None:
    assert meant_by(config).memory_every is None


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("EVERSTEP"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("everstep.tiers.places.memory_error", lambda: NO_AGENT)
    place = tmp_path / "far"
    store = DictStore()
    saved(store, 10, 20, signed=False)
    for key, data in store.objects.items():
        (place / key).parent.mkdir(parents=True, exist_ok=True)
        (place / key).write_bytes(data)
    place.chmod(0o777)
    result = CliRunner().invoke(cli.main, ["doctor", "--tiers", str(place)])
    assert (result.exit_code, "problem: every user" in result.stdout) == (1, True)
    place.chmod(0o700)
    result = CliRunner().invoke(cli.main, ["doctor", "--tiers", "--json", str(place)])
    assert result.exit_code == 0
    assert {one["kind"] for one in json.loads(result.stdout)["remarks"]} == {"note"}
    assert CliRunner().invoke(cli.main, ["doctor", str(place)]).exit_code == 2
