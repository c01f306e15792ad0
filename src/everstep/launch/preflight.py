"""What must be true of this machine before a job starts: refused here, with what to do, or not at
all.

Every check only looks. It starts no process, imports nothing of the user's and writes nothing, so
that `--dry-run` can make the same checks. It can not know what changes between the look and the
start (a port that is taken in between); the start meets that again by itself."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from everstep.errors import UserError
from everstep.settings import RunSettings
from everstep.types import OLDEST_TORCH
from everstep.wire.messages import ScriptSpec


def check(settings: RunSettings, *, resume: bool = False) -> None:
    """Raise UserError if the job of `settings` can not start here. `resume`: the run's directory
    may be there. Does not block; any thread."""
    check_torch(_torch_version())
    check_script(settings.script)
    if not resume:
        check_run_dir(settings)
    check_port(settings.master_port)


def run_dir(settings: RunSettings) -> Path:
    """The directory of the run's journal and logs."""
    return Path(settings.log_dir) / settings.run_id


def check_script(script: ScriptSpec) -> None:
    """Raise UserError if there is no such script or module to run."""
    if not script.target:
        raise UserError("no script is given; write it after the options: everstep run train.py")
    if script.module:
        _check_module(script.target)
        return
    path = Path(script.target)
    if path.is_dir():
        raise UserError(f"{path} is a directory; name the script in it, or use -m for a package")
    if not path.exists():
        raise UserError(f"{path}: no such script (looked from {Path.cwd()}); for a module use -m")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path} is not readable by this user; change its permissions")


def check_torch(version: str | None) -> None:
    """Raise UserError if `version` of torch (None: not installed) is not supported."""
    wanted = ".".join(map(str, OLDEST_TORCH))
    if version is None:
        raise UserError(
            f"torch is not installed for {sys.executable}; "
            f"install it with: pip install 'torch>={wanted}'"
        )
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < OLDEST_TORCH:
        raise UserError(
            f"torch {version} is not supported, it must be {wanted} or newer; "
            f"upgrade it with: pip install 'torch>={wanted}'"
        )


def check_port(port: int) -> None:
    """Raise UserError if TCP `port` can not be bound on this host. 0 always can."""
    if port == 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the listener does it: a port whose last connections are closing is free, a listening
        # one is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"--master-port {port} can not be used: {error.strerror}; choose another, "
                "or leave it out and a free one is taken"
            ) from error


def check_run_dir(settings: RunSettings) -> None:
    """Raise UserError if the run's directory is there already or can not be made."""
    path = run_dir(settings)
    if path.exists():
        raise UserError(
            f"{path} is there already, and a run never writes over another's journal; "
            "choose another --run-id, or leave it out"
        )
    above = path.parent
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = "is not writable by this user" if above.is_dir() else "is not a directory"
        raise UserError(
            f"the run's directory {path} can not be made: {above} {what}; choose another --log-dir"
        )


def _check_module(name: str) -> None:
    """Look for `name` as `python -m` would, without running the packages that it lies in."""
    search: Sequence[str] = [str(Path.cwd()), *(entry for entry in sys.path if entry)]
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), list(search))
        if spec is None:
            break
        search = list(spec.submodule_search_locations or ())
    if spec is None:
        missing = ".".join(parts[:depth])
        inside = f" (looked for {missing})" if missing != name else ""
        raise UserError(
            f"no module named {name!r}{inside}; give its full dotted name, from a directory on "
            "the path, or leave out -m for a script"
        )
    if spec.submodule_search_locations is None:
        return
    if PathFinder.find_spec(f"{name}.__main__", list(search)) is None:
        raise UserError(f"{name!r} is a package without a __main__; name the module in it to run")


def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
