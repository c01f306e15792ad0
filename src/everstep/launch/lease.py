"""The lease: which process may be a job's coordinator, and where it is found.

Theory of operation. Who would coordinate acquires the lease, and with it a term that nobody has had
before. It must ask `holds` before each thing that only one may do. The answer needs nobody else and
is never too late: it is the local clock, compared with a time until which nobody else can have been
given the lease. So a process that was stopped, and wakes long after its successor began, knows
before it acts. What it had sent already is stopped by its term: an agent that has met a higher one
hangs up on it. `lost` is for those who don't act, and should end.

`InPlace` is the lease of a coordinator that comes back where it was: a lock in the run's directory,
which ends with its process and not before. `launch/etcd.py` is the one that moves between hosts.
Time is counted on a clock that goes on while the machine is suspended.

It does not know what a coordinator does. A lock on a network file system is only as good as that
file system's locks.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from everstep.errors import EverstepError, TransientError, UserError

if TYPE_CHECKING:
    from everstep.launch.etcd import EtcdLease

LOCK_FILE: Final = "coordinator.lock"
TERM_FILE: Final = "coordinator.json"
_LOOK_EVERY_S: Final = 0.05  # a try is two system calls


class LeaseHeld(UserError):
    """Another process coordinates the job; the message names it."""


class LeaseLost(TransientError):
    """The lease ended before what was asked for could be done; this process must not act."""


def now_s() -> float:
    """Seconds on the clock of all leases: since the host's boot, suspended or not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a coordinator listens, and the term in which it does."""

    host: str
    port: int
    term: int


Waiting = Callable[[str], None]


def unheard(why: str) -> None:
    """For who does not care why it waits."""


class Tenancy(Protocol):
    """A lease that has been acquired; it is renewed in the background until it is released or lost.
    Loop thread only."""

    @property
    def term(self) -> int:
        """Higher than that of whoever held the lease before; given once."""

    @property
    def holds_until_s(self) -> float:
        """Until when, on `now_s`, nobody else can be given the lease; -inf when it is over."""

    @property
    def holds(self) -> bool:
        """Nobody else has the lease now. What was False once stays False. Does not block."""

    @property
    def lost(self) -> asyncio.Future[str]:
        """Done, with the reason, when the lease does not hold any more and was not released."""

    async def publish(self, host: str, port: int) -> None:
        """Tell where the coordinator listens. Raises LeaseLost."""

    async def release(self) -> None:
        """Let the next one have it at once. Without an answer it ends by itself. May be called
        twice, and when it is lost."""


class Lease(Protocol):
    """What may be held by one process at a time."""

    async def acquire(
        self, wait_s: float, *, known_term: int = -1, on_waiting: Waiting = unheard
    ) -> Tenancy:
        """Take the lease, waiting up to `wait_s` seconds for its holder to end; 0 tries once. The
        term is higher than `known_term`, the highest of which the caller has heard. `on_waiting`
        is told why it can't be had yet, when the reason changes.

        Raises LeaseHeld when somebody else has it, TransientError when it can't be told, UserError
        when it may not be asked for.
        """


class Finder(Protocol):
    """What says where the coordinator is."""

    async def where(self) -> Place | None:
        """Where the holder of the lease listens; None while there is none. Raises TransientError
        when it can't be told, UserError when it may not be asked for."""


def make_lease(text: str, run_id: str, run_dir: Path, lease_s: float) -> Lease:
    """The lease that `text` names, as `settings.coordinator_lease` has it: empty for one in the
    run's directory, which must exist, or an address of etcd. `lease_s`: as in the settings.

    Raises UserError for a text that names none, or if what asks etcd is not installed.
    """
    return _etcd_lease(text, run_id, lease_s) if text else InPlace(run_dir)


def make_finder(text: str, run_id: str, lease_s: float) -> Finder | None:
    """What finds the coordinator of a job whose lease is `text`; None where it stays in its place,
    which the agents are given. Raises UserError as `make_lease` does."""
    return _etcd_lease(text, run_id, lease_s) if text else None


def _etcd_lease(text: str, run_id: str, lease_s: float) -> EtcdLease:
    try:
        from everstep.launch.etcd import EtcdLease  # what a job in one place has no use for
    except ModuleNotFoundError as error:
        raise UserError(
            f"coordinator_lease is {text!r}, and what asks etcd is not installed on host "
            f"{socket.gethostname()} ({error}): pip install everstep[etcd]"
        ) from error
    return EtcdLease.at(text, run_id, lease_s)


async def found(finder: Finder) -> tuple[str, int]:
    """Host and port of the coordinator now. Raises TransientError when it can't be told or there is
    none, UserError when it may not be asked for."""
    place = await finder.where()
    if place is None:
        raise TransientError("no coordinator holds the lease now, or it does not listen yet")
    return place.host, place.port


