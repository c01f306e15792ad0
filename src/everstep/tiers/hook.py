"""What is called when a checkpoint has become durable: a command, or a function of the script's.

Theory of operation. It runs after the commit, beside the training, and for a limited time. Whatever
becomes of it, the checkpoint stands: a failure is words for a warning. A command is no shell's: it
is split as a shell would, and told about the checkpoint by variables. What it starts ends with it
when the time is over. A function runs in a thread; one that exceeds its time can't be ended, and is
let be.

It does not know who calls it, and when.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from everstep.settings import without_secret
from everstep.tiers.catalog import Origin

_TAIL_BYTES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """A checkpoint that has become durable. `destination`: as a person would write it."""

    series: str
    step: int
    destination: str
    nbytes: int
    origin: Origin


Hook: TypeAlias = str | Callable[[Durable], object]


def run_hook(
    hook: Hook, durable: Durable, *, timeout_s: float, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Call `hook` and wait for its end, `timeout_s` at most. Returns None when all is well, else
    what happened, for a warning. Raises nothing of the hook's."""
    if isinstance(hook, str):
        return _command(hook, durable, timeout_s, environ)
    return _function(hook, durable, timeout_s)


def variables(durable: Durable) -> dict[str, str]:
    """What a command is told by its environment."""
    return {
        "EVERSTEP_CHECKPOINT_SERIES": durable.series,
        "EVERSTEP_CHECKPOINT_STEP": str(durable.step),
        "EVERSTEP_CHECKPOINT_DESTINATION": durable.destination,
        "EVERSTEP_CHECKPOINT_BYTES": str(durable.nbytes),
        "EVERSTEP_CHECKPOINT_RUN_ID": durable.origin.run_id,
        "EVERSTEP_CHECKPOINT_COMMIT": durable.origin.commit,
    }


def _command(
    command: str, durable: Durable, timeout_s: float, environ: Mapping[str, str]
) -> str | None:
    what = f"the command on_durable ({command}) for step {durable.step}"
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**without_secret(environ), **variables(durable)},
                start_new_session=True,
            )
        except (OSError, ValueError, IndexError) as error:
            return f"{what} could not be started: {error}"
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is its own
            process.wait()
            return f"{what} was not done in {timeout_s:g} s, and was ended"
        if code == 0:
            return None
        said = f": {_tail(output.fileno())}" if os.fstat(output.fileno()).st_size else ""
        return f"{what} ended with code {code}{said}"


def _tail(fd: int) -> str:
    size = os.fstat(fd).st_size
    raw = os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    return raw.decode(errors="replace").strip()


def _function(
    function: Callable[[Durable], object], durable: Durable, timeout_s: float
) -> str | None:
    what = f"the function on_durable for step {durable.step}"
    raised: list[BaseException] = []

    def call() -> None:
        try:
            function(durable)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, name="everstep-on-durable", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        return f"{what} was not done in {timeout_s:g} s, and is left to itself"
    return f"{what} raised {type(raised[0]).__name__}: {raised[0]}" if raised else None
