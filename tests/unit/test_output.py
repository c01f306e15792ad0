"""Worker output: lines, tail, log; pipes that stay open."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.output import MAX_LINE_BYTES, TAIL_BYTES, LineSplitter, Output

LINES = st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=8))


@given(lines=LINES, data=st.data())
def test_lines_are_whole_however_the_bytes_are_cut(lines: list[str], data: st.DataObject) -> None:
    whole = "".join(line + "\n" for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    splitter = LineSplitter()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += splitter.feed(whole[start:end])
    assert found == lines
    assert splitter.flush() == []


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\r\nb\n", ["a", "b"]),
        (b" 10%\r 50%\r100%\n", ["100%"]),
        (b" 10%\r 50%\r\n", [" 50%"]),
        (b"\xff\n", ["\N{REPLACEMENT CHARACTER}"]),
        (b"no end", []),
    ],
)
def test_what_a_terminal_would_show(data: bytes, lines: list[str]) -> None:
    assert LineSplitter().feed(data) == lines


def test_a_line_without_an_end_does_not_grow_for_ever() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(b"x" * (2 * MAX_LINE_BYTES + 1))
    assert [len(line) for line in lines] == [MAX_LINE_BYTES, MAX_LINE_BYTES]
    assert splitter.flush() == ["x"]
    assert splitter.flush() == []


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Case:
    def __init__(self, loop: asyncio.AbstractEventLoop, folder: Path) -> None:
        self.lines: list[tuple[str, str]] = []
        self.log = folder / "log"
        self.output = Output(loop, self.log, lambda *line: self.lines.append(line))


def test_both_streams_go_to_log_and_watcher(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    case = Case(loop, tmp_path)
    out, err = case.output.open_pipe("stdout"), case.output.open_pipe("stderr")
    os.write(out, b"one\ntw")
    case.output.drain()
    os.write(err, b"oops\n")
    case.output.drain()
    os.write(out, b"o\nlast words")
    os.close(out)
    os.close(err)
    case.output.drain()
    case.output.close()
    case.output.close()
    assert case.lines == [
        ("stdout", "one"),
        ("stderr", "oops"),
        ("stdout", "two"),
        ("stdout", "last words"),
    ]
    assert case.log.read_bytes() == b"one\ntwoops\no\nlast words"


def test_a_pipe_that_somebody_still_holds_is_not_waited_for(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    case = Case(loop, tmp_path)
    out = case.output.open_pipe("stdout")
    os.write(out, b"half")
    case.output.drain()
    case.output.close()
    assert case.lines == [("stdout", "half")]
    os.close(out)


def test_the_loop_reads_by_itself(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    came = loop.create_future()
    output = Output(loop, tmp_path / "log", lambda *line: came.set_result(line))
    out = output.open_pipe("stderr")
    os.write(out, b"hello\n")
    os.close(out)
    line = loop.run_until_complete(asyncio.wait_for(came, 5))
    assert line == ("stderr", "hello")
    output.close()


def test_the_tail_is_bounded_and_the_log_is_not(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    case = Case(loop, tmp_path)
    out = case.output.open_pipe("stdout")
    line = b"x" * 1023 + b"\n"
    count = 2 * TAIL_BYTES // len(line)
    for _ in range(count):
        os.write(out, line)
        case.output.drain()
    os.write(out, b"the end\n")
    case.output.drain()
    os.close(out)
    case.output.close()
    assert case.log.stat().st_size == count * len(line) + 8
    assert len(case.output.detail()) <= TAIL_BYTES
    assert case.output.detail().splitlines()[-1] == "the end"
