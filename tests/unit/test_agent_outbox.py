"""A report goes out as fast as it is read, and what is said meanwhile behind it."""

from __future__ import annotations

import pytest

from everstep.agent.outbox import Outbox
from everstep.wire import nodes


def note(number: int) -> nodes.Note:
    return nodes.Note(key=str(number), text="")


class Case:
    """An outbox whose connection is on paper: each message is of one byte."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.unread_bytes = 0
        self.left: list[str] = []
        self.outbox = Outbox(self, self._send)

    def _send(self, message: nodes.FromNode) -> None:
        assert isinstance(message, nodes.Note)
        self.sent.append(int(message.key))
        self.unread_bytes += 1

    def leave(self, why: str) -> None:
        self.left.append(why)

    def read(self) -> None:
        self.unread_bytes = 0
        self.outbox.go_on()


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr("everstep.agent.outbox._MOST_UNREAD_BYTES", 2)
    monkeypatch.setattr("everstep.agent.outbox._MOST_WAITING", 8)
    return Case()


def test_what_is_said_as_it_happens_does_not_wait(case: Case) -> None:
    for number in range(10):
        case.outbox.send(note(number))
    assert case.sent == list(range(10))
    assert not case.outbox.waits


def test_a_report_waits_until_it_is_read_and_the_rest_behind_it(case: Case) -> None:
    case.outbox.send_all(note(number) for number in range(7))
    assert case.sent == [0, 1, 2]
    case.outbox.send(note(7))
    case.read()
    assert case.sent == [0, 1, 2, 3, 4, 5]
    case.outbox.send_all([note(8)])
    assert case.sent == [0, 1, 2, 3, 4, 5]
    case.read()
    assert case.sent == list(range(9))
    assert not case.outbox.waits


def test_nothing_is_left_of_it_with_the_end_of_the_connection(case: Case) -> None:
    case.outbox.send_all(note(number) for number in range(7))
    case.outbox.clear()
    case.read()
    assert case.sent == [0, 1, 2]


def test_who_reads_too_slowly_is_left(case: Case) -> None:
    case.outbox.send_all(note(number) for number in range(11))
    assert not case.left
    case.outbox.send(note(11))
    assert len(case.left) == 1
    assert not case.outbox.waits
