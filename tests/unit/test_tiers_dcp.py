"""Saves and loads through torch's distributed checkpoint, with all ranks in this process."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit import fake_dcp
from tests.unit.checkpoints import DictStore, Made, draft
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from everstep.errors import StateLost, UserError
from everstep.tiers import load_newest, resharding
from everstep.tiers.dcp import TieredReader, TieredWriter
from everstep.tiers.files import FileStore
from everstep.tiers.find import NoneThere
from everstep.tiers.lanes import SaveWarning
from everstep.tiers.load import open_newest
from everstep.tiers.newest import SetAside
from everstep.tiers.series import SaveFailed, Series
from everstep.tiers.settings import TierSettings
from everstep.tiers.store import StoreError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is :UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

PATIENCE_S = 30.0


def planned(dtype: torch.dtype) -> bool:
    """Whether DCP's own planner can work with a type: it has no size for some (torch 2.13)."""
    try:
        return bool(torch._utils._element_size(dtype))  # type: ignore[no-untyped-call]
    except (RuntimeError, TypeError):
        return False


DTYPES = [
    value
    for value in sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
    if planned(value) and not str(value).startswith(("torch.q", "torch.uint1b"))
]


@pytest.fixture
def settings(tmp_path: Path) -> TierSettings:
    return TierSettings(series="run", destination=str(tmp_path / "tier"), durable_every=1)


@pytest.fixture
def ranks(settings: TierSettings) -> Iterator[Callable[..., list[fake_dcp.Writer]]]:
    """Makes the writers of so many ranks."""
    made: list[fake_dcp.Writer] = []

    def make(count: int, of: TierSettings = settings, **more: Any) -> list[fake_dcp.Writer]:
        writers = [fake_dcp.Writer(of, **more) for _ in range(count)]
        made.extend(writers)
        return writers

    yield make
    for writer in made:
        writer.own.close(PATIENCE_S)


def settle(writers: list[fake_dcp.Writer]) -> None:
    for writer in writers:
        assert writer.wait(PATIENCE_S)


def saved(state: dict[str, Any], settings: TierSettings, step: int = 1) -> None:
    """Saved by one rank, and there."""
    writer = TieredWriter(settings)
    try:
        dcp_save(state, storage_writer=writer, checkpoint_id=str(step))
    finally:
        writer.close()


def loaded(settings: TierSettings) -> dict[str, Any]:
    """All of the newest checkpoint, into a state of its own."""
    return _load_state_dict_from_keys(storage_reader=TieredReader(settings))


def raw(tensor: torch.Tensor) -> bytes:
    """Its elements' bytes, also of types that torch can't compare."""
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


# ------------------------------------------------------------ tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_every_type_comes_back_bit_for_bit(
    dtype: torch.dtype, settings: TierSettings
) -> None:
    size = torch.empty(1, dtype=dtype).element_size()
    whole = torch.randint(0, 256, (4, 6 * size), dtype=torch.uint8).view(dtype)
    saved({"whole": whole}, settings)
    target = torch.zeros(4, 6 * size, dtype=torch.uint8).view(dtype)
    load_newest({"whole": target}, settings)
    assert raw(target) == raw(whole)


def test_views_ties_and_odd_shapes_come_back(settings: TierSettings) -> None:
    base = torch.arange(60.0).view(6, 10)
    state = {
        "column": base[:, 3],
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "scalar": torch.tensor(7, dtype=torch.int16),
        "empty": torch.empty(0, 5, dtype=torch.float16),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        "parameter": torch.nn.Parameter(base[1:3]),
        "tied": base[1:3],
    }
    saved(state, settings)
    target = {key: torch.full_like(value, 99).detach() for key, value in state.items()}
    target["transposed"] = torch.zeros(6, 10).t()  # read into other strides
    load_newest(target, settings)
    for key, value in state.items():
        assert torch.equal(target[key], value), key
    assert loaded(settings).keys() == state.keys()


