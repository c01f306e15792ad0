"""Runs the workers of one node: their zygote, their births, their messages and their burials.

Theory of operation: one event loop on the main thread. The zygote is started first; workers are
forked as they are asked for, and what they say goes to the owner. A worker's death is worked off in
one order: what it had written is delivered; its session is killed and reaped; its output is read to
the end and its file in shared memory removed; only then is the death told, so that whatever is
started next meets nothing of the old. A zygote that dies is replaced, and this process, being a
subreaper, then reaps its workers itself. What goes wrong in a callback or task is told to the owner
once; nothing outlives `close`.

It does not know the job: who the owner is (the coordinator's fleet in this process, or at the other
end of a connection), which ranks there are elsewhere, nor why a worker is wanted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec

from everstep.agent import processes
from everstep.agent.copies import Copies, CopyMessage
from everstep.agent.ending import END_TIMEOUT_S, end_marked, end_session, exit_status
from everstep.agent.nursery import Nursery
from everstep.agent.progress import ProgressFile
from everstep.agent.sentry import Sentry
from everstep.agent.shipping import Dock, Shipping
from everstep.agent.workers import Worker
from everstep.agent.zygote import Zygote, ZygotePlan, environment
from everstep.core.hang import Evidence
from everstep.errors import EverstepError
from everstep.snapshot import SnapshotError
from everstep.types import Cause, HeldCopy
from everstep.wire import nodes
from everstep.wire.messages import (
    ChaosSpec,
    Exited,
    Fork,
    Forked,
    FromWorker,
    Ready,
    Stop,
    ToWorker,
    WorkerSpec,
)
from everstep.wire.nodes import NodeSettings, Shown

Member = tuple[int, int]  # rank and incarnation
MARK = "EVERSTEP_JOB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a node stands on. `environ`: what its processes inherit. `shm_dir`: for the files in
    which workers show where they stand; `shm_name` begins their names, and no other node's. `logs`:
    the directory for what workers print. `host`: the address at which they listen. `mark`: by which
    its processes are known, NAME=value in their environment. `number`: the node's. `dock`:
    for copies that go to other nodes and come from there; None where there are none."""

    environ: Mapping[str, str]
    shm_dir: Path
    shm_name: str
    logs: Path
    zygote_log: Path
    host: str
    mark: str
    number: int = 0
    dock: Dock | None = None


def new_mark() -> str:
    """A mark that no other node has."""
    return f"{MARK}={uuid.uuid4().hex}"


class Owner(Protocol):
    """For whom a node runs its workers. Called on the loop; no call blocks."""

    def said(self, rank: int, incarnation: int, message: FromWorker) -> None:
        """A worker said something."""
        ...

    def died(self, rank: int, incarnation: int, cause: Cause, *, before_kill: bool) -> None:
        """A worker is gone, its session killed and reaped, and all it had written has been told.
        `before_kill`: it is known to have ended before `Node.kill` could reach it."""
        ...

    def output(self, rank: int, incarnation: int, stream: str, line: str) -> None:
        """A line that a worker printed."""
        ...

    def silent(self, evidence: tuple[Evidence, ...]) -> None:
        """Some worker has been silent for longer than it may; `evidence` is of all that live
        here."""
        ...

    def looked(self, evidence: tuple[Evidence, ...]) -> None:
        """The answer to `Node.look`."""
        ...

    def shown(self, shown: Shown) -> None:
        """The answer to `Node.inspect`."""
        ...

    def copy_news(self, news: nodes.CopyNews) -> None:
        """Something about copies."""
        ...

    def note(self, key: str, text: str) -> None:
        """Something a person should know."""
        ...

    def failed(self, error: BaseException) -> None:
        """The node can not go on. It must still be closed."""
        ...


