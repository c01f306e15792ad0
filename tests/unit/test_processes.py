"""Sessions, reaping and how an exit reads."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping

import pytest

from everstep.agent import processes
from everstep.agent.ending import end_marked, end_session, exit_status
from everstep.types import CauseKind

# Prints its own id and that of a child; both then wait for a signal.
FAMILY = """
import os, signal
child = os.fork()
if child:
    print(os.getpid(), child, flush=True)
signal.pause()
"""


def start(code: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A Python in its own session that has printed its first line when this returns."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def first_numbers(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    with process.stdout as out:
        return [int(word) for word in out.readline().split()]


def test_this_process_is_in_the_table() -> None:
    me = processes.look_up(os.getpid())
    assert me is not None
    assert (me.pid, me.parent, me.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert os.getpid() in {process.pid for process in processes.process_table()}


def test_a_name_with_parentheses_and_spaces_is_read() -> None:
    code = "open('/proc/self/comm','w').write('a) R 1 (b'); print(1, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        found = processes.look_up(process.pid)
        assert found is not None
        assert found.parent == os.getpid()
        process.communicate("\n", timeout=10)


def test_a_session_ends_with_all_that_is_in_it() -> None:
    was = processes.set_child_subreaper(True)
    leader = start(FAMILY)
    _, child = first_numbers(leader)
    leader.kill()
    pidfd = os.pidfd_open(leader.pid)
    select.select([pidfd], [], [], 10)
    os.close(pidfd)
    # The leader is a zombie and its child, which lives, is ours now.
    asyncio.run(end_session(leader.pid))
    assert not processes.is_there(child)
    assert not processes.is_there(leader.pid)
    leader.wait(timeout=10)
    processes.set_child_subreaper(was)


@pytest.mark.parametrize("session", [0, 1, os.getsid(0)])
def test_a_session_that_is_no_workers_is_never_killed(session: int) -> None:
    with pytest.raises(ValueError, match="not a worker's"):
        processes.kill_session(session)


def test_the_status_of_an_adopted_process_is_had() -> None:
    leader = start("import signal; print(0, flush=True); signal.pause()")
    first_numbers(leader)
    assert asyncio.run(exit_status(leader.pid)) == signal.SIGKILL
    leader.wait(timeout=10)
    assert asyncio.run(exit_status(leader.pid)) is None


def test_marked_processes_are_found_wherever_they_went() -> None:
    mark = f"EVERSTEP_JOB=test-{os.getpid()}"
    name, _, value = mark.partition("=")
    code = FAMILY.replace("signal.pause()", "os.setsid() if not child else 0; signal.pause()")
    family = start(code, {name: value})
    stranger = start("import signal; print(0, flush=True); signal.pause()", {name: value + "0"})
    pids = first_numbers(family)
    first_numbers(stranger)
    assert sorted(processes.marked(mark)) == sorted(pids)
    asyncio.run(end_marked(mark))
    assert processes.marked(mark) == []
    assert not any(processes.is_there(pid) for pid in pids)
    assert stranger.poll() is None
    stranger.kill()
    for process in (family, stranger):
        process.wait(timeout=10)


def test_the_kernel_ends_a_child_with_its_parent() -> None:
    code = """
import os, signal
from everstep.agent import processes
child = os.fork()
if child == 0:
    processes.set_parent_death_signal(signal.SIGKILL)
    print(os.getpid(), flush=True)
    signal.pause()
signal.pause()
"""
    was = processes.set_child_subreaper(True)
    parent = start(code, {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    (child,) = first_numbers(parent)
    pidfd = os.pidfd_open(child)
    parent.kill()
    parent.wait(timeout=10)
    assert select.select([pidfd], [], [], 10)[0] == [pidfd]
    os.close(pidfd)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    processes.set_child_subreaper(was)


def test_a_process_that_is_gone_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=10)
    processes.send_signal(process.pid, signal.SIGKILL)
    assert processes.reap(process.pid) is None
    assert processes.look_up(process.pid) is None


WHERE = "in step 5 (backward)"


@pytest.mark.parametrize(
    ("status", "kind", "text", "signature", "job_exit_code"),
    [
        (9, CauseKind.SIGNAL, "rank 1 was killed by SIGKILL in step 5 (backward)", "SIGKILL", 137),
        (139, CauseKind.SIGNAL, f"rank 1 was killed by SIGSEGV {WHERE}", "SIGSEGV", 139),
        (3 << 8, CauseKind.EXIT, f"rank 1 exited with code 3 {WHERE}", "exit 3", 3),
        (
            0,
            CauseKind.EARLY_EXIT,
            f"rank 1 exited with code 0 before the end of the run, {WHERE}",
            "exit 0",
            1,
        ),
        (
            None,
            CauseKind.EXIT,
            f"rank 1 ended {WHERE}; its exit status was lost with the zygote",
            "status lost",
            1,
        ),
    ],
)
def test_how_an_end_reads(
    status: int | None, kind: CauseKind, text: str, signature: str, job_exit_code: int
) -> None:
    cause = processes.cause_of_exit(1, status, WHERE, "last output")
    assert (cause.kind, cause.text, cause.signature) == (kind, text, signature)
    assert cause.job_exit_code() == job_exit_code
    assert (cause.detail, cause.where) == ("last output", WHERE)
    assert (cause.fault, cause.at_s) == (None, None)


def test_a_kill_of_ours_says_why() -> None:
    cause = processes.cause_of_exit(2, 9, "parked at step 3", "", "it is late")
    assert cause.text == "rank 2 was killed by SIGKILL by everstep (it is late) parked at step 3"
