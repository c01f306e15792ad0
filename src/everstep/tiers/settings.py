"""The one place for all settings of tiered checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from everstep.errors import UserError
from everstep.quantities import bytes_per_s
from everstep.tiers.hook import Hook
from everstep.tiers.names import check_series

Policy = Literal["newest", "wait", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Where checkpoints go, how often, and how many stay. Raises UserError when it is made."""

    series: str
    """Name of what is saved here, under which it is found again: usually the training's. Letters,
    digits, dots, underscores and hyphens."""

    destination: str = ""
    """The durable tier: a directory (shared between the hosts), or `s3://`, `gs://`, `az://` with a
    bucket and a prefix. Empty: there is none, and the loss of all nodes loses everything."""

    memory_every: int = 0
    """Steps between saves into the hosts' memory. 0: none. Needs an `everstep agent` on each host,
    or `everstep run`."""

    durable_every: int = 0
    """Steps between saves to the destination. 0: none. Should be a multiple of memory_every, so
    that one copy serves both."""

    copies: int = 2
    """Hosts that keep each part in memory, the own one included. 2: any one host may be lost."""

    memory_retained: int = 2
    """Checkpoints that stay in memory. 2: a new one is complete before the older goes."""

    durable_retained: int = 3
    """Checkpoints that stay at the destination; 0: all. The newest whole one always stays."""

    memory_share: float = 0.5
    """Most of the host's memory (of its control group, where that has a limit) that copies on their
    way to the destination may take, all ranks of the host together. Half: the training needs the
    rest. What is kept in memory has the agent's limit (`everstep agent --memory-share`)."""

    on_busy: Policy = "newest"
    """What a save does while an earlier one is still on its way to the destination. `newest`: it
    waits its turn, and displaces one that still waits; `wait`: the call blocks until the earlier is
    done; `skip`: it is not made. All ranks decide alike."""

    on_save_error: Literal["raise", "warn"] = "raise"
    """Whether a save that failed is an error of the next save on every rank, or a warning."""

    upload_bandwidth: str = ""
    """Most bytes a second that one rank sends to the destination, as `200MB/s`. Empty: no limit."""

    deadline_s: float = 600.0
    """Seconds after which a save or a request that makes no progress has failed."""

    grace_s: float = 300.0
    """Seconds that the end of the job waits for saves that are under way. Long enough for the last
    checkpoint of a large job."""

    on_durable: Hook = ""
    """What is called, by one rank, when a checkpoint has become durable: a command, which is told
    about it by EVERSTEP_CHECKPOINT_SERIES, _STEP, _DESTINATION, _BYTES, _RUN_ID and _COMMIT; or a
    function, which is given a `Durable`. To evaluate, deploy, give notice. A failure is a
    warning."""

    on_durable_timeout_s: float = 600.0
    """Seconds after which a command is ended, and a function left to itself."""

    require_signature: bool = False
    """Refuse checkpoints that are not signed with the key: who can write to the bucket can else
    change the model (docs/reference/trust.md)."""

    secret_file: str = ""
    """File with the key that signs checkpoints and joins agents (`everstep secret FILE`); also
    EVERSTEP_SECRET_FILE. Empty, and none in the environment: checkpoints are not signed."""

    def __post_init__(self) -> None:
        try:
            check_series(self.series)
            if self.upload_bandwidth:
                bytes_per_s(self.upload_bandwidth)
        except ValueError as error:
            raise UserError(f"checkpoints: {error}") from None
        if not self.memory_every and not self.destination:
            raise UserError(
                "checkpoints have no place to go: name a destination, or save into the hosts' "
                "memory (memory_every)"
            )
        if self.durable_every and not self.destination:
            raise UserError(
                f"durable_every={self.durable_every} has no destination: name a directory or a "
                "bucket"
            )
        for name, allowed in (("on_busy", get_args(Policy)), ("on_save_error", ("raise", "warn"))):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)!r} is none of {', '.join(allowed)}")
        for name, least in _LEAST.items():
            if not getattr(self, name) >= least:
                raise UserError(f"{name}={getattr(self, name)} is less than {least:g}")
        if not 0 < self.memory_share <= 1:
            raise UserError(f"memory_share={self.memory_share} is no part of the memory, 0 to 1")


_LEAST = {
    "memory_every": 0,
    "durable_every": 0,
    "copies": 1,
    "memory_retained": 1,
    "durable_retained": 0,
    "deadline_s": 1e-3,
    "grace_s": 0,
    "on_durable_timeout_s": 1e-3,
}
