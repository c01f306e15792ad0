"""ResultReader tells from a running function's variables what it will return, or that it can't."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from everstep.worker import codec
from everstep.worker.capsule import (
    MAX_RESULT_BYTES,
    Contents,
    ResultReader,
    encode_result,
    flatten,
)

torch.set_num_threads(1)
Pair = namedtuple("Pair", "a b")


class Bench:
    """Runs a step function as the transaction does; the function calls the gate, which reads it."""

    def __init__(self, make: Callable[[Callable[[], None]], Callable[[int], Any]]) -> None:
        self.names: dict[str, Any] = {}
        self.predicted: bytes | None = None
        self.candidates: dict[str, bytes] = {}
        self.function = make(self._gate)
        self.reader = ResultReader(self.function, threading.get_ident())

    def _gate(self) -> None:
        self.names = self.reader.locals()
        self.predicted = self.reader.predict(self.names)
        self.candidates = self.reader.candidates(self.names)

    def run(self, step: int) -> Any:
        result = self.function(step)
        self.was_known = self.reader.knows(self.names)
        if not self.reader.failed and not self.was_known:
            self.reader.learn(result, self.names)
        return result

    def right(self, step: int) -> bool:
        """Whether what was predicted in a further step is what it returned."""
        result = self.run(step)
        return self.predicted is not None and self.predicted == encode_result(result)


def _loss(step: int) -> torch.Tensor:
    return torch.full((4,), float(step)).requires_grad_().square().sum()


def make_detached(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        loss = _loss(step)
        gate()
        return loss.detach()

    return step_function


def make_item(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        loss = _loss(step)
        gate()
        return loss.item()

    return step_function


def make_int_item(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        correct = torch.tensor([True] * (step + 3)).sum()
        gate()
        return {"correct": correct.item()}

    return step_function


def make_nested(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        loss = _loss(step)
        count, name, flag, nothing = step * 10, f"step {step}", step % 2 == 0, None
        table = torch.arange(6.0).reshape(2, 3) * step
        gate()
        return {
            "loss": loss.detach(),
            "more": [count, (name, flag), {"t": table}],
            "none": nothing,
            "empty": [],
        }

    return step_function


def make_alias(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        loss = _loss(step)
        report = loss.detach()
        gate()
        return report, report

    return step_function


def make_whole_container(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        loss = _loss(step)
        unused = [1, 2]
        gate()
        return [loss.detach(), len(unused) and None]

    return step_function


def make_nan(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        loss = _loss(step) * float("nan")
        number = float("nan") * step
        gate()
        return loss.item(), number

    return step_function


def make_wrapped(gate: Callable[[], None]) -> Callable[[int], Any]:
    inner = make_detached(gate)

    @functools.wraps(inner)
    def outer(step: int) -> Any:
        noise = step + 1000
        return inner(noise - 1000)

    return outer


def make_no_grad(gate: Callable[[], None]) -> Callable[[int], Any]:
    @torch.no_grad()
    def step_function(step: int) -> Any:
        loss = _loss(step)
        gate()
        return loss

    return step_function


def make_method(gate: Callable[[], None]) -> Callable[[int], Any]:
    class Trainer:
        def step(self, step: int) -> Any:
            loss = _loss(step)
            gate()
            return loss.detach()

    return Trainer().step


def make_deep_gate(gate: Callable[[], None]) -> Callable[[int], Any]:
    class Hooked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            gate()
            return grad

    def step_function(step: int) -> Any:
        loss = Hooked.apply(_loss(step))  # type: ignore[no-untyped-call]
        loss.backward()
        return loss.detach()

    return step_function


KNOWN = [
    make_detached, make_item, make_int_item, make_nested, make_alias, make_whole_container,
    make_nan, make_wrapped, make_no_grad, make_method, make_deep_gate,
]  # fmt: skip


@pytest.mark.parametrize("make", KNOWN, ids=lambda make: make.__name__)
def test_after_one_return_every_later_one_is_known_in_time(make: Any) -> None:
    bench = Bench(make)
    bench.run(1)
    assert not bench.was_known
    assert not bench.reader.failed
    assert all(bench.right(step) for step in range(2, 6))


@pytest.mark.parametrize("make", KNOWN, ids=lambda make: make.__name__)
def test_a_replacement_tells_the_first_result_from_its_predecessors_candidates(make: Any) -> None:
    predecessor, replacement = Bench(make), Bench(make)
    result = predecessor.run(3)
    replacement.run(5)  # the rehearsal
    told = replacement.reader.from_candidates(predecessor.candidates)
    assert told == encode_result(result)


def test_candidates_are_kept_only_until_the_first_return() -> None:
    bench = Bench(make_nested)
    bench.run(1)
    assert set(bench.candidates) == {"step", "loss", "count", "name", "flag", "table"}
    bench.run(2)
    assert bench.candidates == {}


# ---------------------------------------------------------------- what can't be told


def make_computed(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        loss = _loss(step)
        gate()
        return loss * 2

    return step_function


def make_constant(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        gate()
        return 3.75

    return step_function


def make_object(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        thing = object()
        gate()
        return thing

    return step_function


def make_named_tuple(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        loss = _loss(step)
        gate()
        return Pair(loss, loss)

    return step_function


def make_shape(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        loss = torch.ones(2, 3)
        gate()
        return loss, loss.shape

    return step_function


def make_sparse(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        table = torch.eye(3).to_sparse()
        gate()
        return table

    return step_function


def make_large(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        large = torch.zeros(MAX_RESULT_BYTES // 4 + 1)
        gate()
        return large

    return step_function


def make_transposed(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        table = torch.arange(4.0).reshape(2, 2)
        gate()
        return table.t()

    return step_function


def make_conjugate(gate: Callable[[], None]) -> Callable[[int], Any]:
    def step_function(step: int) -> Any:
        wave = torch.complex(torch.ones(2), torch.ones(2))
        gate()
        return wave.conj()

    return step_function


@pytest.mark.parametrize(
    "make",
    [make_computed, make_constant, make_object, make_named_tuple, make_shape, make_sparse,
     make_large, make_transposed, make_conjugate],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_what_cannot_be_told_is_said_and_breaks_nothing(make: Any) -> None:
    bench = Bench(make)
    bench.run(1)
    assert bench.reader.failed
    bench.run(2)
    assert bench.predicted is None


@pytest.mark.parametrize("container", [OrderedDict, dict])
def test_a_returned_mapping_is_predicted_as_it_is_or_not_at_all(container: Any) -> None:
    def make(gate: Callable[[], None]) -> Callable[[int], Any]:
        def step_function(step: int) -> Any:
            loss = _loss(step)
            gate()
            return container(loss=loss.detach())

        return step_function

    bench = Bench(make)
    bench.run(1)
    result = bench.run(2)
    assert bench.predicted in (None, encode_result(result))
    assert (bench.predicted is not None) == (container is dict)


def test_a_callable_without_code_is_not_told() -> None:
    linear = torch.nn.Linear(1, 1)
    assert ResultReader(linear, threading.get_ident()).failed
    assert not ResultReader(functools.partial(_loss, 1), threading.get_ident()).knows({})


def test_an_unwrapped_decorator_that_adds_to_the_result_is_never_predicted_wrong() -> None:
    def make(gate: Callable[[], None]) -> Callable[[int], Any]:
        inner = make_detached(gate)

        @functools.wraps(inner)
        def outer(step: int) -> Any:
            return {"loss": inner(step), "step": step}

        return outer

    bench = Bench(make)
    bench.run(1)
    for step in range(2, 4):
        result = bench.run(step)
        assert bench.predicted in (None, encode_result(result))


def test_two_counters_that_were_equal_are_not_mixed_up() -> None:
    """Both are 0 in the first step; which of them is returned is open until they differ."""

    def make(gate: Callable[[], None]) -> Callable[[int], Any]:
        def step_function(step: int) -> Any:
            skipped, accepted = 0, step // 2
            gate()
            del skipped
            return accepted

        return step_function

    bench = Bench(make)
    bench.run(1)
    assert not bench.reader.failed
    bench.run(2)  # now they differ
    assert bench.predicted is None
    assert bench.right(3)
    assert bench.right(4)


def test_equal_tensors_and_numbers_are_not_mixed_up() -> None:
    def make(gate: Callable[[], None]) -> Callable[[int], Any]:
        def step_function(step: int) -> Any:
            penalty = torch.tensor(0.0)
            loss = torch.tensor(float(step - 1))
            gate()
            return loss.item() + 0 * penalty.numel()

        return step_function

    bench = Bench(make)
    bench.run(1)
    bench.run(2)
    assert bench.predicted is None
    assert bench.right(3)


def test_a_variable_changed_in_place_after_the_gate_is_told_from_the_result() -> None:
    def make(gate: Callable[[], None]) -> Callable[[int], Any]:
        def step_function(step: int) -> Any:
            loss = torch.tensor(float(step))
            gate()
            loss += 1
            return loss

        return step_function

    bench = Bench(make)
    bench.run(1)
    assert not bench.right(2)  # which is what the transaction compares


def test_a_variable_that_is_missing_makes_the_result_unknown_not_wrong() -> None:
    def make(gate: Callable[[], None]) -> Callable[[int], Any]:
        def step_function(step: int) -> Any:
            if step != 2:
                loss = torch.tensor(float(step))
            gate()
            if step == 2:
                loss = torch.tensor(2.0)
            return loss

        return step_function

    bench = Bench(make)
    bench.run(1)
    bench.run(2)
    assert bench.predicted is None


def test_a_number_that_became_a_larger_tensor_breaks_nothing() -> None:
    def make(gate: Callable[[], None]) -> Callable[[int], Any]:
        def step_function(step: int) -> Any:
            values = torch.ones(step)
            gate()
            return values.sum().item() if step > 1 else values.item()

        return step_function

    bench = Bench(make)
    bench.run(1)
    assert not bench.right(2)


def test_odd_variables_are_no_candidates_and_break_nothing() -> None:
    def make(gate: Callable[[], None]) -> Callable[[int], Any]:
        def step_function(step: int) -> Any:
            sparse, meta, path = torch.eye(3).to_sparse(), torch.empty(2, device="meta"), "\udc80"
            loss = _loss(step)
            gate()
            del sparse, meta, path
            return loss.detach()

        return step_function

    bench = Bench(make)
    bench.run(1)
    assert set(bench.candidates) == {"step", "loss"}
    assert bench.right(2)


def test_an_exception_in_the_function_leaves_the_reader_as_it_was() -> None:
    def make(gate: Callable[[], None]) -> Callable[[int], Any]:
        def step_function(step: int) -> Any:
            loss = _loss(step)
            gate()
            if step == 2:
                raise RuntimeError("on purpose")
            return loss.detach()

        return step_function

    bench = Bench(make)
    bench.run(1)
    with pytest.raises(RuntimeError, match="on purpose"):
        bench.run(2)
    assert bench.reader.locals() == {}
    assert bench.right(3)


def test_another_threads_frame_is_not_read() -> None:
    bench = Bench(make_detached)
    bench.reader = ResultReader(bench.function, threading.get_ident())
    thread = threading.Thread(target=bench.function, args=(1,))
    thread.start()
    thread.join()
    assert bench.names == {}


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (make_detached, "tensor(nan)"),
        (make_item, "nan"),
        (make_alias, "(tensor(nan), tensor(nan))"),
        (make_named_tuple, "None"),
        (make_computed, "tensor(nan)"),
        (
            make_nested,
            "{'loss': tensor(nan), 'more': [None, (None, None), {'t': tensor([[nan, nan, nan],\n"
            "        [nan, nan, nan]])}], 'none': None, 'empty': []}",
        ),
    ],
)
def test_a_lost_result_has_the_form_of_the_others_and_no_value(make: Any, wanted: str) -> None:
    bench = Bench(make)
    assert bench.reader.placeholder() is None
    bench.run(1)
    for _ in range(2):
        assert repr(bench.reader.placeholder()) == wanted


def test_a_result_that_changes_its_form_is_learned_anew() -> None:
    def make(gate: Callable[[], None]) -> Callable[[int], Any]:
        def step_function(step: int) -> Any:
            zero, one = 0, step - 1
            gate()
            return [one] if step == 1 else [zero, one, zero]

        return step_function

    bench = Bench(make)
    for step in range(1, 5):
        result = bench.run(step)
        assert bench.predicted in (None, encode_result(result)) or step == 2


# ---------------------------------------------------------------- the small parts


def test_leaves_of_nested_containers() -> None:
    pair = Pair(1, 2)
    assert flatten([1, (2, {"a": 3, "b": [None, []]}), pair]) == [1, 2, 3, None, pair]


def test_results_that_are_too_large_or_no_plain_data_are_not_kept() -> None:
    assert (
        encode_result(torch.zeros(MAX_RESULT_BYTES // 4)) is None
    )  # the header does not fit any more
    assert encode_result(torch.zeros(MAX_RESULT_BYTES // 8)) is not None
    assert encode_result(object()) is None
    assert encode_result(None) is not None


def test_contents_travel() -> None:
    contents = Contents(
        step=3,
        result=encode_result((1, None)),
        candidates={"loss": codec.encode(torch.tensor(1.0), "loss")},
        buffers={},
        state=codec.encode({"best": float("inf")}, "run.state"),
        log={3: {"x": 1.0}},
        fence=None,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(contents), type=Contents) == contents
