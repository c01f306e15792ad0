"""What an agent knows of its workers, for a coordinator that begins anew.

Theory of operation: the agent sees all that is said to and by its workers. Of that it keeps, by
worker, what makes up its place in the job: in which world it is, what it has committed, whether it
runs in that world or was stopped in it. What ranks say that must be written down (commits with
their scalars and records, results, notes, faults that fired) is kept until the coordinator says
that it is: it may be lost with the coordinator, or said while there is none. All times stay on
this host's clock: the next coordinator's is not known yet.

It does not know the connection, nor what a coordinator makes of it. Pure state; loop thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from everstep.types import HeldCopy
from everstep.wire import messages, nodes
from everstep.wire.messages import FromWorker, ToWorker, WorkerSpec

Member = tuple[int, int]  # rank and incarnation
_MUST_BE_WRITTEN = (
    messages.Commit,
    messages.Close,
    messages.Finish,
    messages.Fired,
    messages.Note,
)
# Of a rank; a day without a coordinator must not cost the host's memory. Half an hour of thirty
# steps a second, with some scalars each.
_MOST_UNWRITTEN_BYTES: Final = 32 << 20
_OVERHEAD_BYTES: Final = 512  # of a message in memory, beside its own
_PART_BYTES: Final = 4 << 20  # of a message to the coordinator, which may have sixteen times that
_encoder = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class _Life:
    """One living worker. `stopped`: the newest generation that it was told to stop, or that failed
    for it. `led_to`: the position to which its newest regroup leads. `fault`: its word of a failure
    in its present world. `addresses`: those of it, by group, for which it has not got the others'
    yet. `base`: the step of the checkpoint at which it began."""

    generation: int
    joining: bool
    settled: bool = False
    stopped: int = -1
    position: tuple[int, int] = (0, 0)
    led_to: tuple[int, int] = (0, 0)
    fault: messages.Fault | None = None
    addresses: dict[str, messages.Address] = field(default_factory=dict)
    left_at: int | None = None
    finished: bool = False
    closed: bool = False
    bye: bool = False
    base: int = 0


@dataclass(slots=True)
class _Unwritten:
    """What one rank said that is not known to be written, each with its size. `dropped`: how many
    of these were let go."""

    said: deque[tuple[int, nodes.Said]] = field(default_factory=deque)
    nbytes: int = 0
    dropped: int = 0

    def pop(self) -> None:
        """Forget the oldest."""
        nbytes, _ = self.said.popleft()
        self.nbytes -= nbytes


class Memoirs:
    """Of all workers of one node."""

    def __init__(self) -> None:
        self._lives: dict[Member, _Life] = {}
        self._ended: dict[int, nodes.Died] = {}
        self._unwritten: dict[int, _Unwritten] = {}
        self._ranks: set[int] = set()
        self._saved: dict[str, int] = {}  # by tier, the newest checkpoint
        self._slot = -1

    # ------------------------------------------------------------ what happens

    def launched(self, spec: WorkerSpec) -> None:
        """A worker is to be forked."""
        self._ranks.add(spec.rank)
        self._slot = spec.rank // spec.local_world_size
        self._ended.pop(spec.rank, None)
        life = _Life(generation=spec.generation, joining=spec.joiner)
        self._lives[spec.rank, spec.incarnation] = life

    def told(self, rank: int, incarnation: int, message: ToWorker) -> None:
        """A worker is sent a message."""
        life = self._lives.get((rank, incarnation))
        if life is None:
            return
        match message:
            case messages.Go() if not life.joining:
                life.settled = True
            case messages.Stop(generation=generation):
                self._stop(life, generation)
            case messages.Regroup(generation=generation):
                life.generation, life.joining, life.settled = generation, False, False
                life.led_to, life.fault = (message.step, message.sections), None
                life.addresses.clear()
                life.left_at = life.left_at if life.closed else None
            case messages.Addresses(group=group):
                life.addresses.pop(group, None)
            case messages.Closed():
                life.closed = True
            case messages.Bye():
                life.bye = True

    def said(self, rank: int, incarnation: int, message: FromWorker) -> None:
        """A worker said something."""
        life = self._lives.get((rank, incarnation))
        if life is None:
            return
        match message:
            case messages.Loaded(step=step, ok=True):
                life.base, life.position = step, (step, 0)
            case messages.Saved(step=step, tier=tier):
                self._saved[tier] = max(step, self._saved.get(tier, 0))
            case messages.Commit(step=step, sections=sections):
                life.position = (step, sections)
            case messages.Fault(generation=generation):
                self._stop(life, generation)
                life.fault = message if generation == life.generation else life.fault
            case messages.Address(group=group) if message.generation == life.generation:
                life.addresses[group] = message
            case messages.Park(generation=generation):
                self._stop(life, generation)
            case messages.Receipt(generation=generation, ok=True):
                if generation == life.generation:
                    life.position = life.led_to
                    life.settled = life.stopped < generation
            case messages.Close(step=step):
                life.position = max(life.position, (step, 0))
                life.left_at = step
            case messages.Finish():
                life.finished = True
        if isinstance(message, messages.Park) and not message.holding.torn:
            life.position = max(life.position, message.holding.position)
        if isinstance(message, _MUST_BE_WRITTEN):
            self._keep(nodes.Said(rank=rank, incarnation=incarnation, message=message))

    def died(self, died: nodes.Died) -> None:
        """A worker is gone."""
        life = self._lives.get((died.rank, died.incarnation))
        if life is not None and not life.bye:  # else that was the job's end, and stays known
            del self._lives[died.rank, died.incarnation]
            self._ended[died.rank] = died

    def written(self, step: int) -> None:
        """All commits up to `step`, and what was said before them, are written."""
        for unwritten in self._unwritten.values():
            said = unwritten.said
            done = [n for n, (_, each) in enumerate(said) if _is_commit_up_to(each, step)]
            for _ in range(done[-1] + 1 if done else 0):
                unwritten.pop()

    @staticmethod
    def _stop(life: _Life, generation: int) -> None:
        life.stopped = max(life.stopped, generation)
        life.settled = life.settled and generation < life.generation

    def _keep(self, said: nodes.Said) -> None:
        unwritten = self._unwritten.setdefault(said.rank, _Unwritten())
        nbytes = len(_encoder.encode(said)) + _OVERHEAD_BYTES
        unwritten.said.append((nbytes, said))
        unwritten.nbytes += nbytes
        while unwritten.nbytes > _MOST_UNWRITTEN_BYTES:
            unwritten.pop()
            unwritten.dropped += 1

    # ------------------------------------------------------------ what is asked

    @property
    def disturbed(self) -> bool:
        """Some rank of this node has no worker in its loop: the job can't go on by itself."""
        held = {rank for rank, _ in self._lives}
        return held != self._ranks or not all(life.settled for life in self._lives.values())

    def settled(self) -> list[tuple[Member, int]]:
        """The workers that are in their loops, or wait behind them, and the generation of the world
        that they are in."""
        return [
            (member, life.generation)
            for member, life in self._lives.items()
            if life.settled and not life.finished
        ]

    def unanswered(self) -> Iterator[nodes.Said]:
        """What workers have said in the worlds in which they still are, and wait for what comes of
        it: the failures that they have told of, and the addresses of those who build a group."""
        for (rank, incarnation), life in sorted(self._lives.items()):
            asked: list[FromWorker] = [*life.addresses.values()]
            for message in [*asked, life.fault] if life.fault is not None else asked:
                yield nodes.Said(rank=rank, incarnation=incarnation, message=message)

    def report(
        self,
        *,
        term: int,
        node: int,
        peers: tuple[int, ...],
        copies: Iterable[HeldCopy],
        listens: nodes.Listens | None = None,
        run_id: str = "",
    ) -> nodes.Report:
        """All of it, but for what may not be written. The arguments are as nodes.Report has
        them."""
        return nodes.Report(
            term=term,
            node=node,
            slot=self._slot,
            peers=peers,
            members=tuple(
                nodes.MemberReport(
                    rank=rank,
                    incarnation=incarnation,
                    generation=life.generation,
                    joining=life.joining,
                    settled=life.settled,
                    stopped=life.stopped >= life.generation,
                    step=life.position[0],
                    sections=life.position[1],
                    left_at=life.left_at,
                    finished=life.finished,
                    closed=life.closed,
                    bye=life.bye,
                    base=life.base,
                )
                for (rank, incarnation), life in sorted(self._lives.items())
            ),
            ended=tuple(self._ended[rank] for rank in sorted(self._ended)),
            copies=tuple(copies),
            saved=dict(self._saved),
            listens=listens,
            run_id=run_id,
        )

    def unwritten(self) -> Iterator[nodes.Unwritten]:
        """What may not be written, in parts that a message can hold."""
        part: list[nodes.Said] = []
        part_bytes = 0
        for rank in sorted(self._unwritten):
            for nbytes, said in self._said(rank):
                if part and part_bytes + nbytes > _PART_BYTES:
                    yield nodes.Unwritten(said=tuple(part))
                    part, part_bytes = [], 0
                part.append(said)
                part_bytes += nbytes
        if part:
            yield nodes.Unwritten(said=tuple(part))

    def _said(self, rank: int) -> Iterator[tuple[int, nodes.Said]]:
        unwritten = self._unwritten[rank]
        yield from unwritten.said
        if unwritten.dropped:
            text = (
                f"{unwritten.dropped} messages of rank {rank} are lost: there was no coordinator "
                "for so long that the oldest had to be let go"
            )
            note = messages.Note(key=f"unwritten-{rank}", text=text)
            yield _OVERHEAD_BYTES, nodes.Said(rank=rank, incarnation=0, message=note)


def _is_commit_up_to(said: nodes.Said, step: int) -> bool:
    message = said.message
    return isinstance(message, messages.Commit) and message.step <= step
