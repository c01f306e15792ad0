"""Where a checkpoint comes from: the code's commit, versions, the run, the world.

It does not know what is in the checkpoint, and takes nothing from the environment but what `git`
itself reads.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from everstep.tiers.catalog import Origin

_GIT_S = 10.0
_MAX_PACKAGES = 2000


def origin(
    *,
    world: int,
    mesh: Mapping[str, int] | None = None,
    config: Mapping[str, Any] | None = None,
    parent: str = "",
    run_id: str = "",
) -> Origin:
    """What is known here and now. `mesh`: names and sizes of its dimensions; `config`: plain data;
    `parent`: `series/step` that the training began from. Blocks for `git` and a look at what is
    installed, the first time in a process."""
    return Origin(
        run_id=run_id,
        commit=commit_of(_script_folder()),
        world=world,
        mesh=dict(mesh or {}),
        packages=packages(),
        config=dict(config or {}),
        parent=parent,
        written_s=time.time(),
    )


@functools.cache
def commit_of(folder: Path) -> str:
    """The commit that is checked out where `folder` is, with `-dirty` where files differ from it;
    empty where there is none, or no git. Blocks for git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"],
            capture_output=True,
            timeout=_GIT_S,
            check=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace").strip()


@functools.cache
def packages() -> dict[str, str]:
    """Versions of what is installed, by name, and of Python. Blocks on the disk."""
    found = {"python": platform.python_version()}
    for distribution in metadata.distributions():
        if len(found) == _MAX_PACKAGES:
            break
        about = distribution.metadata
        if "Name" in about and "Version" in about:  # not in one that was half removed
            # The first on the path is the one that is imported.
            found.setdefault(about["Name"], about["Version"])
    return dict(sorted(found.items()))


def _script_folder() -> Path:
    """Where the code of this process begins: the script's folder, else the current one."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(script).resolve().parent if script else Path.cwd()
