"""What a step found when it began, so that a failed attempt leaves no trace.

At a step's entry this keeps what an attempt may touch before its update: gradients, training modes,
rank-local buffers, param_groups, schedulers, other objects and those of the rank alone. Gradients
are copied only where the script carries them from step to step; a script that clears them at the
start of its step (`zero_grad` first) is recognised by what it did with the old ones, and then they
are put back as none. Parameters and optimizer state are not kept: nothing before the fence changes
them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from everstep.worker.state import State, digest_of, local, put, version_of


class _Gradient(NamedTuple):
    """A parameter's gradient at the entry: the tensor and a copy of it, if it is to be put back,
    and always a weak reference (a strong one would keep the memory of a gradient that the script
    lets go) with its version then."""

    parameter: torch.Tensor
    kept: torch.Tensor | None
    copied: torch.Tensor | None
    seen: TensorWeakRef
    version: int

    def changed(self) -> bool:
        """Whether it was written to, by one who still has it."""
        grad = self.seen()
        return grad is not None and version_of(grad) != self.version

    def untouched(self) -> torch.Tensor | None:
        """The gradient, if it is as it was."""
        return None if self.changed() else self.seen()

    def carried(self) -> bool:
        grad = self.seen()
        return grad is not None and (
            self.parameter.grad is grad or version_of(grad) != self.version
        )


class Undo:
    """A copy of all that an update changes, taken before the first of several updates in one
    step."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._replicas = state.replicas()
        self._copies = [tensor.clone() for _, tensor in self._replicas]
        self._leaves = state.leaves()

    def put_back(self) -> None:
        """Undo the updates: parameters, optimizer state (what they created is removed),
        param_groups, objects."""
        targets = self._state.adopt([spec for spec, _ in self._replicas])
        with torch.no_grad():
            for target, copy in zip(targets, self._copies, strict=True):
                put(target, copy)
        self._state.load_leaves(self._leaves)


class Entry:
    """The entry of one step; `put_back` may be called once for each failed attempt."""

    def __init__(self, state: State, *, copy_gradients: bool, learn_buffers: bool = False) -> None:
        self._state = state
        self._steering = state.steering()
        self._trained = [parameter.requires_grad for parameter in state.parameter_list]
        self._training = state.training()
        self._own = state.own.values()
        self._buffers = {  # all of them, while it is being learned which change
            name: b.detach().clone()
            for name, b in (state.buffers() if learn_buffers or state.changing else ())
            if learn_buffers or name in state.changing
        }
        self._learns = learn_buffers
        self._versions = 0 if learn_buffers else state.constants_seen()
        self._buffer_digests = self._digests()
        self._gate_digests = self._buffer_digests
        self._gradients: list[_Gradient] = []
        for parameter in state.parameter_list:
            grad = parameter.grad
            if grad is not None:
                copied = grad.detach().clone() if copy_gradients else None
                kept = grad if copy_gradients else None
                self._gradients.append(
                    _Gradient(parameter, kept, copied, TensorWeakRef(grad), version_of(grad))
                )
        self.had_gradients = bool(self._gradients)

    def _digests(self) -> dict[str, str]:
        return {n: digest_of([b]) for n, b in self._state.buffers()} if self._learns else {}

    def at_gate(self) -> None:
        """The update is about to begin: what a buffer is now, it was made before it."""
        self._gate_digests = self._digests()

    def learn_buffers(self) -> bool:
        """The step is over: buffers that it changed before its update (BatchNorm's) belong to the
        rank alone and travel in its capsule. Those that it changed after the update (an average of
        the weights) are made from the state, so replicas hold them alike and peers have them; they
        come too late for the capsule.

        Returns whether a buffer changed that was not known to; only looked for by its version
        where this entry does not learn, so that the next ones should."""
        if not self._learns:
            return self._versions != self._state.constants_seen()
        end = self._digests()
        late = {name for name, digest in end.items() if digest != self._gate_digests[name]}
        self._state.late |= late
        early = {n for n, d in self._gate_digests.items() if d != self._buffer_digests[n]}
        self._state.changing = tuple(
            name
            for name, _ in self._state.buffers()
            if name not in late and (name in early or name in self._state.changing)
        )
        return False

    def _changed_buffers(self) -> list[str]:
        """Buffers of which `put_back` has work."""
        if not self._learns:
            return list(self._buffers)
        now = self._digests()
        return [name for name, digest in now.items() if digest != self._buffer_digests[name]]

    def lost(self) -> bool:
        """Whether the step has changed gradients that it should find again and of which there is no
        copy, since no step before had carried any."""
        return any(item.kept is None and item.changed() for item in self._gradients)

    def carried(self) -> bool:
        """Whether the step added to gradients that were there at its entry, or zeroed them in
        place."""
        return any(item.carried() for item in self._gradients)

    def put_back(self) -> None:
        """Make gradients, modes, rank-local buffers, param_groups and objects what they were."""
        kept = [
            item.kept if item.kept is not None else item.untouched() for item in self._gradients
        ]
        with torch.no_grad():
            for parameter, trained in zip(self._state.parameter_list, self._trained, strict=True):
                parameter.grad = None
                if parameter.requires_grad is not trained:  # frozen for a part of the step
                    parameter.requires_grad_(trained)
            for item, grad in zip(self._gradients, kept, strict=True):
                if grad is not None and item.copied is not None:
                    local(grad).copy_(local(item.copied))
                item.parameter.grad = grad
            buffers = dict(self._state.buffers())
            for name in self._changed_buffers():
                put(buffers[name], self._buffers[name])
        self._state.load_steering(self._steering)
        self._state.set_training(self._training)
        self._state.own.load(self._own)


class GradientPolicy:
    """Learns whether gradients at a step's entry matter. While unknown, they are copied. A script
    that accumulates over several steps clears them at the start of some: once a step has carried
    them, they are copied for good."""

    def __init__(self) -> None:
        self._copies = True
        self._carries = False

    @property
    def copies(self) -> bool:
        """Whether the next entry must copy gradients that are there."""
        return self._copies

    def learn(self, entry: Entry) -> None:
        """A step that began with `entry` has ended. A step without gradients at its entry teaches
        nothing."""
        if entry.had_gradients and not self._carries:
            self._copies = self._carries = entry.carried()
