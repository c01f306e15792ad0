"""An agent's part in copies: what it tells whom and when, with a shelf in a folder and transfers on
paper; then two agents with real ones on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from everstep import snapshot
from everstep.agent import copies as agent_copies
from everstep.agent.copies import Copies
from everstep.agent.shelf import Area, Shelf, create_locked
from everstep.agent.shipping import Dock, Shipping
from everstep.errors import TransientError
from everstep.shm.budget import Budget
from everstep.snapshot import About, Layout, Manifest, SnapshotError, Tensor
from everstep.types import HeldCopy, Stamp
from everstep.wire import messages, nodes
from everstep.wire.bulk import Offer

LAYOUT = Layout([Tensor(name="w", dtype="torch.float32", item_bytes=4, shape=(1000,))])
KEY = b"the secret of the job, 32 bytes."
DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def _budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_copies, "measure", lambda _: Budget(limit_bytes=8 * LAYOUT.nbytes))


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test

    asyncio.run(bounded())


class Paper:
    """Transfers on paper. `shown`: by ticket, what was lent, of all nodes. A `fetch` waits for `go`
    and then ends well, or by `failure`. `fetched`: the tickets, in order; `begun`: set by each."""

    def __init__(self, shown: dict[bytes, bytes] | None = None) -> None:
        self.withdrawn: list[bytes] = []
        self.shown = {} if shown is None else shown
        self.go = asyncio.Event()
        self.go.set()
        self.failure: Exception | None = None
        self.fetched: list[bytes] = []
        self.begun = asyncio.Event()
        self.under_way: dict[Area, asyncio.Future[str]] = {}
        self.closed = False

    def lend(self, area: Area, node: int) -> Offer:
        ticket = f"ticket {len(self.shown):9}".encode()
        with area.bytes() as view:
            self.shown[ticket] = bytes(view)
        return Offer(host="there", port=1, ticket=ticket)

    def withdraw(self, offer: Offer) -> None:
        self.withdrawn.append(offer.ticket)

    async def fetch(self, area: Area, manifest: Manifest, offer: Offer) -> None:
        with area.bytes() as view:
            ended = self.under_way[area] = asyncio.get_running_loop().create_future()
            self.fetched.append(offer.ticket)
            self.begun.set()
            go = asyncio.ensure_future(self.go.wait())
            await asyncio.wait([ended, go], return_when=asyncio.FIRST_COMPLETED)
            go.cancel()
            del self.under_way[area]
            if ended.done():
                raise TransientError(ended.result())
            if self.failure is not None:
                raise self.failure
            view[:] = self.shown[offer.ticket]

    def end(self, area: Area, why: str) -> None:
        """A transfer that is ended fails, soon."""
        if area in self.under_way:
            self.under_way[area].set_result(why)

    def close(self) -> None:
        self.closed = True


class Node:
    """One node. `told`: to the owner; `answers`: to workers."""

    def __init__(self, folder: Path, number: int = 0, shipping: Any = None) -> None:
        self.told: list[nodes.CopyNews] = []
        self.answers: list[messages.ToWorker] = []
        self.places: list[messages.Shelf] = []
        self.changed = asyncio.Event()
        self.shipping = shipping
        self.copies = Copies(folder, "run", number, shipping, self._tell)

    def _tell(self, news: nodes.CopyNews) -> None:
        self.told.append(news)
        self.changed.set()

    def _send(self, message: messages.ToWorker) -> None:
        if isinstance(message, messages.Shelf):
            self.places.append(message)
        else:
            self.answers.append(message)
        self.changed.set()

    async def until(self, what: Callable[[], bool]) -> None:
        while not what():
            self.changed.clear()
            await self.changed.wait()

    def says(self, message: Any, rank: int = 1, incarnation: int = 1) -> None:
        self.copies.handle(rank, incarnation, message, self._send)

    async def shelve(
        self,
        step: int,
        nbytes: int = LAYOUT.nbytes,
        keep: tuple[int, ...] | None = None,
        **who: int,
    ) -> messages.Shelf:
        """A worker asks for an area: of the copies before, that of the step before must stay."""
        kept = (step - 1,) if keep is None else keep
        self.says(messages.Shelve(turn=step, step=step, nbytes=nbytes, keep=kept), **who)
        await self.until(lambda: bool(self.places))
        place = self.places.pop()
        assert place.turn == step
        return place

    async def shelved(
        self,
        step: int,
        turn: int = 0,
        wait: bool = True,
        keep: tuple[int, ...] | None = None,
        **who: int,
    ) -> bytes:
        """A worker writes its copy of `step` and says so."""
        place = await self.shelve(step, keep=keep, **who)
        assert not place.refusal, place.refusal
        about = About(run_id="run", rank=who.get("rank", 1), world=4, shard="s", step=step)
        with open(place.path, "r+b") as file:
            room = bytearray(LAYOUT.nbytes)
            manifest = snapshot.write(memoryview(room), LAYOUT, about, {"w": bytes([step]) * 4000})
            file.write(room)
        text = snapshot.encode(manifest)
        self.says(messages.Shelved(turn=turn or step, step=step, manifest=text, wait=wait), **who)
        return text

    def recall(self, step: int, turn: int = 50, spoiled: bool = False, **who: int) -> None:
        self.says(messages.Recall(turn=turn, step=step, spoiled=spoiled), **who)

    async def until_told(self, count: int) -> None:
        await self.until(lambda: len(self.told) == count)

    async def until_kept(self, count: int) -> None:
        await self.until(lambda: len(self.kept) == count)

    @property
    def kept(self) -> list[int]:
        """The turns of the copies of which workers have heard that they are kept."""
        return [answer.turn for answer in self.answers if isinstance(answer, messages.Kept)]

    @property
    def safe(self) -> list[int]:
        """The turns of those which workers need not wait for any more."""
        return [answer.turn for answer in self.answers if isinstance(answer, messages.Safe)]

    @property
    def recalled(self) -> messages.Recalled:
        (answer,) = [a for a in self.answers if isinstance(a, messages.Recalled)]
        return answer

    @property
    def offered(self) -> nodes.Offered:
        return [news for news in self.told if isinstance(news, nodes.Offered)][-1]


def keepers(generation: int = 0, steps: tuple[int, ...] = (), **of: int) -> nodes.Keepers:
    """Rank 1 is kept by node 4, unless `of` says who keeps it, or nobody."""
    kept = {int(rank[1:]): node for rank, node in (of or {"r1": 4}).items()}
    return nodes.Keepers(generation=generation, keepers=kept, steps=steps)


def secured(step: int, incarnation: int = 1, generation: int = 0) -> nodes.Secured:
    return nodes.Secured(rank=1, incarnation=incarnation, generation=generation, step=step)


def stamp(step: int) -> Stamp:
    about = About(run_id="run", rank=1, world=4, shard="s", step=step)
    room = memoryview(bytearray(LAYOUT.nbytes))
    manifest = snapshot.write(room, LAYOUT, about, {"w": bytes([step]) * 4000})
    return Stamp(generation=0, digest=manifest.digest)


def took(step: int, incarnation: int = 1, generation: int = 0) -> nodes.Took:
    about = {"rank": 1, "incarnation": incarnation, "generation": generation, "step": step}
    return nodes.Took(**about, stamp=stamp(step))


def held(node: Node) -> tuple[tuple[int, int], ...]:
    return tuple((copy.rank, copy.step) for copy in node.copies.held())


def seek(step: int, incarnation: int, spoiled: bool = False) -> nodes.Seek:
    return nodes.Seek(rank=1, incarnation=incarnation, generation=0, step=step, spoiled=spoiled)


def missing(step: int, rank: int = 1) -> nodes.Missing:
    return nodes.Missing(rank=rank, generation=0, step=step)


def lend(step: int, incarnation: int = 2, to: int = 5) -> nodes.Lend:
    return nodes.Lend(rank=1, incarnation=incarnation, generation=0, step=step, to=to)


def content(path: str) -> bytes:
    return Path(path).read_bytes()[-4:]


# ---------------------------------------------------------------- one node


def test_without_a_keeper_a_copy_is_kept_when_it_is_here(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        for step in (1, 2, 3):
            await node.shelved(step)
        assert node.kept == [1, 2, 3]
        assert node.told == [took(s) for s in (1, 2, 3)]
        node.recall(3, incarnation=2)
        assert content(node.recalled.path) == b"\3\3\3\3"
        assert node.recalled.turn == 50
        assert snapshot.decode(node.recalled.manifest).about.step == 3
        await node.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


def test_the_owner_hears_of_a_copy_before_the_worker(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        heard: list[Any] = []
        node.told = node.answers = heard
        await node.shelved(1)
        assert [type(said) for said in heard] == [nodes.Took, messages.Kept]
        await node.copies.close()

    run(test())


def test_without_room_the_worker_is_told_the_numbers(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        assert "needs 8.0 MiB" in (await node.shelve(1, nbytes=8 << 20)).refusal
        await node.shelved(1)
        assert node.kept == [1]
        await node.copies.close()

    run(test())


def test_memory_is_taken_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take longer than the node's lease. Meanwhile the worker may ask again, and die."""

    async def test() -> None:
        node = Node(tmp_path)
        gate, taken = threading.Event(), []

        def slowly(path: Path, nbytes: int) -> int:
            taken.append(path)
            assert gate.wait(DEADLINE_S)
            return create_locked(path, nbytes)

        monkeypatch.setattr(agent_copies, "create_locked", slowly)
        for turn in (1, 2):
            node.says(messages.Shelve(turn=turn, step=1, nbytes=LAYOUT.nbytes, keep=()))
        node.says(messages.Shelve(turn=3, step=1, nbytes=LAYOUT.nbytes, keep=()), rank=2)
        node.copies.buried(2, 1)
        gate.set()
        await node.until(lambda: bool(node.places))
        await asyncio.gather(*node.copies._tasks)
        (place,) = node.places
        assert place.turn == 2
        (folder,) = tmp_path.iterdir()
        assert [str(path) for path in folder.iterdir()] == [place.path]
        assert len(taken) == 3
        await node.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


