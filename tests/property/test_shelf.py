"""The shelf under any order of what can happen to it, against a few lines that say what must be
left."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from everstep import snapshot
from everstep.agent.shelf import Area, Shelf, create_locked
from everstep.shm.budget import Budget
from everstep.snapshot import About, Layout, Tensor

LAYOUT = Layout([Tensor(name="w", dtype="torch.uint8", item_bytes=1, shape=(100,))])


class Copies(RuleBasedStateMachine):
    """One rank's copies. `steps`: complete ones that must be there; `needed`: those that the next
    copy must leave."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.node = 0
        self.shelf = self.fresh()
        self.steps: set[int] = set()
        self.incarnation = 1
        self.step = 0
        self.area: Area | None = None
        self.reading: dict[int, ExitStack] = {}

    def fresh(self) -> Shelf:
        self.node += 1
        return Shelf(self.folder, "run", self.node, Budget(limit_bytes=1 << 20))

    @rule(kept=st.integers(0, 2))
    def copy(self, kept: int) -> None:
        """What happens most of the time: the newest stay, two areas or three take turns."""
        self.begin(set(sorted(self.steps)[-kept:]) if kept else set())
        self.commit()

    @rule(data=st.data())
    def begin_any(self, data: st.DataObject) -> None:
        self.begin(set(data.draw(st.sets(st.sampled_from(sorted(self.steps) or [0])))))

    def begin(self, keep: set[int]) -> None:
        area = self.shelf.begin(
            rank=0, incarnation=self.incarnation, nbytes=LAYOUT.nbytes, keep=keep
        )
        if area.fd < 0:
            assert self.shelf.furnish(area, create_locked(area.path, area.nbytes))
        assert not area.users, "nobody reads what is about to be written"
        self.area = area
        self.steps &= keep

    @precondition(lambda self: self.area is not None)
    @rule()
    def commit(self) -> None:
        assert self.area is not None
        self.step += 1
        about = About(run_id="run", rank=0, world=1, shard="all", step=self.step)
        with self.area.bytes() as view:
            manifest = snapshot.write(view, LAYOUT, about, {"w": bytes([self.step % 256]) * 100})
        self.shelf.commit(self.area, manifest)
        self.steps.add(self.step)
        self.area = None

    @precondition(lambda self: self.area is not None)
    @rule(scribble=st.booleans())
    def abandon(self, scribble: bool) -> None:
        """The writer dies, or it is slow and writes later."""
        assert self.area is not None
        with self.area.bytes() as view:
            self.shelf.abandon(self.area)
            if scribble:
                view[:] = b"x" * len(view)
        self.area = None

    @rule()
    def replace_the_writer(self) -> None:
        self.incarnation += 1

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.steps)))
        if step not in self.reading:
            area = next(area for area in self.shelf.complete(0) if area.step == step)
            self.reading[step] = ExitStack()
            self.reading[step].enter_context(area.bytes())

    @precondition(lambda self: self.reading)
    @rule()
    def stop_reading(self) -> None:
        self.reading.popitem()[1].close()

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        self.steps = data.draw(st.sets(st.sampled_from(sorted(self.steps))))
        self.shelf.retain(self.steps)

    @rule()
    def restart(self) -> None:
        for stack in self.reading.values():
            stack.close()
        self.reading.clear()
        self.shelf.close(keep=True)
        self.shelf = self.fresh()
        self.shelf.release(self.shelf.adopt())
        self.area = None

    @invariant()
    def what_must_be_left_is_there_and_right(self) -> None:
        found = {area.step: area for area in self.shelf.complete(0)}
        assert set(found) == self.steps
        for step, area in found.items():
            assert area.manifest is not None
            with area.bytes() as view:
                snapshot.verify(area.manifest, view)
                assert view[-1] == step % 256

    @invariant()
    def no_more_memory_is_taken_than_for_one_beside_those(self) -> None:
        assert self.shelf.nbytes <= (len(self.steps | set(self.reading)) + 1) * LAYOUT.nbytes

    def teardown(self) -> None:
        for stack in self.reading.values():
            stack.close()
        self.shelf.close()
        left = list(self.folder.iterdir())
        shutil.rmtree(self.folder)
        assert left == []


TestCopies = Copies.TestCase
TestCopies.settings = settings(max_examples=100, stateful_step_count=40)
