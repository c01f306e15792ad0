"""The coordinator of a job on nodes, in a process of its own.

Theory of operation. A job's coordinators follow one another. Each takes the job's lease, and with
it a term; goes on with the run's directory; listens; and begins the job, or takes it over from the
agents that come back to it. Three things end it. The job ends: all nodes are told, and the journal
is closed. It is asked to leave the job alone: it hangs up, and the steps go on without it. It loses
the lease: then it writes and says nothing more, since another one may act. And when it hears no
node any more, all at once, it may be its host that is cut off, and knows less than they do: it
gives up its term, and takes the job over as anybody else would, in the next one.

Two ways lead here. `everstep coordinator` runs one in the foreground, on any host; whoever started
it (a person, systemd, Kubernetes) starts it again. `everstep run` starts one below itself
(coordinator_process.py), and starts it again by itself (supervisor.py).

It does not know what is decided about the job (core), nor who starts it again.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from everstep.agent import clocks, identity, open_files
from everstep.agent.fleet import Fleet, LeaveError
from everstep.agent.node import failures_go_to
from everstep.agent.preflight import Plan
from everstep.agent.remote import CutOffError, Registry
from everstep.agent.workers import free_port
from everstep.agent.zygote import ZygotePlan
from everstep.core.actions import End
from everstep.core.coordinator import Coordinator
from everstep.core.nodes import Layout
from everstep.core.past import Past, recall
from everstep.errors import EverstepError, TransientError, UserError
from everstep.launch.job import (
    LEASE_LOST_EXIT_CODE,
    JobResult,
    ending_by_signals,
    hash_seed,
    meeting_host,
    node_settings,
    policy,
    run_directory,
    started_fields,
)
from everstep.launch.lease import LeaseLost, Tenancy, make_lease
from everstep.observe.journal import records_of
from everstep.observe.rundir import RunDirectory, make_run_directory
from everstep.observe.view import View
from everstep.settings import RunSettings, endpoint, secret_of
from everstep.types import Record
from everstep.wire.messages import ScriptSpec


class DeposedError(TransientError):
    """The lease is lost: this process may not act for the job any more."""

    exit_code = LEASE_LOST_EXIT_CODE


class LeftError(LeaveError, TransientError):
    """The coordinator was asked to leave the job alone."""


def run_coordinator(settings: RunSettings, view: View) -> JobResult:
    """Coordinate the job of `settings` in this process; take it over if its run's directory says
    that it runs. Main thread; blocks until the job is over.

    SIGINT asks for the job's end, and a second time, at once. At SIGTERM and SIGHUP the coordinator
    ends, and the job goes on without it. Raises UserError for what must be changed, LeftError and
    DeposedError when the job goes on without this process, EverstepError for what broke it.
    """
    return asyncio.run(_in_foreground(settings, view))


async def _in_foreground(settings: RunSettings, view: View) -> JobResult:
    journal = run_directory(settings) / "journal.jsonl"
    over = (await _read(journal)).ended is not None
    coordinating = Coordinating(
        settings,
        view,
        ZygotePlan(),
        os.environ,
        port=endpoint(settings.coordinator)[1],
        resume=not settings.coordinator_lease,
        wait_s=math.inf if settings.coordinator_lease else 0.0,
    )

    def asked(number: int) -> None:
        if number == signal.SIGINT:
            coordinating.stop_asked(number)
        else:
            coordinating.leave(number)

    with ending_by_signals(asked):
        end = await coordinating.run()
    if over and not coordinating.told_late:
        raise UserError(
            f"{journal.parent}: this run is over, and a run never writes over another's journal; "
            "choose another --run-id"
        )
    return JobResult(
        exit_code=end.exit_code, run_dir=journal.parent, journal=journal, text=end.text
    )


class Coordinating:
    """One coordinator of the job of `settings`, from the lease to its end. `port`: where it
    listens. `resume`: the job runs, and will be its own to coordinate; else it may never get to
    that. `wait_s`: how long it waits for the lease. Loop thread only."""

    def __init__(
        self,
        settings: RunSettings,
        view: View,
        plan: ZygotePlan,
        environ: Mapping[str, str],
        *,
        port: int,
        resume: bool,
        wait_s: float,
    ) -> None:
        self._settings = settings
        self._port = port
        self._view = view
        self._plan = plan
        self._environ = environ
        self._resume = resume
        self._wait_s = wait_s
        self._run_dir = run_directory(settings)
        self._host = ""
        self._stood_by: set[str] = set()  # for what, in words
        self._fleet: Fleet | None = None
        self.told_late = False
        """The job was over, and some node had not heard of that."""
        self._asked: list[int] = []  # by which signals, before there was a fleet to be told
        # What ends this coordinator, if it is neither the job nor the lease.
        self._cut: asyncio.Future[End | BaseException] = asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------ what may come at any time

    def stop_asked(self, number: int) -> None:
        """Signal `number` asks for the job's end: the first time in order, the second time at
        once."""
        if self._fleet is not None:
            self._fleet.stop_asked(number)
        elif self._resume:
            self._asked.append(number)  # the job runs, and will be ours to end
        else:
            text = f"asked to end by {signal.Signals(number).name} before any worker was started"
            self._cut_by(End(exit_code=128 + number, text=text))

    def leave(self, number: int) -> None:
        """Signal `number` asks this process to end, and to leave the job alone."""
        error = LeftError(
            f"the coordinator was asked to leave by {signal.Signals(number).name}; the job goes "
            f"on, and waits {self._settings.coordinator_timeout_s:g} s for another one"
        )
        error.exit_code = 128 + number
        self._cut_by(error)

    def failed(self, error: BaseException) -> None:
        """Something went wrong that is not a failure of the job's."""
        if self._fleet is not None:
            self._fleet.failed(error)
        else:
            self._cut_by(error)

    def _cut_by(self, what: End | BaseException) -> None:
        if not self._cut.done():
            self._cut.set_result(what)

    def _result_of_cut(self) -> End:
        cut = self._cut.result()
        if isinstance(cut, End):
            return cut
        raise cut

    # ------------------------------------------------------------ from the lease to the end

    async def run(self) -> End:
        """Coordinate until the job is over, and all nodes know it. Main thread.

        Raises DeposedError and LeftError when this process has no part in the job any more, while
        the job goes on; UserError for what must be changed; EverstepError for what broke it.
        """
        failures_go_to(self.failed)
        self._host = meeting_host(self._settings)
        make_run_directory(self._run_dir, resume=True)
        while True:
            tenancy = await self._unless_cut(self._acquire())
            if tenancy is None:
                return self._result_of_cut()
            try:
                return await self._hold(tenancy)
            except CutOffError:
                self._fleet, self._resume = None, True
            except OSError as error:
                raise _unwritable(self._run_dir, error) from error
            finally:
                await tenancy.release()

    async def _acquire(self) -> Tenancy:
        settings, journal = self._settings, self._run_dir / "journal.jsonl"
        known = (await _read(journal)).term
        lease = make_lease(
            settings.coordinator_lease, settings.run_id, self._run_dir, settings.lease_s
        )
        try:
            return await lease.acquire(self._wait_s, known_term=known, on_waiting=self._stand_by)
        except OSError as error:
            raise _unwritable(self._run_dir, error) from error

    def _stand_by(self, why: str) -> None:
        """Say, once, why the lease can't be had yet. The journal is the holder's."""
        if why not in self._stood_by:
            self._stood_by.add(why)
            self._show(f"stands-by-{len(self._stood_by)}", f"this coordinator stands by: {why}")

    def _show(self, key: str, text: str) -> None:
        """A note for the view, and not for the journal."""
        note = {"event": "note", "key": key, "text": text, "rank": None}
        self._view.record({"t": time.monotonic(), **note})

    async def _unless_cut(self, acquiring: Coroutine[Any, Any, Tenancy]) -> Tenancy | None:
        task = asyncio.ensure_future(acquiring)
        ends: set[asyncio.Future[Any]] = {task, self._cut}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        [got] = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(got, BaseException):  # at the same moment
            await got.release()
        return None

    async def _hold(self, tenancy: Tenancy) -> End:
        """Coordinate while the lease holds. Whatever ends this, the run's directory is left as who
        comes next needs it."""

        def guard() -> None:
            if not tenancy.holds:
                raise _deposed(tenancy)

        directory = RunDirectory(
            self._run_dir,
            run_id=self._settings.run_id,
            recorded=self._settings.record,
            resume=True,
            guard=guard,
        )
        over = False
        try:
            past = await _read(directory.journal.path)
            end = await self._coordinate(tenancy, directory, past)
            over = True
        finally:
            if over:
                directory.close()
            else:
                directory.leave()
        return end

    async def _coordinate(self, tenancy: Tenancy, directory: RunDirectory, past: Past) -> End:
        settings = self._settings
        _refuse_another_job(settings, past, directory.path)
        nodes = settings.slots + settings.spares
        open_files.raise_limit(open_files.OF_A_COORDINATOR + 2 * nodes)
        started = past.started or {}
        seed = started.get("hash_seed") or hash_seed(self._environ, settings.run_id)
        master_port = started.get("master_port") or settings.master_port or free_port()
        layout = Layout(
            nproc_per_node=settings.nproc_per_node, nnodes=settings.slots, spares=settings.spares
        )
        fleet = Fleet(
            settings=settings,
            core=Coordinator(settings.world_size, policy(settings), layout),
            directory=directory,
            view=self._view,
            master=(self._host, master_port),
        )
        versions = identity.versions()
        digest = _script_digest(past.started, settings.script)
        registry = Registry(
            fleet,
            host=self._host,
            ports=range(self._port, self._port + 1),
            secret=secret_of(self._environ),
            lease_s=settings.lease_s,
            settings=node_settings(settings, seed, self._plan),
            versions=versions,
            script_digest=digest,
            nproc_per_node=settings.nproc_per_node,
            must_start=not settings.coordinator,
            term=tenancy.term,
            preflight=Plan(
                needed=settings.slots,
                ports=settings.ports,
                within_s=settings.preflight_s,
            ),
        )
        try:
            self._fleet = fleet
            if past.ended is not None:
                return await self._tell_end(fleet, registry, tenancy, past)
            if past.started is None:
                self._view.record(directory.journal.header)
            fleet.record(_coordinator_started(tenancy.term, past))
            if past.started is None:
                fields = started_fields(settings, versions["torch"], seed, master_port, digest)
                fleet.record(Record(event="job_started", fields=fields))
            listens = {"host": self._host, "port": registry.port}
            fleet.record(Record(event="listening", fields=listens))
            if past.started is None and tenancy.term == 0:
                fleet.start()
            else:
                fleet.resume(past.resumed(tenancy.term), past.fired)
            for number in self._asked:
                fleet.stop_asked(number)
            return await self._until_over(fleet, tenancy, registry)
        finally:
            registry.close()

    async def _until_over(self, fleet: Fleet, tenancy: Tenancy, registry: Registry) -> End:
        """Wait for the job's end, and have all nodes end it."""
        goes_on = False  # unless it turns out that it is not ours to end
        try:
            await tenancy.publish(self._host, registry.port)
            ends: set[asyncio.Future[Any]] = {fleet.ended, tenancy.lost, self._cut}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not tenancy.holds:
                raise _deposed(tenancy)
            return fleet.ended.result() if fleet.ended.done() else self._result_of_cut()
        except LeaveError as error:
            goes_on = True
            fields = {"term": tenancy.term, "text": str(error)}
            fleet.record(Record(event="coordinator_left", fields=fields))
            raise
        except EverstepError as error:
            if not tenancy.holds:
                raise _deposed(tenancy) from error
            fields = {"exit_code": error.exit_code, "text": str(error), "cause": None}
            fleet.record(Record(event="job_ended", fields=fields))
            raise
        finally:
            if goes_on or not tenancy.holds:
                fleet.leave()
            else:
                await _close(fleet, registry, tenancy)

    async def _tell_end(
        self, fleet: Fleet, registry: Registry, tenancy: Tenancy, past: Past
    ) -> End:
        """The one before was killed when all was said: wait for nodes that have not heard of it."""
        assert past.ended is not None
        end = End(exit_code=past.ended["exit_code"], text=past.ended["text"])
        fleet.over(end)
        coming = asyncio.ensure_future(registry.all_came(past.here))
        try:
            await tenancy.publish(self._host, registry.port)
            ends: set[asyncio.Future[Any]] = {coming, tenancy.lost, self._cut}
            limit_s = min(self._settings.rejoin_timeout_s, 5 * self._settings.lease_s)
            if past.here:
                who = f"{len(past.here)} node{'' if len(past.here) == 1 else 's'}"
                may = f"{who} may not have heard of that, and can come back for {limit_s:g} s"
                self._show("over", f"this run is over already; {may}")
            await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        except LeaseLost as error:
            raise _deposed(tenancy) from error
        finally:
            coming.cancel()
            self.told_late = fleet.peopled
            await _close(fleet, registry, tenancy)
        return end


