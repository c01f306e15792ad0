"""Batches by step number: what `run.data` makes of a data set or of a function.

Theory of operation
    A step that failed is done again, perhaps by a process that was not there before. So there is no
    iterator and no place in it to save: a source answers `at(step)`, and the answer depends on
    nothing but the step, the seed, the rank and the world size. Each attempt asks again and gets a
    fresh batch.

    `DatasetSource` cuts the endless order of `everstep.data.order` into global batches of
    batch_size * world_size samples: step s has the positions from (s-1)*B*W to s*B*W, of which rank
    r takes B, in order of rank. Therefore the sample numbers of a step are a function of (seed,
    step) alone: with equal B*W the global batch is the same in every world size. Epochs run into
    each other; a batch at the seam holds samples of both, so no sample is ever dropped and no step
    is short. `FunctionSource` leaves all of this to a function of the script.

    Samples are read and collated when they are asked for, by the thread that asks. Random
    augmentation draws from the caller's generators, which are seeded for the step before it asks.

What it does not know
    Whether `dataset[i]` or the function gives the same each time: an object that changes its
    answers, or hands out the same tensor twice and has it changed in place by the step, breaks the
    redo. Whether other ranks were given the same seed and size: `identity` says what must be
    agreed. Prefetching, worker processes, streams without numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset, default_collate

from everstep.data.order import Order
from everstep.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's batch of one step. `value`: what the script gets. `samples`: the numbers of the
    samples in it, in order, or None where only the script knows them."""

    value: Any
    samples: tuple[int, ...] | None


@runtime_checkable
class BatchSource(Protocol):
    """Gives the batch of any step. `isinstance` tells it from other protected things."""

    @property
    def identity(self) -> str:
        """What all ranks of a job, and all incarnations of a rank, must have alike for the data to
        be the same."""
        ...

    def at(self, step: int) -> Batch:
        """A fresh batch of `step` (1 is the first), the same each time.

        Raises ValueError when `step` is below 1, and whatever the data set or function raises, with
        a note that says what was being read. Blocks while it reads. One thread at a time.
        """
        ...


class FunctionSource:
    """Batches from a function `batch_at(step, rank, world)`."""

    def __init__(self, fn: Callable[[int, int, int], Any], *, rank: int, world_size: int) -> None:
        """Raises UserError when `fn` can't be called so, or is a generator or async function."""
        _check_place(rank, world_size)
        _check_function(fn)
        self._fn = fn
        self._rank = rank
        self._world_size = world_size

    @property
    def identity(self) -> str:
        """See `BatchSource.identity`; what the function does is its author's to keep alike."""
        return f"function {_name_of(self._fn)}, world size {self._world_size}"

    def at(self, step: int) -> Batch:
        """See `BatchSource.at`. Raises UserError when the function returns an iterator."""
        _check_step(step)
        try:
            value = self._fn(step, self._rank, self._world_size)
        except Exception as error:
            error.add_note(
                f"everstep: in {_name_of(self._fn)}, batch of step {step}, rank {self._rank}"
            )
            raise
        if isinstance(value, Iterator):
            raise UserError(
                f"{_name_of(self._fn)} returned an iterator ({type(value).__name__}) for step "
                f"{step} on rank {self._rank}; a failed step is done again with its batch, and an "
                f"iterator can be read only once: return the batch itself (a tensor, a tuple, a "
                f"list(...) of it)"
            )
        return Batch(value=value, samples=None)