@pytest.mark.parametrize("where", ["memory", "shelf", "manifest"])
def test_what_goes_wrong_with_a_copy_is_a_refusal(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the node's end."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(5, "the memory is broken")

    async def test() -> None:
        node = Node(tmp_path)
        if where == "manifest":
            monkeypatch.setattr(Shelf, "commit", fails)
            await node.shelved(1)
            (kept,) = node.answers
            assert isinstance(kept, messages.Kept)
            assert "the memory is broken" in kept.refusal
            assert node.told == []
        else:
            name = "create_locked" if where == "memory" else "measure"
            monkeypatch.setattr(agent_copies, name, fails)
            assert "the memory is broken" in (await node.shelve(1)).refusal
        monkeypatch.undo()
        monkeypatch.setattr(agent_copies, "measure", lambda _: Budget(limit_bytes=1 << 20))
        await node.shelved(1)
        assert node.kept[-1] == 1
        await node.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


def test_a_task_that_fails_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        told: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        node = Node(tmp_path, 4, Paper({}))
        other = keeping(tmp_path)
        await other.shelved(1)
        node.copies.obey(other.offered.take)  # a ticket that nobody has made
        await asyncio.gather(*node.copies._tasks, return_exceptions=True)
        await asyncio.sleep(0)
        (context,) = told
        assert isinstance(context["exception"], KeyError)
        await node.copies.close()
        await other.copies.close()

    run(test())


def test_a_worker_that_dies_half_way_leaves_the_copy_before(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        await node.shelved(1)
        await node.shelved(2)
        place = await node.shelve(3)
        Path(place.path).write_bytes(b"\7" * LAYOUT.nbytes)
        node.copies.buried(1, 1)
        node.recall(2, incarnation=2)
        assert content(node.recalled.path) == b"\2\2\2\2"
        node.recall(3, turn=51, incarnation=2)
        assert node.told[-1] == seek(3, 2)
        node.copies.obey(missing(3))
        assert node.answers[-1] == messages.Recalled(
            turn=51, refusal="no copy of rank 1 at step 3 is left, on any node"
        )
        await node.shelved(3, incarnation=2)
        await node.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


def test_a_step_that_is_done_again_has_its_copy_made_again(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        await node.shelved(1)
        await node.shelved(2)
        await node.shelve(2)  # stopped in the fence: the first one is of no step
        node.recall(2)
        assert node.told[-1] == seek(2, 1)
        await node.shelved(2, turn=9)
        assert node.kept == [1, 2, 9]
        await node.copies.close()

    run(test())


async def left_by(node: Node, *steps: int) -> None:
    """It makes copies, and is gone."""
    for step in steps:
        await node.shelved(step)
    await node.copies.close(keep=True)


def test_what_an_agent_left_behind_is_kept_if_the_job_knows_it(tmp_path: Path) -> None:
    async def test() -> None:
        before, after = Node(tmp_path, 0), Node(tmp_path, 7)
        await left_by(before, 1, 2)
        found = after.copies.adopt()
        assert found == tuple(HeldCopy(rank=1, step=s, stamp=stamp(s)) for s in (1, 2))
        assert held(after) == (), "nor does it report them to another coordinator"
        after.copies.obey(nodes.Judged(keep=found[1:]))
        assert held(after) == ((1, 2),)
        after.copies.obey(keepers(3, steps=(2,)))
        after.recall(2, incarnation=5)
        with open(after.recalled.path, "rb") as file:
            assert file.read().endswith(bytes([2]) * 4000)
        await after.shelved(3, incarnation=5)
        assert after.told == [took(3, incarnation=5, generation=3)]
        assert held(after) == ((1, 2), (1, 3))
        await after.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


def test_who_was_there_before_takes_nothing_for_its_own(tmp_path: Path) -> None:
    """A neighbour on the same host, which makes its first copy when the other is dead."""

    async def test() -> None:
        before, beside, after = Node(tmp_path, 0), Node(tmp_path, 7), Node(tmp_path, 8)
        assert beside.copies.adopt() == ()
        await left_by(before, 1)
        await beside.shelved(2, rank=3)
        assert held(beside) == ((3, 2),)
        (found,) = after.copies.adopt()
        assert (found.rank, found.step) == (1, 1)
        after.copies.obey(nodes.Judged(keep=()))
        assert held(after) == ()
        await beside.copies.close()
        await after.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_no_copy_is_refused(asked: bool, tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        if asked:
            await node.shelve(1)
        with pytest.raises(SnapshotError):
            node.says(messages.Shelved(turn=1, step=1, manifest=b"{}", wait=True))
        assert node.kept == []
        assert node.told == []
        await node.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


# ---------------------------------------------------------------- with a keeper


def keeping(folder: Path) -> Node:
    node = Node(folder, shipping=Paper())
    node.copies.obey(keepers())
    return node


def test_with_a_keeper_a_copy_is_kept_when_that_has_it(tmp_path: Path) -> None:
    async def test() -> None:
        node = keeping(tmp_path)
        manifest = await node.shelved(1)
        take = node.offered.take
        assert node.offered.to == 4
        assert (take.rank, take.incarnation, take.step, take.keep) == (1, 1, 1, (0,))
        assert (take.source, take.generation) == (0, 0)
        assert take.manifest == manifest
        assert node.kept == []
        node.copies.obey(secured(2))  # of another step
        node.copies.obey(secured(1, incarnation=2))
        assert node.kept == []
        node.copies.obey(secured(1))
        node.copies.obey(secured(1))  # by a second holder
        assert node.kept == [1]
        await node.shelved(1, rank=2)  # nobody keeps its copies
        assert node.kept == [1, 1]
        await node.copies.close()
        assert node.shipping.closed

    run(test())


def test_a_dead_worker_is_not_answered(tmp_path: Path) -> None:
    async def test() -> None:
        node = keeping(tmp_path)
        await node.shelved(1)
        node.copies.buried(1, 1)
        node.copies.obey(secured(1))
        assert node.kept == []
        node.recall(1, incarnation=2)
        assert not node.recalled.refusal, "its copy is here, whoever else has it"
        await node.copies.close()

    run(test())


def test_in_a_new_generation_nothing_of_the_old_one_is_answered(tmp_path: Path) -> None:
    """A copy on its way when the step was stopped: that it has arrived says nothing of the next."""

    async def test() -> None:
        node = keeping(tmp_path)
        await node.shelved(1)
        stale = node.offered.take.offer.ticket
        node.copies.obey(keepers(1, r1=5))
        assert node.shipping.withdrawn == [stale]
        node.copies.obey(secured(1))
        assert node.kept == []
        await node.shelved(1, turn=7)
        assert node.offered.to == 5
        node.copies.obey(secured(1))
        assert node.kept == [], "that is still of the generation before"
        node.copies.obey(secured(1, generation=1))
        assert node.kept == [7]
        await node.copies.close()

    run(test())


def test_a_copy_that_nobody_came_for_is_lent_no_longer_than_needed(tmp_path: Path) -> None:
    async def test() -> None:
        node = keeping(tmp_path)
        tickets = []
        for step in (1, 2, 3, 4):
            await node.shelved(step)
            tickets.append(node.offered.take.offer.ticket)
            node.copies.obey(secured(step))
        assert node.kept == [1, 2, 3, 4]
        assert node.shipping.withdrawn == tickets
        await node.copies.close()

    run(test())


# ---------------------------------------------------------------- as a keeper


def test_a_keeper_fetches_and_says_so(tmp_path: Path) -> None:
    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, away = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 4, Paper(shown))
        home.copies.obey(keepers())
        for step in (1, 2, 3):
            await home.shelved(step)
            away.copies.obey(home.offered.take)
            await away.until_told(step)
            home.copies.obey(secured(step))
        assert away.told == [took(s) for s in (1, 2, 3)]
        away.recall(3, incarnation=2)
        assert content(away.recalled.path) == b"\3\3\3\3"
        await home.copies.close()
        await away.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


@pytest.mark.parametrize("failure", [TransientError("it is cut"), OSError(28, "no space left")])
def test_a_keeper_that_cannot_says_so_and_keeps_what_it_has(
    failure: Exception, tmp_path: Path
) -> None:
    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, away = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 4, Paper(shown))
        home.copies.obey(keepers())
        await home.shelved(1)
        away.copies.obey(home.offered.take)
        await away.until_told(1)
        home.copies.obey(secured(1))
        await home.shelved(2)
        away.shipping.failure = failure
        away.copies.obey(home.offered.take)
        await away.until_told(2)
        news = away.told[-1]
        assert isinstance(news, nodes.Untaken)
        assert (news.rank, news.incarnation, news.step) == (1, 1, 2)
        assert str(failure) in news.text
        away.recall(1, incarnation=2)
        assert content(away.recalled.path) == b"\1\1\1\1"
        await home.copies.close()
        await away.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


@pytest.mark.parametrize("by", ["another take", "a new generation", "the rank itself", "the end"])
def test_a_transfer_that_was_overtaken_is_ended_and_not_told(by: str, tmp_path: Path) -> None:
    """Its end would be taken for that of the copy that is wanted now."""

    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, away = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 4, Paper(shown))
        home.copies.obey(keepers())
        await home.shelved(1)
        away.shipping.go.clear()
        away.copies.obey(home.offered.take)
        await away.shipping.begun.wait()
        overtaken = set(away.copies._tasks)
        match by:
            case "another take":
                await home.shelved(1, turn=9)
                away.copies.obey(home.offered.take)
            case "a new generation":
                away.copies.obey(keepers(1, r2=4))
            case "the rank itself":
                await away.shelve(1, incarnation=2)
            case "the end":
                await away.copies.close()
        await asyncio.gather(*overtaken)  # though nothing more has come for it
        assert away.told == []
        away.shipping.go.set()
        await asyncio.gather(*away.copies._tasks)
        assert away.told == ([took(1)] if by == "another take" else [])
        await home.copies.close()
        await away.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


def test_copies_that_are_needed_come_one_after_the_other(tmp_path: Path) -> None:
    """Steps that don't wait for their copies: a newer one overtakes only what is not needed."""

    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, away = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 4, Paper(shown))
        home.copies.obey(keepers())
        away.shipping.go.clear()
        tickets = []
        for step in (1, 2, 3):
            await home.shelved(step, wait=False, keep=tuple(range(1, step)))
            tickets.append(home.offered.take.offer.ticket)
            away.copies.obey(home.offered.take)
        assert home.kept == [1, 2, 3]
        assert home.safe == []
        assert home.shipping.withdrawn == []
        await away.shipping.begun.wait()
        assert away.shipping.fetched == tickets[:1]
        away.shipping.go.set()
        await away.until_told(3)
        assert away.told == [took(step) for step in (1, 2, 3)]
        assert away.shipping.fetched == tickets
        assert held(away) == ((1, 1), (1, 2), (1, 3))
        for step in (1, 2, 3):
            home.copies.obey(secured(step))
        assert home.safe == [1, 2, 3]
        assert home.shipping.withdrawn == tickets
        await home.shelved(4, wait=False, keep=(3,))
        assert held(home) == ((1, 3), (1, 4))
        away.copies.obey(home.offered.take)
        await away.until_told(4)
        assert held(away) == ((1, 3), (1, 4))
        await home.copies.close()
        await away.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


