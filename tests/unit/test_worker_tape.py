"""The tape: what is recorded and when, what is played to whom, what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.fakegroups import FakeWorld, in_c10d
from tests.unit.fakenccl import WAIT_S, NcclWorld

from everstep.errors import UserError
from everstep.wire import messages
from everstep.worker import tape as tapes
from everstep.worker.communicators import Answer
from everstep.worker.tape import ITEM_BYTES, Tape

torch.set_num_threads(1)


class Agent:
    """Keeps a rank's tape and hears its notes."""

    def __init__(self) -> None:
        self.items: dict[str, messages.Told] = {}
        self.sent = 0
        self.notes: dict[str, str] = {}

    def take(self, message: messages.Tape) -> None:
        self.sent += 1
        self.items |= {item.key: item for item in message.items}

    def tape(self, *, playing: bool = False) -> Tape:
        """A tape of a new incarnation."""
        return Tape(1, self.items.values(), self.take, self.notes.__setitem__, playing=playing)


@pytest.fixture
def agent() -> Agent:
    return Agent()


def tell(tape: Tape, operation: str, *values: torch.Tensor, group: str = "g") -> None:
    """A live collective that is over at once."""
    place = tape.place(group, operation, list(values))
    if place is not None:
        place.keep(0)


def hear(tape: Tape, operation: str, *likes: torch.Tensor, group: str = "g") -> list[Any] | None:
    """What a solo collective with outputs like these is told."""
    outputs = [torch.full_like(like, 77) for like in likes]
    item = tape.play(group, operation, outputs)
    if item is None:
        assert all((output == 77).all() for output in outputs)
        return None
    return [output.tolist() for output in outputs]