class Countdown:
    """Until when a lease that must be renewed surely holds: what a Tenancy of such a lease is made
    of. `clock`: as `now_s`. Loop thread only.

    A renewal counts from before it was asked for, and only if its answer comes while the lease
    holds: what has once been found over stays so, whatever comes late. `doubt`: why it may not be
    renewed in time, if that is known.
    """

    def __init__(self, until_s: float, clock: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self.until_s = until_s
        self.doubt = ""
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self._alarm = self._loop.call_soon(self._look)

    def left_s(self) -> float:
        """Seconds for which it still holds; 0 when it is over. Who asks may be the first to see
        that."""
        left_s = self.until_s - self._clock()
        if left_s <= 0:
            self.lose("it was not renewed in time" + (f" ({self.doubt})" if self.doubt else ""))
        return max(0.0, left_s)

    def extend(self, until_s: float) -> None:
        """It holds until then, if it holds at all, and is never shortened."""
        if self.left_s():
            self.until_s = max(self.until_s, until_s)
            self.doubt = ""

    def lose(self, why: str) -> None:
        """It is over, unless it was already."""
        if self.until_s != -math.inf:
            self.close()
            self.lost.set_result(why)

    def close(self) -> None:
        """It is over, and nobody is told."""
        self.until_s = -math.inf
        self._alarm.cancel()

    def _look(self) -> None:
        """Tell of the end when it comes; the loop's clock may lag behind ours."""
        if left_s := self.left_s():
            self._alarm = self._loop.call_later(left_s, self._look)


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """What is written down about who holds a lease. Without a host it doesn't listen yet."""

    term: int
    pid: int
    machine: str
    host: str = ""
    port: int = 0

    @classmethod
    def this(cls, term: int) -> Holder:
        """This process."""
        return cls(term=term, pid=os.getpid(), machine=socket.gethostname())

    @property
    def place(self) -> Place | None:
        """Where it listens."""
        return Place(host=self.host, port=self.port, term=self.term) if self.host else None


class Patience:
    """What acquiring has in common: tries until it succeeds or has waited for `wait_s` seconds.
    `on_waiting`: as `Lease.acquire` has it."""

    def __init__(self, wait_s: float, on_waiting: Waiting, clock: Callable[[], float]) -> None:
        self._wait_s = wait_s
        self._on_waiting = on_waiting
        self._clock = clock
        self._deadline_s = clock() + wait_s
        self._told = ""

    async def held(self, holder: Holder | None, where: str, pause_s: float) -> None:
        """Wait, since `holder` has the lease; None: somebody was faster. `where`: the place of the
        lease, in words. Raises LeaseHeld when the time is over."""
        who = "another process"
        if holder is not None:
            who = f"process {holder.pid} on {holder.machine} (term {holder.term})"
        why = f"{where}: {who} coordinates this run"
        after = f" and still does after {self._wait_s:g} s" if self._wait_s else ""
        error = LeaseHeld(f"{why}{after}; leave it to that one, or end it first")
        await self.failed(error, why, pause_s)

    async def failed(self, error: EverstepError, why: str, pause_s: float) -> None:
        """Wait before the next try. Raises `error` when the time is over."""
        left_s = self._deadline_s - self._clock()
        if left_s <= 0:
            raise error
        if why != self._told:
            self._told = why
            self._on_waiting(why)
        await asyncio.sleep(min(pause_s, left_s))


class InPlace:
    """The lease in a run's directory: the lock is held by at most one process, and TERM_FILE keeps
    the term. It is a Finder, too, for those who see the directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    async def acquire(
        self, wait_s: float, *, known_term: int = -1, on_waiting: Waiting = unheard
    ) -> InPlaceTenancy:
        """See Lease. Raises OSError if the directory can't be written. Blocks for the disk."""
        patience = Patience(wait_s, on_waiting, now_s)
        lock = _open_lock(self._run_dir)
        try:
            while not _locked(lock):
                await patience.held(self._read(), str(self._run_dir), _LOOK_EVERY_S)
            before = self._read()
            term = max(known_term, -1 if before is None else before.term) + 1
            holder = Holder.this(term)
            _write_durably(self._run_dir / TERM_FILE, msgspec.json.encode(holder))
        except BaseException:
            os.close(lock)
            raise
        return InPlaceTenancy(self._run_dir / TERM_FILE, holder, lock)

    async def where(self) -> Place | None:
        """See Finder. The holder may have ended."""
        holder = self._read()
        return None if holder is None else holder.place

    def _read(self) -> Holder | None:
        path = self._run_dir / TERM_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=Holder)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise UserError(
                f"{path}: not what a coordinator wrote ({error}); if no coordinator of this run "
                "lives, remove the file, and the term is taken from the journal"
            ) from error


class InPlaceTenancy:
    """A lock that is held; it ends with the process. See Tenancy."""

    def __init__(self, path: Path, holder: Holder, lock: int) -> None:
        self._path = path
        self._holder = holder
        self._lock: int | None = lock
        self.term = holder.term
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def holds_until_s(self) -> float:
        """See Tenancy: as long as the process lives."""
        return -math.inf if self._lock is None else math.inf

    @property
    def holds(self) -> bool:
        """See Tenancy."""
        return self._lock is not None

    async def publish(self, host: str, port: int) -> None:
        """See Tenancy. Raises OSError if the file can't be written. Blocks for the disk."""
        if self._lock is None:
            raise LeaseLost(f"{self._path}: the lease of term {self.term} has been released")
        self._holder = msgspec.structs.replace(self._holder, host=host, port=port)
        _write_durably(self._path, msgspec.json.encode(self._holder))

    async def release(self) -> None:
        """See Tenancy."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


@contextmanager
def at_rest(run_dir: Path) -> Iterator[bool]:
    """Whether nobody has the lease in a run's directory; while it is entered nobody gets it then.
    Raises OSError if the directory can't be written."""
    lock = _open_lock(run_dir)
    try:
        yield _locked(lock)
    finally:
        os.close(lock)


def _open_lock(run_dir: Path) -> int:
    # Who may open it can keep a coordinator from its job.
    return os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_durably(path: Path, content: bytes) -> None:
    """Replace a file's content, so that after a power cut it has the old or the new."""
    fresh = path.with_name(path.name + ".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
    fresh.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