def test_what_is_tied_is_written_once(settings: TierSettings, tmp_path: Path) -> None:
    one = torch.zeros(1 << 18)
    saved({"one": one, "same": one, "flat": one.view(-1)}, settings)
    (part,) = tmp_path.rglob("*.safetensors")
    assert part.stat().st_size < 2 * one.nbytes
    assert set(loaded(settings)) == {"one", "same", "flat"}


def test_a_checkpoint_is_loaded_as_another_type(settings: TierSettings) -> None:
    whole = torch.randn(3, 5)
    saved({"whole": whole}, settings)
    target = {"whole": torch.zeros(3, 5, dtype=torch.bfloat16)}
    load_newest(target, settings)
    assert torch.equal(target["whole"], whole.bfloat16())


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.empty(2, device="meta")],
    ids=["sparse", "meta"],
)
def test_a_tensor_without_bytes_is_named(tensor: torch.Tensor, settings: TierSettings) -> None:
    with pytest.raises(BaseException, match=r"layer\.odd is a sparse, quantized or meta"):
        saved({"layer": {"odd": tensor}}, settings)


# ------------------------------------------------------------ values


def test_values_come_back_as_they_were(settings: TierSettings) -> None:
    state = {
        "epoch": 3,
        "nested": {"best": 0.25, "names": ["a", "b"], "shape": torch.Size([2, 3])},
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "none": None,
        "tuple": (1, (2.5, b"x")),
        "odd": {"empty": {}, "huge": 1 << 200},
    }
    saved(state, settings)
    target: dict[str, Any] = {
        "epoch": 0,
        "nested": {"best": 0.0, "names": [], "shape": None},
        "dtype": None,
        "device": None,
        "none": 1,
        "tuple": (),
        "odd": {"huge": 0},
    }
    load_newest(target, settings)
    state["odd"] = {"huge": 1 << 200}  # an empty dict has no key of its own, with DCP
    assert target == state
    assert loaded(settings) == state


def test_what_is_no_data_is_named_with_its_key(settings: TierSettings) -> None:
    with pytest.raises(BaseException, match=r"scheduler\.fn is a builtins\.function"):
        saved({"scheduler": {"fn": lambda: None}}, settings)
    with pytest.raises(NoneThere):
        load_newest({}, settings)


