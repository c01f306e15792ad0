"""The worker's end of the control channel: one listening thread, a mailbox, and the stop.

Theory of operation: the listening thread reads messages as they come. A `Stop` is acted on at once,
on that thread, through `on_stop`, so that the main thread is freed whatever it waits in; everything
else goes to the mailbox, where the main thread takes it. Every wait has a deadline and ends early
when a generation is stopped. When the agent is gone the process ends: a worker without an agent can
neither recover nor be stopped."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import msgspec

from everstep.errors import EverstepError
from everstep.wire import messages
from everstep.wire.channel import BlockingChannel

EXIT_ORPHAN = 111
EXIT_DEAF = 113
M = TypeVar("M")
A = TypeVar("A", messages.Shelf, messages.Kept, messages.Safe, messages.Recalled)


class Stopped(Exception):
    """The generation that was waited in has been stopped."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"generation {generation} was stopped")
        self.generation = generation


class ControlTimeout(EverstepError):
    """The agent did not answer within the deadline."""


class Control:
    """Messages to and from the agent. `send` and the waits may be called on any thread; waits
    block."""

    def __init__(self, sock: socket.socket, on_stop: Callable[[int], None]) -> None:
        self._channel: BlockingChannel[messages.ToWorker] = BlockingChannel(sock, messages.ToWorker)
        self._on_stop = on_stop
        self._condition = threading.Condition()
        self._inbox: list[messages.ToWorker] = []
        self._addresses: dict[tuple[int, str], dict[int, bytes]] = {}
        self._turn = 0
        self.stopped = -1
        self._thread = threading.Thread(target=self._listen, name="everstep-control", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def send(self, message: msgspec.Struct) -> None:
        """Hand one message to the kernel; it outlives this process. Ends the process if the agent
        is gone."""
        try:
            self._channel.send(message)
        except OSError:
            os._exit(EXIT_ORPHAN)

    def _listen(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except OSError:
                message = None
            if message is None:
                os._exit(EXIT_ORPHAN)
            if isinstance(message, messages.Stop):
                self._stop(message.generation)
            with self._condition:
                if isinstance(message, messages.Stop):
                    self.stopped = max(self.stopped, message.generation)
                elif isinstance(message, messages.Addresses):
                    self._addresses[message.generation, message.group] = message.entries
                else:
                    self._inbox.append(message)
                self._condition.notify_all()

    def _stop(self, generation: int) -> None:
        try:
            self._on_stop(generation)
        except Exception:  # a worker that can't be stopped must not live on, deaf
            traceback.print_exc()
            os._exit(EXIT_DEAF)
            raise

    def take(
        self,
        kind: type[M],
        timeout_s: float,
        *,
        generation: int | None = None,
        match: Callable[[M], bool] = lambda _: True,
    ) -> M:
        """The next message of `kind` that matches; older ones of that kind which do not match are
        dropped.

        Raises Stopped when a generation >= `generation` is stopped first, ControlTimeout after
        `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while True:
                if generation is not None and self.stopped >= generation:
                    raise Stopped(self.stopped)
                for message in list(self._inbox):
                    if isinstance(message, kind):
                        self._inbox.remove(message)
                        if match(message):
                            return message
                self._wait(deadline, f"no {kind.__name__} from the agent")

    def come(self, kind: type[M]) -> list[M]:
        """The messages of `kind` that have come, taken out. Does not wait."""
        with self._condition:
            found: list[M] = [message for message in self._inbox if isinstance(message, kind)]
            self._inbox = [message for message in self._inbox if not isinstance(message, kind)]
        return found

    def next_turn(self) -> int:
        """The number of a request; the answer carries it, so that one to a request that was given
        up is not taken for another's."""
        with self._condition:
            self._turn += 1
            return self._turn

    def answer(self, kind: type[A], turn: int, timeout_s: float, generation: int) -> A:
        """The answer to request `turn`. Raises as `take` does."""
        return self.take(
            kind, timeout_s, generation=generation, match=lambda answer: answer.turn == turn
        )

    def wait_stop(self, generation: int, timeout_s: float) -> int:
        """Wait until `generation` or a newer one is stopped; returns the newest stopped."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while self.stopped < generation:
                self._wait(deadline, f"no stop of generation {generation} from the agent")
            return self.stopped

    def exchange(
        self, generation: int, group: str, rank: int, size: int, payload: bytes, timeout_s: float
    ) -> dict[int, bytes]:
        """All-gather `payload` among the `size` members of `group`, through the agent, in one
        round.

        Raises Stopped or ControlTimeout. Blocks; any thread.
        """
        self.send(
            messages.Address(
                generation=generation, group=group, rank=rank, size=size, payload=payload
            )
        )
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while (generation, group) not in self._addresses:
                if self.stopped >= generation:
                    raise Stopped(self.stopped)
                self._wait(deadline, f"the addresses of the group {group} are not complete")
            for key in [key for key in self._addresses if key[0] < generation]:
                del self._addresses[key]
            return self._addresses.pop((generation, group))

    def _wait(self, deadline: float, what: str) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ControlTimeout(f"{what} within the deadline; look at the agent's output")
        self._condition.wait(left)
