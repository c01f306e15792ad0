"""Whatever etcd and the network do, at most one process thinks at any time that it has the lease.

Theory of operation: real contenders and a naive etcd on an event loop whose time jumps to the next
timer. Each call of a contender meets a fate that Hypothesis draws: how long it is on its way, how
long its answer is, and whether its caller is one that was stopped meanwhile, and so takes the
answer however late it comes. An onlooker asks all contenders' clocks."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeVar

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from everstep.errors import EverstepError, TransientError
from everstep.launch import etcd
from everstep.launch.etcd import EtcdLease, EtcdTenancy
from everstep.launch.etcd_client import EtcdAddress, EtcdClient, KeyValue, Put, Unchanged
from everstep.launch.lease import Countdown

T = TypeVar("T")
TTL_S = 6
ATTEMPT_S = 1.5
RUN_S = 60.0
LOOK_S = 0.1


class Jumping(selectors.DefaultSelector):
    """Does not wait: time goes to where the wait would have ended."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for nothing"
            self.now_s += max(0.0, timeout)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """A loop in virtual time."""

    def __init__(self) -> None:
        self._jumping = Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


@dataclass(frozen=True)
class Fate:
    """Of one call: seconds until etcd has it, seconds until its answer is back; None: it is lost.
    `stopped`: the caller is stopped until then, and sees the answer before its own time-out."""

    there_s: float | None
    back_s: float | None
    stopped: bool


class Etcd:
    """Keys, leases, and a clock that takes `pace` of our seconds for one of its own."""

    def __init__(self, pace: float) -> None:
        self.pace = pace
        self.revision = 1
        self.keys: dict[bytes, KeyValue] = {}
        self.leases: dict[int, float] = {}  # to the time of its end
        self._next = 1

    def expire(self, now_s: float) -> None:
        for lease, end_s in list(self.leases.items()):
            if now_s >= end_s:
                self.revoke(lease)

    def grant(self, now_s: float) -> int:
        self._next += 1
        self.leases[self._next] = now_s + TTL_S * self.pace
        return self._next

    def keep_alive(self, lease: int, now_s: float) -> int:
        if lease not in self.leases:
            return 0
        self.leases[lease] = now_s + TTL_S * self.pace
        return TTL_S

    def revoke(self, lease: int) -> None:
        self.leases.pop(lease, None)
        self.keys = {key: kv for key, kv in self.keys.items() if kv.lease != lease}

    def put_if(self, conditions: Sequence[Unchanged], puts: Sequence[Put]) -> int | None:
        for c in conditions:
            kv = self.keys.get(c.key)
            revision = 0 if kv is None else kv.create_revision
            if kv is not None and c.which == "MOD":
                revision = kv.mod_revision
            if revision != c.revision:
                return None
        if any(put.lease and put.lease not in self.leases for put in puts):
            raise TransientError("requested lease not found")
        self.revision += 1
        for put in puts:
            old = self.keys.get(put.key)
            made = self.revision if old is None else old.create_revision
            self.keys[put.key] = KeyValue(put.key, made, self.revision, put.value, put.lease)
        return self.revision


class Client(EtcdClient):
    """Calls `etcd` through a network that treats each call as its fate says."""

    def __init__(self, etcd: Etcd, fates: Iterator[Fate]) -> None:
        super().__init__(EtcdAddress(endpoints=()), ATTEMPT_S)
        self.etcd = etcd
        self.fates = fates
        self.calls: set[asyncio.Task[Any]] = set()

    async def grant(self, ttl_s: int) -> tuple[int, int]:
        return await self._meet(lambda now_s: self.etcd.grant(now_s)), ttl_s

    async def keep_alive(self, lease: int) -> int:
        return await self._meet(lambda now_s: self.etcd.keep_alive(lease, now_s))

    async def revoke(self, lease: int) -> None:
        await self._meet(lambda now_s: self.etcd.revoke(lease))

    async def read(self, prefix: bytes) -> dict[bytes, KeyValue]:
        return await self._meet(lambda now_s: dict(self.etcd.keys))

    async def put_if(self, conditions: Sequence[Unchanged], puts: Sequence[Put]) -> int | None:
        return await self._meet(lambda now_s: self.etcd.put_if(conditions, puts))

    async def _meet(self, act: Callable[[float], T]) -> T:
        fate = next(self.fates)
        task = asyncio.ensure_future(self._carry(fate, act))
        self.calls.add(task)
        try:
            async with asyncio.timeout(None if fate.stopped else ATTEMPT_S):
                return await asyncio.shield(task)
        except TimeoutError:
            raise TransientError("no answer in time") from None

    async def _carry(self, fate: Fate, act: Callable[[float], T]) -> T:
        loop = asyncio.get_running_loop()
        if fate.there_s is None:
            await asyncio.sleep(2 * ATTEMPT_S)
            raise TransientError("lost on the way")
        await asyncio.sleep(fate.there_s)
        self.etcd.expire(loop.time())
        answer = act(loop.time())
        if fate.back_s is None:
            await asyncio.sleep(2 * ATTEMPT_S)
            raise TransientError("the answer was lost")
        await asyncio.sleep(fate.back_s)
        return answer


