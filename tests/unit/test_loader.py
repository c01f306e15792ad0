"""Batches by step number: what is dispatched where, which samples a step has, and what is
refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from everstep.data.loader import BatchSource, DatasetSource, FunctionSource, make_source
from everstep.data.order import Order
from everstep.errors import UserError


class Squares(Dataset[tuple[int, torch.Tensor]]):
    """Sample n is (n, tensor of n squared)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        return number, torch.tensor(float(number * number))


class Stream(IterableDataset[int]):
    """Has a length, and inherits a `__getitem__` that does not work."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class NoLength:
    """Numbered access without a length."""

    def __getitem__(self, number: int) -> int:
        return number


def make(source: Any, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"batch_size": 2, "seed": 0, "rank": 0, "world_size": 1}
    return make_source(source, **{**arguments, **changes})


def source_of(size: int, batch_size: int, rank: int, world_size: int) -> DatasetSource:
    return DatasetSource(
        Squares(size), batch_size=batch_size, seed=11, rank=rank, world_size=world_size
    )


def global_samples(size: int, batch_size: int, world_size: int, step: int) -> list[int]:
    ranks = [source_of(size, batch_size, rank, world_size) for rank in range(world_size)]
    return [sample for source in ranks for sample in source.at(step).samples or ()]


# ---------------------------------------------------------------- data sets


def test_steps_cover_the_order_without_gap_and_ranks_part_it() -> None:
    order = Order(50, 11)
    for step in range(1, 9):
        assert global_samples(50, 3, 4, step) == order.samples((step - 1) * 12, 12)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_global_batch_depends_on_the_world_only_by_its_size(world_size: int) -> None:
    for step in (1, 2, 5, 1000):
        found = global_samples(50, 12 // world_size, world_size, step)
        assert found == global_samples(50, 12, 1, step)


def test_golden_samples_of_a_step() -> None:
    assert source_of(1000, 4, 1, 2).samples(1) == (608, 297, 841, 478)
    assert source_of(1000, 4, 1, 2).samples(126) == (793, 42, 56, 271)


def test_an_epoch_has_every_sample_once_though_batches_straddle_its_end() -> None:
    seen = [sample for step in range(1, 8) for sample in global_samples(10, 2, 2, step)]
    assert sorted(seen[:10]) == list(range(10))
    assert sorted(seen[10:20]) == list(range(10))
    assert len(seen) == 28


def test_a_global_batch_larger_than_the_data_set_is_filled_from_the_next_epochs() -> None:
    samples = global_samples(3, 4, 2, 1)
    assert [sorted(samples[:3]), sorted(samples[3:6])] == [[0, 1, 2], [0, 1, 2]]
    assert len(samples) == 8


def test_value_is_the_collated_samples_in_order() -> None:
    batch = source_of(50, 4, 1, 2).at(3)
    assert batch.samples
    numbers, squares = batch.value
    assert numbers.tolist() == list(batch.samples)
    assert squares.tolist() == [float(number * number) for number in batch.samples]


def test_any_step_any_time_and_each_attempt_has_a_fresh_batch() -> None:
    source = source_of(50, 4, 0, 2)
    first = source.at(7)
    first.value[1].zero_()  # what a step may do to its batch
    source.at(1)
    again = source.at(7)
    assert again.samples == first.samples
    assert again.samples
    assert again.value[0].tolist() == list(again.samples)
    assert again.value[1].tolist() == [float(n * n) for n in again.samples]
    other = source_of(50, 4, 0, 2).at(7)
    assert torch.equal(other.value[1], again.value[1])


def test_own_collate_gets_the_list_of_samples() -> None:
    source = make(["a", "b", "c"], batch_size=3, collate="".join)
    batch = source.at(1)
    assert sorted(batch.value) == ["a", "b", "c"]
    assert batch.value == "".join("abc"[sample] for sample in batch.samples)


@pytest.mark.parametrize(
    "dataset",
    [
        [1.0, 2.0, 3.0],
        TensorDataset(torch.tensor([1.0, 2.0, 3.0])),
        torch.tensor([1.0, 2.0, 3.0]),
    ],
    ids=["list", "TensorDataset", "tensor"],
)
def test_any_object_with_numbered_access_and_length_is_a_data_set(dataset: Any) -> None:
    source = make(dataset, batch_size=3)
    assert isinstance(source, DatasetSource)
    batch = source.at(1)
    assert batch.samples
    value = batch.value[0] if isinstance(batch.value, list) else batch.value
    assert value.tolist() == [float(sample + 1) for sample in batch.samples]


def test_many_samples_are_read_by_one_call_where_offered() -> None:
    calls: list[list[int]] = []

    class Table(Subset[Any]):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            calls.append(indices)
            return super().__getitems__(indices)

    batch = make(Table(Squares(9), range(9)), batch_size=4).at(1)
    assert calls == [list(batch.samples)]
    assert batch.value[0].tolist() == list(batch.samples)


def test_an_error_in_the_data_set_says_which_samples() -> None:
    class Broken(Squares):
        def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
            raise OSError("bad record")

    source = DatasetSource(Broken(1), batch_size=1, seed=0, rank=2, world_size=3)
    with pytest.raises(OSError, match="bad record") as caught:
        source.at(4)
    assert caught.value.__notes__ == ["everstep: batch of step 4, rank 2, samples [0]"]


def test_identity_tells_what_makes_data_differ() -> None:
    base = make(Squares(9))
    assert base.identity == make(Squares(9)).identity
    others = [
        make(Squares(8)),
        make(Squares(9), seed=1),
        make(Squares(9), seed=b"0"),
        make(Squares(9), batch_size=3),
        make(Squares(9), world_size=2),
        make(list(range(9))),
    ]
    assert len({base.identity, *(other.identity for other in others)}) == 7
    ranks = [make(Squares(9), rank=rank, world_size=2) for rank in range(2)]
    assert ranks[0].identity == ranks[1].identity


# ---------------------------------------------------------------- functions


def test_function_gets_step_rank_and_world_and_its_answer_is_the_batch() -> None:
    calls: list[tuple[int, int, int]] = []

    def batch_at(step: int, rank: int, world: int) -> list[int]:
        calls.append((step, rank, world))
        return [step, rank, world]

    source = make(batch_at, batch_size=None, rank=2, world_size=3)
    assert isinstance(source, FunctionSource)
    batches = [source.at(5), source.at(5)]
    assert [batch.value for batch in batches] == [[5, 2, 3], [5, 2, 3]]
    assert batches[0].samples is None
    assert calls == [(5, 2, 3), (5, 2, 3)]
    assert "batch_at" in source.identity


def test_callables_that_take_three_positional_arguments_are_taken() -> None:
    class Maker:
        def __call__(self, *place: int) -> tuple[int, ...]:
            return place

        def method(self, step: int, rank: int, world: int, extra: int = 7) -> list[int]:
            return [step, rank, world, extra]

    def four(scale: int, step: int, rank: int, world: int) -> int:
        return scale * step

    assert make(Maker(), batch_size=None).at(1).value == (1, 0, 1)
    assert make(Maker().method, batch_size=None).at(2).value == [2, 0, 1, 7]
    assert make(functools.partial(four, 10), batch_size=None).at(3).value == 30
    assert make(max, batch_size=None).at(9).value == 9  # has no signature to check


@pytest.mark.parametrize(
    "fn",
    [lambda: 0, lambda step: step, lambda a, b, c, d: a, lambda a, b, c, *, d: a],
    ids=["none", "one", "four", "keyword"],
)
def test_functions_of_another_signature_are_refused(fn: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"define it as batch_at\(step, rank, world\)"):
        make(fn, batch_size=None)


def test_generator_and_async_functions_are_refused() -> None:
    def generator(step: int, rank: int, world: int) -> Iterator[int]:
        yield step

    async def coroutine(step: int, rank: int, world: int) -> int:
        return step

    async def both(step: int, rank: int, world: int) -> Any:
        yield step

    for fn in (generator, coroutine, both):
        with pytest.raises(UserError, match="return the batch from a plain function"):
            make(fn, batch_size=None)


@pytest.mark.parametrize(
    "fn",
    [
        lambda step, rank, world: (item for item in range(step)),
        lambda step, rank, world: iter([step]),
        lambda step, rank, world: map(str, [step]),
    ],
    ids=["generator", "iterator", "map"],
)
def test_a_batch_that_can_be_read_only_once_is_refused(fn: Callable[..., Any]) -> None:
    source = make(fn, batch_size=None, rank=1, world_size=2)
    with pytest.raises(UserError, match=r"for step 3 on rank 1.*return the batch itself"):
        source.at(3)


def test_an_error_in_the_function_says_where() -> None:
    def batch_at(step: int, rank: int, world: int) -> int:
        return 1 // (step - 2)

    source = make(batch_at, batch_size=None)
    with pytest.raises(ZeroDivisionError) as caught:
        source.at(2)
    (note,) = caught.value.__notes__
    assert note.startswith("everstep: in ")
    assert note.endswith("batch_at, batch of step 2, rank 0")


@pytest.mark.parametrize("argument", [{"batch_size": 4}, {"batch_size": None, "collate": list}])
def test_arguments_for_data_sets_have_no_meaning_with_functions(argument: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="has no meaning with a function"):
        make(lambda step, rank, world: step, **argument)


def test_sources_can_be_told_from_other_protected_things() -> None:
    assert isinstance(make(Squares(3)), BatchSource)
    assert isinstance(make(max, batch_size=None), BatchSource)
    model = torch.nn.Linear(1, 1)
    others = (model, torch.optim.SGD(model.parameters()), torch.ones(2), Squares(3), [model])
    assert not any(isinstance(other, BatchSource) for other in others)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([], "is empty"),
        (Squares(0), "is empty"),
        (Stream(), "Stream object.*an iterable can't go back"),
        (NoLength(), "define __len__"),
        (DataLoader(Squares(3)), "DataLoader.*give its data set"),
        (iter([1, 2]), "list_iterator.*an iterable can't go back"),
        ({1, 2}, "set object"),
        (Squares, "the class Squares: give an object of it"),
        ("corpus/*.txt", "open the files in a data set"),
        (b"corpus", "open the files in a data set"),
        (None, "NoneType object"),
        (7, "int object"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_source_is_refused_with_what_to_do(source: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(source)
    if not callable(source):
        with pytest.raises(UserError):
            FunctionSource(source, rank=0, world_size=1)


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, "4", True])
def test_batch_sizes_that_are_no_numbers_of_samples_are_refused(batch_size: Any) -> None:
    with pytest.raises(UserError, match="batch_size is"):
        make(Squares(3), batch_size=batch_size)


def test_a_data_set_needs_a_batch_size() -> None:
    with pytest.raises(UserError, match="needs batch_size="):
        make(Squares(3), batch_size=None)


@pytest.mark.parametrize("seed", [None, 1.5, "seed", True])
def test_seeds_that_are_no_integers_are_refused(seed: Any) -> None:
    with pytest.raises(UserError, match="seed is"):
        make(Squares(3), seed=seed)


@pytest.mark.parametrize("step", [0, -1])
def test_steps_count_from_one(step: int) -> None:
    for source in (make(Squares(3)), make(lambda step, rank, world: step, batch_size=None)):
        with pytest.raises(ValueError, match="steps count from 1"):
            source.at(step)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    for source, batch_size in ((Squares(3), 2), (lambda step, rank, world: step, None)):
        with pytest.raises(ValueError, match="it must be in range"):
            make(source, batch_size=batch_size, rank=rank, world_size=world_size)


def test_another_number_of_ranks_goes_on_with_the_sample_after_the_last() -> None:
    def of(world: int, rank: int) -> DatasetSource:
        return DatasetSource(range(1000), batch_size=4, seed=1, rank=rank, world_size=world)

    def step(sources: list[DatasetSource], number: int) -> list[int]:
        return [sample for source in sources for sample in source.samples(number)]

    three = [of(3, rank) for rank in range(3)]
    begun = [sample for number in range(1, 6) for sample in step(three, number)]
    assert three[0].position(5) == len(begun) == 60
    two = [of(2, rank) for rank in range(2)]
    for source in two:
        source.go_on(5, three[0].position(5))
    gone_on = [sample for number in range(6, 9) for sample in step(two, number)]
    straight = of(1, 0)
    assert begun + gone_on == [s for number in range(1, 22) for s in straight.samples(number)]
    five = of(5, 0)
    five.go_on(8, two[0].position(8))
    assert five.samples(9) == straight.samples(22)
