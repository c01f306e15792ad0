"""A run begins at the newest checkpoint of its series.

Theory of operation. Before the first step all ranks take the newest checkpoint that is whole in the
union of the tiers: one rank decides, tells the others by a collective of the set-up, and each reads
the bytes that it needs, also where the checkpoint was made by another number of ranks. A rank that
dies in this is answered like any death in set-up: nothing is committed, and all start again.

A new process has no optimizer state yet; it is made first, by the checkpoint's record. What steers
the updates and what belongs to a rank alone (random key, own objects, its buffers) comes from the
record itself. So the step after it is bit for bit the one that an undisturbed run would have made.
Where the number of ranks is another, there is no such run: a rank takes what the one of its number
had; one that is more than there were, what one of them had, with a random key of its own. What
can't be shared out is refused.

A process that joins its peers takes its state from them. It only learns what its predecessor had
when the script came by here.

It does not know what a checkpoint holds (`contents.py`), nor how tiers are read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
import xxhash

from everstep.core.words import name_ranks, verb
from everstep.data.loader import DatasetSource
from everstep.errors import StateLost, UserError
from everstep.tiers import find, tensors, values
from everstep.tiers.catalog import Checkpoint, Whole
from everstep.tiers.newest import SetAside, load_newest
from everstep.tiers.receipt import Receipt
from everstep.tiers.settings import TierSettings
from everstep.wire import messages
from everstep.worker import codec, contents
from everstep.worker.contents import RankOnly
from everstep.worker.runtime import Worker
from everstep.worker.state import Leaves, Spec, State, local, stored

_KEY = "checkpoint/start"  # under which the next process of the rank is told
_SHOWN = 20  # parts, and refusals, that a receipt names


class _Start(msgspec.Struct, frozen=True, kw_only=True):
    """With what a rank began. `position`: samples that were taken before."""

    step: int
    only: RankOnly
    position: int | None


def restore(worker: Worker, settings: TierSettings) -> Receipt | None:
    """Take the newest checkpoint of the series on all ranks: `worker.committed` is then its step.
    None, and nothing is changed, where there is none; a joiner only learns where its rank began.

    Called after `protect`, before the first step, by all ranks; blocks. Raises UserError for a
    checkpoint that is not of this script, StateLost where there are some and none can be had."""
    if worker.joining:
        _follow(worker)
        return None
    taken: dict[str, Checkpoint] = {}

    def targets(checkpoint: Checkpoint) -> dict[str, Any]:
        taken["newest"] = checkpoint
        return _targets(worker, checkpoint)

    tape, worker.communicators.tape = worker.communicators.tape, None  # no replacement does this
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SetAside)  # the receipt says why
            receipt = load_newest(targets, settings)
        tier = _common_tier(receipt)
    except find.NoneThere as none:
        _say(worker, messages.Loaded(generation=_world(worker), step=0, text=str(none)))
        return None
    except StateLost as error:
        said = messages.Loaded(generation=_world(worker), step=0, ok=False, text=str(error))
        _say(worker, said)
        raise
    finally:
        worker.communicators.tape = tape
    checkpoint = taken["newest"]
    own = _own_values(checkpoint)
    start = _Start(step=checkpoint.step, only=_of_rank(worker, own), position=own["position"])
    _load_rest(worker, own)
    _begin(worker, start)
    worker.control.send(messages.Once(key=_KEY, value=msgspec.msgpack.encode(start)))
    parts = tuple((p.rank, p.tier, p.where, p.nbytes) for p in receipt.parts[:_SHOWN])
    refused = "; ".join(str(refusal) for refusal in receipt.refused[:_SHOWN])
    _say(
        worker,
        messages.Loaded(
            generation=_world(worker),
            step=checkpoint.step,
            text=refused,
            newest=receipt.newest,
            tier=tier,
            parts=parts,
            seconds=receipt.seconds,
        ),
    )
    return receipt


def _world(worker: Worker) -> int:
    return worker.communicators.generation


def _say(worker: Worker, loaded: messages.Loaded) -> None:
    worker.control.send(loaded)


def _common_tier(receipt: Receipt) -> Literal["memory", "durable"]:
    """The tier that answered, for all ranks: memory if nobody had to read from another."""
    far = torch.tensor([int("durable" in receipt.tiers)])
    dist.all_reduce(far, dist.ReduceOp.MAX)
    return "durable" if int(far) else "memory"


# ---------------------------------------------------------------------- tensors


def _targets(worker: Worker, checkpoint: Checkpoint) -> dict[str, Any]:
    """The state's tensors, nested as they were saved, to be filled from `checkpoint`."""
    state = worker.state
    assert state is not None
    _own_values(checkpoint)
    specs = list(_specs(state, checkpoint))
    state.adopt(specs)
    gradients = any(spec.name.endswith("#grad") for spec in specs)
    _check_same(state, checkpoint, gradients=gradients)
    packed = contents.pack(worker, gradients=gradients)
    del packed[contents.OWN]
    for top in list(packed):
        packed[top].pop("param_groups", None)
        if not packed[top]:
            del packed[top]
    return packed


