"""On what an agent is a node: its settings, and how its part in a job ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Where = Callable[[], Awaitable[tuple[str, int, int] | None]]
"""Says at which host and port the coordinator is, and its term; None while there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Where an agent finds its coordinator (host and port, or what says where) and keeps its files.
    `say` is told, in a sentence, what a person who started it may want to know.

    `name`, `host`, `domain`: as it registers. `interface`: whose address it and its workers listen
    at; "": that which leads to the coordinator. `ports`: of its own listeners. `join_timeout_s`:
    how long it looks for a coordinator at first. `coordinator_timeout_s`: how long it goes on
    without one. `grace_s`: between SIGTERM and SIGKILL of its workers when it is asked to end.
    `memory_share`, `bytes_per_s`: for checkpoints in memory, as `DeskSettings` has them.
    """

    coordinator: tuple[str, int]
    where: Where | None = None
    say: Callable[[str], None] = lambda _: None
    name: str
    host: str
    domain: str
    interface: str
    ports: Sequence[int]
    log_dir: Path
    shm_dir: Path
    join_timeout_s: float
    coordinator_timeout_s: float
    grace_s: float
    memory_share: float = 0.5
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a tenure ends. `terminate`, `wait_s`: as Node.close has them. `exit_code`: of the agent;
    None: it registers anew. `error`: it is raised."""

    terminate: bool = False
    wait_s: float = 0.0
    exit_code: int | None = None
    error: BaseException | None = None

    @property
    def anew(self) -> bool:
        """The agent stays, and registers anew."""
        return self.exit_code is None and self.error is None
