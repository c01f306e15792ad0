"""What several nodes see, as one picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.agent import lookout
from everstep.core.events import Inspected
from everstep.core.hang import Evidence, Stance
from everstep.wire.nodes import Shown


def seen(rank: int) -> tuple[Evidence, ...]:
    return (
        Evidence(
            rank=rank,
            incarnation=1,
            stance=Stance.WAITING,
            where="in step 3",
            step=3,
            generation=1,
            silent_s=2.0,
            since_s=5.0,
            overdue=True,
        ),
    )


class Case:
    def __init__(self, folder: Path) -> None:
        self.told: list[list[int]] = []
        self.inspected: list[Inspected] = []
        self.asked: list[int] = []
        self.one = lookout.Lookout(
            folder,
            lambda evidence: self.told.append([each.rank for each in evidence]),
            self.inspected.append,
        )

    def silent(self, node: int, *others: int) -> None:
        self.one.silent(node, seen(node), others, self.asked.append)


def test_a_node_that_is_alone_is_heard_at_once(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.silent(0)
    case.silent(0)
    assert case.told == [[0], [0]]


def test_a_silence_is_told_with_what_the_others_see(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.silent(1, 0, 2)
    case.silent(2, 0, 1)  # it has something to tell by itself, and is asked all the same
    assert (case.asked, case.told) == ([0, 2], [])
    case.one.looked(2, seen(2))
    case.one.looked(0, seen(0))
    case.one.looked(0, seen(0))
    assert case.told == [[0, 1, 2]]


def test_a_node_that_is_lost_is_waited_for_no_longer(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.silent(1, 0, 2)
    case.one.looked(0, seen(0))
    case.one.lost(2)
    assert case.told == [[0, 1]]
    case.silent(1, 0)
    case.one.lost(1)
    case.one.looked(0, seen(0))
    assert case.told == [[0, 1], [0]]


def test_stacks_are_told_when_the_last_node_has_shown_them(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.one.inspect({0, 1}, case.asked.append)
    assert case.asked == [0, 1]
    case.one.shown(1, Shown(evidence=seen(1), answers={1: "Thread 1"}))
    assert case.inspected == []
    case.one.shown(0, Shown(evidence=seen(0), unable={0: "stopped by a signal"}))
    (inspected,) = case.inspected
    assert [each.rank for each in inspected.evidence] == [0, 1]
    assert inspected.stacks[0] == "rank 0: stopped by a signal"
    assert "==== rank 1" in Path(inspected.file).read_text()


def test_the_newest_inspections_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "_KEPT_FILES", 3)
    case = Case(tmp_path)
    for _ in range(5):
        case.one.inspect({0}, case.asked.append)
        case.one.shown(0, Shown())
    assert [Path(each.file).name for each in case.inspected] == [
        f"hang-{number}.txt" for number in range(1, 6)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "hang-3.txt",
        "hang-4.txt",
        "hang-5.txt",
    ]
