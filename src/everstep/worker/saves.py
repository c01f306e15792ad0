"""Checkpoints between the steps, by the cadences of `run.checkpoint`.

Theory of operation. A save is a section of all ranks: it is done again if a rank fails in it, and a
replacement skips what its predecessor has done. In it, state is copied (`contents.py`, the
tiers' writer); the rest is in the background and belongs to nobody's step. A save that is done
again is another attempt to make the same checkpoint: if the first one still becomes one, both are
right, since the state is the same.

What failed in the background is heard by all ranks in the next save, and by the rank that sees it
before its next step.

It does not know what a checkpoint holds, nor how one is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch.distributed.checkpoint.api import CheckpointException

from everstep.errors import EverstepError, UserError
from everstep.tiers.dcp import TieredWriter
from everstep.tiers.policy import MEMORY, Failure
from everstep.tiers.settings import TierSettings
from everstep.wire import messages
from everstep.worker.contents import pack
from everstep.worker.runtime import Worker
from everstep.worker.section import Sections


class _Writer(TieredWriter):
    """Keeps failures for the end of the section: what is raised in it would have it done again."""

    def __init__(self, settings: TierSettings, worker: Worker) -> None:
        super().__init__(settings, wait=False, run_id=worker.spec.run_id)
        self._worker = worker
        self.heard: list[Failure] = []

    def remark(self, text: str) -> None:
        self._worker.note(f"tiers: {text}", text)

    def tell(self, failures: Sequence[Failure]) -> None:
        self.heard.extend(failures)


class Saves:
    """The checkpoints of one worker. `gradients`: whether the script carries them from one step to
    the next. Main thread."""

    def __init__(
        self,
        worker: Worker,
        sections: Sections,
        settings: TierSettings,
        *,
        gradients: Callable[[], bool],
    ) -> None:
        self._worker, self._settings, self._gradients = worker, settings, gradients
        self._writer = _Writer(settings, worker)
        self._writer.saver.on_commit = self._committed

        def checkpoint(step: int, everywhere: bool) -> list[str]:
            return self._save(step, everywhere)

        self._section = sections.make(checkpoint, ranks=None, undo=False)

    def between(self, *, last: bool = False) -> None:
        """The steps up to `worker.committed` are done, and the next one has not begun: save if it
        is time. `last`: there is no next one. Raises UserError for what can't be saved, and
        for a save that failed, if that is to be an error."""
        step = self._worker.committed
        self._tell([str(failure) for failure in self._writer.saver.news()])
        if step > self._worker.base and (last or self._writer.due(step)):
            self._tell(self._section(step, last))

    def close(self) -> None:
        """The loop is over: wait for what is on its way, up to the grace. Raises as `between`."""
        self._writer.close()
        self._tell([str(failure) for failure in self._writer.heard])

    def _save(self, step: int, everywhere: bool) -> list[str]:
        """Copy the state, and let it go on its way. Returns which earlier saves have failed."""
        self._writer.everywhere = everywhere
        try:
            self._writer.save(pack(self._worker, gradients=self._gradients()), step)
        except CheckpointException as error:
            raise _cause(error, step) from error
        heard, self._writer.heard = self._writer.heard, []
        return [str(failure) for failure in heard]

    def _committed(self, tier: str, step: int) -> None:
        """A checkpoint exists. On the lane's thread."""
        where: Literal["memory", "durable"] = "memory" if tier == MEMORY else "durable"
        self._worker.control.send(messages.Saved(step=step, tier=where))

    def _tell(self, failures: Sequence[str]) -> None:
        if failures and self._settings.on_save_error == "raise":
            raise UserError(f"{'; '.join(failures)} (on_save_error='warn' goes on without it)")
        for failure in failures:
            self._worker.note(f"save-failed: {failure}", failure)


def _cause(error: CheckpointException, step: int) -> EverstepError:
    """What went wrong inside torch, as an error that a section can have."""
    first = next((cause for cause, _ in error.failures.values()), error)
    return EverstepError(
        f"the state of step {step} could not be copied for its checkpoint: "
        f"{type(first).__name__}: {first}"
    )