def test_a_copy_that_is_not_needed_any_more_is_not_fetched(tmp_path: Path) -> None:
    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, away = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 4, Paper(shown))
        home.copies.obey(keepers())
        away.shipping.go.clear()
        for step, keep in ((1, ()), (2, (1,)), (3, (1,))):
            await home.shelved(step, wait=False, keep=keep)
            away.copies.obey(home.offered.take)
        away.shipping.go.set()
        await away.until_told(2)
        assert away.told == [took(1), took(3)]
        await home.copies.close()
        await away.copies.close()

    run(test())


def test_what_is_of_another_generation_is_not_heeded(tmp_path: Path) -> None:
    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, away = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 4, Paper(shown))
        home.copies.obey(keepers())
        await home.shelved(1)
        away.copies.obey(keepers(2))
        away.copies.obey(home.offered.take)
        away.copies.obey(lend(1))
        away.copies.obey(nodes.Drop(rank=1, generation=1))
        home.copies.obey(secured(1, generation=1))
        assert not away.copies._tasks
        assert away.told == []
        assert home.kept == []
        home.copies.obey(secured(1))
        assert home.kept == [1]
        await home.copies.close()
        await away.copies.close()

    run(test())


def test_copies_of_steps_that_nobody_goes_back_to_are_given_up(tmp_path: Path) -> None:
    async def test() -> None:
        node = keeping(tmp_path)
        for step in (1, 2, 3):
            await node.shelved(step, wait=False, keep=tuple(range(1, step)))
        node.copies.obey(keepers(1, steps=(1, 3)))
        assert held(node) == ((1, 1), (1, 3))
        node.copies.obey(nodes.Drop(rank=1, generation=1))
        assert held(node) == ()
        await node.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


