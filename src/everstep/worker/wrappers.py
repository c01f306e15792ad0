"""Resetting wrappers to idle, so that an attempt that was cut short leaves nothing in them.

DDP's reducer remembers how far a backward pass came and, from the first pass, in which order
gradients became ready; its bucket layout decides the bits of the sums. So before every retry each
rank (a) rebuilds a layout that is due, from what it saw itself, and (b) resets the reducer; all
ranks do both, or the layouts would part. Wrappers are found by a module-registration hook, so that
one that is not passed to `protect` is found as well."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from everstep.errors import UserError


class Wrappers:
    """All DDP instances of this process, from the moment this is made."""

    def __init__(self) -> None:
        self._ddp: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        register_module_module_registration_hook(self._saw)

    def _saw(self, module: torch.nn.Module, _name: str, _submodule: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            self._ddp.add(module)

    def check(self) -> None:
        """Refuse what cannot be reset yet. Raises UserError."""
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

    def reset(self, *, rebuild: bool = True) -> None:
        """Bring every wrapper to idle. The communicators must be solo: a due rebuild answers
        itself. `rebuild` False leaves a layout that is due to the rehearsal that follows, since the
        pass that was to show it was cut short."""
        for ddp in self._ddp:
            reducer = ddp.reducer
            if rebuild and not ddp._has_rebuilt_buckets and reducer._rebuild_buckets():
                ddp._has_rebuilt_buckets = True
            reducer._reset_state()
            ddp.require_forward_param_sync = True
