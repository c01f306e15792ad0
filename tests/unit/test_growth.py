"""The helper that says what has grown: a leak is found, a group that lingers is not one."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from tests.integration.leaks import SLACK, Held, Workers, growth

USUAL = Held(descriptors=12, threads=5, shared=1, rss_mib=260.0)


def test_this_process_holds_what_it_opens() -> None:
    before = Held.by(os.getpid())
    descriptor = os.open("/", os.O_RDONLY)
    after = Held.by(os.getpid())
    os.close(descriptor)
    assert before is not None
    assert after is not None
    assert after.descriptors == before.descriptors + 1
    assert Held.by(2**22 + 1) is None


@pytest.mark.parametrize("name", ["descriptors", "threads", "shared"])
def test_one_more_with_each_incident_is_found(name: str) -> None:
    looks = [replace(USUAL, **{name: number}) for number in range(8)]
    (text,) = growth(looks, SLACK)
    assert text == f"{name} grew from 2 to 5 (0, 1, 2, 3, 4, 5, 6, 7)"


def test_memory_that_grows_is_found() -> None:
    looks = [replace(USUAL, rss_mib=260.0 + 2 * number) for number in range(12)]
    assert ["rss_mib grew" in text for text in growth(looks, SLACK)] == [True]


def test_a_group_that_lingers_is_no_leak() -> None:
    busy = replace(USUAL, descriptors=30, threads=9)
    assert list(growth([USUAL, USUAL, USUAL, busy, USUAL, busy], SLACK)) == []
    assert list(growth([USUAL, busy, busy, busy, busy], SLACK)) == []  # too few to tell


@pytest.mark.parametrize(("pause_s", "leaks"), [(0.5, False), (3.0, True)])
def test_what_lingers_until_a_time_out_is_no_leak(
    monkeypatch: pytest.MonkeyPatch, pause_s: float, leaks: bool
) -> None:
    """Five looks find four descriptors more: within the time, or for longer than that."""
    workers = Workers(collective_timeout_s=5.0)
    workers.on_record({"event": "started", "rank": 1, "incarnation": 1, "pid": 7})
    busy = replace(USUAL, descriptors=16)
    for number in range(12):
        now: dict[int, Held] = {7: USUAL if number < 7 else busy}
        monkeypatch.setattr(Held, "by", now.get)
        monkeypatch.setattr("time.monotonic", lambda number=number: pause_s * number)
        workers.on_record({"event": "incident_closed"})
    assert bool(workers.growth()) is leaks


def test_what_leaks_into_successors_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker lives through one incident, and is born with one descriptor more."""
    workers = Workers(collective_timeout_s=5.0)
    for number in range(8):
        record: dict[str, Any] = {"event": "started", "rank": 1, "incarnation": number + 1}
        workers.on_record({**record, "pid": number})
        held = replace(USUAL, descriptors=12 + number)
        now: dict[int, Held] = {number: held}
        monkeypatch.setattr(Held, "by", now.get)
        workers.on_record({"event": "incident_closed"})
    (text,) = workers.growth()
    assert text.startswith("at their first incident, descriptors grew from 14 to 17")
