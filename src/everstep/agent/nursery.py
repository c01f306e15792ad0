"""Keeps one zygote ready to fork.

Theory of operation: a zygote with threads must not fork, so one whose script's imports have started
some is given up for one without those imports; one that dies while it imports is started once more.
The second failure of either kind is the user's to mend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from everstep.agent.zygote import Zygote, ZygoteDiedError, ZygotePlan
from everstep.errors import UserError
from everstep.wire.messages import Exited, Forked, Ready, ScriptSpec


class Nursery:
    """The zygote of a node. Loop thread only.

    `log`: the file for what zygotes print. `on_message`: called with what the zygote says of its
    children. `on_lost`: called with a zygote that died after it was ready. `note(key, text)`: for
    what a person should know.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        plan: ZygotePlan,
        environment: Mapping[str, str],
        script: ScriptSpec,
        log: Path,
        on_message: Callable[[Forked | Exited], None],
        on_lost: Callable[[Zygote], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._loop = loop
        self._plan = plan
        self._environment = environment
        self._script = script
        self._log = log
        self._on_message = on_message
        self._on_lost = on_lost
        self._note = note
        self._with_imports = True
        self._zygote: Zygote | None = None

    @property
    def zygote(self) -> Zygote | None:
        """The zygote, if it is ready to fork."""
        return self._zygote if self._zygote is not None and self._zygote.ready else None

    @property
    def pid(self) -> int | None:
        """The process id of the zygote, ready or not."""
        return None if self._zygote is None else self._zygote.pid

    async def open(self) -> Ready:
        """Make a zygote ready, and return its report.

        Raises UserError if it cannot serve or has threads whatever is left out, ZygoteDiedError if
        it dies twice.
        """
        ready = await self._load()
        if ready.threads and self._with_imports:
            self._note(
                "zygote-threads",
                f"the script's imports start threads ({', '.join(ready.threads)}), so workers are "
                "forked without them and import them themselves; each start takes that much longer",
            )
            self._with_imports = False
            await self.close()
            ready = await self._load()
        if ready.threads:
            raise UserError(
                f"importing torch starts threads ({', '.join(ready.threads)}), and a process with "
                "threads cannot be forked; set what turns them off (OMP_NUM_THREADS=1, "
                "MKL_NUM_THREADS=1) and unset what is loaded unasked (LD_PRELOAD, a sitecustomize)"
            )
        for module, error in ready.failed.items():
            self._note(f"import-failed:{module}", f"`import {module}` fails in advance: {error}")
        return ready

    async def close(self) -> None:
        """End the zygote and every worker that it forked."""
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.close()

    async def _load(self) -> Ready:
        try:
            return await self._load_once()
        except ZygoteDiedError as error:
            self._note("zygote-died", f"{error}; it is tried once more")
        return await self._load_once()

    async def _load_once(self) -> Ready:
        self._zygote = Zygote(
            self._loop,
            self._plan,
            self._environment,
            self._log,
            self._on_message,
            self._lost,
        )
        return await self._zygote.load(self._script, with_imports=self._with_imports)

    def _lost(self, zygote: Zygote) -> None:
        if zygote is self._zygote:
            self._zygote = None
            self._on_lost(zygote)
