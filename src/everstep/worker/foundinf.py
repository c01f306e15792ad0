"""The gate before an update, kept by the device instead of the host.

Theory of operation. The host would have to wait for the last collective and the fence before it may
launch an update, and the device would idle until the update's kernels arrive. Fused optimizers can
be launched before that: they read a number on the device, `found_inf`, and change nothing where it
is 1. GradScaler uses it to skip overflown steps; here it is 1 where the step was not clean:

    all collectives so far -> is the generation clean? -> [fence: sum over ranks] -> found_inf
    -> verdict to the host -> the update

all on the script's stream. A rank's part in the fence is 1 only if its groups were whole when its
own collectives had ended, for the host marks the generation before it aborts anything; an aborted
fence holds the sum of some ranks at most. So the sum is the world's size only if all ranks came
here clean, and then every one of them can make the step.

The host learns the verdict from the copy, behind the launch: so the device has the update to do
while the host goes on. What was left out by mistake, since a peer was let through, is made then
(`redo`); nothing of the script's has run in between, so it is the same update.

An update that is left out must leave no trace. So the first one of an optimizer, which makes its
state, goes by the host's gate; so do optimizers that know no `found_inf`, that are not torch's own,
or that have hooks: those would run on an update that was not.

Does not know: attempts, recovery, which fence was agreed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from everstep.worker.communicators import Communicators, QuiesceTimeout
from everstep.worker.guard import Guard
from everstep.worker.streams import Device, StreamGuard

_STOP_POLL_S = 0.05  # how late a waiting host notices a stop, where no event comes
AllReduce = Callable[[torch.Tensor], Any]


def _nothing(_: torch.Tensor) -> None:
    return None


class Verdict:
    """Whether all that a rank needs for its update was there when the stream came to it. Main
    thread."""

    def __init__(
        self, device: Device, communicators: Communicators, own: torch.Tensor, whole: int
    ) -> None:
        """`own`: int32 of one element on the device, 1 if the rank's collectives were whole when
        the stream came there. `decide` follows."""
        accelerator = device.accelerator
        self._device, self._communicators, self._whole = device, communicators, whole
        self._own, self._all = accelerator.host_cell(0), accelerator.host_cell(0)
        self._known = threading.Event()
        self._error: BaseException | None = None
        accelerator.launch(lambda: self._own.copy_(own, non_blocking=True))

    def decide(self, cell: torch.Tensor, then: Callable[[torch.Tensor], None] = _nothing) -> None:
        """Put on the stream: let through if `cell` holds `whole` there. `then` is given that, as a
        tensor on the device, in the same launch."""

        def launched() -> None:
            with torch.no_grad():
                clean = cell == self._whole
                then(clean)
                self._all.copy_(clean.to(torch.int32), non_blocking=True)

        self._device.accelerator.launch(launched)
        self._device.watch.add(self, self._device.accelerator.here(), self._learn)

    def probe(self) -> None:
        """See streams.Source. What fails is a collective's, not this copy's."""

    def _learn(self, error: BaseException | None) -> None:
        self._error = error
        self._known.set()

    def confirm(self, quiesce_timeout_s: float) -> bool:
        """Whether the device let the update through. Blocks until it is known; after a stop, until
        the aborted collectives have ended, and at most `quiesce_timeout_s` longer. Raises
        QuiesceTimeout where it can't be known."""
        while not self._known.wait(_STOP_POLL_S):
            if self._communicators.poisoned:
                self._communicators.quiesce(quiesce_timeout_s)
                if not self._known.wait(quiesce_timeout_s):
                    raise QuiesceTimeout(
                        "the device did not come to the update within "
                        f"{quiesce_timeout_s:g} s after the collectives had ended"
                    )
        if self._error is not None:
            raise QuiesceTimeout(f"the device is lost: {self._error}") from self._error
        return bool(self._all.item())

    @property
    def came_whole(self) -> bool:
        """Once confirmed: whether this rank has what it needs for the step, whatever became of the
        others. The device knows better than the host, which may have been stopped before it saw
        that a collective had ended."""
        return bool(self._own.item())