def _specs(state: State, checkpoint: Checkpoint) -> Iterator[Spec]:
    """Of all tensors that the state must have: the script's own, and those that the checkpoint has
    beside them."""
    fixed = {name for name, _ in [*state.parameters(), *state.buffers()]}
    yield from (spec for spec, _ in state.replicas() if spec.name in fixed)
    below: dict[str, list[str]] = {}
    for key in checkpoint.tensors:
        parent, _, last = key.rpartition(".")
        below.setdefault(parent, []).append(last)
    far = set(_own_values(checkpoint)["far"])
    for prefix, parameter, parents in contents.optimizer_places(state):
        for parent in parents:
            for last in below.get(parent, ()):
                key = f"{parent}.{last}"
                whole = checkpoint.tensors[key]
                yield Spec(
                    name=f"{prefix}/{last}",
                    dtype=whole.dtype,
                    shape=_shape_here(whole, parameter),
                    near=key not in far,
                )
    for name, parameter, key in contents.gradient_places(state):
        if key in checkpoint.tensors:
            held = stored(parameter)
            yield Spec(
                name=f"{name}#grad", dtype=str(held.dtype), shape=tuple(held.shape), near=True
            )


def _shape_here(whole: Whole, parameter: torch.Tensor) -> tuple[int, ...]:
    """What is stored here of an optimizer's tensor: sharded as its parameter is, if it is alike."""
    if whole.shape == tuple(parameter.shape):
        return tuple(stored(parameter).shape)
    return whole.shape


def _check_same(state: State, checkpoint: Checkpoint, *, gradients: bool) -> None:
    """Raise UserError unless the checkpoint has just the tensors of the protected modules."""
    what = f"the checkpoint of step {checkpoint.step} in series {checkpoint.series}"
    advice = "begin another series (run.checkpoint(series=...)) where the model is another"
    keys = contents.tensor_keys(state, gradients=gradients)
    shapes = {name: tuple(t.shape) for name, t in [*state.parameters(), *state.buffers()]}
    for key, name in keys.items():
        whole = checkpoint.tensors.get(key)
        if whole is None:
            raise UserError(f"{what} has no {key}, which this script has; {advice}")
        if name in shapes and whole.shape != shapes[name]:
            raise UserError(
                f"{key} is {list(shapes[name])} in this script, and {list(whole.shape)} in {what}; "
                f"{advice}"
            )
    tops = tuple(f"{top}." for top in contents.module_tops(state))
    extra = [key for key in checkpoint.tensors if key.startswith(tops) and key not in keys]
    if extra:
        raise UserError(f"{what} has {extra[0]}, which this script has not; {advice}")


# ---------------------------------------------------------------------- all else