# ---------------------------------------------------------------- a copy from elsewhere


def test_a_copy_is_found_elsewhere(tmp_path: Path) -> None:
    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, seeker = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 5, Paper(shown))
        await home.shelved(3)
        seeker.recall(3, incarnation=2)
        assert seeker.told == [seek(3, 2)]
        home.copies.obey(lend(3))
        seeker.copies.obey(home.offered.take)
        await seeker.until(lambda: bool(seeker.answers))
        assert seeker.told[1:] == [took(3, 2)]
        assert seeker.recalled.turn == 50
        assert content(seeker.recalled.path) == b"\3\3\3\3"
        await home.copies.close()
        await seeker.copies.close()

    run(test())


def test_a_copy_that_is_not_where_it_was_thought_to_be(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path, shipping=Paper())
        node.copies.obey(lend(3))
        await node.shelved(1)
        node.copies.obey(lend(3))
        lack = nodes.Lack(rank=1, incarnation=2, generation=0, step=3, to=5)
        assert [news for news in node.told if isinstance(news, nodes.Lack)] == [lack, lack]
        await node.copies.close()

    run(test())


def test_a_copy_that_nobody_has(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path, shipping=Paper())
        node.recall(3)
        node.copies.obey(missing(2))  # of another
        node.copies.obey(missing(3, rank=2))
        assert node.answers == []
        node.copies.obey(missing(3))
        assert "no copy of rank 1 at step 3 is left" in node.recalled.refusal
        await node.copies.close()

    run(test())


