"""One run of the step function: what has happened in it so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from everstep.worker.entry import Entry, Undo

if TYPE_CHECKING:
    from everstep.worker.capsule import Contents
    from everstep.worker.copies import CopyUndo
    from everstep.worker.foundinf import Passage
    from everstep.worker.recovery import Outcome


# Their update is made of each gradient by itself, and does nothing where there is none.
_ELEMENTWISE = (
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)


class Unwind(BaseException):
    """Leaves the script's step function from inside: its update must not happen. Never seen by the
    script, unless it catches BaseException."""


class Attempt:
    """Written by the transaction while the function runs; main thread, or the thread that runs a
    backward pass meanwhile."""

    def __init__(self, step: int, entry: Entry, *, rehearsal: bool, base: int = 0) -> None:
        self.step, self.entry, self.rehearsal = step, entry, rehearsal
        self.number = 0 if rehearsal else step - base
        """The how-manieth step it is since the ranks began; 0 for a rehearsal."""
        self.updates = 0
        self.passed = False
        """The gate let an update through."""
        self.sealed = False
        """It let the last update through: the capsule is out and stays as it is."""
        self.inside: int | None = None
        """While an update runs: how many collectives came before it."""
        self.updating: Any = None
        """The optimizer that updates, or did so last."""
        self.calls_back = False
        self.needs_peers = False  # an update communicates, or runs the model
        """An update was given a closure, to run the model by."""
        self.result: tuple[Any] | None = None
        """What the function returned, if it did so before the fence."""
        self.unwound = False
        """The function was left at a gate, so its update is not whole."""
        self.torn = False
        """Something was changed before the update that can't be put back."""
        self.undo: Undo | CopyUndo | None = None
        self.fence: str | None = None
        """The fence, once agreed: one of fence.KINDS."""
        self.passage: Passage | None = None
        """Of the update that is being launched, where the device decides on it."""
        self.collectives = 0
        """How many collectives came before the last gate."""
        self.outcome: Outcome | None = None
        """A recovery inside the gate after which the update must not happen."""
        self.log: dict[int, dict[str, float]] = {}
        """What was logged before the step."""
        self.values: dict[str, Any] = {}
        """A copy of `run.state` before the step."""
        self.streams: bytes | None = None
        """The generators before the step, where they are carried."""
        self.captured: Contents | None = None
        """The capsule as it was sent last."""
        self.before_gate: Contents | None = None
        """The same, when the gate was reached."""
        self.captured_names: dict[str, Any] = {}
        """The function's local variables at that moment."""
        self.last_names: dict[str, Any] = {}
        """The same, at the last collective before the gate."""
        self.gate_names: dict[str, Any] = {}
        """The same, in the gate."""
        self._withheld: list[tuple[torch.Tensor, torch.Tensor]] = []

    def withhold(self, optimizer: torch.optim.Optimizer) -> None:
        """In a rehearsal, let the update that begins find no gradients, if that leaves it undone:
        what it would make comes from peers, and to make it costs as much as the whole pass."""
        if type(optimizer) not in _ELEMENTWISE or self.calls_back:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._withheld.append((parameter, parameter.grad))
                    parameter.grad = None

    def give_back(self) -> None:
        """The update is over: the script finds its gradients again."""
        for parameter, gradient in self._withheld:
            parameter.grad = gradient
        self._withheld.clear()
