"""Copies of this rank's state in shared memory, for a shard that no peer holds.

Theory of operation. Under `copies = sync` a step commits only when every rank whose shard has no
natural replica has a copy of what the step made: at the end of the function, before the late fence,
the rank writes its state as a snapshot (snapshot.py) into an area of its agent's shelf, and waits
until the agent says that it is kept. So a rank that dies after a commit left its state behind, and
one that dies before the fence left that of the step before: its peers go back there. They do so
from their own copy, which is what an update is undone from, too, unless the script has changed the
state since. Everything that is no tensor (the steering, the manifest) travels as one tensor of
bytes, with room to grow, so that an area fits the next copy as well.

Does not know: where an area lies, who else keeps the copy (agent/copies.py), when a copy is needed
(the core). Main thread, but for `fetch`, which runs on the exchange's.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import msgspec
import torch

from everstep import snapshot
from everstep.errors import EverstepError, UserError
from everstep.snapshot import Layout, Manifest, Tensor
from everstep.wire import messages
from everstep.worker import codec
from everstep.worker.control import Control, Stopped
from everstep.worker.state import Leaves, Spec, State, put

_REST = "#rest"
_REST_STEP_BYTES = 16 << 10  # its room is a multiple of this
_AREAS = 2
_PATIENCE_S = 600.0  # for an agent that ships a copy over a slow link; the stop comes before


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """All of a state that is no tensor of a snapshot. `specs`: of those, in the state's order."""

    specs: list[Spec]
    leaves: Leaves
    modes: dict[str, list[str]]


@dataclass(slots=True)
class _Written:
    """A copy that this process has written. `versions`: of the state, as long as it is as it was
    then."""

    path: str
    manifest: Manifest
    versions: int


class CopyError(EverstepError):
    """A copy that is not there, or not what it should be."""


