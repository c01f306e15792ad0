"""An agent's part in copies: what it tells whom and when, with a shelf in a folder and transfers on
paper; then two agents with real ones on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from everstep import snapshot
from everstep.agent import copies as agent_copies
from everstep.agent.budget import Budget
from everstep.agent.copies import Copies
from everstep.agent.shelf import Area
from everstep.agent.shipping import Dock, Shipping
from everstep.errors import TransientError
from everstep.snapshot import About, Layout, Manifest, SnapshotError, Tensor
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
    and then ends well, or by `failure`."""

    def __init__(self, shown: dict[bytes, bytes] | None = None) -> None:
        self.withdrawn: list[bytes] = []
        self.shown = {} if shown is None else shown
        self.go = asyncio.Event()
        self.go.set()
        self.failure: Exception | None = None
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
            await self.go.wait()
            if self.failure is not None:
                raise self.failure
            view[:] = self.shown[offer.ticket]

    def close(self) -> None:
        self.closed = True


class Node:
    """One node. `told`: to the owner; `answers`: to workers."""

    def __init__(self, folder: Path, number: int = 0, shipping: Any = None) -> None:
        self.told: list[nodes.CopyNews] = []
        self.answers: list[messages.ToWorker] = []
        self.changed = asyncio.Event()
        self.shipping = shipping
        self.copies = Copies(folder, "run", number, shipping, self._tell)

    def _tell(self, news: nodes.CopyNews) -> None:
        self.told.append(news)
        self.changed.set()

    def _send(self, message: messages.ToWorker) -> None:
        self.answers.append(message)
        self.changed.set()

    async def until(self, what: Callable[[], bool]) -> None:
        while not what():
            self.changed.clear()
            await self.changed.wait()

    def says(self, message: Any, rank: int = 1, incarnation: int = 1) -> None:
        self.copies.handle(rank, incarnation, message, self._send)

    def shelve(self, step: int, nbytes: int = LAYOUT.nbytes, **who: int) -> messages.Shelf:
        self.says(messages.Shelve(turn=step, step=step, nbytes=nbytes), **who)
        answer = self.answers[-1]
        assert isinstance(answer, messages.Shelf)
        assert answer.turn == step
        return answer

    def shelved(self, step: int, turn: int = 0, **who: int) -> bytes:
        """A worker writes its copy of `step` and says so."""
        place = self.shelve(step, **who)
        assert not place.refusal, place.refusal
        about = About(run_id="run", rank=who.get("rank", 1), world=4, shard="s", step=step)
        with open(place.path, "r+b") as file:
            room = bytearray(LAYOUT.nbytes)
            manifest = snapshot.write(memoryview(room), LAYOUT, about, {"w": bytes([step]) * 4000})
            file.write(room)
        text = snapshot.encode(manifest)
        self.says(messages.Shelved(turn=turn or step, step=step, manifest=text), **who)
        return text

    def recall(self, step: int, turn: int = 50, **who: int) -> None:
        self.says(messages.Recall(turn=turn, step=step), **who)

    async def until_told(self, count: int) -> None:
        await self.until(lambda: len(self.told) == count)

    async def until_kept(self, count: int) -> None:
        await self.until(lambda: len(self.kept) == count)

    @property
    def kept(self) -> list[int]:
        """The turns of the copies of which workers have heard that they are kept."""
        return [answer.turn for answer in self.answers if isinstance(answer, messages.Kept)]

    @property
    def recalled(self) -> messages.Recalled:
        (answer,) = [a for a in self.answers if isinstance(a, messages.Recalled)]
        return answer

    @property
    def offered(self) -> nodes.Offered:
        return [news for news in self.told if isinstance(news, nodes.Offered)][-1]

    def take_of(self, offered: nodes.Offered) -> nodes.Take:
        return nodes.Take(
            rank=offered.rank,
            incarnation=offered.incarnation,
            manifest=offered.manifest,
            offer=offered.offer,
        )


