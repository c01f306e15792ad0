"""An agent's connections to the agents of other nodes.

Theory of operation: each agent listens for its peers (a hub), and makes a link to each that it
needs, when it first has something for it. What it asks goes over its own link; the answer comes
back on that connection, in order. Who connects says first which node it is and which it is looking
for: an address may have become another's, and a node that has left the job is not listened to. A
link that is lost is made again for as long as `Peers` lists the node. Nothing waits here for a
link: what is to be asked, or asked again since it may not have arrived, the caller knows, and is
told when it can be.

The hub outlives the agent's tenures, so that its port can be told before the node has a number.

It does not know what the messages mean, nor whether a node without a connection is lost: that is
the coordinator's to decide. Loop thread only; nothing blocks but `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from everstep.wire.network import Hub, Limits, Link
from everstep.wire.nodes import Peers
from everstep.wire.peers import FromPeer, Greeted, Greeting, ToPeer
from everstep.wire.secret import Secret

_NOBODY: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What an agent is told of its neighbours, on the loop. Each may call any method.

    `on_joined(node)`: this node can ask that one. `on_lost(node, why)`: it can't any more, and what
    was asked since may not have arrived, or is not answered. The two take turns.
    `on_unreached(node, why)`: a connection has been wanted for `Limits.connect_s` and is not there;
    told once, until it is, whoever wants it meanwhile. `on_asked(node, message)`,
    `on_answered(node, message)`: what a node asks of this one, and what it answers.
    `on_refused(address, why)`: of strangers, as Hub has it.
    """

    on_joined: Callable[[int], None]
    on_lost: Callable[[int, str], None]
    on_unreached: Callable[[int, str], None]
    on_asked: Callable[[int, ToPeer], None]
    on_answered: Callable[[int, FromPeer], None]
    on_refused: Callable[[str, str], None]


@dataclass(slots=True, eq=False)
class _Way:
    """To a node. `link`: None for a while after it was turned away. `open`: it has been greeted
    back. `why`: why it is not, as far as known. `retry`: makes the next link. `unreached`: fires
    when it has not been open for too long."""

    node: int
    address: tuple[str, int]
    link: Link[FromPeer] | None = None
    open: bool = False
    why: str = "it has not answered"
    retry: asyncio.TimerHandle | None = None
    unreached: asyncio.TimerHandle | None = None


