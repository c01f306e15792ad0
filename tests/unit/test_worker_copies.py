"""A rank's own copies, made and used, against an agent on paper."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from everstep import snapshot
from everstep.errors import UserError
from everstep.snapshot import Manifest
from everstep.wire import messages
from everstep.worker import transfer
from everstep.worker.control import Control, Stopped
from everstep.worker.copies import Copies, CopyError
from everstep.worker.state import State
from everstep.worker.transfer import ReceiptError

GENERATION = 3
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex128,
    torch.complex64,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]
Answers = Iterable[messages.ToWorker]


class AgentOnPaper(Control):
    """The worker's end of a channel, at whose other end an agent is played: what it answers is in
    the mailbox at once. `plays`: another answer for messages of a kind."""

    def __init__(self, folder: Path) -> None:
        self._ends = socket.socketpair()
        super().__init__(self._ends[0], lambda _: None)
        self._folder = folder
        self._numbers = itertools.count()
        self._begun: dict[int, Path] = {}
        self.said: list[msgspec.Struct] = []
        self.kept: dict[int, tuple[Path, bytes]] = {}
        self.plays: dict[type, Callable[[Any], Answers]] = {}

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def send(self, message: msgspec.Struct) -> None:
        self.said.append(message)
        play = self.plays.get(type(message), self.answers)
        self._inbox += play(message)

    def answers(self, message: msgspec.Struct) -> Answers:
        match message:
            case messages.Shelve(turn=turn, step=step, nbytes=nbytes):
                path = self._area(step, nbytes)
                return [messages.Shelf(turn=turn, path=str(path))]
            case messages.Shelved(turn=turn, step=step, manifest=manifest):
                first = not self.kept
                self.kept[step] = self._begun[step], manifest
                return [messages.Kept(turn=turn), *([messages.Safe(turn=turn)] if first else [])]
            case messages.Note():
                return []
            case messages.Recall(turn=turn, step=step):
                path, manifest = self.kept[step]
                return [messages.Recalled(turn=turn, path=str(path), manifest=manifest)]
        raise AssertionError(f"an agent is not told {message}")

    def _area(self, step: int, nbytes: int) -> Path:
        """Two areas take turns, as on a shelf; one that does not fit is made anew."""
        path = self._begun.get(step) or self._begun.get(step - 2)
        if path is None or path.stat().st_size != nbytes:
            path = self._folder / f"area-{next(self._numbers)}"
            path.write_bytes(bytes(nbytes))
        self._begun[step] = path
        return path

    def manifest(self, step: int) -> Manifest:
        return snapshot.decode(self.kept[step][1])

    def stop(self) -> None:
        self.stopped = GENERATION


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentOnPaper]:
    agent = AgentOnPaper(tmp_path)
    yield agent
    agent.close()


def copies_of(
    agent: Control, *, run_id: str = "run", rank: int = 1, every: int = 0, write: bool = True
) -> Copies:
    class Spec:
        world_size = 4

    spec = Spec()
    spec.run_id, spec.rank = run_id, rank  # type: ignore[attr-defined]
    copies = Copies(agent, cast(Any, spec))
    copies.begin(messages.Go(copies=True, copy=write, copy_every=every))
    return copies


class Counter:
    """An object of the script."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"count": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values