def test_the_transfer_for_a_dead_process_is_no_answer_to_the_next(tmp_path: Path) -> None:
    """It is ended when the next one's begins, and that one is still waited for."""

    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, seeker = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 5, Paper(shown))
        await home.shelved(3)
        seeker.shipping.go.clear()
        for incarnation in (2, 3):
            seeker.recall(3, turn=incarnation, incarnation=incarnation)
            home.copies.obey(lend(3, incarnation))
            seeker.copies.obey(home.offered.take)
            if incarnation == 2:
                await seeker.shipping.begun.wait()
                seeker.copies.buried(1, 2)
        seeker.shipping.go.set()
        await asyncio.gather(*seeker.copies._tasks)
        assert seeker.recalled.turn == 3
        assert not seeker.recalled.refusal
        await home.copies.close()
        await seeker.copies.close()

    run(test())


def test_where_a_transfer_fails_the_copy_is_sought_elsewhere(tmp_path: Path) -> None:
    """The seeker says from whom it can't be had, and goes on waiting."""

    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        homes = [Node(tmp_path, number, Paper(shown)) for number in (0, 2)]
        seeker = Node(tmp_path, 5, Paper(shown))
        seeker.shipping.failure = TransientError("the way there is cut")
        for home in homes:
            await home.shelved(3)
        seeker.recall(3, incarnation=2)
        homes[0].copies.obey(lend(3))
        seeker.copies.obey(homes[0].offered.take)
        await seeker.until_told(2)
        news = seeker.told[-1]
        assert isinstance(news, nodes.Untaken)
        assert (news.source, news.text) == (0, "the way there is cut")
        assert seeker.answers == []
        seeker.shipping.failure = None
        homes[1].copies.obey(lend(3))
        seeker.copies.obey(homes[1].offered.take)
        await seeker.until(lambda: bool(seeker.answers))
        assert content(seeker.recalled.path) == b"\3\3\3\3"
        for node in (*homes, seeker):
            await node.copies.close()

    run(test())


