"""everstep: checkpointless training for PyTorch.

The public names are few; importing the package imports no torch. `init()` is where a script begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.errors import EverstepError, PeerError, StateLost, TransientError, UserError

if TYPE_CHECKING:
    from everstep.worker.run import Run

__version__ = "0.1.0"
__all__ = ["EverstepError", "PeerError", "StateLost", "TransientError", "UserError", "init"]


def init(*, rng: str = "keyed") -> Run | Any:
    """Join the job; stands where `dist.init_process_group` stood.

    Under `everstep run` it returns the protected run. Anywhere else (plain `python`, torchrun,
    `EVERSTEP=off`) it returns an unprotected one with the same methods, and says so once. Calling
    it again returns the same run.

    `rng`: "keyed" (each step and section starts with generators seeded for it, so that no stream
    has to be saved) or "carry" (the script's own streams go on; they travel with every step).

    Blocks until all ranks have joined. Main thread. Raises UserError
    where torch.distributed is set up already."""
    from everstep.worker.process import current_run

    run = current_run(rng)
    if run is not None:
        return run
    from everstep.worker.unprotected import plain_run

    return plain_run(rng)
