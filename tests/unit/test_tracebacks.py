"""Tracebacks as they are shown: whose frames are left out, and what is held back."""

from __future__ import annotations

from pathlib import Path

import pytest

import everstep
from everstep.observe.tracebacks import Folder, cleaned

HEAD = "Traceback (most recent call last):"
OURS = [
    f'  File "{Path(everstep.__file__).parent}/worker/process.py", line 59, in _guarded',
    "    _run_script(worker.spec.script)",
    "    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
    '  File "<frozen runpy>", line 291, in run_path',
]
SCRIPT = ['  File "train.py", line 7, in <module>', "    main()"]
END = "ValueError: boom"
UNCAUGHT = [HEAD, *OURS, *SCRIPT, END]
CHAIN = "During handling of the above exception, another exception occurred:"


def taken(folder: Folder, lines: list[str], rank: int = 0, incarnation: int = 1) -> list[str]:
    return [shown for line in lines for shown in folder.take(rank, incarnation, line)]


@pytest.mark.parametrize(
    "ours",
    [
        OURS,
        ['  File "/usr/lib/python3.11/runpy.py", line 2, in x', "    y"],
        ['  File "/v/site-packages/everstep/worker/transaction.py", line 3, in x', "    y"],
    ],
)
def test_frames_of_everstep_and_runpy_are_left_out_wherever_they_stand(ours: list[str]) -> None:
    assert cleaned([HEAD, *ours, *SCRIPT, *ours, *SCRIPT, END]) == [HEAD, *SCRIPT, *SCRIPT, END]


def test_frames_of_others_and_other_text_stay() -> None:
    text = [
        "said before",
        HEAD,
        '  File "/home/me/everstep/train.py", line 7, in f',
        "    g()",
        "  [Previous line repeated 3 more times]",
        END,
        "  and more of the message",
        "",
        CHAIN,
        "",
        *UNCAUGHT,
    ]
    assert cleaned(text) == [*text[: -len(UNCAUGHT)], HEAD, *SCRIPT, END]


def test_an_error_in_everstep_alone_stays_whole() -> None:
    alone = [HEAD, *OURS, "AssertionError"]
    assert cleaned(alone) == alone
    assert cleaned([*alone, "", CHAIN, "", *UNCAUGHT])[: len(alone)] == alone


def test_a_place_of_a_syntax_error_stays() -> None:
    place = ['  File "train.py", line 2', "    def f(:", "          ^"]
    assert cleaned([HEAD, *OURS, *place, "SyntaxError: x"]) == [HEAD, *place, "SyntaxError: x"]


def test_the_second_of_two_alike_is_one_line() -> None:
    folder = Folder()
    assert taken(folder, UNCAUGHT) == [HEAD, *SCRIPT, END]
    assert taken(folder, UNCAUGHT, rank=1) == [f"{END} (its traceback is above)"]
    other = [*UNCAUGHT[:-1], "ValueError: another"]
    assert taken(folder, other, incarnation=2) == [HEAD, *SCRIPT, "ValueError: another"]


def test_a_chain_that_was_shown_leaves_nothing_between_its_parts() -> None:
    folder = Folder()
    chain = [*UNCAUGHT, "", CHAIN, "", *UNCAUGHT[:-1], "KeyError: 1"]
    assert CHAIN in taken(folder, chain)
    again = taken(folder, [*chain, "after", ""], rank=1)
    assert [line.split(":")[0] for line in again] == ["ValueError", "KeyError", "after", ""]


def test_what_the_script_prints_itself_is_not_held_back_nor_folded() -> None:
    folder = Folder()
    caught = [HEAD, *SCRIPT, END]
    for _ in range(2):
        assert folder.take(0, 1, caught[0]) == []
        assert folder.take(0, 1, caught[1]) == caught[:2]
        assert taken(folder, caught[2:]) == caught[2:]
        assert taken(folder, [HEAD, "no frame"]) == [HEAD, "no frame"]


def test_a_traceback_without_an_end_is_given_out() -> None:
    folder = Folder()
    assert taken(folder, UNCAUGHT[:-1], rank=3, incarnation=2) == []
    assert folder.rest() == [(3, 2, UNCAUGHT[:-1])]
    assert folder.rest() == []
    endless = [HEAD, OURS[0], *["    x"] * 5000]
    assert taken(folder, endless) == endless