class Odd(nn.Module):
    """Parameters and constant buffers of all kinds."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(5, 3, generator=generator))
        self.across = nn.Parameter(torch.randn(4, 6, generator=generator).t())
        self.every_other = nn.Parameter(torch.randn(9, generator=generator)[::2])
        self.alone = nn.Parameter(torch.randn((), generator=generator))
        self.empty = nn.Parameter(torch.zeros(0, 7))
        for number, dtype in enumerate(DTYPES):
            values = torch.randint(0, 2, (3, 2), generator=generator)
            self.register_buffer(f"kind_{number}", values.to(dtype))
        self.register_buffer("expanded", torch.randn(4, 1, generator=generator).expand(4, 3))
        turned = torch.randn(3, dtype=torch.complex64, generator=generator)
        self.register_buffer("conjugate", turned.conj())


def state_of(module: nn.Module | None = None, counter: Counter | None = None) -> State:
    module = module or Odd()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    things = {"model": module, "optimizer": optimizer, "counter": counter or Counter()}
    state = State(things)
    state.shard = "1 of 4"
    return state


def update(state: State, times: int = 1) -> None:
    for _ in range(times):
        for parameter in state.parameter_list:
            parameter.grad = torch.full_like(parameter, 0.5)
        for optimizer in state.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        for thing in state.objects.values():
            thing.values["count"] += 1


def keep(copies: Copies, state: State, step: int) -> bool:
    return copies.keep(state, step, GENERATION, gradients=False)


def recall(copies: Copies, state: State, step: int) -> str:
    return transfer.recall(copies, state, step, GENERATION)[0]


# ---------------------------------------------------------------- there and back


def test_a_new_process_has_what_the_old_one_had(agent: AgentOnPaper) -> None:
    counter = Counter()
    old = state_of(counter=counter)
    update(old, 3)
    counter.values["notes"] = {"deep": [1, (2.5, None)], "tensor": torch.arange(3)}
    old.modules["model"].eval()
    old.optimizers["optimizer"].param_groups[0]["lr"] = 0.03
    assert keep(copies_of(agent), old, 7)
    new = state_of(Odd(seed=5))
    assert new.digests() != old.digests()
    recall(copies_of(agent), new, 7)
    assert new.digests() == old.digests()
    assert new.optimizers["optimizer"].param_groups[0]["lr"] == 0.03
    assert not new.modules["model"].training
    assert new.steering().groups == new.at_commit.groups  # type: ignore[union-attr]


def test_the_areas_fit_the_next_copies_though_the_rest_grows(agent: AgentOnPaper) -> None:
    """The room for what is no tensor is a round number: only a leap needs other areas."""
    counter, copies = Counter(), copies_of(agent)
    state = state_of(counter=counter)
    update(state)
    for step in range(1, 6):
        counter.values["said"] = "x" * (100 * step)
        assert keep(copies, state, step)
    sizes = [said.nbytes for said in agent.said if isinstance(said, messages.Shelve)]
    assert len(set(sizes)) == 1
    counter.values["said"] = "x" * 100_000
    assert keep(copies, state, 6)
    grown = [said.nbytes for said in agent.said if isinstance(said, messages.Shelve)][-1]
    assert grown > sizes[0] + 80_000
    fresh, seen = state_of(Odd(seed=5), made := Counter()), copies_of(agent)
    recall(seen, fresh, 6)
    assert made.values["said"] == "x" * 100_000
    recall(seen, fresh, 5)
    assert made.values["said"] == "x" * 500


def test_gradients_travel_where_the_script_carries_them(agent: AgentOnPaper) -> None:
    old, new = state_of(), state_of(Odd(seed=5))
    for number, parameter in enumerate(old.parameter_list):
        if number % 2:
            parameter.grad = torch.full_like(parameter, number)
    for parameter in new.parameter_list:
        parameter.grad = torch.ones_like(parameter)
    assert copies_of(agent).keep(old, 2, GENERATION, gradients=True)
    recall(copies_of(agent), new, 2)
    for had, has in zip(old.parameter_list, new.parameter_list, strict=True):
        assert (had.grad is None) == (has.grad is None)
        assert had.grad is None or torch.equal(had.grad, has.grad)  # type: ignore[arg-type]


def test_optimizer_state_is_made_and_removed_by_the_copy(agent: AgentOnPaper) -> None:
    fresh, trained = state_of(), state_of(Odd(seed=5))
    update(trained)
    assert keep(copies_of(agent), fresh, 1)
    recall(copies_of(agent), trained, 1)
    assert list(trained.optimizer_tensors()) == []
    update(trained)
    assert keep(copies_of(agent), trained, 2)
    recall(copies_of(agent), fresh, 2)
    assert fresh.digests() == trained.digests()


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=8
    ),
    st.integers(0, 2**32),
)
def test_any_tensors_come_back_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory,
    buffers: list[tuple[torch.dtype, list[int]]],
    seed: int,
) -> None:
    """NaNs with any payload and negative zeros too."""
    generator = torch.Generator().manual_seed(seed)

    def module(filled: bool) -> nn.Module:
        made = nn.Linear(2, 1)
        for number, (dtype, shape) in enumerate(buffers):
            tensor = torch.zeros(shape, dtype=dtype)
            if filled and tensor.numel():
                high = 2 if dtype is torch.bool else 256
                flat = tensor.reshape(-1).view(torch.uint8)
                flat.random_(0, high, generator=generator)
            made.register_buffer(f"b{number}", tensor)
        return made

    agent = AgentOnPaper(tmp_path_factory.mktemp("areas"))
    old, new = state_of(module(True)), state_of(module(False))
    assert keep(copies_of(agent), old, 1)
    recall(copies_of(agent), new, 1)
    agent.close()
    assert new.digests() == old.digests()


# ---------------------------------------------------------------- undo


def test_an_update_is_undone_from_the_copy_of_the_step_before(agent: AgentOnPaper) -> None:
    copies, state = copies_of(agent), state_of()
    assert copies.undo(state, 0) is None
    assert keep(copies, state, 1)
    before = state.digests()
    undo = copies.undo(state, 1)
    update(state)
    assert keep(copies, state, 2)
    assert copies.undo(state, 1) is None, "it is too late to say so"
    assert undo is not None
    undo.put_back()
    assert state.digests() == before
    assert list(state.optimizer_tensors()) == []
    assert copies.undo(state, 1) is not None, "and it can fail again"
    update(state)
    assert keep(copies, state, 2)  # done again
    assert copies.undo(state, 2) is not None
    update(state)
    assert keep(copies, state, 3)
    assert copies.undo(state, 1) is None, "its area has another copy by now"
    assert copies.undo(state, 3) is not None


def test_what_the_script_has_changed_since_is_not_undone(agent: AgentOnPaper) -> None:
    """A copy knows nothing of what the loop's body, or a section, has done to the weights."""
    copies, state = copies_of(agent), state_of()
    assert keep(copies, state, 1)
    with torch.no_grad():
        state.parameter_list[0].mul_(2)
    assert copies.undo(state, 1) is None


