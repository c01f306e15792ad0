"""The agent's part in copies: gives its ranks room for them, has another node keep them as well,
and finds them again.

Theory of operation: a worker asks for an area, writes its state into it, and says so with the
manifest; the copy is complete when the manifest lies beside it on the shelf (shelf.py). Where the
rank has a keeper, the copy is then offered to that node, which fetches it and says so. When the
worker hears that its copy is kept, it does so as it asked: after that, or before. A new process of
a rank asks for the copy of a step: it is on this shelf, or some other node is asked to lend it.
What is complete here is told to the owner, before any worker hears of it, so that no rank can
commit a step of which the coordinator does not know the copies. The shelf is made when the first
copy needs it, or when an agent of the same job has left one: what is complete there is told, kept
until the coordinator has judged it, and then as any other copy is.

Keepers are named anew at the beginning of each generation, and all that is said of copies bears its
number. What was on its way in the one before is of an attempt that was stopped: it is ended, nobody
waits for it any more, and nothing of it is told. A keeper fetches a rank's copies one after the
other; those that the rank does not need any more are ended as well. What is lent can't be written
to as long as it is.

Memory is taken on a thread: that takes a second for some gigabytes, and the node's lease is less.

Does not know: who needs copies, who keeps them, and which step is gone on from. Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep import snapshot
from everstep.agent.shelf import Area, Shelf, create_locked, is_left, refusal
from everstep.agent.shipping import Shipping
from everstep.errors import EverstepError
from everstep.shm.budget import measure
from everstep.snapshot import Manifest, SnapshotError
from everstep.types import HeldCopy, Stamp
from everstep.wire import nodes
from everstep.wire.bulk import Offer
from everstep.wire.messages import Kept, Recall, Recalled, Safe, Shelve, Shelved, ToWorker
from everstep.wire.messages import Shelf as Place

Member = tuple[int, int]  # rank and incarnation
Send = Callable[[ToWorker], None]
CopyMessage = Shelve | Shelved | Recall

_TROUBLE = (EverstepError, OSError, ValueError)  # with one copy: no reason for the node to end


@dataclass(slots=True)
class _Waiting:
    """Who waits for what. `safe`: by rank, incarnation and step of a copy that is under way to its
    keeper, how to say that it has come. `recalled`: by member, the step whose copy is sought, and
    how to answer."""

    safe: dict[tuple[int, int, int], Callable[[], None]] = field(default_factory=dict)
    recalled: dict[Member, tuple[int, Callable[[Recalled], None]]] = field(default_factory=dict)


@dataclass(slots=True)
class _Incoming:
    """Of one rank. `wanted`: by step, what is to be fetched. `filling`: the area into which it is,
    now, and of which step. `turn`: one after the other."""

    wanted: dict[int, nodes.Take] = field(default_factory=dict)
    filling: tuple[int, Area] | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Copies:
    """The copies of one node. `tell`: to the owner. `shipping`: None where there is no other
    node."""

    def __init__(
        self,
        shm_dir: Path,
        run_id: str,
        node: int,
        shipping: Shipping | None,
        tell: Callable[[nodes.CopyNews], None],
    ) -> None:
        self._shm_dir, self._run_id, self._node = shm_dir, run_id, node
        self._shipping, self._tell = shipping, tell
        self._shelf: Shelf | None = None
        self._generation = 0
        self._keepers: Mapping[int, int] = {}
        self._needed: tuple[int, ...] = ()  # the steps that somebody may go back to
        self._begun: dict[Member, tuple[Area, Shelve]] = {}
        self._waiting = _Waiting()
        self._incoming: dict[int, _Incoming] = {}  # by rank
        self._lent: dict[int, list[tuple[int, Offer]]] = {}  # by rank, with the step
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ what workers say

    def handle(self, rank: int, incarnation: int, message: CopyMessage, send: Send) -> None:
        """A worker said something about its copy; `send` answers it. Raises SnapshotError for what
        is none."""
        match message:
            case Shelve():
                self._give_room((rank, incarnation), message, send)
            case Shelved():
                self._keep((rank, incarnation), message, send)
            case Recall():
                self._recall((rank, incarnation), message, send)

    def buried(self, rank: int, incarnation: int) -> None:
        """The worker is dead: what it had begun is given up. What it had completed goes its way."""
        self._waiting.recalled.pop((rank, incarnation), None)
        for key in [key for key in self._waiting.safe if key[:2] == (rank, incarnation)]:
            del self._waiting.safe[key]
        begun = self._begun.pop((rank, incarnation), None)
        if begun is not None and self._shelf is not None:
            self._shelf.abandon(begun[0])

    def adopt(self) -> tuple[HeldCopy, ...]:
        """Take over what an agent of this job has left in this host's memory. Once, before anything
        else. Returns the copies. Raises UserError where the directory is another user's."""
        if not is_left(self._shm_dir, self._run_id):
            return ()
        return self._open_shelf().adopt()

    def held(self) -> tuple[HeldCopy, ...]:
        """The complete copies in this node's memory."""
        return () if self._shelf is None else self._shelf.held()

    async def close(self, *, keep: bool = False) -> None:
        """End all transfers and remove all copies; but with `keep` those that are complete stay for
        whoever adopts them."""
        for rank in self._incoming:
            self._end_incoming(rank)
        if self._shipping is not None:
            self._shipping.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # none waits for others
        await asyncio.sleep(0)  # loans that ended just now give their areas back
        if self._shelf is not None:
            self._shelf.close(keep=keep)

    def _give_room(self, member: Member, request: Shelve, send: Send) -> None:
        rank, incarnation = member
        self._end_incoming(rank)
        self._withdraw(rank, request.keep)
        try:
            area = self._begin(rank, incarnation, request.nbytes, request.keep)
        except _TROUBLE as error:
            send(Place(turn=request.turn, refusal=str(error)))
            return
        self._begun[member] = area, request
        if area.fd >= 0:
            send(Place(turn=request.turn, path=str(area.path)))
        else:
            self._go(self._furnish_for(member, area, request.turn, send))

    async def _furnish_for(self, member: Member, area: Area, turn: int, send: Send) -> None:
        try:
            await self._furnish(area)
        except _TROUBLE as error:
            self._drop_begun(member, area)
            send(Place(turn=turn, refusal=str(error)))
            return
        if not area.gone:
            send(Place(turn=turn, path=str(area.path)))

    def _drop_begun(self, member: Member, area: Area) -> None:
        if member in self._begun and self._begun[member][0] is area:
            del self._begun[member]

    def _keep(self, member: Member, said: Shelved, send: Send) -> None:
        rank, incarnation = member
        area, request = self._begun.pop(member, (None, None))
        if area is None or request is None or self._shelf is None:
            raise SnapshotError(f"rank {rank} has written a copy for which it was given no area")
        manifest = snapshot.decode(said.manifest)
        try:
            self._shelf.commit(area, manifest)
        except (OSError, ValueError) as error:
            self._shelf.abandon(area)
            send(Kept(turn=said.turn, refusal=f"the copy can't be kept: {error}"))
            return
        self._tell(self._took(rank, incarnation, manifest))
        keeper = self._keepers.get(rank)
        kept, safe = Kept(turn=said.turn), Safe(turn=said.turn)
        if not said.wait:
            send(kept)
        last = kept if said.wait else safe
        if keeper is None or self._shipping is None:
            send(last)
            return
        self._waiting.safe[rank, incarnation, said.step] = lambda: send(last)
        self._offer(area, incarnation, said.manifest, keeper, request.keep)

    def _recall(self, member: Member, request: Recall, send: Send) -> None:
        rank, step = member[0], request.step
        if request.spoiled and self._shelf is not None:
            self._shelf.drop(rank, step)
        area = self._find(rank, step)
        if area is not None:
            send(_shown(area, request.turn))
            return
        self._waiting.recalled[member] = (
            step,
            lambda answer: send(msgspec.structs.replace(answer, turn=request.turn)),
        )
        self._tell(
            nodes.Seek(
                rank=rank,
                incarnation=member[1],
                generation=self._generation,
                step=step,
                spoiled=request.spoiled,
            )
        )

    # ------------------------------------------------------------ what the owner says

    def obey(self, order: nodes.CopyOrder) -> None:
        """The coordinator's word about copies, or a keeper's answer."""
        if isinstance(order, nodes.Keepers):
            self._begin_generation(order)
        elif isinstance(order, nodes.Judged):
            if self._shelf is not None:
                self._shelf.release(order.keep)
        elif order.generation == self._generation:
            self._obey(order)

    def _obey(self, order: nodes.CopyOrder) -> None:
        match order:
            case nodes.Take(rank=rank):
                manifest = snapshot.decode(order.manifest)
                self._end_incoming(rank, keep=order.keep)
                incoming = self._incoming.setdefault(rank, _Incoming())
                incoming.wanted[order.step] = order
                self._go(self._take(order, manifest, incoming))
            case nodes.Secured(rank=rank, incarnation=incarnation, step=step):
                others = tuple(other for other, _ in self._lent.get(rank, ()) if other != step)
                self._withdraw(rank, others)
                safe = self._waiting.safe.pop((rank, incarnation, step), None)
                if safe is not None:
                    safe()
            case nodes.Lend(rank=rank, incarnation=incarnation, step=step, to=to):
                area = self._find(rank, step)
                if area is None or area.manifest is None:
                    self._tell(
                        nodes.Lack(
                            rank=rank,
                            incarnation=incarnation,
                            generation=self._generation,
                            step=step,
                            to=to,
                        )
                    )
                else:
                    text = snapshot.encode(area.manifest)
                    others = tuple(other for other in self._needed if other != step)
                    self._offer(area, incarnation, text, to, others)
            case nodes.Missing(rank=rank, step=step):
                missing = f"no copy of rank {rank} at step {step} is left, on any node"
                for member in [m for m in self._waiting.recalled if m[0] == rank]:
                    self._answer(member, step, Recalled(turn=0, refusal=missing))
            case nodes.Drop(rank=rank):
                self._withdraw(rank)
                self._end_incoming(rank)
                if self._shelf is not None:
                    self._shelf.drop(rank)

    def _begin_generation(self, order: nodes.Keepers) -> None:
        """What was under way is of no use, nor are copies of steps that are done again."""
        self._generation, self._keepers = order.generation, order.keepers
        self._needed = order.steps
        self._waiting = _Waiting()
        for rank in self._incoming:
            self._end_incoming(rank)
        for rank in list(self._lent):
            self._withdraw(rank)
        if self._shelf is not None:
            self._shelf.retain(order.steps)

    # ------------------------------------------------------------ lent and fetched

    def _offer(
        self, area: Area, incarnation: int, manifest: bytes, to: int, keep: tuple[int, ...]
    ) -> None:
        assert self._shipping is not None
        offer = self._shipping.lend(area, to)
        self._lent.setdefault(area.rank, []).append((area.step, offer))
        take = nodes.Take(
            rank=area.rank,
            incarnation=incarnation,
            generation=self._generation,
            step=area.step,
            keep=keep,
            manifest=manifest,
            offer=offer,
            source=self._node,
        )
        self._tell(nodes.Offered(to=to, take=take))

    def _withdraw(self, rank: int, keep: Collection[int] = ()) -> None:
        """The copies of `rank` that are lent are of use to nobody any more, but those of steps in
        `keep`."""
        for step, offer in self._lent.pop(rank, ()):
            if step in keep:
                self._lent.setdefault(rank, []).append((step, offer))
                continue
            assert self._shipping is not None
            self._shipping.withdraw(offer)

    def _end_incoming(self, rank: int, keep: Collection[int] = ()) -> None:
        """What is fetched for `rank` is not wanted any more, but for steps in `keep`."""
        incoming = self._incoming.get(rank)
        if incoming is None:
            return
        for step in [step for step in incoming.wanted if step not in keep]:
            del incoming.wanted[step]
            if incoming.filling is not None and incoming.filling[0] == step:
                assert self._shipping is not None
                self._shipping.end(incoming.filling[1], "the copy is not wanted any more")

    async def _take(self, order: nodes.Take, manifest: Manifest, incoming: _Incoming) -> None:
        """Fetch what is offered, and keep it. Says nothing if it is not wanted any more."""
        rank, step, incarnation = order.rank, order.step, order.incarnation
        async with incoming.turn:
            if incoming.wanted.get(step) is not order:
                return
            try:
                area = await self._fetch(order, manifest, incoming)
            except _TROUBLE as error:
                if incoming.wanted.get(step) is order:
                    del incoming.wanted[step]
                    self._tell(
                        nodes.Untaken(
                            rank=rank,
                            incarnation=incarnation,
                            generation=order.generation,
                            step=step,
                            source=order.source,
                            text=str(error),
                        )
                    )
                return
        if area is not None:
            self._tell(self._took(rank, incarnation, manifest))
            self._answer((rank, incarnation), step, _shown(area, 0))

    async def _fetch(
        self, order: nodes.Take, manifest: Manifest, incoming: _Incoming
    ) -> Area | None:
        """The copy that is offered, complete on the shelf; None if it is not wanted any more."""
        assert self._shipping is not None
        step = order.step
        area = self._begin(order.rank, order.incarnation, manifest.nbytes, order.keep)
        assert self._shelf is not None
        incoming.filling = step, area
        try:
            if area.fd < 0:
                await self._furnish(area)
            if incoming.wanted.get(step) is not order:
                return None
            await self._shipping.fetch(area, manifest, order.offer)
            if incoming.wanted.get(step) is not order:
                return None
            self._shelf.commit(area, manifest)
        finally:
            incoming.filling = None
            self._shelf.abandon(area)
        del incoming.wanted[step]
        return area

    def _answer(self, member: Member, step: int, answer: Recalled) -> None:
        waits = self._waiting.recalled.get(member)
        if waits is not None and waits[0] == step:
            del self._waiting.recalled[member]
            waits[1](answer)

    def _took(self, rank: int, incarnation: int, manifest: Manifest) -> nodes.Took:
        about = manifest.about
        return nodes.Took(
            rank=rank,
            incarnation=incarnation,
            generation=self._generation,
            step=about.step,
            stamp=Stamp(generation=about.generation, digest=manifest.digest),
        )

    # ------------------------------------------------------------ the shelf

    def _begin(self, rank: int, incarnation: int, nbytes: int, keep: Collection[int]) -> Area:
        shelf = self._shelf or self._open_shelf()
        return shelf.begin(rank=rank, incarnation=incarnation, nbytes=nbytes, keep=keep)

    def _open_shelf(self) -> Shelf:
        budget = measure(self._shm_dir)
        self._shelf = Shelf(self._shm_dir, self._run_id, self._node, budget)
        return self._shelf

    async def _furnish(self, area: Area) -> None:
        """Take the memory of `area`. Raises UserError where there is none."""
        assert self._shelf is not None
        loop = asyncio.get_running_loop()
        try:
            fd = await loop.run_in_executor(None, create_locked, area.path, area.nbytes)
        except OSError as error:
            self._shelf.abandon(area)
            raise refusal(area.path, error) from error
        self._shelf.furnish(area, fd)

    def _find(self, rank: int, step: int) -> Area | None:
        whole = self._shelf.complete(rank) if self._shelf is not None else []
        return next((area for area in whole if area.step == step), None)

    def _go(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            context = {"message": "everstep: a task about copies failed", "exception": error}
            task.get_loop().call_exception_handler(context)


def _shown(area: Area, turn: int) -> Recalled:
    assert area.manifest is not None
    return Recalled(turn=turn, path=str(area.path), manifest=snapshot.encode(area.manifest))
