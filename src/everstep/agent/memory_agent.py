"""An agent without a job: it keeps checkpoints in this host's memory for whoever trains here.

Theory of operation: it serves this user's processes by a socket in its directory in shared memory,
and with a secret listens for the agents of other hosts, which it learns of from the ranks that save
or from its own command line. It ends with SIGTERM or SIGINT; what it keeps is removed then, unless
it was told to keep it for its successor. One that was killed leaves it, and the next of the same
name and secret has it.

It runs no workers and knows no coordinator.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep.agent import identity
from everstep.shm import budget
from everstep.tiers.memory.circle import DeskSettings
from everstep.tiers.memory.serving import on_host
from everstep.tiers.memory.wire import SOCKET
from everstep.wire.secret import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAgentSettings:
    """`peers`: agents of other hosts, host and port. `keep`: what is complete stays when it is
    asked to end. `interface`: whose address it listens at; "": that which leads to the first of
    `peers`, else that of the host's name. The others as DeskSettings has them."""

    name: str
    host: str
    domain: str
    interface: str
    ports: Sequence[int]
    peers: Sequence[tuple[str, int]]
    secret: Secret | None = field(repr=False)
    share: float
    bytes_per_s: float | None
    shm_dir: Path
    keep: bool


def run_memory_agent(settings: MemoryAgentSettings, say: Callable[[str], None]) -> int:
    """Keep checkpoints until a signal asks for the end. Returns the exit code, 0. Main thread;
    blocks. `say`: tells a person. Raises UserError for what must be changed here."""
    return asyncio.run(_serve(settings, say))


async def _serve(settings: MemoryAgentSettings, say: Callable[[str], None]) -> int:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    desk_settings = DeskSettings(
        shm_dir=settings.shm_dir,
        name=settings.name,
        host=settings.host,
        domain=settings.domain,
        secret=settings.secret,
        listen_host=lambda: _address(settings),
        ports=settings.ports,
        share=settings.share,
        bytes_per_s=settings.bytes_per_s,
        say=say,
    )
    async with on_host(desk_settings, peers=settings.peers, keep=settings.keep) as desk:
        site, vault = desk.circle.site, desk.vault
        say(f"ranks of this host find it at {desk_settings.directory / SOCKET}")
        if site is None:
            say("it has no secret, and keeps nothing for other hosts")
        else:
            bulk = desk.circle.plane.port
            say(f"other hosts find it at {_endpoint(site.address, site.port)} (and port {bulk})")
        say(
            f"it keeps {len(vault.list(''))} objects, {budget.size(vault.taken_bytes)}, of an "
            f"earlier agent, and may keep {budget.size(vault.limit_bytes)}"
        )
        await asked.wait()
        if vault.list("") and settings.keep:
            say(f"{budget.size(vault.taken_bytes)} stay for the next agent of this name")
    return 0


def _address(settings: MemoryAgentSettings) -> str:
    if settings.interface:
        return identity.address_of(settings.interface)
    if settings.peers:
        return identity.address_towards(*settings.peers[0])
    return identity.numeric(socket.gethostname())


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
