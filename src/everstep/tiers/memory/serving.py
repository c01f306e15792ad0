"""A desk that is served, for as long as its agent lives: in a job, or by itself on a host.

In a job nothing is taken before a rank comes: the socket has a name in no file system, which the
job's processes find in their environment. By itself it is found in its directory.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from everstep.tiers.memory.circle import DeskSettings
from everstep.tiers.memory.desk import Desk
from everstep.tiers.memory.door import Door
from everstep.tiers.memory.wire import SOCKET, VARIABLE


@asynccontextmanager
async def in_job(
    settings: DeskSettings, environ: Mapping[str, str]
) -> AsyncIterator[Mapping[str, str]]:
    """Serve the job's processes, whose environment is given back with the desk's socket in it. An
    environment that names one already keeps it: an agent by itself is there before and after the
    job. Nothing is left at the end. Raises UserError."""
    if environ.get(VARIABLE):
        yield environ
        return
    name = f"@everstep-tier-{secrets.token_hex(16)}"
    desk = Desk(settings)
    door = Door(desk, name, desk.open)
    try:
        yield {**environ, VARIABLE: name}
    finally:
        await door.close()
        await desk.close(keep=False)


@asynccontextmanager
async def on_host(
    settings: DeskSettings, *, peers: Sequence[tuple[str, int]] = (), keep: bool
) -> AsyncIterator[Desk]:
    """Serve the host's processes of this user. `peers`: where desks of other hosts listen; ranks
    are served when these have answered, or can't be reached, so that their copies go there. `keep`:
    what is complete stays at the end, for a desk of the same name. Raises UserError."""
    desk = Desk(settings)
    try:
        await desk.open()
        await desk.circle.listen()
        await desk.circle.seek(peers)
        door = Door(desk, str(settings.directory / SOCKET), desk.open)
        try:
            yield desk
        finally:
            await door.close()
    finally:
        await desk.close(keep=keep)


def desk_name(host: str, name: str) -> str:
    """The name of the desk of agent `name` on `host`, which no other of the job has."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name if host == name else f"{host}.{name}")[-64:].lstrip(
        "._-"
    )