def test_nothing_is_pickled(settings: TierSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **more: Any) -> Any:
        raise AssertionError("a checkpoint went through pickle")

    for module, name in ((pickle, "dumps"), (pickle, "loads"), (torch, "save"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    state = {"w": torch.ones(3), "lr": 0.1}
    saved(state, settings)
    target = {"w": torch.zeros(3), "lr": 0.0}
    load_newest(target, settings)
    assert torch.equal(target["w"], state["w"])  # type: ignore[arg-type]
    assert target["lr"] == 0.1


def test_a_planner_of_its_own_gets_values_as_it_expects(settings: TierSettings) -> None:
    seen: list[Any] = []

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            seen.append(torch.load(value, weights_only=True))

    saved({"lr": 0.1}, settings)
    load_newest({"lr": 0.0}, settings, planner=Planner())
    assert seen == [0.1]


# ------------------------------------------------------------ sharded

WHOLE = torch.arange(7 * 12.0).view(7, 12)
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "one": ((1,), [Replicate()]),
    "rows-2": ((2,), [Shard(0)]),
    "rows-4": ((4,), [Shard(0)]),  # uneven
    "columns-3": ((3,), [Shard(1)]),
    "hybrid": ((2, 2), [Replicate(), Shard(0)]),
    "grid": ((2, 3), [Shard(0), Shard(1)]),
    "more-than-rows": ((9,), [Shard(0)]),  # some hold nothing
}


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_a_tensor_is_laid_out_anew(
    before: str, after: str, settings: TierSettings, ranks: Callable[..., list[fake_dcp.Writer]]
) -> None:
    shape, placements = LAYOUTS[before]
    count = torch.Size(shape).numel()
    states = [
        {"w": fake_dcp.shard_of(WHOLE, rank, shape, placements), "step": 5} for rank in range(count)
    ]
    writers = ranks(count)
    fake_dcp.save(states, writers, 5)
    settle(writers)
    shape, placements = LAYOUTS[after]
    targets = [
        {"w": fake_dcp.shard_of(torch.full_like(WHOLE, -1), rank, shape, placements), "step": 0}
        for rank in range(torch.Size(shape).numel())
    ]
    fake_dcp.load(targets, settings)
    for rank, target in enumerate(targets):
        want = fake_dcp.shard_of(WHOLE, rank, shape, placements)
        assert torch.equal(target["w"].to_local(), want.to_local())  # type: ignore[attr-defined]
        assert target["step"] == 5


def test_a_resharding_rank_reads_only_its_blocks(
    settings: TierSettings,
    ranks: Callable[..., list[fake_dcp.Writer]],
) -> None:
    whole = torch.zeros(64, 1 << 18)  # 1 MiB a row
    fake_dcp.save([{"w": whole}], writers := ranks(1), 1)
    settle(writers)
    (reader,) = fake_dcp.load([{"w": fake_dcp.shard_of(whole, 3, (8,), [Shard(0)])}], settings)
    assert reader.receipt is not None
    assert reader.receipt.nbytes <= whole.nbytes / 8 + 2 * (4 << 20)


def test_a_part_of_a_checkpoint_is_loaded(settings: TierSettings) -> None:
    saved({"model": {"a": torch.ones(2), "b": torch.ones(3)}, "lr": 1.0}, settings)
    target = {"model": {"b": torch.zeros(3)}}
    load_newest(target, settings)
    assert torch.equal(target["model"]["b"], torch.ones(3))
    target = {"model": {"b": torch.zeros(3), "c": torch.zeros(1)}}
    with pytest.raises(BaseException, match=r"Missing key in checkpoint state_dict: model\.c"):
        load_newest(target, settings)
    load_newest(target, settings, planner=DefaultLoadPlanner(allow_partial_load=True))


# ------------------------------------------------------------ which one is loaded


def test_elements_of_another_size_than_their_type_has_are_refused(settings: TierSettings) -> None:
    store, kept = FileStore(Path(settings.destination)), DictStore()
    draft(7, {"w": Made(shape=(2,), data=b"12345678", dtype="torch.float16")}).put(kept)
    for key, data in kept.objects.items():
        store.put(key, [memoryview(data)], deadline_s=PATIENCE_S)
    with pytest.raises(CheckpointException, match="4 bytes for each element"):
        dcp_load({"w": torch.zeros(2, dtype=torch.float16)}, storage_reader=TieredReader(settings))


def test_the_newest_is_loaded_and_a_step_where_it_is_asked_for(settings: TierSettings) -> None:
    for step in (10, 20):
        saved({"step": step}, settings, step)
    assert loaded(settings) == {"step": 20}
    target = {"step": 0}
    assert load_newest(target, settings, step=10).step == 10
    assert target == {"step": 10}
    dcp_load(target, storage_reader=TieredReader(settings), checkpoint_id="step-20")
    assert target == {"step": 20}


def test_ranks_that_see_other_checkpoints_load_the_coordinators(
    settings: TierSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        saved({"step": step, "w": torch.full((4,), float(step))}, settings, step)
    steps = iter([10, 20])  # the first rank looked before the save, the second after it
    monkeypatch.setattr(
        resharding,
        "open_newest",
        lambda tiers, **how: open_newest(tiers, **(how | {"step": next(steps)})),
    )
    targets = [{"step": 0, "w": torch.zeros(4)} for _ in range(2)]
    fake_dcp.load(targets, settings)
    assert [target["step"] for target in targets] == [10, 10]
    assert all(torch.equal(t["w"], torch.full((4,), 10.0)) for t in targets)  # type: ignore[arg-type]


def test_a_corrupt_part_sends_the_load_a_step_back(settings: TierSettings, tmp_path: Path) -> None:
    for step in (10, 20):
        saved({"w": torch.full((100,), float(step))}, settings, step)
    (part,) = tmp_path.rglob("*0020/*/*.safetensors")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    target = {"w": torch.zeros(100)}
    with pytest.raises(BaseException, match="PartLost"):
        load_newest(target, settings, step=20)
    with pytest.warns(SetAside, match="step 20 was set aside"):
        receipt = load_newest(target, settings)
    assert (receipt.step, receipt.behind) == (10, 10)
    assert torch.equal(target["w"], torch.full((100,), 10.0))
    saved({"w": torch.full((100,), 21.0)}, settings, 20)  # the training comes there again
    assert load_newest(target, settings).step == 20
    assert torch.equal(target["w"], torch.full((100,), 21.0))


def test_a_part_that_cannot_be_asked_for_is_not_set_aside(
    settings: TierSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        saved({"w": torch.full((100,), float(step))}, settings, step)
    get = FileStore.get_into

    def refuse(store: FileStore, key: str, *args: Any, **how: Any) -> None:
        if "0020/" in key and key.endswith(".safetensors"):
            raise StoreError("the disk is away")
        get(store, key, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "get_into", refuse)
        assert load_newest({"w": torch.zeros(100)}, settings).step == 10
    assert load_newest({"w": torch.zeros(100)}, settings).step == 20


def test_no_checkpoint_is_told_from_one_that_is_lost(
    settings: TierSettings, tmp_path: Path
) -> None:
    with pytest.raises(NoneThere):
        load_newest({}, settings)
    saved({"w": torch.ones(2)}, settings)
    for part in tmp_path.rglob("*.safetensors"):
        part.unlink()
    with pytest.raises(StateLost) as raised:
        load_newest({"w": torch.zeros(2)}, settings)
    assert not isinstance(raised.value, NoneThere)


# ------------------------------------------------------------ saves in the background


class Gate:
    """Holds parts back until it is opened; or refuses them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.refuse = threading.Event(), ""
        self.came = threading.Semaphore(0)
        put = FileStore.put

        def held(store: FileStore, key: str, *args: Any, **how: Any) -> None:
            if key.endswith(".safetensors"):
                self.came.release()
                stop = how.get("stop") or threading.Event()
                while not self.open.wait(0.01):
                    if stop.is_set():
                        break
                if self.refuse:
                    raise StoreError(self.refuse)
            put(store, key, *args, **how)

        monkeypatch.setattr(FileStore, "put", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_what_changes_after_the_save_is_not_saved(settings: TierSettings, gate: Gate) -> None:
    state: dict[str, Any] = {"w": torch.ones(1000), "values": {"list": [1, [2]]}}
    writer = TieredWriter(settings)
    dcp_save(state, storage_writer=writer, checkpoint_id="1")
    state["w"].zero_()
    state["values"]["list"][1].append(3)
    gate.open.set()
    writer.close()
    found = loaded(settings)
    assert torch.equal(found["w"], torch.ones(1000))
    assert found["values"] == {"list": [1, [2]]}


def test_the_scripts_random_streams_stand_still(
    settings: TierSettings, gate: Gate, ranks: Callable[..., list[fake_dcp.Writer]]
) -> None:
    """A wait for another rank's part draws pauses, in the process of the training."""
    writers = ranks(2)
    before = random.getstate(), torch.get_rng_state().tolist()
    fake_dcp.save([{"step": 1, "w": torch.ones(1)}] * 2, writers, 1)
    assert all(gate.came.acquire(timeout=PATIENCE_S) for _ in writers[:1])
    gate.open.set()
    settle(writers)
    load_newest({"step": 0}, settings)
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def steps_there(settings: TierSettings) -> list[int]:
    return Series(FileStore(Path(settings.destination)), settings.series).steps()


@pytest.mark.parametrize(("policy", "expected"), [("newest", [1, 3]), ("skip", [1])])
def test_saves_while_one_is_on_its_way(
    policy: Any,
    expected: list[int],
    settings: TierSettings,
    gate: Gate,
    ranks: Callable[..., list[fake_dcp.Writer]],
) -> None:
    chosen = TierSettings(
        series="run", destination=settings.destination, durable_every=1, on_busy=policy
    )
    writers = ranks(2, chosen)
    for step in (1, 2, 3):
        fake_dcp.save([{"step": step, "w": torch.ones(2) * step}] * 2, writers, step)
        if step == 1:
            assert all(gate.came.acquire(timeout=PATIENCE_S) for _ in writers)
    gate.open.set()
    settle(writers)
    assert steps_there(settings) == expected
    for writer in writers:
        assert writer.own.counts.displaced == (policy == "newest")
        assert writer.own.counts.skipped == 2 * (policy == "skip")
        writer.check()


def test_a_save_that_waits_makes_the_next_one_wait(
    settings: TierSettings, gate: Gate, ranks: Callable[..., list[fake_dcp.Writer]]
) -> None:
    chosen = TierSettings(
        series="run", destination=settings.destination, durable_every=1, on_busy="wait"
    )
    (writer,) = writers = ranks(1, chosen)
    fake_dcp.save([{"step": 1}], writers, 1)
    assert gate.came.acquire(timeout=PATIENCE_S)
    opener = threading.Thread(target=gate.open.set)
    opener.start()
    fake_dcp.save([{"step": 2}], writers, 2)
    opener.join()
    assert writer.own.committed >= 1, "the second began before the first had ended"
    settle(writers)
    assert steps_there(settings) == [1, 2]


def test_a_failed_save_is_raised_on_every_rank_at_the_next(
    settings: TierSettings, gate: Gate, ranks: Callable[..., list[fake_dcp.Writer]]
) -> None:
    writers = ranks(3)
    gate.refuse = "the disk is on fire"
    gate.open.set()
    states = [{"step": 1, "w": torch.ones(1)}] * 3
    fake_dcp.save(states, writers, 1)
    settle(writers)
    assert steps_there(settings) == []
    assert all(writer.own.counts.failed == 1 for writer in writers)
    gate.refuse = ""
    plans = []
    for rank, writer in enumerate(writers):
        writer.reset(2)
        writer.set_up_storage_writer(rank == 0, rank=rank)
        planner = DefaultSavePlanner()
        planner.set_up_planner(states[rank], None, rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    for plan, writer in zip(writers[0].prepare_global_plan(plans), writers, strict=True):
        with pytest.raises(SaveFailed, match=r"step 1 to the durable .*the disk is on fire"):
            writer.write_data(plan, planner)
    fake_dcp.save([{"step": 3}] * 3, writers, 3)  # told once
    settle(writers)
    assert steps_there(settings) == [3]


def test_a_failed_save_is_a_warning_where_that_is_asked_for(
    settings: TierSettings, gate: Gate, ranks: Callable[..., list[fake_dcp.Writer]]
) -> None:
    chosen = TierSettings(
        series="run", destination=settings.destination, durable_every=1, on_save_error="warn"
    )
    (writer,) = writers = ranks(1, chosen)
    gate.refuse = "the disk is on fire"
    gate.open.set()
    fake_dcp.save([{"step": 1, "w": torch.ones(1)}], writers, 1)
    settle(writers)
    with pytest.warns(SaveWarning, match="the disk is on fire"):
        writer.check()
    writer.check()


def test_a_rank_that_cannot_copy_fails_the_save_for_all_and_is_told_once(
    settings: TierSettings, ranks: Callable[..., list[fake_dcp.Writer]]
) -> None:
    writers = ranks(2)
    good = {"w": fake_dcp.shard_of(torch.ones(4), 0, (2,), [Shard(0)])}
    bad = {"w": fake_dcp.shard_of(torch.ones(4), 1, (2,), [Shard(0)]), "x": object()}
    with pytest.raises(UserError, match=r"x is a builtins\.object"):
        fake_dcp.save([good, bad], writers, 1)
    settle(writers[1:])
    good2 = [{"w": fake_dcp.shard_of(torch.ones(4), rank, (2,), [Shard(0)])} for rank in range(2)]
    fake_dcp.save(good2, writers, 2)
    settle(writers)
    assert steps_there(settings) == [2]
    for writer in writers:
        writer.check()


def test_a_rank_that_began_anew_lets_the_others_go_on(
    settings: TierSettings, gate: Gate, ranks: Callable[..., list[fake_dcp.Writer]]
) -> None:
    """The part of a process that died never comes: nobody waits for it to the deadline."""
    writers = ranks(2)
    fake_dcp.save([{"step": 1, "w": torch.ones(3)}] * 2, writers, 1)
    assert all(gate.came.acquire(timeout=PATIENCE_S) for _ in writers)
    writers[1].own._lanes["durable"].give_up(None)  # it is gone, with all that it knew
    replaced = [writers[0], *ranks(1)]
    gate.open.set()
    fake_dcp.save([{"step": 2}] * 2, replaced, 2)
    settle(replaced)
    assert steps_there(settings) == [2]
    assert replaced[0].own.counts.lost == 1
    replaced[0].check()


def test_ranks_must_save_one_step(
    settings: TierSettings, ranks: Callable[..., list[fake_dcp.Writer]]
) -> None:
    writers = ranks(2)
    plans = []
    for rank, writer in enumerate(writers):
        writer.reset(rank)
        writer.set_up_storage_writer(rank == 0, rank=rank)
        planner = DefaultSavePlanner()
        planner.set_up_planner({}, None, rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    with pytest.raises(UserError, match="rank 0 saves step 0 and rank 1 step 1"):
        writers[0].prepare_global_plan(plans)


def test_plans_that_are_kept_are_refused(
    settings: TierSettings, ranks: Callable[..., list[fake_dcp.Writer]]
) -> None:
    writers = ranks(1)
    planners = [DefaultSavePlanner(enable_plan_caching=True) for _ in range(2)]
    fake_dcp.save([{"w": torch.ones(2)}], writers, 1, planners[:1])
    with pytest.raises(UserError, match="enable_plan_caching"):
        fake_dcp.save([{"w": torch.ones(2)}], writers, 2, planners[1:])


def test_a_planner_that_converts_is_obeyed(settings: TierSettings) -> None:
    class Half(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def resolve_data(self, write_item: WriteItem) -> Any:
            return super().resolve_data(write_item).to(torch.float16)  # type: ignore[union-attr]

    writer = TieredWriter(settings)
    dcp_save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id="1", planner=Half())
    writer.close()
    assert loaded(settings)["w"].dtype == torch.float16


@pytest.mark.parametrize("name", ["final", "step-1-of-many"])
def test_a_save_needs_its_step(name: str, settings: TierSettings) -> None:
    writer = TieredWriter(settings)
    with pytest.raises(UserError, match="names no step"):
        dcp_save({}, storage_writer=writer, checkpoint_id=name)
    with pytest.raises(BaseException, match="a save needs its step"):
        dcp_save({}, storage_writer=writer)
    writer.close()


def test_old_checkpoints_make_room(settings: TierSettings) -> None:
    chosen = TierSettings(
        series="run", destination=settings.destination, durable_every=1, durable_retained=2
    )
    writer = TieredWriter(chosen)
    for step in range(1, 6):
        dcp_save({"step": step}, storage_writer=writer, checkpoint_id=str(step))
        assert writer.wait(PATIENCE_S)
    writer.close()
    assert steps_there(settings) == [4, 5]
