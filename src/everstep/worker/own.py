"""Objects that belong to one rank alone: statistics of its samples, a loader's cursor.

No replica holds them, so they travel in the rank's capsule with every step, whole; hence they are
plain data and small. `protect(local=...)` names them.

Does not know: when they are kept, and who takes them over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everstep.errors import UserError
from everstep.worker import codec

MAX_BYTES = 1 << 20
"""What one object's state may take: it is written to the agent in every step."""


class Own:
    """The objects of `protect(local=...)`, by name. Main thread.

    `things`: by name, or a list, whose items are named by their place. Raises UserError for what
    has no `state_dict` and `load_state_dict`, and for a state that is no plain data or too
    large."""

    def __init__(self, things: Mapping[str, Any] | Sequence[Any] = ()) -> None:
        if isinstance(things, Mapping):
            self._things = dict(things)
        elif isinstance(things, (list, tuple)):
            self._things = {f"local.{index}": thing for index, thing in enumerate(things)}
        else:
            raise UserError(
                f"protect(local=...) takes objects by name or in a list, not a "
                f"{type(things).__name__}; write local={{'name': it}}"
            )
        for name, thing in self._things.items():
            if not all(
                callable(getattr(thing, method, None))
                for method in ("state_dict", "load_state_dict")
            ):
                raise UserError(
                    f"protect(local=...): {name} is a {type(thing).__name__}, which has no "
                    "state_dict() and load_state_dict(); give it both, or keep plain values in "
                    "run.state"
                )
        self.values()

    def __bool__(self) -> bool:
        return bool(self._things)

    @property
    def names(self) -> list[str]:
        """Their names, sorted: alike in all processes of the rank."""
        return sorted(self._things)

    def values(self) -> dict[str, bytes]:
        """Their states now, as codec bytes. Raises UserError for one that may not be kept."""
        found = {}
        for name, thing in self._things.items():
            found[name] = data = codec.encode(thing.state_dict(), f"the state of {name}")
            if len(data) > MAX_BYTES:
                raise UserError(
                    f"protect(local=...): the state of {name} is {len(data) / 2**20:.1f} MiB, and "
                    f"{MAX_BYTES >> 20} MiB is the most, since it is written in every step; keep "
                    "less in it, or protect it as a module, which peers hold"
                )
        return found

    def load(self, values: Mapping[str, bytes]) -> None:
        """Put back what `values` returned. A name that is missing there is left as it is."""
        for name, data in values.items():
            if name in self._things:
                self._things[name].load_state_dict(codec.decode(data))
