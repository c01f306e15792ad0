"""The tape: what a rank was told by its peers before the job could go on without it.

Theory of operation: a process that joins runs the script's set-up and its first steps solo, with
no peers. What they told the rank that it replaces (a configuration, a seed, gathered objects, the
shapes of a pipeline, the order of DDP's buckets) is on that rank's tape and is played back; what
isn't is answered as solo.py does.

*Recording*, in a rank that began with the job: from its first collective to the end of its second
step, since DDP lays out its buckets anew in that one. In set-up everything is kept that has up to
`ITEM_BYTES`; in the steps only what holds no floating numbers, for gradients and activations of one
batch are of no use to another. The copy is made when the collective has ended and before the script
can see it, and is with the agent by then, so nothing that a rank goes by is lost with it. Before
`protect` nothing is sent: until then a failure begins the whole job again.

*Playing*, while solo: an item is found by the step (0 is set-up, then the rehearsals), the group,
the operation, the shapes and dtypes of its outputs, in a step those of the collective before it as
well, and its place among those that are alike in all this. A step that is done again counts from
its beginning, and what its failed attempt was told stays on the tape.

*Not on the tape*: what is larger, in set-up. It is harmless where it fills protected state, or a
wrapper's constructor copies it there, since a joiner's state comes from peers. Anything else is
said in a note when `protect` is called, and refused by name in a joiner.

Does not know: what a collective means, who keeps the tape meanwhile."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from everstep.errors import UserError
from everstep.wire import messages
from everstep.worker import codec
from everstep.worker.communicators import tensors_of

ITEM_BYTES = 1 << 20  # larger things are parameters or data, which have better ways to travel
TAPE_BYTES = 16 << 20  # the agent keeps one tape for each of its ranks
LAST_STEP = 2  # the last step that is recorded

# Who copies what it is told to where the script's state is: module, and function where not all of
# the module does.
_WRAPPERS = (
    ("torch.nn.parallel", ""),
    ("torch.distributed.fsdp", ""),
    ("torch.distributed.tensor", "distribute_tensor"),
    ("torch.distributed.checkpoint.state_dict", ""),
)


class Place:
    """Where on the tape the outputs of one collective belong that is under way."""

    def __init__(self, tape: Tape, key: str, outputs: Any) -> None:
        self._tape, self._key, self._outputs = tape, key, outputs

    def keep(self, source: int) -> None:
        """The collective has ended: copy its outputs. `source`: the rank in the group it came from,
        where that was not known before. Any thread, before the script can touch them."""
        tensors = list(tensors_of(self._outputs))
        value = codec.encode(tensors, "the outputs of a collective")
        self._tape.keep(messages.Told(key=self._key, value=value, source=source))


class _Missing:
    """What was told in set-up and is not on the tape. Holds no memory of the script's."""

    def __init__(
        self, key: str, operation: str, where: str, why: str, tensors: list[torch.Tensor]
    ) -> None:
        self.key, self.operation, self.where, self.why = key, operation, where, why
        self.nbytes = _bytes_of(tensors)
        # Weak, so that none is freed and its address taken by another before they are compared.
        reference: Any = StorageWeakRef
        self._storages = [reference(t.untyped_storage()) for t in tensors if _is_plain(t)]
        self._whole = len(self._storages) == len(tensors)

    def is_within(self, protected: set[int]) -> bool:
        """Whether all of it lies in protected storages."""
        alive = (not storage.expired() for storage in self._storages)
        return self._whole and all(alive) and all(s.cdata in protected for s in self._storages)


