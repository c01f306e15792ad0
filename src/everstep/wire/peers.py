"""The messages between agents, as msgspec structs.

An agent connects to the agents that it needs: its guardian, who keeps what belongs to its ranks
alone, and the keepers of its ranks' copies. It asks (`ToPeer`), and is answered (`FromPeer`) on the
same connection; so whoever asked is told by the connection's end that no answer will come, and asks
again. Two agents that need each other have two connections. A connection begins with `Greeting` and
`Greeted`. Every wait for such an answer ends by it, by the loss of the connection, or by a stop of
the generation."""

from __future__ import annotations

from everstep.wire.messages import Keepsake, Message
from everstep.wire.nodes import Secured, Take

# ---------------------------------------------------------------- who asks -> who is asked


class Greeting(Message):
    """Node `node` is here, and takes the other for node `to`: an address may be another's by
    now."""

    node: int
    to: int


class Deposit(Message):
    """Keep this for the next process of `rank`: `incarnation` has said it. `number`: rises with
    each deposit of a node."""

    number: int
    rank: int
    incarnation: int
    message: Keepsake


class Withdrawn(Message):
    """Another node keeps what belongs to `ranks` now; it need not be kept any longer."""

    ranks: tuple[int, ...]


ToPeer = Greeting | Deposit | Withdrawn | Take

# ---------------------------------------------------------------- who is asked -> who asks


class Greeted(Message):
    """Go on."""


class Deposited(Message):
    """All deposits up to `number` are kept."""

    number: int


class Declined(Message):
    """The keeper can't take the copy of `step`; `text` says why. The rank's own is the only one."""

    rank: int
    incarnation: int
    generation: int
    step: int
    text: str


FromPeer = Greeted | Deposited | Secured | Declined
