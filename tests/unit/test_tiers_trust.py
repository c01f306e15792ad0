"""Whoever can write to a store can make no reader run code, take memory for what is not there, or
leave the store's root."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit import checkpoints
from tests.unit.checkpoints import DictStore, Draft, Made, draft

from everstep.errors import EverstepError, StateLost
from everstep.tiers import huggingface, look, signing, values
from everstep.tiers.diff import compare
from everstep.tiers.files import FileStore
from everstep.tiers.load import Opened, load
from everstep.tiers.places import Place, Places
from everstep.tiers.slabs import Reading
from everstep.tiers.store import Refused, StoreError

COMMIT = "run/commits/0000000007.json"
_RUNS = {
    "compile",
    "exec",
    "import",
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "ctypes.dlopen",
    "socket.connect",
    "marshal.loads",
}
_heard: list[tuple[str, tuple[Any, ...]]] | None = None


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _heard is not None and (event in _RUNS or event == "open"):
        _heard.append((event, arguments))


sys.addaudithook(_hear)  # it stays; it hears only while `watched` says so


@contextmanager
def watched(root: Path) -> Iterator[None]:
    """Nothing is run meanwhile, nothing opened outside of `root`, nothing written."""
    global _heard
    _heard = []
    try:
        yield
    finally:
        heard, _heard = _heard, None
    ran = [event for event, _ in heard if event != "open"]
    assert ran == []
    for _, (path, _, flags) in heard:
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), path
        assert not Path(path).is_absolute() or Path(path).is_relative_to(root), path
        assert ".." not in Path(path).parts


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def good() -> Draft:
    data = bytes(range(240))
    made = Made(shape=(6, 10), data=data, boxes=checkpoints.rows((6, 10), 2))
    return draft(7, {"w": made}, {"epoch": values.encode(3, "epoch")}, world=2)


def lay(root: Path, made: Draft) -> Draft:
    store = DictStore()
    made.put(store)
    for key, data in store.objects.items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(data)
    return made


def places(root: Path) -> Places:
    place = Place(tier="durable", store=FileStore(root))
    return Places(places=(place,), series=None, step=None, key=None, require_signature=False)


def everything(opened: Opened) -> dict[str, bytes]:
    reading = Reading(opened)
    for value in opened.checkpoint.values.values():
        values.decode(value)
    compare(reading, reading)
    return {
        name: b"".join(area for _, area in reading.slabs(name))
        for name in opened.checkpoint.tensors
    }


def read_all(root: Path) -> list[str]:
    """Read a store in every way; why it was refused, for each."""
    here = places(root)
    refusals = []
    try:
        load(here.tiers("run"), everything)
    except (StoreError, StateLost) as error:
        refusals.append(str(error))
    try:
        listed, _ = look.survey(here)
        refusals += [kept.problem for one in listed for kept in one.kept if kept.problem]
    except StoreError as error:
        refusals.append(str(error))
    verdict = look.verify(here.places[0], here.reader(here.places[0], "run"), 7)
    return refusals + [finding.why for finding in verdict.findings]


@pytest.fixture(autouse=True)
def warm(tmp_path: Path) -> None:
    """All that is imported late is imported, NumPy for its numbers too."""
    values.decode(msgspec.msgpack.encode(["numpy", "<f8", bytes(8)]))
    lay(tmp_path / "good", good())
    assert read_all(tmp_path / "good") == []
    (tmp_path / "good" / COMMIT).write_bytes(b"{}")
    read_all(tmp_path / "good")


def record(change: Callable[[dict[str, Any]], object]) -> Callable[[Path, Draft], None]:
    """Change the record as JSON, which is then sealed again without a key."""

    def spoil(root: Path, made: Draft) -> None:
        tree = json.loads(msgspec.json.encode(made.checkpoint))
        change(tree)
        text = json.dumps(tree).encode()
        (root / COMMIT).write_bytes(signing.seal(text, None))

    return spoil


def part(change: Callable[[dict[str, Any]], object]) -> Callable[[Path, Draft], None]:
    """Change rank 0's manifest as JSON, and the record's digest of it."""

    def spoil(root: Path, made: Draft) -> None:
        path = root / made.attempt.part(0, "json")
        tree = json.loads(path.read_bytes())
        change(tree)
        text = json.dumps(tree).encode()
        path.write_bytes(text)
        digest = hashlib.sha256(text).hexdigest()
        record(lambda tree: tree["parts"][0].update(manifest_sha256=digest))(root, made)

    return spoil


def raw(data: bytes) -> Callable[[Path, Draft], None]:
    """Other bytes for the record."""

    def spoil(root: Path, made: Draft) -> None:
        (root / COMMIT).write_bytes(data)

    return spoil


def tensor(**change: Any) -> Callable[[dict[str, Any]], object]:
    return lambda tree: tree["snapshot"]["tensors"][0].update(change)


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/everstep-bomb",)


HUGE = 1 << 45
RECORDS = {
    "a pickle": raw(pickle.dumps(Bomb())),
    "a pickle in an envelope": raw(b'{"signature":"","manifest":' + pickle.dumps(Bomb()) + b"}"),
    "empty": raw(b""),
    "deep": raw(b'{"signature":"","manifest":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "no JSON": raw(b'{"signature":"","manifest":{"step":NaN}}'),
    "another series": record(lambda tree: tree.update(series="../other")),
    "another step": record(lambda tree: tree.update(step=8)),
    "an attempt elsewhere": record(lambda tree: tree.update(attempt="../../../../etc")),
    "a field too many": record(lambda tree: tree.update(run="rm -rf /")),
    "no parts": record(lambda tree: tree.update(parts=[])),
    "a part twice": record(lambda tree: tree["parts"].append(tree["parts"][0])),
    "a rank below zero": record(lambda tree: tree["parts"][0].update(rank=-1)),
    "a huge part": record(lambda tree: tree["parts"][0].update(nbytes=HUGE)),
    "a part beyond all bounds": record(lambda tree: tree["parts"][0].update(nbytes=1 << 80)),
    "no digest": record(lambda tree: tree["parts"][0].update(manifest_sha256="")),
    "a huge tensor": record(lambda tree: tree["tensors"]["w"].update(shape=[HUGE, HUGE])),
    "a huge piece": record(lambda tree: tree["tensors"]["w"]["pieces"][0].update(shape=[HUGE, 10])),
    "a piece twice": record(
        lambda tree: tree["tensors"]["w"]["pieces"].append(tree["tensors"]["w"]["pieces"][0])
    ),
    "a piece elsewhere": record(
        lambda tree: tree["tensors"]["w"]["pieces"][0].update(name="../../etc/passwd")
    ),
    "a piece of no rank": record(lambda tree: tree["tensors"]["w"]["pieces"][0].update(rank=99)),
    "another type": record(lambda tree: tree["tensors"]["w"].update(dtype="os.system")),
    "a long list": record(lambda tree: tree.update(paths={"w": ["w", 1 << 40]})),
    "tensor and value": record(lambda tree: tree["values"].update(w="AA==")),
}
PARTS = {
    "a huge file": part(lambda tree: tree["snapshot"].update(nbytes=HUGE)),
    "huge blocks": part(lambda tree: tree["snapshot"].update(block_bytes=1 << 40)),
    "tiny blocks": part(lambda tree: tree["snapshot"].update(block_bytes=1)),
    "no blocks": part(lambda tree: tree["snapshot"].update(blocks=[])),
    "many blocks": part(lambda tree: tree["snapshot"].update(blocks=["0" * 32] * 10_000)),
    "a huge tensor there": part(tensor(shape=[HUGE])),
    "huge elements": part(tensor(item_bytes=1 << 40)),
    "a name of safetensors' own": part(tensor(name="__metadata__")),
    "a tensor twice": part(
        lambda tree: tree["snapshot"]["tensors"].append(tree["snapshot"]["tensors"][0])
    ),
    "another rank": part(lambda tree: tree["snapshot"]["about"].update(rank=1)),
    "another step there": part(lambda tree: tree["snapshot"]["about"].update(step=6)),
    "digests for some": part(lambda tree: tree.update(block_sha256=["0" * 64] * 9)),
    "a field of its own": part(lambda tree: tree.update(__reduce__="os.system")),
}


@pytest.mark.parametrize("name", [*RECORDS, *PARTS])
def test_a_crafted_manifest_is_refused(root: Path, name: str) -> None:
    made = lay(root, good())
    (RECORDS | PARTS)[name](root, made)
    tracemalloc.start()
    try:
        with watched(root):
            refusals = read_all(root)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refusals
    assert peak < 64 << 20
    assert not Path("/tmp/everstep-bomb").exists()


def test_a_record_is_measured_before_it_is_read(root: Path) -> None:
    lay(root, good())
    os.truncate(root / COMMIT, signing.MAX_ENVELOPE_BYTES + 1)  # a hole: nothing is written
    tracemalloc.start()
    try:
        assert all("more than" in why for why in read_all(root))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_part_is_as_long_as_the_record_says(root: Path) -> None:
    made = lay(root, good())
    os.truncate(root / made.attempt.part(0, "safetensors"), 1 << 40)
    with watched(root):
        assert all("bytes" in why for why in read_all(root))


@pytest.mark.parametrize("what", ["commit", "part", "folder"])
def test_links_lead_nowhere(root: Path, tmp_path: Path, what: str) -> None:
    made = lay(root, good())
    outside = tmp_path / "outside"
    target = {
        "commit": root / COMMIT,
        "part": root / made.attempt.part(0, "safetensors"),
        "folder": (root / made.attempt.part(0, "json")).parent,
    }[what]
    target.rename(outside)
    target.symlink_to(outside)
    with watched(root):
        assert read_all(root) or not look.survey(places(root))[0]
    with pytest.raises(EverstepError):
        load(places(root).tiers("run"), everything)


def test_a_pipe_in_place_of_a_record_holds_nobody_up(root: Path) -> None:
    lay(root, good())
    (root / COMMIT).unlink()
    os.mkfifo(root / COMMIT)
    with pytest.raises(EverstepError):
        load(places(root).tiers("run"), everything)


@pytest.mark.parametrize(
    "value",
    [
        pickle.dumps(Bomb()),
        msgspec.msgpack.encode(["torch", "dtype", "os.system('true')"])[:-1],
        msgspec.msgpack.encode(["numpy", "O", b"x" * 8]),
        msgspec.msgpack.encode(["numpy", "<f8", b""]),
        msgspec.msgpack.encode(["eval", "1"]),
        msgspec.msgpack.encode(["int", "__import__('os')"]),
        msgspec.msgpack.encode({"__reduce__": 1}),
        msgspec.msgpack.encode(["set", ["list"]]),
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"",
    ],
)
def test_a_crafted_value_is_refused(tmp_path: Path, value: bytes) -> None:
    with watched(tmp_path), pytest.raises(Refused):
        values.decode(value)


def test_names_of_tensors_are_names_and_no_paths(root: Path, tmp_path: Path) -> None:
    names = ["../../escape", "/etc/passwd", "a\0b", "model/../w"]
    lay(root, draft(7, {name: Made(shape=(2,), data=bytes(8)) for name in names}))
    out = tmp_path / "out"
    load(places(root).tiers("run"), lambda opened: huggingface.write(Reading(opened), out))
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert not (tmp_path / "escape").exists()
