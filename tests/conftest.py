"""What every test is held to: it leaves no process, descriptor, thread or /dev/shm entry behind.

Theory of operation. The test process makes itself a child subreaper, so that whatever a test starts
stays below it in the process tree, orphans and daemons included. Around each test the fixture
compares what there is with what there was. Things that end by themselves a moment later (a process
that was just killed) are given a grace and asked for again; what is there after it is named, and
processes are ended, so that the next test starts clean.

An entry in /dev/shm that is held by a process outside this tree belongs to somebody else who runs
beside us (another pytest-xdist worker). It does not see native threads, which libraries keep in
pools for the life of the process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import signal
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.buckets import Bucket

# A time for one example says how busy the machine is; pytest-timeout bounds the whole test.
hypothesis.settings.register_profile("everstep", deadline=None)
hypothesis.settings.load_profile("everstep")

PR_SET_CHILD_SUBREAPER = 36
SHM = Path("/dev/shm")
_seconds_by_stage: dict[str, float] = defaultdict(float)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("leak_grace_s", "seconds that things may take to end after a test", default="5")


def pytest_configure(config: pytest.Config) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that need more than the package registries: skipped with the reason, a failure in
    CI."""
    missing = []
    if item.get_closest_marker("root") is not None and os.geteuid() != 0:
        missing.append("root")
    for marker in item.iter_markers("apt"):
        missing += [program for program in marker.args if shutil.which(program) is None]
    if not missing:
        return
    reason = f"needs {', '.join(missing)}"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, which CI must provide", pytrace=False)
    pytest.skip(reason)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    parts = Path(report.nodeid.partition("::")[0]).parts
    _seconds_by_stage[parts[1] if len(parts) > 2 else parts[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Time by folder, above pytest's count line. Under xdist the seconds of all workers are added
    up."""
    stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in _seconds_by_stage.items())
    if stages:
        terminalreporter.write_line(f"== time in tests: {stages}")


@dataclass(frozen=True)
class Holdings:
    """What a test process has: process ids to names, descriptors to what they are, threads,
    /dev/shm entries."""

    processes: dict[int, str]
    descriptors: dict[int, str]
    threads: frozenset[threading.Thread]
    shm: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        return cls(
            processes=_descendants(),
            descriptors=_descriptors(os.getpid()),
            threads=frozenset(threading.enumerate()),
            shm=frozenset(os.listdir(SHM)) if SHM.is_dir() else frozenset(),
        )


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, descriptor, thread or /dev/shm entry behind."""
    before = Holdings.now()
    yield
    leaks = find_leaks(before)
    if leaks:
        gc.collect()  # what only a reference cycle keeps is not left behind
        grace_s = float(request.config.getini("leak_grace_s"))
        leaks = _after_grace(before, grace_s)
    _end(set(Holdings.now().processes) - set(before.processes))
    if leaks:
        pytest.fail("left behind by the test: " + "; ".join(leaks), pytrace=False)


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """An object store on loopback, one for all tests of this process. To be asked for by a test or
    its module by name, not on the way: else it would be taken for what the test leaves behind."""
    from tests import buckets  # not all that is run with this file has them

    with buckets.serve(tmp_path_factory.mktemp("bucket")) as server:
        yield server


def find_leaks(before: Holdings) -> list[str]:
    """What there is now and was not before, in words. Reaps adopted children that have ended."""
    _reap(set(_descendants()) - set(before.processes))
    now = Holdings.now()
    leaks = [
        f"process {pid} ({name})"
        for pid, name in now.processes.items()
        if pid not in before.processes
    ]
    leaks += [
        f"descriptor {fd} ({target})"
        for fd, target in now.descriptors.items()
        if before.descriptors.get(fd) != target
    ]
    leaks += [
        f"thread {thread.name}" for thread in now.threads - before.threads if thread.is_alive()
    ]
    leaks += [f"/dev/shm/{name}" for name in sorted(_ours(now.shm - before.shm))]
    return leaks


def _after_grace(before: Holdings, grace_s: float) -> list[str]:
    """The leaks that are still there when the grace is over, or none as soon as there are none."""
    deadline = time.monotonic() + grace_s
    gate = threading.Event()
    while leaks := find_leaks(before):
        if time.monotonic() >= deadline:
            return leaks
        gate.wait(0.02)
    return []


def _descendants() -> dict[int, str]:
    """All processes below this one, by name. A parent's number says who is below whom."""
    children: dict[int, list[int]] = defaultdict(list)
    names = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = Path("/proc", entry, "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        name, _, rest = text.partition("(")[2].rpartition(")")
        names[int(entry)] = name
        children[int(rest.split()[1])].append(int(entry))
    found = {}
    unseen = list(children[os.getpid()])
    while unseen:
        pid = unseen.pop()
        found[pid] = names[pid]
        unseen += children[pid]
    return found


def _descriptors(pid: int) -> dict[int, str]:
    """Open descriptors of a process and what they point to; none if it is gone or another
    user's."""
    found = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
                found[int(entry)] = os.readlink(f"/proc/{pid}/fd/{entry}")
    return found


def _ours(names: frozenset[str]) -> set[str]:
    """Those of new /dev/shm entries that no process outside this tree holds open or mapped."""
    names = frozenset(name for name in names if _is_of_this_user(SHM / name))
    if not names:
        return set()
    family = {os.getpid(), *_descendants()}
    held: set[str] = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in family:
            held.update(_descriptors(int(entry)).values())
            held.update(_mapped(int(entry)))
    return {name for name in names if str(SHM / name) not in held}


def _mapped(pid: int) -> set[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {line.split(maxsplit=5)[5] for line in lines if str(SHM) in line}


def _is_of_this_user(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)


def _reap(pids: set[int]) -> None:
    """Collect those that have ended. Orphans that this process adopted have nobody else to do
    it."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _end(pids: set[int]) -> None:
    """Kill the test's processes that are still there, one by one, and collect them."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
