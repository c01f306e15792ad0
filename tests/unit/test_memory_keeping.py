"""What may go from a host's memory, and what a start clears."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.tiers import names
from everstep.tiers.memory import ownership
from everstep.tiers.memory.keeping import Kept, deciders, is_shared, outdated
from everstep.tiers.memory.ownership import ORPHAN_S, PREFIX
from everstep.tiers.memory.vault import Vault
from everstep.tiers.store import Full


def _attempt(step: int, number: int = 0) -> names.Attempt:
    return names.Attempt(series="run", step=step, name=f"{number:016x}")


@given(
    saves=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), unique_by=lambda s: s[0]
    ),
    retained=st.integers(1, 4),
)
def test_what_came_last_stays_and_what_nobody_needs_goes(
    saves: list[tuple[int, int, bool]], retained: int
) -> None:
    """Saves one after the other, of steps in any order, some of which never commit."""
    there: list[Kept] = []
    order = 0
    committed: list[int] = []
    for step, number, commits in saves:
        keys = [_attempt(step, number).part(rank, "json") for rank in range(2)]
        keys += [names.commit_key("run", step)] if commits else []
        for key in keys:
            order += 1
            there.append(Kept(key, order))
        if commits:
            committed.append(step)
            gone = outdated("run", there, retained)
            assert len(set(gone)) == len(gone)
            there = [kept for kept in there if kept.key not in gone]
        keys_there = {kept.key for kept in there}
        for kept_step in committed[-retained:]:
            assert names.commit_key("run", kept_step) in keys_there
            assert any(key.startswith(f"run/parts/{kept_step:010}/") for key in keys_there)
        for old in committed[:-retained]:
            assert names.commit_key("run", old) not in keys_there
            assert not any(f"/{old:010}/" in key for key in keys_there)
    # No more stays than what is retained and the attempts since the last commit but one.
    last = [i for i, (_, _, commits) in enumerate(saves) if commits][-2:]
    since = saves[last[0] :] if len(last) == 2 else saves
    allowed = {*committed[-retained:], *(step for step, _, _ in since)}
    steps = {part[0].step for kept in there if (part := names.part_of(kept.key))}
    assert steps <= allowed


def test_commits_go_before_their_parts_and_other_series_stay() -> None:
    keys = []
    for step in (1, 2):
        keys += [_attempt(step).part(0, "safetensors"), names.commit_key("run", step)]
    keys += [names.commit_key("other", 1), "run/what"]
    there = [Kept(key, order) for order, key in enumerate(keys, 1)]
    assert outdated("run", there, 1) == [
        names.commit_key("run", 1),
        _attempt(1).part(0, "safetensors"),
    ]


def test_what_ends_an_attempt_is_shared() -> None:
    shared = [
        names.commit_key("run", 1),
        _attempt(1).part(0, "failed"),
        _attempt(1).part(0, "same"),
    ]
    assert all(map(is_shared, shared))
    assert not any(map(is_shared, [_attempt(1).part(0, "json"), "run/x"]))


@given(key=st.text(max_size=9), sites=st.lists(st.text(max_size=4), unique=True, min_size=1))
def test_all_hosts_ask_in_the_same_order(key: str, sites: list[str]) -> None:
    order = deciders(key, sites)
    assert order == deciders(key, reversed(sites))
    assert deciders(key, order[1:]) == order[1:]


def test_a_sweep_clears_what_nobody_owns_in_its_time(tmp_path: Path) -> None:
    paths = {}
    for name in ("alive", "dead", "old", "own"):
        held = Vault(tmp_path / f"{PREFIX}tag-{name}", share=0.5)
        area = held.admit(4)
        area.furnish()
        held.publish(area, "run/x")
        held.admit(7)
        paths[name] = held
    for name in ("dead", "old", "own"):
        os.close(paths[name]._lock)  # type: ignore[arg-type]  # as their deaths do
    now_s = paths["old"].directory.stat().st_mtime
    os.utime(paths["old"].directory, (now_s - ORPHAN_S - 1,) * 2)
    removed = ownership.sweep(tmp_path, own=paths["own"].directory, now_s=now_s)
    assert removed == [f"{PREFIX}tag-old"]
    way = {name: len(list((held.directory / "way").glob("*"))) for name, held in paths.items()}
    assert way == {"alive": 1, "dead": 0, "old": 0, "own": 1}
    assert (paths["dead"].directory / "objects" / "run" / "x").exists()
    ownership.forget(paths["alive"].directory)
    ownership.forget(paths["dead"].directory)
    ownership.forget(tmp_path / "nothing")
    assert paths["alive"].directory.exists()
    assert not paths["dead"].directory.exists()
    for name in ("dead", "old", "own"):
        paths[name]._lock = None
    for held in paths.values():
        for area in [*held._areas]:
            held.abandon(area)
    paths["alive"].close(keep=False)
    assert not paths["alive"].directory.exists()


def test_a_start_waits_for_a_sweep_that_is_looking(tmp_path: Path) -> None:
    directory = tmp_path / f"{PREFIX}tag-a"
    directory.mkdir()
    fd = os.open(directory, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    real = time.monotonic
    looks = iter([0.0])

    def monotonic() -> float:
        if next(looks, None) is None:  # it has been refused once
            fcntl.flock(fd, fcntl.LOCK_UN)
        return real()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", monotonic)
        held = Vault(directory, share=0.5)
    os.close(fd)
    held.close(keep=False)


def test_spare_memory_makes_room(tmp_path: Path) -> None:
    held = Vault(tmp_path / f"{PREFIX}tag-a", share=0.5)
    try:
        nbytes = 1 << 20
        share = 2.5 * nbytes / held.limit_bytes * 0.5
        held._share = share
        for key in ("x", "y"):
            area = held.admit(nbytes)
            area.furnish()
            held.publish(area, key)
        with pytest.raises(Full, match=r"take 2.0 MiB of the 2.5 MiB that they may"):
            held.admit(nbytes)
        held.delete("x")
        assert held.taken_bytes == 2 * nbytes  # its memory waits for another of its size
        held.abandon(held.admit(nbytes + 1))  # or is given back for one of another
        assert held.taken_bytes == nbytes
    finally:
        held.close(keep=False)
