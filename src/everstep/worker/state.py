"""The state that `protect` names: what it consists of, its digests, its snapshots, and how it is
made again.

Theory of operation: protected things are of three kinds. A *module* has parameters (replicas) and
buffers; an *optimizer* has per-parameter state and param_groups; anything else with
`state_dict`/`load_state_dict` is an *object* of plain data. Tensors are named `model/weight`,
`optimizer/0/3/exp_avg` (group 0, parameter 3) and are read and written in place, so the module, the
optimizer and every wrapper around them stay the same objects. What is no tensor travels as one
value, the *leaves*. The manifest (names, shapes, dtypes) of a donor decides what exists: optimizer
state is created and removed by it, never by what a rehearsal left behind.

Does not know: steps, peers, how bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import torch
import xxhash

from everstep.errors import UserError
from everstep.worker import checks, codec
from everstep.worker.own import Own
from everstep.worker.shards import WHOLE

_GIVEN_BY_SCALER = ("grad_scale", "found_inf")


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a manifest. `near`: its device is that of the parameter it belongs to; else the
    CPU. `trained`: a parameter that gets gradients."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    near: bool
    trained: bool = False


class Leaves(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of the state that is no tensor of its own: codec bytes by name."""

    values: dict[str, bytes]

    def digest(self) -> bytes:
        """Equal for equal values, whatever order an object keeps its own in."""
        return msgspec.msgpack.encode(
            sorted((name, codec.digest(data)) for name, data in self.values.items())
        )


class Steering(msgspec.Struct, frozen=True, kw_only=True):
    """What steers the updates and is no tensor of the state: param_groups (without their
    parameters) by optimizer, and the state of objects (schedulers, scalers) by name."""

    groups: dict[str, list[dict[str, Any]]]
    objects: dict[str, Any]


def _load_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for key in [key for key in group if key != "params" and key not in values]:
            del group[key]
        for key, value in values.items():
            present = group.get(key)
            if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
                present.copy_(value)  # a capturable lr: others hold this very tensor
            else:
                group[key] = value


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is stored here: itself, or a DTensor's local shard."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """What is stored here of a tensor, out of autograd's sight. `local` of a DTensor's `detach` is
    the same tensor by way of its dispatcher, which is dear where it is done in each step."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.detach()


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written to in place; a DTensor's own count stands still."""
    version: int = getattr(tensor, "_local_tensor", tensor)._version
    return version


