"""The journal: whole lines, a cut last one, a version."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.errors import UserError
from everstep.observe.journal import JournalError, JournalWriter, read_journal
from everstep.observe.rundir import RunDirectory
from everstep.types import Cause, CauseKind


class DeposedError(Exception):
    """Raised by a guard."""


def write_three(path: Path) -> list[dict[str, Any]]:
    ticks = itertools.count(10)
    writer = JournalWriter(path, run_id="r", wall_time=1.5, clock=lambda: float(next(ticks)))
    cause = Cause(kind=CauseKind.SIGNAL, text="rank 1 was killed ö by SIGKILL", signal=9)
    lines = [
        writer.header,
        writer.write("step", {"step": 1, "generation": 0}),
        writer.write("incident_opened", {"incident": 1, "cause": cause, "args": ("a", "b")}),
    ]
    writer.close()
    return lines


def test_what_is_written_is_read(tmp_path: Path) -> None:
    lines = write_three(tmp_path / "j")
    assert read_journal(tmp_path / "j") == lines
    assert lines[0] == {
        "t": 10.0,
        "event": "journal",
        "format": "everstep-journal",
        "version": 1,
        "run_id": "r",
        "wall_time": 1.5,
    }
    assert lines[1] == {"t": 11.0, "event": "step", "step": 1, "generation": 0}
    assert lines[2]["cause"]["kind"] == "signal"
    assert lines[2]["args"] == ["a", "b"]


def test_a_cut_at_any_byte_loses_at_most_the_last_line(tmp_path: Path) -> None:
    lines = write_three(tmp_path / "j")
    data = (tmp_path / "j").read_bytes()
    for length in range(len(data) + 1):
        (tmp_path / "cut").write_bytes(data[:length])
        assert read_journal(tmp_path / "cut") == lines[: data[:length].count(b"\n")]


def test_every_record_is_in_the_file_before_the_next_is_made(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "j", run_id="r", wall_time=0.0)
    for step in range(1, 4):
        writer.write("step", {"step": step})
        assert read_journal(tmp_path / "j")[-1]["step"] == step
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write("step", {})


def test_a_journal_is_never_written_over(tmp_path: Path) -> None:
    write_three(tmp_path / "j")
    with pytest.raises(FileExistsError):
        JournalWriter(tmp_path / "j", run_id="r", wall_time=0.0)


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (b'{"event": "journal", "format": "everstep-journal", "version": 2}\n', "version 2"),
        (b'{"event": "journal", "format": "another", "version": 1}\n', "not a journal"),
        (b'{"event": "step"}\n', "not a journal"),
        (b"[1]\n", "line 1"),
        (b"\n{}\n", "line 1"),
    ],
)
def test_what_is_no_journal_of_this_version_is_refused(
    tmp_path: Path, first: bytes, says: str
) -> None:
    (tmp_path / "j").write_bytes(first)
    with pytest.raises(JournalError, match=says):
        read_journal(tmp_path / "j")


def test_damage_before_the_last_line_is_named(tmp_path: Path) -> None:
    write_three(tmp_path / "j")
    lines = (tmp_path / "j").read_bytes().split(b"\n")
    lines[1] = lines[1][:5]
    (tmp_path / "j").write_bytes(b"\n".join(lines))
    with pytest.raises(JournalError, match="line 2"):
        read_journal(tmp_path / "j")


def test_the_files_beside_it(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run", run_id="r", recorded=True)
    directory.metrics(1, 5, {"loss": 0.5, "step": 99.0})
    directory.trace(1, 5, msgspec.msgpack.encode({"value": "ff", "samples": [1, 2]}))
    directory.digests(1, {"w": "ab"})
    directory.digests(0, {"w": "cd"})
    directory.close()
    found = {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")}
    assert sorted(found) == ["digests.json", "journal.jsonl", "metrics.jsonl", "trace.jsonl"]
    assert msgspec.json.decode(found["metrics.jsonl"]) == {"loss": 0.5, "step": 5, "rank": 1}
    record = {"value": "ff", "samples": [1, 2]}
    assert msgspec.json.decode(found["trace.jsonl"]) == {"rank": 1, "step": 5, "record": record}
    assert msgspec.json.decode(found["digests.json"]) == {"0": {"w": "cd"}, "1": {"w": "ab"}}


def test_one_that_was_cut_at_any_byte_is_gone_on_with(tmp_path: Path) -> None:
    lines = write_three(tmp_path / "j")
    data = (tmp_path / "j").read_bytes()
    for length in range(len(data) + 1):
        path = tmp_path / "cut"
        path.write_bytes(data[:length])
        writer = JournalWriter(path, run_id="r", wall_time=9.0, clock=lambda: 20.0, resume=True)
        added = writer.write("step", {"step": 2})
        writer.close()
        there = lines[: data[:length].count(b"\n")] or [writer.header]
        assert read_journal(path) == [*there, added]
        assert writer.header == there[0]


def test_a_line_longer_than_a_block_is_found_whole_or_cut(tmp_path: Path) -> None:
    path, long = tmp_path / "j", "x" * 200_000
    writer = JournalWriter(path, run_id="r", wall_time=0.0)
    writer.write("note", {"text": long})
    writer.close()
    JournalWriter(path, run_id="r", wall_time=0.0, resume=True).close()
    assert read_journal(path)[-1]["text"] == long
    with path.open("ab") as file:
        file.write(b"y" * 200_000)
    JournalWriter(path, run_id="r", wall_time=0.0, resume=True).close()
    assert [record["event"] for record in read_journal(path)] == ["journal", "note"]


def test_what_is_no_journal_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b'{"event": "step"}\n')
    with pytest.raises(JournalError, match="not a journal"):
        JournalWriter(tmp_path / "j", run_id="r", wall_time=0.0, resume=True)


def test_times_of_another_host_are_moved_to_the_first_ones_clock(tmp_path: Path) -> None:
    def write(at_s: float, wall_time: float, boot_id: str, *, resume: bool) -> None:
        clock = itertools.count(at_s).__next__
        writer = JournalWriter(
            tmp_path / "j", run_id="r", wall_time=1000.0, clock=clock, resume=resume
        )
        writer.write("coordinator_started", {"boot_id": boot_id, "wall_time": wall_time})
        writer.write("fault_fired", {"fired_t": at_s + 0.5})
        writer.write("incident_opened", {"cause": {"at_s": None}})
        writer.write("incident_cause", {"cause": {"at_s": at_s + 1.5}})
        writer.close()

    write(100.0, 1001.0, "a", resume=False)  # 100 to 104
    write(7.0, 1020.0, "b", resume=True)  # begins 20 s after the header
    write(5000.0, 1010.0, "c", resume=True)  # its wall clock is behind
    write(6000.0, 1030.0, "c", resume=True)
    records = read_journal(tmp_path / "j")
    first, moved, behind, same = records[1:5], records[5:9], records[9:13], records[13:]
    assert [record["t"] for record in first] == [101.0, 102.0, 103.0, 104.0]
    assert [record["t"] for record in moved] == [120.0, 121.0, 122.0, 123.0]
    assert moved[1]["fired_t"] == 120.5
    assert (moved[2]["cause"]["at_s"], moved[3]["cause"]["at_s"]) == (None, 121.5)
    assert [record["t"] for record in behind] == [123.0, 124.0, 125.0, 126.0]
    assert same[0]["t"] == 1123.0


def told(directory: RunDirectory, steps: range) -> None:
    """What two ranks commit in `steps`."""
    for step in steps:
        for rank in (0, 1):
            directory.metrics(rank, step, {"loss": 1.0 / step})
            directory.trace(rank, step, msgspec.msgpack.encode({"value": step + rank}))


def rows(path: Path) -> list[tuple[int, int]]:
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    return [(line["rank"], line["step"]) for line in lines]


@pytest.mark.parametrize("closed", [True, False])
def test_what_is_told_again_is_not_written_again(tmp_path: Path, closed: bool) -> None:
    first = RunDirectory(tmp_path / "run", run_id="r", recorded=True)
    told(first, range(1, 6))
    first.digests(0, {"w": "ab"})
    if closed:
        first.close()
    else:
        first.leave()
    with (tmp_path / "run" / "trace.jsonl").open("ab") as torn:
        torn.write(b'{"rank":0,"st')
    second = RunDirectory(tmp_path / "run", run_id="r", recorded=True, resume=True)
    told(second, range(4, 8))
    second.digests(1, {"w": "cd"})
    second.close()
    expected = [(rank, step) for step in range(1, 8) for rank in (0, 1)]
    for name in ("metrics.jsonl", "trace.jsonl"):
        assert rows(tmp_path / "run" / name) == expected
    digests = msgspec.json.decode((tmp_path / "run" / "digests.json").read_bytes())
    assert digests == {"0": {"w": "ab"}, "1": {"w": "cd"}}
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"digests.json", "journal.jsonl", "logs", "metrics.jsonl", "trace.jsonl"}


def test_a_step_that_comes_out_otherwise_is_written_and_so_can_be_seen(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run", run_id="r", recorded=True)
    first.trace(0, 1, msgspec.msgpack.encode({"value": 1}))
    first.leave()
    second = RunDirectory(tmp_path / "run", run_id="r", recorded=True, resume=True)
    second.trace(0, 1, msgspec.msgpack.encode({"value": 2}))
    second.close()
    assert rows(tmp_path / "run" / "trace.jsonl") == [(0, 1), (0, 1)]


def test_only_who_resumes_may_find_the_directory_there(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run", run_id="r", recorded=False).leave()
    with pytest.raises(UserError, match="choose another --run-id"):
        RunDirectory(tmp_path / "run", run_id="r", recorded=False)


def test_who_may_not_write_writes_nothing(tmp_path: Path) -> None:
    allowed = True

    def guard() -> None:
        if not allowed:
            raise DeposedError

    directory = RunDirectory(tmp_path / "run", run_id="r", recorded=True, guard=guard)
    told(directory, range(1, 2))
    allowed = False
    for write in (
        lambda: directory.journal.write("step", {"step": 2}),
        lambda: directory.metrics(0, 2, {"loss": 1.0}),
        lambda: directory.trace(0, 2, msgspec.msgpack.encode({})),
        lambda: directory.digests(0, {}),
    ):
        with pytest.raises(DeposedError):
            write()
    directory.leave()
    assert rows(tmp_path / "run" / "metrics.jsonl") == [(0, 1), (1, 1)]
    assert rows(tmp_path / "run" / "trace.jsonl") == [(0, 1), (1, 1)]
    assert (tmp_path / "run" / "digests.jsonl").read_bytes() == b""
    assert [record["event"] for record in read_journal(directory.journal.path)] == ["journal"]


def test_without_a_record_there_is_no_trace(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run", run_id="r", recorded=False)
    directory.trace(0, 1, b"")
    directory.close()
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["journal.jsonl", "logs", "metrics.jsonl"]