class Passage(Verdict):
    """One update that the device decides on. Main thread."""

    def __init__(
        self,
        device: Device,
        communicators: Communicators,
        optimizer: torch.optim.Optimizer,
        own: torch.Tensor,
        whole: int,
    ) -> None:
        super().__init__(device, communicators, own, whole)
        self._optimizer = optimizer
        self._theirs = getattr(optimizer, "found_inf", None)  # GradScaler's
        self._found = torch.zeros((), dtype=torch.float32, device=device.accelerator.device)
        self._attached = False

    def attach(self, cell: torch.Tensor) -> None:
        """The update that is launched next happens if `cell` holds `whole` when the stream comes
        here."""

        def leave_out(clean: torch.Tensor) -> None:
            self._found.copy_(clean.logical_not().reshape(()))
            if self._theirs is not None:
                torch.maximum(self._found, self._theirs, out=self._found)

        self.decide(cell, leave_out)
        self._attached = True
        self._optimizer.found_inf = self._found  # type: ignore[attr-defined]

    def updated(self) -> None:
        """The update is launched: the optimizer is as the script made it again. Once or more."""
        if not self._attached:
            return
        self._attached = False
        if self._theirs is None:
            del self._optimizer.found_inf  # type: ignore[attr-defined]
        else:
            self._optimizer.found_inf = self._theirs  # type: ignore[attr-defined]

    def confirm(self, quiesce_timeout_s: float) -> bool:
        """See Verdict."""
        self.updated()
        return super().confirm(quiesce_timeout_s)

    def redo(self) -> None:
        """Make the update that the device left out. In the post-hook: gradients, hyper-parameters
        and what GradScaler gave are still there."""
        self._optimizer.step()


class DeviceGate:
    """Opens passages. `all_reduce` sums an int32 over all ranks, in place, and returns its Work.
    Main thread."""

    def __init__(
        self,
        device: Device,
        communicators: Communicators,
        all_reduce: AllReduce,
        *,
        world_size: int,
    ) -> None:
        self._device, self._communicators = device, communicators
        self._all_reduce, self._size = all_reduce, world_size
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = (
            weakref.WeakKeyDictionary()
        )

    def takes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's next update can be left to the device."""
        known = self._known.get(optimizer)
        if known is None:
            known = self._known[optimizer] = _reads_found_inf(optimizer)
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        return (
            known
            and not hooks
            and all(
                _has_state(optimizer, group, parameter)
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            )
        )

    def open(self, optimizer: torch.optim.Optimizer, *, fence: bool) -> Passage:
        """In the optimizer's pre-hook: put on the stream all that decides whether its update
        happens. Does not wait for the device. `fence`: all ranks must have come here."""
        own = self._own_part()
        passage = Passage(self._device, self._communicators, optimizer, own, self._whole(fence))
        passage.attach(self._sum(own) if fence else own)
        return passage

    def ask(self) -> Verdict:
        """As `open` with a fence, for an update that the host launches when it knows."""
        own = self._own_part()
        verdict = Verdict(self._device, self._communicators, own, self._whole(fence=True))
        verdict.decide(self._sum(own))
        return verdict

    def _own_part(self) -> torch.Tensor:
        for guard in list(self._communicators.open.values()):
            _line_up(guard)
        return self._device.clean(self._communicators.generation).read()

    def _sum(self, own: torch.Tensor) -> torch.Tensor:
        cell = torch.empty_like(own)
        self._device.accelerator.launch(lambda: cell.copy_(own))
        _line_up(self._all_reduce(cell))
        return cell

    def _whole(self, fence: bool) -> int:
        return self._size if fence else 1


def _line_up(work: Any) -> None:
    """Let the stream wait for a collective; the host, for one that no stream knows of."""
    if isinstance(work, StreamGuard):
        work.line_up()
    elif isinstance(work, Guard):
        work.await_release()


def _reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """By GradScaler's own contract with optimizers. Those that want the scaler itself are of
    before it; one of a class that is not torch's may do more than its update."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    return all(group.get("fused") for group in optimizer.param_groups)


def _has_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> bool:
    """Whether an update of the parameter makes no state. SGD without momentum has none."""
    entry = optimizer.state.get(parameter)
    if not entry:
        return group.get("momentum") == 0
    return all(value is not None for value in entry.values())