def put(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into `target`, which may be expanded: what is stored once is written once."""
    for dim in range(target.dim()):
        if target.stride(dim) == 0 and target.size(dim) > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


class State:
    """What one worker protects. All methods run on the main thread, between collectives."""

    def __init__(self, things: dict[str, Any]) -> None:
        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.objects: dict[str, Any] = {}
        for name, thing in things.items():
            self._place(name, thing)
        if not self.optimizers:
            raise UserError(
                "protect() got no optimizer: its state would be lost with a rank; pass "
                "optimizer=<your optimizer>"
            )
        if not self.modules:
            raise UserError("protect() got no module: pass model=<your model, or its wrapper>")
        self.own = Own()
        """What belongs to this rank alone, by the script's word."""
        self.shard = WHOLE
        """Which part of the job's state this is: the key that replicas have alike."""
        self.said: tuple[int, ...] | None = None
        """The ranks that hold the same, where the script says it."""
        self.changing: tuple[str, ...] = ()
        self.late: set[str] = set()
        """Buffers that the step changes after its update: replicas that change."""
        self.at_commit: Steering | None = None
        """The steering as it was at the last commit: what peers are given."""
        self.has_buffers = any(True for _ in self.buffers())
        # FSDP2 puts gathered parameters into the modules while they run: these are the stored ones.
        self._parameters = list(self._named_parameters())
        self.parameter_list = [parameter for _, parameter in self._parameters]
        self._parts = [part for module in self.modules.values() for part in module.modules()]
        self._check_updated_parameters_are_protected()

    def _place(self, name: str, thing: Any) -> None:
        if "/" in name:
            raise UserError(f"protect(): the name {name!r} must not contain '/'")
        if name in self.modules or name in self.optimizers or name in self.objects:
            raise UserError(
                f"protect(): two things are named {name!r} (items of a list are named by their "
                "place)"
            )
        if isinstance(thing, torch.nn.Module):
            checks.refuse_unsupported_module(name, thing)
            self.modules[name] = thing
            for inner, extra in checks.extra_states(name, thing).items():
                codec.encode(extra.state_dict(), f"the extra state of {inner}")
                self.objects[inner] = extra
        elif isinstance(thing, torch.optim.Optimizer):
            checks.refuse_unsupported(name, thing)
            self.optimizers[name] = thing
            if checks.is_zero_optimizer(thing):  # what it keeps of this rank's part
                self.optimizers[f"{name}.local"] = thing.optim  # type: ignore[attr-defined]
        elif isinstance(thing, (list, tuple)):
            for index, item in enumerate(thing):
                self._place(f"{name}.{index}", item)
        elif callable(getattr(thing, "state_dict", None)) and callable(
            getattr(thing, "load_state_dict", None)
        ):
            self.objects[name] = thing
            codec.encode(
                thing.state_dict(), f"the state of {name}"
            )  # refused now, not at the first failure
        else:
            checks.refuse_stateless(name, thing)

    def _check_updated_parameters_are_protected(self) -> None:
        known = {id(p) for module in self.modules.values() for p in module.parameters()}
        for name, optimizer in self.optimizers.items():
            for index, parameter in enumerate(
                p for g in optimizer.param_groups for p in g["params"]
            ):
                if id(parameter) not in known:
                    raise UserError(
                        f"protect(): parameter {index} of {name} belongs to no protected module, "
                        "so it would be lost with a rank; protect that module too"
                    )

    def check_first_step(self) -> None:
        """Right before the first step. Raises UserError for what was forgotten."""
        checks.refuse_forgotten_scheduler(self.optimizers, self.objects)

    def check_optimizer_state(self) -> None:
        """After a first update. Raises UserError for state that would be lost."""
        checks.refuse_lost_state(self.optimizers)

    # ------------------------------------------------------------ names

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """All parameters of the protected modules, each once."""
        return self._parameters

    def _named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for prefix, module in self.modules.items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{prefix}/{name}", parameter

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All buffers, each once, persistent or not."""
        seen: set[int] = set()
        for prefix, module in self.modules.items():
            for name, buffer in module.named_buffers():
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield f"{prefix}/{name}", buffer

    def _optimizer_entries(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        for prefix, optimizer in self.optimizers.items():
            for g, group in enumerate(optimizer.param_groups):
                for p, parameter in enumerate(group["params"]):
                    entry = optimizer.state.get(parameter)
                    yield f"{prefix}/{g}/{p}", parameter, entry if entry is not None else {}

    def optimized(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name (`optimizer/0/3`) and tensor of every parameter that an optimizer updates."""
        return ((prefix, parameter) for prefix, parameter, _ in self._optimizer_entries())

    def updates_seen(self) -> int:
        """How often parameters and tensors of the optimizers were written to, all together."""
        count = sum([version_of(parameter) for parameter in self.parameter_list])
        for optimizer in self.optimizers.values():
            for entry in optimizer.state.values():
                for value in entry.values():
                    if isinstance(value, torch.Tensor):
                        count += version_of(value)
        return count

    def constants_seen(self) -> int:
        """How often buffers were written to that no step is known to change."""
        if not self.has_buffers:
            return 0
        known = {*self.changing, *self.late}
        return sum(b._version for name, b in self.buffers() if name not in known)

    def optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, tensor and parameter of every tensor in the optimizers' state."""
        for prefix, parameter, entry in self._optimizer_entries():
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    yield f"{prefix}/{key}", value, parameter

    def replicas(self, gradients: bool = False) -> list[tuple[Spec, torch.Tensor]]:
        """Every tensor that replicas hold alike, in a fixed order: parameters, constant buffers,
        optimizer state, and gradients where the script carries them from step to step."""
        found: list[tuple[Spec, torch.Tensor]] = []

        def add(name: str, tensor: torch.Tensor, near: bool) -> None:
            held = stored(tensor)
            spec = Spec(
                name=name,
                dtype=str(held.dtype),
                shape=tuple(held.shape),
                near=near,
                trained=tensor.requires_grad,
            )
            found.append((spec, held))

        for name, parameter in self.parameters():
            add(name, parameter, True)
        for name, buffer in self.buffers():
            if name not in self.changing:
                add(name, buffer, True)
        for name, tensor, parameter in self.optimizer_tensors():
            add(name, tensor, tensor.device == parameter.device)
        if gradients:
            for name, parameter in self.parameters():
                if parameter.grad is not None:
                    add(f"{name}#grad", parameter.grad, True)
        return found

    # ------------------------------------------------------------ what is no tensor

    def steering(self) -> Steering:
        """param_groups and the state of objects, as they are now."""
        return Steering(
            groups={
                name: [
                    {k: codec.copy(v) for k, v in group.items() if k != "params"}
                    for group in optimizer.param_groups
                ]
                for name, optimizer in self.optimizers.items()
            },
            objects={name: codec.copy(thing.state_dict()) for name, thing in self.objects.items()},
        )

    def load_steering(self, steering: Steering) -> None:
        """Put back what `steering` returned; it stays as it is, so this can be done again."""
        for name, optimizer in self.optimizers.items():
            _load_groups(optimizer, codec.copy(steering.groups[name]))
            for given in _GIVEN_BY_SCALER:  # to a fused update, and left there by one that was cut
                optimizer.__dict__.pop(given, None)
        for name, thing in self.objects.items():
            thing.load_state_dict(codec.copy(steering.objects[name]))
            # Where it stood inside a step; one that is not enabled never stands anywhere.
            if isinstance(thing, torch.amp.GradScaler) and thing.is_enabled():
                thing._per_optimizer_states.clear()

    def leaves(self, steering: Steering | None = None) -> Leaves:
        """The steering (as it is now, if none is given) and the scalars in optimizer state, as
        bytes."""
        steering = steering or self.steering()
        values: dict[str, bytes] = {}
        for name, groups in steering.groups.items():
            values[f"{name}#groups"] = codec.encode(groups, f"param_groups of {name}")
        scalars: dict[str, dict[str, Any]] = {}
        for prefix, _, entry in self._optimizer_entries():
            for key, value in entry.items():
                if not isinstance(value, torch.Tensor):
                    scalars.setdefault(prefix, {})[key] = value
        values["#scalars"] = codec.encode(scalars, "the optimizers' state")
        for name, state in steering.objects.items():
            values[f"{name}#object"] = codec.encode(state, f"the state of {name}")
        return Leaves(values=values)

    def load_leaves(self, leaves: Leaves) -> None:
        """Put back what `leaves` returned."""
        scalars = codec.decode(leaves.values["#scalars"])
        for prefix, parameter, entry in self._optimizer_entries():
            kept = scalars.get(prefix, {})
            for key in [
                k for k, v in entry.items() if not isinstance(v, torch.Tensor) and k not in kept
            ]:
                del entry[key]
            if kept:
                self._entry_of(prefix, parameter).update(kept)
        values = leaves.values
        self.load_steering(
            Steering(
                groups={name: codec.decode(values[f"{name}#groups"]) for name in self.optimizers},
                objects={name: codec.decode(values[f"{name}#object"]) for name in self.objects},
            )
        )

    def _entry_of(self, prefix: str, parameter: torch.Tensor) -> dict[str, Any]:
        entry: dict[str, Any] = self.optimizers[prefix.split("/", 1)[0]].state[parameter]
        return entry

    def training(self) -> list[bool]:
        """Of every part of the protected modules, whether it is in training mode."""
        return [part.training for part in self._parts]

    def set_training(self, training: list[bool]) -> None:
        """Put back what `training` returned."""
        for part, value in zip(self._parts, training, strict=True):
            part.training = value

    def modes(self) -> dict[str, list[str]]:
        """By module, the names of those parts that are in evaluation mode."""
        return {
            prefix: [name for name, part in module.named_modules() if not part.training]
            for prefix, module in self.modules.items()
        }

    def set_modes(self, modes: dict[str, list[str]]) -> None:
        """Put every part into the mode that `modes` returned on a peer."""
        for prefix, module in self.modules.items():
            evaluating = set(modes.get(prefix, ()))
            for name, part in module.named_modules():
                part.training = name not in evaluating

    # ------------------------------------------------------------ making the state fit a donor's
    # manifest

    def adopt(self, manifest: list[Spec]) -> list[torch.Tensor]:
        """Create and remove optimizer state (and gradients) so that it has exactly the donor's
        tensors; returns the tensors to be filled, in the manifest's order. Raises UserError where a
        module differs."""
        wanted = {spec.name: spec for spec in manifest}
        by_prefix: dict[str, list[Spec]] = {}
        for spec in manifest:
            by_prefix.setdefault(spec.name.rpartition("/")[0], []).append(spec)
        fixed = dict(self.parameters()) | dict(self.buffers())
        targets: dict[str, torch.Tensor] = {}
        for prefix, parameter, entry in list(self._optimizer_entries()):
            for key in [k for k, v in entry.items() if isinstance(v, torch.Tensor)]:
                if f"{prefix}/{key}" not in wanted:
                    del entry[key]
            for spec in by_prefix.get(prefix, []):
                if spec.name not in fixed:
                    targets[spec.name] = self._optimizer_tensor(prefix, parameter, spec)
        for name, parameter in self.parameters():
            grad = wanted.get(f"{name}#grad")
            if grad is None:
                parameter.grad = None
            else:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                targets[grad.name] = local(parameter.grad)
        targets |= {name: stored(t) for name, t in fixed.items() if name in wanted}
        for name, spec in wanted.items():
            target = targets.get(name)
            if (
                target is None
                or tuple(target.shape) != spec.shape
                or str(target.dtype) != spec.dtype
            ):
                has = (
                    "nothing of that name"
                    if target is None
                    else f"{target.dtype} {tuple(target.shape)}"
                )
                raise UserError(
                    f"{name} is {spec.dtype} {spec.shape} on the running ranks, but this process "
                    f"has {has}; the script must build the same model each time it runs"
                )
        extra = [name for name, _ in self.parameters() if name not in wanted]
        if extra:
            raise UserError(
                f"{extra[0]} is a parameter of this process, but not of the running ranks; the "
                "script must build the same model each time it runs"
            )
        return [targets[spec.name] for spec in manifest]

    def check_trained(self, manifest: list[Spec]) -> None:
        """Raise UserError where the donor trains other parameters than this process."""
        wanted = {spec.name: spec for spec in manifest}
        for name, parameter in self.parameters():
            if name in wanted and wanted[name].trained != parameter.requires_grad:
                raise UserError(
                    f"requires_grad of {name} was changed on the running ranks after set-up; a "
                    "replacement has it as the script sets it up, so it can't join. Freeze and "
                    "unfreeze parameters before run.protect, or for a part of the step alone"
                )

    def _optimizer_tensor(self, prefix: str, parameter: torch.Tensor, spec: Spec) -> torch.Tensor:
        entry = self._entry_of(prefix, parameter)
        key = spec.name.rpartition("/")[2]
        present = entry.get(key)
        if isinstance(present, torch.Tensor):
            held = local(present)
            if tuple(held.shape) == spec.shape and str(held.dtype) == spec.dtype:
                return held
        device = parameter.device if spec.near else torch.device("cpu")
        if spec.shape == tuple(stored(parameter).shape):
            made = torch.zeros_like(parameter, dtype=codec.dtype_named(spec.dtype), device=device)
        else:
            made = torch.zeros(spec.shape, dtype=codec.dtype_named(spec.dtype), device=device)
        entry[key] = made
        return stored(made)

    # ------------------------------------------------------------ digests

    def digests(self) -> dict[str, str]:
        """Name to digest of every tensor and value that replicas must hold alike."""
        found = {spec.name: digest_of([tensor]) for spec, tensor in self.replicas()}
        for name, value in self.leaves().values.items():
            found[name] = codec.digest(value)
        return found

    def manifest_digest(self, data: str) -> str:
        """One digest over names, shapes and dtypes of modules, the names of everything, and where
        the data comes from (`data`): what all ranks, and all incarnations of a rank, must have
        alike."""
        names = [
            (name, str(t.dtype), tuple(stored(t).shape))
            for name, t in [*self.parameters(), *self.buffers()]
        ]
        text = repr((names, sorted(self.optimizers), sorted(self.objects), self.own.names, data))
        return xxhash.xxh3_128_hexdigest(text.encode())


def digest_of(tensors: list[torch.Tensor], extra: bytes = b"") -> str:
    """xxh3-128 over the bytes of all tensors, in order. Reads device memory through the host: waits
    for it."""
    digest = xxhash.xxh3_128(extra)
    for tensor in tensors:
        raw = codec.tensor_bytes(stored(tensor).to("cpu").resolve_conj().resolve_neg())
        digest.update(codec.buffer_of(raw))
    return digest.hexdigest()