async def _close(fleet: Fleet, registry: Registry, tenancy: Tenancy) -> None:
    """Have all nodes end, and write down which have: who comes next need not wait for those."""
    await fleet.close()
    if tenancy.holds:
        told = Record(event="nodes_told", fields={"nodes": sorted(registry.told)})
        fleet.record(told, shown=False)


def _deposed(tenancy: Tenancy) -> DeposedError:
    why = tenancy.lost.result() if tenancy.lost.done() else "it has run out"
    return DeposedError(
        f"the coordinator of term {tenancy.term} has lost its lease: {why}. The job goes on, and "
        "another coordinator may take it over; this one can be started again to stand by"
    )


async def _read(journal: Path) -> Past:
    """What a journal tells; nothing, if there is none. It may be long, and the lease is to be
    renewed meanwhile. Raises JournalError."""
    return await asyncio.to_thread(lambda: recall(records_of(journal) if journal.exists() else ()))


def _unwritable(run_dir: Path, error: OSError) -> EverstepError:
    return EverstepError(
        f"{run_dir}: the run's directory can't be written ({error.strerror or error}): without its "
        "journal a job can't be coordinated. Free room there, or choose another --log-dir, and "
        "start it again"
    )


def _script_digest(started: Mapping[str, Any] | None, script: ScriptSpec) -> str:
    """Of the script of the job. It may have been edited since: the job's is the one with which it
    began."""
    if started is not None and "script_digest" in started:
        return str(started["script_digest"])
    return identity.script_digest(script)


def _refuse_another_job(settings: RunSettings, past: Past, path: Path) -> None:
    """Raise UserError if the run in `path` is not the one of `settings`."""
    if past.started is None:
        return
    wanted: dict[str, Any] = {
        "script": settings.script.target,
        "args": list(settings.script.args),
        "world_size": settings.world_size,
        "chaos": [spec.text for spec in settings.chaos],
        "nproc_per_node": settings.nproc_per_node,
        "copies": settings.copies,
        "replicate_every": settings.replicate_every,
    }
    for what, value in wanted.items():
        if past.started[what] != value:
            raise UserError(
                f"{path}: the run there is another job: its {what} is {past.started[what]!r}, not "
                f"{value!r}; start its coordinator with the same command, or choose another "
                "--run-id"
            )


def _coordinator_started(term: int, past: Past) -> Record:
    fields = {
        "term": term,
        "step": past.recorded,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot_id": clocks.boot_id(),
        "wall_time": time.time(),
    }
    return Record(event="coordinator_started", fields=fields)
