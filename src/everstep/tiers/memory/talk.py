"""What is said about objects in memory: between a rank and the desk of its host, and from desk to
desk, as msgspec structs.

A rank asks over a Unix socket, one question at a time on a connection; `Reserve` and `Open` are
answered with a descriptor beside the message, and what they give is the connection's until
`Release`, or its end. A desk asks another over the network; `ask` pairs an answer with its
question. What a desk is asked by another it answers from its own memory alone.

Objects of up to `INLINE_BYTES` travel in messages, larger ones over the bulk plane."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from everstep.errors import EverstepError
from everstep.snapshot import Count, Digest
from everstep.tiers.store import Denied, Exists, Full, Missing, StoreError
from everstep.wire.bulk import Offer

INLINE_BYTES = 1 << 20
MAX_FRAME_BYTES = 8 << 20
PAGE_ENTRIES = 2000
MAX_SITES = 1 << 16

Key = Annotated[str, Meta(min_length=1, max_length=512)]
Prefix = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=4096)]
Small = Annotated[bytes, Meta(max_length=INLINE_BYTES)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Token = Annotated[str, Meta(max_length=32)]
SiteName = Annotated[str, Meta(max_length=128)]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all that is said."""


class Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A desk: `name`, no other's; the machine that it is on, and what fails with that; where it
    listens for other desks."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    host: Annotated[str, Meta(min_length=1, max_length=256)]
    domain: Annotated[str, Meta(min_length=1, max_length=256)]
    address: Annotated[str, Meta(min_length=1, max_length=64)]
    port: Annotated[int, Meta(ge=1, le=65535)]


class Terms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an object is put. `absent`: only if there is none of its key. `token`: of who puts it:
    the same put may be asked again. `copies`: on so many hosts. `retained`: how many commits of its
    series stay; 0: all. `deadline_s`: seconds that it may take."""

    absent: bool = False
    token: Token = ""
    copies: Annotated[int, Meta(ge=1, le=64)] = 1
    retained: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    deadline_s: Seconds


# ---------------------------------------------------------------- rank -> desk


class Reserve(Message):
    """An area of `nbytes` bytes. Answered by `Reserved` and its descriptor."""

    nbytes: Annotated[int, Meta(ge=1, le=1 << 46)]


class Publish(Message):
    """The area of this connection is the object `key`."""

    key: Key
    terms: Terms


class Put(Message):
    """A small object."""

    key: Key
    data: Small
    terms: Terms


class Open(Message):
    """An object of this host, for reading. Answered by `Opened` with its descriptor, or by `Away`:
    this host does not have it."""

    key: Key


class Release(Message):
    """What this connection holds is not used any more. Answered by `Done`."""


class Introduce(Message):
    """Other desks. Answered by `Done` before they are reached."""

    sites: Annotated[tuple[Site, ...], Meta(max_length=MAX_SITES)]


class About(Message):
    """Who is this? Answered by `This`. `listen`: and have it listen for other hosts."""

    listen: bool = False


class Holders(Message):
    """Which hosts have the object? Answered by `Held`."""

    key: Key
    deadline_s: Seconds


# ---------------------------------------------------------------- rank or desk -> desk


class Get(Message):
    """Bytes of an object, at most `INLINE_BYTES`. `at`: only from that host."""

    key: Key
    start: Count
    end: Count
    deadline_s: Seconds
    at: SiteName = ""


class Lend(Message):
    """Bytes of an object, over the bulk plane. `node`: whose ticket it is; a rank's desk fills it
    in. `digests`: they are wanted too. `beside`: hosts that were tried already."""

    key: Key
    start: Count
    end: Count
    deadline_s: Seconds
    at: SiteName = ""
    beside: Annotated[tuple[SiteName, ...], Meta(max_length=64)] = ()
    node: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)] = 0
    digests: bool = False


class Size(Message):
    """How long is it?"""

    key: Key
    deadline_s: Seconds
    at: SiteName = ""


class Names(Message):
    """The objects below a prefix, behind the key `after`. A desk that asks gets one `Page`, a rank
    all of them, one after the other."""

    prefix: Prefix
    deadline_s: Seconds
    after: Prefix = ""
    at: SiteName = ""


class Delete(Message):
    """Remove an object, wherever it is."""

    key: Key
    deadline_s: Seconds


FromRank = (
    Reserve | Publish | Put | Open | Release | Introduce | About | Holders
    | Get | Lend | Size | Names | Delete
)  # fmt: skip

# ---------------------------------------------------------------- desk -> desk


class Keep(Message):
    """Keep a copy: `data` is it, or `offer` gives it, whose blocks of `block_bytes` have these
    digests. `terms`: as who put it gave them."""

    key: Key
    nbytes: Count
    terms: Terms
    data: Small = b""
    offer: Offer | None = None
    block_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 30)] = 1 << 22
    blocks: tuple[Digest, ...] = ()


FromDesk = Keep | Get | Lend | Size | Names | Delete


class Meet(Message):
    """The first word on a connection between desks: who asks, and whom it takes the other for; ""
    where only the address is known."""

    site: Site
    to: SiteName


class Asked(Message):
    """A question."""

    ask: Count
    what: FromDesk


ToDesk = Meet | Asked

# ---------------------------------------------------------------- answers


class Done(Message):
    """It is so. `notes`: what a person should know."""

    notes: tuple[Text, ...] = ()


Kind = Literal["missing", "exists", "full", "denied", "store", "value"]


class Failed(Message):
    """It could not be done."""

    kind: Kind
    text: Text


class Reserved(Message):
    """With the descriptor of the area."""


class Opened(Message):
    """With the descriptor of the object."""

    nbytes: Count


class Away(Message):
    """This host does not have the object; others may."""


class Data(Message):
    """Bytes of an object."""

    data: Small


class Lent(Message):
    """`site` gives the bytes; `node` may fetch them. `blocks`: digests of the range's blocks, where
    they were wanted. `key`: of the bulk plane, for ranks, who could read it from their desk's
    memory as well."""

    site: SiteName
    node: Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
    offer: Offer
    block_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 30)]
    blocks: tuple[Digest, ...] = ()
    key: bytes = b""


class Sized(Message):
    """An object's bytes."""

    nbytes: Count