def test_a_copy_that_is_not_what_was_written_is_not_shown_or_lent_again(tmp_path: Path) -> None:
    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        node, other = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 5, Paper(shown))
        await node.shelved(3)
        await other.shelved(3)
        node.recall(3, incarnation=2)
        Path(node.recalled.path).write_bytes(b"\7" * LAYOUT.nbytes)
        node.recall(3, turn=51, spoiled=True, incarnation=2)
        assert node.told[-1] == seek(3, 2, spoiled=True)
        assert held(node) == ()
        node.copies.obey(lend(3))
        assert isinstance(node.told[-1], nodes.Lack)
        other.copies.obey(lend(3, to=0))
        node.copies.obey(other.offered.take)
        await node.until(lambda: len(node.answers) == 3)
        found = node.answers[-1]
        assert isinstance(found, messages.Recalled)
        assert found.turn == 51
        assert content(found.path) == b"\3\3\3\3"
        await node.copies.close()
        await other.copies.close()

    run(test())


def test_the_end_leaves_nothing_whatever_was_on_its_way(tmp_path: Path) -> None:
    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, away = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 4, Paper(shown))
        home.copies.obey(keepers())
        await home.shelved(1)
        await home.shelve(1, rank=2)
        away.shipping.go.clear()
        away.copies.obey(home.offered.take)
        await asyncio.sleep(0)
        await away.copies.close()
        await home.copies.close()
        assert away.told == []
        assert list(tmp_path.iterdir()) == []

    run(test())


