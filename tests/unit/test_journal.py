"""The journal: whole lines, a cut last one, a version."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.observe.journal import JournalError, JournalWriter, read_journal
from everstep.observe.rundir import RunDirectory
from everstep.types import Cause, CauseKind


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


def test_without_a_record_there_is_no_trace(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run", run_id="r", recorded=False)
    directory.trace(0, 1, b"")
    directory.close()
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["journal.jsonl", "logs", "metrics.jsonl"]
