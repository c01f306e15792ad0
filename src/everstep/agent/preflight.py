"""Do the nodes reach one another? Asked before the first worker starts, so that a closed port is
named, and not met as a time-out in the middle of set-up.

Theory of operation. Nodes that join are admitted as they come, but for the one that completes the
job's number: it is held back until every node has tried others (agent/reach.py), all at the same
time. With up to nine nodes each tries all others. With more, each tries those that stand 1, 2, 4,
and so on to 128 places behind it in the row of numbers; so whatever keeps some nodes from all the
rest, in either direction, is met by some pair, and no node tries more than eight. Nodes of one host
and address need not try. If a pair that was tried is closed the job is refused, with the pair's
name: a communicator connects all ranks with all. Who comes later tries, and is tried by, eight of
those who are there, and is refused alone. So it is under a coordinator that takes the
job over, too: nodes that held slots are there, and reach one another. Those that had none are held
back for a moment, until those have come that they are to try; the one before may not have come to
that.

It does not know how one tries, nor what a node does in the job. Loop thread only.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from everstep.wire import nodes
from everstep.wire.plumbing import address_text

MOST: Final = 8
"""Others that a node tries, where there are more."""
_SETTLE_S: Final = 2.0  # for nodes to come to a coordinator that takes over
_ANSWER_S: Final = 2.0  # beyond the time for the tries, until an answer counts as missing
_TOLD: Final = 4  # closed pairs that a refusal names

Pair = tuple[int, int]  # who tries whom


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """A node that has joined. `number`, `host`, `address`: as it registered."""

    number: int
    host: str
    address: str
    listens: nodes.Listens | None

    def __str__(self) -> str:
        return f"node {self.number} (host {self.host}, {self.address})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is wanted of a preflight. `needed`: nodes that the job needs. `ports`: the setting.
    `within_s`: for the tries of a round; 0: all are admitted untried."""

    needed: int
    ports: str
    within_s: float


class Gatekeeper(Protocol):
    """What is done about nodes. No call blocks, nor calls the preflight."""

    def probe(self, number: int, order: nodes.Probe) -> None:
        """Send a node what it is to try."""
        ...

    def admit(self, number: int) -> None:
        """The node takes part in the job."""
        ...

    def refuse(self, number: int, why: str) -> None:
        """The node can't take part; the job goes on."""
        ...

    def refuse_job(self, why: str) -> None:
        """The job can't begin."""
        ...


@dataclass(slots=True)
class _Round:
    """Tries that are under way. `first`: of all nodes, before the job begins. `new`: nodes that
    were held back for it. `unanswered`: those that have yet to answer."""

    first: bool
    new: frozenset[int]
    pairs: set[Pair]
    unanswered: set[int]
    closed: list[tuple[int, nodes.Closed]] = field(default_factory=list)


