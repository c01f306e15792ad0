"""What a worker tells of a failure, one short line for people and all of it as detail; and how long
it waits for others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from everstep.types import CauseKind
from everstep.wire import messages
from everstep.worker import runtime
from everstep.worker.control import Stopped
from everstep.worker.groups import OuterGroup
from everstep.worker.runtime import Worker, exception_cause


def told(error: BaseException) -> list[messages.Fault]:
    sent: list[Any] = []
    worker = SimpleNamespace(
        committed=4,
        control=SimpleNamespace(send=sent.append),
        progress=SimpleNamespace(words=lambda: "in step 5 (fence)"),
    )
    Worker._on_fault(cast("Worker", worker), 3, error)
    return sent


def test_a_broken_collective_is_told_shortly_and_kept_whole() -> None:
    error = (
        "[/gloo/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. Check it. GLHF!"
    )
    [fault] = told(RuntimeError(error))
    assert (fault.generation, fault.step) == (3, 5)
    assert fault.cause.kind is CauseKind.PEER
    assert fault.cause.text == "lost touch with a peer (connection reset)"
    assert fault.cause.detail == error
    assert fault.cause.where == "in step 5 (fence)"


def test_a_collective_that_was_stopped_is_no_fault() -> None:
    assert told(Stopped(3)) == []


@pytest.mark.parametrize(("generation", "timeout_s"), [(3, 900.0), (4, 10.0)])
def test_ranks_come_late_to_a_group_that_the_script_makes_and_never_to_a_recovery(
    generation: int, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    spec = SimpleNamespace(
        generation=3,
        meet_timeout_s=900.0,
        build_timeout_s=10.0,
        collective_timeout_s=600.0,
        host="127.0.0.1",
    )
    worker = SimpleNamespace(
        spec=spec,
        device=None,
        control=SimpleNamespace(exchange=lambda *args: waited.append(args[-1])),
    )

    def build(rank: int, size: int, exchange: Callable[[bytes], object], **more: object) -> None:
        exchange(b"")
        assert more["build_timeout_s"] == 10.0, "they are all there"

    monkeypatch.setattr(runtime, "GlooInner", build)
    group = SimpleNamespace(name="of ranks 0, 1", rank=lambda: 0, size=lambda: 2)
    Worker._make_inner(cast("Worker", worker), cast("OuterGroup", group), generation)
    assert waited == [timeout_s]


class Odd(Exception):
    """An error of a module that is not the script."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (ValueError(""), "ValueError"),
        (KeyError("x"), "KeyError: 'x'"),
        (
            RuntimeError("\nno graph\n\nSet TORCHDYNAMO_VERBOSE=1 for more\n"),
            "RuntimeError: no graph",
        ),
        (Odd("so"), f"{__name__}.Odd: so"),
    ],
)
def test_an_exception_is_told_by_its_type_and_the_first_line_of_its_message(
    error: Exception, text: str
) -> None:
    error.add_note("everstep: batch of step 5, rank 1")
    cause = exception_cause(error, "in step 5")
    assert (cause.kind, cause.text, cause.where) == (CauseKind.EXCEPTION, text, "in step 5")
    assert "batch of step 5, rank 1" in cause.detail
    assert cause.signature == f"{type(error).__qualname__}: {error}"
