"""The agent's part in copies: gives its ranks room for them, has another node keep them as well,
and finds them again.

Theory of operation: a worker asks for an area, writes its state into it, and says so with the
manifest; the copy is complete when the manifest lies beside it on the shelf (shelf.py). Where the
rank has a keeper, the copy is then offered to that node, which fetches it and says so; only then
the worker is told that its copy is kept, and may commit. A new process of a rank asks for the copy
of a step: it is on this shelf, or some other node is asked to lend it. What is complete here is
told to the owner, before any worker hears of it, so that no rank can commit a step of which the
coordinator does not know the copies. The shelf is made when the first copy needs it.

Keepers are named anew at the beginning of each generation. What was on its way in the one before
is of an attempt that was stopped: nobody waits for it any more, and nothing of it is told. A copy
that nobody came for is lent until then, or until the rank begins another: as long as it is lent,
its area can't be used.

Does not know: who needs copies, who keeps them, and which step is gone on from. Loop thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep import snapshot
from everstep.agent.budget import measure
from everstep.agent.shelf import Area, Shelf, StillNeeded
from everstep.agent.shipping import Shipping
from everstep.errors import EverstepError, UserError
from everstep.snapshot import Manifest, SnapshotError
from everstep.wire import nodes
from everstep.wire.bulk import Offer
from everstep.wire.messages import Kept, Recall, Recalled, Shelve, Shelved, ToWorker
from everstep.wire.messages import Shelf as Place

Member = tuple[int, int]  # rank and incarnation
Send = Callable[[ToWorker], None]
CopyMessage = Shelve | Shelved | Recall


@dataclass(slots=True)
class _Waiting:
    """What workers of this node wait for, by member. `kept`: the step whose copy is under way to
    its keeper, and how to answer; `recalled`: the step whose copy is sought, and how to answer."""

    kept: dict[Member, tuple[int, Callable[[], None]]] = field(default_factory=dict)
    recalled: dict[Member, tuple[int, Callable[[Recalled], None]]] = field(default_factory=dict)


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
        self._keepers: Mapping[int, int] = {}
        self._under_way: dict[Member, Area] = {}
        self._waiting = _Waiting()
        self._taking: dict[int, nodes.Take] = {}  # by rank, what is under way to here
        self._lent: dict[int, list[Offer]] = {}  # by rank
        self._transfers: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ what workers say

    def handle(self, rank: int, incarnation: int, message: CopyMessage, send: Send) -> None:
        """A worker said something about its copy; `send` answers it. Raises SnapshotError for what
        is none."""
        match message:
            case Shelve():
                send(self._give_room(rank, incarnation, message))
            case Shelved(turn=turn):
                self._keep(rank, incarnation, message, lambda: send(Kept(turn=turn)))
            case Recall(turn=turn, step=step):
                self._recall(rank, incarnation, step, turn, send)

    def buried(self, rank: int, incarnation: int) -> None:
        """The worker is dead: what it had begun is given up."""
        self._waiting.kept.pop((rank, incarnation), None)
        self._waiting.recalled.pop((rank, incarnation), None)
        area = self._under_way.pop((rank, incarnation), None)
        if area is not None and self._shelf is not None:
            self._shelf.abandon(area)

    async def close(self) -> None:
        """End all transfers and remove all copies."""
        if self._shipping is not None:
            self._shipping.close()
        for task in self._transfers:
            task.cancel()
        await asyncio.gather(*self._transfers, return_exceptions=True)
        await asyncio.sleep(0)  # loans that ended just now give their areas back
        if self._shelf is not None:
            self._shelf.close()

    def _give_room(self, rank: int, incarnation: int, request: Shelve) -> Place:
        self._taking.pop(rank, None)
        try:
            area = self._area(rank, incarnation, request.step, request.nbytes)
        except (StillNeeded, UserError) as error:
            return Place(turn=request.turn, refusal=str(error))
        self._under_way[rank, incarnation] = area
        return Place(turn=request.turn, path=str(area.path))

    def _area(self, rank: int, incarnation: int, step: int, nbytes: int) -> Area:
        """Room for a copy of `step`. Who makes that step holds the one before, and so do all: they
        have met in its fence."""
        if self._shelf is None:
            budget = measure(self._shm_dir)
            self._shelf = Shelf(self._shm_dir, self._run_id, self._node, budget)
        self._withdraw(rank)
        self._shelf.drop_from(rank, step)
        return self._shelf.begin(
            rank=rank, incarnation=incarnation, nbytes=nbytes, acknowledged=step - 1
        )

    def _keep(self, rank: int, incarnation: int, said: Shelved, kept: Callable[[], None]) -> None:
        area = self._under_way.pop((rank, incarnation), None)
        if area is None or self._shelf is None:
            raise SnapshotError(f"rank {rank} has written a copy for which it was given no area")
        self._shelf.commit(area, snapshot.decode(said.manifest))
        self._tell(nodes.Took(rank=rank, incarnation=incarnation, step=said.step))
        keeper = self._keepers.get(rank)
        if keeper is None or self._shipping is None:
            kept()
            return
        self._waiting.kept[rank, incarnation] = said.step, kept
        self._offer(area, incarnation, said.manifest, keeper)

    def _recall(self, rank: int, incarnation: int, step: int, turn: int, send: Send) -> None:
        area = self._find(rank, step)
        if area is not None:
            send(_shown(area, turn))
        elif self._shipping is None:
            send(Recalled(turn=turn, refusal=self._missing(rank, step)))
        else:
            self._waiting.recalled[rank, incarnation] = (
                step,
                lambda answer: send(msgspec.structs.replace(answer, turn=turn)),
            )
            self._tell(nodes.Seek(rank=rank, incarnation=incarnation, step=step))

    # ------------------------------------------------------------ what the owner says

    def obey(self, order: nodes.CopyOrder) -> None:
        """The coordinator's word about copies."""
        match order:
            case nodes.Keepers(keepers=keepers):
                self._keepers = keepers
                self._forget_under_way()
            case nodes.Take(rank=rank):
                self._taking[rank] = order  # now: what makes it stale may come before its task runs
                task = asyncio.get_running_loop().create_task(self._take(order))
                self._transfers.add(task)
                task.add_done_callback(self._transfers.discard)
            case nodes.Secured(rank=rank, incarnation=incarnation, step=step):
                waits = self._waiting.kept.get((rank, incarnation))
                if waits is not None and waits[0] == step:
                    del self._waiting.kept[rank, incarnation]
                    waits[1]()
            case nodes.Lend(rank=rank, incarnation=incarnation, step=step, to=to):
                area = self._find(rank, step)
                if area is None or area.manifest is None:
                    lack = nodes.Lack(rank=rank, incarnation=incarnation, step=step, to=to)
                    self._tell(lack)
                else:
                    self._offer(area, incarnation, snapshot.encode(area.manifest), to)
            case nodes.Missing(rank=rank, step=step):
                missing = Recalled(turn=0, refusal=self._missing(rank, step))
                for member in [m for m in self._waiting.recalled if m[0] == rank]:
                    self._answer(*member, step, missing)

    def _offer(self, area: Area, incarnation: int, manifest: bytes, to: int) -> None:
        assert self._shipping is not None
        offer = self._shipping.lend(area, to)
        self._lent.setdefault(area.rank, []).append(offer)
        self._tell(
            nodes.Offered(
                rank=area.rank,
                incarnation=incarnation,
                manifest=manifest,
                offer=offer,
                to=to,
            )
        )

    def _withdraw(self, rank: int) -> None:
        """The copies of `rank` that are lent are of use to nobody any more."""
        for offer in self._lent.pop(rank, ()):
            assert self._shipping is not None
            self._shipping.withdraw(offer)

    def _forget_under_way(self) -> None:
        """A generation begins."""
        self._waiting = _Waiting()
        self._taking.clear()
        for rank in list(self._lent):
            self._withdraw(rank)

    async def _take(self, order: nodes.Take) -> None:
        """Fetch what is offered, and keep it. Says nothing if it is not wanted any more."""
        manifest = snapshot.decode(order.manifest)
        rank, step, incarnation = manifest.about.rank, manifest.about.step, order.incarnation
        try:
            area = await self._fetch(order, manifest)
        except (EverstepError, OSError) as error:
            if self._taking.get(rank) is order:
                del self._taking[rank]
                self._tell(
                    nodes.Untaken(rank=rank, incarnation=incarnation, step=step, text=str(error))
                )
                self._answer(rank, incarnation, step, Recalled(turn=0, refusal=str(error)))
            return
        if area is not None:
            self._tell(nodes.Took(rank=rank, incarnation=incarnation, step=step))
            self._answer(rank, incarnation, step, _shown(area, 0))

    async def _fetch(self, order: nodes.Take, manifest: Manifest) -> Area | None:
        """The copy that is offered, complete on the shelf; None if it is not wanted any more."""
        assert self._shipping is not None
        rank = manifest.about.rank
        if self._taking.get(rank) is not order:
            return None
        area = self._area(rank, order.incarnation, manifest.about.step, manifest.nbytes)
        assert self._shelf is not None
        try:
            await self._shipping.fetch(area, manifest, order.offer)
            if self._taking.get(rank) is not order:
                return None
            self._shelf.commit(area, manifest)
        finally:
            self._shelf.abandon(area)
        del self._taking[rank]
        return area

    def _answer(self, rank: int, incarnation: int, step: int, answer: Recalled) -> None:
        waits = self._waiting.recalled.get((rank, incarnation))
        if waits is not None and waits[0] == step:
            del self._waiting.recalled[rank, incarnation]
            waits[1](answer)

    # ------------------------------------------------------------ the shelf

    def _find(self, rank: int, step: int) -> Area | None:
        whole = self._shelf.complete(rank) if self._shelf is not None else []
        return next((area for area in whole if area.step == step), None)

    def _missing(self, rank: int, step: int) -> str:
        return f"no copy of rank {rank} at step {step} is left, on node {self._node} or elsewhere"


def _shown(area: Area, turn: int) -> Recalled:
    assert area.manifest is not None
    return Recalled(turn=turn, path=str(area.path), manifest=snapshot.encode(area.manifest))