class Node:
    """The workers of one node. Loop thread only. `open` once, then `close`. `shipping`: its bulk
    plane; None where there is no other node."""

    def __init__(self, settings: NodeSettings, ground: Ground, owner: Owner) -> None:
        self._loop = asyncio.get_running_loop()
        self._ground = ground
        self._owner = owner
        self._nursery = Nursery(
            self._loop,
            plan=ZygotePlan(runner=settings.runner, preload=settings.preload),
            environment=environment(ground.environ, settings.hash_seed, ground.mark),
            script=settings.script,
            log=ground.zygote_log,
            on_message=self._on_zygote_message,
            on_lost=self._on_zygote_lost,
            note=owner.note,
        )
        self._closing = False
        self._hurry = asyncio.Event()
        self._alone = asyncio.Event()  # no worker is left
        self._alone.set()
        self._workers: dict[Member, Worker] = {}
        self._by_pid: dict[int, Worker] = {}
        self._unborn: dict[Member, asyncio.TimerHandle] = {}  # those whose start waits
        # Of first incarnations, by rank: made before anything starts, so that a lack of room shows.
        self._progress: dict[int, ProgressFile] = {}
        self._sentry = Sentry(self._loop, settings, self._workers, owner.silent, owner.note)
        self.shipping = None if ground.dock is None else Shipping(ground.dock, ground.number)
        self._copies = Copies(
            ground.shm_dir, settings.run_id, ground.number, self.shipping, owner.copy_news
        )
        self._preparations: set[asyncio.Task[None]] = set()
        self._burials: set[asyncio.Task[None]] = set()
        self._not_ours = {p.pid for p in processes.process_table() if p.parent == os.getpid()}
        self._was_subreaper = processes.set_child_subreaper(True)

    # ------------------------------------------------------------ its life

    async def open(self, first: Iterable[int] = ()) -> Ready:
        """Make the zygote ready. `first`: ranks that will be launched here, for which room is
        taken.

        Raises UserError for what must be changed before it can start.
        """
        for rank in first:
            self._progress[rank] = self._make_progress(rank, 1)
        ready = await self._nursery.open()
        self._sentry.start()
        return ready

    def hurry(self) -> None:
        """A `close` that waits for workers waits no longer."""
        self._hurry.set()

    async def close(self, *, terminate: bool, wait_s: float, keep_copies: bool = False) -> None:
        """End all that is left. `terminate`: by SIGTERM first. `wait_s`: how long workers may take
        to end by themselves. Afterwards no process, descriptor or file in memory is left, but, with
        `keep_copies`, copies that another node may adopt.

        Raises EverstepError if a process cannot be ended.
        """
        self._closing = True
        self._sentry.stop()
        await _cancel(self._preparations)
        self._forget_unborn()
        if terminate:
            for worker in self._workers.values():
                worker.terminate()
        if wait_s > 0:
            await self._wait_alone_or_hurry(wait_s)
        for worker in self._workers.values():
            worker.kill("the job is over")
        try:
            await asyncio.wait_for(self._alone.wait(), 2 * END_TIMEOUT_S)
            await self._nursery.close()
            await end_marked(self._ground.mark)
            self._reap_strays()
        finally:
            await _cancel(self._burials)
            for worker in list(self._workers.values()):
                worker.close()
            for progress in self._progress.values():
                progress.remove()
            await self._copies.close(keep=keep_copies)
            processes.set_child_subreaper(self._was_subreaper)

    async def _wait_alone_or_hurry(self, wait_s: float) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._alone, self._hurry)]
        await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    # ------------------------------------------------------------ what the owner asks for

    @property
    def peer_address(self) -> tuple[str, int]:
        """A node in the coordinator's process listens for nobody."""
        return self._ground.host, 0

    def launch(
        self,
        spec: WorkerSpec,
        variables: Mapping[str, str],
        delay_s: float,
        kept: object = (),
    ) -> None:
        """Fork a worker, after `delay_s`, as soon as a zygote is ready. `spec`: without paths and
        host, which are the node's. `variables`: for its environment."""
        rank, incarnation = spec.rank, spec.incarnation
        progress = self._progress.pop(rank, None) if incarnation == 1 else None
        progress = progress or self._make_progress(rank, incarnation)
        # A worker may change its directory.
        stacks = (self._ground.logs / f"rank{rank}.{incarnation}.stacks").absolute()
        spec = msgspec.structs.replace(
            spec,
            progress_path=str(progress.path),
            stacks_path=str(stacks),
            host=self._ground.host,
        )
        log = self._ground.logs / f"rank{rank}.{incarnation}.log"
        worker = Worker(self._loop, spec, variables, progress, log)
        self._workers[rank, incarnation] = worker
        self._alone.clear()
        if delay_s > 0:
            text = f"rank {rank} has failed often: it starts in {delay_s:.1f} s"
            self._owner.note(f"backoff-{rank}-{incarnation}", text)
            timer = self._loop.call_later(delay_s, self._give_birth, worker)
            self._unborn[rank, incarnation] = timer
        else:
            self._give_birth(worker)

    def kill(self, rank: int, incarnation: int, why: str) -> None:
        """SIGKILL a worker's whole session. Nothing, if it is dead."""
        worker = self._workers.get((rank, incarnation))
        if worker is not None:
            worker.kill(why)
            if (rank, incarnation) in self._unborn:  # its death must be seen soon
                self._give_birth(worker)

    def send(self, rank: int, incarnation: int, message: ToWorker) -> None:
        """Send a message to a worker. Nothing, if it is dead."""
        worker = self._workers.get((rank, incarnation))
        if worker is not None:
            worker.send(message)
            if isinstance(message, Stop):
                self._sentry.interrupted((rank, incarnation))

    def send_all(self, members: Iterable[Member], message: ToWorker) -> None:
        """Send a message to several workers."""
        for rank, incarnation in members:
            self.send(rank, incarnation, message)

    def copy_order(self, order: nodes.CopyOrder) -> None:
        """The coordinator's word about copies."""
        self._copies.obey(order)

    def adopt_copies(self) -> tuple[HeldCopy, ...]:
        """Take over the copies that an agent of the same job has left in this host's memory."""
        return self._copies.adopt()

    def copies_held(self) -> tuple[HeldCopy, ...]:
        """The copies in this node's memory."""
        return self._copies.held()

    def peers(self, order: nodes.Peers) -> None:
        """A node in the coordinator's process has no peers."""

    @property
    def listens(self) -> nodes.Listens | None:
        """Nobody tries to reach it."""
        return None

    def probe(self, order: nodes.Probe) -> None:
        """Nor does it try others."""
        raise AssertionError(f"{order} to the job's only node")

    def reclaim(self, order: nodes.Reclaim) -> None:
        """Nor does it keep what the coordinator doesn't."""
        raise AssertionError(f"{order} to the job's only node")

    def written(self, step: int) -> None:
        """Nothing is kept here of what was said: whom it is told to is in this process."""

    def look(self) -> None:
        """Say what all workers show, by `Owner.looked`."""
        self._owner.looked(self._sentry.look())

    def dismiss(self, why: str) -> None:
        """The job goes on without this node: kill all its workers."""
        for worker in self._workers.values():
            worker.kill(why)

    def cut(self, fault: ChaosSpec) -> NoReturn:
        """A fault on purpose: end this process by SIGKILL, and for kind `node` all that it started,
        as if the power were cut: nobody has time to tell of another's end."""
        if fault.kind == "node":
            for pid in processes.marked(self._ground.mark):
                processes.send_signal(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL cannot be ignored")

    def inspect(self) -> None:
        """Have all workers show their stacks, and say by `Owner.shown` what they do, soon."""
        self._go(self._inspect(), self._preparations)

    async def _inspect(self) -> None:
        self._owner.shown(await self._sentry.inspect())

    # ------------------------------------------------------------ the zygote

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
            self._owner.note(
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
        """Processes of this node that lost their parent to this one and lead a session that is no
        known worker's."""
        found = []
        for pid in processes.marked(self._ground.mark):
            process = processes.look_up(pid)
            if process is None or pid in self._by_pid or pid == self._nursery.pid:
                continue
            if process.parent == os.getpid() and process.session == pid:
                found.append(pid)
        return found

    # ------------------------------------------------------------ workers

    def _make_progress(self, rank: int, incarnation: int) -> ProgressFile:
        return ProgressFile(self._ground.shm_dir, self._ground.shm_name, rank, incarnation)

    def _give_birth(self, worker: Worker) -> None:
        timer = self._unborn.pop((worker.spec.rank, worker.spec.incarnation), None)
        if timer is not None:
            timer.cancel()
        if self._nursery.zygote is not None:
            self._fork(worker, self._nursery.zygote)

    def _fork(self, worker: Worker, zygote: Zygote) -> None:
        rank, incarnation = worker.spec.rank, worker.spec.incarnation
        fds = worker.open(
            partial(self._on_message, worker),
            partial(self._owner.output, rank, incarnation),
            partial(self._on_garbage, worker),
        )
        worker.zygote = zygote
        zygote.fork(Fork(spec=worker.spec, environment=dict(worker.variables)), fds)

    def _on_message(self, worker: Worker, message: FromWorker) -> None:
        rank, incarnation = worker.spec.rank, worker.spec.incarnation
        if not isinstance(message, CopyMessage):
            self._owner.said(rank, incarnation, message)
            return
        try:
            self._copies.handle(rank, incarnation, message, worker.send)
        except SnapshotError as error:
            self._on_garbage(worker, str(error))

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
            cause = self._sentry.explain_abort(worker, cause)
        worker.close()
        self._copies.buried(rank, incarnation)
        del self._by_pid[worker.pid]
        del self._workers[rank, incarnation]
        if not self._workers:
            self._alone.set()
        self._owner.died(rank, incarnation, cause, before_kill=not worker.killed)
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

    def _go(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
        """Run in the background; a failure is the node's."""
        task = self._loop.create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self._owner.failed(error)


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def failures_go_to(failed: Callable[[BaseException], None]) -> None:
    """Have whatever goes wrong in a callback of the running loop told to `failed`."""

    def on_exception(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        failed(context.get("exception") or EverstepError(str(context["message"])))

    asyncio.get_running_loop().set_exception_handler(on_exception)