class Preflight:
    """Of the nodes of one job. `begun`: it runs already, under a coordinator before this.
    `call_later`: as of asyncio's loop."""

    def __init__(
        self,
        gatekeeper: Gatekeeper,
        plan: Plan,
        *,
        begun: bool,
        call_later: Callable[[float, Callable[[], None]], Cancellable],
    ) -> None:
        self._gatekeeper = gatekeeper
        self._needed, self._ports, self._within_s = plan.needed, plan.ports, plan.within_s
        self._begun = begun
        self._settles = begun  # those that the job had are about to come
        self._call_later = call_later
        self._there: dict[int, Station] = {}  # admitted
        self._held: dict[int, Station] = {}
        self._round: _Round | None = None
        self._timer: Cancellable | None = None
        self._closed = False

    def joined(self, station: Station) -> None:
        """A node can fork: it is admitted now, or later, or refused."""
        if self._closed:
            return
        complete = len(self._there) + len(self._held) + 1 >= self._needed
        if self._within_s and (self._begun or complete):
            self._held[station.number] = station
            self._go_on()
        else:
            self._admit(station)

    def known(self, station: Station) -> None:
        """A node has come back that held a slot: it has been admitted."""
        self._there[station.number] = station
        self._go_on()

    def probed(self, number: int, answer: nodes.Probed) -> None:
        """A node has tried what it was to try. Nothing, if it was not asked, or is too late."""
        if self._round is None or number not in self._round.unanswered:
            return
        self._round.unanswered.discard(number)
        self._round.closed += [(number, closed) for closed in answer.closed]
        self._finish_if_over()

    def lost(self, number: int) -> None:
        """A node is gone. Nothing, if it was not there."""
        self._there.pop(number, None)
        self._held.pop(number, None)
        if self._round is not None:
            self._round.unanswered.discard(number)
            self._finish_if_over()

    def close(self) -> None:
        """The job is over: nothing is said any more. May be called twice."""
        self._closed = True
        self._round = None
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------ rounds

    def _go_on(self) -> None:
        """Begin a round, if those that are to be tried are there, or have had their time."""
        there = len(self._there or self._held)  # all are held, where the job had not begun
        if not self._settles or there >= self._needed:
            self._settled()
        elif self._timer is None and self._held:
            self._timer = self._call_later(_SETTLE_S, self._settled)

    def _settled(self) -> None:
        if self._settles and self._timer is not None:
            self._timer.cancel()
        self._settles = False
        self._next_round()

    def _next_round(self) -> None:
        if self._round is not None or not self._held:
            return
        everybody = self._there | self._held
        for station in list(everybody.values()):
            if why := unreachable(station, everybody.values()):
                if not self._begun:
                    self._refuse_job(why)
                    return
                if self._held.pop(station.number, None) is not None:
                    self._gatekeeper.refuse(station.number, why)
        self._begin_round(everybody)
        self._finish_if_over()

    def _begin_round(self, everybody: Mapping[int, Station]) -> None:
        if self._begun:
            there = sorted(self._there)
            pairs = {pair for new in self._held for pair in late_pairs(new, there)}
        else:
            pairs = first_pairs(sorted(everybody))
        pairs = {(a, b) for a, b in pairs if _can_try(everybody[a], everybody[b])}
        asked = {a for a, _ in pairs}
        self._round = _Round(not self._begun, frozenset(self._held), pairs, asked)
        for number in sorted(asked):
            targets = {
                b: listens
                for a, b in sorted(pairs)
                if a == number and (listens := everybody[b].listens) is not None
            }
            self._gatekeeper.probe(number, nodes.Probe(targets=targets, within_s=self._within_s))
        self._timer = self._call_later(self._within_s + _ANSWER_S, self._out_of_time)

    def _out_of_time(self) -> None:
        if self._round is not None:
            self._finish(self._round)

    def _finish_if_over(self) -> None:
        if self._round is not None and not self._round.unanswered:
            self._finish(self._round)

    def _finish(self, done: _Round) -> None:
        self._round = None
        if self._timer is not None:
            self._timer.cancel()
        complaints = self._complaints(done)
        if done.first and complaints:
            self._refuse_job(in_words(list(complaints.values())))
            return
        decided = done.new & self._held.keys()
        # Fewer, where one was lost meanwhile: then all try again when the next one comes.
        self._begun = self._begun or len(self._there) + len(decided) >= self._needed
        for number in sorted(decided):
            station = self._held.pop(number)
            own = [text for pair, text in complaints.items() if number in pair]
            if own:
                self._gatekeeper.refuse(number, in_words(own))
            else:
                self._admit(station)
        self._next_round()

    def _complaints(self, done: _Round) -> dict[Pair, str]:
        """What is wrong, once for each pair."""
        everybody = self._there | self._held
        found: dict[Pair, str] = {}
        for asker, closed in done.closed:
            pair = asker, closed.node
            if pair in done.pairs and pair not in found and everybody.keys() >= set(pair):
                found[pair] = complaint(
                    everybody[asker], everybody[closed.node], closed, self._ports
                )
        for number in sorted(done.unanswered & everybody.keys()):
            found[number, number] = (
                f"{everybody[number]} has not said within {self._within_s + _ANSWER_S:g} s whether "
                "it reaches the others; look at its agent's log"
            )
        return found

    def _refuse_job(self, why: str) -> None:
        self.close()
        self._gatekeeper.refuse_job(why)

    def _admit(self, station: Station) -> None:
        self._there[station.number] = station
        self._gatekeeper.admit(station.number)


class Cancellable(Protocol):
    """A timer."""

    def cancel(self) -> None:
        """It won't call."""
        ...


# ---------------------------------------------------------------- pure


def first_pairs(numbers: Sequence[int]) -> set[Pair]:
    """Who tries whom among nodes that are all new to each other."""
    count = len(numbers)
    steps: Iterable[int] = range(1, count)
    if count > MOST + 1:
        steps = (1 << power for power in range(MOST) if 1 << power < count)
    return {
        (number, numbers[(place + step) % count])
        for step in steps
        for place, number in enumerate(numbers)
    }


def late_pairs(new: int, there: Sequence[int]) -> set[Pair]:
    """Who tries whom when one comes to others: in both directions, evenly among them."""
    count = min(MOST, len(there))
    some = {there[place * len(there) // count] for place in range(count)}
    return {pair for other in some for pair in ((new, other), (other, new))}


def _can_try(asker: Station, target: Station) -> bool:
    """Not those of one host; nor one that does not say how."""
    if asker.listens is None or target.listens is None:
        return False
    return _place(asker) != _place(target)


def _place(station: Station) -> tuple[str, str]:
    return station.listens.network if station.listens is not None else "", station.address


def unreachable(station: Station, all_: Iterable[Station]) -> str:
    """Why others can't reach a node whatever the network does: at its address every host means
    itself, and `all_` are not on its own. Else ""."""
    if station.listens is None or not ipaddress.ip_address(station.address).is_loopback:
        return ""
    if all(_place(other)[0] in ("", station.listens.network) for other in all_):
        return ""
    return (
        f"{station} listens at an address that only its own host can reach, since the "
        "coordinator's name leads there on it (see its /etc/hosts); give the coordinator's "
        "address, or name the interface with --interface"
    )


def complaint(asker: Station, target: Station, closed: nodes.Closed, ports: str) -> str:
    """A closed pair in words, and what to do."""
    where = address_text(closed.host, closed.port)
    if closed.chosen and target.listens is not None:
        first, last = target.listens.any_ports
        advice = (
            f"gloo and nccl take such ports: open {first}-{last} (net.ipv4.ip_local_port_range of "
            f"host {target.host}) between them, or use --interface"
        )
    elif ports:
        advice = f"open the port range {ports} between them, or use --interface"
    else:
        advice = "give a range with --ports and open it between them, or use --interface"
    return (
        f"{asker} can't reach node {target.number} (host {target.host}) at {where}: {closed.why}; "
        f"{advice}"
    )


def in_words(complaints: Sequence[str]) -> str:
    """Several complaints as one."""
    more = len(complaints) - _TOLD
    rest = f"; and {more} more pairs are closed" if more > 0 else ""
    return "; ".join(complaints[:_TOLD]) + rest
