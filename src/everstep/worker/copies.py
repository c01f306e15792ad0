"""Copies of this rank's state in shared memory, for a shard that no peer holds.

Theory of operation. A step commits only when every rank whose shard has no natural replica has a
copy of what the step made: at the end of the function, before the late fence, the rank writes its
state as a snapshot (snapshot.py) into an area of its agent's shelf, and waits until the agent says
that it is kept: on this node and on another under `copies = sync`, on this node under `async`. So a
rank that dies after a commit left its state behind, and one that dies before the fence left that of
the step before: its peers go back there. They do so from their own copy, which is what an update is
undone from, too, unless the script has changed the state since. Under `async` a node that is lost
may take the newest copies with it; which older ones all ranks still have is agreed in the fence
(schedule.py). Everything that is no tensor (the steering, the manifest) travels as one tensor of
bytes, with room to grow, so that an area fits the next copy as well.

A copy that turns out not to be what was written is looked for elsewhere.

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
from everstep.snapshot import Layout, Manifest, SnapshotError, Tensor
from everstep.wire import messages
from everstep.worker import codec
from everstep.worker.control import Control, Stopped
from everstep.worker.schedule import AREAS, Schedule
from everstep.worker.state import Leaves, Spec, State, put

_REST = "#rest"
_REST_STEP_BYTES = 16 << 10  # its room is a multiple of this
_AREAS = 2  # where each step waits for its copy
_SOURCES = 3  # from which a copy is taken before it is given up: this node's, and two others
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


_SKIPPED = (
    "copies of the ranks' states move slower than steps are made, so some steps are not copied, "
    "and the loss of a node will cost more than one; give the copies a faster network (or a higher "
    "recovery_bandwidth), or make fewer of them (replicate_every)"
)


class CopyError(EverstepError):
    """A copy that is not there, or not what it should be."""


class Copies:
    """The copies of one rank. `on`: whether any shard of the job needs them, so that steps end in a
    late fence."""

    def __init__(self, control: Control, spec: messages.WorkerSpec) -> None:
        self._control, self._spec = control, spec
        self.on = False
        self._write = False  # whether this rank makes any
        self._schedule: Schedule | None = None  # where steps don't wait for them
        self._written: dict[int, _Written] = {}  # by step
        self._turns: dict[int, int] = {}  # by request, the step of a copy that is on its way
        self._maps: dict[str, mmap.mmap] = {}

    def begin(self, go: messages.Go) -> None:
        """It is known now who makes copies, and when."""
        self.on, self._write = go.copies, go.copy
        self._schedule = Schedule(go.copy_every) if go.copies and go.copy_every else None

    def resume(self, steps: tuple[int, ...]) -> None:
        """The ranks have regrouped, and copies of `steps` are left."""
        self._written = {step: self._written[step] for step in steps if step in self._written}
        self._turns.clear()
        if self._schedule is not None:
            self._schedule.resume(steps)

    @property
    def oldest(self) -> int:
        """The oldest step to which all ranks may have to go back, where that may be one before the
        newest; 0 where it may not."""
        steps = () if self._schedule is None else self._schedule.steps
        return steps[0] if steps else 0

    # ------------------------------------------------------------ making one

    def keep(self, state: State, step: int, generation: int, *, gradients: bool) -> bool:
        """Copy the state as `step` has made it, if it is to be. Blocks until the agent says that it
        is kept. False if `generation` was stopped meanwhile. Raises UserError where there is no
        room."""
        if not self._write:
            return True
        schedule = self._schedule
        try:
            if schedule is None:
                self._copy(state, step, generation, (step - 1,), gradients=gradients)
                return True
            self._hear(schedule, step, generation)
            if schedule.wants(step):
                kept = schedule.steps
                turn = self._copy(state, step, generation, kept, gradients=gradients)
                self._turns[turn] = step
                schedule.made(step)
                if not kept:  # there is none to go back to yet
                    self._wait(schedule, turn, generation)
            elif schedule.skipped == 1 and self._spec.rank == 0:  # all know the same
                self._control.send(messages.Note(key="copy-skipped", text=_SKIPPED))
        except Stopped:
            return False
        return True

    def closing(self) -> None:
        """The loop is over: say how many steps were not copied, if any."""
        skipped = 0 if self._schedule is None else self._schedule.skipped
        if skipped and self._spec.rank == 0:  # all know the same
            were = "step was" if skipped == 1 else "steps were"
            text = f"{skipped} {were} not copied, since copies move slower than steps are made"
            self._control.send(messages.Note(key="copies-skipped", text=text))

    def says(self, step: int) -> tuple[int, ...]:
        """What this rank says of its copies in the fence of `step`."""
        return () if self._schedule is None else self._schedule.says(step)

    def agree(self, step: int, least: list[int]) -> None:
        """All ranks have met in the fence of `step`; `least`: of what each has said."""
        if self._schedule is not None:
            made, safe = least
            self._schedule.agree(step, made, safe)

    def _hear(self, schedule: Schedule, step: int, generation: int) -> None:
        """Take note of the copies that have come where they belong, and wait for one if the newest
        that has is too old. Raises Stopped."""
        for safe in self._control.come(messages.Safe):
            if safe.turn in self._turns:
                schedule.settled(self._turns.pop(safe.turn))
        awaited = schedule.must_wait(step)
        for turn in [turn for turn, older in self._turns.items() if older == awaited]:
            self._wait(schedule, turn, generation)

    def _wait(self, schedule: Schedule, turn: int, generation: int) -> None:
        self._control.answer(messages.Safe, turn, _PATIENCE_S, generation)
        schedule.settled(self._turns[turn])
        # Answers to earlier requests were passed over; they say nothing more.
        self._turns = {later: step for later, step in self._turns.items() if later > turn}

    def _copy(
        self, state: State, step: int, generation: int, kept: tuple[int, ...], *, gradients: bool
    ) -> int:
        """Copy the state, where copies of the steps in `kept` must stay. Returns the number of the
        request. Raises Stopped, and UserError where there is no room."""
        replicas = state.replicas(gradients)
        rest = msgspec.msgpack.encode(
            Rest(specs=[spec for spec, _ in replicas], leaves=state.leaves(), modes=state.modes())
        )
        room = -(-(len(rest) + 8) // _REST_STEP_BYTES) * _REST_STEP_BYTES
        tensors = [_tensor(spec, tensor) for spec, tensor in replicas]
        tensors.append(Tensor(name=_REST, dtype="torch.uint8", item_bytes=1, shape=(room,)))
        layout = snapshot.layout_of(tuple(tensors))
        path = self._area(step, layout.nbytes, generation, kept)
        about = self._about(state, step, generation)
        manifest = self._fill(path, layout, about, replicas, rest, room)
        turn = self._control.next_turn()
        self._control.send(
            messages.Shelved(
                turn=turn,
                step=step,
                manifest=snapshot.encode(manifest),
                wait=self._schedule is None,
            )
        )
        answer = self._control.answer(messages.Kept, turn, _PATIENCE_S, generation)
        if answer.refusal:
            raise UserError(answer.refusal)
        self._written = {older: self._written[older] for older in kept if older in self._written}
        self._written[step] = _Written(path, manifest, state.updates_seen())
        return turn

    def _area(self, step: int, nbytes: int, generation: int, kept: tuple[int, ...]) -> str:
        turn = self._control.next_turn()
        self._control.send(messages.Shelve(turn=turn, step=step, nbytes=nbytes, keep=kept))
        answer = self._control.answer(messages.Shelf, turn, _PATIENCE_S, generation)
        if answer.refusal:
            raise UserError(answer.refusal)
        return answer.path

    def _about(self, state: State, step: int, generation: int) -> snapshot.About:
        return snapshot.About(
            run_id=self._spec.run_id,
            rank=self._spec.rank,
            world=self._spec.world_size,
            shard=state.shard,
            step=step,
            generation=generation,
        )

    def _fill(
        self,
        path: str,
        layout: Layout,
        about: snapshot.About,
        replicas: list[tuple[Spec, torch.Tensor]],
        rest: bytes,
        room: int,
    ) -> Manifest:
        raw = {spec.name: codec.tensor_bytes(_plain(tensor)) for spec, tensor in replicas}
        buffers = {name: codec.buffer_of(data) for name, data in raw.items()}
        framed = len(rest).to_bytes(8, "little") + rest
        buffers[_REST] = framed.ljust(room, b"\0")
        with memoryview(self._map(path)) as area:
            return snapshot.write(area, layout, about, buffers)

    def _map(self, path: str) -> mmap.mmap:
        """The area, mapped for good: areas are used in turn, and to map one anew costs as much as
        to fill it."""
        if path not in self._maps:
            while len(self._maps) >= (_AREAS if self._schedule is None else AREAS):
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
        Stopped when `generation` is, CopyError where no copy can be used."""
        trouble: list[str] = []
        while len(trouble) < _SOURCES:
            turn = self._control.next_turn()
            spoiled = bool(trouble)
            self._control.send(messages.Recall(turn=turn, step=step, spoiled=spoiled))
            found = self._control.answer(messages.Recalled, turn, _PATIENCE_S, generation)
            if found.refusal:
                trouble.append(found.refusal)
                break
            try:
                manifest = snapshot.decode(found.manifest)
                _check_ours(manifest, self._spec, state, step)
                targets, rest = _load(state, found.path, manifest)
            except (CopyError, SnapshotError, OSError) as error:
                trouble.append(str(error))
            else:
                return targets, rest, manifest.nbytes
        raise CopyError("; ".join(dict.fromkeys(trouble)))


class CopyUndo:
    """Undoes the updates of an attempt from the rank's own copy of the step before."""

    def __init__(self, state: State, kept: _Written) -> None:
        self._state, self._kept = state, kept

    def put_back(self) -> None:
        """Parameters, optimizer state, param_groups, objects. Raises CopyError where the copy is
        not what was written: then nothing has been put back."""
        try:
            _, rest = _load(self._state, self._kept.path, self._kept.manifest)
        except (SnapshotError, OSError) as error:
            raise CopyError(str(error)) from error
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
