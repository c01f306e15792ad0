"""Linux processes: sessions, death, and how an exit reads.

Theory of operation: every worker leads a session of its own, so that whatever it started is found
by its session id in /proc and can be ended with it. A session's id is not given to another process
while its leader is a zombie or any member lives; so a session is killed before its leader is
reaped. The agent is a subreaper: what loses its parent becomes its child and can be waited for. A
process that leaves the session is found by the job's mark in its environment when the job ends.

It does not know of workers or ranks. It does not see processes of other pid namespaces.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from everstep.core.words import name_signal
from everstep.types import Cause, CauseKind

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One line of the process table. `state`: the kernel's letter; Z is a zombie. `session`: its
    session's id."""

    pid: int
    parent: int
    session: int
    state: str


def set_child_subreaper(on: bool) -> bool:
    """Make this process the parent of its orphaned descendants, or not. Returns what it was. Raises
    OSError."""
    was = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was))
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(on))
    return bool(was.value)


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send signal `number` to this process when the thread that made it ends; 0:
    none."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))


def _prctl(option: int, argument: object) -> None:
    zero = ctypes.c_ulong(0)
    if _libc.prctl(ctypes.c_int(option), argument, zero, zero, zero) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def process_table() -> Iterator[Process]:
    """All processes that can be seen now. One may be gone by the time it is yielded."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            entry = look_up(int(name))
            if entry is not None:
                yield entry


def look_up(pid: int) -> Process | None:
    """The process table's line for `pid`, or None if there is none."""
    text = _read(f"/proc/{pid}/stat")
    if text is None:
        return None
    # The name in parentheses may hold spaces and parentheses itself; all that follows the last one
    # is plain.
    state, parent, _group, session, *_ = text[text.rindex(b")") + 2 :].split(None, 4)
    return Process(pid=pid, parent=int(parent), session=int(session), state=state.decode())


def is_there(pid: int) -> bool:
    """Whether the process table has a line for `pid`; a zombie has one."""
    return look_up(pid) is not None


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process (SIGSTOP, SIGTSTP); a debugger's stop is none."""
    process = look_up(pid)
    return process is not None and process.state == "T"


def is_traced(pid: int) -> bool:
    """Whether a debugger (or strace) holds the process."""
    status = _read(f"/proc/{pid}/status") or b""
    tracer = next((line for line in status.splitlines() if line.startswith(b"TracerPid:")), b":0")
    return tracer.partition(b":")[2].strip() != b"0"


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    try:
        chunks = []
        while chunk := os.read(fd, 1 << 16):
            chunks.append(chunk)
        return b"".join(chunks)
    except ProcessLookupError:
        return None
    finally:
        os.close(fd)


def kill_session(session: int) -> list[Process]:
    """SIGKILL every process of a session, its leader included, and return those that are not yet
    gone.

    A zombie whose parent is another process is gone as far as this one can see to it; zombies of
    this process are listed, for the caller to reap. Call it again until it returns none: a process
    may fork while it is looked for.
    """
    if session <= 1 or session == os.getsid(0):
        raise ValueError(f"session {session} is not a worker's")
    left = []
    for process in process_table():
        if process.session == session:
            if process.state == "Z" and process.parent != os.getpid():
                continue
            send_signal(process.pid, signal.SIGKILL)
            left.append(process)
    return left


def marked(mark: str) -> list[int]:
    """Process ids, but this one, that were started with `mark` (NAME=value) in their environment
    and still live."""
    wanted = mark.encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            environment = _read(f"/proc/{name}/environ")
            if environment is not None and wanted in environment.split(b"\0"):
                found.append(int(name))
    return found


def zombies() -> list[int]:
    """Children of this process that have ended and were not waited for."""
    return [p.pid for p in process_table() if p.parent == os.getpid() and p.state == "Z"]


def send_signal(pid: int, number: int) -> None:
    """Send a signal; a process that is gone is no error."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it ended by itself, which is what was wanted


def reap(pid: int) -> int | None:
    """The status of a child that has ended, as from `os.waitpid`; None while it runs or if it is no
    child of ours."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if found == pid else None


def cause_of_exit(rank: int, status: int | None, where: str, detail: str, why: str = "") -> Cause:
    """How a worker's end reads.

    `status`: as from `os.waitpid`, None if it could not be had. `where`: "in step 5 (optimizer)".
    `detail`: its last output. `why`: everstep's own reason, if everstep killed it.
    """
    if status is None:
        return Cause(
            kind=CauseKind.EXIT,
            text=f"rank {rank} ended {where}; its exit status was lost with the zygote",
            detail=detail,
            signature="status lost",
            exit_code=1,
            where=where,
        )
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = name_signal(number)
        by_us = f" by everstep ({why})" if why else ""
        return Cause(
            kind=CauseKind.SIGNAL,
            text=f"rank {rank} was killed by {name}{by_us} {where}",
            detail=detail,
            signature=name,
            signal=number,
            where=where,
        )
    code = os.waitstatus_to_exitcode(status)
    kind = CauseKind.EXIT if code else CauseKind.EARLY_EXIT
    early = "" if code else " before the end of the run,"
    return Cause(
        kind=kind,
        text=f"rank {rank} exited with code {code}{early} {where}",
        detail=detail,
        signature=f"exit {code}",
        exit_code=code,
        where=where,
    )


def job_exit_code(status: int) -> int:
    """A process's exit code as a shell shows it: 128+signal, or the code."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code