class Onlooker:
    """Has seen all tenancies. Reads their clocks without asking them, which might end them."""

    def __init__(self) -> None:
        self.tenancies: list[EtcdTenancy] = []
        self.over: set[int] = set()

    def look(self, now_s: float) -> None:
        holders = [t.term for t in self.tenancies if t.holds_until_s > now_s]
        assert len(holders) <= 1, f"terms {holders} hold at {now_s:.2f} s"
        assert not self.over & set(holders), f"term {holders} holds again at {now_s:.2f} s"
        self.over |= {t.term for t in self.tenancies} - set(holders)

    def took(self, tenancy: EtcdTenancy) -> None:
        known = [t.term for t in self.tenancies]
        assert tenancy.term > max(known, default=-1), f"{tenancy.term} holds, after {known}"
        self.tenancies.append(tenancy)
        self.look(asyncio.get_running_loop().time())


async def contend(lease: EtcdLease, onlooker: Onlooker, hold_s: float) -> None:
    """Hold the lease for a while, again and again; who loses it leaves its keys to etcd."""
    while True:
        try:
            tenancy = await lease.acquire(20.0)
        except EverstepError:
            continue  # it has waited for long, or can't be told
        onlooker.took(tenancy)
        try:
            await tenancy.publish("host", tenancy.term)
            await asyncio.wait({tenancy.lost}, timeout=hold_s)
        except EverstepError:
            pass  # lost, or about to be
        finally:
            await tenancy.release()


async def watch(onlooker: Onlooker) -> None:
    loop = asyncio.get_running_loop()
    while loop.time() < RUN_S:
        onlooker.look(loop.time())
        await asyncio.sleep(LOOK_S)


async def play(pace: float, fates: Sequence[Sequence[Fate]], hold_s: float) -> Onlooker:
    """All contenders, until the time is over or one of them is wrong."""
    store, onlooker = Etcd(pace), Onlooker()
    clients = [Client(store, cycle(own)) for own in fates]
    clock = asyncio.get_running_loop().time
    tasks: list[asyncio.Task[None]] = [asyncio.ensure_future(watch(onlooker))]
    for client in clients:
        lease = EtcdLease(client, "everstep/one/", TTL_S, clock)
        tasks.append(asyncio.ensure_future(contend(lease, onlooker, hold_s)))
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(c for client in clients for c in client.calls), return_exceptions=True)
    for task in done:
        task.result()
    return onlooker


def in_virtual_time(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(coroutine)


SECONDS = st.one_of(
    st.just(0.0), st.floats(0.0, 0.5), st.floats(0.0, 3.0), st.floats(0.0, 3.0 * TTL_S)
)
FATES = st.builds(
    Fate,
    there_s=st.one_of(SECONDS, SECONDS, st.none()),
    back_s=st.one_of(SECONDS, SECONDS, st.none()),
    stopped=st.booleans(),
)
GOOD = Fate(there_s=0.0, back_s=0.0, stopped=False)
STREAKS = st.lists(
    st.tuples(st.one_of(st.just(GOOD), FATES), st.integers(1, 8)), min_size=1, max_size=12
).map(lambda streaks: [fate for fate, times in streaks for _ in range(times)])
CASES = st.tuples(
    st.floats(0.91, 1.1),
    st.lists(STREAKS, min_size=2, max_size=3),
    st.floats(0.5, 40.0),
)


@settings(max_examples=50)
@given(case=CASES)
def test_at_most_one_holds_at_any_time(case: tuple[float, list[list[Fate]], float]) -> None:
    onlooker = in_virtual_time(play(*case))
    event(f"held {min(len(onlooker.tenancies), 3)} or more times")
    event(f"lost some: {any(t.lost.done() for t in onlooker.tenancies)}")


class FromTheAnswer(Countdown):
    """Counts a renewal from when its answer is there."""

    def extend(self, until_s: float) -> None:
        super().extend(self._clock() + TTL_S)


class Forgetful(Countdown):
    """Believes an answer that comes when it is over."""

    def left_s(self) -> float:
        return max(0.0, self.until_s - self._clock())

    def extend(self, until_s: float) -> None:
        self.until_s = max(self.until_s, until_s)


class NoConditions(Etcd):
    def put_if(self, conditions: Sequence[Unchanged], puts: Sequence[Put]) -> int | None:
        return super().put_if((), puts)


def renewed_late(back_s: float) -> list[Fate]:
    """Of one whose second renewal is answered late, and who is cut off then."""
    late = Fate(there_s=0.0, back_s=back_s, stopped=True)
    cut_off = Fate(there_s=None, back_s=None, stopped=False)
    return [GOOD] * 7 + [late] + [cut_off] * 100


LOST_AFTER_S = 40.0


@pytest.mark.parametrize(
    ("what", "wrong", "fates"),
    [
        ("Countdown", FromTheAnswer, [renewed_late(3.5), [GOOD]]),
        ("Countdown", Forgetful, [renewed_late(5.0), [GOOD]]),
        ("Etcd", NoConditions, [[GOOD], [GOOD]]),
    ],
)
def test_the_onlooker_sees(
    what: str, wrong: type, fates: list[list[Fate]], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_virtual_time(play(1.0, fates, LOST_AFTER_S))
    if what == "Etcd":
        monkeypatch.setitem(globals(), what, wrong)
    else:
        monkeypatch.setattr(etcd, what, wrong)
    with pytest.raises(AssertionError, match="hold"):
        in_virtual_time(play(1.0, fates, LOST_AFTER_S))


def test_where_nothing_fails_it_goes_round() -> None:
    onlooker = in_virtual_time(play(1.0, [[GOOD], [GOOD]], 5.0))
    assert len(onlooker.tenancies) >= RUN_S / (5.0 + 1.0)
    assert not any(t.lost.done() for t in onlooker.tenancies)