class DatasetSource:
    """Batches from a map-style data set, shuffled anew each epoch by `seed`."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int | bytes,
        rank: int,
        world_size: int,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        """Args: `dataset` has `__getitem__` and `__len__` (`__getitems__` is used where it is
        there); its length is read once, here. `batch_size` in samples per rank and step. `collate`
        makes a batch of a list of samples.

        Raises UserError when `dataset` is empty or not map-style, or `batch_size` is not a whole
        number above 0.
        """
        _check_place(rank, world_size)
        size = _size_of(dataset)
        if not _is_whole(batch_size) or batch_size < 1:
            raise UserError(
                f"run.data: batch_size is {batch_size!r}; give the number of samples per rank and "
                f"step, 1 or more"
            )
        if not (_is_whole(seed) or isinstance(seed, bytes)):
            raise UserError(
                f"run.data: seed is {seed!r}; give an integer or bytes, the same on every rank"
            )
        self._dataset = dataset
        self._size = size
        self._order = Order(size, seed)
        self._seed = seed
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self._collate = collate
        self._shift = 0  # by how many samples this order is ahead of one that began here

    @property
    def identity(self) -> str:
        """See `BatchSource.identity`."""
        return (
            f"dataset {type(self._dataset).__name__} of {self._size} samples, "
            f"batch size {self._batch_size}, seed {self._seed!r}, world size {self._world_size}"
        )

    def samples(self, step: int) -> tuple[int, ...]:
        """The numbers of this rank's samples in `step` (1 is the first). Raises ValueError below 1.
        Any thread."""
        _check_step(step)
        start = self.position(step - 1) + self._rank * self._batch_size
        return tuple(self._order.samples(start, self._batch_size))

    def position(self, step: int) -> int:
        """How many samples all ranks together have taken by the end of `step`."""
        return step * self._world_size * self._batch_size + self._shift

    def go_on(self, step: int, position: int) -> None:
        """By the end of `step`, `position` samples were taken, by however many ranks: the next
        steps go on from there, so that none is left out and none is taken twice."""
        self._shift += position - self.position(step)

    def at(self, step: int) -> Batch:
        """See `BatchSource.at`."""
        samples = self.samples(step)
        try:
            value = self._collate(_read(self._dataset, samples))
        except Exception as error:
            error.add_note(
                f"everstep: batch of step {step}, rank {self._rank}, samples {list(samples)}"
            )
            raise
        return Batch(value=value, samples=samples)


def make_source(
    source: Any,
    *,
    batch_size: int | None,
    seed: int | bytes,
    rank: int,
    world_size: int,
    collate: Callable[[list[Any]], Any] | None = None,
) -> BatchSource:
    """What `run.data(source, ...)` gives: a map-style data set's batches, or a function's.

    Args: `batch_size` in samples per rank and step, `collate` as in `DatasetSource`; both for data
    sets only. Raises UserError when `source` is neither, or an argument is missing, wrong or has no
    meaning. Blocks: no.
    """
    if _is_map_style(source):
        if batch_size is None:
            raise UserError(
                "run.data: a data set needs batch_size=, the number of samples per rank and step"
            )
        return DatasetSource(
            source,
            batch_size=batch_size,
            seed=seed,
            rank=rank,
            world_size=world_size,
            collate=default_collate if collate is None else collate,
        )
    _check_function(source)
    for name, value in (("batch_size", batch_size), ("collate", collate)):
        if value is not None:
            raise UserError(
                f"run.data: {name}= has no meaning with a function: {_name_of(source)} itself "
                f"makes the whole batch of one rank; leave it out"
            )
    return FunctionSource(source, rank=rank, world_size=world_size)


def _is_map_style(source: Any) -> bool:
    """IterableDataset inherits `__getitem__` without having it; text has it and is no data set."""
    if isinstance(source, type | str | bytes | IterableDataset):
        return False
    return hasattr(source, "__getitem__")


def _refusal(source: Any) -> str:
    """Why `source` is no source of batches, and what to do."""
    takes = "run.data takes a map-style data set or a function batch_at(step, rank, world)"
    what = f"{type(source).__name__} object"
    if isinstance(source, type):
        return f"{takes}, and got the class {source.__name__}: give an object of it"
    if isinstance(source, str | bytes):
        return f"{takes}, and got the text {source!r}: open the files in a data set and give that"
    if isinstance(source, DataLoader):
        return (
            f"{takes}, and got a {what}, which can't give the batch of a step again: give its "
            f"data set, with batch_size= and collate="
        )
    return (
        f"{takes}, and got a {what}. It must have __getitem__ and __len__, because a failed step "
        f"is done again with the same batch: an iterable can't go back. Give it numbered access, "
        f"or write batch_at so that it makes the batch from the step's number"
    )


def _size_of(dataset: Any) -> int:
    """The number of samples of `dataset`. Raises UserError when it isn't map-style, or is empty."""
    if not _is_map_style(dataset):
        raise UserError(_refusal(dataset))
    try:
        size = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise UserError(
            f"run.data: {type(dataset).__name__} has __getitem__ but no usable __len__ ({error}); "
            f"the shuffle needs to know how many samples there are: define __len__"
        ) from error
    if size < 1:
        raise UserError(
            f"run.data: the data set ({type(dataset).__name__}) is empty; check the path or filter "
            f"it was made from"
        )
    return size


def _check_function(fn: Callable[..., Any]) -> None:
    """Raise UserError unless `fn(step, rank, world_size)` can be called and may return a batch."""
    if not callable(fn) or isinstance(fn, type):
        raise UserError(_refusal(fn))
    name = _name_of(fn)
    if (
        inspect.isgeneratorfunction(fn)
        or inspect.isasyncgenfunction(fn)
        or inspect.iscoroutinefunction(fn)
    ):
        raise UserError(
            f"run.data: {name} is a generator or async function; a batch must be made anew at each "
            f"attempt of its step: return the batch from a plain function"
        )
    try:
        signature = inspect.signature(fn)
    except ValueError:
        return  # some built-in callables have no signature to read; the first call will tell
    try:
        signature.bind(1, 0, 1)
    except TypeError as error:
        raise UserError(
            f"run.data: {name}{signature} can't be called with three positional arguments "
            f"({error}); define it as batch_at(step, rank, world)"
        ) from error


def _read(dataset: Any, samples: Sequence[int]) -> list[Any]:
    """The samples of the given numbers, by one call where the data set offers it."""
    if getattr(dataset, "__getitems__", None) is not None:
        return list(dataset.__getitems__(list(samples)))
    return [dataset[number] for number in samples]


def _name_of(fn: Any) -> str:
    """A name for messages; never the repr, whose address differs between ranks."""
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def _is_whole(value: Any) -> bool:
    """Whether `value` is an integer; True and False are not meant as numbers."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_place(rank: int, world_size: int) -> None:
    """A wrong place would read another rank's data without a word."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; it must be in range({world_size})")


def _check_step(step: int) -> None:
    """A step below 1 would read from the end of an epoch that never was."""
    if step < 1:
        raise ValueError(f"step is {step}; steps count from 1")
