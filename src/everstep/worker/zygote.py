"""The zygote: a process with torch and the script's imports loaded, from which workers are forked.

Run by the agent as `python -m everstep.worker.zygote FD RUNNER [MODULE...]`: the descriptor of its
socket to the agent, the function that a worker runs (`module:name`), and what to import before the
script's own imports.

Theory of operation: one thread, one loop over its socket and its children's pidfds. It imports,
says `Ready` with any thread that the imports have started (a fork would copy the locks that such a
thread holds, and not the thread), and forks on request. A child that ends has its session killed
before it is reaped, so that the session's id cannot have been given to anybody else. When the
agent's end of the socket closes, the zygote kills all its children's sessions and exits: no orphan
outlives the agent. While it imports it cannot look at the socket; until then the kernel ends it
with the agent.

The zygote's death is nothing to its workers: they hold their own channels to the agent, which
becomes their parent.

It does not know ranks beyond repeating them, nor why a child ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import re
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from everstep.agent import processes
from everstep.types import OLDEST_TORCH
from everstep.wire.channel import FrameReader, encode
from everstep.wire.messages import (
    Exited,
    Fork,
    Forked,
    FromZygote,
    Load,
    Ready,
    ScriptSpec,
    ToZygote,
    WorkerSpec,
    ZygoteFailed,
)
from everstep.worker.imports import top_imports

Runner = Callable[[WorkerSpec, socket.socket], int]

_WANTED = ".".join(map(str, OLDEST_TORCH))
_FDS_PER_FORK = 3
_END_DEADLINE_S = 5.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _CannotServeError(Exception):
    """What the agent is told in `ZygoteFailed`."""


def main(arguments: Sequence[str]) -> int:
    """Serve the agent until it closes the socket. Returns the process's exit code. Blocks."""
    agent = os.getppid()
    processes.set_parent_death_signal(signal.SIGKILL)
    for number in _IGNORED:
        # Ctrl-C and its like are for the agent to act on; the zygote lives as long as the agent's
        # socket.
        signal.signal(number, signal.SIG_IGN)
    sys.path.pop(0)  # the current directory, put there by -m; the script's own comes in `_load`
    sock = socket.socket(fileno=int(arguments[0]))
    sock.set_inheritable(False)
    if os.getppid() != agent:
        return 1
    try:
        _Zygote(sock, arguments[1], arguments[2:]).serve()
    except _CannotServeError as error:
        sock.sendall(encode(ZygoteFailed(text=str(error))))
        return 1
    return 0