class Tape:
    """One worker's tape. `items`: what is on it from the beginning; `playing`: it is a joiner's;
    `send` and `note` tell the agent. Main thread, but for `keep`."""

    def __init__(
        self,
        rank: int,
        items: Iterable[messages.Told],
        send: Callable[[messages.Tape], None],
        note: Callable[[str, str], None],
        *,
        playing: bool,
    ) -> None:
        self._rank = rank
        self._items = {item.key: item for item in items}
        self._send, self._note = send, note
        self._playing = playing
        self._step = 0
        self._counts: Counter[str] = Counter()
        self._before: dict[str, str] = {}  # the newest in each group
        self._room = TAPE_BYTES
        self._unsent: deque[messages.Told] = deque()
        self._missing: list[_Missing] = []
        self._protected: set[int] | None = None

    def begin(self, step: int) -> None:
        """A live attempt at `step` begins: record it."""
        self._turn(step, playing=False)

    def rehearse(self, step: int) -> None:
        """A rehearsal begins: play what was told in `step`."""
        self._turn(step, playing=True)

    def _turn(self, step: int, *, playing: bool) -> None:
        self._judge()  # what was told since `protect` counts as set-up
        self._step, self._playing = step, playing
        self._counts.clear()
        self._before.clear()

    # ------------------------------------------------------------ recording

    def place(self, group: str, operation: str, outputs: Any) -> Place | None:
        """A live collective is about to be launched: where its outputs belong. None: they are not
        recorded."""
        tensors = list(tensors_of(outputs))
        if not self._takes(tensors):
            return None
        key = self._key(group, operation, tensors)
        cost = _bytes_of(tensors) + len(key)
        if not all(_is_plain(tensor) for tensor in tensors):
            why = "is a sparse or quantized tensor, which is not kept on its tape"
        elif _bytes_of(tensors) > ITEM_BYTES:
            why = f"is larger than {ITEM_BYTES >> 20} MiB, the most that its tape takes at once"
        elif cost > self._room:
            why = f"found its tape of {TAPE_BYTES >> 20} MiB full"
            self._note(
                "tape-full",
                f"rank {self._rank} was told more than {TAPE_BYTES >> 20} MiB in set-up and the "
                "first steps; the rest is not kept for a replacement",
            )
        else:
            self._room -= cost
            return Place(self, key, outputs)
        if not self._step:
            where, callers = _callers()
            if not any(_is_wrapper(module, function) for module, function in callers):
                self._missing.append(_Missing(key, operation, where, why, tensors))
        return None

    def keep(self, item: messages.Told) -> None:
        """Put an item on the tape, and send it. Any thread; blocks until the kernel has it."""
        self._items[item.key] = item
        self._unsent.append(item)  # before the look at `_protected`: `protect` looks the other way
        self._flush()

    def protect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Set-up ends, and `tensors` (the stored ones, no DTensors) are protected: hand over the
        tape, and say what can't be told again."""
        self._protected = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._judge()
        self._flush()

    def _flush(self) -> None:
        items = []
        while self._protected is not None and self._unsent:
            with contextlib.suppress(IndexError):  # another thread took the last one
                items.append(self._unsent.popleft())
        if items:
            self._send(messages.Tape(items=tuple(items)))

    def _judge(self) -> None:
        """Refuse what set-up was told beside the tape and beside the state."""
        if self._protected is not None:
            for missing in self._missing:
                if not missing.is_within(self._protected):
                    self._refuse(missing)
            self._missing.clear()

    def _refuse(self, missing: _Missing) -> None:
        text = (
            f"rank {self._rank} was told {_size(missing.nbytes)} by a collective "
            f"({missing.operation}) in set-up ({missing.where}), which a replacement can't be told "
            f"again: it {missing.why}, and it fills nothing that is protected. Name what it fills "
            "in run.protect(...), or have each rank read it from a file"
        )
        self._note(f"untold-{missing.where}", f"{text}; until then a failure ends the run")
        self.keep(messages.Told(key=missing.key, refusal=text))

    # ------------------------------------------------------------ playing

    def play(
        self, group: str, operation: str, outputs: Any, *, is_root: bool = False
    ) -> messages.Told | None:
        """A solo collective: fill its outputs with what was told by its like. None: that is not on
        the tape, and the outputs are as they were. `is_root`: its outputs are what this rank tells
        others. Raises UserError where the script can't go on without."""
        tensors = list(tensors_of(outputs))
        if not self._playing or not self._takes(tensors):
            return None
        item = self._items.get(self._key(group, operation, tensors))
        if item is None:
            return None
        if item.refusal:
            raise UserError(item.refusal)
        told = codec.decode(item.value)
        if is_root and not self._step:
            self._compare(tensors, told)
        with torch.no_grad():
            for tensor, value in zip(tensors, told, strict=True):
                tensor.detach().copy_(value)
        return item

    def _compare(self, own: list[torch.Tensor], told: list[torch.Tensor]) -> None:
        """Objects that a rank broadcasts stay its own: say so where its predecessor sent others."""
        if all(torch.equal(a.detach().cpu(), b) for a, b in zip(own, told, strict=True)):
            return
        where, callers = _callers()
        if any(function == "broadcast_object_list" for _, function in callers):
            self._note(
                f"told-otherwise-{where}",
                f"the replacement of rank {self._rank} has other objects for its peers than its "
                f"predecessor sent them in set-up ({where}), and keeps its own; if they steer the "
                "training it is another run now. Make what differs from process to process (a "
                "time, a random number) in run.once(...)",
            )

    def _takes(self, tensors: list[torch.Tensor]) -> bool:
        """Whether outputs like these are recorded and played."""
        return bool(tensors) and not (self._step and any(_is_inexact(t) for t in tensors))

    def _key(self, group: str, operation: str, tensors: list[torch.Tensor]) -> str:
        kinds = (f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors)
        signature = " ".join(f"{len(list(same))}*{kind}" for kind, same in groupby(kinds))
        this = f"{operation}/{signature}"
        alike = f"{self._step}/{group}/{self._before.get(group, '')}{this}"
        if self._step:
            self._before[group] = f"{this} before "
        self._counts[alike] += 1
        return f"{alike}/{self._counts[alike]}"


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 100_000 else f"{nbytes} bytes"


def _callers() -> tuple[str, list[tuple[str, str]]]:
    """The script's line that a collective comes from, and the functions of torch and everstep
    between, by module and name, innermost first. Keeps no frame: they hold the script's tensors."""
    between: list[tuple[str, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("torch", "everstep"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}", between
        between.append((module, frame.f_code.co_name))
        frame = frame.f_back
    return "inside torch", between


def _is_wrapper(module: str, function: str) -> bool:
    return any(
        (module == known or module.startswith(f"{known}.")) and wanted in ("", function)
        for known, wanted in _WRAPPERS
    )