# ---------------------------------------------------------------- real transfers


def shipping_of(node: int, refused: list[str]) -> Shipping:
    def on_refused(address: str, why: str) -> None:
        refused.append(f"{address}: {why}")

    return Shipping(Dock(host="127.0.0.1", ports=[0], key=KEY, on_refused=on_refused), node)


class Pair:
    """Two nodes with real transfers, and an owner that passes on what they tell."""

    def __init__(self, folder: Path) -> None:
        self.refused: list[str] = []
        self.nodes = {n: Node(folder, n, shipping_of(n, self.refused)) for n in (0, 4)}
        self.home, self.away = self.nodes[0], self.nodes[4]
        for node in self.nodes.values():
            node.copies._tell = self._passes_on(node)
        self.home.copies.obey(keepers())
        self.away.copies.obey(keepers())

    def _passes_on(self, node: Node) -> Callable[[nodes.CopyNews], None]:
        def tell(news: nodes.CopyNews) -> None:
            node._tell(news)
            match news:
                case nodes.Offered(to=to):
                    self.nodes[to].copies.obey(news.take)
                case nodes.Took(step=step) | nodes.Untaken(step=step) if node is self.away:
                    self.home.copies.obey(secured(step))
                case nodes.Seek(incarnation=incarnation, step=step):
                    self.home.copies.obey(lend(step, incarnation, to=4))

        return tell

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.copies.close()