class _Zygote:
    def __init__(self, sock: socket.socket, runner: str, preload: Sequence[str]) -> None:
        self._sock = sock
        self._runner_name = runner
        self._preload = preload
        self._runner: Runner | None = None
        self._reader: FrameReader[ToZygote] = FrameReader(ToZygote)
        self._fds: deque[int] = deque()
        self._children: dict[int, int] = {}  # pidfd to pid
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)

    def serve(self) -> None:
        try:
            while True:
                for fd, _ in self._poll.poll():
                    if fd != self._sock.fileno():
                        self._bury(fd)
                    elif not self._hear():
                        return
        finally:
            self._end_children()

    def _hear(self) -> bool:
        """Take what the agent sent. False: its end is closed."""
        try:
            data, fds, flags, _ = socket.recv_fds(
                self._sock, 1 << 16, 4 * _FDS_PER_FORK, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return False
        self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise _CannotServeError(
                "descriptors sent to the zygote were lost; raise the limit: `ulimit -n`"
            )
        for message in self._reader.feed(data):
            if isinstance(message, Load):
                self._load(message)
            else:
                self._fork(message)
        return bool(data)

    def _send(self, message: FromZygote) -> None:
        # An agent that is gone shows as the end of the stream, where it is acted on.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._sock.sendall(encode(message))

    # ------------------------------------------------------------ load

    def _load(self, load: Load) -> None:
        for name in self._preload:
            _import_own(name)
        version = _torch_version()
        module, _, function = self._runner_name.partition(":")
        self._runner = getattr(_import_own(module), function)
        failed = _import_script(load.script) if load.with_imports else {}
        # Objects made so far are never looked at by the collector again: a collection in a worker
        # would write to, and so copy, every page that it shares with the zygote.
        gc.collect()
        gc.freeze()
        processes.set_parent_death_signal(0)
        self._send(Ready(threads=_other_threads(), failed=failed, torch=version))

    # ------------------------------------------------------------ children

    def _fork(self, fork: Fork) -> None:
        fds = [self._fds.popleft() for _ in range(_FDS_PER_FORK)]
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            raise _CannotServeError(
                f"no worker can be forked for rank {fork.spec.rank}: {error.strerror}; this "
                "machine is out of memory or of processes (`ulimit -u`)"
            ) from error
        if pid == 0:
            self._become_worker(fork, fds)
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        self._send(Forked(rank=fork.spec.rank, incarnation=fork.spec.incarnation, pid=pid))

    def _bury(self, pidfd: int) -> None:
        pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        processes.kill_session(pid)
        _, status = os.waitpid(pid, 0)
        self._send(Exited(pid=pid, status=status))

    def _end_children(self) -> None:
        """Kill every child's session and reap the children, for at most a few seconds."""
        deadline = time.monotonic() + _END_DEADLINE_S
        for pidfd, pid in self._children.items():
            processes.send_signal(pid, signal.SIGKILL)  # it may not have its own session yet
            processes.kill_session(pid)
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            if ended.poll(1000 * max(0.0, deadline - time.monotonic())):
                processes.kill_session(pid)
                os.waitpid(pid, 0)

    # ------------------------------------------------------------ in the child

    def _become_worker(self, fork: Fork, fds: Sequence[int]) -> NoReturn:
        """Everything a fresh process has and a fork has not; then the runner. Never returns into
        the loop."""
        code = 1
        try:
            os.setsid()
            control, out, err = fds
            os.dup2(out, 1)
            os.dup2(err, 2)
            self._sock.close()
            for fd in (out, err, *self._fds, *self._children):
                os.close(fd)
            for number in _IGNORED:
                signal.signal(number, signal.SIG_DFL)
            # A terminal's Ctrl-C does not reach another session, but a launcher's may; the agent
            # ends the workers.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.environ.update(fork.environment)
            _reseed_numpy()
            if self._runner is None:
                raise RuntimeError("the zygote was asked to fork before it was asked to load")
            code = self._runner(fork.spec, socket.socket(fileno=control))
        except BaseException:  # noqa: BLE001 - a fork has no caller to raise to; it is printed
            traceback.print_exc()
        finally:
            # Nothing of the zygote's own may run in the child, not even when a flush fails (a full
            # disk).
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(code)


def _import_own(name: str) -> object:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _CannotServeError(
            f"{name} cannot be imported by {sys.executable}: {type(error).__name__}: {error}; "
            f"install it there (pip install 'torch>={_WANTED}') or start everstep with the Python "
            "that has it"
        ) from error


def _torch_version() -> str:
    """The version of the torch that is loaded, "" if none is. Raises _CannotServeError if it is too
    old."""
    version = str(getattr(sys.modules.get("torch"), "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(int(part) for part in numbers.groups()) < OLDEST_TORCH:
        raise _CannotServeError(
            f"torch {version} is not supported; everstep needs {_WANTED} or newer: pip install -U "
            f"'torch>={_WANTED}'"
        )
    return version


def _import_script(script: ScriptSpec) -> dict[str, str]:
    """Import what the script imports at its top. Returns module to error for those that failed."""
    source = _source(script)
    failed = {}
    for wanted in top_imports(source):
        try:
            __import__(wanted.module, fromlist=wanted.names)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the worker will meet it, and show it
            failed[wanted.module] = f"{type(error).__name__}: {error}"
    return failed


def _source(script: ScriptSpec) -> bytes:
    """The script's text, empty where it cannot be had; sys.path is set as Python would set it."""
    if not script.module:
        sys.path.insert(0, str(Path(script.target).resolve().parent))
        return Path(script.target).read_bytes()
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(script.target)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(script.target + ".__main__")
    except (Exception, SystemExit):  # noqa: BLE001 - a parent package fails; the worker shows it
        return b""
    return Path(found.origin).read_bytes() if found is not None and found.origin else b""


def _reseed_numpy() -> None:
    """NumPy's global stream would be the same in all forks. (Python's own is seeded anew by
    itself.)"""
    module = sys.modules.get("numpy.random")
    if module is not None:
        module.seed()


def _other_threads() -> tuple[str, ...]:
    """Names of this process's threads beside its main thread."""
    tasks = Path("/proc/self/task")
    return tuple(
        (tasks / name / "comm").read_text().strip()
        for name in os.listdir(tasks)
        if int(name) != os.getpid()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
