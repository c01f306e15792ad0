"""Tiered checkpoints: memory of the cluster first, durable second. See docs/design/tiers.md.

The public names. Those that need torch are looked up when a script asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.tiers.settings import TierSettings

if TYPE_CHECKING:
    from everstep.tiers.dcp import TieredReader, TieredWriter, load_newest

__all__ = ["TierSettings", "TieredReader", "TieredWriter", "load_newest"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from everstep.tiers import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