def test_a_copy_that_was_stopped_is_none(agent: AgentOnPaper) -> None:
    copies, state = copies_of(agent), state_of()
    assert keep(copies, state, 1)

    def stops(_: messages.Shelved) -> Answers:
        agent.stop()
        return []

    agent.plays[messages.Shelved] = stops
    assert not keep(copies, state, 2)
    assert copies.undo(state, 2) is None
    assert copies.undo(state, 1) is not None


def test_a_rank_whose_shard_is_elsewhere_asks_for_nothing(agent: AgentOnPaper) -> None:
    copies = copies_of(agent, write=False)
    assert keep(copies, state_of(), 1)
    assert agent.said == []


# ---------------------------------------------------------------- what the agent says


@pytest.mark.parametrize("asked", [messages.Shelve, messages.Shelved])
def test_the_answer_to_a_stopped_request_is_not_taken_for_anothers(
    asked: type, agent: AgentOnPaper
) -> None:
    """What comes late, of the attempt before, names another turn."""
    copies, state = copies_of(agent), state_of()
    late: list[messages.ToWorker] = []

    def stops(message: Any) -> Answers:
        answer = agent.answers(message)
        if isinstance(message, messages.Shelve):
            answer = [messages.Shelf(turn=message.turn, path="/nowhere")]
        late.extend(answer)
        agent.stop()
        return []

    agent.plays[asked] = stops
    assert not keep(copies, state, 1)
    del agent.plays[asked]
    agent.stopped = GENERATION - 1
    answered: list[bool] = []

    def answers_late(message: Any) -> Answers:
        both = [*late, *agent.answers(message)] if not answered else agent.answers(message)
        answered.append(True)
        return both

    agent.plays[asked] = answers_late
    assert keep(copies, state, 1)
    assert copies.undo(state, 1) is not None
    recall(copies, state, 1)


def test_where_there_is_no_room_the_job_is_told(agent: AgentOnPaper) -> None:
    agent.plays[messages.Shelve] = lambda m: [messages.Shelf(turn=m.turn, refusal="7 MiB too few")]
    with pytest.raises(UserError, match="7 MiB too few"):
        keep(copies_of(agent), state_of(), 1)


def test_a_copy_that_is_nowhere_fails_the_receipt(agent: AgentOnPaper) -> None:
    def refuses(message: messages.Recall) -> Answers:
        return [messages.Recalled(turn=message.turn, refusal="no copy of rank 1 is left")]

    agent.plays[messages.Recall] = refuses
    with pytest.raises(ReceiptError, match="no copy of rank 1"):
        recall(copies_of(agent), state_of(), 1)


def test_a_recall_ends_with_its_generation(agent: AgentOnPaper) -> None:
    agent.plays[messages.Recall] = lambda _: []
    agent.stop()
    with pytest.raises(Stopped):
        copies_of(agent).fetch(state_of(), 1, GENERATION)


