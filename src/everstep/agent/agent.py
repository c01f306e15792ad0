"""The agent: supervises one node's workers and carries out what the coordinator decides.

Theory of operation: one event loop on the main thread. It starts the zygote, gives the
coordinator's shell what workers say, and does what it answers. A worker's death is worked off in
one order: what it had written is delivered; its session is killed and reaped; its output is read to
the end and its file in shared memory removed; only then is the death reported, so that whatever the
coordinator starts next meets nothing of the old. A zygote that dies is replaced, and the agent,
being a subreaper, then reaps its workers itself. Whatever goes wrong in a callback ends the job and
is raised by `run`; nothing outlives `close`.

It does not decide about ranks (core), nor show anything (observe).
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from everstep.agent import processes
from everstep.agent.ending import END_TIMEOUT_S, end_marked, end_session, exit_status
from everstep.agent.nursery import Nursery
from everstep.agent.progress import ProgressFile
from everstep.agent.sentry import Sentry
from everstep.agent.workers import Worker, torchrun_environment, worker_spec
from everstep.agent.zygote import Zygote, ZygotePlan, environment
from everstep.coordinator import CoordinatorShell, Core
from everstep.core import actions
from everstep.errors import EverstepError
from everstep.keepsakes import Heritage
from everstep.observe.rundir import RunDirectory
from everstep.observe.view import View
from everstep.settings import RunSettings
from everstep.types import Record
from everstep.wire.messages import (
    Exited,
    Fork,
    Forked,
    FromWorker,
    Stop,
    ToWorker,
)

Member = tuple[int, int]  # rank and incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the agent gives to its processes. `environ`: what they inherit. `hash_seed`:
    PYTHONHASHSEED of all."""

    environ: Mapping[str, str]
    hash_seed: str
    master_port: int


