"""Threads that sleep are told from threads that run."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

from everstep.worker.threads import asleep

PR_SET_NAME = 15


def _name_this_thread(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def test_no_thread_of_that_name_is_asleep() -> None:
    assert asleep("not-there", 0.001)


def test_a_waiting_thread_is_asleep_and_a_running_one_is_not() -> None:
    waits, stop, named = threading.Event(), threading.Event(), threading.Barrier(3)

    def wait() -> None:
        _name_this_thread("es-waits")
        named.wait(5)
        waits.wait(10)

    def spin() -> None:
        _name_this_thread("es-spins")
        named.wait(5)
        while not stop.is_set():
            Path("/proc/self/stat").read_bytes()

    threads = [threading.Thread(target=target) for target in (wait, spin)]
    for thread in threads:
        thread.start()
    named.wait(5)
    try:
        assert any(asleep("es-waits", 0.02) for _ in range(50))
        assert not all(asleep("es-spins", 0.05) for _ in range(3))
    finally:
        stop.set()
        waits.set()
        for thread in threads:
            thread.join()
