"""Resetting wrappers to idle, so that an attempt that was cut short leaves nothing in them.

DDP's reducer remembers how far a backward pass came and, from the first pass, in which order
gradients became ready; its bucket layout decides the bits of the sums. So before every retry each
rank (a) rebuilds a layout that is due, from what it saw itself, and (b) resets the reducer; all
ranks do both, or the layouts would part. DDP instances are found by a module-registration hook, so
that one that is not passed to `protect` is found as well.

FSDP2 keeps gathered parameters in the modules between forward and backward; after a poisoned gather
they are zeros, and the next pass would use them. So every root is resharded, and the gradients it
has not reduced yet are dropped. Its modules change their class without telling anybody: they are
looked for among all objects, when set-up ends and after the first step."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from everstep.errors import UserError

_STATIC_PASSES = 2  # DDP lays out a static graph's buckets by its second pass, others by the first


class Wrappers:
    """All DDP and FSDP2 instances of this process, from the moment this is made."""

    def __init__(self) -> None:
        self._ddp: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._whole: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._fsdp: weakref.WeakSet[Any] = weakref.WeakSet()
        register_module_module_registration_hook(self._saw)

    def find_fsdp(self) -> None:
        """Look for FSDP2 modules. Takes some 10 ms where FSDP2 is in use, else nothing."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        kind = getattr(fsdp, "FSDPModule", None)
        if kind is not None:
            found = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
            self._fsdp = weakref.WeakSet(found)

    def _saw(self, module: torch.nn.Module, _name: str, _submodule: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            self._ddp.add(module)

    def check(self) -> None:
        """Set-up ends. Raises UserError for what cannot be reset."""
        self.find_fsdp()
        _keep_dynamo_out()
        for ddp in self._ddp:
            if getattr(ddp, "_delay_all_reduce_params", None):
                raise UserError(
                    "DDP with delay_all_reduce_named_params is not supported by everstep yet"
                )
            if getattr(ddp, "_comm_hooks", None):
                raise UserError(
                    "a DDP communication hook is not supported by everstep yet: its state would "
                    "not be protected"
                )

    def most_rehearsals(self, committed: int) -> int | None:
        """How many passes a replacement may make whose peers have committed `committed` steps, so
        that its bucket layouts are theirs; None: as many as it takes."""
        young = any(ddp.static_graph and committed < _STATIC_PASSES for ddp in self._ddp)
        return committed if young else None

    def due_passes(self) -> int:
        """How many passes lay out all buckets."""
        return max((_STATIC_PASSES if ddp.static_graph else 1 for ddp in self._ddp), default=0)

    def passed(self) -> None:
        """A whole pass was made here: a step, or a rehearsal of one."""
        for ddp in self._ddp:
            if ddp._lazy_init_ran:
                self._whole.add(ddp)

    @property
    def used(self) -> int:
        """How many DDP instances have made a pass, whole or not."""
        return sum(1 for ddp in self._ddp if ddp._lazy_init_ran)

    def check_laid_out(self, wanted: int) -> None:
        """Raise UserError unless `wanted` DDP instances have made a whole pass here: those of the
        peers have, and their bucket layouts are those of that pass."""
        if len(self._whole) < wanted:
            raise UserError(
                f"of the job's DistributedDataParallel modules {wanted} have been used, and only "
                f"{len(self._whole)} in the step that this rank's replacement has rehearsed, or "
                "could make to its end: the others' buckets can't be laid out as on its peers. Use "
                "every such module in every step (with a loss of weight 0), or wrap them in one"
            )

    def reset(self, *, passes: int) -> None:
        """Bring every wrapper to idle. The communicators must be solo: a due rebuild answers
        itself. `passes`: how many whole passes were made; a layout is not due before, and what was
        seen of one in a pass that was cut short does not count."""
        for ddp in self._ddp:
            reducer = ddp.reducer
            due = passes >= (_STATIC_PASSES if ddp.static_graph else 1) and ddp in self._whole
            if due and not ddp._has_rebuilt_buckets and reducer._rebuild_buckets():
                ddp._has_rebuilt_buckets = True
            reducer._reset_state()
            ddp.require_forward_param_sync = True
        for module in self._fsdp:
            state = module._get_fsdp_state()
            if state._is_root:  # known from the first pass on; before it there is nothing to reset
                module.reset_iter_state()
                _drop_unreduced(state)


def _keep_dynamo_out() -> None:
    """Where a compiled function holds a wrapper, dynamo follows its collectives into our Python
    groups, and fails at the first attribute of a process group that C++ doesn't know."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.add("everstep.worker")


def _drop_unreduced(root: Any) -> None:
    """Gradients of gathered parameters that a pass left behind unreduced."""
    for state in root._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                gathered = getattr(parameter, "_unsharded_param", None)
                if gathered is not None:
                    gathered.grad = None
