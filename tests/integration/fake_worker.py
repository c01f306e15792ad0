"""A worker without torch, for tests of agent, zygote and shell: it keeps to wire/messages.

Its state is one number; a step multiplies and adds, so that a step done twice or left out shows.
The all-reduce of a step and the transfer of the state are exchanges of addresses through the agent,
which stop when the generation is stopped. The script is never run: `spec.script.args` are `steps=N`
and oddities to do at the start.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from everstep.types import Cause, CauseKind, Decision, Holding
from everstep.wire import messages as m
from everstep.wire.channel import BlockingChannel
from everstep.worker.progress import Phase, Progress

T = TypeVar("T")


class StoppedError(Exception):
    """The agent stopped the generation."""


class ChaosError(Exception):
    """A fault on purpose of kind `raise`."""


def after(step: int) -> int:
    """The state after `step` steps."""
    value = 7
    for k in range(1, step + 1):
        value = (value * 31 + k) % 1_000_003
    return value


def run_worker(spec: m.WorkerSpec, control: socket.socket) -> int:
    """The zygote's runner."""
    worker = FakeWorker(spec, control)
    try:
        return worker.run()
    except Exception as error:  # noqa: BLE001 - it is sent, shown, and ends the process
        cause = Cause(
            kind=CauseKind.EXCEPTION,
            text=f"{type(error).__name__}: {error}",
            detail=traceback.format_exc(),
            signature=f"{type(error).__name__}: {error}",
        )
        worker.channel.send(m.Raised(cause=cause))
        traceback.print_exc()
        return 1
    finally:
        worker.progress.close()


