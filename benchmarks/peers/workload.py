"""What all contestants train, the fault that meets them, and what they write down.

A perceptron of 25.2 million parameters under Adam, 300 MB of state; a batch is a function of (step,
rank), so that a step that is done again can be the same step. Every contestant's script builds the
model and the batches here and says what happened through `Events`; it runs in that contestant's own
environment, so nothing but torch and the standard library may be imported.

The fault is SIGKILL in the middle of the backward pass: a hook on an activation half-way up the
model, set only in the step and on the rank that it is meant for. It fires once in a run; a file
remembers that, since the process doesn't.

Does not know any contestant."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LAYERS, WIDTH, BATCH = 6, 2048, 8
RANKS = 4
FAULT_STEP, FAULT_RANK = 8, 2
STEPS = int(os.environ.get("PEERS_STEPS", "0"))
DIRECTORY = Path(os.environ.get("PEERS_DIR", "."))


class Perceptron(nn.Module):
    """Linear and ReLU, `LAYERS` times. `fuse` may kill the process in its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.fuse = Fuse()

    def forward(self, x: Tensor) -> Tensor:
        """x, result: float (batch, WIDTH)."""
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if number == LAYERS // 2 and self.fuse.is_due() and x.requires_grad:
                x.register_hook(self.fuse.burn)  # type: ignore[no-untyped-call]
        return x


class Fuse:
    """The fault. A script sets `step` and `rank` before each step; unset, it never fires."""

    def __init__(self) -> None:
        self.step, self.rank = 0, -1
        self.armed = os.environ.get("PEERS_FAULT") == "1"
        self.burnt = DIRECTORY / "fault"

    def is_due(self) -> bool:
        """Whether the process is to die in this step."""
        here = (self.step, self.rank) == (FAULT_STEP, FAULT_RANK)
        return self.armed and here and not self.burnt.exists()

    def burn(self, gradient: Tensor) -> None:
        """Says so and ends the process. Does not return."""
        self.burnt.touch(exist_ok=False)
        Events(f"fault.{os.getpid()}").say("fault", step=self.step, rank=self.rank)
        os.kill(os.getpid(), signal.SIGKILL)


class Events:
    """A file of JSON lines, each with `t`, seconds on the host's monotonic clock, and `event`. One
    for each process."""

    def __init__(self, who: str) -> None:
        self._file = (DIRECTORY / f"{who}.jsonl").open("a", buffering=1)

    def say(self, event: str, **fields: Any) -> None:
        """Write a line. Blocks as long as a write to the page cache does."""
        line = {"t": time.monotonic(), "event": event, "pid": os.getpid(), **fields}
        self._file.write(json.dumps(line) + "\n")

    def end(self, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The last line of a rank: the digest of its final state."""
        self.say("end", rank=rank, digest=digest(model, optimizer))
        (DIRECTORY / f"end.{rank}").touch()


def prepare(*, values: bool = True) -> tuple[Perceptron, torch.optim.Optimizer]:
    """The model and its optimizer, the same in every process; one thread. Without `values` the
    parameters are whatever the memory held: quicker, for who loads them anyway."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if values:
        model = Perceptron()
    else:
        with torch.device("meta"):
            model = Perceptron()
        model.to_empty(device="cpu")
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def batch_at(step: int, rank: int) -> Tensor:
    """Float (BATCH, WIDTH): what `rank` learns in `step`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.rand(BATCH, WIDTH, generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """How far the output is from the input, scalar float."""
    output: Tensor = model(batch)
    return (output - batch).square().mean()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over the bits of all parameters and of the optimizer's state, in their order."""
    result = hashlib.sha256()
    for tensor in _tensors(model, optimizer):
        result.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return result.hexdigest()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    for parameter in model.parameters():
        yield parameter
        yield from (v for v in optimizer.state[parameter].values() if isinstance(v, Tensor))
