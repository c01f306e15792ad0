"""The newest checkpoint that can be had, into the state of all ranks.

Theory of operation. One rank decides which it is, and tells the others; then each loads its part of
it through DCP. When a part proves lost to any rank, all hear of it, and take the next older one.
Once that is loaded, the deciding rank sets aside what is damaged: training comes to those steps
again, and a step is saved once.

It does not know how bytes are read (`resharding.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from everstep.errors import EverstepError, StateLost
from everstep.tiers import find
from everstep.tiers.catalog import Checkpoint
from everstep.tiers.find import Told
from everstep.tiers.load import PartLost
from everstep.tiers.receipt import Receipt, Refusal
from everstep.tiers.resharding import TieredReader
from everstep.tiers.settings import TierSettings
from everstep.tiers.stack import Stack


class SetAside(UserWarning):
    """What became of a checkpoint that proved corrupt."""


def load_newest(
    state: dict[str, Any] | Callable[[Checkpoint], dict[str, Any]],
    settings: TierSettings,
    *,
    step: int | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    set_aside: bool = True,
) -> Receipt:
    """Load the newest whole checkpoint, or that of `step`, into `state`, as `dcp.load` does. When
    a part of it proves lost to any rank, all take the next older one. `state` may be made of the
    checkpoint's record. `set_aside`: newer ones that are damaged, as a training goes on from here;
    False for who only reads.

    Blocks; all ranks of the group call it. Raises `find.NoneThere` where there is none to load,
    StateLost where none can be had."""
    alone = no_dist or not dist.is_initialized()
    if settings.memory_every and not alone:
        _introduce(settings, process_group)
    lost: list[PartLost] = []
    while True:
        told = _decide(settings, step, lost, process_group, alone)
        reader = TieredReader(settings, told=told)
        try:
            target = state(reader.look()) if callable(state) else state
            with warnings.catch_warnings():
                if alone:
                    warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp_load(
                    target,
                    storage_reader=reader,
                    planner=planner,
                    process_group=process_group,
                    no_dist=alone,
                )
        except CheckpointException as error:
            parts = [each for each, _ in error.failures.values() if isinstance(each, PartLost)]
            if not parts or step is not None:
                raise
            lost.append(parts[0])
            continue
        finally:
            reader.close()
        assert reader.receipt is not None
        passed = [_refusal(each, settings) for each in lost]
        receipt = msgspec.structs.replace(
            reader.receipt, refused=(*passed, *reader.receipt.refused)
        )
        if set_aside and (alone or dist.get_rank(process_group) == 0):
            _set_aside(settings, receipt)
        return receipt


def _introduce(settings: TierSettings, group: dist.ProcessGroup | None) -> None:
    """Make the hosts' memories known to each other: an agent that was started again knows of none,
    and what it does not know of would seem lost. Raises on all ranks what a rank raises."""
    stack = Stack(settings)
    try:
        said: list[Any] = [None] * dist.get_world_size(group)
        mine: str | EverstepError
        try:
            mine = stack.card()
        except EverstepError as error:
            mine = error
        dist.all_gather_object(said, mine, group=group)
        for each in said:
            if isinstance(each, EverstepError):
                raise each
        stack.memory().introduce(sorted({card for card in said if card}))
    finally:
        stack.close()


def _set_aside(settings: TierSettings, receipt: Receipt) -> None:
    """Make checkpoints that are damaged, and newer than what was loaded, exist no more."""
    steps = find.damaged(receipt)
    if not steps:
        return
    stack = Stack(settings)
    try:
        failed = find.set_aside(stack.tiers(), steps, deadline_s=settings.deadline_s)
    finally:
        stack.close()
    said = [f"step {step} was set aside: it can be saved again ({steps[step]})" for step in steps]
    for text in failed or said:
        warnings.warn(text, SetAside, stacklevel=3)


def _refusal(lost: PartLost, settings: TierSettings) -> Refusal:
    """Why a checkpoint was passed over, as all ranks have heard."""
    return Refusal(
        tier="every tier",
        where=settings.series,
        step=lost.step,
        rank=lost.rank,
        why=lost.why,
        damaged=lost.damaged,
    )


def _decide(
    settings: TierSettings,
    step: int | None,
    lost: list[PartLost],
    group: dist.ProcessGroup | None,
    alone: bool,
) -> Told:
    """What the group's first rank decides for, when checkpoints with a lost part were seen. Raises
    on all ranks what it raises there."""
    told: list[Any] = [None]
    if alone or dist.get_rank(group) == 0:
        stack = Stack(settings)
        try:
            without = {each.step for each in lost}
            found = find.decide(
                stack.tiers(), step=step, without=without, deadline_s=settings.deadline_s
            )
            told = [found.told]
        except EverstepError as error:
            told = [error]
        finally:
            stack.close()
    if not alone:
        dist.broadcast_object_list(told, group=group, group_src=0)
    if isinstance(told[0], Exception):
        if lost and isinstance(told[0], StateLost):
            raise StateLost("; ".join(map(str, [told[0], *lost]))) from told[0]
        raise told[0]
    assert isinstance(told[0], Told)
    return told[0]
