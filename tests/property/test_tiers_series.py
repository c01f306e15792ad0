"""A series of checkpoints against a dict: saves that die at any write, loads, prunes, lost parts.

The model has, of each step, the bytes that were saved, and whether a part of it was taken away. The
writers share one store, as the incarnations of a job do. What a dead one has done stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.checkpoints import DictStore
from tests.unit.faultystores import FaultyStore, Killed

from everstep import snapshot
from everstep.tiers.catalog import Checkpoint, Origin, Piece, Whole
from everstep.tiers.names import Attempt
from everstep.tiers.reading import attempt_of
from everstep.tiers.series import Failed, SaveFailed, Series, Taken

STEPS = st.integers(0, 6)
FILLS = st.integers(0, 3).map(lambda n: bytes([n]) * 8)
DEATHS = st.integers(1, 9)
LONG_S = 60.0
NOW = 1e9


@dataclass
class Known:
    """A checkpoint in the model. `whole`: no part was taken away."""

    fill: bytes
    world: int
    whole: bool = True


class SeriesMachine(RuleBasedStateMachine):
    @initialize(signed=st.booleans())
    def begin(self, signed: bool) -> None:
        self.dict = DictStore()
        self.key = bytes(32) if signed else None
        self.model: dict[int, Known] = {}

    def series(self, dies_at: int = 0, done: bool = False) -> Series:
        """As a new process sees it."""
        store = FaultyStore(self.dict)
        store.dies_at, store.done = dies_at, done
        return Series(
            store, "run", key=self.key, require_signature=self.key is not None, pause=lambda _: None
        )

    @rule(step=STEPS, world=st.integers(1, 3), fill=FILLS)
    def save(self, step: int, world: int, fill: bytes) -> None:
        to = self.series()
        taken = self.model.get(step)
        if taken is None:
            save(to, to.begin(step), world, fill)
            self.model[step] = Known(fill, world)
            return
        attempt = to.begin(step)
        try:
            save(to, attempt, world, fill)
        except Taken:
            assert not (taken.whole and (taken.fill, taken.world) == (fill, world))
            assert isinstance(to.outcome(attempt, deadline_s=LONG_S), Failed)
        else:
            assert taken.whole
            assert (taken.fill, taken.world) == (fill, world)

    @rule(step=STEPS, world=st.integers(1, 3), fill=FILLS, at=DEATHS, done=st.booleans())
    def save_and_die(self, step: int, world: int, fill: bytes, at: int, done: bool) -> None:
        to = self.series(at, done)
        try:
            save(to, to.begin(step), world, fill)
        except (Killed, Taken):
            # Two writes for each part, then the commit.
            if step not in self.model and (done and at == 2 * world + 1):
                self.model[step] = Known(fill, world)
        else:
            self.model.setdefault(step, Known(fill, world))

    @rule(step=STEPS, fill=FILLS)
    def save_with_a_failed_rank(self, step: int, fill: bytes) -> None:
        to = self.series()
        attempt = to.begin(step)
        put_part(to, attempt, 0, 2, fill)
        to.fail(attempt, 1, "no space left", deadline_s=LONG_S)
        with pytest.raises(SaveFailed, match="no space left"):
            commit(to, attempt, 2)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), how=st.sampled_from(["safetensors", "json", "shorter"]))
    def lose_a_part(self, data: st.DataObject, how: str) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        if not self.model[step].whole:
            return
        rank = data.draw(st.integers(0, self.model[step].world - 1))
        attempt = attempt_of(self.series().read(step))
        if how == "shorter":
            key = attempt.part(rank, "safetensors")
            self.dict.objects[key] = self.dict.objects[key][:-1]
        else:
            del self.dict.objects[attempt.part(rank, how)]
        self.model[step].whole = False

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def set_aside(self, data: st.DataObject) -> None:
        broken = [step for step, known in self.model.items() if not known.whole]
        if broken:
            step = data.draw(st.sampled_from(sorted(broken)))
            self.series().set_aside(self.series().read(step))
            del self.model[step]

    @rule(keep=st.integers(0, 3), old=st.booleans())
    def prune(self, keep: int, old: bool) -> None:
        self.series().prune(keep=keep, older_than_s=0 if old else 2 * NOW, now=NOW)
        self._forget(keep)
        if old:
            attempts = {attempt_of(self.series().read(step)).name for step in self.model}
            assert {key.split("/")[3] for key in self.dict.objects if "/parts/" in key} <= attempts

    @rule(keep=st.integers(1, 3), at=DEATHS, done=st.booleans())
    def prune_and_die(self, keep: int, at: int, done: bool) -> None:
        before = dict(self.model)
        try:
            self.series(at, done).prune(keep=keep, older_than_s=0, now=NOW)
        except Killed:
            there = self.series().steps()
            self._forget(keep)
            assert set(self.model) <= set(there) <= set(before)
            self.model = {step: before[step] for step in there}
        else:
            self._forget(keep)

    def _forget(self, keep: int) -> None:
        whole = sorted(step for step, known in self.model.items() if known.whole)
        if keep and len(whole) >= keep:
            self.model = {s: known for s, known in self.model.items() if s >= whole[-keep]}

    @invariant()
    def what_is_there_is_what_was_saved(self) -> None:
        to = self.series()
        assert to.steps() == sorted(self.model)
        for step, known in self.model.items():
            checkpoint = to.read(step)
            assert bool(to.missing(checkpoint)) != known.whole
            if known.whole:
                assert load(to, checkpoint) == known.fill * known.world


def save(to: Series, attempt: Attempt, world: int, fill: bytes) -> Checkpoint:
    for rank in range(world):
        put_part(to, attempt, rank, world, fill)
    return commit(to, attempt, world)


def put_part(to: Series, attempt: Attempt, rank: int, world: int, fill: bytes) -> None:
    tensor = snapshot.Tensor(name="w", dtype="torch.uint8", item_bytes=1, shape=(len(fill),))
    layout = snapshot.Layout([tensor])
    about = snapshot.About(run_id="r", rank=rank, world=world, shard="w", step=attempt.step)
    area = memoryview(bytearray(layout.nbytes))
    manifest = snapshot.write(area, layout, about, {"w": fill})
    to.put_part(attempt, rank, area, manifest, deadline_s=LONG_S)


def commit(to: Series, attempt: Attempt, world: int) -> Checkpoint:
    pieces = tuple(Piece(rank=r, name="w", place=(8 * r,), shape=(8,)) for r in range(world))
    return to.commit(
        attempt,
        world=world,
        tensors={"w": Whole(dtype="torch.uint8", shape=(8 * world,), pieces=pieces)},
        values={},
        origin=Origin(),
        deadline_s=LONG_S,
    )


def load(to: Series, checkpoint: Checkpoint) -> bytes:
    """All bytes of the tensor, with their digests checked."""
    found = b""
    for part in checkpoint.parts:
        manifest = to.part_manifest(checkpoint, part.rank)
        key = attempt_of(checkpoint).part(part.rank, "safetensors")
        data = to.store.get(key, deadline_s=LONG_S)
        snapshot.verify(manifest.snapshot, memoryview(data))
        found += data[-8:]
    return found


TestSeries = SeriesMachine.TestCase
TestSeries.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