def test_a_copy_that_can_not_be_kept_ends_the_job(agent: AgentOnPaper) -> None:
    agent.plays[messages.Shelved] = lambda m: [messages.Kept(turn=m.turn, refusal="it is broken")]
    with pytest.raises(UserError, match="it is broken"):
        keep(copies_of(agent), state_of(), 1)


def test_a_spoiled_copy_is_taken_from_elsewhere(agent: AgentOnPaper) -> None:
    copies, state = copies_of(agent), state_of()
    update(state)
    assert keep(copies, state, 1)
    wanted, (path, manifest) = state.digests(), agent.kept[1]
    whole = path.with_name("lent")
    whole.write_bytes(path.read_bytes())
    path.write_bytes(bytes(len(path.read_bytes())))

    def lends(message: messages.Recall) -> Answers:
        where = whole if message.spoiled else path
        return [messages.Recalled(turn=message.turn, path=str(where), manifest=manifest)]

    agent.plays[messages.Recall] = lends
    other = state_of(Odd(seed=5))
    recall(copies_of(agent), other, 1)
    assert other.digests() == wanted
    asked = [said.spoiled for said in agent.said if isinstance(said, messages.Recall)]
    assert asked == [False, True]


def test_where_all_copies_are_spoiled_each_is_tried_once(agent: AgentOnPaper) -> None:
    copies, state = copies_of(agent), state_of()
    assert keep(copies, state, 1)
    path, manifest = agent.kept[1]
    path.write_bytes(bytes(len(path.read_bytes())))
    answers = [
        messages.Recalled(turn=0, path=str(path), manifest=manifest),
        messages.Recalled(turn=0, path=str(path), manifest=manifest),
        messages.Recalled(turn=0, refusal="none is left"),
    ]
    agent.plays[messages.Recall] = lambda m: [msgspec.structs.replace(answers.pop(0), turn=m.turn)]
    with pytest.raises(ReceiptError, match=r"is corrupt in bytes.*none is left"):
        recall(copies_of(agent), state_of(), 1)
    assert answers == []


# ---------------------------------------------------------------- steps that don't wait


