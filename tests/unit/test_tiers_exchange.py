"""Checkpoints of others' formats, to and from ours."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit import checkpoints
from tests.unit.checkpoints import DictStore, Made, draft, tier
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from everstep.errors import UserError
from everstep.tiers import huggingface, values
from everstep.tiers.catalog import Origin
from everstep.tiers.files import FileStore
from everstep.tiers.find import Tier, decide
from everstep.tiers.foreign import export_to, import_from
from everstep.tiers.foreign_task import Task
from everstep.tiers.incoming import Incoming, bring_in
from everstep.tiers.load import Opened, open_newest
from everstep.tiers.series import Series
from everstep.tiers.slabs import Reading
from everstep.tiers.store import Refused

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().view(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def made_of(tensor: torch.Tensor, world: int = 1) -> Made:
    shape = tuple(tensor.shape)
    return Made(
        shape=shape,
        data=bits(tensor),
        boxes=checkpoints.rows(shape, world) if world > 1 else (),
        dtype=str(tensor.dtype),
        item_bytes=tensor.element_size(),
    )


TENSORS = {
    "model.w": torch.arange(60, dtype=torch.float32).view(10, 6),
    "model.half": torch.arange(7, dtype=torch.bfloat16),
    "model.fp8": torch.arange(5, dtype=torch.float32).to(torch.float8_e4m3fn),
    "model.yes": torch.tensor([True, False]),
    "model.scalar": torch.tensor(3, dtype=torch.int64),
    "model.empty": torch.empty(0, 4),
    "optimizer.m": torch.arange(60, dtype=torch.float32).view(10, 6) / 7,
}


def reading(store: DictStore, tensors: dict[str, torch.Tensor] = TENSORS) -> Reading:
    made = {key: made_of(tensor, 2 if tensor.ndim == 2 else 1) for key, tensor in tensors.items()}
    draft(7, made, {"epoch": values.encode(3, "epoch")}, world=2).put(store)
    return Reading(open_newest([tier(store)]))


def test_an_export_is_what_safetensors_reads(tmp_path: Path) -> None:
    told: list[str] = []
    [path] = huggingface.write(
        reading(DictStore()), tmp_path / "out", prefix="model.", say=told.append
    )
    assert path.name == "model.safetensors"
    loaded = load_file(path)
    assert loaded.keys() == {key[6:] for key in TENSORS if key.startswith("model.")}
    for key, tensor in loaded.items():
        like = TENSORS[f"model.{key}"]
        assert (tensor.dtype, tensor.shape, bits(tensor)) == (like.dtype, like.shape, bits(like))
    assert told == ["1 values that are no tensors are left out: safetensors holds none"]


def test_an_export_takes_no_memory_for_the_whole(tmp_path: Path) -> None:
    nbytes = 64 << 20
    series = Series(FileStore(tmp_path / "to"), "run")
    one = Incoming(
        key="w",
        dtype="torch.uint8",
        item_bytes=1,
        shape=(nbytes,),
        fill=lambda area: area.release(),
    )
    bring_in(series, 1, [one], {}, origin=Origin())
    found = decide([Tier(name="durable", series=series)])
    with Opened(found, cache_bytes=4 << 20) as opened:
        tracemalloc.start()
        try:
            huggingface.write(Reading(opened), tmp_path / "out")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < nbytes / 2


def test_an_export_in_shards_has_an_index(tmp_path: Path) -> None:
    out = tmp_path / "out"
    huggingface.write(reading(DictStore()), out, shard_bytes=200)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == TENSORS.keys()
    for key, name in index["weight_map"].items():
        assert bits(load_file(out / name)[key]) == bits(TENSORS[key])
    assert sorted(path.name for path in out.iterdir()) == sorted(
        {*index["weight_map"].values(), "model.safetensors.index.json"}
    )
    brought = {one.key: one for one in huggingface.read(out)}
    assert brought.keys() == TENSORS.keys()


def test_an_export_overwrites_nothing_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    store = DictStore()
    source = reading(store)
    huggingface.write(source, tmp_path)
    with pytest.raises(UserError, match="there already"):
        huggingface.write(source, tmp_path)
    other = tmp_path / "other"
    odd = reading(DictStore(), {"c": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(UserError, match=r"c is of torch\.complex128"):
        huggingface.write(odd, other)
    assert list(other.iterdir()) == []
    with pytest.raises(UserError, match="no tensor's key begins"):
        huggingface.write(source, other, prefix="none.")


def test_elements_of_another_size_than_their_type_has_are_refused(tmp_path: Path) -> None:
    store = DictStore()
    draft(7, {"w": Made(shape=(2,), data=b"12345678", dtype="torch.float16")}).put(store)
    with pytest.raises(Refused, match="w: an element of F16 has not 4 bytes"):
        huggingface.write(Reading(open_newest([tier(store)])), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part_bytes", [100, 1 << 30])
def test_an_import_holds_the_same_bits(tmp_path: Path, part_bytes: int) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    series = Series(FileStore(tmp_path / "to"), "run")
    found = huggingface.read(tmp_path)
    checkpoint = bring_in(series, 5, found, {}, origin=Origin(), part_bytes=part_bytes)
    assert (len(checkpoint.parts) > 1) == (part_bytes == 100)
    with open_newest([tier_of(series)]) as opened:
        source = Reading(opened)
        assert source.checkpoint.tensors.keys() == TENSORS.keys()
        for key, tensor in TENSORS.items():
            whole = source.checkpoint.tensors[key]
            assert (whole.dtype, whole.shape) == (str(tensor.dtype), tuple(tensor.shape))
            assert b"".join(area for _, area in source.slabs(key)) == bits(tensor)
    with pytest.raises(UserError, match="nothing is overwritten"):
        bring_in(series, 5, found, {}, origin=Origin())


def tier_of(series: Series) -> Tier:
    return Tier.durable(series)


def header(entries: object, *, length: int | None = None, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, end: int, shape: list[int], dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "no such length"),
        (header({}, length=1 << 62), "no such length"),
        (header({}, length=(1 << 64) - 1), "no such length"),
        (header(b"\x80\x04cos\nsystem\n"), "no safetensors file"),
        (header(b"[" * 100_000), "no safetensors file"),
        (header({"w": entry(0, 4, [4])}, data=b"abc"), "its tensors end at"),
        (header({"w": entry(0, 4, [4])}, data=b"abcde"), "its tensors end at"),
        (header({"w": entry(0, 4, [1 << 40, 1 << 40])}, data=b"abcd"), "not where they should be"),
        (header({"w": entry(1, 5, [4])}, data=b"abcde"), "not where they should be"),
        (
            header({"v": entry(0, 4, [4]), "w": entry(2, 6, [4])}, data=b"abcdef"),
            "not where they should be",
        ),
        (header({"w": entry(-4, 0, [4])}, data=b""), "no safetensors file"),
        (header({"w": entry(0, 4, [4], "pickle")}, data=b"abcd"), "unknown here"),
        (header({"w": {**entry(0, 4, [4]), "run": "rm"}}, data=b"abcd"), "no safetensors file"),
    ],
)
def test_a_crafted_file_is_refused(tmp_path: Path, raw: bytes, why: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=why):
        huggingface.read(path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", ""]
)
def test_an_index_names_files_beside_it_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(UserError, match="no file beside it"):
        huggingface.read(tmp_path)


def test_an_index_and_its_files_agree(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    with pytest.raises(UserError, match="which is not there"):
        huggingface.read(tmp_path)
    save_file({"v": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="in none of its files"):
        huggingface.read(tmp_path)
    with pytest.raises(UserError, match="neither"):
        huggingface.read(tmp_path / "none")


def nested() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": [{"step": torch.tensor(4.0)}], "lr": 0.1},
        "epoch": 3,
    }


def test_torchs_own_format_there_and_back(tmp_path: Path) -> None:
    save(nested(), checkpoint_id=tmp_path / "theirs", no_dist=True)
    task = Task(
        do="import",
        addresses=(str(tmp_path / "ours"),),
        folder=str(tmp_path / "theirs"),
        series="run",
        step=9,
        part_bytes=20,
    )
    done = import_from(task)
    assert (done.tensors, done.values) == (3, 2)
    series = Series(FileStore(tmp_path / "ours"), "run")
    with open_newest([tier_of(series)]) as opened:
        export_to(Reading(opened), tmp_path / "back")
        with pytest.raises(UserError, match="not empty"):
            export_to(Reading(opened), tmp_path / "back")
    loaded = {
        "model": {"w": torch.zeros(3, 4), "b": torch.zeros(3, dtype=torch.bfloat16)},
        "optimizer": {"state": [{"step": torch.tensor(0.0)}], "lr": 0.0},
        "epoch": 0,
    }
    load(loaded, checkpoint_id=tmp_path / "back", no_dist=True)
    whole = nested()
    assert torch.equal(loaded["model"]["w"], whole["model"]["w"])  # type: ignore[index]
    assert torch.equal(loaded["model"]["b"], whole["model"]["b"])  # type: ignore[index]
    assert (loaded["epoch"], loaded["optimizer"]["lr"]) == (3, 0.1)  # type: ignore[index]
    assert loaded["optimizer"]["state"][0]["step"] == 4  # type: ignore[index]


def test_every_type_goes_to_torchs_own_format(tmp_path: Path) -> None:
    odd = {"c": torch.arange(4).to(torch.complex128), "z": torch.zeros(2, 0, 3)}
    source = reading(DictStore(), TENSORS | odd)
    export_to(source, tmp_path / "out")
    loaded = {key: torch.zeros_like(tensor) for key, tensor in (TENSORS | odd).items()}
    load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    for key, tensor in (TENSORS | odd).items():
        assert bits(loaded[key]) == bits(tensor), key


def test_a_value_that_is_no_data_is_named(tmp_path: Path) -> None:
    save({"odd": {"thing": Path("/")}}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    task = Task(
        do="import",
        addresses=(str(tmp_path / "ours"),),
        folder=str(tmp_path / "theirs"),
        series="run",
        step=1,
    )
    with pytest.raises(UserError, match=r"odd\.thing"):
        import_from(task)


def test_metadata_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    path = tmp_path / "theirs" / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())  # noqa: S301 - our own
    for info in metadata.storage_data.values():
        info.relative_path = "../../etc/passwd"
    path.write_bytes(pickle.dumps(metadata))
    task = Task(do="import", addresses=("x",), folder=str(path.parent), series="run", step=1)
    with pytest.raises(UserError, match="names the file"):
        import_from(task)


def test_what_does_not_come_fails_the_import(tmp_path: Path) -> None:
    def gone(area: memoryview) -> None:
        raise UserError("gone")

    series = Series(FileStore(tmp_path), "run")
    one = Incoming(key="w", dtype="torch.uint8", item_bytes=1, shape=(4,), fill=gone)
    with pytest.raises(UserError, match="gone"):
        bring_in(series, 1, [one], {}, origin=Origin())
    assert series.steps() == []