def _own_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """What stands in a checkpoint beside tensors. Raises UserError where that is nothing."""
    found: dict[str, Any] = {"leaves": {}, "modes": {}, "rank": {}, "far": [], "position": None}
    for key, data in checkpoint.values.items():
        path = checkpoint.paths.get(key, (key,))
        if path[0] == contents.OWN and len(path) > 1:
            place = found
            for part in path[1:-1]:
                place = place.setdefault(str(part), {})
            place[str(path[-1])] = values.decode(data, tensors.word)
    if not found["rank"]:
        raise UserError(
            f"the checkpoint of step {checkpoint.step} in series {checkpoint.series} was not made "
            "by run.checkpoint, so a run can't go on from it; give the run a series of its own, or "
            "load it yourself before run.protect"
        )
    return found


def _load_rest(worker: Worker, own: Mapping[str, Any]) -> None:
    """What steers the updates, and the modules' modes. Raises UserError for another script's."""
    state = worker.state
    assert state is not None
    try:
        state.load_leaves(Leaves(values=own["leaves"]))
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            "the checkpoint's param_groups, schedulers or other protected objects don't fit those "
            f"of this script ({type(error).__name__}: {error}); begin another series "
            "(run.checkpoint(series=...))"
        ) from error
    state.set_modes(own["modes"])
    state.at_commit = state.steering()


def _of_rank(worker: Worker, own: Mapping[str, Any]) -> RankOnly:
    """What belongs to this rank alone. Raises UserError for what can't be shared out among another
    number of ranks."""
    rank, world, before = worker.spec.rank, worker.spec.world_size, own["world"]
    only = contents.rank_only(own["rank"][str(rank % before)])
    if worker.carry and (before != world or only.streams is None):
        rng = "carry" if own["carried"] else "keyed"
        raise UserError(
            f"the checkpoint was made by {before} ranks with rng={rng!r}, and {world} with "
            "everstep.init(rng='carry') can't go on with its random streams; take as many ranks "
            "and the same rng, or everstep.init(rng='keyed')"
        )
    if before == world:
        return only
    if rank == 0:
        worker.note("another-world", _another_world(own, world))
    if rank < before:
        return only
    key = xxhash.xxh3_128_digest(only.rng_key + rank.to_bytes(8, "little"))
    new = b"".join(xxhash.xxh3_128_digest(key + bytes([part])) for part in range(3))
    return msgspec.structs.replace(only, rng_key=new, local={}, log={})


def _another_world(own: Mapping[str, Any], world: int) -> str:
    before = own["world"]
    text = (
        f"the checkpoint of step {own['step']} was made by {before} ranks, and {world} go on from "
        "it: with the same tensors, but other random streams"
    )
    if any(contents.rank_only(data).local for data in own["rank"].values()):
        lost = f"those of {name_ranks(range(world, before))} are gone"
        new = f"{verb(range(before, world), 'begins', 'begin')} with those of the script"
        text += f"; of the objects of protect(local=...), {lost if world < before else new}"
    if own["position"] is None:
        text += "; where the data goes on is the script's affair, whose function makes the batches"
    return text


# ---------------------------------------------------------------------- where the rank begins


def _begin(worker: Worker, start: _Start) -> None:
    """The rank stands at the checkpoint's step."""
    state, only = worker.state, start.only
    assert state is not None
    worker.base = worker.committed = start.step
    worker.rng_key = only.rng_key
    worker.values.clear()
    worker.values.update(codec.decode(only.values))
    worker.log = {step: dict(scalars) for step, scalars in only.log.items()}
    state.own.load(only.local)
    buffers = dict(state.buffers())
    state.changing = tuple(name for name in buffers if name in only.buffers)
    with torch.no_grad():
        for name in state.changing:
            local(buffers[name]).copy_(codec.decode(only.buffers[name]))
    if start.position is not None and isinstance(worker.source, DatasetSource):
        worker.source.go_on(start.step, start.position)
    worker.seed("after")
    worker.restore_streams(only.streams if worker.carry else None)


def _follow(worker: Worker) -> None:
    """Begin as the rank's earlier process did here, if it began at a checkpoint."""
    recorded = worker.spec.once.get(_KEY)
    if recorded is not None:
        _begin(worker, msgspec.msgpack.decode(recorded, type=_Start))