class Held(Message):
    """Names of the hosts that have an object, the own one first."""

    sites: Annotated[tuple[SiteName, ...], Meta(max_length=MAX_SITES)]


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """An object that is there."""

    key: Key
    nbytes: Count
    changed_s: float


class Page(Message):
    """Some objects, in order of their keys. `more`: there are others behind them."""

    entries: Annotated[tuple[Listed, ...], Meta(max_length=PAGE_ENTRIES)]
    more: bool


class This(Message):
    """`site`: None where this desk speaks with no other. `peers`: whom it knows; `lost`: those that
    it does not reach."""

    name: SiteName
    site: Site | None
    peers: Annotated[tuple[SiteName, ...], Meta(max_length=MAX_SITES)] = ()
    lost: Annotated[tuple[SiteName, ...], Meta(max_length=MAX_SITES)] = ()
    taken_bytes: Count = 0
    limit_bytes: Count = 0


Answer = Done | Failed | Reserved | Opened | Away | Data | Lent | Sized | Held | Page | This


class Met(Message):
    """The answer to `Meet`: who is here."""

    site: Site


class Answered(Message):
    """The answer to the question `ask`."""

    ask: Count
    what: Answer


FromOther = Met | Answered

_KINDS: dict[Kind, type[Exception]] = {
    "missing": Missing,
    "exists": Exists,
    "full": Full,
    "denied": Denied,
    "value": ValueError,
    "store": StoreError,
}


def failure(error: EverstepError | ValueError | OSError) -> Failed:
    """What is answered where this was raised."""
    kinds = [kind for kind, known in _KINDS.items() if isinstance(error, known)]
    return Failed(kind=kinds[0] if kinds else "store", text=str(error)[:4000])


def error_of(failed: Failed) -> Exception:
    """What is to be raised for an answer."""
    return _KINDS[failed.kind](failed.text)
