"""The inner groups: what an outer group swaps at a regroup. Here gloo; nccl is in nccl.py.

Theory of operation: an inner group lives in one generation. It is built on a builder thread,
aborted from any thread, and destroyed on a reaper thread, because gloo's constructor and destructor
both wait for peers that may be dead. The addresses of all members travel in one round through the
control plane (a pure Python store that answers gloo's bootstrap), so no store server and no rank
must outlive the others.

Does not know: what a collective means, poison, steps.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from everstep.errors import TransientError
from everstep.worker import sockets, threads

Exchange = Callable[[bytes], dict[int, bytes]]
_GLOO_THREAD = "pt_gloo_runloop"  # of any group of this process: all of them must be asleep


class Inner(Protocol):
    """One communicator of one generation. `patience`: how long one of its operations may take."""

    patience: datetime.timedelta

    def operation(self, name: str) -> Callable[..., Any]:
        """The method that launches collective `name` and returns its Work."""
        ...

    def abort(self) -> None:
        """Wake everything that waits in the group, on any thread. Does not block for long."""
        ...

    def retire(self) -> None:
        """The script is done with the group: end it without failing what it still does, if that can
        be told. `destroy` follows."""
        ...

    def silent(self) -> bool:
        """Whether all its connections are closed, so that nothing can arrive in anybody's memory
        any more."""
        ...

    def asleep(self, seconds: float) -> bool:
        """Whether none of the threads that run its operations has run for `seconds`; blocks so
        long."""
        ...

    def destroy(self) -> None:
        """Drop it, once. May block; called on a reaper thread."""
        ...


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What one member puts into the exchange: where it listens, and gloo's own keys."""

    host: str
    port: int
    keys: dict[str, bytes]


class ExchangeStore(Store):
    """A store that is one all-gather: the first `get` or `wait` sends what was set and brings
    everybody's.

    torch's gloo sets one key a rank (its address blob) and then reads all. Blocks in the exchange;
    raises what the exchange raises."""

    def __init__(self, host: str, port: int, exchange: Exchange) -> None:
        super().__init__()
        self._entry = Entry(host=host, port=port, keys={})
        self._exchange = exchange
        self._keys: dict[str, bytes] | None = None
        self.peers: frozenset[sockets.Address] = frozenset()
        self.error: Exception | None = None

    def set(self, key: str, value: bytes | str) -> None:
        self._entry.keys[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self._all()[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Returns once all keys are there: one of our own needs no exchange."""
        if all(key in self._entry.keys for key in keys):
            return
        missing = [key for key in keys if key not in self._all()]
        if missing:
            raise KeyError(f"peers did not set {missing}")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._all() for key in keys)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """The exchange has its own deadline."""

    def has_extended_api(self) -> bool:
        return False

    def _all(self) -> dict[str, bytes]:
        if self._keys is None:
            try:
                answers = self._exchange(msgspec.msgpack.encode(self._entry))
            except Exception as error:
                self.error = (
                    error  # c10d wraps what a Python store raises; the builder raises this one
                )
                raise
            entries = [msgspec.msgpack.decode(answer, type=Entry) for answer in answers.values()]
            self.peers = frozenset((e.host, e.port) for e in entries) - {
                (self._entry.host, self._entry.port)
            }
            self._keys = {key: value for entry in entries for key, value in entry.keys.items()}
        return self._keys


_device_lock = threading.Lock()


def _listening_device(host: str) -> tuple[Any, sockets.Address]:
    """A gloo device and the address it listens at. gloo does not tell it: it is the listening
    socket that came."""
    with _device_lock:
        for _ in range(8):
            before = sockets.listening_addresses()
            device = ProcessGroupGloo.create_device(hostname=host)
            new = [a for a in sockets.listening_addresses() - before if a[0] == host]
            if len(new) == 1:
                return device, new[0]
            del device  # another thread began to listen at the same moment: once more
    raise TransientError(f"cannot tell at which port of {host} gloo listens; try again")


class GlooInner:
    """A ProcessGroupGloo of one generation. The constructor blocks until all members are connected
    (bounded by the exchange's deadline, and `build_timeout_s`); call it on a builder thread."""

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Exchange,
        *,
        host: str,
        build_timeout_s: float,
        collective_timeout_s: float,
        on_address: Callable[[GlooInner], None] = lambda _: None,
    ) -> None:
        device, self._own = _listening_device(host)
        self._store = ExchangeStore(self._own[0], self._own[1], exchange)
        on_address(self)  # from here on it can be aborted, also while it is being built
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # in no stub
        options._devices = [device]
        options._timeout = datetime.timedelta(seconds=build_timeout_s)
        try:
            self.group = ProcessGroupGloo(self._store, rank, size, options)
        except Exception as error:
            if self._store.error is not None:
                raise self._store.error from error
            raise
        # gloo's point-to-point calls keep the time-out of the construction unless they are told.
        self.patience = datetime.timedelta(seconds=collective_timeout_s)
        self.group._set_default_timeout(self.patience)

    def operation(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.group, name)
        return method

    def abort(self) -> None:
        sockets.shut(self._own, self._store.peers)

    def retire(self) -> None:
        self.abort()

    def silent(self) -> bool:
        return sockets.connected(self._own, self._store.peers) == 0

    def asleep(self, seconds: float) -> bool:
        return threads.asleep(_GLOO_THREAD, seconds)

    def destroy(self) -> None:
        """Drop the group, once. Blocks until gloo's threads have ended; call it on a reaper
        thread."""
        self.__dict__.pop("group", None)