class Copies:
    """The copies of one rank. `write`: whether its shard has none elsewhere; `on`: whether any
    shard of the job has, so that steps end in a late fence."""

    def __init__(self, control: Control, spec: messages.WorkerSpec) -> None:
        self._control, self._spec = control, spec
        self.on = self.write = False
        self._written: dict[int, _Written] = {}  # by step, the newest two
        self._maps: dict[str, mmap.mmap] = {}

    # ------------------------------------------------------------ making one

    def keep(self, state: State, step: int, generation: int, *, gradients: bool) -> bool:
        """Copy the state as `step` has made it. Blocks until the agent says that it is kept. False
        if `generation` was stopped meanwhile. Raises UserError where there is no room."""
        if not self.write:
            return True
        replicas = state.replicas(gradients)
        rest = msgspec.msgpack.encode(
            Rest(specs=[spec for spec, _ in replicas], leaves=state.leaves(), modes=state.modes())
        )
        room = -(-(len(rest) + 8) // _REST_STEP_BYTES) * _REST_STEP_BYTES
        tensors = [_tensor(spec, tensor) for spec, tensor in replicas]
        tensors.append(Tensor(name=_REST, dtype="torch.uint8", item_bytes=1, shape=(room,)))
        layout = Layout(tensors)
        try:
            path = self._area(step, layout.nbytes, generation)
            manifest = self._write(path, layout, state, step, replicas, rest, room)
            text = snapshot.encode(manifest)
            turn = self._control.next_turn()
            self._control.send(messages.Shelved(turn=turn, step=step, manifest=text))
            self._control.answer(messages.Kept, turn, _PATIENCE_S, generation)
        except Stopped:
            return False
        self._written = {s: kept for s, kept in self._written.items() if s == step - 1}
        self._written[step] = _Written(path, manifest, state.updates_seen())
        return True

    def _area(self, step: int, nbytes: int, generation: int) -> str:
        turn = self._control.next_turn()
        self._control.send(messages.Shelve(turn=turn, step=step, nbytes=nbytes))
        answer = self._control.answer(messages.Shelf, turn, _PATIENCE_S, generation)
        if answer.refusal:
            raise UserError(answer.refusal)
        return answer.path

    def _write(
        self,
        path: str,
        layout: Layout,
        state: State,
        step: int,
        replicas: list[tuple[Spec, torch.Tensor]],
        rest: bytes,
        room: int,
    ) -> Manifest:
        about = snapshot.About(
            run_id=self._spec.run_id,
            rank=self._spec.rank,
            world=self._spec.world_size,
            shard=state.shard,
            step=step,
        )
        raw = {spec.name: codec.tensor_bytes(_plain(tensor)) for spec, tensor in replicas}
        buffers = {name: codec.buffer_of(data) for name, data in raw.items()}
        framed = len(rest).to_bytes(8, "little") + rest
        buffers[_REST] = framed.ljust(room, b"\0")
        with memoryview(self._map(path)) as area:
            return snapshot.write(area, layout, about, buffers)

    def _map(self, path: str) -> mmap.mmap:
        """The area, mapped for good: an area is used in turn with one other, and to map it anew
        costs as much as to fill it."""
        if path not in self._maps:
            while len(self._maps) >= _AREAS:
                self._maps.pop(next(iter(self._maps))).close()
            self._maps[path] = _map(path)
        return self._maps[path]

    # ------------------------------------------------------------ using one

    def undo(self, state: State, committed: int) -> CopyUndo | None:
        """What undoes the updates of the step after `committed`, of which none is made yet; None
        where this process has not written that copy, or parameters were changed since."""
        kept = self._written.get(committed)
        if kept is None or kept.versions != state.updates_seen():
            return None
        return CopyUndo(state, kept)

    def fetch(
        self, state: State, step: int, generation: int
    ) -> tuple[list[torch.Tensor], Rest, int]:
        """Take the tensors of `step` from the rank's copy, wherever it is kept. Returns them, what
        else there is of the state, and the bytes read. Blocks; on the exchange's thread. Raises
        Stopped when `generation` is, CopyError and SnapshotError for what can't be used."""
        turn = self._control.next_turn()
        self._control.send(messages.Recall(turn=turn, step=step))
        found = self._control.answer(messages.Recalled, turn, _PATIENCE_S, generation)
        if found.refusal:
            raise CopyError(found.refusal)
        manifest = snapshot.decode(found.manifest)
        _check_ours(manifest, self._spec, state, step)
        targets, rest = _load(state, found.path, manifest)
        return targets, rest, manifest.nbytes


class CopyUndo:
    """Undoes the updates of an attempt from the rank's own copy of the step before."""

    def __init__(self, state: State, kept: _Written) -> None:
        self._state, self._kept = state, kept

    def put_back(self) -> None:
        """Parameters, optimizer state, param_groups, objects."""
        _, rest = _load(self._state, self._kept.path, self._kept.manifest)
        self._state.load_leaves(rest.leaves)
        self._kept.versions = self._state.updates_seen()


def _load(state: State, path: str, manifest: Manifest) -> tuple[list[torch.Tensor], Rest]:
    """Fill the state's tensors from the snapshot in `path`, which is verified first."""
    with _map(path) as mapped, memoryview(mapped) as area:
        snapshot.verify(manifest, area)
        layout = snapshot.check(manifest)
        spans = {tensor.name: (start, end) for tensor, start, end in layout.spans()}
        first, last = spans[_REST]
        length = int.from_bytes(area[first : first + 8], "little")
        if length > last - first - 8:
            raise CopyError(f"{path}: the copy's description is longer than its place")
        rest = msgspec.msgpack.decode(area[first + 8 : first + 8 + length], type=Rest)
        state.check_trained(rest.specs)
        targets = state.adopt(rest.specs)
        with torch.no_grad():
            for spec, target in zip(rest.specs, targets, strict=True):
                first, last = spans[spec.name]
                if last > first:
                    data = torch.frombuffer(
                        area, dtype=torch.uint8, offset=first, count=last - first
                    )
                    put(target, data.clone().view(target.dtype).reshape(target.shape))
                    del data  # it holds the map
    return targets, rest


def _check_ours(manifest: Manifest, spec: messages.WorkerSpec, state: State, step: int) -> None:
    about = manifest.about
    if (about.run_id, about.rank, about.step) != (spec.run_id, spec.rank, step):
        raise CopyError(
            f"the copy is of rank {about.rank} at step {about.step} of run {about.run_id}, and "
            f"rank {spec.rank} needs step {step} of run {spec.run_id}"
        )
    if about.shard != state.shard:
        raise CopyError(
            f"the copy of rank {about.rank} is of shard {about.shard}, and the rank has "
            f"{state.shard}"
        )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu").resolve_conj().resolve_neg()


def _tensor(spec: Spec, tensor: torch.Tensor) -> Tensor:
    return Tensor(
        name=spec.name, dtype=spec.dtype, item_bytes=tensor.element_size(), shape=spec.shape
    )


def _map(path: str) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)