class FakeWorker:
    def __init__(self, spec: m.WorkerSpec, control: socket.socket) -> None:
        self.spec = spec
        self.channel: BlockingChannel[m.ToWorker] = BlockingChannel(control, m.ToWorker)
        self.inbox: deque[m.ToWorker] = deque()
        self.progress = Progress(spec.progress_path)
        self.generation = spec.generation
        self.stopped = -1
        self.committed = 0
        self.state = after(0)
        self.torn = spec.joiner
        self.faults = list(spec.faults)
        options = [arg.partition("=") for arg in spec.script.args]
        self.options = {name: value for name, _, value in options}

    def run(self) -> int:
        spec = self.spec
        self.channel.send(m.Hello(pid=os.getpid(), t=time.monotonic()))
        self.be_odd()
        key = spec.rng_key or f"key of rank {spec.rank} from {spec.incarnation}".encode()
        digests = {"w": "0"}
        self.channel.send(m.Protect(shard="all", manifest="m", digests=digests, rng_key=key))
        self.take(m.Go)
        if "init" not in spec.once:
            self.channel.send(m.Once(key="init", value=b"done"))
        print(f"rank {spec.rank} set up, key {key.decode()}, once {dict(spec.once)}", flush=True)
        if spec.joiner:
            self.channel.send(m.Wait())
            self.take(m.Position)
            self.follow(self.park())
        self.until(self.train)
        self.progress.phase = Phase.CLOSING
        self.until(self.close)
        self.channel.send(m.Finish(digests={"state": str(self.state)}))
        self.progress.phase = Phase.FINISHED
        self.until(lambda: self.take(m.Bye, stoppable=True))
        print(f"rank {spec.rank} ends with {self.state}", flush=True)
        return 0

    def until(self, work: Callable[[], object]) -> None:
        """Do `work` until it is not stopped."""
        while True:
            try:
                work()
                return
            except StoppedError:
                self.follow(self.park())

    # ---------------------------------------------------------------- a step

    def train(self) -> None:
        while self.committed < int(self.options.get("steps", "6")):
            step = self.committed + 1
            self.progress.step = step
            try:
                self.step(step)
            except ChaosError as error:
                self.channel.send(
                    m.Fault(
                        generation=self.generation,
                        step=step,
                        cause=Cause(
                            kind=CauseKind.EXCEPTION,
                            text=str(error),
                            detail=traceback.format_exc(),
                            signature=str(error),
                        ),
                    )
                )
                self.follow(self.park())

    def step(self, step: int) -> None:
        self.fire(step, "forward")
        self.progress.phase = Phase.STEP
        self.fire(step, "backward")
        self.channel.send(m.Capsule(step=step, payload=f"capsule {step}".encode()))
        total = self.exchange(f"step{step}", b"1")
        assert len(total) == self.spec.world_size
        self.progress.phase = Phase.UPDATE
        self.fire(step, "optimizer")
        self.state = (self.state * 31 + step) % 1_000_003
        self.commit(step)
        self.progress.phase = Phase.BETWEEN
        self.fire(step, "between")

    def commit(self, step: int) -> None:
        self.committed = step
        record = msgspec.msgpack.encode({"value": self.state, "samples": [step]})
        self.channel.send(
            m.Commit(
                generation=self.generation,
                step=step,
                t=time.monotonic(),
                log={step: {"state": float(self.state)}},
                record=record if self.spec.record else None,
            )
        )

    def close(self) -> None:
        self.channel.send(m.Close(generation=self.generation, step=self.committed))
        self.take(m.Closed, stoppable=True)

    def fire(self, step: int, at: str) -> None:
        for fault in [f for f in self.faults if (f.step, f.at) == (step, at)]:
            self.faults.remove(fault)
            self.channel.send(m.Fired(index=fault.index, t=time.monotonic()))
            if fault.kind == "coordinator":
                continue  # that ends, not we
            if fault.kind in ("node", "agent"):
                signal.pause()  # until it is ended with its node
            if fault.kind == "raise":
                raise ChaosError(f"{fault.text} was asked for")
            if fault.kind == "exit":
                sys.stdout.flush()
                os._exit(fault.code)
            number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "abort": signal.SIGABRT}
            os.kill(os.getpid(), number.get(fault.kind, signal.SIGSEGV))

    # ---------------------------------------------------------------- a recovery

    def park(self) -> m.Regroup:
        """Park for every stop that comes, until a regroup does."""
        parked = -1
        self.progress.phase = Phase.PARKED
        while True:
            current = max(self.stopped, self.spec.generation if self.spec.joiner else -1)
            if current > parked and (self.stopped >= self.generation or self.torn):
                parked = current
                holding = Holding(committed=0 if self.torn else self.committed, torn=self.torn)
                self.channel.send(m.Park(generation=current, holding=holding))
            message = self.receive()
            if isinstance(message, m.Regroup) and message.generation > self.stopped:
                return message

    def follow(self, regroup: m.Regroup) -> None:
        self.progress.phase = Phase.RECOVER
        self.generation = regroup.generation
        try:
            self.restore(regroup)
        except StoppedError:
            self.follow(self.park())

    def restore(self, regroup: m.Regroup) -> None:
        self.channel.send(m.Built(generation=self.generation))
        held = self.exchange("state", str(self.state).encode())
        fetch = regroup.plan.decision is Decision.FETCH
        if fetch:
            assert regroup.capsule == f"capsule {regroup.step}".encode(), regroup
            self.torn = True
            self.state = int(held[regroup.plan.sources[0]])
            self.torn = False
        ok = self.state == after(regroup.step)
        self.channel.send(
            m.Receipt(
                generation=self.generation,
                ok=ok,
                t=time.monotonic(),
                nbytes=8 if fetch else 0,
                text="" if ok else f"{self.state} is not the state of step {regroup.step}",
            )
        )
        if fetch:
            self.commit(regroup.step)

    # ---------------------------------------------------------------- messages

    def exchange(self, group: str, payload: bytes) -> dict[int, bytes]:
        self.channel.send(
            m.Address(
                generation=self.generation,
                group=group,
                rank=self.spec.rank,
                size=self.spec.world_size,
                payload=payload,
            )
        )
        answer = self.take(
            m.Addresses,
            stoppable=True,
            match=lambda a: (a.generation, a.group) == (self.generation, group),
        )
        return answer.entries

    def take(
        self,
        kind: type[T],
        *,
        stoppable: bool = False,
        match: Callable[[T], bool] = lambda _: True,
    ) -> T:
        while True:
            if stoppable and self.stopped >= self.generation:
                raise StoppedError
            message = self.receive()
            if isinstance(message, kind) and match(message):
                return message

    def receive(self) -> m.ToWorker:
        message = self.channel.receive()
        if message is None:
            os._exit(111)
        if isinstance(message, m.Stop):
            self.stopped = max(self.stopped, message.generation)
        return message

    # ---------------------------------------------------------------- oddities

    def be_odd(self) -> None:
        """Do at the start what scripts do that make an agent's life hard."""
        if "holder" in self.options and os.fork() == 0:
            # A loader worker: it holds the control channel and the pipes and outlives its parent.
            signal.pause()
        if "daemon" in self.options:
            # It leaves the session, and so is found by the job's mark alone.
            subprocess.Popen(
                [sys.executable, "-c", "import signal; signal.pause()"],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        if "deaf" in self.options:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if "garbage" in self.options and self.spec.rank == 0 and self.spec.incarnation == 1:
            self.channel.send(m.Go())
        if "raises" in self.options:
            raise ValueError(f"the script of rank {self.spec.rank} is wrong")
        if "exits" in self.options and self.spec.rank == 1:
            print("no newline at the end", end="", flush=True)
            os._exit(int(self.options["exits"]))
        if "hangs" in self.options:
            if self.options["hangs"] == "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("hanging", flush=True)
            signal.pause()
        hashlib.sha256(b"").hexdigest()