def test_copies_travel_between_two_agents(tmp_path: Path) -> None:
    async def test() -> None:
        pair = Pair(tmp_path)
        for step in range(1, 9):
            await pair.home.shelved(step)
            await pair.home.until_kept(step)
        pair.away.recall(8, incarnation=2)
        assert content(pair.away.recalled.path) == b"\10\10\10\10"
        assert pair.refused == []
        await pair.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


def test_a_copy_is_lent_to_a_node_that_never_had_it(tmp_path: Path) -> None:
    async def test() -> None:
        pair = Pair(tmp_path)
        pair.home.copies.obey(keepers(0, r2=4))
        await pair.home.shelved(3)
        pair.away.recall(3, incarnation=2)
        await pair.away.until(lambda: bool(pair.away.answers))
        assert content(pair.away.recalled.path) == b"\3\3\3\3"
        await pair.close()

    run(test())


def test_steps_go_on_beside_a_keeper_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is offered and never fetches must not hold the areas of the steps to come."""

    async def test() -> None:
        pair = Pair(tmp_path)
        await pair.home.shelved(1)
        await pair.home.until_kept(1)
        assert pair.away.copies._shelf is not None
        monkeypatch.setattr(pair.away.copies._shelf, "_budget", Budget(limit_bytes=0))
        for step in range(2, 8):
            await pair.home.shelved(step)
            await pair.home.until_kept(step)
        await pair.close()
        assert list(tmp_path.iterdir()) == []

    run(test())
