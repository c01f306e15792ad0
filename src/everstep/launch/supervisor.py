"""A launcher that runs a job on nodes: it keeps the job's coordinator going, and its own agents.

Theory of operation: the coordinator is a process of its own, so that its death stops nothing but
recoveries. One that is ended by a signal is started again, at once the first time, and takes the
job over from its agents. What it shows is handed to the view here. Signals that ask for the end go
on to it, since only it can tell the other hosts; if it does not obey in time it is killed, and what
was started here is ended without it. Whatever ends the job, nothing that was started here is left.

An agent of ours that fails before it has joined ends the job: the coordinator may never have heard
of it. One that fails later is a lost node, about which the coordinator decides. Where the lease is
with a coordinator on another host ours stands by, and the job is over when our agents say so. One
of ours that loses the lease stands by again. Then the journal is not ours to end, either.

It does not know the state of the job, nor which of the coordinators it has started is heeded.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from everstep.agent.node import failures_go_to
from everstep.agent.zygote import ZygotePlan
from everstep.core.words import name_signal
from everstep.errors import EverstepError, UserError
from everstep.launch.coordinator_process import CoordinatorProcess
from everstep.launch.job import (
    END_SIGNALS,
    LEASE_LOST_EXIT_CODE,
    JobResult,
    ending_by_signals,
    meeting_host,
    run_directory,
)
from everstep.launch.lease import at_rest
from everstep.launch.pool import LocalAgents
from everstep.launch.relay import Begin, Ended, Fail, News, Printed, Raised, Recorded, Stop
from everstep.observe.journal import JournalWriter, records_of
from everstep.observe.rundir import make_run_directory
from everstep.observe.view import View
from everstep.settings import RunSettings, endpoint, has_secret, secret_of, without_secret
from everstep.wire.ports import listen, ports_of
from everstep.wire.secret import Secret, make_secret

_MOST_DEATHS = 5  # within the window: what kills it that often does not pass by itself
_DEATHS_WINDOW_S = 60.0
_BACKOFF_S = 0.2  # before it is started for the second time, doubled each time more
_MAX_BACKOFF_S = 2.0
_END_TIMEOUT_S = 45.0  # beyond the grace: as long as a coordinator waits for its nodes, and more
_HURRY_TIMEOUT_S = 10.0
_LAST_WORD_S = 2.0  # of a coordinator that has heard from an agent why that failed


class Supervisor:
    """Runs one job of `settings`. Loop thread only; `run` once."""

    def __init__(
        self, settings: RunSettings, view: View, plan: ZygotePlan, environ: Mapping[str, str]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._view = view
        self._plan = plan
        self._environ = environ
        self._run_dir = run_directory(settings)
        self._secret = _secret(settings, environ)
        self._listens_at = 0
        self._agents: LocalAgents | None = None
        self._process: CoordinatorProcess | None = None
        self._last: Ended | Raised | None = None
        self._deaths: deque[float] = deque()
        self._asked: list[int] = []
        self._killed = False  # since it did not end in time
        self._broken: asyncio.Future[BaseException] = self._loop.create_future()
        self._timers: list[asyncio.TimerHandle] = []
        self._over: asyncio.Future[Ended] = self._loop.create_future()  # says another coordinator
        self._in_charge = False  # agents have come to the coordinator that is ours
        self._ours = not settings.coordinator_lease  # the job, when the next one is started
        self._nodes_by_agent: dict[tuple[str, int], int] = {}  # by name and process id
        self._joined: set[int] = set()

    async def run(self) -> JobResult:
        """Run the job to its end. Raises as `launch.local.run_job` does."""
        settings = self._settings
        failures_go_to(self._break)
        host = meeting_host(settings)
        make_run_directory(self._run_dir)
        logs = self._run_dir / "logs"
        agents = self._agents = LocalAgents(
            settings, self._secret, logs, self._environ, self._agent_ended, self._break
        )
        try:
            with ending_by_signals(self._stop_asked), _port(settings, host) as self._listens_at:
                process = self._start(resume=False)
                # They look for it until it listens: all import what they need at the same time.
                here = 1 if settings.coordinator else settings.slots + settings.spares
                agents.start(here, host, self._listens_at)
                last = await self._until_last_word(process)
        finally:
            for timer in self._timers:
                timer.cancel()
            try:
                if self._process is not None:
                    await self._process.close()
            finally:
                await agents.close()
        if isinstance(last, Raised):
            raise _as_raised(last)
        return JobResult(
            exit_code=last.exit_code,
            run_dir=self._run_dir,
            journal=self._run_dir / "journal.jsonl",
            text=last.text,
        )

    # ------------------------------------------------------------ the coordinator's life

    async def _until_last_word(self, process: CoordinatorProcess) -> Ended | Raised:
        """Keep a coordinator going until one says how the job ended."""
        while True:
            ends: set[asyncio.Future[Any]] = {process.ended, self._broken, self._over}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                await self._give_up(process, self._broken.result())
            if self._over.done():
                return self._over.result()
            code = process.ended.result()
            if self._last is not None and not _has_lost_lease(self._last):
                return self._last
            if self._last is None and code >= 0:
                raise EverstepError(_epitaph(process, code))
            if self._killed:
                return self._unheeded()
            if self._last is None:
                pause_s = self._mourn(process, code)
            else:
                pause_s, self._ours = _BACKOFF_S, False
            await asyncio.wait({self._broken}, timeout=pause_s)
            self._last = None
            process = self._start(resume=self._ours)

    def _start(self, *, resume: bool) -> CoordinatorProcess:
        environ = without_secret(self._environ) | {"EVERSTEP_SECRET": self._secret.reveal()}
        process = self._process = CoordinatorProcess(environ, self._take)
        begin = Begin(
            settings=self._settings,
            port=self._listens_at,
            runner=self._plan.runner,
            preload=self._plan.preload,
            resume=resume,
        )
        self._in_charge = False
        process.send(begin)
        for number in self._asked:
            process.send(Stop(signal=number))
        return process

    def _mourn(self, process: CoordinatorProcess, code: int) -> float:
        """One has died. Returns the seconds after which the next one is started; raises
        EverstepError if it has happened too often."""
        now_s = self._loop.time()
        self._deaths.append(now_s)
        while self._deaths[0] <= now_s - _DEATHS_WINDOW_S:
            self._deaths.popleft()
        count = len(self._deaths)
        if count >= _MOST_DEATHS and not self._settings.lift_budgets:
            text = (
                f"the coordinator has died {count} times within {_DEATHS_WINDOW_S:g} s, the last "
                f"time {_how(code)}: something on this host ends it (out of memory, a limit?), and "
                f"it is not started again{_said(process)}"
            )
            self._close_journal(1, text)
            raise EverstepError(text)
        return 0.0 if count == 1 else min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** (count - 2))

    async def _give_up(self, process: CoordinatorProcess, error: BaseException) -> None:
        """Something broke the job here: have the coordinator end it, and raise `error`."""
        known = error if isinstance(error, EverstepError) else None
        text = str(error) if known else repr(error)
        process.send(Fail(text=text, exit_code=known.exit_code if known else 1))
        timeout_s = self._settings.grace_s + _END_TIMEOUT_S
        await asyncio.wait({process.ended}, timeout=timeout_s)
        await process.close()
        self._close_journal(known.exit_code if known else 1, text)
        raise error

    def _unheeded(self) -> Ended:
        number = self._asked[0]
        text = (
            f"asked to end by {name_signal(number)}; the coordinator did not end in time and was "
            "killed, so agents on other hosts end later by themselves"
        )
        self._close_journal(128 + number, text)
        return Ended(exit_code=128 + number, text=text)

    def _close_journal(self, exit_code: int, text: str) -> None:
        """Write the end that no coordinator has written, if none writes there that is not ours.
        Blocks for the disk."""
        if self._settings.coordinator_lease:
            return  # one on another host may have the directory, too
        with at_rest(self._run_dir) as free:
            if free and (self._run_dir / "journal.jsonl").exists():
                self._write_end(exit_code, text)

    def _write_end(self, exit_code: int, text: str) -> None:
        path = self._run_dir / "journal.jsonl"
        journal = JournalWriter(
            path, run_id=self._settings.run_id, wall_time=time.time(), resume=True
        )
        try:
            if not any(record["event"] == "job_ended" for record in records_of(path)):
                fields = {"exit_code": exit_code, "text": text, "cause": None}
                self._view.record(journal.write("job_ended", fields))
        finally:
            journal.close()

    # ------------------------------------------------------------ what comes in

    def _take(self, news: News) -> None:
        match news:
            case Recorded(record=record):
                self._note(record)
                self._view.record(record)
            case Printed(rank=rank, incarnation=incarnation, stream=stream, line=line):
                self._view.output(rank, incarnation, stream, line)
            case Ended() | Raised():
                self._last = news

    def _note(self, record: dict[str, Any]) -> None:
        match record.get("event"):
            case "node_registered":
                self._in_charge = self._ours = True
                self._nodes_by_agent[record["name"], record["pid"]] = record["node"]
            case "node_joined":
                self._joined.add(record["node"])

    def _stop_asked(self, number: int) -> None:
        """A signal asks for the job's end."""
        self._asked.append(number)
        first = len(self._asked) == 1
        limit_s = self._settings.grace_s + _END_TIMEOUT_S if first else _HURRY_TIMEOUT_S
        self._timers.append(self._loop.call_later(limit_s, self._kill))
        if self._process is not None:
            self._process.send(Stop(signal=number))

    def _kill(self) -> None:
        self._killed = True
        if self._process is not None:
            self._process.kill()

    def _agent_ended(self, name: str, pid: int, code: int, last_words: str) -> None:
        """An agent of ours has ended by itself."""
        if self._settings.coordinator_lease and not self._in_charge:
            if self._agents is not None and not self._agents.alive and not self._over.done():
                exit_code = code if code >= 0 else 128 - code
                self._over.set_result(Ended(exit_code=exit_code, text=last_words if code else ""))
            return
        asked = code <= 0 or code - 128 in END_SIGNALS
        if not asked and self._nodes_by_agent.get((name, pid)) not in self._joined:
            error = EverstepError(
                f"an agent ended with code {code} before it had joined, {last_words}"
            )
            self._timers.append(self._loop.call_later(_LAST_WORD_S, self._break, error))

    def _break(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_result(error)


@contextmanager
def _port(settings: RunSettings, host: str) -> Iterator[int]:
    """Where the job's coordinators listen, one after the other. While it is entered, the system
    gives the port to nobody by chance."""
    if settings.coordinator:
        yield endpoint(settings.coordinator)[1]
        return
    with listen(host, ports_of(settings.ports), 1) as found:
        address = found.getsockname()
    with socket.socket(found.family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so others may listen there
        bound.bind(address)
        yield address[1]


def _secret(settings: RunSettings, environ: Mapping[str, str]) -> Secret:
    given = settings.coordinator or has_secret(environ)
    return secret_of(environ) if given else make_secret()


def _as_raised(raised: Raised) -> EverstepError:
    if raised.exit_code == UserError.exit_code:
        return UserError(raised.text)
    error = EverstepError(raised.text)
    error.exit_code = raised.exit_code
    return error


def _has_lost_lease(last: Ended | Raised) -> bool:
    return isinstance(last, Raised) and last.exit_code == LEASE_LOST_EXIT_CODE


def _epitaph(process: CoordinatorProcess, code: int) -> str:
    return (
        f"the coordinator (process {process.pid}) ended {_how(code)} without a word: that is an "
        f"error of everstep's{_said(process)}"
    )


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"


def _said(process: CoordinatorProcess) -> str:
    return f"; its last words:\n{process.last_words}" if process.last_words else ""
