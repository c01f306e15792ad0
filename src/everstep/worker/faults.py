"""Faults on purpose, in the process that trains: at the named place of the named step, do what the
spec says.

A fault is told to the agent before it fires, so that it fires once a job, whatever becomes of this
process. It never fires in a rehearsal. A rank that was stopped short of the place, and took the
step from a peer, meets the fault at that place of its next step.

It does not know what becomes of a fault: whether anybody notices, and who takes the rank's place.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from everstep.chaos import IN_STEP, SETUP
from everstep.wire import messages
from everstep.worker.control import Control
from everstep.worker.state import local

OOM_BYTES = 64 << 20
"""What `oom` takes before it dies: enough to be seen in a graph, and no danger to any machine."""

_SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "segv": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "stop": signal.SIGSTOP,
}
_OOM_PIECE = 8 << 20
_FLIPPED = 0x04


class ChaosError(RuntimeError):
    """The exception that a fault of kind `raise` raises."""


class Faults:
    """The faults that are still to fire on this rank. `committed`: says how many steps are
    committed here, 0 in a process that has not joined yet."""

    def __init__(
        self,
        specs: tuple[messages.ChaosSpec, ...],
        control: Control,
        committed: Callable[[], int],
    ) -> None:
        self._pending = list(specs)
        self._control = control
        self._committed = committed
        self._parameters: list[torch.Tensor] = []
        self._step = 0
        self._began_s = 0.0
        self._usual_s: float | None = None

    @property
    def step(self) -> int:
        """The step under way, or 0. Set by the transaction, for each attempt."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        now_s = time.monotonic()
        if self._step:
            self._usual_s = now_s - self._began_s
        self._step, self._began_s = step, now_s

    def attach(self, module: torch.nn.Module) -> None:
        """Stand in the middle of the module's forward and backward pass, if a fault is due
        there."""
        places = {spec.at for spec in self._pending}
        leaves = [m for m in module.modules() if next(m.children(), None) is None]
        if "forward" in places and leaves:
            compiled = any(_is_compiled(part) for part in module.modules())
            # A hook inside a compiled model would become a part of it.
            entered = module if compiled else leaves[len(leaves) // 2]
            entered.register_forward_pre_hook(self._in_forward)
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        if "backward" in places and self._parameters:
            parameter = self._parameters[len(self._parameters) // 2]
            if local(parameter) is parameter:
                parameter.register_hook(self._in_backward)  # type: ignore[no-untyped-call]
            else:  # FSDP2 computes with gathered copies: the stored parameters get no gradient
                leaves[len(leaves) // 2].register_forward_hook(self._before_backward)

    def _in_forward(self, _module: torch.nn.Module, _inputs: Any) -> None:
        self.fire("forward")

    def _before_backward(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._in_backward)  # type: ignore[no-untyped-call]

    def _in_backward(self, _gradient: torch.Tensor) -> None:
        self.fire("backward")

    def fire(self, at: str, step: int | None = None) -> None:
        """Do what is due at place `at`. `step`: the step that the place belongs to, where that is
        not plain from the place.

        May not return; raises ChaosError for `raise`. Blocks for `slow` and, for ever, for `hang`.
        The main thread, or one that it waits for."""
        if not self._pending:
            return
        step = self._step_at(at) if step is None else step
        if step is None:
            return
        for spec in list(self._pending):
            if spec.at == at and spec.step <= step:
                self._pending.remove(spec)
                self._control.send(messages.Fired(index=spec.index, t=time.monotonic()))
                self._do(spec)

    def _step_at(self, at: str) -> int | None:
        """The step that place `at` belongs to now; None where it is the place of no step."""
        if at == SETUP:
            return 0
        if at in IN_STEP:
            return self._step or None  # a rehearsal is no step
        return self._committed()

    def _do(self, spec: messages.ChaosSpec) -> None:
        match spec.kind:
            case "exit":
                os._exit(spec.code)
            case "raise":
                raise ChaosError(f"fault on purpose: {spec.text}")
            case "hang" | "node" | "agent":  # of a node: the coordinator ends it, and this with it
                threading.Event().wait()  # nobody sets it; other threads run on
            case "coordinator" | "net":
                pass  # the coordinator has been told, and does it
            case "oom":
                _run_out_of_memory()
            case "slow":
                self._dawdle(spec.factor)
            case "corrupt":
                flip_bit(next(p for p in self._parameters if local(p.detach()).numel()))
            case _:
                os.kill(os.getpid(), _SIGNALS[spec.kind])

    def _dawdle(self, factor: float) -> None:
        """Make this step take `factor` times as long as the one before; the first, `factor` times
        what it has taken so far."""
        usual_s = self._usual_s
        if usual_s is None:
            usual_s = time.monotonic() - self._began_s
        time.sleep((factor - 1) * usual_s)


def _run_out_of_memory() -> None:
    """What a process does that the kernel ends for want of memory: grow, and be killed. The growth
    is bounded; the kernel is not asked."""
    held = []
    try:
        for _ in range(OOM_BYTES // _OOM_PIECE):
            held.append(b"\1" * _OOM_PIECE)  # written to, or the pages would be there in name only
    except MemoryError:
        pass  # short of memory already: all the better
    os.kill(os.getpid(), signal.SIGKILL)


def flip_bit(parameter: torch.Tensor) -> None:
    """Flip a bit in the mantissa of the largest element of `parameter` that is stored here.

    As silent as a fault of memory: autograd's version counter does not move. The element changes by
    a few percent (float64: more), stays finite, and is not so small that the next update would
    swallow the difference.
    """
    stored = local(parameter.detach()).data  # `data` has a version counter of its own
    largest = torch.unravel_index(stored.abs().argmax(), stored.shape)
    element = stored[tuple(int(index) for index in largest)].reshape(1).view(torch.uint8)
    element[max(0, len(element) - 2)] ^= _FLIPPED


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
