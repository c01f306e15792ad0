"""The fixture that fails a leaking test, seen from outside: each kind of leak is made and must be
caught."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent.parent / "conftest.py"
ENTRY = f"everstep-leak-{os.getpid()}"
HEAD = """
import os, socket, subprocess, sys, threading
from pathlib import Path
import pytest
FOREVER = [sys.executable, "-c", "import signal; signal.pause()"]
kept = []
"""
LEAKING = f"""
def test_process():
    kept.append(subprocess.Popen(FOREVER))
    Path("pid").write_text(str(kept[0].pid))

def test_orphan_in_a_session_of_its_own():
    starter = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", starter, *FOREVER], check=True)

def test_descriptor():
    kept.append(os.open("/dev/null", os.O_RDONLY))

def test_thread():
    thread = threading.Thread(target=threading.Event().wait, daemon=True, name="stays")
    thread.start()

def test_shared_memory():
    Path("/dev/shm/{ENTRY}").write_bytes(b"x")

def test_what_is_not_a_leak():
    child = subprocess.Popen(FOREVER)
    child.kill()
    child.wait()
    threading.Timer(0.05, lambda: None).start()
    os.close(os.open("/dev/null", os.O_RDONLY))

@pytest.mark.apt("no-such-program-anywhere")
def test_that_needs_what_is_not_here():
    raise AssertionError("must not run")
"""
EXPECTED = {
    "process": r"process \d+ \(python",
    "orphan_in_a_session_of_its_own": r"process \d+ \(python",
    "descriptor": r"descriptor \d+ \(/dev/null\)",
    "thread": r"thread stays",
    "shared_memory": rf"/dev/shm/{ENTRY}",
}


def run_pytest(folder: Path, body: str, *, ci: str = "") -> subprocess.CompletedProcess[str]:
    """Run `body` as a test module of its own, under a copy of our conftest."""
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    markers = "markers =\n    root: r\n    apt: a\n"
    (folder / "pytest.ini").write_text(
        f"[pytest]\nleak_grace_s = 0.3\nfilterwarnings = error\n{markers}"
    )
    (folder / "test_it.py").write_text(HEAD + body)
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-ra", "-v", "test_it.py"],
        cwd=folder,
        env=environment | {"CI": ci},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a run in which every kind of leak was made, not in CI."""
    folder = tmp_path_factory.mktemp("leaking")
    result = run_pytest(folder, LEAKING)
    Path("/dev/shm", ENTRY).unlink(missing_ok=True)
    assert result.returncode == 1, result.stdout + result.stderr
    return folder, result.stdout


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_leak_is_caught(kind: str, leaking: tuple[Path, str]) -> None:
    _, _, after = leaking[1].partition(f"ERROR at teardown of test_{kind} ")
    section = after.partition("ERROR at teardown")[0]
    assert re.search(f"left behind by the test: {EXPECTED[kind]}", section), leaking[1]


def test_only_leaks_are_caught(leaking: tuple[Path, str]) -> None:
    assert "test_what_is_not_a_leak PASSED" in leaking[1]
    assert f"{len(EXPECTED) + 1} passed, 1 skipped, {len(EXPECTED)} errors" in leaking[1]


def test_a_leaked_process_does_not_outlive_its_test(leaking: tuple[Path, str]) -> None:
    pid = (leaking[0] / "pid").read_text()
    assert not Path("/proc", pid).exists()


def test_what_is_not_here_is_skipped_with_its_name_and_fails_in_ci(
    leaking: tuple[Path, str], tmp_path: Path
) -> None:
    assert "needs no-such-program-anywhere" in leaking[1]
    only_last = LEAKING[LEAKING.index("@pytest.mark.apt") :]
    result = run_pytest(tmp_path, only_last, ci="true")
    assert result.returncode == 1
    assert "needs no-such-program-anywhere, which CI must provide" in result.stdout


def test_shared_memory_of_others_is_not_ours(tmp_path: Path) -> None:
    """While the inner test runs, this process, which is outside its tree, makes an entry and holds
    it."""
    path = Path(f"/dev/shm/everstep-other-{os.getpid()}")
    body = """
def test_while_another_process_holds_an_entry():
    with socket.socket(socket.AF_UNIX) as gate:
        gate.connect("gate")
        assert gate.recv(1) == b"x"
"""
    held: list[int] = []

    def make_entry_while_the_test_runs() -> None:
        connection, _ = gate.accept()
        with connection:
            held.append(os.open(path, os.O_CREAT | os.O_RDWR))
            connection.sendall(b"x")

    with socket.socket(socket.AF_UNIX) as gate:
        gate.settimeout(30)
        gate.bind(str(tmp_path / "gate"))
        gate.listen()
        maker = threading.Thread(target=make_entry_while_the_test_runs)
        maker.start()
        try:
            result = run_pytest(tmp_path, body)
        finally:
            maker.join(timeout=30)
            path.unlink(missing_ok=True)
            for fd in held:
                os.close(fd)
    assert held
    assert result.returncode == 0, result.stdout + result.stderr