class Neighbours:
    """Listens on `host`, a numeric address of this host of either family, on the first free port of
    `ports`. A node from `begin` on, which comes before the first `peers`.

    Raises UserError as Hub does.
    """

    def __init__(
        self,
        *,
        host: str,
        ports: Sequence[int],
        secret: Secret,
        events: Events,
        limits: Limits | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._secret = secret
        self._events = events
        self._limits = limits or Limits()
        self._node = _NOBODY
        self._addresses: dict[int, tuple[str, int]] = {}
        self._gone: set[int] = set()  # nodes that were listed once, and are not any more
        self._ways: dict[int, _Way] = {}
        self._callers: dict[int, int] = {}  # who has greeted: peer to node
        self._peers: dict[int, int] = {}  # and node to peer
        self._hub: Hub[ToPeer] = Hub(
            host=host,
            ports=ports,
            secret=secret,
            receives=ToPeer,
            on_joined=lambda *_: None,  # it has to say who it is
            on_message=self._called,
            on_lost=self._caller_lost,
            on_refused=events.on_refused,
            limits=self._limits,
        )
        self.host = host
        """The address at which it listens."""
        self.port = self._hub.port
        """The port on which it listens."""

    # ------------------------------------------------------------ who there is

    def begin(self, node: int) -> None:
        """This is node `node` now, and knows no other yet. Nothing is told of connections that the
        node had under another number."""
        for way in list(self._ways.values()):
            self._close(way)
        for peer in list(self._callers):
            self._hang_up(peer, "it has become another node")
        self._addresses.clear()
        self._gone.clear()
        self._node = node

    def peers(self, order: Peers) -> None:
        """Which other nodes there are, and where. Connections with others end, which is told; the
        one to the guardian is made."""
        listed = {node: where for node, where in order.addresses.items() if node != self._node}
        self._gone = (self._gone | self._addresses.keys()) - listed.keys()
        self._addresses = listed
        for way in list(self._ways.values()):
            if listed.get(way.node) != way.address:
                self._close(way)
                if way.open:
                    self._events.on_lost(way.node, "it has no part in the job any more")
        for node in self._gone & self._peers.keys():
            self._hang_up(self._peers[node], "it has no part in the job any more")
        self.reach(order.guardian)

    def reach(self, node: int) -> bool:
        """Have a link to a node made, if there is none yet. False: the node is not listed."""
        address = self._addresses.get(node)
        if address is None:
            return False
        if node not in self._ways:
            self._ways[node] = way = _Way(node, address)
            self._dial(way)
            self._watch(way)
        return True

    # ------------------------------------------------------------ what is said

    def ask(self, node: int, message: ToPeer) -> bool:
        """Send a message over the link to a node; what is asked of one node arrives in order.
        False: there is none that stands. One is made, and `on_joined` will tell of it, but where
        the node is not listed; or it has just ended, and `on_lost` is about to tell.

        Raises ChannelError when the message is too large.
        """
        if not self.reach(node):
            return False
        way = self._ways[node]
        return way.open and way.link is not None and way.link.send(message)

    def answer(self, node: int, message: FromPeer) -> bool:
        """Send a message over the connection that a node has made to this one. False: there is
        none, which that node knows, or is about to.

        Raises ChannelError when the message is too large.
        """
        peer = self._peers.get(node)
        return peer is not None and self._hub.send(peer, message)

    def unread_bytes(self, node: int) -> int:
        """Bytes that were asked of a node and are not known to be received."""
        way = self._ways.get(node)
        return 0 if way is None or way.link is None else way.link.unread_bytes

    def close(self) -> None:
        """End all connections, and listen no longer; nothing is told after. Blocks for a moment.
        May be called twice."""
        for way in list(self._ways.values()):
            self._close(way)
        self._hub.close("the agent has ended", linger_s=0)

    # ------------------------------------------------------------ links to others

    def _dial(self, way: _Way) -> None:
        way.retry = None
        way.link = Link(
            host=way.address[0],
            port=way.address[1],
            secret=self._secret,
            receives=FromPeer,
            on_joined=lambda: self._greet(way),
            on_message=lambda message: self._answered(way, message),
            on_lost=lambda why: self._lost(way, why),
            on_waiting=lambda why: self._waits(way, why),
            limits=self._limits,
            whom=f"node {way.node}",
        )

    def _close(self, way: _Way) -> None:
        del self._ways[way.node]
        for timer in (way.retry, way.unreached):
            if timer is not None:
                timer.cancel()
        if way.link is not None:
            way.link.close(linger_s=0)

    def _watch(self, way: _Way) -> None:
        """The way is not open: tell if it stays so."""
        way.unreached = self._loop.call_later(self._limits.connect_s, self._unreached, way)

    def _unreached(self, way: _Way) -> None:
        way.unreached = None
        self._events.on_unreached(way.node, way.why)

    def _greet(self, way: _Way) -> None:
        assert way.link is not None
        way.link.send(Greeting(node=self._node, to=way.node))

    def _answered(self, way: _Way, message: FromPeer) -> None:
        if not isinstance(message, Greeted):
            self._events.on_answered(way.node, message)
            return
        if way.unreached is not None:
            way.unreached.cancel()
            way.unreached = None
        way.open = True
        self._events.on_joined(way.node)

    def _lost(self, way: _Way, why: str) -> None:
        way.why = why
        if way.open:
            way.open = False
            self._watch(way)
            self._events.on_lost(way.node, why)
        else:  # turned away: a link tries again at once, and would be again
            assert way.link is not None
            way.link.close(linger_s=0)
            way.link = None
            way.retry = self._loop.call_later(self._limits.max_retry_s, self._dial, way)

    def _waits(self, way: _Way, why: str) -> None:
        way.why = why

    # ------------------------------------------------------------ links of others

    def _called(self, peer: int, message: ToPeer) -> None:
        node = self._callers.get(peer)
        if node is not None and not isinstance(message, Greeting):
            self._events.on_asked(node, message)
        elif node is None and isinstance(message, Greeting):
            self._greeted(peer, message)
        else:
            self._hang_up(peer, "it begins with no greeting, or greets twice")

    def _greeted(self, peer: int, greeting: Greeting) -> None:
        node = greeting.node
        if greeting.to != self._node:
            here = "no node yet" if self._node == _NOBODY else f"node {self._node}"
            self._hang_up(peer, f"node {greeting.to} is not here: this is {here}")
        elif node in self._gone:
            self._hang_up(peer, f"node {node} has no part in the job any more")
        else:
            if node in self._peers:  # its loss is not noticed yet
                self._hang_up(self._peers[node], "it has come again by another connection")
            self._callers[peer] = node
            self._peers[node] = peer
            self._hub.send(peer, Greeted())

    def _hang_up(self, peer: int, why: str) -> None:
        self._caller_lost(peer, why)
        self._hub.drop(peer, why)

    def _caller_lost(self, peer: int, _: str) -> None:
        node = self._callers.pop(peer, None)
        if node is not None:
            del self._peers[node]
