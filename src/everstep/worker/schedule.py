"""Which steps are copied, and which copies must stay, where steps do not wait for their copies.

Theory of operation. A step's copy is on its way to another node while the next steps run. Should a
node be lost, all ranks go back to the newest step of which every shard has a copy somewhere; so
every rank must still have its copy of that step, whichever it is. The ranks agree on it in the
fence that ends each step: each says whether it has made a copy of the step, and which is the newest
of its copies that is where it belongs. Of a step of which all have made one, a copy is *common*;
the least of what they say is *safe* with all. Common copies from the safe one on must stay; all
others may be written over. There are `AREAS` areas: one is written to, one is on its way, and one
is safe. When there is no room, since copies move slower than steps, the step is not copied, on any
rank: all know the same. When the safe one is too far behind, the step waits; so does the first that
is copied, since there is none to go back to.

Pure; knows nothing of what is in a copy, nor of how it moves.
"""

from __future__ import annotations

AREAS = 3


def most_behind(every: int) -> int:
    """By how many steps the safe copy may be behind the step that is under way, before that waits.
    `every`: as `Schedule` has it. Two copies further, and some slack for one that is late."""
    return 2 * every + 2


class Schedule:
    """Of one rank, where a copy is made every `every` steps; all ranks come to the same."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.steps: tuple[int, ...] = ()
        """The steps whose copies are common and must stay, the oldest first; that one is safe."""
        self.skipped = 0
        """Copies that were due, and for which there was no room since copies move too slowly."""
        self._inherited: set[int] = set()  # steps that were copied before the ranks regrouped
        self._settled: set[int] = set()  # of those, and of the step under way
        self._made: int | None = None

    def resume(self, steps: tuple[int, ...]) -> None:
        """The ranks have regrouped: copies of `steps` are common."""
        self.steps, self._settled, self._made = steps, set(steps[:1]), None
        self._inherited = set(steps)

    def wants(self, step: int) -> bool:
        """Whether `step` is to be copied. Counts one for which there is no room."""
        if self.steps and step % self.every:
            return False
        if len(self.steps) < AREAS:
            return True
        if not self._inherited & set(self.steps):  # else room is made when the first has come
            self.skipped += 1
        return False

    def must_wait(self, step: int) -> int | None:
        """The step whose copy must be where it belongs before `step` may end, if there is one."""
        if not self.steps or step - self.steps[0] <= most_behind(self.every):
            return None
        newest = self.steps[-1]
        return None if newest in self._settled else newest

    def made(self, step: int) -> None:
        """This rank has a copy of `step`, which is under way."""
        self._made = step

    def settled(self, step: int) -> None:
        """This rank's copy of `step` is where it belongs."""
        self._settled.add(step)

    def says(self, step: int) -> tuple[int, int]:
        """What this rank says in the fence of `step`: whether it has a copy of it, and which is the
        newest of its common copies that is where it belongs."""
        made = self._made == step
        common = {*self.steps, step} if made else set(self.steps)
        return int(made), max(self._settled & common, default=-1)

    def agree(self, step: int, made: int, safe: int) -> None:
        """The ranks have met in the fence of `step`: the least of what each has said."""
        common = (*self.steps, step) if made else self.steps
        self.steps = tuple(older for older in common if older >= safe)
        self._settled &= set(self.steps)