def secured(step: int, incarnation: int = 1) -> nodes.Secured:
    return nodes.Secured(rank=1, incarnation=incarnation, step=step)


def content(path: str) -> bytes:
    return Path(path).read_bytes()[-4:]


# ---------------------------------------------------------------- one node


def test_without_a_keeper_a_copy_is_kept_when_it_is_here(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        for step in (1, 2, 3):
            node.shelved(step)
        assert node.kept == [1, 2, 3]
        assert node.told == [nodes.Took(rank=1, incarnation=1, step=s) for s in (1, 2, 3)]
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
        node.shelved(1)
        assert [type(said) for said in heard] == [messages.Shelf, nodes.Took, messages.Kept]
        await node.copies.close()

    run(test())


def test_without_room_the_worker_is_told_the_numbers(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        assert "needs 8.0 MiB" in node.shelve(1, nbytes=8 << 20).refusal
        node.shelved(1)
        assert node.kept == [1]
        await node.copies.close()

    run(test())


def test_a_worker_that_dies_half_way_leaves_the_copy_before(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        node.shelved(1)
        node.shelved(2)
        place = node.shelve(3)
        Path(place.path).write_bytes(b"\7" * LAYOUT.nbytes)
        node.copies.buried(1, 1)
        node.recall(2, incarnation=2)
        assert content(node.recalled.path) == b"\2\2\2\2"
        node.recall(3, turn=51, incarnation=2)
        assert node.answers[-1] == messages.Recalled(
            turn=51, refusal="no copy of rank 1 at step 3 is left, on node 0 or elsewhere"
        )
        node.shelved(3, incarnation=2)
        await node.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


def test_a_step_that_is_done_again_has_its_copy_made_again(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        node.shelved(1)
        node.shelved(2)
        node.shelve(2)  # stopped in the fence: the first one is of no step
        node.recall(2)
        assert node.recalled.refusal
        node.shelved(2, turn=9)
        assert node.kept == [1, 2, 9]
        await node.copies.close()

    run(test())


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_no_copy_is_refused(asked: bool, tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        if asked:
            node.shelve(1)
        with pytest.raises(SnapshotError):
            node.says(messages.Shelved(turn=1, step=1, manifest=b"{}"))
        assert node.kept == []
        assert node.told == []
        await node.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


# ---------------------------------------------------------------- with a keeper


def keeping(folder: Path) -> Node:
    node = Node(folder, shipping=Paper())
    node.copies.obey(nodes.Keepers(keepers={1: 4}))
    return node


def test_with_a_keeper_a_copy_is_kept_when_that_has_it(tmp_path: Path) -> None:
    async def test() -> None:
        node = keeping(tmp_path)
        manifest = node.shelved(1)
        offered = node.offered
        assert (offered.rank, offered.incarnation, offered.to) == (1, 1, 4)
        assert offered.manifest == manifest
        assert node.kept == []
        node.copies.obey(secured(2))  # of another step
        node.copies.obey(secured(1, incarnation=2))
        assert node.kept == []
        node.copies.obey(secured(1))
        node.copies.obey(secured(1))  # by a second holder
        assert node.kept == [1]
        node.shelved(1, rank=2)  # nobody keeps its copies
        assert node.kept == [1, 1]
        await node.copies.close()
        assert node.shipping.closed

    run(test())


def test_a_dead_worker_is_not_answered(tmp_path: Path) -> None:
    async def test() -> None:
        node = keeping(tmp_path)
        node.shelved(1)
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
        node.shelved(1)
        stale = node.offered.offer.ticket
        node.copies.obey(nodes.Keepers(keepers={1: 5}))
        assert node.shipping.withdrawn == [stale]
        node.copies.obey(secured(1))
        assert node.kept == []
        node.shelved(1, turn=7)
        assert node.offered.to == 5
        node.copies.obey(secured(1))
        assert node.kept == [7]
        await node.copies.close()

    run(test())


def test_a_copy_that_nobody_came_for_is_lent_no_longer_than_needed(tmp_path: Path) -> None:
    async def test() -> None:
        node = keeping(tmp_path)
        tickets = []
        for step in (1, 2, 3, 4):
            node.shelved(step)
            tickets.append(node.offered.offer.ticket)
            node.copies.obey(secured(step))
        assert node.kept == [1, 2, 3, 4]
        assert node.shipping.withdrawn == tickets[:-1]
        await node.copies.close()

    run(test())


# ---------------------------------------------------------------- as a keeper


def test_a_keeper_fetches_and_says_so(tmp_path: Path) -> None:
    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, away = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 4, Paper(shown))
        home.copies.obey(nodes.Keepers(keepers={1: 4}))
        for step in (1, 2, 3):
            home.shelved(step)
            away.copies.obey(away.take_of(home.offered))
            await away.until_told(step)
            home.copies.obey(secured(step))
        assert away.told == [nodes.Took(rank=1, incarnation=1, step=s) for s in (1, 2, 3)]
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
        home.copies.obey(nodes.Keepers(keepers={1: 4}))
        home.shelved(1)
        away.copies.obey(away.take_of(home.offered))
        await away.until_told(1)
        home.copies.obey(secured(1))
        home.shelved(2)
        away.shipping.failure = failure
        away.copies.obey(away.take_of(home.offered))
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


@pytest.mark.parametrize("by", ["another take", "a new generation", "the rank itself"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_transfer_that_was_overtaken_is_not_told(by: str, fails: bool, tmp_path: Path) -> None:
    """Its end, good or bad, would be taken for that of the copy that is wanted now."""

    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, away = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 4, Paper(shown))
        home.copies.obey(nodes.Keepers(keepers={1: 4}))
        home.shelved(1)
        away.shipping.go.clear()
        away.copies.obey(away.take_of(home.offered))
        await asyncio.sleep(0)
        (overtaken,) = away.copies._transfers
        match by:
            case "another take":
                home.shelved(1, turn=9)
                away.copies.obey(away.take_of(home.offered))
                await asyncio.sleep(0)
            case "a new generation":
                away.copies.obey(nodes.Keepers(keepers={}))
            case "the rank itself":
                away.shelve(1, incarnation=2)
        away.shipping.failure = TransientError("it is cut") if fails else None
        away.shipping.go.set()
        await asyncio.gather(overtaken, *away.copies._transfers)
        expected: list[type] = []
        if by == "another take":
            expected = [nodes.Untaken if fails else nodes.Took]
        assert [type(news) for news in away.told] == expected
        await home.copies.close()
        await away.copies.close()
        assert list(tmp_path.iterdir()) == []

    run(test())


# ---------------------------------------------------------------- a copy from elsewhere


def test_a_copy_is_found_elsewhere(tmp_path: Path) -> None:
    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, seeker = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 5, Paper(shown))
        home.shelved(3)
        seeker.recall(3, incarnation=2)
        assert seeker.told == [nodes.Seek(rank=1, incarnation=2, step=3)]
        home.copies.obey(nodes.Lend(rank=1, incarnation=2, step=3, to=5))
        seeker.copies.obey(seeker.take_of(home.offered))
        await seeker.until(lambda: bool(seeker.answers))
        assert seeker.told[1:] == [nodes.Took(rank=1, incarnation=2, step=3)]
        assert seeker.recalled.turn == 50
        assert content(seeker.recalled.path) == b"\3\3\3\3"
        await home.copies.close()
        await seeker.copies.close()

    run(test())


def test_a_copy_that_is_not_where_it_was_thought_to_be(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path, shipping=Paper())
        node.copies.obey(nodes.Lend(rank=1, incarnation=2, step=3, to=5))
        node.shelved(1)
        node.copies.obey(nodes.Lend(rank=1, incarnation=2, step=3, to=5))
        lack = nodes.Lack(rank=1, incarnation=2, step=3, to=5)
        assert [news for news in node.told if isinstance(news, nodes.Lack)] == [lack, lack]
        await node.copies.close()

    run(test())


def test_a_copy_that_nobody_has(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path, shipping=Paper())
        node.recall(3)
        node.copies.obey(nodes.Missing(rank=1, step=2))  # of another
        node.copies.obey(nodes.Missing(rank=2, step=3))
        assert node.answers == []
        node.copies.obey(nodes.Missing(rank=1, step=3))
        assert "no copy of rank 1 at step 3 is left" in node.recalled.refusal
        await node.copies.close()

    run(test())


def test_the_transfer_for_a_dead_process_is_no_answer_to_the_next(tmp_path: Path) -> None:
    """It fails when the next one's begins, and that one is still waited for."""

    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, seeker = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 5, Paper(shown))
        home.shelved(3)
        seeker.shipping.go.clear()
        for incarnation in (2, 3):
            seeker.recall(3, turn=incarnation, incarnation=incarnation)
            home.copies.obey(nodes.Lend(rank=1, incarnation=incarnation, step=3, to=5))
            seeker.copies.obey(seeker.take_of(home.offered))
            await asyncio.sleep(0)
            if incarnation == 2:
                seeker.copies.buried(1, 2)
        seeker.shipping.go.set()
        await asyncio.gather(*seeker.copies._transfers)
        assert seeker.recalled.turn == 3
        assert not seeker.recalled.refusal
        await home.copies.close()
        await seeker.copies.close()

    run(test())


def test_a_recall_whose_transfer_fails_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, seeker = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 5, Paper(shown))
        home.shelved(3)
        seeker.recall(3, incarnation=2)
        home.copies.obey(nodes.Lend(rank=1, incarnation=2, step=3, to=5))
        seeker.shipping.failure = TransientError("the way there is cut")
        seeker.copies.obey(seeker.take_of(home.offered))
        await seeker.until(lambda: bool(seeker.answers))
        assert seeker.recalled.refusal == "the way there is cut"
        await home.copies.close()
        await seeker.copies.close()

    run(test())


def test_the_end_leaves_nothing_whatever_was_on_its_way(tmp_path: Path) -> None:
    async def test() -> None:
        shown: dict[bytes, bytes] = {}
        home, away = Node(tmp_path, 0, Paper(shown)), Node(tmp_path, 4, Paper(shown))
        home.copies.obey(nodes.Keepers(keepers={1: 4}))
        home.shelved(1)
        home.shelve(1, rank=2)
        away.shipping.go.clear()
        away.copies.obey(away.take_of(home.offered))
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
        self.home.copies.obey(nodes.Keepers(keepers={1: 4}))
        self.away.copies.obey(nodes.Keepers(keepers={1: 4}))

    def _passes_on(self, node: Node) -> Callable[[nodes.CopyNews], None]:
        def tell(news: nodes.CopyNews) -> None:
            node._tell(news)
            match news:
                case nodes.Offered(to=to):
                    self.nodes[to].copies.obey(node.take_of(news))
                case nodes.Took(step=step) | nodes.Untaken(step=step) if node is self.away:
                    self.home.copies.obey(secured(step))
                case nodes.Seek(rank=rank, incarnation=incarnation, step=step):
                    lend = nodes.Lend(rank=rank, incarnation=incarnation, step=step, to=4)
                    self.home.copies.obey(lend)

        return tell

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.copies.close()


def test_copies_travel_between_two_agents(tmp_path: Path) -> None:
    async def test() -> None:
        pair = Pair(tmp_path)
        for step in range(1, 9):
            pair.home.shelved(step)
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
        pair.home.copies.obey(nodes.Keepers(keepers={}))
        pair.home.shelved(3)
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
        pair.home.shelved(1)
        await pair.home.until_kept(1)
        assert pair.away.copies._shelf is not None
        monkeypatch.setattr(pair.away.copies._shelf, "_budget", Budget(limit_bytes=0))
        for step in range(2, 8):
            pair.home.shelved(step)
            await pair.home.until_kept(step)
        await pair.close()
        assert list(tmp_path.iterdir()) == []

    run(test())