def whole(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def real(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_what_was_told_is_played_in_its_order(agent: Agent) -> None:
    tape = agent.tape()
    tell(tape, "broadcast", real(1.5))
    tell(tape, "broadcast", real(2.5))
    tell(tape, "broadcast", real(3.5), group="other")
    tell(tape, "recv", real(4.5))
    tell(tape, "allgather", whole(1, 2), whole(3, 4))
    tape.protect([])
    joiner = agent.tape(playing=True)
    assert hear(joiner, "recv", real(0)) == [[4.5]]
    assert hear(joiner, "broadcast", real(0)) == [[1.5]]
    assert hear(joiner, "broadcast", real(0), group="other") == [[3.5]]
    assert hear(joiner, "broadcast", real(0)) == [[2.5]]
    assert hear(joiner, "broadcast", real(0)) is None
    assert hear(joiner, "allgather", whole(0, 0), whole(0, 0)) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        torch.tensor([1 + 2j, 3 - 4j]),
        torch.tensor([True, False]),
        torch.tensor(7, dtype=torch.uint8),
        torch.empty(0, 3),
        torch.arange(12.0).reshape(3, 4).t()[1:],
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_any_dense_tensor_is_played_bit_for_bit(agent: Agent, tensor: torch.Tensor) -> None:
    tape = agent.tape()
    tell(tape, "recv", tensor)
    tape.protect([])
    target = torch.zeros_like(tensor)
    assert agent.tape(playing=True).play("g", "recv", [target]) is not None
    assert torch.equal(target, tensor)


@pytest.mark.parametrize("other", [real(0, 0), whole(0), torch.zeros(1, 1), torch.zeros(1).half()])
def test_what_does_not_fit_is_not_played(agent: Agent, other: torch.Tensor) -> None:
    tape = agent.tape()
    tell(tape, "broadcast", real(1.5))
    tape.protect([])
    joiner = agent.tape(playing=True)
    assert hear(joiner, "broadcast", other) is None
    assert hear(joiner, "broadcast", real(0)) == [[1.5]]  # another's call does not count


def test_nothing_is_sent_before_protect_and_then_everything_at_once(agent: Agent) -> None:
    tape = agent.tape()
    tell(tape, "broadcast", real(1.5))
    tell(tape, "broadcast", real(2.5))
    assert agent.sent == 0
    tape.protect([])
    assert (agent.sent, len(agent.items)) == (1, 2)
    tell(tape, "broadcast", real(3.5))  # still set-up
    tape.begin(1)
    tell(tape, "broadcast", whole(4))
    assert (agent.sent, len(agent.items)) == (3, 4)


def test_steps_keep_what_is_no_float(agent: Agent) -> None:
    tape = agent.tape()
    tape.protect([])
    for step in (1, 2):
        tape.begin(step)
        tell(tape, "allreduce", real(0.5))
        tell(tape, "allreduce", torch.tensor([1j]))
        tell(tape, "broadcast", whole(step, step))
    assert len(agent.items) == 2
    joiner = agent.tape(playing=True)
    assert hear(joiner, "broadcast", whole(0, 0)) is None  # that was in no set-up
    for step in (1, 2):
        joiner.rehearse(step)
        assert hear(joiner, "broadcast", whole(0, 0)) == [[step, step]]
    joiner.rehearse(3)
    assert hear(joiner, "broadcast", whole(0, 0)) is None


def test_a_step_that_is_done_again_counts_from_its_beginning(agent: Agent) -> None:
    """What only its failed attempt was told stays, DDP does not lay out its buckets again; and is
    told apart by what came before it, from what another model was told in the second."""
    tape = agent.tape()
    tape.protect([])
    tape.begin(2)
    tell(tape, "broadcast", whole(1, 2, 3))
    tell(tape, "broadcast", whole(4))
    tape.begin(2)
    tell(tape, "broadcast", whole(5))
    joiner = agent.tape(playing=True)
    joiner.rehearse(2)
    assert hear(joiner, "broadcast", whole(0, 0, 0)) == [[1, 2, 3]]
    assert hear(joiner, "broadcast", whole(0)) == [[4]]
    assert hear(joiner, "broadcast", whole(0)) is None
    joiner.rehearse(2)
    assert hear(joiner, "broadcast", whole(0)) == [[5]]


def test_a_survivor_hears_its_own_tape_in_a_rehearsal_alone(agent: Agent) -> None:
    tape = agent.tape()
    tape.protect([])
    tape.begin(1)
    tell(tape, "recv", whole(6))
    tape.begin(1)
    assert hear(tape, "recv", whole(0)) is None  # a wrapper is reset
    tape.rehearse(1)
    assert hear(tape, "recv", whole(0)) == [[6]]


# ---------------------------------------------------------------- not on the tape


def large() -> torch.Tensor:
    return torch.zeros(ITEM_BYTES // 4 + 1)


def refused(agent: Agent, operation: str, like: torch.Tensor) -> str:
    """How a joiner is refused; empty if it is not."""
    try:
        assert hear(agent.tape(playing=True), operation, like) is None
    except UserError as error:
        return str(error)
    return ""


def test_a_large_thing_is_refused_unless_it_is_protected(agent: Agent) -> None:
    tape = agent.tape()
    free, state, part = large(), large(), torch.zeros(2, ITEM_BYTES)
    tell(tape, "broadcast", free)
    tell(tape, "recv", state.view(-1, 1))
    tell(tape, "scatter", part[1])
    assert agent.notes == {}
    tape.protect([state, part])
    (key,) = agent.notes
    assert key.startswith("untold-test_worker_tape.py:")
    assert "rank 1 was told 1.0 MB by a collective (broadcast) in set-up" in agent.notes[key]
    assert "is larger than 1 MiB" in refused(agent, "broadcast", free)
    assert refused(agent, "recv", state.view(-1, 1)) == refused(agent, "scatter", part[1]) == ""


def test_memory_that_was_freed_protects_nothing(agent: Agent) -> None:
    tape = agent.tape()
    tell(tape, "broadcast", large())
    likely = large()  # the allocator gives the same address again
    tape.protect([likely])
    assert refused(agent, "broadcast", likely)


def test_a_large_thing_after_protect_is_judged_too(agent: Agent) -> None:
    tape = agent.tape()
    state = large()
    tape.protect([state])
    tell(tape, "broadcast", state)
    tell(tape, "recv", large())
    tape.begin(1)
    assert refused(agent, "recv", state)
    assert not refused(agent, "broadcast", state)


def test_a_large_thing_in_a_step_is_left_alone(agent: Agent) -> None:
    tape = agent.tape()
    tape.protect([])
    tape.begin(1)
    tell(tape, "broadcast", large().long())
    assert agent.items == {}
    assert agent.notes == {}


@pytest.mark.parametrize(
    ("module", "function", "known"),
    [
        ("torch.nn.parallel.distributed", "__init__", True),
        ("torch.distributed.fsdp._fully_shard._fsdp_param", "anything", True),
        ("torch.distributed.tensor._api", "distribute_tensor", True),
        ("torch.distributed.tensor._api", "full_tensor", False),
        ("torch.nn.parallelism", "anything", False),
    ],
)
def test_wrappers_are_trusted_with_what_they_are_told(
    agent: Agent, module: str, function: str, known: bool
) -> None:
    """They copy it into the state."""
    tape = agent.tape()
    collective = partial(tape.place, "g", "broadcast", [large()])
    seen_in(module, function, seen_in("everstep.worker.groups", "_run", collective))()
    tape.protect([])
    assert bool(refused(agent, "broadcast", large())) is not known


def seen_in(module: str, function: str, inner: Callable[[], object]) -> Callable[[], None]:
    """A function that calls `inner`, and whose frame looks like one of `module`."""

    def call() -> None:
        inner_()  # type: ignore[name-defined]  # noqa: F821 - among its globals

    code = call.__code__.replace(co_name=function)
    return FunctionType(code, {"__name__": module, "inner_": inner})


def test_a_full_tape_is_said(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tapes, "TAPE_BYTES", 3000)
    tape = agent.tape()
    for _ in range(4):
        tell(tape, "broadcast", torch.zeros(250))
    tape.protect([])
    assert "tape-full" in agent.notes
    assert "full" in refused_at(agent, 4, torch.zeros(250))
    assert refused_at(agent, 2, torch.zeros(250)) == ""


def refused_at(agent: Agent, count: int, like: torch.Tensor) -> str:
    """How a joiner is refused at its `count`-th broadcast."""
    joiner = agent.tape(playing=True)
    try:
        for _ in range(count):
            hear(joiner, "broadcast", like)
    except UserError as error:
        return str(error)
    return ""


def test_a_sparse_thing_is_refused(agent: Agent) -> None:
    tape = agent.tape()
    tell(tape, "allreduce", torch.eye(2).to_sparse())
    tape.protect([])
    (text,) = agent.notes.values()
    assert "sparse" in text


# ---------------------------------------------------------------- through the groups


def taped(world: FakeWorld, agent: Agent, *, playing: bool = False) -> Tape:
    tape = world.communicators.tape = agent.tape(playing=playing)
    return tape


def end_all(world: FakeWorld, fill: Callable[[], object]) -> None:
    """End the inner works that are under way, having filled their outputs."""
    fill()
    for work in world.made[0].works:
        work.end()
    world.made[0].works.clear()


def test_a_live_collective_is_recorded_as_it_came(agent: Agent) -> None:
    world = FakeWorld()
    with in_c10d(world):
        tape = taped(world, agent)
        tensor = torch.zeros(2)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        end_all(world, lambda: tensor.fill_(4.0))
        work.wait()
        tensor.zero_()  # what the script makes of it is not what it was told
        tape.protect([])
    (item,) = agent.items.values()
    assert item.source == 0
    joiner = FakeWorld(solo=True)
    with in_c10d(joiner):
        taped(joiner, agent, playing=True)
        mine = torch.ones(2)
        dist.all_reduce(mine)
        assert mine.tolist() == [4.0, 4.0]
        dist.all_reduce(mine)  # beyond the tape: as solo answers
        assert mine.tolist() == [12.0, 12.0]


def test_a_poisoned_collective_is_not_recorded(agent: Agent) -> None:
    world = FakeWorld()
    with in_c10d(world):
        tape = taped(world, agent)
        tape.protect([])
        tape.begin(1)
        world.communicators.answer = Answer.ZEROS
        tensor = torch.ones(2, dtype=torch.int64)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        world.communicators.stop(0)
        work.wait()
        end_all(world, lambda: None)
        dist.all_reduce(tensor)
    assert agent.items == {}


def test_a_receive_from_anybody_knows_from_whom(agent: Agent) -> None:
    world = FakeWorld(rank=1, size=3)
    with in_c10d(world):
        tape = taped(world, agent)
        world.made[0].has_future = False
        tensor = torch.zeros(1)
        work = dist.irecv(tensor)
        assert work is not None
        (launched,) = world.made[0].calls
        end_all(world, lambda: launched[1][0][0].fill_(9.0))
        work.wait()
        tape.protect([])
    joiner = FakeWorld(solo=True, rank=1, size=3)
    with in_c10d(joiner):
        taped(joiner, agent, playing=True)
        tensor = torch.zeros(1)
        assert dist.recv(tensor) == 0
        assert tensor.item() == 9.0


def test_objects_are_told_whatever_the_joiner_would_say(agent: Agent) -> None:
    """A gather of objects sends sizes first; the joiner's own object has another."""
    world = FakeWorld(rank=1, size=2)
    objects = [{"rank": 0}, {"rank": 1, "note": "long" * 5}]
    with in_c10d(world):
        tape = taped(world, agent)
        pack: Any = dist.distributed_c10d._object_to_tensor
        rows = [pack(o, torch.device("cpu"), None) for o in objects]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in objects]
        most = max(int(size) for _, size in rows)
        padded = [torch.zeros(most, dtype=torch.uint8) for _ in objects]
        for outputs, values in ((sizes, [s for _, s in rows]), (padded, [d for d, _ in rows])):
            place = tape.place(world.communicators.groups[0].name, "allgather", [outputs])
            assert place is not None
            for output, value in zip(outputs, values, strict=True):
                output[: value.numel()] = value
            place.keep(0)
        tape.protect([])
    joiner = FakeWorld(solo=True, rank=1, size=2)
    with in_c10d(joiner):
        taped(joiner, agent, playing=True)
        said: list[Any] = [None, None]
        dist.all_gather_object(said, {"rank": 1})
    assert said == objects


def test_a_root_whose_objects_differ_is_named(agent: Agent) -> None:
    def send(value: Any, rank: int) -> list[Any]:
        objects = [value]
        dist.broadcast_object_list(objects, src=rank)
        return objects

    world = FakeWorld(rank=1, size=2)
    with in_c10d(world):
        tape = taped(world, agent)
        ended = world.made[0].operation

        def at_once(name: str) -> Callable[..., Any]:
            def launch(*arguments: Any) -> Any:
                work = ended(name)(*arguments)
                work.end()
                return work

            return launch

        world.made[0].operation = at_once  # type: ignore[method-assign]
        send(["a", 1], 1)
        tape.protect([])
    for value, notes in ((["a", 1], 0), (["a", 2], 1)):
        joiner = FakeWorld(solo=True, rank=1, size=2)
        with in_c10d(joiner):
            taped(joiner, agent, playing=True)
            assert send(value, 1) == [value]
        assert len(agent.notes) == notes


def test_a_joiner_is_refused_through_its_collective(agent: Agent) -> None:
    tape = agent.tape()
    tell(tape, "broadcast", large(), group="")
    tape.protect([])
    (item,) = agent.items.values()
    joiner = FakeWorld(solo=True)
    with in_c10d(joiner):
        name = joiner.communicators.groups[0].name
        key = item.key.replace("0//", f"0/{name}/")
        agent.items = {key: messages.Told(key=key, refusal=item.refusal)}
        taped(joiner, agent, playing=True)
        with pytest.raises(UserError, match="rank 1 was told"):
            dist.broadcast(large(), src=0)


# ---------------------------------------------------------------- on a device


def test_the_host_waits_for_what_goes_on_the_tape(agent: Agent) -> None:
    """Else the script's next kernels could change it before the host can copy it."""
    world = NcclWorld()
    world.communicators.answer = Answer.ZEROS
    tape = world.communicators.tape = agent.tape()
    tape.protect([])
    tape.begin(1)
    group = world.group()
    gradient, size = torch.ones(2), whole(0)
    group.allreduce([gradient]).wait()  # the kernel has not even started
    thread = threading.Thread(target=group.allreduce([size]).wait)
    thread.start()
    for index, tensor in enumerate((gradient, size)):
        world.work(index).finish(partial(tensor.fill_, 5))
    world.accelerator.run()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    size.zero_()
    world.communicators.drain()
    world.device.watch.close()
    joiner = agent.tape(playing=True)
    joiner.rehearse(1)
    assert hear(joiner, "allreduce", whole(0), group=group.name) == [[5]]
    assert hear(joiner, "allreduce", real(0, 0), group="world") is None
