"""Faults on purpose, in the process that trains: at the named place of the named step, do what the
spec says.

A fault is told to the agent before it fires, so that it fires once a job, whatever becomes of this
process. It never fires in a rehearsal. A rank that was stopped short of the place, and took the step
from a peer, meets the fault at that place of its next step."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from everstep.wire import messages
from everstep.worker.control import Control

_SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "segv": signal.SIGSEGV,
    "abort": signal.SIGABRT,
}


class ChaosError(RuntimeError):
    """The exception that a fault of kind `raise` raises."""


class Faults:
    """The faults that are still to fire on this rank. `step` is set by the transaction: the step
    under way, or 0."""

    def __init__(self, specs: tuple[messages.ChaosSpec, ...], control: Control) -> None:
        self._pending = list(specs)
        self._control = control
        self.step = 0

    def attach(self, module: torch.nn.Module) -> None:
        """Stand in the middle of the module's forward and backward pass, if a fault is due
        there."""
        places = {spec.at for spec in self._pending}
        leaves = [m for m in module.modules() if next(m.children(), None) is None]
        if "forward" in places and leaves:
            leaves[len(leaves) // 2].register_forward_pre_hook(self._in_forward)
        parameters = [p for p in module.parameters() if p.requires_grad]
        if "backward" in places and parameters:
            parameter = parameters[len(parameters) // 2]
            parameter.register_hook(self._in_backward)  # type: ignore[no-untyped-call]

    def _in_forward(self, _module: torch.nn.Module, _inputs: Any) -> None:
        self.fire("forward")

    def _in_backward(self, _gradient: torch.Tensor) -> None:
        self.fire("backward")

    def fire(self, at: str) -> None:
        """Do what is due at place `at` of the step under way. May not return; raises ChaosError for
        `raise`."""
        if not self._pending or not self.step:
            return
        for spec in list(self._pending):
            if spec.at == at and spec.step <= self.step:
                self._pending.remove(spec)
                self._control.send(messages.Fired(index=spec.index, t=time.monotonic()))
                self._do(spec)

    @staticmethod
    def _do(spec: messages.ChaosSpec) -> None:
        if spec.kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[spec.kind])
        elif spec.kind == "exit":
            os._exit(spec.code)
        else:
            raise ChaosError(f"fault on purpose: {spec.text}")