class Agent:
    """Runs the workers of one job on this node. Implements `coordinator.Effects`. Loop thread only.

    `make_started`: the fields of the journal's `job_started` from the version of torch. `run` once,
    then `close`.
    """

    def __init__(
        self,
        *,
        settings: RunSettings,
        surroundings: Surroundings,
        core: Core,
        directory: RunDirectory,
        view: View,
        plan: ZygotePlan,
        make_started: Callable[[str], dict[str, Any]],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._surroundings = surroundings
        self._directory = directory
        self._view = view
        self._make_started = make_started
        self._mark = f"EVERSTEP_JOB={uuid.uuid4().hex}"
        self._nursery = Nursery(
            self._loop,
            plan=plan,
            environment=environment(surroundings.environ, surroundings.hash_seed, self._mark),
            script=settings.script,
            log=directory.logs / "zygote.log",
            on_message=self._on_zygote_message,
            on_lost=self._on_zygote_lost,
            note=self._note,
        )
        self._shell = CoordinatorShell(core, self, settings.chaos, self._loop.call_at)
        self._ended: asyncio.Future[actions.End] = self._loop.create_future()
        self._started = False
        self._closing = False
        self._hurry = asyncio.Event()
        self._alone = asyncio.Event()  # no worker is left
        self._alone.set()
        self._workers: dict[Member, Worker] = {}
        self._by_pid: dict[int, Worker] = {}
        self._unborn: dict[Member, asyncio.TimerHandle] = {}  # those whose start waits
        # Of first incarnations, by rank: made before anything starts, so that a lack of room shows.
        self._progress: dict[int, ProgressFile] = {}
        self._sentry = Sentry(
            self._loop,
            settings,
            self._workers,
            self._shell.silent,
            self._note,
            directory.path,
        )
        self._preparations: set[asyncio.Task[None]] = set()
        self._burials: set[asyncio.Task[None]] = set()
        self._asked_by: int | None = None
        self._not_ours = {p.pid for p in processes.process_table() if p.parent == os.getpid()}
        self._was_subreaper = processes.set_child_subreaper(True)
        self._loop.set_exception_handler(self._on_loop_exception)

    # ------------------------------------------------------------ the job's life

    async def run(self) -> actions.End:
        """Start the zygote and the workers and stay until the job is over.

        Raises UserError for what must be changed before it can start, and whatever broke the agent
        itself.
        """
        for rank in range(self._settings.nproc_per_node):
            self._progress[rank] = self._make_progress(rank, 1)
        self._go(self._start(), self._preparations)
        return await self._ended

    def stop_asked(self, number: int) -> None:
        """Signal `number` asks the job to end: the first time in order, the second time at once."""
        if self._asked_by is not None:
            self._hurry.set()
            return
        self._asked_by = number
        if self._started:
            self._shell.stop_asked(number)
        else:
            text = f"asked to end by {signal.Signals(number).name} before any worker was started"
            self.end(actions.End(exit_code=128 + number, text=text))

    async def close(self) -> None:
        """End all that is left: in their own time after a success, after SIGTERM and a grace if a
        person asked for the end, at once if a failure is the reason. Afterwards no process,
        descriptor or file in memory is left.

        Raises EverstepError if a process cannot be ended.
        """
        self._closing = True
        self._sentry.stop()
        self._shell.stop()
        await _cancel(self._preparations)
        self._forget_unborn()
        if self._asked_by is not None:
            for worker in self._workers.values():
                worker.terminate()
        if self._asked_by is not None or self._succeeded():
            await self._wait_alone_or_hurry()
        for worker in self._workers.values():
            worker.kill("the job is over")
        try:
            await asyncio.wait_for(self._alone.wait(), 2 * END_TIMEOUT_S)
            await self._nursery.close()
            await end_marked(self._mark)
            self._reap_strays()
        finally:
            await _cancel(self._burials)
            for worker in list(self._workers.values()):
                worker.close()
            for progress in self._progress.values():
                progress.remove()
            processes.set_child_subreaper(self._was_subreaper)
        if self._ended.done() and not self._ended.cancelled():
            self._ended.exception()  # `run` has raised it, unless a cancellation came first

    def _succeeded(self) -> bool:
        ended = self._ended
        return (
            ended.done()
            and not ended.cancelled()
            and ended.exception() is None
            and ended.result().exit_code == 0
        )

    async def _wait_alone_or_hurry(self) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._alone, self._hurry)]
        await asyncio.wait(
            waits, timeout=self._settings.grace_s, return_when=asyncio.FIRST_COMPLETED
        )
        for wait in waits:
            wait.cancel()

    # ------------------------------------------------------------ Effects, for the coordinator

    def record(self, record: Record, *, shown: bool = True) -> None:
        """Append to the journal."""
        line = self._directory.journal.write(record.event, record.fields)
        if shown:
            self._view.record(line)

    def spawn(self, order: actions.Spawn, heritage: Heritage) -> None:
        """Fork a worker as soon as a zygote is ready."""
        progress = self._progress.pop(order.rank, None) if order.incarnation == 1 else None
        progress = progress or self._make_progress(order.rank, order.incarnation)
        stacks = self._directory.stacks(order.rank, order.incarnation)
        spec = worker_spec(self._settings, order, heritage, progress.path, stacks)
        log = self._directory.log(order.rank, order.incarnation)
        worker = Worker(self._loop, spec, progress, log)
        self._workers[order.rank, order.incarnation] = worker
        self._alone.clear()
        if order.delay_s > 0:
            text = f"rank {order.rank} has failed often: it starts in {order.delay_s:.1f} s"
            self._note(f"backoff-{order.rank}-{order.incarnation}", text)
            timer = self._loop.call_later(order.delay_s, self._give_birth, worker)
            self._unborn[order.rank, order.incarnation] = timer
        else:
            self._give_birth(worker)

    def _give_birth(self, worker: Worker) -> None:
        timer = self._unborn.pop((worker.spec.rank, worker.spec.incarnation), None)
        if timer is not None:
            timer.cancel()
        if self._nursery.zygote is not None:
            self._fork(worker, self._nursery.zygote)

    def kill(self, rank: int, incarnation: int, why: str) -> None:
        """SIGKILL a worker."""
        worker = self._workers.get((rank, incarnation))
        if worker is not None:
            worker.kill(why)
            if (rank, incarnation) in self._unborn:  # its death must be seen soon
                self._give_birth(worker)

    def inspect(self) -> None:
        """Have all workers show their stacks."""
        self._go(self._inspect(), self._preparations)

    async def _inspect(self) -> None:
        self._shell.inspected(await self._sentry.inspect())

    def send(self, rank: int, incarnation: int, message: ToWorker) -> None:
        """Send a message to a worker."""
        worker = self._workers.get((rank, incarnation))
        if worker is not None:
            worker.send(message)
            if isinstance(message, Stop):
                self._sentry.interrupted((rank, incarnation))

    def metrics(self, rank: int, step: int, log: Mapping[str, float]) -> None:
        """Keep logged scalars."""
        self._directory.metrics(rank, step, log)

    def trace(self, rank: int, step: int, record: bytes) -> None:
        """Keep a step's record."""
        self._directory.trace(rank, step, record)

    def digests(self, rank: int, digests: Mapping[str, str]) -> None:
        """Keep a rank's final digests."""
        self._directory.digests(rank, digests)

    def end(self, end: actions.End) -> None:
        """The job is over; `run` returns."""
        if not self._ended.done():
            self._ended.set_result(end)

    # ------------------------------------------------------------ the zygote

    async def _start(self) -> None:
        torch = (await self._nursery.open()).torch
        self.record(Record(event="job_started", fields=self._make_started(torch)))
        self._started = True
        self._shell.start()
        self._sentry.start()

    def _on_zygote_message(self, message: Forked | Exited) -> None:
        if isinstance(message, Exited):
            worker = self._by_pid.get(message.pid)
            if worker is not None and not worker.status.done():
                worker.status.set_result(message.status)
                self._on_death(worker)
            return
        worker = self._workers.get((message.rank, message.incarnation))
        if worker is not None:
            self._by_pid[message.pid] = worker
            worker.attach(message.pid, partial(self._on_death, worker))

    def _on_zygote_lost(self, zygote: Zygote) -> None:
        if not self._closing:
            self._note(
                "zygote-lost", "the zygote died; another one is started, and no worker is touched"
            )
            self._go(self._replace_zygote(zygote), self._preparations)

    async def _replace_zygote(self, lost: Zygote) -> None:
        """Start another zygote and fork what the lost one was asked for and did not announce."""
        unannounced = [w for w in self._workers.values() if w.pid is None and w.zygote is lost]
        await end_session(lost.pid)
        for pid in self._unknown_children():
            await end_session(pid)
        for worker in unannounced:
            worker.detach()
        await self._nursery.open()
        zygote = self._nursery.zygote
        for worker in list(self._workers.values()):
            waits = (worker.spec.rank, worker.spec.incarnation) in self._unborn
            unforked = worker.pid is None and worker.zygote is not zygote and not waits
            if zygote is not None and unforked:
                self._fork(worker, zygote)

    def _unknown_children(self) -> list[int]:
        """Processes of this job that lost their parent to the agent and lead a session that is no
        known worker's."""
        found = []
        for pid in processes.marked(self._mark):
            process = processes.look_up(pid)
            if process is None or pid in self._by_pid or pid == self._nursery.pid:
                continue
            if process.parent == os.getpid() and process.session == pid:
                found.append(pid)
        return found

    # ------------------------------------------------------------ workers

    def _make_progress(self, rank: int, incarnation: int) -> ProgressFile:
        return ProgressFile(Path(self._settings.shm_dir), self._settings.run_id, rank, incarnation)

    def _fork(self, worker: Worker, zygote: Zygote) -> None:
        rank, incarnation = worker.spec.rank, worker.spec.incarnation
        fds = worker.open(
            partial(self._on_message, rank, incarnation),
            partial(self._view.output, rank, incarnation),
            partial(self._on_garbage, worker),
        )
        worker.zygote = zygote
        variables = torchrun_environment(
            rank, worker.spec.world_size, self._surroundings.master_port
        )
        variables["EVERSTEP_RUN_ID"] = worker.spec.run_id
        variables["EVERSTEP_INCARNATION"] = str(incarnation)
        zygote.fork(Fork(spec=worker.spec, environment=variables), fds)

    def _on_message(self, rank: int, incarnation: int, message: FromWorker) -> None:
        self._shell.message(rank, incarnation, message)

    def _on_garbage(self, worker: Worker, why: str) -> None:
        worker.kill(f"its control channel is broken: {why}")

    def _on_death(self, worker: Worker) -> None:
        """The process is dead: hear its last words, then bury it."""
        if not worker.dying:
            worker.dying = True
            worker.drain()
            self._go(self._bury(worker), self._burials)

    async def _bury(self, worker: Worker) -> None:
        assert worker.pid is not None
        status = await self._status(worker, worker.pid)
        await end_session(worker.pid)
        rank, incarnation = worker.spec.rank, worker.spec.incarnation
        cause = worker.cause(status)
        if cause.signal == signal.SIGABRT:
            self._sentry.explain_abort(worker)
        worker.close()
        del self._by_pid[worker.pid]
        del self._workers[rank, incarnation]
        if not self._workers:
            self._alone.set()
        self._shell.died(rank, incarnation, cause, before_kill=not worker.killed)
        self._reap_strays()

    async def _status(self, worker: Worker, pid: int) -> int | None:
        """The exit status: from the zygote or, if that is dead, by waiting for what is then our
        child."""
        zygote = worker.zygote
        assert zygote is not None
        await asyncio.wait(
            (worker.status, zygote.gone),
            timeout=END_TIMEOUT_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not worker.status.done() and not zygote.gone.done():
            zygote.kill()
            await asyncio.wait_for(asyncio.shield(zygote.gone), END_TIMEOUT_S)
        if worker.status.done():
            return worker.status.result()
        return await exit_status(pid)

    def _reap_strays(self) -> None:
        """Reap what left a worker's session, lost its parent, and has ended by itself."""
        known = {*self._not_ours, *self._by_pid, self._nursery.pid}
        for pid in processes.zombies():
            if pid not in known:
                processes.reap(pid)

    def _forget_unborn(self) -> None:
        """Drop workers that have no process yet; the zygote's end is the end of one that it may
        just be forking."""
        for timer in self._unborn.values():
            timer.cancel()
        self._unborn.clear()
        for member, worker in list(self._workers.items()):
            if worker.pid is None:
                worker.close()
                del self._workers[member]
        if not self._workers:
            self._alone.set()

    # ------------------------------------------------------------ tasks and their failures

    def _note(self, key: str, text: str) -> None:
        self.record(Record(event="note", fields={"key": key, "text": text, "rank": None}))

    def _go(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
        """Run in the background; a failure ends the job."""
        task = self._loop.create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self._fail(error)

    def _on_loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._fail(context.get("exception") or EverstepError(str(context["message"])))

    def _fail(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
        else:
            self._loop.default_exception_handler(
                {"message": "everstep: a failure after the job's end", "exception": error}
            )


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
