"""Waiting threads are used again, and leave by themselves."""

from __future__ import annotations

import threading

from everstep.worker.waiters import Waiters


def test_an_idle_thread_is_used_again() -> None:
    waiters, seen = Waiters(), []
    for _ in range(5):
        done = threading.Event()

        def job(done: threading.Event = done) -> None:
            seen.append(threading.get_ident())
            done.set()

        waiters.run(job)
        assert done.wait(5)
        _until_idle(waiters)
    assert len(set(seen)) == 1


def test_jobs_that_wait_do_not_hold_up_others() -> None:
    waiters, gate, started = Waiters(), threading.Event(), threading.Semaphore(0)

    def job() -> None:
        started.release()
        gate.wait(5)

    for _ in range(4):
        waiters.run(job)
    try:
        assert all(started.acquire(timeout=5) for _ in range(4))
    finally:
        gate.set()


def _until_idle(waiters: Waiters) -> None:
    """The thread takes its place among the idle just after the job's end."""
    for _ in range(10_000):
        if waiters._idle:
            return
        threading.Event().wait(0.0005)
    raise AssertionError("the thread did not become idle")
