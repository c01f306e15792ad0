"""Saves of one state again and again, without planning each anew.

Theory of operation. DCP's planning takes several rounds, and longer than the copy where a state is
many small tensors; and for a training each plan is the one before. So the plan of a save is kept,
with what it was made from: keys, shapes, types, layouts, which names are one tensor. In the next
save every rank says, in one exchange with all others, how it stands, which plan it has kept, and
its values that are no tensors. If all have kept the same, each makes the same order of what all
have said, and copies; else DCP plans.

It does not know what is saved.
"""

from __future__ import annotations

import secrets
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult

from everstep import snapshot
from everstep.errors import EverstepError
from everstep.tiers import policy
from everstep.tiers.lanes import Contents
from everstep.tiers.parts import lay_out
from everstep.tiers.policy import Wish

if TYPE_CHECKING:
    from everstep.tiers.dcp import TieredWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The plan of a save. `token`: of the save, alike on all ranks. `shape`: what it was made from;
    `places`: what of it lies where; `contents`: on the rank that commits."""

    token: str
    shape: list[Any]
    items: list[WriteItem]
    places: list[Any]
    contents: Contents | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What a rank tells all others. `attempt`: what it would call this save."""

    token: str
    attempt: str
    wish: Wish
    raised: tuple[str, ...]
    values: dict[str, bytes]


@dataclass(slots=True, kw_only=True)
class _Ready:
    """What this rank would copy by the kept plan."""

    kept: _Kept
    layout: snapshot.Layout
    sources: dict[str, torch.Tensor]
    values: dict[str, bytes]


class Again:
    """Saves through `writer`, by all ranks of the world. Main thread."""

    def __init__(self, writer: TieredWriter) -> None:
        self._writer = writer
        self._kept: _Kept | None = None

    def save(self, state: dict[str, Any], step: int) -> None:
        """Save `state`, as `dcp.save` does with the writer; all ranks call it. What one rank can't
        save is raised on all."""
        alone = not dist.is_initialized()
        rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        writer = self._writer
        writer.reset(step)
        writer.set_up_storage_writer(rank == 0, rank=rank)
        flat = flatten_state_dict(state)[0]
        ready, said, trouble = None, None, None
        try:
            ready = self._prepare(flat, rank)
            said = _Said(
                token=ready.kept.token if ready is not None else "",
                attempt=secrets.token_hex(8),
                wish=writer.wish(),
                raised=tuple(writer.saver.raised),
                values=ready.values if ready is not None else {},
            )
        except EverstepError as error:  # the others wait for this rank's word
            trouble = error
        every: list[Any] = [said or trouble] * world
        if world > 1:
            dist.all_gather_object(every, said or trouble)
        for each in every:
            if isinstance(each, EverstepError):
                raise each
        if ready is not None and {each.token for each in every} == {ready.kept.token}:
            self._by_kept(ready, every)
            return
        self._kept = None
        self._plan(state, step, alone=alone)
        planned = writer.planned()
        if planned is not None:
            token, items, results, contents = planned
            self._kept = _Kept(
                token=token,
                shape=_shape(flat),
                items=items,
                places=_places(results),
                contents=contents,
            )

    def _plan(self, state: dict[str, Any], step: int, *, alone: bool) -> None:
        """Save with a plan of DCP's. Raises what a rank raised, where that is an error of ours."""
        try:
            with warnings.catch_warnings():
                if alone:
                    warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp_save(state, storage_writer=self._writer, checkpoint_id=str(step), no_dist=alone)
        except CheckpointException as error:
            for cause, _ in error.failures.values():
                if isinstance(cause, EverstepError):
                    raise cause from error
            raise

    def _prepare(self, flat: dict[str, Any], rank: int) -> _Ready | None:
        """What is copied by the kept plan; None where it does not fit any more."""
        kept = self._kept
        if kept is None or kept.shape != _shape(flat):
            return None
        planner = DefaultSavePlanner()
        planner.state_dict = flat
        results, layout, sources = lay_out(kept.items, planner, rank)
        if _places(results) != kept.places:
            return None
        found = {
            result.index.fqn: result.storage_data
            for result in results
            if isinstance(result.storage_data, bytes)
        }
        return _Ready(kept=kept, layout=layout, sources=sources, values=found)

    def _by_kept(self, ready: _Ready, every: list[_Said]) -> None:
        writer = self._writer
        first = every[0]
        order = policy.decide(
            [each.wish for each in every], writer.settings, first.attempt, first.raised
        )
        contents = ready.kept.contents
        if contents is not None:
            writer.saver.begin(order.attempt)
        writer.obey(order)
        if order.tiers:
            with writer.said(order):
                writer.copy(order, ready.layout, ready.sources)
        if contents is not None:
            values = {key: data for each in every for key, data in each.values.items()}
            writer.saver.finish(replace(contents, values=values))


def _shape(flat: dict[str, Any]) -> list[Any]:
    """All of a state that its plan depends on."""
    return [
        (key, value.dtype, value.shape, _spread(value)) if isinstance(value, torch.Tensor) else key
        for key, value in flat.items()
    ]


def _spread(tensor: torch.Tensor) -> Any:
    """How a DTensor lies on its mesh."""
    mesh = getattr(tensor, "device_mesh", None)
    return None if mesh is None else (mesh, tensor.placements)  # type: ignore[attr-defined]


def _places(results: list[WriteResult]) -> list[Any]:
    """Which tensor lies under which name; of values, that they are there."""
    return [
        (result.index.fqn, result.storage_data)
        if isinstance(result.storage_data, tuple)
        else result.index.fqn
        for result in results
    ]
