"""What a worker tells of a failure: one short line for people, and all of it as detail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from everstep.types import CauseKind
from everstep.wire import messages
from everstep.worker.control import Stopped
from everstep.worker.runtime import Worker


def told(error: BaseException) -> list[messages.Fault]:
    sent: list[Any] = []
    worker = SimpleNamespace(committed=4, control=SimpleNamespace(send=sent.append))
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


def test_a_collective_that_was_stopped_is_no_fault() -> None:
    assert told(Stopped(3)) == []
