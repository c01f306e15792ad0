"""`everstep ckpt` and loads over agents and an object store that are real."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.buckets import Bucket
from tests.integration.test_memory_agent import SECRET, Lab
from tests.unit import checkpoints
from tests.unit.checkpoints import DictStore, Draft, Made, draft

from everstep import cli
from everstep.tiers import names, values
from everstep.tiers.catalog import Origin
from everstep.tiers.find import Tier
from everstep.tiers.load import Opened, load
from everstep.tiers.memory.wire import VARIABLE
from everstep.tiers.open import open_store
from everstep.tiers.series import Series
from everstep.tiers.store import Store
from everstep.wire.secret import Secret

S = 30.0
KEY = Secret(SECRET, "the test").checkpoint_key()
FLOATS = 1_500_000  # two parts of 3 MB: large objects go other ways than small ones


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path / "shm")
    made.shm_dir.mkdir()
    try:
        yield made
    finally:
        made.close()


def made(step: int) -> Draft:
    data = bytes([step % 251, 1, 2, 3]) * FLOATS
    whole = Made(shape=(FLOATS,), data=data, boxes=checkpoints.rows((FLOATS,), 2))
    return draft(
        step,
        {"model.w": whole},
        {"epoch": values.encode(step, "epoch")},
        world=2,
        signed=True,
        block_bytes=1 << 20,
        origin=Origin(config={"everstep": {"memory_every": 10, "durable_every": 20}}),
    )


def put(store: Store, one: Draft) -> None:
    """Put it as the ranks of a training would."""
    held = DictStore()
    one.put(held, KEY)
    for key in sorted(held.objects, reverse=True):  # the commit last
        store.put(key, [memoryview(held.objects[key])], deadline_s=S)


def everything(opened: Opened) -> list[bytes]:
    return [opened.read(part.rank, 0, part.nbytes) for part in opened.checkpoint.parts]


def everstep(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def answer(*arguments: str, code: int = 0) -> Any:
    result = everstep(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.slow
def test_a_corrupt_copy_falls_to_another_hosts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.start("a")
    lab.start("b", "--peers", lab.where["a"])
    saved = made(10)
    with closing(lab.store("a")) as near, closing(lab.store("b")) as other:
        near.introduce([near.card(), other.card()])
        put(near, saved)
        assert near.notes() == []
        flip(lab.directory("a") / "objects" / saved.attempt.part(1, "safetensors"), 2_000_000)
        series = Series(near, "run", key=KEY, require_signature=True)
        result, receipt = load([Tier.memory(series)], everything)
    assert result == [data for _, data in saved.parts]
    assert {refusal.rank for refusal in receipt.refused} == {1}
    assert {part.where for part in receipt.parts if part.rank == 1} == {"memory of b"}
    monkeypatch.setenv(VARIABLE, str(lab.directory("a") / "socket"))
    monkeypatch.setenv("EVERSTEP_SECRET", SECRET)
    found = answer("ckpt", "verify", "--require-signature", "memory", code=1)
    [finding] = found["verdicts"][0]["findings"]
    assert (finding["kind"], finding["rank"]) == ("corrupt", 1)
    lab.end("a", signal.SIGKILL)
    lab.start("a", "--peers", lab.where["b"])
    assert answer("ckpt", "ls", "memory")["checkpoints"][0]["step"] == 10


@pytest.mark.slow
def test_the_commands_see_memory_and_a_bucket(
    lab: Lab, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "EVERSTEP")):
            monkeypatch.delenv(name)
    for name, value in bucket.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("EVERSTEP_SECRET", SECRET)
    lab.start("a")
    monkeypatch.setenv(VARIABLE, str(lab.directory("a") / "socket"))
    place = f"s3://everstep/{tmp_path.name}"
    with closing(lab.store("a", copies=1)) as near, closing(open_store(place)) as far:
        use_commands(near, far, place, tmp_path / "out")


def use_commands(near: Store, far: Store, place: str, out: Path) -> None:
    saved = {step: made(step) for step in (10, 20, 30, 40, 50)}
    for step in (20, 40):
        put(far, saved[step])
    for step in (40, 50):
        put(near, saved[step])

    listed = answer("ckpt", "ls", "memory", place)["checkpoints"]
    assert [(one["step"], [kept["tier"] for kept in one["kept"]]) for one in listed] == [
        (20, ["durable"]),
        (40, ["memory", "durable"]),
        (50, ["memory"]),
    ]
    assert answer("ckpt", "show", "memory", place)["checkpoint"]["step"] == 50
    assert len(answer("ckpt", "verify", "memory", place)["verdicts"]) == 4
    assert answer("ckpt", "diff", "memory#run/40", f"{place}#run/40")["unread"] == 1
    apart = answer("ckpt", "diff", "memory#run/50", f"{place}#run/40", code=1)
    assert apart["nbytes"] == 4 * FLOATS

    remarks = answer("doctor", "--tiers", "--loss-budget", "20", place)["remarks"]
    assert [one["kind"] for one in remarks] == ["unseen"]  # who else has rights to a bucket
    assert answer("doctor", "--tiers", "--loss-budget", "5", place, code=1)

    assert answer("ckpt", "export", "memory", place, str(out))["step"] == 50
    assert answer("ckpt", "import", str(out), f"{place}#copy/1")["tensors"] == 1
    torn = names.Attempt(series="run", step=60, name="0" * 16).part(0, "json")
    far.put(torn, [memoryview(b"{}")], deadline_s=S)
    assert [one["step"] for one in answer("ckpt", "ls", f"{place}#run")["attempts"]] == [60]
    pruned = answer("ckpt", "prune", "--keep", "1", "--older-than-s", "0", f"{place}#run")
    assert pruned["run"]["steps"] == [20]
    assert [one["step"] for one in answer("ckpt", "ls", f"{place}#run")["checkpoints"]] == [40]
