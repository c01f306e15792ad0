"""Asks a running job about itself from any host that has its secret, and asks it to end.

Theory of operation: a client is one link to the coordinator, as an agent's, over which it asks and
is answered (wire/clients.py). It asks again after each loss, for the coordinator may be gone for a
moment and come back, and gives up when for `timeout_s` nothing has answered. It takes part in
nothing, and the job does not notice whether it reads.

Lines are written by a thread, since whoever reads them may stop reading: the connection stays, and
what does not fit the thread's queue is left out and counted, as what the coordinator left out.

It does not know how what it is told is shown (observe/status.py).
"""

from __future__ import annotations

import asyncio
import getpass
import os
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from everstep.errors import EverstepError, UserError
from everstep.wire import clients
from everstep.wire.clients import Line
from everstep.wire.link import Find
from everstep.wire.network import Link
from everstep.wire.secret import Secret

NO_JOB: Final = 3  # exit code
_QUEUED: Final = 256  # batches that wait for the reader: 64 MiB, all that is kept several times


class NoJobError(EverstepError):
    """There is no such job, or it can't be reached; the message says what was tried."""

    exit_code = NO_JOB


class Printer(Protocol):
    """Where lines go. Called by a thread of its own."""

    def line(self, line: Line) -> None:
        """Show a line."""
        ...

    def missed(self, rank: int, count: int) -> None:
        """Say that `count` lines of `rank` were left out here."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """How a job is reached: its coordinator listens at `where` (host and port), or where `find`
    says, which is asked before each attempt. `timeout_s`: for how long nothing may answer. `say` is
    told, in a sentence, what is waited for."""

    where: tuple[str, int]
    secret: Secret
    timeout_s: float
    say: Callable[[str], None]
    find: Find | None = None


def ask_status(contact: Contact) -> clients.Status:
    """What the job does. Blocks, at most about `timeout_s`; runs an event loop of its own.

    Raises NoJobError when nothing answers.
    """
    found: list[clients.Status] = []

    def take(answer: clients.ToClient) -> bool:
        if isinstance(answer, clients.Status):
            found.append(answer)
        return bool(found)

    asyncio.run(_Talk(contact, clients.AskStatus, take).run())
    return found[0]


def read_logs(contact: Contact, asked: clients.AskLogs, printer: Printer) -> None:
    """Print what was asked for, until there is no more, or the job is over. Blocks; runs an event
    loop of its own. After a KeyboardInterrupt a daemon thread may still hang in a write.

    Raises NoJobError when nothing answers, and when for `timeout_s` the coordinator has not come
    back; UserError for ranks that the job does not have.
    """
    writer = _Writer(printer)
    place = asked

    def ask() -> clients.AskLogs:
        return place

    def take(answer: clients.ToClient) -> bool:
        nonlocal place
        if not isinstance(answer, clients.Lines):
            return False
        writer.put(answer)
        after = answer.lines[-1].at if answer.lines else place.after
        place = clients.AskLogs(
            ranks=asked.ranks,
            follow=asked.follow,
            source=answer.source,
            after=after,
            tail=asked.tail if after == 0 else -1,
        )
        return answer.last

    try:
        asyncio.run(_Talk(contact, ask, take).run())
    except EverstepError:
        writer.close()
        raise
    writer.close()


def stop_job(contact: Contact, *, now: bool) -> None:
    """Ask the job to end, in order or `now`, and wait until it has. Blocks; runs an event loop of
    its own.

    Raises NoJobError when nothing answers, and when for `timeout_s` the coordinator has not come
    back.
    """
    say = contact.say
    who = f"{_user()} on host {socket.gethostname()}"

    def ask() -> clients.AskStop:
        return clients.AskStop(now=now, who=who)

    def take(answer: clients.ToClient) -> bool:
        if isinstance(answer, clients.Stopping):
            say(f"run {answer.run_id} is asked to end{' at once' if now else ''}")
        elif isinstance(answer, clients.Over):
            say(f"it ends with exit code {answer.exit_code}: {answer.text or 'finished'}")
        return False

    asyncio.run(_Talk(contact, ask, take).run())


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may have no name for it
        return f"user {os.getuid()}"


class _Talk:
    """One link, on which the same is asked until all is answered.

    `ask()`: the question. `take(answer)`: whether that was all. The talk is over then, or when the
    connection ends after the job has.
    """

    def __init__(
        self,
        contact: Contact,
        ask: Callable[[], clients.FromClient],
        take: Callable[[clients.ToClient], bool],
    ) -> None:
        self._contact = contact
        self._timeout_s = contact.timeout_s
        self._ask = ask
        self._take = take
        self._say = contact.say
        self._answered = False  # on this connection
        self._over = False
        self._why = "nothing answered"

    async def run(self) -> None:
        """Talk to the end. Raises NoJobError when for `timeout_s` nothing has answered."""
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[None] = loop.create_future()
        loop.set_exception_handler(
            lambda _, context: self._fail(
                context.get("exception") or EverstepError(str(context["message"]))
            )
        )
        self._patience = loop.call_later(self._timeout_s, self._give_up)
        self._link: Link[clients.ToClient] = Link(
            host=self._contact.where[0],
            port=self._contact.where[1],
            secret=self._contact.secret,
            receives=clients.ToClient,
            on_joined=self._on_joined,
            on_message=self._on_message,
            on_lost=self._on_lost,
            on_waiting=self._on_waiting,
            find=self._contact.find,
        )
        try:
            await self._end
        finally:
            self._patience.cancel()
            self._link.close("it has no more questions")

    def _on_joined(self) -> None:
        self._link.send(self._ask())

    def _on_message(self, answer: clients.ToClient) -> None:
        self._patience.cancel()
        self._answered = True
        self._over = self._over or isinstance(answer, clients.Over)
        if isinstance(answer, clients.Declined):
            self._fail(UserError(answer.text))
        elif self._take(answer):
            self._finish()

    def _on_lost(self, why: str) -> None:
        if self._over:
            self._finish()
            return
        if self._answered:  # else it still has the time that it had
            self._answered = False
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(self._timeout_s, self._give_up)
            self._say(f"{why}; waiting up to {self._timeout_s:g} s for a coordinator")
        self._why = why

    def _on_waiting(self, why: str) -> None:
        if self._over:
            self._finish()
            return
        self._why = why
        self._say(f"{why}; trying for {self._timeout_s:g} s")

    def _give_up(self) -> None:
        self._fail(
            NoJobError(
                f"{self._why}; it was tried for {self._timeout_s:g} s. Is the job still there, and "
                "is this its secret?"
            )
        )

    def _finish(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def _fail(self, error: BaseException) -> None:
        if not self._end.done():
            self._end.set_exception(error)


class _Writer:
    """Hands lines to a printer, in a thread, and tells it what was missed."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer
        self._queue: queue.Queue[clients.Lines | None] = queue.Queue(_QUEUED)
        self._failure: BaseException | None = None
        self._source = ""
        self._newest: dict[int, int] = {}  # by rank, the number of its last line
        # It may hang in a write for as long as the reader likes; the process may end before that.
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, lines: clients.Lines) -> None:
        """Have lines printed. Left out where too many wait already."""
        if self._failure is not None:
            raise self._failure
        try:
            self._queue.put_nowait(lines)
        except queue.Full:
            pass  # the next line's number tells

    def close(self) -> None:
        """Wait until all that was put is printed. Blocks as the reader does."""
        self._queue.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            if self._failure is not None:
                continue
            try:
                self._print(batch)
            except Exception as error:  # noqa: BLE001 - raised by the next `put`, or by `close`
                self._failure = error

    def _print(self, batch: clients.Lines) -> None:
        if batch.source != self._source:  # another coordinator counts anew
            self._source = batch.source
            self._newest.clear()
        for line in batch.lines:
            missed = line.number - self._newest.get(line.rank, line.number - 1) - 1
            if missed > 0:
                self._printer.missed(line.rank, missed)
            self._newest[line.rank] = line.number
            self._printer.line(line)
