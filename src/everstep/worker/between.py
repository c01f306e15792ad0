"""What the script does to protected state between two steps.

A replacement enters the loop where its predecessor returned from the last committed step, with the
state as it was then, and runs the loop's body again. So what travels must be the state *at the
commit*. param_groups and schedulers are small: they are copied at each commit, so a body may step a
scheduler. Tensors are not copied: a body that changes them (an average of the weights, a clipping)
would be applied twice. That is looked for by digest after the first steps, and refused; later it is
looked for by the tensors' versions, and said.
"""

from __future__ import annotations

from everstep.errors import UserError
from everstep.worker.runtime import Worker
from everstep.worker.state import State, digest_of

_DIGESTED_STEPS = 2


class Between:
    """Looks at the state at each commit, and at the start of the next step. Main thread."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._digests: dict[str, str] | None = None
        self._versions = -1
        self._begun = -1

    def at_commit(self, state: State, step: int) -> None:
        """`step` has just been committed."""
        state.at_commit = state.steering()
        looked_at = self._is_looked_at(step)
        if looked_at:
            state.check_optimizer_state()
        self._digests = digests(state) if looked_at else None
        self._versions = versions(state)

    def changed_since_commit(self, state: State, step: int) -> bool:
        """Before the first update of `step`: whether the step itself has changed a parameter, which
        can't be put back. Raises UserError in the first steps."""
        if self._begun == state.updates_seen():
            return False
        text = (
            "the step function changes a protected parameter, or a tensor of an optimizer, before "
            "its update; should it have to be done again, that would be done twice. Do it after "
            "the update"
        )
        if self._is_looked_at(step):
            raise UserError(text)
        self._worker.note("changed-before-update", text)
        return True

    def at_attempt(self, state: State) -> None:
        """An attempt is about to run the step function."""
        self._begun = state.updates_seen()

    def at_begin(self, state: State, step: int) -> None:
        """`step` is about to begin. Raises UserError where the script changed a tensor since the
        commit, in the first steps."""
        if step == self._worker.base + 1:
            state.check_first_step()
        self.at_section(state, step)

    def at_section(self, state: State, step: int) -> None:
        """`step`, or a section before it, is about to begin: as `at_begin`."""
        if self._digests is not None:
            now = digests(state)
            changed = sorted(
                name for name, digest in self._digests.items() if digest != now.get(name)
            )
            if changed:
                raise UserError(f"{changed[0]} {_CHANGED.format(step=step - 1)}")
        elif self._versions >= 0 and self._versions != versions(state):
            what = "a parameter, a buffer or a tensor of an optimizer"
            self._worker.note("changed-between", f"{what} {_CHANGED.format(step=step - 1)}")

    def _is_looked_at(self, step: int) -> bool:
        return step - self._worker.base <= _DIGESTED_STEPS

    def after_section(self, state: State) -> None:
        """A section is done: what it may have changed, it has."""
        if self._digests is not None:
            self._digests = digests(state)
        if self._versions >= 0:
            self._versions = versions(state)


_CHANGED = (
    "was changed between the steps, after step {step}: a replacement of this rank would change it "
    "twice. Do it in the step function, after the update"
)


def versions(state: State) -> int:
    """How often protected tensors were written to that a step is not known to change of its own."""
    return state.updates_seen() + state.constants_seen()


def digests(state: State) -> dict[str, str]:
    """The digest of every protected tensor, by name."""
    found = {spec.name: digest_of([tensor]) for spec, tensor in state.replicas()}
    found |= {name: digest_of([buffer]) for name, buffer in state.buffers()}
    return found
