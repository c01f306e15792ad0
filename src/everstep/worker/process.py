"""The life of a worker process, from the fork to the exit code.

The zygote calls `run_worker` in the child. The script runs as `__main__`, from its top;
`everstep.init()` finds the worker here. The exit code is the script's; what it raised is told to
the agent first, so that the first cause can be shown."""

from __future__ import annotations

import atexit
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

import torch

from everstep.errors import EverstepError, StateLost, UserError
from everstep.types import Cause, CauseKind
from everstep.wire import messages
from everstep.worker.communicators import QuiesceTimeout
from everstep.worker.control import Stopped
from everstep.worker.rng import carries
from everstep.worker.run import Run
from everstep.worker.runtime import Worker, exception_cause

EXIT_REPLACE = 112

_worker: Worker | None = None
_run: Run | None = None


def current_run(rng: str) -> Run | None:
    """The run of this process: made at the first call. `rng`: how random streams are kept. None
    where no agent started the process. Raises UserError for another `rng` than at the first
    call."""
    global _run
    carry = carries(rng)
    if _worker is None:
        return None
    if _run is None:
        _worker.carry = carry
        _run = Run(_worker)
    elif _worker.carry != carry:
        raise UserError(f"everstep.init(rng={rng!r}) was called once with another rng; choose one")
    return _run


def run_worker(spec: messages.WorkerSpec, control: socket.socket) -> int:
    """Run the script under the agent that holds the other end of `control`. Returns the exit code.
    Main thread."""
    global _worker
    import time

    started = time.monotonic()
    worker = _worker = Worker(spec, control)
    worker.control.start()
    worker.control.send(messages.Hello(pid=os.getpid(), t=started))
    code = _guarded(worker)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _guarded(worker: Worker) -> int:
    try:
        try:
            _run_script(worker.spec.script)
        except SystemExit as leaving:
            code = _exit_code(leaving)
            if code or (_run is not None and _run.in_step):
                return code  # 0 inside a step is a failure too: the agent sees an early exit
        if _run is not None:
            _run._finish()
        return 0
    except (UserError, StateLost) as error:
        worker.control.send(messages.Refuse(text=_located(error), exit_code=error.exit_code))
        traceback.print_exc()
        return error.exit_code
    except (QuiesceTimeout, Stopped) as error:
        text = f"this process has to be replaced: {error}"
        worker.control.send(
            messages.Raised(cause=Cause(kind=CauseKind.WORKER, text=text, exit_code=EXIT_REPLACE))
        )
        return EXIT_REPLACE
    except (Exception, KeyboardInterrupt) as error:
        worker.control.send(messages.Raised(cause=exception_cause(error, worker.progress.words())))
        traceback.print_exc()
        return error.exit_code if isinstance(error, EverstepError) else 1


def _located(error: EverstepError) -> str:
    """The error's text with the line of the script that led to it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _ours(f.filename)]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{error}{where}"


def _ours(filename: str) -> bool:
    """Not the script's: everstep's, torch's (which calls back into everstep), the interpreter's."""
    packages = str(Path(__file__).resolve().parents[1]), str(Path(torch.__file__).parent)
    return filename.startswith((*packages, "<frozen")) or "runpy" in filename


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    print(leaving.code, file=sys.stderr)
    return 1


def _run_script(script: messages.ScriptSpec) -> None:
    sys.argv = [script.target, *script.args]
    if script.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script.target).resolve().parent))
        runpy.run_path(script.target, run_name="__main__")
