"""A lease in etcd: the coordinator may come back on any host, and agents find it.

Theory of operation. Two keys of a run: `holder` lives by an etcd lease and says who holds ours,
where it listens and in which term; `term` lives for good and is the newest term. Both are set in
one transaction, which succeeds only if there is no holder and the term is still the one that was
read. So a term is given once, and at most one process has it.

etcd ends its lease when its TTL has passed since it last heard of it. The holder counts from before
it asked, and only to a part of the TTL, since clocks of two hosts may run at different speeds; so
it knows of its end before etcd does. An answer that comes later counts for nothing. A transaction
whose outcome is not known is given up: its lease is revoked, and with it the key that it may have
set. That skips a term, which harms nobody.

Who waits looks twice a second, and has no lease meanwhile. A lost holder is thus succeeded within
the TTL and about a second; a released one within half a second.

It does not know of a holder whose key or lease a person removes before the next renewal: for a
quarter of the TTL two may hold. Agents, who obey the highest term, are the last line.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from everstep.errors import EverstepError, TransientError, UserError
from everstep.launch.etcd_client import EtcdClient, KeyValue, Put, Unchanged, parse_address
from everstep.launch.lease import (
    Countdown,
    Holder,
    LeaseLost,
    Patience,
    Place,
    Waiting,
    now_s,
    unheard,
)

LEASES_PER_TTL: Final = 3
"""TTL of etcd's lease in `lease_s`. A coordinator that is gone is missed only by the next recovery,
so we can be more patient with etcd than with agents."""
_SURE: Final = 0.9  # part of the TTL; a clock that chrony corrects is off by 8 % at most
_RENEWALS_PER_TTL: Final = 4  # a renewal and two repetitions fit into what we are sure of
_AGAIN_S: Final = 0.5  # after a failure; etcd may refuse at once while it starts
_LOOK_EVERY_S: Final = 0.5  # about as exactly as etcd ends leases


class EtcdLease:
    """The lease of one run, kept under `prefix`; a Lease and a Finder. `ttl_s`: what is asked of
    etcd, which may give more."""

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        ttl_s: int,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self._client = client
        self._prefix = prefix.encode()
        self._holder_key = f"{prefix}holder".encode()
        self._term_key = f"{prefix}term".encode()
        self._ttl_s = ttl_s
        self._clock = clock

    @classmethod
    def at(cls, text: str, run_id: str, lease_s: float) -> EtcdLease:
        """The lease of a run at an address like etcd://host:2379. `lease_s`: as in the settings.
        Raises UserError for a text that is no such address."""
        ttl_s = math.ceil(LEASES_PER_TTL * lease_s)
        client = EtcdClient(parse_address(text), ttl_s / _RENEWALS_PER_TTL)
        return cls(client, f"everstep/{run_id}/", ttl_s)

    async def acquire(
        self, wait_s: float, *, known_term: int = -1, on_waiting: Waiting = unheard
    ) -> EtcdTenancy:
        """See Lease. A try under way is not cut short."""
        patience = Patience(wait_s, on_waiting, self._clock)
        while True:
            try:
                got = await self._try(known_term)
            except TransientError as error:
                await patience.failed(error, str(error), _AGAIN_S)
            else:
                if isinstance(got, EtcdTenancy):
                    return got
                await patience.held(got, f"etcd, {self._prefix.decode()}", _LOOK_EVERY_S)

    async def where(self) -> Place | None:
        """See Finder."""
        holder = _decoded(await self._client.read(self._prefix), self._holder_key)
        return None if holder is None else holder.place

    async def _try(self, known_term: int) -> EtcdTenancy | Holder | None:
        """The lease, who has it, or None if somebody was faster."""
        there = await self._client.read(self._prefix)
        if holder := _decoded(there, self._holder_key):
            return holder
        term_kv = there.get(self._term_key)
        last_term = -1 if term_kv is None else _term(term_kv)
        term = max(last_term, known_term) + 1
        holder = Holder.this(term)
        asked_s = self._clock()
        lease, ttl_s = await self._client.grant(self._ttl_s)
        revision = None
        try:
            revision = await self._client.put_if(
                [
                    Unchanged(self._holder_key, 0, "CREATE"),
                    Unchanged(self._term_key, term_kv.mod_revision if term_kv else 0),
                ],
                [
                    Put(self._holder_key, msgspec.json.encode(holder), lease),
                    Put(self._term_key, str(term).encode()),
                ],
            )
        finally:
            if revision is None:
                await _revoked(self._client, lease)
        if revision is None:
            return None
        tenancy = EtcdTenancy(
            self._client,
            self._holder_key,
            holder,
            lease=lease,
            revision=revision,
            ttl_s=ttl_s,
            countdown=Countdown(asked_s + _SURE * ttl_s, self._clock),
            clock=self._clock,
        )
        if not tenancy.holds:
            await tenancy.release()
            raise TransientError(f"etcd gave the lease only after it had ended ({ttl_s} s)")
        return tenancy


class EtcdTenancy:
    """A lease that is held by a key of etcd. See Tenancy."""

    def __init__(
        self,
        client: EtcdClient,
        key: bytes,
        holder: Holder,
        *,
        lease: int,
        revision: int,
        ttl_s: int,
        countdown: Countdown,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._key = key
        self._holder = holder
        self._lease = lease
        # The revision that made the key, which setting it leaves as it is: that may be done twice.
        self._ours = Unchanged(key, revision, "CREATE")
        self._ttl_s = ttl_s
        self._countdown = countdown
        self._clock = clock
        self._renewal = asyncio.get_running_loop().create_task(self._renew())
        self._renewal.add_done_callback(self._on_renewal_over)

    @property
    def term(self) -> int:
        """See Tenancy."""
        return self._holder.term

    @property
    def holds_until_s(self) -> float:
        """See Tenancy."""
        return self._countdown.until_s

    @property
    def holds(self) -> bool:
        """See Tenancy."""
        return self._countdown.left_s() > 0

    @property
    def lost(self) -> asyncio.Future[str]:
        """See Tenancy."""
        return self._countdown.lost

    async def publish(self, host: str, port: int) -> None:
        """See Tenancy. Tries until the lease ends."""
        holder = msgspec.structs.replace(self._holder, host=host, port=port)
        failure = "it has ended"
        while self.holds:
            try:
                revision = await self._client.put_if(
                    [self._ours],
                    [Put(self._key, msgspec.json.encode(holder), self._lease)],
                )
            except TransientError as error:
                failure = str(error)
                await asyncio.sleep(min(_AGAIN_S, self._countdown.left_s()))
                continue
            if revision is None:
                self._countdown.lose("etcd has no such holder any more")
                failure = "somebody else may have it"
            elif self.holds:
                self._holder = holder
                return
        raise LeaseLost(f"the lease of term {self.term} is lost ({failure}); end this coordinator")

    async def release(self) -> None:
        """See Tenancy."""
        self._countdown.close()
        self._renewal.cancel()
        await asyncio.gather(self._renewal, return_exceptions=True)
        await _revoked(self._client, self._lease)

    async def _renew(self) -> None:
        pause_s = self._ttl_s / _RENEWALS_PER_TTL
        while self.holds:
            asked_s = self._clock()
            next_s = asked_s + pause_s
            try:
                ttl_s = await self._renewed()
            except TransientError as error:
                self._countdown.doubt = str(error)
                next_s = asked_s + min(_AGAIN_S, pause_s)
            except UserError as error:
                self._countdown.lose(str(error))
            else:
                if ttl_s == 0:
                    self._countdown.lose("etcd has ended it, or somebody has removed its key")
                self._countdown.extend(asked_s + _SURE * ttl_s)
            await asyncio.sleep(max(0.0, next_s - self._clock()))

    async def _renewed(self) -> int:
        """Seconds for which etcd keeps the lease from when it had the call; 0: we have it no more.

        Most members agree on what is read, so whoever answers has learned of a new leader. Else one
        that was the leader, and was stopped, might renew a lease that the others are about to end.
        """
        kv = (await self._client.read(self._key)).get(self._key)
        if kv is None or kv.create_revision != self._ours.revision:
            return 0
        return await self._client.keep_alive(self._lease)

    def _on_renewal_over(self, renewal: asyncio.Task[None]) -> None:
        if not renewal.cancelled() and (error := renewal.exception()) is not None:
            self._countdown.lose(f"its renewal failed: {error!r}")


async def _revoked(client: EtcdClient, lease: int) -> None:
    with contextlib.suppress(EverstepError):  # then its TTL ends it
        await client.revoke(lease)


def _decoded(there: Mapping[bytes, KeyValue], key: bytes) -> Holder | None:
    if key not in there:
        return None
    try:
        return msgspec.json.decode(there[key].value, type=Holder)
    except msgspec.MsgspecError as error:
        raise _foreign(there[key]) from error


def _term(kv: KeyValue) -> int:
    if not kv.value.isdigit():
        raise _foreign(kv)
    return int(kv.value)


def _foreign(kv: KeyValue) -> UserError:
    return UserError(
        f"etcd: {kv.key.decode()} has a value that no coordinator wrote; choose another --run-id, "
        "or remove the key if the run has ended"
    )