class Ranks:
    """One rank whose peers all do as it does. `asked`: the steps whose copies must stay, by each
    copy."""

    def __init__(self, agent: AgentOnPaper, every: int = 1) -> None:
        self.agent, self.copies, self.state = (
            agent,
            copies_of(agent, every=every, rank=0),
            state_of(),
        )
        self.step = 0

    def run(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            update(self.state)
            assert keep(self.copies, self.state, self.step)
            self.copies.agree(self.step, list(self.copies.says(self.step)))

    def settle(self, *steps: int) -> None:
        """The keeper has the copies of `steps`."""
        said = [message for message in self.agent.said if isinstance(message, messages.Shelved)]
        turns = {message.step: message.turn for message in said}
        self.agent._inbox += [messages.Safe(turn=turns[step]) for step in steps]

    @property
    def asked(self) -> list[tuple[int, ...]]:
        return [message.keep for message in self.agent.said if isinstance(message, messages.Shelve)]


def test_what_is_not_safe_yet_stays(agent: AgentOnPaper) -> None:
    """While one copy is written to, the one before is on its way, and another one is safe."""
    ranks = Ranks(agent)
    for step in range(1, 6):
        ranks.run()
        ranks.settle(step)
    assert ranks.asked == [(), (1,), (1, 2), (2, 3), (3, 4)]
    assert len({path for path, _ in agent.kept.values()}) >= 2
    assert ranks.copies.oldest == 4


def test_a_copy_for_which_there_is_no_room_is_not_made(agent: AgentOnPaper) -> None:
    ranks = Ranks(agent)
    ranks.run(5)
    assert [s.step for s in agent.said if isinstance(s, messages.Shelved)] == [1, 2, 3]
    notes = [said for said in agent.said if isinstance(said, messages.Note)]
    assert [note.key for note in notes] == ["copy-skipped"]
    assert ranks.copies.undo(ranks.state, 5) is None, "an update is undone otherwise then"
    ranks.settle(1, 2, 3)
    ranks.run(2)
    assert ranks.asked[-1] == (3,), "agreed on in the fence of step 6"


def test_a_step_waits_where_the_safe_copy_is_too_far_behind(agent: AgentOnPaper) -> None:
    ranks = Ranks(agent)
    ranks.run(5)
    update(ranks.state)
    agent.stop()  # whoever waits is told so
    assert not keep(ranks.copies, ranks.state, 6)
    ranks.settle(1, 2)
    assert not keep(ranks.copies, ranks.state, 6), "the newest is waited for"
    ranks.settle(3)
    assert keep(ranks.copies, ranks.state, 6)


def test_after_a_regroup_what_is_left_is_what_stays(agent: AgentOnPaper) -> None:
    ranks = Ranks(agent)
    ranks.run(3)
    assert ranks.copies.oldest == 1
    ranks.copies.resume((2,))
    assert ranks.copies.oldest == 2
    assert ranks.copies.undo(ranks.state, 3) is None
    ranks.step = 2
    ranks.settle(1)  # of the generation before
    ranks.run()
    assert ranks.asked[-1] == (2,)
    assert ranks.copies.oldest == 2


def test_the_step_after_a_regroup_for_which_there_is_no_room_is_no_news(
    agent: AgentOnPaper,
) -> None:
    ranks = Ranks(agent)
    ranks.run(2)
    ranks.copies.resume((1, 2))
    ranks.run(2)
    assert list(ranks.asked[-1]) == [1, 2], "for step 3, and none for step 4"
    ranks.copies.closing()
    assert not any(isinstance(said, messages.Note) for said in agent.said)
    ranks.settle(3)
    ranks.run(2)
    assert list(ranks.asked[-1]) == [3]


# ---------------------------------------------------------------- what is not to be believed


@pytest.mark.parametrize("place", [0, 100, -1, "middle"])
def test_a_flipped_bit_is_never_loaded(place: int | str, agent: AgentOnPaper) -> None:
    copies, state = copies_of(agent), state_of()
    update(state)
    assert keep(copies, state, 1)
    path, _ = agent.kept[1]
    data = bytearray(path.read_bytes())
    at = len(data) // 2 if isinstance(place, str) else place
    data[at] ^= 0x10
    path.write_bytes(data)
    other = state_of(Odd(seed=5))
    before = other.digests()
    with pytest.raises(ReceiptError, match="rank 1 at step 1 is corrupt"):
        recall(copies_of(agent), other, 1)
    assert other.digests() == before
    undo = copies.undo(state, 1)
    assert undo is not None
    with pytest.raises(CopyError, match="corrupt"):
        undo.put_back()
    path.unlink()
    with pytest.raises(CopyError, match="No such file"):
        undo.put_back()


@pytest.mark.parametrize(
    ("whose", "said"),
    [
        ({"rank": 2}, "of rank 1 at step 1 of run run, and rank 2"),
        ({"run_id": "other"}, "of run run, and rank 1 needs step 1 of run other"),
    ],
)
def test_a_copy_of_another_is_refused(
    whose: dict[str, Any], said: str, agent: AgentOnPaper
) -> None:
    assert keep(copies_of(agent), state_of(), 1)
    with pytest.raises(ReceiptError, match=said):
        recall(copies_of(agent, **whose), state_of(), 1)


def test_a_copy_of_another_step_or_shard_is_refused(agent: AgentOnPaper) -> None:
    copies, state = copies_of(agent), state_of()
    assert keep(copies, state, 1)
    agent.kept[2] = agent.kept[1]
    with pytest.raises(CopyError, match="at step 1 of run run, and rank 1 needs step 2"):
        copies.fetch(state, 2, GENERATION)
    state.shard = "another"
    with pytest.raises(CopyError, match="of shard 1 of 4, and the rank has another"):
        copies.fetch(state, 1, GENERATION)


def test_a_file_that_is_no_copy_is_refused(agent: AgentOnPaper) -> None:
    copies, state = copies_of(agent), state_of()
    assert keep(copies, state, 1)
    path, manifest = agent.kept[1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ReceiptError, match="its manifest"):
        recall(copies, state, 1)
    agent.kept[1] = path, manifest[:-1]
    with pytest.raises(ReceiptError, match="no manifest"):
        recall(copies, state, 1)


def test_another_model_is_said_to_be_one(agent: AgentOnPaper) -> None:
    assert keep(copies_of(agent), state_of(nn.Linear(3, 2)), 1)
    with pytest.raises(UserError, match="the script must build the same model"):
        recall(copies_of(agent), state_of(nn.Linear(2, 3)), 1)
