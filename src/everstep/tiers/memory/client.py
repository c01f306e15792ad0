"""A rank's way to its host's memory tier: a store.

Theory of operation. Questions go to the desk of the host over a Unix socket. Large objects are not
sent: the rank writes into shared memory that the desk has given it, and reads from it; what another
host has it fetches itself, over the bulk plane, straight to where it is wanted. An object that is
put from memory that was reserved is not copied: the desk takes the memory as it is.

It does not know other hosts but by name. Any thread; all calls block.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from everstep.errors import EverstepError, UserError
from everstep.snapshot import BLOCK_BYTES, SnapshotError, block_spans
from everstep.tiers import names
from everstep.tiers.memory import talk
from everstep.tiers.memory.ownership import PREFIX
from everstep.tiers.memory.plane import LARGE_BYTES
from everstep.tiers.memory.pool import Pool, Reader
from everstep.tiers.memory.reservation import Reservation
from everstep.tiers.memory.vault import check_range
from everstep.tiers.memory.wire import SOCKET, VARIABLE, Gone, Wire
from everstep.tiers.store import Entry, Missing, Stopped, StoreError
from everstep.wire.bulk import STREAMS, Caller, Corrupt, Sink, fetch

_INLINE = talk.INLINE_BYTES
_FETCH_BYTES = 8 << 30  # of one loan: its digests fit a message
__all__ = ["VARIABLE", "MemoryStore", "Reservation", "connect"]

_ABOUT_S = 10.0
_PIECE_BYTES = 512 << 10  # fits a core's cache, and is worth letting go of the interpreter


def connect(
    where: str | None = None,
    *,
    copies: int = 2,
    retained: int = 0,
    patience_s: float = 10.0,
    shm_dir: Path = Path("/dev/shm"),
) -> MemoryStore:
    """The store in the memory of this host and its neighbours. `where`: the desk's socket; None:
    that of the environment, or of the one agent of this user that keeps checkpoints here.
    `copies`, `retained`: as `TierSettings` has `copies` and `memory_retained`; 0: nothing goes by
    itself. Blocks. Raises UserError where there is no agent, or there are several."""
    where = where or os.environ.get(VARIABLE) or _only_socket(shm_dir)
    store = MemoryStore(Pool(where, patience_s), copies=copies, retained=retained)
    try:
        store.about()
    except StoreError as error:
        store.close()
        raise UserError(
            f"no agent keeps checkpoints at {where}: {error}; start `everstep agent` on this host, "
            "or leave memory_every at 0"
        ) from error
    return store


def _only_socket(shm_dir: Path) -> str:
    found = [
        path
        for path in sorted(shm_dir.glob(f"{PREFIX}*/{SOCKET}"))
        if path.parent.stat().st_uid == os.geteuid() and _is_served(path)
    ]
    if len(found) != 1:
        seen = ", ".join(map(str, found)) or f"none of this user in {shm_dir}"
        raise UserError(
            f"which agent keeps checkpoints in memory? Found are {seen}; start `everstep agent` on "
            f"this host, or name its socket in {VARIABLE}"
        )
    return str(found[0])


def _is_served(path: Path) -> bool:
    try:
        Wire(str(path)).close()
    except (Gone, StoreError):
        return False  # its agent is dead
    return True


class MemoryStore:
    """A `Store` of the memory of hosts. Made by `connect`. `at`: only what that host has is read;
    such a view ends with the store that made it."""

    def __init__(self, pool: Pool, *, copies: int = 2, retained: int = 0, at: str = "") -> None:
        self._pool = pool
        self._copies = copies
        self._retained = retained
        self._at = at
        self._lock = threading.Lock()
        self._reserved: list[Reservation] = []
        self._notes: list[str] = []

    # ------------------------------------------------------------ beyond a store

    @property
    def where(self) -> str:
        """As Store has it."""
        return f"memory of {self._at or socket.gethostname()}" + ("" if self._at else " and others")

    def about(self, *, deadline_s: float = _ABOUT_S) -> talk.This:
        """Who the desk is, whom it knows, how much it has."""
        return self._pool.ask(talk.About(), talk.This, deadline_s)

    def card(self) -> str:
        """What other hosts must know of this one, for `introduce`; "" where it has no secret, and
        so speaks with none. The first call has the desk listen."""
        site = self._pool.ask(talk.About(listen=True), talk.This, _ABOUT_S).site
        return "" if site is None else msgspec.json.encode(site).decode()

    def introduce(self, cards: Sequence[str], *, deadline_s: float = _ABOUT_S) -> None:
        """Tell the desk of the other hosts, by their cards. Raises ValueError for what is none."""
        try:
            sites = tuple(msgspec.json.decode(card, type=talk.Site) for card in set(cards) if card)
        except msgspec.MsgspecError as error:
            raise ValueError(f"this is no card of a host: {error}") from error
        self._pool.ask(talk.Introduce(sites=sites), talk.Done, deadline_s)

    def notes(self) -> list[str]:
        """What a person should know since the last call."""
        with self._lock:
            notes, self._notes = self._notes, []
        return notes

    def reserve(self, nbytes: int, *, deadline_s: float) -> Reservation:
        """Memory for an object of `nbytes` bytes, all of it mapped. Blocks for clearing it where it
        is new. Raises Full with the numbers, StoreError."""
        self._pool.let_go()
        wire, _, fd = self._pool.hold(talk.Reserve(nbytes=nbytes), talk.Reserved, deadline_s)
        try:
            reservation = Reservation(wire, fd, nbytes)
        except BaseException:
            wire.close()
            raise
        reservation.fault_in()
        with self._lock:
            self._reserved = [each for each in self._reserved if each.held]
            self._reserved.append(reservation)
        return reservation

    def copies(self, key: str, *, deadline_s: float) -> Sequence[MemoryStore]:
        """A view of each host that has the object, this one first: to read it from there."""
        names.check_key(key)
        held = self._pool.ask(talk.Holders(key=key, deadline_s=deadline_s), talk.Held, deadline_s)
        return [MemoryStore(self._pool, copies=1, at=site) for site in held.sites]

    def get_checked(
        self,
        key: str,
        area: memoryview,
        *,
        start: int,
        block_bytes: int,
        digests: Sequence[str],
        deadline_s: float,
    ) -> None:
        """As `get_into`, and each block of `area` is compared with its digest (XXH3, 128 bits) as
        it comes. Raises SnapshotError when it stays wrong."""
        reader = self._open(key, deadline_s)
        if reader is None:
            try:
                self._fetch(key, area, start, deadline_s, block_bytes, digests)
            except Corrupt as error:
                raise SnapshotError(f"{key}: {error}") from error
            return
        with self._pool.reading(key, reader):
            check_range(key, reader.nbytes, start, start + area.nbytes)
            spans = block_spans(area.nbytes, block_bytes)
            for (first, last), expected in zip(spans, digests, strict=True):
                with area[first:last] as block:
                    if _fill_and_digest(reader.fd, block, start + first, key) != expected:
                        raise SnapshotError(
                            f"{key} is corrupt in bytes {start + first} to {start + last} in the "
                            "memory of this host; take another copy of it"
                        )

    # ------------------------------------------------------------ a store

    def put(
        self,
        key: str,
        pieces: Sequence[memoryview],
        *,
        absent: bool = False,
        deadline_s: float,
        stop: threading.Event | None = None,
    ) -> None:
        """As Store has it; to as many hosts as copies are wanted and can be had: `notes` says of
        fewer."""
        names.check_key(key)
        if stop is not None and stop.is_set():
            raise Stopped(f"{key}: the save was given up")
        self._pool.let_go()
        terms = talk.Terms(
            absent=absent,
            token=secrets.token_hex(8),
            copies=self._copies,
            retained=self._retained,
            deadline_s=deadline_s,
        )
        nbytes = sum(piece.nbytes for piece in pieces)
        reservation = self._reservation(pieces)
        if reservation is not None:
            try:
                self._publish(reservation, key, terms)
                return
            except Gone:
                pass  # the agent has died meanwhile: its successor gets a copy
        if nbytes <= _INLINE:
            data = b"".join(pieces)
            done = self._pool.ask(talk.Put(key=key, data=data, terms=terms), talk.Done, deadline_s)
            self._note(done)
            return
        end_s = time.monotonic() + deadline_s
        while True:
            left_s = max(end_s - time.monotonic(), 0.001)
            with self.reserve(nbytes, deadline_s=left_s) as fresh:
                _gather(fresh.area, pieces)
                try:
                    self._publish(fresh, key, terms)
                    return
                except Gone as error:
                    if time.monotonic() >= end_s:
                        raise StoreError(f"{key}: {error}") from error

    def get(self, key: str, *, start: int = 0, end: int | None = None, deadline_s: float) -> bytes:
        """As Store has it."""
        if end is None:
            end = self.size(key, deadline_s=deadline_s)
        if start > end:
            raise StoreError(f"{key}: bytes {start} to {end} were asked for")
        data = bytearray(end - start)
        with memoryview(data) as area:
            self.get_into(key, area, start=start, deadline_s=deadline_s)
        return bytes(data)

    def get_into(self, key: str, area: memoryview, *, start: int = 0, deadline_s: float) -> None:
        """As Store has it."""
        reader = self._open(key, deadline_s)
        if reader is None:
            self._fetch(key, area, start, deadline_s)
            return
        with self._pool.reading(key, reader):
            check_range(key, reader.nbytes, start, start + area.nbytes)
            _fill(reader.fd, area, start, key)

    def size(self, key: str, *, deadline_s: float) -> int:
        """As Store has it."""
        names.check_key(key)
        asked = talk.Size(key=key, at=self._at, deadline_s=deadline_s)
        return self._pool.ask(asked, talk.Sized, deadline_s).nbytes

    def list(self, prefix: str, *, deadline_s: float) -> Iterator[Entry]:
        """As Store has it: of all hosts that are reached."""
        names.check_prefix(prefix)
        asked = talk.Names(prefix=prefix, at=self._at, deadline_s=deadline_s)
        self._pool.let_go()
        return iter(
            [
                Entry(key=each.key, nbytes=each.nbytes, changed_s=each.changed_s)
                for each in self._pool.pages(asked, deadline_s)
            ]
        )

    def delete(self, key: str, *, deadline_s: float) -> None:
        """As Store has it: on all hosts that are reached."""
        names.check_key(key)
        self._pool.let_go()
        self._pool.ask(talk.Delete(key=key, deadline_s=deadline_s), talk.Done, deadline_s)

    def sweep(self, *, older_than_s: float, deadline_s: float) -> int:
        """As Store has it. What a dead rank was writing goes when it dies."""
        return 0

    def close(self) -> None:
        """As Store has it; reservations too."""
        if self._at:
            return
        self._pool.close()
        with self._lock:
            reserved, self._reserved = self._reserved, []
        for reservation in reserved:
            reservation.close()

    # ------------------------------------------------------------ reading

    def _open(self, key: str, deadline_s: float) -> Reader | None:
        """This host's object, with one more user; None where another one is to be asked."""
        names.check_key(key)
        return None if self._at else self._pool.open(key, deadline_s)

    def _fetch(
        self,
        key: str,
        area: memoryview,
        start: int,
        deadline_s: float,
        block_bytes: int = BLOCK_BYTES,
        digests: Sequence[str] | None = None,
    ) -> None:
        """Fill `area` from another host."""
        if digests is None and area.nbytes <= _INLINE:
            end = start + area.nbytes
            get = talk.Get(key=key, start=start, end=end, at=self._at, deadline_s=deadline_s)
            area[:] = self._pool.ask(get, talk.Data, deadline_s).data
            return
        step = _FETCH_BYTES // block_bytes * block_bytes
        for first in range(0, area.nbytes, step):
            last = min(first + step, area.nbytes)
            blocks = None
            if digests is not None:
                blocks = digests[first // block_bytes : -(-last // block_bytes)]
            with area[first:last] as part:
                self._fetch_part(key, part, start + first, deadline_s, block_bytes, blocks)

    def _fetch_part(
        self,
        key: str,
        area: memoryview,
        start: int,
        deadline_s: float,
        block_bytes: int,
        digests: Sequence[str] | None,
    ) -> None:
        """From one host after the other, until one has given it right."""
        end_s = time.monotonic() + deadline_s
        tried: list[str] = []
        failure: EverstepError | None = None
        while True:
            left_s = max(end_s - time.monotonic(), 0.001)
            asked = talk.Lend(
                key=key,
                start=start,
                end=start + area.nbytes,
                at=self._at,
                beside=tuple(tried),
                digests=digests is None,
                deadline_s=left_s,
            )
            try:
                lent = self._pool.ask(asked, talk.Lent, left_s)
            except Missing as error:
                if failure is None:
                    raise
                if isinstance(failure, Corrupt):
                    raise failure from error
                raise StoreError(f"{key}: {failure}") from error
            if digests is None:
                sink = Sink(area, lent.block_bytes, lent.blocks)
            else:
                sink = Sink(area, block_bytes, digests)
            streams = STREAMS if area.nbytes >= LARGE_BYTES else 1
            caller = Caller(key=lent.key, node=lent.node)
            try:
                fetch(sink, [lent.offer], caller, deadline_s=left_s, streams=streams)
                return
            except EverstepError as error:
                failure = failure if isinstance(failure, Corrupt) else error
                tried.append(lent.site)
                if self._at or time.monotonic() >= end_s:
                    if isinstance(failure, Corrupt):
                        raise failure from error
                    raise StoreError(f"{key} from {lent.site}: {error}") from error

    # ------------------------------------------------------------ writing

    def _reservation(self, pieces: Sequence[memoryview]) -> Reservation | None:
        """The area that is put, if it is one."""
        if len(pieces) != 1:
            return None
        with self._lock:
            found = [each for each in self._reserved if each.is_of(pieces[0])]
        return found[0] if found and not found[0].published else None

    def _publish(self, reservation: Reservation, key: str, terms: talk.Terms) -> None:
        asked = talk.Publish(key=key, terms=terms)
        done, _ = reservation.wire.ask(asked, talk.Done, terms.deadline_s)
        reservation.published = True
        self._note(done)

    def _note(self, done: talk.Done) -> None:
        with self._lock:
            self._notes += done.notes


def _gather(area: memoryview, pieces: Sequence[memoryview]) -> None:
    at = 0
    for piece in pieces:
        if piece.nbytes:
            with piece.cast("B") as raw:
                area[at : at + raw.nbytes] = raw
            at += piece.nbytes


def _fill_and_digest(fd: int, area: memoryview, start: int, key: str) -> str:
    """Fill `area`, and its digest: of pieces that are still in the core's cache."""
    made = xxhash.xxh3_128()
    for first in range(0, area.nbytes, _PIECE_BYTES):
        with area[first : first + _PIECE_BYTES] as piece:
            _fill(fd, piece, start + first, key)
            made.update(piece)
    return made.hexdigest()


def _fill(fd: int, area: memoryview, start: int, key: str) -> None:
    have = 0
    while have < area.nbytes:
        with area[have:] as rest:
            count = os.preadv(fd, [rest], start + have)
        if not count:
            raise StoreError(f"{key} ends after {start + have} bytes")
        have += count
